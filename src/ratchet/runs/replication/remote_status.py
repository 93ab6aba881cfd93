"""Status of runs in a replica, read on any machine that can reach the replica."""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ratchet.config.machine import Machine, find_replica_environment_problem, find_replica_problem
from ratchet.config.units import format_bytes, format_count, format_duration
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.runs import directory
from ratchet.runs.journal import JournalEvent, JournalReader, parse_line
from ratchet.runs.progress_view import ProgressView, SidecarState
from ratchet.runs.replication import lease, manifests
from ratchet.runs.replication.lease import LeaseRecord
from ratchet.runs.replication.manifests import ReplicaJournalReader
from ratchet.runs.replication.object_storage import strip_credentials
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits, parse_numbers
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.runs.status import SHOWN, Goodput, RunProgress

SILENT_S = 300.0
"""Time without a report after which the holder of a run is not shown as training."""
RETRY_TIMEOUT_S = 30.0
"""How long a call of an interactive command is retried."""
OPTION = "--replica"
_PREFIX_PARTS = 2
"""Number of leading parts in an object name: `runs` and the run's id."""


@dataclass(frozen=True)
class ReplicatingMachine:
    """Report of one process that trained the run."""

    node: str
    last_t: float
    """Unix time of the last report, by the clock of the machine that reported."""
    bytes_sent: int
    bytes_skipped: int
    """Size of the content that the replica already had."""
    send_s: float
    outages: int


@dataclass(frozen=True)
class ReplicaState:
    """State of one run in a replica, without its journal."""

    durable: tuple[int, int]
    """Token and step of the newest checkpoint, or of the result; zeros if the replica has neither."""
    finished: bool
    """Whether the replica has the result."""
    holder: LeaseRecord | None
    """Last holder of the run; None: no machine has held it."""
    machines: tuple[ReplicatingMachine, ...]


@dataclass(frozen=True)
class RemoteRunStatus:
    """Status of one run according to its replica."""

    run_id: str
    progress: RunProgress
    goodput: Goodput
    state: ReplicaState
    durable_t: float | None
    """Unix time at which the newest checkpoint was sealed, by the clock of the machine that sealed it; None if the
    journal does not record it."""
    damaged_lines: int
    """Number of damaged lines in the journal."""


def list_remote_runs(store: ReplicaStore) -> list[str]:
    """Return the ids of all runs in a replica.

    Raises:
        SettingsError: bucket, credentials or clock are wrong.
        ReplicaError: the replica cannot be reached.
    """
    parts = (name.split("/") for name in store.list("runs", strict=True))
    return sorted({part[1] for part in parts if len(part) > _PREFIX_PARTS and part[0] == "runs"})


def list_held_runs(store: ReplicaStore) -> list[str]:
    """Return the ids of unfinished runs that a machine holds now. Raises the errors of `list_remote_runs`."""
    states = ((run, read_replica_state(store, RunObjectNames(run))) for run in list_remote_runs(store))
    return [run for run, state in states if state.holder and state.holder.state == "holding" and not state.finished]


def read_remote_run(store: ReplicaStore, run: str) -> RemoteRunStatus:
    """Read the status of one run. Raises ReplicaError or SettingsError if the replica cannot be read."""
    names = RunObjectNames(run)
    progress, goodput, sealed_t = RunProgress(), Goodput(), dict[object, float]()
    events, damaged = _parse_events(manifests.recover_journal(store, names).content)
    for event in events:
        progress.update(event)
        goodput.update(event)
        if event.kind == "checkpoint_saved":
            sealed_t[event.data.get("step")] = event.t
    state = read_replica_state(store, names)
    damaged += progress.damaged_events
    return RemoteRunStatus(run, progress, goodput, state, sealed_t.get(state.durable[1]), damaged)


def read_replica_state(store: ReplicaStore, names: RunObjectNames) -> ReplicaState:
    """Read the state of one run except its journal. Raises ReplicaError or SettingsError if the replica cannot be
    read."""
    claim = lease.read_lease(store, names)
    results = list(store.list(names.folder("result")))
    checkpoints = map(_parse_token_and_step, store.list(names.folder("checkpoints")))
    return ReplicaState(
        durable=max((*checkpoints, *_read_results(store, results)), default=(0, 0)),
        finished=bool(results),
        holder=claim,
        machines=_read_machine_reports(store, names),
    )


def _parse_events(content: bytes) -> tuple[list[JournalEvent], int]:
    """Parse the events of a journal. Also return the number of damaged lines."""
    with tempfile.TemporaryDirectory(prefix="ratchet-survey-") as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(content)
        reader = JournalReader(path)
        return list(reader.read()), reader.damaged_lines


def _parse_token_and_step(name: str) -> tuple[int, int]:
    numbers = parse_numbers(name)
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def _read_results(store: ReplicaStore, result_names: list[str]) -> Iterator[tuple[int, int]]:
    """Yield token and step of each result that can be read."""
    for name in result_names:
        with suppress(DamagedFileError):
            if numbers := parse_numbers(name):
                yield numbers[0], manifests.read_replica_manifest(store, name).step


def _read_machine_reports(store: ReplicaStore, names: RunObjectNames) -> tuple[ReplicatingMachine, ...]:
    """Read the reports of the machines, the newest last. Damaged ones are skipped."""
    reports = []
    for name in store.list(names.folder("nodes")):
        try:
            raw: dict[str, Any] = json.loads(store.read(name) or b"")
            reports.append(
                ReplicatingMachine(
                    str(raw["node"]), float(raw["last"]), int(raw["bytes_sent"]), int(raw["bytes_skipped"]),
                    float(raw["send_s"]), int(raw["outages"]),
                )
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            continue  # the report is only displayed; nothing depends on it
    return tuple(sorted(reports, key=lambda report: report.last_t))


def summarize_run(run_status: RemoteRunStatus) -> str:
    """Describe a run in one line."""
    progress = run_status.progress
    steps = f"step {progress.step} of {progress.planned_steps or '?'}"
    return f"run {run_status.run_id}: {_describe_state(run_status)}; {steps}, {_describe_durable(run_status)}"


def describe_remote_run(run_status: RemoteRunStatus) -> str:
    """Describe a run in several lines."""
    progress = run_status.progress
    repeated = f"; {format_count(progress.lost_steps, 'step')} done again" if progress.lost_steps else ""
    lines = [
        f"run {run_status.run_id}: {_describe_state(run_status)}",
        f"  step        {progress.step} of {progress.planned_steps or '?'}",
        f"  durable     {_describe_durable(run_status)}",
        f"  machines    {_describe_machines(run_status.state)}",
        f"  interrupted {format_count(len(progress.attempt_ends), 'time')}{repeated}",
        *(f"              {end}" for end in progress.attempt_ends[-SHOWN:]),
    ]
    if (share := run_status.goodput.share()) is not None:
        useful_s, wall_s = format_duration(run_status.goodput.useful_s), format_duration(run_status.goodput.wall_s())
        useful_text = f"steps that count took {useful_s} of {wall_s}"
        lines.append(f"  goodput     {share:.1%}: {useful_text}")
    if run_status.state.machines:
        lines.append(f"  upload      {_describe_upload(run_status.state)}")
    lines += [f"  alert       {text}" for text in progress.alerts[-SHOWN:]]
    lines += [f"  notice      {text}" for text in progress.notices[-SHOWN:]]
    if run_status.damaged_lines:
        lines.append(f"  notice      {run_status.damaged_lines} damaged journal line(s) skipped")
    return "\n".join(lines)


def _describe_state(run_status: RemoteRunStatus) -> str:
    if run_status.state.finished:
        return f"finished ({run_status.progress.finished or 'its result is in the replica'})"
    holder = run_status.state.holder
    if holder is None:
        return "not begun"
    if holder.state == "released":
        ended = f": {run_status.progress.attempt_ends[-1]}" if run_status.progress.attempt_ends else ""
        state = "stopped" if run_status.progress.attempts else "not begun"
        return f"{state}; machine {holder.node} has released it{ended}"
    return f"held by machine {holder.node} since {holder.since}"


def _describe_durable(run_status: RemoteRunStatus) -> str:
    if not run_status.state.durable[1]:
        return "no checkpoint yet"
    age = (
        ""
        if run_status.durable_t is None
        else f", sealed {format_duration(max(0.0, time.time() - run_status.durable_t))} ago"
    )
    return f"step {run_status.state.durable[1]}{age}"


def _describe_machines(state: ReplicaState) -> str:
    if not state.machines:
        return _describe_holders(state)
    last = state.machines[-1]
    age = format_duration(max(0.0, time.time() - last.last_t))
    return f"{_describe_holders(state)}; {last.node} reported last, {age} ago"


def _describe_holders(state: ReplicaState) -> str:
    """Describe how many machines held the run, and how many times they did."""
    holders = state.holder.holders if state.holder else 0
    return f"{len(state.machines)}, which have held it {format_count(holders, 'time')}"


def _describe_upload(state: ReplicaState) -> str:
    sent = sum(machine.bytes_sent for machine in state.machines)
    seconds = sum(machine.send_s for machine in state.machines)
    text = f"{format_bytes(sent)} sent"
    if seconds:
        text += f" at {8 * sent / seconds / 1e6:,.1f} Mbps"
    if skipped := sum(machine.bytes_skipped for machine in state.machines):
        text += f", {format_bytes(skipped)} were there already"
    outages = sum(machine.outages for machine in state.machines)
    return f"{text}, {format_count(outages, 'outage')}" if outages else text


class RemoteRunSource:
    """A run in a replica that `ratchet watch` reads repeatedly (see runs/progress_view.py).

    Args:
        store: the replica.
        name: the run's id.
    """

    def __init__(self, store: ReplicaStore, name: str) -> None:
        self.name = name
        self.view, self.sidecar = ProgressView(), SidecarState()
        self.new_events: Sequence[JournalEvent] = ()
        self._store, self._names = store, RunObjectNames(name)
        self._journal = ReplicaJournalReader(store, self._names)

    def refresh(self) -> None:
        """Read the new events and the state. Raises ReplicaError if the replica cannot be read."""
        content, is_restarted = self._journal.read_new()
        if is_restarted:
            self.view = ProgressView()
        self.new_events = [
            event for event, _ in map(parse_line, content.splitlines(keepends=True)) if event is not None
        ]
        for event in self.new_events:
            self.view.update(event)
        self.sidecar = self._read_sidecar()

    def _read_sidecar(self) -> SidecarState:
        state = read_replica_state(self._store, self._names)
        token, step = state.durable
        replication = ReplicationState(
            place=self._store.display_url, token=token, node=state.holder.node if state.holder else "", lock=(0, 0),
            durable_steps=(step,) if step else (), result=state.finished,
        )  # fmt: skip
        return SidecarState(running=_is_trained(state), replica=replication, finished=state.finished)


def _is_trained(state: ReplicaState) -> bool:
    """Return whether a machine holds the run and has reported within SILENT_S.

    The time of a report is by the clock of the machine that reported; it is compared with the clock of this machine.
    """
    if state.holder is None or state.holder.state != "holding" or state.finished:
        return False
    report_times = [machine.last_t for machine in state.machines]
    with suppress(ValueError):  # `since` is only displayed, so it may have any format
        report_times.append(datetime.fromisoformat(state.holder.since).timestamp())
    return time.time() - max(report_times, default=0.0) < SILENT_S


def resolve_replica(machine: Machine, value: str | bool, run: str | None) -> tuple[ReplicaStore, str | None]:
    """Open the replica of `--replica`, and resolve the run. `--replica RUN` names a run in `machine.replica`.

    Args:
        machine: settings with the project's replica.
        value: value of the option; True: the option has no value.
        run: run id, if the command line has it as an argument.

    Raises:
        SettingsError: no replica is set, or its address is not valid.
    """
    url = None if isinstance(value, bool) else value
    if url is not None and run is None and "/" not in url:
        url, run = None, url
    url = parse_replica_option(url) if url else machine.replica
    if url is None:
        problem = f" {run}: without a / this is a run, and its replica is unknown" if run else ": no replica is set"
        raise SettingsError(
            f"{OPTION}{problem}; set machine.replica, or write {OPTION} s3://BUCKET/PREFIX or {OPTION} /FOLDER"
        )
    return ReplicaStore(url, TransferLimits(retry_timeout_s=RETRY_TIMEOUT_S), lambda: False), run


def parse_replica_option(value: str) -> str:
    """Return the replica's address from the value of `--replica`. A relative path becomes absolute.

    Raises:
        SettingsError: the value cannot be the address of a replica, or this machine cannot use that replica.
    """
    url = value if ":/" in value or "::" in value else str(Path(value).expanduser().absolute())
    if problem := find_replica_problem(url) or find_replica_environment_problem(url):
        raise SettingsError(f"{OPTION}: found {strip_credentials(value)!r}; {problem}")
    return url


def find_remote_run(store: ReplicaStore, prefix: str) -> str:
    """Find the only run in a replica whose id begins with a prefix.

    Raises:
        DataError: no run matches, or more than one.
        ReplicaError: the replica cannot be reached.
    """
    return directory.match_prefix(list_remote_runs(store), prefix, "the replica")
