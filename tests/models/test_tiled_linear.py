"""4-bit layers that are dequantized in tiles compute what bitsandbytes computes, forward and backward."""

import pytest
import torch
from bitsandbytes.nn import Linear4bit

from ratchet.models import tiled_linear
from ratchet.models.tiled_linear import TiledLinear4bit

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.01, "atol": 0.01}}
"""Sums in another order. On most processors the bits are equal."""


def build_pair(
    outputs: int,
    inputs: int,
    kind: str,
    double: bool,
    bias: bool,
    dtype: torch.dtype,
    storage: torch.dtype = torch.uint8,
) -> tuple[Linear4bit, TiledLinear4bit]:
    """Return a layer of bitsandbytes and ours with the same weights."""
    torch.manual_seed(outputs)
    plain = torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)
    layers = []
    for _ in range(2):
        layer = Linear4bit(
            inputs, outputs, bias, dtype, compress_statistics=double, quant_type=kind, quant_storage=storage
        )  # fmt: skip
        layer.load_state_dict(plain.state_dict())
        layers.append(layer.to("cpu").requires_grad_(False))
    layers[1].__class__ = TiledLinear4bit
    return layers[0], layers[1]


def run(layer: Linear4bit, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    assert x.grad is not None
    return output.detach(), x.grad


@pytest.mark.parametrize(
    ("outputs", "inputs", "kind", "double", "bias", "dtype", "storage"),
    [
        (160, 192, "nf4", True, False, torch.float32, torch.uint8),
        (161, 192, "nf4", False, True, torch.float32, torch.uint8),
        (64, 320, "fp4", True, True, torch.bfloat16, torch.bfloat16),
        (100, 100, "nf4", True, False, torch.float32, torch.uint8),  # a row is not a whole number of blocks
    ],
)
def test_results_are_those_of_bitsandbytes(
    outputs: int, inputs: int, kind: str, double: bool, bias: bool, dtype: torch.dtype, storage: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(tiled_linear, "LARGEST_KEPT_BYTES", 0)
    monkeypatch.setattr(tiled_linear, "TILE_BYTES", 50_000)  # the last tile is a smaller one
    theirs, ours = build_pair(outputs, inputs, kind, double, bias, dtype, storage)
    x, gradient = torch.randn(2, 7, inputs, dtype=dtype), torch.randn(2, 7, outputs, dtype=dtype)
    for expected, found in zip(run(theirs, x, gradient), run(ours, x, gradient), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCES[dtype])
    assert all(torch.equal(*pair) for pair in zip(run(ours, x, gradient), run(ours, x, gradient), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), **TOLERANCES[dtype])


def test_a_large_matrix_is_never_dequantized_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = build_pair(3000, 3072, "nf4", True, True, torch.float32)
    x, gradient = torch.randn(3, 3072), torch.randn(3, 3000)
    expected, largest = run(theirs, x, gradient), 0
    original = tiled_linear._PackedMatrix._dequantize

    def measure(*arguments: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        tile = original(*arguments)
        largest = max(largest, tile.nbytes)
        return tile

    monkeypatch.setattr(tiled_linear._PackedMatrix, "_dequantize", measure)
    found = run(ours, x, gradient)
    assert 0 < largest <= tiled_linear.TILE_BYTES
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair, **TOLERANCES[torch.float32])
