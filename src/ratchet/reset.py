"""`ratchet reset RUN`: remove a run directory, after saying what is lost and asking."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ratchet import files
from ratchet.errors import BusyError, RatchetError, SettingsError
from ratchet.layout import Layout
from ratchet.lock import Lock
from ratchet.records import TrainReport
from ratchet.records_gate import read_champion
from ratchet.run import directory, status
from ratchet.run.directory import RunPaths

AGREEMENT = ("y", "yes")


def reset(layout: Layout, run: str, yes: bool, ask: Callable[[str], str] | None = None) -> str:
    """Remove a run; returns what was done, for the terminal.

    Args:
        layout: the project.
        run: run id, or its beginning.
        yes: do not ask.
        ask: shows a question and returns the answer; by default the terminal.

    Raises:
        DataError: no such run, or several.
        BusyError: it is being trained.
        SettingsError: there is no terminal to ask on.
        StorageError: it cannot be removed.
    """
    remove_leftovers(layout.runs)
    paths = directory.named(layout.runs, run)
    with directory.storage(paths.root), paths.lock().acquire() as lock:
        _require_there(paths, lock)
        text = describe(layout, paths)
        if not yes and not _agreed(text, ask):
            return f"run {paths.root.name} was kept"
        files.remove_sealed(paths.root.resolve())
        if paths.root.is_symlink():  # a run that was moved to a larger disk
            paths.root.unlink()
        files.fsync_directory(layout.runs)
    return f"{text}\nremoved"


def describe(layout: Layout, paths: RunPaths) -> str:
    """What a person should know before a run is removed."""
    progress = status.of(paths)
    name, size = paths.root.name, status.size(_size_bytes(paths.root))
    sealed = "its result is sealed" if (paths.result / files.MANIFEST).is_file() else "it has no result yet"
    lines = [f"run {name}: step {progress.step} of {progress.planned_steps or '?'}, {size}; {sealed}"]
    if _trained_from(layout) == name:
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


def _trained_from(layout: Layout) -> str:
    try:
        return TrainReport.load(layout.train_report).run_id
    except RatchetError:
        return ""  # no report, or none that can be read: no run can be said to be behind it


def _size_bytes(root: Path) -> int:
    """Space on disk; a file with several names counts once."""
    found = (path.lstat() for path in root.rglob("*"))
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in found}.values())


def _require_there(paths: RunPaths, lock: Lock) -> None:
    """Raise BusyError if somebody removed the run while we took its lock."""
    if not directory.holds(lock):
        raise BusyError(f"run {paths.root.name} was removed by somebody else at this moment")


def _agreed(text: str, ask: Callable[[str], str] | None) -> bool:
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
