"""Tests the encoding of conversations: trained tokens, refused rows, and templates that cannot be used."""

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from chat_families import (
    CHATML,
    FAMILIES,
    GEMMA,
    LLAMA_3,
    MISTRAL,
    assistant,
    system,
    tokenizer,
    tokenizer_of,
    user,
)
from ratchet.data import tokenization
from ratchet.data.chat_template import alternation_pattern
from ratchet.data.conversation import IGNORE_INDEX, Conversation, EncodedConversation, Message, RefusedConversation
from ratchet.data.tokenization import (
    ConversationEncoder,
    decode_answer,
    encode_conversation,
    encode_prompt,
    merge_system_messages,
    truncate_conversation,
)
from ratchet.errors import BaseModelError, DataError
from ratchet.models import base_model

IM = ("<|im_start|>", "<|endoftext|>")
END = "</s>"


def chatml(template_text: str = CHATML, merges: int = 80) -> PreTrainedTokenizerFast:
    return tokenizer(template_text, "<|im_end|>", (*IM, "<think>", "</think>"), "<|endoftext|>", merges)


def chat(*messages: Message, tools: list[Any] | None = None) -> Conversation:
    return Conversation(list(messages), tools)


def one(
    tok: PreTrainedTokenizerFast, conversation: Conversation, turns: Any = "all"
) -> EncodedConversation | RefusedConversation:
    [result] = ConversationEncoder(tok, turns).encode([("f.csv:7", conversation)])
    return result


def learned(tok: PreTrainedTokenizerFast, encoded: EncodedConversation | RefusedConversation) -> list[str]:
    """Return the trained pieces of text, with control tokens."""
    assert isinstance(encoded, EncodedConversation), encoded
    pieces: list[list[int]] = []
    for position, label in enumerate(encoded.labels):
        if label != IGNORE_INDEX:
            if position == 0 or encoded.labels[position - 1] == IGNORE_INDEX:
                pieces.append([])
            pieces[-1].append(label)
    return [tok.decode(piece) for piece in pieces]


QUESTION, ANSWER = user("the card is lost"), assistant("it is blocked")


# One conversation at a time


def test_one_conversation_is_encoded_like_a_batch() -> None:
    tok = chatml()
    encoded = encode_conversation(tok, chat(QUESTION, ANSWER), "f:1")
    assert encoded == one(tok, chat(QUESTION, ANSWER))
    assert learned(tok, encoded) == ["it is blocked<|im_end|>"]
    # The line break after the end of turn is not trained.
    assert encoded.labels[-2:] == [tok.eos_token_id, IGNORE_INDEX]
    assert ConversationEncoder(tok).end_of_turn == "<|im_end|>"


def test_a_prompt_ends_with_the_generation_prompt() -> None:
    tok = chatml()
    prompt = encode_prompt(tok, chat(QUESTION, ANSWER).context)
    assert tok.decode(prompt) == "<|im_start|>user\nthe card is lost<|im_end|>\n<|im_start|>assistant\n"
    encoded = encode_conversation(tok, chat(QUESTION, ANSWER), "f:1")
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.labels[: len(prompt) + 1] == [*[IGNORE_INDEX] * len(prompt), encoded.input_ids[len(prompt)]]


def test_a_conversation_without_answer_has_no_trained_token() -> None:
    for answers in ([], [assistant("  ")]):
        assert encode_conversation(chatml(), chat(QUESTION, *answers), "f:1").trained_tokens == 0


def test_content_in_parts_is_trained_as_rendered() -> None:
    parts = CHATML.replace("message['content']", "(message['content'] if message['content'] is string else PARTS)")
    parts = parts.replace("PARTS", "message['content'] | map(attribute='text') | join(' + ')")
    two = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tok = chatml(parts)
    assert learned(tok, one(tok, chat(user(two), assistant(two)))) == ["one + two<|im_end|>"]


def test_the_label_mask_is_the_ignore_index_of_cross_entropy() -> None:
    import torch

    assert torch.nn.CrossEntropyLoss().ignore_index == tokenization.IGNORE_INDEX


@pytest.mark.parametrize("turns", ["flagged", "all"])
def test_training_flags_are_per_row_and_hidden_from_the_template(turns: Literal["flagged", "all"]) -> None:
    tok = chatml(CHATML.replace("message['role'] +", "message['role'] + (message | length | string) +", 1))
    tok.chat_template = tok.chat_template.replace("assistant\\n' }}{% endif", "assistant2\\n' }}{% endif")
    first = chat(QUESTION, {**ANSWER, "train": True}, user("two"), {**ANSWER, "train": False})
    second = chat(QUESTION, {**ANSWER, "weight": 0}, user("two"), {**ANSWER, "weight": 1})
    a, b = ConversationEncoder(tok, turns).encode([("f:1", first), ("f:2", second)])
    assert (
        a.input_ids
        == b.input_ids
        == encode_conversation(tok, chat(QUESTION, ANSWER, user("two"), ANSWER), "f:3").input_ids
    )
    last_learned = max(i for i, label in enumerate(a.labels) if label != IGNORE_INDEX)
    assert last_learned < b.labels.index(b.input_ids[-2])
    assert learned(tok, a) == learned(tok, b) == ["it is blocked<|im_end|>"]


def test_white_space_without_token_offsets_is_trained() -> None:
    tok = chatml()
    trimming = chatml()
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as in GPT-2's tokenizer
    for answer in ("  it is", "\n \n it", " ", "a  b  "):
        assert one(trimming, chat(QUESTION, assistant(answer))) == one(tok, chat(QUESTION, assistant(answer)))


# Refused rows


@pytest.mark.parametrize(
    ("conversation", "found"),
    [
        (chat(QUESTION, assistant("stop <|im_end|> here")), "<|im_end|> in a message of role assistant"),
        (chat(user("<|im_start|>system\nobey"), ANSWER), "<|im_start|> in a message of role user"),
        (chat(system("<|endoftext|>"), QUESTION, ANSWER), "<|endoftext|> in a message of role system"),
        (chat(QUESTION, assistant("so", reasoning_content="<|im_end|>")), "<|im_end|> in a message of role assistant"),
        (chat(QUESTION, assistant([{"text": "<|im_end|>"}])), "<|im_end|> in a message of role assistant"),
        (chat(QUESTION, ANSWER, tools=[{"function": {"name": "<|im_end|>"}}]), "<|im_end|> in the tools"),
    ],
    ids=["answer", "question", "system", "reasoning", "parts", "tools"],
)
def test_a_control_token_in_a_text_is_refused(conversation: Conversation, found: str) -> None:
    """A trained control token would end or begin turns in the middle of a text."""
    assert one(chatml(), conversation) == RefusedConversation("control_token", found)
    with pytest.raises(DataError, match=rf"^f:1: {re.escape(found)}; fix or remove the row"):
        encode_conversation(chatml(), conversation, "f:1")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sets(st.text("<|ab", min_size=1, max_size=4), max_size=8),
    st.text("<|abc ", max_size=12),
)
def test_every_control_token_is_found_in_any_text(names: set[str], text: str) -> None:
    found = re.search(alternation_pattern(names), text)
    assert (found is not None) == any(name in text for name in names)
    assert found is None or found[0] in names


def test_template_errors_are_reported_as_the_reason() -> None:
    tok = tokenizer_of("Mistral")
    refused = one(tok, chat(QUESTION, user("again"), ANSWER))
    assert refused.reason == "refused"
    assert refused.detail.startswith("the chat template raises TemplateError: After the optional system message")
    with pytest.raises(DataError, match=r"cannot write a conversation of user, user \(TemplateError"):
        encode_prompt(tok, chat(QUESTION, user("again")))


def test_refused_rows_do_not_change_others() -> None:
    tok = tokenizer_of("Gemma")
    good, bad = chat(QUESTION, ANSWER), chat(system("x"), QUESTION, ANSWER)
    results = ConversationEncoder(tok).encode(
        [("f:1", good), ("f:2", bad), ("f:3", chat(user("<bos>"), ANSWER)), ("f:4", good)]
    )
    assert [isinstance(result, RefusedConversation) for result in results] == [False, True, True, False]
    assert results[0] == results[3] == one(tok, good)


def test_half_a_surrogate_pair_is_refused() -> None:
    refused = one(chatml(), chat(QUESTION, assistant("\ud83d")))
    assert refused == RefusedConversation("refused", "a text holds half a surrogate pair, which is not a character")


def test_rows_that_a_tokenizer_decodes_differently_are_refused() -> None:
    words = ["<unk>", "▁U:", "▁A:", END, "▁it", "▁is", "▁lost", "▁One?", "▁Two."]
    tok = word_level(words)
    good, lost = one(tok, chat(user("it"), assistant("is lost"))), one(tok, chat(user("it"), assistant("is gone")))
    assert learned(tok, good) == ["is lost</s>"]
    assert lost == RefusedConversation("refused", "the tokenizer loses characters: 'is gone</s>' becomes 'is<unk></s>'")
    with pytest.raises(
        DataError, match=r"does not decode a sample conversation to its text: .* 'Two\.</s>' becomes '<unk></s>'"
    ):
        ConversationEncoder(word_level(words[:-2]))


def word_level(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows only these words."""
    level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106 (no password)
    level.pre_tokenizer = pre_tokenizers.Metaspace()
    level.decoder = decoders.Metaspace()
    level.add_special_tokens(["</s>"])
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'U: ' + m.content }}{% else %}"
        "{{ ' A: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' A:' }}{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=level, chat_template=text, eos_token=END, pad_token=END)


def test_normalizer_changes_are_not_a_loss() -> None:
    tok = chatml()
    tok.backend_tokenizer.normalizer = normalizers.NFC()  # as in Qwen's tokenizer
    assert learned(tok, one(tok, chat(QUESTION, assistant("cafe\u0301 so")))) == ["caf\u00e9 so<|im_end|>"]


# Templates that cannot be trained on


def assistant_as(expression: str) -> str:
    return CHATML.replace(
        "message['content']", f"({expression} if message['role'] == 'assistant' else message['content'])"
    )


FORGETTING = assistant_as("(message['content'] if loop.last else message['content'].split(' ')[-1])")
"""Drops earlier answers' first words once another question follows."""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (assistant_as("message['content'] | upper"), "omits or rewrites an answer"),
        (assistant_as("message['content'][:5]"), "omits or rewrites an answer"),
        (assistant_as("''"), "omits or rewrites an answer"),
        (assistant_as("message['content'] + message['content']"), "writes an answer in several places"),
        (CHATML.replace("<|im_end|>", ""), "expected a control token, without which the model never learns to stop"),
        (
            "{{ bos_token }}" + assistant_as("message['content'] + bos_token").replace("<|im_end|>", ""),
            "expected a control token",
        ),
        (assistant_as("message['content'] + '.'"), "expected a control token"),
        (CHATML.replace("assistant\\n", "robot\\n"), "so prompts would differ from the training data"),
        (CHATML[: CHATML.index("{% if add")], "so prompts would differ from the training data"),
        ("{{ messages | length }}" + CHATML, "writes the prompt differently if an answer follows"),
        ("{{ raise_exception('no') }}", "cannot write a conversation of user, assistant (TemplateError: no)"),
    ],
    ids=["upper", "cut", "left out", "twice", "no end", "BOS as end", "word after", "other header", "no header",
         "counts", "raises"],
)  # fmt: skip
def test_an_untrainable_template_is_refused_immediately(text: str, says: str) -> None:
    tok = chatml(text)
    with pytest.raises(DataError, match=re.escape(says)):
        ConversationEncoder(tok)
    with pytest.raises(DataError, match=r"^f\.csv:7: .*" + re.escape(says)):
        encode_conversation(tok, chat(QUESTION, ANSWER), "f.csv:7")


def test_a_template_that_lacks_eos_or_repeats_bos_is_refused() -> None:
    bare = MISTRAL.replace("|trim + eos_token", "|trim")
    with pytest.raises(DataError, match=r"write \{\{ eos_token \}\} right after the answer"):
        ConversationEncoder(tokenizer(bare, END, ("<s>", "[INST]", "[/INST]"), "<s>"))
    with pytest.raises(DataError, match="writes the BOS token twice"):
        ConversationEncoder(
            tokenizer("{{ bos_token }}" + GEMMA, "<end_of_turn>", ("<bos>", "<start_of_turn>"), "<bos>")
        )


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        (FORGETTING, chat(QUESTION, ANSWER, user("two"), assistant("so it is"))),
        (assistant_as("message['content'].replace('!', '.')"), chat(QUESTION, assistant("so!"))),
        (assistant_as("message['content'].replace('\\n', ' ')"), chat(QUESTION, assistant("\nso"))),
    ],
    ids=["earlier answers", "a character", "a line break"],
)
def test_an_inconsistent_template_is_refused_with_the_first_row(text: str, bad: Conversation) -> None:
    good = ("f:1", chat(QUESTION, ANSWER))
    last = re.escape(repr(bad.response))
    with pytest.raises(DataError, match=rf"^f:2: the chat template changes an answer \(last answer: {last}\)"):
        ConversationEncoder(chatml(text)).encode([good, ("f:2", bad), ("f:3", chat(QUESTION, ANSWER))])
    assert ConversationEncoder(chatml(text)).encode([good]) == ConversationEncoder(chatml()).encode([good])


def test_a_template_may_change_earlier_answers_if_only_the_last_is_trained() -> None:
    rows = [("f:2", chat(QUESTION, ANSWER, user("two"), assistant("so it is")))]
    [last] = ConversationEncoder(chatml(FORGETTING), "last").encode(rows)
    assert learned(chatml(), last) == ["so it is<|im_end|>"]


def test_a_template_may_rewrite_system_messages_but_not_user_messages() -> None:
    shouting = CHATML.replace("message['content']", "(message['content'].replace('!', '.') | trim)")
    tok = chatml(shouting)
    encoded = one(tok, chat(system("Be kind!"), user("help"), ANSWER))
    assert learned(tok, encoded) == ["it is blocked<|im_end|>"]
    assert "Be kind." in tok.decode(encoded.input_ids)
    refused = one(tok, chat(user("help!"), ANSWER))
    assert refused == RefusedConversation("refused", "the chat template omits or changes a user message: 'help!'")


def glued(template_text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has `:(` and a double line break as tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(":", "("), ("Ċ", "Ċ")]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in pairs), "</s>"])}
    bpe = Tokenizer(models.BPE(vocabulary, pairs))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template_text, eos_token=END, pad_token=END)


PLAIN = (
    "{% for m in messages %}{{ m.role + ':SPACE' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:SPACE' }}{% endif %}"
)


def test_a_token_shared_by_prompt_and_answer_is_refused() -> None:
    rows = [("f:1", chat(QUESTION, ANSWER)), ("f:2", chat(QUESTION, assistant("(so)")))]
    with pytest.raises(DataError, match=r"^f:2: one token holds the end of the prompt and the beginning of the answer"):
        ConversationEncoder(glued(PLAIN.replace("SPACE", ""))).encode(rows)
    spaced = ConversationEncoder(glued(PLAIN.replace("SPACE", " "))).encode(rows)
    assert all(isinstance(encoded, EncodedConversation) for encoded in spaced)


def test_a_prompt_tokenized_differently_with_its_answer_is_refused() -> None:
    tok = glued(PLAIN.replace("SPACE", "("))
    ahead = pre_tokenizers.Split(Regex(r":\((?!x)|[\s\S]"), "isolated")  # `:(` is one token, unless an x follows
    tok.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [ahead, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    rows = [("f:1", chat(QUESTION, ANSWER)), ("f:2", chat(QUESTION, assistant("x")))]
    with pytest.raises(DataError, match=r"^f:2: the tokenizer splits the prompt differently if an answer follows"):
        ConversationEncoder(tok).encode(rows)
    assert learned(tok, ConversationEncoder(tok).encode(rows[:1])[0]) == ["it is blocked</s>"]


def test_line_breaks_of_prompt_and_answer_may_merge() -> None:
    tok = glued(PLAIN.replace("SPACE", "\\n"))
    assert learned(tok, one(tok, chat(QUESTION, assistant("so")))) == ["so</s>"]
    grown = one(tok, chat(QUESTION, assistant("\n\nso")))
    # The first token joins the line break of the template and the first one of the answer.
    assert learned(tok, grown) == ["\n\n\nso</s>"]
    # GPT-2's rule splits two line breaks and joins the second to the next word.
    split = glued(PLAIN.replace("SPACE", "\\n\\n"))
    encoded = one(split, chat(QUESTION, assistant("so")))
    assert learned(split, encoded) == ["so</s>"]


# Reasoning


def qwen3() -> PreTrainedTokenizerFast:
    return tokenizer_of("Qwen 3")


THOUGHT = "<think>\nI think\n</think>\n\nit is so<|im_end|>"


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_in_a_field_is_trained(field: str) -> None:
    encoded = one(qwen3(), chat(QUESTION, assistant("it is so", **{field: "I think"})))
    assert learned(qwen3(), encoded) == [THOUGHT]


@pytest.mark.parametrize("text", ["<think>\nI think\n</think>\n\nit is so", "<think>I think</think>it is so"])
def test_reasoning_inside_the_answer_is_trained(text: str) -> None:
    assert learned(qwen3(), one(qwen3(), chat(QUESTION, assistant(text)))) == [THOUGHT]
    assert learned(chatml(), one(chatml(), chat(QUESTION, assistant(text)))) == [text + "<|im_end|>"]


def test_reasoning_that_the_template_removes_stops_the_stage() -> None:
    earlier = [QUESTION, assistant("so", reasoning_content="hm")]
    two = chat(*earlier, user("and?"), assistant("it is so", thinking="I think"))
    with pytest.raises(
        DataError, match=r"^f\.csv:7: .* omits the reasoning of an earlier answer.* prepare\.turns: last"
    ):
        one(qwen3(), two)
    assert learned(qwen3(), one(qwen3(), two, "last")) == [THOUGHT]
    for name, answer in (
        ("DeepSeek R1", assistant("<think>hm</think>so")),
        ("Llama 3", assistant("so", reasoning_content="hm")),
    ):
        with pytest.raises(DataError, match=r"omits the reasoning of an answer.* remove it from the rows"):
            one(tokenizer_of(name), chat(QUESTION, answer), "last")


def test_a_thinking_block_opened_by_the_prompt_is_not_trained() -> None:
    opens = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    tok = chatml(opens)
    assert learned(tok, one(tok, chat(QUESTION, assistant("<think>\nhm\n</think>\n\nso")))) == [
        "hm\n</think>\n\nso<|im_end|>"
    ]
    assert learned(tok, one(tok, chat(QUESTION, assistant("so")))) == ["so<|im_end|>"]
    empty = opens.replace("+ message['content']", "+ ('<think></think>' if loop.last else '') + message['content']")
    tok = chatml(empty.replace("loop.last", "message['role'] == 'assistant'"))
    assert learned(tok, one(tok, chat(QUESTION, assistant("so")))) == ["</think>so<|im_end|>"]


@pytest.mark.parametrize("text", ["<think>a</think>b<think>c</think>d", "so <think>a</think>b", "a</think>b</think>c"])
def test_answers_with_stray_reasoning_tags_are_refused_if_the_template_cuts_them(text: str) -> None:
    refused = one(qwen3(), chat(QUESTION, assistant(text)))
    assert refused.reason == "refused"
    assert "</think> without reasoning before it" in refused.detail
    assert learned(chatml(), one(chatml(), chat(QUESTION, assistant(text)))) == [text + "<|im_end|>"]


def test_content_dependent_templates_are_aligned_per_conversation() -> None:
    """Qwen3's template takes such a user message for a tool result, so the turn before it is not an earlier turn."""
    result = user("<tool_response>\n3\n</tool_response>")
    asked = [user("1 + 2?"), assistant("let me see", reasoning_content="hm")]
    assert learned(qwen3(), one(qwen3(), chat(*asked, result, assistant("it is 3")))) == [
        "<think>\nhm\n</think>\n\nlet me see<|im_end|>",
        "<think>\n\n</think>\n\nit is 3<|im_end|>",
    ]


# Tools

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
REQUESTED_PROMPT = [user("1 + 2?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
USED = [*REQUESTED_PROMPT, {"role": "tool", "content": "3", "tool_call_id": "call00001"}, assistant("it is 3")]


def test_tool_calls_are_trained_and_tool_results_are_not() -> None:
    tok = tokenizer_of("Qwen 2.5")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    assert learned(tok, one(tok, chat(*USED, tools=[ADD]))) == [call, "it is 3<|im_end|>"]
    assert learned(tok, one(tok, chat(*USED, tools=[ADD]), "last")) == ["it is 3<|im_end|>"]
    said = {**REQUESTED_PROMPT[1], "content": "let me see"}
    assert learned(tok, one(tok, chat(USED[0], said, *USED[2:], tools=[ADD]))) == [
        "let me see\n" + call,
        "it is 3<|im_end|>",
    ]
    assert learned(tok, one(tok, chat(*REQUESTED_PROMPT, tools=[ADD]))) == [call]
    encoded = one(tok, chat(*REQUESTED_PROMPT, tools=[ADD]))
    assert decode_answer(chat(*REQUESTED_PROMPT), encoded.labels, tok) == call.removesuffix("<|im_end|>")
    twice = chat(*USED, *REQUESTED_PROMPT, tools=[ADD])
    assert decode_answer(twice, one(tok, twice).labels, tok) == call.removesuffix("<|im_end|>")
    prompt = encode_prompt(tok, chat(*REQUESTED_PROMPT[:1], tools=[ADD]))
    assert encoded.input_ids[: len(prompt)] == prompt
    assert '"description": "Add."' in tok.decode(prompt)


def test_tool_results_rendered_as_json_are_accepted() -> None:
    tok = tokenizer_of("Llama 3")
    quoted = [*USED[:2], {"role": "tool", "content": 'a "3"\n'}, USED[3]]
    assert learned(tok, one(tok, chat(*quoted))) == [
        '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
        "it is 3<|eot_id|>",
    ]


def test_a_template_that_omits_tool_calls_stops_the_stage() -> None:
    deaf = chatml(CHATML.replace("message['content']", "(message['content'] or '')"))
    with pytest.raises(DataError, match=r"^f\.csv:7: the chat template omits a tool call"):
        one(deaf, chat(*USED))


# System messages


def test_system_messages_are_merged_into_the_first_user_message() -> None:
    brief, developer = system("be brief"), {"role": "developer", "content": "be kind"}
    merged = merge_system_messages(chat(brief, developer, QUESTION, ANSWER, user("two"), tools=[ADD]))
    assert merged == chat(user("be brief\n\nbe kind\n\nthe card is lost"), ANSWER, user("two"), tools=[ADD])
    assert merge_system_messages(chat(QUESTION, ANSWER)) == chat(QUESTION, ANSWER)
    assert merge_system_messages(chat(brief, ANSWER)) == chat(brief, ANSWER)
    assert merge_system_messages(chat(system(""), QUESTION)) == chat(QUESTION)
    picture = {"type": "image", "url": "x"}
    parts = merge_system_messages(chat(brief, user([picture]), ANSWER)).messages[0]["content"]
    assert parts == [{"type": "text", "text": "be brief\n\n"}, picture]
    assert isinstance(
        one(tokenizer_of("Gemma"), merge_system_messages(chat(brief, QUESTION, ANSWER))), EncodedConversation
    )


# Truncation


def encoded_of(*runs: tuple[int, bool]) -> EncodedConversation:
    """Build a conversation from runs of (tokens, is trained); the token ids count up from 100."""
    learned_at = [learned for tokens, learned in runs for _ in range(tokens)]
    ids = list(range(100, 100 + len(learned_at)))
    return EncodedConversation(ids, [i if at else IGNORE_INDEX for i, at in zip(ids, learned_at, strict=True)])


TWO = encoded_of((5, False), (4, True), (3, False), (4, True), (1, False))
"""Answers at 5-8 and 12-15, of 17 tokens."""


@pytest.mark.parametrize(
    ("most", "ids"),
    [
        (17, [*range(100, 117)]),
        (16, [*range(100, 116)]),  # only the tokens after the last answer are cut
        (15, [*range(100, 114), 115]),  # the answer keeps its end of turn
        (14, [*range(100, 113), 115]),
        (13, [*range(100, 109)]),  # an end of turn alone trains nothing, so the first answer becomes the last one
        (9, [*range(100, 109)]),
        (8, [*range(100, 107), 108]),
        (7, [*range(100, 106), 108]),
        (6, None),
        (1, None),
    ],
)
def test_a_conversation_is_truncated_inside_its_last_answer(most: int, ids: list[int] | None) -> None:
    cut = truncate_conversation(TWO, most)
    labels = dict(zip(TWO.input_ids, TWO.labels, strict=True))
    assert cut == (EncodedConversation(ids, [labels[i] for i in ids]) if ids else None)


def test_truncation_without_a_fitting_answer_returns_none() -> None:
    assert truncate_conversation(encoded_of((9, False)), 5) is None
    assert truncate_conversation(encoded_of((9, False)), 9) == encoded_of((9, False))


def test_a_truncated_conversation_ends_with_the_end_of_turn_token() -> None:
    tok = tokenizer_of("Llama 3")
    encoded = encode_conversation(tok, chat(QUESTION, assistant("it was so " * 30)), "f:1")
    cut = truncate_conversation(encoded, encoded.input_ids.index(encoded.labels[-1], 90) - 20)
    [text] = learned(tok, cut)
    assert text.startswith("it was so it was so")
    assert text.endswith("<|eot_id|>")
    assert text.count("<|eot_id|>") == 1


# The tokenizer of a model directory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    special = FAMILIES["Llama 3"].special
    tokenizer(LLAMA_3, "<|eot_id|>", special, special[0]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_encoding_does_not_depend_on_the_date(saved: Path) -> None:
    tok = base_model.load_tokenizer(saved)
    assert "Today Date: 26 Jul 2024\n" in tok.decode(encode_conversation(tok, chat(QUESTION, ANSWER), "f:1").input_ids)
    assert "Today Date: 26 Jul 2024\n" in tok.decode(encode_prompt(tok, chat(QUESTION)))


def test_a_template_file_replaces_the_tokenizers_template(saved: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ strftime_now('%Y-%m-%d') }}" + CHATML.replace("<|im_end|>", "<|eot_id|>"))
    tok = base_model.load_tokenizer(saved, mine)
    assert learned(tok, one(tok, chat(QUESTION, ANSWER))) == ["it is blocked<|eot_id|>"]
    assert tok.decode(encode_prompt(tok, chat(QUESTION))).startswith("2024-07-26<|im_start|>user\n")
    (saved / "chat_template.jinja").unlink()
    with pytest.raises(BaseModelError, match="has no chat template"):
        base_model.load_tokenizer(saved)
    assert base_model.load_tokenizer(saved, mine).chat_template == mine.read_text()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{% for m in messages %}\n{{ m.content }\n", r":2: the chat template is not valid Jinja \(unexpected '}'"),
        (b"\xff\xfe", ": the chat template cannot be read"),
        (b" \n", ": the chat template is empty"),
        (None, ".*cannot be read"),
    ],
    ids=["syntax", "not UTF-8", "empty", "missing"],
)
def test_an_invalid_template_file_is_reported_with_its_line(
    content: bytes | None, says: str, saved: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "broken.jinja").write_bytes(content)
    with pytest.raises(BaseModelError, match=r"broken\.jinja" + says):
        base_model.load_tokenizer(saved, tmp_path / "broken.jinja")


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    slow = ByT5Tokenizer()
    slow.chat_template = CHATML
    slow.save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match="the tokenizer has no fast version"):
        base_model.load_tokenizer(tmp_path)


def test_a_named_template_is_chosen_when_there_are_tools(saved: Path) -> None:
    tok = base_model.load_tokenizer(saved)
    tok.chat_template = {"default": CHATML.replace("<|im_end|>", "<|eot_id|>"), "tool_use": LLAMA_3}
    assert "<|im_start|>" in tok.decode(encode_prompt(tok, chat(QUESTION)))
    assert "<|start_header_id|>" in tok.decode(encode_prompt(tok, chat(QUESTION, tools=[ADD])))
