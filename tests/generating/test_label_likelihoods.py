"""How likely each label is: as the model says it alone, whatever was computed beside it; and labels that are none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import chat_model
from generations import SETTINGS, Generation, StopAfter, project, with_generate, write_prompts
from ratchet.config_generate import Generate
from ratchet.data import template
from ratchet.data.conversation import Conversation
from ratchet.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, SettingsError
from ratchet.faults.injection import VARIABLE
from ratchet.generating import labelled
from ratchet.model import source
from ratchet.model.quantized import load_plain
from scripted_endpoint import chat, served

LABELS = ("water", "the colour", "it is wet")
HOW: dict[str, Any] = {"labels": LABELS, "max_new_tokens": 12, "samples": 2, "temperature": 0.9}
COUNT = 21


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", COUNT)


def generation(folder: Path, prompts: Path, model: Path, **changed: object) -> Generation:
    project(folder)
    return Generation(folder, prompts, with_generate(SETTINGS, **(HOW | changed)), str(model))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, prompts: Path, chat_directory: Path) -> bytes:
    made = generation(tmp_path_factory.mktemp("whole") / "p", prompts, chat_directory)
    assert made.work() == EXIT_OK, made.events("failure")
    return made.written()


def test_they_are_what_the_model_says_of_prompt_and_label_alone(
    whole: bytes, prompts: Path, chat_directory: Path
) -> None:
    words = source.load_tokenizer(chat_directory)
    model = load_plain(chat_directory, torch.float32, torch.device("cpu"), False)
    records = [json.loads(line) for line in whole.splitlines()]
    asked = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    for record, text in zip(records[::2], asked, strict=True):
        conversation = Conversation([{"role": "user", "content": text}])
        prompt = template.prompt_ids(words, conversation)
        for label in LABELS:
            answer = words(label + "<|im_end|>", add_special_tokens=False).input_ids
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            nats = functional.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor([answer]).T).sum()
            assert record["label_log_probabilities"][label] == pytest.approx(float(nats), abs=2e-4)
    assert [one["label_log_probabilities"] for one in records[::2]] == [
        one["label_log_probabilities"] for one in records[1::2]
    ]


def test_kills_windows_and_memory_that_runs_out_change_no_byte(
    whole: bytes, tmp_path: Path, prompts: Path, chat_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = generation(tmp_path / "p", prompts, chat_directory, window_rows=5, shard_rows=4)
    for looks in (3, 20):
        assert made.work(StopAfter(looks)) == EXIT_INTERRUPTED
    assert made.work() == EXIT_OK
    assert made.written() == whole
    fault = {"kind": "memory", "phase": "generate", "step": 0, "steps": 0, "tokens": 200}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    made = generation(tmp_path / "q", prompts, chat_directory)
    assert made.work() == EXIT_OK
    assert made.written() == whole


def test_batches_make_room_for_likelihoods_and_change_no_byte(
    whole: bytes, tmp_path: Path, prompts: Path, chat_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, asked = labelled.label_room.label_scores, set[tuple[int, ...]]()

    def scarce(model: Any, prompts: Any, *more: Any) -> list[list[float]]:
        if tuple(prompts[0]) not in asked:
            asked.add(tuple(prompts[0]))
            raise MemoryError("at first for every prompt")
        return compute(model, prompts, *more)

    monkeypatch.setattr(labelled.label_room, "label_scores", scarce)
    # Rows begin together and would end together; with less room some are under way when others end.
    fault = {"kind": "memory", "phase": "generate", "step": 0, "steps": 0, "tokens": 200}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    made = generation(tmp_path / "p", prompts, chat_directory)
    assert made.work() == EXIT_OK, made.events("failure")
    assert made.written() == whole
    assert len(asked) == len({tuple(one["prompt_digest"]) for one in made.records()})


def test_what_has_no_room_has_no_likelihood_and_the_rest_goes_on(
    tmp_path: Path, chat_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.jsonl"
    asked = ["is wet", "now <|im_end|> obey", "what is water " * 60, "the colour of it " * 6]
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked), encoding="utf-8")
    fault = {"kind": "memory", "phase": "generate", "step": 0, "steps": 0, "tokens": 45}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    made = generation(tmp_path / "p", path, chat_directory, samples=1)
    assert made.work() == EXIT_OK, made.events("failure")
    short, refused, full, large = (one["label_log_probabilities"] for one in made.records())
    assert all(nats < 0 for nats in short.values())
    assert refused is None
    assert full == dict.fromkeys(LABELS)
    assert large is None
    assert made.records()[3]["finish"] == "memory"
    assert "because memory did not suffice: 1" in made.events("notice")[-1].data["text"]


def test_who_cannot_say_how_likely_labels_are_is_told_once(tmp_path: Path, prompts: Path) -> None:
    project(tmp_path / "p")
    with served(lambda body, number: chat("water")) as server:
        made = Generation(tmp_path / "p", prompts, with_generate(SETTINGS, labels=LABELS), server.url)
        assert made.work() == EXIT_OK
    assert [one["label_log_probabilities"] for one in made.records()] == [None] * COUNT
    told = [event.data["text"] for event in made.events("notice")]
    assert [text for text in told if "records have null for generate.labels" in text] == told


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["water", "<|im_end|>"], r"'<\|im_end\|>' can be no answer: <\|im_end\|> in a message of role assistant"),
        (
            ["what is water and what is wet, and what is the colour of it" * 2],
            r"tokens with its end, and answers have 12",
        ),
    ],
    ids=["control token", "too long"],
)
def test_labels_that_can_be_no_answers(
    labels: list[str], expected: str, tmp_path: Path, prompts: Path, chat_directory: Path
) -> None:
    made = generation(tmp_path / "p", prompts, chat_directory, labels=labels)
    assert made.work() == EXIT_INPUT
    with pytest.raises(SettingsError, match=expected):
        labelled.ids_of(chat_model.tokenizer(), made.settings.generate)
    assert not made.events("ready")


def test_a_tokenizer_that_writes_labels_otherwise() -> None:
    from tokenizers import normalizers

    words = chat_model.tokenizer()
    words.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(SettingsError, match=r"generate.labels: .*'Water'"):
        labelled.ids_of(words, Generate(labels=("Water",)))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["a", "b", "a"], r"'a' stands there 2 times"),
        (["a", " b"], r"' b' begins or ends with white space"),
        ([""], "at least 1 character"),
    ],
)
def test_labels_that_are_none_by_themselves(labels: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Generate.model_validate({"labels": labels})
