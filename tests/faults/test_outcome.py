"""No difference between two trainings goes unseen: every file, every number, every step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import DataError
from ratchet.faults.outcome import Outcome, batches, differences, journal_of
from ratchet.layout import RUNS_VARIABLE, Layout
from ratchet.run.journal import Journal

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


def tell(layout: Layout, *events: tuple[str, dict[str, Any]]) -> None:
    path = layout.experiments / "runs" / "abc" / "journal.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path, attempt=1)
    for kind, data in events:
        journal.append(kind, **data)
    journal.close()


def validation(number: int, **changes: Any) -> dict[str, Any]:
    return {"step": number, "loss": 4.5, "tokens": 90, "improved": True, "seconds": 0.1} | changes


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Layout]:
    """A finished training, as far as its outcome goes."""

    def made(name: str) -> Layout:
        layout = Layout(tmp_path / name)
        for number, file in enumerate(FILES):
            (layout.train / file).parent.mkdir(parents=True, exist_ok=True)
            (layout.train / file).write_bytes(bytes([number] * 100))
        tell(layout, *[("step", step(number)) for number in range(1, STEPS + 1)], ("validation", validation(STEPS)))
        return layout

    return made


def change_journal(layout: Layout, number: int, **changes: Any) -> None:
    journal = journal_of(layout)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[number] |= changes
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_equal_trainings_do_not_differ(make: Callable[[str], Layout]) -> None:
    a, b = Outcome.of(make("a")), Outcome.of(make("b"))
    assert a.files.keys() == set(FILES)
    assert differences(a, b) == []


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("bit", [0, 399, 799], ids=lambda bit: f"bit{bit}")
def test_a_flipped_bit_in_any_file_is_seen(make: Callable[[str], Layout], file: str, bit: int) -> None:
    a, b = make("a"), make("b")
    content = bytearray((b.train / file).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (b.train / file).write_bytes(content)
    assert differences(Outcome.of(a), Outcome.of(b)) == [f"{file}: other content"]


def test_files_too_few_and_too_many_are_seen(make: Callable[[str], Layout]) -> None:
    a, b = make("a"), make("b")
    (b.train / "train.json").unlink()
    (b.train / "checkpoints" / "more.bin").write_bytes(b"")
    found = differences(Outcome.of(a), Outcome.of(b))
    assert found == ["checkpoints/more.bin: not there in the reference", "train.json: not there"]


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": 4.7500000000000009}, {"grad_norm": 0.5000000001}, {"learning_rate": 0.011}, {"trained_tokens": 81},
        {"input_tokens": 481}, {"batch": "ffffffffffff"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_number_of_a_step_is_seen(make: Callable[[str], Layout], changes: dict[str, Any]) -> None:
    a, b = make("a"), make("b")
    change_journal(b, 1, **changes)
    (found,) = differences(Outcome.of(a), Outcome.of(b))
    assert json.dumps(next(iter(changes.values()))) in found


def test_other_validations_and_missing_ones_are_seen(make: Callable[[str], Layout]) -> None:
    a, b, c = make("a"), make("b"), make("c")
    change_journal(b, STEPS, loss=4.4)
    journal = journal_of(c)
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    assert "4.4" in differences(Outcome.of(a), Outcome.of(b))[0]
    assert differences(Outcome.of(a), Outcome.of(c)) == [f"{STEPS} events instead of {STEPS + 1}"]


def test_times_attempts_and_other_events_make_no_difference(make: Callable[[str], Layout]) -> None:
    a, b = make("a"), make("b")
    change_journal(b, 2, step_s=99.0, t=1.0, attempt=7)
    tell(b, ("checkpoint", {"step": 4}), ("notice", {"text": "hello"}), ("attempt", {"pid": 1}))
    assert differences(Outcome.of(a), Outcome.of(b)) == []


def test_steps_done_again_alike_make_no_difference_and_otherwise_one(make: Callable[[str], Layout]) -> None:
    a, b, c = make("a"), make("b"), make("c")
    tell(b, ("step", step(5)), ("step", step(6)), ("validation", validation(6)))
    tell(c, ("step", step(5)), ("step", step(6, loss=1.0)))
    assert differences(Outcome.of(a), Outcome.of(b)) == []
    (found,) = differences(Outcome.of(a), Outcome.of(c))
    assert "did step 6 again otherwise" in found


def test_a_step_that_is_skipped_at_one_time_only_is_a_contradiction(make: Callable[[str], Layout]) -> None:
    a, b = make("a"), make("b")
    tell(b, ("skipped", {"step": 6, "action": "skip", "rows": [1], "to_step": None, "rate_scale": 1.0, "reason": ""}))
    (found,) = differences(Outcome.of(a), Outcome.of(b))
    assert "did step 6 again otherwise" in found


def test_a_step_that_nobody_told_of_is_seen_even_without_a_reference(make: Callable[[str], Layout]) -> None:
    b = make("b")
    journal = journal_of(b)
    journal.write_text("".join(line for n, line in enumerate(journal.read_text().splitlines(keepends=True)) if n != 2))
    assert Outcome.of(b).contradictions == ("step 3 is nowhere in the journal",)


def test_the_ledger_holds_each_step_once(make: Callable[[str], Layout]) -> None:
    b = make("b")
    tell(b, ("step", step(5)), ("step", step(6)))
    assert batches(Outcome.of(b)) == {number: f"{number:012x}" for number in range(1, STEPS + 1)}


def test_many_differences_are_told_in_few_lines(make: Callable[[str], Layout]) -> None:
    a, b = make("a"), make("b")
    for file in FILES:
        (b.train / file).write_bytes(b"other")
    found = differences(Outcome.of(a), Outcome.of(b))
    assert found[-1] == f"and {len(FILES) - 5} more files"
    assert len(found) == 6


def test_the_journal_is_that_of_the_project_whatever_the_environment_says(
    make: Callable[[str], Layout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make("a")
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "elsewhere"))
    assert journal_of(a).is_relative_to(a.root)


def test_a_project_without_one_single_run_has_no_outcome(make: Callable[[str], Layout], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 runs"):
        Outcome.of(Layout(tmp_path / "empty"))
    b = make("b")
    other = b.experiments / "runs" / "def"
    other.mkdir()
    (other / "journal.jsonl").write_text("")
    with pytest.raises(DataError, match="2 runs"):
        Outcome.of(b)
