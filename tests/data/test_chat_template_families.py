"""Encoding with the chat templates of a dozen model families: only the assistant's tokens are trained."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_families import CHATML, FAMILIES, assistant, system, tokenizer, tokenizer_of, user
from ratchet.data.conversation import IGNORE_INDEX, Conversation, EncodedConversation, Message, RefusedConversation
from ratchet.data.tokenization import ConversationEncoder, encode_prompt

THINKING = {"Qwen 3", "DeepSeek R1"}
"""Families whose prompt and text differ by a thinking block."""


def encode(name: str, messages: Sequence[Message], turns: Any = "all") -> EncodedConversation:
    [encoded] = ConversationEncoder(tokenizer_of(name), turns).encode([("f:1", Conversation(list(messages)))])
    assert isinstance(encoded, EncodedConversation)
    return encoded


def spans(encoded: EncodedConversation) -> list[range]:
    """Return the runs of trained positions."""
    learned = [i for i, label in enumerate(encoded.labels) if label != IGNORE_INDEX]
    begins = [i for i in learned if i - 1 not in learned]
    ends = [i + 1 for i in learned if i + 1 not in learned]
    return [range(a, b) for a, b in zip(begins, ends, strict=True)]


def learned(name: str, encoded: EncodedConversation) -> list[str]:
    """Return the text of each trained span, without the family's lead and its end of turn."""
    family, tok = FAMILIES[name], tokenizer_of(name)
    texts = []
    for i, span in enumerate(runs := spans(encoded)):
        text = tok.decode(encoded.input_ids[span.start : span.stop])
        assert text.endswith(family.end)
        last = family.last_lead if family.last_lead is not None and i == len(runs) - 1 else family.lead
        if family.pieces:  # each word has a leading space, so decoding may add or drop one
            text, last = text.lstrip(" "), last.lstrip(" ")
        assert text.startswith(last)
        texts.append(text[len(last) : -len(family.end)])
    return texts


def same(name: str, texts: list[str], answers: list[str]) -> bool:
    """Return whether the texts equal the answers, except for white space that the family does not keep."""
    if name == "Qwen 3":  # the thinking block before the last answer absorbs its leading line breaks
        answers = [*answers[:-1], answers[-1].lstrip("\n")]
    if FAMILIES[name].trims or FAMILIES[name].pieces:
        return [text.strip() for text in texts] == [answer.strip() for answer in answers]
    return texts == answers


CHAT = [
    user("one?"), assistant("first answer"), user("two?"), assistant("second"), user("three?"), assistant("it was so"),
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_match_the_template_and_only_answers_are_trained(name: str) -> None:
    tok = tokenizer_of(name)
    messages = [user("the card is lost"), assistant("it is blocked")]
    encoded = encode(name, messages)
    assert learned(name, encoded) == ["it is blocked" + (" " if name == "Llama 2" else "")]
    assert all(label in (IGNORE_INDEX, i) for label, i in zip(encoded.labels, encoded.input_ids, strict=True))
    text = tok.apply_chat_template(messages, tokenize=False)
    assert encoded.input_ids == tok(text, add_special_tokens=False)["input_ids"]
    assert encoded.input_ids.count(tok.bos_token_id) == (FAMILIES[name].bos is not None and FAMILIES[name].bos in text)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_turns_setting_selects_trained_answers(name: str) -> None:
    assert same(name, learned(name, encode(name, CHAT)), ["first answer", "second", "it was so"])
    assert same(name, learned(name, encode(name, CHAT, "last")), ["it was so"])
    flags: list[dict[str, Any]] = [{}, {"train": False}, {}, {"train": True}, {}, {"weight": 1}]
    flagged = [{**message, **flag} for message, flag in zip(CHAT, flags, strict=True)]
    assert same(name, learned(name, encode(name, flagged, "flagged")), ["second", "it was so"])
    assert encode(name, flagged).input_ids == encode(name, CHAT).input_ids  # the template does not see the flags
    nothing = encode(name, CHAT, "flagged")
    assert (nothing.trained_tokens, nothing.input_ids) == (0, encode(name, CHAT).input_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_system_message_is_not_trained_or_refused(name: str) -> None:
    messages = [system("be brief"), *CHAT]
    if FAMILIES[name].system == "refused":
        [refused] = ConversationEncoder(tokenizer_of(name)).encode([("f:1", Conversation(messages))])
        assert refused == RefusedConversation(
            "refused", "the chat template raises TemplateError: System role not supported"
        )
        return
    encoded = encode(name, messages)
    assert "be brief" in tokenizer_of(name).decode(encoded.input_ids)
    assert same(name, learned(name, encoded), ["first answer", "second", "it was so"])


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - THINKING))
def test_trained_tokens_begin_where_the_inference_prompt_ends(name: str) -> None:
    encoded = encode(name, CHAT)
    for turn, span in zip((1, 3, 5), spans(encoded), strict=True):
        prompt = encode_prompt(tokenizer_of(name), Conversation(CHAT[:turn]))
        assert encoded.input_ids[: len(prompt)] == prompt
        assert span.start == len(prompt)


@pytest.mark.parametrize("name", sorted(THINKING))
def test_a_prompt_that_differs_by_a_thinking_block_is_accepted(name: str) -> None:
    encoded = encode(name, CHAT[:2])
    shown = (
        tokenizer_of(name).decode(encode_prompt(tokenizer_of(name), Conversation(CHAT[:1]))).removesuffix("<think>\n")
    )
    assert tokenizer_of(name).decode(encoded.input_ids[: spans(encoded)[0].start]) == shown


@pytest.mark.parametrize("name", FAMILIES)
def test_batch_encoding_equals_single_encoding(name: str) -> None:
    """The encoder measures the first rows of a structure, places later ones by counting, and measures odd ones too."""
    answers = ["it was so", "so", "", "  two\n\nlines ", "日本語 🙂", "\n\nnews", "1 2 3", "a" * 40, "it was so"] * 130
    rows = [(f"f:{i}", Conversation([user(f"question {i}"), assistant(text)])) for i, text in enumerate(answers)]
    together = ConversationEncoder(tokenizer_of(name)).encode(rows)
    alone = ConversationEncoder(tokenizer_of(name))
    assert together[-27:] == [alone.encode([row])[0] for row in rows[-27:]]
    again = [encoded for encoded in together if isinstance(encoded, EncodedConversation)]
    assert len(again) == len(rows)
    assert [encoded.trained_tokens == 0 for encoded in again] == [text == "" for text in answers]


ODD = [
    "grüße 日本語 🙂", "two\nlines", "\n two\n\n\nlines \n", "  spaces  ", "[INS] x [/IN", "1", "ǆ", "e\u0301", "\x00",
    "<|im_end", "### Response:\nno", "ASSISTANT: no", "the card is lost", "{{ x }}", "▁", "<0x41>", "\u3000wide\u3000",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("answer", ODD)
def test_any_answer_is_trained_unchanged(name: str, answer: str) -> None:
    messages = [user(f"the card is lost {answer}"), assistant(answer), user(answer), assistant(f"{answer} {answer}")]
    if FAMILIES[name].pieces and answer == "▁":  # SentencePiece takes it for a space and would train a space
        [refused] = ConversationEncoder(tokenizer_of(name)).encode([("f:1", Conversation(messages))])
        assert refused.detail.startswith("the tokenizer loses characters: '▁")
        return
    assert same(name, learned(name, encode(name, messages)), [answer, f"{answer} {answer}"])


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), min_size=1, max_size=20)
words = st.sampled_from(
    ["one", "first answer", "ASSISTANT:", "user", "\n", " ", "\n\n", "### Response:\n", "[", "<", "🙂"]
)
written = st.lists(words | texts, min_size=1, max_size=5).map("".join).filter(str.strip)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.tuples(written, written), min_size=1, max_size=3), st.booleans())
def test_random_conversations_are_verified(name: str, turns: list[tuple[str, str]], repeat: bool) -> None:
    messages = []
    for question, answer in turns:
        messages += [user(f"{question} {answer}" if repeat else question), assistant(answer)]
    encoded = encode(name, messages)
    assert same(name, learned(name, encoded), [answer for _, answer in turns])
    tok, begin = tokenizer_of(name), spans(encoded)[-1].start
    if name not in THINKING:  # merged white space changes tokens, but not the text
        asked = tok.decode(encode_prompt(tok, Conversation(messages[:-1])))
        assert tok.decode(encoded.input_ids[:begin]).rstrip() == asked.rstrip()


def test_padding_and_truncation_of_the_tokenizer_are_reset() -> None:
    tok = tokenizer(CHATML, "<|im_end|>", ("<|im_start|>",))
    plain = ConversationEncoder(tok).encode([("f:1", Conversation(CHAT))])
    tok(["a", "the card is lost"], padding=True, truncation=True, max_length=5)
    assert (
        ConversationEncoder(tok).encode([("f:1", Conversation(CHAT)), ("f:2", Conversation(CHAT[:2]))])[0] == plain[0]
    )


LONG_CHAT = [
    user("one two three " * 3), assistant("first answer it was so " * 2), user("the card is blocked hello world " * 20),
    assistant("second"), user("lost?"), assistant("the card is lost hello world " * 6),
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_cut_in_the_middle_and_answers_stay(name: str) -> None:
    encoder, conversation = ConversationEncoder(tokenizer_of(name)), Conversation(LONG_CHAT)
    length = len(encode(name, LONG_CHAT).input_ids)
    shortened, encoded = encoder.shorten("f:1", conversation, length, length - 60, "prompt") or (None, None)
    assert shortened is not None and isinstance(encoded, EncodedConversation)
    assert length - 75 < len(encoded.input_ids) <= length - 60
    assert learned(name, encoded) == learned(name, encode(name, LONG_CHAT))
    assert shortened.messages[0] == {**LONG_CHAT[0], "content": LONG_CHAT[0]["content"].strip()}  # short ones stay
    assert shortened.messages[4] == LONG_CHAT[4]
    before, after = LONG_CHAT[2]["content"].strip(), shortened.messages[2]["content"]
    assert len(after) < len(before)
    half = len(after) // 3
    assert before.startswith(after[:half]) and before.endswith(after[-half:])
    assert encoder.shorten("f:1", conversation, length, 20, "prompt") is None  # the answers alone need more


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_and_answers_are_cut_by_the_same_share(name: str) -> None:
    encoder, tok = ConversationEncoder(tokenizer_of(name)), tokenizer_of(name)
    length = len(encode(name, LONG_CHAT).input_ids)
    shortened, encoded = encoder.shorten("f:1", Conversation(LONG_CHAT), length, length * 2 // 3, "both") or (
        None,
        None,
    )
    assert shortened is not None and isinstance(encoded, EncodedConversation)
    assert length * 2 // 3 - 15 < len(encoded.input_ids) <= length * 2 // 3
    for span in spans(encoded):  # each answer still ends its turn
        assert tok.decode(encoded.input_ids[span.start : span.stop]).endswith(FAMILIES[name].end)

    def size(text: str) -> int:
        return len(tok.backend_tokenizer.encode(text.strip(), add_special_tokens=False).ids)

    sizes = [(size(a["content"]), size(b["content"])) for a, b in zip(LONG_CHAT, shortened.messages, strict=True)]
    kept = [after / before for before, after in sizes if before > 20]
    assert max(kept) - min(kept) < 0.1
    for a, b in zip(LONG_CHAT[1::2], shortened.messages[1::2], strict=True):
        assert a["content"].startswith(b["content"])


@pytest.mark.parametrize("name", ["Qwen 3", "ChatML"])
def test_reasoning_survives_a_cut_of_its_answer(name: str) -> None:
    encoder, reasoning = ConversationEncoder(tokenizer_of(name)), "<think>\none two three\n</think>\n\n"
    messages = [user("lost? " * 10), assistant(reasoning + "the card is lost hello world " * 20)]
    length = len(encode(name, messages).input_ids)
    shortened, encoded = encoder.shorten("f:1", Conversation(messages), length, length // 2, "both") or (None, None)
    assert shortened is not None and isinstance(encoded, EncodedConversation)
    answer = shortened.messages[1]["content"]
    assert answer.startswith(reasoning + "the card") and len(answer) < len(messages[1]["content"])
    long_thoughts = [user("lost?"), assistant(f"<think>\n{'one two three ' * 20}</think>\n\nthe card")]
    length = len(encode(name, long_thoughts).input_ids)
    assert encoder.shorten("f:1", Conversation(long_thoughts), length, length // 2, "both") is None


def test_system_messages_and_tool_calls_survive_a_cut_of_tool_results() -> None:
    call = {"type": "function", "function": {"name": "card", "arguments": {"first": "one " * 10}}}
    messages: list[Message] = [
        system("one two three"), user("lost?"), {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "the card is blocked " * 20 + "hello world"}, assistant("it was so"),
    ]  # fmt: skip
    encoder, whole = ConversationEncoder(tokenizer_of("Qwen 2.5")), encode("Qwen 2.5", messages)
    length = len(whole.input_ids)
    shortened, encoded = encoder.shorten("f:1", Conversation(messages), length, length - 50, "prompt") or (None, None)
    assert shortened is not None and isinstance(encoded, EncodedConversation)
    assert [m for m in shortened.messages if m["role"] != "tool"] == [m for m in messages if m["role"] != "tool"]
    result = shortened.messages[3]["content"]
    assert result.startswith("the card") and result.endswith("world")
    assert encoded.trained_tokens == whole.trained_tokens
