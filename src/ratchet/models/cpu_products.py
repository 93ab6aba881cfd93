"""Lets oneDNN compute products of float32 matrices on AMD CPUs with AVX-512.

torch computes them with Intel's MKL, which uses only AVX2 on AMD CPUs. oneDNN is part of torch too and uses AVX-512: on
a core of an AMD EPYC (Zen 5), it reaches 235 GFLOP/s instead of 105 (docs/evidence_speed.md).
"""

import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

MIN_OPERATIONS = 1_000_000
"""Products of fewer operations (2 x rows x inner x columns) keep torch's kernel: the call of oneDNN from Python would
take as long as the product."""
CPU_INFO = Path("/proc/cpuinfo")
_AMD, _AVX512 = "AuthenticAMD", "AVX512"


@functools.cache
def use_onednn() -> torch.library.Library | None:
    """Replace torch's kernels for products of matrices in this process, where oneDNN is faster (`is_onednn_faster`).

    The results differ by rounding. Returns the library that holds the replacements; they last as long as it exists, and
    the cache keeps it. Returns None if nothing is replaced.
    """
    if not is_onednn_faster():
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # of replaced kernels
        library.impl("mm", _multiply, "CPU")
        library.impl("mm.out", _multiply_into, "CPU")
        library.impl("addmm", _multiply_and_add, "CPU")
    return library


def is_onednn_faster() -> bool:
    """Return whether torch has oneDNN and MKL, and this is an AMD CPU with AVX-512."""
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != _AVX512:
        return False
    try:
        return _AMD in CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False


def _is_suitable(left: Tensor, right: Tensor) -> bool:
    if left.dtype is not torch.float32 or right.dtype is not torch.float32 or left.dim() != 2 or right.dim() != 2:
        return False
    rows, inner = left.shape
    operations: int = 2 * rows * inner * right.shape[1]
    return inner == int(right.shape[0]) and operations >= MIN_OPERATIONS


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    if _is_suitable(left, right):
        return _multiply_by_onednn(left, right, None)
    return _multiply_by_default(left, right, left.new_empty(left.shape[0], right.shape[-1]))


def _multiply_into(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    if _is_suitable(left, right) and out.shape == (left.shape[0], right.shape[1]):
        return out.copy_(_multiply_by_onednn(left, right, None))
    return _multiply_by_default(left, right, out)


def _multiply_and_add(addend: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    is_bias = addend.dim() == 1 and len(addend) == right.shape[-1] and addend.dtype is left.dtype
    if is_bias and alpha == beta == 1 and _is_suitable(left, right):
        return _multiply_by_onednn(left, right, addend)
    output = left.new_empty(left.shape[0], right.shape[-1])
    return torch.addmm(addend, left, right, beta=beta, alpha=alpha, out=output)


def _multiply_by_onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return product


def _multiply_by_default(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute the product with torch's own kernel: `addmm.out` is not replaced."""
    return torch.addmm(left.new_zeros(1), left, right, beta=0, out=out)
