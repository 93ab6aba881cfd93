"""The answers of a generation, read from its output for whoever judges them; its card vouches for every byte."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ratchet.appraisal.intervals import widened
from ratchet.errors import DamagedError
from ratchet.generating import output
from ratchet.generating.answers import FINISHES
from ratchet.generating.output import LABELS
from ratchet.generating.prompts import Value
from ratchet.generating.spec import Card
from ratchet.measures.figures import SHARE, mean_score
from ratchet.records_evaluation import Metric


@dataclass(frozen=True, slots=True)
class Given:
    """One answer."""

    said: str
    """Without reasoning, and without white space at its ends: as `evaluate` compares answers."""
    finish: str
    tokens: int | None
    nats: float | None
    """Mean log-probability of its tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt with its answers."""

    id: str
    reference: str | None
    """Without white space at its ends; None: it has none."""
    fields: Mapping[str, Value]
    answers: Sequence[Given]
    """In the order of their numbers, at least one."""
    labels: "array[float] | None"
    """Log-probability in nats of each of the generation's labels as the whole answer, NaN where it is not known."""

    @property
    def right(self) -> float:
        """Share of its answers that are the reference."""
        return math.fsum(one.said == self.reference for one in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Answers:
    """All of a generation."""

    path: Path
    card: Card
    prompts: Sequence[Asked]
    is_labels: bool
    """Whether answers come from a small set, so that they are judged label by label."""

    @property
    def judged(self) -> Sequence[Asked]:
        """Prompts with a reference."""
        return [one for one in self.prompts if one.reference is not None]

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Answers that are possible: generate.labels, and references beside them. Empty where answers are free."""
        if not self.is_labels:
            return ()
        named = self.card.spec.generate.labels
        return (*named, *sorted({one.reference for one in self.prompts if one.reference is not None} - set(named)))

    @cached_property
    def strange(self) -> Sequence[Asked]:
        """Prompts whose reference is none of generate.labels, if these are given."""
        named = set(self.card.spec.generate.labels)
        return [one for one in self.judged if one.reference not in named] if named else []


def is_output(name: str) -> bool:
    """Whether a name is that of a generation's output."""
    return Path(name).suffix in output.ENDINGS


def asked(path: Path, card: Card) -> Iterator[Asked]:
    """Prompt by prompt what an output says.

    Raises:
        DamagedError: it is not as it was written.
    """
    answers: list[Given] = []
    count = 0
    for number, record in enumerate(output.read(path, card), start=1):
        try:
            answers.append(_given(record))
            if len(answers) == card.spec.generate.samples:
                yield _asked(record, answers, card.spec.generate.labels)
                answers, count = [], count + 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{path}: record {number} is none of `ratchet generate` ({error!r})") from None
    if answers or not count:
        raise DamagedError(f"{path}: holds {count:,} whole prompts, and its card says {card.prompts:,}")


def read(path: Path, task: str) -> Answers:
    """All answers of an output.

    Args:
        path: what `ratchet generate --output` wrote; its card lies beside it.
        task: prepare.task: `labels` if answers come from a small set; generate.labels say so, too.

    Raises:
        SettingsError, DamagedError: see `output.card` and `asked`.
    """
    card = output.card(path)
    return Answers(path, card, list(asked(path, card)), is_labels(card, task))


def is_labels(card: Card, task: str) -> bool:
    """Whether answers come from a small set: generate.labels name it, or prepare.task says so."""
    return bool(card.spec.generate.labels) or task == "labels"


def accuracy(right: Sequence[float]) -> Metric:
    """Of `Asked.right`: share of answers that are the reference; the mean of several to a prompt is one sample."""
    return widened(mean_score(right, "higher", SHARE))


def _given(record: Mapping[str, Any]) -> Given:
    if record["finish"] not in FINISHES:
        raise ValueError(f"finish {record['finish']!r}")
    nats = record["mean_log_probability"]
    known = nats if nats is not None and math.isfinite(nats) and record["tokens"] else None
    return Given(record["answer"].strip(), record["finish"], record["tokens"], known)


def _asked(record: Mapping[str, Any], answers: Sequence[Given], labels: Sequence[str]) -> Asked:
    reference, said = record.get("reference"), record.get(LABELS)
    known = None
    if labels and said is not None:
        known = array("d", (math.nan if said[label] is None else float(said[label]) for label in labels))
    text = None if reference is None else str(reference).strip()
    return Asked(str(record["id"]), text, record.get("fields") or {}, tuple(answers), known)


def written(value: Value) -> str:
    """A kept field's value for people: texts as they are, the rest as in JSON."""
    return value if isinstance(value, str) else json.dumps(value)
