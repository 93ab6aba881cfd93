"""What a merge will do, tensor by tensor, from headers and JSON alone: all that can be refused early is found here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ratchet.errors import SettingsError
from ratchet.export.merge import tensor_names
from ratchet.export.merge.base_reader import BaseStorageFormat, BaseWeightReader, TokenRowInitialization
from ratchet.export.merge.deltas import AdapterUpdates
from ratchet.export.merge.request import MergeRecipe, validate_recipe
from ratchet.export.merge.shards import TensorEntry
from ratchet.export.merge.tensor_names import TensorGroup, UnknownNamesError
from ratchet.models import base_model, loading, model_spec, prequantized, vocabulary, weights
from ratchet.models.device import Model
from ratchet.models.memory import parameters
from ratchet.models.model_spec import ModelSpec
from ratchet.storage.records.base import StoredQuantization


@dataclass(frozen=True)
class MergeUnit:
    """Parameters that are computed and written together: mostly one."""

    group: TensorGroup
    places: dict[str, str]
    """Parameters as they are read, and what they are in the result: a head gets a copy of what it was tied to."""
    entries: tuple[TensorEntry, ...]
    """What is written of them, in this order."""
    renamed: bool
    """Whether each is one of the entries, in this order; else numbers are put together or taken apart to be written."""


@dataclass(frozen=True)
class MergePlan:
    """A merge that can begin."""

    model: Model
    """The merged model without data, with its config and a row for each token."""
    updates: AdapterUpdates
    form: BaseStorageFormat
    pieces: tuple[MergeUnit, ...] | None
    """None: the names of the files cannot be followed, and the model is merged as a whole."""
    tied: bool
    """Whether embeddings and head are one tensor in the result; of a merge as a whole, whether they may be."""

    @property
    def entries(self) -> list[TensorEntry]:
        """Everything that is written."""
        return [entry for piece in self.pieces or () for entry in piece.entries]


def plan_merge(recipe: MergeRecipe) -> MergePlan:
    """Look at base and adapters without reading a weight of the base.

    Raises:
        BaseModelError: base or adapter are not what they should be, or do not go together.
        DamagedFileError: an adapter cannot be read, or holds NaN.
        SettingsError: the recipe asks for what these files do not have.
    """
    validate_recipe(recipe)
    stored = _stored_quantization(recipe)
    plan = model_spec.load(recipe.base, recipe.card.remote_code)
    plan.require_causal()
    weights.check_stored_tensors(recipe.base, plan, stored)
    computed_in = loading.pick_dtype(recipe.train.compute_dtype, recipe.device)
    held_in = computed_in if recipe.merge_base == "dequantized" else torch.float32
    size, pieces = _token_row_count(recipe)
    grown = partial(_grow_model, plan, held_in, size, pieces)
    model = grown()
    updates = AdapterUpdates.read(recipe, model, grown)
    small = plan.model(held_in)
    form = BaseStorageFormat(
        dtypes={name: tensor.dtype for name, tensor in small.state_dict().items()},
        four_bits=_four_bit_weights(recipe, small, stored),
        in_files=frozenset(weights.unpacked_shapes(recipe.base, stored)) if stored else frozenset(),
        turned=frozenset(f"{layer.name}.weight" for layer in plan.layers if layer.kind == "conv1d"),
        rows=dict(_token_row_parameters(small, model, pieces)),
    )
    try:
        shapes = weights.plain_shapes(recipe.base, plan, stored)
        found, tied = _plan_units(recipe, shapes, small, model, form, updates)
    except UnknownNamesError:
        return MergePlan(model, updates, form, None, tied=bool(model.all_tied_weights_keys))
    return MergePlan(model, updates, form, tuple(found), tied)


def _stored_quantization(recipe: MergeRecipe) -> StoredQuantization | None:
    stored = prequantized.detect(base_model.read_config(recipe.base), str(recipe.base))
    if stored is None:
        return None
    prequantized.require_same_quantization(stored, recipe.train, str(recipe.base))
    if recipe.merge_base == "original":
        raise SettingsError(
            f"export.merge_base: original, but {recipe.base} is quantised in its own files, so there are no other "
            "weights than those that were trained against; set export.merge_base: dequantized"
        )
    return stored


def _token_row_count(recipe: MergeRecipe) -> tuple[int, vocabulary.Pieces]:
    """Rows that the model needs, and how those of added tokens begin."""
    tokenizer = base_model.open_tokenizer(recipe.base, recipe.card.remote_code)
    pieces = vocabulary.add_tokens(tokenizer, recipe.card.added_tokens)
    return vocabulary.required_rows(tokenizer), pieces


def _grow_model(plan: ModelSpec, dtype: torch.dtype, size: int, pieces: vocabulary.Pieces) -> Model:
    model = plan.model(dtype)
    vocabulary.grow_embeddings(model, size, pieces)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _four_bit_weights(recipe: MergeRecipe, small: Model, stored: StoredQuantization | None) -> frozenset[str]:
    """Weights that are put in 4 bits when the base is loaded for training, by transformers' own choice."""
    if stored is not None or recipe.train.quantization == "none" or recipe.merge_base == "original":
        return frozenset()
    return frozenset(f"{name}.weight" for name in parameters.list_quantized_modules(small))


def _token_row_parameters(
    small: Model, model: Model, pieces: vocabulary.Pieces
) -> Iterator[tuple[str, TokenRowInitialization]]:
    """Every parameter with a row for each token, by all of its names."""
    held = [one for one in (small.get_input_embeddings(), small.get_output_embeddings()) if one is not None]
    tensors = {id(t) for one in held for t in (getattr(one, "weight", None), getattr(one, "bias", None))}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, parameter in small.named_parameters(remove_duplicate=False):
        if id(parameter) in tensors:
            count, stored = shapes[name][0], len(parameter)
            yield name, TokenRowInitialization(count, stored, dict.fromkeys(range(stored, count), ()) | dict(pieces))


# ----------------------------------------------------------------------------------------------------- what is written


def _plan_units(
    recipe: MergeRecipe,
    shapes: dict[str, tuple[int, ...]],
    small: Model,
    model: Model,
    form: BaseStorageFormat,
    updates: AdapterUpdates,
) -> tuple[list[MergeUnit], bool]:
    """All pieces in the order of writing, and whether what is tied stays tied.

    Args:
        recipe: what is merged.
        shapes: of the stored tensors.
        small: the base without data, as it is stored.
        model: the same with a row for each token.
        form: how parameters are held.
        updates: what changes them.

    Raises:
        UnknownNamesError: what would be written is not, to the last tensor, what transformers would read back.
    """
    try:
        groups = tensor_names.group_tensors(model, shapes)
        read = tensor_names.meta_tensor_reader(shapes, form.dtypes)
        made = [(group, group.parameters(small, read)) for group in groups]
        found, tied = _without_ties(recipe, model, form, updates, made)
        pieces = _with_entries(recipe, model, found)
        pieces.sort(key=lambda piece: -max(entry.dtype.itemsize for entry in piece.entries))
        _require_read_back(model, pieces)
    except (KeyError, ValueError, IndexError, TypeError, RuntimeError, AttributeError) as error:
        raise UnknownNamesError(f"{recipe.base}: {error}") from error  # whatever a conversion does without data
    return pieces, tied


def _without_ties(
    recipe: MergeRecipe,
    model: Model,
    form: BaseStorageFormat,
    updates: AdapterUpdates,
    made: Sequence[tuple[TensorGroup, dict[str, Tensor]]],
) -> tuple[list[tuple[TensorGroup, dict[str, str]]], bool]:
    """Every group with the places of its parameters, each tensor that stays tied once; and whether all stay tied."""
    ties: dict[str, str] = dict(model.all_tied_weights_keys)
    by_name = {name: group for group, tensors in made for name in tensors}
    apart = {t for t, s in ties.items() if {t, s} <= by_name.keys() and not _are_equal(recipe, form, by_name, (t, s))}
    if missing := (model.state_dict().keys() - by_name.keys()) - (ties.keys() | set(ties.values())):
        raise UnknownNamesError(f"{min(missing)} comes from nowhere")
    keep = not apart and all(updates.are_same(target, origin) for target, origin in ties.items())
    found = [(group, {name: name for name in tensors}) for group, tensors in made]
    if keep:
        found = [(group, {n: ties.get(n, n) for n in places}) for group, places in found]
        taken: set[str] = set()
        unique = []
        for group, places in found:
            if not taken.intersection(places.values()):
                unique.append((group, places))
                taken.update(places.values())
        return unique, bool(ties)
    for target, origin in ties.items():
        for one, other in ((target, origin), (origin, target)):
            if one not in by_name and other in by_name:
                found.append((by_name[other], {other: one}))
                by_name[one] = by_name[other]
    untie_embeddings(model)
    return found, False


def _are_equal(
    recipe: MergeRecipe, form: BaseStorageFormat, by_name: dict[str, TensorGroup], pair: tuple[str, str]
) -> bool:
    """Whether two stored tensors that the config calls one are: transformers ties them only then."""
    values = BaseWeightReader(recipe, form)
    first, second = (values.read(by_name[name].stored[0][1], name) for name in pair)
    return bool(first.shape == second.shape and torch.equal(first, second))


def untie_embeddings(model: Model) -> None:
    """Say in its config that embeddings and head are two tensors."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False


def _with_entries(
    recipe: MergeRecipe, model: Model, found: Sequence[tuple[TensorGroup, dict[str, str]]]
) -> list[MergeUnit]:
    """Every group with what is written of it."""
    held, own = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    without_data = {
        place: torch.empty(held[place].shape, dtype=output_dtype(recipe, held[place], place in own), device="meta")
        for _, places in found
        for place in places.values()
    }
    new_names = tensor_names.stored_names(model, without_data)
    pieces = []
    for group, places in found:
        tensors = {place: without_data[place] for place in places.values()}
        if new_names is None:
            made = tensor_names.convert_to_stored(model, tensors)
        else:
            made = {new_names[place]: tensor for place, tensor in tensors.items()}
        entries = tuple(TensorEntry(name, tuple(one.shape), one.dtype) for name, one in made.items())
        pieces.append(MergeUnit(group, places, entries, new_names is not None))
    return pieces


def output_dtype(recipe: MergeRecipe, tensor: Tensor, is_parameter: bool) -> torch.dtype:
    """Type in which a tensor is written: the recipe's for weights, its own for buffers."""
    return recipe.dtype if is_parameter and tensor.is_floating_point() else tensor.dtype


def _require_read_back(model: Model, pieces: Sequence[MergeUnit]) -> None:
    """Raises UnknownNamesError unless transformers would find every parameter in what is written, and nothing else."""
    shapes = {entry.name: entry.shape for piece in pieces for entry in piece.entries}
    if len(shapes) != sum(len(piece.entries) for piece in pieces):
        raise UnknownNamesError("two tensors would have one name")
    report = weights.loading_report(model, shapes)
    if odd := [key for key in ("missing_keys", "mismatched_keys", "unexpected_keys") if report[key]]:
        raise UnknownNamesError(f"{odd[0]}: {min(map(str, report[odd[0]]))}")
