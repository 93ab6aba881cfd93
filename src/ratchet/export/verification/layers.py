"""Verification of a merge: each module and each decoder layer of the merged model is given what the same one of
base + adapter was given, and must give what it gave. So errors do not add up, and the one that is off has a name.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.errors import DamagedError, first_line
from ratchet.export.verification.activations import (
    Leaf,
    Recording,
    decoder_layers,
    given_states,
    hidden,
    kept,
    logits_of,
    record,
)
from ratchet.export.verification.divergence import CURE, SCORES, SUMS, Compared, Part, refuse, rounding, tolerance_of
from ratchet.models.device import Model
from ratchet.storage.records.export import MergeCheck, ModuleDifference

__all__ = ["Recording", "check", "record"]

LISTED = 8


def check(recording: Recording, merged: Model, dtype: torch.dtype) -> MergeCheck:
    """Hold a merged model against what was recorded of base + adapter, computed from the same weights.

    Linear layers, embeddings and norms are compared in float32, whatever they are stored in; decoder layers run in the
    merged model's own type. What a layer is off is held against what it adds to its input, not against its output,
    in which a few features of large models are a thousand times as large as all others.

    Args:
        recording: of base + adapter.
        merged: a plain model, read from what was written; it is not changed.
        dtype: type of its stored weights.

    Raises:
        DamagedError: it equals the base although the adapter does something; a module is not there; or one is off,
            and is named.
    """
    tolerance = tolerance_of(dtype, recording.dtype)
    with torch.no_grad():
        moved = _moved(recording, merged)
        leaves = list(_leaves(recording, merged, tolerance))
        refuse(leaves)
        layers = _layers(recording, merged, rounding(dtype, recording.dtype, merged.dtype))
        refuse(layers)
    worst = sorted((*leaves, *layers), key=lambda part: (-part.excess, part.name))[:LISTED]
    return MergeCheck(
        modules=len(leaves),
        layers=len(recording.layers),
        worst=tuple(ModuleDifference(name=p.name, max_difference=p.difference, scale=p.scale) for p in worst),
        tolerance=tolerance,
        moved=moved,
    )


def _moved(recording: Recording, merged: Model) -> float:
    """Largest difference of a logit to the bare base; 0 where the adapter changes nothing.

    Raises:
        DamagedError: the merged model is the base, while base + adapter is not.
    """
    with_adapter, bare = torch.cat(recording.logits), torch.cat(recording.bare_logits)
    if torch.equal(with_adapter, bare):
        return 0.0
    found = torch.cat([logits_of(merged, row) for row in recording.rows])
    if found.shape != bare.shape:
        raise DamagedError(
            f"the merged model has {found.shape[-1]} logits where base + adapter has {bare.shape[-1]}{CURE}"
        )
    moved, missed = float((found - bare).abs().max()), float((found - with_adapter).abs().max())
    if moved < 0.1 * missed:  # rounding to bfloat16 moves it a little, too
        raise DamagedError(
            f"the merge equals the base: no update arrived. Its logits are within {moved:.2g} of the base's, which the "
            f"adapter moves by {float((with_adapter - bare).abs().max()):.2g}{CURE}"
        )
    return moved


# -------------------------------------------------------------------------------------------------------------- modules


def _leaves(recording: Recording, merged: Model, tolerance: float) -> Iterator[Part]:
    modules = dict(merged.named_modules())
    for name, leaf in recording.leaves.items():
        module = modules.get(name)
        if module is None:
            raise DamagedError(f"the merged model has no module {name}, which base + adapter has{CURE}")
        try:
            found = _ran(module, leaf)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise DamagedError(f"the merged model's {name} does not take its input ({first_line(error)})") from error
        compared = Compared(name, tolerance)
        compared.add(leaf.outputs, found)
        yield compared.part()


def _ran(module: nn.Module, leaf: Leaf) -> Tensor:
    parameter = next(module.parameters())
    if parameter.dtype != torch.float32:
        module = copy.deepcopy(module).float()
    inputs = leaf.inputs.to(parameter.device)
    output = module(inputs.float() if inputs.is_floating_point() else inputs)
    found: Tensor = output.float().cpu()
    return found


# --------------------------------------------------------------------------------------------------------------- layers


@dataclass
class _Run:
    """The merged model's layers, each given what was recorded."""

    recording: Recording
    rounding: float
    row: int = 0
    compared: dict[str, Compared] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @property
    def allowed(self) -> float:
        """Difference over scale."""
        return SUMS + SCORES * self.rounding

    def of(self, name: str) -> Compared:
        """What is gathered under a name."""
        return self.compared.setdefault(name, Compared(name, self.allowed, typical=self.rounding > 0))

    def before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The recorded states in the place of those that came; those before the first layer are compared."""
        if name in self.seen:
            return None
        recorded, came = self.recording.layers[name].inputs[self.row], given_states(args, kwargs)
        if name == next(iter(self.recording.layers)):
            self.of(f"what {name} is given").add(kept(recorded[0]), kept(came[0]))
        states = recorded.to(came, copy=True)  # it may write into what it is given
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    def after(self, name: str, output: Any) -> Any:
        """Compare; what the last one gives is replaced by what was recorded, for the head to be given the same."""
        if name in self.seen:
            return None
        self.seen.add(name)
        layer, states = self.recording.layers[name], hidden(output)
        expected, given = layer.outputs[self.row], kept(layer.inputs[self.row][0])
        size = expected.abs().amax(-1)
        added = (expected - given).abs().amax(-1) if given.shape == expected.shape else size
        # What rounding makes of the sum of both counts too, in the type that the layer runs in.
        floor = 4 * torch.finfo(states.dtype).eps / self.allowed * size
        self.of(name).add(expected, kept(states[0]), torch.maximum(added, floor))
        if name != next(reversed(self.recording.layers)):
            return None
        last = self.recording.last[self.row].to(states)
        return (last, *output[1:]) if isinstance(output, tuple) else last


def _layers(recording: Recording, merged: Model, by_rounding: float) -> list[Part]:
    """Every decoder layer, what comes before the first and what comes after the last."""
    modules = dict(decoder_layers(merged))
    if modules.keys() != recording.layers.keys():
        raise DamagedError(f"the merged model has {len(modules)} layers, base + adapter {len(recording.layers)}")
    run = _Run(recording, by_rounding)
    with _running(run, modules):
        for row, ids in enumerate(recording.rows):
            run.row = row
            run.seen.clear()
            found = logits_of(merged, ids)
            run.of(f"what follows {next(reversed(modules))}" if modules else "the model").add(
                recording.logits[row], found
            )
    return [compared.part() for compared in run.compared.values()]


@contextmanager
def _running(run: _Run, modules: dict[str, nn.Module]) -> Iterator[None]:
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
