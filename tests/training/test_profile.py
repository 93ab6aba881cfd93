"""Tests of `ratchet train --profile`: its measurements and sums are correct, and it changes nothing else."""

import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
from torch.nn import functional

import tiny_project
from profile_cases import (
    SETTINGS,
    profiled,  # noqa: F401 (a fixture)
    project,  # noqa: F401 (a fixture)
    rest_of,
    sealed,
)
from ratchet.cli.main import main
from ratchet.errors import DataError, InterruptedRunError, LockHeldError, SettingsError, StorageError
from ratchet.reports.training_page import format_profile
from ratchet.runs.directory import RunDirectory, RunPaths
from ratchet.runs.fault_injection.injection import VARIABLE
from ratchet.runs.signals import GracefulShutdown
from ratchet.stages import train
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import RUNS_VARIABLE, ProjectLayout
from ratchet.storage.records.training import PARTS, TrainingProfile
from ratchet.training import profiler, step_timer
from ratchet.training.run_spec import build_run_spec
from ratchet.training.step_timer import StepSpans, StepTimer
from small_loop import SMALL, loop_of

CPU = torch.device("cpu")


class Clock:
    """Clock that the test moves forward."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_spans_of_a_lap_exclude_what_is_inside_and_each_lap_begins_at_nothing() -> None:
    clock = Clock()
    watch = StepTimer(CPU, clock)
    watch.start()
    clock.now_s += 1
    with watch.measure("outer"):
        clock.now_s += 2
        with watch.measure("inner"):
            clock.now_s += 4
            with watch.measure("innermost"):
                clock.now_s += 8
        clock.now_s += 16
        with watch.measure("inner"):
            clock.now_s += 32
    clock.now_s += 64
    lap = watch.stop()
    assert lap.spans == {"outer": 18, "inner": 36, "innermost": 8}
    assert (lap.seconds, lap.rest_s) == (127, 65)
    watch.start()
    watch.count_micro_batch(12)
    watch.count_micro_batch(8)
    with pytest.raises(ValueError, match="broken"), watch.measure("outer"), watch.measure("inner"):
        clock.now_s += 3
        raise ValueError("broken")
    failed = watch.stop()
    assert (failed.spans, failed.micro_batches, failed.padded_tokens) == ({"outer": 0, "inner": 3}, 2, 20)
    watch.start()
    with watch.measure("other"):
        clock.now_s += 5
    last = watch.stop()
    assert (last.spans, last.micro_batches, last.padded_tokens) == ({"other": 5}, 0, 0)


def test_a_training_without_a_profile_carries_spans_that_hold_nothing() -> None:
    spans = StepSpans()
    assert spans.measure("forward") is spans.measure("backward")
    with spans.measure("forward"), spans.measure("forward"):
        spans.count_micro_batch(10)
    assert vars(spans) == {}


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB", torch.float16, 312e12),
        ("NVIDIA A100-SXM4-40GB", torch.float32, None),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA L40S", torch.bfloat16, None),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165e12),
        ("Tesla T4", torch.float16, 65e12),
        ("", torch.bfloat16, None),
    ],
)
def test_data_sheets_are_told_of_just_these_devices(name: str, dtype: torch.dtype, expected: float | None) -> None:
    assert step_timer.datasheet_flops_per_s(name, dtype) == expected


def test_operations_of_products_and_attention_are_counted_forward_and_back() -> None:
    layer = nn.Linear(16, 32, bias=False).requires_grad_(False)
    x = torch.randn(2, 4, 8, 16, requires_grad=True)
    with profiler.count_workload(layer) as asked:
        mixed = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        layer(mixed).sum().backward()
    product, attention = 2 * 64 * 16 * 32, 2 * 2 * (2 * 4) * 8 * 8 * 16
    assert asked.flops == 2 * product + attention * (1 + 2.5)  # attention: two products forward, five backward
    # The product needs only its frozen factor for the backward pass, which belongs to the model. Attention needs its
    # inputs (one tensor, used three times), its result, and the logarithms of its sums (float32, at least 2 x 4 x 8).
    assert asked.saved_bytes >= 2 * x.nbytes + 4 * 64
    assert asked.saved_bytes < 3 * x.nbytes


def test_products_with_matrices_in_four_bits_are_counted_too() -> None:
    layer = Linear4bit(64, 128, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer = layer.requires_grad_(False).to(CPU)
    x = torch.randn(2, 16, 64, requires_grad=True)
    with profiler.count_workload(layer) as asked:
        layer(x).sum().backward()
    assert asked.flops == 2 * (2 * 32 * 64 * 128)
    moved = profiler.estimate_moved_bytes(layer, asked, micro_batches=3, passes=2, states_bytes=0)
    assert moved["dequantised weights, written and read"] == 3 * 2 * 2 * (64 * 128 * 4)
    assert moved["weights as stored, read"] >= 3 * 2 * (64 * 128 // 2)


def test_kept_tensors_are_let_go_with_their_graph() -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(32, 64)
    with profiler.count_workload(layer) as asked:
        for _ in range(3):
            layer(x.clone()).exp().sum().backward()
    each = 2 * x.nbytes  # the layer's input and the result of exp
    assert asked.saved_bytes == 3 * each
    assert asked.peak_saved_bytes == each


def test_products_are_those_of_frozen_matrices_and_the_head_sees_learned_positions_only(tmp_path: Path) -> None:
    model = loop_of(tmp_path, SMALL).context.model
    found = profiler.count_product_shapes(model, rows=100, trained=7)
    assert found[7, 32, 64] == found[7, 64, 32] == 1  # the head: width 32, vocabulary 64
    assert found[100, 32, 48] == found[100, 48, 32] == 6  # two layers: gate, up, and down in the opposite pass
    assert sum(found.values()) == 2 * (1 + 2 * 7)


def test_the_time_of_a_kernel_counts_once_as_that_of_its_operator() -> None:
    """On a GPU, torch lists kernels beside the operators that start them, and spans on both devices."""
    options: dict[str, Any] = {"thread": 1, "use_device": "cuda"}
    product = FunctionEvent(1, "aten::mm", start_us=0, end_us=5, **options)
    product.append_kernel("sgemm", 0, 30)
    addition = FunctionEvent(2, "aten::add", start_us=5, end_us=9, **options)
    addition.append_kernel("elementwise", 0, 10)
    span = FunctionEvent(3, "forward", start_us=0, end_us=9, is_user_annotation=True, **options)
    kernels = [
        FunctionEvent(4, "sgemm", start_us=20, end_us=50, device_type=DeviceType.CUDA, **options),
        FunctionEvent(5, "elementwise", start_us=50, end_us=60, device_type=DeviceType.CUDA, **options),
    ]
    averages = [FunctionEventAvg().add(event) for event in (product, addition, span, *kernels)]
    found = profiler.list_operators(averages, 2, is_gpu=True)
    assert [(one.name, one.calls, one.self_s, one.share) for one in found] == [
        ("aten::mm", 0.5, pytest.approx(15e-6), pytest.approx(0.75)),
        ("aten::add", 0.5, pytest.approx(5e-6), pytest.approx(0.25)),
    ]


def test_too_few_planned_steps_are_refused_with_what_to_change(tmp_path: Path) -> None:
    task = loop_of(tmp_path, SMALL.model_copy(update={"epochs": 0.25})).context
    assert task.batch_plan.steps == 3
    with pytest.raises(SettingsError, match=r"found 3 optimizer steps; expected at least 4; raise train.epochs"):
        profiler.profile_training(task, 20)


def test_a_disk_that_takes_nothing_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = loop_of(tmp_path, SMALL).context

    def full(operation: files.Operation, path: Path) -> None:
        if task.paths.result.name in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "before", full)
    with pytest.raises(StorageError, match=r"No space left on device; free some space .* RATCHET_RUNS=DIR"):
        profiler.profile_training(task, 20)


def test_a_request_to_stop_leaves_nothing(tmp_path: Path) -> None:
    stop = GracefulShutdown()
    task = loop_of(tmp_path, SMALL, stop).context
    stop._is_requested = True
    with pytest.raises(InterruptedRunError):
        profiler.profile_training(task, 20)
    assert not task.paths.result.exists()


def test_profile_has_floors_below_the_step_and_is_printed_and_kept_as_a_page(
    project: ProjectLayout, profiled: tuple[str, dict[str, str]]
) -> None:
    found = TrainingProfile.load(sealed(project) / "profile.json")
    # Forward pass and gradient of the inputs: 2 operations per weight each. The inputs of the first layer's queries,
    # keys and values need no gradient. Adapter, head and attention add to this minimum.
    tiny = tiny_project.TINY
    matrices = tiny.layers * (4 * tiny.hidden_size**2 + 3 * tiny.hidden_size * tiny.intermediate_size)
    least = (4 * matrices - 2 * 3 * tiny.hidden_size**2) * found.padded_tokens
    assert least < found.limits.flops < 2 * least
    assert min(found.limits.moved_bytes.values()) > 0
    assert 0 < found.limits.min_step_s < found.step_s
    kept = (sealed(project) / "profile.md").read_text(encoding="utf-8")
    assert profiled[0].startswith(kept)
    assert kept == format_profile(found)
    for name in (*PARTS, "operations", "bytes moved", "tokens/s", "padding", "calls per step"):
        assert name in kept
    for quartiles_s, is_busy in (((0.9, 1.1), False), ((0.8, 1.2), True)):
        uneven = found.model_copy(update={"step_s": 1.0, "quartiles_s": quartiles_s})
        assert ("machine is busy" in format_profile(uneven)) == is_busy


def test_the_trace_shows_the_spans(project: ProjectLayout, profiled: tuple[str, dict[str, str]]) -> None:
    events = json.loads(gzip.decompress((sealed(project) / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"data", "forward", "loss", "backward", "optimizer", "aten::mm"} <= names
    operators = {one.name for one in TrainingProfile.load(sealed(project) / "profile.json").operators}
    assert operators <= names
    assert not operators & set(PARTS)


def test_an_interrupted_profile_leaves_nothing_and_says_what_was_interrupted(project: ProjectLayout) -> None:
    work = RunPaths(project.profiles / train.WORK / build_run_spec(project, SETTINGS).run_id)
    before = rest_of(project)
    process = subprocess.Popen(
        tiny_project.command("train", "--profile", "4"), cwd=project.root, env=tiny_project.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (work.journal.exists() and '"attempt"' in work.journal.read_text(encoding="utf-8")):
        assert process.poll() is None, "ended before it could be interrupted"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 75
    assert "profile of run" in said
    assert "the run is as it was" in said
    assert rest_of(project) == before


def test_second_profile_at_the_same_time_is_refused(project: ProjectLayout) -> None:
    run = RunDirectory.open(project.profiles / train.WORK, build_run_spec(project, SETTINGS))
    try:
        with pytest.raises(LockHeldError):
            train.profile_training(Project.from_parts(project, SETTINGS), 4)
    finally:
        files.remove_sealed(run.paths.root)
        run.close()


@pytest.mark.parametrize("steps", ["3", "0", "-1"])
@pytest.mark.usefixtures("calm")
def test_too_few_steps_are_refused(project: ProjectLayout, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--project", str(project.root), "train", "--profile", steps]) == 2
    assert f"--profile {steps}: it takes 4 optimizer steps at least: one to warm up" in capsys.readouterr().err


def test_before_the_data_are_prepared_it_says_what_training_would(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "new", SETTINGS)
    with pytest.raises(DataError, match="dvc repro"):
        train.profile_training(Project.from_parts(layout, SETTINGS), 4)
    assert not layout.profiles.exists()


def test_a_training_that_is_too_short_is_refused_before_a_worker_loads_a_model(project: ProjectLayout) -> None:
    few = SETTINGS.model_copy(update={"train": SETTINGS.train.model_copy(update={"epochs": 0.3})})
    with pytest.raises(SettingsError, match=r"found [23] optimizer steps; expected at least 4; raise"):
        train.profile_training(Project.from_parts(project, few), 4)
    assert not (project.profiles / train.WORK / build_run_spec(project, few).run_id).exists()


@pytest.mark.long
def test_a_failed_profile_says_why_and_keeps_the_workers_words_where_runs_are_kept(
    project: ProjectLayout, profiled: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, name = sealed(project).stat().st_ino, build_run_spec(project, SETTINGS).run_id
    here = project.profiles / train.WORK
    shutil.rmtree(here / name, ignore_errors=True)  # removes the remains of an interrupted profile
    moved = {RUNS_VARIABLE: str(tmp_path / "large disk"), VARIABLE: '[{"kind": "die"}]'}
    failed = subprocess.run(
        tiny_project.command("train", "--profile", "4"), cwd=project.root, env=tiny_project.environment() | moved,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert failed.returncode == 1
    assert "killed by SIGKILL" in failed.stderr
    assert "machine.max_restarts" not in failed.stderr, "a setting that has no part in it"
    assert sealed(project).stat().st_ino == kept
    assert list(here.iterdir()) == []
    monkeypatch.setenv(RUNS_VARIABLE, moved[RUNS_VARIABLE])
    work = RunPaths(project.profiles / train.WORK / name)
    assert work.worker_log.is_relative_to(tmp_path / "large disk")
    assert str(work.worker_log) in failed.stderr
    assert work.worker_log.is_file()
