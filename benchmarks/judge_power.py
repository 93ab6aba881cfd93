"""Measures how often intervals and tests of judged answers are wrong, with simulated judges and groups of known truth.

    python benchmarks/judge_power.py [--quick] [--json FILE]

1. Judges: each row has a better answer, the candidate's in 50, 70 or 90 % of rows. A reply of the judge is a tie in
   10 %, the answer that is shown first in 20 or 30 %, and the better answer otherwise. The 95 % intervals of win rate
   and position bias must miss the true value in at most 5 % of evaluations of 20, 60 or 200 rows.
2. Dependent rows: 60 or 200 rows in groups of four; a group has the same better answer.
3. Groups of people: a model answers 24 templates for four groups without any difference. At most 5 % of models may have
   a significant difference of refusals or of lengths between some two groups, or an interval of one without zero.
   Models that refuse one group's prompts 20 or 40 points more often show what the test finds.

A target is 5 % plus three standard errors of the simulation. Seeds are fixed. --quick draws 100 cases a row instead of
400. The full mode takes about two and a half minutes of one core.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import finish
from report_rows import Row, at_most, told
from simulations import error_limit, rng

from ratchet.config.evaluate import Evaluate
from ratchet.evaluation.evaluator import EvaluationResult, EvaluationSubject
from ratchet.evaluation.judge import PairwiseJudgement, Preferred, compute_preference
from ratchet.evaluation.safety import PATTERNS, score_suite
from ratchet.evaluation.safety_suite import PromptTemplate, SafetySuite, key_of
from ratchet.storage.records.evaluation import GroupDifference, MetricValue

NOMINAL = 0.05
TIES = 0.1
"""Share of replies that are a tie."""
SIZES, GROUPED_SIZES, GROUP_ROWS = (20, 60, 200), (60, 200), 4
ORDERS: tuple[tuple[Preferred, Preferred], ...] = (("candidate", "opponent"), ("opponent", "candidate"))
"""Answers in both orders of the judge: the first and the second."""
GROUPS = ("Ann", "Bob", "Cy", "Di")
SUITE = SafetySuite(
    templates=tuple(PromptTemplate(template=f"Question {number} of {{group}}", groups=GROUPS) for number in range(24))
)
SCORES = {"refused": "refusals", "words": "lengths"}
"""Compared scores of the safety tests, with their names in the rows."""
REFUSAL, WORD = "I'm sorry, but I can't help with that.", " word"


@dataclass(frozen=True)
class Judge:
    """A judge of known truth."""

    wins: float
    """Share of rows in which the candidate's answer is better."""
    first: float
    """Share of replies that prefer the answer that is shown first, for any answers."""

    @property
    def win_rate(self) -> float:
        """True win rate: replies by order, and ties, are half."""
        return 0.5 + (1 - TIES - self.first) * (self.wins - 0.5)

    @property
    def position_bias(self) -> float:
        """True position bias: replies by quality prefer the first answer in one of two orders."""
        return self.first / (1 - TIES) / 2

    def judge(self, stream: np.random.Generator, rows: int, group_rows: int) -> list[PairwiseJudgement]:
        """Draw the verdicts on the rows of an evaluation."""
        judged = []
        for row in range(rows):
            if row % group_rows == 0:
                better: Preferred = "candidate" if stream.random() < self.wins else "opponent"
            preferred: list[Preferred] = []
            for first, _ in ORDERS:
                chance = stream.random()
                preferred.append("tie" if chance < TIES else first if chance < TIES + self.first else better)
            judged.append(PairwiseJudgement(f"group {row // group_rows}", (preferred[0], preferred[1])))
        return judged


def main() -> int:
    """Draw the evaluations and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 cases a row instead of 400")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    args = parser.parse_args()
    cases = 100 if args.quick else 400
    return finish([*judges(cases), *groups(cases), *unfair(cases // 4)], args.json)


def rare(name: str, wrong: int, cases: int) -> Row:
    """Return a row for something that may happen in 5 % of the cases, plus three standard errors."""
    return at_most(name, wrong / cases, error_limit(NOMINAL, cases))


def judges(cases: int) -> Iterator[Row]:
    """Yield rows for intervals of the win rate and the position bias."""
    places = [(size, 1) for size in SIZES] + [(size, GROUP_ROWS) for size in GROUPED_SIZES]
    for rows, group_rows in places:
        widths, place = [], f"{rows} rows" + f" in groups of {group_rows}" * (group_rows > 1)
        for first in (0.2, 0.3):
            for wins in (0.5, 0.7, 0.9):
                judge, missed = Judge(wins, first), Counter[str]()
                text = f"{place}, {wins:.0%} better, {first:.0%} by order"
                stream = rng(text)
                for case in range(cases):
                    found = compute_preference("base", judge.judge(stream, rows, group_rows), Counter(), case)
                    missed["win rate"] += misses(found.win_rate, judge.win_rate)
                    missed["position bias"] += misses(found.position_bias, judge.position_bias)
                    if found.win_rate is not None:
                        widths.append(found.win_rate.high - found.win_rate.low)
                for name in ("win rate", "position bias"):
                    yield rare(f"{name} missed: {text}", missed[name], cases)
        yield told(f"half width of the interval of the win rate, mean: {place}", float(np.mean(widths)) / 2)


def misses(metric: MetricValue | None, truth: float) -> bool:
    """Return whether an interval does not contain the true value. A metric that does not exist misses it."""
    return metric is None or not metric.low <= truth <= metric.high


def groups(cases: int) -> Iterator[Row]:
    """Yield rows for differences between groups of models without any."""
    stream, significant, excluded = rng("groups"), Counter[str](), Counter[str]()
    for _ in range(cases):
        differences = compare_groups(stream, 0.0)
        for score in SCORES:
            tests = [one for one in differences if one.score == score]
            significant[score] += any(one.is_significant for one in tests)
            excluded[score] += any(not one.low <= 0 <= one.high for one in tests)
    for score, name in SCORES.items():
        yield rare(f"some difference of {name} is significant", significant[score], cases)
        yield rare(f"some interval of differences of {name} has no zero", excluded[score], cases)


def unfair(cases: int) -> Iterator[Row]:
    """Yield rows for models that refuse the first group's prompts more often."""
    for more in (0.2, 0.4):
        stream = rng(f"unfair {more}")
        found = sum(
            any(one.score == "refused" and one.is_significant for one in compare_groups(stream, more))
            for _ in range(cases)
        )
        yield told(f"{more:.0%} more refusals for one group: found", found / cases)


def compare_groups(stream: np.random.Generator, more: float) -> Sequence[GroupDifference]:
    """Draw the answers of a model, and return the differences between groups that the safety tests report.

    Some templates are refused more often than others, and have longer answers, for all groups alike. `more` is added to
    the probability that a prompt of the first group is refused.
    """
    result = EvaluationResult(EvaluationSubject("candidate", "model", "model", "adapter"), {})
    refused, length = stream.beta(1, 4, len(SUITE.templates)), stream.normal(3.5, 0.5, len(SUITE.templates))
    for number, template in enumerate(SUITE.templates):
        for group in GROUPS:
            words = 1 + int(np.exp(stream.normal(length[number], 0.3)))
            is_refused = stream.random() < refused[number] + more * (group == GROUPS[0])
            result.safety_answers[key_of(template, group)] = REFUSAL if is_refused else "Sure." + WORD * words
    report, _ = score_suite(SUITE, {"candidate": result}, Evaluate(), PATTERNS, None, lambda _: None)
    return report.differences["candidate"]


if __name__ == "__main__":
    raise SystemExit(main())
