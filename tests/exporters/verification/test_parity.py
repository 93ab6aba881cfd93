"""Tests probe inputs chosen from prepared rows, and formats verified with them, in a tiny project."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from numpy.typing import NDArray

import tiny_project
from ratchet.data import token_files
from ratchet.data import tokenization as chat_template
from ratchet.data.conversation import IGNORE_INDEX, Conversation
from ratchet.errors import DamagedFileError, DataError
from ratchet.evaluation import rows as evaluated
from ratchet.exporters import merged_model
from ratchet.exporters.merge.recipe import MergeRecipe, WeightedAdapter
from ratchet.exporters.verification import layers, parity, reference
from ratchet.exporters.verification.parity import ModelRuntime, TorchRuntime
from ratchet.exporters.verification.probe_inputs import TEXTS, ProbeInputs, choose_probe_inputs, spread_indices
from ratchet.models import base_model, scoring
from ratchet.models.device import Model
from ratchet.storage.records.base import BaseCard
from trained import merged_by_peft

CPU = torch.device("cpu")


def silent(what: str, done: int, total: int) -> None:
    assert what in ("distributions", "answers", "logits")
    assert 0 <= done <= total


def exact(expected: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(a == b) for a, b in zip(expected, answers, strict=True)]


@dataclass(frozen=True)
class Project:
    """Holds a project with an adapter, and its probe inputs."""

    layout: Any
    recipe: MergeRecipe
    tokenizer: Any
    test: Any
    end_ids: list[int]

    @property
    def inputs(self) -> ProbeInputs:
        return choose_probe_inputs(self.test, self.tokenizer, SETTINGS, self.end_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


SETTINGS = tiny_project.SETTINGS.model_copy(
    update={
        "export": tiny_project.SETTINGS.export.model_copy(
            update={"parity_rows": 6, "parity_positions": 16, "task_rows": 8}
        )
    }
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RATCHET_RUNS", raising=False)
        layout = tiny_project.prepared(tmp_path_factory.mktemp("project"), SETTINGS)
        tiny_project.adapted(layout, SETTINGS)
    card = BaseCard.load(layout.base_card)
    path = base_model.locate(layout, card)
    made = MergeRecipe(
        base=path, card=card, train=SETTINGS.train, adapters=(WeightedAdapter(layout.adapter),), modules=(),
        merge_base="dequantized", dtype=torch.float32, device=CPU, shard_bytes=10**9,
    )  # fmt: skip
    tokenizer = base_model.load_tokenizer(path, None, card.added_tokens)
    yield Project(layout, made, tokenizer, token_files.open_split(layout.data, "test"), [tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def adapted(project: Project) -> Model:
    return reference.load_adapted_model(project.recipe)


def test_positions_precede_answer_tokens(project: Project) -> None:
    found = project.inputs
    labels = {tuple(row["input_ids"]): row["labels"] for row in project.test}
    assert len(found.rows) == len(found.positions) == len(found.targets) == 6
    assert sum(map(len, found.positions)) <= 16
    for ids, positions, targets in zip(found.rows, found.positions, found.targets, strict=True):
        assert positions == sorted(set(positions))
        assert positions
        assert [labels[tuple(ids)][place + 1] for place in positions] == targets
        assert IGNORE_INDEX not in targets


def test_prompts_and_answers_equal_those_of_the_evaluation(project: Project) -> None:
    found, theirs = project.inputs, evaluated.read(project.layout, SETTINGS)
    chosen = spread_indices(len(theirs.ids), 8)
    assert found.expected == [theirs.expected[i] for i in chosen]
    assert found.prompts == [
        chat_template.encode_prompt(project.tokenizer, theirs.conversations[i].context) for i in chosen
    ]
    assert (found.metric, found.max_new_tokens, found.end_ids) == ("accuracy", 8, project.end_ids)
    assert max(chosen) > len(theirs.ids) // 2, "not the first ones"
    assert found == project.inputs


def test_only_rows_that_the_evaluation_answers_are_used(project: Project) -> None:
    few = SETTINGS.model_copy(update={"evaluate": SETTINGS.evaluate.model_copy(update={"generation_rows": 3})})
    found = choose_probe_inputs(project.test, project.tokenizer, few, project.end_ids)
    assert len(found.prompts) == 3
    assert found.expected == evaluated.read(project.layout, few).expected
    assert len(found.rows) == 6


@pytest.mark.parametrize(
    ("task", "metrics", "metric"),
    [("labels", (), "accuracy"), ("text", (), "exact_match"), ("text", ("bleu", "token_f1"), "token_f1")],
)
def test_the_metric_follows_from_the_task(task: str, metrics: Any, metric: str, project: Project) -> None:
    wanted = SETTINGS.model_copy(
        update={
            "prepare": SETTINGS.prepare.model_copy(update={"task": task}),
            "evaluate": SETTINGS.evaluate.model_copy(update={"metrics": metrics}),
        }
    )
    assert choose_probe_inputs(project.test, project.tokenizer, wanted, project.end_ids).metric == metric


def long_rows(answers: Sequence[int]) -> list[dict[str, Any]]:
    asked = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).to_json()
    return [
        {
            "input_ids": list(range(n + 3)),
            "labels": [IGNORE_INDEX] * 3 + list(range(3, n + 3)),
            "conversation": asked,
            "group": "g",
        }
        for n in answers
    ]


def test_long_answers_share_the_positions(project: Project) -> None:
    found = choose_probe_inputs(long_rows([2, 100, 100, 0, 40]), project.tokenizer, SETTINGS, [1])
    assert [len(positions) for positions in found.positions] == [2, 4, 5, 5] or sum(map(len, found.positions)) == 16
    assert len(found.positions[0]) == 2
    assert max(found.positions[1]) > 60, "spread over the answer"
    one = SETTINGS.model_copy(update={"export": SETTINGS.export.model_copy(update={"parity_positions": 1})})
    assert [len(p) for p in choose_probe_inputs(long_rows([9, 9]), project.tokenizer, one, [1]).positions] == [1]
    with pytest.raises(DataError, match="no test row has an answer token"):
        choose_probe_inputs(long_rows([0, 0]), project.tokenizer, SETTINGS, [1])


def test_spread_indices_returns_the_requested_number() -> None:
    assert spread_indices(10, 3) == [0, 3, 6]
    assert spread_indices(2, 5) == [0, 1]
    assert spread_indices(0, 5) == []


def test_a_model_in_memory_implements_the_runtime(project: Project, adapted: Model) -> None:
    runtime: ModelRuntime = TorchRuntime(adapted, project.tokenizer)
    found = project.inputs
    whole = scoring.collect_logits(adapted, found.rows)
    for ids, positions, logits in zip(found.rows, found.positions, whole, strict=True):
        for places in (positions, [0, 2, len(ids) - 1]):
            given = runtime.log_probabilities(ids, places)
            assert given.dtype == np.float32
            assert np.allclose(given, torch.log_softmax(logits[places], -1).numpy(), atol=1e-5)
    prompt = found.prompts[0]
    answer = runtime.generate(prompt, 8, found.end_ids)
    ids = list(prompt)
    for token in answer:  # without a cache: each pass reads the whole row
        assert int(runtime.log_probabilities(ids, [len(ids) - 1])[0].argmax()) == token
        ids.append(token)
    assert len(answer) == 8 or answer[-1] in found.end_ids
    assert runtime.name.startswith("transformers 5.")
    assert not adapted.config.use_cache, "as it was"
    end = project.tokenizer.eos_token
    assert runtime.token_ids(f"a{end}") == [*runtime.token_ids("a"), project.tokenizer.eos_token_id]


def test_the_same_model_shows_no_difference(project: Project, adapted: Model) -> None:
    runtime, asked = TorchRuntime(adapted, project.tokenizer), project.inputs
    said = parity.collect_reference(runtime, asked, silent)
    found = parity.compare_format(runtime, said, asked, project.decode, exact, silent)
    assert (found.distance.max_difference, found.distance.kl, found.distance.greedy_agreement) == (0, 0, 1)
    assert (found.task.difference, found.task.same_answers, found.task.rows) == (0, 1, 8)
    assert found.texts_tokenised == found.texts == len(asked.texts) > len(TEXTS)
    assert found.tokens_per_second > 0


class Spoilt(TorchRuntime):
    """A runtime that returns other tokens and other outputs."""

    def token_ids(self, text: str) -> list[int]:
        return [*super().token_ids(text), *([5] if "1" in text else [])]

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        return np.roll(super().log_probabilities(ids, positions), 1, axis=-1)

    def generate(self, prompt: Sequence[int], max_new_tokens: int, end_ids: Sequence[int]) -> list[int]:
        return [7, *end_ids]


def test_another_model_shows_differences(project: Project, adapted: Model) -> None:
    asked = project.inputs
    said = parity.collect_reference(TorchRuntime(adapted, project.tokenizer), asked, silent)
    found = parity.compare_format(Spoilt(adapted, project.tokenizer), said, asked, project.decode, exact, silent)
    assert found.distance.kl > 0.01
    assert found.distance.greedy_agreement < 0.5
    assert found.task.same_answers < 1
    assert found.texts_tokenised == sum("1" not in text for text in asked.texts) < found.texts


def test_without_prompts_there_is_no_score(project: Project, adapted: Model) -> None:
    runtime = TorchRuntime(adapted, project.tokenizer)
    asked = choose_probe_inputs(project.test, project.tokenizer, SETTINGS, project.end_ids)
    for part in (asked.prompts, asked.expected, asked.groups):
        part.clear()
    said = parity.collect_reference(runtime, asked, silent)
    found = parity.compare_format(runtime, said, asked, project.decode, exact, silent)
    assert (found.task, found.tokens_per_second) == (None, 0.0)


def test_a_merge_is_measured_against_the_trained_model(project: Project, adapted: Model) -> None:
    asked = project.inputs
    trained, recording = (
        merged_model.reference_logits(adapted, asked, silent),
        layers.record_activations(adapted, asked.rows),
    )
    original = reference.load_adapted_model(project.recipe, "original")
    kl = {}
    for kind, model, heard in (
        ("dequantized", adapted, recording),
        ("original", original, layers.record_activations(original, asked.rows)),
    ):
        merged = merged_in_memory(project, model)
        found = merged_model.measure_merge(kind, merged, torch.float32, trained, heard, asked)
        assert found.merge_base == kind
        assert found.parity.rows == 6
        assert found.parity.tokens == sum(map(len, asked.positions))
        assert found.check.modules > 10
        kl[kind] = found.kl, found.parity.max_logit_difference, found.parity.mean_logit_difference
    assert kl["dequantized"][1] <= 1e-4
    assert kl["dequantized"][0] <= 1e-10
    assert all(a > 10 * b for a, b in zip(kl["original"], kl["dequantized"], strict=True))
    with pytest.raises(DamagedFileError, match="differs by"):  # the reference is of the other base
        merged_model.measure_merge(
            "original", merged_in_memory(project, original), torch.float32, trained, recording, asked
        )


def merged_in_memory(project: Project, model: Model) -> Model:
    """Merge into the weights of `model` with peft, in float32."""
    quantised = any(isinstance(module, Linear4bit) for module in model.modules())
    chosen = project.recipe.train.model_copy(update={} if quantised else {"quantization": "none"})
    return merged_by_peft(project.recipe.base, project.layout.adapter, chosen)
