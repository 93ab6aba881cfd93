"""Builds the trained model on the meta device, with 4-bit layers and adapters.

If the decoder blocks repeat, two shorter models (PERIODS_OF_SHORT_AND_LONG) represent the model: each further period of
blocks adds a fixed amount of memory at each point of the step, and repeats the events of an inner period. This is exact
if all periods are equal, which is checked first: blocks are compared by their classes, shapes, settings and adapters.
Other models are built whole.
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
from ratchet.models.device import Model
from ratchet.models.memory import block_events, parameters
from ratchet.models.memory.block_events import MIN_PERIODS
from ratchet.models.memory.parameters import BLOCK_SIZE, NESTED_BLOCK_SIZE, BaseTensorSizes
from ratchet.models.memory.trace import AllocationEvent, AllocationTrace, Device, MemoryPeak, Segment
from ratchet.models.model_spec import ModelSpec, find_blocks, list_layers
from ratchet.models.tiled_linear import TiledLinear4bit

PERIODS_OF_SHORT_AND_LONG = {"cuda": (3, 4), "cpu": (MIN_PERIODS - 1, MIN_PERIODS)}
"""Numbers of periods of the two models that represent a longer model. At least three periods are needed: the last block
is computed only at trained positions (chunked_loss.py), so one period must be neither first nor last. On CPUs memory
also depends on how the allocator fills gaps: the events of the long model are repeated, which needs MIN_PERIODS."""
SCHEDULE_STEPS = 1000
"""Number of steps of AdaLoRA's schedule, which does not affect memory."""
_INDEX_ATTRIBUTES = ("layer_idx", "layer_id", "layer_number")
"""Names under which transformers stores a block's index."""


@dataclass(frozen=True)
class ExtrapolatedMetaModel:
    """Models with adapters on the meta device, from which figures of the real model are extrapolated."""

    models: tuple[Model, ...]
    """The real model, or a short and a long model."""
    periods: tuple[int, ...]
    """Numbers of periods of the short, the long and the real model; empty if `models` has only the real model."""
    boundary_blocks: tuple[tuple[int, int], ...]
    """For each of `models`: the number of first blocks and the number of last blocks whose peaks are used. The blocks
    between these are left out."""
    base_sizes: BaseTensorSizes

    def extrapolate(self, values: tuple[int, ...]) -> int:
        """Return the real model's value, given the values of `models`."""
        if not self.periods:
            return values[0]
        short, long, real = self.periods
        return values[0] + (values[1] - values[0]) * (real - short) // (long - short)

    def sum_over_blocks(self, figure: Callable[[Model], int]) -> int:
        """Return a figure of the real model that is a sum over its blocks."""
        return self.extrapolate(tuple(figure(model) for model in self.models))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of the real model in order.

        The parameters of one period are repeated for the periods that the long model lacks.
        """
        trainable = [(name, p) for name, p in self.models[-1].named_parameters() if p.requires_grad]
        built = [parameter for _, parameter in trainable]
        if not self.periods:
            return built
        _, long, real = self.periods
        stack, first = find_blocks(self.models[-1])[0], self.boundary_blocks[-1][0]
        repeated = tuple(f"{stack}.{number}." for number in range(first, first + self._period))
        positions = [position for position, (name, _) in enumerate(trainable) if name.startswith(repeated)]
        end = positions[-1] + 1 if positions else 0
        return built[:end] + (real - long) * [built[position] for position in positions] + built[end:]

    def find_highest_peak(self, traces: Sequence[AllocationTrace]) -> dict[str, int]:
        """Return the parts of the highest peak of any segment of the real model's step; empty without traces."""
        best: dict[str, int] = {}
        aligned = [
            _align_peaks(trace, model, boundary)
            for trace, model, boundary in zip(traces, self.models, self.boundary_blocks, strict=bool(traces))
        ]
        for segment, first in aligned[0].items() if aligned else ():
            peaks = [peaks_of_model[segment].parts for peaks_of_model in aligned]
            parts = {part: self.extrapolate(tuple(peak[part] for peak in peaks)) for part in first.parts}
            best = max(best, parts, key=lambda candidate: sum(candidate.values()))
        return best

    def repeat_events(self, traces: Sequence[AllocationTrace]) -> list[AllocationEvent] | None:
        """Return the events of the real model, given traces of `models`; None if they cannot be derived."""
        if not self.periods or not traces:
            return traces[0].events if traces else []
        _, long, real = self.periods
        first = self.boundary_blocks[-1][0] - self._period
        return block_events.repeat_periods(traces[-1].events, first, self._period, real - long)

    @property
    def _period(self) -> int:
        """Number of blocks in a period, if there are two models."""
        short_count, long_count = (len(find_blocks(model)[1]) for model in self.models)
        return (long_count - short_count) // (self.periods[1] - self.periods[0])


def _align_peaks(trace: AllocationTrace, model: Model, boundary: tuple[int, int]) -> dict[Segment, MemoryPeak]:
    """Key peaks by a position that is equal in a shorter and a longer model; omit blocks between the boundaries."""
    count = len(find_blocks(model)[1])
    peaks: dict[Segment, MemoryPeak] = {}
    for (direction, position, number), peak in trace.peaks.items():
        if position != "block" or number < boundary[0]:
            peaks[direction, position, number] = peak
        elif number >= count - boundary[1]:
            peaks[direction, "block", number - count] = peak
    return peaks


@dataclass(frozen=True)
class _BlockRepetition:
    """Blocks `first` to `first + period * count - 1` repeat; `first` blocks before and `rest` blocks after do not."""

    first: int
    period: int
    count: int
    rest: int

    def block_indices(self, periods: int) -> list[int]:
        """Return the indices of the blocks that a model with `periods` periods keeps."""
        end = self.first + self.period * self.count
        return [*range(self.first + self.period * periods), *range(end, end + self.rest)]


def build(
    spec: ModelSpec, settings: Train, dtype: torch.dtype, device: Device, new_tokens: int = 0, whole: bool = False
) -> ExtrapolatedMetaModel:  # fmt: skip
    """Build the model that these settings train, or, unless `whole`, two models that represent it.

    Raises SettingsError if targets, ranks or patterns do not fit the model.
    """
    targets.check(spec, settings)

    def build_plain() -> Model:
        return spec.model(dtype, settings.attention)

    def quantize_and_adapt(model: Model) -> Model:
        if names := parameters.measure_base_sizes(model, settings).quantized_modules:
            _quantize_on_meta(model, names, settings, dtype, device)
        return _attach_adapter(model, settings, new_tokens)

    full = build_plain()
    base_sizes = parameters.measure_base_sizes(full, settings)
    repetition = None if whole else _find_repetition(full, settings)
    lengths, all_blocks = PERIODS_OF_SHORT_AND_LONG[device], ((len(find_blocks(full)[1]), 0),)
    if repetition is None or repetition.count <= lengths[1]:
        return ExtrapolatedMetaModel((quantize_and_adapt(full),), (), all_blocks, base_sizes)
    models, boundary_blocks = [], []
    for periods, model in zip(lengths, (build_plain(), full), strict=True):
        if not _remove_periods(model, repetition, periods, settings):
            return ExtrapolatedMetaModel((quantize_and_adapt(build_plain()),), (), all_blocks, base_sizes)
        models.append(quantize_and_adapt(model))
        # Two periods from the end, because the last block differs from all others.
        boundary_blocks.append((repetition.first + repetition.period, 2 * repetition.period + repetition.rest))
    return ExtrapolatedMetaModel(tuple(models), (*lengths, repetition.count), tuple(boundary_blocks), base_sizes)


def build_frozen(spec: ModelSpec, settings: Train, dtype: torch.dtype, device: Device) -> tuple[Model, BaseTensorSizes]:
    """Build a frozen model without adapter for forward passes on the meta device; return it with its tensor sizes.

    Raises SettingsError if a matrix does not fit into tensors of train.quantization_storage.
    """
    model = spec.model(dtype, settings.attention)
    base_sizes = parameters.measure_base_sizes(model, settings)
    if base_sizes.quantized_modules:
        _quantize_on_meta(model, base_sizes.quantized_modules, settings, dtype, device)
    return model.requires_grad_(False), base_sizes


def _quantize_on_meta(
    model: Model, names: tuple[str, ...], settings: Train, dtype: torch.dtype, device: Device
) -> None:
    """Replace these modules by bitsandbytes layers with weights and constants of the right sizes."""
    for name in names:
        module = model.get_submodule(name)
        inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
        kind = TiledLinear4bit if device == "cpu" else Linear4bit  # as in models/loading.py
        layer: Any = kind(inputs, outputs, module.bias is not None, dtype, device="meta")
        layer.weight = _pack_on_meta(layer, settings, dtype)
        layer.bias = module.bias
        layer.source_cls = type(module)  # transformers sets it too
        layer.support_avx512bf16_for_cpu = False
        model.set_submodule(name, layer.requires_grad_(False))
    model.is_loaded_in_4bit = True


def _pack_on_meta(layer: Linear4bit, settings: Train, dtype: torch.dtype) -> Params4bit:
    def empty(*shape: int, element_dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=element_dtype, device="meta")

    elements = layer.in_features * layer.out_features
    blocks = -(-elements // BLOCK_SIZE)
    nested: dict[str, Any] = {}
    if settings.double_quantization:
        nested_state = QuantState(
            empty(-(-blocks // NESTED_BLOCK_SIZE)), code=empty(256), blocksize=NESTED_BLOCK_SIZE, dtype=torch.float32
        )
        nested = {"offset": empty(), "state2": nested_state}
    state = QuantState(
        empty(blocks, element_dtype=torch.uint8 if nested else torch.float32),
        shape=torch.Size((layer.out_features, layer.in_features)),
        code=empty(16),
        blocksize=BLOCK_SIZE,
        quant_type=settings.quantization,
        dtype=dtype,
        **nested,
    )
    return Params4bit(
        empty((elements + 1) // 2, 1, element_dtype=torch.uint8), requires_grad=False, quant_state=state,
        blocksize=BLOCK_SIZE, compress_statistics=settings.double_quantization, quant_type=settings.quantization,
        module=layer, bnb_quantized=True,
    )  # fmt: skip


def _attach_adapter(model: Model, settings: Train, new_tokens: int) -> Model:
    # PiSSA changes only the values of the matrices, not their shapes; the meta device has no values to decompose.
    settings = settings.model_copy(update={"initialization": "zero"})
    # peft creates its matrices on torch's default device and moves them to the model's device only afterwards.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensors without data; peft repeats its own warnings for the real model
        return adapters.attach(model, settings, "forecast", range(new_tokens), SCHEDULE_STEPS)


# Repetition of blocks.


def _find_repetition(model: Model, settings: Train) -> _BlockRepetition | None:
    """Find how the blocks repeat, with the shortest period and the fewest blocks before; None if they do not."""
    name, blocks = find_blocks(model)
    signatures = _block_signatures(model, name, blocks, settings)
    for period in range(1, len(signatures) // 2):
        for first in range(len(signatures) - 2 * period + 1):
            if signatures[first:-period] == signatures[first + period :]:
                count, rest = divmod(len(signatures) - first, period)
                return _BlockRepetition(first, period, count, rest)
    return None


def _block_signatures(model: Model, name: str, blocks: nn.ModuleList, settings: Train) -> list[str]:
    """Return a text for each block; blocks with equal texts need equal memory."""
    adapted_layers: dict[str, list[str]] = {str(number): [] for number in range(len(blocks))}
    for layer in targets.choose(list_layers(model), settings.target_modules):
        if layer.name.startswith(f"{name}."):
            number, _, rest = layer.name.removeprefix(f"{name}.").partition(".")
            adapted_layers[number].append(f"{rest} {targets.layer_rank(layer, settings)}")
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    kinds = list(kinds) + [None] * (len(blocks) - len(kinds))
    return [
        f"{kinds[number]} {adapted_layers[str(number)]} {_block_signature(block)}"
        for number, block in enumerate(blocks)
    ]


def _block_signature(block: nn.Module) -> str:
    """Describe a block by its classes, simple attributes except indices, and shapes."""
    lines = []
    for name, module in block.named_modules():
        attributes = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and key not in _INDEX_ATTRIBUTES
        }
        shapes = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in module.named_parameters(recurse=False)]
        lines.append(f"{name} {type(module).__qualname__} {sorted(attributes.items(), key=str)} {shapes}")
    return "\n".join(lines)


def _remove_periods(model: Model, repetition: _BlockRepetition, periods: int, settings: Train) -> bool:
    """Remove blocks until `periods` periods remain; return False if the signature of a remaining block changes."""
    name, blocks = find_blocks(model)
    signatures = _block_signatures(model, name, blocks, settings)
    kept_indices = repetition.block_indices(periods)
    shorter = nn.ModuleList(blocks[number] for number in kept_indices)
    config = model.config.get_text_config()
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in kept_indices]
    config.num_hidden_layers = len(kept_indices)
    model.set_submodule(name, shorter)
    return _block_signatures(model, name, shorter, settings) == [signatures[number] for number in kept_indices]
