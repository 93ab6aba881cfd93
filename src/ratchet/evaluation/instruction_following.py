"""Instruction following: the verifiable rules of IFEval, checked by the code of lm-evaluation-harness, offline.

The harness's module downloads data of NLTK when it is imported, and two of its 25 rules need them. So the rules run in
their own process, which does not download, and counts sentences and words in capitals without these data. The
process also limits the time, because keywords are regular expressions of the rows.

Source of the rules and of the strict and loose figures: Zhou et al., "Instruction-Following Evaluation for Large
Language Models", 2023.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.config.extras import require_libraries
from ratchet.errors import DataError, SettingsError

IDS, ARGUMENTS = "instruction_id_list", "kwargs"
"""Fields of a row, with the names of the data set google/IFEval: a list of rules, and a list of their arguments."""
TIMEOUT_S = 300.0
"""Time limit of the rules on all answers of a model. A check takes about a millisecond."""
CAPITAL_WORD = re.compile(r"\w+(?:[-.]\w+)*")


@dataclass(frozen=True)
class FollowedInstructions:
    """Which instructions of a row an answer follows."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]
    """The same, if the first or last line, or asterisks, may be left out of the answer."""


@dataclass(frozen=True)
class RowInstructions:
    """The instructions of one row."""

    ids: tuple[str, ...]
    arguments: tuple[Mapping[str, Any], ...]
    """Arguments of each instruction, without missing ones."""


def read_instructions(row_id: str, fields: Mapping[str, str]) -> RowInstructions | None:
    """Read the instructions of a row from its fields; None if it has none. Raises DataError if they are malformed."""
    if not fields.get(IDS):
        return None
    ids, arguments = (_parse(fields.get(name, "")) for name in (IDS, ARGUMENTS))
    if ids == []:
        return None
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise DataError(
            f"test row {row_id}: field {IDS}: found {fields[IDS][:80]!r}; expected a list of names of rules"
        )
    if (
        not isinstance(arguments, list)
        or len(arguments) != len(ids)
        or not all(isinstance(item, dict | None) for item in arguments)
    ):
        raise DataError(
            f"test row {row_id}: field {ARGUMENTS}: found {fields.get(ARGUMENTS, '')[:80]!r}; expected a list with one "
            f"object for each of the {len(ids)} rules of {IDS}"
        )
    given = [{key: value for key, value in (item or {}).items() if value is not None} for item in arguments]
    return RowInstructions(tuple(ids), tuple(given))


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def require_valid_instructions(ids: Sequence[str], fields: Sequence[Mapping[str, str]]) -> None:
    """Check the instructions of all rows before answers are generated.

    Raises:
        DataError: a row has an unknown rule or wrong arguments.
        SettingsError: no row has instructions.
        MissingLibraryError: the harness or a library that it needs for these rules is not installed.
    """
    require_libraries("evaluate.metrics: ifeval", "harness")
    read = {row_id: read_instructions(row_id, row) for row_id, row in zip(ids, fields, strict=True)}
    rows = {row_id: row for row_id, row in read.items() if row is not None}
    if not rows:
        raise SettingsError(
            f"evaluate.metrics: ifeval needs rows with the fields {IDS} and {ARGUMENTS}; found no such row among "
            f"{len(ids)}; list both fields in prepare.extra_fields"
        )
    for row_id, problem in zip(rows, _run({"check": [_to_json(row) for row in rows.values()]}), strict=True):
        if problem is not None:
            raise DataError(f"test row {row_id}: {problem}")


def check_instructions(
    rows: Sequence[RowInstructions], prompts: Sequence[str], answers: Sequence[str]
) -> list[FollowedInstructions]:
    """Return for each answer which instructions of its row it follows. Raises SettingsError if it takes too long."""
    request = [
        {**_to_json(row), "prompt": prompt, "answer": answer}
        for row, prompt, answer in zip(rows, prompts, answers, strict=True)
    ]
    return [FollowedInstructions(tuple(strict), tuple(loose)) for strict, loose in _run({"score": request})]


def _to_json(row: RowInstructions) -> dict[str, Any]:
    return {"ids": list(row.ids), "arguments": [dict(item) for item in row.arguments]}


def _run(request: Mapping[str, Any]) -> list[Any]:
    """Run `main` in its own process. With a LOCAL_RANK other than 0 the harness does not download."""
    command = [sys.executable, "-m", "ratchet.evaluation.instruction_following"]
    environment = {**os.environ, "LOCAL_RANK": "1"}
    try:
        process = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SettingsError(
            f"evaluate.metrics: ifeval: the rules took more than {TIMEOUT_S:g} s; a keyword is a regular expression, "
            "so avoid a repetition inside a repetition"
        ) from None
    if process.returncode:
        last = (process.stderr.strip() or "no message").splitlines()[-1]
        raise SettingsError(f"evaluate.metrics: ifeval: the rules of lm-evaluation-harness failed: {last}")
    results: list[Any] = json.loads(process.stdout)
    return results


# The process of the rules.


def main() -> None:
    """Read a request from standard input, and write its results."""
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        results = [_find_problem(row) for row in request["check"]] if "check" in request else _score(request["score"])
    json.dump(results, sys.stdout)


def _import_rules() -> Any:
    """Import the harness's rules, and replace the functions that need data of NLTK or random numbers."""
    import langdetect
    from lm_eval.tasks.ifeval import instructions
    from lm_eval.tasks.ifeval import utils as checks

    texts = instructions.instructions_util
    langdetect.DetectorFactory.seed = 0
    texts.count_sentences = lambda text: len(texts.split_into_sentences(text))
    texts.nltk.word_tokenize = CAPITAL_WORD.findall
    return checks


def _find_problem(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the instructions of a row; None if they are complete."""
    rules = _import_rules().instructions_registry.INSTRUCTION_DICT
    for name, arguments in zip(row["ids"], row["arguments"], strict=True):
        if name not in rules:
            return f"field {IDS}: found {name!r}; expected one of {', '.join(sorted(rules))}"
        rule = rules[name](name)
        expected = set(rule.get_instruction_args_keys())
        # The harness replaces an argument that is missing, 0 or empty by a random one.
        if wrong := sorted(expected ^ arguments.keys()) or [key for key in arguments if not arguments[key]]:
            needed = ", ".join(sorted(expected)) or "no arguments"
            return f"field {ARGUMENTS}: {name}: found {arguments}; expected {needed} ({wrong[0]} is wrong)"
        try:
            rule.build_description(**arguments)
            rule.check_following("A text. Another one.")
        except Exception as error:
            return f"field {ARGUMENTS}: {name}: found {arguments}, which the rule refuses: {error}"
    return None


def _score(rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[bool], list[bool]]]:
    checks = _import_rules()
    results = []
    for number, row in enumerate(rows):
        example = checks.InputExample(number, row["ids"], row["prompt"], row["arguments"])
        strict, loose = (
            check(example, row["answer"]).follow_instruction_list
            for check in (checks.test_instruction_following_strict, checks.test_instruction_following_loose)
        )
        results.append(([bool(x) for x in strict], [bool(x) for x in loose]))
    return results


if __name__ == "__main__":
    main()
