"""The weights of a GGUF file: which tensor becomes which, in what type, block after block.

Norms and biases stay F32; so do the divisors of rotary frequencies. Matrices get the file's type, with exceptions that
follow llama.cpp's own tools: rows that blocks do not divide are F16 (`convert_hf_to_gguf.py`); in files of 4 and 5 bits
the head, and an embedding that is the head, is Q8_0, as `llama-quantize` takes it where its first choice (Q6_K, which
the `gguf` package cannot write) does not fit; in ternary files embedding and head are F16.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGUF_DEFAULT_ALIGNMENT,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
    quants,
)
from gguf.gguf_writer import WriterState
from numpy.typing import NDArray

from ratchet.config.export import GgufType, PlainType
from ratchet.errors import BaseModelError, SettingsError
from ratchet.export.gguf import architectures, tokenizer
from ratchet.export.gguf.architectures import CONVERTER, GgufArchitecture
from ratchet.export.gguf.tokenizer import GgufVocabulary
from ratchet.models import base_model
from ratchet.storage import files
from ratchet.storage.records.export import Progress

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
class GgufTensor:
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


def plan_tensors(directory: Path, model: GgufArchitecture, type_: PlainType) -> list[GgufTensor]:
    """Every tensor, in an order that does not depend on how the model's files are divided.

    Raises:
        BaseModelError: a tensor is missing, unknown, of another shape than config.json says, or twice there.
    """
    names = get_tensor_name_map(model.family.arch, model.layers)
    found: dict[str, GgufTensor] = {}
    for stored, (file, shape) in sorted(_read_tensor_headers(directory).items()):
        if _UNSTORED.search(stored) or (stored == "lm_head.weight" and model.tied):
            continue
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        if name is None or (stored.endswith(".bias") and not stored.endswith(model.family.biases or ("-",))):
            raise BaseModelError(
                f"{file}: {stored}: llama.cpp knows no such tensor in a {model.family.title} of {model.layers} layers"
            )
        if name in found:
            raise BaseModelError(f"{file}: {stored} and {found[name].stored} are the same tensor to llama.cpp")
        found[name] = _plan_tensor(name, shape, stored, file, model, TYPES[type_][0])
    found |= {name: GgufTensor(name, array.shape, Q.F32, None) for name, array in model.extra.items()}
    _require_complete(directory, model, found)
    return sorted(found.values(), key=_sort_key)


def _read_tensor_headers(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of every tensor, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in (directory / name for name in base_model.list_weight_files(directory)):
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


def _plan_tensor(
    name: str, shape: tuple[int, ...], stored: str, file: Path, model: GgufArchitecture, wanted: GGMLQuantizationType
) -> GgufTensor:
    heads = 0
    if model.family.interleaved and (found := re.search(r"attn_([qk])\.", name)):
        heads = model.config.num_attention_heads if found[1] == "q" else model.key_heads
        if shape[0] != heads * model.head_width:
            raise BaseModelError(f"{file}: {stored} has {shape[0]} rows, {heads} heads of {model.head_width} were due")
    offset = model.family.norm_offset if name.endswith("norm.weight") else 0.0
    return GgufTensor(name, shape, _tensor_type(name, shape, wanted, model.tied), stored, file, heads, offset)


def _tensor_type(name: str, shape: tuple[int, ...], wanted: GGMLQuantizationType, tied: bool) -> GGMLQuantizationType:
    if len(shape) < 2:
        return Q.F32
    if name in (EMBEDDING, HEAD) and wanted in TERNARY:
        return Q.F16
    if (name == HEAD or (name == EMBEDDING and tied)) and wanted not in PLAIN:
        wanted = Q.Q8_0
    return wanted if shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0 else Q.F16


def _require_complete(directory: Path, model: GgufArchitecture, found: dict[str, GgufTensor]) -> None:
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


def _sort_key(tensor: GgufTensor) -> tuple[int, int, str]:
    """Before the blocks: embedding and what is computed; after them: the last norm, the head."""
    if block := _BLOCK.fullmatch(tensor.name):
        return 1, int(block[1]), block[2]
    return (2 if tensor.name in (LAST_NORM, HEAD) else 0), 0, tensor.name


def encode_tensor(tensor: GgufTensor, model: GgufArchitecture) -> Iterator[memoryview]:
    """The bytes of a tensor, a piece at a time. Raises BaseModelError: numbers that its type cannot hold."""
    if tensor.file is None:
        yield model.extra[tensor.name].data.cast("B")
        return
    from safetensors import safe_open

    with safe_open(str(tensor.file), framework="pt") as tensors:
        part = tensors.get_slice(tensor.stored)
        for rows in _row_slices(tensor, model.head_width):
            values = part[rows].float().numpy() + np.float32(tensor.offset)
            if tensor.heads:
                values = interleave_halves(values, len(values) // model.head_width)
            _require_numbers(tensor, values)
            held: NDArray[Any] = np.ascontiguousarray(quants.quantize(values, tensor.type))
            yield held.data.cast("B")


def _row_slices(tensor: GgufTensor, head_width: int) -> Iterator[slice]:
    """Whole heads where rows of heads change places."""
    unit = head_width if tensor.heads else 1
    row_bytes = 4 * math.prod(tensor.shape[1:])
    step = max(1, AT_ONCE_BYTES // row_bytes // unit) * unit
    return (slice(start, min(start + step, tensor.shape[0])) for start in range(0, tensor.shape[0], step))


def interleave_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads x (first half, second half)] in the order [heads x (pairs of both)].

    transformers rotates dimension i of a head with i + width / 2, llama.cpp's Llama i with i + 1, as Su et al. 2021
    (RoFormer) and Meta's own code do.
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _require_numbers(tensor: GgufTensor, values: NDArray[np.float32]) -> None:
    largest = np.abs(values).max(initial=0.0)
    if not np.isfinite(largest):
        raise BaseModelError(f"{tensor.file}: {tensor.stored} holds NaN or infinity; a model with such weights is none")
    if tensor.type is Q.F16 and largest > _LARGEST_F16:
        raise BaseModelError(
            f"{tensor.file}: {tensor.stored} holds {largest:g}, and F16 ends at {_LARGEST_F16:g}; take bf16 or f32 in "
            "export.gguf.types"
        )


def describe_type_exceptions(tensors: list[GgufTensor], type_: PlainType) -> tuple[str, ...]:
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


# GGUF files of merged models, for llama.cpp, Ollama and LM Studio.
#
# Written from the tensors of a Hugging Face directory, a piece at a time: memory does not grow with the model. Equal
# directories give equal bytes; no path, no date and no name of a machine is in the file.
#
# The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package knows its keys, tensor
# names
# and block types; the order in which bytes go to disk is ours, for only `files` writes.

CARD = "README.md"


def is_supported(directory: Path) -> bool:
    """Whether the writer here knows the model's architecture. Raises BaseModelError when it is no model's directory."""
    return architectures.is_supported(directory)


def require_exportable(directory: Path, types: Sequence[GgufType], llama_cpp: Path | None) -> None:
    """Refuse before long work what cannot be written after it.

    Args:
        directory: config.json and tokenizer of the merged model, or of its base, which has the same.
        types: wanted.
        llama_cpp: a llama.cpp installation or checkout; its converter carries other architectures and tokenizers.

    Raises:
        SettingsError: an architecture that is not carried, and no converter at hand; a type that no matrix can have.
        BaseModelError: config or tokenizer cannot be read, or llama.cpp has nothing that does what they say.
    """
    if not is_supported(directory) and llama_cpp is not None and (llama_cpp / CONVERTER).is_file():
        return
    model = architectures.read_architecture(directory)
    tokenizer.read_vocabulary(directory, model.config.vocab_size)
    for type_ in types:
        if type_ in TYPES:
            width = block_width(type_)
            if not any(one % width == 0 for one in model.widths):
                found = ", ".join(map(str, sorted(model.widths)))
                raise SettingsError(
                    f"export.gguf.types: {type_}: it holds rows of multiples of {width}, this model's have {found}: "
                    "everything would be F16; take f16, or a type of smaller blocks (q8_0: 32)"
                )


def write_gguf(directory: Path, target: Path, type_: PlainType, progress: Progress) -> tuple[str, ...]:
    """Write a merged model as one file.

    Args:
        directory: of the model, as transformers opens it.
        target: the file, in a folder that the caller seals.
        type_: of the matrices.
        progress: told about bytes.

    Returns:
        what somebody who uses the file should know: what is in another type, what llama.cpp does otherwise.

    Raises:
        BaseModelError: see `require_exportable`; or a tensor is missing, strange, or holds what the type cannot.
    """
    model = architectures.read_architecture(directory)
    vocabulary = tokenizer.read_vocabulary(directory, model.config.vocab_size)
    tensors = plan_tensors(directory, model, type_)
    header = _encode_header(directory, model, vocabulary, tensors, type_)
    total = len(header) + sum(_align_size(one.size_bytes) for one in tensors)
    files.write_blocks(target, _report_progress(_encode_file(header, tensors, model), progress, f"gguf {type_}", total))
    return (*describe_type_exceptions(tensors, type_), *model.notes, *vocabulary.notes)


def gguf_size_bytes(directory: Path, type_: PlainType) -> int:
    """Of the file that `write_gguf` would make, exactly. Raises as `write_gguf`."""
    model = architectures.read_architecture(directory)
    vocabulary = tokenizer.read_vocabulary(directory, model.config.vocab_size)
    tensors = plan_tensors(directory, model, type_)
    header = _encode_header(directory, model, vocabulary, tensors, type_)
    return len(header) + sum(_align_size(one.size_bytes) for one in tensors)


class _InMemoryGgufWriter(GGUFWriter):  # type: ignore[misc]  # the package is not followed
    """The package's writer for everything before the weights, which it writes into memory."""

    def open_output_file(self, path: Path | None = None) -> None:
        self.fout = [BytesIO()]
        self.state = WriterState.EMPTY

    def content(self) -> bytes:
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_ti_data_to_file()
        found: bytes = self.fout[0].getvalue()
        return found


def _encode_header(
    directory: Path,
    model: GgufArchitecture,
    vocabulary: GgufVocabulary,
    tensors: Iterable[GgufTensor],
    type_: PlainType,
) -> bytes:
    writer = _InMemoryGgufWriter(None, MODEL_ARCH_NAMES[model.family.arch])
    _declare_origin(writer, directory, vocabulary.strips)
    writer.add_file_type(TYPES[type_][1])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    architectures.write_metadata(writer, model)
    tokenizer.write_metadata(writer, vocabulary)
    for one in tensors:
        # whatever array type is said, the type of the blocks is the last argument
        writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), one.size_bytes, one.type)
    content = writer.content()
    return content + bytes(-len(content) % GGUF_DEFAULT_ALIGNMENT)


def _declare_origin(writer: GGUFWriter, directory: Path, strips: bool) -> None:
    """Name, licence and base, from the model card."""
    title, front = _read_card(directory / CARD)
    writer.add_type("model")
    writer.add_name(gguf_model_name(title, strips))
    if licence := front.get("license"):
        writer.add_license(str(licence))
    if name := front.get("license_name"):
        writer.add_license_name(str(name))
    if base := front.get("base_model"):
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, str(base).rsplit("/", 1)[-1])
        writer.add_base_model_repo_url(0, f"https://huggingface.co/{base}")


def gguf_model_name(title: str, strips: bool) -> str:
    """A name under which llama.cpp treats spaces after special tokens as the tokenizer does: it goes by `phi-3`."""
    if strips == any(one in title.lower() for one in tokenizer.STRIPPED_BY_NAME):
        return title
    return f"{title} (Phi-3)" if strips else re.sub("(phi)-?3", r"\1 3", title, flags=re.IGNORECASE)


def _read_card(file: Path) -> tuple[str, dict[str, str]]:
    """Title and front matter of a model card as `modelcard` writes it: texts there are JSON."""
    if not file.is_file():
        return "model", {}
    text = file.read_text(encoding="utf-8")
    parts = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    lines = re.findall(r'^(\w+): ("(?:[^"\\]|\\.)*")$', parts[1] if parts else "", flags=re.MULTILINE)
    heading = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    return (heading[1].strip() if heading else "model"), {key: json.loads(value) for key, value in lines}


def _align_size(size: int) -> int:
    return size + -size % int(GGUF_DEFAULT_ALIGNMENT)


def _encode_file(header: bytes, tensors: Iterable[GgufTensor], model: GgufArchitecture) -> Iterator[bytes | memoryview]:
    yield header
    for one in tensors:
        yield from encode_tensor(one, model)
        yield bytes(_align_size(one.size_bytes) - one.size_bytes)


def _report_progress(
    pieces: Iterable[bytes | memoryview], progress: Progress, what: str, total: int
) -> Iterator[list[bytes | memoryview]]:
    done = 0
    for piece in pieces:
        yield [piece]
        done += len(piece)
        progress(what, done, total)
