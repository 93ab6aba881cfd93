"""A second reader of GGUF files: transformers' own loader (`gguf_file=`), with none of llama.cpp's arithmetic.

It turns every tensor back into float32 (by the `gguf` package) and computes as transformers does: an F32 file gives the
merged model's logits exactly, and a quantised one shows what its numbers alone cost.

What it cannot do is told, not guessed (transformers 5.23): it knows some twenty architectures; of a file's settings it
reads no rope scaling, no sliding window and, for some, no head size. A setting that it lost is taken from the merged
model, and named. It leaves out tensors that it has no place for, in silence: so numbers are counted.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ratchet.errors import first_line
from ratchet.models.memory import capacity

NAME = f"transformers {transformers.__version__}, gguf_file="

Logits = Callable[[Sequence[Sequence[int]]], Sequence[torch.Tensor]]
"""Of the merged model: [positions, vocabulary] of each row, in float32."""

COPIES = 3
"""Of all weights in float32 that are in memory at once: dequantised, in the model, and one tensor being copied."""
NOT_WEIGHTS = ("rope_freqs", "rope_factors")
"""Tensors of a file that are constants of the architecture."""
IDLE = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "pad_token_id", "pretraining_tp", "quantization_config", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout",
    "model_type", "max_position_embeddings", "residual_dropout", "embedding_dropout",
})  # fmt: skip
"""Settings of a config that change no logit of a short row."""
UNREADABLE = (ValueError, NotImplementedError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, OSError)
"""What that loader raises for files that it was not written for."""


def compare_logits(
    path: Path, merged: Path, rows: Sequence[Sequence[int]], logits: Logits
) -> tuple[float | None, str | None]:
    """Largest difference of a logit between the file as transformers reads it and the merged model.

    Args:
        path: the GGUF file.
        merged: Hugging Face directory of the merged model, for its settings.
        rows: token ids.
        logits: asked only once the file's own are known, and nothing else of it is in memory.

    Returns:
        The difference, None where it cannot be said; and a note where there is something to say: why it cannot, or what
        the loader needed to be told.
    """
    try:
        if why := _describe_memory_shortage(path):
            return None, why
        with _silence_loader():
            config, note = _read_config(path, merged)
            found = _compute_logits(path, config, rows)
    except UNREADABLE as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None, f"transformers' GGUF loader cannot read this file ({first_line(error)})"
    expected = logits(rows)
    pairs = zip(found, expected, strict=True)
    worst = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return (worst, note) if math.isfinite(worst) else (None, "logits are not finite")


def _describe_memory_shortage(path: Path) -> str | None:
    needed = COPIES * 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    there = capacity.measure_host()
    free = there.available_bytes - capacity.resident_bytes()
    if needed <= free:
        return None
    return f"transformers' GGUF loader needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def _read_config(path: Path, merged: Path) -> tuple[Any, str | None]:
    """Settings as the loader reads them, or those of the merged model where it loses some."""
    read = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    true = AutoConfig.from_pretrained(merged, local_files_only=True)
    lost = sorted(_lost_settings(read.to_dict(), true.to_dict()))
    if not lost:
        return read, None
    if read.model_type != true.model_type:
        raise ValueError(f"it takes a {true.model_type} for a {read.model_type}, with another {', '.join(lost)}")
    true.tie_word_embeddings = read.tie_word_embeddings
    return true, f"transformers' GGUF loader does not read {', '.join(lost)} from the file; it was told"


def _lost_settings(read: dict[str, Any], true: dict[str, Any]) -> Iterator[str]:
    for name in (read.keys() | true.keys()) - IDLE:
        if name in true and not _is_nearly_equal(read.get(name), true[name]):
            yield name


def _is_nearly_equal(a: Any, b: Any) -> bool:
    """Equal, but for what float32 makes of a number."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_is_nearly_equal(a.get(key), b.get(key)) for key in a.keys() | b.keys())
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, float | int) and isinstance(b, float | int) and math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b) or (not a and not b)


def _compute_logits(path: Path, config: Any, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    model, told = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32, output_loading_info=True,
        local_files_only=True, trust_remote_code=False,
    )  # fmt: skip
    for kind in ("missing_keys", "mismatched_keys"):
        if told[kind]:
            raise ValueError(f"{kind.replace('_', ' ')}: {sorted(map(str, told[kind]))[0]}")
    held = sum(one.numel() for one in model.parameters())
    there = sum(int(one.n_elements) for one in GGUFReader(path).tensors if not one.name.startswith(NOT_WEIGHTS))
    if held != there:
        raise ValueError(f"it has places for {held:,} of {there:,} numbers")
    model.eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([list(row)])).logits[0].float() for row in rows]


@contextlib.contextmanager
def _silence_loader() -> Iterator[None]:
    """What matters is returned or raised; its progress bar goes to standard error and has no other switch."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
