"""Writes merged models as GGUF files for llama.cpp, Ollama and LM Studio.

A file is written from the tensors of a Hugging Face directory in small pieces, so memory does not grow with the model.
Equal directories give equal bytes: the file contains no path, no date and no machine name.

Norms, biases and divisors of rotary frequencies are F32. Matrices have the file's type, with three exceptions that
follow llama.cpp's own tools:

    F16     matrices whose row length is not a multiple of the block size (`convert_hf_to_gguf.py`)
    Q8_0    in files of 4 and 5 bits, the head, or the embedding if it is the head. `llama-quantize` chooses Q8_0 if its
            first choice (Q6_K, which the `gguf` package cannot write) does not fit
    F16     in ternary files, embedding and head

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package provides keys, tensor names
and block types; `storage.files` writes the bytes, like all files of a project.
"""

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

from ratchet.config.export import BuiltInGgufType, GgufType
from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.gguf import architectures, tokenizer
from ratchet.exporters.gguf.architectures import GgufArchitecture
from ratchet.exporters.gguf.tokenizer import GgufVocabulary
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
MODEL_CARD = "README.md"
CHUNK_BYTES = 64 * 2**20
"""Approximate size of the float32 pieces in which rows are read, converted and written."""
_MAX_F16 = 65504.0
_DERIVED_TENSORS = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors in older files that follow from the config and are not written."""
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    stored: str | None
    """Name in the model's files; None: the tensor is computed from the config."""
    file: Path | None = None
    heads: int = 0
    """Number of heads whose rows are reordered from halves to pairs; 0: no reordering."""
    offset: float = 0.0
    """Number that is added to the stored values."""

    @property
    def size_bytes(self) -> int:
        """Size of the data in the file."""
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // int(block) * int(size)


def require_exportable(directory: Path, types: Sequence[GgufType], has_converter: bool) -> None:
    """Refuse unsupported models before any long work.

    Args:
        directory: config.json and tokenizer of the merged model, or of its base, whose files are the same.
        types: the requested types.
        has_converter: whether llama.cpp's converter is installed. It accepts a model whose architecture our writer does
            not support, and its tokenizer is not checked.

    Raises:
        SettingsError: the architecture is not supported and no converter is installed, or no matrix can have a type.
        BaseModelError: config or tokenizer cannot be read, or llama.cpp would compute or tokenize differently.
    """
    if has_converter and not architectures.is_supported(directory):
        return
    model = architectures.read_architecture(directory)
    tokenizer.read_vocabulary(directory, model.config.vocab_size)
    for type_ in types:
        if type_ in TYPES:
            width = block_width(type_)
            if not any(row_width % width == 0 for row_width in model.row_widths):
                widths = ", ".join(map(str, sorted(model.row_widths)))
                raise SettingsError(
                    f"export.gguf.types: {type_} needs row lengths that are multiples of {width}; this model has "
                    f"{widths}, so all matrices would be F16; use f16, or a type with smaller blocks (q8_0: 32)"
                )


def write_gguf(directory: Path, target: Path, type_: BuiltInGgufType, progress: Progress) -> tuple[str, ...]:
    """Write a merged model as one file.

    Args:
        directory: a model directory of transformers.
        target: the file, in a directory that the caller seals.
        type_: type of the matrices.
        progress: called with the bytes written and their total.

    Returns:
        Notes for users of the file: tensors of other types, and differences between llama.cpp and transformers.

    Raises:
        BaseModelError: as `require_exportable`; or a tensor is missing, unknown, or not storable in its type.
    """
    model = architectures.read_architecture(directory)
    vocabulary = tokenizer.read_vocabulary(directory, model.config.vocab_size)
    tensors = plan_tensors(directory, model, type_)
    header = _encode_header(directory, model, vocabulary, tensors, type_)
    total = len(header) + sum(_align_size(tensor.size_bytes) for tensor in tensors)

    def blocks() -> Iterator[list[bytes | memoryview]]:
        yield [header]
        done = len(header)
        for tensor in tensors:
            for piece in encode_tensor(tensor, model):
                yield [piece]
                done += len(piece)
                progress(f"gguf {type_}", done, total)
            padding = bytes(_align_size(tensor.size_bytes) - tensor.size_bytes)
            yield [padding]
            done += len(padding)
        progress(f"gguf {type_}", done, total)

    files.write_blocks(target, blocks())
    return (*describe_type_exceptions(tensors, type_), *model.notes, *vocabulary.notes)


def block_width(type_: GgufType) -> int:
    """Return how many numbers a block of this type has; row lengths must be a multiple of it."""
    return int(GGML_QUANT_SIZES[TYPES[type_][0]][0])


# The plan of tensors.


def plan_tensors(directory: Path, model: GgufArchitecture, type_: BuiltInGgufType) -> list[GgufTensor]:
    """Plan every tensor of the file, in an order that does not depend on the shards of the model's files.

    Raises:
        BaseModelError: a tensor is missing, unknown or duplicated, or its shape does not fit config.json.
    """
    names = get_tensor_name_map(model.family.arch, model.layers)
    planned: dict[str, GgufTensor] = {}
    for stored, (file, shape) in sorted(_read_tensor_headers(directory).items()):
        if _DERIVED_TENSORS.search(stored) or (stored == "lm_head.weight" and model.is_tied):
            continue
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        if name is None or (stored.endswith(".bias") and not stored.endswith(model.family.biases or ("-",))):
            raise BaseModelError(
                f"{file}: found tensor {stored}, which llama.cpp does not have in a {model.family.title} with "
                f"{model.layers} layers; remove all types from export.gguf.types"
            )
        if name in planned:
            raise BaseModelError(
                f"{file}: {stored} and {planned[name].stored} are the same tensor for llama.cpp; remove one of them"
            )
        heads = 0
        if model.family.interleaved and (match := re.search(r"attn_([qk])\.", name)):
            heads = model.config.num_attention_heads if match[1] == "q" else model.key_value_heads
            if shape[0] != heads * model.head_size:
                raise BaseModelError(
                    f"{file}: {stored}: found {shape[0]} rows; expected {heads} heads x {model.head_size} = "
                    f"{heads * model.head_size}"
                )
        offset = model.family.norm_offset if name.endswith("norm.weight") else 0.0
        tensor_type = _tensor_type(name, shape, TYPES[type_][0], model.is_tied)
        planned[name] = GgufTensor(name, shape, tensor_type, stored, file, heads, offset)
    planned |= {name: GgufTensor(name, array.shape, Q.F32, None) for name, array in model.computed_tensors.items()}
    _require_complete(directory, model, planned)

    def sort_key(tensor: GgufTensor) -> tuple[int, int, str]:
        if match := _LAYER_TENSOR.fullmatch(tensor.name):
            return 1, int(match[1]), match[2]
        return (2 if tensor.name in (LAST_NORM, HEAD) else 0), 0, tensor.name

    return sorted(planned.values(), key=sort_key)  # embedding and computed tensors, the layers, last norm and head


def _read_tensor_headers(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Read file and shape of every tensor from the headers alone."""
    from safetensors import SafetensorError, safe_open

    headers: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in (directory / name for name in base_model.list_weight_files(directory)):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    if name in headers:
                        raise BaseModelError(f"{file}: tensor {name} is also in {headers[name][0].name}; remove one")
                    headers[name] = (file, tuple(tensors.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise BaseModelError(f"{file}: damaged or truncated ({error}); create it again") from None
    if not headers:
        raise BaseModelError(f"{directory}: found no weights; expected *.safetensors")
    return headers


def _tensor_type(name: str, shape: tuple[int, ...], type_: GGMLQuantizationType, is_tied: bool) -> GGMLQuantizationType:
    if len(shape) < 2:
        return Q.F32
    if name in (EMBEDDING, HEAD) and type_ in TERNARY:
        return Q.F16
    if (name == HEAD or (name == EMBEDDING and is_tied)) and type_ not in PLAIN:
        type_ = Q.Q8_0
    return type_ if shape[-1] % GGML_QUANT_SIZES[type_][0] == 0 else Q.F16


def _require_complete(directory: Path, model: GgufArchitecture, planned: dict[str, GgufTensor]) -> None:
    """Check that all layers have the same tensors, and that embedding, last norm and an untied head exist."""
    parts = {match[2] for match in map(_LAYER_TENSOR.fullmatch, planned) if match}
    required = {f"blk.{i}.{part}" for i in range(model.layers) for part in parts}
    required |= {EMBEDDING, LAST_NORM} | (set() if model.is_tied else {HEAD})
    if missing := sorted(required - planned.keys()):
        others = f" and {len(missing) - 1} other tensors" if missing[1:] else ""
        raise BaseModelError(f"{directory}: the weight files lack {missing[0]}{others}; restore the files")
    rows, width = planned[EMBEDDING].shape
    if (rows, width) != (model.config.vocab_size, model.config.hidden_size):
        raise BaseModelError(
            f"{directory}: found an embedding of {rows} x {width}; config.json has "
            f"{model.config.vocab_size} x {model.config.hidden_size}; restore the original config.json"
        )


def describe_type_exceptions(tensors: list[GgufTensor], type_: BuiltInGgufType) -> tuple[str, ...]:
    """Describe the matrices whose type differs from the file's."""
    file_type = TYPES[type_][0]
    exceptions: dict[str, list[str]] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.type is not file_type:
            exceptions.setdefault(tensor.type.name, []).append(tensor.name)
    return tuple(
        f"{kind} instead of {file_type.name}: {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more" if names[3:] else "")
        for kind, names in exceptions.items()
    )


# The header.


class InMemoryGgufWriter(GGUFWriter):  # type: ignore[misc]  # the package is untyped
    """Writes the part of a file before the weights into memory."""

    def open_output_file(self, path: Path | None = None) -> None:
        self.fout = [BytesIO()]
        self.state = WriterState.EMPTY

    def content(self) -> bytes:
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_ti_data_to_file()
        content: bytes = self.fout[0].getvalue()
        return content


def _encode_header(
    directory: Path,
    model: GgufArchitecture,
    vocabulary: GgufVocabulary,
    tensors: Iterable[GgufTensor],
    type_: BuiltInGgufType,
) -> bytes:
    writer = InMemoryGgufWriter(None, MODEL_ARCH_NAMES[model.family.arch])
    title, card = "model", dict[str, object]()
    if (path := directory / MODEL_CARD).is_file():
        from huggingface_hub import ModelCard

        content = ModelCard(path.read_text(encoding="utf-8"))
        heading = re.search(r"^# (.+)$", content.text, flags=re.MULTILINE)
        title, card = (heading[1].strip() if heading else title), content.data.to_dict()
    writer.add_type("model")
    writer.add_name(gguf_model_name(title, vocabulary.strips_spaces))
    if licence := card.get("license"):
        writer.add_license(str(licence))
    if name := card.get("license_name"):
        writer.add_license_name(str(name))
    if base := card.get("base_model"):
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, str(base).rsplit("/", 1)[-1])
        writer.add_base_model_repo_url(0, f"https://huggingface.co/{base}")
    writer.add_file_type(TYPES[type_][1])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    architectures.write_metadata(writer, model)
    tokenizer.write_metadata(writer, vocabulary)
    for tensor in tensors:
        # The writer uses the last argument, the type of the blocks, instead of the array type.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size_bytes, tensor.type)
    content = writer.content()
    return content + bytes(-len(content) % GGUF_DEFAULT_ALIGNMENT)


def gguf_model_name(title: str, strips_spaces: bool) -> str:
    """Return a name of the model with which llama.cpp treats spaces after special tokens as the tokenizer does.

    The name matters because of `tokenizer.STRIPPED_BY_NAME`.
    """
    if strips_spaces == any(name in title.lower() for name in tokenizer.STRIPPED_BY_NAME):
        return title
    return f"{title} (Phi-3)" if strips_spaces else re.sub("(phi)-?3", r"\1 3", title, flags=re.IGNORECASE)


# The tensors.


def encode_tensor(tensor: GgufTensor, model: GgufArchitecture) -> Iterator[memoryview]:
    """Yield a tensor's bytes in pieces. Raises BaseModelError for numbers that its type cannot store."""
    if tensor.file is None:
        yield model.computed_tensors[tensor.name].data.cast("B")
        return
    from safetensors import safe_open

    with safe_open(str(tensor.file), framework="pt") as tensors:
        stored = tensors.get_slice(tensor.stored)
        # Pieces contain complete heads if rows of heads are reordered.
        unit = model.head_size if tensor.heads else 1
        step = max(1, CHUNK_BYTES // (4 * math.prod(tensor.shape[1:])) // unit) * unit
        for start in range(0, tensor.shape[0], step):
            values = stored[start : start + step].float().numpy() + np.float32(tensor.offset)
            if tensor.heads:
                values = interleave_halves(values, len(values) // model.head_size)
            largest = np.abs(values).max(initial=0.0)
            if not np.isfinite(largest):
                raise BaseModelError(f"{tensor.file}: {tensor.stored} contains NaN or infinity; train or merge again")
            if tensor.type is Q.F16 and largest > _MAX_F16:
                raise BaseModelError(
                    f"{tensor.file}: {tensor.stored} contains {largest:g}, but the F16 maximum is {_MAX_F16:g}; use "
                    "bf16 or f32 in export.gguf.types"
                )
            blocks: NDArray[Any] = np.ascontiguousarray(quants.quantize(values, tensor.type))
            yield blocks.data.cast("B")


def interleave_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows from [heads x (first half, second half)] to [heads x (pairs of both)].

    transformers rotates dimension i of a head with i + size / 2; llama.cpp's Llama rotates i with i + 1, as Su et al.
    2021 (RoFormer) and Meta's own code do.
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _align_size(size: int) -> int:
    return size + -size % int(GGUF_DEFAULT_ALIGNMENT)
