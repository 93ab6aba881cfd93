"""Scores completed runs on validation rows in a separate process. Imports no torch."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ratchet import errors
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_INTERRUPTED, DataError, InterruptedRunError, RatchetError, SettingsError
from ratchet.runs.directory import RunPaths
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import (
    VALIDATION_METRICS,
    ValidationJob,
    ValidationLaunch,
    ValidationMetric,
    ValidationScores,
    load_validation_scores,
)

SCORER = (sys.executable, "-m", "ratchet.evaluation.validation_worker")
POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
"""Time for the process to end after a request; it may be in the middle of a batch."""
MAX_ERROR_LENGTH = 400
"""Characters of an unexpected error message."""


def _ignore_wait() -> None:
    """Do nothing."""


def score_runs(
    layout: ProjectLayout, settings: Settings, job: ValidationJob, check_stop: Callable[[], None] = _ignore_wait
) -> list[ValidationScores]:
    """Return the scores of the job's runs, in its order; no process is started if all scores are cached.

    Args:
        layout: the project.
        settings: `machine` (device, threads, evaluation_batch_size) and evaluate.max_new_tokens are read.
        job: runs, metrics and rows.
        check_stop: called several times a second; if it raises, the process is ended, and no file is incomplete.

    Raises:
        RatchetError: the failure of the process, in the class that it reported; InterruptedRunError if it was stopped.
    """
    # The address of the database may contain a password, and all users can see a process's arguments.
    machine = settings.machine.model_copy(update={"study_storage": None})
    launch = ValidationLaunch(job=job, max_new_tokens=settings.evaluate.max_new_tokens, machine=machine)
    launch.require_measurable(DatasetCard.load(layout.dataset_card))
    found = _read_kept_scores(layout, launch)
    if None in found:
        _run_scorer(layout, launch, check_stop)
        found = _read_kept_scores(layout, launch)
    if missing := [run_id for run_id, one in zip(job.run_ids, found, strict=True) if one is None]:
        raise RatchetError(f"run {missing[0]}: was scored, but its scores cannot be read; check the disk")
    return [one for one in found if one is not None]


def score_run(
    layout: ProjectLayout,
    settings: Settings,
    run_id: str,
    metrics: Sequence[str],
    check_stop: Callable[[], None] = _ignore_wait,
) -> Mapping[str, float]:
    """Return metrics of one run on sweep.generation_rows validation rows.

    Raises the errors of `score_runs`, and SettingsError for unknown metrics.
    """
    job = ValidationJob(
        run_ids=(run_id,), metrics=tuple(map(parse_row_metric, metrics)), rows=settings.sweep.generation_rows
    )
    [found] = score_runs(layout, settings, job, check_stop)
    return {str(metric): value for metric, value in found.metrics.items()}


def parse_row_metric(metric: str) -> ValidationMetric:
    """Return the metric if it can be measured row by row. Raises SettingsError for others."""
    for known in VALIDATION_METRICS:
        if known == metric:
            return known
    raise SettingsError(f"{metric}: cannot be measured by row; expected one of {', '.join(VALIDATION_METRICS)}")


def _read_kept_scores(layout: ProjectLayout, launch: ValidationLaunch) -> list[ValidationScores | None]:
    request_digest = launch.request_digest(DatasetCard.load(layout.dataset_card))
    found = []
    for run_id in launch.job.run_ids:
        paths = RunPaths(layout.runs / run_id)
        if not paths.result.is_dir():
            raise DataError(f"run {run_id}: no result in {paths.root}; only completed runs can be scored")
        report = TrainReport.load(paths.result / "train.json")
        found.append(load_validation_scores(paths.root, request_digest, report.adapter_digest))
    return found


def _run_scorer(layout: ProjectLayout, launch: ValidationLaunch, check_stop: Callable[[], None]) -> None:
    # A file, not a pipe: output of libraries must not block.
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [*SCORER, str(layout.root), launch.model_dump_json(), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        try:
            while (code := _wait(process, POLL_S)) is None:
                check_stop()
        finally:
            _terminate(process)
        if code:
            raise _read_failure(code, stderr, launch.job)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, and kill it if it does not."""
    try:
        process.terminate()
        _wait(process, STOP_TIMEOUT_S)
    finally:  # also after a second request while waiting
        process.kill()
        process.wait()


def _read_failure(code: int, stderr: IO[bytes], job: ValidationJob) -> RatchetError:
    """Return the exception that the last line on stderr describes."""
    stderr.seek(0)
    lines = [line for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing on stderr"
    name, _, text = last.partition(": ")
    if code < 0:
        return RatchetError(f"scoring of {', '.join(job.run_ids)}: ended by signal {-code}; {last[:MAX_ERROR_LENGTH]}")
    if code == EXIT_INTERRUPTED:
        return InterruptedRunError(f"scoring of {', '.join(job.run_ids)}: stopped; run it again")
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, RatchetError):
        return error_class(text)
    return RatchetError(f"scoring of {', '.join(job.run_ids)}: exit code {code}: {last[:MAX_ERROR_LENGTH]}")
