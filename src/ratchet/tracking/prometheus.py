"""Exports metrics of a run to Prometheus: over HTTP, as a file for node_exporter's textfile collector, or both.

A callback computes the current values from the journal (runs/prometheus_series.py); scrapes and the file writer read
them. All of this runs in the supervisor, not in the worker. The module is imported only if the settings enable it.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from ratchet.config.machine import Machine
from ratchet.errors import SettingsError, StorageError
from ratchet.runs.callbacks import Status
from ratchet.runs.job_queue import JobQueue
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import print_message
from ratchet.runs.prometheus_series import METRICS, STEP_SECONDS, VERDICTS, PrometheusSample, PrometheusSeries
from ratchet.storage import files
from ratchet.storage.records.gate import Verdict

QUEUE_JOBS = "ratchet_queue_jobs"
"""Metric of `ratchet queue --export-metrics`; all others are about a run (`METRICS`)."""
WRITE_EVERY_S = 15.0
"""Seconds between two writes of the file, which is the usual scrape interval of Prometheus."""


class RunMetricsCollector(Collector):
    """Callback of one run that is also a collector of prometheus_client.

    `on_last_values` is called at the end of the run, when the values are final.
    """

    name = "prometheus"

    def __init__(self, run: str, project: str, machine: Machine, on_last_values: Callable[[Status], None]) -> None:
        self._run, self._project, self._on_last_values = run, project, on_last_values
        self._series = PrometheusSeries(machine)
        self._mutex = threading.Lock()

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Update the values by the next events."""
        with self._mutex:  # a scrape in the middle of a replayed journal would see counters decrease
            for event in events:
                self._series.update(event)

    def on_end(self, status: Status) -> None:
        """Set the final values, then call `on_last_values`, which may wait until they are scraped."""
        with self._mutex:
            self._series.end(status)
        self._on_last_values(status)

    def collect(self) -> Iterator[Family]:
        """Yield all values as prometheus_client expects them; none before the first event."""
        with self._mutex:
            if not self._series.progress.last_t:
                return
            samples, (buckets, seconds) = list(self._series.samples()), self._series.step_durations()
        samples = [
            sample._replace(labels=sample.labels | {"project": self._project})
            if "project" in METRICS[sample.name].labels
            else sample
            for sample in samples
        ]
        yield from _group_families(self._run, samples)
        steps = Family(STEP_SECONDS, METRICS[STEP_SECONDS].help, "histogram")
        for bound, count in buckets:
            steps.add_sample(f"{STEP_SECONDS}_bucket", {"run": self._run, "le": bound}, count)
        steps.add_sample(f"{STEP_SECONDS}_count", {"run": self._run}, buckets[-1][1])
        steps.add_sample(f"{STEP_SECONDS}_sum", {"run": self._run}, seconds)
        yield steps


class PrometheusExporter:
    """The HTTP port and the file of this process, if the settings enable them.

    Raises:
        SettingsError: the port is in use or cannot be bound.
        StorageError: the file cannot be written.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._registry = CollectorRegistry()
        self._writer = None
        if machine.metrics_file is not None:
            path = Path(machine.metrics_file)
            if not path.parent.is_dir():
                raise StorageError(
                    f"machine.metrics_file: {path.parent} is not a directory; create it, or set another file"
                )
            if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
                raise StorageError(
                    f"machine.metrics_file: {path} cannot be written; change its permissions, or set another"
                )
            self._writer = _MetricsFileWriter(path, self._registry)
        port = machine.metrics_port
        self._server = None if port is None else _MetricsServer(machine.metrics_host, port, self._registry)
        if self._writer:
            self._writer.start()

    def create_callback(self, run: str, project: str) -> RunMetricsCollector:
        """Create the callback of the run to export. Call this once per process."""
        collector = RunMetricsCollector(run, project, self._machine, self._export_last_values)
        self._registry.register(collector)
        return collector

    def add_queue(self, queue: JobQueue) -> None:
        """Export the number of jobs of a queue."""
        self._registry.register(QueueCollector(queue))

    def close(self) -> None:
        """Stop the server and the writer. The file is kept."""
        if self._server:
            self._server.close()
        if self._writer:
            self._writer.end()

    def _export_last_values(self, status: Status) -> None:
        """Write the last values. Then wait for a scrape of them, at most `machine.metrics_scrape_wait_s`.

        There is no wait after a request to stop, or if there was no recent scrape.
        """
        if self._writer:
            self._writer.write()
        if self._server and status != "KILLED":
            self._server.wait_for_fetch(self._machine.metrics_scrape_wait_s)


class QueueCollector(Collector):
    """Reads the number of jobs from the queue at each scrape. If the database does not answer, the scrape fails."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Family]:
        """Yield the number of jobs in each state."""
        jobs = Family(QUEUE_JOBS, "Jobs of the queue, by state", "gauge")
        for state, count in self._queue.count_states().items():
            jobs.add_sample(QUEUE_JOBS, {"queue": self._queue.name, "state": state}, count)
        yield jobs


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write the gate's verdict to a metrics file next to `path` (`machine.metrics_file`), with `-gate` in its name.

    A failure is printed on standard error.
    """

    class VerdictCollector(Collector):
        def collect(self) -> Iterator[Family]:
            decision = [
                PrometheusSample("ratchet_gate_verdict", {"verdict": v}, float(v == verdict.decision)) for v in VERDICTS
            ]
            timestamp = PrometheusSample("ratchet_gate_timestamp_seconds", {}, round(time.time(), 3))
            return _group_families(verdict.run_id, [*decision, timestamp])

    registry = CollectorRegistry()
    registry.register(VerdictCollector())
    _MetricsFileWriter(path.with_name(f"{path.stem}-gate{path.suffix}"), registry).write()


def _group_families(run: str, samples: Iterable[PrometheusSample]) -> Iterator[Family]:
    """Group samples of the same name into families."""
    families: dict[str, Family] = {}
    for name, labels, value in samples:
        if name not in families:
            metric = METRICS[name]
            family_name = name.removesuffix("_total") if metric.kind == "counter" else name
            families[name] = Family(family_name, metric.help, metric.kind)
        families[name].add_sample(name, {"run": run, **labels}, value)
    return iter(families.values())


class _MetricsResponse(list[bytes]):
    """Body of a response. The server calls `close` after it has sent the body."""

    def __init__(self, blocks: Iterable[bytes], on_sent: Callable[[], None]) -> None:
        super().__init__(blocks)
        self.close = on_sent


class _MetricsServer:
    """HTTP server of prometheus_client with a thread for each request, which notes when a scrape is complete.

    Raises SettingsError if the port cannot be bound.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self._fetched_s: float | None = None
        """Time of the last completed scrape, by time.monotonic()."""
        self._has_ended = False
        self._last_values_sent = threading.Event()
        try:
            self._server, _ = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingsError(
                    f"machine.metrics_port: {port} of {host} is in use by another process (another training on this "
                    "machine?); set another port, or null"
                ) from None
            raise SettingsError(
                f"machine.metrics_host, machine.metrics_port: cannot bind {host}, port {port} "
                f"({error.strerror or error}); set an address of this machine and a port >= 1024"
            ) from None
        self._application: Any = self._server.get_app()
        self._server.set_app(self._serve)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def wait_for_fetch(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for a scrape of the last values. Return at once if the last scrape is older than
        that."""
        self._has_ended = True
        if self._fetched_s is not None and time.monotonic() - self._fetched_s <= wait_s:
            self._last_values_sent.wait(wait_s)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> _MetricsResponse:
        has_ended = self._has_ended

        def on_sent() -> None:
            self._fetched_s = time.monotonic()
            if has_ended:
                self._last_values_sent.set()

        return _MetricsResponse(self._application(environ, start_response), on_sent)


class _MetricsFileWriter(threading.Thread):
    """Thread that writes the metrics file periodically."""

    def __init__(self, path: Path, registry: CollectorRegistry) -> None:
        super().__init__(name="metrics-file", daemon=True)
        self._path, self._registry = path, registry
        self._ended = threading.Event()
        self._mutex = threading.Lock()
        self._is_failure_reported = False

    def run(self) -> None:
        while not self._ended.wait(WRITE_EVERY_S):
            self.write()

    def write(self) -> None:
        """Write the file now. Only the first failure of this process is printed."""
        with self._mutex:
            try:
                files.write_atomic(self._path, generate_latest(self._registry))
            except OSError as error:
                if not self._is_failure_reported:
                    self._is_failure_reported = True
                    print_message(f"{self._path} cannot be written ({error.strerror}); training continues")

    def end(self) -> None:
        """Stop writing."""
        self._ended.set()
