"""A generation as people see it while it goes on, and when it is over: its screen, watch, status, and reset."""

import io
import os
from pathlib import Path

import pytest

import generations
from generations import SETTINGS, Generation, write_prompts
from ratchet.config.schema import Machine
from ratchet.console.callback import ConsoleCallback
from ratchet.errors import DataError, LockHeldError, SettingsError
from ratchet.runs.journal import JournalEvent
from ratchet.stages import reset
from ratchet.stages.status import status
from ratchet.stages.watch import WatchOptions, watch
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
    """One that is over, of a server."""
    with served(answer) as server:
        made = generation(tmp_path, server.url)
        assert made.work() == 0
    return made


def shown(layout: ProjectLayout, *runs: str, once: bool = True) -> str:
    stream = io.StringIO()
    watch(layout, Machine(), WatchOptions(runs, once=once), stream)
    return stream.getvalue()


def test_status_and_journal_of_a_generation(done: Generation) -> None:
    finishes = [event.data["finish"] for event in done.events("answered")]
    assert sum(one.get("stop", 0) for one in finishes) == COUNT
    assert done.events("answered")[-1].data["rows"] is not None  # requests under way
    name = done.spec.run_id
    said = status(done.layout, name[:6])
    assert said.startswith(f"generation {name}: finished (completed)\n")
    assert f"  answers     {COUNT} of {COUNT}\n" in said
    assert f"  ends        {COUNT} stop" in said
    assert "tokens/s" in said
    assert "step" not in said
    assert status(done.layout, None) == said  # it is over, and there is no training
    assert "no run yet" in status(ProjectLayout(done.layout.root / "empty"), None)
    with done.opened():
        assert f"generation {name}: " in status(done.layout, None)  # now it is running
    with pytest.raises(DataError, match=r"no run of that name in .*/runs and .*/generations; there are: "):
        status(done.layout, "zzz")


def test_watch_shows_generations_beside_trainings(done: Generation) -> None:
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
    questions: list[str] = []

    def no(question: str) -> str:
        questions.append(question)
        return "n"

    assert reset.reset(done.layout, name[:6], yes=False, ask=no) == f"run {name} was kept"
    assert done.paths.root.exists()
    assert f"generation {name}: {COUNT} of {COUNT} answers, " in questions[0]
    assert "its result is sealed\n  files that it was written to stay as they are" in questions[0]
    with done.opened(), pytest.raises(LockHeldError):
        reset.reset(done.layout, name, yes=True)
    lay(done.layout, Training(seed=1))
    assert reset.reset(done.layout, name, yes=True).endswith("removed")
    assert not done.paths.root.exists()
    assert output.read_bytes()
    assert len(list(done.layout.runs.iterdir())) == 1
    left = done.layout.generations / f"{files.PARTIAL}{name}-doomed-999999999"  # what a killed reset left
    left.mkdir()
    with pytest.raises(DataError):
        reset.reset(done.layout, name, yes=True)
    assert not left.exists()
    with pytest.raises(SettingsError, match="which run"):
        reset.reset(done.layout, None, yes=True)


def test_a_terminal_that_is_gone_does_not_end_a_generation(done: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "gone")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    with done.opened() as run:
        console = ConsoleCallback(run.paths, Gone())
        own = JournalEvent("attempt", 1.0, 2, {"pid": os.getpid(), "code_version": "1"})
        with pytest.raises(OSError, match="gone"):
            console.see([own])
        console.see([own])  # told once
        console.finish("FINISHED")
