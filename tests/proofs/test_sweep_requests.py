"""Proves docs/sweeps.md, "Control trials yourself": a paused trial is left out, and continued from its checkpoint after
`ratchet sweep --resume`."""

import os
import signal

import tiny_project
import tiny_sweep
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from sweep_cases import (
    begin_slow,
    project,  # noqa: F401 (a fixture)
    request,
    stop_worker,
    template,  # noqa: F401 (a fixture)
)

PACKAGES = ("tuning", "stages")


def test_a_paused_trial_is_left_out_and_later_continued_from_its_checkpoint(project: ProjectLayout) -> None:
    sweep = begin_slow(project, epochs=3.0, trials=2)
    [worker] = tiny_sweep.processes_of(f"ratchet.tuning.sweep_worker {project.root}")
    trainers = tiny_sweep.processes_of(f"ratchet.training.worker_main {project.runs}")
    for pid in trainers:  # otherwise, the training may end before the requests are stored
        os.kill(pid, signal.SIGSTOP)
    stop_worker(project, worker)
    assert "its worker saves a checkpoint and ends it now" in request(project, "--pause", "0")
    assert "the next free worker begins it" in request(project, "--clone", "0", "--set", "learning_rate=0.2")
    for pid in (*trainers, worker):
        os.kill(pid, signal.SIGCONT)
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == 0, output
    assert "paused by a person and not continued: 0 (`ratchet sweep --resume TRIAL`)" in output
    paused, *others = tiny_sweep.report(project).trials
    assert (paused.state, paused.cause, [trial.state for trial in others]) == ("pruned", "paused", ["complete"] * 2)
    request(project, "--resume", "0")
    assert "train.rank: found" in request(project, "--clone", "0", "--warm", "--set", "rank=16", code=2)
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stderr
    resumed = tiny_sweep.report(project).trials[3]
    assert (resumed.state, resumed.continues, resumed.run_id) == ("complete", 0, paused.run_id)
    events = list(JournalReader(project.runs / str(paused.run_id) / "journal.jsonl").read())
    starts = [event.data["start_step"] for event in events if event.kind == "worker_ready"]
    assert starts == [0, paused.cost.steps]
