"""A simulated GPU: tensors that say they are on `cuda:0`, and are computed on the CPU.

Python code sees a CUDA device; torch itself sees a device of its own (PrivateUse1), so automatic differentiation works
without CUDA. As on a GPU, an operation on tensors of different devices fails, and so does, in deterministic mode, an
operation without a deterministic CUDA kernel. The simulation is global to its process and cannot be removed: use it in
a process of its own.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import bitsandbytes  # noqa: F401  (it looks for CUDA while it is imported)
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

CUDA = torch.device("cuda", 0)
ATEN = torch.ops.aten
COPIES = {ATEN.copy_.default, ATEN._to_copy.default, ATEN._copy_from.default}
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default}
"""Operations whose indices may be on the CPU."""
ALWAYS = {ATEN.kthvalue.default, ATEN.median.dim}
"""Operations without a deterministic kernel (ATen/native/cuda: Sorting.cpp)."""
FLOATING = {ATEN.cumsum.default, ATEN.histc.default}
"""Operations without one for floating-point numbers (ScanKernels.cpp, SummaryOps.cu)."""


class _Memory:
    """The size in bytes of the largest tensor that fits into the memory of the GPU."""

    largest_bytes = 2**40


memory = _Memory()


class _Queue:
    """Copies to the host that the GPU has not made yet, and the current GPU of the calling thread."""

    def __init__(self) -> None:
        self.current, self.waits = 0, 0
        self._copies: list[tuple[Tensor, Tensor]] = []

    def copy(self, target: Tensor, values: Tensor) -> None:
        """Copy without waiting. Until then, the target has other numbers."""
        target.fill_(77)
        self._copies.append((target, values.clone()))

    def synchronize(self, device: Any = None) -> None:
        """Wait for a GPU; without a device, for the current one."""
        self.waits += 1
        index = None if device is None else torch.device(device).index
        if (self.current if index is None else index) == CUDA.index:
            for target, values in self._copies:
                target.copy_(values)
            self._copies.clear()


queue = _Queue()


class SimulatedTensor(Tensor):
    """A tensor on the simulated GPU; `inner` has its values, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "SimulatedTensor":
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("simulated", 0), requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.inner!r})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # shape and dtype
        self.inner = value.inner  # type: ignore[attr-defined]

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return _compute(function, arguments, options or {})


def _is_simulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == "simulated"


def _compute(function: Any, arguments: Any, options: Any) -> Any:
    leaves = tree_flatten((arguments, options))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    simulated = [tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)]
    target = options.get("device")
    to_host = bool(simulated) and target is not None and not _is_simulated(target)
    foreign = [t for t in tensors if not isinstance(t, SimulatedTensor) and t.dim()]
    if simulated and foreign and function not in COPIES and function not in INDEXED:
        raise RuntimeError(f"{function}: expected all tensors on one device, found cuda:0 and {foreign[0].device}")
    if torch.are_deterministic_algorithms_enabled() and simulated:
        is_floating = simulated[0].is_floating_point() and options.get("dtype") is None
        if function in ALWAYS or (function in FLOATING and is_floating):
            raise RuntimeError(f"{function} does not have a deterministic implementation")
    if function is ATEN.copy_.default and arguments[2:] == (True,) and not isinstance(arguments[0], SimulatedTensor):
        queue.copy(arguments[0], simulated[0].inner)
        return arguments[0]
    inner = tree_map_only(SimulatedTensor, lambda t: t.inner, (arguments, options))
    if target is not None:
        inner[1]["device"] = torch.device("cpu")
        inner[1].pop("pin_memory", None)
    if function is ATEN.histc.default and simulated:  # a CPU counts floating-point numbers only, a GPU integers
        result = function(inner[0][0].float(), *inner[0][1:], **inner[1]).to(simulated[0].dtype)
    else:
        result = function(*inner[0], **inner[1])
    if isinstance(result, Tensor) and function not in COPIES and result.nbytes > memory.largest_bytes:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {result.nbytes} bytes.")
    if function is ATEN._local_scalar_dense.default or to_host:
        return result
    if not simulated and not _is_simulated(target):
        return result
    if function is ATEN.copy_.default and not isinstance(arguments[0], SimulatedTensor):
        return arguments[0]
    wrapped = tree_map_only(Tensor, SimulatedTensor, result)
    return return_and_correct_aliasing(function, arguments, options, wrapped) if simulated else wrapped


class _Factories(TorchDispatchMode):
    """Creates tensors on the simulated GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if _is_simulated(options.get("device")):
            return _compute(function, arguments, options)
        return function(*arguments, **options)


class _Devices(TorchFunctionMode):
    """Passes torch the simulated device in place of `cuda`."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        options.pop("pin_memory", None)
        if function is torch.device:
            return function(*arguments, **options)

        def translate(value: Any) -> Any:
            if isinstance(value, torch.device) and value.type == "cuda":
                return torch.device("simulated", 0)
            if isinstance(value, str) and value.split(":")[0] == "cuda":
                return "simulated:0"
            return value

        return function(*map(translate, arguments), **{name: translate(value) for name, value in options.items()})


class _Event:
    """An event of a GPU that is always ready."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


MEMORY_BYTES = 2**34
FUNCTIONS: dict[str, Any] = {
    "Event": _Event,
    "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: queue.current,
    "synchronize": queue.synchronize, "set_device": lambda _: None,
    "empty_cache": lambda: None, "reset_peak_memory_stats": lambda _=None: None,
    "mem_get_info": lambda _=None: (MEMORY_BYTES // 2, MEMORY_BYTES), "memory_reserved": lambda _=None: 2**20,
    "max_memory_reserved": lambda _=None: 2**21, "max_memory_allocated": lambda _=None: 2**20,
    "get_device_name": lambda _=None: "NVIDIA L4", "get_device_capability": lambda _=None: (8, 9),
    "is_bf16_supported": lambda including_emulation=True: True, "temperature": lambda _=None: 50,
}  # fmt: skip


@contextlib.contextmanager
def simulate() -> Iterator[None]:
    """Give this process a simulated GPU inside the context. Call it before anything is differentiated."""
    backend_registration._setup_privateuseone_for_python_backend("simulated")
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(numbers, device=...)` then asks the modes below
    torch.cuda.default_generators = (torch.default_generator,)
    for name, function in FUNCTIONS.items():
        setattr(torch.cuda, name, function)
    with _Devices(), _Factories():
        yield
