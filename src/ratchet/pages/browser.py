"""The browser of flipped samples: complete without JavaScript, filtered and paged with it (services/gate.js)."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from ratchet import markup
from ratchet.markup import Html, counted, differences, lone, quiet, tag
from ratchet.pages.flips import KINDS, Kind, Pairing, Shown, task_of, wanted
from ratchet.pages.values import digits
from ratchet.records_evaluation import Who

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
Beside = tuple[int, Pairing, Mapping[str, tuple[Kind, int]]]
"""A metric's number, its scores, and the place of every sample."""
Scored = tuple[int, Pairing, Kind, int]
"""The same for one sample: its kind, and its place among that kind."""


def samples(made: Sequence[Pairing], texts: Mapping[Key, Shown]) -> Sequence[Html] | str:
    """The section: how many samples flipped, filters, and the samples that there is room for."""
    tasks = sorted({task for task, _ in texts})
    known = [one for one in made if any((task_of(one.metric, tasks), sample) in texts for sample in one.scores)]
    if not known:
        return "There is no reference whose samples could be read beside the candidate's."
    chosen = _chosen(known, texts, tasks)
    said = f"{counted(len(chosen), 'sample')} can be read here"
    if left_out := _left_out(known, texts, tasks, chosen):
        said += f"; {left_out:,} that changed between right and wrong are left out for want of room"
    listed = tag("div", *chosen.values(), class_="list", tabindex="0", role="region", aria_label="Samples")
    return [
        _counts(known),
        quiet(
            f"{said}. The evaluation's files have all. Words are marked that the other answer has not in that place."
        ),
        tag("div", _controls(known, _names(texts)), listed, _paging(), id="browser"),
    ]


def _counts(made: Sequence[Pairing]) -> Html:
    """Samples by kind, all of them."""
    rows = []
    for one in made:
        found = [f"{len(one.kinds[kind]):,}" for kind in KINDS]
        if one.graded:
            found[2] = markup.NONE
        about = f"{one.candidate} against {one.against}"
        rows.append((tag("span", tag("bdi", one.metric), tag("small", about)), f"{len(one.scores):,}", *found))
    heads = ("metric", "n", "worse", "better", "both wrong", "both right, or equal")
    return markup.table("Flipped samples by metric", "tnnnnn", heads, rows)


def _chosen(made: Sequence[Pairing], texts: Mapping[Key, Shown], tasks: Sequence[str]) -> dict[tuple[Who, Key], Html]:
    """Samples by reference, as many as there is room for; for each reference the lost ones first."""
    beside: dict[tuple[Who, str], list[Beside]] = {}
    for number, one in enumerate(made):
        beside.setdefault((one.against, task_of(one.metric, tasks)), []).append((number, one, one.places()))
    fields, references = _names(texts), list(dict.fromkeys(one.against for one in made))
    found: dict[tuple[Who, Key], Html] = {}
    order: dict[tuple[Who, Key], tuple[int, ...]] = {}
    used = 0
    for one, sample in wanted(made):
        key = (task_of(one.metric, tasks), sample)
        place = (one.against, key)
        if place in found or key not in texts:
            continue
        scored = [(number, other, *kinds[sample]) for number, other, kinds in beside[one.against, key[0]]
                  if sample in kinds]  # fmt: skip
        article = _article(texts[key], one, scored, references.index(one.against), fields)
        used += len(article.encode())
        if used > ROOM_BYTES:
            break
        number, _, kind, rank = scored[0]
        found[place], order[place] = article, (references.index(one.against), number, KINDS.index(kind), rank)
    return {place: found[place] for place in sorted(found, key=order.__getitem__)}


def _left_out(
    made: Sequence[Pairing], texts: Mapping[Key, Shown], tasks: Sequence[str], chosen: Collection[tuple[Who, Key]]
) -> int:
    """Samples that changed between right and wrong and that have no room here."""
    flipped = {
        (one.against, (task_of(one.metric, tasks), sample))
        for one in made
        if not one.graded
        for kind in FLIPS
        for sample in one.kinds[kind]
    }
    return sum(place[1] in texts for place in flipped - set(chosen))


def _article(shown: Shown, about: Pairing, scored: Sequence[Scored], reference: int, fields: Sequence[str]) -> Html:
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
        tag("p", *(_chip(*one) for one in scored), class_="chips"),
        tag("div", tag("small", "prompt"), tag("p", tag("bdi", _cut(shown.prompt, PROMPT_SHOWN))), class_="prompt"),
        tag("div", *_answers(shown, about), class_="answers"),
        tag("small", tag("bdi", " \u00b7 ".join(told))),
        **data,
    )


def _chip(_: int, one: Pairing, kind: Kind, place: int) -> Html:
    """What a metric says of a sample."""
    before, after = one.scores[one.kinds[kind][place]]
    said = SAID[one.graded][kind]
    text = f" {one.metric} {digits(before)} \u2192 {digits(after)}"
    return tag("span", tag("b", SIGNS[kind], aria_label=said, title=said, role="img"), text, class_=kind)


def _answers(shown: Shown, about: Pairing) -> Iterator[Html]:
    """What was expected, and what both models said, if they were asked to say something."""
    yield tag("div", tag("small", "expected"), tag("p", tag("bdi", _cut(shown.expected, ANSWER_SHOWN))))
    old, new = (_answer(shown.answers.get(who)) for who in (about.against, about.candidate))
    if old is None and new is None:
        return
    texts = differences(old or "", new or "")
    for who, one, marked in zip((about.against, about.candidate), (old, new), texts, strict=True):
        yield tag("div", tag("small", who), tag("p", tag("i", "not answered") if one is None else marked))


def _answer(given: Sequence[str] | None) -> str | None:
    """All answers of a model to one sample; several are numbered."""
    if given is None:
        return None
    if len(given) == 1:
        return _cut(given[0], ANSWER_SHOWN)
    return _cut("\n".join(f"{number}. {one}" for number, one in enumerate(given, start=1)), ANSWER_SHOWN)


def _cut(text: str, most: int) -> str:
    """A text whose middle is left out if it is long: the question often stands at its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _names(texts: Mapping[Key, Shown]) -> list[str]:
    """Fields by which samples may be filtered."""
    return sorted({name for shown in texts.values() for name in shown.fields})[:FIELDS_SHOWN]


def _controls(made: Sequence[Pairing], fields: Sequence[str]) -> Html:
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
        _select("reference", "reference", *(tag("option", one, value=str(n)) for n, one in enumerate(references))),
        _select("metric", "metric", *metrics),
        *(_select(name, f"f{number}", tag("option", "all", value="")) for number, name in enumerate(fields)),
    ]
    search = tag("label", tag("span", "search"), lone("input", type="search", data_by="search", autocomplete="off"))
    return tag(
        "div",
        tag("div", *selects, search, class_="selects"),
        tag("div", *kinds, class_="kinds", role="group", aria_label="Kinds of samples"),
        class_="controls", role="search", aria_label="Filter the samples", hidden="",
    )  # fmt: skip


def _select(name: str, by: str, *options: Html) -> Html:
    return tag("label", tag("span", name), tag("select", *options, data_by=by))


def _paging() -> Html:
    buttons = [tag("button", text, type="button", data_turn=turn) for text, turn in (("Previous", "-1"), ("Next", "1"))]
    return tag("div", buttons[0], tag("span", role="status"), buttons[1], class_="paging", hidden="")
