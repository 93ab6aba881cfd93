"""Queue of whole runs: jobs in one SQL table, in an SQLite file of the project or in PostgreSQL for several machines.

A worker claims a job with one statement, which also finds jobs whose worker has stopped renewing its lease. Each claim
increases the job's token (a fencing token), and every later statement of the worker names it: a worker that lost its
job cannot change it any more. All times are by the clock of the database, so clocks of machines are never compared.

The queue only assigns jobs. What protects a run is its lock, or the lease of its replica on several machines.
"""

import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Double,
    Integer,
    MetaData,
    Row,
    Table,
    Text,
    and_,
    create_engine,
    func,
    insert,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from ratchet.config.fields import MAX_INTEGER
from ratchet.errors import DataError, StorageError, first_line
from ratchet.storage.databases import prepare_postgres, prepare_sqlite
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
JOB_STATES: tuple[JobState, ...] = get_args(JobState)
Stage = Literal["train", "export", "evaluate", "gate"]
JOB_STAGES: tuple[Stage, ...] = get_args(Stage)
"""Stages at which a job may end, the first one first. Stages base and prepare precede them."""

JOBS = Table(
    "ratchet_jobs", MetaData(),
    Column("id", Integer, primary_key=True),
    Column("queue", Text, nullable=False, index=True),
    Column("state", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("params", Text, nullable=False),
    Column("changes", Text, nullable=False),
    Column("revision", Text),
    Column("until", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("token", Integer, nullable=False),
    Column("worker", Text),
    Column("run_id", Text),
    Column("note", Text, nullable=False),
    Column("submitted", Double, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("lease_end", Double),
    Column("ended", Double),
)  # fmt: skip


class JobRequest(Record):
    """A whole run that someone wants: its settings, and the commit of the project's files."""

    params: str
    """Text of params.yaml with all settings. A worker replaces section machine by its own."""
    changes: str = ""
    """Settings that differ from params.yaml, for display."""
    revision: str | None = None
    """Commit of git whose files the job uses; None: the files of the worker's project."""
    until: Stage = "train"
    """Last stage."""
    priority: int = 0
    """Jobs of higher priority are claimed first; equal ones in the order of their numbers."""
    max_attempts: int = 5
    actor: str = ""


class Job(JobRequest):
    """A job of the queue."""

    id: int
    queue: str
    state: JobState
    attempts: int
    """Attempts begun, without those that were stopped on request."""
    token: int
    """Number of claims."""
    worker: str | None
    """The last worker that claimed it."""
    run_id: str | None
    note: str
    """Result of the last attempt."""
    submitted: float
    not_before: float
    lease_end: float | None
    ended: float | None
    """Unix times by the clock of the database."""


def name_worker() -> str:
    """Return a name of this process for display, such as `node7/4711`."""
    return f"{socket.gethostname()}/{os.getpid()}"


class JobQueue:
    """The jobs of one project.

    Args:
        layout: the project, with the SQLite file.
        url: `machine.study_storage`; None: the SQLite file.
        name: name of the queue. Jobs of other queues in the same database are invisible.

    Raises:
        SettingsError: the address is not valid.
        StorageError: the database cannot be used. Every method may raise it.
    """

    def __init__(self, layout: ProjectLayout, url: str | None, name: str) -> None:
        self.name = name
        if url is None:
            connect, self.where = prepare_sqlite(layout.job_queue), str(layout.job_queue)
            self._engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
            self._now: ColumnElement[float] = literal_column("(julianday('now') - 2440587.5) * 86400.0", Double)
        else:
            connect, self.where = prepare_postgres(url, name_worker())
            self._engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
            self._now = literal_column("extract(epoch FROM clock_timestamp())::float8", Double)
        self._create_table()

    def submit(self, request: JobRequest) -> Job:
        """Add a job."""
        values = request.model_dump(exclude={"format"}) | {
            "queue": self.name, "state": "waiting", "attempts": 0, "token": 0, "note": "", "submitted": self._now,
            "not_before": self._now,
        }  # fmt: skip
        with self._begin() as connection:
            return _make_job(connection.execute(insert(JOBS).values(values).returning(JOBS)).one())

    def claim(self, worker: str, lease_s: float) -> Job | None:
        """Take the next job for a worker; None if no job is ready.

        A job is ready if it waits, or if its worker has not renewed the lease. If that was its last attempt, it fails.
        """
        jobs = JOBS.c
        is_expired = and_(jobs.state == "running", jobs.lease_end < self._now)
        # The lease may end between the two statements below, so the second one counts the attempts too.
        is_lost = and_(is_expired, jobs.attempts < jobs.max_attempts)
        is_ready = or_(and_(jobs.state == "waiting", jobs.not_before <= self._now), is_lost)
        lost = "the worker of the last attempt vanished: " + jobs.worker
        order = (jobs.priority.desc(), jobs.id)
        first = select(jobs.id).where(jobs.queue == self.name, is_ready).order_by(*order).limit(1)
        with self._begin() as connection:
            connection.execute(
                update(JOBS)
                .where(jobs.queue == self.name, is_expired, jobs.attempts >= jobs.max_attempts)
                .values(state="failed", note=lost, ended=self._now)
            )
            row = connection.execute(
                update(JOBS)
                .where(jobs.id == first.with_for_update(skip_locked=True).scalar_subquery())
                .values(
                    state="running", worker=worker, token=jobs.token + 1, attempts=jobs.attempts + 1,
                    lease_end=self._now + lease_s,
                )
                .returning(JOBS)
            ).one_or_none()  # fmt: skip
        return None if row is None else _make_job(row)

    def renew(self, job: Job, lease_s: float) -> bool:
        """Renew the lease of a claimed job. Return whether the worker still has the job."""
        return self._change_held(job, lease_end=self._now + lease_s)

    def set_run(self, job: Job, run_id: str) -> bool:
        """Record the run of a claimed job. Return whether the worker still has the job."""
        return self._change_held(job, run_id=run_id)

    def finish(self, job: Job, state: Literal["done", "failed"], note: str) -> bool:
        """End a claimed job. Return whether the worker still had the job."""
        return self._change_held(job, state=state, note=note, ended=self._now)

    def release(self, job: Job, note: str, delay_s: float = 0.0, is_counted: bool = True) -> bool:
        """Return a claimed job to the queue, for any worker after a delay. Return whether the worker still had the job.

        `is_counted`: whether this was an attempt. If it was the last one, the job fails.
        """
        if is_counted and job.attempts >= job.max_attempts:
            return self.finish(job, "failed", note)
        attempts = job.attempts if is_counted else job.attempts - 1
        return self._change_held(
            job, state="waiting", attempts=attempts, note=note, not_before=self._now + delay_s, lease_end=None
        )

    def cancel(self, number: int) -> Job:
        """End a job; its worker stops it at the next renewal. Raises DataError if it is over or does not exist."""
        return self._change(number, ("waiting", "running"), state="cancelled", ended=self._now, note="cancelled")

    def retry(self, number: int) -> Job:
        """Return a job that failed or was cancelled to the queue. Raises DataError for other jobs."""
        return self._change(
            number, ("failed", "cancelled"), state="waiting", attempts=0, not_before=self._now, ended=None, note="",
            run_id=None,
        )  # fmt: skip

    def list_jobs(self) -> list[Job]:
        """Return all jobs: first those that wait or run, in the order of claims; then the others, the newest first."""
        with self._begin() as connection:
            jobs = [_make_job(row) for row in connection.execute(select(JOBS).where(JOBS.c.queue == self.name))]
        return sorted(jobs, key=lambda job: (-(job.ended or math.inf), job.state == "waiting", -job.priority, job.id))

    def count_states(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        states = JOBS.c.state
        query = select(states, func.count()).where(JOBS.c.queue == self.name).group_by(states)
        with self._begin() as connection:
            counts = {state: int(count) for state, count in connection.execute(query).all()}
        return {state: counts.get(state, 0) for state in JOB_STATES}

    def _change_held(self, job: Job, **values: Any) -> bool:
        """Change a job that its worker still holds. Return whether it does."""
        is_held = and_(JOBS.c.id == job.id, JOBS.c.token == job.token, JOBS.c.state == "running")
        with self._begin() as connection:
            return connection.execute(update(JOBS).where(is_held).values(values)).rowcount == 1

    def _change(self, number: int, states: tuple[JobState, ...], **values: Any) -> Job:
        is_meant = and_(JOBS.c.id == min(number, MAX_INTEGER), JOBS.c.queue == self.name)
        with self._begin() as connection:
            query = update(JOBS).where(is_meant, JOBS.c.state.in_(states)).values(values).returning(JOBS)
            if (row := connection.execute(query).one_or_none()) is not None:
                return _make_job(row)
            state = connection.execute(select(JOBS.c.state).where(is_meant)).scalar_one_or_none()
        found = f"is {state}; expected a job that is {' or '.join(states)}" if state else "does not exist"
        raise DataError(f"job {number} of queue {self.name} {found} (`ratchet queue` lists all)")

    def _create_table(self) -> None:
        for is_last in (False, True):
            try:
                with self._begin() as connection:
                    if self._engine.dialect.name == "sqlite":
                        connection.execute(text("PRAGMA journal_mode = WAL"))  # the mode is stored in the file
                    JOBS.metadata.create_all(connection)
                return
            except StorageError as error:
                cause = error.__cause__
                was_faster = isinstance(cause, IntegrityError) or "already exists" in str(cause)
                if is_last or not was_faster:
                    raise

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        """Run statements in one transaction. Raises StorageError."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            reason = first_line(getattr(error, "orig", None) or error)
            raise StorageError(
                f"queue {self.name} in {self.where}: {reason}; check that it answers and can be written, then "
                "run the command again"
            ) from error


def _make_job(row: Row[Any]) -> Job:
    return Job.model_validate(dict(row._mapping))
