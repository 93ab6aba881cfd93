"""Which samples two models answer differently, and which of them a page has room for."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.gate.evidence import GateEvidence
from ratchet.gate.paired_test import MOST_NATS
from ratchet.reports.forest_plot import REFERENCES, find_metric, format_significant
from ratchet.storage import html
from ratchet.storage.html import Html, explanation, format_count, mark_both_differences, tag, void_tag
from ratchet.storage.records.evaluation import EvaluatedRow, MetricValue, SampleScore, Who
from ratchet.storage.records.gate import Verdict

Kind = Literal["lost", "won", "wrong", "right"]
"""Right and wrong: only the reference is right, only the candidate, neither, both. Any other score: the candidate's is
worse, it is better, (none), they are equal."""

KINDS: tuple[Kind, ...] = ("lost", "won", "wrong", "right")

MOST = {"lost": 400, "won": 400, "wrong": 100, "right": 40}
"""Samples of one kind, metric and reference that a page shows."""

Documents = Mapping[Who, Mapping[str, Sequence[Mapping[str, Any]]]]
"""The harness's documents {id, prompt, target, answers, scores}, by model and task."""


@dataclass(frozen=True)
class SampleView:
    """A sample as people read it."""

    id: str
    prompt: str
    expected: str
    task: str = ""
    """Of the harness; empty for a test row."""
    fields: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[Who, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class PairedSampleScores:
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
                   documents: Documents) -> dict[tuple[str, str], SampleView]:  # fmt: skip
    """Every sample that has a text, by task ("" for test rows) and id."""
    found = {
        ("", row.id): SampleView(
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
        given = {who: _answer_texts(document.get("answers")) for who, document in models.items()}
        found[task, sample] = SampleView(
            id=sample,
            prompt=_format_text(first.get("prompt")),
            expected=_format_text(first.get("target")),
            task=task,
            answers=given,
        )
    return found


def pair_scores(verdict: Verdict, evidence: GateEvidence) -> list[PairedSampleScores]:
    """Every metric that candidate and a reference both have sample by sample; those of the rules first."""
    forms: dict[tuple[str, Who], str] = {
        (found.metric, found.against): found.form for reason in verdict.reasons for found in reason.comparisons
    }
    made = []
    for against in REFERENCES:
        for metric in sorted(evidence.samples.get(against, {})):
            shown = find_metric(evidence.report, metric)
            candidate = _compared_form(forms.get((metric, against), ""), metric, evidence)
            if shown is None or candidate is None or shown.better == "unknown":
                continue
            made.append(_pair_metric(metric, shown, against, candidate, evidence))
    return sorted(made, key=lambda one: (one.graded, (one.metric, one.against) not in forms))


def _compared_form(compared: str, metric: str, evidence: GateEvidence) -> Who | None:
    """The form of the candidate that the gate compared, else the first that was scored."""
    scored = evidence.scored_forms
    if compared:
        scored.sort(key=lambda who: (who == "merged") != (compared == "merged"))
    return next((who for who in scored if metric in evidence.samples.get(who, {})), None)


def _pair_metric(
    metric: str, shown: MetricValue, against: Who, candidate: Who, evidence: GateEvidence
) -> PairedSampleScores:
    new, old = evidence.samples[candidate][metric], evidence.samples[against][metric]
    scores = {
        sample: (_sample_score(old[sample], shown), _sample_score(new[sample], shown))
        for sample in new
        if sample in old
    }
    scores = {sample: pair for sample, pair in sorted(scores.items()) if all(map(math.isfinite, pair))}
    graded = shown.better == "lower" or any(value not in (0.0, 1.0) for pair in scores.values() for value in pair)
    turned = -1.0 if shown.better == "lower" else 1.0
    kinds: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for sample, (before, after) in scores.items():
        kinds[_change_kind(turned * (after - before), bool(after) or graded)].append(sample)
    for ids in kinds.values():
        ids.sort(key=lambda sample: (-abs(scores[sample][1] - scores[sample][0]), sample))
    return PairedSampleScores(metric, against, candidate, graded, scores, kinds)


def _sample_score(sample: SampleScore, metric: MetricValue) -> float:
    """A sample's score; of perplexities its own perplexity, so that long samples are not worse than short ones."""
    if metric.kind != "perplexity" or not sample.weight:
        return sample.value
    nats = sample.value / sample.weight
    return math.exp(nats) if nats < MOST_NATS else nats + math.inf  # which leaves NaN what it is


def _change_kind(gain: float, right: bool) -> Kind:
    if gain:
        return "won" if gain > 0 else "lost"
    return "right" if right else "wrong"


def metric_task(metric: str, tasks: Sequence[str]) -> str:
    """The harness task that a metric belongs to; none for those of test rows."""
    fitting = [task for task in tasks if metric.startswith(f"harness/{task}/")]
    return max(fitting, key=len, default="")


def order_samples(made: Sequence[PairedSampleScores]) -> Iterator[tuple[PairedSampleScores, str]]:
    """Samples in the order in which a page takes them: flips of all metrics in turn, then the others."""
    for kinds in (("lost", "won"), ("wrong",), ("right",)):
        for place in range(max(MOST[kind] for kind in kinds)):
            for one in made:
                for kind in KINDS:
                    if kind in kinds and place < min(MOST[kind], len(one.kinds[kind])):
                        yield one, one.kinds[kind][place]


def _answer_texts(given: Any) -> list[str]:
    return [_format_text(one) for one in given] if isinstance(given, (list, tuple)) else [_format_text(given)]


def _format_text(given: Any) -> str:
    return given if isinstance(given, str) else "" if given is None else str(given)


# The browser of flipped samples: complete without JavaScript, filtered and paged with it (reports/gate.js).

ROOM_BYTES = 1_300_000
"""Of all samples together: the page stays below 2 MB."""

PROMPT_SHOWN, ANSWER_SHOWN, FIELD_SHOWN = 1600, 800, 80
"""Characters of a text; the middle of a longer one is left out, of a field its end."""

FLIPS: tuple[Kind, Kind] = ("lost", "won")

FIELDS_SHOWN = 8
"""Fields by which samples may be filtered; values of one are as many as the samples have."""

SAID: dict[bool, dict[Kind, str]] = {
    False: {
        "lost": "only reference right",
        "won": "only candidate right",
        "wrong": "both wrong",
        "right": "both right",
    },
    True: {"lost": "candidate worse", "won": "candidate better", "wrong": "", "right": "equal"},
}
"""Kinds, for scores of right and wrong and for all others."""

SIGNS: dict[Kind, str] = {"lost": "\u25bc", "won": "\u25b2", "wrong": "\u2715", "right": "="}

Key = tuple[str, str]
"""Task (none for test rows) and id."""
Beside = tuple[int, PairedSampleScores, Mapping[str, tuple[Kind, int]]]
"""A metric's number, its scores, and the place of every sample."""
Scored = tuple[int, PairedSampleScores, Kind, int]
"""The same for one sample: its kind, and its place among that kind."""


def render_samples(made: Sequence[PairedSampleScores], texts: Mapping[Key, SampleView]) -> Sequence[Html] | str:
    """The section: how many samples flipped, filters, and the samples that there is room for."""
    tasks = sorted({task for task, _ in texts})
    known = [one for one in made if any((metric_task(one.metric, tasks), sample) in texts for sample in one.scores)]
    if not known:
        return "There is no reference whose samples could be read beside the candidate's."
    chosen = _select_samples(known, texts, tasks)
    said = f"{format_count(len(chosen), 'sample')} can be read here"
    if left_out := _count_omitted(known, texts, tasks, chosen):
        said += f"; {left_out:,} that changed between right and wrong are left out for want of room"
    listed = tag("div", *chosen.values(), class_="list", tabindex="0", role="region", aria_label="Samples")
    return [
        _render_counts(known),
        explanation(
            f"{said}. The evaluation's files have all. Words are marked that the other answer has not in that place."
        ),
        tag("div", _render_controls(known, _filter_fields(texts)), listed, _render_paging(), id="browser"),
    ]


def _render_counts(made: Sequence[PairedSampleScores]) -> Html:
    """Samples by kind, all of them."""
    rows = []
    for one in made:
        found = [f"{len(one.kinds[kind]):,}" for kind in KINDS]
        if one.graded:
            found[2] = html.NONE
        about = f"{one.candidate} against {one.against}"
        rows.append((tag("span", tag("bdi", one.metric), tag("small", about)), f"{len(one.scores):,}", *found))
    heads = ("metric", "n", "worse", "better", "both wrong", "both right, or equal")
    return html.table("Flipped samples by metric", "tnnnnn", heads, rows)


def _select_samples(
    made: Sequence[PairedSampleScores], texts: Mapping[Key, SampleView], tasks: Sequence[str]
) -> dict[tuple[Who, Key], Html]:
    """Samples by reference, as many as there is room for; for each reference the lost ones first."""
    beside: dict[tuple[Who, str], list[Beside]] = {}
    for number, one in enumerate(made):
        beside.setdefault((one.against, metric_task(one.metric, tasks)), []).append((number, one, one.places()))
    fields, references = _filter_fields(texts), list(dict.fromkeys(one.against for one in made))
    found: dict[tuple[Who, Key], Html] = {}
    order: dict[tuple[Who, Key], tuple[int, ...]] = {}
    used = 0
    for one, sample in order_samples(made):
        key = (metric_task(one.metric, tasks), sample)
        place = (one.against, key)
        if place in found or key not in texts:
            continue
        scored = [(number, other, *kinds[sample]) for number, other, kinds in beside[one.against, key[0]]
                  if sample in kinds]  # fmt: skip
        article = _render_sample(texts[key], one, scored, references.index(one.against), fields)
        used += len(article.encode())
        if used > ROOM_BYTES:
            break
        number, _, kind, rank = scored[0]
        found[place], order[place] = article, (references.index(one.against), number, KINDS.index(kind), rank)
    return {place: found[place] for place in sorted(found, key=order.__getitem__)}


def _count_omitted(
    made: Sequence[PairedSampleScores],
    texts: Mapping[Key, SampleView],
    tasks: Sequence[str],
    chosen: Collection[tuple[Who, Key]],
) -> int:
    """Samples that changed between right and wrong and that have no room here."""
    flipped = {
        (one.against, (metric_task(one.metric, tasks), sample))
        for one in made
        if not one.graded
        for kind in FLIPS
        for sample in one.kinds[kind]
    }
    return sum(place[1] in texts for place in flipped - set(chosen))


def _render_sample(
    shown: SampleView, about: PairedSampleScores, scored: Sequence[Scored], reference: int, fields: Sequence[str]
) -> Html:
    """One sample: how both models scored, prompt, expected answer, and both answers with what differs."""
    data = {"data_r": str(reference), "data_k": " ".join(f"{n}{kind[:2]}{place}" for n, _, kind, place in scored)}
    data |= {
        f"data_f{number}": shown.fields[name][:FIELD_SHOWN]
        for number, name in enumerate(fields)
        if name in shown.fields
    }
    told = [f"task {shown.task}"] if shown.task else []
    told += [shown.id[:12], *(f"{name} = {value[:FIELD_SHOWN]}" for name, value in sorted(shown.fields.items()))]
    return tag(
        "article",
        tag("p", *(_render_chip(*one) for one in scored), class_="chips"),
        tag(
            "div",
            tag("small", "prompt"),
            tag("p", tag("bdi", _truncate_middle(shown.prompt, PROMPT_SHOWN))),
            class_="prompt",
        ),
        tag("div", *_render_answers(shown, about), class_="answers"),
        tag("small", tag("bdi", " \u00b7 ".join(told))),
        **data,
    )


def _render_chip(_: int, one: PairedSampleScores, kind: Kind, place: int) -> Html:
    """What a metric says of a sample."""
    before, after = one.scores[one.kinds[kind][place]]
    said = SAID[one.graded][kind]
    text = f" {one.metric} {format_significant(before)} \u2192 {format_significant(after)}"
    return tag("span", tag("b", SIGNS[kind], aria_label=said, title=said, role="img"), text, class_=kind)


def _render_answers(shown: SampleView, about: PairedSampleScores) -> Iterator[Html]:
    """What was expected, and what both models said, if they were asked to say something."""
    yield tag("div", tag("small", "expected"), tag("p", tag("bdi", _truncate_middle(shown.expected, ANSWER_SHOWN))))
    old, new = (_format_answer(shown.answers.get(who)) for who in (about.against, about.candidate))
    if old is None and new is None:
        return
    texts = mark_both_differences(old or "", new or "")
    for who, one, marked in zip((about.against, about.candidate), (old, new), texts, strict=True):
        yield tag("div", tag("small", who), tag("p", tag("i", "not answered") if one is None else marked))


def _format_answer(given: Sequence[str] | None) -> str | None:
    """All answers of a model to one sample; several are numbered."""
    if given is None:
        return None
    if len(given) == 1:
        return _truncate_middle(given[0], ANSWER_SHOWN)
    return _truncate_middle("\n".join(f"{number}. {one}" for number, one in enumerate(given, start=1)), ANSWER_SHOWN)


def _truncate_middle(text: str, most: int) -> str:
    """A text whose middle is left out if it is long: the question often stands at its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _filter_fields(texts: Mapping[Key, SampleView]) -> list[str]:
    """Fields by which samples may be filtered."""
    return sorted({name for shown in texts.values() for name in shown.fields})[:FIELDS_SHOWN]


def _render_controls(made: Sequence[PairedSampleScores], fields: Sequence[str]) -> Html:
    """Filters; the script fills in counts and values, and shows them."""
    references = list(dict.fromkeys(one.against for one in made))
    metrics = [
        tag("option", one.metric, value=str(number), data_r=str(references.index(one.against)),
            data_graded="yes" if one.graded else "no")
        for number, one in enumerate(made)
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
        class_="controls", role="search", aria_label="Filter the samples", hidden="",
    )  # fmt: skip


def _render_select(name: str, by: str, *options: Html) -> Html:
    return tag("label", tag("span", name), tag("select", *options, data_by=by))


def _render_paging() -> Html:
    buttons = [tag("button", text, type="button", data_turn=turn) for text, turn in (("Previous", "-1"), ("Next", "1"))]
    return tag("div", buttons[0], tag("span", role="status"), buttons[1], class_="paging", hidden="")
