"""Stage evaluate with a judge: figures in the report and the table; scores of the models are what they were."""

import json
import re
from pathlib import Path

import pytest
import torch

import tiny_project
from ratchet.config import params_file
from ratchet.config.schema import Settings
from ratchet.errors import EndpointError, SettingsError
from ratchet.stages import evaluate
from ratchet.storage import files
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationReport, judged_file
from scripted_endpoint import JSON, Said, chat, served

SETTINGS: Settings = params_file.apply_changes(
    tiny_project.SETTINGS,
    {"evaluate.harness.tasks": [], "evaluate.generate_rows": 8, "evaluate.latency_rows": 0,
     "evaluate.general.blocks": 4, "machine.endpoint.tries": 1},
)  # fmt: skip


def longest(body: JSON, _: int) -> Said:
    """Prefers what is longer, as judges do."""
    texts = dict(re.findall(r"ANSWER ([AB])\]\n(.*?)\n\[\w{12} END\]", body["messages"][0]["content"], re.S))
    return chat(json.dumps({"verdict": "A" if len(texts["A"]) > len(texts["B"]) else "B"}))


def test_stage_adds_judgements_and_changes_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_log_to_mlflow", lambda *_: None)
    torch.set_num_threads(1)
    layout = tiny_project.prepared(tmp_path / "project")
    tiny_project.adapted(layout, SETTINGS, strength=0.5)
    evaluate.evaluate(layout, SETTINGS, lambda _: None)
    plain = EvaluationReport.load(layout.eval_report)
    assert plain.judged is None and not (layout.evaluate / "judge").exists()

    with served(longest) as server:
        wanted = params_file.apply_changes(SETTINGS, {"evaluate.judge.address": server.url})
        said = evaluate.evaluate(layout, wanted, lambda _: None)
        first = files.read_manifest(layout.evaluate)
        count = len(server.got)
        evaluate.evaluate(layout, wanted, lambda _: None)
        assert len(server.got) == count, "verdicts are kept"
    files.verify_sealed(layout.evaluate, "evaluation")
    assert files.read_manifest(layout.evaluate) == first
    found = EvaluationReport.load(layout.eval_report)
    assert found.judged is not None and set(found.judged.comparisons) == {"base"}
    one = found.judged.comparisons["base"]
    assert one.rows == 8 and one.wins + one.ties + one.losses == 8
    assert found.judged.questions == count == 2 * (8 - one.equal)
    assert "judge: candidate and base, 8 rows; win rate" in said
    assert "there is no champion to compare with" in said
    lines = list(base.read_lines(layout.evaluate / judged_file("base")))
    assert [line["id"] for line in lines] == sorted(line["id"] for line in lines)
    assert (found.contracts, found.scores) == (plain.contracts, plain.scores)

    with pytest.raises(EndpointError):
        evaluate.evaluate(layout, wanted, lambda _: None)
    assert files.read_manifest(layout.evaluate) == first, "the last evaluation stays"
    with pytest.raises(SettingsError, match="no file x below"):
        evaluate.evaluate(layout, params_file.apply_changes(wanted, {"evaluate.judge.rubric": "x"}), lambda _: None)
