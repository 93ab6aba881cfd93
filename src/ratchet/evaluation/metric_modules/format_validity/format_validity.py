"""Whether an answer has the form that was asked for: JSON (RFC 8259), or a regular expression that matches all of it.

White space at the ends of an answer does not count. Regular expressions are tried in a process of their own, because
one with nested repetition can run for years on an unlucky answer and nothing but the end of its process stops it.
"""

import json
import subprocess
import sys
from typing import Any

import evaluate

from ratchet.evaluation.metric_modules.texts import metric_info

MATCHER = """
import json, re, sys
asked = json.load(sys.stdin)
pattern = re.compile(asked["pattern"])
json.dump([pattern.fullmatch(text) is not None for text in asked["texts"]], sys.stdout)
"""


class FormatValidity(evaluate.Metric):  # type: ignore[misc]
    """1 for an answer of the right form, else 0."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__))

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        answer_format: str = "json",
        longest_s: float = 20.0,
    ) -> dict[str, Any]:
        """Raises TimeoutError when a regular expression needs longer than `longest_s` seconds."""
        texts = [answer.strip() for answer in predictions]
        valid = (
            [is_json(text) for text in texts]
            if answer_format == "json"
            else match_whole_texts(answer_format, texts, longest_s)
        )
        return {"format_validity": [float(one) for one in valid]}


def is_json(text: str) -> bool:
    """Whether a text is one JSON value; Python's NaN and Infinity are none."""
    try:
        json.loads(text, parse_constant=_reject_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def match_whole_texts(pattern: str, texts: list[str], longest_s: float) -> list[bool]:
    """Which texts match as a whole."""
    asked = json.dumps({"pattern": pattern, "texts": texts})
    command = [sys.executable, "-I", "-c", MATCHER]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=longest_s, check=True)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{pattern!r} took more than {longest_s:g} s on {len(texts)} answers") from None
    return [bool(one) for one in json.loads(done.stdout)]
