"""Counts the bytes of a base model's tensors exactly, and the parameters of an adapter, without loading weights.

Tensors of a 4-bit matrix in bitsandbytes 0.50 (functional.quantize_4bit, QuantState; Dettmers et al. 2023): two
elements per byte, in the dtype train.quantization_storage; one constant (absmax) per block of 64 elements, float32, or
uint8 with double quantization; the 16 values of a 4-bit number. Double quantization adds the mean of the constants, one
constant per 256 constants, and the 256 values of an 8-bit number, all in float32. Matrices share none of these tensors.

transformers 5 quantizes exactly the layers of class `nn.Linear` or `Conv1D`. It does not quantize the output head (tied
or not), fused experts (parameters, not layers), embeddings, and subclasses of `nn.Linear`.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.models.device import Model
from ratchet.models.model_spec import ModelSpec, list_layers
from ratchet.models.targets import choose, layer_rank

BLOCK_SIZE = 64
"""Number of elements per quantization constant: bitsandbytes' default, which transformers does not change."""
NESTED_BLOCK_SIZE = 256
"""Number of constants per nested constant of double quantization."""
_FLOAT32 = 4
_CODE_BYTES = 16 * _FLOAT32
_NESTED_CODE_BYTES = 256 * _FLOAT32


@dataclass(frozen=True)
class BaseTensorSizes:
    """Sizes of the tensors of a frozen base. Bytes are those of the tensors, without rounding by the allocator."""

    quantized_bytes: int
    constants_bytes: int
    plain_bytes: int
    """Bytes of all other tensors, including buffers."""
    largest_source_bytes: int
    """Bytes of the largest tensor before quantization, in the compute dtype."""
    quantized_modules: tuple[str, ...]
    unquantized_layers: tuple[str, ...]
    """Layers of attention and MLP that are not in 4 bits although 4 bits were requested."""
    tensor_sizes: tuple[tuple[int, int], ...]
    """Pairs of tensor size in bytes and number of tensors of this size."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.quantized_bytes + self.constants_bytes + self.plain_bytes

    def allocated_bytes(self, granule_bytes: int) -> int:
        """Return the sum with an allocator that rounds to multiples of `granule_bytes` (512 on CUDA, 64 on a CPU)."""
        return sum(-(-size // granule_bytes) * granule_bytes * count for size, count in self.tensor_sizes)


def estimate_base_sizes(spec: ModelSpec, settings: Train, compute_bytes: int) -> BaseTensorSizes:
    """Compute the sizes of a base whose compute dtype has `compute_bytes` bytes (2 or 4)."""
    compute_dtype = settings.compute_dtype
    half_dtype = torch.float16 if compute_dtype == "float16" else torch.bfloat16
    return measure_base_sizes(spec.model({2: half_dtype, 4: torch.float32}[compute_bytes]), settings)


def measure_base_sizes(model: Model, settings: Train) -> BaseTensorSizes:
    """Compute the sizes of an existing unquantized model on any device, with weights in the compute dtype.

    For a model that was loaded in 4 bits use `list_unique_tensors` instead. Raises SettingsError if a matrix does not
    fit into tensors of train.quantization_storage.
    """
    is_quantized = settings.quantization != "none"
    names = frozenset(list_quantized_modules(model)) if is_quantized else frozenset[str]()
    packed_names = {id(model.get_submodule(name).weight): name for name in names}
    quantized: Counter[int] = Counter()
    constants: Counter[int] = Counter()
    unquantized: Counter[int] = Counter()
    largest = 0
    for tensor in list_unique_tensors(model):
        largest = max(largest, tensor.nbytes)
        if id(tensor) in packed_names:
            quantized[_packed_bytes(tensor.numel(), settings, packed_names[id(tensor)])] += 1
            constants.update(_constant_sizes(tensor.numel(), settings.double_quantization))
        else:
            unquantized[tensor.nbytes] += 1
    return BaseTensorSizes(
        quantized_bytes=_total_size(quantized),
        constants_bytes=_total_size(constants),
        plain_bytes=_total_size(unquantized),
        largest_source_bytes=largest,
        quantized_modules=tuple(name for name, _ in model.named_modules() if name in names),
        unquantized_layers=tuple(
            layer.name for layer in list_layers(model) if layer.role in ("attention", "mlp") and layer.name not in names
        )
        if is_quantized
        else (),
        tensor_sizes=tuple(sorted((quantized + constants + unquantized).items())),
    )


def list_unique_tensors(model: Model) -> list[Tensor]:
    """Return every tensor of a model once: parameters, buffers and quantization constants."""
    tensors: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        tensors.setdefault(id(tensor), tensor)
        if state := getattr(tensor, "quant_state", None):
            nested = (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
            tensors.update({id(part): part for part in (state.absmax, state.code, *nested)})
    return list(tensors.values())


def count_quantized_parameters(model: Model) -> int:
    """Return the number of weights of a loaded model that are in 4 bits."""
    return sum(module.in_features * module.out_features for module in model.modules() if isinstance(module, Linear4bit))


def list_quantized_modules(model: Model) -> list[str]:
    """Return the modules of an unquantized model that transformers would load in 4 bits, in module order.

    The rules are those of transformers' integrations.bitsandbytes.replace_with_bnb_linear.
    """
    # A 4-bit checkpoint lists the modules that are not quantized; None: transformers' default.
    stored = getattr(model.config, "quantization_config", None) or {}
    skipped = (stored if isinstance(stored, dict) else stored.to_dict()).get("llm_int8_skip_modules")
    excluded = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, excluded)
    ]


def count_trainable_parameters(spec: ModelSpec, settings: Train, new_tokens: int = 0) -> int:
    """Count trainable parameters: those of the adapters, and the embedding rows of added tokens.

    An adapter has A [r, inputs] and B [outputs, r]; DoRA adds magnitudes of the outputs, AdaLoRA r singular values.
    peft stores trained rows next to the embedding, and a tied head shares them.
    """
    heads = [layer for layer in spec.layers if layer.role == "head"]
    total = new_tokens * (heads[0].inputs if heads else 0) * (1 if spec.tied_head else 2)
    for layer in choose(spec.layers, settings.target_modules, spec.others):
        rank = layer_rank(layer, settings)
        total += rank * layer.count * (layer.inputs + layer.outputs)
        total += {"lora": 0, "dora": layer.outputs, "adalora": rank}[settings.adapter]
    return total


def count_total_parameters(spec: ModelSpec, settings: Train, new_tokens: int = 0) -> int:
    """Count parameters of base and adapter; AdaLoRA has one constant per layer (peft's `ranknum`) in addition."""
    total = spec.parameters + count_trainable_parameters(spec, settings, new_tokens)
    if settings.adapter == "adalora":
        total += len(choose(spec.layers, settings.target_modules, spec.others))
    return total


def _packed_bytes(elements: int, settings: Train, name: str) -> int:
    packed_bytes, storage = (elements + 1) // 2, settings.quantization_storage
    if packed_bytes % getattr(torch, storage).itemsize:
        raise SettingsError(
            f"train.quantization_storage: {storage}: {name} has {packed_bytes} bytes in 4 bits, which is not a "
            "multiple of its element size; set uint8"
        )
    return packed_bytes


def _constant_sizes(elements: int, double: bool) -> list[int]:
    """Return the sizes in bytes of each constant tensor of a 4-bit matrix."""
    blocks = -(-elements // BLOCK_SIZE)
    if not double:
        return [blocks * _FLOAT32, _CODE_BYTES]
    return [blocks, _CODE_BYTES, _FLOAT32, -(-blocks // NESTED_BLOCK_SIZE) * _FLOAT32, _NESTED_CODE_BYTES]


def _total_size(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())
