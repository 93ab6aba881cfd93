"""Tests of the progress of a generation, while it runs and after its end: console, watch, status and reset."""

import io
import os
import shutil
import time
from pathlib import Path

import pytest

import generations
from generations import SETTINGS, Generation, write_prompts
from ratchet.cli.reset import format_reset, format_target
from ratchet.cli.status import format_status
from ratchet.config.machine import Machine
from ratchet.console.callback import ConsoleCallback
from ratchet.errors import DataError, LockHeldError, SettingsError
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent
from ratchet.stages.reset import reset
from ratchet.stages.status import status
from ratchet.stages.watch import watch
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from scripted_endpoint import JSON, Said, chat, served
from trained_runs import Training, lay

COUNT = 60


def answer(body: JSON, number: int) -> Said:
    return chat("It is wet.")


def generation(root: Path, url: str) -> Generation:
    generations.project(root / "p")
    return Generation(root / "p", write_prompts(root / "prompts.jsonl", COUNT), SETTINGS, url)


@pytest.fixture
def done(tmp_path: Path) -> Generation:
    """Run a generation on a server to its end."""
    with served(answer) as server:
        made = generation(tmp_path, server.url)
        assert made.work() == 0
    return made


def shown(layout: ProjectLayout, *runs: str, once: bool = True) -> str:
    stream = io.StringIO()
    watch(layout, Machine(), stream, runs, once=once)
    return stream.getvalue()


def test_status_and_journal_of_a_generation(done: Generation) -> None:
    finishes = [event.data["finish"] for event in done.events("generation_progress")]
    assert sum(one.get("stop", 0) for one in finishes) == COUNT
    assert done.events("generation_progress")[-1].data["rows"] is not None  # number of requests in progress
    name = done.spec.run_id
    report = status(done.layout, name[:6])
    [run] = report.runs
    assert (run.run_id, run.kind, run.state, run.step, run.planned_steps) == (
        name, "generation", "finished", COUNT, COUNT,
    )  # fmt: skip
    said = format_status(report)
    assert said.startswith(f"generation {name}: finished (completed)\n")
    assert f"  answers     {COUNT} of {COUNT}\n" in said
    assert f"  ended by    {COUNT} stop" in said
    assert "tokens/s" in said
    assert "step" not in said
    assert format_status(status(done.layout)) == said  # no training exists, so status shows the latest generation
    assert "no run yet" in format_status(status(ProjectLayout(done.layout.root / "empty")))
    with done.open_run():
        assert f"generation {name}: " in format_status(status(done.layout))  # a running generation
    with pytest.raises(DataError, match=r"matches no run in .*/runs and .*/generations; found: "):
        status(done.layout, "zzz")


def test_status_shows_a_killed_generation_until_a_newer_training(done: Generation) -> None:
    training = lay(done.layout, Training(seed=1, done=40))
    assert [run.run_id for run in status(done.layout).runs] == [training], "the generation is finished"
    paths = RunPaths(done.paths.root)
    shutil.rmtree(paths.result)
    lines = paths.journal.read_bytes().splitlines(keepends=True)
    paths.journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    report = status(done.layout)
    assert [(run.run_id, run.state) for run in report.runs[1:]] == [(done.spec.run_id, "not_running")]
    newer = lay(done.layout, Training(seed=2, done=40, begun=time.time() + 3600))
    assert [run.run_id for run in status(done.layout).runs] == [newer]


def test_watch_shows_generations_and_trainings(done: Generation) -> None:
    name = done.spec.run_id
    assert f"answer {COUNT} of {COUNT}" in shown(done.layout, name[:6])
    training = lay(done.layout, Training(seed=1, done=40))
    both = shown(done.layout, name, training)
    assert name in both
    assert training in both
    (line,) = shown(done.layout, name, once=False).splitlines()
    assert line == f"{name} finished, answer {COUNT}/{COUNT}"


def test_reset_removes_the_directory_and_never_the_output(done: Generation, tmp_path: Path) -> None:
    name, output = done.spec.run_id, tmp_path / "answers.jsonl"
    output.write_bytes(done.written())
    result = reset(done.layout, name[:6], lambda target: False)
    assert format_reset(result) == f"run {name} was kept"
    assert done.paths.root.exists()
    shown_target = format_target(result.target)
    assert f"generation {name}: {COUNT} of {COUNT} answers, " in shown_target
    assert "its result is complete\n  output files that were written from it stay as they are" in shown_target
    with done.open_run(), pytest.raises(LockHeldError):
        reset(done.layout, name)
    lay(done.layout, Training(seed=1))
    assert format_reset(reset(done.layout, name)).endswith("removed")
    assert not done.paths.root.exists()
    assert output.read_bytes()
    assert len(list(done.layout.runs.iterdir())) == 1
    left = done.layout.generations / f"{files.PARTIAL}{name}-doomed-999999999"  # left behind by a killed reset
    left.mkdir()
    with pytest.raises(DataError):
        reset(done.layout, name)
    assert not left.exists()
    with pytest.raises(SettingsError, match="which run"):
        reset(done.layout, None)


def test_a_closed_terminal_does_not_end_a_generation(done: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "gone")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    with done.open_run() as run:
        console = ConsoleCallback(run.paths, Gone())
        own = JournalEvent("attempt_started", 1.0, 2, {"pid": os.getpid(), "code_version": "1"})
        with pytest.raises(OSError, match="gone"):
            console.on_events([own])
        console.on_events([own])  # the error is raised only once
        console.on_end("FINISHED")
