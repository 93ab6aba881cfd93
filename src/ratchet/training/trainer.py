"""The training loop. Starting is resuming from step 0: it always begins with the newest valid checkpoint, if any."""

import math
import os
import threading
import time
from dataclasses import replace
from typing import Any, Literal

from ratchet.errors import EXIT_INTERRUPTED, InterruptedRunError, PeersLostError, StorageError
from ratchet.models.loss import require_packing_isolation
from ratchet.runs import status
from ratchet.runs.journal import read_decisions
from ratchet.training import checkpoint, distributed
from ratchet.training.async_checkpoint import AsyncCheckpointer, CheckpointInterval, NullCheckpointer
from ratchet.training.distributed import RankGroup
from ratchet.training.train_state import TrainState
from ratchet.training.train_step import StepExecutor, TrainingContext


class TrainingLoop:
    """One attempt at a training: from the newest valid checkpoint to the last step, an early stop, or a request."""

    def __init__(self, task: TrainingContext) -> None:
        self.task = task
        self.plan = task.plan
        self.learner = StepExecutor(task)
        identity = {"spec": task.spec.model_dump(mode="json"), "made_by": task.made_by}
        past = status.read_progress(task.paths)
        there = task.paths.checkpoint_steps()
        self._restore(identity)
        ranks = task.ranks
        step = self.state.step
        if past.checkpoint_step > step and past.checkpoint_step not in there:
            self._notice(
                f"the checkpoint of step {past.checkpoint_step} that the journal tells of is gone; "
                f"going on from step {step}"
            )
        if past.step < step:
            self._notice(
                f"the checkpoint is of step {step}, the journal tells of {past.step} steps: "
                "the figures of those between are lost, the training is not"
            )
        self.learner.decided = distributed.merge_decisions(ranks, read_decisions(task.paths.journal, step))
        if step == 0:
            self.learner.begin(_minimum_tokens(ranks, task.first_tokens))
        if ranks.any(past.killed_for_memory):
            self.learner.after_kill_for_memory()
        self.saver: AsyncCheckpointer | NullCheckpointer = NullCheckpointer(self.state)
        if ranks.place.writes:
            self.saver = AsyncCheckpointer(
                task.paths, task.journal, identity, task.machine.keep_checkpoints, self.state
            )
        self.interval = CheckpointInterval(
            task.machine.checkpoint_every, step, time.monotonic(), max(0, past.attempts - 1), past.train_s
        )
        self._offered = self.state
        self._due = False
        self._ending = threading.Lock()
        """Held by the thread that seals at a request to stop; it is not given back."""
        task.faults.watch_disk(lambda: self.state.step + 1)

    @property
    def state(self) -> TrainState:
        """Where training stands."""
        return self.learner.state

    def _restore(self, identity: dict[str, Any]) -> None:
        task = self.task
        path = distributed.agree_on_checkpoint(
            task.ranks, task.paths, checkpoint.find_newest_valid(task.paths, task.spec, self._notice)
        )
        if task.ranks.place.writes:
            checkpoint.quarantine_newer(task.paths, path)
        task.ranks.any(False)  # until all are where they are to be, nobody reads or writes
        if path is None:
            return
        for difference in checkpoint.list_origin_differences(path, identity):
            self._notice(f"from here on not bit-exact: {difference}")
        saved = good = checkpoint.read(path)
        if saved.state.good_step not in (0, saved.state.step):
            good = checkpoint.read(task.paths.checkpoint(saved.state.good_step))
        self.learner.restore(saved, good)

    def _notice(self, text: str) -> None:
        self.task.journal.append("notice", text=text)

    def run(self) -> TrainState:
        """Train to the end; returns the final state, which is sealed.

        Raises:
            InterruptedRunError: asked to stop; the state is sealed.
            PeersLostError: other ranks are gone, or were asked to stop; the state is sealed.
            DivergenceError, NonFiniteStateError, MemoryExhaustedError: see `StepExecutor.step`.
            SettingsError: rows are to be packed, and the model would mix them; nothing was learned.
            StorageError: the end could not be saved within `machine.storage_wait_s`.
        """
        task = self.task
        shared = self.plan.shared_sequence()
        if shared and not self.end_reason:
            require_packing_isolation(task.model, task.train, shared, task.device)
        task.stop.arm(task.machine.grace_s, self._seal_from_outside)
        try:
            return self._train()
        except PeersLostError:
            # Not when it was sealed with the others, and not when that takes them: then the one before is the last.
            if not self.task.stop.begun and not self.learner.leaves_unsent:
                self._seal_and_tell("left")
            raise
        finally:
            task.monitor.close()
            self.saver.close()

    def _train(self) -> TrainState:
        task = self.task
        while True:
            if self._asked_together():
                self._stop()
            improved = False
            if self._validation_is_due():
                task.monitor.enter("evaluation")
                found = self.learner.validate()
                if found is None:
                    continue
                improved = found
            ended = self.end_reason is not None
            self._keep(improved or ended)
            if ended:
                self._finish_saving()
                return self.state
            task.monitor.enter("steady" if "first_step" in task.monitor.found else "first_step")
            self.learner.step()
            task.monitor.leave("first_step")

    def _asked_together(self) -> bool:
        """Whether any rank was asked to stop; and whether a checkpoint is due, which the first one's clock says."""
        ranks = self.task.ranks
        in_flight = self.saver.in_flight
        due = ranks.leads and self.interval.due(self.state.step, time.monotonic()) and not in_flight
        told = ranks.gather([float(self.task.stop.asked), float(due)])
        self._due = bool(told[0][1])
        return any(asked for asked, _ in told)

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

    def _keep(self, must: bool) -> None:
        """Take a snapshot and have it saved, if it must be or is due."""
        if self._is_offered():
            return
        if self._due or must or self.learner.good_is_due():
            self._offer()

    def _is_offered(self) -> bool:
        """Whether this very state was handed over for saving.

        Not its step alone: one that was stopped before its validation is sealed again with it, or `best` would differ.
        The budget does not count: it may have shrunk in a step that was then broken off, and is in the journal.
        """
        return replace(self.state, budget=self._offered.budget) == self._offered

    def _offer(self) -> None:
        taken, block_s = self.learner.snapshot()
        self._offered = taken.state
        self.interval.taken(taken.state.step, time.monotonic(), block_s, self.saver.save_s)
        self.saver.offer(taken, block_s)

    def _finish_saving(self) -> None:
        """Wait for the disk: what is not sealed is not trained."""
        task = self.task
        task.heartbeat.beat("save")
        wait_s = task.machine.storage_wait_s
        if not self.saver.drain(wait_s, lambda: task.heartbeat.beat("save")):
            raise StorageError(
                f"the end of training could not be saved within {wait_s:g} s ({self.saver.outage}); sealed is step "
                f"{self.saver.sealed.step} of {self.state.step}. Make room or mend the disk, and repeat"
            )

    def _stop(self) -> None:
        """Seal the last completed step, then end."""
        self.task.stop.begin()
        self._ending.acquire()  # for ever, if the other thread is already sealing: it ends the process
        asked = self.task.stop.asked
        self._seal_and_tell("stopped" if asked else "left")
        if not asked:
            raise PeersLostError(f"another rank was asked to stop after step {self.state.step}")
        raise InterruptedRunError(f"stopped at step {self.saver.sealed.step}")

    def _seal_from_outside(self) -> None:
        """The training thread did not stop in time: seal the last completed step without it, and end the process."""
        self._ending.acquire()
        with self.learner.settled:
            self._seal_and_tell("stopped", alone=True)
        os._exit(EXIT_INTERRUPTED)

    def _seal_and_tell(self, kind: Literal["stopped", "left"], alone: bool = False) -> None:
        """Have the state saved, unless that takes other ranks, and we are `alone`."""
        if not self._is_offered() and not (alone and self.learner.leaves_unsent):
            self._offer()
        machine = self.task.machine
        if not self.saver.drain(machine.grace_s, lambda: self.task.heartbeat.beat("save")):
            text = f"step {self.state.step} could not be saved within {machine.grace_s:g} s ({self.saver.outage})"
            self.task.journal.append("alert", text=text)
        self.task.journal.append(kind, step=self.saver.sealed.step)


def _minimum_tokens(ranks: RankGroup, tokens: int | None) -> int | None:
    """The smallest number of tokens that any rank begins with; None where none has to begin with few."""
    least = min(found for (found,) in ranks.gather([math.inf if tokens is None else tokens]))
    return None if math.isinf(least) else int(least)
