"""`ratchet work`: takes jobs from the queue, and runs each in a workspace of its own until its last stage.

A workspace is a folder in experiments/queue with the settings of the job and the files of the project, so jobs with
other data or bases do not touch the outputs of the project. Runs, scores and MLflow are those of the project
(`ProjectLayout.shared_root`). Each stage is a process, `ratchet STAGE`, whose exit code decides what happens next.
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, Literal, NamedTuple, TypeVar

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import (
    EXIT_BUG,
    EXIT_GATE,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    InputError,
    InterruptedRunError,
    RatchetError,
    RunFailedError,
    SettingsError,
    StorageError,
)  # fmt: skip
from ratchet.redaction import SETTING_PREFIX
from ratchet.runs.job_queue import JOB_STAGES, Job, JobQueue, name_worker
from ratchet.runs.signals import StopSignal
from ratchet.stages.project import Project
from ratchet.stages.submit import open_queue, run_git
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.training.run_spec import build_run_spec, pin_champion

JOB_VARIABLE = "RATCHET_JOB"
"""Environment variable with the number of the job, in its stages. They stop if the worker dies (cli/main.py)."""
STAGE_COMMAND = [sys.executable, "-m", "ratchet"]
POLL_S = 2.0
"""Seconds between two looks into an empty queue."""
CHECK_S = 0.2
RENEWALS_PER_LEASE = 4
STOP_MARGIN_S = 60.0
"""Time beyond machine.grace_period_s that a stage has to end after a request, for the upload of its last checkpoint."""
RETRY_FACTOR = 30.0
MAX_RETRY_DELAY_S = 3600.0
"""The delay before the second attempt is RETRY_FACTOR times machine.restart_delay_s. It doubles up to the maximum."""
INPUT_ATTEMPTS = 2
"""Attempts of a job that ends with exit code 2. The second may be on a machine that has what the first lacks."""
MAX_FAILED_JOBS = 3
"""A worker ends if this many jobs in a row failed on it, because its machine may be the cause."""

Answer = TypeVar("Answer")


class WorkReport(Record):
    """Jobs that a worker has run until it ended."""

    queue: str
    worker: str
    done: tuple[int, ...]
    """Numbers of the jobs that are done."""
    failed: tuple[int, ...]
    """Numbers of the jobs with a failed attempt."""


class _Outcome(NamedTuple):
    """End of an attempt."""

    kind: Literal["done", "stopped", "busy", "failed", "lost"]
    note: str
    exit_code: int = EXIT_OK


def work(
    project: Project,
    on_progress: Callable[[str], None],
    exit_when_idle_s: float | None = None,
    on_idle: str | None = None,
) -> WorkReport:
    """Run jobs until the queue has been empty for a time, or until a request to stop.

    Args:
        project: the project; section machine of its settings says how runs execute here.
        on_progress: receives a line for each event.
        exit_when_idle_s: seconds without a job after which the worker ends; None: never.
        on_idle: command to run then, such as the call that ends a rented machine.

    Raises:
        SettingsError: `on_idle` is no command, or `exit_when_idle_s` is not a number of seconds.
        InterruptedRunError: stopped on request; the job is in the queue again.
        RunFailedError: several jobs in a row failed here, or `on_idle` failed.
        StorageError: the database has not answered for machine.storage_timeout_s.
    """
    command = _parse_command(on_idle)
    if command and exit_when_idle_s is None:
        raise SettingsError("--on-idle: found without --exit-when-idle; give both")
    if exit_when_idle_s is not None and not 0 <= exit_when_idle_s < math.inf:
        raise SettingsError(f"--exit-when-idle {exit_when_idle_s:g}: expected seconds >= 0")
    worker = _QueueWorker(project, on_progress)
    with worker.stop.installed():
        worker.run(exit_when_idle_s)
    if command and subprocess.run(command, check=False).returncode:
        raise RunFailedError(f"--on-idle {on_idle}: the command failed; the worker has ended, this machine has not")
    return worker.report()


def _parse_command(text: str | None) -> list[str]:
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise SettingsError(f"--on-idle {text}: {error}") from None
    if text is not None and (not words or shutil.which(words[0]) is None):
        raise SettingsError(
            f"--on-idle {text}: no program of this name is on PATH; expected a program and its arguments"
        )
    return words


class _QueueWorker:
    """Takes jobs one after the other."""

    def __init__(self, project: Project, on_progress: Callable[[str], None]) -> None:
        self._project, self._on_progress = project, on_progress
        self._machine = project.settings.machine
        self._queue = open_queue(project)
        self._name = name_worker()
        self._done: list[int] = []
        self._failed: list[int] = []
        self._failed_in_a_row: set[int] = set()
        self.stop = StopSignal()

    def report(self) -> WorkReport:
        return WorkReport(queue=self._queue.name, worker=self._name, done=tuple(self._done), failed=tuple(self._failed))

    def run(self, exit_when_idle_s: float | None) -> None:
        """Run jobs; see `work`."""
        idle_since_s = time.monotonic()
        self._on_progress(f"worker {self._name}: queue {self._queue.name} in {self._queue.where}")
        while not self.stop.is_requested:
            job = self._ask(lambda: self._queue.claim(self._name, self._machine.lease_timeout_s))
            if job is not None:
                self._run_job(job)
                idle_since_s = time.monotonic()
            elif exit_when_idle_s is None or time.monotonic() - idle_since_s < exit_when_idle_s:
                self.stop.wait(POLL_S if exit_when_idle_s is None else min(POLL_S, exit_when_idle_s), _do_nothing)
            elif not self._ask(self._queue.count_states)["waiting"]:  # a job may wait for its next attempt
                self._on_progress(f"worker {self._name}: no job for {exit_when_idle_s:g} s")
                return
            else:
                self.stop.wait(POLL_S, _do_nothing)
        raise InterruptedRunError(f"worker {self._name}: stopped on request; its job is in the queue again")

    def _run_job(self, job: Job) -> None:
        """Run a claimed job, and return it to the queue or end it."""
        title = f"job {job.id}"
        self._on_progress(f"{title}: attempt {job.attempts} of {job.max_attempts}{job.changes and f' ({job.changes})'}")
        with _LeaseRenewal(self._queue, job, self._machine.lease_timeout_s, self._on_progress) as lease:
            attempt = _JobAttempt(
                self._project, lambda run_id: self._ask(lambda: self._queue.set_run(job, run_id)), job, lease,
                self.stop, self._on_progress,
            )  # fmt: skip
            try:
                outcome = attempt.run()
            except RatchetError as error:
                outcome = _Outcome("failed", str(error), error.exit_code)
            except OSError as error:  # a full disk, for example
                outcome = _Outcome("failed", str(error), EXIT_BUG)
            finally:
                attempt.remove_workspaces()
            has_job = self._end_job(job, outcome)
        if outcome.kind == "lost" or not has_job:
            self._on_progress(f"{title}: another worker has it, or it was cancelled; nothing more is stored about it")
            return
        self._on_progress(f"{title}: {outcome.kind}{outcome.note and f': {outcome.note}'}")
        if outcome.kind == "done":
            self._done.append(job.id)
            self._failed_in_a_row.clear()
        elif outcome.kind == "failed":
            self._failed.append(job.id)
            self._failed_in_a_row.add(job.id)
            if len(self._failed_in_a_row) >= MAX_FAILED_JOBS:
                raise RunFailedError(
                    f"worker {self._name}: {MAX_FAILED_JOBS} jobs in a row failed here, the last with: {outcome.note}\n"
                    "  fix the machine and start the worker again; `ratchet queue` shows the jobs"
                )

    def _end_job(self, job: Job, outcome: _Outcome) -> bool:
        """Store the outcome. Return whether this worker still had the job."""
        queue, note = self._queue, outcome.note
        if outcome.kind == "done":
            return self._ask(lambda: queue.finish(job, "done", note))
        if outcome.kind == "stopped":
            return self._ask(lambda: queue.release(job, note, is_counted=False))
        if outcome.kind == "busy":
            return self._ask(lambda: queue.release(job, note, self._machine.lease_timeout_s, is_counted=False))
        if outcome.kind == "failed" and outcome.exit_code == EXIT_INPUT and job.attempts >= INPUT_ATTEMPTS:
            return self._ask(lambda: queue.finish(job, "failed", note))
        if outcome.kind == "failed":
            delay_s = RETRY_FACTOR * self._machine.restart_delay_s * 2 ** (job.attempts - 1)
            return self._ask(lambda: queue.release(job, note, min(delay_s, MAX_RETRY_DELAY_S)))
        return False

    def _ask(self, operation: Callable[[], Answer]) -> Answer:
        """Run an operation of the queue; repeat it while the database does not answer."""
        since_s: float | None = None
        while True:
            try:
                return operation()
            except StorageError as error:
                if since_s is None:
                    since_s = time.monotonic()
                    self._on_progress(f"{error} (trying again for {self._machine.storage_timeout_s:g} s)")
                if time.monotonic() - since_s >= self._machine.storage_timeout_s or self.stop.is_requested:
                    raise
            time.sleep(POLL_S)


class _LeaseRenewal:
    """Renews the lease of a job in a thread, while the context lasts."""

    def __init__(self, queue: JobQueue, job: Job, lease_s: float, on_progress: Callable[[str], None]) -> None:
        self._queue, self._job, self._lease_s, self._on_progress = queue, job, lease_s, on_progress
        self.is_lost = False
        """Whether another worker may have the job, or it was cancelled."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_periodically, name="job-lease", daemon=True)

    def __enter__(self) -> "_LeaseRenewal":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _renew_periodically(self) -> None:
        renewed_s, is_reported = time.monotonic(), False
        while not self._ended.wait(self._lease_s / RENEWALS_PER_LEASE) and not self.is_lost:
            began_s = time.monotonic()
            try:
                self.is_lost = not self._queue.renew(self._job, self._lease_s)
                renewed_s, is_reported = began_s, False
            except StorageError as error:
                if not is_reported:
                    is_reported = True
                    self._on_progress(f"job {self._job.id}: its lease cannot be renewed: {error}")
                self.is_lost = time.monotonic() - renewed_s >= self._lease_s


class _JobAttempt:
    """One attempt of a job, in its workspace."""

    def __init__(
        self, project: Project, record_run: Callable[[str], object], job: Job, lease: _LeaseRenewal, stop: StopSignal,
        on_progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._project, self._record_run, self._job, self._lease, self._stop = project, record_run, job, lease, stop
        self._on_progress = on_progress
        self._grace_s = project.settings.machine.grace_period_s + STOP_MARGIN_S
        folder = project.layout.queue
        self._workspace = folder / f"job-{job.id}.{job.token}"  # an earlier attempt may not have ended everywhere
        self._kept = folder / f"job-{job.id}"
        self._log = folder / f"job-{job.id}.log"

    def run(self) -> _Outcome:
        """Run the stages. Raises RatchetError if the workspace cannot be made."""
        job = self._job
        settings = params_file.parse(job.params, f"params.yaml of job {job.id}")
        settings = settings.model_copy(update={"machine": self._project.settings.machine})
        layout = make_workspace(self._project.layout, self._workspace, settings, job.revision)
        for stage in ("base", "prepare", *JOB_STAGES[: JOB_STAGES.index(job.until) + 1]):
            if stage == "train" and (problem := self._check_run(layout, settings)):
                return _Outcome("failed", problem, EXIT_INPUT)
            outcome = self._run_stage(stage)
            if outcome is not None:
                break
        else:
            outcome = _Outcome("done", "")
        if outcome.kind == "done" and job.until != "train":
            if self._kept.exists():
                shutil.rmtree(self._kept)
            self._workspace.rename(self._kept)
        return outcome

    def remove_workspaces(self) -> None:
        """Remove the workspaces of this and of earlier attempts on this machine. Links are not followed."""
        for workspace in self._project.layout.queue.glob(f"job-{self._job.id}.[0-9]*"):
            if int(workspace.name.rpartition(".")[2]) > self._job.token:  # a later attempt may run here
                continue
            try:
                shutil.rmtree(workspace)
            except OSError as error:
                self._on_progress(f"job {self._job.id}: {workspace} is not removed: {error}")

    def _check_run(self, layout: ProjectLayout, settings: Settings) -> str:
        """Record the run of the job. Return why this machine must not train it; empty if it may.

        An attempt elsewhere has begun another run if files differ, and this machine could not resume it.
        """
        run_id = build_run_spec(layout, pin_champion(layout, settings, records=False)).run_id
        self._on_progress(f"job {self._job.id}: run {run_id}")
        if self._job.run_id not in (None, run_id):
            return (
                f"the data or the base of {self._project.root} differ from those of the last attempt: they make run "
                f"{run_id}, that one made {self._job.run_id}; update the files of the workers, or submit it again"
            )
        self._record_run(run_id)
        return ""

    def _run_stage(self, stage: str) -> _Outcome | None:
        """Run a stage. Return None if the next one may follow."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(SETTING_PREFIX)}
        command = [*STAGE_COMMAND, "--project", str(self._workspace), stage, "--json"]
        with self._log.open("ab") as log, (self._workspace / f"{stage}.out").open("w+b") as output:
            log.write(f"--- job {self._job.id}, attempt {self._job.attempts}: ratchet {stage}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command, env=environment | {JOB_VARIABLE: str(self._job.id)}, stdout=output, stderr=log
            )
            exit_code = self._wait(process)
            output.seek(0)
            text = output.read().decode(errors="replace")
        if self._lease.is_lost:
            return _Outcome("lost", "")
        if exit_code == EXIT_OK:
            return _Outcome("done", f"gate: {json.loads(text)['decision']}") if stage == "gate" else None
        kind, message = _parse_failure(text)
        note = f"{stage}: {message or f'exit code {exit_code}'} ({self._log.relative_to(self._project.root)})"
        if exit_code == EXIT_GATE and stage == "gate":
            return _Outcome("done", f"{stage}: {message}" if message else "the gate did not decide PROMOTE")
        if self._stop.is_requested:
            return _Outcome("stopped", note)
        if exit_code == EXIT_INTERRUPTED or kind == "LockHeldError":
            return _Outcome("busy", note)
        return _Outcome("failed", note, exit_code)

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for a stage. Stop it if the worker is asked to stop, or has lost the job."""
        stopped_s: float | None = None
        while True:
            try:
                return process.wait(CHECK_S)
            except subprocess.TimeoutExpired:
                now_s = time.monotonic()
                if stopped_s is None and (self._stop.is_requested or self._lease.is_lost):
                    stopped_s = now_s
                    process.terminate()
                elif stopped_s is not None and now_s - stopped_s > self._grace_s:
                    process.kill()


def _parse_failure(text: str) -> tuple[str, str]:
    """Return class and message of the error in the output of a command with `--json`; empty texts without one."""
    try:
        failure = json.loads(text)["error"]
        return str(failure["type"]), str(failure["message"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def make_workspace(layout: ProjectLayout, workspace: Path, settings: Settings, commit: str | None) -> ProjectLayout:
    """Create a workspace with these settings.

    Its files are those of a commit, and links to whatever of the project is not in it: without a commit, to all of it.

    Raises InputError if the commit, or a file of it that DVC tracks, cannot be fetched.
    """
    workspace.mkdir(parents=True)
    if commit is not None:
        _extract_commit(layout, workspace, commit)
    own = {"params.yaml", "dvc.yaml", "dvc.lock", "experiments", "mlruns", ".git", ".dvc"}
    for path in layout.root.iterdir():
        if path.name not in own and not (workspace / path.name).exists():
            (workspace / path.name).symlink_to(path)
    target = ProjectLayout(workspace)
    if layout.private_key.exists() and not target.private_key.exists():
        target.private_key.symlink_to(layout.private_key)
    target.experiments.mkdir(exist_ok=True)
    if commit is None:
        shutil.copyfile(layout.root / "dvc.yaml", workspace / "dvc.yaml")
        for path in layout.experiments.glob("*.json*"):  # what git tracks: champion, ledgers
            shutil.copyfile(path, target.experiments / path.name)
    target.params.write_text(params_file.dump(settings), encoding="utf-8")
    return target


def _extract_commit(layout: ProjectLayout, workspace: Path, commit: str) -> None:
    try:
        run_git(layout, "cat-file", "-e", f"{commit}^{{commit}}")
    except InputError:
        run_git(layout, "fetch", "--all", "--quiet")
    with subprocess.Popen(["git", "archive", commit], cwd=layout.root, stdout=PIPE, stderr=DEVNULL) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                # Python 3.11.4 and later have the filter; later ones warn without it.
                options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                archive.extractall(workspace, members=_list_members(archive, commit), **options)  # noqa: S202 (checked)
        except tarfile.ReadError:
            raise InputError(
                f"commit {commit} is not in this clone, and no remote has it; push it to a branch"
            ) from None
    tracked = [str(path.relative_to(workspace)) for path in workspace.rglob("*.dvc") if path.is_file()]
    if tracked:
        _fetch_data(layout, workspace, tracked)


def _list_members(archive: tarfile.TarFile, commit: str) -> Iterator[tarfile.TarInfo]:
    """Iterate over the files of a commit. Raises InputError at a link that leads out of the project."""
    for member in archive:
        target = Path(os.path.normpath(Path(member.name).parent / member.linkname))
        if member.issym() and (target.is_absolute() or os.pardir in target.parts):
            raise InputError(
                f"commit {commit}: {member.name} is a link to {member.linkname}, outside of the project; a job "
                "extracts no such link"
            )
        yield member


def _fetch_data(layout: ProjectLayout, workspace: Path, tracked: list[str]) -> None:
    """Bring the files that DVC tracks into a workspace: from the cache of the project, else from its remote."""
    dvc = [sys.executable, "-m", "dvc"]
    cache = subprocess.run([*dvc, "cache", "dir"], cwd=layout.root, capture_output=True, text=True, check=False)
    (workspace / ".dvc").mkdir(exist_ok=True)
    (workspace / ".dvc" / "config.local").write_text(
        f"[core]\n    no_scm = true\n[cache]\n    dir = {cache.stdout.strip()}\n", encoding="utf-8"
    )
    for command in ("checkout", "pull"):
        done = subprocess.run(
            [*dvc, command, "-q", *tracked], cwd=workspace, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
    raise InputError(f"`dvc pull` failed for {', '.join(tracked)}: {done.stderr.strip()}")


def _do_nothing() -> None:
    """Poll nothing."""
