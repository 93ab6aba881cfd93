"""A transformers or peft model in memory, asked as every other runtime is: what the exported forms are held against."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from ratchet.model import scoring
from ratchet.model.columns import Pass
from ratchet.model.device import Model


class TorchModel:
    """Implements `runtimes.runtime.Runtime` over a model in evaluation mode, on any device, in its own arithmetic."""

    def __init__(self, model: Model, tokenizer: Any) -> None:
        """Nothing is loaded or changed.

        Args:
            model: causal; with adapters or not.
            tokenizer: its own.
        """
        self._model, self._tokenizer = model, tokenizer

    @property
    def name(self) -> str:
        """Name and version of the library that computes."""
        return f"transformers {transformers.__version__}"

    def token_ids(self, text: str) -> list[int]:
        """The text's tokens; special tokens in it count as such, and none is put before it."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Of the next token, in nats: [positions, vocabulary]; row i is what follows ids[: positions[i] + 1]."""
        return log_softmax(logits_at(self._model, ids, positions))

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """The likeliest continuation, with a cache of keys and values; holds the token that ended it."""
        config = self._model.config
        before, config.use_cache = config.use_cache, True  # off since training, and read by some models' own code
        try:
            pad = self._tokenizer.pad_token_id  # nothing is filled with it: there is one row
            return scoring.generate(self._model, [prompt], ends, max_new_tokens, 0 if pad is None else pad)[0]
        finally:
            config.use_cache = before


def logits_at(model: Model, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """Logits of a row at some positions: [positions, vocabulary] in float32.

    The head runs on pieces of the columns between the first and the last position, so a long row of a large
    vocabulary is never in memory as a whole.

    Args:
        positions: ascending indices into `ids`, at least one.
    """
    first, last = positions[0], positions[-1] + 1
    found: list[Tensor] = []
    with torch.no_grad():
        row = torch.tensor([list(ids)], device=model.device)
        for start, logits in Pass(model, row, (first, last)).pieces():
            inside = [one - start for one in positions if start <= one < start + logits.shape[1]]
            found.append(logits[0, inside].float().cpu())
    gathered: NDArray[np.float32] = torch.cat(found).numpy()
    return gathered


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logits [positions, vocabulary] as log-probabilities in nats."""
    found: NDArray[np.float32] = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    return found
