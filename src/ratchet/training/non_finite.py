"""Finds the layer in which a number that is not finite began, when a step is computed the second time."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ratchet.models.device import Model


class NonFiniteTracer:
    """Watches the outputs of all modules of a model. Watching costs a sum and a wait for the device per module."""

    first_module: str = ""
    """The first module of the forward pass whose output was not finite, by its name in the base; empty if none."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the forward passes inside the context. They compute the same bits."""
        modules = self._model.get_base_model().named_modules()
        hooks = [module.register_forward_hook(partial(self._check, name)) for name, module in modules if name]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check(self, name: str, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        # A module is called before the module that contains it returns, so the first name is that of the innermost one.
        if not self.first_module and any(not _is_finite(tensor) for tensor in _iterate_tensors(output)):
            self.first_module = name.replace(".base_layer", "")


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. A sum needs no memory of the tensor's size, unlike `isfinite`."""
    return bool(torch.isfinite(tensor.detach().sum(dtype=torch.float32)))


def _iterate_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _iterate_tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _iterate_tensors(value)


def describe_origin(first_modules: list[str] | None, module_norms: Mapping[str, float]) -> str:
    """Describe where a number that is not finite began.

    Args:
        first_modules: `NonFiniteTracer.first_module` of each rank; None if no forward pass was watched.
        module_norms: gradient norms of modules, in the order of the forward pass.
    """
    if found := next(filter(None, first_modules or ()), ""):
        return f"the first output that is not finite is that of {found}"
    broken = [name for name, norm in module_norms.items() if not math.isfinite(norm)]
    if not broken:
        return ""
    if len(broken) < len(module_norms):  # the backward pass begins at the last module
        return f"the first gradient that is not finite is that of {broken[-1]}"
    return "no gradient is finite" + ("" if first_modules is None else ", although the outputs of all layers are")
