"""Tests the gate and the audit after lines of experiments/test_set_uses.jsonl were removed."""

import json
import subprocess

import pytest

from promotion_project import SETTINGS, write_outputs
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.quality_gate import test_sets
from ratchet.stages.audit import audit
from ratchet.stages.gate import gate
from ratchet.stages.project import Project
from ratchet.stages.promote import promote
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import EvaluationReport

pytestmark = pytest.mark.usefixtures("calm")

TWO_USES = SETTINGS.gate.model_copy(update={"max_test_set_uses": 2})


@pytest.fixture
def third(tracked_project: ProjectLayout) -> Project:
    """Return a project whose third model on the test set is judged, after two promoted ones. Two are allowed."""
    settings = SETTINGS.model_copy(update={"gate": TWO_USES})
    tracked_project.params.write_text(params_file.dump(settings), encoding="utf-8")
    project = Project(tracked_project.root)
    for model in "ab":
        write_outputs(tracked_project, model)
        gate(project)
        promote(project)
    write_outputs(tracked_project, "c")
    return project


def test_all_uses_are_counted_while_the_file_is_complete(third: Project) -> None:
    verdict = gate(third)
    assert (verdict.decision, verdict.test_set_uses, verdict.reasons[-1].rule) == ("HOLD", 3, "test_set_uses")
    assert audit(third).list_facts("contradicted") == []


def test_a_removed_file_makes_the_verdict_invalid(third: Project, capsys: pytest.CaptureFixture[str]) -> None:
    layout = third.layout
    lines = layout.test_set_uses.read_bytes()
    layout.test_set_uses.unlink()
    report = EvaluationReport.load(layout.eval_report)
    test_sets.record_test_set_use(layout, report.test_set_digest, report.adapter_digest, report.run_id)
    verdict = gate(third)
    assert (verdict.decision, verdict.test_set_uses) == ("INVALID", 3)
    [reason] = verdict.reasons
    assert reason.rule == "test_set_uses"
    assert (
        "experiments/test_set_uses.jsonl: has lines about 1 model of this test set, but the verdicts of" in reason.text
    )
    assert "prove at least 3, so lines are missing; HEAD lacks them too" in reason.text
    [problem] = audit(third).list_facts("contradicted")
    assert (problem.name, "lines are missing" in problem.proof) == ("uses of the test set", True)
    assert main(["--project", str(layout.root), "audit"]) == 3
    assert "!!" in capsys.readouterr().out

    layout.test_set_uses.write_bytes(lines)
    assert (gate(third).decision, gate(third).test_set_uses) == ("HOLD", 3)
    assert audit(third).list_facts("contradicted") == []


def test_a_removed_line_of_another_model_is_found_by_the_number_in_a_verdict(third: Project) -> None:
    """The second verdict names two models, so the line of the first one cannot be missing."""
    layout = third.layout
    uses = [json.loads(line) for line in layout.test_set_uses.read_bytes().splitlines()]
    kept = [use for use in uses if use["run_id"] != "run-a"]
    layout.test_set_uses.write_text("".join(json.dumps(use) + "\n" for use in kept), encoding="utf-8")
    assert (gate(third).decision, gate(third).test_set_uses) == ("INVALID", 3)


def test_the_message_counts_the_lines_that_git_has(third: Project) -> None:
    layout = third.layout
    for command in (["init", "-q"], ["add", "experiments/test_set_uses.jsonl"], ["commit", "-q", "-m", "uses"]):
        identity = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
        subprocess.run(["git", *identity, *command], cwd=layout.root, check=True, capture_output=True)
    count = len(layout.test_set_uses.read_bytes().splitlines())
    layout.test_set_uses.unlink()
    [reason] = gate(third).reasons
    assert f"HEAD has {count} lines that the file lacks: copy them from `git show HEAD:" in reason.text


def test_promoted_models_count_although_the_test_set_has_grown(third: Project) -> None:
    """Without the file, nothing says that the grown test set has the rows of the earlier one."""
    layout = third.layout
    layout.test_set_uses.unlink()
    comparison = test_sets.compare_uses(layout, "7" * 64, "model")
    assert (comparison.recorded, comparison.proven, len(comparison.witnesses)) == (0, 3, 2)


def test_models_that_another_person_promoted_count_without_lines(
    third: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been evaluated in another clone."""
    third.layout.test_set_uses.unlink()
    monkeypatch.setenv("RATCHET_ACTOR", "eve")
    assert (gate(third).decision, gate(third).test_set_uses) == ("HOLD", 3)


def test_a_number_that_includes_models_of_others_proves_no_missing_line(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked_project.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")
    project = Project(tracked_project.root)
    for actor, model in (("eve", "a"), ("ada", "b")):
        monkeypatch.setenv("RATCHET_ACTOR", actor)
        write_outputs(tracked_project, model)
        gate(project)
        promote(project)
        if actor == "eve":
            tracked_project.test_set_uses.unlink()  # it is in the clone of eve
    report = EvaluationReport.load(tracked_project.eval_report)
    comparison = test_sets.compare_uses(tracked_project, report.test_set_digest, report.adapter_digest)
    assert (comparison.recorded, comparison.proven, comparison.witnesses) == (1, 2, ())
    assert audit(project).list_facts("contradicted") == []


def test_the_audit_by_another_person_notices_a_removed_line(third: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is about a model that was never promoted, so only the number in a later verdict shows it."""
    layout = third.layout
    settings = SETTINGS.model_copy(update={"gate": TWO_USES.model_copy(update={"max_test_set_uses": 9})})
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    project = Project(layout.root)
    write_outputs(layout, "d")
    gate(project)
    promote(project)
    uses = [json.loads(line) for line in layout.test_set_uses.read_bytes().splitlines()]
    kept = [use for use in uses if use["run_id"] != "run-c"]
    layout.test_set_uses.write_text("".join(json.dumps(use) + "\n" for use in kept), encoding="utf-8")
    monkeypatch.setenv("RATCHET_ACTOR", "eve")
    [problem] = audit(project).list_facts("contradicted")
    assert (problem.name, "has only 3 now; lines were removed" in problem.proof) == ("uses of the test set", True)


def test_promoted_models_of_another_test_set_do_not_count(third: Project) -> None:
    layout = third.layout
    comparison = test_sets.compare_uses(layout, "7" * 64, "model")
    assert (comparison.proven, comparison.describe_missing_lines(layout)) == (1, None)
