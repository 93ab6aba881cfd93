"""Asks a process of its own how finished runs score on validation rows; imports no torch, and holds no model."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ratchet import errors
from ratchet.config.schema import Settings
from ratchet.errors import EXIT_INTERRUPTED, DataError, InterruptedRunError, RatchetError, SettingsError
from ratchet.runs.directory import RunPaths
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import (
    MEASURED,
    HeldOutJob,
    HeldOutLaunch,
    HeldOutMetric,
    HeldOutScores,
    read_held_out,
)

SCORER = (sys.executable, "-m", "ratchet.evaluation.validation_worker")
POLL_S = 0.1
PATIENCE_S = 30.0
"""For a process that was asked to end: it may be in the midst of a batch."""
TOLD = 400
"""Characters of a failure that is not one of ours, at most."""


def _ignore_wait() -> None:
    """Nobody looks."""


def score_runs(
    layout: ProjectLayout, settings: Settings, job: HeldOutJob, look: Callable[[], None] = _ignore_wait
) -> list[HeldOutScores]:
    """Scores of the job's runs, in its order; no process is started where their directories keep all of them.

    Args:
        layout: the project.
        settings: `machine` (device, threads, evaluation_rows) and evaluate.max_new_tokens are read.
        job: which runs, and what of them.
        look: called a few times a second; may raise to end it: the process is then ended, and nothing half-written.

    Raises:
        RatchetError: what the process said of its failure, in the class that it named (see held_out_scores.answer);
            InterruptedRunError when somebody stopped it.
    """
    # The database's address may hold a password, and arguments of a process are seen by all.
    machine = settings.machine.model_copy(update={"studies": None})
    launch = HeldOutLaunch(job=job, max_new_tokens=settings.evaluate.max_new_tokens, machine=machine)
    launch.require_measurable(DatasetCard.load(layout.dataset_card))
    found = _read_kept_scores(layout, launch)
    if None in found:
        _run_scorer(layout, launch, look)
        found = _read_kept_scores(layout, launch)
    if missing := [run_id for run_id, one in zip(job.run_ids, found, strict=True) if one is None]:
        raise RatchetError(f"run {missing[0]}: was scored, but its scores cannot be read back; look at the disk")
    return [one for one in found if one is not None]


def score_run(
    layout: ProjectLayout,
    settings: Settings,
    run_id: str,
    metrics: Sequence[str],
    look: Callable[[], None] = _ignore_wait,
) -> Mapping[str, float]:
    """Figures of one run on sweep.rows validation rows, by metric. Raises as `score_runs`, and for unknown metrics."""
    job = HeldOutJob(run_ids=(run_id,), metrics=tuple(map(parse_row_metric, metrics)), rows=settings.sweep.rows)
    [found] = score_runs(layout, settings, job, look)
    return {str(metric): value for metric, value in found.figures.items()}


def parse_row_metric(metric: str) -> HeldOutMetric:
    """The metric, if it can be measured row by row. Raises SettingsError for others."""
    for known in MEASURED:
        if known == metric:
            return known
    raise SettingsError(f"{metric}: no score of a row; there are: {', '.join(MEASURED)}")


def _read_kept_scores(layout: ProjectLayout, launch: HeldOutLaunch) -> list[HeldOutScores | None]:
    question = launch.question(DatasetCard.load(layout.dataset_card))
    found = []
    for run_id in launch.job.run_ids:
        paths = RunPaths(layout.runs / run_id)
        if not paths.result.is_dir():
            raise DataError(f"run {run_id}: no result in {paths.root}; only what was trained to its end can be scored")
        report = TrainReport.load(paths.result / "train.json")
        found.append(read_held_out(paths.root, question, report.adapter_digest))
    return found


def _run_scorer(layout: ProjectLayout, launch: HeldOutLaunch, look: Callable[[], None]) -> None:
    # Files, no pipes: whatever a library prints, nobody waits for a reader.
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*SCORER, str(layout.root), launch.model_dump_json(), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            while (code := _wait(process, POLL_S)) is None:
                look()
        finally:
            _terminate(process)
        if code:
            raise _read_failure(code, said, launch.job)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Ask a process that still runs to end, and kill one that does not."""
    try:
        process.terminate()
        _wait(process, PATIENCE_S)
    finally:  # also of a second request, while we waited
        process.kill()
        process.wait()


def _read_failure(code: int, said: IO[bytes], job: HeldOutJob) -> RatchetError:
    """What the last line on stderr tells, as the exception that it was there."""
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing on stderr"
    name, _, text = last.partition(": ")
    if code < 0:
        return RatchetError(f"scoring of {', '.join(job.run_ids)}: ended by signal {-code}; {last[:TOLD]}")
    if code == EXIT_INTERRUPTED:
        return InterruptedRunError(f"scoring of {', '.join(job.run_ids)}: stopped; repeat it")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RatchetError):
        return kind(text)
    return RatchetError(f"scoring of {', '.join(job.run_ids)}: exit code {code}: {last[:TOLD]}")
