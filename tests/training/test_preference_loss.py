"""Tests of preference tuning: losses and gradients against plain formulas, and a resumed training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.config.train import Objective, Train
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import DataError, InterruptedRunError
from ratchet.models import adapters
from ratchet.models.loss import SequenceBatch, answer_nll
from ratchet.models.preference_loss import Preference, PreferenceLoss, compute_pair_losses, weigh_labels
from ratchet.runs.directory import RunPaths
from ratchet.training.trainer import TrainingLoop
from small_loop import SMALL, after_steps, loop_of, losses, steps, trained_by

OBJECTIVES = ("dpo", "ipo", "orpo")
PREFER = SMALL.model_copy(update={"objective": "dpo", "dropout": 0.0, "batch_size": 3, "epochs": 2})


def plain_log_probabilities(model: torch.nn.Module, loop: TrainingLoop, row: int) -> torch.Tensor:
    """Return the log-probabilities of a row's answer tokens, from the logits of all positions."""
    rows = loop.context.train_rows
    span = slice(rows.offsets[row], rows.offsets[row + 1])
    ids, labels = torch.tensor(rows.input_ids[span].tolist()), torch.tensor(rows.labels[span].tolist())
    logits = model(input_ids=ids[None]).logits[0, :-1].double()
    is_trained = labels[1:] != IGNORE_INDEX
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0][is_trained]


def plain_loss(loop: TrainingLoop, objective: str, beta: float, pairs: list[list[int]]) -> torch.Tensor:
    """Return the mean loss of pairs as the papers define it; the reference is the base without adapter."""
    model, terms = loop.context.model, []
    for chosen, rejected in pairs:
        policy = [plain_log_probabilities(model, loop, row) for row in (chosen, rejected)]
        with model.disable_adapter(), torch.no_grad():
            reference = [plain_log_probabilities(model, loop, row) for row in (chosen, rejected)]
        if objective == "dpo":
            ratios = [a.sum() - b.sum() for a, b in zip(policy, reference, strict=True)]
            terms.append(-functional.logsigmoid(beta * (ratios[0] - ratios[1])))
        elif objective == "ipo":
            ratios = [a.mean() - b.mean() for a, b in zip(policy, reference, strict=True)]
            terms.append((ratios[0] - ratios[1] - 1 / (2 * beta)) ** 2)
        else:
            odds = [(a.mean().exp() / (1 - a.mean().exp())).log() for a in policy]
            terms.append(-policy[0].mean() - beta * functional.logsigmoid(odds[0] - odds[1]))
    return torch.stack(terms).mean()


def mismatched_log_probabilities(model: torch.nn.Module, loop: TrainingLoop, batch: list[int]) -> list[torch.Tensor]:
    """Return the log-probabilities of the answer tokens of each prompt with the answer of the row before it."""
    rows, found = loop.context.train_rows, []
    longest = int(rows.lengths.max())
    for row, before in zip(batch, [batch[-1], *batch[:-1]], strict=True):
        parts = []
        for one in (row, before):
            ids = rows.input_ids[rows.offsets[one] : rows.offsets[one + 1]].tolist()
            labels = rows.labels[rows.offsets[one] : rows.offsets[one + 1]].tolist()
            start = next(k for k, label in enumerate(labels) if label != IGNORE_INDEX)
            parts.append((ids[:start], ids[start:]))
        prompt, answer = parts[0][0], parts[1][1]
        ids = torch.tensor([*prompt, *answer][:longest])
        logits = model(input_ids=ids[None]).logits[0, :-1].double()
        found.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[len(prompt) - 1 :, 0])
    return found


def plain_label_loss(loop: TrainingLoop, beta: float, batch: list[int]) -> torch.Tensor:
    """Return the mean loss of labelled rows as the paper defines it; a third of the rows is desirable, so their weight
    is 2."""
    model = loop.context.model
    with model.disable_adapter(), torch.no_grad():
        reference = torch.stack([plain_log_probabilities(model, loop, row).sum() for row in batch])
        mismatched_reference = torch.stack([x.sum() for x in mismatched_log_probabilities(model, loop, batch)])
    rewards = torch.stack([plain_log_probabilities(model, loop, row).sum() for row in batch]) - reference
    with torch.no_grad():
        mismatched = torch.stack([x.sum() for x in mismatched_log_probabilities(model, loop, batch)])
    z = (mismatched - mismatched_reference).mean().clamp(min=0)
    is_desirable = torch.tensor([row % 3 == 0 for row in batch])
    gains, losses = beta * (rewards - z), beta * (z - rewards)
    return torch.where(is_desirable, 2 * (1 - torch.sigmoid(gains)), 1 - torch.sigmoid(losses)).mean()


def check_gradients(loop: TrainingLoop, expected: torch.Tensor, step: int) -> None:
    """Check that a step has the gradients of this loss, and reports this loss."""
    expected.backward()
    wanted = [parameter.grad.clone() for parameter in loop.executor.parameters]
    loop.executor.optimizer.zero_grad()
    loop.executor.compute_gradients(step)
    for gradient, parameter in zip(wanted, loop.executor.parameters, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    loop.executor.step()
    assert losses(loop.context.paths)[-1] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("batching", ["shuffled", "packed"])
def test_loss_and_gradient_of_labelled_answers_are_those_of_the_paper(tmp_path: Path, batching: str) -> None:
    train = PREFER.model_copy(update={"objective": "kto", "batching": batching, "pack_tokens": 60, "beta": 0.3})
    loop = loop_of(tmp_path, train, micro=2)  # the divergence is that of the batch, whatever the micro-batches are
    draw = torch.Generator().manual_seed(0)
    for parameter in loop.executor.parameters:  # the model differs from the reference, such that z is above 0
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    rows = [row for sequence in loop.plan.batch(0) for row in sequence]
    loop.context.model.train()
    check_gradients(loop, plain_label_loss(loop, 0.3, rows), step=1)
    assert steps(RunPaths(tmp_path))[-1].data["kl"] > 0


def test_the_rarer_kind_of_labels_weighs_more_and_one_kind_alone_is_refused(tmp_path: Path) -> None:
    def weights(desirable: int, undesirable: int) -> tuple[float, float]:
        return weigh_labels(np.arange(desirable + undesirable) < desirable)

    assert weights(5, 5) == weights(8, 6) == (1, 1)
    assert weights(2, 6) == (3, 1)
    assert weights(8, 2) == (1, pytest.approx(3))
    loop = loop_of(tmp_path, PREFER.model_copy(update={"objective": "kto"}))
    rows = replace(loop.context.train_rows, is_desirable=np.ones(48, bool))
    with pytest.raises(DataError, match="all 48 training answers are desirable; add undesirable ones"):
        Preference.from_settings(loop.context.settings, loop.context.model, rows)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("batching", ["shuffled", "packed"])
def test_loss_and_gradient_are_those_of_the_paper(tmp_path: Path, objective: str, batching: str) -> None:
    train = PREFER.model_copy(update={"objective": objective, "batching": batching, "pack_tokens": 60, "beta": 0.3})
    loop = loop_of(tmp_path, train)
    loop.executor.step()  # the model differs from the reference
    rows = [row for sequence in loop.plan.batch(1) for row in sequence]
    pairs = [rows[k : k + 2] for k in range(0, len(rows), 2)]
    assert all(chosen % 2 == 0 and rejected == chosen + 1 for chosen, rejected in pairs)
    loop.context.model.train()
    check_gradients(loop, plain_loss(loop, objective, 0.3, pairs), step=2)


@pytest.mark.parametrize(("objective", "batching"), [("dpo", "by_length"), ("dpo", "packed"), ("kto", "packed")])
def test_a_stopped_training_goes_on_exactly_and_micro_batches_change_only_the_rounding(
    tmp_path: Path, objective: str, batching: str
) -> None:
    changes = {"objective": objective, "batching": batching, "pack_tokens": 60, "dropout": 0.1}
    train = PREFER.model_copy(update=changes)
    whole, stopped = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "stopped")
    complete = loop_of(whole.root, train)
    complete.run()
    with pytest.raises(InterruptedRunError):
        loop_of(stopped.root, train, after_steps(stopped, 3)).run()
    resumed = loop_of(stopped.root, train)
    assert resumed.state.step == 3
    resumed.run()
    assert losses(stopped) == losses(whole)
    weights = trained_by(complete)
    assert all(torch.equal(weights[name], value) for name, value in trained_by(resumed).items())
    statistics = [event.data["reward_margin"] for event in steps(whole)]
    assert statistics == [event.data["reward_margin"] for event in steps(stopped)]
    assert statistics[0] == 0  # the model begins as its reference
    assert complete.state.validation_loss
    small = loop_of(tmp_path / "small", train.model_copy(update={"dropout": 0.0}), micro=1)
    large = loop_of(tmp_path / "large", train.model_copy(update={"dropout": 0.0}), micro=4)
    small.run()
    large.run()
    for name, value in trained_by(small).items():
        torch.testing.assert_close(value, trained_by(large)[name], rtol=1e-3, atol=1e-5)
    assert small.state.validation_loss == pytest.approx(large.state.validation_loss, rel=1e-4)


@pytest.mark.parametrize(("objective", "start", "batch_rows"), [("dpo", 0.6931, 3), ("kto", 0.6667, 6)])
def test_training_prefers_the_chosen_answers(tmp_path: Path, objective: str, start: float, batch_rows: int) -> None:
    loop = loop_of(tmp_path, PREFER.model_copy(update={"objective": objective, "epochs": 8, "batch_size": batch_rows}))
    loop.run()
    first, last = steps(RunPaths(tmp_path))[0].data, steps(RunPaths(tmp_path))[-1].data
    assert first["loss"] == pytest.approx(start, abs=0.2 if objective == "kto" else 1e-3)
    assert last["loss"] < 0.9 * first["loss"]
    assert last["chosen_reward"] > last["rejected_reward"]
    assert last["reward_accuracy"] == 1
    assert first["kl"] == 0
    assert last["kl"] > 0 or objective == "kto"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_adapter_on_the_head_gets_the_gradient_of_the_paper(tmp_path: Path, objective: str) -> None:
    train = PREFER.model_copy(update={"objective": objective, "target_modules": ("q_proj", "lm_head")})
    loop = loop_of(tmp_path, train)
    loop.executor.step()
    rows = [row for sequence in loop.plan.batch(1) for row in sequence]
    loop.context.model.train()
    pairs = [rows[k : k + 2] for k in range(0, len(rows), 2)]
    check_gradients(loop, plain_loss(loop, objective, train.beta, pairs), step=2)


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_trained_rows_of_a_tied_head_get_the_gradient_of_the_paper(objective: Objective) -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    train = Train(objective=objective, rank=4, quantization="none")
    model = adapters.attach(base, train, "a" * 64, [38, 39])
    reward = Preference.from_settings(train, model, TokenRows.from_lists([[1]], [[1]]))
    parameters = [parameter for _, parameter in adapters.trainable_parameters(model)]
    for parameter in parameters:
        parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.randint(0, 40, (4, 10))
    ids[:, 6] = 38
    labels = torch.where(torch.arange(10) < 4, IGNORE_INDEX, ids)
    batch = SequenceBatch(ids, labels, None)
    PreferenceLoss(model, batch, 1.0, reward).backward()
    found = [parameter.grad.clone() for parameter in parameters]
    model.zero_grad()
    sums = -answer_nll(model, ids, labels).sum(1).double()
    if objective == "dpo":
        with model.disable_adapter(), torch.no_grad():
            reference = -answer_nll(model, ids, labels).sum(1).double()
        differences = (sums - reference)[0::2] - (sums - reference)[1::2]
        loss = -functional.logsigmoid(train.beta * differences).sum()
    else:
        means = sums / 6
        odds = (means.exp() / (1 - means.exp())).log()
        loss = (-means[0::2] - train.beta * functional.logsigmoid(odds[0::2] - odds[1::2])).sum()
    loss.backward()
    for gradient, parameter in zip(found, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("certain", [0, 1])
def test_a_certain_answer_of_orpo_has_finite_odds(certain: int) -> None:
    likelihoods = torch.tensor([-5.0, -5.0], dtype=torch.float64)
    likelihoods[certain] = 0.0
    found = compute_pair_losses(likelihoods, None, torch.tensor([2, 2]), "orpo", 0.1)
    assert all(bool(tensor.isfinite().all()) for tensor in (found.losses, found.gradient, found.rewards))
