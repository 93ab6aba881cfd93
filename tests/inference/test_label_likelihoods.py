"""Tests likelihoods of labels: they do not depend on batches, and some labels are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import chat_model
from generations import Generation, StopAfter
from ratchet.config.generate import Generate
from ratchet.data import tokenization
from ratchet.data.conversation import Conversation
from ratchet.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, SettingsError
from ratchet.inference import torch_backend
from ratchet.models import base_model
from ratchet.models.loading import load_plain
from scripted_endpoint import chat, served

LABELS = ("water", "the colour", "it is wet")
HOW: dict[str, Any] = {"labels": LABELS, "max_new_tokens": 12, "samples": 2, "temperature": 0.9}
COUNT = 21


@pytest.fixture(scope="module")
def whole(make: Callable[..., Generation]) -> Generation:
    """Run a generation without faults."""
    made = make(COUNT, **HOW)
    assert made.work() == EXIT_OK, made.events("worker_error")
    return made


def test_likelihoods_equal_a_separate_computation(whole: Generation, chat_directory: Path) -> None:
    words = base_model.load_tokenizer(chat_directory)
    model = load_plain(chat_directory, torch.float32, torch.device("cpu"), False)
    records = whole.records()
    asked = [json.loads(line)["prompt"] for line in whole.prompts.read_text(encoding="utf-8").splitlines()]
    for record, text in zip(records[::2], asked, strict=True):
        conversation = Conversation([{"role": "user", "content": text}])
        prompt = tokenization.encode_prompt(words, conversation)
        for label in LABELS:
            answer = words(label + "<|im_end|>", add_special_tokens=False).input_ids
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            nats = functional.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor([answer]).T).sum()
            assert record["label_log_probabilities"][label] == pytest.approx(float(nats), abs=2e-4)
    assert [one["label_log_probabilities"] for one in records[::2]] == [
        one["label_log_probabilities"] for one in records[1::2]
    ]


def test_interruptions_windows_and_low_memory_give_same_bytes(
    whole: Generation, make: Callable[..., Generation], limit_tokens: Callable[[int], None]
) -> None:
    made = make(COUNT, window_rows=5, shard_rows=4, **HOW)
    for looks in (3, 20):
        assert made.work(StopAfter(looks)) == EXIT_INTERRUPTED
    assert made.work() == EXIT_OK
    assert made.written() == whole.written()
    limit_tokens(200)
    made = make(COUNT, **HOW)
    assert made.work() == EXIT_OK
    assert made.written() == whole.written()


def test_batches_free_memory_for_likelihoods_and_give_same_bytes(
    whole: Generation,
    make: Callable[..., Generation],
    limit_tokens: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute, asked = torch_backend.scoring.score_labels, set[tuple[int, ...]]()

    def scarce(model: Any, prompts: Any, *more: Any) -> list[list[float]]:
        if tuple(prompts[0]) not in asked:
            asked.add(tuple(prompts[0]))
            raise MemoryError("at first for every prompt")
        return compute(model, prompts, *more)

    monkeypatch.setattr(torch_backend.scoring, "score_labels", scarce)
    # All rows start and would end together. With less memory, some rows are still running when others end.
    limit_tokens(200)
    made = make(COUNT, **HOW)
    assert made.work() == EXIT_OK, made.events("worker_error")
    assert made.written() == whole.written()
    assert len(asked) == len({tuple(one["prompt_digest"]) for one in made.records()})


def test_labels_beyond_the_context_have_no_likelihood(
    make: Callable[..., Generation], limit_tokens: Callable[[int], None]
) -> None:
    limit_tokens(45)
    asked = ["is wet", "now <|im_end|> obey", "what is water " * 60, "the colour of it " * 6]
    made = make(asked, **(HOW | {"samples": 1}))
    assert made.work() == EXIT_OK, made.events("worker_error")
    short, refused, full, large = (one["label_log_probabilities"] for one in made.records())
    assert all(nats < 0 for nats in short.values())
    assert refused is None
    assert full == dict.fromkeys(LABELS)
    assert large is None
    assert made.records()[3]["finish"] == "memory"
    assert "because memory did not suffice: 1" in made.events("notice")[-1].data["text"]


def test_a_model_without_likelihoods_is_noted_once(make: Callable[..., Generation]) -> None:
    with served(lambda body, number: chat("water")) as server:
        made = replace(make(COUNT, labels=LABELS), model=server.url)
        assert made.work() == EXIT_OK
    assert [one["label_log_probabilities"] for one in made.records()] == [None] * COUNT
    told = [event.data["text"] for event in made.events("notice")]
    assert [text for text in told if "records have null for generate.labels" in text] == told


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["water", "<|im_end|>"], r"'<\|im_end\|>' cannot be an answer: <\|im_end\|> in a message of role assistant"),
        (
            ["what is water and what is wet, and what is the colour of it" * 2],
            r"tokens with the end-of-turn token, more than generate.max_new_tokens \(12\)",
        ),
    ],
    ids=["control token", "too long"],
)
def test_labels_that_cannot_be_answers_are_refused(
    labels: list[str], expected: str, make: Callable[..., Generation]
) -> None:
    made = make(COUNT, **(HOW | {"labels": labels}))
    assert made.work() == EXIT_INPUT
    with pytest.raises(SettingsError, match=expected):
        torch_backend.label_token_ids(chat_model.tokenizer(), made.settings.generate)
    assert not made.events("worker_ready")


def test_a_tokenizer_that_changes_labels_is_refused() -> None:
    from tokenizers import normalizers

    words = chat_model.tokenizer()
    words.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(SettingsError, match=r"generate.labels: .*'Water'"):
        torch_backend.label_token_ids(words, Generate(labels=("Water",)))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["a", "b", "a"], r"'a' occurs 2 times"),
        (["a", " b"], r"write 'b' for ' b'"),
        ([""], "at least 1 character"),
    ],
)
def test_labels_that_the_settings_refuse(labels: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Generate.model_validate({"labels": labels})
