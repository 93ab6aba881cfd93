"""Tests of machine crashes at every point of a save, and of disk errors at every operation.

In every case the run resumes from the previous or the new checkpoint, bit-exact.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import snapshots
from crash_points_cases import (
    SCENARIOS,
    as_made,  # noqa: F401 (a fixture)
    choose_disk,
    damaged_newest,
    operations,
    prepared,
    quick_disk,  # noqa: F401 (a fixture)
    recover,
    save_and_rotate,
    saves,
)
from ratchet.runs.directory import RunPaths
from ratchet.storage import files
from ratchet.training import checkpoint
from snapshots import contents, newest, save

SEED = int(os.environ.get("RATCHET_TEST_SEED", "5"))
SMALL: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], set[str]]] = {
    "write_atomic": (
        lambda root: files.write_atomic(root / "x", "old"),
        lambda root: files.write_atomic(root / "x", "new"),
        {"old", "new"},
    ),
    "write_atomic, first time": (
        lambda root: None,
        lambda root: files.write_atomic(root / "deep" / "x", "new"),
        {"", "new"},
    ),
    "publish, first time": (lambda root: None, lambda root: sealed(root, "new"), {"", "new"}),
    "publish over another": (lambda root: sealed(root, "old"), lambda root: sealed(root, "new"), {"old", "new"}),
    "publish over another, no exchange": (
        lambda root: sealed(root, "old"),
        lambda root: sealed(root, "new"),
        {"old", "new"},
    ),
    "remove_sealed": (lambda root: sealed(root, "old"), lambda root: files.remove_sealed(root / "x"), {"old", ""}),
}


def sealed(root: Path, word: str) -> None:
    with files.sealed_directory(root / "x", "thing") as scratch:
        (scratch / "sub").mkdir()
        (scratch / "a").write_text(word)
        (scratch / "sub" / "b").write_text(word)


def found(root: Path) -> str:
    """Return the content after a restart: `old`, `new`, empty, `mixed`, or the names of other files."""
    folder = root / "deep" if (root / "deep").exists() else root
    files.remove_partials(root)
    files.remove_partials(folder)
    if rest := [p.name for p in folder.iterdir() if p.name != "x"]:
        return f"rest: {rest}"
    path = folder / "x"
    if path.is_dir():
        files.verify_sealed(path, "thing")
        words = {(path / "a").read_text(), (path / "sub" / "b").read_text()}
        return words.pop() if len(words) == 1 else "mixed"
    return path.read_text() if path.exists() else ""


def test_readers_always_see_the_old_or_the_new_version(tmp_path: Path) -> None:
    sealed(tmp_path, "old")
    there = []
    files.before = lambda operation, path: there.append((tmp_path / "x" / "a").exists())
    sealed(tmp_path, "new")
    assert len(there) > 10
    assert all(there)


def test_every_announced_fsync_follows_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[str] = []
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    paths = RunPaths(tmp_path / "run")

    def note(operation: files.Operation, path: Path) -> None:
        assert len(done) == len(announced)
        announced.extend([str(path)] if operation == "fsync" else [])

    files.before = note
    saves(2, 4, 6)(paths)
    save_and_rotate(paths)
    assert len(announced) > 20
    assert done == announced


@dataclass
class Disk:
    """Simulated disk that loses data that was not fsynced. It tracks the data that survives a crash and the data that
    may survive.

    Contents are stored by inode, names by directory inode. A rename is atomic, but renames that were not fsynced may
    reach the disk one by one and in any order. Contents that were not fsynced may be missing, cut short, or zeros.
    """

    root: Path
    ignores_fsync: bool = False
    images: list[tuple[int, dict[int, dict[str, int]], dict[int, bytes]]] = field(default_factory=list)
    _open: dict[int, int] = field(default_factory=dict)

    def record(self, work: Callable[[], object]) -> None:
        """Run the work, and record the possible states of the disk before each operation and after the last one."""
        names, bytes_of = self._scan()
        self._sure, self._whole = {k: dict(v) for k, v in names.items()}, dict(bytes_of)
        self._now, self._all, self._pending = names, dict(bytes_of), list[dict[tuple[int, str], int | None]]()
        self._draw, self._count, self._fsynced = random.Random(SEED), 0, None  # type: Path | None
        files.before = self._before
        try:
            work()
        finally:
            files.before = lambda operation, path: None
        self._before("fsync", self.root)
        for fd in self._open.values():
            os.close(fd)

    def _before(self, operation: files.Operation, path: Path) -> None:
        then, (self._now, contents_now) = self._now, self._scan()
        self._all |= contents_now
        self._pending += self._differences(then)
        if self._fsynced is not None and not self.ignores_fsync:
            self._commit(self._fsynced, contents_now)
        self._fsynced = path if operation == "fsync" else None
        self._count += 1
        self._build_images()

    def _scan(self) -> tuple[dict[int, dict[str, int]], dict[int, bytes]]:
        names: dict[int, dict[str, int]] = {}
        bytes_of: dict[int, bytes] = {}
        for folder, _, _ in os.walk(self.root):
            number = self._store_content(Path(folder))
            names[number] = {entry.name: self._store_content(entry) for entry in Path(folder).iterdir()}
            bytes_of |= {e.stat().st_ino: e.read_bytes() for e in Path(folder).iterdir() if e.is_file()}
        return names, bytes_of

    def _store_content(self, path: Path) -> int:
        """Return the inode of a path. The file stays open, so no other file gets the same inode."""
        number = path.stat().st_ino
        if number not in self._open:
            self._open[number] = os.open(path, os.O_RDONLY)
        return number

    def _differences(self, then: dict[int, dict[str, int]]) -> list[dict[tuple[int, str], int | None]]:
        """Return the changes of names since `then`, one change per folder. No rename moves a file to another folder."""
        changes = []
        for folder in then.keys() | self._now.keys():
            old, new = then.get(folder, {}), self._now.get(folder, {})
            names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
            if names:
                changes.append({(folder, name): new.get(name) for name in names})
        return changes

    def _commit(self, path: Path, contents_now: dict[int, bytes]) -> None:
        number = path.stat().st_ino
        if number in contents_now:
            self._whole[number] = contents_now[number]
            return
        for change in [c for c in self._pending if any(folder == number for folder, _ in c)]:
            self._apply(self._sure, change)
            self._pending.remove(change)

    @staticmethod
    def _apply(names: dict[int, dict[str, int]], change: dict[tuple[int, str], int | None]) -> None:
        for (folder, name), number in change.items():
            if number is None:
                names.setdefault(folder, {}).pop(name, None)
            else:
                names.setdefault(folder, {})[name] = number

    def _build_images(self) -> None:
        """Record the states that a machine might find after a crash now: only fsynced data, all data, all but one
        change, and random subsets."""
        pending, draw = self._pending, self._draw
        chosen = [[], list(pending)]
        if pending:
            chosen.append([change for change in pending if change is not draw.choice(pending)])
            chosen += [[change for change in pending if draw.random() < 0.5] for _ in range(3)]
        cuts: list[Callable[[bytes], bytes]] = [
            lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), lambda data: data,
        ]  # fmt: skip
        for number, subset in enumerate(chosen):
            names = {folder: dict(entries) for folder, entries in self._sure.items()}
            for change in subset:
                self._apply(names, change)
            cut = cuts[number % 3] if number < 3 else None
            data = {
                inode: content if self._whole.get(inode) == content else (cut or draw.choice(cuts))(content)
                for inode, content in self._all.items()
            }
            self.images.append((self._count, names, data))

    def put(self, image: tuple[int, dict[int, dict[str, int]], dict[int, bytes]], target: Path) -> None:
        """Write a recorded state of the disk to `target`."""
        _, names, data = image
        shutil.rmtree(target, ignore_errors=True)

        def make(number: int, folder: Path) -> None:
            folder.mkdir()
            for name, inner in names.get(number, {}).items():
                if inner in data:
                    (folder / name).write_bytes(data[inner])
                else:
                    make(inner, folder / name)

        make(self.root.stat().st_ino, target)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "first save"])
def test_after_a_machine_crash_at_any_point_the_old_or_the_new_version_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, as_made: dict[int, dict[str, str]]
) -> None:
    choose_disk(monkeypatch, name)
    scenario = SCENARIOS[name]
    paths = prepared(tmp_path / "runs", scenario)
    disk = Disk(tmp_path / "runs")
    disk.record(lambda: scenario.work(paths))
    print(f"seed: {SEED} (RATCHET_TEST_SEED); {len(disk.images)} images")
    sample = random.Random(SEED).sample(disk.images, min(50, len(disk.images)))
    problems: list[str] = []
    for image in sample:
        disk.put(image, tmp_path / "after")
        problems += [f"before operation {image[0]}: {text}" for text in recover(tmp_path / "after", scenario, as_made)]
    assert problems == []


def test_the_simulated_crash_loses_data_that_was_not_fsynced(
    tmp_path: Path, as_made: dict[int, dict[str, str]]
) -> None:
    scenario = SCENARIOS["save, link and rotate"]
    paths = prepared(tmp_path / "runs", scenario)
    disk = Disk(tmp_path / "runs", ignores_fsync=True)
    disk.record(lambda: scenario.work(paths))
    damaged = 0
    for image in disk.images[-40:]:
        disk.put(image, tmp_path / "after")
        damaged += bool(recover(tmp_path / "after", scenario, as_made))
    assert damaged > 5


@pytest.mark.parametrize("name", SMALL)
def test_after_a_machine_crash_the_old_or_the_new_file_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    choose_disk(monkeypatch, name)
    prepare, work, allowed = SMALL[name]
    (tmp_path / "w").mkdir()
    prepare(tmp_path / "w")
    disk = Disk(tmp_path / "w")
    disk.record(lambda: work(tmp_path / "w"))
    seen = set()
    for image in disk.images:
        disk.put(image, tmp_path / "after")
        seen.add(found(tmp_path / "after"))
        if image[0] == disk.images[-1][0]:  # the work is done, so its result must not be lost
            assert found(tmp_path / "after") == found(tmp_path / "w")
    assert seen == allowed


CODES = [errno.ENOSPC, errno.EIO, errno.EROFS]


def fail_at(point: int, code: int, lasting: bool) -> None:
    """Let the disk fail at operation number `point` (from 1), once or from then on."""
    count = [0]

    def fail(operation: files.Operation, path: Path) -> None:
        count[0] += 1
        if count[0] == point or (lasting and count[0] > point):
            raise OSError(code, "injected", str(path))

    files.before = fail


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_disk_error_at_any_point_stops_only_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, as_made: dict[int, dict[str, str]]
) -> None:
    choose_disk(monkeypatch, name)
    scenario, runs = SCENARIOS[name], tmp_path / "runs"
    paths = prepared(runs, scenario)
    points = len(operations(lambda: scenario.work(paths)))
    problems: list[str] = []
    for point in range(1, points + 1):
        paths = prepared(runs, scenario)
        code = CODES[point % 3]
        fail_at(point, code, lasting=point % 2 == 0)
        with pytest.raises(OSError, match="injected") as raised:
            scenario.work(paths)
        assert raised.value.errno == code
        files.before = lambda operation, path: None
        step, notices = newest(paths)
        if (step or 0) not in (scenario.old, scenario.new) or (notices and scenario.prepare is not damaged_newest):
            problems.append(f"point {point}: goes on from {step}, {notices}")
        problems += [f"point {point}: {text}" for text in recover(runs, scenario, as_made)]
    assert problems == []


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    saves(2, 4)(paths)
    for point in range(1, len(operations(lambda: save(paths, 6))) - 1):  # points before the publication
        shutil.rmtree(paths.checkpoint(6), ignore_errors=True)
        was = contents(paths.root)
        fail_at(point, errno.EIO, lasting=False)
        with pytest.raises(OSError, match="injected"):
            save(paths, 6)
        assert contents(paths.root) == was
        assert [p.name for p in paths.checkpoints.iterdir() if p.name.startswith(".")] == []


def test_a_failed_save_can_be_repeated_in_the_same_process(tmp_path: Path) -> None:
    """The writer thread repeats a save in the same process, without a restart."""
    paths = RunPaths(tmp_path / "run")
    save(paths, 2)
    whole = len(operations(lambda: save(paths, 4)))
    shutil.rmtree(paths.checkpoint(4))
    for point in range(1, whole + 1):
        fail_at(point, errno.ENOSPC, lasting=True)
        with pytest.raises(OSError, match="injected"):
            save(paths, 4)
        files.before = lambda operation, path: None
        save(paths, 4)
        assert newest(paths) == (4, [])
        assert sorted(p.name for p in paths.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]
        shutil.rmtree(paths.checkpoint(4))
    assert snapshots.equal(checkpoint.read(paths.checkpoint(2)), snapshots.snapshot(2))
