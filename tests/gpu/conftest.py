"""Tests of everything that a GPU changes (`make test-gpu`): they need one NVIDIA GPU of 16 GB, and no network.

RATCHET_TEST_GPU_DEVICE=cpu runs the same tests on the CPU where they have a meaning there, which tries out the tests
themselves. Results and figures are written to build/gpu.json and build/gpu.md.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEVICE_VARIABLE = "RATCHET_TEST_GPU_DEVICE"
DEVICE = os.environ.get(DEVICE_VARIABLE, "cuda")
BUILD = Path(__file__).parents[2] / "build"
Record = Callable[..., None]
os.environ["CUBLAS_WORKSPACE_CONFIG"] = (
    ":4096:8"  # as a supervisor sets it: deterministic cuBLAS needs it from the start
)
_cases: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; skip them without the device."""
    from ratchet.models import device

    reason = ""
    try:
        device.pick_device("cuda" if DEVICE == "cuda" else "cpu")
    except Exception as error:
        reason = str(error)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> Any:
    import torch

    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def only_gpu() -> None:
    """Skip a test that has no meaning on a CPU."""
    if DEVICE != "cuda":
        pytest.skip("needs a GPU")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Return a function that adds figures of the test to the report."""
    figures = _cases.setdefault(request.node.nodeid, {}).setdefault("figures", {})
    return lambda **values: figures.update(values)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    case = _cases.setdefault(report.nodeid, {})
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        case |= {"outcome": report.outcome, "seconds": round(report.duration, 2), "text": text[-3000:]}


def pytest_sessionfinish() -> None:
    """Write the report, unless tests were only collected."""
    cases = {name: case for name, case in _cases.items() if "outcome" in case}
    if not cases:
        return
    machine = _describe_machine()
    BUILD.mkdir(exist_ok=True)
    document = {"written": time.strftime("%Y-%m-%d %H:%M:%S"), "machine": machine, "cases": cases}
    (BUILD / "gpu.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    rows = [
        f"| {name.partition('::')[2]} | {case['outcome']} | {case['seconds']} | {_format_case(case)} |"
        for name, case in cases.items()
    ]
    lines = ["# Tests on a GPU", "", *(f"- {name}: {value}" for name, value in machine.items()), ""]
    lines += ["| test | outcome | s | figures |", "|---|---|---|---|", *rows]
    (BUILD / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _format_case(case: dict[str, Any]) -> str:
    text = "; ".join(f"{name} {value}" for name, value in case.get("figures", {}).items())
    if case["outcome"] != "passed":
        text = f"{text} {' '.join(case['text'].split())[-300:]}".replace("|", "/")
    return text


def _describe_machine() -> dict[str, str]:
    from dataclasses import asdict
    from importlib.metadata import version

    import torch

    from ratchet.models import device
    from ratchet.runs import gpus

    chosen = torch.device(DEVICE if DEVICE != "cuda" or torch.cuda.is_available() else "cpu")
    inventory = asdict(gpus.query_gpus())
    return {
        "device": device.describe_device(chosen), "driver": inventory["driver"] or inventory["problem"],
        "CUDA of the driver": inventory["cuda"] or "none", "CUDA of torch": str(torch.version.cuda),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("ratchet-llm", "torch", "transformers", "peft", "bitsandbytes")},
    }  # fmt: skip
