"""Compares 4-bit layers on a CPU with those of bitsandbytes: forward and backward through the same weights.

    python benchmarks/four_bits.py [--quick] [--json FILE]

For each model the block's matrices are quantized (NF4, double quantization) and computed in float32 with one thread. A
measurement is a forward and a backward pass through each of them, of ours and of bitsandbytes in turns; ratios are
medians over pairs. With few rows most of bitsandbytes' time is spent on memory for dequantized matrices; with many rows
both wait for the same products, and the ratio approaches 1.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

import torch
from bitsandbytes.nn import Linear4bit
from report import finish
from report_rows import Row, at_least, at_most, ratio, told

from ratchet.models.tiled_linear import TiledLinear4bit

BLOCKS = {
    "1B": [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)],
    "8B": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)],
}
"""Outputs and inputs of the matrices of a block: Llama 3.2 1B, and Llama 3.1 8B (config.json of both models)."""
ROWS = {True: (64, 256), False: (64, 128, 256, 512, 1024)}
PAIRS = {True: 3, False: 7}
TARGET, TARGET_ROWS = 1.5, 64
LARGEST_DIFFERENCE = 1e-5
"""Limit for the difference of any result, divided by the largest result."""


def build(outputs: int, inputs: int) -> tuple[Linear4bit, Linear4bit]:
    """Return a layer of bitsandbytes and ours, with the same weights in memory."""
    theirs, ours = (
        Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.float32, quant_type="nf4") for _ in range(2)
    )
    theirs.weight.data.normal_(std=0.02)
    theirs = theirs.to("cpu").requires_grad_(False)
    theirs.support_avx512bf16_for_cpu = False
    ours.weight, ours.__class__ = theirs.weight, TiledLinear4bit
    return theirs, ours


def run(layers: list[Linear4bit], inputs: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Return the seconds of a forward and backward pass through each layer, and their results."""
    results = []
    begun = time.perf_counter()
    for layer, x in zip(layers, inputs, strict=True):
        x.grad = None
        output = layer(x)
        output.backward(output.detach())
        results += [output.detach(), x.grad]
    return time.perf_counter() - begun, [result for result in results if result is not None]


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of each model and number of rows."""
    for name, shapes in BLOCKS.items():
        theirs, ours = map(list, zip(*(build(*shape) for shape in shapes), strict=True))
        for rows in ROWS[quick]:
            inputs = [torch.randn(rows, layer.in_features).requires_grad_() for layer in ours]
            expected, found = run(theirs, inputs)[1], run(ours, inputs)[1]
            difference = max(
                float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, found, strict=True)
            )  # fmt: skip
            del expected, found
            pairs = [(run(theirs, inputs)[0], run(ours, inputs)[0]) for _ in range(PAIRS[quick])]
            value, spread = ratio([pair[0] for pair in pairs], [pair[1] for pair in pairs])
            row = f"{name}, {rows} rows: time of bitsandbytes / ours"
            yield at_least(row, value, TARGET, spread) if rows <= TARGET_ROWS else told(row, value, spread)
            yield at_most(f"{name}, {rows} rows: largest difference", difference, LARGEST_DIFFERENCE)


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two numbers of rows, three pairs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return finish(list(measure(given.quick)), given.json)


if __name__ == "__main__":
    sys.exit(main())
