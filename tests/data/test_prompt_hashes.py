"""Tests the hashes of prompts: the prompt of a stored conversation is read alone, and equivalent prompts are equal."""

from typing import Any

import pytest

from ratchet.data.conversation import Conversation, read_prompt
from ratchet.data.prompt_hashes import hash_prompt

ANSWER = {"role": "assistant", "content": "yes"}
PARTS = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": 'a "quoted"\n\\ text, \u00e9\u2028\U0001f600 {}'}, ANSWER],
        [{"role": "user", "content": "", "name": "ada"}, ANSWER],
        [{"content": "keys in another order", "role": "user"}, ANSWER],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "second"}, ANSWER],
        [{"role": "user", "content": PARTS}, ANSWER],
        [{"role": "user", "content": None}, ANSWER],
        [ANSWER],
    ],
)
def test_the_prompt_is_that_of_the_whole_conversation(messages: list[dict[str, Any]]) -> None:
    conversation = Conversation(messages, rejected=ANSWER)
    assert read_prompt(conversation.to_json()) == conversation.prompt


def test_equivalent_prompts_have_equal_hashes() -> None:
    assert hash_prompt(" My  INVOICE\n") == hash_prompt("my invoice") != hash_prompt("my invoices")
    assert 0 <= hash_prompt("\ud800") < 2**64
