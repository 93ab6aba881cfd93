"""Verifies a merge module by module and layer by layer on the beginnings of a few real rows.

Base + adapter runs once, and inputs and outputs of its modules are recorded. Then each module and each decoder layer of
the merged model gets the recorded input, and must return the recorded output. So errors do not accumulate over modules,
and the error message can name the module that deviates.

A recording is small for models of any size: it contains hidden states of a few dozen tokens before each decoder layer,
and inputs and outputs of each linear layer, embedding and norm at eight positions. For a 70B model this is about half a
gigabyte.
"""

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ratchet.errors import DamagedFileError, first_line
from ratchet.exporters.verification import reference
from ratchet.models.device import Model
from ratchet.models.model_spec import find_blocks
from ratchet.storage.records.export import MergeCheck, ModuleDifference

ROWS = 2
TOKENS = 32
"""Number of tokens from the beginning of each row. A causal model computes them as in the complete row."""
POSITIONS = 4
"""Number of positions per row whose outputs are recorded."""
LISTED_MODULES = 8
"""Number of modules that the report lists, those with the largest deviations."""

SUM_TOLERANCE = 1e-4
"""Allowed relative difference from another order of float32 sums: W x + s B A x instead of (W + s B A) x. The unit
roundoff of 6e-8 grows with the root of the number of terms, to about 1e-5 for rows of 30,000 terms. The tolerance is
ten times this value, because sums may nearly cancel. Measured on 24 families of tiny models: 1.5e-5 at
most."""
ROUNDING_EPSILONS = 4
"""Tolerance in machine epsilons of the coarsest type in which weights are stored or used. Rounding of weights, inputs
and outputs changed an output by at most 1.4 epsilons (measured on five families in bfloat16 and float16)."""
LAYER_ROUNDING_FACTOR = 8
"""Factor by which the rounding tolerance of a complete layer exceeds that of a module, because attention turns a small
difference between large scores into a factor. In float32 the rounding tolerance is 0, so the factor has no effect."""

REPORT_BUG = "; this is a bug of the merge: report it with the name of the architecture"

Tokens = Sequence[int]


@dataclass
class LeafRecording:
    """Inputs and outputs of a module that computes each position independently."""

    inputs: Tensor
    """[positions, features] in the original type; for an embedding, token ids [positions] in int64."""
    outputs: Tensor
    """[positions, features] in float32."""


@dataclass
class LayerRecording:
    """Inputs and outputs of a decoder layer, row by row."""

    inputs: list[Tensor] = field(default_factory=list)
    """Complete input of each row: [1, tokens, width]."""
    outputs: list[Tensor] = field(default_factory=list)
    """Output of each row at the recorded positions: [positions, width] in float32."""


@dataclass
class ActivationRecording:
    """Inputs and outputs of base + adapter. Tensors are on the CPU."""

    rows: list[list[int]]
    dtype: torch.dtype
    """Type of the computation."""
    leaves: dict[str, LeafRecording] = field(default_factory=dict)
    layers: dict[str, LayerRecording] = field(default_factory=dict)
    """Decoder layers in order."""
    last_states: list[Tensor] = field(default_factory=list)
    """Output of the last layer for each row: [1, tokens, width]."""
    logits: list[Tensor] = field(default_factory=list)
    """[positions, vocabulary] in float32 for each row."""
    base_logits: list[Tensor] = field(default_factory=list)
    """Logits of the base without adapters, in the same form."""


def record_activations(model: Model, rows: Sequence[Tokens]) -> ActivationRecording:
    """Run base + adapter on the beginnings of a few evenly chosen rows, and record its modules.

    Args:
        model: a peft model in evaluation mode; `reference.compute_in_float32` makes the comparison more precise.
        rows: token ids of real rows, at least one.

    Raises:
        DamagedFileError: base + adapter computes NaN or infinity.
    """
    base = model.get_base_model()
    number = min(len(rows), ROWS)
    # Norms and embeddings have the type that the model computes in; 4-bit layers store bytes.
    dtype = next(p.dtype for p in base.parameters() if p.is_floating_point() and not hasattr(p, "quant_state"))
    recording = ActivationRecording([list(rows[i * len(rows) // number][:TOKENS]) for i in range(number)], dtype)
    with torch.no_grad(), ExitStack() as hooks:
        for name, module in leaf_modules(base):
            record = functools.partial(_record_leaf, recording, name)
            hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
        for name, module in decoder_layers(base):
            recording.layers[name] = LayerRecording()
            record_input = functools.partial(_record_layer_input, recording, name)
            hooks.enter_context(module.register_forward_pre_hook(record_input, with_kwargs=True))
            record_output = functools.partial(_record_layer_output, recording, name)
            hooks.enter_context(module.register_forward_hook(record_output))
        for row in recording.rows:
            recording.logits.append(position_logits(model, row))
    with torch.no_grad(), reference.disable_adapters(model):
        recording.base_logits = [position_logits(model, row) for row in recording.rows]
    outputs = {name: [leaf.outputs] for name, leaf in recording.leaves.items()}
    outputs |= {name: layer.outputs for name, layer in recording.layers.items()}
    outputs |= {"the base without adapters": recording.base_logits, "base + adapter": recording.logits}
    for name, tensors in outputs.items():
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            raise DamagedFileError(
                f"{name}: base + adapter computes NaN or infinity on a row of the data; train the adapter again"
            )
    return recording


def position_logits(model: Model, row: Tokens) -> Tensor:
    """Return the logits of a short row at the recorded positions: [positions, vocabulary] in float32, on the CPU."""
    logits = model(input_ids=torch.tensor([list(row)], device=model.device), use_cache=False).logits
    return select_positions(logits[0])


def select_positions(states: Tensor) -> Tensor:
    """Select the recorded positions of [tokens, ...], in float32, on the CPU."""
    return states[position_indices(len(states))].detach().float().cpu()


def position_indices(count: int) -> list[int]:
    """Return the indices of the recorded positions among `count`: evenly spread, including the last."""
    number = min(count, POSITIONS)
    return [(i + 1) * count // number - 1 for i in range(number)]


# Modules of a model.


def decoder_layers(base: Model) -> list[tuple[str, nn.Module]]:
    """Return names and modules of the decoder layers in order; empty if none are found."""
    name, layers = find_blocks(base)
    return [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]


def leaf_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield linear layers, embeddings and norms with their names in the base, including the adapters around them."""
    if reference.is_adapted(module):
        plain: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module
        if _is_leaf(plain) and not isinstance(module, ParamWrapper):
            yield name, module
        return
    if _is_leaf(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from leaf_modules(child, f"{name}.{child_name}".lstrip("."))


def _is_leaf(module: Any) -> bool:
    """Return whether a module is a linear layer, an embedding, or a norm (no submodules, one weight per feature)."""
    if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return True
    weight = getattr(module, "weight", None)
    is_norm = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not any(True for _ in module.children())
    return is_norm and not isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase)


# Recording hooks.


def _record_leaf(
    recording: ActivationRecording, name: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if len(args) != 1 or kwargs or not (isinstance(args[0], Tensor) and isinstance(output, Tensor)):
        return  # the module may combine positions; only its layer is compared
    inputs, outputs = args[0].detach(), output.detach().reshape(-1, output.shape[-1])
    inputs = inputs.reshape(-1, inputs.shape[-1]) if inputs.is_floating_point() else inputs.reshape(-1)
    if not len(inputs) or len(inputs) != len(outputs):
        return
    selected = position_indices(len(inputs))
    leaf = LeafRecording(inputs[selected].cpu(), outputs[selected].float().cpu())
    if (earlier := recording.leaves.get(name)) is not None:
        leaf = LeafRecording(torch.cat([earlier.inputs, leaf.inputs]), torch.cat([earlier.outputs, leaf.outputs]))
    if len(leaf.outputs) <= ROWS * POSITIONS:  # if a module is used repeatedly, record only its first uses
        recording.leaves[name] = leaf


def _record_layer_input(
    recording: ActivationRecording, name: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    layer = recording.layers[name]
    if len(layer.inputs) == len(recording.logits):  # otherwise the layer is used repeatedly for the same row
        layer.inputs.append(input_states(args, kwargs).detach().clone().cpu())  # a layer may write into its input


def _record_layer_output(recording: ActivationRecording, name: str, _: Any, __: Any, output: Any) -> None:
    layer, states = recording.layers[name], output_states(output)
    if len(layer.outputs) == len(recording.logits):
        layer.outputs.append(select_positions(states[0]))
        if name == next(reversed(recording.layers)):
            recording.last_states.append(states.detach().clone().cpu())


def input_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states in the arguments of a decoder layer."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def output_states(output: Any) -> Tensor:
    """Return the hidden states in the output of a decoder layer, which may be a tuple."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


# Deviations of a module.


@dataclass(frozen=True)
class ModuleDeviation:
    """Deviation of one module or layer at the position that represents it."""

    name: str
    difference: float
    """Largest difference of an output."""
    scale: float
    """Magnitude that the difference is compared with."""
    tolerance: float
    """Allowed difference as a fraction of the scale."""

    @property
    def excess(self) -> float:
        """Difference as a multiple of the allowed difference; a module with more than 1 fails."""
        if not math.isfinite(self.difference):
            return math.inf
        relative = self.difference / self.scale if self.scale else math.inf if self.difference else 0.0
        return relative / self.tolerance


@dataclass
class ModuleComparison:
    """Comparison of one module or layer at all positions."""

    name: str
    tolerance: float
    use_median: bool = False
    """Whether the median position represents the module instead of the worst position. In bfloat16, rounding may make a
    router choose the other of two nearly equal experts, and the token then passes through other weights."""
    differences: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    def add(self, expected: Tensor, actual: Tensor, scales: Tensor | None = None) -> None:
        """Add outputs [positions, features] of base + adapter and of the merged model.

        Args:
            expected: outputs of base + adapter.
            actual: outputs of the merged model.
            scales: [positions]; None: the largest expected value at each position.

        Raises:
            DamagedFileError: the shapes differ.
        """
        if expected.shape != actual.shape:
            raise DamagedFileError(
                f"{self.name}: found shape {tuple(actual.shape)} in the merged model; expected "
                f"{tuple(expected.shape)} (positions, features) as in base + adapter{REPORT_BUG}"
            )
        self.differences.append((actual - expected).abs().amax(-1))
        self.scales.append(expected.abs().amax(-1) if scales is None else scales)

    def deviation(self) -> ModuleDeviation:
        """Return the deviation at the position that represents the module."""
        differences, scales = torch.cat(self.differences), torch.cat(self.scales)
        scales = scales.clamp(min=1e-3 * float(scales.max()))  # for positions whose output is almost zero
        pairs = zip(differences.tolist(), scales.tolist(), strict=True)
        deviations = [ModuleDeviation(self.name, *pair, self.tolerance) for pair in pairs]
        deviations.sort(key=lambda deviation: deviation.excess)
        return deviations[(len(deviations) - 1) // 2 if self.use_median else -1]


def rounding_error(*dtypes: torch.dtype) -> float:
    """Return the relative error that storing and computing in these types adds to a module's output."""
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    return ROUNDING_EPSILONS * coarsest if coarsest > torch.finfo(torch.float32).eps else 0.0


def require_within_tolerance(deviations: Sequence[ModuleDeviation]) -> None:
    """Raise DamagedFileError for the worst deviation, if any exceeds its tolerance."""
    failed = _sort_worst_first(deviation for deviation in deviations if not deviation.excess <= 1)
    if failed:
        worst, count = failed[0], len(failed) - 1
        others = f"; {count} other module{'s differ' if count > 1 else ' differs'}, too" if count else ""
        raise DamagedFileError(
            f"the merged model differs from base + adapter: for the same input, {worst.name} differs by "
            f"{worst.difference:.2g}, where base + adapter has values up to {worst.scale:.2g} (allowed: "
            f"{worst.tolerance:.2g} of that){others}{REPORT_BUG}"
        )


def _sort_worst_first(deviations: Iterable[ModuleDeviation]) -> list[ModuleDeviation]:
    return sorted(deviations, key=lambda deviation: (-deviation.excess, deviation.name))


# Checking a merge.


def check_merge(recording: ActivationRecording, merged: Model, dtype: torch.dtype) -> MergeCheck:
    """Compare a merged model with a recording of base + adapter that was computed from the same weights.

    Linear layers, embeddings and norms are compared in float32, whatever their stored type; decoder layers run in the
    merged model's own type. A layer's difference is measured relative to the change that the layer makes to its input.
    The output would be a poor scale, because in large models a few of its features are a thousand times as large as all
    others.

    Args:
        recording: recording of base + adapter.
        merged: the plain model, loaded from disk; it stays unchanged.
        dtype: type of the model's stored weights.

    Raises:
        DamagedFileError: the merged model equals the base although the adapter has an effect, or a module is missing or
            deviates; the message names the module.
    """
    tolerance = SUM_TOLERANCE + rounding_error(dtype, recording.dtype)
    with torch.no_grad():
        effect = _measure_adapter_effect(recording, merged)
        leaves = list(_compare_leaves(recording, merged, tolerance))
        require_within_tolerance(leaves)
        layers = _compare_layers(recording, merged, rounding_error(dtype, recording.dtype, merged.dtype))
        require_within_tolerance(layers)
    worst = _sort_worst_first((*leaves, *layers))[:LISTED_MODULES]
    return MergeCheck(
        modules=len(leaves),
        layers=len(recording.layers),
        worst=tuple(ModuleDifference(name=d.name, max_difference=d.difference, scale=d.scale) for d in worst),
        tolerance=tolerance,
        adapter_effect=effect,
    )


def _measure_adapter_effect(recording: ActivationRecording, merged: Model) -> float:
    """Return the largest difference of a logit between merged model and base; 0 if the adapter changes nothing.

    Raises:
        DamagedFileError: the merged model equals the base, although base + adapter does not.
    """
    adapted, base = torch.cat(recording.logits), torch.cat(recording.base_logits)
    if torch.equal(adapted, base):
        return 0.0
    logits = torch.cat([position_logits(merged, row) for row in recording.rows])
    if logits.shape != base.shape:
        raise DamagedFileError(
            f"the merged model has {logits.shape[-1]} logits; expected {base.shape[-1]} as in base + adapter"
            f"{REPORT_BUG}"
        )
    to_base, to_adapted = float((logits - base).abs().max()), float((logits - adapted).abs().max())
    if to_base < 0.1 * to_adapted:  # rounding to bfloat16 alone also changes the logits a little
        raise DamagedFileError(
            f"the merged model equals the base: its logits differ from the base's by {to_base:.2g} at most, but the "
            f"adapter changes them by {float((adapted - base).abs().max()):.2g}{REPORT_BUG}"
        )
    return to_base


def _compare_leaves(recording: ActivationRecording, merged: Model, tolerance: float) -> Iterator[ModuleDeviation]:
    modules = dict(merged.named_modules())
    for name, leaf in recording.leaves.items():
        module = modules.get(name)
        if module is None:
            raise DamagedFileError(f"the merged model has no module {name}, which base + adapter has{REPORT_BUG}")
        parameter = next(module.parameters())
        inputs = leaf.inputs.to(parameter.device)
        try:
            if parameter.dtype != torch.float32:
                module = copy.deepcopy(module).float()
            actual = module(inputs.float() if inputs.is_floating_point() else inputs).float().cpu()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise DamagedFileError(
                f"{name}: the merged model's module rejects the recorded input ({first_line(error)}){REPORT_BUG}"
            ) from error
        comparison = ModuleComparison(name, tolerance)
        comparison.add(leaf.outputs, actual)
        yield comparison.deviation()


@dataclass
class _LayerwiseReplay:
    """Runs the merged model's layers on the recorded inputs, and compares their outputs."""

    recording: ActivationRecording
    rounding: float
    row: int = 0
    comparisons: dict[str, ModuleComparison] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @property
    def tolerance(self) -> float:
        """Allowed difference as a fraction of the scale."""
        return SUM_TOLERANCE + LAYER_ROUNDING_FACTOR * self.rounding

    def comparison(self, name: str) -> ModuleComparison:
        """Return the comparison with this name; create it if it does not exist."""
        return self.comparisons.setdefault(name, ModuleComparison(name, self.tolerance, use_median=self.rounding > 0))

    def replace_input(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a layer's input by the recorded input; first compare the input of the first layer."""
        if name in self.seen:
            return None
        recorded, actual = self.recording.layers[name].inputs[self.row], input_states(args, kwargs)
        if name == next(iter(self.recording.layers)):
            self.comparison(f"input of {name}").add(select_positions(recorded[0]), select_positions(actual[0]))
        states = recorded.to(actual, copy=True)  # a layer may write into its input
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    def compare_output(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        """Compare a layer's output; replace the last layer's output, which the head reads, by the recorded output."""
        if name in self.seen:
            return None
        self.seen.add(name)
        layer, states = self.recording.layers[name], output_states(output)
        expected, inputs = layer.outputs[self.row], select_positions(layer.inputs[self.row][0])
        output_scale = expected.abs().amax(-1)
        change = (expected - inputs).abs().amax(-1) if inputs.shape == expected.shape else output_scale
        # The sum of input and change is itself rounded to the type that the layer runs in.
        min_scale = 4 * torch.finfo(states.dtype).eps / self.tolerance * output_scale
        self.comparison(name).add(expected, select_positions(states[0]), torch.maximum(change, min_scale))
        if name != next(reversed(self.recording.layers)):
            return None
        last_states = self.recording.last_states[self.row].to(states)
        return (last_states, *output[1:]) if isinstance(output, tuple) else last_states


def _compare_layers(recording: ActivationRecording, merged: Model, rounding: float) -> list[ModuleDeviation]:
    """Compare every decoder layer, the modules before the first layer, and the modules after the last."""
    modules = dict(decoder_layers(merged))
    if modules.keys() != recording.layers.keys():
        raise DamagedFileError(
            f"the merged model has {len(modules)} layers; expected {len(recording.layers)} as in base + adapter"
            f"{REPORT_BUG}"
        )
    replay = _LayerwiseReplay(recording, rounding)
    with ExitStack() as hooks:
        for name, module in modules.items():
            replace = functools.partial(replay.replace_input, name)
            hooks.enter_context(module.register_forward_pre_hook(replace, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(functools.partial(replay.compare_output, name)))
        for row, ids in enumerate(recording.rows):
            replay.row = row
            replay.seen.clear()
            logits = position_logits(merged, ids)
            name = f"modules after {next(reversed(modules))}" if modules else "the model"
            replay.comparison(name).add(recording.logits[row], logits)
    return [comparison.deviation() for comparison in replay.comparisons.values()]
