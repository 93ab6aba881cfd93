"""What a mirror tells of its runs, to somebody who has nothing but the mirror."""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ratchet.config.schema import Machine
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.runs import directory
from ratchet.runs.journal import JournalEvent, JournalReader, parse_line
from ratchet.runs.progress_view import ProgressView
from ratchet.runs.replication import lease, manifests
from ratchet.runs.replication.lease import LeaseRecord
from ratchet.runs.replication.manifests import ReplicaJournalReader
from ratchet.runs.replication.object_names import RunObjectNames, parse_numbers
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.runs.run_source import SidecarState
from ratchet.runs.status import SHOWN, Goodput, RunProgress, format_duration, format_size

_KINDS = 2
"""Parts of a name before the run's id and what is below it."""


@dataclass(frozen=True)
class ReplicatingMachine:
    """What one process that trained the run has reported of itself."""

    node: str
    last_t: float
    """Unix time of its last report, by its own clock."""
    bytes_sent: int
    bytes_skipped: int
    """Of content that was in the mirror already."""
    send_s: float
    outages: int


@dataclass(frozen=True)
class ReplicaState:
    """Of one run all that its journal does not tell."""

    durable: tuple[int, int]
    """Token and step of the newest checkpoint, or of the result; zeros before there is one."""
    finished: bool
    """Whether the result is there."""
    holder: LeaseRecord | None
    """The newest claim that holds, or held, the run."""
    holders: int
    """How many tokens were handed out and used."""
    machines: tuple[ReplicatingMachine, ...]


@dataclass(frozen=True)
class RemoteRunStatus:
    """One run, as far as it has arrived."""

    progress: RunProgress
    goodput: Goodput
    standing: ReplicaState
    durable_t: float | None
    """Unix time at which the newest checkpoint was sealed, by the clock of the machine that sealed it; None when the
    journal lacks it."""
    damaged_lines: int
    """Of the journal."""


def list_remote_runs(store: ReplicaStore) -> list[str]:
    """Ids of all runs in a mirror, for somebody who waits.

    Raises:
        SettingsError: bucket, credentials or clock are wrong.
        MirrorError: it cannot be reached.
    """
    parts = (name.split("/") for name in store.list("runs", strict=True))
    return sorted({part[1] for part in parts if len(part) > _KINDS and part[0] == "runs"})


def list_held_runs(store: ReplicaStore) -> list[str]:
    """Ids of those that a machine holds now, and that have no result. Raises as `list_remote_runs` does."""
    there = ((run, read_replica_state(store, RunObjectNames(run))) for run in list_remote_runs(store))
    return [run for run, found in there if found.holder and found.holder.state == "holding" and not found.finished]


def read_remote_run(store: ReplicaStore, run: str) -> RemoteRunStatus:
    """Read one run. Raises MirrorError, SettingsError when the mirror cannot be read."""
    names = RunObjectNames(run)
    progress, goodput, sealed_t = RunProgress(), Goodput(), dict[object, float]()
    events, damaged = _parse_events(manifests.recover_journal(store, names).content)
    for event in events:
        progress.see(event)
        goodput.see(event)
        if event.kind == "checkpoint":
            sealed_t[event.data.get("step")] = event.t
    there = read_replica_state(store, names)
    damaged += progress.damaged_events
    return RemoteRunStatus(progress, goodput, there, sealed_t.get(there.durable[1]), damaged)


def read_replica_state(store: ReplicaStore, names: RunObjectNames) -> ReplicaState:
    """Read all of one run but its journal. Raises MirrorError, SettingsError when the mirror cannot be read."""
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
    """Those of a journal, and how many lines were damaged."""
    with tempfile.TemporaryDirectory(prefix="ratchet-survey-") as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(content)
        reader = JournalReader(path)
        return list(reader.read()), reader.damaged_lines


def _parse_pair(name: str) -> tuple[int, int]:
    numbers = parse_numbers(name)
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def _read_results(store: ReplicaStore, there: list[str]) -> Iterator[tuple[int, int]]:
    """Token and step of those that can be read."""
    for name in there:
        with suppress(DamagedFileError):
            if numbers := parse_numbers(name):
                yield numbers[0], manifests.read_replica_manifest(store, name).step


def _read_claims(store: ReplicaStore, names: RunObjectNames) -> list[LeaseRecord]:
    """Of those who hold or held the run, by token."""
    read = (LeaseRecord.from_bytes(store.read(names.claim(*key)) or b"") for key in lease.list_keys(store, names))
    return [claim for claim in read if claim is not None and claim.state != "waiting"]


def _read_machine_reports(store: ReplicaStore, names: RunObjectNames) -> tuple[ReplicatingMachine, ...]:
    """All reports that can be read, the newest last."""
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
            continue  # a report for people, and nothing depends on it
    return tuple(sorted(found, key=lambda one: one.last_t))


def summarize_run(store: ReplicaStore, run: str) -> str:
    """A run in one line."""
    found = read_remote_run(store, run)
    p = found.progress
    return f"run {run}: {_describe_state(found)}; step {p.step} of {p.planned_steps or '?'}, {_describe_durable(found)}"


def describe_remote_run(store: ReplicaStore, run: str) -> str:
    """What `ratchet status --mirror URL RUN` prints."""
    found = read_remote_run(store, run)
    p = found.progress
    again = f"; {p.lost_steps} step{'s' * (p.lost_steps != 1)} done again" if p.lost_steps else ""
    lines = [
        f"run {run}: {_describe_state(found)}",
        f"  step        {p.step} of {p.planned_steps or '?'}",
        f"  durable     {_describe_durable(found)}",
        f"  machines    {_describe_machines(found.standing)}",
        f"  interrupted {len(p.ends)} time{'s' * (len(p.ends) != 1)}{again}",
        *(f"              {end}" for end in p.ends[-SHOWN:]),
    ]
    if (share := found.goodput.share()) is not None:
        useful, wall = format_duration(found.goodput.useful_s), format_duration(found.goodput.wall_s())
        kept = f"steps that count took {useful} of {wall}"
        lines.append(f"  goodput     {share:.1%}: {kept}")
    if found.standing.machines:
        lines.append(f"  upload      {_describe_upload(found.standing)}")
    lines += [f"  alert       {text}" for text in p.alerts[-SHOWN:]]
    lines += [f"  notice      {text}" for text in p.notices[-SHOWN:]]
    if found.damaged_lines:
        lines.append(f"  notice      {found.damaged_lines} damaged journal line(s) skipped")
    return "\n".join(lines)


def _describe_state(found: RemoteRunStatus) -> str:
    if found.standing.finished:
        return f"finished ({found.progress.finished or 'its result is in the mirror'})"
    holder = found.standing.holder
    if holder is None:
        return "not begun"
    if holder.state == "released":
        ended = f": {found.progress.ends[-1]}" if found.progress.ends else ""
        state = "stopped" if found.progress.attempts else "not begun"
        return f"{state}; machine {holder.node} has released it{ended}"
    return f"held by machine {holder.node} since {holder.since}"


def _describe_durable(found: RemoteRunStatus) -> str:
    if not found.standing.durable[1]:
        return "no checkpoint yet"
    age = "" if found.durable_t is None else f", sealed {format_duration(max(0.0, time.time() - found.durable_t))} ago"
    return f"step {found.standing.durable[1]}{age}"


def _describe_machines(found: ReplicaState) -> str:
    if not found.machines:
        return _describe_holders(found)
    last = found.machines[-1]
    heard = format_duration(max(0.0, time.time() - last.last_t))
    return f"{_describe_holders(found)}; {last.node} reported last, {heard} ago"


def _describe_holders(found: ReplicaState) -> str:
    """One machine may have had the run several times."""
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


# A run in a mirror, for somebody who looks at it again and again from any machine.

SILENT_S = 300.0
"""A machine that holds a run, and has not reported for so long, is not thought to train it."""


class RemoteRunSource:
    """One run in a mirror; see run/attached.py.

    Args:
        store: the mirror.
        name: the run's id.
    """

    def __init__(self, store: ReplicaStore, name: str) -> None:
        self.name = name
        self.vitals, self.aside = ProgressView(), SidecarState()
        self.new: Sequence[JournalEvent] = ()
        self._store, self._names = store, RunObjectNames(name)
        self._journal = ReplicaJournalReader(store, self._names)

    def look(self) -> None:
        """Take in what has arrived since the last time. Raises MirrorError when the mirror cannot be read."""
        content, anew = self._journal.look()
        if anew:
            self.vitals = ProgressView()
        self.new = [event for event, _ in map(parse_line, content.splitlines(keepends=True)) if event is not None]
        for event in self.new:
            self.vitals.see(event)
        self.aside = self._aside()

    def _aside(self) -> SidecarState:
        found = read_replica_state(self._store, self._names)
        token, step = found.durable
        noted = ReplicationState(
            place=self._store.shown, token=token, node=found.holder.node if found.holder else "", lock=(0, 0),
            durable_steps=(step,) if step else (), result=found.finished,
        )  # fmt: skip
        return SidecarState(running=_is_trained(found), mirror=noted, finished=found.finished)


def _is_trained(found: ReplicaState) -> bool:
    """Whether a machine holds the run, and has given a sign of life lately, by its own clock."""
    if found.holder is None or found.holder.state != "holding" or found.finished:
        return False
    signs = [one.last_t for one in found.machines]
    with suppress(ValueError):  # for people, and so in any form
        signs.append(datetime.fromisoformat(found.holder.since).timestamp())
    return time.time() - max(signs, default=0.0) < SILENT_S


# Which mirror, and which run in it, somebody means on a command line.

PATIENCE_S = 30.0
"""Of somebody who waits for an answer."""
OPTION = "--mirror"


def resolve_mirror(machine: Machine, words: str | bool, run: str | None) -> tuple[ReplicaStore, str | None]:
    """The mirror, opened, and what was said of a run in it. `--mirror RUN` is a run in the project's own mirror.

    Args:
        machine: names the project's mirror.
        words: what followed the option; True: nothing did.
        run: named beside it.

    Raises:
        SettingsError: no mirror is named anywhere, or it cannot be opened.
    """
    url = None if isinstance(words, bool) else words
    if url is not None and run is None and "/" not in url:
        url, run = None, url
    url = url or machine.mirror
    if url is None:
        meant = f" {run}: is taken for a run, since no / is in it; in which mirror" if run else ": which one"
        raise SettingsError(
            f"{OPTION}{meant}? Set machine.mirror, or name it: {OPTION} s3://BUCKET/PREFIX, {OPTION} /FOLDER"
        )
    return ReplicaStore(url, TransferLimits(patience_s=PATIENCE_S), lambda: False), run


def find_remote_run(store: ReplicaStore, prefix: str) -> str:
    """The one run in a mirror whose id begins so.

    Raises:
        DataError: there is none, or more than one.
        MirrorError: the mirror cannot be reached.
    """
    return directory.match_prefix(list_remote_runs(store), prefix, "the mirror")
