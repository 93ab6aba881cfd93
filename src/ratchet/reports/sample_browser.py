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
"""Change of a sample. For right and wrong: only the reference is right, only the candidate, neither, both. For other
scores: the candidate is worse, it is better, (unused), they are equal.
"""

KINDS: tuple[Kind, ...] = ("lost", "won", "wrong", "right")

MOST = {"lost": 400, "won": 400, "wrong": 100, "right": 40}
"""Maximum number of samples per kind, metric and reference on a page."""

Documents = Mapping[ModelRole, Mapping[str, Sequence[Mapping[str, Any]]]]
"""The harness's documents {id, prompt, target, answers, scores}, by model and task."""


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
    """`candidate` or `merged`: the compared role."""
    graded: bool
    """Whether scores are graded instead of right and wrong."""
    scores: Mapping[str, tuple[float, float]]
    """Scores of reference and candidate, by sample."""
    kinds: Mapping[Kind, Sequence[str]]
    """Samples by kind, largest difference first."""

    def places(self) -> dict[str, tuple[Kind, int]]:
        """Return the kind of each sample and its position within the kind."""
        return {sample: (kind, place) for kind, ids in self.kinds.items() for place, sample in enumerate(ids)}


def read_documents(rows: Sequence[EvaluatedRow], answers: Mapping[ModelRole, Mapping[str, Sequence[str]]],
                   documents: Documents) -> dict[tuple[str, str], SampleView]:  # fmt: skip
    """Return every sample that has a text, by task ("" for test rows) and id."""
    views = {
        ("", row.id): SampleView(
            id=row.id,
            prompt=row.prompt,
            expected=row.expected,
            fields=row.fields,
            answers={
                who: answers_by_role[row.id] for who, answers_by_role in answers.items() if row.id in answers_by_role
            },
        )
        for row in rows
    }
    by_place: dict[tuple[str, str], dict[ModelRole, Mapping[str, Any]]] = {}
    for who, tasks in documents.items():
        for task, documents_by_task in tasks.items():
            for document in documents_by_task:
                by_place.setdefault((task, str(document["id"])), {})[who] = document
    for (task, sample), models in by_place.items():
        first = next(iter(models.values()))
        answers_by_role = {who: _answer_texts(document.get("answers")) for who, document in models.items()}
        views[task, sample] = SampleView(
            id=sample,
            prompt=_format_text(first.get("prompt")),
            expected=_format_text(first.get("target")),
            task=task,
            answers=answers_by_role,
        )
    return views


def pair_scores(verdict: Verdict, evidence: GateEvidence) -> list[PairedSampleScores]:
    """Return every metric with per-sample scores of both candidate and a reference, metrics of the rules first."""
    forms: dict[tuple[str, ModelRole], str] = {
        (found.metric, found.against): found.role for reason in verdict.reasons for found in reason.comparisons
    }
    paired = []
    for against in REFERENCES:
        for metric in sorted(evidence.samples.get(against, {})):
            metric_value = find_metric(evidence.report, metric)
            candidate = _compared_role(forms.get((metric, against), ""), metric, evidence)
            if metric_value is None or candidate is None or metric_value.better == "unknown":
                continue
            paired.append(_pair_metric(metric, metric_value, against, candidate, evidence))
    return sorted(paired, key=lambda one: (one.graded, (one.metric, one.against) not in forms))


def _compared_role(compared: str, metric: str, evidence: GateEvidence) -> ModelRole | None:
    """Return the role of the candidate that the gate compared, else the first that was scored."""
    scored = evidence.scored_roles
    if compared:
        scored.sort(key=lambda who: (who == "merged") != (compared == "merged"))
    return next((who for who in scored if metric in evidence.samples.get(who, {})), None)


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
    turned = -1.0 if metric_value.better == "lower" else 1.0
    kinds: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for sample, (before, after) in scores.items():
        kinds[_change_kind(turned * (after - before), bool(after) or graded)].append(sample)
    for ids in kinds.values():
        ids.sort(key=lambda sample: (-abs(scores[sample][1] - scores[sample][0]), sample))
    return PairedSampleScores(metric, against, candidate, graded, scores, kinds)


def _sample_score(sample: SampleScore, metric: MetricValue) -> float:
    """Return a sample's score. Perplexities use the sample's own perplexity, so that long samples do not dominate."""
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
    fitting = [task for task in tasks if metric.startswith(f"harness/{task}/")]
    return max(fitting, key=len, default="")


def order_samples(paired: Sequence[PairedSampleScores]) -> Iterator[tuple[PairedSampleScores, str]]:
    """Yield samples in display order: flips of all metrics in turn, then the others."""
    for kinds in (("lost", "won"), ("wrong",), ("right",)):
        for place in range(max(MOST[kind] for kind in kinds)):
            for one in paired:
                for kind in KINDS:
                    if kind in kinds and place < min(MOST[kind], len(one.kinds[kind])):
                        yield one, one.kinds[kind][place]


def _answer_texts(answers: Any) -> list[str]:
    return [_format_text(one) for one in answers] if isinstance(answers, (list, tuple)) else [_format_text(answers)]


def _format_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


# Browser of flipped samples: complete without JavaScript, with filters and pages with it (reports/gate.js).

ROOM_BYTES = 1_300_000
"""Maximum size of all samples together, which keeps the page below 2 MB."""

PROMPT_SHOWN, ANSWER_SHOWN, FIELD_SHOWN = 1600, 800, 80
"""Maximum number of characters of a text. The middle of a longer prompt or answer and the end of a longer field are
cut."""

FLIPS: tuple[Kind, Kind] = ("lost", "won")

FIELDS_SHOWN = 8
"""Maximum number of fields with a filter. A field's filter has all values of the samples."""

SAID: dict[bool, dict[Kind, str]] = {
    False: {
        "lost": "only reference right",
        "won": "only candidate right",
        "wrong": "both wrong",
        "right": "both right",
    },
    True: {"lost": "candidate worse", "won": "candidate better", "wrong": "", "right": "equal"},
}
"""Names of the kinds, by whether scores are graded."""

SIGNS: dict[Kind, str] = {"lost": "\u25bc", "won": "\u25b2", "wrong": "\u2715", "right": "="}

Key = tuple[str, str]
"""Task ("" for test rows) and id."""
Beside = tuple[int, PairedSampleScores, Mapping[str, tuple[Kind, int]]]
"""Number of a metric, its scores, and the position of every sample."""
Scored = tuple[int, PairedSampleScores, Kind, int]
"""Number of a metric, its scores, kind of a sample, and its position within the kind."""


def render_samples(paired: Sequence[PairedSampleScores], texts: Mapping[Key, SampleView]) -> Sequence[Html] | str:
    """Render the section: numbers of flipped samples, filters, and as many samples as the page has space for."""
    tasks = sorted({task for task, _ in texts})
    known = [one for one in paired if any((metric_task(one.metric, tasks), sample) in texts for sample in one.scores)]
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
    for one in paired:
        counts = [f"{len(one.kinds[kind]):,}" for kind in KINDS]
        if one.graded:
            counts[2] = html.NONE
        about = f"{one.candidate} against {one.against}"
        rows.append((tag("span", tag("bdi", one.metric), tag("small", about)), f"{len(one.scores):,}", *counts))
    heads = ("metric", "n", "worse", "better", "both wrong", "both right, or equal")
    return html.table("Flipped samples by metric", "tnnnnn", heads, rows)


def _select_samples(
    paired: Sequence[PairedSampleScores], texts: Mapping[Key, SampleView], tasks: Sequence[str]
) -> dict[tuple[ModelRole, Key], Html]:
    """Select samples by reference until the page is full; lost ones first for each reference."""
    beside: dict[tuple[ModelRole, str], list[Beside]] = {}
    for number, one in enumerate(paired):
        beside.setdefault((one.against, metric_task(one.metric, tasks)), []).append((number, one, one.places()))
    fields, references = _filter_fields(texts), list(dict.fromkeys(one.against for one in paired))
    selected: dict[tuple[ModelRole, Key], Html] = {}
    order: dict[tuple[ModelRole, Key], tuple[int, ...]] = {}
    used = 0
    for one, sample in order_samples(paired):
        key = (metric_task(one.metric, tasks), sample)
        place = (one.against, key)
        if place in selected or key not in texts:
            continue
        scored = [(number, other, *kinds[sample]) for number, other, kinds in beside[one.against, key[0]]
                  if sample in kinds]  # fmt: skip
        article = _render_sample(texts[key], one, scored, references.index(one.against), fields)
        used += len(article.encode())
        if used > ROOM_BYTES:
            break
        number, _, kind, rank = scored[0]
        selected[place], order[place] = article, (references.index(one.against), number, KINDS.index(kind), rank)
    return {place: selected[place] for place in sorted(selected, key=order.__getitem__)}


def _count_omitted(
    paired: Sequence[PairedSampleScores],
    texts: Mapping[Key, SampleView],
    tasks: Sequence[str],
    chosen: Collection[tuple[ModelRole, Key]],
) -> int:
    """Count the samples that changed between right and wrong and are not shown."""
    flipped = {
        (one.against, (metric_task(one.metric, tasks), sample))
        for one in paired
        if not one.graded
        for kind in FLIPS
        for sample in one.kinds[kind]
    }
    return sum(place[1] in texts for place in flipped - set(chosen))


def _render_sample(
    view: SampleView, about: PairedSampleScores, scored: Sequence[Scored], reference: int, fields: Sequence[str]
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
        tag("p", *(_render_chip(*one) for one in scored), class_="chips"),
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


def _render_chip(_: int, one: PairedSampleScores, kind: Kind, place: int) -> Html:
    """Render a metric's result for a sample."""
    before, after = one.scores[one.kinds[kind][place]]
    kind_text = SAID[one.graded][kind]
    text = f" {one.metric} {format_significant(before)} \u2192 {format_significant(after)}"
    return tag("span", tag("b", SIGNS[kind], aria_label=kind_text, title=kind_text, role="img"), text, class_=kind)


def _render_answers(view: SampleView, about: PairedSampleScores) -> Iterator[Html]:
    """Render the expected answer and both models' answers, if they generated text."""
    yield tag("div", tag("small", "expected"), tag("p", tag("bdi", _truncate_middle(view.expected, ANSWER_SHOWN))))
    old, new = (_format_answer(view.answers.get(who)) for who in (about.against, about.candidate))
    if old is None and new is None:
        return
    texts = mark_both_differences(old or "", new or "")
    for who, one, marked in zip((about.against, about.candidate), (old, new), texts, strict=True):
        yield tag("div", tag("small", who), tag("p", tag("i", "not answered") if one is None else marked))


def _format_answer(answers: Sequence[str] | None) -> str | None:
    """Join all answers of a model to one sample. Several answers are numbered."""
    if answers is None:
        return None
    if len(answers) == 1:
        return _truncate_middle(answers[0], ANSWER_SHOWN)
    return _truncate_middle("\n".join(f"{number}. {one}" for number, one in enumerate(answers, start=1)), ANSWER_SHOWN)


def _truncate_middle(text: str, most: int) -> str:
    """Cut the middle of a long text, because the question is often at the end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _filter_fields(texts: Mapping[Key, SampleView]) -> list[str]:
    """Return the fields that have a filter."""
    return sorted({name for view in texts.values() for name in view.fields})[:FIELDS_SHOWN]


def _render_controls(paired: Sequence[PairedSampleScores], fields: Sequence[str]) -> Html:
    """Render the filters. The script fills in counts and values, and makes them visible."""
    references = list(dict.fromkeys(one.against for one in paired))
    metrics = [
        tag("option", one.metric, value=str(number), data_r=str(references.index(one.against)),
            data_graded="yes" if one.graded else "no")
        for number, one in enumerate(paired)
    ]  # fmt: skip
    kinds = [
        tag("button", tag("span", SIGNS[kind], aria_hidden="true"), " ", tag("span", SAID[False][kind]), " ", tag("b"),
            type="button", data_kind=kind[:2], data_yes=SAID[True][kind], data_no=SAID[False][kind],
            aria_pressed="false" if kind == "right" else "true")
        for kind in KINDS
    ]  # fmt: skip
    selects = [
        _render_select(
            "reference", "reference", *(tag("option", one, value=str(n)) for n, one in enumerate(references))
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


def _render_select(name: str, by: str, *options: Html) -> Html:
    return tag("label", tag("span", name), tag("select", *options, data_by=by))


def _render_paging() -> Html:
    buttons = [tag("button", text, type="button", data_turn=turn) for text, turn in (("Previous", "-1"), ("Next", "1"))]
    return tag("div", buttons[0], tag("span", role="status"), buttons[1], class_="paging", hidden="")
