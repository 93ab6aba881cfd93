"""The micro-batches that a training would have under settings that are only being thought about."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ratchet.config.schema import Settings
from ratchet.data import tokenization
from ratchet.data.batches import BatchPlan
from ratchet.errors import SettingsError
from ratchet.models.memory.forecast import Work
from ratchet.models.model_spec import Blueprint
from ratchet.runs import devices
from ratchet.training import memory_preflight

ASSUMED_SHARE = 0.5
"""Of a row's tokens that is learned from, where no data says otherwise."""


def works(data: Path | None, device: torch.device, teacher: Blueprint | None = None) -> Callable[[Settings], Work]:
    """The largest micro-batches under some settings: of the prepared rows, else of rows as long as settings allow.

    There are as many ranks as `machine.gpus` says for this machine, on the fewest machines that `machine.nodes` allows.

    Args:
        data: where stage prepare has left them; None where it has not run.
        device: that would train.
        teacher: that train.distill names; counted where the settings have it in memory.
    """

    def finished(found: Work, settings: Settings) -> Work:
        found = replace(found, teacher=teacher if settings.train.distill.stays else None)
        return _among_ranks(found, settings)

    if data is None:
        return lambda settings: finished(_assumed(settings, device), settings)
    train, validation = tokenization.rows(data, "train"), tokenization.rows(data, "validation")

    def work(settings: Settings) -> Work:
        try:
            plan = BatchPlan(train.lengths, settings.train)
        except SettingsError:  # the longest rows would not fit into such packs
            found = _assumed(settings, device)
        else:
            found = _cut(memory_preflight.work_of(plan, train, validation, settings.machine, device), settings)
        return finished(found, settings)

    return work


def _among_ranks(work: Work, settings: Settings) -> Work:
    here = devices.ranks_here(settings.machine)
    sharing = here if work.device == "cpu" else 1
    return work.among(here * settings.machine.node_range[0], sharing, settings.train.batch_rows)


def _cut(work: Work, settings: Settings) -> Work:
    """The same when rows that are longer than these settings allow are gone."""
    limit, checked = _longest(settings), settings.prepare.max_tokens
    share, checked_share = min(1.0, limit / work.row_tokens), min(1.0, checked / work.validation_tokens)
    return replace(
        work,
        row_tokens=min(limit, work.row_tokens),
        learned_tokens=max(1, round(share * work.learned_tokens)),
        validation_tokens=min(checked, work.validation_tokens),
        validation_learned_tokens=max(1, round(checked_share * work.validation_learned_tokens)),
        new_tokens=len(settings.base.added_tokens),
    )


def _assumed(settings: Settings, device: torch.device) -> Work:
    length, checked, rows = _longest(settings), settings.prepare.max_tokens, settings.machine.micro_batch_rows
    return Work(
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


def _longest(settings: Settings) -> int:
    return settings.train.pack_tokens if settings.train.batching == "packed" else settings.prepare.max_tokens
