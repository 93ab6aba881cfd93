"""How many rows are scored at once: a power of two that follows from machine and model, the same every time."""

from typing import Any, Literal

from ratchet.model import capacity, storage
from ratchet.model.quantized import Model

MOST_ROWS = 64
"""More make nothing faster, and fill shorter rows for longer ones."""
SHARE = 0.5
"""Of the memory beside the weights that rows may take: others use the machine as well, and blocks are never packed
without gaps. What is free at the moment is not asked: scores move with the rows of a batch, if only by rounding."""


def rows_at_once(wanted: int | Literal["auto"], model: Model, longest_tokens: int, vocabulary: int) -> int:
    """Rows of a batch. `auto` takes the greatest power of two whose rows, all as long as the longest, should fit.

    Args:
        wanted: `machine` says it, or leaves it to us.
        model: loaded; its weights and its device count.
        longest_tokens: of any row that will be scored, generated tokens included.
        vocabulary: logits of a position.

    Returns:
        At least 1. Where even so many do not fit, memory runs out (model.memory.is_exhausted), and half as many may.
    """
    if wanted != "auto":
        return wanted
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    room = SHARE * (capacity.of(model.device).total_bytes - sum(t.nbytes for t in storage.tensors_of(model)))
    rows = 1
    needed = bytes_of_row(whole.config.get_text_config(), longest_tokens, vocabulary)
    while rows < MOST_ROWS and 2 * rows * needed <= room:
        rows *= 2
    return rows


def bytes_of_row(config: Any, tokens: int, vocabulary: int) -> int:
    """Bound of what a row holds while it is scored without gradients, in bytes.

    Keys and values of all layers twice (a cache that grows is copied), the widest layer's inputs and outputs, attention
    scores if they are written out, and some copies of the logits of one position; all in float32. Wider pieces of
    logits are bounded for a batch as a whole (model.columns.CHUNK_ELEMENTS).
    """
    hidden = int(config.hidden_size)
    layers = int(config.num_hidden_layers)
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    inner = _widest(config, "intermediate_size", 4 * hidden)
    key_heads = _widest(config, "num_key_value_heads", heads)
    head = int(getattr(config, "head_dim", None) or -(-hidden // heads))
    cache = 2 * 2 * layers * key_heads * head * tokens
    width = (8 * hidden + 3 * inner) * tokens
    scores = 2 * heads * tokens * tokens if getattr(config, "_attn_implementation", None) == "eager" else 0
    return 4 * (cache + width + scores + 4 * vocabulary)


def _widest(config: Any, name: str, otherwise: int) -> int:
    """A size that some models give layer by layer."""
    found = getattr(config, name, None)
    return int(max(found) if isinstance(found, list | tuple) else found or otherwise)
