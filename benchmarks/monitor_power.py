"""Measures false alarms and detection delays of `ratchet monitor` with simulated logs of known truth.

    python benchmarks/monitor_power.py [--quick] [--json FILE]

1. False alarms: the log is like the evaluation, of 100 or 650 rows. The share of logs with an alarm within 2,000
   requests must be at most 1 % + 2,000 / requests_per_false_alarm, plus three standard errors of the simulation. A rate
   of one in 20,000 is simulated, because that of the default, one in 100,000, would need more cases.
2. Delay: the log changes at its first request, or after 2,000 requests. The share of changes found within 2,000
   requests and the median number of requests until the alarm, at the default rate, for refusals of 10 % instead of 2 %,
   answers 30 % longer, scores 5 or 10 points lower, and prompts about another topic (all of them, or 10 %).

The false alarms of a naive monitor are shown too: after every 100 requests, it tests at 5 % whether the log so far
differs from the evaluation (Kolmogorov-Smirnov for lengths, a z-test for shares).

Seeds are fixed. --quick draws 200 cases instead of 2,000 for false alarms, and 40 instead of 200 for delays.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from report import finish
from report_rows import Row, at_most, told
from scipy import stats
from simulations import error_limit, rng

from ratchet.config.monitor import Monitor
from ratchet.data.prompt_profile import PromptProfile, count_ngrams
from ratchet.quality_gate.change_detection import Direction, compute_factors, update_evidence
from ratchet.stages.monitor import LAST_PLACES, PROFILE_ROWS, START_SHARE, TESTS, find_place

Values = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, bool], Values]
"""Draws values: before the change, or after it."""

SIZES = (100, 650)
REQUESTS, LOOK = 2000, 100
"""Requests before a change, and after it; requests between two looks of the naive monitors."""
RATE = 20_000
"""requests_per_false_alarm of the simulation of false alarms."""
NAIVE_ALPHA = 0.05


@dataclass(frozen=True)
class World:
    """A change of one test's values."""

    text: str
    test: str
    draw: Draw


def share(before: float, after: float) -> Draw:
    return lambda stream, n, changed: (stream.random(n) < (after if changed else before)).astype(float)


def lengths(stream: np.random.Generator, n: int, changed: bool) -> Values:
    """Draw lengths of answers: a median of 200 characters, and 30 % more after the change."""
    return np.exp(stream.normal(np.log(260 if changed else 200), 0.6, n))


WORLDS = (
    World("refusals 2 % to 10 %", "refusals", share(0.02, 0.10)),
    World("answers 30 % longer", "answer length", lengths),
    World("scores 0.80 to 0.75", "scores", share(0.80, 0.75)),
    World("scores 0.80 to 0.70", "scores", share(0.80, 0.70)),
)

NAMES = ("invoice", "refund", "parcel", "delivery", "password", "login", "receipt", "courier", "profile", "payment")
FATES = ("is missing", "arrived late", "does not work", "was declined", "was sent twice", "cannot be changed")
OTHER_NAMES = ("dough", "soup", "chicken", "cake", "dressing", "pasta", "batter", "omelette", "curry", "rice")
OTHER_FATES = ("is too salty", "does not rise", "burns on the bottom", "tastes bitter", "sticks to the pan")
ENDS = ("What should I do?", "Can you help me?", "Thanks in advance.", "How long does it take?", "Is that normal?")


def prompt(draw: random.Random, other: float) -> str:
    names, fates = (OTHER_NAMES, OTHER_FATES) if draw.random() < other else (NAMES, FATES)
    again = f" and the {draw.choice(names)} {draw.choice(fates)}" if draw.random() < 0.5 else ""
    return f"My {draw.choice(names)} {draw.choice(fates)}{again}. {draw.choice(ENDS)}"


def main() -> int:
    """Draw the logs, monitor them and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 and 40 cases instead of 2,000 and 200")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    args = parser.parse_args()
    cases, few = (200, 40) if args.quick else (2000, 200)
    return finish([*false_alarms(cases), *delays(few), *topics(few // 4)], args.json)


def false_alarms(cases: int) -> Iterator[Row]:
    """Yield rows for logs that are like the evaluation. Each test has a fifth of the rate, and four are simulated."""
    for size in SIZES:
        alarms, naive = np.zeros(cases, bool), np.zeros(cases, bool)
        for world in WORLDS[:3]:
            found, peeked = watch(world, size, cases, len(TESTS) * RATE, change_at=REQUESTS, requests=REQUESTS)
            alarms, naive = alarms | (found > 0), naive | (peeked > 0)
        bound = START_SHARE + REQUESTS / RATE
        limit = error_limit(bound, cases)
        yield at_most(
            f"false alarm within {REQUESTS:,} requests, {size} rows, 1 % + 1 in {RATE:,}", alarms.mean(), limit
        )
        yield told(f"false alarm of tests repeated every {LOOK} requests, {size} rows", float(naive.mean()))


def delays(cases: int) -> Iterator[Row]:
    """Yield rows for logs that change."""
    threshold = len(TESTS) * Monitor().requests_per_false_alarm
    for world in WORLDS:
        for size in SIZES:
            for at in (0, REQUESTS):
                found, _ = watch(world, size, cases, threshold, at, at + REQUESTS)
                yield from delay_rows(f"{world.text}, {size} rows, after {at:,}", found, at)


def delay_rows(text: str, found: NDArray[np.int64], at: int) -> Iterator[Row]:
    """Yield the share of changes found within REQUESTS requests, and the median delay of those."""
    late = found[found > at] - at
    yield told(f"found within {REQUESTS:,} requests: {text}", len(late) / len(found))
    if len(late) * 2 > len(found):
        yield told(f"median delay in requests: {text}", float(np.median(np.where(found > at, found - at, np.inf))))


def watch(
    world: World, size: int, cases: int, threshold: float, change_at: int, requests: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of the request at the first alarm of each case (0: none), and that of a naive monitor."""
    stream = rng(f"{world.text} {size} {change_at} {requests}")
    reference = [world.draw(stream, size, False) for _ in range(cases)]
    before = min(change_at, requests)
    log = np.array(
        [
            np.concatenate([world.draw(stream, before, False), world.draw(stream, requests - before, True)])
            for _ in range(cases)
        ]
    )
    return monitor(world.test, reference, log, threshold, stream), peek(world.test, reference, log)


def monitor(
    test: str, reference: list[Values], log: Values, threshold: float, stream: np.random.Generator
) -> NDArray[np.int64]:
    """Return the number of the request at the first alarm of each log."""
    places = np.vectorize(lambda value: find_place(test, value), otypes=[int])(log)  # type: ignore[arg-type]
    last, cases = LAST_PLACES[test], np.arange(len(log))  # type: ignore[index]
    counts = np.array(
        [np.bincount([find_place(test, value) for value in rows], minlength=last + 1) for rows in reference]  # type: ignore[arg-type]
    )
    used = np.flatnonzero(counts.any(axis=0) | np.isin(np.arange(last + 1), places))
    counts, places = counts[:, used], np.searchsorted(used, places)
    direction: Direction = TESTS[test]  # type: ignore[index]
    bettors = compute_factors(np.array(0.5), direction).shape[-1]
    evidence = np.full((len(log), bettors), START_SHARE * threshold / len(TESTS))
    alarms = np.zeros(len(log), np.int64)
    for number, place in enumerate(places.T, start=1):
        counts[cases, place] += 1
        below = np.where(np.arange(len(used)) < place[:, np.newaxis], counts, 0).sum(axis=1)
        ranks = (below + stream.random(len(log)) * counts[cases, place]) / counts.sum(axis=1)
        evidence = update_evidence(evidence, compute_factors(ranks, direction))
        alarms = np.where((alarms == 0) & (evidence.mean(axis=1) >= threshold), number, alarms)
    return alarms


def peek(test: str, reference: list[Values], log: Values) -> NDArray[np.int64]:
    """Return the number of the request at the first alarm of each log by a test at 5 % after every LOOK requests."""
    alarms = np.zeros(len(log), np.int64)
    for case, (rows, values) in enumerate(zip(reference, log, strict=True)):
        for number in range(LOOK, len(values) + 1, LOOK):
            if differs(test, rows, values[:number]):
                alarms[case] = number
                break
    return alarms


def differs(test: str, rows: Values, values: Values) -> bool:
    if test in ("refusals", "scores"):
        pooled = (rows.sum() + values.sum()) / (len(rows) + len(values))
        error = (max(pooled * (1 - pooled), 1e-12) * (1 / len(rows) + 1 / len(values))) ** 0.5
        worse = values.mean() - rows.mean() if test == "refusals" else rows.mean() - values.mean()
        return bool(stats.norm.sf(worse / error) < NAIVE_ALPHA)
    return bool(stats.ks_2samp(rows, values, method="asymp").pvalue < NAIVE_ALPHA)


def topics(cases: int) -> Iterator[Row]:
    """Yield rows for prompts about another topic."""
    threshold = len(TESTS) * Monitor().requests_per_false_alarm
    for other in (1.0, 0.1):
        for size in SIZES:
            reference, log, count = [], [], 300 if other == 1 else 1000
            for case in range(cases):
                draw = random.Random(f"{size} {other} {case}")
                rows = [prompt(draw, 0.0) for _ in range(size)]
                described = min(PROFILE_ROWS, size // 2)
                profile = PromptProfile([count_ngrams(text) for text in rows[:described]])
                reference.append(np.array([profile.measure_similarity(text) for text in rows[described:]]))
                log.append([profile.measure_similarity(prompt(draw, other)) for _ in range(count)])
            found = monitor("inputs", reference, np.array(log), threshold, rng(f"topics {size} {other}"))
            text = f"{other:.0%} of the prompts about another topic, {size} rows"
            yield told(f"found within {count:,} requests: {text}", (found > 0).mean())
            if (found > 0).mean() > 0.5:
                yield told(f"median delay in requests: {text}", float(np.median(np.where(found > 0, found, np.inf))))


if __name__ == "__main__":
    raise SystemExit(main())
