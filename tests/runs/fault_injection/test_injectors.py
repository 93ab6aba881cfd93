"""Injected damage follows from the seed, matches its description, and affects only processes and files of the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.errors import RunFailedError
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection import injectors
from ratchet.runs.fault_injection.injectors import TrainCommandProcess
from ratchet.runs.fault_injection.plan import FaultAction
from ratchet.runs.journal import Journal, JournalReader

NAMES = ("manifest.json", "optimizer.safetensors", "state.json", "trainable.safetensors")


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Create a run with three checkpoints and a journal."""
    paths = RunPaths(tmp_path / "abc")
    for step in (2, 4, 6):
        paths.checkpoint(step).mkdir(parents=True)
        for number, name in enumerate(NAMES):
            (paths.checkpoint(step) / name).write_bytes(bytes([step] * (50 + number)))
    journal = Journal(paths.journal, attempt=1)
    for step in range(1, 7):
        journal.append("step", step=step, loss=1.0 / step)
    journal.close()
    return paths


def contents(paths: RunPaths) -> dict[str, bytes]:
    return {str(p.relative_to(paths.root)): p.read_bytes() for p in paths.checkpoints.rglob("*") if p.is_file()}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    return [name for name in before if before[name] != after.get(name)]


@pytest.mark.parametrize("draw", range(8))
def test_one_bit_of_the_newest_checkpoint_flips(run: RunPaths, draw: int) -> None:
    before = contents(run)
    text = injectors.damage_run("flip a bit", run, draw)
    (name,) = changed(before, contents(run))
    old, new = before[name], contents(run)[name]
    assert name.startswith("checkpoints/step-00000006/")
    assert Path(name).name in text
    assert len(old) == len(new)
    assert sum((a ^ b).bit_count() for a, b in zip(old, new, strict=True)) == 1


@pytest.mark.parametrize("draw", range(4))
def test_a_file_is_cut_or_removed(run: RunPaths, draw: int) -> None:
    before = contents(run)
    injectors.damage_run("cut a file", run, draw)
    (name,) = changed(before, contents(run))
    assert before[name].startswith(contents(run)[name])
    injectors.damage_run("remove a file", run, draw)
    assert len(contents(run)) == len(before) - 1


def test_damage_changes_shared_bytes_and_removal_one_name(run: RunPaths) -> None:
    newest, older = (run.checkpoint(step) / "state.json" for step in (6, 4))
    for path in list(run.checkpoint(6).iterdir()):
        path.unlink()
    os.link(older, newest)
    injectors.damage_run("flip a bit", run, 0)
    assert newest.read_bytes() == older.read_bytes() != bytes([4] * 52)
    injectors.damage_run("remove a file", run, 0)
    assert not newest.exists()
    assert older.exists()


@pytest.mark.parametrize("what", ["flip a bit", "cut a file", "remove a file", "damage the journal"])
def test_damage_follows_from_the_draw(tmp_path: Path, what: FaultAction) -> None:
    texts = []
    for name in ("a", "b"):
        paths = RunPaths(tmp_path / name)
        paths.checkpoint(2).mkdir(parents=True)
        (paths.checkpoint(2) / "state.json").write_bytes(bytes(100))
        paths.journal.write_text('{"event":"attempt_started","t":1.0,"attempt":1}\n' * 9)
        texts.append(injectors.damage_run(what, paths, seed=11))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("draw", range(8))
def test_a_damaged_journal_keeps_its_events_and_ends_in_half_a_line(run: RunPaths, draw: int) -> None:
    injectors.damage_run("damage the journal", run, draw)
    content = run.journal.read_bytes()
    reader = JournalReader(run.journal)
    assert [event.data["step"] for event in reader.read()] == [1, 2, 3, 4, 5, 6]
    assert reader.damaged_lines >= 1
    assert not content.endswith(b"\n")


def test_damage_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="no checkpoint"):
        injectors.damage_run("flip a bit", RunPaths(tmp_path / "abc"), 0)


def test_a_foreign_process_is_no_worker_and_survives(tmp_path: Path) -> None:
    wait = "import sys, time; print('there', flush=True); time.sleep(60)"
    like_a_worker = [sys.executable, "-c", wait, "ratchet.training.worker_main", str(tmp_path)]
    with subprocess.Popen(like_a_worker, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        with TrainCommandProcess(tmp_path, ()) as command:
            assert command.worker() is None
            assert not command.signal_worker(signal.SIGKILL)
            assert command.kill()
        assert stranger.poll() is None
        stranger.kill()


def test_a_command_leaves_no_process_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TrainCommandProcess(tmp_path, ()) as command:
        raise KeyboardInterrupt
    assert command.process.returncode is not None
