"""Tests the progress of a generation, and outputs that fail late."""

import errno
from pathlib import Path

import pytest

import fake_answers
from ratchet.cli.generate import format_generation
from ratchet.cli.status import format_status
from ratchet.config.settings import Settings
from ratchet.console.callback import ConsoleCallback
from ratchet.errors import InterruptedRunError, StorageError
from ratchet.inference import output
from ratchet.inference.output import AnswerLedger
from ratchet.inference.spec import CARD, GenerationAnswer, GenerationCard, GenerationPaths, GenerationStart
from ratchet.runs.directory import RunDirectory
from ratchet.runs.journal import JournalEvent
from ratchet.runs.supervisor import supervise
from ratchet.stages import generate
from ratchet.stages.generate import GenerateResult
from ratchet.stages.status import status
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path


class Asking:
    """A pruner that ends the run before its first attempt."""

    on_stop_signal = None

    def prune_reason(self) -> str:
        return "enough"


def answers(paths: GenerationPaths, *places: int, seal: int = 0) -> None:
    ledger = AnswerLedger(paths, 1, 100, lambda text: None)
    for place in places:
        ledger.add(GenerationAnswer(place, "said", "stop", 1, 2, -0.5))
    if seal:
        assert ledger.seal(seal)
    ledger.close()


def stopped(run: RunDirectory, settings: Settings) -> str:
    start = GenerationStart(machine=settings.machine, generate=settings.generate, train=settings.train, path="")
    with pytest.raises(InterruptedRunError) as caught:
        supervise(run, start, [], "1", Asking())  # type: ignore[arg-type]
    return str(caught.value)


def test_answers_are_counted_in_shards_and_ledger(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    run = RunDirectory.open(layout.generations, fake_answers.spec())
    paths = GenerationPaths(run.paths.root)
    assert stopped(run, Settings()).endswith("stopped on request; run it again to resume (0 answers are kept)")
    run.journal.attempt = 1
    run.journal.append("attempt_started", pid=1, code_version="1")  # the worker is killed before its first event
    answers(paths, 0, 1, 2, 3, 7, seal=2)
    assert len(list(paths.shards.iterdir())) == 2
    answers(paths, 9)
    assert stopped(run, Settings()).endswith("stopped on request; run it again to resume (6 answers are kept)")
    run.close()
    report = status(layout)
    assert [(run.state, run.step) for run in report.runs] == [("stopped", 6)]
    said = format_status(report)
    assert "  answers     6 of ?\n" in said
    assert "attempt 1: stopped on request after 6 answers" in said


@pytest.mark.parametrize(
    ("device", "numbers", "start", "line"),
    [
        ("server", "as served", 0, "starting, 1000 answers on a server"),
        ("llama.cpp", "as in the file", 7, "resuming from answer 7, 1000 answers on llama.cpp"),
        ("cuda", "bfloat16", 0, "starting, 1000 answers on cuda in bfloat16"),
        ("none", "none", 1000, "resuming from answer 1000, 1000 answers"),
    ],
)
def test_the_device_is_described(
    device: str, numbers: str, start: int, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr("os.getpid", lambda: 5)
    ready = {"start_step": start, "planned_steps": 1000, "device": device, "compute_dtype": numbers}
    events = [JournalEvent("attempt_started", 1.0, 1, {"pid": 5}), JournalEvent("worker_ready", 2.0, 1, ready)]
    run = RunDirectory.open(tmp_path, fake_answers.spec())
    ConsoleCallback(run.paths, write_line=said.append).on_events(events)
    run.close()
    assert said == [f"  {line}"]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_late_failure_leaves_no_partial_output(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = GenerationPaths(tmp_path / "run")
    paths.result.mkdir(parents=True)
    fake_answers.write(paths.result / "answers.jsonl", [fake_answers.record(1, "b", None)])
    card_path(paths.result / "answers.jsonl").rename(paths.result / CARD)
    target = tmp_path / "out" / f"a{ending}"

    def full(operation: files.Operation, path: Path) -> None:
        if operation == "rename" and path == target:
            raise OSError(errno.ENOTDIR, "Not a directory", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(files, "before", full)
        with pytest.raises(StorageError, match=r"Not a directory; all answers are kept in .*result"):
            generate._write_answers(paths, target, "m", 0)
    assert [path.name for path in target.parent.iterdir()] == [card_path(target).name]
    assert output.write_output(paths, target, "m", 0).answers == 1


def test_a_single_answer_is_described(tmp_path: Path) -> None:
    fake_answers.write(tmp_path / "a.jsonl", [fake_answers.record(1, "b", None)])
    card = GenerationCard.load(card_path(tmp_path / "a.jsonl")).model_copy(update={"faults": 1})
    result = GenerateResult(output=tmp_path / "a.jsonl", card=card, was_written_before=False)
    said = format_generation(result)
    assert "1 answer to 1 prompt (1 stop); 1 record left out" in said
