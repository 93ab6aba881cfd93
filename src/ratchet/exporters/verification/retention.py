"""Measures what each adapter lost in a merge: the loss of its answers alone and in the merged model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratchet.data import token_files
from ratchet.exporters.inputs import ExportJob
from ratchet.exporters.merge.recipe import WeightedAdapter
from ratchet.exporters.verification import reference
from ratchet.models import loading, oom, scoring
from ratchet.models.device import Model
from ratchet.quality_gate import paired_test
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan
from ratchet.storage.records.export import AdapterRetention

ROWS = 200
"""Maximum number of validation rows of each adapter. Rows are ordered by a digest, so the first ones are a sample."""
PLAN = PairedTestPlan(confidence=0.975, power=0.8, discordance=0.1, resamples=9999, seed=0)
"""Two bounds of 97.5 % make a 95 % interval. Power and discordance affect only sample sizes, which are not used."""


@dataclass(frozen=True)
class _AdapterRows:
    """Validation rows on which an adapter is measured."""

    input_ids: list[list[int]]
    labels: list[list[int]]

    def losses(self, model: Model, pad_token_id: int) -> list[float]:
        """Return the mean nats per answer token of each row."""
        losses = []
        for ids, labels in zip(self.input_ids, self.labels, strict=True):
            [row] = scoring.score_rows(model, [ids], [labels], pad_token_id)
            losses.append(row.nll / row.tokens)
        return losses


def measure_retention(job: ExportJob, merged: Path) -> tuple[AdapterRetention, ...]:
    """Measure every adapter of a merge on its own validation rows. At most one model is in memory at a time."""
    export, root = job.settings.export, job.layout.root
    names = ["trained", *(entry.adapter for entry in export.additional_adapters)]
    folders = [
        job.layout.data,
        *(root / e.prepared_data if e.prepared_data else job.layout.data for e in export.additional_adapters),
    ]
    recipe, pad = job.recipe("dequantized"), job.tokenizer().pad_token_id
    rows = [_read_rows(folder) for folder in folders]
    model = loading.load_plain(merged, job.dtype, job.device, job.base.remote_code)
    merged_losses = [part.losses(model, pad) for part in rows]
    del model
    oom.release_memory()
    found = []
    for number, (name, adapter, part) in enumerate(zip(names, recipe.adapters, rows, strict=True)):
        job.progress(f"what the adapters lost: {name}", number, len(names))
        alone = replace(recipe, adapters=(WeightedAdapter(adapter.adapter),), modules=(), method="linear")
        model = reference.load_adapted_model(alone)
        alone_losses = part.losses(model, pad)
        with reference.disable_adapters(model):
            base_losses = part.losses(model, pad)
        del model
        oom.release_memory()
        # A positive difference is an improvement, so the bounds of the loss change sign.
        pairs = PairedScores(merged_losses[number], alone_losses, "lower")
        difference = paired_test.compare(pairs, 0.0, PLAN)
        found.append(
            AdapterRetention(
                adapter=name, weight=adapter.weight, rows=len(part.labels), base=_mean(base_losses),
                alone=_mean(alone_losses), merged=_mean(merged_losses[number]), low=-difference.high,
                high=-difference.low,
            )
        )  # fmt: skip
    return tuple(found)


def _read_rows(folder: Path) -> _AdapterRows:
    dataset = token_files.open_split(folder, "validation").select_columns(["input_ids", "labels"])
    part = dataset[:ROWS]
    return _AdapterRows(list(part["input_ids"]), list(part["labels"]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
