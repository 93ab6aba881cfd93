"""Runs a directory with model.onnx in onnxruntime; imports neither torch nor transformers.

The graph takes input_ids, attention_mask, position_ids and cached keys and values, and returns logits and the extended
keys and values. So a prompt is read once, and further tokens one at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ratchet.errors import DamagedFileError, first_line

MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"

_MAX_LOGITS = 2**26
"""Maximum number of logits per call of the graph, 256 MB. A longer text is read in pieces; the keys and values of
earlier pieces are cached."""
_PAST, _PRESENT = "past_key_values.", "present."


@dataclass
class _OnnxCache:
    """Cached keys and values in onnxruntime's own memory."""

    tokens: int
    values: dict[str, Any]


class OnnxRuntime:
    """A ModelRuntime (exporters/verification/parity.py) on the CPU."""

    def __init__(self, directory: Path, session: Any, tokenizer: Tokenizer) -> None:
        self._directory = directory
        self._session = session
        self._tokenizer = tokenizer
        self._inputs = {item.name: item for item in session.get_inputs()}
        self._outputs = [item.name for item in session.get_outputs()]
        self._vocabulary = int(session.get_outputs()[0].shape[-1])

    @property
    def name(self) -> str:
        return f"onnxruntime {onnxruntime.__version__}"

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """See ModelRuntime. The softmax is computed in float64."""
        indices = np.asarray(positions, dtype=np.int64)
        result = np.empty((len(indices), self._vocabulary), dtype=np.float32)
        stride = max(1, _MAX_LOGITS // self._vocabulary)
        cache = self._empty_cache()
        for start in range(0, int(indices[-1]) + 1 if len(indices) else 0, stride):
            end = min(start + stride, int(indices[-1]) + 1)
            logits, cache = self._step(ids[start:end], cache)
            selected = (indices >= start) & (indices < end)
            values = logits[0, indices[selected] - start].astype(np.float64)
            values -= values.max(axis=-1, keepdims=True)
            result[selected] = values - np.log(np.exp(values).sum(axis=-1, keepdims=True))
        return result

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """See ModelRuntime. Among equally likely tokens the first is chosen."""
        answer: list[int] = []
        logits, cache = self._step(prompt, self._empty_cache())
        while len(answer) < max_new_tokens:
            answer.append(int(logits[0, -1].argmax()))
            if answer[-1] in ends or len(answer) == max_new_tokens:
                break
            logits, cache = self._step(answer[-1:], cache)
        return answer

    def _empty_cache(self) -> _OnnxCache:
        values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, spec.shape[1], 0, spec.shape[3]), np.float32))
            for name, spec in self._inputs.items()
            if name.startswith(_PAST)
        }
        return _OnnxCache(0, values)

    def _step(self, ids: Sequence[int], cache: _OnnxCache) -> tuple[NDArray[np.float32], _OnnxCache]:
        """Return logits [1, length, vocabulary] after each of `ids`, and the extended cache."""
        tokens = cache.tokens + len(ids)
        inputs = {
            "input_ids": np.asarray([ids], dtype=np.int64),
            "attention_mask": np.ones((1, tokens), dtype=np.int64),
            "position_ids": np.arange(cache.tokens, tokens, dtype=np.int64)[None],
        }
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        try:
            outputs = self._session.run_with_ort_values(self._outputs, values | cache.values)
        except Exception as error:  # onnxruntime's errors have no common base class
            raise DamagedFileError(
                f"{self._directory / MODEL_FILE}: onnxruntime cannot run it on {len(ids)} tokens after {cache.tokens}: "
                f"{first_line(error)}; export it again, or use fewer tokens"
            ) from error
        outputs_by_name = dict(zip(self._outputs, outputs, strict=True))
        logits: NDArray[np.float32] = outputs_by_name.pop("logits").numpy()
        past = {name.replace(_PRESENT, _PAST, 1): value for name, value in outputs_by_name.items()}
        return logits, _OnnxCache(tokens, past)


@contextmanager
def open_runtime(directory: Path, threads: int) -> Iterator[OnnxRuntime]:
    """Open a directory with an exported ONNX model on the CPU. Raises DamagedFileError if a file is missing or invalid.

    Args:
        directory: has model.onnx, its weights and tokenizer.json.
        threads: threads of one operation; they do not spin while waiting.
    """
    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.use_deterministic_compute = True
    options.log_severity_level = 3  # errors only; they are raised too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    tokenizer = _load_tokenizer(directory / TOKENIZER_FILE)
    path = directory / MODEL_FILE
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base class
        raise DamagedFileError(f"{path}: onnxruntime cannot open it: {first_line(error)}; export it again") from error
    names = {item.name for item in session.get_inputs()}
    missing = [name for name in ("input_ids", "attention_mask", "position_ids") if name not in names]
    if missing or session.get_outputs()[0].name != "logits" or not any(name.startswith(_PAST) for name in names):
        raise DamagedFileError(
            f"{path}: expected a language model with a cache as exported by Ratchet; found inputs "
            f"{', '.join(sorted(names)[:6])}; export it again"
        )
    yield OnnxRuntime(directory, session, tokenizer)


def _load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer without the truncation and padding that its file may define."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library's errors are plain Exceptions
        raise DamagedFileError(f"{path}: tokenizers cannot read it: {first_line(error)}; export it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
