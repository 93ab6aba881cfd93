"""Which samples two models answer differently, and which of them a page has room for."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.gating.evidence import Evidence
from ratchet.gating.paired import MOST_NATS
from ratchet.pages.values import REFERENCES, measured
from ratchet.records_evaluation import EvaluatedRow, Metric, Sample, Who
from ratchet.records_gate import Verdict

Kind = Literal["lost", "won", "wrong", "right"]
"""Right and wrong: only the reference is right, only the candidate, neither, both. Any other score: the candidate's is
worse, it is better, (none), they are equal."""

KINDS: tuple[Kind, ...] = ("lost", "won", "wrong", "right")

MOST = {"lost": 400, "won": 400, "wrong": 100, "right": 40}
"""Samples of one kind, metric and reference that a page shows."""

Documents = Mapping[Who, Mapping[str, Sequence[Mapping[str, Any]]]]
"""The harness's documents {id, prompt, target, answers, scores}, by model and task."""


@dataclass(frozen=True)
class Shown:
    """A sample as people read it."""

    id: str
    prompt: str
    expected: str
    task: str = ""
    """Of the harness; empty for a test row."""
    fields: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[Who, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pairing:
    """Two models' scores of one metric."""

    metric: str
    against: Who
    candidate: Who
    """`candidate` or `merged`: the form that is compared."""
    graded: bool
    """The scores are not of right and wrong."""
    scores: Mapping[str, tuple[float, float]]
    """Reference's and candidate's, by sample."""
    kinds: Mapping[Kind, Sequence[str]]
    """Samples, the greatest difference first."""

    def places(self) -> dict[str, tuple[Kind, int]]:
        """Kind of each sample, and how far in front it stands among its kind."""
        return {sample: (kind, place) for kind, ids in self.kinds.items() for place, sample in enumerate(ids)}


def read_documents(rows: Sequence[EvaluatedRow], answers: Mapping[Who, Mapping[str, Sequence[str]]],
                   documents: Documents) -> dict[tuple[str, str], Shown]:  # fmt: skip
    """Every sample that has a text, by task ("" for test rows) and id."""
    found = {
        ("", row.id): Shown(
            id=row.id,
            prompt=row.prompt,
            expected=row.expected,
            fields=row.fields,
            answers={who: given[row.id] for who, given in answers.items() if row.id in given},
        )
        for row in rows
    }
    by_place: dict[tuple[str, str], dict[Who, Mapping[str, Any]]] = {}
    for who, tasks in documents.items():
        for task, listed in tasks.items():
            for document in listed:
                by_place.setdefault((task, str(document["id"])), {})[who] = document
    for (task, sample), models in by_place.items():
        first = next(iter(models.values()))
        given = {who: _texts(document.get("answers")) for who, document in models.items()}
        found[task, sample] = Shown(
            id=sample, prompt=_text(first.get("prompt")), expected=_text(first.get("target")), task=task, answers=given
        )
    return found


def pairings(verdict: Verdict, evidence: Evidence) -> list[Pairing]:
    """Every metric that candidate and a reference both have sample by sample; those of the rules first."""
    forms: dict[tuple[str, Who], str] = {
        (found.metric, found.against): found.form for reason in verdict.reasons for found in reason.comparisons
    }
    made = []
    for against in REFERENCES:
        for metric in sorted(evidence.samples.get(against, {})):
            shown = measured(evidence.report, metric)
            candidate = _form(forms.get((metric, against), ""), metric, evidence)
            if shown is None or candidate is None or shown.better == "unknown":
                continue
            made.append(_pairing(metric, shown, against, candidate, evidence))
    return sorted(made, key=lambda one: (one.graded, (one.metric, one.against) not in forms))


def _form(compared: str, metric: str, evidence: Evidence) -> Who | None:
    """The form of the candidate that the gate compared, else the first that was scored."""
    scored = evidence.scored_forms
    if compared:
        scored.sort(key=lambda who: (who == "merged") != (compared == "merged"))
    return next((who for who in scored if metric in evidence.samples.get(who, {})), None)


def _pairing(metric: str, shown: Metric, against: Who, candidate: Who, evidence: Evidence) -> Pairing:
    new, old = evidence.samples[candidate][metric], evidence.samples[against][metric]
    scores = {sample: (_each(old[sample], shown), _each(new[sample], shown)) for sample in new if sample in old}
    scores = {sample: pair for sample, pair in sorted(scores.items()) if all(map(math.isfinite, pair))}
    graded = shown.better == "lower" or any(value not in (0.0, 1.0) for pair in scores.values() for value in pair)
    turned = -1.0 if shown.better == "lower" else 1.0
    kinds: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for sample, (before, after) in scores.items():
        kinds[_kind(turned * (after - before), bool(after) or graded)].append(sample)
    for ids in kinds.values():
        ids.sort(key=lambda sample: (-abs(scores[sample][1] - scores[sample][0]), sample))
    return Pairing(metric, against, candidate, graded, scores, kinds)


def _each(sample: Sample, metric: Metric) -> float:
    """A sample's score; of perplexities its own perplexity, so that long samples are not worse than short ones."""
    if metric.kind != "perplexity" or not sample.weight:
        return sample.value
    nats = sample.value / sample.weight
    return math.exp(nats) if nats < MOST_NATS else nats + math.inf  # which leaves NaN what it is


def _kind(gain: float, right: bool) -> Kind:
    if gain:
        return "won" if gain > 0 else "lost"
    return "right" if right else "wrong"


def task_of(metric: str, tasks: Sequence[str]) -> str:
    """The harness task that a metric belongs to; none for those of test rows."""
    fitting = [task for task in tasks if metric.startswith(f"harness/{task}/")]
    return max(fitting, key=len, default="")


def wanted(made: Sequence[Pairing]) -> Iterator[tuple[Pairing, str]]:
    """Samples in the order in which a page takes them: flips of all metrics in turn, then the others."""
    for kinds in (("lost", "won"), ("wrong",), ("right",)):
        for place in range(max(MOST[kind] for kind in kinds)):
            for one in made:
                for kind in KINDS:
                    if kind in kinds and place < min(MOST[kind], len(one.kinds[kind])):
                        yield one, one.kinds[kind][place]


def _texts(given: Any) -> list[str]:
    return [_text(one) for one in given] if isinstance(given, (list, tuple)) else [_text(given)]


def _text(given: Any) -> str:
    return given if isinstance(given, str) else "" if given is None else str(given)
