"""The training loop. Starting is resuming from step 0: it always begins with the newest valid checkpoint, if any."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ratchet.config import Machine, Train
from ratchet.data.batches import BatchPlan, Rows, micro_batches
from ratchet.errors import DivergedError, InterruptedRunError
from ratchet.model import adapter
from ratchet.model.loss import Sequences, answer_nll, require_rows_apart
from ratchet.model.quantized import Model
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Journal
from ratchet.training import checkpoint, optimizer, schedule
from ratchet.training.checkpoint import State


@dataclass(frozen=True)
class Task:
    """What to train, on what, how, and whom to tell."""

    settings: Train
    machine: Machine
    model: Model
    device: torch.device
    compute_dtype: str
    train: Rows
    validation: Rows
    paths: RunPaths
    journal: Journal
    stop: Callable[[], bool]
    """Asked at every step: should training seal a checkpoint and end?"""


class Loop:
    """One attempt at a training: from the newest valid checkpoint to the last step, an early stop, or a request."""

    def __init__(self, task: Task) -> None:
        self.task = task
        settings = task.settings
        self.plan = BatchPlan(task.train.lengths, settings)
        self.parameters = [parameter for _, parameter in adapter.trainable(task.model)]
        self.optimizer = optimizer.build(iter(self.parameters), settings, task.device)
        self.state, self.sealed_step = self._restore()

    def _restore(self) -> tuple[State, int]:
        task = self.task
        path = checkpoint.newest_valid(task.paths, self._notice)
        if path is None:
            return State(), -1
        state = checkpoint.load(path, task.model, self.optimizer, task.device)
        _, document = checkpoint.read_state(path)
        if document["compute_dtype"] != task.compute_dtype:
            self._notice(f"compute type changed within the run, {document['compute_dtype']} to {task.compute_dtype}")
        return state, state.step

    def _notice(self, text: str) -> None:
        self.task.journal.append("notice", text=text)

    def run(self) -> State:
        """Train to the end; returns the final state, which is sealed.

        Raises:
            InterruptedRunError: asked to stop; the state is sealed.
            DivergedError: loss or gradient is not finite; the weights are those of the step before.
            SettingsError: rows are to be packed, and the model would mix them; nothing was learned.
        """
        task = self.task
        shared = self.plan.shared_sequence()
        if shared and not self.end_reason:
            require_rows_apart(task.model, task.train, shared, task.device)
        while True:
            if task.stop():
                self._seal()
                task.journal.append("stopped", step=self.state.step)
                raise InterruptedRunError(f"stopped at step {self.state.step}")
            improved = False
            if self._validation_is_due():
                loss = self._validate()
                if loss is None:
                    continue
                improved = self._take_validation(loss)
            ended = self.end_reason
            due = self.state.step > 0 and self.state.step % task.machine.checkpoint_every_steps == 0
            if improved or ended or due:
                self._seal()
            if ended:
                return self.state
            self._step()

    def _validation_is_due(self) -> bool:
        step = self.state.step
        due = step > 0 and (step % self.task.settings.validate_every_steps == 0 or step == self.plan.steps)
        return due and step not in self.state.validation_loss

    @property
    def end_reason(self) -> str | None:
        """`completed` or `early_stopped` once training has ended."""
        patience = self.task.settings.early_stopping.patience
        if self.state.step >= self.plan.steps:
            return "completed"
        return "early_stopped" if patience and self.state.bad_validations >= patience else None

    def _seal(self) -> None:
        task, step = self.task, self.state.step
        if step in (self.sealed_step, 0):
            return
        started = time.monotonic()
        task.journal.sync()  # what the checkpoint assumes to be told must not be lost with the machine
        size = checkpoint.save(task.paths, self.state, task.model, self.optimizer, task.compute_dtype)
        seconds = round(time.monotonic() - started, 4)
        task.journal.append(
            "checkpoint", step=step, size_bytes=size, seconds=seconds, best=self.state.best_step == step
        )
        self.sealed_step = step
        checkpoint.rotate(task.paths, task.machine.keep_checkpoints, self.state.best_step)

    def _step(self) -> None:
        """One optimizer step over one global batch, in as many micro-batches as the machine needs."""
        task, step = self.task, self.state.step
        started = time.monotonic()
        schedule.seed_step(task.settings.seed, step)
        task.model.train()
        batch = self.plan.batch(step)
        lengths = [task.train.tokens(sequence) for sequence in batch]
        trained = sum(map(task.train.trained, batch))
        loss_sum = 0.0
        for piece in micro_batches(list(range(len(batch))), lengths, task.machine.micro_batch_rows):
            # Normalised by the tokens of the whole step, so that the micro-batch changes memory and nothing else.
            loss = self._nll(task.train, [batch[k] for k in piece]).sum() / trained
            loss.backward()
            loss_sum += float(loss.detach())
        gradient = torch.nn.utils.clip_grad_norm_(self.parameters, task.settings.max_grad_norm)
        norm = float(gradient)
        _require_finite(step + 1, loss_sum, norm)
        rate = schedule.learning_rate(step, self.plan.steps, task.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state = replace(
            self.state,
            step=step + 1,
            train_loss=loss_sum,
            trained_tokens=self.state.trained_tokens + trained,
            input_tokens=self.state.input_tokens + sum(lengths),
        )
        task.journal.append(
            "step", step=step + 1, loss=loss_sum, learning_rate=rate, grad_norm=norm, trained_tokens=trained,
            input_tokens=sum(lengths), step_s=round(time.monotonic() - started, 5),
        )  # fmt: skip

    def _nll(self, data: Rows, sequences: list[list[int]]) -> torch.Tensor:
        batch = Sequences.of(data, sequences, self.task.device)
        return answer_nll(self.task.model, batch.input_ids, batch.labels, batch.position_ids)

    def _validate(self) -> float | None:
        """Mean loss per answer token of the validation rows, in nats; None when asked to stop in between."""
        task = self.task
        started = time.monotonic()
        task.model.eval()
        everything = list(range(len(task.validation)))
        lengths = task.validation.lengths.tolist()
        total, count = 0.0, 0
        with torch.no_grad():
            for rows in micro_batches(everything, lengths, task.machine.micro_batch_rows):
                if task.stop():
                    return None
                total += float(self._nll(task.validation, [[row] for row in rows]).double().sum())
                count += task.validation.trained(rows)
        loss = total / count
        improved = self._improves(loss)
        task.journal.append(
            "validation", step=self.state.step, loss=loss, tokens=count, improved=improved,
            seconds=round(time.monotonic() - started, 4),
        )  # fmt: skip
        return loss

    def _improves(self, loss: float) -> bool:
        best = self.state.best_loss
        return best is None or loss < best - self.task.settings.early_stopping.threshold

    def _take_validation(self, loss: float) -> bool:
        improved = self._improves(loss)
        self.state = replace(
            self.state,
            validation_loss={**self.state.validation_loss, self.state.step: loss},
            best_step=self.state.step if improved else self.state.best_step,
            bad_validations=0 if improved else self.state.bad_validations + 1,
        )
        return improved


def _require_finite(step: int, loss: float, norm: float) -> None:
    values: dict[str, Any] = {"loss": loss, "gradient norm": norm}
    for what, value in values.items():
        if not math.isfinite(value):
            raise DivergedError(
                f"{what} is {value} at step {step}; the weights were not touched. "
                "Lower train.learning_rate, or look at the rows of this step"
            )
