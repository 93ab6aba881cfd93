"""Loss and gradient of one optimizer step, and the loss of all validation rows, in micro-batches that fit."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.data.batches import BatchPlan, Rows, micro_batches
from ratchet.faults.injection import Injection, Phase
from ratchet.model import adapter, heads, memory
from ratchet.model.loss import Sequences
from ratchet.model.quantized import Model
from ratchet.run.directory import RunPaths, RunSpec
from ratchet.run.heartbeat import Heartbeat
from ratchet.run.journal import Journal
from ratchet.training import analysis, schedule
from ratchet.training.budget import Budget
from ratchet.training.distillation import Lessons
from ratchet.training.distillation_live import Attending
from ratchet.training.monitor import Monitor
from ratchet.training.ranks import Place, Ranks, shares
from ratchet.training.stopping import Stopping
from ratchet.training.stopwatch import Spans
from ratchet.wire.wire import Wire


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
    spans: Spans = field(default_factory=Spans)
    """Measured where somebody profiles."""
    ranks: Ranks = field(default_factory=lambda: Ranks(Place(), torch.device("cpu"), lambda: None, 0.0))
    """Who else computes the same steps."""
    shares_base: bool = False
    """Whether layers of the base travel (sharding.py): then every pass is one of all ranks."""
    lessons: Lessons | Attending | None = None
    """What a teacher has said about the training rows, or says now, if there is one."""

    @property
    def settings(self) -> Train:
        return self.spec.train


@dataclass(frozen=True)
class Computed:
    """What one pass over a step's batch gave. The gradient itself is in the parameters, clipped."""

    batch: list[list[int]]
    """Rows of each sequence of the step, in order."""
    loss: float
    """Mean over the step's answer tokens, in nats; with a teacher that of both parts (teacher_loss.py)."""
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
        named = list(adapter.trainable(task.model))
        self.parameters = [parameter for _, parameter in named]
        self.busy_s: list[float] = []
        """Of each rank, seconds in its own micro-batches of what was computed last."""
        compression = task.settings.compression
        self.wire: Wire | None = None
        """What adds up the ranks' gradients, if there are others, or were: then there may be something left unsent."""
        if not task.ranks.alone or compression.method != "none":
            whole_sums = compression.whole_steps(self.plan.steps)
            self.wire = Wire(named, task.ranks.group, compression, task.ranks.wait, whole_sums)
            if self.wire.remark:
                task.journal.append("notice", text=self.wire.remark)

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
        schedule.seed_step(task.settings.seed, step, task.ranks.place.rank)
        task.model.train()
        with task.spans.of("data"):
            batch = self.plan.batch(step)
            lengths = [task.train.tokens(sequence) for sequence in batch]
            trained = sum(map(task.train.trained, batch))
            dealt = self._dealt(list(range(len(batch))), lengths, budget)
        factor = task.faults.loss_factor(step + 1)

        def learn(piece: list[int]) -> float:
            task.heartbeat.beat("step")
            task.faults.in_step(step + 1)
            with self._fitting("train", step + 1, [lengths[k] for k in piece]):
                with task.spans.of("data"):
                    sequences = [batch[k] for k in piece]
                    rows = self._batch(task.train, sequences)
                task.spans.computes(rows.input_ids.numel())
                with task.spans.of("forward" if isinstance(task.lessons, Attending) else "data"):
                    lesson = task.lessons.of(sequences, rows) if task.lessons else None
                # Normalised by the tokens of the whole step, so that the micro-batch changes memory and nothing else.
                nll = heads.learn(task.model, rows, factor / trained * loss_scale, task.spans.of, lesson)
                self._settle()
                return float(nll) / trained * factor

        found = self._together(dealt, learn)
        if found is None:
            self.drop()
            return None
        with task.spans.of("optimizer"):
            self._complete(loss_scale)
            module_norms = analysis.norms(task.model) if analysis.due(step + 1, self.plan.steps) else {}
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, task.settings.max_grad_norm))
        return Computed(batch, found, norm, trained, sum(lengths), module_norms)

    def _dealt(self, indices: list[int], lengths: Sequence[int], budget: Budget) -> list[list[list[int]]]:
        """The micro-batches of each rank, of all that these sequences make; at least one for each rank, if there are
        so many sequences."""
        world, machine = self.task.ranks.place.world, self.task.machine
        rows = min(machine.micro_batch_rows, -(-len(indices) // world))
        limits = [tokens for tokens in (budget.tokens, machine.micro_batch_tokens) if tokens is not None]
        pieces = micro_batches(indices, lengths, rows, min(limits, default=None))
        padded = [len(piece) * max(lengths[k] for k in piece) for piece in pieces]
        return [[pieces[number] for number in numbers] for numbers in shares(pieces, padded, world)]

    def _together(self, dealt: list[list[list[int]]], compute: Callable[[list[int]], float]) -> float | None:
        """The sum of what is computed of all pieces of all ranks; None when any of them was asked to stop.

        Raises:
            DoesNotFitError: a piece of any rank: the largest that failed. Where the base is shared, only the rank
                whose piece it was hears of it: the others wait for its pass, and it cannot go on with that.
        """
        task, total, failed = self.task, 0.0, (0, 0)
        begun_s = time.monotonic()
        own = dealt[task.ranks.place.rank]
        for number in range(max(map(len, dealt)) if task.shares_base else len(own)):
            if task.ranks.any(task.stop.asked) if task.shares_base else task.stop.asked:
                break
            try:
                if number < len(own):
                    total += compute(own[number])
                else:
                    self._attend(dealt, compute)
            except DoesNotFitError as error:
                if task.shares_base:
                    raise
                failed = error.rows, error.tokens
                break
        told = task.ranks.gather([total, float(task.stop.asked), *failed, time.monotonic() - begun_s])
        self.busy_s = [one[4] for one in told]
        if any(one[1] for one in told):
            return None
        rows, tokens = max(((one[2], one[3]) for one in told), key=lambda found: found[1])
        if rows:
            self.drop()
            raise DoesNotFitError(int(rows), int(tokens))
        return sum(one[0] for one in told)

    def _settle(self) -> None:
        """Where layers travel, a pass waits for other ranks, and may do so for long."""
        if self.task.shares_base:
            self.task.ranks.settle(self.task.device)

    def _attend(self, dealt: list[list[list[int]]], compute: Callable[[list[int]], float]) -> None:
        """A pass over a row that is another's, for others need our shares of the layers; nothing is kept of it."""
        kept = [parameter.grad for parameter in self.parameters]
        self.drop()
        compute(min((piece for pieces in dealt for piece in pieces), key=len)[:1])
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = gradient

    def _complete(self, loss_scale: float) -> None:
        """Take the scale off the gradient, add those of other ranks, and that of what the adapter wants beside a low
        loss."""
        if loss_scale != 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(loss_scale)
        if self.wire:
            self.wire.sum()
        penalty = adapter.penalty(self.task.model)
        if penalty is not None:
            (self.task.settings.adalora.orthogonality * penalty).backward()

    def unsent(self) -> dict[str, Tensor]:
        """What this rank has left unsent so far, and what else it needs to go on adding up exactly."""
        return self.wire.state() if self.wire else {}

    def forget(self) -> None:
        """What the last sum left unsent counts no more: nothing is learned from it."""
        if self.wire:
            self.wire.forget()

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

        def score(rows: list[int]) -> float:
            task.heartbeat.beat("validate")
            with self._fitting("validation", step, [lengths[row] for row in rows]):
                nll = heads.likelihood(task.model, self._batch(task.validation, [[row] for row in rows]))
                self._settle()
                return float(nll)

        with torch.no_grad():
            total = self._together(self._dealt(everything, lengths, budget), score)
        count = task.validation.trained(everything)
        return None if total is None else (total / count, count)

    def _batch(self, data: Rows, sequences: list[list[int]]) -> Sequences:
        return Sequences.of(data, sequences, self.task.device)

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
