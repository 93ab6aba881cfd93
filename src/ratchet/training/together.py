"""How ranks begin: they make sure that they train the same thing, and from the same checkpoint.

Every machine keeps the whole run. One that was away, or is new, gets the newest checkpoint from one that has it: no
shared disk is needed, and whichever machines are left can go on.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratchet import digest, files
from ratchet.errors import SettingsError
from ratchet.run import mirrored
from ratchet.run.directory import CHECKPOINT, RunPaths
from ratchet.run.journal import Decisions
from ratchet.training.alike import NEEDED, difference
from ratchet.training.ranks import PIECE_BYTES, Ranks
from ratchet.training.sealed import read_sealed


def require_alike(ranks: Ranks, told: dict[str, Any]) -> None:
    """Raise SettingsError, on every rank, unless all say the same about what they train with, and with what.

    Args:
        ranks: all of them.
        told: JSON, as `alike.difference` takes it.
    """
    everybody = ranks.gather_json({"host": socket.gethostname(), "told": told})
    first = everybody[0]
    for rank, other in enumerate(everybody):
        if found := difference(first["told"], other["told"]):
            raise SettingsError(
                f"ranks 0 (on {first['host']}) and {rank} (on {other['host']}) would train different things: {found}. "
                f"{NEEDED}"
            )


def meet(ranks: Ranks, paths: RunPaths, own: Path | None) -> Path | None:
    """The checkpoint that all go on from: the newest that any of them has; None when there is none.

    It then lies in every machine's run directory, with those that its state refers to.

    Args:
        ranks: all of them.
        paths: the run, on this machine.
        own: the newest valid checkpoint here.
    """
    if ranks.alone:
        return own
    sealed = read_sealed(own) if own else None
    mine = [sealed.state.step, files.read_manifest(own).digest] if own and sealed else [0, ""]
    there = ranks.gather_json(mine)
    newest = max(step for step, _ in there)
    if not newest:
        return None
    source = next(rank for rank, (step, _) in enumerate(there) if step == newest)
    if any(one != there[source] for one in there):
        wanted = [newest, *sorted(sealed.state.refers_to)] if sealed and ranks.place.rank == source else []
        lacks = ranks.place.writes and mine != there[source]
        for step in ranks.gather_json(wanted)[source]:
            _copy(ranks, source, paths.checkpoint(step), lacks)
    return paths.checkpoint(newest)


def _copy(ranks: Ranks, source: int, folder: Path, lacks: bool) -> None:
    """A sealed directory of the source, sealed in the same place wherever it is lacking."""
    sends = ranks.place.rank == source
    own = {name: list(entry) for name, entry in files.read_manifest(folder).files.items()} if sends else {}
    entries = ranks.gather_json(own)[source]
    known = {name: (str(found), int(size)) for name, (found, size) in entries.items()}
    if not lacks:
        for name, (_, size) in known.items():
            for _ in _blocks(ranks, source, folder / name if sends else None, size):
                pass  # others write it
        return
    if folder.exists():
        files.remove_sealed(folder)
    files.make_directory(folder.parent)
    with files.sealed_directory(folder, CHECKPOINT, known) as scratch:
        for name, (expected, size) in known.items():
            target = scratch / name
            files.write_blocks(target, ([block] for block in _blocks(ranks, source, None, size)))
            if digest.of_file(target) != expected:
                raise OSError(f"{folder.name}/{name}: not what rank {source} has: it was changed on its way")


def _blocks(ranks: Ranks, source: int, path: Path | None, size: int) -> Iterator[bytes]:
    stream = path.open("rb") if path else None
    try:
        for start in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - start)
            yield ranks.send_block(source, stream.read(length) if stream else None, length)
    finally:
        if stream:
            stream.close()


def machines(ranks: Ranks, paths: RunPaths) -> list[str]:
    """The supervisors of all machines that keep a mirror, by the names under which they claim the run there.

    Args:
        ranks: all of them.
        paths: the run, on this machine.
    """
    noted = mirrored.read(paths)
    return sorted({name for name in ranks.gather_json(noted.node if noted else "") if name})


def decided(ranks: Ranks, own: Decisions) -> Decisions:
    """What the run has decided before, as the rank knows it that knows most: a new machine has no journal of it."""
    told = ranks.gather_json(
        {
            "budgets": [[phase, step, data] for (phase, step), data in own.budgets.items()],
            "skipped": [[step, data] for step, data in own.skipped.items()],
        }
    )
    most = max(told, key=lambda one: len(one["budgets"]) + len(one["skipped"]))
    budgets = {(phase, step): data for phase, step, data in most["budgets"]}
    return Decisions(budgets, dict(most["skipped"]))
