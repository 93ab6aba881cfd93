"""Tests of preference tuning: losses and gradients against plain formulas, and a resumed training."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import InterruptedRunError
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
    expected = plain_loss(loop, objective, 0.3, pairs)
    expected.backward()
    wanted = [p.grad.clone() for p in loop.executor.parameters]
    loop.executor.optimizer.zero_grad()
    loop.executor.compute_gradients(2)
    for gradient, parameter in zip(wanted, loop.executor.parameters, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    loop.executor.step()
    assert losses(RunPaths(tmp_path))[-1] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("batching", ["by_length", "packed"])
def test_a_stopped_training_goes_on_exactly_and_micro_batches_change_only_the_rounding(
    tmp_path: Path, batching: str
) -> None:
    train = PREFER.model_copy(update={"batching": batching, "pack_tokens": 60, "dropout": 0.1})
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


def test_training_prefers_the_chosen_answers(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, PREFER.model_copy(update={"epochs": 8}))
    loop.run()
    first, last = steps(RunPaths(tmp_path))[0].data, steps(RunPaths(tmp_path))[-1].data
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert last["loss"] < 0.6
    assert last["reward_accuracy"] == 1
    assert last["kl"] > 0 == first["kl"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_adapter_on_the_head_gets_the_gradient_of_the_paper(tmp_path: Path, objective: str) -> None:
    train = PREFER.model_copy(update={"objective": objective, "target_modules": ("q_proj", "lm_head")})
    loop = loop_of(tmp_path, train)
    loop.executor.step()
    rows = [row for sequence in loop.plan.batch(1) for row in sequence]
    loop.context.model.train()
    plain_loss(loop, objective, train.beta, [rows[k : k + 2] for k in range(0, len(rows), 2)]).backward()
    wanted = [p.grad.clone() for p in loop.executor.parameters]
    loop.executor.optimizer.zero_grad()
    loop.executor.compute_gradients(2)
    for gradient, parameter in zip(wanted, loop.executor.parameters, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
