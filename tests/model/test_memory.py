"""Memory that runs out: recognised where it really does, and forecast as autograd and optimizers really hold it."""

import json
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.model import adapter, memory, quantized
from ratchet.model.loss import answer_nll
from ratchet.model.quantized import Model
from ratchet.training import optimizer

ROWS = 2
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
Dtype = Literal["float32", "bfloat16"]
Attention = Literal["sdpa", "eager"]
Kind = Literal["adamw", "adamw_8bit"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers with random weights, grouped keys and a gated MLP."""
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def with_adapter(base: Path, settings: Train) -> Model:
    return adapter.attach(quantized.load(base, settings, torch.device("cpu")), settings, "digest").train()


def held_bytes(model: Model, length: int) -> int:
    """What autograd keeps of a forward pass over ROWS x length tokens, learning from one column."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    input_ids = torch.randint(0, 100, (ROWS, length))
    labels = torch.full_like(input_ids, -100)
    labels[:, -1] = 1
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        answer_nll(model, input_ids, labels).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize("length", [32, 160])
@pytest.mark.parametrize(
    ("quantization", "dtype", "dropout", "attention", "targets"),
    [
        ("nf4", "float32", 0.0, "sdpa", "all"),
        ("none", "float32", 0.1, "sdpa", "all"),
        ("none", "float32", 0.0, "eager", "all"),
        ("nf4", "bfloat16", 0.0, "sdpa", "all"),
        ("none", "bfloat16", 0.1, "eager", "all"),
        ("none", "bfloat16", 0.0, "sdpa", ("q_proj", "v_proj")),
    ],
)
def test_activations_are_those_that_autograd_keeps(
    base: Path, quantization: Literal["nf4", "none"], dtype: Dtype, dropout: float, attention: Attention,
    targets: Any, length: int,
) -> None:  # fmt: skip
    settings = Train(
        quantization=quantization, compute_dtype=dtype, dropout=dropout, attention=attention, targets=targets, rank=4
    )
    model = with_adapter(base, settings)
    forecast = memory.forecast(model, settings, ROWS * length, ROWS)
    assert forecast.activations_bytes == pytest.approx(held_bytes(model, length), rel=0.1)


def test_activation_checkpointing_keeps_the_inputs_of_layers_and_one_layer(base: Path) -> None:
    settings = Train(rank=4, quantization="none", compute_dtype="float32")
    forecast = memory.forecast(with_adapter(base, settings), settings, 1000, 4)
    inputs = 3 * 1000 * 64 * 4
    assert forecast.recomputed_bytes == pytest.approx(inputs + forecast.activations_bytes / 3)
    assert forecast.total_bytes(False) - forecast.total_bytes(True) == (
        forecast.activations_bytes - forecast.recomputed_bytes
    )


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("rank", [2, 64])
def test_adapter_and_optimizer_are_those_that_torch_holds(base: Path, kind: Kind, rank: int) -> None:
    """64 x 64 elements are the fewest that bitsandbytes keeps in 8 bits."""
    settings = Train(rank=rank, quantization="none", compute_dtype="float32", optimizer=kind)
    model = with_adapter(base, settings)
    parameters = [parameter for _, parameter in adapter.trainable(model)]
    own = optimizer.build(iter(parameters), settings, torch.device("cpu"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    own.step()
    forecast = memory.forecast(model, settings, 64, 1)
    assert forecast.adapter_bytes == sum(p.nbytes + p.grad.nbytes for p in parameters if p.grad is not None)
    states = [
        tensor
        for state in own.state.values()
        for name, tensor in state.items()
        if name in ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
    ]
    assert forecast.optimizer_bytes == sum(tensor.nbytes for tensor in states) > 0


def test_what_quantisation_saves_is_what_the_quantised_model_lacks(base: Path) -> None:
    plain = Train(rank=4, quantization="none", compute_dtype="float32", double_quantization=False)
    nf4 = plain.model_copy(update={"quantization": "nf4"})
    before = memory.forecast(with_adapter(base, plain), plain, 64, 1)
    after = memory.forecast(with_adapter(base, nf4), nf4, 64, 1)
    assert before.dequantized_bytes == 0
    assert after.dequantized_bytes == 64 * 160 * 4
    saved = before.total_bytes(False) - after.total_bytes(False)
    assert savings(memory.advice(before, plain, Machine()))["train.quantization: nf4"] == pytest.approx(saved, rel=0.05)


def test_logits_are_counted_as_if_every_position_were_learned_from(base: Path) -> None:
    settings = Train(rank=4, quantization="none", compute_dtype="float32")
    assert memory.forecast(with_adapter(base, settings), settings, 30, 3).logits_bytes == 3 * 4 * 30 * 100


def savings(advice: str) -> dict[str, float]:
    """Bytes by setting, in the order of the text."""
    found = re.findall(r"([\w.]+: [\w.]+|[\w.]+ \(and .*?\): \d+) \(([\d.]+) (\w+) less\)", advice)
    return {what: float(number) * UNITS[unit] for what, number, unit in found}


def test_advice_names_every_setting_that_saves_with_what_it_saves_first_what_saves_most(base: Path) -> None:
    settings = Train(rank=64, quantization="none", compute_dtype="float32")
    model = with_adapter(base, settings)
    forecast = memory.forecast(model, settings, 2000, 1)
    found = savings(memory.advice(forecast, settings, Machine()))
    assert set(found) == {
        "prepare.max_tokens: 1000", "machine.activation_checkpointing: true", "train.rank: 32",
        "train.quantization: nf4", "train.optimizer: adamw_8bit",
    }  # fmt: skip
    assert list(found.values()) == sorted(found.values(), reverse=True)
    half = memory.forecast(model, settings, 1000, 1)
    expected = forecast.total_bytes(False) - half.total_bytes(False)
    assert found["prepare.max_tokens: 1000"] == pytest.approx(expected, rel=0.01)
    expected = forecast.activations_bytes - forecast.recomputed_bytes
    assert found["machine.activation_checkpointing: true"] == pytest.approx(expected, rel=0.01)


def test_advice_says_what_is_needed_and_leaves_out_what_is_set_already(base: Path) -> None:
    settings = Train(rank=1, quantization="nf4", compute_dtype="float32", optimizer="adamw_8bit")
    forecast = memory.forecast(with_adapter(base, settings), settings, 512, 1)
    advice = memory.advice(forecast, settings, Machine(activation_checkpointing=True))
    assert list(savings(advice)) == ["prepare.max_tokens: 256"]
    assert "activations" in advice
    assert "base weights" in advice
    assert "With changes to `machine` this run goes on; others begin a new one." in advice


def test_advice_for_packs_is_to_make_packs_shorter(base: Path) -> None:
    settings = Train(rank=1, quantization="nf4", compute_dtype="float32", batching="packed")
    forecast = memory.forecast(with_adapter(base, settings), settings, 512, 1)
    advice = memory.advice(forecast, settings, Machine())
    assert "train.pack_tokens (and if need be prepare.max_tokens): 256" in savings(advice)


def test_where_nothing_is_left_to_change_advice_says_so(base: Path) -> None:
    settings = Train(rank=1, quantization="nf4", compute_dtype="float32", optimizer="adamw_8bit")
    forecast = memory.forecast(with_adapter(base, settings), settings, 1, 1)
    advice = memory.advice(forecast, settings, Machine(activation_checkpointing=True))
    assert "Take a smaller base model, or a machine with more memory." in advice


EXHAUST = """
import json, resource
import numpy, torch
from ratchet.model import memory

torch.ones(8, 8) @ torch.ones(8, 8)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, now + 2**30))
wide = torch.ones(2**15, 4, requires_grad=True)
attempts = {
    "torch": lambda: torch.empty(2**31),
    "step": lambda: (wide @ wide.T).softmax(1).sum().backward(),
    "python": lambda: bytearray(2**33),
    "numpy": lambda: numpy.ones(2**30),
    "negative": lambda: torch.empty(-1),
    "shapes": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
}
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
    except Exception as error:
        found[name] = memory.is_exhausted(error)
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of the address space are Linux's")
def test_memory_that_really_runs_out_is_recognised() -> None:
    done = subprocess.run([sys.executable, "-c", EXHAUST], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "torch": True,
        "step": True,
        "python": True,
        "numpy": True,
        "negative": False,
        "shapes": False,
    }


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=["cuda", "cublas", "cudnn", "driver", "cublas-other", "illegal-access", "disk", "other-type", "interrupt"],
)
def test_nothing_else_is_taken_for_it(error: BaseException, exhausted: bool) -> None:
    assert memory.is_exhausted(error) == exhausted


class Node:
    """Refers to itself, as the frames of a failed computation do through its error."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(4)


def test_releasing_gives_back_what_only_refers_to_itself() -> None:
    kept = weakref.ref(Node())
    memory.release()
    assert kept() is None
