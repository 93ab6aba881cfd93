"""`ratchet reset RUN`: remove the directory of a training or generation, or a run from a mirror, after saying what is
lost and asking."""

import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ratchet.config.schema import Machine
from ratchet.errors import LockHeldError, RatchetError, SettingsError
from ratchet.runs import directory, status
from ratchet.runs.directory import RunPaths
from ratchet.runs.log import print_message
from ratchet.runs.progress_view import is_generation
from ratchet.runs.replication import remote_status
from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.object_names import RunObjectNames
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.gate import read_champion

AGREEMENT = ("y", "yes")


def reset(layout: ProjectLayout, run: str | None, yes: bool, ask: Callable[[str], str] | None = None) -> str:
    """Remove a run; returns what was done, for the terminal.

    Args:
        layout: the project.
        run: run id, or its beginning; None is refused.
        yes: do not ask.
        ask: shows a question and returns the answer; by default the terminal.

    Raises:
        DataError: no such run, or several.
        LockHeldError: it goes on now.
        SettingsError: no run named, or no terminal to ask on.
        StorageError: it cannot be removed.
    """
    if run is None:
        raise SettingsError("reset: which run? Name it by its id or its beginning; `ratchet status` shows the latest")
    for folder in (layout.runs, layout.generations):
        remove_leftovers(folder)
    paths = directory.find_run((layout.runs, layout.generations), run)
    with directory.storage_errors(paths.root), paths.lock().acquire() as lock:
        _require_exists(paths, lock)
        text = describe(layout, paths)
        if not yes and not _confirm(text, ask):
            return f"run {paths.root.name} was kept"
        files.remove_sealed(paths.root.resolve())
        if paths.root.is_symlink():  # a run that was moved to a larger disk
            paths.root.unlink()
        files.fsync_directory(paths.root.parent)
    return f"{text}\nremoved"


def reset_replica(
    machine: Machine, words: str | bool, run: str | None, yes: bool, ask: Callable[[str], str] | None = None
) -> str:
    """Remove a run from a mirror; its directories on machines stay. Returns what was done, for the terminal.

    Nobody may be training it: its claim is taken first, which waits until that of a machine that is gone has run out.

    Args:
        machine: settings of the project, or those of a new one.
        words: what followed `--mirror`: a URL, the beginning of a run's id, or True: nothing.
        run: the beginning of a run's id.
        yes: do not ask.
        ask: as of `reset`.

    Raises:
        DataError: no such run there, or several.
        LeaseHeldError: a machine trains it.
        SettingsError: no mirror, no run named, or no terminal to ask on.
        MirrorError: the mirror cannot be reached.
    """
    store, prefix = remote_status.resolve_mirror(machine, words, run)
    if prefix is None:
        raise SettingsError("reset --mirror: which run? Name it by its id or its beginning; `ratchet status --mirror`")
    names = RunObjectNames(remote_status.find_remote_run(store, prefix))
    text = remote_status.describe_remote_run(store, names.run_id)
    if not yes and not _confirm(text, ask):
        return f"run {names.run_id} was kept"
    lease = ReplicaLease(store, names, f"reset-{secrets.token_hex(4)}", machine.lease_s)
    lease.take(lambda: False, print_message)
    try:
        there = store.list(names.root)
        claimed = [name for name in there if name.startswith(f"{names.folder('claims')}/")]
        # Checkpoints before what they are made of: a reader who comes now finds none rather than a broken one.
        for kind in ("result", "checkpoints", "journal"):
            store.remove([name for name in there if name.startswith(f"{names.folder(kind)}/")])
        store.remove([name for name in there if name not in claimed])
    finally:
        lease.release()
    store.remove(claimed)
    return f"{text}\nremoved from the mirror"


def describe(layout: ProjectLayout, paths: RunPaths) -> str:
    """What a person should know before a run is removed."""
    progress = status.read_progress(paths)
    name, size = paths.root.name, status.format_size(_size_bytes(paths.root))
    sealed = "its result is sealed" if (paths.result / files.MANIFEST).is_file() else "it has no result yet"
    if is_generation(paths):
        done = f"{progress.step:,} of {format(progress.planned_steps, ',') if progress.planned_steps else '?'} answers"
        return f"generation {name}: {done}, {size}; {sealed}\n  files that it was written to stay as they are"
    lines = [f"run {name}: step {progress.step} of {progress.planned_steps or '?'}, {size}; {sealed}"]
    if _trained_run_id(layout) == name:
        lines.append("  experiments/train comes from it: those files stay, but the run cannot be gone on with")
    champions = read_champion(layout.champion)
    if champions.champion is not None and champions.champion.run_id == name:
        lines.append("  the champion comes from it: the promoted model stays in mlruns/")
    elif name in (champion.run_id for champion in champions.previous):
        lines.append("  an earlier champion comes from it: the promoted model stays in mlruns/")
    return "\n".join(lines)


def remove_leftovers(runs: Path) -> None:
    """Finish what a killed `reset` began: directories that are renamed aside already."""
    for path in runs.glob(f"{files.PARTIAL}*-doomed-*"):
        if not Path("/proc", path.name.rsplit("-", 1)[1]).exists():
            shutil.rmtree(path, ignore_errors=True)


def _trained_run_id(layout: ProjectLayout) -> str:
    try:
        return TrainReport.load(layout.train_report).run_id
    except RatchetError:
        return ""  # no report, or none that can be read: no run can be said to be behind it


def _size_bytes(root: Path) -> int:
    """Space on disk; a file with several names counts once."""
    found = (path.lstat() for path in root.rglob("*"))
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in found}.values())


def _require_exists(paths: RunPaths, lock: FileLock) -> None:
    """Raise LockHeldError if somebody removed the run while we took its lock."""
    if not directory.is_lock_current(lock):
        raise LockHeldError(f"run {paths.root.name} was removed by somebody else at this moment")


def _confirm(text: str, ask: Callable[[str], str] | None) -> bool:
    """Ask. Raises SettingsError when nobody can answer."""
    if ask is None:
        if not sys.stdin.isatty():
            raise SettingsError(f"{text}\n  nothing was removed: there is no terminal to ask on; --yes removes it")
        ask = input
    try:
        answer = ask(f"{text}\nremove it for good? [y/N] ")
    except EOFError:
        answer = ""
    return answer.strip().lower() in AGREEMENT
