"""Every difference between two trainings is found in files, numbers and steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import DataError
from ratchet.runs.fault_injection.outcome import (
    TrainingFingerprint,
    find_differences,
    find_journal,
)
from ratchet.runs.journal import Journal
from ratchet.storage.layout import RUNS_VARIABLE, ProjectLayout

FILES = (
    "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "checkpoints/best/manifest.json",
    "checkpoints/best/trainable.safetensors", "checkpoints/last/optimizer.safetensors", "checkpoints/last/state.json",
    "manifest.json", "train.json",
)  # fmt: skip
STEPS = 6


def step(number: int, **changes: Any) -> dict[str, Any]:
    told = {
        "step": number, "loss": 5.0 - number / 8, "grad_norm": 0.5, "learning_rate": 0.01, "trained_tokens": 80,
        "input_tokens": 480, "step_s": 0.03, "batch": f"{number:012x}",
    }  # fmt: skip
    return told | changes


def tell(layout: ProjectLayout, *events: tuple[str, dict[str, Any]]) -> None:
    path = layout.experiments / "runs" / "abc" / "journal.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path, attempt=1)
    for kind, data in events:
        journal.append(kind, **data)
    journal.close()


def validation(number: int, **changes: Any) -> dict[str, Any]:
    return {"step": number, "loss": 4.5, "tokens": 90, "improved": True, "seconds": 0.1} | changes


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], ProjectLayout]:
    """Return a function that creates a project with the files and the journal of a finished training."""

    def made(name: str) -> ProjectLayout:
        layout = ProjectLayout(tmp_path / name)
        for number, file in enumerate(FILES):
            (layout.train / file).parent.mkdir(parents=True, exist_ok=True)
            (layout.train / file).write_bytes(bytes([number] * 100))
        tell(layout, *[("step", step(number)) for number in range(1, STEPS + 1)], ("validation", validation(STEPS)))
        return layout

    return made


def change_journal(layout: ProjectLayout, number: int, **changes: Any) -> None:
    journal = find_journal(layout)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[number] |= changes
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_files(layout: ProjectLayout) -> None:
    (layout.train / "train.json").unlink()
    (layout.train / "checkpoints" / "more.bin").write_bytes(b"")


def other_content(layout: ProjectLayout) -> None:
    for file in FILES:
        (layout.train / file).write_bytes(b"other")


def other_times(layout: ProjectLayout) -> None:
    change_journal(layout, 2, step_s=99.0, t=1.0, attempt=7)
    tell(layout, ("checkpoint_saved", {"step": 4}), ("notice", {"text": "hello"}), ("attempt_started", {"pid": 1}))


def without_line(layout: ProjectLayout, number: int) -> None:
    journal = find_journal(layout)
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:number] + lines[number + 1 :]))


SKIPPED = {"step": 6, "action": "skip", "rows": [1], "rollback_step": None, "learning_rate_scale": 1.0, "reason": ""}
CHANGES: dict[str, tuple[Callable[[ProjectLayout], None], list[str]]] = {
    "nothing": (lambda b: None, []),
    "times, attempts and other events": (other_times, []),
    "steps repeated alike": (
        lambda b: tell(b, ("step", step(5)), ("step", step(6)), ("validation", validation(6))), [],
    ),
    "a step repeated otherwise": (
        lambda b: tell(b, ("step", step(5)), ("step", step(6, loss=1.0))), ["repeated step 6 differently"],
    ),
    "a step done and skipped": (lambda b: tell(b, ("step_skipped", SKIPPED)), ["repeated step 6 differently"]),
    "a missing step": (
        lambda b: without_line(b, 2), ["instead of"] * 4 + ["6 events instead of 7", "step 3 is missing"],
    ),
    "a missing validation": (lambda b: without_line(b, STEPS), ["6 events instead of 7"]),
    "a file missing and one more": (
        other_files, ["checkpoints/more.bin: missing in the reference", "train.json: missing"],
    ),
    "all files": (other_content, ["different content"] * 5 + [f"and {len(FILES) - 5} more files"]),
    "loss": (lambda b: change_journal(b, 1, loss=4.7500000000000009), ["4.750000000000001"]),
    "grad_norm": (lambda b: change_journal(b, 1, grad_norm=0.5000000001), ["0.5000000001"]),
    "learning_rate": (lambda b: change_journal(b, 1, learning_rate=0.011), ["0.011"]),
    "trained_tokens": (lambda b: change_journal(b, 1, trained_tokens=81), ["81"]),
    "input_tokens": (lambda b: change_journal(b, 1, input_tokens=481), ["481"]),
    "batch": (lambda b: change_journal(b, 1, batch="ffffffffffff"), ["ffffffffffff"]),
    "validation loss": (lambda b: change_journal(b, STEPS, loss=4.4), ["4.4"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_differences_between_two_trainings(make: Callable[[str], ProjectLayout], name: str) -> None:
    a, b = make("a"), make("b")
    change, expected = CHANGES[name]
    change(b)
    found = find_differences(TrainingFingerprint.from_project(a), TrainingFingerprint.from_project(b))
    assert len(found) == len(expected), found
    assert all(words in text for text, words in zip(found, expected, strict=True)), found


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("bit", [0, 399, 799], ids=lambda bit: f"bit{bit}")
def test_a_flipped_bit_in_any_file_is_a_difference(make: Callable[[str], ProjectLayout], file: str, bit: int) -> None:
    a, b = make("a"), make("b")
    content = bytearray((b.train / file).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (b.train / file).write_bytes(content)
    assert find_differences(TrainingFingerprint.from_project(a), TrainingFingerprint.from_project(b)) == [
        f"{file}: different content"
    ]


def test_outcome_holds_every_file_each_step_once_and_missing_steps(make: Callable[[str], ProjectLayout]) -> None:
    b = make("b")
    tell(b, ("step", step(5)), ("step", step(6)))
    found = TrainingFingerprint.from_project(b)
    assert found.files.keys() == set(FILES)
    batches = [event["batch"] for event in map(json.loads, found.series) if event["event"] == "step"]
    assert batches == [f"{number:012x}" for number in range(1, STEPS + 1)]
    assert found.contradictions == ()
    without_line(b, 2)
    assert TrainingFingerprint.from_project(b).contradictions == ("step 3 is missing in the journal",)


def test_the_journal_does_not_depend_on_the_environment(
    make: Callable[[str], ProjectLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make("a")
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "elsewhere"))
    assert find_journal(a).is_relative_to(a.root)


def test_a_project_without_exactly_one_run_is_refused(make: Callable[[str], ProjectLayout], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 runs"):
        TrainingFingerprint.from_project(ProjectLayout(tmp_path / "empty"))
    b = make("b")
    other = b.experiments / "runs" / "def"
    other.mkdir()
    (other / "journal.jsonl").write_text("")
    with pytest.raises(DataError, match="2 runs"):
        TrainingFingerprint.from_project(b)
