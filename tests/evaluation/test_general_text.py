"""Tests the bundled general text: no overlap with training data, and deterministic blocks."""

import copy
import re
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ratchet.data.leakage import BenchmarkIndex
from ratchet.errors import DataError
from ratchet.evaluation import rows
from ratchet.models import tiny_model

BUNDLED = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_model.train_tokenizer(["one two three four five"], 300)


def test_the_bundled_text_is_long_and_has_no_repetition() -> None:
    pieces = rows.read_bundled_text().strip().split("\n\n")
    words = rows.read_bundled_text().split()
    assert len(pieces) > 70
    assert 6000 <= len(words) <= 8000
    sentences = [s for piece in pieces for s in re.split(r"(?<=[.?!]) ", piece)]
    assert len(sentences) == len(set(sentences))


def test_the_bundled_text_shares_no_13_words_with_the_bundled_corpus() -> None:
    benchmark = BenchmarkIndex({"general": rows.read_bundled_text().split("\n\n")}, 13)
    seen = 0
    for path in [*BUNDLED.glob("text/*.txt"), *BUNDLED.glob("raw/support.*")]:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert benchmark.matches(line) == []
            seen += 1
    assert seen > 5000
    assert benchmark.matches("so " + rows.read_bundled_text()[300:600])  # an overlap would be found


def test_blocks_are_the_text_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    text = rows.read_bundled_text()
    found = rows.split_into_blocks(text, tokenizer, block_tokens=50, blocks=40)
    assert [len(block) for block in found] == [50] * 40
    assert text.startswith(tokenizer.decode([token for block in found for token in block]))
    assert found == rows.split_into_blocks(text, tokenizer, block_tokens=50, blocks=40)
    assert rows.split_into_blocks(text, tokenizer, block_tokens=50, blocks=30) == found[:30]


def test_blocks_begin_with_the_tokenizers_prefix(tokenizer: PreTrainedTokenizerFast) -> None:
    """Llama's tokenizer, for example, puts a token before each text."""
    beginning = copy.deepcopy(tokenizer)
    first = beginning.convert_tokens_to_ids(tiny_model.END_OF_TEXT)
    beginning.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tiny_model.END_OF_TEXT} $A", pair=None, special_tokens=[(tiny_model.END_OF_TEXT, first)]
    )
    plain, begun = (
        rows.split_into_blocks("one two three four " * 40, one, block_tokens=10, blocks=5)
        for one in (tokenizer, beginning)
    )
    assert begun == [[first, *block] for block in plain]


@pytest.mark.parametrize(
    ("text", "block_tokens", "blocks", "said"),
    [
        ("one two three", 64, 256, "enough for 0 blocks of 64"),
        ("", 64, 256, "0 tokens"),
        ("one two three four " * 100, 8, 1, "at most 1 are used"),
    ],
    ids=["short", "empty", "one block"],
)
def test_too_little_text_is_refused(
    tokenizer: PreTrainedTokenizerFast, text: str, block_tokens: int, blocks: int, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        rows.split_into_blocks(text, tokenizer, block_tokens, blocks)
