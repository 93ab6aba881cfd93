"""A generation as people see it while it goes on, and when it is over: its screen, watch, status, and reset."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import generations
from generations import SETTINGS, Generation, with_generate, write_prompts
from ratchet import files, reset
from ratchet.config import Machine
from ratchet.errors import BusyError, DataError, SettingsError
from ratchet.faults.injection import VARIABLE, Fault
from ratchet.layout import Layout
from ratchet.run.journal import Event
from ratchet.services.console import Console
from ratchet.status import status
from ratchet.watch import Options, watch
from scripted_endpoint import JSON, Said, chat, served
from tmux_screen import Screen, needs_tmux
from trained_runs import Training, lay

COUNT = 60
SLOW = json.dumps([Fault(kind="slow", seconds=0.1).model_dump(mode="json")])


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


def shown(layout: Layout, *runs: str, once: bool = True) -> str:
    stream = io.StringIO()
    watch(layout, Machine(), Options(runs, once=once), stream)
    return stream.getvalue()


def test_status_knows_generations(done: Generation) -> None:
    name = done.spec.run_id
    said = status(done.layout, name[:6])
    assert said.startswith(f"generation {name}: finished (completed)\n")
    assert f"  answers     {COUNT} of {COUNT}\n" in said
    assert f"  ends        {COUNT} stop" in said
    assert "tokens/s" in said
    assert "step" not in said
    assert status(done.layout, None) == said  # it is over, and there is no training
    assert "no run yet" in status(Layout(done.layout.root / "empty"), None)
    with done.opened():
        assert f"generation {name}: " in status(done.layout, None)  # now it goes on
    with pytest.raises(DataError, match=r"no run of that name in .*/runs and .*/generations; there are: "):
        status(done.layout, "zzz")


def test_watch_knows_generations_beside_trainings(done: Generation) -> None:
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
    with done.opened(), pytest.raises(BusyError):
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


def test_the_journal_tells_how_answers_ended(done: Generation) -> None:
    told = [event.data["finish"] for event in done.events("answered")]
    assert sum(one.get("stop", 0) for one in told) == COUNT
    assert done.events("answered")[-1].data["rows"] is not None  # requests under way


def test_a_terminal_that_is_gone_is_no_end_of_a_generation(done: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "gone")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    with done.opened() as run:
        console = Console(run.paths, Gone())
        own = Event("attempt", 1.0, 2, {"pid": os.getpid(), "code_version": "1"})
        with pytest.raises(OSError, match="gone"):
            console.see([own])
        console.see([own])  # told once
        console.finish("FINISHED")


@needs_tmux
def test_a_generation_on_a_real_terminal(tmp_path: Path) -> None:
    model = generations.chat_directory(tmp_path / "model")
    layout = generations.project(tmp_path / "p", with_generate(max_new_tokens=24))
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", COUNT), tmp_path / "answers.jsonl"
    ratchet = f"cd {layout.root} && {sys.executable} -m ratchet"
    command = f"{ratchet} generate {prompts} --model {model} --output {output}"
    with Screen(command, environment={VARIABLE: SLOW}) as screen:
        lines = screen.until(lambda lines: any("padded tokens" in line for line in lines))
        name = next(line for line in lines if line.startswith("generation ")).split()[1]
        assert any("answering" in line for line in lines)
        assert any("forecast" in line for line in lines)
        assert any(f"of {COUNT}" in line for line in lines)
        assert not screen.shows_cursor
        said = subprocess.run(
            ["bash", "-c", f"{ratchet} status; {ratchet} watch --once {name[:6]}; {ratchet} reset --yes {name}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert f"generation {name}: running" in said.stdout
        assert f"{name}  answering" in said.stdout
        assert said.returncode == 2
        screen.resize(40, 12)
        narrow = screen.until(lambda lines: any(f"/{COUNT}" in line for line in lines))
        assert max(map(len, narrow)) <= 40
        screen.resize(80, 24)
        screen.until(lambda lines: "[ended 0]" in lines)
        assert screen.shows_cursor
        text = "\n".join(screen.lines(all_of_it=True))
        assert "finished" in text
        assert f"{COUNT} answers to {COUNT} prompts" in text
    assert len(output.read_bytes().splitlines()) == COUNT
