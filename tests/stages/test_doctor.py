"""Tests of `ratchet doctor`: in a small project, for a 7B model of which only the config exists, and outside a
project."""

import re
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from doctor_cases import (
    examine,
    seven,  # noqa: F401 (a fixture)
)
from ratchet.config import params_file
from ratchet.errors import BaseModelError, SettingsError
from ratchet.models import device
from ratchet.models.memory import capacity
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout

SETTINGS = params_file.apply_changes(
    tiny_project.SETTINGS, {"train.epochs": 4.0}
)  # with 2 epochs, the doctor rightly gives more advice


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("doctor") / "project")


@pytest.fixture
def project(prepared: ProjectLayout) -> ProjectLayout:
    """Return the prepared project with its settings restored. Tests change nothing else."""
    tiny_project.save(prepared, SETTINGS)
    return prepared


def advised(layout: ProjectLayout, changes: dict[str, Any], write: bool = False) -> tuple[bool, str]:
    """Change some settings of the project; return the doctor's result."""
    text = params_file.amend_text(layout.params.read_text(), changes)
    layout.params.write_text(text)
    return examine(layout, params_file.load(layout.params), None, write)


def test_a_good_project_gets_no_advice(project: ProjectLayout) -> None:
    settings = params_file.load(project.params)
    well, text = examine(project, settings, None, False)
    assert well
    assert "advice: nothing to change in params.yaml" in text
    assert "LlamaForCausalLM, " in text
    assert "training rows (labels) of " in text
    assert "it fits" in text
    assert "nf4 works here" in text
    assert "problem" not in text
    needed = next(line for line in text.splitlines() if line.startswith("  memory"))
    assert f"for {settings.machine.micro_batch_size} rows of " in needed
    longest = int(needed.partition("rows of ")[2].split()[0])
    assert longest < settings.prepare.max_tokens, "of the rows that were prepared, not of what is allowed"


def test_write_changes_only_the_lines_of_the_advice(project: ProjectLayout) -> None:
    changes = {"train.learning_rate": 5e-6, "train.target_modules": "attention", "train.alpha": 1000.0}
    well, text = advised(project, changes)
    asked = project.params.read_text()
    assert well
    assert "train.learning_rate: 5e-06 → 0.007" in text
    assert "thinkingmachines.ai" in text
    assert "+  target_modules: all" in text.splitlines()
    assert "`ratchet doctor --write` makes these changes" in text
    assert project.params.read_text() == asked, "advice is not taken without being asked for"

    well, text = advised(project, {}, write=True)
    assert well
    assert text.endswith("params.yaml: written")
    found = project.params.read_text()
    before, after = asked.splitlines(), found.splitlines()
    differing = [(old.split(":")[0].strip(), new) for old, new in zip(before, after, strict=True) if old != new]
    assert differing == [
        ("alpha", "  alpha: 8"),
        ("target_modules", "  target_modules: all"),
        ("learning_rate", "  learning_rate: 0.007"),
    ]
    again = examine(project, params_file.load(project.params), None, True)
    assert again[0]
    assert "nothing to change" in again[1]
    assert project.params.read_text() == found


def test_settings_that_change_meanwhile_are_not_overwritten(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = params_file.apply_changes(SETTINGS, {"train.target_modules": "attention"})
    tiny_project.save(project, settings)
    right = device.find_four_bit_fault

    def meanwhile(*arguments: Any) -> str | None:
        project.params.write_text(project.params.read_text().replace("rank: 4", "rank: 5"))
        return right(*arguments)

    monkeypatch.setattr(device, "find_four_bit_fault", meanwhile)
    with pytest.raises(SettingsError, match="changed by another process meanwhile; nothing was written"):
        examine(project, settings, None, True)
    assert params_file.load(project.params).train.rank == 5
    assert params_file.load(project.params).train.target_modules == "attention"


def test_before_any_stage_has_run_unknown_values_are_named(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "new")
    well, text = examine(layout, params_file.load(layout.params), None, False)
    assert well
    assert "not known: base.source: tiny: stage base has not run" in text
    assert "not known before stage prepare has run" in text
    assert "memory  " not in text


def test_outside_any_project_it_reports_the_machine() -> None:
    well, text = examine(None, None, None, False)
    assert well
    assert "device  " in text
    assert re.search(
        r"products   float32 [\d,]+ GFLOP/s, bfloat16 [\d,]+ GFLOP/s; `auto` is float32 on every CPU", text
    )
    assert re.search(r"kernels    (Ratchet's own for attention, .* \(AVX(2|512)\)|torch's only: .+)\n", text)
    assert "bitsandbytes 0." in text
    assert "not known: no Ratchet project here: name a base with --base (a model directory or its config.json)" in text
    assert "advice" not in text


def test_a_probe_names_rates_kernels_and_the_models_that_fit() -> None:
    """`ratchet doctor` prints it on a GPU; here a CPU is measured."""
    import torch

    from ratchet.stages.hardware_probe import probe_gpu

    shapes = {"small": (256, 512, 2, 2, 1000), "huge": (65_536, 262_144, 3, 8, 1000)}
    found = dict(probe_gpu(torch.device("cpu"), 64, shapes))
    assert list(found) == ["products", "nf4", "fp4", "attention", "QLoRA"]
    assert re.fullmatch(r"float32 .* TFLOP/s, float16 .*, bfloat16 .*; `auto` is float32", found["products"])
    assert (found["nf4"], found["fp4"]) == ("works", "works")
    assert found["attention"] == "flash for rows and packs"
    assert re.fullmatch(
        r"small in .*, at most [\d,]+ tokens/s; huge needs [\d,.]+ [TG]iB and does not fit", found["QLoRA"]
    )


@pytest.mark.parametrize(("gain", "is_named"), [(2.0, True), (1.1, False)])
def test_bfloat16_is_named_where_this_cpu_gains(monkeypatch: pytest.MonkeyPatch, gain: float, is_named: bool) -> None:
    import torch

    from ratchet.stages import hardware_probe

    rates = {torch.float32: 9e10, torch.bfloat16: gain * 9e10}
    monkeypatch.setattr(hardware_probe.profiler, "measure_product_flops_per_s", lambda _, dtype, __: rates[dtype])
    text = hardware_probe.describe_cpu_products()
    assert text.startswith("float32 90 GFLOP/s, bfloat16 ")
    assert ("products are faster in bfloat16" in text) is is_named


def test_on_a_gpu_the_doctor_adds_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ratchet.stages import hardware_probe

    monkeypatch.setattr(device, "pick_device", lambda setting: torch.device("cpu" if setting == "cpu" else "cuda"))
    monkeypatch.setattr(device, "describe_device", lambda _: "NVIDIA L4")
    monkeypatch.setattr(device, "find_four_bit_fault", lambda *_: None)
    monkeypatch.setattr(hardware_probe, "probe_gpu", lambda _: iter([("products", "bfloat16 90 TFLOP/s")]))
    _, text = examine(None, None, None, False)
    assert "products   bfloat16 90 TFLOP/s" in text
    assert "host  " in text


def test_a_gpu_that_is_not_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ratchet.stages import doctor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor, "count_visible_gpus", lambda: 1)
    _, text = examine(None, None, None, False)
    assert "GPU        not used: torch " in text


def test_a_full_disk_is_a_problem(project: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "disk_free_bytes", lambda _: 1000)
    well, text = advised(project, {})
    assert not well
    assert "1000 bytes are free, and a run needs about" in text
    assert "RATCHET_RUNS" in text


def test_unsupported_4_bit_weights_are_a_problem_that_write_solves(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_four_bit_fault", lambda *_: "bitsandbytes has no kernel here")
    well, text = advised(project, {})
    assert not well
    assert "problem: train.quantization: nf4: bitsandbytes has no kernel here; none trains LoRA without" in text
    assert "train.quantization: nf4 → none" in text
    well, _ = advised(project, {}, write=True)
    assert well
    assert params_file.load(project.params).train.quantization == "none"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"train.rank_pattern": {"no_such": 2}}, "problem: train.rank_pattern: no_such"),
        ({"machine.device": "cuda"}, "problem: machine.device: cuda, but torch finds no GPU"),
        ({"machine.device": "cuda"}, "#machinedevice-cuda-but-torch-finds-no-gpu"),
    ],
    ids=["pattern", "device", "link"],
)
def test_reasons_to_refuse_a_run_are_problems(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], problem: str
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    well, text = advised(project, change)
    assert not well
    assert problem in text


@pytest.mark.parametrize(
    ("base", "error", "message"),
    [
        ("missing", SettingsError, "no such file"),
        ("not json", BaseModelError, "not JSON"),
        ('{"model_type": "no_such_model"}', BaseModelError, "no_such_model"),
    ],
    ids=["missing", "not-json", "unknown"],
)
def test_an_invalid_base_is_refused(base: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if base != "missing":
        path.write_text(base)
    with pytest.raises(error, match=message):
        examine(None, None, path, False)


def test_advice_needs_the_settings_of_the_file_and_writing_a_project_and_its_own_base(
    project: ProjectLayout, seven: Path
) -> None:
    with pytest.raises(SettingsError, match="changed while it was read"):
        examine(project, params_file.apply_changes(SETTINGS, {"train.rank": 5}), None, False)
    with pytest.raises(SettingsError, match="no Ratchet project here"):
        examine(None, None, None, True)
    with pytest.raises(SettingsError, match="the advice is for --base"):
        examine(project, params_file.load(project.params), seven, True)


def test_a_failing_disk_leaves_the_settings_unchanged(project: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = params_file.apply_changes(SETTINGS, {"train.target_modules": "attention"})
    tiny_project.save(project, changed)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "before", full)
    with pytest.raises(OSError, match="No space left"):
        examine(project, changed, None, True)
    assert params_file.load(project.params) == changed
