"""Scores models for benchmarks/distill.py: per row, in pairs, and for the time of one answer."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from distill_world import CPU
from report_rows import Row, at_least, told
from torch.nn import functional

from ratchet.config.sweep import Direction
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import scoring
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, compute_all_logits
from ratchet.quality_gate import finalists
from ratchet.quality_gate.finalists import FinalistComparator, FinalistScores
from ratchet.storage.records.sweep import SweepObjective

LEVEL = 0.025
"""One-sided error of each end of an interval; both ends together give 95 %."""
BATCH = 32


@dataclass(frozen=True)
class Scores:
    """Per-row scores of one model."""

    right: list[float]
    """1 for each row whose greedy answer equals the reference."""
    nats: list[float]
    """Negative log-likelihood of each row's reference answer."""

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.right)

    @property
    def loss(self) -> float:
        """Nats per row."""
        return statistics.mean(self.nats)


def scores(model: Model, rows: TokenRows) -> Scores:
    """Score all rows. The greedy answer equals the reference if each of its tokens is the most likely one."""
    right, nats = [], []
    for start in range(0, len(rows), BATCH):
        batch = SequenceBatch.from_sequences(rows, [[row] for row in range(start, min(start + BATCH, len(rows)))], CPU)
        targets = batch.labels[:, 1:]
        with torch.no_grad():
            logits = compute_all_logits(model, batch)[:, :-1].float()
        nll = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
        nats += nll.sum(dim=1).tolist()
        right += ((logits.argmax(dim=-1) == targets) | (targets == IGNORE_INDEX)).all(dim=1).float().tolist()
    return Scores(right, nats)


@dataclass(frozen=True)
class Compared:
    """Two ways of training; the first is expected to be better."""

    first: str
    second: str
    targets: tuple[str, ...] = ()
    """Metrics (accuracy, loss) in which the first must be reliably better; otherwise the benchmark fails."""


def compared(
    what: str, found: dict[str, list[list[float]]], pair: Compared, tokens_of: list[float] | None
) -> Iterator[Row]:
    """Yield the advantage of the first model, with an interval over rows and seeds.

    Args:
        what: `accuracy` or `loss`.
        found: scores by way of training, seed and row.
        pair: the two ways of training.
        tokens_of: for `loss`, the answer tokens of each row.
    """
    wanted: Direction = "maximize" if tokens_of is None else "minimize"
    comparator = FinalistComparator(SweepObjective(metric=what, direction=wanted), 1 - LEVEL, weights=tokens_of)
    one, other = (
        FinalistScores(number, {}, tuple(f"{who}{k}" for k in range(len(found[who]))), found[who])
        for number, who in enumerate((pair.first, pair.second))
    )
    better = finalists.compare_pair(comparator, (one, other), (one, other), LEVEL)
    worse = finalists.compare_pair(comparator, (other, one), (one, other), LEVEL)
    name = f"{what}: gain of {pair.first} over {pair.second}"
    yield told(name, better.value)
    yield told(f"{name}, upper end (95 %)", -worse.low)
    low = f"{name}, lower end (95 %)"
    yield at_least(low, better.low, 0.0) if what in pair.targets else told(low, better.low)


def means(what: str, found: dict[str, list[list[float]]], tokens_of: list[float] | None) -> Iterator[Row]:
    """Yield the mean of each method, and the lowest and highest mean of its seeds."""
    for who, several in found.items():
        each = [math.fsum(one) / (len(one) if tokens_of is None else math.fsum(tokens_of)) for one in several]
        yield told(f"{what}: {who}", statistics.mean(each))
        if len(each) > 1:
            yield told(f"{what}: {who}, least of the seeds", min(each))
            yield told(f"{what}: {who}, most of the seeds", max(each))


def seconds_per_answer(models: dict[str, Model], rows: TokenRows, pad: int, timed: int) -> dict[str, list[float]]:
    """Return the seconds per answer of each model on the same rows, one at a time; the models take turns. All models
    generate as many tokens as the reference has, so that times differ by the model and not by the length of answers."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for row in range(min(timed, len(rows))):
        prompt, given = _divided(rows, row)
        for name in models if row % 2 else reversed(models):
            begun = time.perf_counter()
            scoring.generate(models[name], [prompt], [], len(given), pad)
            found[name].append(time.perf_counter() - begun)
    return found


def _divided(rows: TokenRows, row: int) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer of a row, without the tokens that the template writes after the end of the
    turn."""
    span = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
    ids, labels = rows.input_ids[span].tolist(), rows.labels[span].tolist()
    first = next(place for place, label in enumerate(labels) if label != IGNORE_INDEX)
    return ids[:first], [label for label in labels if label != IGNORE_INDEX]
