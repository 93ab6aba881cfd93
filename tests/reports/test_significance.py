"""Tests significance: only differences on the same rows under one contract are tested.

Also tests that random differences are not significant.
"""

import random
from typing import Any

import pytest

import gate_cases as cases
import trained_runs
from gate_cases import Models, right, spread
from ratchet.config.gate import Gate
from ratchet.reports import comparison, run_history
from ratchet.reports.comparison import CURRENT, TEST, VALIDATION, ModelEvaluation, PairwiseTestResult, SubjectScores
from ratchet.runs.directory import RunPaths
from ratchet.storage.layout import ProjectLayout
from trained_runs import Training

GATE = Gate(resamples=1000)


def scored(models: Models, **changes: Any) -> list[SubjectScores]:
    """Build one subject for each model, all from one evaluation."""
    found = cases.evidence(models)
    report = found.report.model_copy(update=changes)
    return [SubjectScores(who, [ModelEvaluation("r", who, CURRENT, report, found.samples[who])], []) for who in models]


def told(given: list[SubjectScores]) -> list[PairwiseTestResult]:
    found, silences = comparison.compare_pairs(given, GATE)
    assert silences == {}
    return found


def test_the_better_one_leads_whoever_was_named_first() -> None:
    models: Models = {
        "base": {"accuracy": right(100), "answer_loss": spread(2.0)},
        "candidate": {"accuracy": right(160), "answer_loss": spread(1.0)},
    }
    for given in (scored(models), scored(models)[::-1]):
        accuracy, loss = told(given)
        for one in (accuracy, loss):
            assert (one.leader, one.other, one.rows, one.is_significant) == ("candidate", "base", TEST, True)
            assert 0 < one.low < one.difference
        assert (accuracy.values, accuracy.difference) == ((0.8, 0.5), pytest.approx(0.3))


def test_equal_models_are_told_apart_by_nobody() -> None:
    models: Models = {"base": {"accuracy": right(100)}, "candidate": {"accuracy": right(100)}}
    [one] = told(scored(models))
    assert (one.is_significant, one.difference, one.p_adjusted) == (False, 0.0, 1.0)


def test_more_comparisons_must_be_surer() -> None:
    few: Models = {"base": {"accuracy": right(100)}, "candidate": {"accuracy": cases.flipped(right(100), better=12)}}
    many: Models = {
        who: {"accuracy": found["accuracy"], **{f"f{k}_f1": spread(1.0 + k) for k in range(8)}}
        for who, found in few.items()
    }
    alone, among = told(scored(few))[0], next(one for one in told(scored(many)) if one.metric == "accuracy")
    assert alone.p == among.p
    assert alone.p_adjusted < among.p_adjusted


def test_two_models_that_only_chance_tells_apart_are_rarely_called_different() -> None:
    draw, wrong = random.Random(3), 0
    for _ in range(200):
        models: Models = {
            who: {"accuracy": {f"s{k}": float(draw.random() < 0.7) for k in range(120)}}
            for who in ("base", "candidate")
        }
        wrong += told(scored(models))[0].is_significant
    assert wrong <= 18  # at 5 % of 200, more than 18 have a probability of 0.01


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("contract", "scored under different contracts"),
        ("data", "scored on different data"),
        ("samples", "no scores of single rows"),
        ("nothing", "base was not evaluated"),
        ("rows", "no metric has scores of single rows for both"),
    ],
)
def test_what_cannot_be_compared_is_said_and_not_tested(change: str, said: str) -> None:
    count = 100 if change == "rows" else 200
    models: Models = {"base": {"accuracy": right(20, count)}, "candidate": {"accuracy": right(160)}}
    first, second = scored(models)
    [one] = first.evaluations
    if change in ("contract", "data"):
        others = {**one.report.scores, "base": one.scores.model_copy(update={"contract": "k9"})}
        digest = "0" * 64 if change == "data" else one.report.data_digest
        report = one.report.model_copy(update={"scores": others, "data_digest": digest})
        first = SubjectScores("base", [ModelEvaluation("r", "base", CURRENT, report, one.samples)], [])
    elif change == "samples":
        first = SubjectScores("base", [ModelEvaluation("r", "base", "kept", one.report)], [])
    elif change == "nothing":
        first = SubjectScores("base", [], [{}])
    found, silences = comparison.compare_pairs([first, second], GATE)
    assert found == []
    [(reason, pairs)] = silences.items()
    assert pairs == "base and candidate"
    assert said in reason


def groups(project: ProjectLayout, **changes: Any) -> list[SubjectScores]:
    """Build two groups of two seeds, scored on validation rows; the second group is better."""
    found = []
    for name, one, share in (("low", Training(steps=10), 0.6), ("high", Training(steps=10, rank=16), 0.9)):
        answers = []
        for number, member in enumerate(trained_runs.seeds(one, 2)):
            trained_runs.lay(project, member)
            trained_runs.score(project, member, share + 0.005 * number, **(changes if name == "high" else {}))
            answers.append(
                comparison.read_validation_scores(
                    run_history.read_run_summary(RunPaths(project.runs / member.spec.run_id))
                )
            )
        found.append(SubjectScores(name, [], answers))
    return found


def test_groups_of_seeds_are_compared_on_validation_rows(project: ProjectLayout) -> None:
    for one in told(groups(project)):
        assert (one.leader, one.rows, one.n) == ("high", VALIDATION, 200)
        assert "plus seeds" in one.method


@pytest.mark.parametrize("change", ["request_digest", "numerics", "adapter_digest"])
def test_groups_that_were_asked_otherwise_are_not_compared(project: ProjectLayout, change: str) -> None:
    other: Any = {"device": "cuda"} if change == "numerics" else "1" * 12
    found, silences = comparison.compare_pairs(groups(project, **{change: other}), GATE)
    assert (found, len(silences)) == ([], 1)


def test_a_file_of_scores_that_was_changed_is_left_out(project: ProjectLayout) -> None:
    one = Training(steps=10)
    trained_runs.lay(project, one)
    trained_runs.score(project, one, 0.5)
    [path] = (project.runs / one.spec.run_id).glob("validation_scores-*.json")
    account = run_history.read_run_summary(RunPaths(project.runs / one.spec.run_id))
    assert len(comparison.read_validation_scores(account)) == 1
    path.write_text(path.read_text(encoding="utf-8").replace("1.0", "0.0", 1), encoding="utf-8")
    assert comparison.read_validation_scores(account) == {}
