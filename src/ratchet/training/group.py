"""Trains several runs with the same base and data in one process: a training group.

Each run is a member with a thread, a run directory and a training loop of its own, as if it were alone. Members share
the frozen base, and compute their micro-batches together in one pass of it (models/merged_pass.py). They go in rounds:
in each round, each member does one step. Members join and leave between two rounds.

The rounding of a merged pass depends on the members. So that a group that was killed resumes with the same bits, all
members save a checkpoint in the same round: when one of them wants to, and whenever a member has joined or left. A file
lists these common checkpoints, and a new process of the group waits for the same members and begins there.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ratchet.errors import InterruptedRunError
from ratchet.models import chunked_loss, merged_pass, oom
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, TeacherTargets
from ratchet.models.merged_pass import MergedModel, MergedPasses, RandomStream, SharedBase
from ratchet.runs.directory import RunPaths
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.storage import files

WAIT_S = 0.5
"""Seconds between two heartbeats of a member that waits for others."""

REJOIN_WAIT_S = 20.0
"""Seconds that a restarted group waits for the members of its last common checkpoint, in addition to
machine.restart_delay_s."""

MAX_MERGED_TOKENS = {"cpu": 384, "cuda": 16384}
"""Largest number of padded tokens in a merged pass, by device, because the memory of a pass grows with them.

On two cores, a pass over the rows of four runs takes 0.66 of the time of four passes for 512 tokens (hidden size 128),
0.75 to 1.15 for 2,048, and 1.2 for 4,096 (hidden size 512). With 384, four runs take 1.3 times the memory of one. The
number for GPUs is not measured."""

SEPARATE_PASSES = "the passes of this run are computed separately, not in those of the other runs"

_State = Literal["busy", "round", "pass", "checkpoint"]


class MemberShutdown(GracefulShutdown):
    """Request to stop one member of a group. It comes from the member's supervisor, not from a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.is_abandoned = False
        """Whether the supervisor is gone. The member then ends without saving, as a killed process would."""

    def request(self) -> None:
        """Ask the member to save its state and end."""
        self._is_requested = True

    def abandon(self) -> None:
        """Let the member end at once."""
        self.is_abandoned = self._is_requested = True

    def arm(self, grace_period_s: float, seal: Callable[[], None]) -> None:
        """Do nothing: a member that does not stop in time is killed with its group by its supervisor."""


@dataclass
class _MicroBatch:
    """A micro-batch that a member has submitted, and its result."""

    batch: SequenceBatch
    scale: float
    targets: TeacherTargets | None
    loss: float = 0.0
    error: Exception | None = None


@dataclass(eq=False)
class GroupMember:
    """A run in a group. All methods are called by the thread of the run."""

    group: "TrainingGroup"
    run_id: str
    journal: Journal
    shutdown: MemberShutdown
    heartbeat: Heartbeat
    restart_delay_s: float
    """Seconds after which its supervisor starts it again, when its process has died."""
    resume_step: int | None = None
    """Step of the last common checkpoint, from which the run must resume; None: the newest checkpoint."""
    reserved_bytes: int = 0
    """Memory that the run needs by its forecast, in addition to the process with the base; 0: it does not train yet."""
    _merged: MergedModel | None = None
    _random: RandomStream | None = None
    _model: Model = None
    _state: _State = "busy"
    _is_released: bool = True
    _is_admitted: bool = False
    _waits_for_memory: bool = False
    _wants_checkpoint: bool = False
    _must_save: bool = False
    _saved_step: int | None = None
    _is_recorded: bool = False
    _micro_batch: _MicroBatch | None = None

    def notice(self, text: str) -> None:
        """Write a text to the journal of the run."""
        self.journal.append("notice", text=text)

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the next step (dropout)."""
        self._random_stream.seed(seed)

    def begin_round(self, wants_checkpoint: bool) -> bool:
        """Wait until all members begin the next round. Return whether all of them must save a checkpoint first.

        Raises InterruptedRunError if the supervisor of this run is gone.
        """
        self._wants_checkpoint = wants_checkpoint
        self.group.wait(self, "round")
        return self._must_save

    def end_checkpoint(self, step: int | None) -> bool:
        """Wait until all members have tried to save their checkpoints. Return whether all of them could, so that the
        group now resumes from these checkpoints.

        Raises InterruptedRunError as `begin_round`.

        Args:
            step: step of the saved checkpoint; None: it could not be saved.
        """
        self._saved_step = step
        self.group.wait(self, "checkpoint")
        return self._is_recorded

    def forward_backward(self, batch: SequenceBatch, scale: float, targets: TeacherTargets | None) -> float:
        """Compute a micro-batch together with those of the other members, and add `scale` times its gradient to the
        parameters' gradients. Return the sum of its losses in nats.

        Raises InterruptedRunError as `begin_round`, and the exceptions of `chunked_loss.forward_backward`.
        """
        self._micro_batch = submitted = _MicroBatch(batch, scale, targets)
        try:
            self.group.wait(self, "pass")
        finally:
            self._micro_batch = None
        if submitted.error is not None:
            raise submitted.error
        return submitted.loss

    def load_base(self, key: str, load: Callable[[], Model]) -> Model:
        """Return a base model that shares the weights of the base with this key, which `load` loads for the first
        member. Call this inside `computing`."""
        return self.group.load_base(self, key, load)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Exclude the computations of other members inside the context."""
        with self.group.computing(lambda: self.heartbeat.beat("peers")):
            yield

    def leave(self) -> None:
        """Leave the group. The other members do not wait for this one any more. May be called again."""
        self.group.remove(self)

    def end(self) -> None:
        """Leave the group, and release the memory of the run."""
        self.leave()
        self._model = self._merged = None
        self.group.release(self)

    def attach(self, model: Model, device: torch.device) -> None:
        """Set the model of this run, whose base is a copy of the group's."""
        self._model, self._random = model, RandomStream(device)
        if (obstacle := merged_pass.find_obstacle(model)) is None:
            self._merged = MergedModel(model, self._random)
        else:
            self.notice(f"{SEPARATE_PASSES}: {obstacle}")

    @property
    def _random_stream(self) -> RandomStream:
        if self._random is None:
            raise RuntimeError("the member has no model yet")
        return self._random

    @property
    def _is_mergeable(self) -> bool:
        """Whether the submitted micro-batch can be merged with others. Recomputed activations would draw other random
        numbers."""
        if self._merged is None or self._micro_batch is None or self._micro_batch.targets is not None:
            return False
        return not (self._merged.has_dropout and self._merged.recomputes_activations)


class TrainingGroup:
    """The runs that a process trains together."""

    def __init__(self, record: Path) -> None:
        """Begin a group, or resume it. `record` is the file that lists its common checkpoints."""
        self._record = record
        self._expected, self._limit = _read_record(record)
        """Step and attempt of each run in the last common checkpoint of an earlier process; and the largest number of
        micro-batches in a pass, after a pass ran out of memory."""
        self._began_s: float | None = None
        """Time at which the first run joined a group that has not begun yet."""
        self._has_begun = False
        self._members: list[GroupMember] = []
        """Runs for which the others wait."""
        self._present: list[GroupMember] = []
        """Runs that use memory: those above, and those that seal their results."""
        self._has_changed = True
        """Whether a member has joined or left since the last common checkpoint."""
        self._changed = threading.Condition()
        self._compute_lock = threading.Lock()
        # A thread of its own, because each thread that computes keeps memory: on a base of 60M parameters, four runs
        # took 4.7 GB when any member's thread computed the passes, and 1.3 GB with this thread.
        self._pool = ThreadPoolExecutor(1, "passes")
        self._is_computing = False
        self._bases: dict[str, tuple[SharedBase, MergedPasses]] = {}
        self._base_of: dict[GroupMember, str] = {}

    # Members.

    def join(
        self, paths: RunPaths, journal: Journal, shutdown: MemberShutdown, heartbeat: Heartbeat, restart_delay_s: float
    ) -> GroupMember:
        """Add a run, which takes part from its first `begin_round` on."""
        with self._changed:
            if self._began_s is None:
                self._began_s = time.monotonic()
            member = GroupMember(self, paths.root.name, journal, shutdown, heartbeat, restart_delay_s)
            if not self._has_begun and member.run_id in self._expected:
                member.resume_step, attempt = self._expected[member.run_id]
                if any(e.kind == "step" and e.attempt > attempt for e in JournalReader(paths.journal).read()):
                    member.notice(
                        f"another process has trained this run since the common checkpoint of step "
                        f"{member.resume_step}; resuming from the newest checkpoint"
                    )
                    member.resume_step = None
            self._members.append(member)
            self._present.append(member)
            return member

    def remove(self, member: GroupMember) -> None:
        """Remove a run. Called by `GroupMember.leave`."""
        with self._changed:
            if member in self._members:
                self._members.remove(member)
                self._base_of.pop(member, None)
                self._has_changed = self._has_changed or member._is_admitted
                self._changed.notify_all()

    def release(self, member: GroupMember) -> None:
        """Release the memory of a run. Called by `GroupMember.end`."""
        with self._changed:
            if member in self._present:
                self._present.remove(member)
                self._changed.notify_all()

    # Memory and models.

    def load_base(self, member: GroupMember, key: str, load: Callable[[], Model]) -> Model:
        """Return a base model for a member. Called by `GroupMember.load_base`."""
        if key not in self._bases:
            base = SharedBase(load())
            self._bases[key] = base, MergedPasses(base)
        with self._changed:
            self._base_of[member] = key
        return self._bases[key][0].copy()

    def sum_reserved_bytes(self, member: GroupMember) -> int:
        """Return the memory that is reserved for the other members."""
        with self._changed:
            return sum(other.reserved_bytes for other in self._present if other is not member)

    def wait_for_memory(self, member: GroupMember) -> bool:
        """Wait until another member has left; return False at once if this member is the only one.

        Raises InterruptedRunError if the supervisor of the run is gone, or asks it to stop.
        """
        with self._changed:
            others = [other for other in self._present if other is not member and other.reserved_bytes]
            if not others:
                return False
            member._waits_for_memory = True
            while all(other in self._present for other in others):
                if member.shutdown.is_requested:
                    raise InterruptedRunError("stopped before it was loaded")
                member.heartbeat.beat("load")
                self._changed.wait(WAIT_S)
            member._waits_for_memory = False
            return True

    @contextmanager
    def computing(self, beat: Callable[[], None]) -> Iterator[None]:
        """Exclude other computations of the process inside the context."""
        while not self._compute_lock.acquire(timeout=WAIT_S):
            beat()
        try:
            yield
        finally:
            self._compute_lock.release()

    # Rounds.

    def wait(self, member: GroupMember, state: _State) -> None:
        """Wait until all members have come so far that this one can continue. Called by the methods of GroupMember."""
        with self._changed:
            member._state, member._is_released = state, False
            self._changed.notify_all()
            while not member._is_released:
                if self._is_computing:
                    pass
                elif member.shutdown.is_abandoned:
                    self.remove(member)
                    raise InterruptedRunError("the supervisor of this run is gone")
                elif self._advance():
                    self._changed.notify_all()
                    continue
                elif submitted := self._find_complete_pass():
                    self._run_pass(submitted, member.heartbeat)
                    continue
                self._changed.wait(WAIT_S)
                member.heartbeat.beat("peers")

    def _advance(self) -> bool:
        """Release the members if all of them have reached the next round, or have saved a common checkpoint."""
        admitted = [member for member in self._members if member._is_admitted]
        waiting = [member for member in self._members if not member._is_released]
        if admitted and all(member in waiting and member._state == "checkpoint" for member in admitted):
            self._record_checkpoint(admitted)
            _release(admitted)
            return True
        if not all(member in waiting and member._state == "round" for member in admitted):
            return False
        joining = [member for member in waiting if member._state == "round" and not member._is_admitted]
        if not admitted and not (joining and self._may_begin()):
            return False
        if joining or self._has_changed or any(member._wants_checkpoint for member in admitted):
            must_save, self._has_changed = True, False
        else:
            must_save = False
        for member in (*admitted, *joining):
            member._is_admitted, member._must_save = True, must_save
        self._has_begun = True
        _release([*admitted, *joining])
        return True

    def _record_checkpoint(self, members: Sequence[GroupMember]) -> None:
        """Record a common checkpoint, unless a member could not save its own."""
        runs = {m.run_id: (m._saved_step, m.journal.attempt) for m in members if m._saved_step is not None}
        is_recorded = len(runs) == len(members)
        if is_recorded:
            try:
                files.write_atomic(self._record, json.dumps({"runs": runs, "limit": self._limit}, sort_keys=True))
            except OSError as error:
                is_recorded = False
                for member in members:
                    member.notice(f"{self._record} cannot be written ({error}); an earlier common checkpoint counts")
        for member in members:
            member._is_recorded = is_recorded

    def _may_begin(self) -> bool:
        """Return whether a group may begin: all runs have been loaded, and those of the last common checkpoint are
        back or have had the time."""
        if self._has_begun:
            return True
        if any(member._is_released and not member._waits_for_memory for member in self._members):
            return False
        wait_s = REJOIN_WAIT_S + max((member.restart_delay_s for member in self._members), default=0.0)
        has_waited = self._began_s is not None and time.monotonic() - self._began_s > wait_s
        return has_waited or self._expected.keys() <= {member.run_id for member in self._members}

    def _find_complete_pass(self) -> list[GroupMember]:
        """Return the members whose micro-batches can be computed now, in the order of their runs; none while a member
        may still submit one."""
        admitted = [member for member in self._members if member._is_admitted]
        if any(member._is_released for member in admitted):
            return []
        return sorted((member for member in admitted if member._state == "pass"), key=lambda member: member.run_id)

    def _run_pass(self, submitted: Sequence[GroupMember], heartbeat: Heartbeat) -> None:
        """Compute micro-batches, with the lock released. `heartbeat` is that of the calling thread's run."""
        self._is_computing = True
        self._changed.release()
        try:
            with self.computing(lambda: heartbeat.beat("peers")):
                heartbeat.beat("step")
                self._pool.submit(self._compute, submitted, torch.get_num_threads()).result()
        except Exception as error:  # each of the runs raises it
            for member in submitted:
                if member._micro_batch is not None:
                    member._micro_batch.error = error
        finally:
            self._changed.acquire()
            self._is_computing = False
            _release(submitted)
            self._changed.notify_all()

    # Computation.

    def _compute(self, members: Sequence[GroupMember], threads: int) -> None:
        torch.set_num_threads(threads)
        # A pass recomputes activations for all of its runs or for none.
        merged: dict[tuple[str, bool], list[GroupMember]] = {}
        for member in members:
            if member._is_mergeable and member._merged is not None:
                key = self._base_of[member], member._merged.recomputes_activations
                merged.setdefault(key, []).append(member)
            else:
                _compute_alone(member)
        for (base, _), submitted in merged.items():
            for part in self._divide(submitted):
                self._compute_merged(base, part)

    def _divide(self, members: Sequence[GroupMember]) -> list[list[GroupMember]]:
        """Divide members into passes."""
        parts: list[list[GroupMember]] = []
        rows = columns = 0
        for member in members:
            item = member._micro_batch
            if item is None:
                raise RuntimeError("the member has submitted no micro-batch")
            added, longest = item.batch.input_ids.shape
            largest = MAX_MERGED_TOKENS[item.batch.input_ids.device.type]
            is_full = bool(parts) and len(parts[-1]) == self._limit
            if not parts or is_full or (rows + added) * max(columns, longest) > largest:
                parts.append([])
                rows = columns = 0
            parts[-1].append(member)
            rows, columns = rows + added, max(columns, longest)
        return parts

    def _compute_merged(self, base: str, members: Sequence[GroupMember]) -> None:
        """Compute micro-batches in one pass; if memory runs out, in two passes of half as many, and so on."""
        if len(members) == 1:
            _compute_alone(members[0])
            return
        gradients, states = _take_gradients(members), [member._random_stream.state() for member in members]
        items = [(member._merged, member._micro_batch) for member in members]
        pairs = [(model, item) for model, item in items if model is not None and item is not None]
        failure: Exception | None = None
        try:
            losses = self._bases[base][1].forward_backward(
                [model for model, _ in pairs], [item.batch for _, item in pairs], [item.scale for _, item in pairs]
            )
        except Exception as error:
            failure = error.with_traceback(None)  # the traceback would keep the tensors of the pass in memory
        if failure is None:
            _put_gradients(gradients, is_sum=True)
            for (_, item), loss in zip(pairs, losses, strict=True):
                item.loss = loss
            return
        if oom.is_device_lost(failure):  # nothing can be computed any more
            for _, item in pairs:
                item.error = failure
            return
        _put_gradients(gradients, is_sum=False)
        for member, state in zip(members, states, strict=True):
            member._random_stream.restore(state)
        if oom.is_out_of_memory(failure):
            oom.release_memory()
            half = -(-len(members) // 2)
            self._limit = half if self._limit is None else min(self._limit, half)
            text = (
                f"the micro-batches of {len(members)} runs do not fit into memory together; from now on, at most "
                f"{self._limit} are computed at a time"
            )
            for member in members:
                member.notice(text)
            for part in (members[:half], members[half:]):
                self._compute_merged(base, part)
            return
        for member in members:  # an error of one run must not end the others
            member._merged = None
            member.notice(f"{SEPARATE_PASSES}: {failure}")
            _compute_alone(member)


def _release(members: Sequence[GroupMember]) -> None:
    for member in members:
        member._state, member._is_released = "busy", True


def _compute_alone(member: GroupMember) -> None:
    item = member._micro_batch
    if item is None:
        raise RuntimeError("the member has submitted no micro-batch")
    try:
        with member._random_stream.use():
            loss = chunked_loss.compute_loss(member._model, item.batch, item.scale, item.targets)
            loss.backward()
        item.loss = loss.item()
    except Exception as error:  # raised again in the thread of the member, without what the pass has in memory
        item.error = error.with_traceback(None)


_Gradients = list[tuple[torch.nn.Parameter, torch.Tensor | None]]


def _take_gradients(members: Sequence[GroupMember]) -> _Gradients:
    """Remove and return the gradients of earlier micro-batches, so that a failing pass cannot change them."""
    gradients: _Gradients = []
    for member in members:
        for parameter in member._model.parameters():
            if parameter.requires_grad:
                gradients.append((parameter, parameter.grad))
                parameter.grad = None
    return gradients


def _put_gradients(gradients: _Gradients, is_sum: bool) -> None:
    """Put gradients back; with `is_sum`, add those of the pass to them."""
    for parameter, earlier in gradients:
        if not is_sum:
            parameter.grad = earlier
        elif earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def _read_record(path: Path) -> tuple[dict[str, tuple[int, int]], int | None]:
    try:
        content: Any = json.loads(path.read_bytes())
        limit = content["limit"]
        runs = {run_id: (int(step), int(attempt)) for run_id, (step, attempt) in content["runs"].items()}
        return runs, limit and int(limit)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, None  # there is no common checkpoint
