"""Tests stage evaluate with a judge: the report and the table have its metrics, and the scores do not change."""

import json
import re
from pathlib import Path

import pytest
import torch

import tiny_project
from ratchet.cli.evaluate import format_evaluation
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import EndpointError, SettingsError
from ratchet.stages import evaluate
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationReport, judge_file
from scripted_endpoint import JSON, Said, chat, served

SETTINGS: Settings = params_file.apply_changes(
    tiny_project.SETTINGS,
    {"evaluate.harness.tasks": [], "evaluate.generation_rows": 8, "evaluate.latency_rows": 0,
     "evaluate.general_text.max_blocks": 4, "machine.endpoint.max_attempts": 1},
)  # fmt: skip


def longest(body: JSON, _: int) -> Said:
    """Answer as a judge that prefers the longer answer."""
    texts = dict(re.findall(r"ANSWER ([AB])\]\n(.*?)\n\[\w{12} END\]", body["messages"][0]["content"], re.S))
    return chat(json.dumps({"verdict": "A" if len(texts["A"]) > len(texts["B"]) else "B"}))


@pytest.mark.long
def test_stage_adds_judgements_and_changes_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_log_to_mlflow", lambda *_: None)
    torch.set_num_threads(1)
    layout = tiny_project.prepared(tmp_path / "project")
    tiny_project.adapted(layout, SETTINGS, strength=0.5)
    evaluate.evaluate(Project.from_parts(layout, SETTINGS))
    plain = EvaluationReport.load(layout.eval_report)
    assert plain.judge_report is None and not (layout.evaluate / "judge").exists()

    with served(longest) as server:
        wanted = params_file.apply_changes(SETTINGS, {"evaluate.judge.base_url": server.url})
        text = format_evaluation(evaluate.evaluate(Project.from_parts(layout, wanted)))
        first = files.read_manifest(layout.evaluate)
        count = len(server.got)
        evaluate.evaluate(Project.from_parts(layout, wanted))
        assert len(server.got) == count, "verdicts are kept"
    files.verify_sealed(layout.evaluate, "evaluation")
    assert files.read_manifest(layout.evaluate) == first
    found = EvaluationReport.load(layout.eval_report)
    assert found.judge_report is not None and set(found.judge_report.comparisons) == {"base"}
    one = found.judge_report.comparisons["base"]
    assert one.rows == 8 and one.wins + one.ties + one.losses == 8
    assert found.judge_report.questions == count == 2 * (8 - one.identical_answers)
    assert "judge: candidate and base, 8 rows; win rate" in text
    assert "there is no champion to compare with" in text
    lines = list(base.read_lines(layout.evaluate / judge_file("base")))
    assert [line["id"] for line in lines] == sorted(line["id"] for line in lines)
    assert (found.contracts, found.scores) == (plain.contracts, plain.scores)
    answers = evaluate.collect_answers(layout.evaluate, found, 5)  # for MLflow
    assert [answer.row_id for answer in answers] == [line["id"] for line in lines][:5]
    assert all(set(answer.verdicts) == {"base"} and "accuracy" in answer.scores for answer in answers)
    assert evaluate.collect_answers(layout.evaluate, found, 0) == []
    del found.scores["candidate"].metrics["accuracy"]  # as if it were not finite: its samples stay
    assert not any("accuracy" in one.scores for one in evaluate.collect_answers(layout.evaluate, found, 5))

    with pytest.raises(EndpointError):
        evaluate.evaluate(Project.from_parts(layout, wanted))
    assert files.read_manifest(layout.evaluate) == first, "the last evaluation stays"
    with pytest.raises(SettingsError, match="file x not found in"):
        evaluate.evaluate(Project.from_parts(layout, params_file.apply_changes(wanted, {"evaluate.judge.rubric": "x"})))
