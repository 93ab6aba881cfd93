"""Rows, answers and servers for tests of the judge."""

import json
import re
from collections.abc import Sequence
from typing import Any

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.data.conversation import Conversation
from ratchet.evaluation.evaluator import EvaluationResult, EvaluationSubject
from ratchet.evaluation.rows import TestRows
from ratchet.storage import digests
from ratchet.storage.records.evaluation import ModelRole
from scripted_endpoint import JSON, Said, chat

ROWS = 40


def settings(url: str, **more: Any) -> Settings:
    """Return the settings of a project that uses this judge."""
    changes = {
        "evaluate.judge.base_url": url,
        "machine.endpoint.retry_delay_s": 0.01,
        "machine.endpoint.max_attempts": 2,
    }
    return params_file.apply_changes(
        Settings(), changes | {f"evaluate.judge.{name}": value for name, value in more.items()}
    )


def rows(count: int = ROWS) -> TestRows:
    asked = [
        Conversation([{"role": "user", "content": f"question {k}"}, {"role": "assistant", "content": f"truth {k}"}])
        for k in range(count)
    ]
    ids = [digests.hash_bytes(str(k).encode()) for k in range(count)]
    empty: list[list[int]] = [[] for _ in range(count)]
    return TestRows(
        ids, asked, empty, empty, [None] * count, [{}] * count, [one.response for one in asked], None, count
    )


def result(who: str, answers: Sequence[str]) -> EvaluationResult:
    return EvaluationResult(EvaluationSubject(who, who, who, "adapter"), {}, answers=[[one] for one in answers])


def answers(count: int = ROWS) -> dict[ModelRole, EvaluationResult]:
    """Return answers of two models. Every fourth answer of the candidate is bad and the others are good; for the base
    it is the reverse."""
    ours = [f"{'bad' if k % 4 == 0 else 'good'} answer {k}, ours" for k in range(count)]
    theirs = [f"{'good' if k % 4 == 0 else 'bad'} answer {k}, theirs" for k in range(count)]
    return {"candidate": result("candidate", ours), "base": result("base", theirs)}


def shown(body: JSON) -> dict[str, str]:
    """Return the texts in a request to the judge, by name."""
    content = body["messages"][0]["content"]
    [mark] = re.findall(r"\[(\w{12}) CONVERSATION\]", content)
    return dict(re.findall(rf"\[{mark} ([A-Z ]+)[^\]]*\]\n(.*?)\n\[{mark} END\]", content, re.S))


def says(verdict: str) -> Said:
    return chat(json.dumps({"reason": "because", "verdict": verdict}))


def fair(body: JSON, _: int = 0) -> Said:
    """Answer as a judge that prefers the good answer in both orders."""
    texts = shown(body)
    return says("A" if texts["ANSWER A"].startswith("good") else "B")
