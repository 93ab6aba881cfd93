"""The training loop of one attempt: steps, validation, checkpoints and the end.

An attempt always begins with the newest valid checkpoint; without a checkpoint, it begins at step 0.
"""

import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ratchet.errors import EXIT_INTERRUPTED, InterruptedRunError, PeersLostError, StorageError
from ratchet.models import oom
from ratchet.models.cpu_kernels import library
from ratchet.models.loss import require_packing_isolation
from ratchet.runs import status
from ratchet.runs.journal import read_decisions
from ratchet.training import checkpoint, distributed
from ratchet.training.async_checkpoint import AsyncCheckpointer, CheckpointInterval, NullCheckpointer
from ratchet.training.context import TrainingContext
from ratchet.training.early_stopping import should_stop
from ratchet.training.gpu_temperature import GpuThermometer
from ratchet.training.group import GroupMember
from ratchet.training.memory_ladder import MemoryLadder
from ratchet.training.train_state import TrainState
from ratchet.training.train_step import StepExecutor

PAUSE_S = 1.0
"""Seconds between two checks during a pause."""


class TrainingLoop:
    """One attempt of a training: from the newest valid checkpoint to the last step, an early stop or a stop request."""

    def __init__(self, context: TrainingContext) -> None:
        self.context = context
        self.plan = context.batch_plan
        self.executor = StepExecutor(context)
        ranks, machine = context.ranks, context.machine
        identity = {"spec": context.spec.model_dump(mode="json"), "environment": context.environment}
        progress = status.read_progress(context.paths)
        saved_steps = context.paths.checkpoint_steps()
        self._restore(identity)
        step = self.state.step
        if progress.checkpoint_step > step and progress.checkpoint_step not in saved_steps:
            self._notice(
                f"the checkpoint of step {progress.checkpoint_step}, which the journal lists, is missing; "
                f"resuming from step {step}"
            )
        if progress.step < step:
            self._notice(
                f"the checkpoint is of step {step}, but the journal ends at step {progress.step}: "
                "the metrics of the steps between are lost, the training is not"
            )
        self.executor.recorded = distributed.merge_decisions(ranks, read_decisions(context.paths.journal, step))
        if step == 0 and (warmup := context.settings.warmup_steps or 0) > self.plan.steps:
            self._notice(
                f"train.warmup_steps: found {warmup}, but the training has {self.plan.steps} steps, so it ends before "
                "the learning rate has reached train.learning_rate"
            )
        if step == 0:
            own_limit = context.initial_micro_batch_tokens
            smallest = min(limit for (limit,) in ranks.gather([math.inf if own_limit is None else own_limit]))
            self.executor.limit_first_micro_batches(None if math.isinf(smallest) else int(smallest))
        if ranks.any(progress.killed_for_memory):
            self.executor.shrink_after_oom_kill()
        self.checkpointer: AsyncCheckpointer | NullCheckpointer = NullCheckpointer(self.state)
        if ranks.environment.is_writer:
            self.checkpointer = AsyncCheckpointer(
                context.paths, context.journal, identity, machine.keep_checkpoints, self.state
            )
        self.interval = CheckpointInterval(
            machine.checkpoint_every, step, time.monotonic(), max(0, progress.attempts - 1), progress.train_s
        )
        self._submitted = self.state
        """State of the last snapshot that was submitted for saving."""
        self._is_checkpoint_due = self._must_save_together = False
        self.ladder = MemoryLadder() if machine.memory_ladder and context.group is None else None
        self.thermometer = GpuThermometer.of_device(context.device, machine.max_gpu_celsius, self._notice)
        self._exit_lock = threading.Lock()
        """After a stop request, the thread that seals the run takes this lock and never releases it."""
        context.faults.watch_disk(lambda: self.state.step + 1)

    @property
    def state(self) -> TrainState:
        """State after the last completed step."""
        return self.executor.state

    @property
    def end_reason(self) -> str | None:
        """`completed` or `early_stopped` once training has ended."""
        if self.state.step >= self.plan.steps:
            return "completed"
        return "early_stopped" if should_stop(self.context.settings.early_stopping, self.state) else None

    def run(self) -> TrainState:
        """Train to the end; return the final state, which is sealed.

        Raises:
            InterruptedRunError: a stop was requested; the state is sealed.
            PeersLostError: other ranks have ended, or were asked to stop. The state is sealed, unless other ranks have
                ended and a snapshot needs all ranks (`StepExecutor.has_residuals`).
            DivergenceError, NonFiniteStateError, MemoryExhaustedError: see `StepExecutor.step`.
            SettingsError: rows are packed, but the model would mix them; no step was done.
            StorageError: the final state could not be saved within `machine.storage_timeout_s`.
        """
        context = self.context
        packed_sequence = self.plan.find_multi_row_sequence()
        if packed_sequence and not self.end_reason:
            with context.computing():
                require_packing_isolation(context.model, context.train_rows, packed_sequence, context.device)
        context.shutdown.arm(context.machine.grace_period_s, self._seal_from_signal_thread)
        try:
            return self._train()
        except PeersLostError:
            # Nothing is sealed here if the ranks have already sealed the state together (`_stop`), or if a snapshot
            # needs all ranks. In the second case, the next attempt resumes from the previous checkpoint.
            if not context.shutdown.is_handled and not self.executor.has_residuals:
                self._seal("interrupted_by_peer")
            raise
        finally:
            if context.group is not None:
                context.group.leave()
            context.memory_monitor.close()
            self.checkpointer.close()
            if context.group is not None:  # a process of its own would end here
                context.heartbeat.beat("save")
                self.checkpointer.join()

    def _train(self) -> TrainState:
        monitor = self.context.memory_monitor
        while True:
            if self._synchronize_ranks():
                self._stop()
            is_best, step = False, self.state.step
            is_due = step > 0 and (step % self.plan.validation_interval == 0 or step == self.plan.steps)
            if is_due and step not in self.state.validation_loss:
                monitor.enter("evaluation")
                outcome = self.executor.validate()
                if outcome is None:  # a stop was requested
                    self._save_together()
                    continue
                is_best = outcome
            has_ended = self.end_reason is not None
            if self._is_checkpoint_due or is_best or has_ended or self.executor.is_rollback_snapshot_due():
                self._submit_checkpoint()
            is_saved_together = self._save_together()
            if has_ended and (self.context.group is None or is_saved_together):
                break
            if has_ended:  # the next round begins with a common checkpoint
                continue
            monitor.enter("steady" if "first_step" in monitor.peaks else "first_step")
            self.executor.step()
            monitor.leave("first_step")
        # Training has ended only when the final state is sealed.
        context, timeout_s = self.context, self.context.machine.storage_timeout_s
        if context.group is not None:
            context.group.leave()
        context.heartbeat.beat("save")
        if not self.checkpointer.drain(timeout_s, lambda: context.heartbeat.beat("save")):
            raise StorageError(
                f"the final state could not be saved within {timeout_s:g} s ({self.checkpointer.outage}); the newest "
                f"saved step is {self.checkpointer.sealed.step} of {self.state.step}. Free space or repair the disk, "
                "then run the same command again"
            )
        return self.state

    def _synchronize_ranks(self) -> bool:
        """Return whether any rank was asked to stop.

        Rank 0 decides by its clock whether a checkpoint is due, and all ranks get this decision.
        """
        ranks, group = self.context.ranks, self.context.group
        if group is not None:
            return self._begin_round(group)
        is_saving = self.checkpointer.is_saving
        is_due = ranks.is_first and self.interval.is_due(self.state.step, time.monotonic()) and not is_saving
        share = 0.0 if self.ladder is None else self.context.memory_monitor.read_used_share()
        celsius = float(self.thermometer.celsius if self.thermometer.update() else 0)
        by_rank = ranks.gather([float(self.context.shutdown.is_requested), float(is_due), share, celsius])
        self._is_checkpoint_due = bool(by_rank[0][1])
        self._act_on_memory(max(share for _, _, share, _ in by_rank))
        if hottest := max(celsius for *_, celsius in by_rank):
            return self._cool_down(int(hottest))
        return any(is_requested for is_requested, *_ in by_rank)

    def _act_on_memory(self, share: float) -> None:
        """Take the reactions of the memory ladder; all ranks take the same ones."""
        for rung in () if self.ladder is None else self.ladder.climb(share):
            text = f"memory: {share:.0%} of the device are in use after step {self.state.step}"
            if rung in ("shrink", "checkpoint"):
                is_smaller = self.executor.shrink_before_out_of_memory(rung == "checkpoint")
                text += "; micro-batches are smaller" if is_smaller else "; micro-batches have one row already"
            if rung == "checkpoint":
                self._is_checkpoint_due = True
                text += ", and a checkpoint is saved"
            if rung == "free_caches":
                oom.release_memory()
                text += "; caches are freed"
            self._notice(text)

    def _cool_down(self, celsius: int) -> bool:
        """Wait until the GPUs of all ranks have cooled down; return whether any rank was asked to stop."""
        limit, started_s = self.context.machine.max_gpu_celsius, time.monotonic()
        self._notice(f"paused after step {self.state.step}: a GPU has {celsius} °C (machine.max_gpu_celsius: {limit})")
        is_hot, is_stopping = True, False
        while is_hot and not is_stopping:
            time.sleep(PAUSE_S)
            self.context.heartbeat.beat("peers")
            flags = [float(self.context.shutdown.is_requested), float(self.thermometer.update())]
            stops, hot = zip(*self.context.ranks.gather(flags), strict=True)
            is_stopping, is_hot = any(stops), any(hot)
        if not is_stopping:
            self._notice(f"continues after a pause of {time.monotonic() - started_s:.0f} s")
        return is_stopping

    def _begin_round(self, group: GroupMember) -> bool:
        """Begin a round of the group; return whether this run was asked to stop, and so has left the group.

        If a run ends or stops, all runs save a checkpoint first, so that a group that is killed later does not repeat
        steps without it.
        """
        shutdown = self.context.shutdown
        if self.thermometer.update():  # the other runs wait for this one
            self._cool_down(self.thermometer.celsius)
        has_ended, is_stopping = self.end_reason is not None, shutdown.is_requested
        is_due = self.interval.is_due(self.state.step, time.monotonic())
        self._must_save_together = group.begin_round(is_due or has_ended or is_stopping)
        self._is_checkpoint_due = self._must_save_together
        if is_stopping:
            self._save_together()
            group.leave()
        return is_stopping

    def _save_together(self) -> bool:
        """If all runs of the group must save a checkpoint in this round, save this run's, and wait until all are
        sealed. Return whether they had to."""
        context, group = self.context, self.context.group
        if group is None or not self._must_save_together:
            return False
        self._must_save_together = False
        self._submit_checkpoint()
        # If the disk fails, the group continues: the checkpointer reports it and tries again.
        is_saved = self.checkpointer.drain(context.machine.storage_timeout_s, lambda: context.heartbeat.beat("save"))
        if group.end_checkpoint(self.state.step if is_saved else None):
            self.checkpointer.kept_step = self.state.step
        return True

    # Checkpoints.

    def _restore(self, identity: dict[str, Any]) -> None:
        """Restore the newest checkpoint that any rank has."""
        context = self.context
        path = distributed.agree_on_checkpoint(context.ranks, context.paths, self._find_checkpoint())
        if context.ranks.environment.is_writer:
            checkpoint.quarantine_newer(context.paths, path)
        context.ranks.any(False)  # a barrier: checkpoints are copied and renamed before any rank reads or writes one
        if path is None:
            return
        for difference in checkpoint.list_environment_differences(path, identity):
            has_no_kernels = difference.startswith("kernels ") and not library.load_kernels().is_available
            reason = f" ({library.load_kernels().text})" if has_no_kernels else ""
            self._notice(f"from here on not bit-exact: {difference}{reason}")
        snapshot = rollback_snapshot = checkpoint.read(path)
        rollback_step = snapshot.state.rollback_step
        if rollback_step not in (0, snapshot.state.step):
            rollback_snapshot = checkpoint.read(context.paths.checkpoint(rollback_step))
        self.executor.restore(snapshot, rollback_snapshot)

    def _find_checkpoint(self) -> Path | None:
        """Return the newest valid checkpoint; in a group, that of the last common checkpoint, if it is valid."""
        context, step = self.context, None if self.context.group is None else self.context.group.resume_step
        if step == 0:  # later checkpoints are not common ones
            return None
        path = checkpoint.find_newest_valid(context.paths, context.spec, self._notice, step)
        if step is None or path == context.paths.checkpoint(step):
            return path
        self._notice(f"the common checkpoint of step {step} cannot be used; from here on not bit-exact")
        return checkpoint.find_newest_valid(context.paths, context.spec, self._notice)

    def _is_submitted(self) -> bool:
        """Return whether the current state was submitted for saving.

        Comparing steps is not enough: a state that was saved before its validation must be saved again after the
        validation, because the best step may differ. The budget is not compared, because it may have shrunk in a step
        that was then interrupted, and the journal contains the new budget.
        """
        return replace(self.state, budget=self._submitted.budget) == self._submitted

    def _submit_checkpoint(self) -> None:
        """Take a snapshot and submit it for saving, unless this state was already submitted."""
        if self._is_submitted():
            return
        snapshot, blocked_s = self.executor.snapshot()
        self._submitted = snapshot.state
        self.interval.record(snapshot.state.step, time.monotonic(), blocked_s, self.checkpointer.save_s)
        self.checkpointer.submit(snapshot, blocked_s)

    # The end after a stop request.

    def _stop(self) -> None:
        """Seal the last completed step, then end the attempt."""
        self.context.shutdown.acknowledge()
        self._exit_lock.acquire()  # blocks forever if the signal thread has the lock: that thread ends the process
        is_requested = self.context.shutdown.is_requested
        self._seal("interrupted" if is_requested else "interrupted_by_peer")
        if not is_requested:
            raise PeersLostError(f"another rank was asked to stop after step {self.state.step}")
        raise InterruptedRunError(f"stopped at step {self.checkpointer.sealed.step}")

    def _seal_from_signal_thread(self) -> None:
        """Seal the last completed step and end the process, because the training thread did not stop in time."""
        self._exit_lock.acquire()
        with self.executor.state_lock:
            self._seal("interrupted", without_peers=True)
        os._exit(EXIT_INTERRUPTED)

    def _seal(self, kind: Literal["interrupted", "interrupted_by_peer"], without_peers: bool = False) -> None:
        """Save the state, and write the event `kind`.

        With `without_peers`, the state is not saved if a snapshot needs the other ranks.
        """
        if not self._is_submitted() and not (without_peers and self.executor.has_residuals):
            self._submit_checkpoint()
        context, grace_period_s = self.context, self.context.machine.grace_period_s
        if not self.checkpointer.drain(grace_period_s, lambda: context.heartbeat.beat("save")):
            text = f"step {self.state.step} could not be saved within {grace_period_s:g} s ({self.checkpointer.outage})"
            context.journal.append("alert", text=text)
        context.journal.append(kind, step=self.checkpointer.sealed.step)

    def _notice(self, text: str) -> None:
        self.context.journal.append("notice", text=text)
