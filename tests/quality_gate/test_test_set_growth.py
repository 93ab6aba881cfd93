"""Tests the record of a test set: it grows and stays the same, or is replaced, and models use up its evidence."""

import json

import pytest

from gate_cases import CURRENT, Models, evidence, gate, right
from ratchet.config.gate import Gate, MustNotRegressRule
from ratchet.errors import DamagedFileError
from ratchet.quality_gate import test_sets
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.test_sets import ROWS, Budget
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Verdict

RULE = MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05)


def ids(n: int, documents: int = 0) -> dict[str, list[str]]:
    """Return the ids of n test rows, and of documents of a harness task."""
    rows = {ROWS: [f"s{k:05d}" for k in range(n)]}
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
    new_rows = {f"s{k:05d}": after.places[ROWS, f"s{k:05d}"] for k in range(50, 80)}
    assert new_rows == {f"s{k:05d}": (80, k) for k in range(50, 80)}
    assert sorted(after.places["answers", str(k)] for k in range(20)) == [(20, place) for place in range(20)]
    shuffled = [f"s{k:05d}" for k in (79, 10, 60, 3)]
    assert test_sets.sort_rows(project, shuffled) == sorted(shuffled), "rows are missing, so this is another test set"
    earlier_id = {ROWS: ["s", *ids(80)[ROWS]], "answers": ids(0, 20)["answers"]}
    assert test_sets.sort_rows(project, earlier_id[ROWS]) == [*ids(80)[ROWS], "s"]
    assert test_sets.count_models(project, large, "b") == 2
    content = project.test_set_uses.read_bytes()
    assert register(project, rows=80, documents=20) == (large, "")
    assert register(project, rows=50) == (small, "")
    assert project.test_set_uses.read_bytes() == content


def test_missing_rows_make_another_test_set(project: ProjectLayout) -> None:
    first, _ = register(project, rows=50)
    test_sets.record_test_set_use(project, first, "a", "run-a")
    replaced = {ROWS: [f"s{k:05d}" for k in range(10, 60)]}
    note = test_sets.register_test_set(project, replaced)
    assert note.startswith("10 of 50 samples of the test set before are missing, so this is another test set")
    assert test_sets.count_models(project, test_sets.compute_digest(replaced), "b") == 1


def test_the_budget_counts_models_before_this_one(project: ProjectLayout) -> None:
    small, _ = register(project, rows=50)
    for model in "abc":
        test_sets.record_test_set_use(project, small, model, "run")
    verdict = Verdict(
        decision="PROMOTE", model_digest="m", adapter_digest="b", run_id="run", is_champion=False, champion_digest=None,
        reasons=(), test_set_digest=small, rules="r",
    )  # fmt: skip
    large, _ = register(project, rows=90)
    test_sets.record_verdict(project, verdict)
    test_sets.record_test_set_use(project, large, "d", "run")
    found = [test_sets.read_budget(project, large, model) for model in "abcde"]
    assert found == [Budget(1, 0), Budget(2, 0), Budget(3, 0), Budget(4, 1), Budget(5, 1)]
    assert Budget(1, 0).share == 1
    assert 1 > Budget(2, 0).share > Budget(4, 1).share > Budget(4, 0).share > 0


def test_rows_that_were_changed_in_the_file_are_noticed(project: ProjectLayout) -> None:
    digest, _ = register(project, rows=5)
    content = json.loads(project.test_set_uses.read_text())
    content["rows"][0] = "s99999"
    project.test_set_uses.write_text(json.dumps(content) + "\n")
    with pytest.raises(DamagedFileError, match=r"the rows of test set \w+ do not have this digest; restore the file"):
        test_sets.read_test_set(project, digest)


def decide(project: ProjectLayout, models: Models, rows: int, budget: Budget, settings: Gate) -> Verdict:
    """Return the verdict about models on a test set of this size."""
    found = evidence(models, CURRENT)
    digest, _ = register(project, rows=rows)
    return decide_verdict(
        type(found)(**{**vars(found), "test_set": test_sets.read_test_set(project, digest), "budget": budget}), settings
    )


def test_hold_becomes_promote_with_added_rows_and_later_models_need_more(project: ProjectLayout) -> None:
    settings = gate(RULE, test="sequential", max_test_set_uses=1)

    def models(n: int) -> Models:
        old = {key: float(k % 10 < 7) for k, key in enumerate(right(n, n))}
        new = {key: 1 - value if k % 50 in (0, 9) else value for k, (key, value) in enumerate(old.items())}
        return {"candidate": {"accuracy": new}, "champion": {"accuracy": old}}

    held = decide(project, models(100), 100, Budget(1, 0), settings)
    (comparison,) = held.reasons[0].comparisons
    assert (held.decision, comparison.method, comparison.is_sequential) == ("HOLD", "betting", True)
    assert "test rows are required" in held.reasons[0].text
    promoted = decide(project, models(400), 400, Budget(1, 0), settings)
    assert (promoted.decision, promoted.budget_share) == ("PROMOTE", 1.0)
    late = decide(project, models(400), 400, Budget(200, 0), settings)
    assert late.decision == "HOLD", "199 earlier models without a promotion"
    assert late.budget_share == pytest.approx(200**-1.6)
    assert "99.999 % confidence, because of earlier models on these rows: at least -" in late.reasons[0].text
