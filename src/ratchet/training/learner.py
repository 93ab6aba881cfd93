"""What steps change (weights, optimizer, state), and what is done when a step does not go as it should.

Every decision that depends on the machine (memory) is in the journal before it has effect, and one that is found there
is taken again: an attempt that repeats steps of an earlier one gets the same bits.
"""

import math
import threading
import time
from dataclasses import asdict, replace
from typing import Literal

import torch

from ratchet import digest
from ratchet.errors import CorruptedError, DivergedError, MemoryExhaustedError, PeersLostError
from ratchet.faults.injection import Phase
from ratchet.model import adapter, memory, recomputation
from ratchet.run.journal import Decisions
from ratchet.training import analysis, checkpoint, guards, optimizer, scaling, schedule, snapshot
from ratchet.training.budget import Budget
from ratchet.training.gradient import Computed, DoesNotFitError, Gradients, Task
from ratchet.training.guards import Repeat, Report, RollBack, Skip, Stop, Verdict
from ratchet.training.pace import Pace
from ratchet.training.state import Snapshot, State

FIRST: tuple[tuple[Phase, int], ...] = (("train", 1), ("validation", 0))
"""Where in the journal the budgets stand that a run begins with."""
NEVER = 10**9
"""Steps: what the forecast allows is not tried larger."""


class Learner:
    """One training's weights, optimizer and state, always those of the same step for whoever holds `settled`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.plan = task.plan
        self.gradients = Gradients(task)
        self.optimizer = optimizer.build(task.model, task.settings, task.device)
        self.state = State(loss_scale=task.loss_scale)
        self.settled = threading.Lock()
        """Held while weights, optimizer and state change."""
        self.decided = Decisions()
        self._pace = Pace(task.journal)
        self._good = self._taken() if task.settings.guards.roll_back else None
        """What a rule may go back to; None when none does."""

    def restore(self, saved: Snapshot, good: Snapshot) -> None:
        """Go on from a checkpoint; `good`: that of the step which it may go back to."""
        checkpoint.restore(saved, self.task.model, self.optimizer)
        self._unsent(saved)
        self.state = saved.state
        if self._good is not None and good.state.step:
            self._good = good

    def _taken(self) -> Snapshot:
        taken = snapshot.take(self.state, self.task.model, self.optimizer)
        if not self.leaves_unsent:
            return taken
        return replace(taken, wire=self.task.ranks.gather_tensors(self.gradients.unsent()))

    def _unsent(self, saved: Snapshot) -> None:
        """What ranks had not sent when it was saved is to be sent yet."""
        if self.gradients.wire:
            self.gradients.wire.restore(saved.wire)

    @property
    def leaves_unsent(self) -> bool:
        """Whether ranks know something that the others do not: then a snapshot takes all of them."""
        return not self.task.ranks.alone and self.task.settings.compression.method != "none"

    def snapshot(self) -> tuple[Snapshot, float]:
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
            raise DivergedError(
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
            except DoesNotFitError as error:
                failed = error.rows, error.tokens
            self._shrink("validation", step, failed, again)
            again = True

    # ------------------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """One optimizer step over one global batch, or the decision to do without it; nothing when asked to stop.

        Raises:
            DivergedError: more bad steps than `train.guards` puts up with.
            CorruptedError: a weight is not finite although no step made it so.
            MemoryExhaustedError: one row does not fit.
        """
        started, number = time.monotonic(), self.state.step + 1
        if decided := self.decided.skipped.get(number):
            self._leave_out(decided["action"], decided["reason"])
            return
        self._take_decided("train", number)
        rate = schedule.learning_rate(number - 1, self.plan.steps, self.task.settings) * self.state.rate_scale
        judged = self._judged(rate)
        if judged is None:
            return
        computed, verdict = judged
        if isinstance(verdict, Skip | RollBack | Stop):
            self._do_without(verdict)
            return
        if isinstance(verdict, Report):
            self.task.journal.append(
                "spike", step=number, grad_norm=computed.norm, rows=self._rows(), **asdict(verdict)
            )
        self._learn(computed, rate, started)

    def _judged(self, rate: float) -> tuple[Computed, Verdict] | None:
        """The step's gradient, and what is to be done about it; None when asked to stop."""
        rules = self.task.settings.guards
        computed = self._computed()
        if computed is None:
            return None
        verdict = guards.judge(rules, self.state, computed.loss, computed.norm, rate, repeated=False)
        if not isinstance(verdict, Repeat):
            return computed, verdict
        self.gradients.forget()
        self.task.journal.append("repeated", step=self.state.step + 1, reason=verdict.reason)
        computed = self._computed()
        if computed is None:
            return None
        return computed, guards.judge(rules, self.state, computed.loss, computed.norm, rate, repeated=True)

    def _computed(self) -> Computed | None:
        """Loss and gradient of the step, in micro-batches made smaller until they fit; None when asked to stop."""
        again = False
        while True:
            try:
                computed = self.gradients.step(self.state.step, self.state.budget, self.state.loss_scale)
            except DoesNotFitError as error:
                failed = error.rows, error.tokens
            else:
                if computed is None or not scaling.overflowed(self.state, computed.loss, computed.norm):
                    return computed
                self.gradients.forget()
                self.state = scaling.after_overflow(self.state)
                self.task.journal.append("scale", step=self.state.step + 1, loss_scale=self.state.loss_scale)
                continue
            # Out of the `except`, where the traceback would keep the failed computation's memory alive.
            self._shrink("train", self.state.step + 1, failed, again)
            again = True

    def _learn(self, computed: Computed, rate: float, started: float) -> None:
        """The optimizer step: the one place where weights change, and state with them."""
        task, number = self.task, self.state.step + 1
        with self.settled:
            with task.spans.of("optimizer"):
                for group in self.optimizer.param_groups:
                    group["lr"] = rate * group["rate_ratio"]
                self.optimizer.step()
                adapter.after_step(task.model, number, self.plan.steps)
                self.optimizer.zero_grad(set_to_none=True)
            budget = self.state.budget.after_good_step()
            grown = budget.grown and budget.good_steps == 0
            state = scaling.after_good(guards.after_good(self.state, task.settings.guards, computed.norm))
            self.state = replace(
                analysis.noted(state, number, computed.module_norms),
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
                batch=digest.of_json(computed.batch)[: digest.SHORT], step_s=step_s,
            )  # fmt: skip
        self._pace.add(number, step_s, self.gradients.busy_s)
        if grown:
            self._tell_budget("train", number + 1, "grow", 0)
        if task.faults.poisons(number):
            with torch.no_grad():
                self.gradients.parameters[0].view(-1)[0] = float("nan")

    def _do_without(self, verdict: Skip | RollBack | Stop) -> None:
        if not snapshot.is_finite(dict(adapter.trainable(self.task.model))):
            raise CorruptedError(
                f"weights are not finite before step {self.state.step + 1}, though no step with such a loss or "
                "gradient was learned from: hardware, or a train.learning_rate beyond all bounds"
            )
        if isinstance(verdict, Stop):
            raise DivergedError(f"{verdict.diagnosis}; rows of step {self.state.step + 1}: {self._rows()}")
        self._leave_out("roll_back" if isinstance(verdict, RollBack) else "skip", verdict.reason)

    def _leave_out(self, action: Literal["skip", "roll_back"], reason: str) -> None:
        """Count a step as done without learning from it; `roll_back`: with the weights of the last good snapshot."""
        self.gradients.drop()
        self.gradients.forget()
        rows, good = self._rows(), self._good if action == "roll_back" else None
        with self.settled:
            if good is not None:
                checkpoint.restore(good, self.task.model, self.optimizer)
                self._unsent(good)
            self.state = guards.after_bad(self.state, self.task.settings.guards, good.state if good else None)
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
        memory.release()
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
        if phase != "train" or self.task.machine.activation_checkpointing != "auto" or recomputation.is_on(model):
            return False
        recomputation.switch_on(model)
        text = f"one row of {tokens} tokens does not fit at step {step}: from here on activations are recomputed"
        self.task.journal.append("notice", text=text)
        return True

    def _budget(self, phase: Phase) -> Budget:
        return self.state.budget if phase == "train" else self.state.validation_budget

    def _set_budget(self, phase: Phase, budget: Budget) -> None:
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
        for phase, step in FIRST:
            self._take_decided(phase, step)
            if tokens is not None and (phase, step) not in self.decided.budgets:
                self._set_budget(phase, Budget(tokens, self._largest(), wait_steps=NEVER))
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
            self._set_budget(phase, Budget(**decided["budget"]))
