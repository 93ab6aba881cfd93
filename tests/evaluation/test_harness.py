"""Tests harness tasks on a model in memory: scores equal those of the harness command.

Also tests restarts after a kill, and error messages.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from harness_cases import (
    BATCH_ROWS,
    BOTH,
    CHOICE,
    COMMON,
    READ,
    ROWS,
    TASKS,
    TEXT,
    WRITE,
    Bench,
    bench,  # noqa: F401 (a fixture)
    command,  # noqa: F401 (a fixture)
    of,
    ours,  # noqa: F401 (a fixture)
    theirs,  # noqa: F401 (a fixture)
    total,
    write,
    write_tasks,
)
from ratchet.config.evaluate import HarnessSettings
from ratchet.data import harness_tasks
from ratchet.errors import SettingsError
from ratchet.evaluation import harness
from ratchet.evaluation.scorer import ScoreStore


def test_scores_directions_chance_and_groups(ours: Any) -> None:
    # Some choices must be right, and answers must differ; otherwise equality with the command's scores would show
    # little.
    assert 0 < total(of(ours["choice"], "acc")) < 1
    assert len(set(of(ours["write"], "letters").values.values())) > 5
    directions = {one.metric: one.better for one in ours["write"].scores}
    assert directions == {"exact_match": "higher", "bleu": "higher", "letters": "unknown"}
    assert {one.better for one in ours["read"].scores} == {"lower"}
    assert ours["choice"].chance == pytest.approx(sum(1 / (2 + i % 4) for i in range(ROWS)) / ROWS)
    assert ours["write"].chance is None
    both, parts = ours["both"], (ours["last"], ours["choice"])
    assert len(both.documents) == 2 * ROWS
    pooled = [value for part in parts for value in of(part, "acc").values.values()]
    assert total(of(both, "acc")) == pytest.approx(sum(pooled) / len(pooled))
    assert [one.metric for one in both.scores] == ["acc"]


@dataclass
class Counting:
    """Counts computed values, but not those read from the store; may kill the process after `die_after` of them."""

    store: ScoreStore
    die_after: int | None = None
    made: list[str] = field(default_factory=list)

    def get_or_compute(self, key: str, make: Callable[[], Any]) -> Any:
        def count() -> Any:
            if self.die_after is not None and len(self.made) == self.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            self.made.append(key)
            return make()

        return self.store.get_or_compute(key, count)


def test_a_killed_run_resumes_with_equal_results(bench: Bench, ours: Any, tmp_path: Path) -> None:
    settings = HarnessSettings(tasks=TASKS)
    child = os.fork()
    if child == 0:
        try:
            bench.run(settings, Counting(ScoreStore(tmp_path / "scores.jsonl"), die_after=6))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL

    again = Counting(ScoreStore(tmp_path / "scores.jsonl"))
    resumed = bench.run(settings, again)
    assert resumed == [ours[name] for name in TASKS]
    whole = Counting(ScoreStore(None))
    bench.run(settings, whole)
    assert len(again.made) == len(whole.made) - 6

    nothing = Counting(ScoreStore(tmp_path / "scores.jsonl"))
    assert bench.run(settings, nothing) == resumed
    assert nothing.made == []


def test_models_without_logits_at_single_positions_use_the_code_of_the_harness(
    bench: Bench, ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.models.likelihoods.score_pairs", lambda *_: None)
    found = bench.run(HarnessSettings(tasks=TASKS), ScoreStore(tmp_path / "scores.jsonl"))
    for result, name in zip(found, TASKS, strict=True):
        for scores, expected in zip(result.scores, ours[name].scores, strict=True):
            assert scores.values == pytest.approx(expected.values, rel=1e-4, abs=1e-5)
    nothing = Counting(ScoreStore(tmp_path / "scores.jsonl"))
    assert bench.run(HarnessSettings(tasks=TASKS), nothing) == found
    assert nothing.made == []


def test_drawn_answers_are_drawn_again_after_a_kill(bench: Bench, tmp_path: Path) -> None:
    folder = bench.root / "drawn"
    folder.mkdir()
    text = WRITE.replace("include: _common", COMMON.rstrip()).replace(
        "do_sample: false", "do_sample: true, temperature: 1.0"
    )
    (folder / "drawn.yaml").write_text(text.replace("task: write", "task: drawn"))
    (folder / "own.py").write_text((bench.tasks / "own.py").read_text())

    def drawn(recall: harness.HarnessResultCache) -> list[harness.HarnessTaskResult]:
        settings = HarnessSettings(tasks=("drawn",))
        return harness.run(bench.model, bench.tokenizer, settings, bench.root, folder, BATCH_ROWS, recall)

    @dataclass
    class Half:
        """Stores every second chunk only."""

        store: ScoreStore
        count: int = 0

        def get_or_compute(self, key: str, make: Callable[[], Any]) -> Any:
            self.count += 1
            return self.store.get_or_compute(key, make) if self.count % 2 else make()

    first = drawn(Half(ScoreStore(tmp_path / "scores.jsonl")))
    torch.manual_seed(99)
    assert drawn(ScoreStore(tmp_path / "scores.jsonl")) == first


def test_the_digest_covers_the_requests(bench: Bench, ours: Any, tmp_path: Path) -> None:
    root = tmp_path / "other"
    folder = write_tasks(root)

    def digest(fewshot: int | None = None, limit: int | None = None) -> str:
        settings = HarnessSettings(tasks=("choice",), num_fewshot=fewshot, limit=limit)
        return run(bench, root, folder, settings)[0].digest

    same = digest()
    assert same == ours["choice"].digest  # the digest does not depend on the folder
    changed = {digest(fewshot=2), digest(limit=5)}
    rows = [json.loads(line) for line in (folder / "choice.jsonl").read_text().splitlines()]
    rows[7]["gold"] = 1 - rows[7]["gold"]
    write(folder / "choice.jsonl", rows)
    changed.add(digest())
    (folder / "choice.yaml").write_text(CHOICE.replace("{{question}}", "Q: {{question}}"))
    changed.add(digest())
    assert len(changed) == 4
    assert same not in changed


def run(bench: Bench, root: Path, folder: Path, settings: HarnessSettings) -> list[harness.HarnessTaskResult]:
    """Run the tasks of another project's folder."""
    return harness.run(bench.model, bench.tokenizer, settings, root, folder, BATCH_ROWS, ScoreStore(None))


def with_equal_documents(root: Path) -> Path:
    """Write tasks, one of which has a document twice."""
    folder = write_tasks(root)
    rows = [json.loads(line) for line in (folder / "choice.jsonl").read_text().splitlines()]
    write(folder / "choice.jsonl", [*rows, rows[4]])
    return folder


def test_equal_documents_are_named(bench: Bench, tmp_path: Path) -> None:
    folder = with_equal_documents(tmp_path)
    with pytest.raises(SettingsError, match=r"task choice: documents 5 and 23 are identical \([0-9a-f]{12}\)"):
        run(bench, tmp_path, folder, HarnessSettings(tasks=("choice",)))


def test_scores_that_are_no_number_stay_so(bench: Bench, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    (folder / "own.py").write_text("def letters(references, predictions, **_):\n    return float('nan')\n")
    [found] = run(bench, tmp_path, folder, HarnessSettings(tasks=("write",)))
    assert all(math.isnan(value) for value in of(found, "letters").values.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (HarnessSettings(tasks=("nothing",)), r"no task 'nothing' in .*available: both, choice, last, read, write"),
        (HarnessSettings(tasks=("choice",), builtin_tasks=("choice",)), "'choice' is in tasks and in builtin_tasks"),
        (HarnessSettings(tasks=("torn",)), r"torn.yaml: not a task of the harness"),
        (HarnessSettings(tasks=("gone",)), r"cannot load gone \(FileNotFoundError"),
        (HarnessSettings(tasks=("loose",)), "loose is a group without a mean .*name its tasks instead: last, choice"),
        (HarnessSettings(tasks=("long",)), "cannot run long: .*must be less than model's maximum sequence length"),
        (
            HarnessSettings(tasks=("wide",)),
            r"evaluate\.harness\.tasks: the harness cannot run wide: document 7: continuation has \d+ "
            "tokens, but the model reads at most 160; shorten or remove that document",
        ),
    ],
    ids=["unknown", "both", "torn", "no data", "group", "too long", "long choice"],
)
def test_unusable_tasks_are_refused(bench: Bench, settings: HarnessSettings, message: str, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    if settings.tasks != ("nothing",):
        (folder / "torn.yaml").write_text("task: [torn\n")
        (folder / "gone.yaml").write_text(READ.replace("task: read", "task: gone").replace("read.jsonl", "gone.jsonl"))
        (folder / "loose.yaml").write_text(BOTH.partition("aggregate")[0].replace("both", "loose"))
        (folder / "long.yaml").write_text(WRITE.replace("task: write", "task: long").replace("12}", "400}"))
        (folder / "wide.yaml").write_text(CHOICE.replace("task: choice", "task: wide"))
        rows = [json.loads(line) for line in (folder / "choice.jsonl").read_text().splitlines()]
        rows[6]["choices"][-1] = TEXT * 12
        write(folder / "choice.jsonl", rows)
    with pytest.raises(SettingsError, match=message):
        run(bench, tmp_path, folder, settings)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that replaces the harness's own tasks, whose index takes 20 seconds, by a folder."""
    from lm_eval.tasks import TaskManager

    return lambda folder: monkeypatch.setattr(
        harness, "_index_bundled_tasks", lambda: TaskManager(include_path=str(folder), include_defaults=False)
    )


def test_a_library_task_whose_data_cannot_be_fetched(
    bench: Bench, library: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    library(Path(lm_eval.tasks.__file__).parent / "arc")
    with pytest.raises(
        SettingsError, match=r"builtin_tasks: the data of arc_easy are not available .*'allenai/ai2_arc'.*network"
    ):
        bench.run(HarnessSettings(builtin_tasks=("arc_easy",)))
    with pytest.raises(SettingsError, match=r"no task 'arc_eazy'; did you mean arc_easy"):
        bench.run(HarnessSettings(builtin_tasks=("arc_eazy",)))


def test_a_library_s_documents_may_be_the_same(
    bench: Bench, library: Callable[[Path], None], tmp_path: Path, ours: Any
) -> None:
    """Users cannot fix tasks of a library, so equal documents are counted, and still pair one to one."""
    folder = with_equal_documents(tmp_path)
    library(folder)
    [found] = run(bench, tmp_path, folder, HarnessSettings(builtin_tasks=("choice",)))
    values = of(found, "acc").values
    assert len(values) == ROWS + 1
    twice = next(key for key in values if key.endswith("#2"))
    assert values[twice] == values[twice.removesuffix("#2")]


def test_the_caller_s_random_numbers_and_folder_stay(bench: Bench) -> None:
    random.seed(5)
    expected, before = random.Random(5).random(), Path.cwd()
    bench.run(HarnessSettings(tasks=("read",), limit=2))
    assert random.random() == expected
    assert Path.cwd() == before


@pytest.mark.parametrize(
    ("task", "file", "changed"),
    [
        ("choice", "choice.yaml", True), ("choice", "choice.jsonl", True), ("choice", "shots.jsonl", True),
        ("choice", "write-2.jsonl", False), ("choice", "own.py", False), ("write", "write-2.jsonl", True),
        ("write", "_common", True), ("write", "own.py", True), ("both", "choice.jsonl", True),
        ("both", "_common", True), ("both", "read.jsonl", False),
    ],
)  # fmt: skip
def test_a_task_s_fingerprint_is_of_all_that_it_is_made_of(task: str, file: str, changed: bool, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    before = harness_tasks.fingerprint_tasks(["choice", "write", "both"], tmp_path, folder)
    assert sorted(before) == ["both", "choice", "write"]
    (folder / file).write_text((folder / file).read_text() + "\n")
    assert (harness_tasks.fingerprint_tasks([task], tmp_path, folder)[task] != before[task]) is changed


def test_fingerprints_of_tasks_that_are_gone_or_torn(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    before = harness_tasks.fingerprint_tasks(["choice"], tmp_path, folder)
    (folder / "choice.jsonl").unlink()
    assert harness_tasks.fingerprint_tasks(["choice"], tmp_path, folder) != before
    (folder / "choice.yaml").write_text("task: [choice")
    assert harness_tasks.fingerprint_tasks(["choice", "unknown"], tmp_path, folder) == {}


def test_fingerprints_need_no_harness() -> None:
    heavy = ("lm_eval", "torch", "datasets")
    code = f"import sys; from ratchet.evaluation import harness; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
