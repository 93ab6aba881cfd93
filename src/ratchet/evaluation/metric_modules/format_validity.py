"""Format validity: whether an answer is JSON (RFC 8259), or a regular expression matches the whole answer.

Leading and trailing whitespace is ignored. Regular expressions run in a process of their own, because nested
repetitions can take years on some answers, and only ending the process stops them.
"""

import json
import subprocess
import sys
from typing import Any

import evaluate

from ratchet.evaluation.metric_modules.module_info import metric_info

MATCH_SCRIPT = """
import json, re, sys
request = json.load(sys.stdin)
pattern = re.compile(request["pattern"])
json.dump([pattern.fullmatch(text) is not None for text in request["texts"]], sys.stdout)
"""


class FormatValidity(evaluate.Metric):  # type: ignore[misc]
    """1 for a valid answer, else 0."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__))

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        answer_format: str = "json",
        timeout_s: float = 20.0,
    ) -> dict[str, Any]:
        """Raise TimeoutError if a regular expression takes longer than `timeout_s` seconds."""
        texts = [answer.strip() for answer in predictions]
        valid = (
            [is_json(text) for text in texts]
            if answer_format == "json"
            else match_whole_texts(answer_format, texts, timeout_s)
        )
        return {"format_validity": [float(one) for one in valid]}


def is_json(text: str) -> bool:
    """Return whether a text is one JSON value; Python's NaN and Infinity are not valid JSON."""
    try:
        json.loads(text, parse_constant=_reject_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def match_whole_texts(pattern: str, texts: list[str], timeout_s: float) -> list[bool]:
    """Return for each text whether the pattern matches all of it."""
    request = json.dumps({"pattern": pattern, "texts": texts})
    command = [sys.executable, "-I", "-c", MATCH_SCRIPT]
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{pattern!r} took more than {timeout_s:g} s on {len(texts)} answers") from None
    return [bool(one) for one in json.loads(done.stdout)]
