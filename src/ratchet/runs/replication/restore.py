"""What is fetched from a mirror: how much of it has come is told now and then, and a request to stop ends it."""

import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.errors import DamagedFileError, InterruptedRunError, SettingsError
from ratchet.runs import status
from ratchet.runs.directory import CHECKPOINT, BaseRunSpec, Run, RunPaths, spec_identity
from ratchet.runs.replication import manifests
from ratchet.runs.replication.lease import Origin
from ratchet.runs.replication.manifests import ReplicaManifest
from ratchet.runs.replication.object_names import RunObjectNames, parse_numbers
from ratchet.runs.replication.store import ReplicaStore
from ratchet.storage import files
from ratchet.storage.records.base import find_differing_keys

TOLD_EVERY_S = 5.0


class DownloadProgress:
    """Of one sealed directory after the other.

    Args:
        run_id: what is fetched belongs to.
        stopping: asked at each piece, whether to break off.
        tell: told now and then, in words.
    """

    def __init__(self, run_id: str, stopping: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self._run_id, self._stopping, self._tell = run_id, stopping, tell
        self._what, self._expected_bytes, self._come_bytes = "", 0, 0
        self._told_s = time.monotonic()

    def expect(self, what: str, size: int) -> None:
        """From now on come the `size` bytes of `what`."""
        self._what, self._expected_bytes, self._come_bytes = what, size, 0

    def come(self, count: int) -> None:
        """So many bytes more. Raises InterruptedRunError when asked to stop."""
        if self._stopping():
            raise InterruptedRunError(f"run {self._run_id}: stopped while it was fetched from its mirror; repeat")
        self._come_bytes = min(self._expected_bytes, self._come_bytes + count)  # what was wrong comes again
        if (now := time.monotonic()) - self._told_s >= TOLD_EVERY_S:
            self._told_s = now
            of = f"{status.format_size(self._come_bytes)} of {status.format_size(self._expected_bytes)}"
            self._tell(f"{self._what}: {of} fetched from the mirror")


# Brings a run directory to where its mirror stands: the machine that was here before is gone, and its disk with it.

SUPERSEDED = "superseded-"
"""What this machine had of a run that another one has gone on with since: the last time that this happened."""


@dataclass(frozen=True)
class RestoreSource:
    """A mirror that a run is brought from, and what was found on the way."""

    store: ReplicaStore
    names: RunObjectNames
    arrival: DownloadProgress
    notices: list[str] = field(default_factory=list)
    """What a person should know: of everything that is passed over, why."""
    damaged: set[str] = field(default_factory=set)
    """Objects that are not what they are called: as long as they are there, nobody sends them again."""

    def fetch(self, sealed: ReplicaManifest, target: Path) -> None:
        """See `documents.fetch`. Raises InterruptedRunError as well."""
        self.arrival.expect(f"{sealed.kind} of step {sealed.step}", sealed.size_bytes)
        manifests.fetch_sealed(self.store, self.names, sealed, target, self.damaged, self.arrival.come)


@dataclass(frozen=True)
class RestoreResult:
    """What was brought here."""

    step: int | None
    """Of the checkpoint; None: the mirror had no whole one."""
    steps: tuple[int, ...]
    """Of that and those that it refers to."""
    origin: Origin | None
    """Of the journal."""
    put_back: bool = False
    """Whether what was here goes on."""


def require_same_spec(store: ReplicaStore, names: RunObjectNames, spec: BaseRunSpec) -> bool:
    """Whether the mirror has this run. Raises SettingsError when what lies in its place is something else."""
    data = store.read(names.spec)
    if data is None:
        if strange := sorted(store.list(names.folder("objects"))):
            raise SettingsError(
                f"machine.mirror: {strange[0]} is there, but no {names.spec}: this is no mirror of a run, or somebody "
                f"removed a part of it; name another place, or `ratchet reset --mirror {names.run_id}`"
            )
        return False
    ours = spec.model_dump(mode="json")
    try:
        differences = find_differing_keys(spec_identity(json.loads(data)), spec_identity(ours))
    except (ValueError, TypeError, AttributeError):
        raise SettingsError(
            f"machine.mirror: {names.spec} is no spec of a run; name another place, or "
            f"`ratchet reset --mirror {names.run_id}`"
        ) from None
    if differences:
        raise SettingsError(
            f"machine.mirror: {names.spec} is of another run, it differs in {', '.join(differences)}: another version "
            "or project wrote it; name another place"
        )
    return True


def find_newest_step(store: ReplicaStore, names: RunObjectNames) -> tuple[int, int]:
    """Token and step of the last checkpoint in the mirror; (0, 0) when there is none."""
    return max(_list_checkpoints(store, names), default=(0, 0))


def has_result(store: ReplicaStore, names: RunObjectNames) -> bool:
    """Whether the mirror has a result whole, by names and sizes of its objects; none is read."""
    there = {name.rsplit("/", 1)[-1]: size for name, size in store.list(names.folder("objects")).items()}
    for name in store.list(names.folder("result")):
        for token in parse_numbers(name):
            with suppress(DamagedFileError):
                entries = manifests.read_replica_manifest(store, names.result(token)).files.values()
                if all(there.get(sha) == size for sha, size in entries):
                    return True
    return False


def restore_result(run: Run, source: RestoreSource) -> int | None:
    """Fetch the sealed result; returns its token, or None when the mirror has no whole one."""
    store, names = source.store, source.names
    for token in sorted(
        (n[0] for name in store.list(names.folder("result")) if (n := parse_numbers(name))), reverse=True
    ):
        try:
            source.fetch(manifests.read_replica_manifest(store, names.result(token)), run.paths.result)
        except DamagedFileError as error:
            source.notices.append(f"the result in the mirror is passed over: {error}")
        else:
            restore_journal(run, store, names)
            return token
    return None


def restore_checkpoint(paths: RunPaths, source: RestoreSource) -> tuple[int, ...]:
    """Fetch the newest whole checkpoint by token and step, and before it those that it refers to.

    Args:
        paths: a run directory without checkpoints that are newer than the mirror's.
        source: where from; told of each that is passed over.

    Returns:
        The steps that were fetched, that of the checkpoint last; empty when none is whole.

    Raises:
        MirrorError: the mirror does not answer.
    """
    passed = set[tuple[int, int]]()
    while there := set(_list_checkpoints(source.store, source.names)) - passed:  # looked for anew: a holder may tidy up
        token, step = max(there)
        passed.add((token, step))
        try:
            wanted = _collect_manifests(source.store, source.names, token, step)
            for one in wanted:
                source.fetch(one, paths.checkpoint(one.step))
        except DamagedFileError as error:
            source.notices.append(f"checkpoint of step {step} in the mirror is passed over: {error}")
        else:
            return tuple(one.step for one in wanted)
    return ()


def restore_journal(run: Run, store: ReplicaStore, names: RunObjectNames) -> Origin | None:
    """Replace the journal by the mirror's; returns whose it is."""
    found = manifests.recover_journal(store, names)
    if found.origin is not None:
        files.write_atomic(run.paths.journal, found.content)
        run.journal.reopen()
    return found.origin


def set_aside(run: Run) -> set[str]:
    """Take this machine's checkpoints and journal out of the way; they stay beside, for a person to look at.

    Returns the names that they have now.
    """
    paths, names = run.paths, set[str]()
    for path in map(paths.checkpoint, paths.checkpoint_steps()):
        names.add(name := f"{SUPERSEDED}{path.name}")
        files.publish_directory(path, path.with_name(name))
    if paths.journal.exists() and paths.journal.stat().st_size:
        names.add(name := f"{SUPERSEDED}{paths.journal.name}")
        files.write_atomic(paths.journal.with_name(name), paths.journal.read_bytes())
        files.write_atomic(paths.journal, b"")
        run.journal.reopen()
    return names


def _put_back(run: Run, names: Collection[str]) -> None:
    """Undo `set_aside`."""
    for folder in (run.paths.checkpoints, run.paths.root):
        for path in [folder / name for name in names if (folder / name).exists()]:
            files.publish_directory(path, path.with_name(path.name.removeprefix(SUPERSEDED)))
    run.journal.reopen()


def remove_superseded(paths: RunPaths, but: Collection[str] = ()) -> None:
    """Remove what was set aside, except what has one of these names. Raises OSError."""
    for folder in (paths.checkpoints, paths.root):
        for path in folder.glob(f"{SUPERSEDED}*"):
            if path.name not in but:
                files.remove_sealed(path)


def restore_all(run: Run, source: RestoreSource) -> RestoreResult:
    """Take over the mirror's state: what is here is set aside first, and put back if the mirror has nothing whole."""
    ours, aside = find_valid_step(run.paths), set_aside(run)
    steps = restore_checkpoint(run.paths, source)
    if ours and not steps:
        _put_back(run, aside)
        return RestoreResult(None, (), None, put_back=True)
    origin = restore_journal(run, source.store, source.names)
    if aside:  # one set is enough
        remove_superseded(run.paths, aside)
    return RestoreResult(steps[-1] if steps else None, steps, origin)


def find_valid_step(paths: RunPaths) -> int:
    """The newest step whose checkpoint here is whole, with those that it refers to; 0: none."""
    for step in reversed(paths.checkpoint_steps()):
        try:
            files.verify_sealed(paths.checkpoint(step), CHECKPOINT)
            for other in manifests.build_checkpoint_manifest(paths.checkpoint(step)).refers_to:
                files.verify_sealed(paths.checkpoint(other), CHECKPOINT)
        except DamagedFileError:
            continue
        return step
    return 0


def _list_checkpoints(store: ReplicaStore, names: RunObjectNames) -> list[tuple[int, int]]:
    found = map(parse_numbers, store.list(names.folder("checkpoints")))
    return [(numbers[0], numbers[1]) for numbers in found if len(numbers) == 2]


def _collect_manifests(store: ReplicaStore, names: RunObjectNames, token: int, step: int) -> list[ReplicaManifest]:
    """Documents of a checkpoint and of those that it refers to, itself last."""
    document = manifests.read_replica_manifest(store, names.checkpoint(token, step))
    if document.kind != CHECKPOINT or document.step != step:
        raise DamagedFileError(f"{names.checkpoint(token, step)}: is of a {document.kind} of step {document.step}")
    return [
        *(manifests.read_replica_manifest(store, names.checkpoint(token, other)) for other in document.refers_to),
        document,
    ]
