"""Logs generated answers of stage evaluate as traces of their run: question, answer, expected answer, scores, verdicts.

The scores and the judge's verdicts are assessments of a trace, which MLflow shows as columns of the tab "Traces" of the
run. No model is called. Ids are digests of the content, so a repeated call adds nothing. The run's tag ANSWERS_TAG is
written last.

MLflow's functions for traces export through a provider that is global to the process, and create random ids. So the
client below the provider is used (MLflow 3.17, mlflow/tracing/client.py).
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ratchet.data.request_log import LoggedRequest, parse_request
from ratchet.errors import DataError
from ratchet.redaction import redact
from ratchet.storage import digests
from ratchet.tracking.mlflow.experiments import Experiment, MlflowStore

ANSWERS_TAG = "ratchet.answers_digest"
"""Digest of the answers whose traces are complete."""
ANSWER = "answer"
PREVIEW_CHARACTERS = 1000
LABEL_WINDOW_MS = 7 * 24 * 3600 * 1000
"""Traces are read again for this long, because people assess answers later."""
TRACES_PER_PAGE = 100


@dataclass(frozen=True)
class JudgeVerdict:
    """The judge's verdict about an answer, compared with that of another model."""

    score: float
    """1: preferred in both orders, 0: in neither."""
    replies: str
    """Replies of the judge."""


@dataclass(frozen=True)
class EvaluatedAnswer:
    """A generated answer to a test row."""

    row_id: str
    model: str
    """Role of the model: candidate or merged."""
    prompt: str
    answer: str
    expected: str
    scores: Mapping[str, float] = field(default_factory=dict)
    verdicts: Mapping[str, JudgeVerdict] = field(default_factory=dict)
    """Verdicts by the other model's role."""


def log_answers(experiment: Experiment, client: Any, run: Any, answers: Sequence[EvaluatedAnswer]) -> None:
    """Log traces of the answers to MLflow's run. Traces of its earlier answers are removed.

    Raises:
        MlflowException, OSError: MLflow cannot be written; a repeated call adds what is missing.
    """
    digest = digests.hash_json([asdict(answer) for answer in answers])
    if run.data.tags.get(ANSWERS_TAG) == digest:
        return
    from mlflow.tracing.client import TracingClient

    tracing = TracingClient(client.tracking_uri)
    ids = {f"tr-{_hash(run.info.run_id, json.dumps(asdict(answer)))}": answer for answer in answers}
    stored = _find_traces(client, experiment.id, run.info.run_id)
    if old := sorted(stored - ids.keys()):
        client.delete_traces(experiment.id, trace_ids=old)
    # A trace that is stored already may lack its data, so all are sent again after an interruption.
    time_ms = int(run.info.end_time or run.info.start_time)
    experiment.call_all([partial(_send, tracing, experiment.id, run, time_ms, *item) for item in ids.items()])
    client.set_tag(run.info.run_id, ANSWERS_TAG, digest)


def _find_traces(client: Any, experiment_id: str, mlflow_id: str) -> set[str]:
    """Return the ids of the run's traces of answers."""
    found: set[str] = set()
    token = None
    while True:
        page = client.search_traces(
            locations=[experiment_id],
            filter_string=f"trace.name = '{ANSWER}'",
            run_id=mlflow_id,
            max_results=500,
            page_token=token,
            include_spans=False,
        )
        found.update(trace.info.trace_id for trace in page)
        token = page.token
        if not token:
            return found


def _send(tracing: Any, experiment_id: str, run: Any, time_ms: int, trace_id: str, answer: EvaluatedAnswer) -> None:
    """Send a trace with its only span."""
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey
    from mlflow.tracing.utils.artifact_utils import get_artifact_uri_for_trace

    request = {"messages": [{"role": "user", "content": redact(answer.prompt)}]}
    response = redact(answer.answer)
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=time_ms,
        state=TraceState.OK,
        request_preview=request["messages"][0]["content"][:PREVIEW_CHARACTERS],
        response_preview=response[:PREVIEW_CHARACTERS],
        client_request_id=answer.row_id,
        execution_duration=0,
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run.info.run_id},
        tags={TraceTagKey.TRACE_NAME: ANSWER, "ratchet.model": answer.model, "ratchet.row": answer.row_id},
        assessments=_assess(trace_id, answer, time_ms),
    )
    attributes = {
        SpanAttributeKey.REQUEST_ID: trace_id,
        SpanAttributeKey.SPAN_TYPE: "CHAT_MODEL",
        SpanAttributeKey.INPUTS: request,
        SpanAttributeKey.OUTPUTS: response,
    }
    span: dict[str, Any] = {
        "trace_id": base64.b64encode(bytes.fromhex(trace_id[3:])).decode(),
        "span_id": base64.b64encode(bytes.fromhex(trace_id[3:19])).decode(),
        "parent_span_id": None, "name": ANSWER, "start_time_unix_nano": time_ms * 10**6,
        "end_time_unix_nano": time_ms * 10**6, "status": {"code": "STATUS_CODE_OK", "message": ""}, "events": [],
        "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in attributes.items()},
    }  # fmt: skip
    # MLflow's own function for this would look for the files at the global address.
    location = get_artifact_uri_for_trace(tracing.start_trace(info))
    repository = get_artifact_repository(location, tracking_uri=tracing.tracking_uri)
    repository.upload_trace_data(json.dumps({"spans": [span]}, ensure_ascii=False))


def _assess(trace_id: str, answer: EvaluatedAnswer, time_ms: int) -> list[Any]:
    """Build the assessments of an answer. Their ids are digests, so a repeated trace has each of them once."""
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    origin: dict[str, Any] = {"trace_id": trace_id, "create_time_ms": time_ms, "last_update_time_ms": time_ms}
    code = AssessmentSource("CODE", "ratchet evaluate")
    judge = AssessmentSource("LLM_JUDGE", "evaluate.judge")
    assessments: list[Any] = [Expectation("expected_response", redact(answer.expected), source=code, **origin)]
    assessments += [Feedback(name, value, source=code, **origin) for name, value in answer.scores.items()]
    assessments += [
        Feedback(f"judge/{role}", verdict.score, source=judge, rationale=redact(verdict.replies), **origin)
        for role, verdict in answer.verdicts.items()
    ]
    for assessment in assessments:
        assessment.assessment_id = f"a-{_hash(trace_id, assessment.name)}"
    return assessments


def _hash(*parts: str) -> str:
    """Return 32 hex digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class LoggedTrace:
    """A trace of a request to a deployed model."""

    id: str
    time_ms: int
    """Unix time of the request in milliseconds."""
    request: LoggedRequest | None
    problem: str = ""
    """Reason why the trace is no request."""


def read_requests(store: MlflowStore, experiment: str, metric: str | None, since_ms: int) -> Iterator[LoggedTrace]:
    """Yield the complete traces of an experiment, the oldest first, from LABEL_WINDOW_MS before `since_ms` on.

    An assessment of the name `metric`, or `score`, is the score; `expected_response` is the right answer.

    Raises:
        DataError: MLflow has no experiment of this name.
        TrackingError: MLflow cannot be read.
    """
    with store.connected() as client:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            raise DataError(f"mlflow:{experiment}: {store.where} has no experiment of this name")
        token = None
        while True:
            page = client.search_traces(
                locations=[found.experiment_id],
                filter_string=f"trace.timestamp_ms >= {max(0, since_ms - LABEL_WINDOW_MS)}",
                order_by=["timestamp_ms ASC"], max_results=TRACES_PER_PAGE, page_token=token,
            )  # fmt: skip
            for trace in page:
                if trace.info.state != "IN_PROGRESS":
                    yield _read_trace(trace, metric)
            token = page.token
            if not token:
                return


def _read_trace(trace: Any, metric: str | None) -> LoggedTrace:
    info = trace.info
    root = next((span for span in trace.data.spans if span.parent_id is None), None)
    if root is None:
        return LoggedTrace(info.trace_id, info.request_time, None, "the trace has no span")
    inputs = root.inputs if isinstance(root.inputs, Mapping) else {"prompt": root.inputs}
    record = {"request": inputs, "response": root.outputs, "id": info.trace_id, "time": info.request_time}
    for assessment in info.assessments:
        if assessment.name in (metric, "score"):
            record["score"] = assessment.value
        elif assessment.name == "expected_response":
            record["reference"] = assessment.value
    try:
        return LoggedTrace(info.trace_id, info.request_time, parse_request(record))
    except ValueError as error:
        return LoggedTrace(info.trace_id, info.request_time, None, str(error))
