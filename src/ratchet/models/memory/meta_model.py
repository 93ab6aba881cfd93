"""The model as it is trained, on the meta device: 4-bit layers, adapters; and, where its blocks repeat,
two shorter ones that stand for it.

Memory is a sum over blocks. Where all periods of blocks are alike, a model with one more period needs a fixed amount
more at each place of the step, so a model of three periods and one of four tell what any number needs. That is exact,
not an approximation, and it is checked before it is used: blocks are compared by their classes, shapes, settings and
adapters. Models whose blocks do not repeat are built as a whole.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers.pytorch_utils import Conv1D

from ratchet.config.train import Train
from ratchet.models import adapters, targets
from ratchet.models.loading import Model
from ratchet.models.memory import parameters
from ratchet.models.memory.malloc import MallocSimulator
from ratchet.models.memory.parameters import BaseTensorSizes
from ratchet.models.memory.trace import AllocationTrace, Device, MemoryPeak, Segment
from ratchet.models.model_spec import ModelSpec, find_blocks, list_layers

SHORT_AND_LONG = {"cuda": (3, 4), "cpu": (8, 16)}
"""Periods of the two models that stand for a longer one. Three are the fewest: the last block is computed where it is
learned from only (last_block.py), so there has to be one that is neither the first nor the last.
On CPUs memory also depends on how the allocator fills gaps, which is even only in the long run."""
STEPS = 1000
"""That AdaLoRA's schedule is made for; it moves no byte."""
_BLOCK, _NESTED_BLOCK = 64, 256
_NUMBERS = ("layer_idx", "layer_id", "layer_number")
"""What transformers calls a block's own number."""


@dataclass(frozen=True)
class ExtrapolatedMetaModel:
    """Models with adapters on the meta device, and how many periods each has beside the real one."""

    models: tuple[Model, ...]
    """The real one; or a short and a long one."""
    periods: tuple[int, ...]
    """Of the short, the long and the real one; none where the real one is there itself."""
    ends: tuple[tuple[int, int], ...]
    """For each model: blocks counted from the first, and blocks counted from the last; others lie between."""
    stored: BaseTensorSizes
    """Bytes of the real one's base."""

    def extended(self, values: tuple[int, ...]) -> int:
        """What the real model has, given what the models here have."""
        if not self.periods:
            return values[0]
        short, long, real = self.periods
        return values[0] + (values[1] - values[0]) * (real - short) // (long - short)

    def sum_of(self, figure: Callable[[Model], int]) -> int:
        """A figure of the real model that is a sum over its blocks."""
        return self.extended(tuple(figure(model) for model in self.models))

    def learning(self) -> list[nn.Parameter]:
        """What learns in the real model, in its order; blocks that are not here are stood for by one that is."""
        model, ends = self.models[-1], self.ends[-1]
        found = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        if not self.periods:
            return [one for _, one in found]
        short, long, real = self.periods
        (_, fewer), (stack, more) = (find_blocks(one) for one in self.models)
        period = (len(more) - len(fewer)) // (long - short)
        repeated = tuple(f"{stack}.{number}." for number in range(ends[0], ends[0] + period))
        there = [one for name, one in found if name.startswith(repeated)]
        end = max((place + 1 for place, (name, _) in enumerate(found) if name.startswith(repeated)), default=0)
        parameters = [one for _, one in found]
        return parameters[:end] + (real - long) * there + parameters[end:]

    def highest(self, accounts: Sequence[AllocationTrace]) -> dict[str, int]:
        """Parts of the greatest peak that any segment of the real model's step has; nothing without accounts."""
        best: dict[str, int] = {}
        if accounts:
            found = [_key_peaks_by_position(*one) for one in zip(accounts, self.models, self.ends, strict=True)]
            for place, first in found[0].items():
                peaks = [one[place].parts for one in found]
                parts = {part: self.extended(tuple(peak[part] for peak in peaks)) for part in first.parts}
                best = max(best, parts, key=lambda one: sum(one.values()))
        return best

    def resident_bytes(self, heaps: Sequence[MallocSimulator], accounts: Sequence[AllocationTrace]) -> int:
        """Pages that the real process has touched when all this has happened in it too."""
        return self.extended(tuple(heap.replay(one.events) for heap, one in zip(heaps, accounts, strict=True)))


def _key_peaks_by_position(account: AllocationTrace, model: Model, ends: tuple[int, int]) -> dict[Segment, MemoryPeak]:
    """Peaks by a name of their place that is the same in a shorter and a longer model; those between are left out."""
    count = len(find_blocks(model)[1])
    found: dict[Segment, MemoryPeak] = {}
    for (direction, place, number), peak in account.peaks.items():
        if place != "block" or number < ends[0]:
            found[direction, place, number] = peak
        elif number >= count - ends[1]:
            found[direction, "block", number - count] = peak
    return found


@dataclass(frozen=True)
class _BlockRepetition:
    """Blocks `first` to `first + period * count` repeat; `first` before them and `rest` after them do not."""

    first: int
    period: int
    count: int
    rest: int

    def kept(self, periods: int) -> list[int]:
        """Numbers of the blocks of a model with so many periods."""
        end = self.first + self.period * self.count
        return [*range(self.first + self.period * periods), *range(end, end + self.rest)]


def build(
    blueprint: ModelSpec, settings: Train, dtype: torch.dtype, device: Device, new_tokens: int = 0
) -> ExtrapolatedMetaModel:  # fmt: skip
    """The model that these settings train, or what stands for it.

    Args:
        blueprint: of the base.
        settings: section train.
        dtype: of matrix products.
        device: that trains.
        new_tokens: rows of the embedding that learn.

    Raises:
        SettingsError: targets, ranks or patterns do not fit the model.
    """
    targets.check(blueprint, settings)

    def plain() -> Model:
        return blueprint.model(dtype, settings.attention)

    def finished(model: Model) -> Model:
        if names := parameters.measure_base_sizes(model, settings).quantized:
            _quantize_on_meta(model, names, settings, dtype)
        return _attach_adapter(model, settings, new_tokens)

    whole = plain()
    stored = parameters.measure_base_sizes(whole, settings)
    repetition = _find_repetition(whole, settings)
    lengths = SHORT_AND_LONG[device]
    if repetition is None or repetition.count <= lengths[1]:
        return ExtrapolatedMetaModel((finished(whole),), (), ((len(find_blocks(whole)[1]), 0),), stored)
    models, ends = [], []
    for periods, model in zip(lengths, (plain(), whole), strict=True):
        if not _remove_periods(model, repetition, periods, settings):
            return ExtrapolatedMetaModel((finished(plain()),), (), ((len(find_blocks(whole)[1]), 0),), stored)
        models.append(finished(model))
        # Two periods from the end, for the last block is like no other one.
        ends.append((repetition.first + repetition.period, 2 * repetition.period + repetition.rest))
    return ExtrapolatedMetaModel(tuple(models), (*lengths, repetition.count), tuple(ends), stored)


def build_frozen(blueprint: ModelSpec, settings: Train, dtype: torch.dtype) -> tuple[Model, BaseTensorSizes]:
    """A model without an adapter as it is held for forward passes, all of it, on the meta device; and its bytes.

    Raises:
        SettingsError: a matrix cannot be held in tensors of train.quantization_storage.
    """
    model = blueprint.model(dtype, settings.attention)
    stored = parameters.measure_base_sizes(model, settings)
    if stored.quantized:
        _quantize_on_meta(model, stored.quantized, settings, dtype)
    return model.requires_grad_(False), stored


def _quantize_on_meta(model: Model, names: tuple[str, ...], settings: Train, dtype: torch.dtype) -> None:
    """Put these modules into bitsandbytes' own layers, with weights and constants of the right sizes."""
    for name in names:
        module = model.get_submodule(name)
        inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
        layer: Any = Linear4bit(inputs, outputs, module.bias is not None, dtype, device="meta")
        layer.weight = _pack_on_meta(layer, settings, dtype)
        layer.bias = module.bias
        layer.source_cls = type(module)  # as transformers notes it
        layer.support_avx512bf16_for_cpu = False
        model.set_submodule(name, layer.requires_grad_(False))
    model.is_loaded_in_4bit = True


def _pack_on_meta(layer: Linear4bit, settings: Train, dtype: torch.dtype) -> Params4bit:
    def empty(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    elements = layer.in_features * layer.out_features
    blocks = -(-elements // _BLOCK)
    nested: dict[str, Any] = {}
    if settings.double_quantization:
        inner = QuantState(
            empty(-(-blocks // _NESTED_BLOCK)), code=empty(256), blocksize=_NESTED_BLOCK, dtype=torch.float32
        )
        nested = {"offset": empty(), "state2": inner}
    state = QuantState(
        empty(blocks, of=torch.uint8 if nested else torch.float32),
        shape=torch.Size((layer.out_features, layer.in_features)),
        code=empty(16),
        blocksize=_BLOCK,
        quant_type=settings.quantization,
        dtype=dtype,
        **nested,
    )
    return Params4bit(
        empty((elements + 1) // 2, 1, of=torch.uint8), requires_grad=False, quant_state=state, blocksize=_BLOCK,
        compress_statistics=settings.double_quantization, quant_type=settings.quantization, module=layer,
        bnb_quantized=True,
    )  # fmt: skip


def _attach_adapter(model: Model, settings: Train, new_tokens: int) -> Model:
    # PiSSA begins with other values in matrices of the same shapes; on meta there is nothing to decompose.
    settings = settings.model_copy(update={"initialization": "zero"})
    # peft makes its matrices where torch makes tensors, and only then moves them to where the model is.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # initialising tensors without data; what peft says of a real one, it says then
        return adapters.attach(model, settings, "forecast", range(new_tokens), STEPS)


# --------------------------------------------------------------------------------------------------------- repetition


def _find_repetition(model: Model, settings: Train) -> _BlockRepetition | None:
    """How the blocks repeat, with as short a period and as few odd ones before it as can be; None if they do not."""
    name, blocks = find_blocks(model)
    words = _block_signatures(model, name, blocks, settings)
    for period in range(1, len(words) // 2):
        for first in range(len(words) - 2 * period + 1):
            if words[first:-period] == words[first + period :]:
                count, rest = divmod(len(words) - first, period)
                return _BlockRepetition(first, period, count, rest)
    return None


def _block_signatures(model: Model, name: str, blocks: nn.ModuleList, settings: Train) -> list[str]:
    """A text for each block; blocks with equal texts need equal memory."""
    adapters: dict[str, list[str]] = {str(number): [] for number in range(len(blocks))}
    for layer in targets.choose(list_layers(model), settings.targets):
        if layer.name.startswith(f"{name}."):
            number, _, rest = layer.name.removeprefix(f"{name}.").partition(".")
            adapters[number].append(f"{rest} {targets.layer_rank(layer, settings)}")
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    kinds = list(kinds) + [None] * (len(blocks) - len(kinds))
    return [f"{kinds[number]} {adapters[str(number)]} {_block_signature(block)}" for number, block in enumerate(blocks)]


def _block_signature(block: nn.Module) -> str:
    """Classes, plain attributes but for the block's number, and shapes."""
    found = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None)
            and key not in ("layer_idx", "layer_id", "layer_number")
        }
        shapes = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in module.named_parameters(recurse=False)]
        found.append(f"{name} {type(module).__qualname__} {sorted(plain.items(), key=str)} {shapes}")
    return "\n".join(found)


def _remove_periods(model: Model, repetition: _BlockRepetition, periods: int, settings: Train) -> bool:
    """Take blocks out, until there are so many periods; False if the adapters would then be other ones than before."""
    name, blocks = find_blocks(model)
    words = _block_signatures(model, name, blocks, settings)
    kept = repetition.kept(periods)
    shorter = nn.ModuleList(blocks[number] for number in kept)
    config = model.config.get_text_config()
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in kept]
    config.num_hidden_layers = len(kept)
    model.set_submodule(name, shorter)
    return _block_signatures(model, name, shorter, settings) == [words[number] for number in kept]
