"""Compares Ratchet's kernels for CPUs with torch's and transformers' operators: forward and backward, in float32.

    python benchmarks/cpu_kernels.py [--quick] [--threads N] [--json FILE]

Attention of a pack of about 1,024 tokens (or one row of 4,096) in rows of one length, with 8 heads of 64: torch
computes one row after the other (`scaled_dot_product_attention`, causal), as Ratchet does without a compiler. The other
operators have 256 rows of the widths of `limit` in benchmarks/train.py. The two implementations run in turns; a
measurement is five forward and backward passes of one. Ratios are medians over pairs. If there are no kernels, the
benchmark prints the reason, and the exit code is 0.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "PASSIVE"}

import torch
from report import finish
from report_rows import Row, at_least, at_most, ratio
from torch import Tensor
from torch.nn import functional
from transformers.models.llama import modeling_llama

from ratchet.models.cpu_kernels import library, operators
from ratchet.models.cpu_kernels.attention import Span, attend
from ratchet.models.fused_operators import _GatedUnit, _RootMeanSquareNorm

TOKENS, FEW_TOKENS, HEADS, WIDTH, HIDDEN, INNER = 1024, 256, 8, 64, 512, 1376
ROW_LENGTHS = {True: (60, 150, 1024), False: (25, 60, 150, 300, 1024, 4096)}
SHORT = 300
"""Attention of rows of at most this many tokens must be FASTER; of longer rows, NOT_SLOWER."""
PAIRS = {True: 25, False: 41}
PASSES = 5
"""Passes of a measurement."""
FASTER, NOT_SLOWER = 1.25, 1.0
LARGEST_DIFFERENCE = 1e-5
"""Limit for the difference of any result, divided by the largest number of that result."""
Compute = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def compute(operator: Compute, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
    """Return the seconds of some forward and backward passes, and the results of the last."""
    begun = time.perf_counter()
    for _ in range(PASSES):
        outputs = operator(inputs)
        found = torch.autograd.grad(outputs, inputs, gradients)
    return time.perf_counter() - begun, [*(output.detach() for output in outputs), *found]


def compare(
    name: str, target: float, pairs: int, theirs: Compute, ours: Compute, inputs: list[Tensor]
) -> Iterator[Row]:
    """Yield the rows of one operator."""
    for part in inputs:
        part.requires_grad_()
    gradients = [torch.randn_like(output) for output in theirs(inputs)]
    expected, found = compute(theirs, inputs, gradients)[1], compute(ours, inputs, gradients)[1]
    difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, found, strict=True))
    times = [(compute(theirs, inputs, gradients)[0], compute(ours, inputs, gradients)[0]) for _ in range(pairs)]
    value, spread = ratio([pair[0] for pair in times], [pair[1] for pair in times])
    yield at_least(f"{name}: time of torch / ours", value, target, spread)
    yield at_most(f"{name}: largest difference", difference, LARGEST_DIFFERENCE)


def draw_heads(tokens: int) -> Tensor:
    return torch.randn(1, tokens, HEADS, WIDTH).transpose(1, 2)


def compare_attention(length: int, pairs: int) -> Iterator[Row]:
    """Yield the rows of attention."""
    count = max(1, TOKENS // length)
    scale = WIDTH**-0.5
    spans: list[Span] = [(0, k * length, (k + 1) * length, True) for k in range(count)]

    def theirs(inputs: Sequence[Tensor]) -> list[Tensor]:
        of_rows = zip(*(part.split(length, dim=2) for part in inputs), strict=True)
        attention = functional.scaled_dot_product_attention
        return [torch.cat([attention(*row, is_causal=True, scale=scale).transpose(1, 2) for row in of_rows], dim=1)]

    def ours(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [attend(inputs[0], inputs[1], inputs[2], spans, scale)]

    inputs = [draw_heads(count * length) for _ in range(3)]
    target = FASTER if length <= SHORT else NOT_SLOWER
    yield from compare(f"attention, rows of {length} tokens", target, pairs, theirs, ours, inputs)


def measure(quick: bool) -> Iterator[Row]:
    """Yield all rows."""
    pairs = PAIRS[quick]
    for length in ROW_LENGTHS[quick]:
        yield from compare_attention(length, pairs)
    norm = modeling_llama.LlamaRMSNorm(HIDDEN)
    weight = norm.weight.requires_grad_(False).normal_()
    cos, sin = torch.randn(1, FEW_TOKENS, WIDTH), torch.randn(1, FEW_TOKENS, WIDTH)
    rotate = modeling_llama.apply_rotary_pos_emb
    others: list[tuple[str, Compute, Compute, list[Tensor]]] = [
        (
            "gated unit",
            lambda x: [functional.silu(x[0]) * x[1]],
            lambda x: [_GatedUnit.apply(*x)],
            [torch.randn(FEW_TOKENS, INNER), torch.randn(FEW_TOKENS, INNER)],
        ),
        (
            "norm",
            lambda x: [norm(x[0])],
            lambda x: [_RootMeanSquareNorm.apply(x[0], weight, norm.variance_epsilon)],
            [torch.randn(FEW_TOKENS, HIDDEN)],
        ),
        (
            "rotary embedding",
            lambda x: rotate(*x, cos, sin),
            lambda x: operators.rotate(rotate, *x, cos, sin),
            [draw_heads(FEW_TOKENS), draw_heads(FEW_TOKENS)],
        ),
    ]
    for name, theirs, ours, inputs in others:
        yield from compare(name, FASTER, pairs, theirs, ours, inputs)


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three lengths of rows, 25 pairs")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of both (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    if not (found := library.load_kernels()).is_available:
        print(f"skipped: kernels: {found.text}")
        return finish([], given.json)
    return finish(list(measure(given.quick)), given.json)


if __name__ == "__main__":
    sys.exit(main())
