"""Tests the record of a test set: it grows and stays the same, or is replaced, and models use up its evidence."""

import json
from dataclasses import replace

import pytest

from gate_cases import CURRENT, Models, evidence, gate, right
from ratchet.config.gate import AboveChanceRule, Gate, MustNotRegressRule
from ratchet.errors import DamagedFileError
from ratchet.quality_gate import test_sets
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.statistics import compute_alpha_share
from ratchet.quality_gate.test_sets import TEST_ROWS
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Verdict

RULE = MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05)


def ids(n: int, documents: int = 0) -> dict[str, list[str]]:
    """Return the ids of n test rows, and of documents of a harness task."""
    rows = {TEST_ROWS: [f"s{k:05d}" for k in range(n)]}
    return rows | ({"answers": [str(k) for k in range(documents)]} if documents else {})


def register(project: ProjectLayout, *, rows: int, documents: int = 0) -> tuple[str, str]:
    """Record the test set; return its digest and the note."""
    found = ids(rows, documents)
    note = test_sets.register_test_set(project, found)
    return test_sets.compute_digest(found), note


def test_earlier_rows_stay_first_and_their_models_count(project: ProjectLayout) -> None:
    small, _ = register(project, rows=50)
    test_sets.record_test_set_use(project, small, "a", "run-a")
    before = test_sets.read_test_set(project, small)
    large, note = register(project, rows=80, documents=20)
    assert note == ""
    after = test_sets.read_test_set(project, large)
    assert before is not None
    assert after is not None
    assert {key: after.places[key] for key in before.places} == before.places
    new_rows = {f"s{k:05d}": after.places[TEST_ROWS, f"s{k:05d}"] for k in range(50, 80)}
    assert new_rows == {f"s{k:05d}": (80, k) for k in range(50, 80)}
    assert sorted(after.places["answers", str(k)] for k in range(20)) == [(20, place) for place in range(20)]
    shuffled = [f"s{k:05d}" for k in (79, 10, 60, 3)]
    assert test_sets.sort_rows(project, shuffled) == sorted(shuffled), "rows are missing, so this is another test set"
    earlier_id = {TEST_ROWS: ["s", *ids(80)[TEST_ROWS]], "answers": ids(0, 20)["answers"]}
    assert test_sets.sort_rows(project, earlier_id[TEST_ROWS]) == [*ids(80)[TEST_ROWS], "s"]
    assert test_sets.count_models(project, large, "b") == 2
    content = project.test_set_uses.read_bytes()
    assert register(project, rows=80, documents=20) == (large, "")
    assert register(project, rows=50) == (small, "")
    assert project.test_set_uses.read_bytes() == content


def test_missing_rows_make_another_test_set(project: ProjectLayout) -> None:
    first, _ = register(project, rows=50)
    test_sets.record_test_set_use(project, first, "a", "run-a")
    replaced = {TEST_ROWS: [f"s{k:05d}" for k in range(10, 60)]}
    note = test_sets.register_test_set(project, replaced)
    assert note.startswith("10 of 50 samples of the test set before are missing, so this is another test set")
    assert test_sets.count_models(project, test_sets.compute_digest(replaced), "b") == 1


def test_models_are_numbered_by_their_first_evaluation(project: ProjectLayout) -> None:
    small, _ = register(project, rows=50)
    for model in "abca":
        test_sets.record_test_set_use(project, small, model, "run")
    large, _ = register(project, rows=90)
    test_sets.record_test_set_use(project, large, "d", "run")
    assert [test_sets.read_model_number(project, large, model) for model in "abcde"] == [1, 2, 3, 4, 5]
    shares = [compute_alpha_share(number) for number in range(1, 2000)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) < 2.3


def test_a_test_set_continues_after_another_one_was_used(project: ProjectLayout) -> None:
    """As after a visit of another branch: rows of both are in the file."""
    first, _ = register(project, rows=50)
    test_sets.record_test_set_use(project, first, "a", "run-a")
    test_sets.register_test_set(project, {TEST_ROWS: ["x", "y"]})
    again, note = register(project, rows=60)
    assert note == ""
    assert test_sets.count_models(project, again, "b") == 2


def test_the_rows_of_another_branch_may_be_missing(project: ProjectLayout) -> None:
    register(project, rows=50)
    register(project, rows=60)
    lines = project.test_set_uses.read_text().splitlines(keepends=True)
    project.test_set_uses.write_text(lines[1])
    digest, _ = register(project, rows=70)
    assert test_sets.read_test_set(project, digest) is not None


def test_rows_that_were_changed_in_the_file_are_noticed(project: ProjectLayout) -> None:
    digest, _ = register(project, rows=5)
    content = json.loads(project.test_set_uses.read_text())
    content["rows"][0] = "s99999"
    project.test_set_uses.write_text(json.dumps(content) + "\n")
    with pytest.raises(DamagedFileError, match=r"the rows of test set \w+ do not have this digest; restore the file"):
        test_sets.read_test_set(project, digest)


def decide(project: ProjectLayout, models: Models, rows: int, number: int, settings: Gate) -> Verdict:
    """Return the verdict about models on a test set of this size."""
    found = evidence(models, CURRENT)
    digest, _ = register(project, rows=rows)
    return decide_verdict(
        type(found)(**{**vars(found), "test_set": test_sets.read_test_set(project, digest), "model_number": number}),
        settings,
    )


def test_hold_becomes_promote_with_added_rows_and_later_models_need_more(project: ProjectLayout) -> None:
    settings = gate(RULE, test="sequential", max_test_set_uses=1)

    def models(n: int) -> Models:
        old = {key: float(k % 10 < 7) for k, key in enumerate(right(n, n))}
        new = {key: 1 - value if k % 50 in (0, 9) else value for k, (key, value) in enumerate(old.items())}
        return {"candidate": {"accuracy": new}, "champion": {"accuracy": old}}

    held = decide(project, models(100), 100, 1, settings)
    (comparison,) = held.reasons[0].comparisons
    assert (held.decision, comparison.method, comparison.is_sequential) == ("HOLD", "betting", True)
    assert "test rows are required" in held.reasons[0].text
    promoted = decide(project, models(400), 400, 1, settings)
    assert (promoted.decision, promoted.alpha_share) == ("PROMOTE", 1.0)
    late = decide(project, models(400), 400, 200, settings)
    assert late.decision == "HOLD", "199 earlier models"
    assert late.alpha_share == pytest.approx(200**-1.6)
    assert "99.999 % confidence, because of earlier models on these rows: at least -" in late.reasons[0].text


def test_a_test_set_that_does_not_fit_the_kind_of_test_is_invalid(project: ProjectLayout) -> None:
    old = right(70, 100)
    found = evidence({"candidate": {"accuracy": old}, "champion": {"accuracy": old}}, CURRENT)
    unordered = decide_verdict(found, gate(RULE, test="sequential"))
    assert (unordered.decision, unordered.reasons[0].rule) == ("INVALID", "test_set")
    ended = found.report.model_copy(update={"remaining_rows": 5})
    early = decide_verdict(replace(found, report=ended), gate(RULE))
    assert early.decision == "INVALID"
    assert "ended early" in early.reasons[0].text


def test_no_look_fails_a_model_by_few_losses_or_by_its_measured_accuracy(project: ProjectLayout) -> None:
    losses = dict.fromkeys(right(0, 100), 1.0)
    worse = {key: 2.0 + k % 3 for k, key in enumerate(losses)}
    rule = MustNotRegressRule(rule="must_not_regress", metric="answer_loss", margin=0.05)
    scores: Models = {"candidate": {"answer_loss": worse}, "champion": {"answer_loss": losses}}
    assert decide(project, scores, 100, 1, gate(rule, test="sequential")).decision == "HOLD"
    half = {key: float(k % 2) for k, key in enumerate(losses)}
    chance = AboveChanceRule(rule="above_chance", metric="accuracy", chance=0.5)
    verdict = decide(project, {"candidate": {"accuracy": half}}, 100, 1, gate(chance, test="sequential"))
    assert verdict.decision == "HOLD"
