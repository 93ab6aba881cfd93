"""Tests of parameters and metrics for tracking servers, with the names of MLflow's own monitor."""

import re
from pathlib import Path
from typing import Any

import mlflow.system_metrics.metrics
import pytest

from ratchet.config.settings import Settings
from ratchet.config.train import GuardSettings, Train
from ratchet.runs.directory import RunSpec
from ratchet.runs.journal import JournalEvent
from ratchet.runs.tracking_payload import ALWAYS, MetricPoint, MetricPointExtractor, collect_parameters


def shown(train: Train) -> dict[str, str]:
    spec = RunSpec(train=train, data_digest="d" * 64, base_digest="b" * 64)
    return collect_parameters(spec, Settings(train=train))


def system(sample: int, received: int = 0, attempt: int = 1, **more: Any) -> JournalEvent:
    data = {
        "sample": sample, "cpu_percent": 50.0, "memory_bytes": 2_000_000, "memory_percent": 25.0,
        "disk_used_percent": 75.0, "network_received_bytes": received, "network_sent_bytes": 10 * received,
        "worker_cpu_percent": 100.0, "worker_memory_bytes": 1_000_000, "gpus": [],
    }  # fmt: skip
    return JournalEvent("system_metrics", 100.0 + sample, attempt, data | more)


def step(number: int, attempt: int = 1) -> JournalEvent:
    data = {"step": number, "loss": 1.0, "learning_rate": 0.1, "grad_norm": 2.0, "input_tokens": 500, "step_s": 0.5}
    return JournalEvent("step", 100.0 + number, attempt, data)


def values(points: list[MetricPoint]) -> dict[str, float]:
    return {point.key: point.value for point in points}


def test_of_an_ordinary_run_nothing_is_shown_that_is_the_same_everywhere() -> None:
    identity = {"base.source", "base.digest", "data.digest", "recipe_version"}
    assert set(shown(Train())) == identity | {f"train.{name}" for name in ALWAYS}


def test_what_is_no_default_is_shown_too() -> None:
    train = Train(dropout=0.1, guards=GuardSettings(max_bad_steps=7), target_modules=("q", "v"))
    told = shown(train)
    assert set(told) - set(shown(Train())) == {"train.dropout", "train.guards.max_bad_steps"}
    assert (told["train.dropout"], told["train.guards.max_bad_steps"], told["train.target_modules"]) == (
        "0.1",
        "7",
        "q,v",
    )


def test_figures_of_the_machine_have_the_names_of_mlflow_s_own_monitor() -> None:
    gpu = {"index": 0, "utilization_percent": 90, "memory_bytes": 3_000_000, "memory_total_bytes": 12_000_000}
    found = values(MetricPointExtractor().extract(system(1, gpus=[gpu | {"power_w": 300.0, "temperature_c": None}])))
    folder = Path(mlflow.system_metrics.metrics.__path__[0])
    theirs = {
        name.replace("{i}", "0")
        for path in folder.glob("*.py")
        for name in re.findall(r'_metrics\[f?"([^"]+)"\]', path.read_text())
    }
    own = {"system/worker_cpu_utilization_percentage", "system/worker_memory_usage_megabytes"}
    assert set(found) - own <= {f"system/{name}" for name in theirs}
    assert found["system/gpu_0_memory_usage_percentage"] == 25
    assert found["system/gpu_0_power_usage_watts"] == 300
    assert found["system/system_memory_usage_megabytes"] == 2
    assert "system/gpu_0_temperature_celsius" not in found, "it is not known"


@pytest.mark.parametrize("count_elsewhere", [1_000_000, 500_000_000_000])
def test_network_counts_from_the_first_sample_and_continues_on_another_machine(count_elsewhere: int) -> None:
    events = [
        system(1, 5_000_000), system(2, 7_000_000),
        system(3, count_elsewhere, attempt=2), system(4, count_elsewhere + 1_000_000, attempt=2),
    ]  # fmt: skip
    figures = MetricPointExtractor()
    told = [values(figures.extract(event))["system/network_receive_megabytes"] for event in events]
    assert told == [0, 2, 2, 3]
    again = [values(figures.extract(event))["system/network_receive_megabytes"] for event in events]
    assert again == told, "given the same events again, it says the same"
    assert values(figures.extract(events[1]))["system/network_transmit_megabytes"] == 20


def test_the_share_of_what_devices_can_do_is_told_where_it_is_known() -> None:
    figures = MetricPointExtractor()
    figures.extract(JournalEvent("worker_ready", 1.0, 1, {"flops_per_token": 2e6, "peak_flops_per_s": 1e10}))
    figures.extract(JournalEvent("worker_ready", 2.0, 2, {"flops_per_token": 2e6, "peak_flops_per_s": None}))
    assert values(figures.extract(step(1)))["train/mfu"] == pytest.approx(1000 * 2e6 / 1e10)
    assert "train/mfu" not in values(figures.extract(step(2, attempt=2)))


def test_events_of_no_figures_have_no_points() -> None:
    assert MetricPointExtractor().extract(JournalEvent("notice", 1.0, 1, {"text": "a word", "step": 3})) == []


def test_the_token_accuracy_of_a_validation_is_a_metric_if_it_was_computed() -> None:
    extractor, data = MetricPointExtractor(), {"step": 5, "loss": 1.5}
    assert values(extractor.extract(JournalEvent("validation", 1.0, 1, data))) == {"validation/loss": 1.5}
    found = values(extractor.extract(JournalEvent("validation", 1.0, 1, data | {"token_accuracy": 0.25})))
    assert found == {"validation/loss": 1.5, "validation/token_accuracy": 0.25}
