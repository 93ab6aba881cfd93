"""Tests on a GPU: quantization, dtypes, attention, determinism and the loss, against the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

import families
from ratchet.config.train import Train
from ratchet.data.batches import TokenRows
from ratchet.models import adapters, loading
from ratchet.models import device as devices
from ratchet.models.chunked_loss import ChunkedLoss, compute_nll
from ratchet.models.device import MAX_ROUNDING_ERROR
from ratchet.models.loss import SequenceBatch

CPU = torch.device("cpu")
WIDTHS = (64, 320, 1024, 4096)
TOLERANCE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 8e-2}
"""Largest difference of a row's loss in nats per token from float32 on a CPU, of a tiny model with large weights."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    families.make("llama", hidden_size=256, intermediate_size=512, num_attention_heads=4).save_pretrained(folder)
    return folder


def random_rows(lengths: tuple[int, ...] = (20, 17, 9, 3, 30, 64)) -> TokenRows:
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, families.VOCABULARY, length).tolist() for length in lengths]
    return TokenRows.from_lists(ids, [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in ids])


def adapted(base: Path, device: torch.device, **changes: Any) -> Any:
    settings = Train(**{"rank": 8, "compute_dtype": "float32", "dropout": 0.0} | changes)
    model = adapters.attach(loading.load(base, None, settings, device), settings, "base", (), 100)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in adapters.trainable_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter), alpha=0.05)
    return model


def step(model: Any, device: torch.device, sequences: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss in nats and gradients of one micro-batch."""
    model.zero_grad(set_to_none=True)
    loss = ChunkedLoss(model.train(), SequenceBatch.from_sequences(random_rows(), sequences, device), 1.0)
    loss.backward()
    named = adapters.trainable_parameters(model)
    return loss.item(), {name: p.grad.detach().float().cpu() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_those_of_the_cpu(kind: str, double: bool, device: torch.device, record: Any) -> None:
    """A base that was quantized on the CPU (shards) must equal one that was quantized on the GPU."""
    assert devices.find_four_bit_fault(device, WIDTHS, kind) is None
    different, largest = 0.0, 0.0
    for width in WIDTHS:
        weight = torch.randn(256, width, generator=torch.Generator().manual_seed(width))
        packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=double)
        there, there_state = quantize_4bit(weight.to(device), quant_type=kind, compress_statistics=double)
        different = max(different, float((there.cpu() != packed).float().mean()))
        expected, found = dequantize_4bit(packed, state), dequantize_4bit(there, there_state).cpu()
        largest = max(largest, float((found - expected).norm() / expected.norm()))
        assert float((found - weight).norm() / weight.norm()) <= MAX_ROUNDING_ERROR[kind]
    record(different_bytes=different, largest_difference=largest)
    assert different <= 1e-3
    assert largest <= 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_loss_and_gradient_are_those_of_the_cpu(
    quantization: str, dtype: str, base: Path, device: torch.device, record: Any
) -> None:
    if dtype == "bfloat16" and device.type == "cuda" and devices.pick_dtype("auto", device) != torch.bfloat16:
        pytest.skip("this GPU has no bfloat16")
    sequences = [[0, 3], [4], [5]]
    expected, gradients = step(adapted(base, CPU, quantization=quantization), CPU, sequences)
    found, own = step(adapted(base, device, quantization=quantization, compute_dtype=dtype), device, sequences)
    tokens = random_rows().count_trained([0, 3, 4, 5])
    dots = sum(float((own[name] * gradients[name]).sum()) for name in gradients)
    norms = [sum(float(part.square().sum()) for part in parts.values()) ** 0.5 for parts in (own, gradients)]
    record(loss_difference=abs(found - expected) / tokens, gradient_cosine=dots / (norms[0] * norms[1]))
    assert abs(found - expected) / tokens <= TOLERANCE[dtype]
    assert dots / (norms[0] * norms[1]) >= (0.999 if dtype == "float32" else 0.95)


@pytest.mark.parametrize("adapter", ["lora", "dora", "adalora"])
def test_a_step_gives_the_same_bits_again(adapter: str, base: Path, device: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model = adapted(base, device, adapter=adapter, rank=16, compute_dtype="auto", dropout=0.1)
        results = []
        for _ in range(3):
            torch.manual_seed(5)
            results.append(step(model, device, [[0, 3, 4], [1, 2], [5]]))
    finally:
        torch.use_deterministic_algorithms(False)
    for loss, gradients in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(gradient, results[0][1][name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("backend", ["auto", "MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_rows_of_a_pack_do_not_see_each_other(
    backend: str, base: Path, device: torch.device, only_gpu: None, record: Any
) -> None:
    """Flash attention takes no mask, so transformers' packs cannot use it; single rows can."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = list(SDPBackend.__members__.values()) if backend == "auto" else [getattr(SDPBackend, backend)]
    rows, model = random_rows(), adapted(base, device, compute_dtype="auto", quantization="none").eval()
    packed, alone = [], []
    try:
        with sdpa_kernel(kernels), torch.no_grad():
            for row in range(6):
                batch = SequenceBatch.from_sequences(rows, [[row]], device)
                alone.append(float(compute_nll(model, batch)))
            packed.append(float(compute_nll(model, SequenceBatch.from_sequences(rows, [[0, 1, 2, 3, 4, 5]], device))))
    except RuntimeError as error:
        if backend == "auto" or "No available kernel" not in str(error):
            raise
        record(available=f"{len(alone)} of 6 rows alone, packs: {bool(packed)}")
        pytest.skip(f"{backend} is not available here: {str(error)[:100]}")
    tokens = rows.count_trained(range(6))
    record(difference=abs(packed[0] - sum(alone)) / tokens)
    assert abs(packed[0] - sum(alone)) / tokens <= 2e-2


def test_packs_without_positions_would_differ(base: Path, device: torch.device) -> None:
    """This test shows that the comparison above can fail."""
    model = adapted(base, device, quantization="none").eval()
    batch = SequenceBatch.from_sequences(random_rows(), [[0, 1, 2]], device)
    with torch.no_grad():
        apart, together = (
            float(compute_nll(model, SequenceBatch(batch.input_ids, batch.labels, positions)))
            for positions in (batch.position_ids, None)
        )
    assert abs(apart - together) > 1e-3
