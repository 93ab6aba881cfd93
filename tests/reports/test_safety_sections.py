"""Tests the safety tests on the gate's page, and the group of the rules about people and safety."""

import dataclasses
from pathlib import Path

import pytest

import trained_runs
from gate_example import HOSTILE, Case, case
from page_reading import heard, read, section, table
from ratchet.cli.evaluate import format_scores
from ratchet.quality_gate.judgements import HUMAN_PREFERENCE
from ratchet.reports import comparison, run_page
from ratchet.reports.comparison import MOST_POINTS, ComparisonIndex, EvaluationIndex
from ratchet.reports.run_page import RunEvaluation, RunProvenance
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import (
    REFUSED_UNSAFE,
    EvaluationReport,
    GroupDifference,
    MetricValue,
    SafetyReport,
)
from ratchet.storage.records.gate import RuleResult

SAFETY = SafetyReport(
    scorer="classifier abc",
    tested=(REFUSED_UNSAFE, "bias"),
    changes={
        REFUSED_UNSAFE: MetricValue(
            value=-0.2, n=50, low=-0.31, high=-0.09, better="higher", unit="difference", kind="aggregate"
        )
    },
    differences={
        "candidate": (
            GroupDifference(score="refused", first=HOSTILE, second="Bob", templates=24, difference=0.25, low=0.1,
                            high=0.4, p=0.004),
            GroupDifference(score="words", first=HOSTILE, second="Bob", templates=24, difference=-1.5, low=-4.0,
                            high=1.0, p=1.0),
        )
    },
    untestable_rows=7,
    unreadable=2,
)  # fmt: skip
SHARE = MetricValue(value=0.8, n=50, low=0.67, high=0.89, better="higher", unit="proportion")
RULE = RuleResult(rule="must_refuse", metric=REFUSED_UNSAFE, outcome="fail", text="10 of 50 unsafe prompts")
PREFERENCE = RuleResult(rule="must_improve", metric=HUMAN_PREFERENCE, outcome="pass", text="people prefer it")


def with_safety(report: EvaluationReport) -> EvaluationReport:
    scores = {
        role: found.model_copy(update={"metrics": {**found.metrics, REFUSED_UNSAFE: SHARE}})
        for role, found in report.scores.items()
    }
    return report.model_copy(update={"safety": SAFETY, "scores": scores})


@pytest.fixture
def made() -> Case:
    plain = case()
    evidence = dataclasses.replace(plain.evidence, report=with_safety(plain.evidence.report))
    verdict = plain.verdict.model_copy(update={"reasons": (*plain.verdict.reasons, RULE, PREFERENCE)})
    return dataclasses.replace(plain, evidence=evidence, verdict=verdict)


def test_rules_about_people_and_safety_are_a_group_of_their_own(made: Case, tmp_path: Path) -> None:
    page = made.write(tmp_path / "gate.html")
    body = section(page, "rules")
    assert [heard(one) for one in body.iter("h3")] == ["Quality", "People and safety"]
    first, second = body.iter("tbody")
    assert len(list(first)) == len(made.verdict.reasons) - 2
    assert [heard(row).count("unsafe prompts") + heard(row).count("people prefer") for row in second] == [1, 1]
    plain = case().write(tmp_path / "plain.html")
    assert not list(section(plain, "rules").iter("h3"))
    assert "safety" not in {one.get("id") for one in read(plain).iter("section")}


def test_page_and_terminal_show_what_was_tested_and_what_was_not(made: Case, tmp_path: Path) -> None:
    body = section(made.write(tmp_path / "gate.html"), "safety")
    assert table(body, "Change from the base")["safety/refused_unsafe"] == ["\u221220.0 %\u221231.0 % to \u22129.0 %"]
    assert len(table(body, "Differences between groups: candidate")) == 2
    text = heard(body)
    assert "7 training rows could not be tested" in text and "no verdict on 2 answers" in text
    assert "prompt injection" in text and "over-refusal" in text
    lines = format_scores(made.evidence.report)
    assert "safety/refused_unsafe: -20.0 points from the base [-31.0, -9.0] (50 prompts; + is better)" in lines
    assert "candidate: significant differences between groups: 1 of 2" in lines
    assert "not tested: refusal of safe prompts (over-refusal); harm in answers" in lines


def test_the_page_of_a_run_shows_them(made: Case, tmp_path: Path) -> None:
    layout, training = ProjectLayout(tmp_path), trained_runs.Training()
    trained_runs.lay(layout, training)
    index = ComparisonIndex(layout)
    side = comparison.read_side(
        layout, index.subject(training.spec.run_id), index, EvaluationIndex(layout, index), MOST_POINTS
    )
    for report, count in ((made.evidence.report, 1), (case().evidence.report, 0)):
        page = run_page.render(side, RunEvaluation(report, "candidate"), RunProvenance({}, None, None, None))
        assert [heard(head) for head in read(page).iter("h3")].count("Safety") == count
