"""Tests of checkpoints on a real disk: exact content, hard links for unchanged files, and detection of every kind of
damage."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import snapshots
from ratchet.config.train import ADDED, Train
from ratchet.errors import DamagedFileError, NonFiniteStateError
from ratchet.models import safetensors_format
from ratchet.runs.directory import CHECKPOINT, RunPaths
from ratchet.storage import digests, files
from ratchet.training import checkpoint, optimizer
from ratchet.training.train_state import ADDED_FIELDS, TrainState
from snapshots import SPEC, contents, identity, newest, save

FILES = [
    "trainable.safetensors", "optimizer.safetensors", "constants.safetensors", "state.json", "identity.json",
    "manifest.json",
]  # fmt: skip
EQUAL_FILES = ("constants.safetensors", "identity.json")
"""Files that are equal in all checkpoints of a run."""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture
def draw() -> random.Random:
    seed = int(os.environ.get("RATCHET_TEST_SEED", "11"))
    print(f"seed: {seed} (RATCHET_TEST_SEED)")
    return random.Random(seed)


# -------------------------------------------------------------------------------------------------------- tensor files

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64,
]  # fmt: skip

Tensors = dict[str, torch.Tensor]


@st.composite
def tensor_dicts(draw: st.DrawFn) -> Tensors:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), unique=True, max_size=5))
    found: Tensors = {}
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        size = int(torch.empty(shape).numel()) * torch.empty((), dtype=dtype).element_size()
        limit = 2 if dtype == torch.bool else 256
        raw = torch.tensor(draw(st.lists(st.integers(0, limit - 1), min_size=size, max_size=size)), dtype=torch.uint8)
        found[name] = raw.view(dtype).reshape(shape)
    return {name: tensor for name, tensor in found.items() if name != "__metadata__"}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@given(tensors=tensor_dicts(), chunk=st.sampled_from([3, 16, 100, 1 << 24]))
@hypothesis_settings(max_examples=80, deadline=None, derandomize=True)
def test_what_is_written_is_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, tensors: Tensors, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_format, "CHUNK_BYTES", chunk)
        checkpoint.write_safetensors(path, tensors)
        assert checkpoint.compute_digest_and_size(tensors) == (digests.hash_file(path), path.stat().st_size)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    with safe_open(path, framework="pt") as lazy:
        for name, tensor in tensors.items():
            for other in (found[name], lazy.get_tensor(name)):
                assert (other.dtype, other.shape, raw(other)) == (tensor.dtype, tensor.shape, raw(tensor))
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_equal_tensors_give_equal_bytes_in_whatever_order_and_layout(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    checkpoint.write_safetensors(tmp_path / "a", {"x": matrix, "y": torch.ones(2, dtype=torch.bfloat16)})
    checkpoint.write_safetensors(
        tmp_path / "b", {"y": torch.ones(2, dtype=torch.bfloat16), "x": matrix.t().contiguous().t()}
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tensors_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[tuple[str, int]] = []

    def record(operation: files.Operation, path: Path) -> None:
        operations.append((operation, path.stat().st_size if path.exists() else 0))

    monkeypatch.setattr(files, "before", record)
    checkpoint.write_safetensors(
        tmp_path / "a", {"x": torch.zeros(3 * safetensors_format.CHUNK_BYTES, dtype=torch.uint8)}
    )
    names, sizes = zip(*operations, strict=True)
    assert names == ("write",) * 5 + ("fsync",)  # one to open the file; the header and the data share the first chunk
    assert all(b - a <= safetensors_format.CHUNK_BYTES for a, b in pairwise(sizes))
    assert sizes[-1] > 3 * safetensors_format.CHUNK_BYTES


def test_unknown_dtype_and_big_endian_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"odd: safetensors has no name for torch\.complex128"):
        checkpoint.write_safetensors(tmp_path / "a", {"odd": torch.zeros(1, dtype=torch.complex128)})
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(RuntimeError, match="big-endian"):
        checkpoint.compute_digest_and_size({"x": torch.zeros(1)})


# --------------------------------------------------------------------------------------------------- saving and reading


def test_saved_checkpoint_is_read_back_and_gives_signs_of_life(paths: RunPaths) -> None:
    beats: list[None] = []
    taken = snapshots.snapshot(4, 4, 4)
    written = checkpoint.write(paths, taken, identity(), lambda: beats.append(None))
    assert len(beats) > 5
    path = paths.checkpoint(4)
    manifest = files.verify_sealed(path, CHECKPOINT)
    assert set(manifest.files) | {"manifest.json"} == set(FILES)
    assert written.size_bytes == written.bytes_written == manifest.size_bytes
    assert written.bytes_linked == 0
    assert snapshots.equal(checkpoint.read(path), taken)
    assert newest(paths) == (4, [])
    assert json.loads((path / "identity.json").read_bytes()) == identity()


def test_what_an_adapter_needs_beside_its_matrices_has_a_file_of_its_own(paths: RunPaths) -> None:
    extra = {"rank_mask/x": torch.tensor([True, False]), "pissa/x/a": torch.randn(2, 3)}
    written = [
        checkpoint.write(paths, replace(snapshots.snapshot(step), adapter_tensors=extra), identity(), lambda: None)
        for step in (2, 4, 6)
    ]
    path = paths.checkpoint(6) / "adapter.safetensors"
    assert "adapter.safetensors" in files.verify_sealed(path.parent, CHECKPOINT).files
    found = checkpoint.read(path.parent).adapter_tensors
    assert found.keys() == extra.keys()
    assert all(torch.equal(found[name], extra[name]) for name in extra)
    assert inodes(paths, "adapter.safetensors")[0] == inodes(paths, "adapter.safetensors")[2]  # unchanged: hard-linked
    assert written[2].bytes_linked > path.stat().st_size
    flip(path, 8 * path.stat().st_size - 3)
    with pytest.raises(DamagedFileError, match=r"adapter\.safetensors: content differs"):
        checkpoint.read(path.parent)
    assert newest(paths)[0] == 6  # repaired with the file of step 4
    assert checkpoint.read(path.parent).adapter_tensors.keys() == extra.keys()
    broken = replace(snapshots.snapshot(8), adapter_tensors={"pissa/x/a": torch.tensor([float("nan")])})
    with pytest.raises(NonFiniteStateError, match=r"pissa/x/a is not finite after step 8; the state was not saved"):
        checkpoint.write(paths, broken, identity(), lambda: None)


def test_the_bytes_of_a_checkpoint_do_not_depend_on_what_was_saved_before(tmp_path: Path) -> None:
    long, short = RunPaths(tmp_path / "long"), RunPaths(tmp_path / "short")
    for step in (2, 4, 6, 8):
        save(long, step)
    save(short, 8)
    save(short, 8)  # replaces the checkpoint of the same step
    assert contents(long.checkpoint(8)) == contents(short.checkpoint(8))


def inodes(paths: RunPaths, name: str) -> list[int]:
    return [(paths.checkpoint(step) / name).stat().st_ino for step in paths.checkpoint_steps()]


def test_what_has_not_changed_is_linked_and_lies_on_the_disk_twice(paths: RunPaths) -> None:
    written = [save(paths, step) for step in (2, 4, 6, 8, 10)]
    for name in ("constants.safetensors", "identity.json"):
        found = inodes(paths, name)
        assert found[0] == found[2] == found[4]
        assert found[1] == found[3] != found[0]
    for name in ("trainable.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        assert len(set(inodes(paths, name))) == 5
    unchanged = sum((paths.checkpoint(2) / n).stat().st_size for n in ("constants.safetensors", "identity.json"))
    assert [w.bytes_linked for w in written] == [0, 0, unchanged, unchanged, unchanged]
    assert all(w.bytes_written + w.bytes_linked == w.size_bytes for w in written)
    for step in paths.checkpoint_steps():
        files.verify_sealed(paths.checkpoint(step), CHECKPOINT)


def test_damaged_copy_of_a_linked_file_is_repaired_and_not_linked(paths: RunPaths) -> None:
    """The disk has two copies of the unchanged files, and rotation keeps two."""
    for step in (2, 4, 6):
        save(paths, step)
    flip(paths.checkpoint(6) / "constants.safetensors", 9)  # a hard link to the file of step 2
    save(paths, 8)  # hard-links to step 4, the newest but one
    assert newest(paths) == (8, [])
    assert save(paths, 10).bytes_linked == (paths.checkpoint(6) / "identity.json").stat().st_size  # step 6 is damaged
    assert newest(paths) == (10, [])
    notices: list[str] = []
    for _ in range(2):  # the second time, nothing is damaged
        assert checkpoint.find_newest_valid(paths, SPEC, notices.append, 6) == paths.checkpoint(6)
    assert len(notices) == 1
    assert "constants.safetensors was damaged; restored from step-00000010" in notices[0]
    for step in range(11, 19):
        save(paths, step)
        checkpoint.rotate(paths, 2, ())
    assert paths.checkpoint_steps() == [17, 18]
    assert len(set(inodes(paths, "constants.safetensors"))) == 2


def test_where_files_cannot_be_linked_they_are_written(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    for step in (2, 4):
        save(paths, step)
    monkeypatch.setattr(os, "link", refuses)
    written = save(paths, 6)
    assert written.bytes_linked == 0
    assert written.bytes_written == written.size_bytes
    assert newest(paths) == (6, [])


@pytest.mark.parametrize("where", ["weights", "optimizer_tensors"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_sealed(paths: RunPaths, where: str, value: float) -> None:
    save(paths, 2)
    before = contents(paths.root)
    bad = snapshots.snapshot(4)
    name = {"weights": "layer.1.lora_B", "optimizer_tensors": "2/exp_avg"}[where]
    getattr(bad, where)[name][1, 1] = value
    with pytest.raises(NonFiniteStateError, match=rf"{name} is not finite after step 4"):
        checkpoint.write(paths, bad, identity(), lambda: None)
    assert contents(paths.root) == before


def test_a_full_disk_is_noticed_before_anything_is_written(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    save(paths, 2)
    monkeypatch.setattr(files, "RESERVE_BYTES", 2**62)
    seen: list[str] = []
    monkeypatch.setattr(files, "before", lambda operation, path: seen.append(operation))
    with pytest.raises(OSError, match="more in reserve, but only") as found:
        save(paths, 4)
    assert found.value.errno == errno.ENOSPC
    assert seen == []
    assert newest(paths) == (2, [])


# -------------------------------------------------------------------------------------------------------------- damage


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a loop of links": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_found_and_repaired_or_the_older_checkpoint_is_taken(
    paths: RunPaths, draw: random.Random, name: str
) -> None:
    """The newest checkpoint is skipped after any of 100 random bit flips and any damage of DAMAGES, unless the older
    checkpoint has an equal file, which then replaces the damaged one."""
    save(paths, 2)
    save(paths, 4)
    path = paths.checkpoint(4) / name
    good = path.read_bytes()
    missed = []

    def look(damage: object) -> None:
        step, notices = newest(paths)
        is_repaired = name in EQUAL_FILES and damage != "a folder"
        expected = 4 if is_repaired else 2
        text = f"step 4: {name} was damaged; restored from step-00000002" if is_repaired else "step 4 is skipped"
        if step != expected or len(notices) != 1 or text not in notices[0]:
            missed.append((damage, step, notices))
        if is_repaired and (path.is_symlink() or path.read_bytes() != good):
            missed.append((damage, "not repaired"))

    for bit in draw.sample(range(8 * len(good)), 100):
        flip(path, bit)
        look(bit)
        path.write_bytes(good)
    assert newest(paths) == (4, [])
    for damage, harm in DAMAGES.items():
        harm(path)
        look(damage)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(good)
    assert missed == []
    assert newest(paths) == (4, [])


def test_half_copied_checkpoint_is_passed_over(paths: RunPaths) -> None:
    save(paths, 2)
    save(paths, 4)
    shutil.copytree(paths.checkpoint(4), paths.checkpoint(6), ignore=shutil.ignore_patterns("optimizer*", "manifest*"))
    shutil.copytree(paths.checkpoint(4), paths.checkpoint(8))  # intact, but of another step
    paths.checkpoint(10).mkdir()
    paths.checkpoint(12).write_text("a file")
    step, notices = newest(paths)
    assert step == 4
    assert [n.split(" is skipped")[0] for n in notices] == [f"checkpoint of step {s}" for s in (12, 10, 8, 6)]
    assert "contains the state of step 4" in notices[2]


def resealed(path: Path, name: str, content: bytes) -> None:
    """Change a file and seal the directory again, as a faulty program could."""
    (path / name).write_bytes(content)
    (path / files.MANIFEST).unlink()
    files.seal_directory(path, CHECKPOINT)


def changed(document: dict[str, Any], *keys: str, to: Any) -> bytes:
    copy = deepcopy(document)
    node = copy
    for key in keys[:-1]:
        node = node[key]
    if to is KeyError:
        del node[keys[-1]]
    else:
        node[keys[-1]] = to
    return json.dumps(copy).encode()


def test_a_checkpoint_of_a_version_without_newer_settings_is_resumed(paths: RunPaths) -> None:
    """State and spec lack what is newer, and a checkpoint of a run that does not use it contains none of it either."""
    save(paths, 2)
    path = paths.checkpoint(2)
    state = files.read_json_object(path / "state.json")["state"]
    assert not ADDED_FIELDS & state.keys()
    document = files.read_json_object(path / "identity.json")
    for name in ADDED:
        *sections, leaf = name.split(".")
        node = document["spec"]["train"]
        for section in sections:
            node = node[section]
        del node[leaf]
    resealed(path, "identity.json", json.dumps(document).encode())
    assert newest(paths) == (2, [])
    used = replace(snapshots.snapshot(4), state=replace(snapshots.snapshot(4).state, losses=(1.0, 2.5)))
    checkpoint.write(paths, used, identity(), lambda: None)
    assert checkpoint.read(paths.checkpoint(4)).state.losses == (1.0, 2.5)


GARBAGE: dict[str, tuple[str, Callable[[dict[str, Any]], bytes]]] = {
    "not JSON": ("state.json", lambda d: b"{"),
    "not UTF-8": ("state.json", lambda d: b"\xff\xfe{}"),
    "a list": ("state.json", lambda d: b"[]"),
    "a number": ("state.json", lambda d: b"7"),
    "nothing in it": ("state.json", lambda d: b"{}"),
    "ten thousand brackets": ("state.json", lambda d: b"[" * 100_000),
    "NaN": ("state.json", lambda d: changed(d, "state", "train_loss", to=float("nan"))),
    "too large a number": ("state.json", lambda d: changed(d, "state", "bad_steps", to=[1e400])),
    "no state": ("state.json", lambda d: changed(d, "state", to=KeyError)),
    "state a list": ("state.json", lambda d: changed(d, "state", to=[])),
    "no norms": ("state.json", lambda d: changed(d, "state", "grad_norms", to=KeyError)),
    "norms of text": ("state.json", lambda d: changed(d, "state", "grad_norms", to=["x"])),
    "step of text": ("state.json", lambda d: changed(d, "state", "step", to="4")),
    "step nothing": ("state.json", lambda d: changed(d, "state", "best_step", to=None)),
    "a stranger": ("state.json", lambda d: changed(d, "state", "stranger", to=1)),
    "losses a list": ("state.json", lambda d: changed(d, "state", "validation_loss", to=[1])),
    "losses by word": ("state.json", lambda d: changed(d, "state", "validation_loss", to={"x": 1.0})),
    "budget nothing": ("state.json", lambda d: changed(d, "state", "budget", to=None)),
    "budget of text": ("state.json", lambda d: changed(d, "state", "budget", "tokens", to="many")),
    "no groups": ("state.json", lambda d: changed(d, "optimizer", "groups", to=KeyError)),
    "values a list": ("state.json", lambda d: changed(d, "optimizer", "values", to=[])),
    "format of text": ("state.json", lambda d: changed(d, "format", to="2")),
    "identity a list": ("identity.json", lambda d: b"[]"),
    "no spec": ("identity.json", lambda d: changed(d, "spec", to=KeyError)),
    "spec of text": ("identity.json", lambda d: changed(d, "spec", to="x")),
    "no environment": ("identity.json", lambda d: changed(d, "environment", to=KeyError)),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_sealed_garbage_is_passed_over_with_a_message(paths: RunPaths, two: Path, garbage: str) -> None:
    name, make = GARBAGE[garbage]
    resealed(two, name, make(json.loads((two / name).read_bytes())))
    files.verify_sealed(two, CHECKPOINT)
    step, notices = newest(paths)
    assert step == 2
    assert len(notices) == 1
    assert str(two) in notices[0]
    assert "\n" not in notices[0]


@pytest.fixture
def two(paths: RunPaths) -> Path:
    """Save checkpoints of steps 2 and 4; return the path of the newer one."""
    save(paths, 2)
    save(paths, 4)
    return paths.checkpoint(4)


def test_state_without_its_best_or_good_checkpoint_is_passed_over(paths: RunPaths, two: Path) -> None:
    save(paths, 6, best=4, good=2)
    assert newest(paths) == (6, [])
    flip(two / "trainable.safetensors", 700)
    assert newest(paths)[0] == 2
    shutil.rmtree(two)
    step, notices = newest(paths)
    assert step == 2
    assert "step-00000004" in notices[0]


def test_checkpoint_of_format_1_is_passed_over(paths: RunPaths, two: Path) -> None:
    state = json.loads((two / "state.json").read_bytes())
    (two / "identity.json").unlink()
    resealed(two, "state.json", changed(state, "format", to=KeyError))
    step, notices = newest(paths)
    assert step == 2
    assert "found format 1; this version reads format 3" in notices[0]


def test_newer_format_is_refused_if_it_is_undamaged_and_else_passed_over(paths: RunPaths, two: Path) -> None:
    good = (two / "state.json").read_bytes()
    (two / "state.json").write_bytes(good.replace(b'"format": 3', b'"format": 4'))
    assert newest(paths)[0] == 2
    resealed(two, "state.json", b'{"format": 4, "else": "unknown"}')
    refused = r"step-00000004: found format 4, written by a newer version of Ratchet; .* use"
    with pytest.raises(DamagedFileError, match=refused):
        newest(paths)
    (two / files.MANIFEST).write_bytes(b'{"format": 2, "else": "unknown"}')  # the manifest also has an unknown format
    with pytest.raises(DamagedFileError, match=refused):
        newest(paths)


def test_another_run_s_checkpoint_is_refused_by_name_of_what_differs(paths: RunPaths) -> None:
    save(paths, 2)
    other = SPEC.model_copy(update={"train": Train(rank=8, quantization="none"), "base_digest": "x" * 64})
    checkpoint.write(paths, snapshots.snapshot(4), identity(other), lambda: None)
    differs = r"belongs to another run \(different: base_digest, train\.quantization, train\.rank\);"
    with pytest.raises(DamagedFileError, match=differs):
        newest(paths)


def test_other_libraries_are_told_and_not_refused(paths: RunPaths) -> None:
    checkpoint.write(paths, snapshots.snapshot(2), identity(torch="2.12.0"), lambda: None)
    assert newest(paths) == (2, [])
    found = checkpoint.list_environment_differences(paths.checkpoint(2), identity(peft="0.21.2"))
    assert found == ["peft unknown → 0.21.2", "torch 2.12.0 → 2.13.0"]
    assert checkpoint.list_environment_differences(paths.checkpoint(2), identity(torch="2.12.0")) == []


def test_change_between_check_and_reading_is_found(paths: RunPaths) -> None:
    save(paths, 2)
    path = paths.checkpoint(2)
    files.verify_sealed(path, CHECKPOINT)
    for name in ("trainable.safetensors", "optimizer.safetensors", "constants.safetensors"):
        last = 8 * (path / name).stat().st_size - 3
        flip(path / name, last)
        with pytest.raises(DamagedFileError, match=rf"{name}: content differs"):
            checkpoint.read(path)
        flip(path / name, last)
    taken = checkpoint.read(path)
    flip(path / "trainable.safetensors", 3)
    assert snapshots.equal(taken, snapshots.snapshot(2))  # the tensors are in memory, not mapped to the file


# ------------------------------------------------------------------------------------------------------------- rotation


def test_rotation_goes_by_step_and_spares_what_is_protected_or_referred_to(paths: RunPaths) -> None:
    for step in (1, 2, 3, 4, 5):
        save(paths, step)
    save(paths, 6, best=2)
    save(paths, 7, best=5, good=4)
    for step in paths.checkpoint_steps():  # file times in the reverse order of the steps
        os.utime(paths.checkpoint(step), ns=(10**18 - step, 10**18 - step))
    checkpoint.rotate(paths, 2, {3})
    assert paths.checkpoint_steps() == [2, 3, 4, 5, 6, 7]  # 2 is the best of 6, and a later start may fall back to 6
    save(paths, 8, best=5, good=4)
    checkpoint.rotate(paths, 2, ())
    assert paths.checkpoint_steps() == [4, 5, 7, 8]
    assert newest(paths) == (8, [])
    save(paths, 9, best=9, good=8)
    checkpoint.rotate(paths, 1, {7})
    assert paths.checkpoint_steps() == [4, 5, 7, 8, 9]  # 7 is of no use without 4 and 5


@pytest.mark.parametrize("keep", [0, -1, 1])
def test_newest_that_looks_sealed_is_never_removed(paths: RunPaths, keep: int) -> None:
    for step in (1, 2, 3):
        save(paths, step)
    (paths.checkpoint(3) / files.MANIFEST).unlink()
    checkpoint.rotate(paths, keep, ())
    assert paths.checkpoint_steps() == [2, 3]
    assert newest(paths)[0] == 2
    (paths.checkpoint(2) / files.MANIFEST).unlink()  # no checkpoint looks sealed
    checkpoint.rotate(paths, keep, ())
    assert paths.checkpoint_steps() == [2, 3]


def test_a_folder_of_nearly_such_a_name_is_left_alone(paths: RunPaths) -> None:
    for step in (2, 4, 6):
        save(paths, step)
    for name in ("step-1", "step-9"):
        shutil.copytree(paths.checkpoint(4), paths.checkpoints / name)
    checkpoint.rotate(paths, 1, ())
    step, notices = newest(paths)
    assert (step, notices) == (6, [])
    checkpoint.quarantine_newer(paths, paths.checkpoint(6))
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == ["step-00000006", "step-1", "step-9"]


def test_what_is_newer_than_the_checkpoint_gone_on_from_is_set_aside(paths: RunPaths) -> None:
    for step in (2, 4, 6):
        save(paths, step)
    was = contents(paths.checkpoint(6))
    checkpoint.quarantine_newer(paths, paths.checkpoint(4))
    assert paths.checkpoint_steps() == [2, 4]
    assert contents(paths.checkpoints / "damaged-step-00000006") == was
    save(paths, 6, best=4)
    checkpoint.quarantine_newer(paths, paths.checkpoint(6))
    assert paths.checkpoint_steps() == [2, 4, 6]
    checkpoint.quarantine_newer(paths, None)
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == [f"damaged-step-0000000{s}" for s in (2, 4, 6)]
    assert contents(paths.checkpoints / "damaged-step-00000006") != was


# ----------------------------------------------------------------------------------- restoring a model and an optimizer


def learner(kind: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80, bias=False))
    model[1].requires_grad_(False)  # the frozen base
    model.device = torch.device("cpu")  # type: ignore[assignment]
    settings = Train(optimizer=kind, learning_rate=0.01)  # type: ignore[arg-type]
    return model, optimizer.build(model, settings, model.device)


def learn(model: torch.nn.Module, steps: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        model(torch.randn(4, 80)).square().sum().backward()
        steps.step()
        steps.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_training_goes_on_from_a_checkpoint_exactly_and_never_writes_into_the_snapshot(
    paths: RunPaths, kind: str
) -> None:
    model, steps = learner(kind)
    learn(model, steps, 0, 3)
    taken = checkpoint.take_snapshot(TrainState(step=3), model, steps)
    checkpoint.write(paths, taken, identity(), lambda: None)
    assert (paths.checkpoint(3) / "constants.safetensors").exists() == (kind == "adamw_8bit")
    learn(model, steps, 3, 6)
    expected = checkpoint.take_snapshot(TrainState(step=6), model, steps)
    assert not snapshots.equal(expected, taken)

    other, others = learner(kind)
    saved = checkpoint.read(paths.checkpoint(3))
    assert snapshots.equal(saved, taken)
    for _ in range(2):  # twice, because a snapshot may be restored repeatedly
        checkpoint.restore(saved, other, others)
        assert snapshots.equal(saved, taken)
        learn(other, others, 3, 6)
        assert snapshots.equal(checkpoint.take_snapshot(TrainState(step=6), other, others), expected)
        assert snapshots.equal(saved, taken)
    checkpoint.write(paths, saved, identity(), lambda: None)  # the snapshot can still be saved
    assert snapshots.equal(checkpoint.read(paths.checkpoint(3)), taken)


def test_checkpoint_of_other_parameters_is_refused(paths: RunPaths) -> None:
    model, steps = learner("adamw")
    save(paths, 2)
    with pytest.raises(DamagedFileError, match=r"step 2: has other parameters than this model trains, such as 0\.bias"):
        checkpoint.restore(checkpoint.read(paths.checkpoint(2)), model, steps)
    with pytest.raises(DamagedFileError, match=r"step-00000002: has other parameters"):
        checkpoint.load_weights(paths.checkpoint(2), model)
    wrong = checkpoint.take_snapshot(TrainState(step=3), model, steps)
    wrong.weights["0.bias"] = torch.zeros(3)
    with pytest.raises(DamagedFileError, match=r"such as 0\.bias"):
        checkpoint.restore(wrong, model, steps)


def test_weights_alone_can_be_loaded(paths: RunPaths) -> None:
    model, steps = learner("adamw")
    checkpoint.write(paths, checkpoint.take_snapshot(TrainState(step=1), model, steps), identity(), lambda: None)
    was = [p.clone() for p in model.parameters()]
    learn(model, steps, 0, 2)
    checkpoint.load_weights(paths.checkpoint(1), model)
    assert all(torch.equal(a, b) for a, b in zip(was, model.parameters(), strict=True))
