"""An account of every block of memory that lives while torch works: how much, for what, and in what order.

A dispatch mode sees the result of every operation. A block lives from there until torch lets go of its storage. On the
meta device it also answers what the contents of tensors would: how many positions are learned from (`nonzero`), and
whether a batch is packed. Work space inside operators is added where it is large.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from peft.tuners.lora import layer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ratchet.models import chunked_loss
from ratchet.models.loading import Model
from ratchet.models.loss import SequenceBatch, answer_nll
from ratchet.models.memory.malloc import AllocationEvent
from ratchet.models.model_spec import find_blocks
from ratchet.models.teacher import OnlineTeacher, OnlineTeacherTargets

Device = Literal["cpu", "cuda"]
Part = Literal["activations", "logits and loss", "dequantised weights", "gradients", "temporary"]
PARTS: tuple[Part, ...] = ("activations", "logits and loss", "dequantised weights", "gradients", "temporary")
Segment = tuple[str, str, int]
"""Forward or backward; before the blocks, in block number so and so, or after them. Peaks are kept for each."""

GRANULE_BYTES = {"cpu": 64, "cuda": 512}
"""Sizes of blocks are multiples of it: alignment of c10's CPU allocator, kMinBlockSize of CUDACachingAllocator."""
CUSTOM_GEMM_ROWS = 1536
"""Up to so many rows bitsandbytes 0.50 may multiply 4-bit weights on a GPU without writing them out (backends/cuda)."""


@dataclass(frozen=True)
class BatchShape:
    """What goes through the model at once; sizes only."""

    rows: int
    tokens: int
    """Of each row: padded."""
    learned: int
    """Positions of all rows together that are learned from: there logits are computed."""
    packed: bool
    device: Device


@dataclass
class MemoryPeak:
    """The most that lived at once, and what it was."""

    total_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)


@dataclass
class _AllocatedBlock:
    number: int
    alive: "weakref.ref[Any]"
    """Held, for it tells of the end."""
    size_bytes: int
    part: Part


class AllocationTrace(TorchDispatchMode):  # type: ignore[misc]  # torch gives it no type
    """The account: live bytes by part, their peak in every segment, and all that happened to blocks.

    Args:
        model: its own tensors are not counted.
        batch: answers what the contents of tensors would.
        learning: a graph for the backward pass is made.
    """

    def __init__(self, model: Model, batch: BatchShape, learning: bool) -> None:
        super().__init__()
        self.batch = batch
        self.learning = learning
        self.segment: Segment = ("forward", "before", 0)
        self.recomputing = False
        self.live: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.peaks: dict[Segment, MemoryPeak] = {}
        self.events: list[AllocationEvent] = []
        self._blocks: dict[int, _AllocatedBlock] = {}
        self._granule = GRANULE_BYTES[batch.device]
        self._own = {tensor.untyped_storage()._cdata for tensor in iterate_own_tensors(model)}

    def leave_out(self, model: Model) -> None:
        """Another model's own tensors are not counted either."""
        self._own |= {tensor.untyped_storage()._cdata for tensor in iterate_own_tensors(model)}

    def total_bytes(self) -> int:
        """Alive at this moment."""
        return sum(self.live.values())

    def enter(self, segment: Segment) -> None:
        """From here on this segment's peak is taken."""
        if self.segment[0] == "backward":
            self.events.append(AllocationEvent(None, -1, self.segment[1:]))
        self.segment = segment
        self._note(0)

    def count(self, tensor: Tensor, part: Part) -> None:
        """A block that is alive already, or is to be called otherwise."""
        storage = tensor.untyped_storage()
        if (known := self._blocks.get(storage._cdata)) is not None:
            self.live[known.part] -= known.size_bytes
            self.live[part] += known.size_bytes
            known.part = part
        else:
            self._add(storage, part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._answer(func, args, kwargs or {})
        part, extra = self._part(func), workspace_bytes(func, args, kwargs or {}, self.batch.device)
        if extra:
            self.events.append(AllocationEvent("work space", extra, self._graph()))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._own and storage._cdata not in self._blocks:
                    self._add(storage, part)
        self._note(extra, classify_workspace(func))
        if extra:
            self.events.append(AllocationEvent("work space", -1))
        return result

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        aten = torch.ops.aten
        if not any(isinstance(one, Tensor) and one.is_meta for one in args):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return not self.batch.packed if args[0].dtype == torch.bool else 1
        if func is aten.nonzero.default:
            return torch.empty((self.batch.learned, args[0].dim()), dtype=torch.int64, device="meta")
        if func is aten._grouped_mm.default:  # its kernel on meta takes bfloat16 only, those of CPUs take any type
            return _grouped_mm_on_meta(*args, **kwargs)
        return func(*args, **kwargs)

    def _part(self, func: Any) -> Part:
        if func.namespace == "bitsandbytes" and "dequantize" in str(func):
            return "dequantised weights"
        direction, place, _ = self.segment
        if place == "after":
            return "logits and loss"
        return "activations" if direction == "forward" or self.recomputing else "temporary"

    def _add(self, storage: Any, part: Part) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self._granule) * self._granule
        block = _AllocatedBlock(len(self.events), weakref.ref(storage, lambda _: self._drop(key)), size, part)
        self._blocks[key] = block
        self.live[part] += size
        self.events.append(AllocationEvent(block.number, size, self._graph()))

    def _drop(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.live[block.part] -= block.size_bytes
        self.events.append(AllocationEvent(block.number, -1))

    def _graph(self) -> Any:
        """The part of the graph that is being made, if any is."""
        making = self.learning and (self.segment[0] == "forward" or self.recomputing)
        return self.segment[1:] if making else None

    def _note(self, extra_bytes: int, extra_part: Part = "temporary") -> None:
        total = self.total_bytes() + extra_bytes
        peak = self.peaks.setdefault(self.segment, MemoryPeak())
        if total > peak.total_bytes or not peak.parts:
            parts = dict(self.live)
            parts[extra_part] += extra_bytes
            self.peaks[self.segment] = MemoryPeak(total, parts)


def iterate_own_tensors(model: Model) -> Iterator[Tensor]:
    """Parameters, buffers and constants of quantisation."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        if (constants := getattr(tensor, "quant_state", None)) is not None:
            inner = constants.state2
            nested = () if inner is None else (inner.absmax, inner.code, constants.offset)
            yield from (one for one in (constants.absmax, constants.code, *nested) if isinstance(one, Tensor))


def _grouped_mm_on_meta(first: Tensor, second: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """Shape of `grouped_mm`: rows in groups times a matrix a group, or (the gradient of those) a matrix a group."""
    if first.dim() == 2 and second.dim() == 2:
        return first.new_empty((offsets.shape[0], first.shape[0], second.shape[1]))
    if first.dim() == 3 and second.dim() == 2:
        return first.new_empty((first.shape[1], second.shape[1]))
    return first.new_empty((*first.shape[:-1], second.shape[-1]))


def workspace_bytes(func: Any, args: Any, kwargs: dict[str, Any], device: Device) -> int:
    """What an operator allocates and frees inside itself, where that is large."""
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
    return 0


def classify_workspace(func: Any) -> Part:
    """What such work space is for."""
    return "dequantised weights" if func.namespace == "bitsandbytes" else "temporary"


# Run a training step without data, to see what memory it needs.
#
# The real classes do the real work: transformers' model, peft's layers, bitsandbytes' 4-bit layers, our loss,
# autograd,
# activation checkpointing. Only their tensors lie on the meta device: they have shapes and lifetimes but no contents;
# the
# ledger keeps account of them. Attention is sent to the operators that CPUs and GPUs take, for what those keep for the
# backward pass differs (FlashAttention, Dao et al. 2022, keeps no softmax).

LARGEST_HEAD = 256
"""Width of attention heads up to which GPUs have fused kernels."""


class DeviceKernels(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Sends attention and dropout to the operators that a device really takes; on meta torch takes others."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention_on_device(self.device, dict(zip(_ATTENTION_WORDS, args, strict=False)) | (kwargs or {}))
        if self.device == "cuda" and getattr(func, "__name__", "") == "dropout" and len(args) == 3 and args[2]:
            return torch.native_dropout(args[0], args[1], train=True)[0]  # keeps a mask of bytes, CPUs keep the noise
        return func(*args, **(kwargs or {}))


_ATTENTION_WORDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _attention_on_device(device: Device, given: dict[str, Any]) -> Tensor:
    """The kernel that `scaled_dot_product_attention` chooses for what it is given (ATen: sdp_utils, attention.cpp)."""
    query, key, value = (given[word] for word in _ATTENTION_WORDS[:3])
    mask, chance, causal = given.get("attn_mask"), given.get("dropout_p", 0.0), given.get("is_causal", False)
    scale, grouped = given.get("scale"), given.get("enable_gqa", False)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)
    alike = query.shape[-1] == value.shape[-1] and (grouped or query.shape[1] == key.shape[1] == value.shape[1])
    if alike and not (mask is not None and mask.requires_grad):
        if device == "cpu" and not chance:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=mask, scale=scale
            )
            return cast(Tensor, found[0])
        if device == "cuda" and query.shape[-1] <= LARGEST_HEAD:
            options = {"dropout_p": chance, "is_causal": causal, "scale": scale}
            return _attention_on_gpu((query, key, value), mask, options)
    options = {"dropout_p": chance, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, **options)


def _attention_on_gpu(heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """FlashAttention 2 where there is no mask and 16 bits, else the memory-efficient kernel, which repeats the keys."""
    query, key, value = heads
    if mask is None and query.element_size() == 2:
        return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **options)[0])
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])
    learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    found = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, learning, **options)
    return cast(Tensor, found[0])


@contextmanager
def _track_segments(model: Model, ledger: AllocationTrace) -> Iterator[None]:
    """Tell the ledger which block is at work, forward and backward."""
    blocks = list(find_blocks(model)[1])
    handles: list[Any] = []

    def entering(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            ledger.enter(("forward", "block", number))

        return hook

    def leaving(number: int) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            for tensor in tree_iter(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: ledger.enter(("backward", "block", number)))
            if number == len(blocks) - 1:
                ledger.enter(("forward", "after", 0))

        return hook

    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(entering(number)))
        handles.append(block.register_forward_hook(leaving(number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _track_checkpointing(model: Model, ledger: AllocationTrace) -> Iterator[None]:
    """Activation checkpointing as the worker switches it on, with word to the ledger of what is computed again."""

    @contextmanager
    def again() -> Iterator[None]:
        ledger.recomputing = True
        try:
            with DeviceKernels(ledger.batch.device):  # torch turns such modes off within backward()
                yield
        finally:
            ledger.recomputing = False

    base = model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), again())})
    try:
        yield
    finally:
        base.activation_checkpointing_disable()


@contextmanager
def _use_deterministic_algorithms() -> Iterator[None]:
    """As the worker computes: some operators need more memory then."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _fold_experts_without_autocast() -> Iterator[None]:
    """Fold the factors of fused experts in as peft does, without turning autocast off: on meta there is none."""
    own = layer._LoraFactorsProxy.forward

    def fold(proxy: Any, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, proxy.lhs, proxy.rhs, alpha=proxy.scaling)

    layer._LoraFactorsProxy.forward = fold
    try:
        yield
    finally:
        layer._LoraFactorsProxy.forward = own


def trace_micro_batch(
    model: Model, batch: BatchShape, accumulated: bool, checkpointing: bool, teacher: OnlineTeacher | None = None
) -> AllocationTrace:  # fmt: skip
    """Loss and gradient of one micro-batch: the account of it, without weights, adapters and optimizer.

    Args:
        model: on the meta device, with adapters.
        batch: the micro-batch.
        accumulated: gradients of an earlier micro-batch of the same step are there already.
        checkpointing: `machine.activation_checkpointing`.
        teacher: on the meta device, that is asked about the micro-batch.
    """
    ledger = AllocationTrace(model, batch, learning=True)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recomputed = _track_checkpointing(model, ledger) if checkpointing else nullcontext()
    with (
        DeviceKernels(batch.device),
        _use_deterministic_algorithms(),
        _fold_experts_without_autocast(),
        recomputed,
        _track_segments(model, ledger),
    ):
        for parameter in learning:
            parameter.grad = torch.empty_like(parameter) if accumulated else None
            if accumulated:
                ledger.count(parameter.grad, "gradients")
        handles = [p.register_post_accumulate_grad_hook(_gradient_labeler(ledger)) for p in learning]
        model.train()
        with ledger:
            inputs = _build_meta_inputs(batch)
            lesson = None if teacher is None else _build_teacher_targets(teacher, inputs, ledger)
            chunked_loss.forward_backward(model, inputs, 1.0, _report_phases_to(ledger), lesson)
            del inputs, lesson
        for handle in handles:
            handle.remove()
        for parameter in learning:
            parameter.grad = None
    return ledger


def _build_teacher_targets(
    teacher: OnlineTeacher, inputs: SequenceBatch, ledger: AllocationTrace
) -> OnlineTeacherTargets:
    """What a teacher makes of a micro-batch; nothing of it is kept for a backward pass."""
    ledger.leave_out(teacher.model)
    ledger.learning = False
    lesson = teacher.lesson(inputs, lambda _: 0)
    ledger.learning = True
    return lesson


def _gradient_labeler(ledger: AllocationTrace) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.count(parameter.grad, "gradients")

    return hook


def trace_evaluation(model: Model, batch: BatchShape) -> AllocationTrace:
    """The same for a micro-batch of validation rows: no gradient is taken."""
    ledger = AllocationTrace(model, batch, learning=False)
    model.eval()
    with (
        DeviceKernels(batch.device),
        _use_deterministic_algorithms(),
        _fold_experts_without_autocast(),
        _track_segments(model, ledger),
        torch.no_grad(),
        ledger,
    ):
        chunked_loss.compute_nll(model, _build_meta_inputs(batch))
    return ledger


def saved_activation_bytes(model: Model, batch: BatchShape) -> int:
    """What the forward pass leaves alive for the backward pass, the loss included."""
    ledger = AllocationTrace(model, batch, learning=True)
    model.train()
    with DeviceKernels(batch.device), _use_deterministic_algorithms(), _fold_experts_without_autocast(), ledger:
        inputs = _build_meta_inputs(batch)
        loss = answer_nll(model, inputs.input_ids, inputs.labels, inputs.position_ids).sum()
        kept = ledger.total_bytes()
    del loss
    return kept


def _build_meta_inputs(batch: BatchShape) -> SequenceBatch:
    shape = (batch.rows, batch.tokens)
    input_ids, labels = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
    positions = torch.empty(shape, dtype=torch.int64, device="meta") if batch.packed else None
    return SequenceBatch(input_ids, labels, positions)


def _report_phases_to(ledger: AllocationTrace) -> chunked_loss.During:
    """Word to the ledger of when the backward pass of the body begins."""

    def during(what: str) -> AbstractContextManager[None]:
        if what == "backward":
            ledger.enter(("backward", "after", 0))
        return nullcontext()

    return during
