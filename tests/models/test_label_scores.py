"""Tests label likelihoods with a shared prompt against those of prompt and label as one text."""

import pytest
import torch

import families
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import scoring
from ratchet.models import scoring as room
from ratchet.models.device import Model

SEED = torch.Generator().manual_seed(4)
PROMPTS = torch.randint(3, families.VOCABULARY, (3, 21), generator=SEED).tolist()
LABELS = [[9, 2], [10, 11, 12, 2], [10, 11, 2], [13], [14, 15, 16, 17, 18, 2], [10, 2]]


def plainly(model: Model) -> list[list[float]]:
    return [
        [-scoring.score_rows(model, [[*p, *a]], [[IGNORE_INDEX] * len(p) + a], 0)[0].nll for a in LABELS]
        for p in PROMPTS
    ]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_each_label_is_as_likely_as_read_with_its_prompt_as_one_text(family: str) -> None:
    model = families.make(family)
    expected = torch.tensor(plainly(model), dtype=torch.float64)
    for batch_rows in (1, 6, 64):
        found = torch.tensor(room.score_labels(model, PROMPTS, LABELS, batch_rows, 0), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert expected.std() > 1e-3


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_shorter_than_the_prompt_makes_no_difference(family: str) -> None:
    model = families.make(family, sliding_window=8)
    found = torch.tensor(room.score_labels(model, PROMPTS, LABELS, 64, 0))
    torch.testing.assert_close(found, torch.tensor(plainly(model)), rtol=2e-6, atol=0)
    wide = torch.tensor(plainly(families.make(family, sliding_window=64)))
    assert (found - wide).abs().max() > 1e-4


def test_prompts_are_computed_once_and_rows_stay_within_the_batch() -> None:
    model = families.make("llama")
    shapes: list[tuple[int, ...]] = []
    model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(inputs[0].shape[:2]))
    )
    room.score_labels(model, PROMPTS, LABELS, 6, 0)
    assert shapes == [(3, 21), (6, 5), (6, 2), (3 * 2, 1)]


def test_recurrent_models_read_whole_texts_in_batches() -> None:
    model = families.make("mamba")
    rows: list[int] = []
    model.backbone.layers[0].register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    room.score_labels(model, PROMPTS, LABELS, 4, 0)
    assert rows == [3, 4, 4, 4, 4, 2]


@pytest.mark.parametrize(
    ("prompts", "labels"),
    [([[5], [5, 6]], [[7]]), ([[]], [[7]]), ([[5]], [[7], []])],
    ids=["lengths", "prompt", "label"],
)
def test_invalid_prompts_and_labels_are_refused(prompts: list[list[int]], labels: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="expected prompts of one length, and no empty prompt or label"):
        room.score_labels(families.make("llama"), prompts, labels, 4, 0)
