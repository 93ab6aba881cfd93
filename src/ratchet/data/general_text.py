"""Text that has nothing to do with the task: what a model forgets in training shows in how likely it finds this."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.errors import DataError

TEXT = Path(__file__).parent.parent / "template" / "general.txt"
"""Our own prose: some eighty short pieces, written for this, so that no model can have been trained on them before."""

LEAST_BLOCKS = 2
"""Of a text; one sample has no spread."""


def read_bundled_text() -> str:
    """The prose that comes with Ratchet, in English; a blank line between two pieces."""
    return TEXT.read_text(encoding="utf-8")


def split_into_blocks(text: str, tokenizer: Any, block_tokens: int, blocks: int) -> list[list[int]]:
    """The text as token ids, cut into blocks of equal length; a function of its arguments alone.

    Where the tokenizer begins texts with tokens of its own (Llama's and Gemma's BOS), each block begins with them too:
    such models have never seen a text without. The last piece, if it is too short for a block, is left out.

    Args:
        block_tokens: tokens of text in a block, two at least: the first has nothing before it to be told from.
        blocks: of them at most so many, from the beginning of the text on.

    Raises:
        DataError: the text is too short for two blocks, or a block too short to be scored.
    """
    if block_tokens < 2:
        raise DataError(
            f"evaluate.general.block_tokens: {block_tokens}, but a token is scored by those before it: at least 2"
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    whole = len(ids) // block_tokens
    if min(whole, blocks) < LEAST_BLOCKS:
        raise DataError(
            f"evaluate.general: the text has {len(ids):,} tokens, which are {whole} blocks of {block_tokens} "
            f"(block_tokens), and at most {blocks} are wanted (blocks); a comparison needs {LEAST_BLOCKS} at least, "
            "and a hundred to show a change of a few per cent: name a longer text, or ask for shorter or more blocks"
        )
    first = _prefix_ids(tokenizer)
    starts = range(0, min(whole, blocks) * block_tokens, block_tokens)
    return [[*first, *ids[start : start + block_tokens]] for start in starts]


def _prefix_ids(tokenizer: Any) -> Sequence[int]:
    """The ids that the tokenizer puts before any text."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:at]
