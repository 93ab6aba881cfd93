"""A run's figures for Prometheus: over HTTP, as a file for node_exporter's textfile collector, or both.

An observer folds the journal (run/series.py); whoever asks, a scrape or the writer of the file, gets what is folded so
far. All of it is in the supervisor: the worker neither waits for it nor knows of it. Imported only where it is asked
for.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from ratchet.config.schema import Machine
from ratchet.errors import SettingsError, StorageError
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import print_message
from ratchet.runs.prometheus_series import METRICS, STEP_SECONDS, VERDICTS, PrometheusSample, PrometheusSeries
from ratchet.storage import files
from ratchet.storage.records.gate import Verdict

WRITE_EVERY_S = 15.0
"""As often as Prometheus usually asks."""
CLIENT_TIMEOUT_S = 10.0
"""Who asks, and then neither reads nor writes for so long, is hung up on."""


class RunMetricsCollector(Collector):
    """What is known of one run: an observer of its journal, and a collector of prometheus_client.

    Args:
        run: its id, a label of every series.
        project: name of the project.
        machine: settings.
        ended: called with how the run has ended, when what is known will change no more.
    """

    name = "prometheus"

    def __init__(self, run: str, project: str, machine: Machine, ended: Callable[[Status], None]) -> None:
        self._run, self._project, self._ended = run, project, ended
        self._series = PrometheusSeries(machine)
        self._mutex = threading.Lock()

    def see(self, events: Sequence[JournalEvent]) -> None:
        """Take the next events."""
        with self._mutex:  # a scrape in the middle of an old journal would see counters that have gone back
            for event in events:
                self._series.see(event)

    def finish(self, status: Status) -> None:
        """The run has ended for now; returns when that has been fetched, or is not going to be."""
        with self._mutex:
            self._series.end(status)
        self._ended(status)

    def collect(self) -> Iterator[Family]:
        """All there is, as prometheus_client wants it; nothing before the journal was read."""
        with self._mutex:
            if not self._series.progress.last_t:
                return
            samples, (buckets, seconds) = list(self._series.samples()), self._series.step_durations()
        yield from _group_families(self._run, (self._placed(sample) for sample in samples))
        steps = Family(STEP_SECONDS, METRICS[STEP_SECONDS].help, "histogram")
        for bound, count in buckets:
            steps.add_sample(f"{STEP_SECONDS}_bucket", {"run": self._run, "le": bound}, count)
        steps.add_sample(f"{STEP_SECONDS}_count", {"run": self._run}, buckets[-1][1])
        steps.add_sample(f"{STEP_SECONDS}_sum", {"run": self._run}, seconds)
        yield steps

    def _placed(self, sample: PrometheusSample) -> PrometheusSample:
        if "project" not in METRICS[sample.name].labels:
            return sample
        return sample._replace(labels=sample.labels | {"project": self._project})


class PrometheusExporter:
    """The port and the file of this process, those of the two that the settings ask for.

    Raises:
        SettingsError: the port is taken or cannot be bound.
        StorageError: the file cannot be written.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._registry = CollectorRegistry()
        self._writer = _MetricsFileWriter.of(machine, self._registry)
        self._server = _MetricsServer.of(machine, self._registry)
        if self._server:
            threading.Thread(target=self._server.serve_forever, name="metrics-port", daemon=True).start()
        if self._writer:
            self._writer.start()

    def observer(self, run: str, project: str) -> RunMetricsCollector:
        """The observer of the run whose figures these are to be; one for each process."""
        figures = RunMetricsCollector(run, project, self._machine, self._tell_the_end)
        self._registry.register(figures)
        return figures

    def close(self) -> None:
        """No more answers; the file stays."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        if self._writer:
            self._writer.end()

    def _tell_the_end(self, status: Status) -> None:
        """Write the last figures, and wait until they are fetched, if somebody has been fetching them.

        Not after a request to stop: the time that is left then is short.
        """
        if self._writer:
            self._writer.write()
        if self._server and status != "KILLED":
            self._server.wait_for_fetch(self._machine.metrics_wait_s)


def write_verdict(path: Path, verdict: Verdict) -> None:
    """What the gate has decided, as a file of its own; one that cannot be written is told of on standard error.

    Args:
        path: `machine.metrics_file`; the file lies beside it, its name with `-gate`.
        verdict: the decision.
    """

    class Decision(Collector):
        def collect(self) -> Iterator[Family]:
            decided = [
                PrometheusSample("ratchet_gate_verdict", {"verdict": v}, float(v == verdict.decision)) for v in VERDICTS
            ]
            when = PrometheusSample("ratchet_gate_timestamp_seconds", {}, round(time.time(), 3))
            return _group_families(verdict.run_id, [*decided, when])

    registry = CollectorRegistry()
    registry.register(Decision())
    _MetricsFileWriter(path.with_name(f"{path.stem}-gate{path.suffix}"), registry).write()


def _group_families(run: str, samples: Iterable[PrometheusSample]) -> Iterator[Family]:
    """Samples of the same name are one family."""
    found: dict[str, Family] = {}
    for name, labels, value in samples:
        if name not in found:
            metric = METRICS[name]
            plain = name.removesuffix("_total") if metric.kind == "counter" else name
            found[name] = Family(plain, metric.help, metric.kind)
        found[name].add_sample(name, {"run": run, **labels}, value)
    return iter(found.values())


class _QuietMetricsRequest(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, *about: object) -> None:
        """Nobody reads it."""


class _MetricsResponse(list[bytes]):
    """The body of an answer; the server calls `close` when it has been sent."""

    def __init__(self, blocks: Iterable[bytes], sent: Callable[[], None]) -> None:
        super().__init__(blocks)
        self.close = sent


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread of its own, so that one that is slow delays no other."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _QuietMetricsRequest)
        self._fetched_s: float | None = None
        """By time.monotonic(): when somebody has got figures last."""
        self._ended = False
        self._end_fetched = threading.Event()
        self._application = make_wsgi_app(registry)
        self.set_app(self._serve)

    @classmethod
    def of(cls, machine: Machine, registry: CollectorRegistry) -> "_MetricsServer | None":
        """The server that the settings ask for. Raises SettingsError when there can be none."""
        port, host = machine.metrics_port, machine.metrics_host
        if port is None:
            return None
        try:
            return cls(host, port, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingsError(
                    f"machine.metrics_port: {port} of {host} is taken by another process (another training on this "
                    "machine?); take another port, or null"
                ) from None
            raise SettingsError(
                f"machine.metrics_host, machine.metrics_port: {host}, port {port} cannot be had "
                f"({error.strerror or error}); take an address of this machine and a port from 1024 on"
            ) from None

    def server_bind(self) -> None:
        """Without asking the network for our own name, which takes a while where nobody knows it."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, *about: object) -> None:
        """Who asked is gone: nobody's trouble."""

    def wait_for_fetch(self, wait_s: float) -> None:
        """Wait until figures from now on have been sent, if some were within the last `wait_s` seconds; no longer."""
        self._ended = True
        if self._fetched_s is not None and time.monotonic() - self._fetched_s <= wait_s:
            self._end_fetched.wait(wait_s)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> _MetricsResponse:
        ended = self._ended

        def sent() -> None:
            self._fetched_s = time.monotonic()
            if ended:
                self._end_fetched.set()

        return _MetricsResponse(self._application(environ, start_response), sent)


class _MetricsFileWriter(threading.Thread):
    """Writes the file every few seconds, in a thread of its own."""

    def __init__(self, path: Path, registry: CollectorRegistry) -> None:
        super().__init__(name="metrics-file", daemon=True)
        self._path, self._registry = path, registry
        self._over = threading.Event()
        self._mutex = threading.Lock()
        self._complained = False

    @classmethod
    def of(cls, machine: Machine, registry: CollectorRegistry) -> "_MetricsFileWriter | None":
        """The writer that the settings ask for. Raises StorageError when its file cannot be written."""
        if machine.metrics_file is None:
            return None
        path = Path(machine.metrics_file)
        if not path.parent.is_dir():
            raise StorageError(f"machine.metrics_file: {path.parent} is no folder; make it, or name node_exporter's")
        if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
            raise StorageError(f"machine.metrics_file: {path} cannot be written; allow it, or name another")
        return cls(path, registry)

    def run(self) -> None:
        while not self._over.wait(WRITE_EVERY_S):
            self.write()

    def write(self) -> None:
        """Write it now; a disk that does not take it is told of once."""
        with self._mutex:
            try:
                files.write_atomic(self._path, generate_latest(self._registry))
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    print_message(f"{self._path} cannot be written ({error.strerror}); training goes on")

    def end(self) -> None:
        """Write no more."""
        self._over.set()
