"""Head and foot of a sweep's page: key figures, values to adopt, and what it takes to do it again."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ratchet.markup import NONE, Html, counted, percentage, quiet, tag
from ratchet.pages.sweep_canvas import STATES
from ratchet.pages.sweep_savings import Savings
from ratchet.pages.sweep_tables import first_objective, values
from ratchet.pages.sweep_trials import chosen, duration, superseded
from ratchet.records_sweep import SweepReport

Figure = tuple[str, str, str]
"""Name, value, what is to be said of it."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def header(report: SweepReport, saved: Savings) -> Html:
    """Title and key figures."""
    measured = " × ".join(one.metric.replace("_", " ") for one in report.objectives)  # noqa: RUF001
    figures = [
        tag("div", tag("dt", name), tag("dd", tag("strong", tag("bdi", found)), tag("small", tag("bdi", note))))
        for name, found, note in _figures(report, saved)
    ]
    parts = [
        tag("p", "Sweep", class_="quiet"),
        tag("h1", tag("bdi", report.study), tag("span", f"{measured}, {report.sampler.partition(',')[0]}")),
        tag("dl", *figures),
    ]
    if report.stopped:
        parts.append(tag("p", tag("strong", "Stopped before its end: "), tag("bdi", report.stopped), class_="stopped"))
    return tag("header", *parts)


def _figures(report: SweepReport, saved: Savings) -> Iterator[Figure]:
    counts = {state: sum(trial.state == state for trial in report.trials) for state in STATES}
    told = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count) or "none has begun"
    went_on = len(superseded(report))
    told += f"; {went_on:,} of the pruned went on later" if went_on else ""
    begun = sum(trial.continues is None for trial in report.trials)
    yield "Trials", f"{begun:,} of {report.wanted_trials:,}", told
    yield _best(report)
    if report.finals is not None:
        yield "Winner", f"trial {report.finals.winner}", report.finals.reason
    share = percentage(saved.tokens, saved.full_tokens)
    of_all = f"{saved.tokens:,} of {saved.full_tokens:,} answer tokens, {duration(saved.seconds)}"
    yield "Saved", share, of_all if saved.tokens else "nothing was left out"


def _best(report: SweepReport) -> Figure:
    by_number = {trial.number: trial for trial in report.trials}
    if len(report.objectives) > 1:
        listed = ", ".join(map(str, report.best)) or NONE
        return "Front", counted(len(report.best), "trial"), f"trials {listed}: no other beats them in everything"
    found = by_number.get(report.best[0]) if report.best else None
    if found is None:
        return "Best", NONE, "no trial is complete"
    return "Best", first_objective(report, found), f"trial {found.number}: {values(found)}"


def adopt(report: SweepReport) -> Sequence[Html] | str:
    """The values that the sweep recommends, as they are written into params.yaml."""
    found = chosen(report)
    if found is None:
        return (
            "Several trials are on the front, and none was named the winner: choose one from the table of the front."
            if len(report.objectives) > 1 and report.best else "There is nothing to adopt yet: no trial is complete."
        )  # fmt: skip
    why = report.finals.reason if report.finals is not None else "the best of single trainings; no finalists compared"
    return [
        tag("p", tag("strong", f"Trial {found.number}"), ": ", tag("bdi", why)),
        tag("div", tag("pre", tag("code", snippet(found.values))), class_="scroll", role="region",
            aria_label="Values for params.yaml", tabindex="0"),
        tag("p", tag("code", "ratchet sweep --adopt"), " writes them into params.yaml; ", tag("code", "dvc repro"),
            " then finds the run already trained.", class_="quiet"),
    ]  # fmt: skip


def snippet(found: Mapping[str, Any]) -> str:
    """Values by dotted key as YAML that version 1.1 and 1.2 read alike, with every digit."""
    tree: dict[str, Any] = {}
    for knob, item in found.items():
        *sections, leaf = knob.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = _Leaf(item)
    return "\n".join(_lines(tree, ""))


class _Leaf:
    """A value, told from a section."""

    def __init__(self, item: Any) -> None:
        self.item = item


def _lines(node: Mapping[str, Any], pad: str) -> Iterator[str]:
    for key, one in node.items():
        name = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        if isinstance(one, _Leaf):
            yield f"{pad}{name}: {_scalar(one.item)}"
        else:
            yield f"{pad}{name}:"
            yield from _lines(one, f"{pad}  ")


def _scalar(item: Any) -> str:
    """JSON is YAML but for numbers such as 1e-05, which version 1.1 takes for a text."""
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_scalar, item))}]"
    text = json.dumps(item, ensure_ascii=True)
    if isinstance(item, float) and "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text


def reproduce(report: SweepReport) -> Sequence[Html]:
    """Everything that the same trials depend on."""
    known = {
        "study": report.study,
        "sampler": report.sampler,
        "pruner": report.pruner,
        **report.versions,
        "trials": f"{report.wanted_trials:,}",
        "storage": report.storage,
    }
    facts = [(name, tag("bdi", text)) for name, text in known.items() if text]
    facts += [("data", tag("code", report.data_digest)), ("base model", tag("code", report.base_digest))]
    listed = [part for name, text in facts for part in (tag("dt", tag("bdi", name)), tag("dd", text))]
    said = "With one worker the same settings, data, base, seed and versions give the same trials, across restarts too."
    return [quiet(said), tag("dl", *listed, class_="facts")]
