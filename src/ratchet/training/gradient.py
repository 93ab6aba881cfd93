"""Loss and gradient of one optimizer step, and the loss of all validation rows, in micro-batches that fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.data.batches import BatchPlan, Rows, micro_batches
from ratchet.faults.injection import Injection, Phase
from ratchet.model import adapter, memory
from ratchet.model.loss import Sequences, answer_nll
from ratchet.model.quantized import Model
from ratchet.run.directory import RunPaths, RunSpec
from ratchet.run.heartbeat import Heartbeat
from ratchet.run.journal import Journal
from ratchet.training import analysis, schedule
from ratchet.training.budget import Budget
from ratchet.training.monitor import Monitor
from ratchet.training.stopping import Stopping


@dataclass(frozen=True)
class Task:
    """What to train, on what, how, and whom to tell."""

    spec: RunSpec
    machine: Machine
    model: Model
    device: torch.device
    train: Rows
    validation: Rows
    paths: RunPaths
    journal: Journal
    heartbeat: Heartbeat
    stop: Stopping
    made_by: dict[str, str]
    """Versions and device, recorded with every checkpoint: with others, results are not bit-exact."""
    plan: BatchPlan
    monitor: Monitor
    advise: Callable[[int], str]
    """What to change when a single row of so many tokens does not fit into memory."""
    first_tokens: int | None = None
    """Padded tokens of the largest micro-batch to begin with; None: as many as `machine.micro_batch_rows` rows have."""
    loss_scale: float = 1.0
    """That a training begins with (scaling.py)."""
    faults: Injection = field(default_factory=Injection)

    @property
    def settings(self) -> Train:
        return self.spec.train


@dataclass(frozen=True)
class Computed:
    """What one pass over a step's batch gave. The gradient itself is in the parameters, clipped."""

    batch: list[list[int]]
    """Rows of each sequence of the step, in order."""
    loss: float
    """Mean over the step's answer tokens, in nats."""
    norm: float
    """L2 norm of the gradient before clipping."""
    trained_tokens: int
    input_tokens: int
    module_norms: dict[str, float]
    """L2 norm before clipping of each module's gradient; empty at steps at which nobody asks."""


class DoesNotFitError(Exception):
    """A micro-batch for which memory did not suffice; nothing of it is left."""

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__(rows, tokens)
        self.rows = rows
        self.tokens = tokens
        """Padded: rows x longest."""


class Gradients:
    """Computes; changes neither weights nor optimizer. Every micro-batch is a sign of life."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.plan = task.plan
        self.parameters = [parameter for _, parameter in adapter.trainable(task.model)]

    def step(self, step: int, budget: Budget, loss_scale: float = 1.0) -> Computed | None:
        """Gradient of step `step` (from 0) over its whole batch; None when asked to stop before it was complete.

        Args:
            step: number of the step.
            budget: of micro-batches.
            loss_scale: factor of the loss in the backward pass; the gradient is divided by it again.

        Raises:
            DoesNotFitError: the same step may be computed again, with a smaller budget.
        """
        task = self.task
        self.drop()  # of a computation of the same step that is not learned from
        schedule.seed_step(task.settings.seed, step)
        task.model.train()
        batch = self.plan.batch(step)
        lengths = [task.train.tokens(sequence) for sequence in batch]
        trained = sum(map(task.train.trained, batch))
        factor = task.faults.loss_factor(step + 1)
        loss_sum = 0.0
        pieces = micro_batches(list(range(len(batch))), lengths, task.machine.micro_batch_rows, budget.tokens)
        for piece in pieces:
            if task.stop.asked:
                self.drop()
                return None
            task.heartbeat.beat("step")
            task.faults.in_step(step + 1)
            with self._fitting("train", step + 1, [lengths[k] for k in piece]):
                # Normalised by the tokens of the whole step, so that the micro-batch changes memory and nothing else.
                loss = self._nll(task.train, [batch[k] for k in piece]).sum() / trained * factor
                (loss * loss_scale).backward()
                loss_sum += float(loss.detach())
                del loss  # else its graph lives on through the next forward pass, up to a fifth of the peak on a CPU
        self._complete(loss_scale)
        module_norms = analysis.norms(task.model) if analysis.due(step + 1, self.plan.steps) else {}
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, task.settings.max_grad_norm))
        return Computed(batch, loss_sum, norm, trained, sum(lengths), module_norms)

    def _complete(self, loss_scale: float) -> None:
        """Take the scale off the gradient, and add that of what the adapter wants beside a low loss."""
        if loss_scale != 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(loss_scale)
        penalty = adapter.penalty(self.task.model)
        if penalty is not None:
            (self.task.settings.adalora.orthogonality * penalty).backward()

    def drop(self) -> None:
        """Forget the gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def validation(self, step: int, budget: Budget) -> tuple[float, int] | None:
        """Mean loss per answer token of all validation rows, in nats, and their number; None when asked to stop.

        Raises:
            DoesNotFitError: all of it may be computed again, with a smaller budget.
        """
        task = self.task
        task.model.eval()
        lengths = task.validation.lengths.tolist()
        everything = list(range(len(task.validation)))
        total, count = 0.0, 0
        with torch.no_grad():
            for rows in micro_batches(everything, lengths, task.machine.micro_batch_rows, budget.tokens):
                if task.stop.asked:
                    return None
                task.heartbeat.beat("validate")
                with self._fitting("validation", step, [lengths[row] for row in rows]):
                    total += float(self._nll(task.validation, [[row] for row in rows]).double().sum())
                count += task.validation.trained(rows)
        return total / count, count

    def _nll(self, data: Rows, sequences: list[list[int]]) -> torch.Tensor:
        batch = Sequences.of(data, sequences, self.task.device)
        return answer_nll(self.task.model, batch.input_ids, batch.labels, batch.position_ids)

    @contextmanager
    def _fitting(self, phase: Phase, step: int, lengths: list[int]) -> Iterator[None]:
        """Turns every kind of exhausted memory into DoesNotFitError, with the gradient so far forgotten."""
        tokens = len(lengths) * max(lengths)
        try:
            self.task.faults.memory(phase, step, tokens)
            yield
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            self.drop()
            raise DoesNotFitError(len(lengths), tokens) from None
