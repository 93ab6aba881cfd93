"""How many bytes a base takes as it is stored, to the byte, and how many parameters an adapter adds; without weights.

Layout of a 4-bit matrix in bitsandbytes 0.50 (functional.quantize_4bit, QuantState), after Dettmers et al. 2023 (QLoRA,
sections 2 and 3):

    weights    two elements a byte, in tensors of train.quantization_storage
    absmax     a constant for each block of 64 elements: float32, or with double quantisation uint8
    code       the 16 values that four bits stand for, float32
    with double quantisation also
    offset     mean of the constants, float32
    absmax 2   a constant for each 256 constants, float32
    code 2     the 256 values that eight bits stand for, float32

Nothing of that is shared between matrices: each has its own copy of both codes, 1,088 bytes.

transformers 5 puts in 4 bits what is exactly a `nn.Linear` or a `Conv1D`. It leaves as they are: the output head, tied
or not, fused experts (parameters, not layers), embeddings, and classes derived from `nn.Linear`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.models.device import Model
from ratchet.models.model_spec import LayerSpec, ModelSpec, list_layers
from ratchet.models.targets import choose, layer_rank

_BLOCK = 64
"""Elements to a constant; what bitsandbytes takes unless told otherwise, and transformers does not tell."""
_NESTED_BLOCK = 256
_FLOAT32 = 4
_CODE_BYTES = 16 * _FLOAT32
_NESTED_CODE_BYTES = 256 * _FLOAT32


@dataclass(frozen=True)
class BaseTensorSizes:
    """The tensors of a base as it is trained against. Bytes are those of the tensors, not of the allocator's blocks."""

    quantized_bytes: int
    """Matrices in 4 bits."""
    constants_bytes: int
    """What they are read with."""
    plain_bytes: int
    """Everything else, buffers included."""
    largest_plain_bytes: int
    """The largest of these tensors."""
    largest_source_bytes: int
    """The largest tensor as it comes from the file, before quantisation, in the type of matrix products."""
    quantized: tuple[str, ...]
    """Modules in 4 bits."""
    left_plain: tuple[str, ...]
    """Layers of attention and MLP that are not, although 4 bits were asked for."""
    tensor_sizes: tuple[tuple[int, int], ...]
    """Bytes of a tensor, and how many there are of this size."""

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return self.quantized_bytes + self.constants_bytes + self.plain_bytes

    def allocated_bytes(self, granule_bytes: int) -> int:
        """The same from an allocator that gives multiples of `granule_bytes` (512 on CUDA, 64 on a CPU)."""
        return sum(-(-size // granule_bytes) * granule_bytes * count for size, count in self.tensor_sizes)


def estimate_base_sizes(blueprint: ModelSpec, settings: Train, compute_bytes: int) -> BaseTensorSizes:
    """What the base takes when its matrix products are in a type of so many bytes (2 or 4)."""
    wanted = settings.compute_dtype
    half = torch.float16 if wanted == "float16" else torch.bfloat16
    return measure_base_sizes(blueprint.model({2: half, 4: torch.float32}[compute_bytes]), settings)


def measure_base_sizes(model: Model, settings: Train) -> BaseTensorSizes:
    """The same for a model that is at hand, on the meta device or any other, in plain weights of the type computed in.

    A model that was loaded in 4 bits is measured with `list_unique_tensors` instead.

    Raises:
        SettingsError: a matrix cannot be held in tensors of train.quantization_storage.
    """
    quantizes = settings.quantization != "none"
    names = frozenset(list_quantized_modules(model)) if quantizes else frozenset[str]()
    packed = {id(model.get_submodule(name).weight): name for name in names}
    quantized: Counter[int] = Counter()
    constants: Counter[int] = Counter()
    plain: Counter[int] = Counter()
    largest = 0
    for tensor in list_unique_tensors(model):
        largest = max(largest, tensor.nbytes)
        if id(tensor) in packed:
            quantized[_packed_bytes(tensor.numel(), settings, packed[id(tensor)])] += 1
            constants.update(_constant_sizes(tensor.numel(), settings.double_quantization))
        else:
            plain[tensor.nbytes] += 1
    return BaseTensorSizes(
        quantized_bytes=_total_size(quantized),
        constants_bytes=_total_size(constants),
        plain_bytes=_total_size(plain),
        largest_plain_bytes=max(plain, default=0),
        largest_source_bytes=largest,
        quantized=tuple(name for name, _ in model.named_modules() if name in names),
        left_plain=_list_unquantized_tensors(model, names) if quantizes else (),
        tensor_sizes=tuple(sorted((quantized + constants + plain).items())),
    )


def list_unique_tensors(model: Model) -> list[Tensor]:
    """Every tensor of a model once: parameters, buffers, and what 4-bit weights are read with."""
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        found.setdefault(id(tensor), tensor)
        if state := getattr(tensor, "quant_state", None):
            nested = (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
            found.update({id(part): part for part in (state.absmax, state.code, *nested)})
    return list(found.values())


def count_quantized_parameters(model: Model) -> int:
    """Weights of a loaded model that are in 4 bits."""
    return sum(module.in_features * module.out_features for module in model.modules() if isinstance(module, Linear4bit))


def list_quantized_modules(model: Model) -> list[str]:
    """Modules of a plain model that are in 4 bits when it is loaded so, by transformers' own rules
    (integrations.bitsandbytes.replace_with_bnb_linear); in the order of its modules."""
    keep = HfQuantizer.get_modules_to_not_convert(model, _skipped_modules(model.config), model._keep_in_fp32_modules)
    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, keep)
    ]


def count_trainable_parameters(blueprint: ModelSpec, settings: Train, new_tokens: int = 0) -> int:
    """Parameters that learn: the adapters', and the rows of so many added tokens."""
    chosen = choose(blueprint.layers, settings.targets, blueprint.others)
    return sum(_count_adapter_parameters(layer, settings) for layer in chosen) + _count_row_parameters(
        blueprint, new_tokens
    )


def count_total_parameters(blueprint: ModelSpec, settings: Train, new_tokens: int = 0) -> int:
    """Base and adapter together; for AdaLoRA with peft's `ranknum`, one number a layer that does not learn."""
    total = blueprint.parameters + count_trainable_parameters(blueprint, settings, new_tokens)
    if settings.adapter == "adalora":
        total += len(choose(blueprint.layers, settings.targets, blueprint.others))
    return total


def _count_adapter_parameters(layer: LayerSpec, settings: Train) -> int:
    """A [r, inputs] and B [outputs, r] (LoRA); magnitudes of the outputs (DoRA); r singular values (AdaLoRA)."""
    rank = layer_rank(layer, settings)
    matrices = rank * layer.count * (layer.inputs + layer.outputs)
    return matrices + {"lora": 0, "dora": layer.outputs, "adalora": rank}[settings.adapter]


def _count_row_parameters(blueprint: ModelSpec, new_tokens: int) -> int:
    """peft trains the rows of new tokens as a tensor beside the embedding; a head that is tied shares it."""
    head = [layer for layer in blueprint.layers if layer.role == "head"]
    width = head[0].inputs if head else 0
    return new_tokens * width * (1 if blueprint.tied_head else 2)


def _skipped_modules(config: Any) -> list[str] | None:
    """Modules that a checkpoint in 4 bits names as left out; None for transformers' own choice."""
    held = getattr(config, "quantization_config", None) or {}
    told: dict[str, Any] = held if isinstance(held, dict) else held.to_dict()
    return told.get("llm_int8_skip_modules")


def _packed_bytes(elements: int, settings: Train, name: str) -> int:
    packed_bytes, storage = (elements + 1) // 2, settings.quantization_storage
    if packed_bytes % getattr(torch, storage).itemsize:
        raise SettingsError(
            f"train.quantization_storage: {storage}, but {name} is {packed_bytes} bytes in 4 bits, which is no whole "
            "number of these; set uint8"
        )
    return packed_bytes


def _constant_sizes(elements: int, double: bool) -> list[int]:
    """Bytes of each tensor that a 4-bit matrix of so many elements is read with."""
    blocks = -(-elements // _BLOCK)
    if not double:
        return [blocks * _FLOAT32, _CODE_BYTES]
    return [blocks, _CODE_BYTES, _FLOAT32, -(-blocks // _NESTED_BLOCK) * _FLOAT32, _NESTED_CODE_BYTES]


def _list_unquantized_tensors(model: Model, names: frozenset[str]) -> tuple[str, ...]:
    return tuple(
        layer.name for layer in list_layers(model) if layer.role in ("attention", "mlp") and layer.name not in names
    )


def _total_size(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())
