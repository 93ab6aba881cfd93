"""Tests of everything that runs on a GPU, on a simulated one: devices of tensors, determinism, memory, and what ends a
training there. tests/gpu has the tests on a real GPU."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import bitsandbytes
import pytest
import torch

import simulated_gpu_cases
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_BUG, SettingsError
from ratchet.evaluation import comparability
from ratchet.models import device, loading
from ratchet.runs.journal import Journal, JournalReader
from ratchet.stages import hardware_probe
from ratchet.training import exit_codes, optimizer
from simulated_gpu_cases import FOUR_BITS, LONG_CASES, SHORT_CASES

GPU = torch.device("cuda", 1)
SCRIPT = Path(simulated_gpu_cases.__file__)


@cache
def outcomes(cases: tuple[str, ...]) -> dict[str, str]:
    """Run cases in one process, because the simulation cannot be removed from a process."""
    done = subprocess.run([sys.executable, str(SCRIPT), *cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", SHORT_CASES)
def test_work_on_a_simulated_gpu(case: str) -> None:
    assert not (failure := outcomes(tuple(SHORT_CASES))[case]), failure


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_CASES)
def test_more_work_on_a_simulated_gpu(case: str) -> None:
    assert not (failure := outcomes(tuple(LONG_CASES))[case]), failure


ILLEGAL = "CUDA error: an illegal memory access was encountered"
ENDS = [
    (torch.AcceleratorError(ILLEGAL), "hardware"),
    (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), "hardware"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( ... )`"), "hardware"),
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), "bug"),
    (torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"), "bug"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out_of_memory"),
    (torch.AcceleratorError("CUDA error: out of memory"), "out_of_memory"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out_of_memory"),
    (RuntimeError("shapes cannot be multiplied"), "bug"),
]


@pytest.mark.parametrize(("error", "failure"), ENDS, ids=lambda value: str(value)[:60])
def test_the_end_of_a_worker_names_its_cause(error: Exception, failure: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 1)
    assert exit_codes.report_worker_end(error, journal, "set a smaller rank") == EXIT_BUG
    (event,) = JournalReader(tmp_path / "journal.jsonl").read()
    assert event.data["failure_class"] == failure


@pytest.mark.parametrize("error", [ENDS[0][0], ENDS[5][0]], ids=["lost", "memory"])
def test_errors_of_the_gpu_while_loading_do_not_blame_the_model(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are raised as they are, so that the attempt counts as one of hardware or of memory, not of settings."""
    import families

    families.make("llama").save_pretrained(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fail)
    with pytest.raises(type(error), match="CUDA"):
        loading.load(tmp_path, None, FOUR_BITS, torch.device("cpu"))
    monkeypatch.setattr("bitsandbytes.functional.quantize_4bit", fail)
    with pytest.raises(type(error), match="CUDA"):
        device.find_four_bit_fault(torch.device("cpu"), (64,), "nf4")


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"


@pytest.mark.parametrize(
    ("cuda", "visible", "gpus", "setting", "words"),
    [
        (None, None, 1, "cuda", "is a build without CUDA"),
        (None, None, 1, "auto", None),
        ("12.8", "", 0, "cuda", "CUDA_VISIBLE_DEVICES hides all GPUs"),
        ("12.8", "", 0, "auto", None),
        ("12.8", None, 1, "cuda", OLD_DRIVER[:60]),
        ("12.8", None, 1, "auto", OLD_DRIVER[:60]),
        ("12.8", None, 1, "cpu", None),
    ],
)
def test_a_gpu_that_cannot_be_used_is_explained(
    cuda: str | None, visible: str | None, gpus: int, setting: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(OLD_DRIVER)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(device, "count_visible_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if words is None:
        assert device.pick_device(setting).type == "cpu"  # type: ignore[arg-type]
        return
    with pytest.raises(SettingsError, match=rf"machine.device: {setting}") as caught:
        device.pick_device(setting)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize("is_supported", [False, True])
def test_bfloat16_is_used_and_allowed_only_where_the_gpu_has_it(
    is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or is_supported

    names = {GPU.index: "Tesla T4"}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {GPU: (7, 5)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda chosen: names[chosen.index])
    assert device.pick_dtype("auto", GPU) == (torch.bfloat16 if is_supported else torch.float16)
    described = comparability.describe_numerics("adapter", Settings(), GPU, 4)
    assert (described["device"], described["dtype"]) == ("Tesla T4", "bfloat16" if is_supported else "float16")
    for setting in ("auto", "float16"):
        device.require_dtype(setting, GPU)
    device.require_dtype("bfloat16", torch.device("cpu"))
    if is_supported:
        device.require_dtype("bfloat16", GPU)
        return
    with pytest.raises(SettingsError, match=r"bfloat16 is not supported by Tesla T4 \(compute capability 7.5; "):
        device.require_dtype("bfloat16", GPU)


@pytest.mark.parametrize("error", [ENDS[0][0], ENDS[5][0]], ids=["lost", "memory"])
def test_a_probe_of_a_broken_gpu_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is missing is another RuntimeError, and is left out."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    monkeypatch.setattr(hardware_probe.profiler, "measure_product_flops_per_s", lambda *_: 1e12)
    with pytest.raises(type(error)):
        dict(hardware_probe.probe_gpu(torch.device("cpu"), 64, {}))


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_restored_moments_of_a_paged_optimizer_are_in_its_own_memory() -> None:
    """A GPU pages the memory that the optimizer has allocated itself. After a rollback it is used again, because
    bitsandbytes never frees it."""
    parameter = torch.nn.Parameter(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
    parameter.grad = torch.ones_like(parameter)
    own = bitsandbytes.optim.PagedAdamW8bit([parameter])
    own.step()
    tensors, values = optimizer.flatten_state(own)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    pages = [own.state[parameter][name] for name in ("state1", "state2")]
    parameter.grad = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    own.step()
    changed = optimizer.flatten_state(own)[0]
    assert not all(torch.equal(tensor, changed[name]) for name, tensor in saved.items())
    optimizer.restore(own, saved, values)
    assert all(own.state[parameter][name] is page for name, page in zip(("state1", "state2"), pages, strict=True))
    restored = optimizer.flatten_state(own)[0]
    assert all(torch.equal(tensor, restored[name]) for name, tensor in saved.items())
