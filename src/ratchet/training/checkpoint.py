"""Tensors to a safetensors file, streaming: no second copy of them, equal tensors give equal bytes.

The format (README of huggingface/safetensors): 8 bytes, the length N of the header as a little-endian integer; N bytes
of JSON, for each name its dtype, shape and place in what follows; the tensors' bytes, row-major and little-endian,
without gaps. `safetensors` reads it back. Its own writer takes no path to a seam, and hashes nothing.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ratchet.errors import DamagedFileError, NonFiniteStateError
from ratchet.models import adapters
from ratchet.models.device import Model
from ratchet.runs.directory import CHECKPOINT, RunPaths, RunSpec
from ratchet.storage import digests, disk, files
from ratchet.storage.records.base import find_differing_keys
from ratchet.training import optimizer as optimizers
from ratchet.training.train_state import TrainSnapshot, TrainState

CHUNK_BYTES = 16 * 2**20
"""Written at once."""

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def _ignore_beat() -> None:
    """Nobody listens."""


def compute_digest_and_size(tensors: Mapping[str, Tensor], beat: Callable[[], None] = _ignore_beat) -> tuple[str, int]:
    """SHA-256 and size in bytes of the file that `write` makes of these tensors.

    Raises:
        TypeError: the format has no name for a tensor's dtype.
    """
    sha, size = hashlib.sha256(), 0
    for block in _iterate_blocks(tensors):
        for piece in block:
            sha.update(piece)
            size += len(piece)
        beat()
    return sha.hexdigest(), size


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], beat: Callable[[], None] = _ignore_beat) -> None:
    """Write a new file and fsync it (its name is for the caller to make durable).

    Args:
        path: the file.
        tensors: on the CPU; one that is not contiguous is copied.
        beat: called after each chunk of at most CHUNK_BYTES.
    """
    files.write_blocks(path, _iterate_blocks(tensors), beat)


def _iterate_blocks(tensors: Mapping[str, Tensor]) -> Iterator[list[bytes | memoryview]]:
    """The file in pieces: as many in one block as make up at most CHUNK_BYTES."""
    if sys.byteorder != "little":
        raise RuntimeError("tensors lie in memory as big-endian numbers here, and checkpoints hold little-endian ones")
    # The largest numbers first: then each tensor begins at a multiple of its numbers' size, as readers need.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    block: list[bytes | memoryview] = [_build_header(tensors, order)]
    room = CHUNK_BYTES - len(block[0])
    for name in order:
        view = _view_bytes(tensors[name])
        while len(view):
            if room <= 0:
                yield block
                block, room = [], CHUNK_BYTES
            block.append(view[:room])
            view, room = view[room:], room - len(block[-1])
    yield block


def _view_bytes(tensor: Tensor) -> memoryview:
    numbers = tensor.detach().contiguous().reshape(-1)
    view: memoryview = memoryview(numbers.view(torch.uint8).numpy())
    return view


def _build_header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries, begin = {}, 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: safetensors has no name for {tensor.dtype}")
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# What a checkpoint says of itself in JSON, read with suspicion: whatever is found there, no error but DamagedFileError.

FORMAT = 3
"""2 had no file of the adapter's own tensors, and a state without gradient norms."""
STATE = "state.json"
IDENTITY = "identity.json"

_GARBAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class CheckpointMetadata:
    """The JSON side of a checkpoint."""

    state: TrainState
    optimizer: dict[str, Any]
    """The optimizer's other values."""
    identity: dict[str, Any]
    """`spec` of the run, and what it was `made_by`."""


def read_metadata(path: Path) -> CheckpointMetadata:
    """State and identity of a checkpoint; its bytes are not compared with the manifest.

    Raises:
        DamagedFileError: they are not such, or of another format.
    """
    document = read_json(path / STATE)
    found = document.get("format", 1)
    if found != FORMAT:
        raise DamagedFileError(f"{path / STATE}: format {found}, this version goes on from format {FORMAT} only")
    identity = read_json(path / IDENTITY)
    try:
        state, rest = _parse_state(document["state"]), document["optimizer"]
        if not isinstance(rest["groups"], list) or not isinstance(rest["values"], dict):
            raise TypeError("optimizer")
        for key in ("spec", "made_by"):
            if not isinstance(identity[key], dict):
                raise TypeError(key)
    except _GARBAGE as error:
        raise DamagedFileError(f"{path}: its state is unreadable ({type(error).__name__}: {error})") from None
    if path.name.startswith("step-") and path.name != f"step-{state.step:08d}":
        raise DamagedFileError(f"{path}: is of step {state.step}")
    return CheckpointMetadata(state, rest, identity)


def read_json(path: Path) -> dict[str, Any]:
    """An object of JSON, without NaN. Raises DamagedFileError for anything else, and for a file that cannot be read."""
    try:
        value = json.loads(path.read_bytes(), parse_constant=_reject_non_finite)
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path}: not an object of JSON")
    return value


def _reject_non_finite(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _parse_state(raw: dict[str, Any]) -> TrainState:
    state = TrainState.from_json(raw)
    for found, model in (
        (state, TrainState()),
        (state.budget, TrainState().budget),
        (state.validation_budget, TrainState().budget),
    ):
        for entry in fields(model):
            value, example = getattr(found, entry.name), getattr(model, entry.name)
            allowed = {type(example)} | ({int} if example is None or type(example) is float else set())
            if type(value) not in allowed:
                raise TypeError(f"{entry.name} is {value!r}")
    return state


# Snapshots of a training: the only time for which a checkpoint holds training up.


def take_snapshot(state: TrainState, model: Model, optimizer: optimizers.Optimizer) -> TrainSnapshot:
    """Copy weights, optimizer and what else the adapter needs to the CPU's memory.

    Copies on purpose: on a CPU `.cpu()` is the tensor itself.
    """
    own, rest = optimizers.flatten_state(optimizer)
    weights = _copy_tensors({name: parameter.detach() for name, parameter in adapters.trainable_parameters(model)})
    tensors = _copy_tensors(own)
    extra = _copy_tensors(adapters.extra_tensors(model))
    if any(tensor.is_cuda for tensor in own.values()) or model.device.type == "cuda":
        torch.cuda.synchronize()  # the copies below are only under way until then
    return TrainSnapshot(state, weights, tensors, rest, extra)


def _copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copy_to_host(tensor) for name, tensor in tensors.items()}


def _copy_to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone(memory_format=torch.contiguous_format)
    # All copies run at once into pinned memory, which torch keeps and gives out again at the next snapshot.
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def is_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no value of any floating-point tensor is NaN or infinite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())


# Checkpoints: everything that the next step depends on, sealed; safetensors and JSON only.
#
#     trainable.safetensors   the adapter's matrices, by parameter name
#     optimizer.safetensors   the optimizer's tensors (see optimizer.py)
#     constants.safetensors   those of them that never change (bitsandbytes' quantisation maps), if there are any
#     adapter.safetensors     what the kind of adapter needs beside its matrices (AdaLoRA, PiSSA), if it needs anything
#     wire.safetensors        what each rank has left unsent of its gradients (wire.py), by RANK/NAME, if anything
#     state.json              format, state (state.py), the optimizer's other values
#     identity.json           the run's spec, and what made it: versions of libraries, device, threads
#
# Learning rate, order of rows and random streams are functions of the step (schedule.py, data/batches.py), and the
# base
# is pinned by digest: there is nothing else to save. Equal snapshots give equal bytes in every file, whatever was
# saved
# before.

WEIGHTS = "trainable.safetensors"
OPTIMIZER = "optimizer.safetensors"
CONSTANTS = "constants.safetensors"
ADAPTER = "adapter.safetensors"
WIRE = "wire.safetensors"
SET_ASIDE = "damaged-"
"""Checkpoints that a run did not go on from, though they were newer."""

_CONSTANT_KEYS = {"qmap1", "qmap2"}  # bitsandbytes/optim/optimizer.py (0.50): made once, never written again


@dataclass(frozen=True)
class CheckpointWriteStats:
    """What a save has cost."""

    size_bytes: int
    """Of all files of the checkpoint."""
    bytes_written: int
    bytes_linked: int
    """Of files that an earlier checkpoint holds too: no space, no writing."""


@dataclass(frozen=True)
class _CheckpointFile:
    """A file to be made: its fingerprint, and how to write it."""

    entry: files.Entry
    write: Callable[[Path], None]


def write(
    paths: RunPaths, snapshot: TrainSnapshot, identity: dict[str, Any], beat: Callable[[], None]
) -> CheckpointWriteStats:
    """Seal a checkpoint. Nothing is left behind when it fails.

    A file that the newest checkpoint but one holds already is linked, not written. Not the newest: so everything that
    is kept lies on the disk twice, and one flipped bit never damages all checkpoints at once.

    Args:
        paths: the run.
        snapshot: what to save; nobody may change it meanwhile.
        identity: `spec` of the run and what it is `made_by`, as JSON.
        beat: called after each piece of work, as a sign of life.

    Raises:
        NonFiniteStateError: a weight or a state of optimizer or adapter is not finite.
        OSError: the disk is full or failing; the checkpoints that were there are as they were.
    """
    for tensors in (snapshot.weights, snapshot.optimizer, snapshot.extra):
        _require_finite(tensors, snapshot.state.step)
        beat()
    made = _plan_files(snapshot, identity, beat)
    earlier = _find_previous_sealed(paths, snapshot.state.step)
    linked = {name for name, file in made.items() if earlier is not None and _has_entry(earlier / name, file.entry)}
    size = sum(file.entry[1] for file in made.values())
    size_linked = sum(made[name].entry[1] for name in linked)
    target = paths.checkpoint(snapshot.state.step)
    files.make_directory(target.parent)
    disk.require_space(target.parent, size - size_linked)
    with files.sealed_directory(target, CHECKPOINT, {name: file.entry for name, file in made.items()}) as scratch:
        for name, file in made.items():
            if earlier is None or name not in linked or not files.link_file(earlier / name, scratch / name):
                file.write(scratch / name)
                size_linked -= file.entry[1] if name in linked else 0
            beat()
    return CheckpointWriteStats(size, size - size_linked, size_linked)


def _require_finite(tensors: dict[str, Tensor], step: int) -> None:
    for name, tensor in tensors.items():
        if not is_finite({name: tensor}):
            raise NonFiniteStateError(f"{name} is not finite after step {step}: this state is not saved")


def _plan_files(
    snapshot: TrainSnapshot, identity: dict[str, Any], beat: Callable[[], None]
) -> dict[str, _CheckpointFile]:
    constants = {path: t for path, t in snapshot.optimizer.items() if path.rsplit("/", 1)[-1] in _CONSTANT_KEYS}
    changing = {path: tensor for path, tensor in snapshot.optimizer.items() if path not in constants}
    state = {"format": FORMAT, "state": snapshot.state.as_json(), "optimizer": snapshot.rest}
    made = {
        WEIGHTS: _make_tensor_file(snapshot.weights, beat),
        OPTIMIZER: _make_tensor_file(changing, beat),
        STATE: _make_json_file(state),
        IDENTITY: _make_json_file(identity),
    }
    unsent = {f"{rank}/{name}": tensor for rank, own in enumerate(snapshot.wire) for name, tensor in own.items()}
    where_any = {CONSTANTS: constants, ADAPTER: snapshot.extra, WIRE: unsent}
    return made | {name: _make_tensor_file(tensors, beat) for name, tensors in where_any.items() if tensors}


def _make_tensor_file(tensors: dict[str, Tensor], beat: Callable[[], None]) -> _CheckpointFile:
    entry = compute_digest_and_size(tensors, beat)
    return _CheckpointFile(entry, lambda path: write_safetensors(path, tensors, beat))


def _make_json_file(value: Any) -> _CheckpointFile:
    data = files.json_bytes(value)
    return _CheckpointFile((digests.hash_bytes(data), len(data)), lambda path: files.write_blocks(path, [[data]]))


def _looks_sealed(paths: RunPaths, step: int) -> bool:
    with suppress(DamagedFileError):  # the question is whether it is
        return files.read_manifest(paths.checkpoint(step)).kind == CHECKPOINT
    return False


def _find_previous_sealed(paths: RunPaths, saving: int) -> Path | None:
    sealed = [step for step in paths.checkpoint_steps() if step != saving and _looks_sealed(paths, step)]
    return paths.checkpoint(sealed[-2]) if len(sealed) > 1 else None


def _has_entry(path: Path, entry: files.Entry) -> bool:
    """Whether a file is there with just these bytes: one that was damaged on the disk is not passed on."""
    with suppress(OSError):  # then it is written
        return path.stat().st_size == entry[1] and digests.hash_file(path) == entry[0]
    return False


def find_newest_valid(paths: RunPaths, spec: RunSpec, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every byte is right, and with it every other that its state refers to.

    Each damaged or outdated newer one is reported by `notice` and passed over.

    Raises:
        DamagedFileError: one that is intact was written by a newer version, or belongs to another run.
    """
    for step in reversed(paths.checkpoint_steps()):
        path = paths.checkpoint(step)
        _refuse_newer(path)
        try:
            sealed = _verify_and_read(path)
            others = [_verify_and_read(paths.checkpoint(other)) for other in sorted(sealed.state.refers_to)]
        except DamagedFileError as error:
            notice(f"checkpoint of step {step} is passed over: {error}")
            continue
        for one in (sealed, *others):
            if names := find_differing_keys(one.identity["spec"], spec.model_dump(mode="json")):
                where = paths.checkpoint(one.state.step)
                raise DamagedFileError(
                    f"{where}: belongs to another run, it differs in {', '.join(names)}; move it away, and repeat"
                )
        return path
    return None


def _verify_and_read(path: Path) -> CheckpointMetadata:
    files.verify_sealed(path, CHECKPOINT)
    return read_metadata(path)


def _refuse_newer(path: Path) -> None:
    """Raise DamagedFileError for an intact checkpoint of a later format.

    One flipped bit can make a later format of any number: so it takes an intact seal, or a later seal as well.
    """
    found = _read_format(path / STATE)
    if found <= FORMAT:
        return
    if _read_format(path / files.MANIFEST) <= files.MANIFEST_FORMAT:
        try:
            files.verify_sealed(path, CHECKPOINT)
        except DamagedFileError:
            return  # it is damaged, and will be passed over
    raise DamagedFileError(
        f"{path}: format {found}, written by a newer version of ratchet (this one knows {FORMAT}); use that version"
    )


def _read_format(path: Path) -> int:
    try:
        found = read_json(path).get("format", 1)
    except DamagedFileError:
        return 0
    return found if isinstance(found, int) else 0


def quarantine_newer(paths: RunPaths, going_on_from: Path | None) -> None:
    """Take checkpoints newer than this one (all, if there is none) out of the way of those that will be written.

    They stay beside as `damaged-step-…`, for a person to look at; a later one of the same step takes their place.
    """
    last = "" if going_on_from is None else going_on_from.name
    for path in map(paths.checkpoint, paths.checkpoint_steps()):
        if path.name > last and path.exists():
            files.publish_directory(path, path.with_name(f"{SET_ASIDE}{path.name}"))


_UNSAID = {"ranks": "1"}
"""What is meant where nothing is said."""


def list_origin_differences(path: Path, identity: dict[str, Any]) -> list[str]:
    """What has changed since a checkpoint was made that its numbers depend on, such as `torch 2.12 → 2.13`."""
    then, now = read_metadata(path).identity["made_by"], identity["made_by"]
    return [
        f"{key} {then.get(key, _UNSAID.get(key, 'unknown'))} → {now.get(key, _UNSAID.get(key, 'unknown'))}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]


def read(path: Path) -> TrainSnapshot:
    """The snapshot that was saved, in memory of its own.

    Raises:
        DamagedFileError: it is not what was sealed, or its state is not one of this format.
    """
    sealed = read_metadata(path)
    tensors = _load_tensors(path, OPTIMIZER) | _load_optional_tensors(path, CONSTANTS)
    extra, wire = _load_optional_tensors(path, ADAPTER), _split_by_rank(_load_optional_tensors(path, WIRE))
    return TrainSnapshot(sealed.state, _load_tensors(path, WEIGHTS), tensors, sealed.optimizer, extra, wire)


def _split_by_rank(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    found: dict[int, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        rank, name = path.split("/", 1)
        found.setdefault(int(rank), {})[name] = tensor
    return tuple(found[rank] for rank in sorted(found))


def _load_optional_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a file that not every checkpoint has; the manifest says whether this one does."""
    return _load_tensors(path, name) if name in files.read_manifest(path).files else {}


def _load_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a file. They are hashed where they lie in memory: between a check of the file and this, it may change.

    `load_file` maps the file, so its tensors would change with it: they are copied.
    """
    try:
        tensors = {key: tensor.clone() for key, tensor in load_file(path / name).items()}
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path / name}: cannot be read ({error})") from None
    if compute_digest_and_size(tensors) != files.read_manifest(path).files.get(name):
        raise DamagedFileError(f"{path / name}: content differs from the manifest (SHA-256)")
    return tensors


def restore(snapshot: TrainSnapshot, model: Model, optimizer: optimizers.Optimizer) -> None:
    """Put model and optimizer into a state. What they learn later does not change the snapshot.

    Raises:
        DamagedFileError: it is of other parameters than this model trains, or of another optimizer.
    """
    _put_weights(snapshot.weights, snapshot.extra, model, f"the checkpoint of step {snapshot.state.step}")
    tensors = {path: tensor.clone() for path, tensor in snapshot.optimizer.items()}  # optimizers keep those they get
    optimizers.restore(optimizer, tensors, deepcopy(snapshot.rest))


def load_weights(path: Path, model: Model) -> None:
    """Put the adapter of a checkpoint into the model. Raises DamagedFileError if it does not fit."""
    _put_weights(_load_tensors(path, WEIGHTS), _load_optional_tensors(path, ADAPTER), model, str(path))


def _put_weights(saved: dict[str, Tensor], extra: dict[str, Tensor], model: Model, where: str) -> None:
    wanted = dict(adapters.trainable_parameters(model))
    other = sorted(saved.keys() ^ wanted.keys())
    other += [n for n in sorted(saved.keys() & wanted.keys()) if saved[n].shape != wanted[n].shape]
    if other:
        raise DamagedFileError(f"{where}: holds other parameters than this model trains, e.g. {other[0]}")
    try:
        adapters.restore_extra(model, extra)
    except DamagedFileError as error:
        raise DamagedFileError(f"{where}: {error}") from None
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])


def rotate(paths: RunPaths, keep: int, protected: Collection[int]) -> None:
    """Remove old checkpoints by step order.

    Args:
        paths: the run.
        keep: how many of the newest that look sealed are kept, at least one, and with each what it refers to: without
            its best checkpoint none can be resumed from.
        protected: steps that are not removed: the best, those of snapshots, those that are not mirrored yet.
    """
    steps = paths.checkpoint_steps()
    kept = [step for step in steps if _looks_sealed(paths, step)][-max(1, keep) :]
    if not kept:
        return
    needed = set(protected)
    for step in kept:
        with suppress(DamagedFileError):  # a damaged one is no reason to keep another
            needed |= read_metadata(paths.checkpoint(step)).state.refers_to
    for step in steps:
        if step < kept[0] and step not in needed and paths.checkpoint(step).exists():
            files.remove_sealed(paths.checkpoint(step))
