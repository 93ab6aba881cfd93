"""Traces every memory block that is alive while torch runs a training step without data: size, purpose and lifetime.

The real classes run (transformers' model, peft's and bitsandbytes' layers, our loss, autograd, checkpointing), with
tensors on the meta device, which have shapes and lifetimes but no contents. Attention is dispatched to the operators
that CPUs and GPUs use, because they save different tensors for the backward pass. A dispatch mode sees the result of
every operation; a block lives from there until torch releases its storage. The mode also answers questions about tensor
contents: how many positions are trained (`nonzero`), and whether a batch is packed.

On a CPU, resident memory exceeds live memory (measured on small models: twice), so glibc's malloc is simulated for
these blocks. For an aligned request (posix_memalign), glibc 2.36 takes a block that is larger by alignment and a
header, and frees the remainder. The block, once freed, is too small for the next request of the same size, unless it
merged with its neighbours; autograd's small records, alive until the block's backward pass, are placed in those
remainders and prevent the merge. The simulation covers best fit, merging of free blocks, and large blocks that are
mapped separately above a dynamic threshold (malloc/malloc.c: _int_malloc, _int_memalign, _int_free, sysmalloc), but no
trimming.
"""

import bisect
import math
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from peft.tuners.lora import layer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ratchet.models import fused_operators
from ratchet.models.chunked_loss import ChunkedLoss, Phase, ignore_phase
from ratchet.models.cpu_kernels.attention import plan_workspace
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, TeacherTargets
from ratchet.models.model_spec import find_blocks
from ratchet.models.teacher import OnlineTeacher

Device = Literal["cpu", "cuda"]
Part = Literal["activations", "logits and loss", "dequantized weights", "gradients", "temporary"]
PARTS: tuple[Part, ...] = ("activations", "logits and loss", "dequantized weights", "gradients", "temporary")
Segment = tuple[str, str, int]
"""Direction (`forward`, `backward`), position (`before`, `block`, `after`) and index of the decoder block. A peak is
recorded for each segment."""

_TensorSize = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Shape, strides, dtype, and whether the tensor is on the meta device."""

PAGE = 4096
HEADER = 8
ALIGNMENT = 64
"""Alignment of torch's CPU allocator (c10/core/alignment.h, gAlignment)."""
MIN_BLOCK = 32
ALIGNMENT_SLACK = ALIGNMENT + MIN_BLOCK
"""Bytes that an aligned request needs in addition to its size."""
TOP_PADDING = 128 * 1024
"""Bytes by which the heap grows in addition to a request (DEFAULT_TOP_PAD)."""
MAX_MMAP_THRESHOLD = 32 * 2**20
"""Bytes above which blocks are always mapped separately (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)."""
HELD_SHARE = 0.6
"""Share of the remainders next to blocks of a forward pass that autograd's records occupy. This is the only fitted
number in this module; it was fitted to the resident memory of trainings with and without checkpointing."""

GRANULE_BYTES = {"cpu": 64, "cuda": 512}
"""Block sizes are multiples of these bytes: alignment of c10's CPU allocator, kMinBlockSize of CUDACachingAllocator."""
CUSTOM_GEMM_ROWS = 1536
"""Up to this many rows, bitsandbytes 0.50 may multiply 4-bit weights on a GPU without dequantizing (backends/cuda)."""
MAX_FUSED_HEAD_SIZE = 256
"""Largest attention head size for which GPUs have fused kernels."""
_ATTENTION_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class AllocationEvent:
    """Allocation or release of a block, or release of a part of the autograd graph."""

    key: Hashable
    size_bytes: int
    """Size of a new block; negative if the block, or a part of the graph, is released."""
    graph: Hashable = None
    """For a new block of a forward pass: the part of the autograd graph that the block belongs to. For a negative size
    without key: the part of the graph that is released."""
    segment: Segment = ("forward", "before", 0)
    """Segment in which it happens."""


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a batch."""

    rows: int
    tokens: int
    """Tokens of each padded row."""
    learned_positions: int
    """Trained positions of all rows together; logits are computed for them."""
    packed: bool
    device: Device


@dataclass
class MemoryPeak:
    """The largest number of live bytes, and its parts."""

    total_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)


@dataclass
class _AllocatedBlock:
    number: int
    storage_ref: "weakref.ref[Any]"
    size_bytes: int
    part: Part


class AllocationTrace(TorchDispatchMode):  # type: ignore[misc]  # torch gives it no type
    """Records live bytes by part, their peak in every segment, and all allocations and releases."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out torch's wrapper against compilation, which takes longer than the function: nothing is compiled."""
        return False

    def __init__(self, model: Model, batch: BatchShape, records_graph: bool) -> None:
        super().__init__()
        self.batch = batch
        self.records_graph = records_graph
        self.segment: Segment = ("forward", "before", 0)
        self.is_recomputing = False
        self.live: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.peaks: dict[Segment, MemoryPeak] = {}
        self.events: list[AllocationEvent] = []
        self._is_complete = False
        self._blocks: dict[int, _AllocatedBlock] = {}
        self._granule = GRANULE_BYTES[batch.device]
        self._excluded = {tensor.untyped_storage()._cdata for tensor in iterate_own_tensors(model)}

    def exclude(self, model: Model) -> None:
        """Exclude another model's own tensors too."""
        self._excluded |= {tensor.untyped_storage()._cdata for tensor in iterate_own_tensors(model)}

    def complete(self) -> None:
        """Record no further events: what is released from now on outlives the micro-batch."""
        self._is_complete = True

    def total_bytes(self) -> int:
        """Return the bytes alive now."""
        return sum(self.live.values())

    def describe_events(self, begin: int) -> list[tuple[Hashable, int, Hashable]]:
        """Return all events from index `begin` on, with keys relative to `begin`."""
        return [(_shift_key(event.key, -begin), event.size_bytes, event.graph) for event in self.events[begin:]]

    def repeat_events(self, begin: int, count: int) -> None:
        """Insert `count` copies of the events from index `begin` on, as if their operators had run more often.

        The events before `begin` must be the same events, because each repetition releases blocks of the one before.
        Blocks that are alive now keep their keys.
        """
        events = self.events[begin:]
        created = {event.key for event in events if event.size_bytes > 0}

        def copy_key(key: Hashable, number: int) -> Hashable:
            """Return a block's key in a copy. Blocks of the last repetition, number `count`, keep their keys."""
            if key in created:
                return (key, number) if isinstance(key, int) and number < count else key
            following = _shift_key(key, len(events))
            return (following, number - 1) if number and following in created else key

        self.events[begin:] = [
            replace(event, key=copy_key(event.key, number)) for number in range(count + 1) for event in events
        ]

    def enter_segment(self, segment: Segment) -> None:
        """Start a segment and record its peak from now on."""
        if self.segment[0] == "backward":
            self._record(None, -1, self.segment[1:])
        self.segment = segment
        self._update_peak(0)

    def assign_part(self, tensor: Tensor, part: Part) -> None:
        """Assign a block to a part; add the block if it is unknown."""
        storage = tensor.untyped_storage()
        if (block := self._blocks.get(storage._cdata)) is not None:
            self.live[block.part] -= block.size_bytes
            self.live[part] += block.size_bytes
            block.part = part
        else:
            self._add_block(storage, part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run_operator(func, args, kwargs or {})
        direction, position, _ = self.segment
        is_dequantizing = func.namespace == "bitsandbytes"
        part: Part = "activations" if direction == "forward" or self.is_recomputing else "temporary"
        if is_dequantizing and "dequantize" in str(func):
            part = "dequantized weights"
        elif position == "after":
            part = "logits and loss"
        extra = workspace_bytes(func, args, kwargs or {}, self.batch.device)
        if extra:
            self._record("work space", extra, self._current_graph())
        for tensor in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._excluded and storage._cdata not in self._blocks:
                    self._add_block(storage, part)
        self._update_peak(extra, "dequantized weights" if is_dequantizing else "temporary")
        if extra:
            self._record("work space", -1)
        return result

    def _run_operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        aten = torch.ops.aten
        if not any(isinstance(argument, Tensor) and argument.is_meta for argument in args):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return not self.batch.packed if args[0].dtype == torch.bool else 1
        if func is aten.nonzero.default:
            return torch.empty((self.batch.learned_positions, args[0].dim()), dtype=torch.int64, device="meta")
        if func is aten._grouped_mm.default:  # its meta kernel takes only bfloat16, CPU kernels take any dtype
            return _grouped_mm_on_meta(*args, **kwargs)
        return _run_on_meta(func, args, kwargs) if _creates_results(func) else func(*args, **kwargs)

    def _add_block(self, storage: Any, part: Part) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self._granule) * self._granule

        def remove(_: Any) -> None:
            block = self._blocks.pop(key)
            self.live[block.part] -= block.size_bytes
            self._record(block.number, -1)

        block = _AllocatedBlock(len(self.events), weakref.ref(storage, remove), size, part)
        self._blocks[key] = block
        self.live[part] += size
        self._record(block.number, size, self._current_graph())

    def _record(self, key: Hashable, size_bytes: int, graph: Hashable = None) -> None:
        if not self._is_complete:
            self.events.append(AllocationEvent(key, size_bytes, graph, self.segment))

    def _current_graph(self) -> Any:
        """Return the part of the graph that is being recorded, or None."""
        is_recording = self.records_graph and (self.segment[0] == "forward" or self.is_recomputing)
        return self.segment[1:] if is_recording else None

    def _update_peak(self, extra_bytes: int, extra_part: Part = "temporary") -> None:
        total = self.total_bytes() + extra_bytes
        peak = self.peaks.setdefault(self.segment, MemoryPeak())
        if total > peak.total_bytes or not peak.parts:
            parts = dict(self.live)
            parts[extra_part] += extra_bytes
            self.peaks[self.segment] = MemoryPeak(total, parts)


def _shift_key(key: Hashable, count: int) -> Hashable:
    return key + count if isinstance(key, int) else key


def iterate_own_tensors(model: Model) -> Iterator[Tensor]:
    """Yield parameters, buffers and quantization constants."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        if (constants := getattr(tensor, "quant_state", None)) is not None:
            nested_state = constants.state2
            nested = () if nested_state is None else (nested_state.absmax, nested_state.code, constants.offset)
            yield from (part for part in (constants.absmax, constants.code, *nested) if isinstance(part, Tensor))


@cache
def _creates_results(func: Any) -> bool:
    """Return whether an operator writes into no argument and declares no result as a view of one."""
    return not func._schema.is_mutable and all(value.alias_info is None for value in func._schema.returns)


_RESULT_SIZES: dict[Hashable, tuple[bool, tuple[_TensorSize, ...]]] = {}
"""Whether an operator returns a single tensor, and its results, by operator and sizes of its arguments."""
MAX_RESULT_SIZES = 1 << 15


def _run_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on meta tensors, or create its results again if it ran before with arguments of the same sizes.

    The meta kernels are Python code and take most of the time of a trace, which repeats each call for every block.
    """
    key = (func, _describe_sizes(args), tuple((name, _describe_sizes(value)) for name, value in kwargs.items()))
    if (known := _RESULT_SIZES.get(key)) is not None:
        is_single, sizes = known
        tensors = [torch.empty_strided(*size[:2], dtype=size[2], device="meta") for size in sizes]
        return tensors[0] if is_single else tuple(tensors)
    result = func(*args, **kwargs)
    is_single = isinstance(result, Tensor)
    tensors = [result] if is_single else list(result)
    arguments = {_storage_key(value) for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
    # `_unsafe_view` returns a view that its schema does not declare.
    if all(isinstance(tensor, Tensor) and _storage_key(tensor) not in arguments for tensor in tensors):
        if len(_RESULT_SIZES) >= MAX_RESULT_SIZES:
            _RESULT_SIZES.clear()
        _RESULT_SIZES[key] = is_single, tuple(_describe_tensor(tensor) for tensor in tensors)
    return result


def _describe_tensor(tensor: Tensor) -> _TensorSize:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_meta


def _describe_sizes(value: Any) -> Hashable:
    """Return a key of an argument. It has the type, because 1 and 1.0 are equal and give results of other dtypes."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, list | tuple):
        return tuple(map(_describe_sizes, value))
    return type(value), value


def _storage_key(tensor: Tensor) -> Hashable:
    return cast(Hashable, tensor.untyped_storage()._cdata)


def _grouped_mm_on_meta(first: Tensor, second: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty result of `grouped_mm`: grouped rows times one matrix per group, or a gradient of it."""
    if first.dim() == 2 and second.dim() == 2:
        return first.new_empty((offsets.shape[0], first.shape[0], second.shape[1]))
    if first.dim() == 3 and second.dim() == 2:
        return first.new_empty((first.shape[1], second.shape[1]))
    return first.new_empty((*first.shape[:-1], second.shape[-1]))


def workspace_bytes(func: Any, args: Any, kwargs: dict[str, Any], device: Device) -> int:
    """Return the bytes that an operator allocates and frees internally; 0 if these are negligible."""
    if func is torch.ops.bitsandbytes.gemm_4bit.default:
        rows = math.prod(args[0].shape[:-1])
        if device == "cuda" and rows <= CUSTOM_GEMM_ROWS and args[0].dtype != torch.float32:
            return 0
        elements = math.prod(args[2])
        constants = 2 * 4 * -(-elements // args[4]) if kwargs.get("absmax_8bit") is not None else 0
        return int(elements * args[0].element_size() + constants)
    if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        # The deterministic backward pass of FlashAttention 2 gathers dq in float32 (flash_api.cpp, dq_accum).
        return int(4 * args[1].numel())
    if func is torch.ops.ratchet.attention.default:
        return 4 * math.prod(plan_workspace(args[0], args[1], args[3], is_backward=False))
    if func is torch.ops.ratchet.attention_backward.default:
        return 4 * math.prod(plan_workspace(args[1][0], args[1][1], args[2], is_backward=True))
    return 0


# Training and validation steps without data.


class DeviceKernels(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Dispatches attention and dropout to the operators of a real device; the meta device uses other operators."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention_on_device(
                self.device, dict(zip(_ATTENTION_PARAMETERS, args, strict=False)) | (kwargs or {})
            )
        if self.device == "cuda" and func is torch.nn.functional.dropout and kwargs["training"] and kwargs["p"] > 0:
            return torch.native_dropout(args[0], kwargs["p"], train=True)[0]  # saves a byte mask; CPUs save the noise
        return func(*args, **(kwargs or {}))


def _attention_on_device(device: Device, arguments: dict[str, Any]) -> Tensor:
    """Run the kernel that `scaled_dot_product_attention` selects on the device (ATen: sdp_utils, attention.cpp)."""
    query, key, value = (arguments[name] for name in _ATTENTION_PARAMETERS[:3])
    mask, dropout = arguments.get("attn_mask"), arguments.get("dropout_p", 0.0)
    is_causal = arguments.get("is_causal", False)
    scale, enable_gqa = arguments.get("scale"), arguments.get("enable_gqa", False)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)
    is_supported = query.shape[-1] == value.shape[-1] and (
        enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]
    )
    if is_supported and not (mask is not None and mask.requires_grad):
        if device == "cpu" and not dropout:
            outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
            )
            return cast(Tensor, outputs[0])
        if device == "cuda" and query.shape[-1] <= MAX_FUSED_HEAD_SIZE:
            options = {"dropout_p": dropout, "is_causal": is_causal, "scale": scale}
            return _attention_on_gpu((query, key, value), mask, options)
    options = {"dropout_p": dropout, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, **options)


def _attention_on_gpu(heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Run FlashAttention 2 for 16 bits without a mask, else the memory-efficient kernel, which needs repeated keys."""
    query, key, value = heads
    if mask is None and query.element_size() == 2:
        return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **options)[0])
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])
    computes_logsumexp = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    outputs = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, computes_logsumexp, **options
    )
    return cast(Tensor, outputs[0])


@contextmanager
def _track_segments(model: Model, trace: AllocationTrace) -> Iterator[None]:
    """Report to the trace which block is running, forward and backward."""
    blocks = find_blocks(model)[1]
    last = len(blocks) - 1

    def enter(number: int, *_: Any) -> None:
        trace.enter_segment(("forward", "block", number))

    def leave(number: int, _: Any, __: Any, output: Any) -> None:
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: trace.enter_segment(("backward", "block", number)))
        if number == last:
            trace.enter_segment(("forward", "after", 0))

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(partial(enter, number)).remove)
            stack.callback(block.register_forward_hook(partial(leave, number)).remove)
        yield


@contextmanager
def _track_checkpointing(model: Model, trace: AllocationTrace) -> Iterator[None]:
    """Enable activation checkpointing as the worker does, and report recomputation to the trace."""

    @contextmanager
    def recompute() -> Iterator[None]:
        trace.is_recomputing = True
        try:
            with DeviceKernels(trace.batch.device):  # torch disables such modes inside backward()
                yield
        finally:
            trace.is_recomputing = False

    base = model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), recompute())})
    try:
        yield
    finally:
        base.activation_checkpointing_disable()


@contextmanager
def run_as_worker(device: Device) -> Iterator[None]:
    """Compute as a worker does: with the device's kernels and deterministic algorithms, some of which need more memory.

    The factors of fused experts are applied as in peft, but without autocast, which the meta device lacks.
    """
    before = torch.get_deterministic_debug_mode()
    original = layer._LoraFactorsProxy.forward

    def fold(proxy: Any, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, proxy.lhs, proxy.rhs, alpha=proxy.scaling)

    torch.set_deterministic_debug_mode("error")  # torch.use_deterministic_algorithms would load torch's compiler
    layer._LoraFactorsProxy.forward = fold
    try:
        with DeviceKernels(device), fused_operators.represent_device(device):
            yield
    finally:
        layer._LoraFactorsProxy.forward = original
        torch.set_deterministic_debug_mode(before)


class _TracedLoss(ChunkedLoss):
    """Loss that runs the head only on the first chunks and the last chunk, and repeats the events of those between."""

    def __init__(
        self,
        trace: AllocationTrace,
        model: Model,
        batch: SequenceBatch,
        scale: float | None,
        teacher_targets: TeacherTargets | None = None,
        phase: Phase = ignore_phase,
    ) -> None:
        self.trace = trace
        super().__init__(model, batch, scale, teacher_targets, phase)

    def _chunk_starts(self, width: int) -> Iterator[int]:
        starts, number = range(0, len(self.positions), width), 0
        previous: list[Any] = []
        while number < len(starts):
            begin = len(self.trace.events)
            yield starts[number]
            number += 1
            events, skipped = self.trace.describe_events(begin), len(starts) - 1 - number
            if events == previous and skipped > 0:
                self.trace.repeat_events(begin, skipped)
                number += skipped
            previous = events


def trace_micro_batch(
    model: Model, batch: BatchShape, is_accumulated: bool, checkpointing: bool, teacher: OnlineTeacher | None = None
) -> AllocationTrace:  # fmt: skip
    """Trace the loss and gradient of one micro-batch; weights, adapters and optimizer are not counted.

    Args:
        is_accumulated: True if gradients of an earlier micro-batch of the step exist.
        teacher: teacher on the meta device that evaluates the micro-batch.
    """
    trace = AllocationTrace(model, batch, records_graph=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def label_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            trace.assign_part(parameter.grad, "gradients")

    def enter_phase(phase: str) -> AbstractContextManager[None]:
        if phase == "backward":
            trace.enter_segment(("backward", "after", 0))
        return nullcontext()

    checkpointing_context = _track_checkpointing(model, trace) if checkpointing else nullcontext()
    with run_as_worker(batch.device), checkpointing_context, _track_segments(model, trace):
        for parameter in trainable:
            parameter.grad = torch.empty_like(parameter) if is_accumulated else None
            label_gradient(parameter)
        handles = [parameter.register_post_accumulate_grad_hook(label_gradient) for parameter in trainable]
        model.train()
        with trace:
            inputs = build_meta_inputs(batch)
            teacher_targets = None
            if teacher is not None:  # nothing of its outputs is saved for a backward pass
                trace.exclude(teacher.model)
                trace.records_graph = False
                teacher_targets = teacher.compute_targets(inputs, lambda _: 0)
                trace.records_graph = True
            _TracedLoss(trace, model, inputs, 1.0, teacher_targets, enter_phase).backward()
            del inputs, teacher_targets
        trace.complete()
        for handle in handles:
            handle.remove()
        for parameter in trainable:
            parameter.grad = None
    return trace


def trace_evaluation(model: Model, batch: BatchShape) -> AllocationTrace:
    """Trace a micro-batch of validation rows, without gradients."""
    trace = AllocationTrace(model, batch, records_graph=False)
    model.eval()
    with run_as_worker(batch.device), _track_segments(model, trace), torch.no_grad(), trace:
        _TracedLoss(trace, model, build_meta_inputs(batch), None)
    return trace


def build_meta_inputs(batch: BatchShape) -> SequenceBatch:
    """Build the inputs of a micro-batch without contents."""
    shape = (batch.rows, batch.tokens)
    input_ids, labels = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
    positions = torch.empty(shape, dtype=torch.int64, device="meta") if batch.packed else None
    return SequenceBatch(input_ids, labels, positions)


# Simulation of glibc's malloc.


class MallocSimulator:
    """Simulation of the main heap of a process. Addresses are offsets from its beginning."""

    def __init__(self, threshold_bytes: int) -> None:
        self.peak_bytes = 0
        """Highest resident memory since it was last set to 0."""
        self._threshold = min(max(TOP_PADDING, threshold_bytes), MAX_MMAP_THRESHOLD)
        self._top = self._end = self._touched = self._mapped = 0
        self._free: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._live: dict[Hashable, tuple[int | None, int]] = {}
        self._held_remainders: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self._held_fraction = 0.0

    @property
    def resident_bytes(self) -> int:
        """Bytes of touched heap pages and of separately mapped blocks."""
        return self._touched + self._mapped

    def replay(self, events: Iterable[AllocationEvent]) -> int:
        """Apply the events and return the highest resident memory while they run."""
        self.peak_bytes = self.resident_bytes
        live_keys: dict[Hashable, None] = {}  # in the order of allocation
        for event in events:
            if event.size_bytes > 0:
                self._allocate(event)
                live_keys[event.key] = None
            elif event.key is None:
                self._free_graph(event.graph)
            elif event.key in live_keys:
                del live_keys[event.key]
                self._release(event.key)
        for key in live_keys:  # memory that outlives a micro-batch is counted elsewhere
            self._release(key)
        for graph in list(self._held_remainders):
            self._free_graph(graph)
        return self.peak_bytes

    def _allocate(self, event: AllocationEvent) -> None:
        needed = max(MIN_BLOCK, -(-(event.size_bytes + HEADER) // 16) * 16)
        start, size = self._find_block(needed + ALIGNMENT_SLACK)
        if start is None:
            self._mapped += size
        else:  # free the remainder, or let the graph hold it
            remainder, graph = (start + needed, size - needed), event.graph
            self._held_fraction += HELD_SHARE if graph is not None else 0.0
            if graph is not None and self._held_fraction >= 1:
                self._held_fraction -= 1
                self._held_remainders[graph].append(remainder)
            else:
                self._free_block(*remainder)
            size = needed
        self._live[event.key] = start, size
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _find_block(self, size: int) -> tuple[int | None, int]:
        """Return start and size of the smallest sufficient free block, or of new memory.

        The start is None if the memory is mapped separately.
        """
        index = bisect.bisect_left(self._by_size, (size, 0))
        if index < len(self._by_size):
            block_size, start = self._by_size[index]
            self._remove_free(start)
            if block_size - size >= MIN_BLOCK:
                self._add_free(start + size, block_size - size)
                block_size = size
            return start, block_size
        if self._end - self._top < size + MIN_BLOCK:
            if size >= self._threshold:
                return None, _round_up_to_pages(size + HEADER)
            self._end += _round_up_to_pages(size + TOP_PADDING + MIN_BLOCK - (self._end - self._top))
        start, self._top = self._top, self._top + size
        self._touched = max(self._touched, self._top)
        return start, size

    def _release(self, key: Hashable) -> None:
        start, size = self._live.pop(key)
        if start is not None:
            self._free_block(start, size)
            return
        self._mapped -= size
        if self._threshold < size <= MAX_MMAP_THRESHOLD:
            self._threshold = size

    def _free_block(self, start: int, size: int) -> None:
        """Free a block and merge it with free neighbours, or with the top of the heap."""
        if start in self._by_end:
            neighbour = self._by_end[start]
            size += self._remove_free(neighbour)
            start = neighbour
        if start + size in self._free:
            size += self._remove_free(start + size)
        if start + size == self._top:
            self._top = start
        else:
            self._add_free(start, size)

    def _free_graph(self, graph: Hashable) -> None:
        for start, size in self._held_remainders.pop(graph, ()):
            self._free_block(start, size)

    def _remove_free(self, start: int) -> int:
        size = self._free.pop(start)
        del self._by_end[start + size]
        self._by_size.pop(bisect.bisect_left(self._by_size, (size, start)))
        return size

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._by_end[start + size] = start
        bisect.insort(self._by_size, (size, start))


def _round_up_to_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
