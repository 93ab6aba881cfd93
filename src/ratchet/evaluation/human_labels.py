"""Figures from judgements of people: win rate, agreement of raters, biases, and how far an LLM judge agrees."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from ratchet.data.conversation import Conversation, format_pair
from ratchet.evaluation.metrics import (
    cohen_kappa,
    fleiss_kappa,
    proportion_metric,
    share_beyond_half,
    win_rate_metric,
)
from ratchet.quality_gate.judgements import JudgementLog, digest_sample, score_samples
from ratchet.storage.records.evaluation import MetricValue
from ratchet.storage.records.label import (
    JudgeCalibration,
    Judgement,
    LabelReport,
    LabelSideReport,
    RaterAgreement,
    RaterReport,
)

VERDICTS = {1.0: "first side", 0.0: "second side", 0.5: "tie"}
"""Categories of a judgement, by the score of the first side."""


@dataclass(frozen=True)
class LabelSample:
    """A prompt with the different answers of both sides."""

    prompt: str
    """Id of the prompt."""
    conversation: Conversation
    """The prompt; the last message is not an answer."""
    answers: tuple[str, str]
    group: str | None = None
    """Group of the row (prepare.split.group)."""


@dataclass(frozen=True)
class LabelTask:
    """The samples that people judge, and how both sides were matched."""

    sides: tuple[LabelSideReport, LabelSideReport]
    samples: Mapping[str, LabelSample]
    """By the digest of the sample."""
    identical_answers: int
    are_test_rows: bool
    """Whether both sides are models of the evaluation."""
    judges: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Scores of the first side by LLM judges: by name of the judge and id of the prompt."""

    @property
    def side_digests(self) -> tuple[str, str]:
        """Digests of both sides."""
        return self.sides[0].digest, self.sides[1].digest

    def select(self, log: JudgementLog) -> list[Judgement]:
        """Return the judgements about these samples."""
        return [judgement for judgement in log.judgements.values() if judgement.sample in self.samples]


def make_samples(sides: tuple[str, str], samples: Mapping[str, LabelSample]) -> dict[str, LabelSample]:
    """Return the samples by their digests.

    Args:
        sides: digests of both sides.
        samples: by row id, or by the digest of the prompt's text.
    """
    return {
        digest_sample(key, dict(zip(sides, sample.answers, strict=True))): sample for key, sample in samples.items()
    }  # fmt: skip


def compute_report(task: LabelTask, log: JudgementLog, seed: int) -> LabelReport:
    """Compute the figures of all judgements about a task.

    Args:
        task: the samples.
        log: all judgements of the project.
        seed: seed of the bootstrap intervals.
    """
    side = task.sides[0].digest
    found = task.select(log)
    decided = [(judgement, score) for judgement in found if (score := judgement.score(side)) is not None]
    by_sample: dict[str, list[float]] = {}
    by_rater: dict[str, dict[str, float]] = {judgement.rater: {} for judgement in found}
    for judgement, score in decided:
        by_sample.setdefault(judgement.sample, []).append(score)
        by_rater[judgement.rater][judgement.sample] = score
    means = score_samples(found, side)
    return LabelReport(
        sides=task.sides,
        samples=len(task.samples),
        identical_answers=task.identical_answers,
        judged=len(means),
        judgements=len(decided),
        skipped=len(found) - len(decided),
        outdated=sum(
            judgement.sample not in task.samples and set(judgement.shown) == set(task.side_digests)
            for judgement in log.judgements.values()
        ),
        damaged_lines=log.damaged_lines,
        win_rate=_compute_win_rate(task, means, seed),
        position_bias=_compute_position_bias(task, [judgement for judgement, _ in decided], seed),
        length_bias=_compute_length_bias(task, [(judgement.sample, score) for judgement, score in decided], seed),
        raters=tuple(_describe_rater(task, rater, by_rater[rater], found, seed) for rater in sorted(by_rater)),
        agreements=tuple(_compare_raters(by_rater, seed)),
        fleiss_kappa=fleiss_kappa([[VERDICTS[score] for score in scores] for scores in by_sample.values()], seed),
        judges=tuple(_compare_judges(task, means, seed)),
    )


def _group(task: LabelTask, sample: str) -> str:
    """Return the group of dependent scores: of the row, else the sample itself."""
    group = task.samples[sample].group
    return f"sample {sample}" if group is None else f"group {group}"


def _compute_win_rate(task: LabelTask, scores: Mapping[str, float], seed: int) -> MetricValue | None:
    return win_rate_metric([*scores.values()], [_group(task, sample) for sample in scores], seed)


def _compute_position_bias(task: LabelTask, judgements: Sequence[Judgement], seed: int) -> MetricValue | None:
    decided = [judgement for judgement in judgements if judgement.choice != "tie"]
    first = [float(judgement.choice == "first") for judgement in decided]
    return share_beyond_half(first, [_group(task, judgement.sample) for judgement in decided], "judgements", seed)


def _compute_length_bias(task: LabelTask, verdicts: Iterable[tuple[str, float]], seed: int) -> MetricValue | None:
    """Compute the preference for the answer with more characters. `verdicts` are scores of the first side by sample."""
    longer, groups = [], []
    for sample, score in verdicts:
        first, second = map(len, task.samples[sample].answers)
        if score != 0.5 and first != second:
            longer.append(float((score > 0.5) == (first > second)))
            groups.append(_group(task, sample))
    return share_beyond_half(longer, groups, "judgements", seed)


def _describe_rater(
    task: LabelTask, rater: str, scores: Mapping[str, float], judgements: Sequence[Judgement], seed: int
) -> RaterReport:
    return RaterReport(
        rater=rater,
        judgements=len(scores),
        ties=sum(score == 0.5 for score in scores.values()),
        skipped=sum(judgement.rater == rater for judgement in judgements) - len(scores),
        win_rate=_compute_win_rate(task, scores, seed),
    )


def _compare_raters(by_rater: Mapping[str, Mapping[str, float]], seed: int) -> Iterable[RaterAgreement]:
    """Yield the agreement of each pair of raters that have judged the same samples."""
    for first, second in combinations(sorted(by_rater), 2):
        samples = by_rater[first].keys() & by_rater[second].keys()
        pairs = [(VERDICTS[by_rater[first][sample]], VERDICTS[by_rater[second][sample]]) for sample in sorted(samples)]
        if pairs:
            agreement = proportion_metric([float(a == b) for a, b in pairs])
            yield RaterAgreement(raters=(first, second), agreement=agreement, kappa=cohen_kappa(pairs, seed))


def _round_score(score: float) -> float:
    """Return the verdict of a mean score: 1, 0, or 0.5 for a tie."""
    return 0.5 if score == 0.5 else float(score > 0.5)


def _compare_judges(task: LabelTask, means: Mapping[str, float], seed: int) -> Iterable[JudgeCalibration]:
    """Yield the comparison of each LLM judge with people, on the samples that both judged."""
    for name, scores in task.judges.items():
        by_judge = {
            sample: _round_score(scores[prompt])
            for sample in means
            if (prompt := task.samples[sample].prompt) in scores
        }
        by_people = {sample: _round_score(means[sample]) for sample in by_judge}
        pairs = [(VERDICTS[by_judge[sample]], VERDICTS[by_people[sample]]) for sample in by_judge]
        win_rate, people_win_rate = (_compute_win_rate(task, verdicts, seed) for verdicts in (by_judge, by_people))
        if win_rate is None or people_win_rate is None:
            continue
        yield JudgeCalibration(
            judge=name,
            agreement=proportion_metric([float(a == b) for a, b in pairs]),
            kappa=cohen_kappa(pairs, seed),
            win_rate=win_rate,
            people_win_rate=people_win_rate,
            length_bias=_compute_length_bias(task, by_judge.items(), seed),
            people_length_bias=_compute_length_bias(task, by_people.items(), seed),
        )


def make_pairs(task: LabelTask, log: JudgementLog) -> tuple[list[dict[str, Any]], int, int, int]:
    """Make preference pairs of the samples on which all raters prefer the same answer.

    Returns:
        Rows with `prompt`, `chosen` and `rejected` as lists of messages; and the numbers of samples that are left out
        because all judgements are ties, because judgements differ, and because an answer is empty.
    """
    scores: dict[str, set[float]] = {}
    for judgement in task.select(log):
        if (score := judgement.score(task.sides[0].digest)) is not None:
            scores.setdefault(judgement.sample, set()).add(score)
    rows: list[dict[str, Any]] = []
    ties = disagreements = empty = 0
    for digest, sample in task.samples.items():
        verdicts = scores.get(digest, set())
        if len(verdicts) > 1:
            disagreements += 1
        elif verdicts == {0.5}:
            ties += 1
        elif verdicts and not all(answer.strip() for answer in sample.answers):
            empty += 1
        elif verdicts:
            chosen, rejected = sample.answers if verdicts == {1.0} else sample.answers[::-1]
            rows.append(format_pair(sample.conversation.messages, chosen, rejected, sample.conversation.tools))
    return rows, ties, disagreements, empty
