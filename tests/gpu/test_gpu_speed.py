"""Measures on a GPU: tokens per second, MFU and memory beside TRL and Unsloth, and the forecast of the memory."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_project
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.runs.directory import find_newest_run
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAYERS_OF_7B = 8
"""Layers of the 7B shape that are measured, of 32: a layer's rate does not depend on their number, and 7B parameters
would take minutes to write."""
CONTENDERS = ("ours", "trl-packed", "unsloth-packed")
MIN_RATIO = {"trl-packed": 1.15, "unsloth-packed": 1.0}
MAX_MEMORY_RATIO, MIN_MFU = 0.8, 0.4
FORECAST_TOLERANCE = 0.15
_measured: dict[tuple[str, str], dict[str, Any]] = {}


@pytest.fixture(scope="module", params=["1B", "7B"])
def shape(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Iterator[tuple[str, ProjectLayout]]:
    """Create a project whose random model has the shape of 1B or 7B parameters (on a CPU: of 10M)."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import train_projects
    finally:
        sys.path.remove(str(BENCHMARKS))
    is_gpu = device.type == "cuda"
    train_projects.SHAPES["7B"] = train_projects.SHAPES["7B"] | {"num_hidden_layers": LAYERS_OF_7B}
    train = Train(
        rank=16, alpha=32, epochs=1, batch_size=64 if is_gpu else 8, batching="packed",
        pack_tokens=2048 if is_gpu else 512, learning_rate=2e-4, validate_every_steps=10**6,
        quantization="nf4" if is_gpu else "none",  # bitsandbytes has no kernel for the width of 10M on CPUs
    )  # fmt: skip
    machine = Machine(device=device.type, micro_batch_size=1)
    cell = train_projects.Cell(
        request.param, request.param if is_gpu else "10M", 1200 if is_gpu else 48, train, machine, 512
    )
    yield request.param, train_projects.build(tmp_path_factory.mktemp("speed") / "project", cell, None)


@pytest.mark.parametrize("who", CONTENDERS)
def test_tokens_per_second_and_memory(
    who: str, shape: tuple[str, ProjectLayout], device: torch.device, record: Any
) -> None:
    name, layout = shape
    package = who.partition("-")[0]
    if who != "ours" and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, str(BENCHMARKS / "train_cell.py"), json.dumps({"who": who, "project": str(layout.root)})]
    done = subprocess.run(command, env=tiny_project.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    seconds = [after - before for before, after in zip(told["ended"], told["ended"][1:], strict=False)]
    tokens = told["input_tokens"][1 : len(seconds) + 1]
    rate = statistics.median(count / second for count, second in zip(tokens, seconds, strict=True))
    figures = {"tokens_per_s": round(rate), "peak_bytes": told["peak_bytes"]}
    if who == "ours":
        figures |= _read_own_figures(layout, rate)
    _measured[name, who] = figures
    record(**figures)
    if device.type == "cuda":
        _require_targets(name, who)


def _read_own_figures(layout: ProjectLayout, rate: float) -> dict[str, Any]:
    """Return the MFU, and the largest forecast and measured bytes of tensors; None if the journal has none."""
    run = find_newest_run(layout.runs)
    assert run is not None
    events = list(JournalReader(run.journal).read())
    ready = next(event.data for event in events if event.kind == "worker_ready")
    flops, peak = ready["flops_per_token"], ready["peak_flops_per_s"]
    phases = next(event.data["forecast"]["phases"] for event in events if event.kind == "memory_forecast")
    forecast = max(sum(size for part, size in phase["parts"].items() if part != "CUDA context") for phase in phases)
    measured = max(event.data["allocated_bytes"] for event in events if event.kind == "memory_peak")
    return {
        "mfu": flops and peak and round(rate * flops / peak, 3),
        "forecast_bytes": forecast,
        "measured_bytes": measured,
    }


def _require_targets(name: str, who: str) -> None:
    ours, figures = _measured[name, "ours"], _measured[name, who]
    if who == "ours":
        assert abs(ours["forecast_bytes"] / ours["measured_bytes"] - 1) <= FORECAST_TOLERANCE
        assert ours["mfu"] is None or ours["mfu"] >= MIN_MFU
        return
    assert ours["tokens_per_s"] >= MIN_RATIO[who] * figures["tokens_per_s"]
    assert ours["peak_bytes"] <= MAX_MEMORY_RATIO * figures["peak_bytes"]
