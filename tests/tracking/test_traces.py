"""Tests generated answers in MLflow: each is one trace of the run, with its scores and the judge's verdicts."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow import traces
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.traces import EvaluatedAnswer, JudgeVerdict

ANSWERS = [
    EvaluatedAnswer(
        f"row{number}", "candidate", f"question {number}", f"answer {number}", "expected", {"accuracy": float(number)},
        {"base": JudgeVerdict(0.5, "both are right")},
    )
    for number in range(3)
]  # fmt: skip


@pytest.fixture
def tracker(tracked_project: ProjectLayout) -> MlflowTracker:
    tracker = MlflowTracker(tracked_project, "runs")
    tracker.find_or_create("run-a", 1000)
    return tracker


def stored(tracker: MlflowTracker) -> list[Any]:
    with tracker.connected() as client:
        found = client.search_traces(locations=[tracker.id], run_id=tracker.find("run-a").info.run_id)
    return sorted(found, key=lambda trace: trace.info.client_request_id)


def test_an_answer_is_a_trace_with_its_assessments(tracker: MlflowTracker) -> None:
    for _ in range(2):
        tracker.report_answers("run-a", ANSWERS, grace_s=100)
    found = stored(tracker)
    assert [trace.info.client_request_id for trace in found] == ["row0", "row1", "row2"]
    [span] = found[1].data.spans
    assert (span.inputs, span.outputs) == ({"messages": [{"role": "user", "content": "question 1"}]}, "answer 1")
    assert (found[1].info.request_preview, found[1].info.response_preview) == ("question 1", "answer 1")
    assessments = {one.name: one for one in found[1].info.assessments}
    assert {name: one.value for name, one in assessments.items()} == {
        "expected_response": "expected", "accuracy": 1.0, "judge/base": 0.5
    }  # fmt: skip
    assert assessments["judge/base"].source.source_type == "LLM_JUDGE"
    assert assessments["judge/base"].rationale == "both are right"
    assert json.dumps(found[1].to_dict())


def test_a_new_evaluation_replaces_the_traces(tracker: MlflowTracker) -> None:
    tracker.report_answers("run-a", ANSWERS, grace_s=100)
    tracker.report_answers("run-a", [replace(ANSWERS[0], answer="another"), ANSWERS[1]], grace_s=100)
    assert [trace.info.response_preview for trace in stored(tracker)] == ["another", "answer 1"]
    tracker.report_answers("run-a", [], grace_s=100)
    assert stored(tracker) == []


def test_an_interrupted_report_is_continued(
    tracker: MlflowTracker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    send, count = traces._send, 0

    def fail_at_the_second(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise ConnectionError("the network is gone")
        send(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(traces, "_send", fail_at_the_second)
        tracker.report_answers("run-a", ANSWERS, grace_s=100)
    assert "generated answers are not logged to MLflow" in capsys.readouterr().err
    assert len(stored(tracker)) == 1
    tracker.report_answers("run-a", ANSWERS, grace_s=100)
    assert [len(trace.info.assessments) for trace in stored(tracker)] == [3, 3, 3]


def test_secrets_are_hidden(tracker: MlflowTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "planted pass 88")
    tracker.report_answers("run-a", [replace(ANSWERS[0], prompt="say planted pass 88")], grace_s=100)
    [trace] = stored(tracker)
    assert "planted" not in json.dumps(trace.to_dict())
