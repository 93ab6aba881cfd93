"""The weights of a GGUF file: which tensor becomes which, in what type, block after block.

Norms and biases stay F32; so do the divisors of rotary frequencies. Matrices get the file's type, with exceptions that
follow llama.cpp's own tools: rows that blocks do not divide are F16 (`convert_hf_to_gguf.py`); in files of 4 and 5 bits
the head, and an embedding that is the head, is Q8_0, as `llama-quantize` takes it where its first choice (Q6_K, which
the `gguf` package cannot write) does not fit; in ternary files embedding and head are F16.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType, get_tensor_name_map, quants
from numpy.typing import NDArray

from ratchet.config.export import GgufType, PlainType
from ratchet.errors import BaseModelError
from ratchet.export.gguf.architectures import Architecture
from ratchet.models import base_model

Q = GGMLQuantizationType
TYPES: dict[GgufType, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f32": (Q.F32, LlamaFileType.ALL_F32),
    "f16": (Q.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Q.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Q.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Q.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (Q.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": (Q.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": (Q.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "tq1_0": (Q.TQ1_0, LlamaFileType.MOSTLY_TQ1_0),
    "tq2_0": (Q.TQ2_0, LlamaFileType.MOSTLY_TQ2_0),
    "mxfp4": (Q.MXFP4, LlamaFileType.MOSTLY_MXFP4_MOE),
}
PLAIN = (Q.F32, Q.F16, Q.BF16)
TERNARY = (Q.TQ1_0, Q.TQ2_0)
EMBEDDING, HEAD, LAST_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
AT_ONCE_BYTES = 64 * 2**20
"""Rows are read, converted and written in pieces of about so much, in float32."""

_LARGEST_F16 = 65504.0
_UNSTORED = re.compile(r"rotary_emb\.inv_freq$")
"""Older files hold it; it follows from the config."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    stored: str | None
    """Its name in the model's files; None: computed from the config."""
    file: Path | None = None
    heads: int = 0
    """Rows of so many heads change places, from halves to neighbours."""
    offset: float = 0.0

    @property
    def size_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // int(block) * int(size)


def block_width(type_: GgufType) -> int:
    """Numbers that a block of this type holds: a row must be a multiple."""
    return int(GGML_QUANT_SIZES[TYPES[type_][0]][0])


def plan(directory: Path, model: Architecture, type_: PlainType) -> list[Tensor]:
    """Every tensor, in an order that does not depend on how the model's files are divided.

    Raises:
        BaseModelError: a tensor is missing, unknown, of another shape than config.json says, or twice there.
    """
    names = get_tensor_name_map(model.family.arch, model.layers)
    found: dict[str, Tensor] = {}
    for stored, (file, shape) in sorted(_stored(directory).items()):
        if _UNSTORED.search(stored) or (stored == "lm_head.weight" and model.tied):
            continue
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        if name is None or (stored.endswith(".bias") and not stored.endswith(model.family.biases or ("-",))):
            raise BaseModelError(
                f"{file}: {stored}: llama.cpp knows no such tensor in a {model.family.title} of {model.layers} layers"
            )
        if name in found:
            raise BaseModelError(f"{file}: {stored} and {found[name].stored} are the same tensor to llama.cpp")
        found[name] = _tensor(name, shape, stored, file, model, TYPES[type_][0])
    found |= {name: Tensor(name, array.shape, Q.F32, None) for name, array in model.extra.items()}
    _require_complete(directory, model, found)
    return sorted(found.values(), key=_place)


def _stored(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of every tensor, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in (directory / name for name in base_model.weight_files(directory)):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    if name in found:
                        raise BaseModelError(f"{file}: {name} is in {found[name][0].name}, too")
                    found[name] = (file, tuple(tensors.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise BaseModelError(f"{file}: damaged or cut short ({error}); make it again") from None
    if not found:
        raise BaseModelError(f"{directory}: no weights (*.safetensors)")
    return found


def _tensor(
    name: str, shape: tuple[int, ...], stored: str, file: Path, model: Architecture, wanted: GGMLQuantizationType
) -> Tensor:
    heads = 0
    if model.family.interleaved and (found := re.search(r"attn_([qk])\.", name)):
        heads = model.config.num_attention_heads if found[1] == "q" else model.key_heads
        if shape[0] != heads * model.head_width:
            raise BaseModelError(f"{file}: {stored} has {shape[0]} rows, {heads} heads of {model.head_width} were due")
    offset = model.family.norm_offset if name.endswith("norm.weight") else 0.0
    return Tensor(name, shape, _type(name, shape, wanted, model.tied), stored, file, heads, offset)


def _type(name: str, shape: tuple[int, ...], wanted: GGMLQuantizationType, tied: bool) -> GGMLQuantizationType:
    if len(shape) < 2:
        return Q.F32
    if name in (EMBEDDING, HEAD) and wanted in TERNARY:
        return Q.F16
    if (name == HEAD or (name == EMBEDDING and tied)) and wanted not in PLAIN:
        wanted = Q.Q8_0
    return wanted if shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0 else Q.F16


def _require_complete(directory: Path, model: Architecture, found: dict[str, Tensor]) -> None:
    """Every block holds what any of them holds; there is an embedding, a last norm, and a head if it is none."""
    parts = {match[2] for match in map(_BLOCK.fullmatch, found) if match}
    due = {f"blk.{i}.{part}" for i in range(model.layers) for part in parts}
    due |= {EMBEDDING, LAST_NORM} | (set() if model.tied else {HEAD})
    if missing := sorted(due - found.keys()):
        raise BaseModelError(
            f"{directory}: {missing[0]} is missing, and {len(missing) - 1} more: its weights are in none of the files"
        )
    rows, width = found[EMBEDDING].shape
    if (rows, width) != (model.config.vocab_size, model.config.hidden_size):
        raise BaseModelError(
            f"{directory}: the embedding is {rows} x {width}, config.json says "
            f"{model.config.vocab_size} x {model.config.hidden_size}"
        )


def _place(tensor: Tensor) -> tuple[int, int, str]:
    """Before the blocks: embedding and what is computed; after them: the last norm, the head."""
    if block := _BLOCK.fullmatch(tensor.name):
        return 1, int(block[1]), block[2]
    return (2 if tensor.name in (LAST_NORM, HEAD) else 0), 0, tensor.name


def blocks(tensor: Tensor, model: Architecture) -> Iterator[memoryview]:
    """The bytes of a tensor, a piece at a time. Raises BaseModelError: numbers that its type cannot hold."""
    if tensor.file is None:
        yield model.extra[tensor.name].data.cast("B")
        return
    from safetensors import safe_open

    with safe_open(str(tensor.file), framework="pt") as tensors:
        part = tensors.get_slice(tensor.stored)
        for rows in _pieces(tensor, model.head_width):
            values = part[rows].float().numpy() + np.float32(tensor.offset)
            if tensor.heads:
                values = neighbours(values, len(values) // model.head_width)
            _require_numbers(tensor, values)
            held: NDArray[Any] = np.ascontiguousarray(quants.quantize(values, tensor.type))
            yield held.data.cast("B")


def _pieces(tensor: Tensor, head_width: int) -> Iterator[slice]:
    """Whole heads where rows of heads change places."""
    unit = head_width if tensor.heads else 1
    row_bytes = 4 * math.prod(tensor.shape[1:])
    step = max(1, AT_ONCE_BYTES // row_bytes // unit) * unit
    return (slice(start, min(start + step, tensor.shape[0])) for start in range(0, tensor.shape[0], step))


def neighbours(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads x (first half, second half)] in the order [heads x (pairs of both)].

    transformers rotates dimension i of a head with i + width / 2, llama.cpp's Llama i with i + 1, as Su et al. 2021
    (RoFormer) and Meta's own code do.
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _require_numbers(tensor: Tensor, values: NDArray[np.float32]) -> None:
    largest = np.abs(values).max(initial=0.0)
    if not np.isfinite(largest):
        raise BaseModelError(f"{tensor.file}: {tensor.stored} holds NaN or infinity; a model with such weights is none")
    if tensor.type is Q.F16 and largest > _LARGEST_F16:
        raise BaseModelError(
            f"{tensor.file}: {tensor.stored} holds {largest:g}, and F16 ends at {_LARGEST_F16:g}; take bf16 or f32 in "
            "export.gguf.types"
        )


def report(tensors: list[Tensor], type_: PlainType) -> tuple[str, ...]:
    """What is in another type than the file's, for people."""
    wanted = TYPES[type_][0]
    others: dict[str, list[str]] = {}
    for one in tensors:
        if len(one.shape) > 1 and one.type is not wanted:
            others.setdefault(one.type.name, []).append(one.name)
    more = {kind: f" and {len(names) - 3} more" if names[3:] else "" for kind, names in others.items()}
    return tuple(
        f"{kind} in the place of {wanted.name}: {', '.join(names[:3])}{more[kind]}" for kind, names in others.items()
    )
