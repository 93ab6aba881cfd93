"""Tests scores of one model: each row gets its own, and a restart after a kill computes only the missing ones."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import families
from ratchet.config.evaluate import Evaluate
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.evaluation.scorer import Scorer, ScoreStore
from ratchet.models import scoring
from ratchet.models.decoding import token_choice

GENERATOR = torch.Generator().manual_seed(11)
LENGTHS = [9, 4, 17, 4, 12, 9, 4, 25, 6, 9, 3]
ROWS = [torch.randint(3, 64, (n,), generator=GENERATOR).tolist() for n in LENGTHS]
LABELS = [[IGNORE_INDEX if i < len(ids) - 2 else token for i, token in enumerate(ids)] for ids in ROWS]
CHOICES = [[5, 2], [6, 7, 2], [8]]
GREEDY = Evaluate(max_new_tokens=5)
DRAWN = Evaluate(max_new_tokens=5, samples=3, temperature=1.0, seed=4)


class Numbers:
    """A tokenizer with the only method that answers need."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f" {token}" for token in tokens if token != 2)


@pytest.fixture(scope="module")
def model() -> Any:
    return families.make("llama", vocab_size=64)


def count_passes(model: Any) -> list[int]:
    """Return a list that receives the number of rows of every later pass through the model's first layer."""
    rows: list[int] = []
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    return rows


def silent(kind: str, done: int, total: int) -> None:
    pass


def scorer(model: Any, path: Path | None = None, batch_rows: int = 4) -> Scorer:
    return Scorer(model, 0, batch_rows, ScoreStore(path), silent)


ASKED: dict[str, Callable[[Scorer], Any]] = {
    "likelihoods": lambda one: one.score_rows(ROWS, LABELS),
    "text": lambda one: one.score_text(ROWS),
    "greedy": lambda one: one.generate_answers(Numbers(), ROWS, [2], GREEDY),
    "drawn": lambda one: one.generate_answers(Numbers(), ROWS, [2], DRAWN),
    "label scores": lambda one: one.score_labels(ROWS, CHOICES),
}


# -------------------------------------------------------------------------------------------------------------- answers


def test_every_row_gets_its_own_in_the_order_of_the_rows(model: Any) -> None:
    one = scorer(model)
    for found, ids, labels in zip(one.score_rows(ROWS, LABELS), ROWS, LABELS, strict=True):
        alone = scoring.score_rows(model, [ids], [labels], 0)[0]
        assert (found.tokens, found.prompt_tokens) == (2, len(ids) - 3)
        assert (found.nll, found.prompt_nll) == pytest.approx((alone.nll, alone.prompt_nll), rel=1e-6)
    for found, ids in zip(one.score_text(ROWS), ROWS, strict=True):
        assert (found.tokens, found.prompt_tokens, found.prompt_nll) == (len(ids) - 1, 0, 0.0)
    for answers, ids in zip(one.generate_answers(Numbers(), ROWS, [2], GREEDY), ROWS, strict=True):
        assert answers == [Numbers().decode(scoring.generate(model, [ids], [2], 5, 0)[0], True).strip()]
    for scores, ids in zip(one.score_labels(ROWS, CHOICES), ROWS, strict=True):
        assert scores == pytest.approx(scoring.score_labels(model, [ids], CHOICES, 1, 0)[0], rel=1e-6)


def test_drawn_answers_do_not_depend_on_the_batch(model: Any) -> None:
    found = scorer(model).generate_answers(Numbers(), ROWS, [2], DRAWN)
    assert {len(answers) for answers in found} == {3}
    assert len({answer for answers in found for answer in answers}) > 20
    order = [7, 0, 3, 10]
    some = scorer(model, batch_rows=3).generate_answers(Numbers(), [ROWS[i] for i in order], [2], DRAWN)
    assert some == [found[i] for i in order]
    assert scorer(model).generate_answers(Numbers(), ROWS, [2], DRAWN.model_copy(update={"seed": 5})) != found


def test_rows_with_one_prompt_draw_each_their_own(model: Any) -> None:
    first, second = scorer(model).generate_answers(Numbers(), [ROWS[0], ROWS[0]], [2], DRAWN)
    assert set(first).isdisjoint(second)
    assert [first] == scorer(model).generate_answers(Numbers(), [ROWS[0]], [2], DRAWN)


def test_drawn_answers_are_drawn_from_the_model(model: Any) -> None:
    """The test compares the first tokens of 600 draws with torch's softmax of the same logits."""
    wanted = DRAWN.model_copy(update={"samples": 600, "max_new_tokens": 1, "temperature": 0.2})
    answers = scorer(model, batch_rows=600).generate_answers(Numbers(), [ROWS[2]], [], wanted)[0]
    with torch.no_grad():
        chances = torch.softmax(model(input_ids=torch.tensor([ROWS[2]])).logits[0, -1].double() / 0.2, -1)
    for token in chances.topk(3).indices.tolist():
        chance = float(chances[token])
        deviation = (chance * (1 - chance) / 600) ** 0.5
        assert answers.count(str(token)) / 600 == pytest.approx(chance, abs=4 * deviation)


def test_progress_counts_rows(model: Any) -> None:
    told: list[tuple[str, int, int]] = []
    one = replace(scorer(model), progress=lambda *state: told.append(state))
    one.score_rows(ROWS, LABELS)
    assert told == [("likelihoods", 4, 11), ("likelihoods", 8, 11), ("likelihoods", 11, 11)]
    told.clear()
    one.generate_answers(Numbers(), ROWS, [2], DRAWN)
    assert told[-1] == ("answers", 33, 33)


# -------------------------------------------------------------------------------------------------------- stored scores


CHANGES: dict[str, tuple[Callable[[Scorer], Any], Callable[[Scorer], Any], int]] = {
    "a token": (ASKED["likelihoods"], lambda one: one.score_rows([*ROWS[:-1], [3, 4, 5]], LABELS), 1),
    "a label": (ASKED["likelihoods"], lambda one: one.score_rows(ROWS, [*LABELS[:-1], [IGNORE_INDEX] * 3]), 1),
    "batch": (ASKED["likelihoods"], lambda one: replace(one, batch_rows=3).score_rows(ROWS, LABELS), 4),
    "filling": (ASKED["likelihoods"], lambda one: replace(one, pad_token_id=1).score_rows(ROWS, LABELS), 3),
    "ends": (ASKED["greedy"], lambda one: one.generate_answers(Numbers(), ROWS, [2, 9], GREEDY), 3),
    "longest": (ASKED["greedy"], lambda one: one.generate_answers(Numbers(), ROWS, [2], Evaluate(max_new_tokens=4)), 3),
    "drawing": (ASKED["greedy"], ASKED["drawn"], 9),
    "labels": (ASKED["label scores"], lambda one: one.score_labels(ROWS, CHOICES[::-1]), 7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_results_of_another_question_are_not_reused(tmp_path: Path, model: Any, name: str) -> None:
    asked, changed, batches = CHANGES[name]
    asked(scorer(model, tmp_path / "s"))
    lines = len((tmp_path / "s").read_bytes().splitlines())
    changed(scorer(model, tmp_path / "s"))
    assert len((tmp_path / "s").read_bytes().splitlines()) - lines == batches


def test_seed_and_temperature_do_not_matter_to_greedy_answers(tmp_path: Path, model: Any) -> None:
    ASKED["greedy"](scorer(model, tmp_path / "s"))
    before = (tmp_path / "s").read_bytes()
    changed = GREEDY.model_copy(update={"seed": 9, "temperature": 2.0})
    scorer(model, tmp_path / "s").generate_answers(Numbers(), ROWS, [2], changed)
    assert (tmp_path / "s").read_bytes() == before


@pytest.mark.parametrize("kind", ASKED)
def test_stored_results_are_not_computed_again_even_after_a_kill(tmp_path: Path, kind: str) -> None:
    model = families.make("llama", vocab_size=64)
    passes = count_passes(model)
    expected = ASKED[kind](scorer(model, tmp_path / "whole"))
    total = len(passes)
    assert ASKED[kind](scorer(model, tmp_path / "whole")) == expected
    assert len(passes) == total > 2
    assert ASKED[kind](scorer(model)) == expected
    killed_at = total // 2 + 1
    if (child := os.fork()) == 0:  # the child is killed during a pass of the model
        passes.clear()
        model.model.layers[1].register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL) if len(passes) == killed_at else None
        )
        ASKED[kind](scorer(model, tmp_path / "s"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    done, whole = (tmp_path / "s").read_bytes(), (tmp_path / "whole").read_bytes()
    assert whole.startswith(done)
    assert done.endswith(b"\n")
    passes.clear()
    assert ASKED[kind](scorer(model, tmp_path / "s")) == expected
    assert total - killed_at < len(passes) < total  # only the batch of the kill is computed again
    assert (tmp_path / "s").read_bytes() == whole


def test_streams_of_noise_are_distinct() -> None:
    names = {
        token_choice.noise_stream_key(seed, row, sample)
        for seed in (0, 1, 10)
        for row in ("1", "11")
        for sample in (0, 1, 11)
    }
    assert len(names) == 3 * 2 * 3
