"""Loss and gradient of one optimizer step, and the loss of all validation rows, in micro-batches that fit."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ratchet.config.schema import Machine
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows, split_micro_batches
from ratchet.errors import DivergenceError, MemoryExhaustedError, NonFiniteStateError, PeersLostError
from ratchet.models import activation_checkpointing, adapters, chunked_loss, oom
from ratchet.models.gradient_compression.reducer import GradientReducer
from ratchet.models.loading import Model
from ratchet.models.loss import SequenceBatch
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.fault_injection.injection import FaultInjector, Phase
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, RunDecisions
from ratchet.storage import digests
from ratchet.training import analysis, anomaly_detection, checkpoint, optimizer
from ratchet.training.anomaly_detection import GradientSpike, StepRepeat, StepRollback, StepSkip, TrainingHalt, Verdict
from ratchet.training.distillation import TeacherShardReader
from ratchet.training.distributed import RankEnvironment, RankGroup, StragglerMonitor, assign_shares
from ratchet.training.memory_monitor import MemoryMonitor
from ratchet.training.microbatch_budget import MicrobatchBudget
from ratchet.training.online_distillation import OnlineTeacherReader
from ratchet.training.step_timer import StepSpans
from ratchet.training.stopping import GracefulShutdown
from ratchet.training.train_state import TrainSnapshot, TrainState


@dataclass(frozen=True)
class TrainingContext:
    """What to train, on what, how, and whom to tell."""

    spec: RunSpec
    machine: Machine
    model: Model
    device: torch.device
    train: TokenRows
    validation: TokenRows
    paths: RunPaths
    journal: Journal
    heartbeat: Heartbeat
    stop: GracefulShutdown
    made_by: dict[str, str]
    """Versions and device, recorded with every checkpoint: with others, results are not bit-exact."""
    plan: BatchPlan
    monitor: MemoryMonitor
    advise: Callable[[int], str]
    """What to change when a single row of so many tokens does not fit into memory."""
    first_tokens: int | None = None
    """Padded tokens of the largest micro-batch to begin with; None: as many as `machine.micro_batch_rows` rows have."""
    loss_scale: float = 1.0
    """That a training begins with (scaling.py)."""
    faults: FaultInjector = field(default_factory=FaultInjector)
    spans: StepSpans = field(default_factory=StepSpans)
    """Measured where somebody profiles."""
    ranks: RankGroup = field(
        default_factory=lambda: RankGroup(RankEnvironment(), torch.device("cpu"), lambda: None, 0.0)
    )
    """Who else computes the same steps."""
    shares_base: bool = False
    """Whether layers of the base travel (sharding.py): then every pass is one of all ranks."""
    lessons: TeacherShardReader | OnlineTeacherReader | None = None
    """What a teacher has said about the training rows, or says now, if there is one."""

    @property
    def settings(self) -> Train:
        return self.spec.train


@dataclass(frozen=True)
class StepOutput:
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


class MicrobatchMemoryError(Exception):
    """A micro-batch for which memory did not suffice; nothing of it is left."""

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__(rows, tokens)
        self.rows = rows
        self.tokens = tokens
        """Padded: rows x longest."""


class GradientAccumulator:
    """Computes; changes neither weights nor optimizer. Every micro-batch is a sign of life."""

    def __init__(self, task: TrainingContext) -> None:
        self.task = task
        self.plan = task.plan
        named = list(adapters.trainable_parameters(task.model))
        self.parameters = [parameter for _, parameter in named]
        self.busy_s: list[float] = []
        """Of each rank, seconds in its own micro-batches of what was computed last."""
        compression = task.settings.compression
        self.wire: GradientReducer | None = None
        """What adds up the ranks' gradients, if there are others, or were: then there may be something left unsent."""
        if not task.ranks.alone or compression.method != "none":
            whole_sums = compression.whole_steps(self.plan.steps)
            self.wire = GradientReducer(named, task.ranks.group, compression, task.ranks.wait, whole_sums)
            if self.wire.remark:
                task.journal.append("notice", text=self.wire.remark)

    def step(self, step: int, budget: MicrobatchBudget, loss_scale: float = 1.0) -> StepOutput | None:
        """Gradient of step `step` (from 0) over its whole batch; None when asked to stop before it was complete.

        Args:
            step: number of the step.
            budget: of micro-batches.
            loss_scale: factor of the loss in the backward pass; the gradient is divided by it again.

        Raises:
            MicrobatchMemoryError: the same step may be computed again, with a smaller budget.
        """
        task = self.task
        self.drop()  # of a computation of the same step that is not learned from
        optimizer.seed_step(task.settings.seed, step, task.ranks.place.rank)
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
                with task.spans.of("forward" if isinstance(task.lessons, OnlineTeacherReader) else "data"):
                    lesson = task.lessons.of(sequences, rows) if task.lessons else None
                # Normalised by the tokens of the whole step, so that the micro-batch changes memory and nothing else.
                nll = chunked_loss.forward_backward(
                    task.model, rows, factor / trained * loss_scale, task.spans.of, lesson
                )
                self._settle()
                return float(nll) / trained * factor

        found = self._together(dealt, learn)
        if found is None:
            self.drop()
            return None
        with task.spans.of("optimizer"):
            self._complete(loss_scale)
            module_norms = (
                analysis.compute_module_norms(task.model) if analysis.is_due(step + 1, self.plan.steps) else {}
            )
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, task.settings.max_grad_norm))
        return StepOutput(batch, found, norm, trained, sum(lengths), module_norms)

    def _dealt(self, indices: list[int], lengths: Sequence[int], budget: MicrobatchBudget) -> list[list[list[int]]]:
        """The micro-batches of each rank, of all that these sequences make; at least one for each rank, if there are
        so many sequences."""
        world, machine = self.task.ranks.place.world, self.task.machine
        rows = min(machine.micro_batch_rows, -(-len(indices) // world))
        limits = [tokens for tokens in (budget.tokens, machine.micro_batch_tokens) if tokens is not None]
        pieces = split_micro_batches(indices, lengths, rows, min(limits, default=None))
        padded = [len(piece) * max(lengths[k] for k in piece) for piece in pieces]
        return [[pieces[number] for number in numbers] for numbers in assign_shares(pieces, padded, world)]

    def _together(self, dealt: list[list[list[int]]], compute: Callable[[list[int]], float]) -> float | None:
        """The sum of what is computed of all pieces of all ranks; None when any of them was asked to stop.

        Raises:
            MicrobatchMemoryError: a piece of any rank: the largest that failed. Where the base is shared, only the rank
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
            except MicrobatchMemoryError as error:
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
            raise MicrobatchMemoryError(int(rows), int(tokens))
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
        penalty = adapters.orthogonality_penalty(self.task.model)
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

    def validation(self, step: int, budget: MicrobatchBudget) -> tuple[float, int] | None:
        """Mean loss per answer token of all validation rows, in nats, and their number; None when asked to stop.

        Raises:
            MicrobatchMemoryError: all of it may be computed again, with a smaller budget.
        """
        task = self.task
        task.model.eval()
        lengths = task.validation.lengths.tolist()
        everything = list(range(len(task.validation)))

        def score(rows: list[int]) -> float:
            task.heartbeat.beat("validate")
            with self._fitting("validation", step, [lengths[row] for row in rows]):
                nll = chunked_loss.compute_nll(task.model, self._batch(task.validation, [[row] for row in rows]))
                self._settle()
                return float(nll)

        with torch.no_grad():
            total = self._together(self._dealt(everything, lengths, budget), score)
        count = task.validation.trained(everything)
        return None if total is None else (total / count, count)

    def _batch(self, data: TokenRows, sequences: list[list[int]]) -> SequenceBatch:
        return SequenceBatch.of(data, sequences, self.task.device)

    @contextmanager
    def _fitting(self, phase: Phase, step: int, lengths: list[int]) -> Iterator[None]:
        """Turns every kind of exhausted memory into MicrobatchMemoryError, with the gradient so far forgotten."""
        tokens = len(lengths) * max(lengths)
        try:
            self.task.faults.memory(phase, step, tokens)
            yield
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
            self.drop()
            raise MicrobatchMemoryError(len(lengths), tokens) from None


# The scale of the loss when computing in float16, so that small gradients do not vanish in its narrow range.
#
# Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2): a gradient that overflows
# halves the scale, a long time without doubles it. Unlike there, an overflow costs no step: the same one is computed
# again. Powers of two scale floating-point numbers exactly, so the scale itself changes no result.

FIRST = 2.0**16
LARGEST = 2.0**24
GROW_AFTER_STEPS = 2000


def initial_loss_scale(compute_dtype: torch.dtype) -> float:
    """The scale to begin with; 1 where none is needed: bfloat16 and float32 reach as far as gradients do."""
    return FIRST if compute_dtype == torch.float16 else 1.0


def is_overflow(state: TrainState, loss: float, norm: float) -> bool:
    """Whether a smaller scale may mend this step: the loss is finite, its gradient is not."""
    return state.loss_scale > 1 and math.isfinite(loss) and not math.isfinite(norm)


def reduce_loss_scale(state: TrainState) -> TrainState:
    """The state in which the same step is computed again."""
    return replace(state, loss_scale=state.loss_scale / 2, scale_steps=0)


def advance_loss_scale(state: TrainState) -> TrainState:
    """The state after a step without overflow."""
    if state.loss_scale == 1:
        return state
    if state.scale_steps + 1 < GROW_AFTER_STEPS:
        return replace(state, scale_steps=state.scale_steps + 1)
    return replace(state, loss_scale=min(LARGEST, 2 * state.loss_scale), scale_steps=0)


# What steps change (weights, optimizer, state), and what is done when a step does not go as it should.
#
# Every decision that depends on the machine (memory) is in the journal before it has effect, and one that is found
# there
# is taken again: an attempt that repeats steps of an earlier one gets the same bits.

FIRST_STEP: tuple[tuple[Phase, int], ...] = (("train", 1), ("validation", 0))
"""Where in the journal the budgets stand that a run begins with."""
NEVER = 10**9
"""Steps: what the forecast allows is not tried larger."""


class StepExecutor:
    """One training's weights, optimizer and state, always those of the same step for whoever holds `settled`."""

    def __init__(self, task: TrainingContext) -> None:
        self.task = task
        self.plan = task.plan
        self.gradients = GradientAccumulator(task)
        self.optimizer = optimizer.build(task.model, task.settings, task.device)
        self.state = TrainState(loss_scale=task.loss_scale)
        self.settled = threading.Lock()
        """Held while weights, optimizer and state change."""
        self.decided = RunDecisions()
        self._pace = StragglerMonitor(task.journal)
        self._good = self._taken() if task.settings.guards.roll_back else None
        """What a rule may go back to; None when none does."""

    def restore(self, saved: TrainSnapshot, good: TrainSnapshot) -> None:
        """Go on from a checkpoint; `good`: that of the step which it may go back to."""
        checkpoint.restore(saved, self.task.model, self.optimizer)
        self._unsent(saved)
        self.state = saved.state
        if self._good is not None and good.state.step:
            self._good = good

    def _taken(self) -> TrainSnapshot:
        taken = checkpoint.take_snapshot(self.state, self.task.model, self.optimizer)
        if not self.leaves_unsent:
            return taken
        return replace(taken, wire=self.task.ranks.gather_tensors(self.gradients.unsent()))

    def _unsent(self, saved: TrainSnapshot) -> None:
        """What ranks had not sent when it was saved is to be sent yet."""
        if self.gradients.wire:
            self.gradients.wire.restore(saved.wire)

    @property
    def leaves_unsent(self) -> bool:
        """Whether ranks know something that the others do not: then a snapshot takes all of them."""
        return not self.task.ranks.alone and self.task.settings.compression.method != "none"

    def snapshot(self) -> tuple[TrainSnapshot, float]:
        """Copies of weights, optimizer and state, and the seconds that took. May become the one to go back to."""
        started = time.monotonic()
        if self.good_is_due():
            self.state = replace(self.state, good_step=self.state.step)
        taken = self._taken()
        if taken.state.good_step == taken.state.step:
            self._good = taken
        return taken, time.monotonic() - started

    def good_is_due(self) -> bool:
        """Whether this step's weights are those that a rule may go back to from now on."""
        rules, step = self.task.settings.guards, self.state.step
        return (
            rules.roll_back and step > 0 and step % rules.snapshot_every_steps == 0 and step not in self.state.bad_steps
        )

    # -------------------------------------------------------------------------------------------------- validation

    def validate(self) -> bool | None:
        """Measure the loss of the validation rows; whether it is the best so far, or None when asked to stop."""
        step, started = self.state.step, time.monotonic()
        self._take_decided("validation", step)
        measured = self._measured(step)
        if measured is None:
            return None
        loss, tokens = measured
        if not math.isfinite(loss):
            raise DivergenceError(
                f"validation loss is {loss} at step {step}: the model gives no numbers for some validation rows; look "
                "at the base model (`ratchet evaluate` gives its loss) and at train.compute_dtype (float16 overflows)"
            )
        best = self.state.best_loss
        improved = best is None or loss < best - self.task.settings.early_stopping.threshold
        self.state = replace(
            self.state,
            validation_loss={**self.state.validation_loss, step: loss},
            best_step=step if improved else self.state.best_step,
            bad_validations=0 if improved else self.state.bad_validations + 1,
            validation_budget=self.state.validation_budget.after_good_step(),
        )
        self.task.journal.append(
            "validation", step=step, loss=loss, improved=improved, tokens=tokens,
            seconds=round(time.monotonic() - started, 4),
        )  # fmt: skip
        return improved

    def _measured(self, step: int) -> tuple[float, int] | None:
        again = False
        while True:
            try:
                return self.gradients.validation(step, self.state.validation_budget)
            except MicrobatchMemoryError as error:
                failed = error.rows, error.tokens
            self._shrink("validation", step, failed, again)
            again = True

    # ------------------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """One optimizer step over one global batch, or the decision to do without it; nothing when asked to stop.

        Raises:
            DivergenceError: more bad steps than `train.guards` puts up with.
            NonFiniteStateError: a weight is not finite although no step made it so.
            MemoryExhaustedError: one row does not fit.
        """
        started, number = time.monotonic(), self.state.step + 1
        if decided := self.decided.skipped.get(number):
            self._leave_out(decided["action"], decided["reason"])
            return
        self._take_decided("train", number)
        rate = optimizer.compute_learning_rate(number - 1, self.plan.steps, self.task.settings) * self.state.rate_scale
        judged = self._judged(rate)
        if judged is None:
            return
        computed, verdict = judged
        if isinstance(verdict, StepSkip | StepRollback | TrainingHalt):
            self._do_without(verdict)
            return
        if isinstance(verdict, GradientSpike):
            self.task.journal.append(
                "spike", step=number, grad_norm=computed.norm, rows=self._rows(), **asdict(verdict)
            )
        self._learn(computed, rate, started)

    def _judged(self, rate: float) -> tuple[StepOutput, Verdict] | None:
        """The step's gradient, and what is to be done about it; None when asked to stop."""
        rules = self.task.settings.guards
        computed = self._computed()
        if computed is None:
            return None
        verdict = anomaly_detection.judge_step(rules, self.state, computed.loss, computed.norm, rate, repeated=False)
        if not isinstance(verdict, StepRepeat):
            return computed, verdict
        self.gradients.forget()
        self.task.journal.append("repeated", step=self.state.step + 1, reason=verdict.reason)
        computed = self._computed()
        if computed is None:
            return None
        return computed, anomaly_detection.judge_step(
            rules, self.state, computed.loss, computed.norm, rate, repeated=True
        )

    def _computed(self) -> StepOutput | None:
        """Loss and gradient of the step, in micro-batches made smaller until they fit; None when asked to stop."""
        again = False
        while True:
            try:
                computed = self.gradients.step(self.state.step, self.state.budget, self.state.loss_scale)
            except MicrobatchMemoryError as error:
                failed = error.rows, error.tokens
            else:
                if computed is None or not is_overflow(self.state, computed.loss, computed.norm):
                    return computed
                self.gradients.forget()
                self.state = reduce_loss_scale(self.state)
                self.task.journal.append("scale", step=self.state.step + 1, loss_scale=self.state.loss_scale)
                continue
            # Out of the `except`, where the traceback would keep the failed computation's memory alive.
            self._shrink("train", self.state.step + 1, failed, again)
            again = True

    def _learn(self, computed: StepOutput, rate: float, started: float) -> None:
        """The optimizer step: the one place where weights change, and state with them."""
        task, number = self.task, self.state.step + 1
        with self.settled:
            with task.spans.of("optimizer"):
                for group in self.optimizer.param_groups:
                    group["lr"] = rate * group["rate_ratio"]
                self.optimizer.step()
                adapters.update_rank_allocation(task.model, number, self.plan.steps)
                self.optimizer.zero_grad(set_to_none=True)
            budget = self.state.budget.after_good_step()
            grown = budget.grown and budget.good_steps == 0
            state = advance_loss_scale(
                anomaly_detection.record_good_step(self.state, task.settings.guards, computed.norm)
            )
            self.state = replace(
                analysis.record_norms(state, number, computed.module_norms),
                step=number,
                train_loss=computed.loss,
                trained_tokens=state.trained_tokens + computed.trained_tokens,
                input_tokens=state.input_tokens + computed.input_tokens,
                budget=budget,
            )
            step_s = round(time.monotonic() - started, 5)
            task.journal.append(
                "step", step=number, loss=computed.loss, learning_rate=rate, grad_norm=computed.norm,
                trained_tokens=computed.trained_tokens, input_tokens=computed.input_tokens,
                batch=digests.hash_json(computed.batch)[: digests.SHORT], step_s=step_s,
            )  # fmt: skip
        self._pace.add(number, step_s, self.gradients.busy_s)
        if grown:
            self._tell_budget("train", number + 1, "grow", 0)
        if task.faults.poisons(number):
            with torch.no_grad():
                self.gradients.parameters[0].view(-1)[0] = float("nan")

    def _do_without(self, verdict: StepSkip | StepRollback | TrainingHalt) -> None:
        if not checkpoint.is_finite(dict(adapters.trainable_parameters(self.task.model))):
            raise NonFiniteStateError(
                f"weights are not finite before step {self.state.step + 1}, though no step with such a loss or "
                "gradient was learned from: hardware, or a train.learning_rate beyond all bounds"
            )
        if isinstance(verdict, TrainingHalt):
            raise DivergenceError(f"{verdict.diagnosis}; rows of step {self.state.step + 1}: {self._rows()}")
        self._leave_out("roll_back" if isinstance(verdict, StepRollback) else "skip", verdict.reason)

    def _leave_out(self, action: Literal["skip", "roll_back"], reason: str) -> None:
        """Count a step as done without learning from it; `roll_back`: with the weights of the last good snapshot."""
        self.gradients.drop()
        self.gradients.forget()
        rows, good = self._rows(), self._good if action == "roll_back" else None
        with self.settled:
            if good is not None:
                checkpoint.restore(good, self.task.model, self.optimizer)
                self._unsent(good)
            self.state = anomaly_detection.record_bad_step(
                self.state, self.task.settings.guards, good.state if good else None
            )
            self.task.journal.append(
                "skipped", step=self.state.step, action=action, reason=reason, rows=rows,
                to_step=good.state.step if good else None, rate_scale=self.state.rate_scale,
            )  # fmt: skip

    def _rows(self) -> list[int]:
        """Rows of the step that is being done."""
        return [row for sequence in self.plan.batch(self.state.step) for row in sequence]

    # ------------------------------------------------------------------------------------------------------ memory

    def _shrink(self, phase: Phase, step: int, failed: tuple[int, int], again: bool) -> None:
        rows, tokens = failed
        oom.release_memory()
        if rows == 1 and not self.task.shares_base and self._recompute(phase, step, tokens):
            return
        if rows == 1:
            raise MemoryExhaustedError(
                f"one row of {tokens} tokens does not fit into memory in {phase} (step {step}).\n"
                f"{self.task.advise(tokens)}"
            )
        self._set_budget(phase, self._budget(phase).shrunk(tokens, again))
        shares = self.task.shares_base
        self._tell_budget(phase, step, "shrink", tokens, self.task.ranks.place.rank if shares else None)
        if shares:  # the others are in the middle of a pass that we cannot end with them
            raise PeersLostError(
                f"{rows} rows ({tokens} tokens) did not fit into memory at step {step}; the base is shared, so all "
                "ranks begin this step again, with smaller micro-batches"
            )

    def _recompute(self, phase: Phase, step: int, tokens: int) -> bool:
        """Compute activations a second time from now on instead of keeping them, if that is left to us to decide."""
        model = self.task.model
        if (
            phase != "train"
            or self.task.machine.activation_checkpointing != "auto"
            or activation_checkpointing.is_enabled(model)
        ):
            return False
        activation_checkpointing.enable(model)
        text = f"one row of {tokens} tokens does not fit at step {step}: from here on activations are recomputed"
        self.task.journal.append("notice", text=text)
        return True

    def _budget(self, phase: Phase) -> MicrobatchBudget:
        return self.state.budget if phase == "train" else self.state.validation_budget

    def _set_budget(self, phase: Phase, budget: MicrobatchBudget) -> None:
        if phase == "train":
            self.state = replace(self.state, budget=budget)
        else:
            self.state = replace(self.state, validation_budget=budget)

    def _tell_budget(
        self, phase: Phase, step: int, action: Literal["shrink", "grow"], failed_tokens: int, rank: int | None = None
    ) -> None:
        """`rank`: who knows it, where no other does."""
        self.task.journal.append(
            "budget", step=step, phase=phase, action=action, failed_tokens=failed_tokens,
            budget=asdict(self._budget(phase)), **({} if rank is None else {"rank": rank}),
        )  # fmt: skip

    def begin(self, tokens: int | None) -> None:
        """Keep micro-batches within so many padded tokens (None: no limit) from the first step on.

        What an earlier attempt began with holds again.
        """
        for phase, step in FIRST_STEP:
            self._take_decided(phase, step)
            if tokens is not None and (phase, step) not in self.decided.budgets:
                self._set_budget(phase, MicrobatchBudget(tokens, self._largest(), wait_steps=NEVER))
                self._tell_budget(phase, step, "shrink", self._largest())

    def after_kill_for_memory(self) -> None:
        """Halve micro-batches: the system killed the attempt before for the memory that it took."""
        now: tuple[tuple[Phase, int], ...] = (("train", self.state.step + 1), ("validation", self.state.step))
        for phase, step in now:
            before = self._budget(phase)
            failed = min(before.tokens or self._largest(), self._largest())
            if failed > int(self.task.train.lengths.max()):  # a single row cannot be divided
                self._set_budget(phase, before.shrunk(failed, repeated=True))
                self._tell_budget(phase, step, "shrink", failed)
                self.decided.budgets.pop((phase, step), None)

    def _largest(self) -> int:
        """Padded tokens of the largest micro-batch that `machine.micro_batch_rows` allows."""
        settings = self.task.settings
        longest = settings.pack_tokens if settings.batching == "packed" else int(self.task.train.lengths.max())
        machine = self.task.machine
        most = machine.micro_batch_rows * longest
        return most if machine.micro_batch_tokens is None else min(most, max(longest, machine.micro_batch_tokens))

    def _take_decided(self, phase: Phase, step: int) -> None:
        """What an earlier attempt found out about memory at this step holds again: sums are rounded the same way."""
        if decided := self.decided.budgets.get((phase, step)):
            self._set_budget(phase, MicrobatchBudget(**decided["budget"]))
