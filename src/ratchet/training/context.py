"""Inputs of one training attempt: settings, model, rows, run directory and the services that a step uses."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.models.device import Model
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.fault_injection.injection import FaultInjector
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal
from ratchet.runs.signals import GracefulShutdown
from ratchet.training.distillation import OnlineTeacherReader, TeacherShardReader
from ratchet.training.distributed import RankEnvironment, RankGroup
from ratchet.training.group import GroupMember
from ratchet.training.memory_monitor import MemoryMonitor
from ratchet.training.step_timer import StepSpans


@dataclass(frozen=True)
class TrainingContext:
    """Inputs of one training attempt."""

    spec: RunSpec
    machine: Machine
    model: Model
    device: torch.device
    train_rows: TokenRows
    validation_rows: TokenRows
    paths: RunPaths
    journal: Journal
    heartbeat: Heartbeat
    shutdown: GracefulShutdown
    environment: dict[str, str]
    """Versions of libraries, device and related settings. Every checkpoint contains them, because a resumed run is
    bit-exact only if they are equal."""
    batch_plan: BatchPlan
    memory_monitor: MemoryMonitor
    suggest_memory_changes: Callable[[int], str]
    """Takes the tokens of a single row that does not fit into memory; returns advice for the user."""
    initial_micro_batch_tokens: int | None = None
    """Limit of padded tokens per micro-batch at the first step; None: only the settings limit a micro-batch."""
    initial_loss_scale: float = 1.0
    faults: FaultInjector = field(default_factory=FaultInjector)
    spans: StepSpans = field(default_factory=StepSpans)
    ranks: RankGroup = field(
        default_factory=lambda: RankGroup(RankEnvironment(), torch.device("cpu"), lambda: None, 0.0)
    )
    is_base_sharded: bool = False
    """Whether the base is sharded (sharding.py). Then layers are gathered from all ranks, and every rank must take part
    in every forward pass."""
    teacher: TeacherShardReader | OnlineTeacherReader | None = None
    group: GroupMember | None = None
    """Membership of the run in a group of runs that one process trains; None: the process trains only this run."""

    def computing(self) -> AbstractContextManager[None]:
        """Return the context for computations outside of a step, which excludes those of other runs of the process."""
        return nullcontext() if self.group is None else self.group.computing()

    @property
    def settings(self) -> Train:
        """Section `train` of params.yaml."""
        return self.spec.train
