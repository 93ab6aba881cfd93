"""Which differences are more than chance: only where the same rows were scored under one contract.

The statistics are the gate's (gating/paired) on test rows, and those of a sweep's finals (gating/seeds) on validation
rows, where seeds count too. Of each pair the leader is picked by these very scores, so p-values are doubled; then
Holm's correction over everything that one page compares.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

from ratchet.config_gate import Gate
from ratchet.digest import SHORT
from ratchet.gating import matching, multiplicity, paired, seeds
from ratchet.gating.contest import Contender, Contest
from ratchet.gating.paired import Plan
from ratchet.history.evaluations import Examined
from ratchet.records_evaluation import Metric
from ratchet.records_held_out import LOSS, HeldOut
from ratchet.records_sweep import Measure

T = TypeVar("T")

METRICS = 24
"""Of one pair that are compared, at most: with each claim the others must be surer."""

TEST, VALIDATION = "test rows", "validation rows"


@dataclass(frozen=True)
class Scored:
    """One subject's scores."""

    name: str
    examined: Sequence[Examined]
    held_out: Sequence[Mapping[str, HeldOut]]
    """Of each of its trainings, by question."""


@dataclass(frozen=True)
class Finding:
    """Two subjects on the same rows."""

    metric: str
    rows: str
    leader: str
    """Whose figure is better."""
    other: str
    values: tuple[float, float]
    """The leader's and the other's."""
    measured: Metric | None
    """For its unit; None of validation rows."""
    difference: float
    """Positive: the leader is better; of perplexities the fraction by which it is lower."""
    low: float
    """Bound that it exceeds, with half the chance of error that a page has for one claim."""
    n: int
    p: float
    """Two-sided."""
    method: str
    p_adjusted: float = 1.0
    """After Holm's correction."""
    is_real: bool = False
    """Whether the leader is better beyond doubt."""


@dataclass(frozen=True)
class Silence:
    """Two subjects of which nothing can be said, and why."""

    pair: tuple[str, str]
    why: str


def findings(scored: Sequence[Scored], gate: Gate, only: str | None = None) -> tuple[list[Finding], list[Silence]]:
    """Every comparison that can be made, and the pairs that allow none.

    Args:
        scored: the subjects.
        gate: confidence, resamples and seed of the bootstrap.
        only: name of the one that each of the others is compared with; None: everybody is, with everybody.
    """
    found: list[Finding] = []
    silent: list[Silence] = []
    pairs = (pair for pair in combinations(scored, 2) if only is None or only in (pair[0].name, pair[1].name))
    for first, second in pairs:
        made = [*_on_test_rows(first, second, gate), *_on_validation_rows(first, second, scored, gate)]
        found += made
        if not made:
            silent.append(Silence((first.name, second.name), _why(first, second)))
    level = 1 - gate.confidence
    adjusted = multiplicity.holm([one.p for one in found])
    return [
        replace(one, p_adjusted=p, is_real=p < level and one.low > 0) for one, p in zip(found, adjusted, strict=True)
    ], silent


def _on_test_rows(first: Scored, second: Scored, gate: Gate) -> Iterator[Finding]:
    pair = _alike(first, second)
    if pair is None:
        return
    names = [name for name in sorted(pair[0].samples) if name in pair[1].samples]
    for name in names[:METRICS]:
        metrics = [one.scores.metrics.get(name) for one in pair]
        if metrics[0] is None or metrics[1] is None or metrics[0].better == "unknown" or metrics[0].kind == "figure":
            continue
        if pair[0].samples[name].keys() != pair[1].samples[name].keys():
            continue
        samples = [matching.in_order(one.samples[name]) for one in pair]
        pairs = matching.pairs_of(metrics[0], samples[0], samples[1], pair[0].groups)
        order = (0, 1) if matching.difference(pairs) >= 0 else (1, 0)
        if order == (1, 0):
            pairs = replace(pairs, new=pairs.old, old=pairs.new)
        try:
            one = paired.compare(pairs, 0.0, _plan(gate))
        except ValueError:  # a score that is no number, or rows of no tokens: nothing to be said
            continue
        figures = (metrics[0].value, metrics[1].value)
        yield Finding(
            name, TEST, *_by(order, (first.name, second.name)), _by(order, figures), metrics[0], one.difference,
            one.low, one.n, min(1.0, 2 * one.p), one.method,
        )  # fmt: skip


def _alike(first: Scored, second: Scored) -> tuple[Examined, Examined] | None:
    """Scores of both in one evaluation under one contract, with all samples."""
    return next(
        (
            (one, other)
            for one in first.examined
            for other in second.examined
            if one.samples and other.samples and one.scores.contract == other.scores.contract
        ),
        None,
    )


def _on_validation_rows(first: Scored, second: Scored, everyone: Sequence[Scored], gate: Gate) -> Iterator[Finding]:
    questions = _shared(first, second)
    if not questions:
        return
    question = max(questions, key=lambda one: (len(first.held_out[0][one].ids), one))
    known = first.held_out[0][question]
    among = [one for one in everyone if one.held_out and all(question in run for run in one.held_out)]
    for metric in known.values:
        if not all(metric in run[question].values for one in among for run in one.held_out):
            continue
        contest = Contest(
            measure=Measure(metric=metric, direction="minimize" if metric == LOSS else "maximize"),
            confidence=gate.confidence,
            weights=known.tokens if metric == LOSS else None,
            groups=known.groups if any(group is not None for group in known.groups) else None,
            resamples=gate.resamples,
            seed=gate.seed,
        )
        contenders = {
            one.name: Contender(
                number, {}, tuple(run[question].run_id for run in one.held_out),
                [run[question].values[metric] for run in one.held_out],
            )
            for number, one in enumerate(among)
        }  # fmt: skip
        leader, other = sorted((first.name, second.name), key=lambda name: contest.order(contenders[name]))
        pair = contenders[leader], contenders[other]
        one = seeds.difference(contest, pair, list(contenders.values()), (1 - gate.confidence) / 2)
        values = contest.mean(pair[0].rows), contest.mean(pair[1].rows)
        yield Finding(
            metric, VALIDATION, leader, other, values, None, one.value, one.low, len(known.ids),
            min(1.0, 2 * one.p), one.method,
        )  # fmt: skip


def _shared(first: Scored, second: Scored) -> set[str]:
    """Questions that every training of both has answered, computed alike."""
    runs = [*first.held_out, *second.held_out]
    if not first.held_out or not second.held_out:
        return set()
    shared = set.intersection(*(set(run) for run in runs))
    return {one for one in shared if all(run[one].arithmetic == runs[0][one].arithmetic for run in runs)}


def _plan(gate: Gate) -> Plan:
    return Plan((1 + gate.confidence) / 2, gate.power, gate.discordance, gate.resamples, gate.seed)


def _by(order: tuple[int, int], pair: tuple[T, T]) -> tuple[T, T]:
    return pair[order[0]], pair[order[1]]


def _why(first: Scored, second: Scored) -> str:
    """Why two subjects cannot be compared row by row."""
    for one in (first, second):
        if not one.examined and not any(one.held_out):
            return f"{one.name} was not evaluated"
    contracts = [{found.scores.contract for found in one.examined} for one in (first, second)]
    if all(contracts) and not contracts[0] & contracts[1]:
        data = [{found.report.data_digest for found in one.examined} for one in (first, second)]
        what = "on different data" if not data[0] & data[1] else "under different contracts"
        shown = " and ".join(", ".join(sorted(name[:SHORT] for name in names)) for names in contracts)
        return f"they were scored {what} ({shown}): their figures say nothing about each other"
    if _alike(first, second) is not None:
        return "no figure was measured of both on the same single rows"
    if all(contracts):
        return "only the figures of one of them were kept, not its scores of single rows"
    return "they were not scored on the same rows"
