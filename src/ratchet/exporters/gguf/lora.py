"""Writes a LoRA adapter as a GGUF file, which llama.cpp applies to a GGUF file of the adapter's base.

    general.type, adapter.type      adapter, lora
    adapter.lora.alpha              1; llama.cpp divides it by the rank of each matrix
    NAME.lora_a, NAME.lora_b        both factors of the update of the base's tensor NAME, in F32

The scale of each update is multiplied into its second factor, because the file has one alpha for all matrices, while
peft's scale may differ (rsLoRA, patterns of rank and alpha). Rows of queries and keys are reordered as in the base.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, MODEL_ARCH_NAMES, GGMLQuantizationType, Keys, get_tensor_name_map
from numpy.typing import NDArray

from ratchet.errors import SettingsError
from ratchet.exporters.gguf.architectures import GgufArchitecture
from ratchet.exporters.gguf.writer import InMemoryGgufWriter, interleave_halves
from ratchet.models.adapter_format import LoraFactors
from ratchet.storage import files

Tensor = NDArray[np.float32]


def write_lora(factors: Sequence[LoraFactors], model: GgufArchitecture, name: str, target: Path) -> None:
    """Write an adapter.

    Args:
        factors: the updates of all adapted layers, by modules of the base.
        model: llama.cpp's parameters of the base.
        name: name of the adapter.
        target: the file, in a directory that the caller seals.

    Raises:
        SettingsError: llama.cpp has no tensor of a module, or cannot adapt it.
    """
    tensors = [tensor for part in factors for tensor in _convert_factors(part, model)]
    writer = InMemoryGgufWriter(None, MODEL_ARCH_NAMES[model.family.arch])
    writer.add_type("adapter")
    writer.add_name(name)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, 1.0)
    tensors.sort(key=lambda tensor: tensor[0])
    for tensor_name, values in tensors:
        writer.add_tensor_info(tensor_name, values.shape, values.dtype, values.nbytes, GGMLQuantizationType.F32)
    header = writer.content()
    blocks = [[header + bytes(-len(header) % GGUF_DEFAULT_ALIGNMENT)]]
    blocks += [[values.tobytes() + bytes(-values.nbytes % GGUF_DEFAULT_ALIGNMENT)] for _, values in tensors]
    files.write_blocks(target, blocks)


def _convert_factors(factors: LoraFactors, model: GgufArchitecture) -> list[tuple[str, Tensor]]:
    names = get_tensor_name_map(model.family.arch, model.layers)
    name = names.get_name(f"{factors.name}.weight", try_suffixes=(".weight",))
    is_tied_head = model.is_tied and name == "output.weight"
    if name is None or is_tied_head or name == "token_embd.weight" or factors.a.dim() != 2 or factors.transposed:
        raise SettingsError(
            f"{factors.name}: found LoRA on a module that llama.cpp cannot adapt; serve this adapter merged (`ratchet "
            "export`), or train it with other train.target_modules"
        )
    a: Tensor = factors.a.detach().cpu().float().numpy()
    b: Tensor = factors.b.detach().cpu().float().numpy() * np.float32(factors.scale * factors.rank)
    if model.family.interleaved and (match := re.search(r"attn_([qk])\.", name)):
        heads = model.config.num_attention_heads if match[1] == "q" else model.key_value_heads
        b = interleave_halves(b, heads)
    return [(f"{name}.lora_a", np.ascontiguousarray(a)), (f"{name}.lora_b", np.ascontiguousarray(b))]
