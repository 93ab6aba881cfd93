"""The size limit of micro-batches, which shrinks when memory runs out, and the largest micro-batches of given settings.

A budget depends only on the history of failures and good steps. So a run that is replayed from its journal gets the
same micro-batches, and sums are rounded the same way.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from ratchet.config.settings import Settings
from ratchet.config.train import Objective
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.errors import SettingsError
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.runs import rendezvous
from ratchet.training import memory_monitor

SHRINK = 0.8
"""New budget after the first failure in a step, as a share of the padded tokens that did not fit. Each further failure
in the same step halves the budget."""
GROW = 1.25
"""Factor by which a shrunk budget grows after enough good steps."""
GROW_AFTER_STEPS = 50
"""Number of good steps before a shrunk budget grows. It doubles each time that a grown budget fails."""
MAX_WAIT_STEPS = 10_000
DEFAULT_TRAINED_SHARE = 0.5
"""Assumed share of a row's tokens that are trained, if stage prepare has not run."""


@dataclass(frozen=True)
class MicrobatchBudget:
    """Limit of a micro-batch in padded tokens (number of rows times the longest row). A single row is computed even if
    it is longer than the limit."""

    tokens: int | None = None
    """The limit; None: only `machine.micro_batch_size` limits a micro-batch."""
    failed_tokens: int = 0
    """Padded tokens of the micro-batch that did not fit when the budget last shrank."""
    good_steps: int = 0
    """Number of good steps since the budget last changed."""
    wait_steps: int = GROW_AFTER_STEPS
    """Number of good steps before the budget grows."""
    grown: bool = False
    """Whether the last change enlarged the budget. If so, a failure doubles `wait_steps`."""

    def shrink(self, failed_tokens: int, repeated: bool) -> "MicrobatchBudget":
        """Return the budget after a micro-batch did not fit; `repeated`: not for the first time in this step.

        The result is smaller than `failed_tokens` and never larger than the present budget, so repeated failures end at
        single rows. The caller handles a single row that does not fit, because it cannot be divided.
        """
        if failed_tokens < 1:
            raise ValueError(f"failed_tokens: found {failed_tokens}; expected at least 1")
        limit = failed_tokens if self.tokens is None else min(self.tokens, failed_tokens)
        tokens = limit // 2 if repeated else min(limit, int(SHRINK * failed_tokens))
        wait = min(MAX_WAIT_STEPS, 2 * self.wait_steps) if self.grown else self.wait_steps
        return MicrobatchBudget(max(1, tokens), failed_tokens, wait_steps=wait)

    def record_good_step(self) -> "MicrobatchBudget":
        """Return the budget after a step that fitted.

        The budget grows after `wait_steps` good steps. When the budget reaches the size that failed, the limit is
        removed (None), so that this size is tried again: when it failed, another process may have used the memory.
        Another failure costs one repeated step, and doubles the wait.
        """
        good_steps = self.good_steps + 1
        if self.tokens is None or good_steps < self.wait_steps:
            return replace(self, good_steps=good_steps)
        larger = max(self.tokens + 1, int(GROW * self.tokens))
        return replace(self, tokens=larger if larger < self.failed_tokens else None, good_steps=0, grown=True)


# The micro-batches of hypothetical settings, for forecasts.


def make_work_estimator(
    data: Path | None, device: torch.device, teacher: ModelSpec | None = None
) -> Callable[[Settings], MemoryWorkload]:
    """Return a function that computes the largest micro-batches under given settings.

    The micro-batches consist of prepared rows or, without data, of rows that are as long as the settings allow. The
    number of ranks is `machine.gpus` of this machine times the fewest machines that `machine.nodes` allows.

    Args:
        data: output of stage prepare; None if the stage has not run.
        device: the device that would train.
        teacher: the teacher of train.distill; its memory counts if the settings keep it in memory.
    """

    @lru_cache(maxsize=2)
    def load_rows(folder: Path, objective: Objective) -> tuple[TokenRows, TokenRows]:
        return token_files.load_rows(folder, "train", objective), token_files.load_rows(folder, "validation", objective)

    def estimate_work(settings: Settings) -> MemoryWorkload:
        work = _assume_work(settings, device)
        if data is not None:
            rows = load_rows(data, settings.train.objective)
            with suppress(SettingsError):  # the longest rows would not fit into packs of this size
                plan = BatchPlan(rows[0].lengths, settings.train)
                work = _cut_to_max_length(
                    memory_monitor.compute_largest_work(plan, *rows, settings.machine, device), settings
                )
        work = replace(work, teacher=teacher if settings.train.distill.is_online else None)
        local_ranks = rendezvous.count_local_ranks(settings.machine)
        ranks_per_memory = local_ranks if work.device == "cpu" else 1
        return work.on_ranks(local_ranks * settings.machine.node_range[0], ranks_per_memory, settings.train.batch_size)

    return estimate_work


def _cut_to_max_length(work: MemoryWorkload, settings: Settings) -> MemoryWorkload:
    """Return the workload with row lengths cut to the maximum of the settings."""
    limit, validation_limit = _longest_sequence_tokens(settings), settings.prepare.max_tokens
    share = min(1.0, limit / work.row_tokens)
    validation_share = min(1.0, validation_limit / work.validation_tokens)
    return replace(
        work,
        row_tokens=min(limit, work.row_tokens),
        learned_tokens=max(1, round(share * work.learned_tokens)),
        validation_tokens=min(validation_limit, work.validation_tokens),
        validation_learned_tokens=max(1, round(validation_share * work.validation_learned_tokens)),
        new_tokens=len(settings.base.added_tokens),
    )


def _assume_work(settings: Settings, device: torch.device) -> MemoryWorkload:
    length, validation_length = _longest_sequence_tokens(settings), settings.prepare.max_tokens
    answers = settings.machine.micro_batch_size * settings.train.rows_per_example
    rows = settings.machine.micro_batch_size if settings.train.batching == "packed" else answers
    return MemoryWorkload(
        rows=rows,
        row_tokens=length,
        learned_tokens=max(1, round(DEFAULT_TRAINED_SHARE * length)),
        packed=settings.train.batching == "packed",
        device="cuda" if device.type == "cuda" else "cpu",
        validation_rows=answers,
        validation_tokens=validation_length,
        validation_learned_tokens=max(1, round(DEFAULT_TRAINED_SHARE * validation_length)),
        new_tokens=len(settings.base.added_tokens),
        rows_per_example=1 if settings.train.batching == "packed" else settings.train.rows_per_example,
    )


def _longest_sequence_tokens(settings: Settings) -> int:
    return settings.train.pack_tokens if settings.train.batching == "packed" else settings.prepare.max_tokens
