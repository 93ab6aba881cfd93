"""Merging a model whose files use names that cannot be followed: loaded as a whole, changed, written.

It takes the memory of the loaded base and of the result; everything else is as in stream.py.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ratchet.export.merge import shards, tensor_names
from ratchet.export.merge.base_reader import BaseWeightReader
from ratchet.export.merge.plan import MergePlan, output_dtype, plan_merge, untie_embeddings
from ratchet.export.merge.request import MergeRecipe
from ratchet.export.merge.shards import TensorEntry
from ratchet.models import base_model, frozen_weights, loading, weights
from ratchet.models.device import Model
from ratchet.storage import files
from ratchet.storage.records.export import Progress


def merge_in_memory(recipe: MergeRecipe, plan: MergePlan) -> tuple[dict[str, Tensor], bool]:
    """Every tensor of the merged model, on the CPU, by the name under which transformers writes it.

    Returns:
        The tensors, and whether embeddings and head are one of them.

    Raises:
        BaseModelError, SettingsError: the base cannot be loaded as it was trained against.
    """
    dequantized = recipe.merge_base == "dequantized"
    if dequantized:
        base = loading.load(recipe.base, recipe.card, recipe.train, recipe.device)
    else:
        base = loading.load_plain(recipe.base, torch.float32, recipe.device, recipe.card.remote_code)
    plan.model._weight_conversions = base._weight_conversions  # as they were read, so they are written
    values, own = BaseWeightReader(recipe, plan.form), dict(base.named_parameters(remove_duplicate=False))
    held, ties, found = base.state_dict(), dict(plan.model.all_tied_weights_keys), {}
    if any(own[a] is not own[b] or not plan.updates.are_same(a, b) for a, b in ties.items()):
        ties = {}
        untie_embeddings(plan.model)
    with torch.no_grad():
        for name, place in plan.model.state_dict().items():
            if name in ties:
                continue
            value = _loaded_parameter(base, plan.model, name) if name in own else held[name].clone()
            if not dequantized:
                value = values.as_trained(name, value)
            value = plan.updates.applied(name, value)
            if value.shape != place.shape:
                raise RuntimeError(f"{name}: {tuple(value.shape)}, not {tuple(place.shape)}")
            found[name] = value.to(output_dtype(recipe, value, name in own)).cpu()
    return tensor_names.convert_to_stored(plan.model, found), bool(ties)


def _loaded_parameter(base: Model, model: Model, name: str) -> Tensor:
    """A parameter of the loaded base in float32, in memory of its own, laid out as the plain model has it."""
    path, _, leaf = name.rpartition(".")
    if leaf != "weight":
        return base.get_parameter(name).detach().to(torch.float32, copy=True)
    value = frozen_weights.dense_weight(base.get_submodule(path)).clone()
    return value.T if isinstance(model.get_submodule(path), frozen_weights.TRANSPOSED) else value


# Merge adapters into their base: a plain model that needs neither peft nor bitsandbytes, from shards to shards.
#
# Which weights an adapter is added to matters: it was trained against the dequantised 4-bit base. In our probe the
# logits
# of the merged model then differed by 2e-5 at most; added to the original weights, by .67. Sums are computed in
# float32,
# one tensor at a time, and rounded once. What is in memory is one group of tensors that belong together (a matrix, or
# the
# experts of a layer), two copies of it in float32, and the adapters; the model's size does not matter.

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class MergeResult:
    """What was written."""

    changed: int
    """Tensors of the model that an update was added to."""
    streamed: bool
    """Tensor by tensor; or as a whole in memory, where the names of the files could not be followed."""
    tied: bool
    """Whether embeddings and head are one tensor, and are stored once."""


def merged_size_bytes(recipe: MergeRecipe) -> int:
    """Size of the files of weights that `merge_model` will write. Raises as `recipe.require_mergeable`."""
    plan = plan_merge(recipe)
    return shards.shard_files_size_bytes(_plan_entries(recipe, plan), recipe.shard_bytes)


def merge_model(recipe: MergeRecipe, directory: Path, progress: Progress) -> MergeResult:
    """Write the merged model: weights, config.json and generation_config.json; no tokenizer and no card.

    A head that was tied to the embeddings stays tied unless an adapter has made one of them different: then both are
    written, and the config says so.

    Args:
        recipe: what is merged.
        directory: where; it may be there already, empty.
        progress: told the bytes that are written, and of how many.

    Raises:
        BaseModelError, DamagedFileError, SettingsError: as `recipe.require_mergeable`.
    """
    plan = plan_merge(recipe)
    files.make_directory(directory)
    with torch.no_grad():
        entries, tensors, tied = (_stream_tensors if plan.pieces is not None else _merge_whole_model)(recipe, plan)
        total = sum(entry.size_bytes for entry in entries)
        shards.write_shards(
            directory, entries, tensors, recipe.shard_bytes, lambda done: progress("merge", done, total)
        )
    weights.trim_heap()
    _write_config(recipe, plan, directory)
    return MergeResult(len(plan.updates.names), plan.pieces is not None, tied)


def _plan_entries(recipe: MergeRecipe, plan: MergePlan) -> list[TensorEntry]:
    """What will be written; under the parameters' own names where those of the files are not known yet."""
    if plan.pieces is not None:
        return plan.entries
    own = {name for name, _ in plan.model.named_parameters(remove_duplicate=False)}
    ties = plan.model.all_tied_weights_keys if plan.tied else {}
    held = {name: one for name, one in plan.model.state_dict().items() if name not in ties}
    return [TensorEntry(name, tuple(one.shape), output_dtype(recipe, one, name in own)) for name, one in held.items()]


def _stream_tensors(
    recipe: MergeRecipe, plan: MergePlan
) -> tuple[list[TensorEntry], Iterator[tuple[str, Tensor]], bool]:
    return plan.entries, _iterate_tensors(recipe, plan), plan.tied


def _merge_whole_model(
    recipe: MergeRecipe, plan: MergePlan
) -> tuple[list[TensorEntry], Iterator[tuple[str, Tensor]], bool]:
    found, tied = merge_in_memory(recipe, plan)
    entries = [TensorEntry(name, tuple(one.shape), one.dtype) for name, one in found.items()]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)
    return entries, ((entry.name, found.pop(entry.name)) for entry in entries), tied


def _iterate_tensors(recipe: MergeRecipe, plan: MergePlan) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is written, in the order of the plan; none is held after the next is asked for."""
    values = BaseWeightReader(recipe, plan.form)
    own = {name for name, _ in plan.model.named_parameters(remove_duplicate=False)}
    for piece in plan.pieces or ():
        read = piece.group.parameters(plan.model, values.read)
        made = {}
        for name, place in piece.places.items():
            value = plan.updates.applied(place, values.as_trained(name, read.pop(name)))
            made[place] = value.to(output_dtype(recipe, value, place in own)).cpu()
            del value
        if piece.renamed:
            found = {entry.name: made.pop(place) for entry, place in zip(piece.entries, list(made), strict=True)}
        else:
            found = tensor_names.convert_to_stored(plan.model, made)
        del made, read
        while found:
            name = next(iter(found))
            yield name, found.pop(name)


def _write_config(recipe: MergeRecipe, plan: MergePlan, directory: Path) -> None:
    """config.json and generation_config.json as transformers writes them, and code that the base brings along."""
    config = copy.deepcopy(plan.model.config)
    config.dtype = str(recipe.dtype).removeprefix("torch.")
    config.architectures = [type(plan.model).__name__]
    config.save_pretrained(str(directory))
    own = recipe.base / _GENERATION
    if own.is_file():
        files.write_atomic(directory / _GENERATION, own.read_bytes())
    elif plan.model.can_generate():
        plan.model.generation_config.save_pretrained(str(directory))
    if recipe.card.remote_code:
        for name in base_model.list_companion_files(recipe.base, code=True):
            if name.endswith(".py"):
                files.make_directory((directory / name).parent)
                files.write_atomic(directory / name, (recipe.base / name).read_bytes())
