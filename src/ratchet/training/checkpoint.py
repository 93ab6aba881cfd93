"""Checkpoints: everything that the next step depends on, sealed, in safetensors and JSON only.

    trainable.safetensors   the adapter's matrices, by parameter name
    optimizer.safetensors   the optimizer's tensors (optimizer.py)
    constants.safetensors   the optimizer's tensors that never change (bitsandbytes' quantisation maps), if any
    adapter.safetensors     further tensors of this kind of adapter (AdaLoRA, PiSSA), if any
    residuals.safetensors   each rank's residuals of gradient compression, by RANK/NAME, if any
    state.json              format, state (train_state.py), the optimizer's other values
    identity.json           the run's spec and its environment: versions of libraries, device, threads

Learning rate, order of rows and random numbers are functions of the step (optimizer.py, data/batches.py), and the
base is pinned by digest, so nothing else has to be saved. Equal snapshots give equal bytes in every file, regardless of
earlier checkpoints.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ratchet.errors import DamagedFileError, NonFiniteStateError
from ratchet.models import adapters, safetensors_format
from ratchet.models.device import Model
from ratchet.runs.directory import CHECKPOINT, RunPaths, RunSpec, spec_identity
from ratchet.storage import digests, files
from ratchet.storage.records.base import find_differing_keys
from ratchet.training import optimizer as optimizers
from ratchet.training.train_state import ADDED_FIELDS, TrainSnapshot, TrainState

FORMAT = 3
WEIGHTS = "trainable.safetensors"
OPTIMIZER = "optimizer.safetensors"
CONSTANTS = "constants.safetensors"
ADAPTER = "adapter.safetensors"
RESIDUALS = "residuals.safetensors"
STATE = "state.json"
IDENTITY = "identity.json"
QUARANTINE_PREFIX = "damaged-"
"""Prefix of the directory names of damaged checkpoints: the run has resumed from an older checkpoint."""
_CONSTANT_KEYS = {"qmap1", "qmap2"}  # bitsandbytes/optim/optimizer.py (0.50): computed once, never changed
_DEFAULT_ENVIRONMENT = {"ranks": "1", "kernels": "torch's"}
"""Values of those entries of the environment that a checkpoint leaves out."""
_STATE = TypeAdapter(TrainState)
_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that parsing the JSON files of a checkpoint may raise if their content is invalid."""


# Safetensors files.


def compute_digest_and_size(tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Return SHA-256 and size in bytes of the file that `write_safetensors` writes for these tensors. Raises TypeError
    if safetensors has no name for a tensor's dtype."""
    return _hash_blocks(_iterate_blocks(tensors), lambda: None)


def _hash_blocks(blocks: Iterable[files.Block], beat: Callable[[], None]) -> files.Entry:
    sha, size = hashlib.sha256(), 0
    for block in blocks:
        for piece in block:
            sha.update(piece)
            size += len(piece)
        beat()
    return sha.hexdigest(), size


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new safetensors file in chunks, and fsync it. The caller makes its name durable.

    Equal tensors give equal bytes. The tensors are not copied in memory.
    """
    files.write_blocks(path, _iterate_blocks(tensors))


def _iterate_blocks(tensors: Mapping[str, Tensor]) -> Iterator[list[bytes | memoryview]]:
    """Yield the bytes of the file in blocks of at most safetensors_format.CHUNK_BYTES. A block is a list of pieces."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries = ((name, tensors[name].dtype, tensors[name].shape) for name in order)
    block: list[bytes | memoryview] = [safetensors_format.encode_header(entries, None, sort_names=True)]
    left = safetensors_format.CHUNK_BYTES - len(block[0])
    for name in order:
        view = safetensors_format.view_bytes(tensors[name])
        while view:
            if left <= 0:
                yield block
                block, left = [], safetensors_format.CHUNK_BYTES
            block.append(view[:left])
            view, left = view[left:], left - len(block[-1])
    yield block


# The JSON files of a checkpoint. They are validated when they are read; invalid content raises DamagedFileError.


@dataclass(frozen=True)
class CheckpointMetadata:
    """Content of a checkpoint's JSON files."""

    state: TrainState
    optimizer_values: dict[str, Any]
    identity: dict[str, Any]
    """`spec` of the run and the `environment` that computed the checkpoint."""


def read_metadata(path: Path) -> CheckpointMetadata:
    """Read state and identity of a checkpoint. The bytes of the two files are not compared with the manifest. Raises
    DamagedFileError if a file is invalid or has another format."""
    document = files.read_json_object(path / STATE)
    version = document.get("format", 1)
    if version != FORMAT:
        raise DamagedFileError(f"{path / STATE}: found format {version}; this version reads format {FORMAT} only")
    identity = files.read_json_object(path / IDENTITY)
    try:
        state, optimizer_values = _parse_state(document["state"]), document["optimizer"]
        if not isinstance(optimizer_values["groups"], list) or not isinstance(optimizer_values["values"], dict):
            raise TypeError("optimizer")
        for key in ("spec", "environment"):
            if not isinstance(identity[key], dict):
                raise TypeError(key)
    except _PARSE_ERRORS as error:
        raise DamagedFileError(f"{path}: the state is invalid ({type(error).__name__}: {error})") from None
    if path.name.startswith("step-") and path.name != f"step-{state.step:08d}":
        raise DamagedFileError(f"{path}: contains the state of step {state.step}")
    return CheckpointMetadata(state, optimizer_values, identity)


def _parse_state(raw: dict[str, Any]) -> TrainState:
    if missing := sorted({field.name for field in fields(TrainState)} - ADDED_FIELDS - raw.keys()):
        raise KeyError(*missing)
    try:
        return _STATE.validate_json(json.dumps(raw), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


# Snapshots: the only part of a checkpoint that blocks training.


def take_snapshot(state: TrainState, model: Model, optimizer: optimizers.Optimizer) -> TrainSnapshot:
    """Copy weights, optimizer state and further tensors of the adapter to the host's memory.

    Tensors on a CPU are copied explicitly, because `.cpu()` would return the same tensor.
    """
    optimizer_tensors, optimizer_values = optimizers.flatten_state(optimizer)
    weights = {name: _copy_to_host(parameter.detach()) for name, parameter in adapters.trainable_parameters(model)}
    copied_tensors = {name: _copy_to_host(tensor) for name, tensor in optimizer_tensors.items()}
    adapter_tensors = {name: _copy_to_host(tensor) for name, tensor in adapters.extra_tensors(model).items()}
    if model.device.type == "cuda":
        # The copies are asynchronous. The device is named, because another thread's current GPU is the first one.
        torch.cuda.synchronize(model.device)
    return TrainSnapshot(state, weights, copied_tensors, optimizer_values, adapter_tensors)


def _copy_to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone(memory_format=torch.contiguous_format)
    # All copies run at once into pinned memory, which torch caches and reuses for the next snapshot.
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def is_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether all values of all floating-point tensors are finite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())


# Checkpoint directories.


@dataclass(frozen=True)
class CheckpointWriteStats:
    """Sizes of a saved checkpoint."""

    size_bytes: int
    bytes_written: int
    bytes_linked: int
    """Bytes of files that are hard links to files of an earlier checkpoint, and so take no space."""


def write(
    paths: RunPaths, snapshot: TrainSnapshot, identity: dict[str, Any], beat: Callable[[], None]
) -> CheckpointWriteStats:
    """Write and seal a checkpoint. A failed write leaves no files.

    A file that is equal in the second-newest checkpoint is linked to that file instead of written. A file is never
    linked to the newest checkpoint. So every file is on the disk twice, and one flipped bit cannot damage all
    checkpoints.

    Raises:
        NonFiniteStateError: a weight, or a tensor of optimizer or adapter, is not finite.
        OSError: the disk is full or failing; existing checkpoints are unchanged.
    """
    for tensors in (snapshot.weights, snapshot.optimizer_tensors, snapshot.adapter_tensors):
        for name, tensor in tensors.items():
            if not is_finite({name: tensor}):
                raise NonFiniteStateError(
                    f"{name} is not finite after step {snapshot.state.step}; the state was not saved"
                )
        beat()
    contents = _plan_files(snapshot, identity)
    entries = {name: _hash_blocks(blocks(), beat) for name, blocks in contents.items()}
    sealed = [step for step in paths.checkpoint_steps() if step != snapshot.state.step and _looks_sealed(paths, step)]
    earlier = paths.checkpoint(sealed[-2]) if len(sealed) > 1 else None
    linked = {name for name, entry in entries.items() if earlier is not None and _has_entry(earlier / name, entry)}
    size, size_linked = sum(size for _, size in entries.values()), sum(entries[name][1] for name in linked)
    target = paths.checkpoint(snapshot.state.step)
    files.make_directory(target.parent)
    files.require_space(target.parent, size - size_linked)
    with files.sealed_directory(target, CHECKPOINT, entries) as scratch:
        for name, blocks in contents.items():
            if earlier is None or name not in linked or not files.link_file(earlier / name, scratch / name):
                files.write_blocks(scratch / name, blocks(), beat)
                size_linked -= entries[name][1] if name in linked else 0
            beat()
    return CheckpointWriteStats(size, size - size_linked, size_linked)


def _plan_files(snapshot: TrainSnapshot, identity: dict[str, Any]) -> dict[str, Callable[[], Iterable[files.Block]]]:
    """Return a function for each file of the checkpoint that yields the blocks of the file."""
    constants = {path: t for path, t in snapshot.optimizer_tensors.items() if path.rsplit("/", 1)[-1] in _CONSTANT_KEYS}
    changing = {path: tensor for path, tensor in snapshot.optimizer_tensors.items() if path not in constants}
    residuals = {
        f"{rank}/{name}": tensor for rank, tensors in enumerate(snapshot.residuals) for name, tensor in tensors.items()
    }
    optional = {CONSTANTS: constants, ADAPTER: snapshot.adapter_tensors, RESIDUALS: residuals}
    tensor_files = {WEIGHTS: snapshot.weights, OPTIMIZER: changing, **{name: t for name, t in optional.items() if t}}
    state = {"format": FORMAT, "state": snapshot.state.to_json(), "optimizer": snapshot.optimizer_values}
    json_files = {STATE: [[files.json_bytes(state)]], IDENTITY: [[files.json_bytes(identity)]]}
    return {name: partial(_iterate_blocks, tensors) for name, tensors in tensor_files.items()} | {
        name: partial(list, blocks) for name, blocks in json_files.items()
    }


def _looks_sealed(paths: RunPaths, step: int) -> bool:
    with suppress(DamagedFileError):
        return files.read_manifest(paths.checkpoint(step)).kind == CHECKPOINT
    return False


def _has_entry(path: Path, entry: files.Entry) -> bool:
    """Return whether the file has exactly this size and digest, which excludes damaged files from being linked."""
    with suppress(OSError):  # an unreadable file is not linked
        return path.stat().st_size == entry[1] and digests.hash_file(path) == entry[0]
    return False


def find_newest_valid(
    paths: RunPaths, spec: RunSpec, notice: Callable[[str], None], max_step: int | None = None
) -> Path | None:
    """Return the newest checkpoint that is valid together with all checkpoints that its state requires.

    With `max_step`, later checkpoints do not count.

    Newer checkpoints that are damaged or outdated are reported to `notice` and skipped. Raises DamagedFileError if an
    intact checkpoint was written by a newer version, or belongs to another run.
    """
    for step in reversed(paths.checkpoint_steps()):
        if max_step is not None and step > max_step:
            continue
        path = paths.checkpoint(step)
        _refuse_newer(path)
        try:
            metadata = _verify_or_repair(paths, step, notice)
            required = [
                _verify_or_repair(paths, required_step, notice)
                for required_step in sorted(metadata.state.required_steps)
            ]
        except DamagedFileError as error:
            notice(f"checkpoint of step {step} is skipped: {error}")
            continue
        for candidate in (metadata, *required):
            # Compare identities, because specs of earlier versions lack newer settings.
            own = spec_identity(spec.model_dump(mode="json"))
            if names := find_differing_keys(spec_identity(candidate.identity["spec"]), own):
                where = paths.checkpoint(candidate.state.step)
                raise DamagedFileError(
                    f"{where}: belongs to another run (different: {', '.join(names)}); move it away, then run the same "
                    "command again"
                )
        return path
    return None


def _verify_or_repair(paths: RunPaths, step: int, notice: Callable[[str], None]) -> CheckpointMetadata:
    """Read the metadata of an intact checkpoint. Replace its damaged files by equal files of other checkpoints first.

    Only a file with the digest of the manifest replaces another, so a repaired checkpoint is the one that was saved.
    Weights or optimizer of another step would make another training.
    """
    path = paths.checkpoint(step)
    try:
        return _verify_and_read(path)
    except DamagedFileError:
        files.remove_partials(path)  # of a repair that was killed
        manifest = files.read_manifest(path)  # without a manifest, nothing is known about the files
        others = [paths.checkpoint(other) for other in reversed(paths.checkpoint_steps()) if other != step]
        for name in [name for name, entry in manifest.files.items() if not _has_entry(path / name, entry)]:
            source = next((other for other in others if _has_entry(other / name, manifest.files[name])), None)
            if source is None:
                raise
            try:
                files.write_atomic(path / name, (source / name).read_bytes())
            except OSError as error:
                raise DamagedFileError(f"{path / name}: damaged, and cannot be repaired ({error})") from None
            notice(f"checkpoint of step {step}: {name} was damaged; restored from {source.name}, which has the same")
    return _verify_and_read(path)


def _verify_and_read(path: Path) -> CheckpointMetadata:
    files.verify_sealed(path, CHECKPOINT)
    return read_metadata(path)


def _refuse_newer(path: Path) -> None:
    """Raise DamagedFileError for an intact checkpoint of a newer format.

    One flipped bit can turn the format number into a larger number. So a larger number alone is not enough: the
    manifest must also match the files, or must itself have a newer format than this version knows.
    """
    version = _read_format(path / STATE)
    if version <= FORMAT:
        return
    if _read_format(path / files.MANIFEST) <= files.MANIFEST_FORMAT:
        try:
            files.verify_sealed(path, CHECKPOINT)
        except DamagedFileError:
            return  # the checkpoint is damaged and will be skipped
    raise DamagedFileError(
        f"{path}: found format {version}, written by a newer version of Ratchet; this version reads format {FORMAT}: "
        "use the newer version"
    )


def _read_format(path: Path) -> int:
    try:
        version = files.read_json_object(path).get("format", 1)
    except DamagedFileError:
        return 0
    return version if isinstance(version, int) else 0


def quarantine_newer(paths: RunPaths, newest_valid: Path | None) -> None:
    """Rename checkpoints newer than `newest_valid` (all, if None) to `damaged-step-…`, for a person to inspect.

    If a checkpoint of the same step is quarantined again later, it replaces the first one.
    """
    last = "" if newest_valid is None else newest_valid.name
    for path in map(paths.checkpoint, paths.checkpoint_steps()):
        if path.name > last and path.exists():
            files.publish_directory(path, path.with_name(f"{QUARANTINE_PREFIX}{path.name}"))


def list_environment_differences(path: Path, identity: dict[str, Any]) -> list[str]:
    """Return what has changed in the environment since a checkpoint was saved, such as `torch 2.12 → 2.13`."""
    saved, current = read_metadata(path).identity["environment"], identity["environment"]

    def value(environment: dict[str, str], key: str) -> str:
        return environment.get(key, _DEFAULT_ENVIRONMENT.get(key, "unknown"))

    return [
        f"{key} {value(saved, key)} → {value(current, key)}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def read(path: Path) -> TrainSnapshot:
    """Read a checkpoint as a snapshot. Raises DamagedFileError if the files differ from the manifest, or the state has
    another format."""
    metadata = read_metadata(path)
    residuals: dict[int, dict[str, Tensor]] = {}
    for key, tensor in _load_tensors(path, RESIDUALS, is_optional=True).items():
        rank, name = key.split("/", 1)
        residuals.setdefault(int(rank), {})[name] = tensor
    return TrainSnapshot(
        state=metadata.state,
        weights=_load_tensors(path, WEIGHTS),
        optimizer_tensors=_load_tensors(path, OPTIMIZER) | _load_tensors(path, CONSTANTS, is_optional=True),
        optimizer_values=metadata.optimizer_values,
        adapter_tensors=_load_tensors(path, ADAPTER, is_optional=True),
        residuals=tuple(residuals[rank] for rank in sorted(residuals)),
    )


def _load_tensors(path: Path, name: str, is_optional: bool = False) -> dict[str, Tensor]:
    """Load the tensors of a file, and compare their digest with the manifest. Return none if the file is optional and
    the manifest does not list it.

    The digest is computed from the tensors in memory, because the file may change after it was verified. The tensors
    are copied, because `load_file` maps the file.
    """
    entry = files.read_manifest(path).files.get(name)
    if entry is None and is_optional:
        return {}
    try:
        tensors = {key: tensor.clone() for key, tensor in load_file(path / name).items()}
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path / name}: cannot be read ({error})") from None
    if compute_digest_and_size(tensors) != entry:
        raise DamagedFileError(f"{path / name}: content differs from the manifest (SHA-256)")
    return tensors


def restore(snapshot: TrainSnapshot, model: Model, optimizer: optimizers.Optimizer) -> None:
    """Restore model and optimizer from a snapshot. Later training steps do not change the snapshot. Raises
    DamagedFileError if the snapshot has other parameters than this model trains, or another optimizer."""
    _load_into_model(snapshot.weights, snapshot.adapter_tensors, model, f"the checkpoint of step {snapshot.state.step}")
    tensors = {path: tensor.clone() for path, tensor in snapshot.optimizer_tensors.items()}  # torch would not copy
    optimizers.restore(optimizer, tensors, deepcopy(snapshot.optimizer_values))


def load_weights(path: Path, model: Model) -> None:
    """Load the adapter of a checkpoint into the model. Raises DamagedFileError if the adapter does not fit."""
    _load_into_model(_load_tensors(path, WEIGHTS), _load_tensors(path, ADAPTER, is_optional=True), model, str(path))


def _load_into_model(saved: dict[str, Tensor], adapter_tensors: dict[str, Tensor], model: Model, where: str) -> None:
    parameters = dict(adapters.trainable_parameters(model))
    different = sorted(saved.keys() ^ parameters.keys())
    different += [n for n in sorted(saved.keys() & parameters.keys()) if saved[n].shape != parameters[n].shape]
    if different:
        raise DamagedFileError(f"{where}: has other parameters than this model trains, such as {different[0]}")
    try:
        adapters.restore_extra(model, adapter_tensors)
    except DamagedFileError as error:
        raise DamagedFileError(f"{where}: {error}") from None
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def rotate(paths: RunPaths, keep: int, protected: Collection[int]) -> None:
    """Remove old checkpoints in the order of their steps.

    Args:
        paths: the run.
        keep: number of newest sealed checkpoints to keep, at least one. Checkpoints that their states require are kept
            too, because a run cannot resume from a checkpoint without its best checkpoint.
        protected: steps that are not removed, nor what they require: the best, rollback snapshots, steps that are not
            replicated yet.
    """
    steps = paths.checkpoint_steps()
    kept = [step for step in steps if _looks_sealed(paths, step)][-max(1, keep) :]
    if not kept:
        return
    required = set(protected)
    for step in {*kept, *(required & set(steps))}:
        with suppress(DamagedFileError):  # a damaged checkpoint requires no others
            required |= read_metadata(paths.checkpoint(step)).state.required_steps
    for step in steps:
        if step < kept[0] and step not in required and paths.checkpoint(step).exists():
            files.remove_sealed(paths.checkpoint(step))
