"""GGUF files of merged models, for llama.cpp, Ollama and LM Studio.

Written from the tensors of a Hugging Face directory, a piece at a time: memory does not grow with the model. Equal
directories give equal bytes; no path, no date and no name of a machine is in the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package knows its keys, tensor names
and block types; the order in which bytes go to disk is ours, for only `files` writes.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUF_DEFAULT_ALIGNMENT, MODEL_ARCH_NAMES, GGUFWriter
from gguf.gguf_writer import WriterState

from ratchet.config.export import GgufType, PlainType
from ratchet.errors import SettingsError
from ratchet.export.gguf import architectures, tokenizer
from ratchet.export.gguf import tensors as gguf_tensors
from ratchet.export.gguf.architectures import CONVERTER, Architecture
from ratchet.export.gguf.tensors import Tensor
from ratchet.export.gguf.tokenizer import Vocabulary
from ratchet.storage import files
from ratchet.storage.records.export import Progress

CARD = "README.md"


def is_carried(directory: Path) -> bool:
    """Whether the writer here knows the model's architecture. Raises BaseModelError when it is no model's directory."""
    return architectures.is_carried(directory)


def require(directory: Path, types: Sequence[GgufType], llama_cpp: Path | None) -> None:
    """Refuse before long work what cannot be written after it.

    Args:
        directory: config.json and tokenizer of the merged model, or of its base, which has the same.
        types: wanted.
        llama_cpp: a llama.cpp installation or checkout; its converter carries other architectures and tokenizers.

    Raises:
        SettingsError: an architecture that is not carried, and no converter at hand; a type that no matrix can have.
        BaseModelError: config or tokenizer cannot be read, or llama.cpp has nothing that does what they say.
    """
    if not is_carried(directory) and llama_cpp is not None and (llama_cpp / CONVERTER).is_file():
        return
    model = architectures.of(directory)
    tokenizer.read_vocabulary(directory, model.config.vocab_size)
    for type_ in types:
        if type_ in gguf_tensors.TYPES:
            width = gguf_tensors.block_width(type_)
            if not any(one % width == 0 for one in model.widths):
                found = ", ".join(map(str, sorted(model.widths)))
                raise SettingsError(
                    f"export.gguf.types: {type_}: it holds rows of multiples of {width}, this model's have {found}: "
                    "everything would be F16; take f16, or a type of smaller blocks (q8_0: 32)"
                )


def write(directory: Path, target: Path, type_: PlainType, progress: Progress) -> tuple[str, ...]:
    """Write a merged model as one file.

    Args:
        directory: of the model, as transformers opens it.
        target: the file, in a folder that the caller seals.
        type_: of the matrices.
        progress: told about bytes.

    Returns:
        what somebody who uses the file should know: what is in another type, what llama.cpp does otherwise.

    Raises:
        BaseModelError: see `require`; or a tensor is missing, strange, or holds what the type cannot.
    """
    model = architectures.of(directory)
    vocabulary = tokenizer.read_vocabulary(directory, model.config.vocab_size)
    tensors = gguf_tensors.plan(directory, model, type_)
    header = _header(directory, model, vocabulary, tensors, type_)
    total = len(header) + sum(_padded(one.size_bytes) for one in tensors)
    files.write_blocks(target, _told(_content(header, tensors, model), progress, f"gguf {type_}", total))
    return (*gguf_tensors.report(tensors, type_), *model.notes, *vocabulary.notes)


def size_bytes(directory: Path, type_: PlainType) -> int:
    """Of the file that `write` would make, exactly. Raises as `write`."""
    model = architectures.of(directory)
    vocabulary = tokenizer.read_vocabulary(directory, model.config.vocab_size)
    tensors = gguf_tensors.plan(directory, model, type_)
    header = _header(directory, model, vocabulary, tensors, type_)
    return len(header) + sum(_padded(one.size_bytes) for one in tensors)


class _Memory(GGUFWriter):  # type: ignore[misc]  # the package is not followed
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


def _header(
    directory: Path, model: Architecture, vocabulary: Vocabulary, tensors: Iterable[Tensor], type_: PlainType
) -> bytes:
    writer = _Memory(None, MODEL_ARCH_NAMES[model.family.arch])
    _declare_origin(writer, directory, vocabulary.strips)
    writer.add_file_type(gguf_tensors.TYPES[type_][1])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    architectures.declare(writer, model)
    tokenizer.declare(writer, vocabulary)
    for one in tensors:
        # whatever array type is said, the type of the blocks is the last argument
        writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), one.size_bytes, one.type)
    content = writer.content()
    return content + bytes(-len(content) % GGUF_DEFAULT_ALIGNMENT)


def _declare_origin(writer: GGUFWriter, directory: Path, strips: bool) -> None:
    """Name, licence and base, from the model card."""
    title, front = _card(directory / CARD)
    writer.add_type("model")
    writer.add_name(name_for(title, strips))
    if licence := front.get("license"):
        writer.add_license(str(licence))
    if name := front.get("license_name"):
        writer.add_license_name(str(name))
    if base := front.get("base_model"):
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, str(base).rsplit("/", 1)[-1])
        writer.add_base_model_repo_url(0, f"https://huggingface.co/{base}")


def name_for(title: str, strips: bool) -> str:
    """A name under which llama.cpp treats spaces after special tokens as the tokenizer does: it goes by `phi-3`."""
    if strips == any(one in title.lower() for one in tokenizer.STRIPPED_BY_NAME):
        return title
    return f"{title} (Phi-3)" if strips else re.sub("(phi)-?3", r"\1 3", title, flags=re.IGNORECASE)


def _card(file: Path) -> tuple[str, dict[str, str]]:
    """Title and front matter of a model card as `modelcard` writes it: texts there are JSON."""
    if not file.is_file():
        return "model", {}
    text = file.read_text(encoding="utf-8")
    parts = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    lines = re.findall(r'^(\w+): ("(?:[^"\\]|\\.)*")$', parts[1] if parts else "", flags=re.MULTILINE)
    heading = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    return (heading[1].strip() if heading else "model"), {key: json.loads(value) for key, value in lines}


def _padded(size: int) -> int:
    return size + -size % int(GGUF_DEFAULT_ALIGNMENT)


def _content(header: bytes, tensors: Iterable[Tensor], model: Architecture) -> Iterator[bytes | memoryview]:
    yield header
    for one in tensors:
        yield from gguf_tensors.blocks(one, model)
        yield bytes(_padded(one.size_bytes) - one.size_bytes)


def _told(
    pieces: Iterable[bytes | memoryview], progress: Progress, what: str, total: int
) -> Iterator[list[bytes | memoryview]]:
    done = 0
    for piece in pieces:
        yield [piece]
        done += len(piece)
        progress(what, done, total)
