"""What base + adapter computes inside, module by module and layer by layer, on the beginnings of a few real rows.

Kept small whatever the model's size: the hidden states of a few dozen tokens before each decoder layer, and inputs and
outputs of each linear layer, embedding and norm at eight positions. For a model of 70B that is about half a gigabyte.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ratchet.errors import DamagedFileError, first_line
from ratchet.export.verification import reference
from ratchet.export.verification.divergence import (
    CURE,
    SCORES,
    SUMS,
    ModuleComparison,
    ModuleDeviation,
    module_tolerance,
    require_within_tolerance,
    rounding_error,
)
from ratchet.models.device import Model
from ratchet.models.model_spec import find_blocks
from ratchet.storage.records.export import MergeCheck, ModuleDifference

ROWS = 2
TOKENS = 32
"""Of each row, from its beginning: a causal model computes them as it does in the whole row."""
POSITIONS = 4
"""Of each row, at which outputs are kept."""

Tokens = Sequence[int]


@dataclass
class LeafRecording:
    """A module that does the same at every position, what it was given and what it gave."""

    inputs: Tensor
    """[positions, features]; of an embedding int64 [positions]. As the module was given them."""
    outputs: Tensor
    """[positions, features] in float32."""


@dataclass
class LayerRecording:
    """A decoder layer, row by row."""

    inputs: list[Tensor] = field(default_factory=list)
    """[1, tokens, width]: everything that it was given."""
    outputs: list[Tensor] = field(default_factory=list)
    """[positions, width] in float32."""


@dataclass
class ActivationRecording:
    """Base + adapter at work. Tensors are on the CPU."""

    rows: list[list[int]]
    dtype: torch.dtype
    """That it was computed in."""
    leaves: dict[str, LeafRecording] = field(default_factory=dict)
    layers: dict[str, LayerRecording] = field(default_factory=dict)
    """In their order."""
    last: list[Tensor] = field(default_factory=list)
    """Of each row, what the last layer gave: [1, tokens, width]."""
    logits: list[Tensor] = field(default_factory=list)
    """Of each row, [positions, vocabulary] in float32."""
    bare_logits: list[Tensor] = field(default_factory=list)
    """The same of the base without the adapter."""


def record_activations(model: Model, rows: Sequence[Tokens]) -> ActivationRecording:
    """Run base + adapter on the beginnings of a few rows, evenly chosen.

    Args:
        model: of peft, in evaluation mode; see `reference.compute_in_float32` for a sharper look.
        rows: token ids of real rows, at least one.

    Raises:
        DamagedFileError: base + adapter computes what is no number.
    """
    base = model.get_base_model()
    found = ActivationRecording([list(row[:TOKENS]) for row in spread_items(list(rows), ROWS)], _compute_dtype(base))
    leaves, layers = dict(leaf_modules(base)), decoder_layers(base)
    found.layers = {name: LayerRecording() for name, _ in layers}
    with torch.no_grad(), _recording_hooks(found, leaves, layers):
        for row in found.rows:
            found.logits.append(position_logits(model, row))
    with torch.no_grad(), reference.disable_adapters(model):
        found.bare_logits = [position_logits(model, row) for row in found.rows]
    _require_numbers(found)
    return found


def position_logits(model: Model, row: Tokens) -> Tensor:
    """Logits of a short row at the positions that are kept: [positions, vocabulary] in float32, on the CPU."""
    logits = model(input_ids=torch.tensor([list(row)], device=model.device), use_cache=False).logits
    return select_positions(logits[0])


def select_positions(states: Tensor) -> Tensor:
    """Of [tokens, ...] the positions that are kept, in float32, on the CPU."""
    return states[position_indices(len(states))].detach().float().cpu()


def position_indices(count: int) -> list[int]:
    """Which of so many positions are kept: evenly over them, the last one included."""
    number = min(count, POSITIONS)
    return [(i + 1) * count // number - 1 for i in range(number)]


def spread_items(items: list[Any], wanted: int) -> list[Any]:
    """At most so many, evenly over all."""
    number = min(len(items), wanted)
    return [items[i * len(items) // number] for i in range(number)]


# ---------------------------------------------------------------------------------------------- which modules there are


def decoder_layers(base: Model) -> list[tuple[str, nn.Module]]:
    """Names and modules of the layers that hidden states go through one after the other; empty where none are found."""
    name, layers = find_blocks(base)
    return [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]


def leaf_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Linear layers, embeddings and norms by their names in the base, each with the adapters around it."""
    if reference.is_adapted(module):
        if _is_leaf(_unwrap_module(module)) and not isinstance(module, ParamWrapper):
            yield name, module
        return
    if _is_leaf(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from leaf_modules(child, f"{name}.{child_name}".lstrip("."))


def _unwrap_module(module: Any) -> Any:
    if hasattr(module, "get_base_layer"):
        return module.get_base_layer()
    return module.original_module


def _is_leaf(module: Any) -> bool:
    """Linear, embedding, or a norm: no modules within, and one weight for each feature."""
    if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return True
    weight = getattr(module, "weight", None)
    plain = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not any(True for _ in module.children())
    return plain and not isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase)


# --------------------------------------------------------------------------------------------------------- listening in


@contextmanager
def _recording_hooks(
    found: ActivationRecording, leaves: dict[str, nn.Module], layers: Sequence[tuple[str, nn.Module]]
) -> Iterator[None]:  # fmt: skip
    hooks: list[Any] = []
    for name, module in leaves.items():
        hooks.append(module.register_forward_hook(_on_leaf(found, name), with_kwargs=True))
    for name, module in layers:
        hooks.append(module.register_forward_pre_hook(_before_layer(found, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(_after_layer(found, name, layers[-1][0] == name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _on_leaf(found: ActivationRecording, name: str) -> Callable[..., None]:
    def hear(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if len(args) != 1 or kwargs or not (isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return  # it looks at more than one position; the layer that it stands in is compared as a whole
        given, gave = args[0].detach(), output.detach().reshape(-1, output.shape[-1])
        given = given.reshape(-1, given.shape[-1]) if given.is_floating_point() else given.reshape(-1)
        if not len(given) or len(given) != len(gave):
            return
        chosen = position_indices(len(given))
        one = LeafRecording(given[chosen].cpu(), gave[chosen].float().cpu())
        if (before := found.leaves.get(name)) is not None:
            one = LeafRecording(torch.cat([before.inputs, one.inputs]), torch.cat([before.outputs, one.outputs]))
        if len(one.outputs) <= ROWS * POSITIONS:  # a module that is used several times is heard the first times
            found.leaves[name] = one

    return hear


def _before_layer(found: ActivationRecording, name: str) -> Callable[..., None]:
    def hear(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer = found.layers[name]
        if len(layer.inputs) == len(found.logits):  # else it is used again for the same row
            layer.inputs.append(input_states(args, kwargs).detach().clone().cpu())  # it may write into what it is given

    return hear


def _after_layer(found: ActivationRecording, name: str, is_last: bool) -> Callable[..., None]:
    def hear(_: Any, __: Any, output: Any) -> None:
        layer, states = found.layers[name], hidden_states(output)
        if len(layer.outputs) == len(found.logits):
            layer.outputs.append(select_positions(states[0]))
            if is_last:
                found.last.append(states.detach().clone().cpu())

    return hear


def hidden_states(output: Any) -> Tensor:
    """Hidden states of what a decoder layer gives: alone, or first of several."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def input_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Hidden states of what a decoder layer is given."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _compute_dtype(base: Model) -> torch.dtype:
    """The type that a model computes in: that of its norms and embeddings; layers in 4 bits hold bytes."""
    return next(one.dtype for one in base.parameters() if one.is_floating_point() and not hasattr(one, "quant_state"))


def _require_numbers(found: ActivationRecording) -> None:
    """Raises DamagedFileError, with the first module or layer whose output holds NaN or infinity."""
    parts = [(name, [leaf.outputs]) for name, leaf in found.leaves.items()]
    parts += [(name, layer.outputs) for name, layer in found.layers.items()]
    parts += [("the base without the adapter", found.bare_logits), ("base + adapter", found.logits)]
    for name, tensors in parts:
        if not all(bool(torch.isfinite(one).all()) for one in tensors):
            raise DamagedFileError(
                f"{name}: base + adapter computes what is no number on a row of the data; train again"
            )


# Verification of a merge: each module and each decoder layer of the merged model is given what the same one of
# base + adapter was given, and must give what it gave. So errors do not add up, and the one that is off has a name.

__all__ = ["ActivationRecording", "check_merge", "record_activations"]

LISTED = 8


def check_merge(recording: ActivationRecording, merged: Model, dtype: torch.dtype) -> MergeCheck:
    """Hold a merged model against what was recorded of base + adapter, computed from the same weights.

    Linear layers, embeddings and norms are compared in float32, whatever they are stored in; decoder layers run in the
    merged model's own type. What a layer is off is held against what it adds to its input, not against its output,
    in which a few features of large models are a thousand times as large as all others.

    Args:
        recording: of base + adapter.
        merged: a plain model, read from what was written; it is not changed.
        dtype: type of its stored weights.

    Raises:
        DamagedFileError: it equals the base although the adapter does something; a module is not there; or one is off,
            and is named.
    """
    tolerance = module_tolerance(dtype, recording.dtype)
    with torch.no_grad():
        moved = _measure_adapter_effect(recording, merged)
        leaves = list(_compare_leaves(recording, merged, tolerance))
        require_within_tolerance(leaves)
        layers = _compare_layers(recording, merged, rounding_error(dtype, recording.dtype, merged.dtype))
        require_within_tolerance(layers)
    worst = sorted((*leaves, *layers), key=lambda part: (-part.excess, part.name))[:LISTED]
    return MergeCheck(
        modules=len(leaves),
        layers=len(recording.layers),
        worst=tuple(ModuleDifference(name=p.name, max_difference=p.difference, scale=p.scale) for p in worst),
        tolerance=tolerance,
        moved=moved,
    )


def _measure_adapter_effect(recording: ActivationRecording, merged: Model) -> float:
    """Largest difference of a logit to the bare base; 0 where the adapter changes nothing.

    Raises:
        DamagedFileError: the merged model is the base, while base + adapter is not.
    """
    with_adapter, bare = torch.cat(recording.logits), torch.cat(recording.bare_logits)
    if torch.equal(with_adapter, bare):
        return 0.0
    found = torch.cat([position_logits(merged, row) for row in recording.rows])
    if found.shape != bare.shape:
        raise DamagedFileError(
            f"the merged model has {found.shape[-1]} logits where base + adapter has {bare.shape[-1]}{CURE}"
        )
    moved, missed = float((found - bare).abs().max()), float((found - with_adapter).abs().max())
    if moved < 0.1 * missed:  # rounding to bfloat16 moves it a little, too
        raise DamagedFileError(
            f"the merge equals the base: no update arrived. Its logits are within {moved:.2g} of the base's, which the "
            f"adapter moves by {float((with_adapter - bare).abs().max()):.2g}{CURE}"
        )
    return moved


# -------------------------------------------------------------------------------------------------------------- modules


def _compare_leaves(recording: ActivationRecording, merged: Model, tolerance: float) -> Iterator[ModuleDeviation]:
    modules = dict(merged.named_modules())
    for name, leaf in recording.leaves.items():
        module = modules.get(name)
        if module is None:
            raise DamagedFileError(f"the merged model has no module {name}, which base + adapter has{CURE}")
        try:
            found = _run_leaf(module, leaf)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise DamagedFileError(
                f"the merged model's {name} does not take its input ({first_line(error)})"
            ) from error
        compared = ModuleComparison(name, tolerance)
        compared.add(leaf.outputs, found)
        yield compared.part()


def _run_leaf(module: nn.Module, leaf: LeafRecording) -> Tensor:
    parameter = next(module.parameters())
    if parameter.dtype != torch.float32:
        module = copy.deepcopy(module).float()
    inputs = leaf.inputs.to(parameter.device)
    output = module(inputs.float() if inputs.is_floating_point() else inputs)
    found: Tensor = output.float().cpu()
    return found


# --------------------------------------------------------------------------------------------------------------- layers


@dataclass
class _LayerwiseReplay:
    """The merged model's layers, each given what was recorded."""

    recording: ActivationRecording
    rounding: float
    row: int = 0
    compared: dict[str, ModuleComparison] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @property
    def allowed(self) -> float:
        """Difference over scale."""
        return SUMS + SCORES * self.rounding

    def of(self, name: str) -> ModuleComparison:
        """What is gathered under a name."""
        return self.compared.setdefault(name, ModuleComparison(name, self.allowed, typical=self.rounding > 0))

    def before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The recorded states in the place of those that came; those before the first layer are compared."""
        if name in self.seen:
            return None
        recorded, came = self.recording.layers[name].inputs[self.row], input_states(args, kwargs)
        if name == next(iter(self.recording.layers)):
            self.of(f"what {name} is given").add(select_positions(recorded[0]), select_positions(came[0]))
        states = recorded.to(came, copy=True)  # it may write into what it is given
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    def after(self, name: str, output: Any) -> Any:
        """Compare; what the last one gives is replaced by what was recorded, for the head to be given the same."""
        if name in self.seen:
            return None
        self.seen.add(name)
        layer, states = self.recording.layers[name], hidden_states(output)
        expected, given = layer.outputs[self.row], select_positions(layer.inputs[self.row][0])
        size = expected.abs().amax(-1)
        added = (expected - given).abs().amax(-1) if given.shape == expected.shape else size
        # What rounding makes of the sum of both counts too, in the type that the layer runs in.
        floor = 4 * torch.finfo(states.dtype).eps / self.allowed * size
        self.of(name).add(expected, select_positions(states[0]), torch.maximum(added, floor))
        if name != next(reversed(self.recording.layers)):
            return None
        last = self.recording.last[self.row].to(states)
        return (last, *output[1:]) if isinstance(output, tuple) else last


def _compare_layers(recording: ActivationRecording, merged: Model, by_rounding: float) -> list[ModuleDeviation]:
    """Every decoder layer, what comes before the first and what comes after the last."""
    modules = dict(decoder_layers(merged))
    if modules.keys() != recording.layers.keys():
        raise DamagedFileError(f"the merged model has {len(modules)} layers, base + adapter {len(recording.layers)}")
    run = _LayerwiseReplay(recording, by_rounding)
    with _replay_hooks(run, modules):
        for row, ids in enumerate(recording.rows):
            run.row = row
            run.seen.clear()
            found = position_logits(merged, ids)
            run.of(f"what follows {next(reversed(modules))}" if modules else "the model").add(
                recording.logits[row], found
            )
    return [compared.part() for compared in run.compared.values()]


@contextmanager
def _replay_hooks(run: _LayerwiseReplay, modules: dict[str, nn.Module]) -> Iterator[None]:
    hooks = []
    for name, module in modules.items():
        before = lambda _, args, kwargs, name=name: run.before(name, args, kwargs)  # noqa: E731
        after = lambda _, __, output, name=name: run.after(name, output)  # noqa: E731
        hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
