"""How much of a batch is computed at once, and how that changes when memory runs out: a value, no torch.

A budget is a function of what happened to it (failures and good steps, in order) and of nothing else. So a run that is
replayed from its journal comes to the same micro-batches, and to the same rounding of sums.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ratchet.config.schema import Settings
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import SettingsError
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.runs import rendezvous
from ratchet.training import memory_monitor

SHRINK = 0.8
"""Of the padded tokens that did not fit, at the first failure in a step; each further one in the same step halves."""
GROW = 1.25
GROW_AFTER_STEPS = 50
"""Good steps before a shrunk budget is tried a little larger; doubled each time that the larger one fails."""
LONGEST_WAIT_STEPS = 10_000


@dataclass(frozen=True)
class MicrobatchBudget:
    """The largest micro-batch, in padded tokens (rows x longest); a single row is computed whatever its length."""

    tokens: int | None = None
    """None: as many as `machine.micro_batch_rows` rows have."""
    failed_tokens: int = 0
    """The micro-batch that did not fit when the budget was last made smaller."""
    good_steps: int = 0
    """Steps since the budget last changed."""
    wait_steps: int = GROW_AFTER_STEPS
    """Good steps before it grows."""
    grown: bool = False
    """Whether the last change made it larger: a failure then doubles the wait."""

    def shrunk(self, failed_tokens: int, repeated: bool) -> "MicrobatchBudget":
        """After a micro-batch of `failed_tokens` padded tokens did not fit; `repeated`: not the first in this step.

        The result is smaller than what failed and never larger than before, so failures end at single rows. Those
        cannot be divided: that one row does not fit is for the caller to see.

        Raises:
            ValueError: `failed_tokens` is not positive.
        """
        if failed_tokens < 1:
            raise ValueError(f"a micro-batch has at least one token, not {failed_tokens}")
        before = failed_tokens if self.tokens is None else min(self.tokens, failed_tokens)
        tokens = before // 2 if repeated else min(before, int(SHRINK * failed_tokens))
        wait = min(LONGEST_WAIT_STEPS, 2 * self.wait_steps) if self.grown else self.wait_steps
        return MicrobatchBudget(max(1, tokens), failed_tokens, wait_steps=wait)

    def after_good_step(self) -> "MicrobatchBudget":
        """After a step that fitted; grows when it is time, and to no limit (None) rather than up to what failed.

        What did not fit once is tried again, for the want may have been another process's. If it was not, that costs
        one repeated micro-batch each time, and the wait between the times doubles.
        """
        good_steps = self.good_steps + 1
        if self.tokens is None or good_steps < self.wait_steps:
            return replace(self, good_steps=good_steps)
        larger = max(self.tokens + 1, int(GROW * self.tokens))
        return replace(self, tokens=larger if larger < self.failed_tokens else None, good_steps=0, grown=True)


# The micro-batches that a training would have under settings that are only being thought about.

ASSUMED_SHARE = 0.5
"""Of a row's tokens that is learned from, where no data says otherwise."""


def make_work_estimator(
    data: Path | None, device: torch.device, teacher: ModelSpec | None = None
) -> Callable[[Settings], MemoryWorkload]:
    """The largest micro-batches under some settings: of the prepared rows, else of rows as long as settings allow.

    There are as many ranks as `machine.gpus` says for this machine, on the fewest machines that `machine.nodes` allows.

    Args:
        data: where stage prepare has left them; None where it has not run.
        device: that would train.
        teacher: that train.distill names; counted where the settings have it in memory.
    """

    def finished(found: MemoryWorkload, settings: Settings) -> MemoryWorkload:
        found = replace(found, teacher=teacher if settings.train.distill.stays else None)
        return _divide_among_ranks(found, settings)

    if data is None:
        return lambda settings: finished(_assume_work(settings, device), settings)
    train, validation = token_files.load_rows(data, "train"), token_files.load_rows(data, "validation")

    def work(settings: Settings) -> MemoryWorkload:
        try:
            plan = BatchPlan(train.lengths, settings.train)
        except SettingsError:  # the longest rows would not fit into such packs
            found = _assume_work(settings, device)
        else:
            found = _cut_to_max_length(
                memory_monitor.compute_largest_work(plan, train, validation, settings.machine, device), settings
            )
        return finished(found, settings)

    return work


def _divide_among_ranks(work: MemoryWorkload, settings: Settings) -> MemoryWorkload:
    here = rendezvous.count_local_ranks(settings.machine)
    sharing = here if work.device == "cpu" else 1
    return work.among(here * settings.machine.node_range[0], sharing, settings.train.batch_rows)


def _cut_to_max_length(work: MemoryWorkload, settings: Settings) -> MemoryWorkload:
    """The same when rows that are longer than these settings allow are gone."""
    limit, checked = _longest_sequence_tokens(settings), settings.prepare.max_tokens
    share, checked_share = min(1.0, limit / work.row_tokens), min(1.0, checked / work.validation_tokens)
    return replace(
        work,
        row_tokens=min(limit, work.row_tokens),
        learned_tokens=max(1, round(share * work.learned_tokens)),
        validation_tokens=min(checked, work.validation_tokens),
        validation_learned_tokens=max(1, round(checked_share * work.validation_learned_tokens)),
        new_tokens=len(settings.base.added_tokens),
    )


def _assume_work(settings: Settings, device: torch.device) -> MemoryWorkload:
    length, checked, rows = (
        _longest_sequence_tokens(settings),
        settings.prepare.max_tokens,
        settings.machine.micro_batch_rows,
    )
    return MemoryWorkload(
        rows=rows,
        row_tokens=length,
        learned_tokens=max(1, round(ASSUMED_SHARE * length)),
        packed=settings.train.batching == "packed",
        device="cuda" if device.type == "cuda" else "cpu",
        validation_rows=rows,
        validation_tokens=checked,
        validation_learned_tokens=max(1, round(ASSUMED_SHARE * checked)),
        new_tokens=len(settings.base.added_tokens),
    )


def _longest_sequence_tokens(settings: Settings) -> int:
    return settings.train.pack_tokens if settings.train.batching == "packed" else settings.prepare.max_tokens
