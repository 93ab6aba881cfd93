"""Interface of the runtimes in which exported models are verified."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ModelRuntime(Protocol):
    """An exported model opened in its runtime. Use it in one thread, inside the `with` block that opened it."""

    @property
    def name(self) -> str:
        """Name and version, such as `onnxruntime 1.31.1`."""
        ...

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a text with the model's own tokenizer; special tokens in it count, and none is prepended."""
        ...

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Return log-probabilities of the next token in nats, [positions, vocabulary]; row i follows ids[: positions[i]
        + 1].

        Args:
            ids: all tokens of one row.
            positions: ascending indices into `ids`.
        """
        ...

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """Return the greedy continuation; it ends with one of `ends`, which is included, or at the limit."""
        ...
