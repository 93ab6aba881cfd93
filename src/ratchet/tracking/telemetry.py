"""Reports commands to other services: a trace of each command (OpenTelemetry), and failures that may be bugs (Sentry).

Standard variables of the environment enable both; without them, no library is imported. Neither service receives the
message of an exception, a local variable or a line of a log, because these may quote rows of the data.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from ratchet.config.extras import DISTRIBUTION, SENTRY_VARIABLE, TRACE_VARIABLES, explained_imports
from ratchet.errors import EXIT_BUG, EXIT_INPUT, first_line
from ratchet.redaction import HIDDEN, redact
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import print_message

SEND_TIMEOUT_S = 3.0
"""Maximum wait for each of the two services at the end of a command."""
SENTRY_KEYS = (
    "event_id", "timestamp", "level", "platform", "exception", "tags", "release", "environment", "sdk",
)  # fmt: skip
"""Parts of an event that are sent to Sentry."""
FRAME_KEYS = ("filename", "function", "module", "lineno", "in_app")
"""Parts of a stack frame that are sent to Sentry."""

Attribute = str | int


class CommandReport:
    """Report of the command that this process runs. A service that fails is reported in one line, and does no harm."""

    def __init__(self, command: str) -> None:
        self._attributes: dict[str, Attribute] = {"ratchet.command": command, "ratchet.version": version(DISTRIBUTION)}
        self._trace: _Trace | None = None
        if any(map(os.environ.get, TRACE_VARIABLES)):
            self._try("OpenTelemetry", self._start_trace)

    def annotate(self, **attributes: Attribute) -> None:
        """Add attributes to the trace and to what is sent to Sentry."""
        self._attributes |= {f"ratchet.{name}": value for name, value in attributes.items()}

    def start_attempt(self, number: int, t: float) -> Any:
        """Start the span of an attempt of the run that the command supervises; None if there is no trace."""
        if self._trace is None:
            return None
        identity = {key: value for key, value in self._attributes.items() if key == "ratchet.run_id"}
        return self._trace.start_child(f"attempt {number}", t, identity | {"ratchet.attempt": number})

    def send(self, exit_code: int, error: BaseException | None) -> None:
        """Send the report at the end of the command."""
        self.annotate(exit_code=exit_code)
        if exit_code == EXIT_BUG and error is not None and os.environ.get(SENTRY_VARIABLE):
            self._try("Sentry", lambda: _send_to_sentry(error, self._attributes))
        if (trace := self._trace) is not None:
            self._try("OpenTelemetry", lambda: trace.end(exit_code, error, self._attributes))

    @explained_imports()
    def _start_trace(self) -> None:
        self._trace = _Trace(f"ratchet {self._attributes['ratchet.command']}")

    def _try(self, service: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a library of the service may raise anything
            print_message(f"{service}: nothing is sent: {first_line(error)}")


_current: CommandReport | None = None


def open_report(command: str) -> Callable[[int, BaseException | None], int]:
    """Begin to report a command. Returns a function that sends the report for an exit code, and returns the code."""
    global _current  # noqa: PLW0603 (a process runs one command)
    _current = report = CommandReport(command)

    def close(exit_code: int, error: BaseException | None) -> int:
        global _current  # noqa: PLW0603
        _current = None
        report.send(exit_code, error)
        return exit_code

    return close


def annotate(**attributes: Attribute) -> None:
    """Add attributes to the report of this command, such as `run_id`. Without a report, nothing happens."""
    if _current is not None:
        _current.annotate(**attributes)


def create_callback(run_id: str) -> "TelemetryCallback | None":
    """Create the callback of a run for the report of this command; None without a report."""
    if _current is None:
        return None
    _current.annotate(run_id=run_id)
    return TelemetryCallback(_current)


class TelemetryCallback:
    """Callback that adds the attempts of this process to the trace, and the class of the last failure to the report."""

    name = "telemetry"

    def __init__(self, report: CommandReport) -> None:
        self._report = report
        self._began_t = round(time.time(), 3)
        self._is_own_attempt = False
        self._span: Any = None
        self._step = 0

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Start and end spans. Attempts of earlier processes were reported by these."""
        for event in events:
            if event.kind == "attempt_started":
                self._is_own_attempt = event.data.get("pid") == os.getpid() and event.t >= self._began_t
                if self._is_own_attempt:
                    self._span = self._report.start_attempt(event.attempt, event.t)
            elif not self._is_own_attempt:
                continue
            elif event.kind == "step":
                self._step = event.data["step"]
            elif event.kind in ("worker_exited", "finished", "interrupted"):
                failure = str(event.data.get("failure_class", ""))
                if failure:
                    self._report.annotate(failure_class=failure)
                self._end_span(event.t, failure)

    def on_end(self, status: Status) -> None:
        """End the span of an attempt whose end is not in the journal."""
        self._end_span(time.time(), "")

    def _end_span(self, t: float, failure: str) -> None:
        if self._span is None:
            return
        self._span.set_attribute("ratchet.step", self._step)
        if failure:
            self._span.set_attribute("error.type", failure)
        self._span.end(round(t * 1e9))
        self._span = None


class _Trace:
    """Trace of a command. Its parent is the span in the variable TRACEPARENT, if there is one."""

    def __init__(self, name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._failures: list[int] = []
        failures = self._failures

        class ReportingExporter(OTLPSpanExporter):  # type: ignore[misc]
            """Exporter that remembers failures, which the library only logs."""

            def export(self, spans: Any) -> Any:
                result = super().export(spans)
                if result is not SpanExportResult.SUCCESS:
                    failures.append(len(spans))
                return result

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `end` reports a failure in one line
        service = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "ratchet"}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(ReportingExporter(timeout=SEND_TIMEOUT_S)))
        self._tracer = self._provider.get_tracer("ratchet", version(DISTRIBUTION))
        parent = TraceContextTextMapPropagator().extract({"traceparent": os.environ.get("TRACEPARENT", "")})
        self._span = self._tracer.start_span(name, parent)
        self._context = set_span_in_context(self._span)

    def start_child(self, name: str, t: float, attributes: dict[str, Attribute]) -> Any:
        """Start a span within that of the command."""
        return self._tracer.start_span(name, self._context, attributes=attributes, start_time=round(t * 1e9))

    def end(self, exit_code: int, error: BaseException | None, attributes: dict[str, Attribute]) -> None:
        """End the trace and send the rest of it. Raises TimeoutError or ConnectionError if that fails."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
        if exit_code in (EXIT_BUG, EXIT_INPUT):
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
        thread = threading.Thread(target=self._provider.shutdown, name="telemetry", daemon=True)
        thread.start()
        thread.join(SEND_TIMEOUT_S)
        if thread.is_alive():
            raise TimeoutError(f"no answer within {SEND_TIMEOUT_S:g} s")
        if self._failures:
            variable = next(name for name in reversed(TRACE_VARIABLES) if os.environ.get(name))
            raise ConnectionError(f"no service that accepts traces was reached; check {variable}")


@explained_imports()
def _send_to_sentry(error: BaseException, attributes: dict[str, Attribute]) -> None:
    """Send an exception with its causes. Raises ConnectionError if that fails."""
    from sentry_sdk import Client
    from sentry_sdk.utils import event_from_exception

    failures: list[str] = []
    client = Client(
        dsn=os.environ[SENTRY_VARIABLE], default_integrations=False, auto_enabling_integrations=False,
        include_local_variables=False, include_source_context=False, max_breadcrumbs=0,
        send_client_reports=False, before_send=_strip_event,
        release=os.environ.get("SENTRY_RELEASE", f"{DISTRIBUTION}@{version(DISTRIBUTION)}"),
    )  # fmt: skip
    if client.transport is not None:
        client.transport.on_dropped_event = failures.append
    event, hint = event_from_exception(error, client_options=client.options)
    client.capture_event(event | {"tags": attributes}, hint)
    client.flush(SEND_TIMEOUT_S, lambda pending, timeout_s: failures.append(f"no answer within {timeout_s:g} s"))
    if failures:
        raise ConnectionError(failures[0])


def _strip_event(event: Any, hint: Any) -> Any:
    """Return the parts of an event that have neither data nor secrets: types of exceptions and places in the code."""
    for value in event["exception"]["values"]:
        value["value"] = HIDDEN
        frames = value.get("stacktrace", {}).get("frames", ())
        value["stacktrace"] = {"frames": [{key: frame.get(key) for key in FRAME_KEYS} for frame in frames]}
    return _redact_texts({key: event[key] for key in SENTRY_KEYS if key in event})


def _redact_texts(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: _redact_texts(item) for key, item in value.items()}
    return [_redact_texts(item) for item in value] if isinstance(value, list | tuple) else value
