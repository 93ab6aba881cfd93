"""Selects and renders the samples that two models answer differently."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.quality_gate.evidence import GateEvidence
from ratchet.quality_gate.paired_test import MAX_NATS
from ratchet.reports.forest_plot import REFERENCES, find_metric, format_significant
from ratchet.storage import html
from ratchet.storage.html import Html, explanation, format_count, mark_both_differences, tag, void_tag
from ratchet.storage.records.evaluation import EvaluatedRow, MetricValue, ModelRole, SampleScore
from ratchet.storage.records.gate import Verdict

Kind = Literal["lost", "won", "wrong", "right"]
"""Change of a sample. If answers are right or wrong: `lost`, only the reference is right; `won`, only the candidate is
right; `wrong`, both are wrong; `right`, both are right. If scores are graded: `lost`, the candidate is worse; `won`,
the candidate is better; `right`, both are equal; `wrong` is unused.
"""

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


# Browser of flipped samples: complete without JavaScript; reports/gate.js adds filters and pages.
IndexedScores = tuple[int, PairedSampleScores, Mapping[str, tuple[Kind, int]]]
"""Number of a metric, its scores, and the position of every sample."""
SampleResult = tuple[int, PairedSampleScores, Kind, int]
"""Number of a metric, its scores, kind of a sample, and its position within the kind."""


def render_samples(paired: Sequence[PairedSampleScores], texts: Mapping[SampleKey, SampleView]) -> Sequence[Html] | str:
    """Render numbers of flipped samples, filters, and as many samples as the page has space for."""
    tasks = sorted({task for task, _ in texts})
    known = [
        scores
        for scores in paired
        if any((metric_task(scores.metric, tasks), sample) in texts for sample in scores.scores)
    ]
    if not known:
        return "No reference has samples that can be shown next to the candidate's."
    chosen = _select_samples(known, texts, tasks)
    summary = f"{format_count(len(chosen), 'sample')} shown"
    if omitted := _count_omitted(known, texts, tasks, chosen):
        summary += f"; {omitted:,} that changed between right and wrong are omitted to limit the page size"
    samples = tag("div", *chosen.values(), class_="list", tabindex="0", role="region", aria_label="Samples")
    return [
        _render_counts(known),
        explanation(
            f"{summary}. The evaluation files have all samples. Words that differ between the answers are marked."
        ),
        tag("div", _render_controls(known, _filter_fields(texts)), samples, _render_paging(), id="browser"),
    ]


def _render_counts(paired: Sequence[PairedSampleScores]) -> Html:
    """Render the number of samples by kind."""
    rows = []
    for scores in paired:
        counts = [f"{len(scores.kinds[kind]):,}" for kind in KINDS]
        if scores.graded:
            counts[2] = html.NONE
        about = f"{scores.candidate} against {scores.against}"
        rows.append((tag("span", tag("bdi", scores.metric), tag("small", about)), f"{len(scores.scores):,}", *counts))
    heads = ("metric", "n", "worse", "better", "both wrong", "both right, or equal")
    return html.table("Flipped samples by metric", "tnnnnn", heads, rows)


def _select_samples(
    paired: Sequence[PairedSampleScores], texts: Mapping[SampleKey, SampleView], tasks: Sequence[str]
) -> dict[tuple[ModelRole, SampleKey], Html]:
    """Select samples until the page is full, and sort them by reference, metric and kind."""
    by_task: dict[tuple[ModelRole, str], list[IndexedScores]] = {}
    for number, scores in enumerate(paired):
        by_task.setdefault((scores.against, metric_task(scores.metric, tasks)), []).append(
            (number, scores, scores.places())
        )
    fields, references = _filter_fields(texts), list(dict.fromkeys(scores.against for scores in paired))
    selected: dict[tuple[ModelRole, SampleKey], Html] = {}
    order: dict[tuple[ModelRole, SampleKey], tuple[int, ...]] = {}
    used = 0
    for scores, sample in order_samples(paired):
        key = (metric_task(scores.metric, tasks), sample)
        place = (scores.against, key)
        if place in selected or key not in texts:
            continue
        scored = [
            (number, metric_scores, *kinds[sample])
            for number, metric_scores, kinds in by_task[scores.against, key[0]]
            if sample in kinds
        ]
        article = _render_sample(texts[key], scores, scored, references.index(scores.against), fields)
        used += len(article.encode())
        if used > MAX_BYTES:
            break
        number, _, kind, rank = scored[0]
        selected[place], order[place] = article, (references.index(scores.against), number, KINDS.index(kind), rank)
    return {place: selected[place] for place in sorted(selected, key=order.__getitem__)}


def _count_omitted(
    paired: Sequence[PairedSampleScores],
    texts: Mapping[SampleKey, SampleView],
    tasks: Sequence[str],
    chosen: Collection[tuple[ModelRole, SampleKey]],
) -> int:
    """Count the samples that changed between right and wrong and are not shown."""
    flipped = {
        (scores.against, (metric_task(scores.metric, tasks), sample))
        for scores in paired
        if not scores.graded
        for kind in FLIPS
        for sample in scores.kinds[kind]
    }
    return sum(place[1] in texts for place in flipped - set(chosen))


def _render_sample(
    view: SampleView, about: PairedSampleScores, scored: Sequence[SampleResult], reference: int, fields: Sequence[str]
) -> Html:
    """Render one sample: scores of both models, prompt, expected answer, and both answers with marked differences."""
    data = {"data_r": str(reference), "data_k": " ".join(f"{n}{kind[:2]}{place}" for n, _, kind, place in scored)}
    data |= {
        f"data_f{number}": view.fields[name][:FIELD_SHOWN] for number, name in enumerate(fields) if name in view.fields
    }
    labels = [f"task {view.task}"] if view.task else []
    labels += [view.id[:12], *(f"{name} = {value[:FIELD_SHOWN]}" for name, value in sorted(view.fields.items()))]
    return tag(
        "article",
        tag("p", *(_render_chip(*score) for score in scored), class_="chips"),
        tag(
            "div",
            tag("small", "prompt"),
            tag("p", tag("bdi", _truncate_middle(view.prompt, PROMPT_SHOWN))),
            class_="prompt",
        ),
        tag("div", *_render_answers(view, about), class_="answers"),
        tag("small", tag("bdi", " \u00b7 ".join(labels))),
        **data,
    )


def _render_chip(_: int, scores: PairedSampleScores, kind: Kind, place: int) -> Html:
    """Render a metric's scores of both models for a sample."""
    before, after = scores.scores[scores.kinds[kind][place]]
    kind_text = KIND_NAMES[scores.graded][kind]
    text = f" {scores.metric} {format_significant(before)} \u2192 {format_significant(after)}"
    return tag("span", tag("b", SIGNS[kind], aria_label=kind_text, title=kind_text, role="img"), text, class_=kind)


def _render_answers(view: SampleView, about: PairedSampleScores) -> Iterator[Html]:
    """Render the expected answer and both models' answers, if they generated text."""
    yield tag("div", tag("small", "expected"), tag("p", tag("bdi", _truncate_middle(view.expected, ANSWER_SHOWN))))
    old, new = (_format_answer(view.answers.get(role)) for role in (about.against, about.candidate))
    if old is None and new is None:
        return
    texts = mark_both_differences(old or "", new or "")
    for role, answer, marked in zip((about.against, about.candidate), (old, new), texts, strict=True):
        yield tag("div", tag("small", role), tag("p", tag("i", "not answered") if answer is None else marked))


def _format_answer(answers: Sequence[str] | None) -> str | None:
    """Join all answers of a model to one sample. Several answers are numbered."""
    if answers is None:
        return None
    if len(answers) == 1:
        return _truncate_middle(answers[0], ANSWER_SHOWN)
    return _truncate_middle(
        "\n".join(f"{number}. {answer}" for number, answer in enumerate(answers, start=1)), ANSWER_SHOWN
    )


def _truncate_middle(text: str, most: int) -> str:
    """Cut the middle of a long text. The end is kept, because it often contains the question."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _filter_fields(texts: Mapping[SampleKey, SampleView]) -> list[str]:
    """Return the fields that have a filter."""
    return sorted({name for view in texts.values() for name in view.fields})[:FIELDS_SHOWN]


def _render_controls(paired: Sequence[PairedSampleScores], fields: Sequence[str]) -> Html:
    """Render the filters. The script adds counts and values, and makes the filters visible."""
    references = list(dict.fromkeys(scores.against for scores in paired))
    metrics = [
        tag("option", scores.metric, value=str(number), data_r=str(references.index(scores.against)),
            data_graded="yes" if scores.graded else "no")
        for number, scores in enumerate(paired)
    ]  # fmt: skip
    kinds = [
        tag("button", tag("span", SIGNS[kind], aria_hidden="true"), " ", tag("span", KIND_NAMES[False][kind]), " ",
            tag("b"), type="button", data_kind=kind[:2], data_yes=KIND_NAMES[True][kind],
            data_no=KIND_NAMES[False][kind], aria_pressed="false" if kind == "right" else "true")
        for kind in KINDS
    ]  # fmt: skip
    selects = [
        _render_select(
            "reference",
            "reference",
            *(tag("option", reference, value=str(n)) for n, reference in enumerate(references)),
        ),
        _render_select("metric", "metric", *metrics),
        *(_render_select(name, f"f{number}", tag("option", "all", value="")) for number, name in enumerate(fields)),
    ]
    search = tag("label", tag("span", "search"), void_tag("input", type="search", data_by="search", autocomplete="off"))
    return tag(
        "div",
        tag("div", *selects, search, class_="selects"),
        tag("div", *kinds, class_="kinds", role="group", aria_label="Kinds of samples"),
        class_="controls", role="search", aria_label="Filter samples", hidden="",
    )  # fmt: skip


def _render_select(name: str, data_key: str, *options: Html) -> Html:
    return tag("label", tag("span", name), tag("select", *options, data_by=data_key))


def _render_paging() -> Html:
    buttons = [tag("button", text, type="button", data_turn=turn) for text, turn in (("Previous", "-1"), ("Next", "1"))]
    return tag("div", buttons[0], tag("span", role="status"), buttons[1], class_="paging", hidden="")
