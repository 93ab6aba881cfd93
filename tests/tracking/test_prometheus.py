"""Tests Prometheus metrics: computed from a journal, over real HTTP and in a real file."""

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ports import free_port
from ratchet.config.machine import Machine
from ratchet.errors import SettingsError, StorageError
from ratchet.runs.journal import JournalEvent
from ratchet.runs.prometheus_series import METRICS, STATES, PrometheusSeries
from ratchet.runs.restart_policy import FailureClass
from ratchet.storage import files
from ratchet.storage.records.gate import Verdict
from ratchet.tracking.prometheus import PrometheusExporter, write_verdict

STEP = {"learning_rate": 0.1, "grad_norm": 1.5, "trained_tokens": 5, "input_tokens": 9}
READY = {"start_step": 0, "planned_steps": 10, "device": "cpu", "compute_dtype": "float32", "ranks": 2}
CHECKPOINT = {
    "is_best": True,
    "size_bytes": 100,
    "bytes_written": 60,
    "bytes_linked": 40,
    "blocked_s": 0.25,
    "seconds": 1.0,
}
FORECAST = {"phases": [{"phase": "steps", "parts": {"base": 300, "adapter": 100}}]}


def event(kind: str, t: float = 1000.0, attempt: int = 1, **data: Any) -> JournalEvent:
    return JournalEvent(kind, t, attempt, data)


JOURNAL = [
    event("attempt_started", pid=1, code_version="abc"),
    event("memory_forecast", forecast=FORECAST, available_bytes=900),
    event("worker_ready", **READY),
    event("step", step=1, loss=3.0, step_s=0.2, **STEP),
    event("step", step=2, loss=2.5, step_s=0.3, **STEP),
    event("checkpoint_saved", t=1010.0, step=2, **CHECKPOINT),
    event("memory_peak", phase="steps", peak_bytes=400, allocated_bytes=0, host_bytes=400, device="cpu",
        device_bytes=1000),
    event("step", step=3, loss=2.0, step_s=4.0, **STEP),
    event("validation", step=3, loss=2.25, improved=True, seconds=1.5, tokens=5),
    event("worker_exited", exit_code=-9, failure_class="out_of_memory", decision="Retry", text="killed"),
    event("attempt_started", attempt=2, pid=1, code_version="abc"),
    event("worker_ready", attempt=2, **{**READY, "start_step": 2}),
    event("step", attempt=2, step=3, loss=2.0, step_s=0.2, **STEP),
    event("step_skipped", attempt=2, step=4, action="skip", reason="nan", rows=[1], learning_rate_scale=1.0,
        rollback_step=None),
    event("step_repeated", attempt=2, step=4, reason="nan"),
    event("gradient_spike", attempt=2, step=5, grad_norm=9.0, rows=[1], median=1.0, deviations=8.0),
    event("microbatch_budget", attempt=2, step=5, phase="train", action="shrink", failed_tokens=99,
        budget={"tokens": 64}),
    event("alert", attempt=2, text="memory: 95 %"),
    event("system_metrics", attempt=2, t=2000.0, sample=1, worker_cpu_percent=150.0, worker_memory_bytes=512, gpus=[]),
    event("replicated", attempt=2, step=2, artifact="checkpoint", bytes_sent=100, bytes_skipped=0, seconds=1.0,
        bytes_per_s=100),
    event("checkpoint_saved", attempt=2, t=1100.0, step=5, **CHECKPOINT),
]  # fmt: skip

EXPECTED = {
    "ratchet_run_state{training}": 1, "ratchet_run_state{starting}": 0, "ratchet_run_start_timestamp_seconds": 1000,
    "ratchet_last_event_timestamp_seconds": 1100, "ratchet_ranks": 2, "ratchet_planned_steps": 10, "ratchet_step": 4,
    "ratchet_steps_total": 4, "ratchet_lost_steps_total": 1, "ratchet_validation_seconds_total": 1.5,
    "ratchet_trained_tokens_total": 20, "ratchet_input_tokens_total": 36, "ratchet_train_loss": 2,
    "ratchet_learning_rate": 0.1, "ratchet_gradient_norm": 1.5, "ratchet_validation_loss": 2.25,
    "ratchet_best_validation_loss": 2.25, "ratchet_memory_peak_bytes{steps}": 400,
    "ratchet_memory_forecast_bytes{steps}": 400, "ratchet_memory_available_bytes": 900,
    "ratchet_memory_device_bytes": 1000, "ratchet_checkpoints_total": 2, "ratchet_checkpoint_step": 5,
    "ratchet_checkpoint_timestamp_seconds": 1100, "ratchet_checkpoint_size_bytes": 100,
    "ratchet_checkpoint_written_bytes_total": 120, "ratchet_checkpoint_blocked_seconds_total": 0.5,
    "ratchet_worker_cpus_used": 1.5, "ratchet_worker_resident_memory_bytes": 512,
    "ratchet_replica_step": 2, "ratchet_replica_oldest_unsent_timestamp_seconds": 1100,
    "ratchet_replica_sent_bytes_total": 100, "ratchet_attempts_total": 2, "ratchet_failures_total{out_of_memory}": 1,
    "ratchet_failures_total{stalled}": 0, "ratchet_skipped_steps_total{skip}": 1,
    "ratchet_skipped_steps_total{roll_back}": 0, "ratchet_repeated_steps_total": 1, "ratchet_gradient_spikes_total": 1,
    "ratchet_memory_shrinks_total{train}": 1, "ratchet_micro_batch_limit_tokens{train}": 64, "ratchet_alerts_total": 1,
    "ratchet_step_duration_seconds_count": 4, "ratchet_step_duration_seconds_sum": 4.7,
    "ratchet_step_duration_seconds_bucket{0.25}": 2, "ratchet_step_duration_seconds_bucket{+Inf}": 4,
}  # fmt: skip


LABELS = {"skip", "roll_back", "train", "validation", "steps", *STATES, *get_args(FailureClass)}
"""Values of labels, of those that a journal like this one has."""


def fetched(port: int, accept: str = "*/*") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310 (our own loopback)
        return str(reply.read().decode())


def figures(text: str) -> dict[str, float]:
    """Return values by name; labels other than `run` follow in braces. Parsed by prometheus_client."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["run"] == "abc"
            others = [value for name, value in sorted(sample.labels.items()) if name != "run"]
            found[sample.name + (f"{{{','.join(others)}}}" if others else "")] = float(sample.value)
    return found


@pytest.fixture
def machine() -> Machine:
    return Machine(metrics_port=free_port(), metrics_scrape_wait_s=0.0, replica="/nowhere")


@pytest.fixture
def exposition(machine: Machine) -> Iterator[PrometheusExporter]:
    made = PrometheusExporter(machine)
    yield made
    made.close()


def test_a_journal_becomes_figures_in_both_formats(machine: Machine, exposition: PrometheusExporter) -> None:
    exposition.create_callback("abc", "shop").on_events(JOURNAL)
    port = machine.metrics_port or 0
    with socket.create_connection(("127.0.0.1", port)) as silent:  # a client that reads nothing does not block others
        silent.sendall(b"GET /metrics HTTP/1.1\r\n")
        found = figures(fetched(port))
    assert {name: found.get(name) for name in EXPECTED} == pytest.approx(EXPECTED)
    assert found["ratchet_run_info{abc,float32,cpu,shop}"] == 1
    names = {name.partition("{")[0] for name in found}
    assert {name for name, metric in METRICS.items() if metric.kind != "histogram"} - names == {
        "ratchet_gate_verdict", "ratchet_gate_timestamp_seconds",
    }  # fmt: skip
    text = fetched(port, "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert "# TYPE ratchet_steps counter\n" in text
    assert "_created" not in text


def test_nothing_is_told_before_the_journal_is_read_and_then_all_of_it_at_once(
    machine: Machine, exposition: PrometheusExporter
) -> None:
    """Otherwise a client would see the counters of a resumed run decrease."""
    callback = exposition.create_callback("abc", "shop")
    assert figures(fetched(machine.metrics_port or 0)) == {}
    seen: set[float] = set()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            seen.add(figures(fetched(machine.metrics_port or 0)).get("ratchet_steps_total", -1.0))

    asking = threading.Thread(target=ask)
    asking.start()
    callback.on_events([*JOURNAL[:3], *([JOURNAL[3]] * 20_000)])
    while 20_000.0 not in seen:
        time.sleep(0.01)
    over.set()
    asking.join()
    assert seen <= {-1.0, 20_000.0}


def test_labels_and_names_do_not_depend_on_how_far_the_run_is() -> None:
    """Cardinality is bounded: no label takes a value from a step, a row or a text."""
    series = PrometheusSeries(Machine(replica="/nowhere"))
    for one in JOURNAL:
        for sample in series.samples():
            assert set(sample.labels) <= set(METRICS[sample.name].labels)
            assert sample.name == "ratchet_run_info" or set(sample.labels.values()) <= LABELS
        series.update(one)


def test_damaged_events_are_passed_over() -> None:
    series = PrometheusSeries(Machine(replica="/nowhere"))
    kinds = (
        "attempt_started",
        "worker_ready",
        "step",
        "checkpoint_saved",
        "validation",
        "worker_exited",
        "microbatch_budget",
        "step_skipped",
        "replicated",
        "memory_peak",
    )
    for kind in (*kinds, "memory_forecast", "finished", "interrupted"):
        series.update(event(kind))
        series.update(event(kind, step="x", loss="y", step_s=None, action=[], phase={}, seconds="z", size_bytes=[]))
    assert {sample.name for sample in series.samples()} >= {"ratchet_steps_total", "ratchet_run_state"}
    assert all(isinstance(sample.value, float) for sample in series.samples())


DONE = event("replicated", step=5, artifact="result", bytes_sent=1, bytes_skipped=0, seconds=1.0, bytes_per_s=1)
NOT_THE_SENDER = Machine(replica="/nowhere", nodes="2", rendezvous="trainer:29400")
SENT_BY_ANOTHER = [one for one in JOURNAL if one.kind != "replicated"]


@pytest.mark.parametrize(
    ("machine", "events", "has_age"),
    [
        (Machine(replica="/nowhere"),
         [*JOURNAL, event("finished", step=5, reason="completed", adapter_digest="a"), DONE], False),
        (NOT_THE_SENDER, SENT_BY_ANOTHER, False),
        (NOT_THE_SENDER, [*SENT_BY_ANOTHER, JOURNAL[-2]], True),
    ],
    ids=["everything is sent", "another machine sends", "this machine sends"],
)  # fmt: skip
def test_age_of_what_the_replica_lacks(machine: Machine, events: list[JournalEvent], has_age: bool) -> None:
    series, alone = PrometheusSeries(machine), PrometheusSeries(Machine())
    for one in events:
        series.update(one)
    names = {sample.name for sample in series.samples()}
    assert ("ratchet_replica_oldest_unsent_timestamp_seconds" in names) == has_age
    alone.update(JOURNAL[0])
    assert not any("replica" in sample.name for sample in alone.samples())


def test_address_that_cannot_be_used_is_reported() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"machine.metrics_port: {port} of 127.0.0.1 is in use by another"):
            PrometheusExporter(Machine(metrics_port=port))
    with pytest.raises(
        SettingsError, match=r"machine.metrics_host, machine.metrics_port: cannot bind 192.0.2.1, port 9464"
    ):
        PrometheusExporter(Machine(metrics_port=9464, metrics_host="192.0.2.1"))


def test_the_port_is_on_loopback_unless_told_otherwise(machine: Machine, exposition: PrometheusExporter) -> None:
    assert machine.metrics_host == "127.0.0.1"
    # The bind succeeds because the exporter does not listen on all addresses.
    with socket.socket() as same_port_elsewhere:
        same_port_elsewhere.bind(("127.0.0.2", machine.metrics_port or 0))


def test_the_end_is_fetched_by_those_who_have_been_fetching() -> None:
    machine = Machine(metrics_port=free_port(), metrics_scrape_wait_s=120.0)
    exposition = PrometheusExporter(machine)
    callback = exposition.create_callback("abc", "shop")
    callback.on_events(JOURNAL)
    states: list[float] = []

    def fetch() -> None:
        while not states or states[-1] == 0.0:
            states.append(figures(fetched(machine.metrics_port or 0))["ratchet_run_state{failed}"])

    fetching = threading.Thread(target=fetch)
    fetching.start()
    while not states:
        time.sleep(0.01)
    callback.on_end("FAILED")
    exposition.close()
    fetching.join(60)
    assert states[-1] == 1.0


@pytest.mark.parametrize("status", ["FINISHED", "KILLED"], ids=["nobody fetches", "asked to stop"])
def test_nobody_is_waited_for_in_vain(status: Any) -> None:
    machine = Machine(metrics_port=free_port(), metrics_scrape_wait_s=3600.0)
    exposition = PrometheusExporter(machine)
    callback = exposition.create_callback("abc", "shop")
    callback.on_events(JOURNAL)
    if status == "KILLED":
        fetched(machine.metrics_port or 0)
    ending = threading.Thread(target=callback.on_end, args=(status,), daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    exposition.close()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_file_is_there_at_the_end_and_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "ratchet.prom"
    path.write_text("ratchet_step 7\n")
    before = path.stat().st_ino
    exposition = PrometheusExporter(Machine(metrics_file=str(path)))
    callback = exposition.create_callback("abc", "shop")
    callback.on_events(JOURNAL)
    callback.on_end("FINISHED")
    exposition.close()
    found = figures(path.read_text())
    assert (found["ratchet_steps_total"], found["ratchet_run_state{finished}"]) == (4, 1)
    assert path.stat().st_ino != before
    assert [one.name for one in tmp_path.iterdir()] == ["ratchet.prom"]


@pytest.mark.parametrize("make", [False, True], ids=["no folder", "a folder in its place"])
def test_a_file_that_cannot_be_is_said_before_training(make: bool, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ratchet.prom"
    if make:
        path.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"machine\.metrics_file: "):
        PrometheusExporter(Machine(metrics_file=str(path)))


def test_a_disk_that_takes_no_file_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exposition = PrometheusExporter(Machine(metrics_file=str(tmp_path / "ratchet.prom")))

    def full(operation: str, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "before", full)
    for status in ("FAILED", "FINISHED"):
        exposition.create_callback(f"abc-{status}", "shop").on_end(status)  # type: ignore[arg-type]
    exposition.close()
    error = capsys.readouterr().err
    assert (
        error
        == f"ratchet: {tmp_path / 'ratchet.prom'} cannot be written (No space left on device); training continues\n"
    )


def test_the_gate_has_a_file_of_its_own(tmp_path: Path) -> None:
    verdict = Verdict(
        decision="REJECT", model_digest="m", adapter_digest="a", run_id="abc", is_champion=False, champion_digest=None,
        reasons=(),
    )  # fmt: skip
    write_verdict(tmp_path / "ratchet.prom", verdict)
    found = figures((tmp_path / "ratchet-gate.prom").read_text())
    assert found["ratchet_gate_verdict{REJECT}"] == 1
    assert found["ratchet_gate_verdict{PROMOTE}"] == 0
    assert found["ratchet_gate_timestamp_seconds"] > 1e9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(
            ({"metrics_file": path}, "absolute path that ends in .prom")
            for path in ("ratchet.prom", "/var/lib/ratchet.txt", "/var/lib/.prom", "/var/lib/")
        ),
        *(({"metrics_port": port}, "metrics_port") for port in (0, 65536, -1)),
    ],
)
def test_settings_that_cannot_be_served_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Machine(**settings)
