"""A project with a promoted version, its evaluation, and logs of a server that answers like it, or differently."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gate_cases
from promoted_models import make_champion
from ratchet.config.settings import Settings
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import ROWS, answers_file, sample_file

MODEL = gate_cases.MODEL
THINGS = ("invoice", "parcel", "password", "refund", "delivery", "login", "receipt", "courier", "profile", "payment")
EVENTS = ("is missing", "arrived late", "does not work", "was declined", "was sent twice", "cannot be changed")
DISHES = ("bread dough", "tomato soup", "roast chicken", "chocolate cake", "salad dressing", "pancake batter")
FATES = ("is too salty", "burns in the oven", "needs more butter", "tastes bitter", "sticks to the pan")
REFUSAL = "I'm sorry, but I can't help with that request."
START_S = 1_790_000_000
"""Unix time of the first request, after the promotion."""


def prompt(draw: random.Random, about: str = "support") -> str:
    things, events = (THINGS, EVENTS) if about == "support" else (DISHES, FATES)
    again = f" and the {draw.choice(things)} {draw.choice(events)}" if draw.random() < 0.5 else ""
    return f"My {draw.choice(things)} {draw.choice(events)}{again}, what should I do?"


def answer(draw: random.Random, refused: float = 0.02, longer: float = 1.0) -> str:
    if draw.random() < refused:
        return REFUSAL
    return " ".join(["please", "write", "to", "us", "again"] * 20)[: round(longer * draw.lognormvariate(4, 0.5))]


def requests(
    seed: int, count: int, about: str = "support", right: float = 0.9, **answers: float
) -> list[dict[str, Any]]:
    """Draw requests with answers and scores, as lines of a log."""
    draw = random.Random(seed)
    return [
        {
            "id": f"{seed}-{number}", "time": START_S + number, "prompt": prompt(draw, about),
            "answer": answer(draw, **answers), "score": draw.random() < right,
        }
        for number in range(count)
    ]  # fmt: skip


def write_log(path: Path, lines: Iterable[Mapping[str, Any]], mode: str = "w") -> Path:
    with path.open(mode, encoding="utf-8") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def write_evaluation(layout: ProjectLayout, rows: int = 300, seed: int = 1, **changes: Any) -> None:
    """Write an evaluation of MODEL whose rows are like the requests of `requests`."""
    drawn = requests(seed, rows)
    scores = {line["id"]: float(line["score"]) for line in drawn}
    report = gate_cases.report({"merged": {"accuracy": scores, "format_validity": scores}}, **changes)
    with files.sealed_directory(layout.evaluate, "evaluation") as scratch:
        report.save(scratch / "eval.json")
        lines = [
            {
                "id": line["id"], "prompt": line["prompt"],
                "expected": line["answer"] if line["score"] else "another answer",
                "group": None, "fields": {}, "prompt_tokens": 3, "answer_tokens": 1,
            }
            for line in drawn
        ]  # fmt: skip
        base.write_lines(scratch / ROWS, lines)
        base.write_lines(
            scratch / answers_file("merged"), [{"id": line["id"], "answers": [line["answer"]]} for line in drawn]
        )
        for metric in ("accuracy", "format_validity"):
            gate_cases.write_samples(
                scratch, {metric: gate_cases.samples(metric, scores)}, {metric: sample_file("merged", metric)}
            )


def monitored_project(layout: ProjectLayout, settings: Settings | None = None) -> Project:
    """Make MODEL champion as version 1, and write its evaluation."""
    make_champion(layout, MODEL)
    write_evaluation(layout)
    return Project.from_parts(layout, settings or Settings())
