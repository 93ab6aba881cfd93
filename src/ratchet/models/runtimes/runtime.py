"""An exported model, opened in the runtime that it is for: the one seam through which every form is examined."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ModelRuntime(Protocol):
    """One form of a model, ready to be asked. Used by one thread, in a `with` block of whoever opened it."""

    @property
    def name(self) -> str:
        """Name and version, such as `onnxruntime 1.31.1`."""
        ...

    def token_ids(self, text: str) -> list[int]:
        """As the form's own tokenizer cuts a text in which special tokens count as such; nothing is put before it."""
        ...

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Of the next token, in nats: [positions, vocabulary]; row i is what follows ids[: positions[i] + 1].

        Args:
            ids: tokens of one row, all of them.
            positions: ascending indices into `ids`.
        """
        ...

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """The likeliest continuation, token by token; ends with one of `ends`, which it then holds, or at the limit."""
        ...
