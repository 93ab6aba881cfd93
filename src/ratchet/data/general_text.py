"""General text unrelated to the task: its loss shows how much general ability a model lost in training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.errors import DataError

TEXT = Path(__file__).with_name("general.txt")
"""About eighty short pieces of prose, written for this purpose, so that no model was trained on them before."""

MIN_BLOCKS = 2
"""Minimum number of blocks; a single sample has no variance."""


def read_bundled_text() -> str:
    """Return the bundled English prose; its pieces are separated by blank lines."""
    return TEXT.read_text(encoding="utf-8")


def split_into_blocks(text: str, tokenizer: Any, block_tokens: int, blocks: int) -> list[list[int]]:
    """Tokenize a text and split it into blocks of equal length; deterministic.

    If the tokenizer adds tokens before a text (the BOS of Llama and Gemma), each block begins with them too, since such
    models never see a text without them. An incomplete last block is left out.

    Args:
        text: the text.
        tokenizer: a Hugging Face tokenizer.
        block_tokens: text tokens per block, at least 2: the first token has no context to be predicted from.
        blocks: limit of the number of blocks, from the beginning of the text.

    Raises:
        DataError: the text is too short for two blocks, or `block_tokens` is less than 2.
    """
    if block_tokens < 2:
        raise DataError(
            f"evaluate.general_text.block_tokens: found {block_tokens}; expected at least 2, since a token is scored "
            "given those before it"
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    complete = len(ids) // block_tokens
    if min(complete, blocks) < MIN_BLOCKS:
        raise DataError(
            f"evaluate.general_text: the text has {len(ids):,} tokens, enough for {complete} blocks of {block_tokens} "
            f"(block_tokens), of which at most {blocks} are used (max_blocks); expected at least {MIN_BLOCKS} blocks, "
            "or 100 to show a change of a few per cent: name a longer text, or set shorter or more blocks"
        )
    prefix = _prefix_ids(tokenizer)
    starts = range(0, min(complete, blocks) * block_tokens, block_tokens)
    return [[*prefix, *ids[start : start + block_tokens]] for start in starts]


def _prefix_ids(tokenizer: Any) -> Sequence[int]:
    """Return the ids that the tokenizer adds before any text."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special: list[int] = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)
    return with_special[:start]
