"""Loads `torch._dynamo`, the front end of torch's compiler, when it is first needed.

transformers decorates functions with it, and torch's optimizers call it in every step, but it has an effect only in
compiled code. Without it and distributed tensors, a worker's imports take .65 s less of 2.1 s of CPU time
(docs/evidence_speed.md).
"""

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

DYNAMO = "torch._dynamo"


def defer_dynamo() -> None:
    """Put a placeholder for `torch._dynamo` into sys.modules, if it is not loaded. torch must be imported.

    The placeholder has the functions that are used outside compiled code. Reading another attribute or importing a
    submodule loads the module; the placeholder becomes the module, so earlier references to it stay valid.
    """
    spec = importlib.util.find_spec(DYNAMO) if DYNAMO not in sys.modules else None
    if spec is None or spec.loader is None:
        return
    placeholder = _Placeholder(DYNAMO)
    vars(placeholder).update(
        __spec__=spec, __loader__=spec.loader, __file__=spec.origin, __package__=DYNAMO,
        __path__=spec.submodule_search_locations,
    )  # fmt: skip
    sys.modules[DYNAMO] = placeholder
    vars(sys.modules["torch"])["_dynamo"] = placeholder
    sys.meta_path.insert(0, _SubmoduleFinder)


class _Placeholder(ModuleType):
    """The module before it is loaded."""

    def __getattribute__(self, name: str) -> Any:
        if name in _EAGER_FUNCTIONS and not _LoadState.is_running:
            return _EAGER_FUNCTIONS[name]
        if name == "__path__" or not name.startswith("__"):  # an import of a submodule reads __path__
            _load()
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            _load()
        ModuleType.__setattr__(self, name, value)


class _LoadState:
    """State of the loading of the module."""

    lock = threading.RLock()
    is_running = False
    actions: list[Callable[[], Any]] = []  # noqa: RUF012
    """Functions to call once the module is loaded."""


def _load() -> None:
    """Load the module once. Other threads wait until it is loaded. Without effect while it is being loaded."""
    dynamo = sys.modules[DYNAMO]
    with _LoadState.lock:
        if _LoadState.is_running or not isinstance(dynamo, _Placeholder):
            return
        _LoadState.is_running = True
        try:
            vars(dynamo)["__loader__"].exec_module(dynamo)
            object.__setattr__(dynamo, "__class__", ModuleType)
        finally:
            _LoadState.is_running = False
        for action in _LoadState.actions:
            action()


def _disable(function: Any = None, *args: Any, **options: Any) -> Any:
    if function is None:
        return lambda given: _disable(given, *args, **options)
    if not isinstance(function, FunctionType):
        _load()
        return sys.modules[DYNAMO].disable(function, *args, **options)
    current = function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return current(*args, **kwargs)

    def disable() -> None:
        nonlocal current
        current = sys.modules[DYNAMO].disable(function, *args, **options)

    _LoadState.actions.append(disable)
    return call


def _allow_in_graph(function: Any) -> Any:
    _LoadState.actions.append(lambda: sys.modules[DYNAMO].allow_in_graph(function))
    return function


def _assume_constant_result(function: Any) -> Any:
    function._dynamo_marked_constant = True  # torch's own decorator does nothing else
    return function


def _graph_break(msg: str = "") -> None:
    """Do nothing, as torch's function outside compiled code."""


_EAGER_FUNCTIONS: dict[str, Any] = {
    "disable": _disable,
    "allow_in_graph": _allow_in_graph,
    "assume_constant_result": _assume_constant_result,
    "graph_break": _graph_break,
}


class _SubmoduleFinder:
    """Finds submodules that were loaded with the module while the import system read its `__path__`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:  # fmt: skip
        is_loaded = name.startswith(f"{DYNAMO}.") and name in sys.modules
        return ModuleSpec(name, _LoadedModuleLoader(sys.modules[name])) if is_loaded else None  # type: ignore[arg-type]


class _LoadedModuleLoader:
    """Loader of a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # torch's config modules refuse names that are not settings
