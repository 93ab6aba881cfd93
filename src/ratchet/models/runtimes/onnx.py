"""A directory with model.onnx in onnxruntime, with nothing else: neither torch nor transformers is imported.

The graph takes input_ids, attention_mask, position_ids and the keys and values of what came before, and gives logits
and the keys and values with the new ones; so a prompt goes through once and every further token alone.
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

FILE = "model.onnx"
TOKENIZER = "tokenizer.json"

_AT_ONCE_LOGITS = 2**26
"""Numbers in one answer, 256 MB: longer rows go through in pieces, each after the cache of those before."""
_PAST, _PRESENT = "past_key_values.", "present."


@dataclass
class _OnnxCache:
    """Keys and values so far, in the runtime's own memory."""

    tokens: int
    values: dict[str, Any]


class OnnxRuntime:
    """A Runtime (models/runtimes/runtime.py) on the CPU."""

    def __init__(self, directory: Path, session: Any, tokenizer: Tokenizer) -> None:
        self._directory = directory
        self._session = session
        self._tokenizer = tokenizer
        self._inputs = {one.name: one for one in session.get_inputs()}
        self._outputs = [one.name for one in session.get_outputs()]
        self._vocabulary = int(session.get_outputs()[0].shape[-1])

    @property
    def name(self) -> str:
        return f"onnxruntime {onnxruntime.__version__}"

    def token_ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """See Runtime. The softmax is computed in float64."""
        wanted = np.asarray(positions, dtype=np.int64)
        found = np.empty((len(wanted), self._vocabulary), dtype=np.float32)
        stride = max(1, _AT_ONCE_LOGITS // self._vocabulary)
        cache = self._empty()
        for start in range(0, int(wanted[-1]) + 1 if len(wanted) else 0, stride):
            end = min(start + stride, int(wanted[-1]) + 1)
            logits, cache = self._step(ids[start:end], cache)
            here = (wanted >= start) & (wanted < end)
            found[here] = _log_softmax(logits[0, wanted[here] - start])
        return found

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """See Runtime; of equally likely tokens the first is taken."""
        found: list[int] = []
        logits, cache = self._step(prompt, self._empty())
        while len(found) < max_new_tokens:
            found.append(int(logits[0, -1].argmax()))
            if found[-1] in ends or len(found) == max_new_tokens:
                break
            logits, cache = self._step(found[-1:], cache)
        return found

    def _empty(self) -> _OnnxCache:
        values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32))
            for name, one in self._inputs.items()
            if name.startswith(_PAST)
        }
        return _OnnxCache(0, values)

    def _step(self, ids: Sequence[int], cache: _OnnxCache) -> tuple[NDArray[np.float32], _OnnxCache]:
        """Logits [1, length, vocabulary] of what follows each of `ids`, and the cache with them."""
        tokens = cache.tokens + len(ids)
        fed = {
            "input_ids": np.asarray([ids], dtype=np.int64),
            "attention_mask": np.ones((1, tokens), dtype=np.int64),
            "position_ids": np.arange(cache.tokens, tokens, dtype=np.int64)[None],
        }
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(one) for name, one in fed.items()}
        try:
            answered = self._session.run_with_ort_values(self._outputs, values | cache.values)
        except Exception as error:  # onnxruntime's errors have no root of their own
            raise DamagedFileError(
                f"{self._directory / FILE}: onnxruntime cannot run it on {len(ids)} tokens after {cache.tokens}: "
                f"{first_line(error)}; export it again, or ask for fewer tokens"
            ) from error
        named = dict(zip(self._outputs, answered, strict=True))
        logits: NDArray[np.float32] = named.pop("logits").numpy()
        past = {name.replace(_PRESENT, _PAST, 1): value for name, value in named.items()}
        return logits, _OnnxCache(tokens, past)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over the last axis, computed in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide.astype(np.float32)


@contextmanager
def open_runtime(directory: Path, threads: int) -> Iterator[OnnxRuntime]:
    """A directory as `formats.onnx.write` makes it, on the CPU.

    Args:
        directory: with model.onnx, its weights and tokenizer.json.
        threads: that compute one operation together; they do not spin while they wait.

    Raises:
        DamagedFileError: a file is missing, or is not what it should be.
    """
    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.use_deterministic_compute = True
    options.log_severity_level = 3  # errors: they are raised, too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    tokenizer = _load_tokenizer(directory / TOKENIZER)
    path = directory / FILE
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # as above
        raise DamagedFileError(f"{path}: onnxruntime cannot open it: {first_line(error)}; export it again") from error
    _require_inputs(path, session)
    yield OnnxRuntime(directory, session, tokenizer)


def _require_inputs(path: Path, session: Any) -> None:
    """Raises DamagedFileError unless the graph is one with a cache, as this room feeds it."""
    names = {one.name for one in session.get_inputs()}
    missing = [name for name in ("input_ids", "attention_mask", "position_ids") if name not in names]
    if missing or session.get_outputs()[0].name != "logits" or not any(name.startswith(_PAST) for name in names):
        raise DamagedFileError(
            f"{path}: no language model with a cache as Ratchet writes it: its inputs are "
            f"{', '.join(sorted(names)[:6])}; export it again"
        )


def _load_tokenizer(path: Path) -> Tokenizer:
    """Nothing is cut off or filled up, whatever the file says: rows are given as they are."""
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library's errors are plain Exceptions
        raise DamagedFileError(f"{path}: tokenizers cannot read it: {first_line(error)}; export it again") from error
    found.no_truncation()
    found.no_padding()
    return found
