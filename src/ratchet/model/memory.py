"""Memory that runs out: recognising it, giving it back, and forecasting what a micro-batch needs.

The forecast counts what autograd keeps, layer by layer, in the way of Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), section 4, adapted to QLoRA: a frozen linear layer keeps nothing, for
its weights need no gradient; only the LoRA matrices beside it keep their inputs.

It counts no fragmentation and no work space of libraries, and has been compared with what autograd holds on small
models, not with the peaks of real GPUs. Of decoders of Llama's kind (Llama, Qwen2, Qwen3, OLMo 2, Phi-3, Gemma) it
held 0.97 to 1.24 times the forecast. For others that is a first guess: 0.57 times for OPT, 1.75 for GPT-2, 2.5 for
Mixtral, 8 for Mamba, whose experts and recurrences keep what is not counted here.
"""

import gc
from dataclasses import dataclass, replace

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.model.quantized import Model

_EXHAUSTED = (
    "DefaultCPUAllocator: can't allocate memory",  # torch 2.13, c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "CUDA error: out of memory",  # what is allocated past torch's own allocator: pinned and paged memory
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
FLOAT32_BYTES = 4
LOGIT_COPIES = 3
"""At the start of the backward pass: logarithms of the probabilities, their gradient, and the logits' gradient."""
NF4_BYTES = {True: 0.5 + 0.127 / 8, False: 0.5 + 0.5 / 8}
"""A weight in NF4 and its share of constants, with or without double quantisation (Dettmers et al. 2023, section 3)."""
SMALLEST_8BIT = 4096
"""Elements from which on bitsandbytes keeps optimizer states in 8 bits, with 4 bytes more for each block of 256."""


def is_exhausted(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device; every other failure is none that a smaller batch would mend."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _EXHAUSTED)


def release() -> None:
    """Give back what nothing refers to any more. To be called outside the `except` block: a traceback holds frames."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Shape:
    """What of a model decides how much memory a step needs; sizes in elements unless they are called bytes."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    """Width of all attention heads together."""
    key_value: int
    """Width of all heads of the keys; the values are as wide."""
    heads: int
    vocabulary: int
    compute_bytes: int
    """Of an element of activations."""
    adapter_bytes: int
    """Of an element of the LoRA matrices."""
    mask_bytes: int
    """Of an element of a dropout mask."""
    eager: bool
    """Attention keeps the weights of all pairs of positions."""
    base_bytes: int
    """Frozen weights as they are stored, with the constants of quantisation."""
    linear: int
    """Weights of linear layers that are quantised, or would be."""
    largest_linear: int
    sides: tuple[tuple[int, int], ...]
    """Inputs and outputs of every linear layer that has LoRA matrices."""
    shared_inputs: int
    """Inputs of those layers, counting one that several layers of a block share once."""


@dataclass(frozen=True)
class Forecast:
    """Memory that one micro-batch needs at its peak, in bytes, part by part. An estimate: see the module."""

    shape: Shape
    rows: int
    tokens: int
    """Padded: rows x longest."""
    base_bytes: int
    adapter_bytes: int
    """LoRA matrices and their gradients."""
    optimizer_bytes: int
    activations_bytes: int
    """Kept for the backward pass."""
    recomputed_bytes: int
    """The same with activation checkpointing: the input of every layer, and one layer's activations at a time."""
    logits_bytes: int
    """At most: as if every position were learned from."""
    dequantized_bytes: int
    """The largest linear layer in the type that it is computed in, where it is stored in 4 bits."""

    def parts(self, checkpointing: bool) -> dict[str, int]:
        """Bytes by name; `checkpointing`: `machine.activation_checkpointing`."""
        return {
            "base weights": self.base_bytes,
            "adapter and gradients": self.adapter_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.recomputed_bytes if checkpointing else self.activations_bytes,
            "logits": self.logits_bytes,
            "dequantised weights": self.dequantized_bytes,
        }

    def total_bytes(self, checkpointing: bool) -> int:
        """All parts together."""
        return sum(self.parts(checkpointing).values())


def forecast(model: Model, settings: Train, tokens: int, rows: int) -> Forecast:
    """What a micro-batch of `rows` sequences and `tokens` padded tokens needs.

    Args:
        model: with its adapter, as it is trained.
        settings: rank, dropout, optimizer and quantization are read.
        tokens: rows x longest.
        rows: sequences of the micro-batch.
    """
    return _estimate(shape_of(model), settings, tokens, rows)


def advice(forecast: Forecast, settings: Train, machine: Machine) -> str:
    """What to change when the micro-batch of a forecast does not fit, with what each change would save, best first.

    Args:
        forecast: of the micro-batch, usually a single row.
        settings: that it was made for.
        machine: activation_checkpointing is read.
    """
    checkpointing = machine.activation_checkpointing
    total = forecast.total_bytes(checkpointing)
    parts = ", ".join(f"{name} {_size(n)}" for name, n in forecast.parts(checkpointing).items() if n)
    found = [f"Needed by our estimate: {_size(total)} ({parts})."]
    savings = [
        (total - changed.total_bytes(checkpointing or what.startswith("machine.activation")), what)
        for what, changed in _alternatives(forecast, settings, checkpointing)
    ]
    listed = [f"{what} ({_size(n)} less)" for n, what in sorted(savings, key=lambda s: -s[0]) if n > 0]
    if listed:
        found.append(f"Change one or several of these: {'; '.join(listed)}.")
    else:
        found.append("Take a smaller base model, or a machine with more memory.")
    found.append("With changes to `machine` this run goes on; others begin a new one.")
    return " ".join(found)


def _alternatives(forecast: Forecast, settings: Train, checkpointing: bool) -> list[tuple[str, Forecast]]:
    """Settings that need less memory, each as it is written in params.yaml, with its forecast."""
    shape, tokens, rows = forecast.shape, forecast.tokens, forecast.rows
    found = []
    if tokens > rows:
        length = tokens // rows // 2
        name = "prepare.max_tokens"
        if settings.batching == "packed":
            name = f"train.pack_tokens (and if need be {name})"
        found.append((f"{name}: {length}", _estimate(shape, settings, rows * length, rows)))
    if not checkpointing:
        found.append(("machine.activation_checkpointing: true", forecast))
    if settings.rank > 1:
        changed = settings.model_copy(update={"rank": settings.rank // 2})
        found.append((f"train.rank: {changed.rank}", _estimate(shape, changed, tokens, rows)))
    if settings.quantization == "none":
        changed = settings.model_copy(update={"quantization": "nf4"})
        smaller = int(shape.linear * (shape.compute_bytes - NF4_BYTES[settings.double_quantization]))
        quantised = replace(shape, base_bytes=shape.base_bytes - smaller)
        found.append(("train.quantization: nf4", _estimate(quantised, changed, tokens, rows)))
    if settings.optimizer == "adamw":
        changed = settings.model_copy(update={"optimizer": "adamw_8bit"})
        found.append(("train.optimizer: adamw_8bit", _estimate(shape, changed, tokens, rows)))
    return found


def shape_of(model: Model) -> Shape:
    """Read a model with its adapter: sizes from its configuration, weights from its tensors."""
    config = model.get_base_model().config.get_text_config()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    sides = tuple((int(module.in_features), int(module.out_features)) for module in layers.values())
    shared = {(name.rpartition(".")[0], int(module.in_features)) for name, module in layers.items()}
    adapter = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    hidden = int(config.hidden_size)
    # Not every architecture has all of these, and a forecast that fails would hide what it is made for.
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    linear = [int(m.in_features) * int(m.out_features) for name, m in _linear_layers(model)]
    return Shape(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        query=heads * width,
        key_value=int(getattr(config, "num_key_value_heads", None) or heads) * width,
        heads=heads,
        vocabulary=int(config.vocab_size),
        compute_bytes=int(model.get_input_embeddings().weight.element_size()),
        adapter_bytes=adapter.element_size(),
        mask_bytes=1 if adapter.is_cuda else adapter.element_size(),  # on CPUs torch keeps the noise itself
        eager=config._attn_implementation == "eager",
        base_bytes=_frozen_bytes(model),
        linear=sum(linear),
        largest_linear=max(linear, default=0),
        sides=sides,
        shared_inputs=sum(inputs for _, inputs in shared),
    )


def _linear_layers(model: Model) -> list[tuple[str, nn.Linear]]:
    """The base's linear layers without the output head, which is never quantised. 4-bit layers are Linear too."""
    head = model.get_output_embeddings()
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
    ]


def _frozen_bytes(model: Model) -> int:
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        if not parameter.requires_grad:
            total += parameter.nbytes
            if (constants := getattr(parameter, "quant_state", None)) is not None:
                total += sum(t.nbytes for t in constants.as_dict().values() if isinstance(t, torch.Tensor))
    return int(total)


def _estimate(shape: Shape, settings: Train, tokens: int, rows: int) -> Forecast:
    matrices = [size for inputs, outputs in shape.sides for size in (settings.rank * inputs, settings.rank * outputs)]
    kept = tokens * _kept_bytes(shape, settings, tokens // max(1, rows))
    of_layer = kept // max(1, shape.layers)
    quantised = settings.quantization == "nf4"
    return Forecast(
        shape=shape,
        rows=rows,
        tokens=tokens,
        base_bytes=shape.base_bytes,
        adapter_bytes=2 * shape.adapter_bytes * sum(matrices),
        optimizer_bytes=sum(_state_bytes(size, settings) for size in matrices),
        activations_bytes=kept,
        recomputed_bytes=min(kept, of_layer + tokens * shape.layers * shape.hidden * shape.compute_bytes),
        logits_bytes=LOGIT_COPIES * FLOAT32_BYTES * tokens * shape.vocabulary,
        dequantized_bytes=shape.largest_linear * shape.compute_bytes if quantised else 0,
    )


def _kept_bytes(shape: Shape, settings: Train, length: int) -> int:
    """Of one token, in all layers, in a sequence of `length` tokens."""
    e, b = shape.compute_bytes, shape.adapter_bytes
    norms = 2 * FLOAT32_BYTES * shape.hidden  # computed in float32
    attention = 2 * e * (shape.query + shape.key_value)  # queries, keys, values and the output
    if shape.eager:
        # The softmax in float32, and once more in the type that it is multiplied in.
        attention += shape.heads * length * (FLOAT32_BYTES + (e if e != FLOAT32_BYTES else 0))
    gated = 3 * e * shape.intermediate  # both inputs of the product, and that of the activation function
    inputs = sum(count for count, _ in shape.sides)
    if settings.dropout:
        lora = inputs * (b + shape.mask_bytes)
    elif b != e:
        lora = inputs * b  # every layer makes a copy in the adapter's type
    else:
        lora = shape.shared_inputs * b
    return shape.layers * (norms + attention + gated) + lora + len(shape.sides) * settings.rank * b


def _state_bytes(elements: int, settings: Train) -> int:
    """Two moments of one matrix."""
    if settings.optimizer == "adamw" or elements < SMALLEST_8BIT:
        return 2 * FLOAT32_BYTES * elements
    return 2 * (elements + FLOAT32_BYTES * -(-elements // 256))


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
