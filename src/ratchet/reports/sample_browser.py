"""Selects the samples that two models answer differently, for the gate's page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.quality_gate.evidence import GateEvidence
from ratchet.quality_gate.paired_test import MAX_NATS
from ratchet.reports import pages
from ratchet.reports.pages import format_significant, mark_differences, truncate_middle
from ratchet.storage.html import NONE
from ratchet.storage.records.evaluation import EvaluatedRow, EvaluationReport, MetricValue, ModelRole, SampleScore
from ratchet.storage.records.gate import Verdict

Kind = Literal["lost", "won", "wrong", "right"]
"""Change of a sample. If answers are right or wrong: `lost`, only the reference is right; `won`, only the candidate is
right; `wrong`, both are wrong; `right`, both are right. If scores are graded: `lost`, the candidate is worse; `won`,
the candidate is better; `right`, both are equal; `wrong` is unused.
"""

REFERENCES: tuple[ModelRole, ...] = ("champion", "base", "anchor")
"""Reference models of the comparisons, in display order."""
KINDS: tuple[Kind, ...] = ("lost", "won", "wrong", "right")

MAX_SAMPLES = {"lost": 400, "won": 400, "wrong": 100, "right": 40}
"""Maximum number of samples per kind, metric and reference on a page."""

Documents = Mapping[ModelRole, Mapping[str, Sequence[Mapping[str, Any]]]]
"""The harness's documents {id, prompt, target, answers, scores}, by model and task."""

MAX_BYTES = 1_300_000
"""Maximum size of all samples of a page, which keeps the page below 2 MB."""
PROMPT_SHOWN, ANSWER_SHOWN, FIELD_SHOWN = 1600, 800, 80
"""Maximum numbers of characters. The middle of a longer prompt or answer, and the end of a longer field, are cut."""
FLIPS: tuple[Kind, Kind] = ("lost", "won")
FIELDS_SHOWN = 8
"""Maximum number of fields with a filter."""
KIND_NAMES: dict[bool, dict[Kind, str]] = {
    False: {
        "lost": "only reference right",
        "won": "only candidate right",
        "wrong": "both wrong",
        "right": "both right",
    },
    True: {"lost": "candidate worse", "won": "candidate better", "wrong": "", "right": "equal"},
}
"""Names of the kinds; the key is whether the scores are graded."""
SIGNS: dict[Kind, str] = {"lost": "\u25bc", "won": "\u25b2", "wrong": "\u2715", "right": "="}
SampleKey = tuple[str, str]
"""Task ("" for test rows) and id."""


@dataclass(frozen=True)
class SampleView:
    """Text of a sample."""

    id: str
    prompt: str
    expected: str
    task: str = ""
    """Harness task. Empty for a test row."""
    fields: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[ModelRole, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class PairedSampleScores:
    """Scores of two models for one metric."""

    metric: str
    against: ModelRole
    candidate: ModelRole
    """Role under which the candidate was scored: `candidate` or `merged`."""
    graded: bool
    """Whether scores are graded. Otherwise answers are right or wrong."""
    scores: Mapping[str, tuple[float, float]]
    """Scores of reference and candidate, by sample."""
    kinds: Mapping[Kind, Sequence[str]]
    """Samples by kind, largest difference first."""

    def places(self) -> dict[str, tuple[Kind, int]]:
        """Return the kind of each sample and its position within the kind."""
        return {sample: (kind, place) for kind, ids in self.kinds.items() for place, sample in enumerate(ids)}


def read_documents(rows: Sequence[EvaluatedRow], answers: Mapping[ModelRole, Mapping[str, Sequence[str]]],
                   documents: Documents) -> dict[tuple[str, str], SampleView]:  # fmt: skip
    """Return all samples with a text, by task ("" for test rows) and id."""
    views = {
        ("", row.id): SampleView(
            id=row.id,
            prompt=row.prompt,
            expected=row.expected,
            fields=row.fields,
            answers={
                role: answers_by_role[row.id] for role, answers_by_role in answers.items() if row.id in answers_by_role
            },
        )
        for row in rows
    }
    by_place: dict[tuple[str, str], dict[ModelRole, Mapping[str, Any]]] = {}
    for role, tasks in documents.items():
        for task, documents_by_task in tasks.items():
            for document in documents_by_task:
                by_place.setdefault((task, str(document["id"])), {})[role] = document
    for (task, sample), models in by_place.items():
        first = next(iter(models.values()))
        answers_by_role = {role: _answer_texts(document.get("answers")) for role, document in models.items()}
        views[task, sample] = SampleView(
            id=sample,
            prompt=_format_text(first.get("prompt")),
            expected=_format_text(first.get("target")),
            task=task,
            answers=answers_by_role,
        )
    return views


def find_metric(report: EvaluationReport, name: str) -> MetricValue | None:
    """Find a metric in the scores of any model. Unit and direction are the same for all models."""
    return next((scores.metrics[name] for scores in report.scores.values() if name in scores.metrics), None)


def pair_scores(verdict: Verdict, evidence: GateEvidence) -> list[PairedSampleScores]:
    """Pair the per-sample scores of candidate and references by metric.

    Metrics whose answers are right or wrong come before graded metrics. In both groups, metrics of the gate's rules
    come first.
    """
    compared_roles: dict[tuple[str, ModelRole], str] = {
        (comparison.metric, comparison.against): comparison.role
        for reason in verdict.reasons
        for comparison in reason.comparisons
    }
    paired = []
    for against in REFERENCES:
        for metric in sorted(evidence.samples.get(against, {})):
            metric_value = find_metric(evidence.report, metric)
            candidate = _compared_role(compared_roles.get((metric, against), ""), metric, evidence)
            if metric_value is None or candidate is None or metric_value.better == "unknown":
                continue
            paired.append(_pair_metric(metric, metric_value, against, candidate, evidence))
    return sorted(paired, key=lambda scores: (scores.graded, (scores.metric, scores.against) not in compared_roles))


def _compared_role(compared: str, metric: str, evidence: GateEvidence) -> ModelRole | None:
    """Return the role under which the gate compared the candidate, else another role with scores; None if none has."""
    scored = evidence.scored_roles
    if compared:
        scored.sort(key=lambda role: (role == "merged") != (compared == "merged"))
    return next((role for role in scored if metric in evidence.samples.get(role, {})), None)


def _pair_metric(
    metric: str, metric_value: MetricValue, against: ModelRole, candidate: ModelRole, evidence: GateEvidence
) -> PairedSampleScores:
    new, old = evidence.samples[candidate][metric], evidence.samples[against][metric]
    scores = {
        sample: (_sample_score(old[sample], metric_value), _sample_score(new[sample], metric_value))
        for sample in new
        if sample in old
    }
    scores = {sample: pair for sample, pair in sorted(scores.items()) if all(map(math.isfinite, pair))}
    graded = metric_value.better == "lower" or any(
        value not in (0.0, 1.0) for pair in scores.values() for value in pair
    )
    sign = -1.0 if metric_value.better == "lower" else 1.0
    kinds: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for sample, (before, after) in scores.items():
        kinds[_change_kind(sign * (after - before), bool(after) or graded)].append(sample)
    for ids in kinds.values():
        ids.sort(key=lambda sample: (-abs(scores[sample][1] - scores[sample][0]), sample))
    return PairedSampleScores(metric, against, candidate, graded, scores, kinds)


def _sample_score(sample: SampleScore, metric: MetricValue) -> float:
    """Return a sample's score: for perplexities the sample's own perplexity, so that long samples do not dominate."""
    if metric.kind != "perplexity" or not sample.weight:
        return sample.value
    nats = sample.value / sample.weight
    return math.exp(nats) if nats < MAX_NATS else nats + math.inf  # keeps NaN


def _change_kind(gain: float, right: bool) -> Kind:
    if gain:
        return "won" if gain > 0 else "lost"
    return "right" if right else "wrong"


def metric_task(metric: str, tasks: Sequence[str]) -> str:
    """Return the harness task of a metric, or an empty string for metrics of test rows."""
    matching = [task for task in tasks if metric.startswith(f"harness/{task}/")]
    return max(matching, key=len, default="")


def order_samples(paired: Sequence[PairedSampleScores]) -> Iterator[tuple[PairedSampleScores, str]]:
    """Yield samples in display order: flipped samples of all metrics in turn, then the others."""
    for kinds in (("lost", "won"), ("wrong",), ("right",)):
        for place in range(max(MAX_SAMPLES[kind] for kind in kinds)):
            for scores in paired:
                for kind in KINDS:
                    if kind in kinds and place < min(MAX_SAMPLES[kind], len(scores.kinds[kind])):
                        yield scores, scores.kinds[kind][place]


def _answer_texts(answers: Any) -> list[str]:
    return (
        [_format_text(answer) for answer in answers] if isinstance(answers, (list, tuple)) else [_format_text(answers)]
    )


def _format_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


# Browser of flipped samples: complete without JavaScript; templates/samples.js adds filters and pages.


def select_samples(
    paired: Sequence[PairedSampleScores], texts: Mapping[SampleKey, SampleView]
) -> Mapping[str, Any] | None:
    """Return counts of samples, filters, and as many samples as the page has space for; None if none can be shown."""
    tasks = sorted({task for task, _ in texts})
    known = [
        scores
        for scores in paired
        if any((metric_task(scores.metric, tasks), sample) in texts for sample in scores.scores)
    ]
    if not known:
        return None
    references = list(dict.fromkeys(scores.against for scores in known))
    fields = sorted({name for view in texts.values() for name in view.fields})[:FIELDS_SHOWN]
    chosen = _render_samples(known, texts, tasks, fields)
    flipped = {
        (scores.against, (metric_task(scores.metric, tasks), sample))
        for scores in known
        if not scores.graded
        for kind in FLIPS
        for sample in scores.kinds[kind]
    }
    return {
        "counts": [_count_kinds(scores) for scores in known],
        "articles": list(chosen.values()),
        "omitted": sum(key in texts for _, key in flipped - set(chosen)),
        "references": references,
        "fields": fields,
        "metrics": [
            {"name": scores.metric, "reference": references.index(scores.against),
             "graded": "yes" if scores.graded else "no"}
            for scores in known
        ],
        "kinds": [
            {"name": kind, "sign": SIGNS[kind], "plain": KIND_NAMES[False][kind], "graded": KIND_NAMES[True][kind]}
            for kind in KINDS
        ],
    }  # fmt: skip


def _count_kinds(scores: PairedSampleScores) -> tuple[object, ...]:
    counts: list[object] = [len(scores.kinds[kind]) for kind in KINDS]
    if scores.graded:
        counts[2] = NONE
    macros = pages.macros()
    name = macros.noted(macros.bdi(scores.metric), f"{scores.candidate} against {scores.against}")
    return name, len(scores.scores), *counts


def _render_samples(
    paired: Sequence[PairedSampleScores],
    texts: Mapping[SampleKey, SampleView],
    tasks: Sequence[str],
    fields: Sequence[str],
) -> dict[tuple[ModelRole, SampleKey], str]:
    """Render samples until the page is full, and sort them by reference, metric and kind."""
    by_task: dict[tuple[ModelRole, str], list[tuple[int, PairedSampleScores, Mapping[str, tuple[Kind, int]]]]] = {}
    for number, scores in enumerate(paired):
        by_task.setdefault((scores.against, metric_task(scores.metric, tasks)), []).append(
            (number, scores, scores.places())
        )
    references = list(dict.fromkeys(scores.against for scores in paired))
    rendered: dict[tuple[ModelRole, SampleKey], str] = {}
    order: dict[tuple[ModelRole, SampleKey], tuple[int, ...]] = {}
    used, render = 0, pages.macros().sample
    for scores, sample in order_samples(paired):
        key = (metric_task(scores.metric, tasks), sample)
        place = (scores.against, key)
        if place in rendered or key not in texts:
            continue
        scored = [
            (number, metric_scores, *kinds[sample])
            for number, metric_scores, kinds in by_task[scores.against, key[0]]
            if sample in kinds
        ]
        reference = references.index(scores.against)
        chips = [_describe_score(*score) for score in scored]
        article = str(render({**_describe_sample(texts[key], scores, fields), "reference": reference, "scored": chips}))
        used += len(article.encode())
        if used > MAX_BYTES:
            break
        number, _, kind, rank = scored[0]
        rendered[place], order[place] = article, (reference, number, KINDS.index(kind), rank)
    return {place: rendered[place] for place in sorted(rendered, key=order.__getitem__)}


def _describe_score(number: int, scores: PairedSampleScores, kind: Kind, place: int) -> dict[str, str]:
    """Return a metric's scores of both models for a sample."""
    before, after = scores.scores[scores.kinds[kind][place]]
    return {
        "key": f"{number}{kind[:2]}{place}", "kind": kind, "sign": SIGNS[kind],
        "words": KIND_NAMES[scores.graded][kind],
        "text": f"{scores.metric} {format_significant(before)} \u2192 {format_significant(after)}",
    }  # fmt: skip


def _describe_sample(view: SampleView, about: PairedSampleScores, fields: Sequence[str]) -> dict[str, Any]:
    """Return prompt, expected answer, and both answers with marked differences."""
    labels = [f"task {view.task}"] if view.task else []
    labels += [view.id[:12], *(f"{name} = {value[:FIELD_SHOWN]}" for name, value in sorted(view.fields.items()))]
    roles = (about.against, about.candidate)
    given = [_format_answer(view.answers.get(role)) for role in roles]
    marked = mark_differences(given[0] or "", given[1] or "")
    shown = [(role, None if answer is None else text) for role, answer, text in zip(roles, given, marked, strict=True)]
    return {
        "filters": [(n, view.fields[name][:FIELD_SHOWN]) for n, name in enumerate(fields) if name in view.fields],
        "prompt": truncate_middle(view.prompt, PROMPT_SHOWN),
        "expected": truncate_middle(view.expected, ANSWER_SHOWN),
        "answers": shown if any(answer is not None for answer in given) else [],
        "about": " \u00b7 ".join(labels),
    }


def _format_answer(answers: Sequence[str] | None) -> str | None:
    """Join all answers of a model to one sample. Several answers are numbered."""
    if answers is None:
        return None
    text = answers[0] if len(answers) == 1 else "\n".join(f"{n}. {text}" for n, text in enumerate(answers, start=1))
    return truncate_middle(text, ANSWER_SHOWN)
