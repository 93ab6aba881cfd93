"""Rows of benchmarks/gate_power.py about repeated looks: error rates, rows that sequential tests need, and drift.

A look is a verdict on the rows so far. After HOLD, rows are added, and the gate decides again. A fixed test forgets its
earlier looks; a sequential test (`gate.test: sequential`) includes all earlier rows, so its verdict on all rows is that
of someone who looked after each row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gate_worlds import Draw, Rng, conversations, of_answers, rarely, skewed
from report_rows import Row, at_most, told
from simulations import rng

from ratchet.quality_gate import paired_test, rules
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan
from ratchet.quality_gate.statistics import compute_alpha_share

PLAN = PairedTestPlan(confidence=0.95, power=0.8, discordance=0.1, resamples=1000, seed=0)
ALPHA = 1 - PLAN.confidence
LOOKS = (1, 5, 20, 100)
MAX_PRICE, MAX_MEAN, MIN_SAVED = 1.5, 0.9, 0.4
"""Targets: rows for a power of 80 % and rows on average (early stops included), both divided by those of the fixed
test; share of the rows saved where the difference is five points or more."""
NOISE = 1.4
"""Three standard errors of the number of rows for a power of 80 %, as a fraction and for one case."""
MAX_DRIFT = 0.01
CAP = 1.5
"""A test that has not decided after this many times the rows of the fixed test counts with these rows."""


@dataclass(frozen=True)
class RepeatedLooks:
    """A kind of evaluation, its rows at the first and the last look, and the margin."""

    name: str
    draw: Draw
    first: int
    last: int
    margin: float
    better: float = 0.05
    """Difference of a model that is clearly better."""

    @property
    def text(self) -> str:
        return f"{self.name}, margin {self.margin:g}, {self.first} to {self.last} rows"


WORLDS = (
    RepeatedLooks("answers, 70 % right, 10 % differ", of_answers(0.7, 0.1), 100, 1000, 0.03),
    RepeatedLooks("answers, 60 % right, 30 % differ", of_answers(0.6, 0.3), 50, 500, 0.1),
    RepeatedLooks("losses of which 5 % rise", rarely, 50, 400, 0.05),
    RepeatedLooks("skewed losses", skewed, 50, 400, 0.05),
    RepeatedLooks("conversations", conversations, 100, 600, 0.06),
)
PRICED = (
    RepeatedLooks("answers, 70 % right, 10 % differ", of_answers(0.7, 0.1), 20, 4000, 0.03),
    RepeatedLooks("answers, 90 % right, 4 % differ", of_answers(0.9, 0.04), 20, 1000, 0.055),
    RepeatedLooks("answers, 95 % right, 6 % differ", of_answers(0.95, 0.06), 20, 1600, 0.045, better=0.03),
    RepeatedLooks("answers, 60 % right, 30 % differ", of_answers(0.6, 0.3), 20, 1200, 0.1),
    RepeatedLooks("answers, 70 % right, 20 % differ", of_answers(0.7, 0.2), 20, 3000, 0.05),
    RepeatedLooks("skewed losses", skewed, 20, 2400, 0.03),
)
DRIFTS = (20, 200)
DRIFT_ROWS, DRIFT_CASES = 1000, 20


def first(pairs: PairedScores, n: int) -> PairedScores:
    """Return the first n samples."""
    groups = pairs.groups[:n] if pairs.groups else None
    planned = pairs.planned[:n] if pairs.planned else None
    return replace(pairs, new=pairs.new[:n], old=pairs.old[:n], groups=groups, planned=planned)


def draw(world: RepeatedLooks, stream: Rng, difference: float) -> PairedScores:
    """Draw an evaluation in random order. Conversations are in order already, and stay together."""
    pairs = world.draw(stream, world.last, difference)
    if pairs.groups:
        return pairs
    order = stream.permutation(len(pairs.new))
    return replace(pairs, new=[pairs.new[k] for k in order], old=[pairs.old[k] for k in order])


def in_order(pairs: PairedScores) -> PairedScores:
    """Return the samples for a sequential test."""
    limit = 1.0 if pairs.better == "higher" else None
    return replace(pairs, planned=[len(pairs.new)] * len(pairs.new), limit=limit)


def judge(pairs: PairedScores, margin: float, plan: PairedTestPlan = PLAN) -> str:
    """Return the decision of a rule must_not_regress: PROMOTE, HOLD or REJECT."""
    result = paired_test.compare(pairs, -margin, plan)
    if result.is_sequential and rules.has_too_few_samples(result):
        return "HOLD"
    if result.high < -margin:
        return "REJECT"
    is_powerful = result.is_sequential or result.detectable <= margin
    has_enough = is_powerful and not rules.has_too_few_samples(result)
    return "PROMOTE" if result.low > -margin and has_enough else "HOLD"


def look(pairs: PairedScores, world: RepeatedLooks, looks: int) -> str:
    """Return the first decision of a fixed test other than HOLD over several looks."""
    for n in np.linspace(world.first, world.last, looks).astype(int) if looks > 1 else [world.last]:
        decision = judge(first(pairs, int(n)), world.margin)
        if decision != "HOLD":
            return decision
    return "HOLD"


def errors(cases: int, limit: Callable[[str, int, int], Row]) -> Iterator[Row]:
    """Yield rows for wrong decisions about models that are worse by the margin, and exactly acceptable.

    Such a model is at the border: PROMOTE and REJECT are both wrong, each in at most 5 % of cases.
    """
    for world in WORLDS:
        stream = rng(f"looks {world.text}")
        drawn = [draw(world, stream, -world.margin) for _ in range(cases)]
        for looks in LOOKS:
            found = [look(pairs, world, looks) for pairs in drawn[: cases if looks < 20 else max(1, cases // 4)]]
            yield told(f"fixed test, {looks} looks, wrong PROMOTE: {world.text}", found.count("PROMOTE") / len(found))
        found = [judge(in_order(pairs), world.margin) for pairs in drawn]
        for decision in ("PROMOTE", "REJECT"):
            name = f"sequential, a look after each row, wrong {decision}: {world.text}"
            yield limit(name, found.count(decision), cases)


def rows_until(pairs: PairedScores, world: RepeatedLooks, decision: str) -> int | None:
    """Return the number of rows with which a sequential test first decides so; None if it never does.

    A decision never changes with later rows, so bisection finds it.
    """
    ordered = in_order(pairs)
    low, high = 0, len(pairs.new)
    if judge(ordered, world.margin) != decision:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if judge(first(ordered, middle), world.margin) == decision else (middle, high)
    return high


def rows_of_fixed(world: RepeatedLooks, cases: int) -> int:
    """Return the number of rows from which on the fixed test promotes 80 % of equal models.

    The power of a test of answers rises in a zigzag, so that two further sizes must have it too.
    """
    stream = rng(f"fixed {world.text}")
    drawn = [draw(world, stream, 0.0) for _ in range(cases)]
    sizes = [n for n in np.geomspace(world.first, world.last, 150).astype(int).tolist() if n >= world.last // 8]
    enough = 0
    for place, n in enumerate(sizes):
        promoted = sum(judge(first(pairs, n), world.margin) == "PROMOTE" for pairs in drawn)
        enough = enough + 1 if promoted >= PLAN.power * cases else 0
        if enough == 3:
            return sizes[place - 2]
    raise RuntimeError(f"{world.text}: the fixed test has less power with all rows")


def price(cases: int) -> Iterator[Row]:
    """Yield rows for the number of rows that a sequential test needs, divided by those of the fixed test."""
    means: list[float] = []
    for world in PRICED:
        fixed = rows_of_fixed(world, cases)
        yield told(f"equal models, rows of the fixed test for a power of 80 %: {world.name}", fixed)
        place = f"{world.name}, margin {world.margin:g}"
        for difference in (0.0, world.better, -world.margin - 0.05):
            stream = rng(f"price {world.text} {difference}")
            drawn = [draw(world, stream, difference) for _ in range(cases)]
            used = [rows_until(pairs, world, "REJECT" if difference < 0 else "PROMOTE") or np.inf for pairs in drawn]
            means.append(float(np.mean(np.minimum(used, CAP * fixed))) / fixed)
            text = f"difference {100 * difference:+g} points, rows on average / fixed test's: {place}"
            is_clear = difference >= 0.05 and "answers" in world.name
            yield at_most(text, means[-1], 1 - MIN_SAVED) if is_clear else told(text, means[-1])
            if difference == 0:
                needed = float(np.sort(used)[int(np.ceil(PLAN.power * cases)) - 1]) / fixed
                text = f"equal models, rows for a power of 80 % / fixed test's: {place}"
                yield (
                    at_most(text, needed, MAX_PRICE * (1 + NOISE / cases**0.5))
                    if "answers" in world.name
                    else told(text, needed)
                )
    yield at_most("rows on average / fixed test's, all of the above", float(np.mean(means)), MAX_MEAN)


def drift(quick: bool) -> Iterator[Row]:
    """Yield rows for the loss of the champion over many candidates, each truly a little worse or better."""
    for candidates in DRIFTS:
        for name, is_sequential in (
            ("fixed test, no limit of uses", False),
            ("sequential, a level for each model", True),
        ):
            lost = [run_drift(candidates, is_sequential, seed) for seed in range(4 if quick else DRIFT_CASES)]
            text = f"points lost by the champion over {candidates} candidates, {DRIFT_ROWS} rows: {name}"
            value = max(0.0, float(np.mean(lost)))
            yield at_most(text, value, MAX_DRIFT) if is_sequential else told(text, value)


def run_drift(candidates: int, is_sequential: bool, seed: int, margin: float = 0.03) -> float:
    """Return how much accuracy the champion truly loses.

    All candidates differ from the champion on a tenth of the rows, and are truly worse by the margin: no promotion is
    right. Each is scored on the same rows.
    """
    stream = np.random.default_rng(seed)
    accuracy = 0.8
    champion = (stream.random(DRIFT_ROWS) < accuracy).astype(float)
    for number in range(1, candidates + 1):
        lost, won = (0.1 + margin) / 2 / accuracy, (0.1 - margin) / 2 / (1 - accuracy)
        dice = stream.random(DRIFT_ROWS)
        candidate = np.where(champion == 1, dice >= lost, dice < won).astype(float)
        pairs = PairedScores(candidate.tolist(), champion.tolist(), "higher")
        plan = replace(PLAN, alpha_share=compute_alpha_share(number))
        if judge(in_order(pairs) if is_sequential else pairs, margin, plan) == "PROMOTE":
            champion, accuracy = candidate, accuracy - margin
    return 0.8 - accuracy


def all_rows(quick: bool, cases: int, limit: Callable[[str, int, int], Row]) -> Sequence[Row]:
    """Return all rows about looks."""
    return [*errors(cases, limit), *price(cases), *drift(quick)]
