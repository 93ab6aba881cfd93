"""One pass of a frozen base over the rows of several adapters, each adapter on its own rows.

The idea is that of PLoRA (Yan et al. 2025, arXiv 2508.02932) and of S-LoRA (Sheng et al. 2023, arXiv 2311.03285) for
inference: most of the work is that of the frozen base, which is the same for all adapters. Each adapter belongs to a
model of its own, whose frozen tensors are those of a `SharedBase`. A pass runs through another copy of the base. Behind
each linear layer, the layers of the models add their updates to the output of their own rows. They compute as in a pass
of their model alone, so any kind of adapter on linear layers works. The sums of the base are rounded differently in a
larger matrix product, so results equal those of separate passes only up to rounding.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft.tuners.adalora import AdaLoraLayer
from torch import Tensor, nn
from torch.nn import functional

from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import adapters
from ratchet.models.adapter_format import ADAPTER, adapted_layers
from ratchet.models.chunked_loss import ChunkedLoss
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch


class NotMergeableError(Exception):
    """The model or an adapter does not allow a merged pass. No gradient was changed."""


class RandomStream:
    """The random numbers of one training on one device, in a process that computes several trainings."""

    def __init__(self, device: torch.device) -> None:
        self._own = torch.Generator(device)
        if device.type == "cuda":
            self._default = torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        else:
            self._default = torch.default_generator

    def seed(self, seed: int) -> None:
        """Begin the stream that `torch.manual_seed` would begin."""
        self._own.manual_seed(seed)

    def state(self) -> Tensor:
        """Return the current state."""
        return self._own.get_state()

    def restore(self, state: Tensor) -> None:
        """Continue at a state returned by `state`."""
        self._own.set_state(state)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Draw torch's random numbers from this stream inside the context."""
        outside = self._default.get_state()
        self._default.set_state(self._own.get_state())
        try:
            yield
        finally:
            self._own.set_state(self._default.get_state())
            self._default.set_state(outside)


class SharedBase:
    """A base model whose frozen tensors several models share."""

    def __init__(self, base: Model) -> None:
        self._base = base

    @property
    def size_bytes(self) -> int:
        """Size of the frozen tensors."""
        tensors = (*self._base.parameters(), *self._base.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def copy(self) -> Model:
        """Return a model with modules of its own, whose parameters and buffers are those of the base."""
        tensors = (*self._base.parameters(), *self._base.buffers())
        return copy.deepcopy(self._base, {id(tensor): tensor for tensor in tensors})


@dataclass(frozen=True)
class MergedModel:
    """A model that takes part in merged passes."""

    model: Model
    """peft model, whose base is a copy of the SharedBase."""
    random: RandomStream
    layers: dict[str, Any] = field(init=False)
    """Adapted layers, by the name of the base's module."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", dict(adapted_layers(self.model)))

    @property
    def has_dropout(self) -> bool:
        """Whether the adapter draws random numbers in training."""
        return any(getattr(layer.lora_dropout[ADAPTER], "p", 0.0) > 0 for layer in self.layers.values())

    @property
    def recomputes_activations(self) -> bool:
        """Whether the model recomputes activations in the backward pass."""
        return adapters.uses_activation_checkpointing(self.model)

    def update(self, layer: Any, inputs: Tensor, base_output: Tensor) -> Tensor:
        """Return the output of an adapted layer, whose base layer has this output already."""
        module = layer.get_base_layer()
        # peft adds AdaLoRA's update in place, which would change what the other layers have saved for their gradients.
        value = base_output.clone() if isinstance(layer, AdaLoraLayer) else base_output
        module.forward = lambda *_, **__: value
        try:
            if _has_dropout(layer):
                with self.random.use():
                    output: Tensor = layer(inputs)
            else:
                output = layer(inputs)
        finally:
            del module.forward  # restores the method of the class, for uses outside a merged pass
        return output


def _has_dropout(layer: Any) -> bool:
    return layer.training and getattr(layer.lora_dropout[ADAPTER], "p", 0.0) > 0


def find_obstacle(model: Model) -> str | None:
    """Return why this adapted model cannot take part in merged passes; None if it can, as far as is known."""
    if any("trainable_tokens" in name for name, _ in adapters.trainable_parameters(model)):
        return "it trains rows of the embedding"
    base = model.get_base_model()
    names = {name for name, _ in adapted_layers(model)}
    if any(base.get_submodule(name) is base.get_output_embeddings() for name in names):
        return "the head has an adapter"
    for name, layer in adapted_layers(model):
        if not isinstance(layer.get_base_layer(), nn.Linear):
            return f"{name} is no linear layer"
    modules = [module for name, module in base.named_modules() if "lora_" not in name]
    attention_dropout = getattr(base.config.get_text_config(), "attention_dropout", None)
    if attention_dropout or any(module.p > 0 for module in modules if isinstance(module, nn.Dropout)):
        return "the base itself has dropout"
    return None


@dataclass(frozen=True)
class _Rows:
    """The rows of one model in a merged batch."""

    member: MergedModel
    start: int
    stop: int
    columns: int
    """Longest sequence of these rows; further columns are padding."""
    selected: int
    """Number of trained positions."""


class MergedPasses:
    """Runs merged passes over a base."""

    def __init__(self, base: SharedBase) -> None:
        self._carrier = base.copy()
        self._carrier.train()
        self._patched: set[str] = set()
        self._rows: Sequence[_Rows] = ()
        self._shape = torch.Size()

    def forward_backward(
        self, members: Sequence[MergedModel], batches: Sequence[SequenceBatch], scales: Sequence[float]
    ) -> list[float]:
        """Add the gradients of a micro-batch of each model to its parameters; return the sums of the losses in nats.

        Equals `chunked_loss.forward_backward` of each model alone, up to rounding. Raises NotMergeableError if the base
        does not allow it.
        """
        batch, self._rows = _merge(members, batches)
        self._shape = batch.input_ids.shape
        for member in members:
            self._patch(member.layers)
        self._set_checkpointing(any(adapters.uses_activation_checkpointing(member.model) for member in members))
        try:
            loss = _MergedLoss(self._carrier, batch, [rows.selected for rows in self._rows], scales)
            loss.backward()
        finally:
            self._rows = ()
        values: list[float] = loss.values.tolist()
        return values

    def _patch(self, names: Sequence[str] | dict[str, Any]) -> None:
        for name in set(names) - self._patched:
            module = self._carrier.get_submodule(name)
            module.forward = partial(self._run_layer, name, partial(type(module).forward, module))
            self._patched.add(name)

    def _set_checkpointing(self, is_wanted: bool) -> None:
        if is_wanted and not self._carrier.is_activation_checkpointing:
            self._carrier.activation_checkpointing_enable({"use_reentrant": False})
        elif not is_wanted and self._carrier.is_activation_checkpointing:
            self._carrier.activation_checkpointing_disable()

    def _run_layer(self, name: str, compute_base: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        output, pieces = compute_base(inputs), []
        if inputs.shape[:-1] == self._shape:
            for rows in self._rows:
                own, padding = (
                    output[rows.start : rows.stop, : rows.columns],
                    output[rows.start : rows.stop, rows.columns :],
                )
                layer = rows.member.layers.get(name)
                if layer is not None:
                    own = rows.member.update(layer, inputs[rows.start : rows.stop, : rows.columns], own)
                pieces.append(torch.cat([own, padding], dim=1) if padding.shape[1] else own)
            return torch.cat(pieces, dim=0)
        if inputs.shape[:-1] != (1, sum(rows.selected for rows in self._rows)):  # see restrict_last_block
            raise NotMergeableError(f"{name} receives a tensor of shape {tuple(inputs.shape)}")
        start = 0
        for rows in self._rows:
            own, layer = output.narrow(1, start, rows.selected), rows.member.layers.get(name)
            if layer is not None:
                own = rows.member.update(layer, inputs.narrow(1, start, rows.selected), own)
            pieces.append(own)
            start += rows.selected
        return torch.cat(pieces, dim=1)


def _merge(members: Sequence[MergedModel], batches: Sequence[SequenceBatch]) -> tuple[SequenceBatch, tuple[_Rows, ...]]:
    """Put the rows of all batches below each other, padded to the longest row."""
    longest = max(batch.input_ids.shape[1] for batch in batches)
    packed = any(batch.position_ids is not None for batch in batches)

    def stack(tensors: Sequence[Tensor], fill: int) -> Tensor:
        return torch.cat([functional.pad(tensor, (0, longest - tensor.shape[1]), value=fill) for tensor in tensors])

    def positions(batch: SequenceBatch) -> Tensor:
        if batch.position_ids is not None:
            return batch.position_ids
        return torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device).expand(batch.input_ids.shape)

    merged = SequenceBatch(
        stack([batch.input_ids for batch in batches], 0),
        stack([batch.labels for batch in batches], IGNORE_INDEX),
        stack([positions(batch) for batch in batches], 0) if packed else None,
    )
    rows, start = [], 0
    for member, batch in zip(members, batches, strict=True):
        count, columns = batch.input_ids.shape
        selected = int((batch.labels[:, 1:] != IGNORE_INDEX).sum())
        rows.append(_Rows(member, start, start + count, columns, selected))
        start += count
    return merged, tuple(rows)


class _MergedLoss(ChunkedLoss):
    """Loss of a merged batch, with a sum and a scale of the gradient for each model."""

    def __init__(self, model: Model, batch: SequenceBatch, counts: Sequence[int], scales: Sequence[float]) -> None:
        device = batch.input_ids.device
        repeats = torch.tensor(counts, device=device)
        self._member_of_target = torch.arange(len(counts), device=device).repeat_interleave(repeats)
        self._scales = torch.tensor(scales, dtype=torch.float64, device=device)
        self.values = torch.zeros(len(counts), dtype=torch.float64, device=device)
        """Losses summed over the labels of each model, in nats; float64 [models]."""
        super().__init__(model, batch, 1.0)

    def _compute_at_once(self, scale: float | None) -> None:
        raise NotMergeableError("the model does not compute its logits from the output of its body")

    def _add_nll(self, start: int, nll: Tensor) -> None:
        self.values.index_add_(0, self._member_of_target[start : start + len(nll)], nll.double())

    def _scale_gradient(self, start: int, gradient: Tensor, scale: float) -> Tensor:
        factors = self._scales[self._member_of_target[start : start + len(gradient)]]
        return gradient.mul_(factors.to(gradient.dtype).unsqueeze(1))
