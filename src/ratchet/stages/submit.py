"""`ratchet submit` and `ratchet queue`: whole runs that wait for a worker (`ratchet work`)."""

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from ratchet.config import params_file
from ratchet.errors import InputError, SettingsError
from ratchet.models.start_adapter import CHAMPION, INIT_ADAPTER
from ratchet.redaction import SETTING_PREFIX, redact
from ratchet.runs.job_queue import Job, JobQueue, JobRequest, JobState, Stage
from ratchet.stages.project import Project
from ratchet.stages.team import require_run_quota
from ratchet.storage.actors import current_actor
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record

MAX_NUMBER = 1_000_000
"""Greatest number of attempts, and greatest priority."""


class SubmittedJob(Record):
    """A job that was added to the queue."""

    job: Job
    waiting: int
    """Number of jobs that wait, this one included."""


class QueueReport(Record):
    """All jobs of a project's queue."""

    queue: str
    where: str
    """SQLite file, or address of the database."""
    counts: dict[JobState, int]
    jobs: tuple[Job, ...]


def open_queue(project: Project) -> JobQueue:
    """Open the queue of the project: in `machine.study_storage`, under the name `promote.model_name`.

    Raises StorageError if the database cannot be used.
    """
    settings = project.settings
    return JobQueue(project.layout, settings.machine.study_storage, settings.promote.model_name)


def submit(
    project: Project,
    overrides: Mapping[str, Any] | None = None,
    *,
    revision: str | None = None,
    until: Stage = "train",
    priority: int = 0,
    max_attempts: int = 5,
) -> SubmittedJob:
    """Add a job: a run with the settings of params.yaml, of environment variables and of `overrides`.

    Args:
        project: the project.
        overrides: settings of this job, by dotted name, of any section but `machine`, which is that of each worker.
        revision: commit, tag or branch whose settings and files are used; None: params.yaml as it is now, and the files
            of the worker's project.
        until: last stage.
        priority: jobs of higher priority are begun first.
        max_attempts: attempts until the job fails for good.

    Raises:
        SettingsError: a value is not valid, train.init_adapter is `champion`, or git has no such commit.
        QuotaError: the tenant's quota has no room for a run.
        StorageError: the database cannot be used.
    """
    for name in overrides or {}:
        if name.partition(".")[0] == "machine":
            raise SettingsError(
                f"--set {name}: section machine is that of the worker; set it in its params.yaml or environment"
            )
    if not 1 <= max_attempts <= MAX_NUMBER:
        raise SettingsError(f"--attempts {max_attempts}: expected 1 to {MAX_NUMBER}")
    if abs(priority) > MAX_NUMBER:
        raise SettingsError(f"--priority {priority}: expected -{MAX_NUMBER} to {MAX_NUMBER}")
    commit = None if revision is None else _resolve_commit(project.layout, revision)
    if commit is None:
        text, name = project.layout.params.read_text(encoding="utf-8"), "params.yaml"
    else:
        name = f"params.yaml of {revision}"
        text = run_git(project.layout, "show", f"{commit}:./params.yaml")
    _, entries = params_file.explain(text, name, overrides, os.environ)
    is_own = {entry.name: entry.origin == "--set" or entry.origin.startswith(SETTING_PREFIX) for entry in entries}
    settings = params_file.parse(text, name, overrides, os.environ)
    if settings.train.init_adapter == CHAMPION:
        raise SettingsError(
            f"{INIT_ADAPTER}: found {CHAMPION}, which may change between two attempts of a job; set the RunId of the "
            "promoted model (experiments/champion.json)"
        )
    require_run_quota(project)
    request = JobRequest(
        params=params_file.dump(settings),
        changes=redact(
            ", ".join(
                f"{entry.name}: {entry.value}"
                for entry in entries
                if is_own[entry.name] and not entry.name.startswith("machine.")
            )
        ),
        revision=commit,
        until=until,
        priority=priority,
        max_attempts=max_attempts,
        actor=current_actor(project.root),
    )
    queue = open_queue(project)
    job = queue.submit(request)
    return SubmittedJob(job=job, waiting=queue.count_states()["waiting"])


def read_queue(project: Project) -> QueueReport:
    """Return all jobs. Raises StorageError if the database cannot be used."""
    queue = open_queue(project)
    return QueueReport(queue=queue.name, where=queue.where, counts=queue.count_states(), jobs=tuple(queue.list_jobs()))


def run_git(layout: ProjectLayout, *arguments: str) -> str:
    """Return the output of a git command in the project. Raises InputError if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=layout.root, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise InputError("git is not installed; install it, or submit without --revision") from None
    if done.returncode:
        raise InputError(f"`git {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


def _resolve_commit(layout: ProjectLayout, revision: str) -> str:
    try:
        return run_git(layout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except InputError:
        raise SettingsError(f"--revision {revision}: git has no such commit in {layout.root}") from None
