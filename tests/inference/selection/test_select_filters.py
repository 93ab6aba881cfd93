"""Tests `ratchet select`: every filter removes the expected answers and counts them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_generations as made
from ratchet.cli.main import main
from ratchet.errors import DataError, SettingsError
from ratchet.stages.project import Project
from ratchet.stages.select_answers import select
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path
from ratchet.storage.records.data import SelectionCard

Rows = list[dict[str, Any]]
Made = Callable[..., tuple[Rows, dict[str, int], SelectionCard]]

CUT = {"finish": "length"}
QUESTIONS = [{"id": f"q{n}", "prompt": f"what is {word}"} for n, word in enumerate(["water", "fire", "earth", "air"])]


@pytest.fixture
def chosen(tmp_path: Path) -> Made:
    """Return a function that selects from made-up answers; it returns rows, counts by filter, and the card."""

    def run(
        answers: Callable[[str, int], made.Said], prompts: Rows = QUESTIONS, samples: int = 1, **knobs: Any
    ) -> tuple[Rows, dict[str, int], SelectionCard]:
        generate = {key: knobs.pop(key) for key in ("extra_fields", "labels", "reasoning_tags") if key in knobs}
        drawn = {"samples": samples, "temperature": 0.7 if samples > 1 else 0}
        settings = made.settings_of(knobs, **drawn, **generate)
        layout = made.project(tmp_path / "project", settings)
        asked = made.write_lines(tmp_path / "prompts.jsonl", prompts)
        given = made.generation(layout, settings, asked, answers, tmp_path / "answers.jsonl")
        target = layout.raw / "distilled.jsonl"
        select(Project.from_parts(layout, settings), (given,), target)
        rows = [json.loads(line) for line in target.read_bytes().splitlines()]
        card = SelectionCard.load(card_path(target))
        assert card.rows == len(rows) == card.filters[-1].left
        assert card.answers == len(rows) + sum(one.dropped for one in card.filters)
        return rows, {one.name: one.dropped for one in card.filters if one.dropped}, card

    return run


def taken(rows: Rows) -> dict[str, str]:
    return {row["id"]: row["messages"][-1]["content"] for row in rows}


def test_a_row_has_prompt_answer_and_provenance(chosen: Made) -> None:
    prompts = [
        {
            "id": "a",
            "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
            "area": 7,
        },
        {"id": "b", "messages": [{"role": "user", "content": "what is water"}], "area": None},
    ]
    rows, dropped, card = chosen(lambda id, _: f"answer to {id}", prompts, extra_fields=["area"])
    assert rows[0]["messages"] == [*prompts[0]["messages"], {"role": "assistant", "content": "answer to a"}]
    assert rows[0]["area"] == 7
    assert rows[0]["provenance"] == {
        "generation": card.spec.teachers[0].generation, "model": "a" * 12, "sample": 0, "agreement": 1.0,
        "reward": None,
    }  # fmt: skip
    assert dropped == {}
    assert card.model_names == ("models/a",)


def test_finish_length_and_format_filters(chosen: Made) -> None:
    said: dict[str, made.Said] = {
        "q0": ("cut", CUT), "q1": "", "q2": "more than ten characters", "q3": "12 km",
    }  # fmt: skip
    rows, dropped, card = chosen(lambda id, _: said[id], answer_format=r"\d+ km", max_characters=10)
    assert taken(rows) == {"q3": "12 km"}
    assert dropped == {"finish": 1, "length": 2}
    assert card.filters[0].examples == ("q0, sample 0: length",)


@pytest.mark.parametrize(
    ("said", "knobs", "left", "dropped"),
    [
        ([("a", CUT), ("b", CUT), ("c", CUT), "d"], {"finish_reasons": ["length", "stop"]}, "q0 q1 q2 q3", {}),
        (["7", "7 and more", "about 7", "77"], {"answer_format": r"\d+"}, "q0 q3", {"format": 2}),
        (['{"a": 1}', "{'a': 1}", "[NaN]", "3"], {"answer_format": "json"}, "q0 q3", {"format": 2}),
        (
            ["wet", "hot", "damp", "Wet"],
            {"answer_format": "labels", "labels": ["wet", "hot"], "deduplication": {"jaccard_threshold": None}},
            "q0 q1", {"format": 2},
        ),
        (
            [
                ("wet", {"mean_log_probability": -0.01, "label_log_probabilities": nats})
                for nats in ([-3.0, -4.0], [-3.0, -3.5], [None, -0.1], None)
            ],
            {"answer_format": "labels", "labels": ["wet", "hot"], "min_probability": 0.7},
            "q0 q2 q3", {"probability": 1},
        ),  # e / (e + 1) = 0.73; sqrt(e) / (sqrt(e) + 1) = 0.62
        (["a", "a\0b", "c", "d"], {}, "q0 q2 q3", {"invalid_text": 1}),
    ],
    ids=["cut answers", "whole answer matches", "JSON", "labels", "probability among labels", "no text of a file"],
)  # fmt: skip
def test_each_filter_removes_the_expected_answers(
    said: list[made.Said], knobs: dict[str, Any], left: str, dropped: dict[str, int], chosen: Made
) -> None:
    rows, found, _ = chosen(lambda id, _: said[int(id[1])], **knobs)
    assert [row["id"] for row in rows] == left.split()
    assert found == dropped
    texts = [one[0] if isinstance(one, tuple) else one for one in said]
    assert list(taken(rows).values()) == [texts[int(id[1])] for id in left.split()]


def test_improbable_answers_are_removed(chosen: Made) -> None:
    nats = {"q0": -0.1, "q1": -0.8, "q2": None, "q3": -0.69}
    rows, dropped, card = chosen(lambda id, _: (id, {"mean_log_probability": nats[id]}), min_probability=0.5)
    assert [row["id"] for row in rows] == ["q0", "q3"]
    assert dropped == {"probability": 2}
    assert next(one for one in card.filters if one.dropped).examples == (
        "q1, sample 0: 0.4493", "q2, sample 0: unknown",
    )  # fmt: skip


def test_the_most_likely_answer_of_the_majority_is_selected(chosen: Made) -> None:
    votes: dict[str, list[made.Said]] = {
        "q0": [
            ("It is 4", {"mean_log_probability": -0.9}),
            ("so 4.", {"mean_log_probability": -0.2}),
            ("5", {"mean_log_probability": -0.1}),
            "no number",
        ],
        "q1": ["1", "2", "3", "4"],
        "q2": [
            ("9", {"mean_log_probability": -0.3}),
            ("is 9", {"mean_log_probability": -0.3}),
            ("9!", {"mean_log_probability": None}),
            "8",
        ],
        "q3": ["6", "6", ("6", CUT), ("6", CUT)],
    }
    rows, dropped, _ = chosen(
        lambda id, sample: votes[id][sample],
        samples=4,
        min_agreement=0.5,
        final_answer_pattern=r"\d+",
        deduplication={"jaccard_threshold": None},
    )
    assert taken(rows) == {"q0": "so 4.", "q2": "9", "q3": "6"}
    assert {row["id"]: row["provenance"]["agreement"] for row in rows} == {"q0": 0.5, "q2": 0.75, "q3": 0.5}
    assert dropped == {"finish": 2, "no_final_answer": 1, "agreement": 4, "minority": 2, "not_selected": 4}


def test_final_answers_are_compared_without_case_and_white_space(chosen: Made) -> None:
    rows, _, _ = chosen(lambda _, sample: ["A  b", "a B"][sample], QUESTIONS[:1], samples=2, min_agreement=1)
    assert len(rows) == 1


def test_json_answers_are_compared_by_their_value(chosen: Made) -> None:
    said = ['{"x": 1, "y": 2}', '{"y":2,"x":1}', '{"x": 2}']
    rows, dropped, _ = chosen(
        lambda _, sample: said[sample],
        QUESTIONS[:1],
        samples=3,
        min_agreement=0.6,
        answer_format="json",
        max_per_prompt=3,
    )
    assert [row["provenance"]["agreement"] for row in rows] == [0.6667, 0.6667]
    assert dropped == {"minority": 1}


def test_several_answers_are_sorted_by_likelihood(chosen: Made) -> None:
    nats = [-0.5, -0.1, None, -0.3]
    rows, dropped, _ = chosen(
        lambda id, n: (f"{id} says {n}", {"mean_log_probability": nats[n]}), QUESTIONS[:1], samples=4, max_per_prompt=3,
        deduplication={"jaccard_threshold": None},
    )  # fmt: skip
    assert [row["provenance"]["sample"] for row in rows] == [1, 3, 0]
    assert dropped == {"not_selected": 1}


def test_answers_that_differ_from_the_reference_are_removed(chosen: Made) -> None:
    prompts = [{"id": str(n), "prompt": f"question {n}", "answer": str(n) if n < 2 else None} for n in range(3)]
    said = {"0": "it is 0", "1": "it is 7", "2": "it is 9"}
    rows, dropped, card = chosen(lambda id, _: said[id], prompts, reference="match", final_answer_pattern=r"is (\d+)")
    assert taken(rows) == {"0": "it is 0", "2": "it is 9"}
    assert dropped == {"reference": 1}
    assert card.without_reference == 1


def test_matching_without_any_reference_is_refused(chosen: Made) -> None:
    with pytest.raises(SettingsError, match="no prompt has a reference"):
        chosen(lambda id, _: id, reference="match")


@pytest.mark.parametrize(
    ("said", "knobs", "content"),
    [
        ("[T]hm[/T]q0", {"reasoning": "keep", "reasoning_tags": ["[T]", "[/T]"]}, "[T]\nhm\n[/T]\n\nq0"),
        ("<think>hm</think>q0", {}, "q0"),
    ],
    ids=["kept", "left out by default"],
)
def test_reasoning_is_kept_between_tags_or_removed(
    said: str, knobs: dict[str, Any], content: str, chosen: Made
) -> None:
    rows, _, _ = chosen(lambda id, _: said, QUESTIONS[:1], **knobs)
    assert taken(rows) == {"q0": content}


def test_duplicates_are_removed(chosen: Made) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    prompts = [
        {"id": "a", "prompt": words}, {"id": "b", "prompt": f"{words} sixteen"}, {"id": "c", "prompt": words.upper()},
        {"id": "d", "prompt": "something else"},
    ]  # fmt: skip
    rows, dropped, _ = chosen(lambda id, _: "yes", prompts)
    assert [row["id"] for row in rows] == ["a", "d"]
    assert dropped == {"duplicate": 1, "near_duplicate": 1}


def test_if_no_row_remains_no_file_is_written_and_counts_are_shown(chosen: Made, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of 4 answers none is left:\n  length: 4 left out, 0 left"):
        chosen(lambda id, _: "short", min_characters=100)
    assert list((tmp_path / "project" / "data" / "raw").iterdir()) == []
    assert [path.name for path in (tmp_path / "project" / "experiments").iterdir() if "partial" in path.name] == []


def test_an_endless_regular_expression_is_stopped(chosen: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.inference.answer_selection.MATCH_TIMEOUT_S", 0.2)
    with pytest.raises(SettingsError, match=r"select.answer_format: .* takes more than 0.2 s on one answer"):
        chosen(lambda id, _: "a" * 60, answer_format=r"(a+)+b")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("answer_format: '('", "select.answer_format: found '('; expected a regular expression"),
        ("final_answer_pattern: '('", "select.final_answer_pattern: found '('; expected a regular expression"),
        (
            "min_characters: 5\n  max_characters: 4",
            "select.max_characters: found 4; expected at least min_characters (5)",
        ),
        ("reward: {min_score: 1}", "select.reward: found neither command nor function"),
        ("min_agreement: 1.5", "select.min_agreement: found 1.5"),
        ("finish_reasons: [invalid]", "select.finish_reasons.0: found 'invalid'"),
    ],
)
def test_invalid_settings_are_refused(
    knobs: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ProjectLayout(tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    layout.params.write_text(f"select:\n  {knobs}\n", encoding="utf-8")
    assert main(["--project", str(tmp_path), "select", "a.jsonl", "--output", "b.jsonl"]) == 2
    assert said in capsys.readouterr().err
