"""Measures error rates and power of the gate: evaluations drawn from known truths, judged by `decide_verdict`.

    python benchmarks/gate_power.py [--quick] [--json FILE] [--picture STEM]

1. An equal model that claims to be better: how often it is rejected, and how often promoted.
2. A model that is worse by exactly the margin: how often it is promoted.
3. Shares of PROMOTE, HOLD and REJECT by true difference and number of samples, compared with two common rules: "not
   below the champion" (which is also what MLflow's MetricThreshold with a baseline decides), and "intervals of two
   standard errors overlap" (the usual reading of results of lm-eval, which reports a separate error for each model).

Every error rate may be at most 5 % plus three standard errors of the simulation. Seeds are fixed. --quick draws 300
cases instead of 2,000; --picture draws STEM.svg.
"""

import argparse
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gate_picture
import numpy as np
from gate_looks import all_rows
from gate_picture import Shares
from gate_worlds import Draw, answers, conversations, decide, improve, keep, nats, of_answers, rarely, sampled, skewed
from mlflow.models import EvaluationResult, MetricThreshold
from mlflow.models.evaluation.validation import ModelValidationFailedException, validate_evaluation_results
from report import finish
from report_rows import Row, at_most, told
from simulations import error_limit, rng

from ratchet.quality_gate.paired_test import PairedScores

ALPHA = 0.05
CASES, CASES_QUICK = 2000, 300
MARGIN, DISCORDANCE, ACCURACY = 0.03, 0.1, 0.7
"""Margin, share of samples that differ, and accuracy of the power curve."""
SIZES = (100, 250, 500, 1000, 2000)
STEPS = tuple(np.arange(-2.0, 1.01, 0.5).tolist())
"""True differences of the power curve, in margins."""
RAW_N, RAW_LOSS = 250, 0.02
CLAIMS = 5


@dataclass(frozen=True)
class World:
    """A kind of evaluation, its number of samples, and a margin that this number can resolve."""

    name: str
    draw: Draw
    n: int
    margin: float

    @property
    def text(self) -> str:
        return f"{self.name}, n={self.n}, margin {self.margin:g}"


WORLDS = (
    World("answers, 90 % right, 4 % differ", of_answers(0.9, 0.04), 100, 0.055),
    World("answers, 95 % right, 6 % differ", of_answers(0.95, 0.06), 300, 0.045),
    World("answers, 70 % right, 10 % differ", of_answers(0.7, 0.1), 1000, 0.03),
    World("answers, 60 % right, 30 % differ", of_answers(0.6, 0.3), 100, 0.1),
    World("answers, 60 % right, 30 % differ", of_answers(0.6, 0.3), 1000, 0.03),
    World("means of 4 answers", sampled, 60, 0.1),
    World("means of 4 answers", sampled, 400, 0.05),
    World("skewed losses", skewed, 100, 0.06),
    World("skewed losses", skewed, 400, 0.03),
    World("conversations", conversations, 200, 0.1),
    World("conversations", conversations, 600, 0.06),
    World("perplexity", nats, 60, 0.08),
    World("perplexity", nats, 300, 0.05),
)
HARDEST = World("losses of which 5 % rise", rarely, 400, 0.05)


def main() -> int:
    """Draw the evaluations, judge them and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="300 cases each instead of 2,000")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--picture", type=Path, metavar="STEM", help="draw STEM.svg")
    args = parser.parse_args()
    cases = CASES_QUICK if args.quick else CASES
    shares = curve(cases)
    if args.picture:
        gate_picture.draw(shares, MARGIN, args.picture)
    looks = all_rows(args.quick, cases, rarely_enough)
    return finish([*errors(cases), *peers(cases), *table(shares), *looks], args.json)


def rarely_enough(name: str, wrong: int, cases: int) -> Row:
    """Return a row for an error rate: at most 5 %, plus three standard errors for the number of cases."""
    return at_most(name, wrong / cases, error_limit(ALPHA, cases))


def errors(cases: int) -> Iterator[Row]:
    """Yield rows for the error rates of each kind of evaluation."""
    for world in WORLDS:
        yield from equal(world, cases)
    for world in WORLDS:
        name = f"worse by the margin, PROMOTE: {world.text}"
        yield rarely_enough(name, worse(world, cases), cases)
    yield told(f"worse by the margin, PROMOTE: {HARDEST.text}", worse(HARDEST, cases) / cases)
    yield claims(cases)


def equal(world: World, cases: int) -> Iterator[Row]:
    """Yield rows for an equal model that claims to be better, and must not be worse."""
    stream = rng(f"equal {world.text}")
    found = [
        decide([world.draw(stream, world.n, 0.0)], improve("m0"), keep(world.margin)) for _ in range(cases)
    ]  # fmt: skip
    yield rarely_enough(f"equal, REJECT: {world.text}", found.count("REJECT"), cases)
    yield rarely_enough(f"equal, PROMOTE as better: {world.text}", found.count("PROMOTE"), cases)


def worse(world: World, cases: int) -> int:
    """Return how many models that are worse by the margin are promoted."""
    stream = rng(f"worse {world.text}")
    rule = keep(world.margin)
    return sum(decide([world.draw(stream, world.n, -world.margin)], rule) == "PROMOTE" for _ in range(cases))


def claims(cases: int) -> Row:
    """Return a row for an equal model that claims five improvements. One of them may appear true by chance."""
    stream, rule = rng("claims"), improve(*(f"m{k}" for k in range(CLAIMS)))
    promoted = sum(
        decide([answers(stream, 200, 0.0, ACCURACY, DISCORDANCE) for _ in range(CLAIMS)], rule) == "PROMOTE"
        for _ in range(cases)
    )
    return rarely_enough(f"equal, PROMOTE for one of {CLAIMS} claims (Holm), n=200", promoted, cases)


def peers(cases: int) -> Iterator[Row]:
    """Yield rows for other rules on a model that is two points worse, and on an equal model."""
    for loss, what in ((RAW_LOSS, "two points worse"), (0.0, "equal")):
        for discordance in (0.1, 0.2):
            stream = rng(f"peers {loss} {discordance}")
            drawn = [answers(stream, RAW_N, -loss, ACCURACY, discordance) for _ in range(cases)]
            text = f"{what}, n={RAW_N}, {discordance:.0%} differ"
            yield told(f"promoted by 'not below the champion': {text}", sum(map(not_below, drawn)) / cases)
            yield told(f"promoted by MLflow's MetricThreshold: {text}", sum(map(passes_mlflow, drawn)) / cases)
            yield told(f"promoted where intervals overlap: {text}", sum(map(overlaps, drawn)) / cases)
            ours = sum(decide([pairs], keep(RAW_LOSS)) == "PROMOTE" for pairs in drawn)
            yield told(f"promoted by the gate, margin {RAW_LOSS:g}: {text}", ours / cases)


def not_below(pairs: PairedScores) -> bool:
    """Raw rule: the candidate's score is at least the champion's."""
    return sum(pairs.new) >= sum(pairs.old)


def passes_mlflow(pairs: PairedScores) -> bool:
    """MLflow's validation with the champion as baseline, which has no rule about samples or their noise."""
    candidate, champion = (
        EvaluationResult({"accuracy": sum(scores) / len(scores)}, {}) for scores in (pairs.new, pairs.old)
    )
    logging.getLogger("mlflow.models.evaluation.validation").setLevel(logging.WARNING)  # two lines for each case
    thresholds = {"accuracy": MetricThreshold(min_relative_change=0.0, greater_is_better=True)}
    try:
        validate_evaluation_results(thresholds, candidate, champion)
    except ModelValidationFailedException:
        return False
    return True


def overlaps(pairs: PairedScores) -> bool:
    """Unpaired rule: intervals of two standard errors around the two means overlap."""
    (new, new_error), (old, old_error) = (
        (float(np.mean(scores)), float(np.std(scores, ddof=1)) / len(scores) ** 0.5)
        for scores in (pairs.new, pairs.old)
    )
    return new + 2 * new_error >= old - 2 * old_error


def curve(cases: int) -> list[Shares]:
    """Return shares of decisions by number of samples and true difference. All rules judge the same draws."""
    found = []
    for n in SIZES:
        known: dict[tuple[int, int], str] = {}  # the gate's decision by numbers of discordant pairs
        for step in STEPS:
            stream = rng(f"curve {n} {step}")
            decisions, raw, unpaired = [], 0, 0
            for _ in range(cases):
                pairs = answers(stream, n, step * MARGIN, ACCURACY, DISCORDANCE)
                raw, unpaired = raw + not_below(pairs), unpaired + overlaps(pairs)
                changes = [new - old for new, old in zip(pairs.new, pairs.old, strict=True)]
                key = (changes.count(1.0), changes.count(-1.0))
                if key not in known:
                    known[key] = decide([pairs], keep(MARGIN))
                decisions.append(known[key])
            promote, hold, reject = (decisions.count(kind) / cases for kind in ("PROMOTE", "HOLD", "REJECT"))
            found.append(Shares(n, step * MARGIN, promote, hold, reject, raw / cases, unpaired / cases))
    return found


def table(shares: list[Shares]) -> Iterator[Row]:
    """Yield the rows of the power curve."""
    for one in shares:
        text = f"n={one.n}, true difference {100 * one.difference:+.1f} points, margin {100 * MARGIN:g}"
        yield told(f"PROMOTE: {text}", one.promote)
        yield told(f"REJECT: {text}", one.reject)


if __name__ == "__main__":
    raise SystemExit(main())
