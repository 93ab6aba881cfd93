"""One pass over a batch in micro-batches that fit into memory, divided among the ranks.

Each rank computes its own micro-batches. Then all ranks add up their losses, and check whether any rank ran out of
memory or must stop. With a sharded base, every rank must take part in every forward pass. So a rank that has no
micro-batches left runs a pass over one row, and drops the gradient of that pass.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch

from ratchet.data.batches import TokenRows, divide_sequences, split_micro_batches
from ratchet.models import oom
from ratchet.models.chunked_loss import ChunkedLoss
from ratchet.models.loss import SequenceBatch, TeacherTargets
from ratchet.models.preference_loss import STATISTIC_SUMS, PreferenceLoss, name_statistics
from ratchet.training.context import TrainingContext
from ratchet.training.distillation import OnlineTeacherReader
from ratchet.training.distributed import assign_shares
from ratchet.training.microbatch_budget import MicrobatchBudget


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that are computed at once."""

    sequences: list[list[int]]
    padded_tokens: int
    """Number of sequences times the length of the longest sequence."""
    is_own: bool = True
    """False for a micro-batch that is computed only because other ranks need this rank; its loss and gradient do not
    count."""


@dataclass(frozen=True)
class PassResult:
    """Result of a pass over a batch; the same on every rank.

    Exception: if the base is sharded and this rank ran out of memory, the result has only the values of this rank.
    """

    loss: float
    """Sum of the losses of all micro-batches of all ranks, in nats. In training, the sum is divided by
    `BatchPass.loss_count`."""
    is_stopped: bool
    """Whether a rank was asked to stop, so that the pass is incomplete."""
    failed_rows: int
    """Number of sequences in the largest micro-batch that did not fit into memory; 0 if all fitted."""
    failed_tokens: int
    busy_s: list[float]
    """Seconds that each rank spent on its own micro-batches, by rank."""
    correct_tokens: int = 0
    """Number of trained tokens that the model holds for the most likely ones, if they were counted."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """PREFERENCE_STATISTICS of the batch; empty for `sft`."""


class BatchPass:
    """One pass over a batch of sequences, by all ranks."""

    def __init__(  # noqa: PLR0913 (what is computed, for which step, and how much at once)
        self,
        context: TrainingContext,
        phase: Literal["train", "validation"],
        step: int,
        sequences: list[list[int]],
        budget: MicrobatchBudget,
        parameters: Sequence[torch.nn.Parameter],
        *,
        rows: TokenRows | None = None,
    ) -> None:
        """`rows` has the rows of the sequences if they are not those of the phase; nothing is learned from them."""
        self._context, self._phase, self._step, self._parameters = context, phase, step, parameters
        self._rows: TokenRows = context.train_rows if phase == "train" else context.validation_rows
        if rows is not None:
            self._rows = rows
        self._normalizes = phase == "train" and rows is None
        answers = context.settings.rows_per_example
        self._divides_pairs = answers == 2 and (phase == "validation" or context.batch_plan.batching != "packed")
        """Whether the two answers of a pair are rows of the batch; in a pack, they are parts of one row."""
        self.sequences = sequences
        self.input_tokens = sum(map(self._rows.count_tokens, sequences))
        self.trained_tokens = sum(map(self._rows.count_trained, sequences))
        self.loss_count = self.trained_tokens
        """Number that the sum of the losses is divided by: trained tokens, pairs, or labelled answers."""
        if context.settings.objective != "sft":
            self.loss_count = sum(map(len, sequences)) // answers
        lengths = [self._count_padded_tokens(sequence) for sequence in sequences]
        self.loss_factor = context.faults.loss_factor(step) if self._normalizes else 1.0
        """Factor of the loss; 1 unless a fault is injected."""
        # Each rank gets at least one micro-batch if there are enough sequences.
        world_size, machine = context.ranks.environment.world_size, context.machine
        size = min(machine.micro_batch_size, -(-len(lengths) // world_size))
        limits = [tokens for tokens in (budget.tokens, machine.micro_batch_tokens) if tokens is not None]
        pieces = split_micro_batches(list(range(len(lengths))), lengths, size, min(limits, default=None))
        micro_batches = [
            MicroBatch([sequences[k] for k in piece], len(piece) * max(lengths[k] for k in piece)) for piece in pieces
        ]
        shares = assign_shares([micro_batch.padded_tokens for micro_batch in micro_batches], world_size)
        self._assigned = [[micro_batches[number] for number in numbers] for numbers in shares]
        self._loss, self._correct = 0.0, 0
        self._statistics = torch.zeros(STATISTIC_SUMS, dtype=torch.float64)
        self._failed: MicroBatch | None = None
        self._started_s = time.monotonic()

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches that this rank computes; end early at a request to stop or when memory runs out."""
        context = self._context
        own = self._assigned[context.ranks.environment.rank]
        if not context.is_base_sharded:
            for micro_batch in own:
                if context.shutdown.is_requested or self._failed:
                    return
                self._beat()
                yield micro_batch
            return
        smallest = min(chain.from_iterable(self._assigned), key=lambda micro_batch: len(micro_batch.sequences))
        for number in range(max(map(len, self._assigned))):
            if self._failed or context.ranks.any(context.shutdown.is_requested):
                return
            self._beat()
            if number < len(own):
                yield own[number]
                continue
            gradients = [parameter.grad for parameter in self._parameters]
            self._drop_gradients()
            sequence = smallest.sequences[:1]
            yield MicroBatch(sequence, self._count_padded_tokens(sequence[0]), is_own=False)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

    @contextmanager
    def catch_out_of_memory(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Wrap the computation of a micro-batch. When memory runs out, the pass ends, and all its gradients are
        dropped."""
        try:
            yield
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
            self._failed = micro_batch
            self._drop_gradients()

    def load(self, micro_batch: MicroBatch) -> SequenceBatch:
        """Return the micro-batch as tensors on the device."""
        self._context.faults.memory(self._phase, self._step, micro_batch.padded_tokens)
        sequences = micro_batch.sequences
        if self._divides_pairs:
            sequences = divide_sequences(sequences)
        with self._context.spans.measure("data"):
            batch = SequenceBatch.from_sequences(self._rows, sequences, self._context.device)
        self._context.spans.count_micro_batch(batch.input_ids.numel())
        return batch

    def teacher_targets(self, micro_batch: MicroBatch, batch: SequenceBatch) -> TeacherTargets | None:
        """Return the distillation targets of a micro-batch; None without distillation."""
        teacher = self._context.teacher
        if teacher is None:
            return None
        with self._context.spans.measure("forward" if isinstance(teacher, OnlineTeacherReader) else "data"):
            return teacher.get_targets(micro_batch.sequences, batch)

    def add_loss(self, micro_batch: MicroBatch, loss: ChunkedLoss) -> None:
        """Wait until the device has computed the loss of a micro-batch, and add the loss to the sum."""
        if self._context.is_base_sharded:  # send heartbeats, because the device may wait long for other ranks
            self._context.ranks.wait_for_device(self._context.device)
        self.add_value(micro_batch, loss.item())
        if isinstance(loss, PreferenceLoss) and micro_batch.is_own:
            self._statistics += loss.statistics.cpu()
        self._correct += int(loss.correct) if micro_batch.is_own else 0

    def add_value(self, micro_batch: MicroBatch, value: float) -> None:
        """Add the loss of a micro-batch, in nats, to the sum."""
        if micro_batch.is_own:
            self._loss += value / self.loss_count * self.loss_factor if self._normalizes else value

    def gather(self) -> PassResult:
        """Combine the results of all ranks."""
        context, failed = self._context, self._failed
        rows, tokens = (0, 0) if failed is None else (len(failed.sequences), failed.padded_tokens)
        if failed and context.is_base_sharded:  # the other ranks wait inside the failed pass and cannot answer
            return PassResult(self._loss, False, rows, tokens, [])
        values = [self._loss, float(context.shutdown.is_requested), rows, tokens, time.monotonic() - self._started_s]
        values += [self._correct, *self._statistics.tolist()]
        losses, stops, failed_rows, failed_tokens, busy_s, correct, *sums = zip(
            *context.ranks.gather(values), strict=True
        )
        largest = max(range(len(losses)), key=lambda rank: failed_tokens[rank])
        return PassResult(
            loss=sum(losses),
            is_stopped=any(stops),
            failed_rows=int(failed_rows[largest]),
            failed_tokens=int(failed_tokens[largest]),
            busy_s=list(busy_s),
            correct_tokens=int(sum(correct)),
            statistics=name_statistics(list(map(sum, sums)), self.loss_count),
        )

    def _count_padded_tokens(self, sequence: Sequence[int]) -> int:
        """Return the tokens of a sequence; with padding, if the answers of a pair are rows of their own."""
        if not self._divides_pairs:
            return self._rows.count_tokens(sequence)
        return len(sequence) * max(self._rows.count_tokens([row]) for row in sequence)

    def _beat(self) -> None:
        self._context.heartbeat.beat("step" if self._phase == "train" else "validate")
        if self._phase == "train":
            self._context.faults.in_step(self._step)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
