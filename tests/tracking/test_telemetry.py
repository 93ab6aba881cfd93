"""Tests the trace of a command with a real collector, and bug reports with a server in the place of Sentry."""

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import receiver
import tiny_project
from journaled import attempt, journal, opened
from ratchet.cli import status
from ratchet.cli.main import main
from ratchet.errors import RunFailedError
from ratchet.redaction import HIDDEN
from ratchet.runs.callbacks import CallbackList
from ratchet.runs.directory import list_runs
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking import telemetry
from receiver import Receiver

PACKAGES = ("tracking", "cli")
ENDPOINT, DSN = "OTEL_EXPORTER_OTLP_ENDPOINT", "SENTRY_DSN"
SECRET = "planted-token-4711"  # noqa: S105
ROW = "my parcel never came"
"""Stands for a row of the data."""


def spans(collector: Receiver) -> dict[str, Span]:
    """Return the spans that a collector has received, by name."""
    found = {}
    for path, _, body in collector.got:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert ("service.name", "ratchet") in {(a.key, a.value.string_value) for a in resource.resource.attributes}
            found |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    return found


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def address(server: Receiver) -> str:
    return f"http://127.0.0.1:{server.port}"


def run(layout: ProjectLayout, command: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> int:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return main(["--project", str(layout.root), command])


@pytest.mark.usefixtures("calm")
def test_a_command_is_a_span_within_the_trace_of_its_caller(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = {"TRACEPARENT": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    with receiver.served(200) as collector:
        assert run(project, "status", monkeypatch, **{ENDPOINT: address(collector)}, **parent) == 0
        assert run(project, "train", monkeypatch) == 2
    found = spans(collector)
    assert set(found) == {"ratchet status", "ratchet train"}
    assert found["ratchet status"].trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert found["ratchet status"].parent_span_id.hex() == "00f067aa0ba902b7"
    expected = {"ratchet.command": "train", "ratchet.exit_code": 2, "error.type": "DataError"}
    assert expected.items() <= attributes(found["ratchet train"]).items()
    codes = [found[name].status.code for name in ("ratchet status", "ratchet train")]
    assert codes == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]


def test_attempts_of_this_process_are_children_with_their_times_and_failures(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver.served(200) as collector, closing(opened(project)) as run:
        attempt(run, 1, 1, 3)  # of an earlier process
        monkeypatch.setenv(ENDPOINT, address(collector))
        close = telemetry.open_report("train")
        callback = telemetry.create_callback(run.spec.run_id)
        assert callback is not None
        callbacks = CallbackList([callback], run.journal)
        callbacks.start()
        attempt(run, 2, 1, 5, pid=os.getpid())
        run.journal.append("worker_exited", exit_code=-9, failure_class="killed", decision="Retry", text=ROW)
        attempt(run, 3, 4, 8, pid=os.getpid())
        run.journal.append("finished", step=8, reason="completed", adapter_digest="a")
        callbacks.end("FINISHED", 60)
        assert close(0, None) == 0
        events = journal(run)
    found = spans(collector)
    assert set(found) == {"ratchet train", "attempt 2", "attempt 3"}
    root, second = found["ratchet train"], found["attempt 2"]
    assert second.parent_span_id == root.span_id
    assert attributes(root)["ratchet.run_id"] == run.spec.run_id
    assert attributes(second) == {
        "ratchet.run_id": run.spec.run_id, "ratchet.attempt": 2, "ratchet.step": 5, "error.type": "killed",
    }  # fmt: skip
    assert attributes(found["attempt 3"])["ratchet.step"] == 8
    [ended] = [event.t for event in events if event.kind == "worker_exited"]
    assert second.end_time_unix_nano == round(ended * 1e9)
    assert all(ROW.encode() not in body for _, _, body in collector.got)


@pytest.mark.long
def test_a_training_is_traced_with_its_attempts(tmp_path: Path) -> None:
    train = tiny_project.TRAIN.model_copy(update={"epochs": 0.25})
    machine = tiny_project.MACHINE.model_copy(update={"loggers": ("json_lines",)})
    layout = tiny_project.prepared(
        tmp_path / "project", tiny_project.SETTINGS.model_copy(update={"train": train, "machine": machine})
    )
    fault = {"RATCHET_FAULTS": json.dumps([{"kind": "die", "step": 2, "mark": "died"}])}
    with receiver.served(200) as collector:
        done = subprocess.run(
            tiny_project.command("train"), cwd=layout.root, capture_output=True, text=True, check=False,
            env=tiny_project.environment() | fault | {ENDPOINT: address(collector)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = spans(collector)
    [paths] = list_runs(layout.runs)
    assert set(found) == {"ratchet train", "attempt 1", "attempt 2"}
    assert attributes(found["attempt 1"])["error.type"] == "killed"
    assert {attributes(span)["ratchet.run_id"] for span in found.values()} == {paths.root.name}


def fail_with_row(arguments: object) -> None:
    """Stand for a command with a bug."""
    row = ROW
    try:
        raise KeyError(row)
    except KeyError as error:
        telemetry.annotate(run_id=SECRET)
        raise ValueError(f"cannot use {row} with {SECRET}") from error


def read_events(server: Receiver) -> list[dict[str, Any]]:
    """Return the events in the envelopes that the server has received."""
    found = []
    for path, headers, body in server.got:
        assert path == "/api/42/envelope/"
        content = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        found.append(json.loads(content.splitlines()[2]))
    return found


def dsn(server: Receiver) -> str:
    return f"http://0123456789abcdef0123456789abcdef@127.0.0.1:{server.port}/42"


@pytest.mark.usefixtures("calm")
def test_a_bug_is_sent_to_sentry_without_data_and_secrets(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "run", fail_with_row)
    with receiver.served(200) as server, pytest.raises(ValueError, match=ROW):
        run(project, "status", monkeypatch, SENTRY_DSN=dsn(server), MY_TOKEN=SECRET)
    [event] = read_events(server)
    exceptions = event["exception"]["values"]
    assert [value["type"] for value in exceptions] == ["KeyError", "ValueError"]
    assert {value["value"] for value in exceptions} == {HIDDEN}
    assert exceptions[1]["stacktrace"]["frames"][-1]["function"] == "fail_with_row"
    assert event["tags"]["ratchet.command"] == "status"
    assert event["tags"]["ratchet.run_id"] == HIDDEN
    sent = json.dumps(event)
    for private in (ROW, SECRET, "cannot use", socket.gethostname() + '"', str(Path.home()), sys.argv[0]):
        assert private not in sent
    assert not {"server_name", "modules", "extra", "breadcrumbs", "user", "request"} & event.keys()


@pytest.mark.usefixtures("calm")
def test_only_failures_with_exit_code_1_are_sent_to_sentry(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(arguments: object) -> None:
        raise RunFailedError(f"run 1: bug: {ROW}")

    with receiver.served(200) as server:
        assert run(project, "train", monkeypatch, SENTRY_DSN=dsn(server)) == 2  # there are no data
        assert server.got == []
        monkeypatch.setattr(status, "run", give_up)
        assert run(project, "status", monkeypatch) == 1
    assert [value["type"] for value in read_events(server)[0]["exception"]["values"]] == ["RunFailedError"]


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(
    "answers", [(receiver.STALLS,), (receiver.HANGS_UP,), (500,)], ids=["stalls", "hangs up", "500"]
)
def test_a_service_that_does_not_answer_neither_delays_nor_changes_a_command(
    answers: Sequence[int], project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry, "SEND_TIMEOUT_S", 0.5)
    with receiver.served(*answers) as server:
        began_s = time.monotonic()
        assert run(project, "status", monkeypatch, **{ENDPOINT: address(server)}) == 0
        assert time.monotonic() - began_s < 60
    monkeypatch.setattr(status, "run", fail_with_row)
    with receiver.served(*answers) as server, pytest.raises(ValueError, match=ROW):
        monkeypatch.delenv(ENDPOINT)
        run(project, "status", monkeypatch, SENTRY_DSN=dsn(server))
    lines = [line for line in capsys.readouterr().err.splitlines() if "nothing is sent" in line]
    assert [line.split(": ")[:3] for line in lines] == [
        ["ratchet", service, "nothing is sent"] for service in ("OpenTelemetry", "Sentry")
    ]


@pytest.mark.usefixtures("calm")
def test_wrong_addresses_are_reported_and_do_no_harm(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry, "SEND_TIMEOUT_S", 0.5)
    monkeypatch.setattr(status, "run", fail_with_row)
    with pytest.raises(ValueError, match=ROW):
        run(project, "status", monkeypatch, **{ENDPOINT: "nonsense", DSN: "nonsense"})
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ratchet: ")]
    assert [line.split(": ")[1] for line in lines] == ["Sentry", "OpenTelemetry"]
    assert lines[1].endswith(f"check {ENDPOINT}")


def test_without_the_variables_nothing_is_imported(project: ProjectLayout) -> None:
    code = (
        "import sys; from ratchet.cli.main import main; assert main(sys.argv[1:]) == 0; "
        "print([name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'sentry_sdk') "
        "or name == 'ratchet.tracking.telemetry'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in (ENDPOINT, DSN)}
    command = [sys.executable, "-c", code, "--project", str(project.root), "status"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"
