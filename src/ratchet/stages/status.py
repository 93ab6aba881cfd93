"""`ratchet status`: progress of runs, on this machine or in a replica. Imports neither torch nor MLflow."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ratchet.config.machine import Machine
from ratchet.config.units import format_duration
from ratchet.runs import directory
from ratchet.runs import status as run_status
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.runs.progress_view import ProgressView, create_view, is_generation
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Champion, read_champion

if TYPE_CHECKING:
    from ratchet.runs.replication.remote_status import RemoteRunStatus


class RunStatus(Record):
    """Progress of a training or a generation."""

    run_id: str
    kind: Literal["training", "generation"]
    state: Literal["running", "finished", "stopped", "not_running"]
    """`stopped`: the user stopped the run. `not_running`: never started, crashed or killed. The command that started a
    run resumes it in both states."""
    step: int
    """Number of completed optimizer steps; for a generation, number of completed answers."""
    planned_steps: int | None
    """Total number of steps (or answers); None until a worker knows it."""
    loss: float | None = None
    learning_rate: float | None = None
    validation_loss: float | None = None
    best_loss: float | None = None
    """Lowest validation loss."""
    best_step: int | None = None
    checkpoint_step: int = 0
    """Step of the newest checkpoint."""
    steps_per_s: float | None = None
    """Recent speed in optimizer steps per second; for a generation, in answers per second."""
    tokens_per_s: float | None = None
    remaining_s: float | None = None
    """Estimated time left, in seconds; None if it is not known or the run is not running."""
    attempts: int = 0
    lost_steps: int = 0
    """Number of steps that were repeated after interruptions."""
    alerts: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    description: str
    """The progress as text, in several lines."""


class StatusReport(Record):
    """Progress of runs of a project, and its champion."""

    runs: tuple[RunStatus, ...]
    champion: Champion | None


class ReplicaRunStatus(Record):
    """Progress of a run, as far as it was uploaded to a replica."""

    run_id: str
    is_finished: bool
    """Whether the result is in the replica."""
    machine: str | None
    """Machine that holds the run's lease, if there is one."""
    step: int
    planned_steps: int | None
    durable_step: int
    """Step of the newest checkpoint in the replica; 0 if there is none."""
    attempts: int
    lost_steps: int
    goodput: float | None
    """Share of the time since the start that was spent in steps that count, between 0 and 1."""
    description: str
    """The progress as text: in several lines for a single named run, otherwise in one line."""


class ReplicaStatusReport(Record):
    """Progress of the runs in a replica."""

    runs: tuple[ReplicaRunStatus, ...]


def status(layout: ProjectLayout, run: str | None = None) -> StatusReport:
    """Read the progress of runs.

    Args:
        layout: the project.
        run: id, or its first characters. None: the latest training and all running generations. If no generation runs:
            the latest one, if it is unfinished and newer than the training, or if nothing was trained.

    Raises:
        DataError: no run has this id, or several do.
        DamagedFileError: a newer version of Ratchet wrote the run.
    """
    if run is not None:
        chosen: Sequence[RunPaths] = [directory.find_run((layout.runs, layout.generations), run)]
    else:
        latest = directory.find_newest_run(layout.runs)
        generations = [paths for paths in directory.list_runs(layout.generations) if paths.lock().is_held()]
        if not generations and (last := directory.find_newest_run(layout.generations)):
            is_newest = latest is None or directory.recency(last) > directory.recency(latest)
            generations = [last] if latest is None or (is_newest and not last.is_finished()) else []
        chosen = [*([] if latest is None else [latest]), *generations]
    return StatusReport(runs=tuple(map(read_run_status, chosen)), champion=read_champion(layout.champion).champion)


def read_run_status(paths: RunPaths) -> RunStatus:
    """Read the progress of one run. Raises DamagedFileError if a newer version of Ratchet wrote it."""
    paths.require_known_format()
    reader, is_running = JournalReader(paths.journal), paths.lock().is_held()
    if is_generation(paths):
        view = create_view(paths)
        for event in reader.read():
            view.update(event)
        progress, generation = view.progress, view.generation
        description = _describe_generation(paths, view, is_running, reader.damaged_lines)
        steps_per_s = generation.answers_per_s if generation else None
        tokens_per_s = generation.tokens_per_s if generation else None
        time_left = view.eta.estimate(time.time())
        remaining_s = time_left.estimate_s if time_left else None
    else:
        progress = run_status.replay_events(reader.read())
        description = run_status.describe_progress(paths, progress, reader.damaged_lines)
        steps_per_s, tokens_per_s = progress.steps_per_s, progress.tokens_per_s
        remaining_s = progress.remaining_s
    state: Literal["running", "finished", "stopped", "not_running"]
    if progress.finished:
        state = "finished"
    elif is_running:
        state = "running"
    else:
        state = "stopped" if progress.stopped else "not_running"
    return RunStatus(
        run_id=paths.root.name, kind="generation" if is_generation(paths) else "training", state=state,
        step=progress.step, planned_steps=progress.planned_steps or None, loss=progress.loss,
        learning_rate=progress.learning_rate, validation_loss=progress.validation_loss, best_loss=progress.best_loss,
        best_step=None if progress.best_loss is None else progress.best_step,
        checkpoint_step=progress.checkpoint_step, steps_per_s=steps_per_s, tokens_per_s=tokens_per_s,
        remaining_s=remaining_s if is_running else None, attempts=progress.attempts, lost_steps=progress.lost_steps,
        alerts=tuple(progress.alerts), notices=tuple(progress.notices), description=description,
    )  # fmt: skip


def _describe_generation(paths: RunPaths, view: ProgressView, is_running: bool, damaged_lines: int) -> str:
    progress, generation = view.progress, view.generation
    state = run_status.describe_state(progress, is_running, "`ratchet generate`")
    planned = format(progress.planned_steps, ",") if progress.planned_steps else "?"
    lines = [f"generation {paths.root.name}: {state}", f"  answers     {progress.step:,} of {planned}"]
    if generation is not None and generation.answers_per_s is not None and generation.tokens_per_s is not None:
        lines.append(
            f"  rate        {generation.answers_per_s:,.2f} answers/s, {generation.tokens_per_s:,.0f} tokens/s"
        )
    if is_running and (remaining := view.eta.estimate(time.time())):
        lines.append(f"  time left   {remaining.describe()}")
    if generation is not None and generation.finish_counts:
        lines.append(f"  ended by    {', '.join(generation.describe_finishes())}")
    for tokens, _ in progress.budgets.values():
        if tokens is not None:
            lines.append(f"  budget      at most {tokens:,} padded tokens")
    if progress.last_t and not progress.finished:
        lines.append(f"  last event  {format_duration(max(0.0, time.time() - progress.last_t))} ago")
    return "\n".join([*lines, *run_status.describe_events(progress, damaged_lines)])


# Runs in a replica. Any machine can read them, without the run directories.


def replica_status(machine: Machine, replica: str | bool, run: str | None = None) -> ReplicaStatusReport:
    """Read the progress of all runs in a replica, or of one.

    Args:
        machine: settings of the project, or the defaults.
        replica: value of `--replica`: a URL, the first characters of a run id, or True for machine.replica.
        run: the first characters of a run id; None: all runs.

    Raises:
        SettingsError: no replica is named, or it cannot be used.
        DataError: no run has this id, or several do.
        ReplicaError: the replica cannot be reached.
    """
    from ratchet.runs.replication import remote_status

    store, run = remote_status.resolve_replica(machine, replica, run)
    if run is not None:
        remote_run = remote_status.read_remote_run(store, remote_status.find_remote_run(store, run))
        description = remote_status.describe_remote_run(remote_run)
        return ReplicaStatusReport(runs=(build_replica_status(remote_run, description),))
    runs = [remote_status.read_remote_run(store, name) for name in remote_status.list_remote_runs(store)]
    return ReplicaStatusReport(
        runs=tuple(build_replica_status(remote_run, remote_status.summarize_run(remote_run)) for remote_run in runs)
    )


def build_replica_status(run: "RemoteRunStatus", description: str) -> ReplicaRunStatus:
    """Build the record of a run in a replica."""
    progress, holder = run.progress, run.state.holder
    return ReplicaRunStatus(
        run_id=run.run_id, is_finished=run.state.finished,
        machine=holder.node if holder is not None and holder.state == "holding" else None, step=progress.step,
        planned_steps=progress.planned_steps or None, durable_step=run.state.durable[1],
        attempts=progress.attempts, lost_steps=progress.lost_steps, goodput=run.goodput.share(),
        description=description,
    )  # fmt: skip
