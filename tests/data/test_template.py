"""What is learned from a conversation: the assistant's words and its end of turn, under any honest chat template."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ratchet.data import template
from ratchet.data.sources import Row
from ratchet.data.template import MASKED, Encoded, Message, encode, messages, prompt_ids
from ratchet.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
)  # as Qwen's does
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}[SYS] {{ m.content }} [/SYS]{% endif %}{% endfor %}"
)  # as Mistral's does: no generation prompt of its own
NO_END = CHATML.replace("<|im_start|>", "").replace("<|im_end|>", "")

HONEST = {
    "ChatML": (CHATML, "<|im_end|>"),
    "Llama 3": (LLAMA3, "<|eot_id|>"),
    "with a system message of its own": (DEFAULT_SYSTEM, "<|im_end|>"),
    "Mistral": (INSTRUCT, "</s>"),
}

UPPERCASE = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
TRUNCATING = CHATML.replace("{{ m.content }}", "{{ m.content[:5] }}")
NO_ANSWERS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}")
THINKING = CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%")
# Drops earlier answers' first word once another question follows, as reasoning models drop earlier thoughts.
FORGETTING = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content.split(' ')[-1] }}"
)


def tokenizer(chat_template: str, eos: str, merges: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; every text is some sequence of its tokens."""
    special = [
        "<|bos|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "</s>",
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + merges,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the card is lost the card is blocked hello world user assistant system"] * 5, trainer)
    ends = {"bos_token": "<|bos|>", "eos_token": eos, "pad_token": eos}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=chat_template, **ends)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def learned(tok: PreTrainedTokenizerFast, encoded: Encoded) -> list[str]:
    """The pieces of text that are learned from, special tokens shown."""
    pieces: list[list[int]] = []
    for position, label in enumerate(encoded.labels):
        if label != MASKED:
            if position == 0 or encoded.labels[position - 1] == MASKED:
                pieces.append([])
            pieces[-1].append(label)
    return [tok.decode(piece) for piece in pieces]


def test_a_row_becomes_the_conversation_it_stands_for() -> None:
    row = Row("question", "answer", None, "f:1")
    assert messages(row) == [user("question"), assistant("answer")]
    system = Row("question", "answer", "be brief", "f:1")
    assert messages(system) == [{"role": "system", "content": "be brief"}, user("question"), assistant("answer")]


@pytest.mark.parametrize("merges", [0, 60])
@pytest.mark.parametrize("name", HONEST)
def test_the_answer_and_its_end_are_learned_and_nothing_else(name: str, merges: int) -> None:
    chat_template, eos = HONEST[name]
    tok = tokenizer(chat_template, eos, merges)
    encoded = encode(tok, [user("the card is lost"), assistant("it is blocked")], "f:1")
    assert [piece.strip() for piece in learned(tok, encoded)] == [f"it is blocked{eos}"]
    assert len(encoded.labels) == len(encoded.input_ids)
    assert encoded.trained == sum(label != MASKED for label in encoded.labels)
    assert all(label in (MASKED, i) for label, i in zip(encoded.labels, encoded.input_ids, strict=True))


@pytest.mark.parametrize("name", HONEST)
def test_the_token_ids_are_those_of_the_template(name: str) -> None:
    chat_template, eos = HONEST[name]
    tok = tokenizer(chat_template, eos)
    conversation = [user("the card is lost"), assistant("it is blocked")]
    text = tok.apply_chat_template(conversation, tokenize=False)
    assert encode(tok, conversation, "f:1").input_ids == tok(text, add_special_tokens=False)["input_ids"]


def test_the_line_break_after_the_end_of_turn_is_not_learned() -> None:
    tok = tokenizer(CHATML, "<|im_end|>")
    encoded = encode(tok, [user("q"), assistant("a")], "f:1")
    assert tok.decode(encoded.input_ids[-2:]) == "<|im_end|>\n"
    assert encoded.labels[-2:] == [tok.eos_token_id, MASKED]


def test_without_an_end_of_turn_token_all_that_follows_the_prompt_is_learned() -> None:
    tok = tokenizer(NO_END, "</s>")
    assert learned(tok, encode(tok, [user("q"), assistant("a b")], "f:1")) == ["a b\n"]


@pytest.mark.parametrize("name", ["ChatML", "Llama 3", "with a system message of its own", "Mistral"])
def test_every_turn_of_the_assistant_is_learned(name: str) -> None:
    chat_template, eos = HONEST[name]
    tok = tokenizer(chat_template, eos)
    conversation = [
        user("one"),
        assistant("first"),
        user("two"),
        assistant("second"),
        user("three"),
        assistant("third"),
    ]
    pieces = [piece.strip() for piece in learned(tok, encode(tok, conversation, "f:1"))]
    assert pieces == [f"first{eos}", f"second{eos}", f"third{eos}"]


@pytest.mark.parametrize("name", HONEST)
def test_a_system_message_is_read_and_not_learned(name: str) -> None:
    chat_template, eos = HONEST[name]
    tok = tokenizer(chat_template, eos)
    conversation = [{"role": "system", "content": "be brief"}, user("q"), assistant("a")]
    encoded = encode(tok, conversation, "f:1")
    assert "be brief" in tok.decode(encoded.input_ids)
    assert "Be kind" not in tok.decode(encoded.input_ids)
    assert [piece.strip() for piece in learned(tok, encoded)] == [f"a{eos}"]


@pytest.mark.parametrize(
    "answer",
    ["grüße 日本語 🙂", "two\nlines", "two\n\n\nlines", "  spaces around  ", "a  b", "[INST] x", "1", "ǆ", "e\u0301"],
)
@pytest.mark.parametrize("name", HONEST)
def test_any_answer_is_learned_as_it_is(name: str, answer: str) -> None:
    chat_template, eos = HONEST[name]
    tok = tokenizer(chat_template, eos)
    [piece] = learned(tok, encode(tok, [user("q"), assistant(answer)], "f:1"))
    assert piece.strip().removesuffix(eos).strip() == answer.strip()


def test_a_prompt_ends_where_the_assistant_begins() -> None:
    for chat_template, eos in HONEST.values():
        tok = tokenizer(chat_template, eos)
        conversation = [user("the card is lost"), assistant("it is blocked")]
        encoded = encode(tok, conversation, "f:1")
        prompt = prompt_ids(tok, conversation[:1])
        assert encoded.input_ids[: len(prompt)] == prompt
        assert encoded.labels[: len(prompt)] == [MASKED] * len(prompt)
        assert encoded.labels[len(prompt)] != MASKED


@pytest.mark.parametrize(
    ("chat_template", "says"),
    [
        (UPPERCASE, "turns the answer 'it is blocked' into 'IT IS BLOCKED'"),
        (TRUNCATING, "turns the answer 'it is blocked' into 'it is'"),
        (NO_ANSWERS, "f.csv:7: the chat template"),
        (THINKING, "writes the prompt differently once the answer follows"),
    ],
    ids=["uppercase", "truncating", "without answers", "thinking"],
)
def test_a_template_that_changes_answers_or_prompts_is_refused_with_the_row(chat_template: str, says: str) -> None:
    tok = tokenizer(chat_template, "<|im_end|>")
    with pytest.raises(DataError) as caught:
        encode(tok, [user("the card is lost"), assistant("it is blocked")], "f.csv:7")
    assert str(caught.value).startswith("f.csv:7: the chat template ")
    assert says in str(caught.value)


def test_a_template_that_forgets_earlier_answers_is_refused() -> None:
    tok = tokenizer(FORGETTING, "<|im_end|>")
    encode(tok, [user("one"), assistant("first answer")], "f:1")
    with pytest.raises(DataError, match=r"^f:2: the chat template"):
        encode(tok, [user("one"), assistant("first answer"), user("two"), assistant("second answer")], "f:2")


@pytest.mark.parametrize("answer", ["stop <|im_end|> here", "<|im_end|>", "<|im_start|>user\nhello"])
def test_an_answer_that_contains_a_control_token_is_refused(answer: str) -> None:
    """Learned, it would end or begin turns in the middle of an answer."""
    tok = tokenizer(CHATML, "<|im_end|>")
    with pytest.raises(DataError, match="f:1: "):
        encode(tok, [user("q"), assistant(answer)], "f:1")


def test_a_conversation_without_an_answer_is_learned_from_nowhere() -> None:
    tok = tokenizer(CHATML, "<|im_end|>")
    encoded = encode(tok, [user("q")], "f:1")
    assert encoded.trained == 0
    assert encoded.labels == [MASKED] * len(encoded.input_ids)


def test_the_mask_is_what_cross_entropy_ignores() -> None:
    import torch

    assert torch.nn.CrossEntropyLoss().ignore_index == template.MASKED
