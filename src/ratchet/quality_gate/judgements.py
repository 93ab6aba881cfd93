"""Judgements of people about pairs of answers: their file, and the preference that the gate compares.

`experiments/judgements.jsonl` has the lines of a journal (`runs/journal.py`): an event `judgement` with the fields of
`Judgement`, or an event `undo` with those of `JudgementUndo`. A line is appended and synced before the rater sees the
next sample. The file is committed to git, and an input of stage gate.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.errors import DataError
from ratchet.quality_gate import statistics
from ratchet.runs.journal import Journal, JournalReader
from ratchet.storage import digests, files
from ratchet.storage.records.evaluation import MetricValue, ModelRole
from ratchet.storage.records.label import Judgement, JudgementUndo

HUMAN_PREFERENCE = "human_preference"
"""Name of the metric: share of the judged rows on which people prefer a model's answer; a tie is half."""

KINDS: Mapping[str, type[Judgement | JudgementUndo]] = {"judgement": Judgement, "undo": JudgementUndo}
"""Records of the file, by the kind of their event."""


@dataclass
class JudgementLog:
    """The judgements of a file that were not undone."""

    judgements: dict[tuple[str, str], Judgement] = field(default_factory=dict)
    """By sample and rater, in the order in which they were made; the last one of a rater about a sample counts."""
    damaged_lines: int = 0

    def add(self, entry: Judgement | JudgementUndo) -> None:
        """Apply a record."""
        key = entry.sample, entry.rater
        self.judgements.pop(key, None)
        if isinstance(entry, Judgement):
            self.judgements[key] = entry


def read_judgements(path: Path) -> JudgementLog:
    """Read a file of judgements; empty if it does not exist. Lines that are not valid are counted and skipped.

    Raises:
        DataError: The file cannot be read.
    """
    reader, log = JournalReader(path), JudgementLog()
    try:
        events = list(reader.read())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected a file with JSON lines") from None
    for event in events:
        try:
            log.add(KINDS[event.kind].model_validate(event.data))
        except (KeyError, ValueError):
            log.damaged_lines += 1
    log.damaged_lines += reader.damaged_lines
    return log


def append_record(path: Path, entry: Judgement | JudgementUndo) -> None:
    """Append a record and sync it to the disk. A last line that was cut off is ended first.

    The file is opened each time, because git may have replaced it.

    Raises:
        OSError: The record may not be on the disk.
    """
    is_new = not path.exists()
    journal = Journal(path, attempt=1)
    try:
        kind = next(kind for kind, record in KINDS.items() if isinstance(entry, record))
        journal.append(kind, **entry.model_dump(mode="json", exclude={"format"}))
        journal.sync()
    finally:
        journal.close()
    if is_new:
        files.fsync_directory(path.parent)


def digest_sample(prompt: str, answers: Mapping[str, str]) -> str:
    """Return the digest of a prompt with two answers, by the digest of the side that gave each; order has no effect."""
    return digests.hash_json([prompt, sorted(answers.items())])


@dataclass(frozen=True)
class HumanPreference:
    """Preference of people between the candidate's generated answers and those of a reference model."""

    role: ModelRole
    """Role under which the candidate was evaluated."""
    scores: Mapping[str, float]
    """By row id: mean over raters of 1 for the candidate's answer, 0 for the other one, 0.5 for a tie."""
    unjudged: int
    """Number of rows with different answers and no judgement."""

    @property
    def metric(self) -> MetricValue:
        """The share, over the judged rows."""
        n, total = len(self.scores), math.fsum(self.scores.values())
        low, high = statistics.wilson_bounds(total, n, 0.975)
        return MetricValue(value=total / n, n=n, low=low, high=high, better="higher", unit="proportion", chance=0.5)


def measure_preference(
    log: JudgementLog,
    role: ModelRole,
    sides: tuple[str, str],
    answers: tuple[Mapping[str, str], Mapping[str, str]],
) -> HumanPreference:
    """Match judgements with the present answers of two models.

    Rows with equal answers are not judged. If all answers are equal, every row counts as a tie.

    Args:
        log: All judgements.
        role: Role of the candidate.
        sides: Model digests of candidate and reference.
        answers: Their answers by row id.
    """
    rows = answers[0].keys() & answers[1].keys()
    differing = {
        digest_sample(row, {side: by_row[row] for side, by_row in zip(sides, answers, strict=True)}): row
        for row in sorted(rows)
        if differ(answers[0][row], answers[1][row])
    }
    by_sample = score_samples(log.judgements.values(), sides[0])
    scores = {row: by_sample[sample] for sample, row in differing.items() if sample in by_sample}
    if not differing:
        return HumanPreference(role, dict.fromkeys(sorted(rows), 0.5), 0)
    return HumanPreference(role, scores, len(differing) - len(scores))


def differ(answer: str, other: str) -> bool:
    """Return whether people are asked about two answers; white space at the ends is no difference."""
    return answer.strip() != other.strip()


def score_samples(judgements: Iterable[Judgement], side: str) -> dict[str, float]:
    """Return the mean score of a side over raters, by sample; skips do not count."""
    by_sample: dict[str, list[float]] = {}
    for judgement in judgements:
        if (score := judgement.score(side)) is not None:
            by_sample.setdefault(judgement.sample, []).append(score)
    return {sample: math.fsum(scores) / len(scores) for sample, scores in by_sample.items()}
