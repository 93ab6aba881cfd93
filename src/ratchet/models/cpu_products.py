"""Lets oneDNN compute products of float32 matrices on AMD CPUs with AVX-512.

torch computes them with Intel's MKL, which uses only AVX2 on AMD CPUs. oneDNN is part of torch too and uses AVX-512: on
a core of an AMD EPYC (Zen 5), it reaches 235 GFLOP/s instead of 105 (docs/evidence_speed.md).
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor

MIN_OPERATIONS = 1_000_000
"""Smaller products (2 x rows x inner x columns) stay with MKL: they take some microseconds, and so does the choice."""
CPU_INFO = Path("/proc/cpuinfo")
_AMD, _AVX512 = "AuthenticAMD", "AVX512"

_libraries: list[torch.library.Library] = []
"""The registration of the kernels, which ends with this object."""


def use_onednn() -> None:
    """Replace torch's kernels for products of matrices in this process, where oneDNN is faster (`is_onednn_faster`).

    The results differ by rounding. Repeated calls have no effect.
    """
    if _libraries or not is_onednn_faster():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # of replaced kernels
        library.impl("mm", _multiply, "CPU")
        library.impl("mm.out", _multiply_into, "CPU")
        library.impl("addmm", _multiply_and_add, "CPU")
    _libraries.append(library)


def is_onednn_faster() -> bool:
    """Return whether torch has oneDNN and MKL, and the CPU is one of AMD with AVX-512."""
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != _AVX512:
        return False
    try:
        return _AMD in CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        return False


def _is_suitable(left: Tensor, right: Tensor) -> bool:
    if left.dtype is not torch.float32 or right.dtype is not torch.float32 or left.dim() != 2 or right.dim() != 2:
        return False
    rows, inner = left.shape
    operations: int = 2 * rows * inner * right.shape[1]
    return inner == int(right.shape[0]) and operations >= MIN_OPERATIONS


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    if _is_suitable(left, right):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
        return product
    return _multiply_by_mkl(left, right, left.new_empty(left.shape[0], right.shape[-1]))


def _multiply_into(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    if _is_suitable(left, right) and out.shape == (left.shape[0], right.shape[1]):
        return out.copy_(_multiply(left, right))
    return _multiply_by_mkl(left, right, out)


def _multiply_and_add(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if added.dim() == 1 and len(added) == right.shape[-1] and alpha == beta == 1 and _is_suitable(left, right):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), added, "none", [], "")
        return product
    output = left.new_empty(left.shape[0], right.shape[-1])
    return torch.addmm(added, left, right, beta=beta, alpha=alpha, out=output)


def _multiply_by_mkl(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute the product with an operator that is not replaced; `mm` has the same kernel."""
    return torch.addmm(left.new_zeros(1), left, right, beta=0, out=out)
