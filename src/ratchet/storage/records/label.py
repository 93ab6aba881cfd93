"""Judgements of people about pairs of answers (`ratchet label`), and the figures that follow from them."""

from typing import Literal

from ratchet.storage.records.base import Record
from ratchet.storage.records.evaluation import MetricValue

Choice = Literal["first", "second", "tie", "skip"]


class Judgement(Record):
    """A judgement about the two answers to a prompt: a line of experiments/judgements.jsonl."""

    sample: str
    """Digest of the prompt, both sides and both answers. Another answer is another sample."""
    prompt: str
    """Id of the prompt, for readers of the file."""
    shown: tuple[str, str]
    """Digests of the two sides, in the order in which their answers were shown."""
    choice: Choice
    """The better answer, by the order shown; `skip`: the rater did not decide."""
    rater: str
    note: str = ""

    def score(self, side: str) -> float | None:
        """Return 1 if the answer of this side is preferred, 0 if the other one is, 0.5 for a tie, None for a skip."""
        if self.choice == "skip":
            return None
        if self.choice == "tie":
            return 0.5
        return float(self.shown[0 if self.choice == "first" else 1] == side)


class JudgementUndo(Record):
    """The withdrawal of a rater's judgement about a sample: also a line of experiments/judgements.jsonl."""

    sample: str
    rater: str


class LabelSideReport(Record):
    """One of the two compared sides."""

    name: str
    digest: str
    """Digest of the evaluated model, or of the path of the file of answers."""
    answers: int
    """Number of prompts with an answer."""
    unmatched: int
    """Number of these prompts that the other side does not have."""


class RaterReport(Record):
    """The judgements of one rater."""

    rater: str
    judgements: int
    """Number of judgements without skips."""
    ties: int
    skipped: int
    win_rate: MetricValue | None
    """Win rate of the first side. None: no judgements."""


class RaterAgreement(Record):
    """Agreement of two raters on the samples that both judged."""

    raters: tuple[str, str]
    agreement: MetricValue
    """Share of these samples with the same judgement."""
    kappa: MetricValue | None
    """Cohen's kappa. None: undefined, because chance alone gives full agreement."""


class JudgeCalibration(Record):
    """Comparison of an LLM judge (evaluate.judge) with people, on the samples that both judged."""

    judge: str
    """Name of the judging model."""
    agreement: MetricValue
    """Share of the samples with the same verdict: the first side, the second side, or a tie."""
    kappa: MetricValue | None
    """Cohen's kappa of judge and people. None: undefined, because chance alone gives full agreement."""
    win_rate: MetricValue
    """Win rate of the first side by the judge."""
    people_win_rate: MetricValue
    """Win rate of the first side by people, on the same samples."""
    length_bias: MetricValue | None
    """Share of the judge's decided verdicts for the longer answer, minus 0.5. None: no such verdict."""
    people_length_bias: MetricValue | None
    """The same of the people, on the same samples."""


class LabelReport(Record):
    """Result of `ratchet label`: figures from the judgements about two sides. Win rates are those of the first side."""

    sides: tuple[LabelSideReport, LabelSideReport]
    samples: int
    """Number of prompts with different answers. Only these are shown."""
    identical_answers: int
    """Number of prompts with equal answers, which are not shown and not counted."""
    judged: int
    """Number of samples with at least one judgement, skips not counted."""
    judgements: int
    skipped: int
    outdated: int
    """Number of judgements about these sides and other answers; they are not counted."""
    damaged_lines: int
    """Number of lines of the file that are not valid, for example cut off by a power failure."""
    win_rate: MetricValue | None
    """Mean over samples of the raters' mean score; a tie is half. None: no judgements."""
    position_bias: MetricValue | None
    """Share of the decided judgements for the answer that was shown first, minus 0.5. None: only ties."""
    length_bias: MetricValue | None
    """Share of the decided judgements for the longer answer, minus 0.5. None: only ties."""
    raters: tuple[RaterReport, ...]
    agreements: tuple[RaterAgreement, ...]
    fleiss_kappa: MetricValue | None
    """Fleiss' kappa of all raters, on samples with at least two judgements. None: no such samples, or undefined."""
    judges: tuple[JudgeCalibration, ...]
    """LLM judges of the same answers; empty unless both sides are models of the evaluation."""


class LabelPairsReport(Record):
    """Result of `ratchet label --pairs`: preference pairs from judgements."""

    output: str
    pairs: int
    """Number of pairs: samples on which all raters prefer the same answer."""
    ties: int
    """Number of samples on which all judgements are ties; left out."""
    disagreements: int
    """Number of samples with different judgements; left out."""
    empty: int
    """Number of samples left out because one answer is empty."""
    are_test_rows: bool
    """Whether the prompts are test rows of this project, which `prepare` assigns to the test split again."""
