"""How many tokens are decoded at once: forecast from free memory; less where that was too much, else more."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ratchet.model import capacity, storage
from ratchet.model.device import Model

SHRINK = 0.8
"""Of what did not fit, at the first failure; each further one before a pass that fits halves."""
GROW = 1.25
GROW_AFTER_PASSES = 50
"""Passes that fitted before more is tried; doubled each time that more did not fit."""
LONGEST_WAIT_PASSES = 10_000
SHARE = 0.5
"""Of free memory that rows may take by forecast: others use it too, and blocks are never packed without gaps."""
READ_TOKENS = 8192
"""Padded tokens of prompts that are read in one pass; a single longer prompt is read whole."""


@dataclass(frozen=True)
class Budget:
    """Padded tokens (rows x columns) that may be held at once; a single row is decoded whatever its length."""

    tokens: int
    failed_tokens: int = 0
    """What did not fit when the budget was last made smaller; 0: nothing yet."""
    good_passes: int = 0
    wait_passes: int = GROW_AFTER_PASSES
    grown: bool = False
    """Whether the last change made it larger: a failure then doubles the wait."""

    def shrunk(self, failed_tokens: int, repeated: bool) -> "Budget":
        """After `failed_tokens` did not fit; `repeated`: no pass has fitted since the failure before."""
        before = min(self.tokens, failed_tokens)
        tokens = before // 2 if repeated else min(before, int(SHRINK * failed_tokens))
        wait = min(LONGEST_WAIT_PASSES, 2 * self.wait_passes) if self.grown else self.wait_passes
        return Budget(max(1, tokens), failed_tokens, wait_passes=wait)

    def after_good_pass(self, limits: bool) -> "Budget":
        """After a pass that fitted; `limits`: prompts wait because of the budget. What failed is tried again: the want
        may have been another process's."""
        good = self.good_passes + limits
        if good < self.wait_passes:
            return replace(self, good_passes=good)
        return replace(self, tokens=max(self.tokens + 1, int(GROW * self.tokens)), good_passes=0, grown=True)


def forecast_tokens(model: Model, rows: int, drawn: bool) -> int:
    """Padded tokens that should fit: keys and values, logits of `rows` rows with what choosing takes, and one pass over
    prompts, in a share of the memory that is free beside the weights; at least 1."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = whole.config.get_text_config()
    weights = sum(tensor.nbytes for tensor in storage.tensors_of(model))
    room = SHARE * (capacity.of(model.device).available_bytes - weights)
    room -= rows_bytes(model, rows, 0, drawn) + READ_TOKENS * _bytes_of_read(config)
    return max(1, int(room // bytes_of_token(model, config)))


def rows_bytes(model: Model, rows: int, tokens: int, drawn: bool) -> int:
    """What so many rows with so many padded tokens take: keys and values, logits with what choosing takes."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = whole.config.get_text_config()
    return rows * int(config.vocab_size) * (40 if drawn else 12) + tokens * bytes_of_token(model, config)


def bytes_of_token(model: Model, config: Any) -> int:
    """Keys and values of one token in all layers, and half as much again: buffers are larger than what is in them."""
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    key_heads = _most(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or -(-hidden // heads))
    types = [tensor.element_size() for tensor in model.parameters() if tensor.is_floating_point()]
    return 3 * layers * key_heads * head * int(max(types, default=torch.float32.itemsize))


def _bytes_of_read(config: Any) -> int:
    """Of one token in the widest layer, in float32."""
    hidden = int(config.hidden_size)
    return 4 * (8 * hidden + 3 * _most(getattr(config, "intermediate_size", None) or 4 * hidden))


def _most(found: Any) -> int:
    """Some models say it layer by layer."""
    return int(max(found) if isinstance(found, list | tuple) else found)
