"""Tests the metric human_preference: judgements of people about the evaluated answers, in the rules of the gate."""

from pathlib import Path

import pytest

import gate_cases as cases
from gate_cases import CURRENT, Models, evidence, reason, right
from ratchet.config.gate import AtLeastRule, MustImproveRule, MustNotRegressRule
from ratchet.config.settings import Settings
from ratchet.quality_gate.evidence import read_evidence
from ratchet.quality_gate.judgements import (
    HUMAN_PREFERENCE,
    append_record,
    digest_sample,
    read_judgements,
)
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import ModelRole
from ratchet.storage.records.gate import RuleResult
from ratchet.storage.records.label import Choice, Judgement, JudgementUndo

IMPROVE = MustImproveRule(rule="must_improve", metric=(HUMAN_PREFERENCE,), over="champion")
KEEP = MustNotRegressRule(rule="must_not_regress", metric=HUMAN_PREFERENCE, against="champion", margin=0.2)
MODELS: Models = {
    "base": {"accuracy": right(60, 100)},
    "candidate": {"accuracy": right(90, 100)},
    "champion": {"accuracy": right(80, 100)},
}
DIGESTS: dict[ModelRole, str] = {"candidate": cases.ADAPTER, "champion": cases.OLD, "base": cases.BASE}


def judgement(row: int, choice: Choice, rater: str = "ann", against: ModelRole = "champion") -> Judgement:
    """Return a judgement about the answers that `cases.write` writes; the candidate's answer is shown first."""
    answers = {DIGESTS[role]: f"{role} says yes" for role in ("candidate", against)}
    sample = digest_sample(f"s{row:05d}", answers)
    shown = (DIGESTS["candidate"], DIGESTS[against])
    return Judgement(sample=sample, prompt=f"s{row:05d}", shown=shown, choice=choice, rater=rater)


def judged(layout: ProjectLayout, rule: MustImproveRule | MustNotRegressRule | AtLeastRule) -> RuleResult:
    """Write the evaluation, read the evidence back, and return the result of one rule."""
    if not layout.evaluate.exists():
        cases.write(layout, evidence(MODELS, CURRENT))
    settings = Settings(gate=cases.gate(rule))
    return reason(rule, read_evidence(layout, settings, {"answers": cases.TASK}))


def write(layout: ProjectLayout, wins: int, losses: int, ties: int = 0) -> None:
    choices: list[Choice] = [*["first"] * wins, *["second"] * losses, *["tie"] * ties]  # type: ignore[list-item]
    for row, choice in enumerate(choices):
        append_record(layout.judgements, judgement(row, choice))


def test_without_judgements_the_gate_holds_and_names_the_command(project: ProjectLayout) -> None:
    write(project, 0, 0)
    append_record(project.judgements, judgement(1, "first", against="base"))  # about another model
    for rule in (IMPROVE, KEEP):
        found = judged(project, rule)
        assert found.outcome == "undecided"
        assert "run `ratchet label candidate champion` (100 rows have different answers)" in found.text


@pytest.mark.parametrize(
    ("wins", "losses", "ties", "outcome", "words"),
    [
        (40, 10, 5, "pass", "55 samples, 40 better, 10 worse"),
        (10, 40, 0, "fail", "human_preference 60 points worse than the champion"),
        (12, 8, 0, "undecided", "more judgements, of other rows, are required if the difference stays the same"),
        (8, 12, 0, "undecided", "more judgements are required"),
    ],
)
def test_must_improve(project: ProjectLayout, wins: int, losses: int, ties: int, outcome: str, words: str) -> None:
    write(project, wins, losses, ties)
    found = judged(project, IMPROVE)
    assert (found.outcome, words in found.text) == (outcome, True), found.text


def test_hold_reports_the_number_of_judgements_that_decides(project: ProjectLayout) -> None:
    write(project, 12, 8)
    text = judged(project, IMPROVE).text
    more = int(text.split(": these samples cannot decide it; about ")[1].split()[0])
    factor = (20 + more) / 20
    assert more > 0
    project.judgements.unlink()
    write(project, round(12 * factor) + 1, round(8 * factor))
    assert judged(project, IMPROVE).outcome == "pass"


def test_must_not_regress_needs_judgements_enough_to_show_a_loss_of_the_margin(project: ProjectLayout) -> None:
    write(project, 16, 14)
    found = judged(project, KEEP)
    assert found.outcome == "undecided"
    assert "cannot detect a loss below" in found.text and "more judgements, of other rows, are required" in found.text
    project.judgements.unlink()
    write(project, 55, 40)
    assert judged(project, KEEP.model_copy(update={"margin": 0.3})).outcome == "pass"


def test_several_raters_count_as_one_row(project: ProjectLayout) -> None:
    write(project, 40, 10)
    for row in range(50):
        append_record(project.judgements, judgement(row, "first" if row < 30 else "second", "bob"))
        append_record(project.judgements, judgement(row, "skip", "cem"))
    [comparison] = judged(project, IMPROVE).comparisons
    assert (comparison.n, comparison.better, comparison.worse) == (50, 30, 10)  # ten rows are undecided
    append_record(project.judgements, judgement(0, "second", "dan"))  # two of three prefer the candidate
    [comparison] = judged(project, IMPROVE).comparisons
    assert (comparison.n, comparison.better) == (50, None)
    assert comparison.difference == pytest.approx((29 + 1 / 3 - 10) / 50)


def test_undone_and_outdated_judgements_do_not_count(project: ProjectLayout) -> None:
    write(project, 40, 10)
    for row in range(40):
        append_record(project.judgements, JudgementUndo(sample=judgement(row, "first").sample, rater="ann"))
    assert judged(project, IMPROVE).outcome == "fail"
    other = judgement(0, "first").model_copy(
        update={"sample": digest_sample("s00000", {"a": "another", "b": "answer"})}
    )
    append_record(project.judgements, other)
    [comparison] = judged(project, IMPROVE).comparisons
    assert comparison.n == 10


def test_a_verdict_counts_damaged_lines(project: ProjectLayout) -> None:
    write(project, 40, 10)
    assert "damaged" not in judged(project, IMPROVE).text
    with project.judgements.open("a") as stream:
        stream.write("<<<<<<< HEAD\n=======\n")  # a merge of git that was not finished
    for rule in (IMPROVE, KEEP):
        assert judged(project, rule).text.endswith("judgements.jsonl, which do not count: 2")


def test_rules_that_compare_with_nothing(project: ProjectLayout) -> None:
    write(project, 3, 3)
    floor = AtLeastRule(rule="at_least", metric=HUMAN_PREFERENCE, value=0.5)
    found = judged(project, floor)
    assert found.outcome == "invalid" and "use it in must_improve or must_not_regress" in found.text
    alone = evidence({role: MODELS[role] for role in ("base", "candidate")})
    found = reason(KEEP, alone)
    assert found.outcome == "pass" and "there is no champion yet" in found.text


def test_a_line_that_a_crash_cut_off_is_ended_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "judgements.jsonl"
    append_record(path, judgement(0, "first"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert [*read_judgements(path).judgements.values()] == [judgement(0, "first")]
    append_record(path, judgement(1, "tie"))
    log = read_judgements(path)
    assert [*log.judgements.values()] == [judgement(0, "first"), judgement(1, "tie")]
    assert log.damaged_lines == 1
    with path.open("ab") as stream:
        stream.write(b'{"attempt":1,"event":"judgement","rater":"ann","t":1}\n')
    assert read_judgements(path).damaged_lines == 2
