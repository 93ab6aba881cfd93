"""Reads GGUF files with transformers' own loader (`gguf_file=`), which shares no arithmetic with llama.cpp.

The loader dequantizes every tensor to float32 (with the `gguf` package) and computes as transformers does. So an F32
file gives the merged model's logits exactly, and a quantized file shows only the error of its rounded numbers.

The loader (transformers 5.23) supports about twenty architectures. It does not read rope scaling, sliding windows and,
for some architectures, the head size. A lost setting is taken from the merged model, and a note lists it. The loader
silently skips tensors that the model does not have, so the number of values is checked.
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
"""Computes the merged model's logits: [positions, vocabulary] of each row, in float32."""

COPIES = 3
"""Upper bound of the number of float32 copies of all weights in memory: the dequantized tensors, the model, and tensors
that are being copied."""
CONSTANT_TENSORS = ("rope_freqs", "rope_factors")
"""Prefixes of the names of tensors that are constants of the architecture; the loaded model does not have them."""
IRRELEVANT_SETTINGS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "pad_token_id", "pretraining_tp", "quantization_config", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout",
    "model_type", "max_position_embeddings", "residual_dropout", "embedding_dropout",
})  # fmt: skip
"""Config settings that do not change the logits of a short row."""
LOADER_ERRORS = (
    ValueError, NotImplementedError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, OSError,
)  # fmt: skip
"""Exceptions that transformers' loader raises for unsupported files."""


def compare_logits(
    path: Path, merged: Path, rows: Sequence[Sequence[int]], logits: Logits
) -> tuple[float | None, str | None]:
    """Compute the largest difference of a logit between the file, read by transformers, and the merged model.

    Args:
        path: the GGUF file.
        merged: Hugging Face directory of the merged model, for its config.
        rows: token ids of each row.
        logits: computes the merged model's logits; called after the model from the file has left memory.

    Returns:
        The difference, or None if it cannot be computed; and a note with the reason, or with the settings that the
        loader lost.
    """
    try:
        needed = COPIES * 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
        free = capacity.measure_host().available_bytes - capacity.resident_bytes()
        if needed > free:
            return None, (
                f"transformers' GGUF loader needs {needed / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free"
            )
        with _silence_loader():
            config, note = _read_config(path, merged)
            actual = _compute_logits(path, config, rows)
    except LOADER_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None, f"transformers' GGUF loader cannot read this file ({first_line(error)})"
    expected = logits(rows)
    pairs = zip(actual, expected, strict=True)
    worst = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return (worst, note) if math.isfinite(worst) else (None, "transformers' GGUF loader computes NaN or infinity")


def _read_config(path: Path, merged: Path) -> tuple[Any, str | None]:
    """Return the config that the loader reads; if it lost settings, the merged model's config and a note."""
    loaded = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    expected = AutoConfig.from_pretrained(merged, local_files_only=True)
    loaded_values, values = loaded.to_dict(), expected.to_dict()
    lost = sorted(
        name
        for name in values.keys() - IRRELEVANT_SETTINGS
        if not _is_nearly_equal(loaded_values.get(name), values[name])
    )
    if not lost:
        return loaded, None
    if loaded.model_type != expected.model_type:
        raise ValueError(
            f"it reads model type {loaded.model_type} instead of {expected.model_type}, with another {', '.join(lost)}"
        )
    expected.tie_word_embeddings = loaded.tie_word_embeddings
    return expected, (
        f"transformers' GGUF loader does not read {', '.join(lost)} from the file; the values came from config.json"
    )


def _is_nearly_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal up to float32 rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_is_nearly_equal(a.get(key), b.get(key)) for key in a.keys() | b.keys())
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, float | int) and isinstance(b, float | int) and math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b) or (not a and not b)


def _compute_logits(path: Path, config: Any, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32, output_loading_info=True,
        local_files_only=True, trust_remote_code=False,
    )  # fmt: skip
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(f"{kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[0]}")
    loaded = sum(parameter.numel() for parameter in model.parameters())
    tensors = [tensor for tensor in GGUFReader(path).tensors if not tensor.name.startswith(CONSTANT_TENSORS)]
    stored = sum(int(tensor.n_elements) for tensor in tensors)
    if loaded != stored:
        raise ValueError(f"its model has {loaded:,} values, but the file contains {stored:,}")
    model.eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([list(row)])).logits[0].float() for row in rows]


@contextlib.contextmanager
def _silence_loader() -> Iterator[None]:
    """Silence the loader, whose progress bar on standard error cannot be turned off; its errors are still raised."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
