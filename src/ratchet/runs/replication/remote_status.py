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

from ratchet.config.machine import Machine
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.runs import directory
from ratchet.runs.journal import JournalEvent, JournalReader, parse_line
from ratchet.runs.progress_view import ProgressView, SidecarState
from ratchet.runs.replication import lease, manifests
from ratchet.runs.replication.lease import LeaseRecord
from ratchet.runs.replication.manifests import ReplicaJournalReader
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits, parse_numbers
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.runs.status import SHOWN, Goodput, RunProgress, format_duration, format_size

_PREFIX_PARTS = 2
"""Number of leading parts in an object name: `runs` and the run's id."""


@dataclass(frozen=True)
class ReplicatingMachine:
    """Report of one process that trained the run."""

    node: str
    last_t: float
    """Unix time of its last report, by its own clock."""
    bytes_sent: int
    bytes_skipped: int
    """Size of the content that was in the replica already."""
    send_s: float
    outages: int


@dataclass(frozen=True)
class ReplicaState:
    """State of one run in a replica, besides its journal."""

    durable: tuple[int, int]
    """Token and step of the newest checkpoint, or of the result; zeros without one."""
    finished: bool
    """Whether the replica has the result."""
    holder: LeaseRecord | None
    """The newest claim that holds or held the run."""
    holders: int
    """Number of claims that hold or held the run."""
    machines: tuple[ReplicatingMachine, ...]


@dataclass(frozen=True)
class RemoteRunStatus:
    """Status of one run according to its replica."""

    run_id: str
    progress: RunProgress
    goodput: Goodput
    state: ReplicaState
    durable_t: float | None
    """Unix time at which the newest checkpoint was sealed, by the clock of the machine that sealed it; None when the
    journal lacks it."""
    damaged_lines: int
    """Number of damaged lines in the journal."""


def list_remote_runs(store: ReplicaStore) -> list[str]:
    """Ids of all runs in a replica.

    Raises:
        SettingsError: bucket, credentials or clock are wrong.
        ReplicaError: the replica cannot be reached.
    """
    parts = (name.split("/") for name in store.list("runs", strict=True))
    return sorted({part[1] for part in parts if len(part) > _PREFIX_PARTS and part[0] == "runs"})


def list_held_runs(store: ReplicaStore) -> list[str]:
    """Ids of unfinished runs that a machine holds now. Raises as `list_remote_runs` does."""
    there = ((run, read_replica_state(store, RunObjectNames(run))) for run in list_remote_runs(store))
    return [run for run, found in there if found.holder and found.holder.state == "holding" and not found.finished]


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
    there = read_replica_state(store, names)
    damaged += progress.damaged_events
    return RemoteRunStatus(run, progress, goodput, there, sealed_t.get(there.durable[1]), damaged)


def read_replica_state(store: ReplicaStore, names: RunObjectNames) -> ReplicaState:
    """Read the state of one run except its journal. Raises ReplicaError or SettingsError if the replica cannot be
    read."""
    held = _read_claims(store, names)
    results = list(store.list(names.folder("result")))
    checkpoints = map(_parse_pair, store.list(names.folder("checkpoints")))
    return ReplicaState(
        durable=max((*checkpoints, *_read_results(store, results)), default=(0, 0)),
        finished=bool(results),
        holder=held[-1] if held else None,
        holders=len(held),
        machines=_read_machine_reports(store, names),
    )


def _parse_events(content: bytes) -> tuple[list[JournalEvent], int]:
    """Parse the events of a journal; also return the number of damaged lines."""
    with tempfile.TemporaryDirectory(prefix="ratchet-survey-") as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(content)
        reader = JournalReader(path)
        return list(reader.read()), reader.damaged_lines


def _parse_pair(name: str) -> tuple[int, int]:
    numbers = parse_numbers(name)
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def _read_results(store: ReplicaStore, there: list[str]) -> Iterator[tuple[int, int]]:
    """Yield token and step of each result that can be read."""
    for name in there:
        with suppress(DamagedFileError):
            if numbers := parse_numbers(name):
                yield numbers[0], manifests.read_replica_manifest(store, name).step


def _read_claims(store: ReplicaStore, names: RunObjectNames) -> list[LeaseRecord]:
    """Claims that hold or held the run, ascending by token."""
    read = (LeaseRecord.from_bytes(store.read(names.claim(*key)) or b"") for key in lease.list_keys(store, names))
    return [claim for claim in read if claim is not None and claim.state != "waiting"]


def _read_machine_reports(store: ReplicaStore, names: RunObjectNames) -> tuple[ReplicatingMachine, ...]:
    """Reports of machines that can be read, the newest last."""
    found = []
    for name in store.list(names.folder("nodes")):
        try:
            raw: dict[str, Any] = json.loads(store.read(name) or b"")
            found.append(
                ReplicatingMachine(
                    str(raw["node"]), float(raw["last"]), int(raw["bytes_sent"]), int(raw["bytes_skipped"]),
                    float(raw["send_s"]), int(raw["outages"]),
                )
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            continue  # the report is only displayed; nothing depends on it
    return tuple(sorted(found, key=lambda one: one.last_t))


def summarize_run(found: RemoteRunStatus) -> str:
    """Describe a run in one line."""
    p = found.progress
    steps = f"step {p.step} of {p.planned_steps or '?'}"
    return f"run {found.run_id}: {_describe_state(found)}; {steps}, {_describe_durable(found)}"


def describe_remote_run(found: RemoteRunStatus) -> str:
    """Describe a run in several lines."""
    p = found.progress
    again = f"; {p.lost_steps} step{'s' * (p.lost_steps != 1)} done again" if p.lost_steps else ""
    lines = [
        f"run {found.run_id}: {_describe_state(found)}",
        f"  step        {p.step} of {p.planned_steps or '?'}",
        f"  durable     {_describe_durable(found)}",
        f"  machines    {_describe_machines(found.state)}",
        f"  interrupted {len(p.attempt_ends)} time{'s' * (len(p.attempt_ends) != 1)}{again}",
        *(f"              {end}" for end in p.attempt_ends[-SHOWN:]),
    ]
    if (share := found.goodput.share()) is not None:
        useful, wall = format_duration(found.goodput.useful_s), format_duration(found.goodput.wall_s())
        kept = f"steps that count took {useful} of {wall}"
        lines.append(f"  goodput     {share:.1%}: {kept}")
    if found.state.machines:
        lines.append(f"  upload      {_describe_upload(found.state)}")
    lines += [f"  alert       {text}" for text in p.alerts[-SHOWN:]]
    lines += [f"  notice      {text}" for text in p.notices[-SHOWN:]]
    if found.damaged_lines:
        lines.append(f"  notice      {found.damaged_lines} damaged journal line(s) skipped")
    return "\n".join(lines)


def _describe_state(found: RemoteRunStatus) -> str:
    if found.state.finished:
        return f"finished ({found.progress.finished or 'its result is in the replica'})"
    holder = found.state.holder
    if holder is None:
        return "not begun"
    if holder.state == "released":
        ended = f": {found.progress.attempt_ends[-1]}" if found.progress.attempt_ends else ""
        state = "stopped" if found.progress.attempts else "not begun"
        return f"{state}; machine {holder.node} has released it{ended}"
    return f"held by machine {holder.node} since {holder.since}"


def _describe_durable(found: RemoteRunStatus) -> str:
    if not found.state.durable[1]:
        return "no checkpoint yet"
    age = "" if found.durable_t is None else f", sealed {format_duration(max(0.0, time.time() - found.durable_t))} ago"
    return f"step {found.state.durable[1]}{age}"


def _describe_machines(found: ReplicaState) -> str:
    if not found.machines:
        return _describe_holders(found)
    last = found.machines[-1]
    heard = format_duration(max(0.0, time.time() - last.last_t))
    return f"{_describe_holders(found)}; {last.node} reported last, {heard} ago"


def _describe_holders(found: ReplicaState) -> str:
    """Describe how many machines held the run, and how often. One machine may hold it several times."""
    return f"{len(found.machines)}, which have held it {found.holders} time{'s' * (found.holders != 1)}"


def _describe_upload(found: ReplicaState) -> str:
    sent, seconds = (
        sum(one.bytes_sent for one in found.machines),
        sum(one.send_s for one in found.machines),
    )
    text = f"{format_size(sent)} sent"
    if seconds:
        text += f" at {8 * sent / seconds / 1e6:,.1f} Mbps"
    if skipped := sum(one.bytes_skipped for one in found.machines):
        text += f", {format_size(skipped)} were there already"
    outages = sum(one.outages for one in found.machines)
    return f"{text}, {outages} outage{'s' * (outages != 1)}" if outages else text


SILENT_S = 300.0
"""Time without a report after which the holder of a run is not shown as training."""


class RemoteRunSource:
    """A run in a replica that is read repeatedly (see runs/progress_view.py).

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
        """Read what is new. Raises ReplicaError if the replica cannot be read."""
        content, is_restarted = self._journal.read_new()
        if is_restarted:
            self.view = ProgressView()
        self.new_events = [
            event for event, _ in map(parse_line, content.splitlines(keepends=True)) if event is not None
        ]
        for event in self.new_events:
            self.view.update(event)
        self.sidecar = self._aside()

    def _aside(self) -> SidecarState:
        found = read_replica_state(self._store, self._names)
        token, step = found.durable
        noted = ReplicationState(
            place=self._store.display_url, token=token, node=found.holder.node if found.holder else "", lock=(0, 0),
            durable_steps=(step,) if step else (), result=found.finished,
        )  # fmt: skip
        return SidecarState(running=_is_trained(found), replica=noted, finished=found.finished)


def _is_trained(found: ReplicaState) -> bool:
    """Whether a machine holds the run and has reported within SILENT_S, by its own clock."""
    if found.holder is None or found.holder.state != "holding" or found.finished:
        return False
    signs = [one.last_t for one in found.machines]
    with suppress(ValueError):  # `since` is only displayed, so it may have any format
        signs.append(datetime.fromisoformat(found.holder.since).timestamp())
    return time.time() - max(signs, default=0.0) < SILENT_S


RETRY_TIMEOUT_S = 30.0
"""How long a call of an interactive command is retried."""
OPTION = "--replica"


def resolve_replica(machine: Machine, words: str | bool, run: str | None) -> tuple[ReplicaStore, str | None]:
    """Open the replica and resolve the run in it. `--replica RUN` is a run in the project's own replica.

    Args:
        machine: settings with the project's replica.
        words: value of the option; True: it has no value.
        run: run id that was given as an argument.

    Raises:
        SettingsError: no replica is set, or it cannot be opened.
    """
    url = None if isinstance(words, bool) else words
    if url is not None and run is None and "/" not in url:
        url, run = None, url
    url = url or machine.replica
    if url is None:
        meaning = f" {run}: without a / this is a run, and its replica is unknown" if run else ": no replica is set"
        raise SettingsError(
            f"{OPTION}{meaning}; set machine.replica, or write {OPTION} s3://BUCKET/PREFIX or {OPTION} /FOLDER"
        )
    return ReplicaStore(url, TransferLimits(retry_timeout_s=RETRY_TIMEOUT_S), lambda: False), run


def find_remote_run(store: ReplicaStore, prefix: str) -> str:
    """Find the only run in a replica whose id begins with a prefix.

    Raises:
        DataError: no run matches, or more than one.
        ReplicaError: the replica cannot be reached.
    """
    return directory.match_prefix(list_remote_runs(store), prefix, "the replica")
