"""Tests IFEval's rules on rows of the user: figures of known answers, and refusal of incomplete rules."""

import json
import re

import pytest

from ratchet.errors import DataError, SettingsError
from ratchet.evaluation import instruction_following
from ratchet.evaluation.instruction_following import (
    ARGUMENTS,
    IDS,
    RowInstructions,
    check_instructions,
    read_instructions,
    require_valid_instructions,
)

AT_LEAST = {"relation": "at least"}
CASES = [
    ("punctuation:no_comma", {}, "No mark here.", "One, two."),
    ("length_constraints:number_sentences", {"num_sentences": 3, **AT_LEAST}, "It is here. Is it? Yes!",
     "It is here. Is it?"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "This is WELL-DONE, and NATO's.", "This is WELL-DONE."),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz normaler deutscher Satz.",
     "This is an ordinary English sentence."),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a: 1"),
    ("keywords:existence", {"keywords": ["late"]}, "I am late.", "I am here."),
    ("startend:end_checker", {"end_phrase": "Bye."}, "See you. Bye.", "Bye. See you."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "What?"}, "What? This.", "This."),
]  # fmt: skip


def test_each_rule_decides_as_its_text_says() -> None:
    rows = [RowInstructions((name,), (arguments,)) for name, arguments, _, _ in CASES]
    answers = [answer for _, _, *pair in CASES for answer in pair]
    found = check_instructions([row for row in rows for _ in range(2)], ["What?"] * len(answers), answers)
    for (name, *_), followed, violated in zip(CASES, found[::2], found[1::2], strict=True):
        assert (followed.strict, violated.strict) == ((True,), (False,)), name
    # An answer follows a rule loosely if it does without its first line.
    [one] = check_instructions(
        [RowInstructions(("punctuation:no_comma", "keywords:existence"), ({}, {"keywords": ["late"]}))],
        ["q"], ["Sure, gladly:\nI am late."],
    )  # fmt: skip
    assert one.strict == (False, True) and one.loose == (True, True)


@pytest.mark.parametrize(
    ("ids", "arguments", "said"),
    [
        (["keywords:none"], [{}], "found 'keywords:none'; expected one of change_case:capital_word_frequency"),
        (["length_constraints:number_words"], [{"num_words": 3}], "expected num_words, relation (relation is wrong)"),
        (["length_constraints:number_words"], [{"num_words": 0, **AT_LEAST}], "(num_words is wrong)"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "exactly"}], "which the rule refuses"),
    ],
    ids=["unknown", "missing", "zero", "relation"],
)
def test_a_rule_that_would_be_completed_at_random_is_refused(
    ids: list[str], arguments: list[dict[str, object]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_following, "_run", _run_here)
    fields = {IDS: json.dumps(ids), ARGUMENTS: json.dumps(arguments)}
    with pytest.raises(DataError, match=r"^test row b: field .*" + re.escape(said)):
        require_valid_instructions(["a", "b"], [{IDS: "", ARGUMENTS: ""}, fields])


def _run_here(request: dict[str, list[dict[str, object]]]) -> list[object]:
    """Check rows in this process, without the seconds that another process takes for its imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        return [instruction_following._find_problem(row) for row in request["check"]]


def test_malformed_fields_are_refused_and_rows_without_instructions_have_none() -> None:
    assert read_instructions("a", {}) is None and read_instructions("a", {IDS: "[]", ARGUMENTS: "[]"}) is None
    found = read_instructions("a", {IDS: '["x:y"]', ARGUMENTS: '[{"n": 1, "m": null}]'})
    assert found == RowInstructions(("x:y",), ({"n": 1},))
    for ids, arguments in (("x:y", "[{}]"), ('["x:y"]', "[]"), ('["x:y"]', "[1]"), ('["x:y"]', "")):
        with pytest.raises(DataError, match=r"^test row a: field "):
            read_instructions("a", {IDS: ids, ARGUMENTS: arguments})
    with pytest.raises(SettingsError, match="found no such row among 2"):
        require_valid_instructions(["a", "b"], [{}, {}])
