"""Run a training step without data, to see what memory it needs.

The real classes do the real work: transformers' model, peft's layers, bitsandbytes' 4-bit layers, our loss, autograd,
activation checkpointing. Only their tensors lie on the meta device: they have shapes and lifetimes but no contents; the
ledger keeps account of them. Attention is sent to the operators that CPUs and GPUs take, for what those keep for the
backward pass differs (FlashAttention, Dao et al. 2022, keeps no softmax).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from peft.tuners.lora import layer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from ratchet.model import heads
from ratchet.model.blocks import blocks_of
from ratchet.model.ledger import Batch, Device, Ledger
from ratchet.model.loss import Sequences, answer_nll
from ratchet.model.quantized import Model
from ratchet.model.teacher_beside import Beside, Spoken

LARGEST_HEAD = 256
"""Width of attention heads up to which GPUs have fused kernels."""


class Kernels(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Sends attention and dropout to the operators that a device really takes; on meta torch takes others."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(self.device, dict(zip(_ATTENTION_WORDS, args, strict=False)) | (kwargs or {}))
        if self.device == "cuda" and getattr(func, "__name__", "") == "dropout" and len(args) == 3 and args[2]:
            return torch.native_dropout(args[0], args[1], train=True)[0]  # keeps a mask of bytes, CPUs keep the noise
        return func(*args, **(kwargs or {}))


_ATTENTION_WORDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _attention(device: Device, given: dict[str, Any]) -> Tensor:
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
def _segments(model: Model, ledger: Ledger) -> Iterator[None]:
    """Tell the ledger which block is at work, forward and backward."""
    blocks = list(blocks_of(model)[1])
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
def _checkpointing(model: Model, ledger: Ledger) -> Iterator[None]:
    """Activation checkpointing as the worker switches it on, with word to the ledger of what is computed again."""

    @contextmanager
    def again() -> Iterator[None]:
        ledger.recomputing = True
        try:
            with Kernels(ledger.batch.device):  # torch turns such modes off within backward()
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
def _deterministic() -> Iterator[None]:
    """As the worker computes: some operators need more memory then."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _experts() -> Iterator[None]:
    """Fold the factors of fused experts in as peft does, without turning autocast off: on meta there is none."""
    own = layer._LoraFactorsProxy.forward

    def fold(proxy: Any, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, proxy.lhs, proxy.rhs, alpha=proxy.scaling)

    layer._LoraFactorsProxy.forward = fold
    try:
        yield
    finally:
        layer._LoraFactorsProxy.forward = own


def step(
    model: Model, batch: Batch, accumulated: bool, checkpointing: bool, teacher: Beside | None = None
) -> Ledger:  # fmt: skip
    """Loss and gradient of one micro-batch: the account of it, without weights, adapters and optimizer.

    Args:
        model: on the meta device, with adapters.
        batch: the micro-batch.
        accumulated: gradients of an earlier micro-batch of the same step are there already.
        checkpointing: `machine.activation_checkpointing`.
        teacher: on the meta device, that is asked about the micro-batch.
    """
    ledger = Ledger(model, batch, learning=True)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recomputed = _checkpointing(model, ledger) if checkpointing else nullcontext()
    with Kernels(batch.device), _deterministic(), _experts(), recomputed, _segments(model, ledger):
        for parameter in learning:
            parameter.grad = torch.empty_like(parameter) if accumulated else None
            if accumulated:
                ledger.count(parameter.grad, "gradients")
        handles = [p.register_post_accumulate_grad_hook(_named_gradient(ledger)) for p in learning]
        model.train()
        with ledger:
            inputs = _inputs(batch)
            lesson = None if teacher is None else _lesson(teacher, inputs, ledger)
            heads.learn(model, inputs, 1.0, _telling(ledger), lesson)
            del inputs, lesson
        for handle in handles:
            handle.remove()
        for parameter in learning:
            parameter.grad = None
    return ledger


def _lesson(teacher: Beside, inputs: Sequences, ledger: Ledger) -> Spoken:
    """What a teacher makes of a micro-batch; nothing of it is kept for a backward pass."""
    ledger.leave_out(teacher.model)
    ledger.learning = False
    lesson = teacher.lesson(inputs, lambda _: 0)
    ledger.learning = True
    return lesson


def _named_gradient(ledger: Ledger) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.count(parameter.grad, "gradients")

    return hook


def evaluation(model: Model, batch: Batch) -> Ledger:
    """The same for a micro-batch of validation rows: no gradient is taken."""
    ledger = Ledger(model, batch, learning=False)
    model.eval()
    with Kernels(batch.device), _deterministic(), _experts(), _segments(model, ledger), torch.no_grad(), ledger:
        heads.likelihood(model, _inputs(batch))
    return ledger


def kept_bytes(model: Model, batch: Batch) -> int:
    """What the forward pass leaves alive for the backward pass, the loss included."""
    ledger = Ledger(model, batch, learning=True)
    model.train()
    with Kernels(batch.device), _deterministic(), _experts(), ledger:
        inputs = _inputs(batch)
        loss = answer_nll(model, inputs.input_ids, inputs.labels, inputs.position_ids).sum()
        kept = ledger.total_bytes()
    del loss
    return kept


def _inputs(batch: Batch) -> Sequences:
    shape = (batch.rows, batch.tokens)
    input_ids, labels = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
    positions = torch.empty(shape, dtype=torch.int64, device="meta") if batch.packed else None
    return Sequences(input_ids, labels, positions)


def _telling(ledger: Ledger) -> heads.During:
    """Word to the ledger of when the backward pass of the body begins."""

    def during(what: str) -> AbstractContextManager[None]:
        if what == "backward":
            ledger.enter(("backward", "after", 0))
        return nullcontext()

    return during
