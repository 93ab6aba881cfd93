"""Tests of sealed directories, atomic files and locks, with real processes that are killed at every operation.

test_crash_points.py kills processes and simulated machines during saves of checkpoints.
"""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError, LockHeldError
from ratchet.storage import digests, files
from ratchet.storage.files import FileLock

KIND = "thing"


def make(target: Path, contents: dict[str, bytes] | None = None) -> Path:
    """Seal a directory with a file and a file in a folder; return the directory."""
    with files.sealed_directory(target, KIND) as scratch:
        for name, content in (contents or {"a.bin": b"first", "sub/b.bin": b"second"}).items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(content)
    return target


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ------------------------------------------------------------------------------------------- sealing and publishing


def test_a_sealed_directory_is_verified_and_described_by_its_manifest(tmp_path: Path) -> None:
    target = make(tmp_path / "deep" / "out")
    manifest = files.verify_sealed(target, KIND)
    assert manifest.kind == KIND
    assert manifest.files == {
        "a.bin": (digests.hash_bytes(b"first"), 5),
        "sub/b.bin": (digests.hash_bytes(b"second"), 6),
    }
    assert manifest.size_bytes == 11
    assert manifest == files.read_manifest(target)
    assert names(tmp_path / "deep") == ["out"]


def test_the_digest_depends_only_on_names_and_contents(tmp_path: Path) -> None:
    one = files.verify_sealed(make(tmp_path / "one"))
    same = files.verify_sealed(make(tmp_path / "same"))
    renamed = files.verify_sealed(make(tmp_path / "renamed", {"a.bin": b"first", "sub/c.bin": b"second"}))
    changed = files.verify_sealed(make(tmp_path / "changed", {"a.bin": b"First", "sub/b.bin": b"second"}))
    assert one.digest == same.digest
    assert len({one.digest, renamed.digest, changed.digest}) == 3


def test_an_empty_directory_can_be_sealed(tmp_path: Path) -> None:
    with files.sealed_directory(tmp_path / "out", KIND):
        pass
    assert files.verify_sealed(tmp_path / "out").files == {}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_inside_the_context_keeps_the_old_directory(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with pytest.raises(error), files.sealed_directory(tmp_path / "out", KIND) as scratch:
            (scratch / "a.bin").write_bytes(b"half")
            raise error

    fail()
    assert names(tmp_path) == []
    before = tree(make(tmp_path / "out"))
    fail()
    assert names(tmp_path) == ["out"]
    files.verify_sealed(tmp_path / "out")
    assert tree(tmp_path / "out") == before


def test_a_new_directory_replaces_an_old_one_completely(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "junk").write_bytes(b"junk")
    make(tmp_path / "out", {"old.bin": b"old", "same.bin": b"old"})
    assert files.verify_sealed(tmp_path / "out").files.keys() == {"old.bin", "same.bin"}
    make(tmp_path / "out", {"same.bin": b"new"})
    assert names(tmp_path) == ["out"]
    assert files.verify_sealed(tmp_path / "out").files.keys() == {"same.bin"}
    assert (tmp_path / "out" / "same.bin").read_bytes() == b"new"


def test_files_with_a_known_digest_are_not_read_again(tmp_path: Path) -> None:
    known: dict[str, files.Entry] = {}
    with files.sealed_directory(tmp_path / "out", KIND, known) as scratch:
        files.write_blocks(scratch / "a.bin", [[b"fi", b"rst"]])
        (scratch / "b.bin").write_bytes(b"second")
        known["a.bin"] = (digests.hash_bytes(b"First"), 5)  # a wrong digest would be corrected if the file were read
    assert files.read_manifest(tmp_path / "out").files == {
        "a.bin": (digests.hash_bytes(b"First"), 5),
        "b.bin": (digests.hash_bytes(b"second"), 6),
    }
    with pytest.raises(DamagedFileError, match=r"a\.bin: content differs"):
        files.verify_sealed(tmp_path / "out")


def test_the_hook_is_called_before_every_disk_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(files, "before", lambda operation, path: seen.append((operation, path.name)))
    make(tmp_path / "deep" / "out", {"a.bin": b"1", "sub/b.bin": b"2"})
    files.link_tree(tmp_path / "deep" / "out", tmp_path / "copy")
    files.remove_sealed(tmp_path / "copy")
    pid = os.getpid()
    scratch = f".partial-out-{pid}"
    manifest = f".partial-manifest.json-{pid}"
    assert seen == [
        ("mkdir", "deep"), ("fsync", tmp_path.name), ("mkdir", scratch),
        ("fsync", "a.bin"), ("fsync", "b.bin"), ("fsync", "sub"),
        ("write", manifest), ("write", manifest), ("fsync", manifest), ("rename", "manifest.json"), ("fsync", scratch),
        ("rename", "out"), ("fsync", "deep"),
        ("mkdir", "copy"), ("fsync", tmp_path.name), ("link", "a.bin"), ("link", "manifest.json"),
        ("mkdir", "sub"), ("fsync", "copy"), ("link", "b.bin"),
        ("rename", f".partial-copy-doomed-{pid}"), ("fsync", tmp_path.name),
        *seen[22:-1], ("unlink", f".partial-copy-doomed-{pid}"),
    ]  # fmt: skip
    assert sorted(seen[22:-1]) == [("unlink", name) for name in ("a.bin", "b.bin", "manifest.json", "sub")]


def test_a_failed_cleanup_is_noted_on_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(operation: files.Operation, path: Path) -> None:
        if operation in ("rename", "unlink"):
            raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(files, "before", refuse)
    with pytest.raises(OSError, match="Read-only") as raised:
        make(tmp_path / "out")
    left = f".partial-out-{os.getpid()}"
    assert any(left in note and "the next start removes it" in note for note in raised.value.__notes__)
    assert names(tmp_path) == [left]
    monkeypatch.undo()
    make(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_partial_directories_of_similar_names_are_not_touched(tmp_path: Path) -> None:
    mine, other = tmp_path / f".partial-out-more-{os.getpid()}", tmp_path / f".partial-out-{os.getppid()}"
    dead = tmp_path / ".partial-out-999999999"
    for folder in (mine, other, dead):
        folder.mkdir()
    make(tmp_path / "out")
    assert names(tmp_path) == sorted([mine.name, other.name, "out"])


def test_remove_partials_removes_or_restores_only_leftovers_of_killed_writers(tmp_path: Path) -> None:
    make(tmp_path / ".displaced-lost-123", {"a.bin": b"old"})
    make(tmp_path / ".displaced-there-123", {"a.bin": b"old"})
    make(tmp_path / "there", {"a.bin": b"new"})
    (tmp_path / "kept.txt").write_text("kept")
    (tmp_path / ".partial-f-123").write_text("half")
    (tmp_path / ".partial-there-123" / "sub").mkdir(parents=True)
    (tmp_path / ".partial-there-123" / "sub" / "b.bin").write_text("half")
    files.remove_partials(tmp_path)
    assert names(tmp_path) == ["kept.txt", "lost", "there"]
    assert (tmp_path / "lost" / "a.bin").read_bytes() == b"old"
    assert (tmp_path / "there" / "a.bin").read_bytes() == b"new"
    files.verify_sealed(tmp_path / "there")


def test_disk_space_is_required_with_a_reserve(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    files.require_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"bytes and 16,777,216 more in reserve, but only") as raised:
        files.require_space(tmp_path, free + 2**40)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path)


def test_sealed_directories_nest_and_damage_to_the_inner_one_is_found(tmp_path: Path) -> None:
    with files.sealed_directory(tmp_path / "outer", "outer") as scratch:
        make(scratch / "inner")
        (scratch / "card.json").write_bytes(b"{}")
    outer = files.verify_sealed(tmp_path / "outer", "outer")
    assert outer.files.keys() == {"card.json", "inner/a.bin", "inner/sub/b.bin", "inner/manifest.json"}
    files.verify_sealed(tmp_path / "outer" / "inner", KIND)
    (tmp_path / "outer" / "inner" / files.MANIFEST).unlink()
    with pytest.raises(DamagedFileError, match=r"inner/manifest\.json: missing"):
        files.verify_sealed(tmp_path / "outer")


# ----------------------------------------------------------------------------------------------------------- damage


def flip_bit(target: Path) -> None:
    content = bytearray((target / "a.bin").read_bytes())
    content[2] ^= 0x10
    (target / "a.bin").write_bytes(bytes(content))


def edit_manifest(**changes: object) -> Callable[[Path], None]:
    def damage(target: Path) -> None:
        raw = json.loads((target / files.MANIFEST).read_bytes()) | changes
        try:
            content = files.json_bytes(raw)
        except ValueError:  # an infinite size, which only Python writes as JSON
            content = json.dumps(raw).encode()
        (target / files.MANIFEST).write_bytes(content)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip_bit, r"a\.bin: content differs"),
    "truncated file": (lambda t: os.truncate(t / "sub" / "b.bin", 3), r"b\.bin: found 3 bytes; expected 6"),
    "emptied file": (lambda t: os.truncate(t / "a.bin", 0), r"a\.bin: found 0 bytes; expected 5"),
    "grown file": (lambda t: (t / "a.bin").write_bytes(b"first!"), r"a\.bin: found 6 bytes"),
    "missing file": (lambda t: (t / "sub" / "b.bin").unlink(), r"sub/b\.bin: missing"),
    "file become a folder": (lambda t: ((t / "a.bin").unlink(), (t / "a.bin").mkdir()), r"a\.bin: missing"),
    "extra file": (lambda t: (t / "sub" / "c.bin").write_bytes(b""), r"sub/c\.bin: not in the manifest"),
    "renamed file": (lambda t: (t / "a.bin").rename(t / "z.bin"), r"z\.bin: not in the manifest"),
    "missing manifest": (lambda t: (t / files.MANIFEST).unlink(), r"not sealed"),
    "empty manifest": (lambda t: os.truncate(t / files.MANIFEST, 0), r"invalid manifest"),
    "truncated manifest": (lambda t: os.truncate(t / files.MANIFEST, 40), r"invalid manifest"),
    "binary manifest": (lambda t: (t / files.MANIFEST).write_bytes(b"\xff\x00\xfe"), r"invalid manifest"),
    "manifest that is a list": (lambda t: (t / files.MANIFEST).write_text("[]"), r"invalid manifest"),
    "manifest without files": (lambda t: (t / files.MANIFEST).write_text('{"format": 1}'), r"invalid manifest"),
    "manifest of a wrong shape": (edit_manifest(files={"a.bin": "sha"}), r"invalid manifest"),
    "newer format": (
        edit_manifest(format=2),
        r"found manifest format 2; expected 1; use the version that wrote it",
    ),
    "a manifest of brackets": (lambda t: (t / files.MANIFEST).write_bytes(b"[" * 100_000), r"invalid manifest"),
    "a size beyond all": (edit_manifest(files={"a.bin": {"sha256": "x", "bytes": 1e999}}), r"invalid manifest"),
    "manifest become a folder": (
        lambda t: ((t / files.MANIFEST).unlink(), (t / files.MANIFEST).mkdir()),
        r"manifest\.json: cannot be read \(Is a directory\)",
    ),
    "a manifest without its last byte": (
        lambda t: os.truncate(t / files.MANIFEST, (t / files.MANIFEST).stat().st_size - 1),
        r"invalid manifest \(its bytes were changed\)",
    ),
    "another kind": (edit_manifest(kind="other"), r"found a sealed 'other'; expected 'thing'"),
    "everything gone": (lambda t: t.rename(t.with_name("elsewhere")), r"not sealed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_finds(tmp_path: Path, damage: str) -> None:
    target = make(tmp_path / "out")
    files.verify_sealed(target, KIND)
    inflict, says = DAMAGES[damage]
    inflict(target)
    with pytest.raises(DamagedFileError, match=says):
        files.verify_sealed(target, KIND)


# -------------------------------------------------------------------------------------------- killed at every operation

# The script runs the same work repeatedly in forked children. SIGKILL kills the n-th child just before its n-th
# operation on a file (an audit event: open, rename, mkdir, remove, ...), until a child survives to the end. After each
# death the script determines the state. One interpreter start serves all children.
KILLER = """
import json, os, shutil, signal, sys
from pathlib import Path
from ratchet.storage import files

root = Path(sys.argv[1])
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.truncate", "shutil.rmtree"}

def fill(scratch, word):
    (scratch / "sub").mkdir()
    (scratch / "a.bin").write_text(word * 1000)
    (scratch / "sub" / "b.bin").write_text(word)

def work():
    {work}

def prepare():
    {prepare}

def state():
    {state}

def killed_at(n):
    prepare()
    child = os.fork()
    if child == 0:
        left = [n]
        def count(event, args):
            if event in OPERATIONS and str(args[0] if args else "").startswith(str(root)):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

states = []
for n in range(1, 500):
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    end = killed_at(n)
    states.append([end, state()])
    if end == 0:
        break
print(json.dumps(states))
"""


def kill_at_every_operation(root: Path, work: str, prepare: str, state: str) -> list[tuple[int, str]]:
    """Kill the work before its 1st, 2nd, ... file operation; return exit code and state of each run. The last run
    survives."""
    code = KILLER
    for name, text in (("work", work), ("prepare", prepare), ("state", state)):
        code = code.replace("{" + name + "}", text)
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    states = [(end, found) for end, found in json.loads(done.stdout)]
    assert {end for end, _ in states[:-1]} == {-signal.SIGKILL}
    assert states[-1][0] == 0
    return states


SEAL = """
    with files.sealed_directory(root / "out", "thing") as scratch:
        fill(scratch, "new")
"""
LETTERS = """
    def letters():
        if not (root / "out").exists():
            return "nothing"
        files.verify_sealed(root / "out", "thing")
        return (root / "out" / "a.bin").read_text()[:3] + (root / "out" / "sub" / "b.bin").read_text()

    found = letters()
    files.remove_partials(root)
    assert letters() == found
    assert [p.name for p in root.iterdir()] == ([] if found == "nothing" else ["out"])
    return found
"""
KILLED: dict[str, tuple[str, str, str, str, str]] = {
    "publish": (SEAL, "pass", LETTERS, "nothing", "newnew"),
    "replace": (SEAL, SEAL.replace("new", "old"), LETTERS, "oldold", "newnew"),
    "replace without exchange": (
        "import ctypes; ctypes.CDLL = lambda *_, **__: object()" + SEAL, SEAL.replace("new", "old"),
        "files.remove_partials(root)" + LETTERS, "oldold", "newnew",
    ),
    "remove": ('files.remove_sealed(root / "out")', SEAL, LETTERS, "newnew", "nothing"),
    "write a file": (
        'files.write_atomic(root / "f", "new" * 5000)', '(root / "f").write_text("old")',
        'return (root / "f").read_text()', "old", "new" * 5000,
    ),
}  # fmt: skip
"""By name: work, preparation, code that returns the state, the state before the work, and the state after it."""


@pytest.mark.parametrize("name", KILLED)
def test_a_process_killed_at_any_operation_leaves_the_old_or_the_new_version(tmp_path: Path, name: str) -> None:
    work, prepare, state, before, after = KILLED[name]
    found = [state for _, state in kill_at_every_operation(tmp_path / "w", work, prepare, state)]
    assert len(found) > (10 if name == "publish" else 3)
    assert (found[0], found[-1]) == (before, after)
    assert set(found) == {before, after}
    assert sum(a != b for a, b in pairwise(found)) == 1  # the state changes once, from old to new


# ------------------------------------------------------------------------------------------------------ atomic files


def test_write_atomic_creates_folders_and_leaves_no_other_files(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "x" / "y" / "f", "grün")
    assert tree(tmp_path) == {"x/y/f": "grün".encode()}
    files.write_atomic(tmp_path / "x" / "y" / "f", b"\x00\xff")
    assert tree(tmp_path) == {"x/y/f": b"\x00\xff"}
    with pytest.raises(UnicodeEncodeError):
        files.write_atomic(tmp_path / "x" / "y" / "f", "\ud800")
    assert tree(tmp_path) == {"x/y/f": b"\x00\xff"}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_with_nan_or_infinity_is_not_written(tmp_path: Path, number: float) -> None:
    files.write_json(tmp_path / "f.json", {"b": 1, "a": "ü"})
    assert (tmp_path / "f.json").read_text(encoding="utf-8") == '{\n  "a": "ü",\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "f.json", {"loss": number})
    assert json.loads((tmp_path / "f.json").read_bytes()) == {"a": "ü", "b": 1}


# ------------------------------------------------------------------------------------------------- linking, removing


def test_a_linked_tree_shares_its_files_and_outlives_its_source(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    files.link_tree(source, tmp_path / "copy")
    files.verify_sealed(tmp_path / "copy", KIND)
    assert tree(tmp_path / "copy") == tree(source)
    assert (tmp_path / "copy" / "a.bin").samefile(source / "a.bin")
    files.remove_sealed(source)
    assert not source.exists()
    files.verify_sealed(tmp_path / "copy", KIND)
    assert names(tmp_path) == ["copy"]


def test_linking_over_a_linked_file_never_writes_into_the_sealed_one(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", {"a.bin": b"other"})
    files.link_or_copy(one / "a.bin", tmp_path / "here" / "a.bin")
    files.link_or_copy(two / "a.bin", tmp_path / "here" / "a.bin")
    files.verify_sealed(one, KIND)
    assert (tmp_path / "here" / "a.bin").read_bytes() == b"other"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a second file system")  # noqa: S108
def test_between_file_systems_files_are_copied(tmp_path: Path) -> None:
    source = make(Path("/dev/shm") / f"ratchet-test-{os.getpid()}")  # noqa: S108
    try:
        if source.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("one file system only")
        files.link_tree(source, tmp_path / "copy")
        files.verify_sealed(tmp_path / "copy", KIND)
    finally:
        files.remove_sealed(source)


# ------------------------------------------------------------------------------------------------------------- locks

HOLDER = """
import sys
from pathlib import Path
from ratchet.storage.files import FileLock
lock = FileLock(Path(sys.argv[1]), "the run")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that holds the lock until its standard input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_holder_is_refused_with_the_process_id_of_the_first_until_that_is_killed(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    lock = FileLock(tmp_path / "lock", "the run")
    with pytest.raises(LockHeldError, match=rf"the run is in use by process {holder.pid}\b.*kill {holder.pid}\b"):
        lock.acquire()
    assert lock.is_held()
    with pytest.raises(RuntimeError, match="not held"):
        _ = lock.fd
    with pytest.raises(LockHeldError, match=f"process {holder.pid}"):
        lock.acquire(wait_s=0.1)
    assert holder.poll() is None

    holder.kill()
    holder.wait()
    assert (tmp_path / "lock").read_text() == f"{holder.pid}\n"
    assert not lock.is_held()
    with lock.acquire():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_waiting_for_a_lock_ends_when_it_is_released(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    assert holder.stdin is not None
    waiter = "import sys; from pathlib import Path; from ratchet.storage.files import FileLock as Lock\n"
    waiter += "print('asks', flush=True); Lock(Path(sys.argv[1]), 'x').acquire(wait_s=60); print('has it')"
    command = [sys.executable, "-c", waiter, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asks\n"
        assert process.poll() is None
        holder.stdin.close()
        assert process.stdout.readline() == "has it\n"


def test_checking_a_lock_does_not_acquire_it(tmp_path: Path) -> None:
    lock, other = FileLock(tmp_path / "deep" / "lock", "it"), FileLock(tmp_path / "deep" / "lock", "it")
    assert not other.is_held()
    assert not (tmp_path / "deep").exists()  # the check creates no directory
    with lock.acquire():
        assert other.is_held()
        with pytest.raises(LockHeldError):
            other.acquire()
    assert not other.is_held()
    with lock.acquire():  # the earlier check did not acquire the lock
        assert other.is_held()
    with other:
        assert lock.is_held()
    lock.release()  # releasing a lock that is not held has no effect


@pytest.mark.parametrize("inherited", [True, False])
def test_a_child_that_inherited_the_lock_keeps_it_until_it_ends(tmp_path: Path, inherited: bool) -> None:
    lock, other = FileLock(tmp_path / "lock", "it"), FileLock(tmp_path / "lock", "it")
    lock.acquire()
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[lock.fd] if inherited else [],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        lock.release()
        assert other.is_held() is inherited
        if inherited:
            with pytest.raises(LockHeldError):
                other.acquire()
        else:
            other.acquire().release()
        child.stdin.close()
        child.wait()
    other.acquire().release()


PARENT = """
import subprocess, sys
from pathlib import Path
from ratchet.storage.files import FileLock
lock = FileLock(Path(sys.argv[1]), "it").acquire()
child = subprocess.Popen(
    [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"], pass_fds=[lock.fd]
)
print("started", flush=True)
child.wait()
"""


def test_a_child_that_inherited_the_lock_keeps_it_after_its_parent_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "lock")]
    other = FileLock(tmp_path / "lock", "it")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert sorted([parent.stdout.readline(), parent.stdout.readline()]) == ["started\n", "up\n"]
        parent.kill()
        parent.wait()
        with pytest.raises(LockHeldError, match=f"process {parent.pid}"):
            other.acquire()
        parent.stdin.close()  # the child reads from the same pipe and ends
        assert parent.stdout.read() == ""  # the end of the output: the child is closing its descriptors
    with other.acquire(wait_s=60):
        pass


def test_a_process_that_checks_a_lock_does_not_block_one_that_waits_for_it(tmp_path: Path) -> None:
    """A check takes the lock for a moment: `ratchet status` in a loop must not prevent `dvc repro` from starting."""
    asking = (
        "import sys; from pathlib import Path; from ratchet.storage.files import FileLock as Lock\n"
        "lock = Lock(Path(sys.argv[1]), 'it'); lock.is_held(); print('asks', flush=True)\n"
        "while True: lock.is_held()"
    )
    lock = FileLock(tmp_path / "lock", "it")
    with lock.acquire():
        pass
    command = [sys.executable, "-c", asking, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asker:
        try:
            assert asker.stdout is not None
            asker.stdout.readline()
            for _ in range(100):
                with lock.acquire(wait_s=60):
                    pass
        finally:
            asker.kill()


def test_files_of_a_sealed_directory_have_its_read_permissions(tmp_path: Path) -> None:
    """safetensors creates files that only their owner can read, but a server often runs as another user."""
    with files.sealed_directory(tmp_path / "out", "model") as scratch:
        (scratch / "private").write_bytes(b"x")
        (scratch / "private").chmod(0o600)
        (scratch / "tool").write_bytes(b"x")
        (scratch / "tool").chmod(0o700)
    readers = (tmp_path / "out").stat().st_mode & 0o444
    modes = [stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in ("private", "tool")]
    assert modes == [0o600 | readers, 0o700 | readers]
