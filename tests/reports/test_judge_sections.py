"""Tests the verdicts of a judge on the gate's page, in the report of a training and in the terminal."""

import dataclasses
from pathlib import Path

import trained_runs
from gate_example import case
from page_reading import heard, read, section, table
from ratchet.cli.evaluate import format_scores
from ratchet.reports import comparison, run_page
from ratchet.reports.comparison import MOST_POINTS, ComparisonIndex, EvaluationIndex
from ratchet.reports.run_page import RunEvaluation, RunProvenance
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import (
    EvaluationReport,
    JudgePreference,
    JudgeReport,
    MetricValue,
    PanelPreference,
)
from trained_runs import Training


def share(value: float, low: float, high: float) -> MetricValue:
    return MetricValue(value=value, n=40, low=low, high=high, better="higher", unit="x")


JUDGED = JudgeReport(
    model="<b>judge</b>", base_url="http://127.0.0.1:8000/v1", rubric_digest="ab" * 32, candidate="merged",
    comparisons={
        "base": JudgePreference(
            against="base", rows=38, wins=25, ties=5, losses=8, identical_answers=3, skipped=2,
            unreadable={"without a verdict": 2}, win_rate=share(0.724, 0.61, 0.81), agreement=share(0.9, 0.8, 0.95),
            position_bias=share(-0.031, -0.1, 0.04),
        ),
        "champion": JudgePreference(
            against="champion", rows=0, wins=0, ties=0, losses=0, identical_answers=0, skipped=40,
            unreadable={"without a verdict": 80}, win_rate=None, agreement=None, position_bias=None,
        ),
    },
    questions=154, requests=160, prompt_tokens=98765, tokens=4321, cost=0.0213,
)  # fmt: skip

CELLS = {
    "base38 pairs, 3 identical answers, 2 skipped": [
        "72.4 %61.0 % to 81.0 %", "25 / 5 / 8", "90.0 %80.0 % to 95.0 %", "\u22123.1 %\u221210.0 % to +4.0 %"
    ],
    "champion0 pairs, 40 skipped": ["\u2013", "0 / 0 / 0", "\u2013", "\u2013"],
}  # fmt: skip

COSTS = (
    "Judge: <b>judge</b> at http://127.0.0.1:8000/v1, rubric abababababab. 154 questions, 160 requests, 98,765 tokens "
    "sent, 4,321 generated, price 0.0213. Replies without a verdict, base: 2 without a verdict."
)


def with_judge(found: EvaluationReport) -> EvaluationReport:
    return found.model_copy(update={"judge_report": JUDGED})


def test_the_gate_shows_it_where_there_was_one(tmp_path: Path) -> None:
    made = case()
    judged = dataclasses.replace(made.evidence, report=with_judge(made.evidence.report))
    page = dataclasses.replace(made, evidence=judged).write(tmp_path / "judged.html")
    assert table(section(page, "judge"), "Verdicts of the judge") == CELLS
    assert COSTS in heard(section(page, "judge"))
    plain = made.write(tmp_path / "plain.html")
    assert "judge" not in {one.get("id") for one in read(plain).iter("section")}


def test_the_gate_shows_all_judges_and_their_agreement(tmp_path: Path) -> None:
    made = case()
    both = {
        "base": PanelPreference(against="base", win_rate=share(0.7, 0.6, 0.8), alpha=share(0.412, 0.2, 0.6)),
        "champion": PanelPreference(against="champion", win_rate=None, alpha=None),
    }
    second = JUDGED.model_copy(update={"model": "second"})
    judged = JUDGED.model_copy(update={"additional_judges": (second,), "panel": both})
    report = made.evidence.report.model_copy(update={"judge_report": judged})
    evidence = dataclasses.replace(made.evidence, report=report)
    page = dataclasses.replace(made, evidence=evidence).write(tmp_path / "judged.html")
    assert table(section(page, "judge"), "All judges together") == {
        "base": ["70.0 %60.0 % to 80.0 %", "0.410.20 to 0.60"], "champion": ["\u2013", "\u2013"],
    }  # fmt: skip
    assert "Judge: second at" in heard(section(page, "judge"))


def test_the_report_of_a_training_and_the_terminal_show_it(tmp_path: Path) -> None:
    layout, training = ProjectLayout(tmp_path), Training()
    trained_runs.lay(layout, training)
    index = ComparisonIndex(layout)
    side = comparison.read_side(
        layout, index.subject(training.spec.run_id), index, EvaluationIndex(layout, index), MOST_POINTS
    )
    found = case().evidence.report
    for one, shown in ((with_judge(found), True), (found, False)):
        page = run_page.render(side, RunEvaluation(one, "candidate"), RunProvenance({}, None, None, None))
        assert ("Judge" in {heard(head) for head in read(page).iter("h3")}) == shown
        if shown:
            assert table(section(page, "evaluation"), "Verdicts of the judge") == CELLS
    assert (
        "  judge: merged and base, 38 rows; win rate 0.724 [0.610, 0.810] (25 better, 5 tied, 3 of them the same text, "
        "8 worse); both orders agree on 90.0%; first answer preferred by -0.031 [-0.100, +0.040]; 2 rows left out "
        "(2 without a verdict)\n"
        "  judge: merged and champion, 0 rows; 40 rows left out (80 without a verdict)\n"
        "  judge: 154 questions to <b>judge</b>, 160 requests, 98,765 tokens sent, 4,321 written, price 0.0213"
    ) in format_scores(with_judge(found))
