"""One optimizer step, the validation pass, and the decisions of both when something goes wrong.

Every decision that depends on the machine (memory) is in the journal before it takes effect. An attempt that repeats
steps of an earlier attempt reads the earlier decisions and applies them, so it gets the same bits.
"""

import math
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Literal

import torch
from torch.nn.utils import clip_grad_norm_

from ratchet.data.batches import list_rows
from ratchet.errors import DivergenceError, MemoryExhaustedError, NonFiniteStateError, PeersLostError
from ratchet.models import adapters, oom
from ratchet.models.chunked_loss import ChunkedLoss
from ratchet.models.gradient_compression import GradientReducer
from ratchet.models.loss import SequenceBatch, TeacherTargets
from ratchet.models.preference_loss import LogRatios, Preference, PreferenceLoss
from ratchet.runs.fault_injection.injection import Phase
from ratchet.runs.journal import RunDecisions
from ratchet.storage import digests
from ratchet.training import analysis, checkpoint, optimizer
from ratchet.training.anomaly_detection import (
    MAX_MODULES,
    StepVerdict,
    judge_step,
    record_bad_step,
    record_good_step,
)
from ratchet.training.context import TrainingContext
from ratchet.training.distributed import StragglerMonitor
from ratchet.training.early_stopping import has_improved
from ratchet.training.micro_batches import BatchPass, PassResult
from ratchet.training.microbatch_budget import MicrobatchBudget
from ratchet.training.non_finite import NonFiniteTracer, describe_origin
from ratchet.training.train_state import TrainSnapshot, TrainState

INITIAL_BUDGET_STEPS: tuple[tuple[Phase, int], ...] = (("train", 1), ("validation", 0))
"""Phase and step of the journal events that contain the first budgets of a run."""
NEVER_GROW = 10**9
"""Value of `wait_steps` for a budget that the memory forecast has set: such a budget never grows."""


class StepExecutor:
    """Executes the steps of one training, and owns its weights, optimizer and state.

    A thread that has `state_lock` sees weights, optimizer and state of the same step.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.context = context
        self.plan = context.batch_plan
        named_parameters = list(adapters.trainable_parameters(context.model))
        self.parameters = [parameter for _, parameter in named_parameters]
        self.optimizer = optimizer.build(context.model, context.settings, context.device)
        self.state = TrainState(loss_scale=context.initial_loss_scale)
        self.state_lock = threading.Lock()
        self.recorded = RunDecisions()
        # Before a checkpoint is restored, because the reference is the model before its first step.
        self._preference = Preference.from_settings(context.settings, context.model, context.train_rows)
        self._straggler_monitor = StragglerMonitor(context.journal)
        self._reducer: GradientReducer | None = None
        """Sums gradients over ranks. A single rank also has a reducer if gradients are compressed, because earlier
        attempts with more ranks may have left residuals."""
        compression = context.settings.gradient_compression
        if not context.ranks.is_single or compression.method != "none":
            warmup_steps = compression.uncompressed_steps(self.plan.steps)
            self._reducer = GradientReducer(
                named_parameters, context.ranks.group, compression, context.ranks.wait, warmup_steps
            )
            if self._reducer.warning:
                context.journal.append("notice", text=self._reducer.warning)
        self._rollback_snapshot = self._take_snapshot() if context.settings.guards.uses_roll_back else None
        """Snapshot that the guards may roll back to; None if no rule rolls back."""

    # One step, from the batch to the weights.

    def step(self) -> None:
        """Do one optimizer step over one global batch, or skip it; do nothing if a stop is requested.

        Raises:
            DivergenceError: there are more bad steps than `train.guards.max_bad_steps`.
            NonFiniteStateError: a weight is not finite, although every applied step was finite.
            MemoryExhaustedError: a single row does not fit into memory.
            PeersLostError: the base is sharded and this rank ran out of memory in the middle of a pass.
        """
        context, model, started_s, number = self.context, self.context.model, time.monotonic(), self.state.step + 1
        if recorded := self.recorded.skipped_steps.get(number):
            self._skip_step(recorded["action"], recorded["reason"])
            return
        self._apply_recorded_budget("train", number)
        learning_rate = optimizer.compute_learning_rate(self.state.step, self.plan.steps, context.settings)
        learning_rate *= self.state.learning_rate_scale
        is_repeated = has_shrunk = False
        # The passes of a group are computed by another thread, on another copy of the base.
        tracer = NonFiniteTracer(model) if context.group is None else None
        while True:  # repeat after out of memory, an overflow of the loss scale, or a loss or norm that is not finite
            self.optimizer.zero_grad(set_to_none=True)
            with tracer.watch() if tracer is not None and is_repeated else nullcontext():
                batch_pass, result = self._compute_pass(number)
            if result.is_stopped:
                self.optimizer.zero_grad(set_to_none=True)
                return
            if result.failed_rows:
                self._shrink_micro_batches("train", number, result, has_shrunk)
                has_shrunk = True
                continue
            with context.spans.measure("optimizer"):
                self._reduce_gradients()
                is_analysed = analysis.is_due(number, self.plan.steps)
                all_norms = analysis.compute_module_norms(model) if is_analysed or is_repeated else {}
                module_norms = all_norms if is_analysed else {}
                grad_norm = float(clip_grad_norm_(self.parameters, context.settings.max_grad_norm))
            if optimizer.is_overflow(self.state, result.loss, grad_norm):
                self._discard_residuals()
                self.state = optimizer.reduce_loss_scale(self.state)
                context.journal.append("loss_scale", step=number, loss_scale=self.state.loss_scale)
                continue
            verdict = judge_step(
                context.settings.guards, self.state, result.loss, grad_norm, learning_rate, repeated=is_repeated,
                origin=self._describe_origin(tracer, all_norms) if is_repeated else "",
            )  # fmt: skip
            if verdict.action != "repeat":
                break
            self._discard_residuals()
            context.journal.append("step_repeated", step=number, reason=verdict.reason)
            is_repeated, has_shrunk = True, False
        if verdict.action not in ("apply", "report"):
            self._handle_bad_step(verdict, grad_norm)
            return
        if verdict.action == "report":
            self._report_step(verdict, grad_norm)
        with self.state_lock:
            with context.spans.measure("optimizer"):
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate * group["loraplus_lr_ratio"]
                self.optimizer.step()
                adapters.update_rank_allocation(model, number, self.plan.steps)
                self.optimizer.zero_grad(set_to_none=True)
            self._record_step(batch_pass, result, grad_norm, module_norms, learning_rate, started_s)

    def _compute_pass(self, number: int) -> tuple[BatchPass, PassResult]:
        """Add the gradients of this rank's micro-batches of a step (from 1) to the parameters' gradients; return the
        pass with the result of all ranks."""
        context = self.context
        seed = optimizer.step_seed(context.settings.seed, number - 1, context.ranks.environment.rank)
        if context.group is None:
            torch.manual_seed(seed)
        else:
            context.group.seed(seed)
        with context.spans.measure("data"):
            sequences = self.plan.batch(number - 1)
        divergence, incomplete = self._estimate_divergence("train", number, sequences)
        if incomplete is not None:
            return incomplete
        context.model.train()
        with context.spans.measure("data"):
            batch_pass = BatchPass(context, "train", number, sequences, self.state.budget, self.parameters)
        for micro_batch in batch_pass.micro_batches():
            with batch_pass.catch_out_of_memory(micro_batch):
                batch = batch_pass.load(micro_batch)
                # The count is that of the whole step, so the size of micro-batches changes nothing else.
                scale = batch_pass.loss_factor / batch_pass.loss_count * self.state.loss_scale
                targets = batch_pass.teacher_targets(micro_batch, batch)
                if context.group is not None:
                    batch_pass.add_value(micro_batch, context.group.forward_backward(batch, scale, targets))
                    continue
                loss = self._compute_loss(batch, scale, targets, divergence=divergence)
                loss.backward()
                batch_pass.add_loss(micro_batch, loss)
        return batch_pass, batch_pass.gather()

    def _estimate_divergence(
        self, phase: Literal["train", "validation"], step: int, sequences: list[list[int]]
    ) -> tuple[float, tuple[BatchPass, PassResult] | None]:
        """Estimate the divergence in the loss of `kto` (preference_loss.py) on all rows of a batch, by all ranks.

        Return it in nats, 0 for other objectives; and, if memory ran out or a stop is requested, the incomplete pass.
        """
        context, preference = self.context, self._preference
        if preference is None or preference.weights is None or preference.reference is None:
            return 0.0, None
        rows = context.train_rows if phase == "train" else context.validation_rows
        with context.spans.measure("data"):
            mismatched = rows.mismatch([row for sequence in sequences for row in sequence])
            if len(mismatched) == 1:  # the last batch of an epoch may have no answer to another prompt
                return 0.0, None
            singles = [[row] for row in range(len(mismatched))]
            batch_pass = BatchPass(context, phase, step, singles, self._budget(phase), self.parameters, rows=mismatched)
        context.model.eval()
        with torch.no_grad():
            for micro_batch in batch_pass.micro_batches():
                with batch_pass.catch_out_of_memory(micro_batch):
                    batch = batch_pass.load(micro_batch)
                    ratios = LogRatios(context.model, batch, preference.reference, context.spans.measure)
                    batch_pass.add_loss(micro_batch, ratios)
        result = batch_pass.gather()
        if result.is_stopped or result.failed_rows:
            return 0.0, (batch_pass, result)
        return max(0.0, result.loss / len(mismatched)), None

    def _compute_loss(
        self,
        batch: SequenceBatch,
        scale: float | None,
        targets: TeacherTargets | None = None,
        counts_correct: bool = False,
        divergence: float = 0.0,
    ) -> ChunkedLoss:
        """Run the forward pass of a micro-batch; without a `scale`, only its loss is computed, and with
        `counts_correct` its number of correct tokens. `divergence` is that of the batch, for `kto`."""
        model, measure = self.context.model, self.context.spans.measure
        if self._preference is not None:
            return PreferenceLoss(model, batch, scale, self._preference, measure, divergence)
        return ChunkedLoss(model, batch, scale, targets, measure, counts_correct)

    def _describe_origin(self, tracer: NonFiniteTracer | None, norms: dict[str, float]) -> str:
        """Describe where a number that is not finite began in a step that all ranks repeat."""
        return describe_origin(None if tracer is None else self.context.ranks.gather_json(tracer.first_module), norms)

    def _find_largest_norms(self, grad_norm: float) -> dict[str, float]:
        """Return the largest gradient norms by module, as before the clipping of gradients with this global norm."""
        norms = analysis.compute_module_norms(self.context.model)
        clipped = max(1.0, grad_norm / self.context.settings.max_grad_norm)
        return {name: clipped * norms[name] for name in sorted(norms, key=lambda name: -norms[name])[:MAX_MODULES]}

    def compute_gradients(self, number: int) -> None:
        """Compute the gradient of a step (from 1) without applying it, for measurements. Raises MemoryExhaustedError if
        a micro-batch does not fit into memory."""
        if failed_tokens := self._compute_pass(number)[1].failed_tokens:
            raise MemoryExhaustedError(f"a micro-batch of {failed_tokens} tokens does not fit into memory")
        self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        """Remove the loss scale from the gradients, sum them over ranks, and add the gradient of AdaLoRA's penalty."""
        if self.state.loss_scale != 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.state.loss_scale)
        if self._reducer:
            self._reducer.sum()
        penalty = adapters.orthogonality_penalty(self.context.model)
        if penalty is not None:
            (self.context.settings.adalora.orth_reg_weight * penalty).backward()

    def _record_step(
        self,
        batch_pass: BatchPass,
        result: PassResult,
        grad_norm: float,
        module_norms: dict[str, float],
        learning_rate: float,
        started_s: float,
    ) -> None:
        """Advance the state by one step and write the step to the journal."""
        context, number = self.context, self.state.step + 1
        scale = self.state.learning_rate_scale
        state = record_good_step(self.state, context.settings.guards, grad_norm, result.loss)
        if state.learning_rate_scale != scale:
            text = f"step {number}: the learning rate recovers: train.guards multiplies it by "
            context.journal.append("notice", text=f"{text}{state.learning_rate_scale:.4g}, no longer by {scale:.4g}")
        state = analysis.record_norms(optimizer.advance_loss_scale(state), number, module_norms)
        self.state = replace(
            state,
            step=number,
            train_loss=result.loss,
            trained_tokens=state.trained_tokens + batch_pass.trained_tokens,
            input_tokens=state.input_tokens + batch_pass.input_tokens,
            budget=self.state.budget.record_good_step(),
        )
        step_s = round(time.monotonic() - started_s, 5)
        context.journal.append(
            "step", step=number, loss=result.loss, learning_rate=learning_rate, grad_norm=grad_norm,
            trained_tokens=batch_pass.trained_tokens, input_tokens=batch_pass.input_tokens,
            batch=digests.hash_json(batch_pass.sequences)[: digests.SHORT], step_s=step_s, **result.statistics,
        )  # fmt: skip
        self._straggler_monitor.add(number, step_s, result.busy_s)
        if self.state.budget.grown and self.state.budget.good_steps == 0:
            self._log_budget("train", number + 1, "grow", 0)
        if context.faults.poisons(number):
            with torch.no_grad():
                self.parameters[0].view(-1)[0] = float("nan")

    def _report_step(self, verdict: StepVerdict, grad_norm: float) -> None:
        """Report an abnormal step that is applied."""
        number, journal = self.state.step + 1, self.context.journal
        if verdict.reason:
            journal.append("notice", text=f"step {number}: {verdict.reason}; rows {self._list_rows()}")
            return
        journal.append(
            "gradient_spike", step=number, grad_norm=grad_norm, rows=self._list_rows(), median=verdict.median,
            deviations=verdict.deviations, modules=self._find_largest_norms(grad_norm),
        )  # fmt: skip

    def _handle_bad_step(self, verdict: StepVerdict, grad_norm: float) -> None:
        """Skip the step, or end the training."""
        number = self.state.step + 1
        if not checkpoint.is_finite(dict(adapters.trainable_parameters(self.context.model))):
            raise NonFiniteStateError(
                f"weights are not finite before step {number}, although no step with a non-finite loss or gradient was "
                "applied: check the hardware, or lower train.learning_rate"
            )
        if verdict.action == "stop":
            raise DivergenceError(f"{verdict.reason}; rows of step {number}: {self._list_rows()}")
        reason = verdict.reason
        if math.isfinite(grad_norm):
            largest = self._find_largest_norms(grad_norm)
            reason += f"; largest gradient norms: {', '.join(f'{name} {norm:.4g}' for name, norm in largest.items())}"
        self._skip_step("roll_back" if verdict.action == "roll_back" else "skip", reason)

    def _skip_step(self, action: Literal["skip", "roll_back"], reason: str) -> None:
        """Count a step as done without applying it; with `roll_back`, also restore the weights of the last snapshot."""
        self.optimizer.zero_grad(set_to_none=True)
        self._discard_residuals()
        rows, snapshot = self._list_rows(), self._rollback_snapshot if action == "roll_back" else None
        with self.state_lock:
            if snapshot is not None:
                checkpoint.restore(snapshot, self.context.model, self.optimizer)
                self._restore_residuals(snapshot)
            self.state = record_bad_step(self.state, self.context.settings.guards, snapshot.state if snapshot else None)
            self.context.journal.append(
                "step_skipped", step=self.state.step, action=action, reason=reason, rows=rows,
                rollback_step=snapshot.state.step if snapshot else None,
                learning_rate_scale=self.state.learning_rate_scale,
            )  # fmt: skip

    def _list_rows(self) -> list[int]:
        """Return the rows of the current step."""
        return [row for sequence in self.plan.batch(self.state.step) for row in sequence]

    # Validation.

    def validate(self) -> bool | None:
        """Compute the loss of the validation rows; return whether this loss is the best so far; None if a stop is
        requested.

        Raises:
            DivergenceError: the loss is not finite.
            MemoryExhaustedError, PeersLostError: see `step`.
        """
        step, started_s = self.state.step, time.monotonic()
        rows_per_example = self.context.settings.rows_per_example
        examples = range(len(self.context.validation_rows) // rows_per_example)
        sequences = [list_rows([example], rows_per_example) for example in examples]
        self._apply_recorded_budget("validation", step)
        self.context.model.eval()
        stopping = self.context.settings.early_stopping
        needs_accuracy = "token_accuracy" in stopping.metrics
        has_shrunk = False
        while True:
            batch_pass, result = self._validate_rows(step, sequences, needs_accuracy)
            if result.is_stopped:
                return None
            if not result.failed_rows:
                break
            self._shrink_micro_batches("validation", step, result, has_shrunk)
            has_shrunk = True
        mean_loss, best_loss = result.loss / batch_pass.loss_count, self.state.best_loss
        if not math.isfinite(mean_loss):
            raise DivergenceError(
                f"validation loss is {mean_loss} at step {step}: the model's logits are not finite for some validation "
                "rows; check the base model (`ratchet evaluate` prints its loss) and train.compute_dtype (float16 "
                "overflows)"
            )
        is_best = best_loss is None or mean_loss < best_loss
        accuracy = result.correct_tokens / batch_pass.trained_tokens
        has_progress = has_improved(stopping, self.state, mean_loss, accuracy)
        self.state = replace(
            self.state,
            validation_loss={**self.state.validation_loss, step: mean_loss},
            token_accuracy={**self.state.token_accuracy, step: accuracy} if needs_accuracy else {},
            best_step=step if is_best else self.state.best_step,
            bad_validations=0 if has_progress else self.state.bad_validations + 1,
            validation_budget=self.state.validation_budget.record_good_step(),
        )
        self.context.journal.append(
            "validation", step=step, loss=mean_loss, improved=is_best, tokens=batch_pass.trained_tokens,
            seconds=round(time.monotonic() - started_s, 4), **result.statistics,
            **({"token_accuracy": accuracy} if needs_accuracy else {}),
        )  # fmt: skip
        return is_best

    def _validate_rows(
        self, step: int, sequences: list[list[int]], counts_correct: bool
    ) -> tuple[BatchPass, PassResult]:
        """Compute the losses of the validation rows; return the pass with the result of all ranks."""
        divergence, incomplete = self._estimate_divergence("validation", step, sequences)
        if incomplete is not None:
            return incomplete
        batch_pass = BatchPass(
            self.context, "validation", step, sequences, self.state.validation_budget, self.parameters
        )
        with torch.no_grad():
            for micro_batch in batch_pass.micro_batches():
                with batch_pass.catch_out_of_memory(micro_batch):
                    batch = batch_pass.load(micro_batch)
                    with self.context.computing():
                        loss = self._compute_loss(batch, None, counts_correct=counts_correct, divergence=divergence)
                    batch_pass.add_loss(micro_batch, loss)
        return batch_pass, batch_pass.gather()

    # Snapshots.

    def restore(self, snapshot: TrainSnapshot, rollback_snapshot: TrainSnapshot) -> None:
        """Restore the training from a checkpoint, and the snapshot that the guards may roll back to."""
        checkpoint.restore(snapshot, self.context.model, self.optimizer)
        self._restore_residuals(snapshot)
        self.state = snapshot.state
        if self._rollback_snapshot is not None and rollback_snapshot.state.step:
            self._rollback_snapshot = rollback_snapshot

    def snapshot(self) -> tuple[TrainSnapshot, float]:
        """Copy weights, optimizer and state; return the copy and the seconds that it took.

        If a rollback snapshot is due, the guards may roll back to this copy.
        """
        started_s = time.monotonic()
        if self.is_rollback_snapshot_due():
            self.state = replace(self.state, rollback_step=self.state.step)
        snapshot = self._take_snapshot()
        if snapshot.state.rollback_step == snapshot.state.step:
            self._rollback_snapshot = snapshot
        return snapshot, time.monotonic() - started_s

    def is_rollback_snapshot_due(self) -> bool:
        """Return whether the weights of this step must become the snapshot that the guards may roll back to."""
        guards, step = self.context.settings.guards, self.state.step
        is_due = step > 0 and step % guards.snapshot_every_steps == 0
        return guards.uses_roll_back and is_due and step not in self.state.bad_steps

    @property
    def has_residuals(self) -> bool:
        """Whether each rank has its own compression residuals, so that a snapshot needs all ranks."""
        return not self.context.ranks.is_single and self.context.settings.gradient_compression.method != "none"

    def _take_snapshot(self) -> TrainSnapshot:
        snapshot = checkpoint.take_snapshot(self.state, self.context.model, self.optimizer)
        if not self.has_residuals:
            return snapshot
        residuals = self._reducer.state() if self._reducer else {}
        return replace(snapshot, residuals=self.context.ranks.gather_tensors(residuals))

    def _restore_residuals(self, snapshot: TrainSnapshot) -> None:
        if self._reducer:
            self._reducer.restore(snapshot.residuals)

    def _discard_residuals(self) -> None:
        """Restore the residuals from before the last sum of gradients, because that sum is not applied."""
        if self._reducer:
            self._reducer.undo()

    # Memory: the budgets of micro-batches.

    def limit_first_micro_batches(self, tokens: int | None) -> None:
        """Limit micro-batches to `tokens` padded tokens (None: no limit) from the first step on.

        A limit of an earlier attempt, which is in the journal, has precedence.
        """
        for phase, step in INITIAL_BUDGET_STEPS:
            self._apply_recorded_budget(phase, step)
            if tokens is not None and (phase, step) not in self.recorded.budgets:
                largest = self._largest_micro_batch_tokens()
                self._set_budget(phase, MicrobatchBudget(tokens, largest, wait_steps=NEVER_GROW))
                self._log_budget(phase, step, "shrink", largest)

    def shrink_after_oom_kill(self) -> None:
        """Halve micro-batches, because the system killed the previous attempt when memory ran out."""
        largest = self._largest_micro_batch_tokens()
        phases: tuple[tuple[Phase, int], ...] = (("train", self.state.step + 1), ("validation", self.state.step))
        for phase, step in phases:
            budget = self._budget(phase)
            failed_tokens = min(budget.tokens or largest, largest)
            if failed_tokens > int(self.context.train_rows.lengths.max()):  # a micro-batch of one row cannot be divided
                self._set_budget(phase, budget.shrink(failed_tokens, repeated=True))
                self._log_budget(phase, step, "shrink", failed_tokens)
                self.recorded.budgets.pop((phase, step), None)

    def shrink_before_out_of_memory(self, is_urgent: bool) -> bool:
        """Make the micro-batches of the next step smaller, because memory is nearly exhausted; halve them if it is
        urgent. Return False if they have one row each already."""
        number, largest = self.state.step + 1, self._largest_micro_batch_tokens()
        tokens = min(self.state.budget.tokens or largest, largest)
        if tokens <= int(self.context.train_rows.lengths.max()):
            return False
        self._set_budget("train", self.state.budget.shrink(tokens, is_urgent))
        self._log_budget("train", number, "shrink", tokens, is_early=True)
        self.recorded.budgets.pop(("train", number), None)  # the new budget has precedence
        oom.release_memory()
        return True

    def _shrink_micro_batches(self, phase: Phase, step: int, result: PassResult, has_shrunk: bool) -> None:
        """Make micro-batches smaller, because one did not fit. `has_shrunk`: not for the first time in this step.

        Raises:
            MemoryExhaustedError: a single row does not fit.
            PeersLostError: micro-batches were made smaller, but the base is sharded, so all ranks must restart the
                step.
        """
        rows, tokens, is_sharded = result.failed_rows, result.failed_tokens, self.context.is_base_sharded
        self.optimizer.zero_grad(set_to_none=True)
        oom.release_memory()
        if rows == 1 and not is_sharded and self._enable_activation_checkpointing(phase, step, tokens):
            return
        if rows == 1:
            raise MemoryExhaustedError(
                f"one row of {tokens} tokens does not fit into memory in {phase} (step {step}).\n"
                f"{self.context.suggest_memory_changes(tokens)}"
            )
        self._set_budget(phase, self._budget(phase).shrink(tokens, has_shrunk))
        rank = self.context.ranks.environment.rank if is_sharded else None
        self._log_budget(phase, step, "shrink", tokens, rank=rank)
        if is_sharded:  # the other ranks wait inside a pass that cannot be completed
            raise PeersLostError(
                f"{rows} rows ({tokens} tokens) did not fit into memory at step {step}; the base is sharded, so all "
                "ranks restart this step with smaller micro-batches"
            )

    def _enable_activation_checkpointing(self, phase: Phase, step: int, tokens: int) -> bool:
        """Recompute activations from now on, if the settings allow it; return whether this call has changed anything.

        A validation pass stores no activations, so recomputing them saves no memory.
        """
        model = self.context.model
        is_auto = self.context.machine.activation_checkpointing == "auto"
        if phase != "train" or not is_auto or adapters.uses_activation_checkpointing(model):
            return False
        adapters.enable_activation_checkpointing(model)
        text = f"one row of {tokens} tokens does not fit at step {step}: activations are recomputed from now on"
        self.context.journal.append("notice", text=text)
        return True

    def _budget(self, phase: Phase) -> MicrobatchBudget:
        return self.state.budget if phase == "train" else self.state.validation_budget

    def _set_budget(self, phase: Phase, budget: MicrobatchBudget) -> None:
        if phase == "train":
            self.state = replace(self.state, budget=budget)
        else:
            self.state = replace(self.state, validation_budget=budget)

    def _apply_recorded_budget(self, phase: Phase, step: int) -> None:
        """Use the budget of an earlier attempt at this step, so that sums are rounded the same way."""
        if recorded := self.recorded.budgets.get((phase, step)):
            self._set_budget(phase, MicrobatchBudget(**recorded["budget"]))

    def _log_budget(
        self,
        phase: Phase,
        step: int,
        action: Literal["shrink", "grow"],
        failed_tokens: int,
        *,
        rank: int | None = None,
        is_early: bool = False,
    ) -> None:
        """Write a budget to the journal.

        Args:
            phase: phase of the budget.
            step: first step of the budget.
            action: how it has changed.
            failed_tokens: padded tokens that did not fit, or with `is_early` would soon not fit.
            rank: the only rank whose budget has changed; None: all ranks.
            is_early: the budget shrinks before memory has run out.
        """
        self.context.journal.append(
            "microbatch_budget", step=step, phase=phase, action=action, failed_tokens=failed_tokens,
            budget=asdict(self._budget(phase)), **({} if rank is None else {"rank": rank}),
            **({"is_early": True} if is_early else {}),
        )  # fmt: skip

    def _largest_micro_batch_tokens(self) -> int:
        """Return the padded tokens of the largest micro-batch that the settings allow."""
        settings, machine = self.context.settings, self.context.machine
        is_packed = settings.batching == "packed"
        longest = settings.pack_tokens if is_packed else int(self.context.train_rows.lengths.max())
        rows = machine.micro_batch_size * (1 if is_packed else settings.rows_per_example)
        largest = rows * longest
        limit = machine.micro_batch_tokens
        return largest if limit is None else min(largest, max(longest, limit))
