"""Imports torch, transformers, bitsandbytes and peft without parts that Ratchet never uses.

Importing them normally takes 5 s of a worker's start (2 cores of a cloud machine). This module saves, measured one
after the other: 0.9 s for torch's inductor, which bitsandbytes loads to decorate functions that are never called on
CPUs and seldom on GPUs; 0.4 s for scipy, from which transformers needs one function for object detection; 0.1 s for
boto3, which accelerate imports where it is installed; 1.3 s for garbage collection among a million objects of modules,
none of which is garbage.

Nothing is removed: deferred modules are loaded on first use.
"""

import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def set_library_defaults() -> None:
    """Set them for this process and its workers; a variable that is set already keeps its value.

    Call it before torch is imported.
    """
    # Threads that wait for each other sleep. On two idle processors a step then takes 1.7 times as long as with threads
    # that spin (the default of libgomp), but with one busy process next to it, spinning takes 40 times as long
    # (docs/performance.md, "Threads that wait").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneDNN and ideep keep 1024 kernels by default, one for each shape of a 16-bit product: with batches of many
    # lengths, a model of 0.1M parameters held 550 MB after 57 steps. With 32 kernels it is 35 MB at the same speed.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "32")
    os.environ.setdefault("TQDM_DISABLE", "1")  # Ratchet reports progress itself


BOTO3 = "boto3"
SCIPY_OPTIMIZE = "scipy.optimize"
MODELS_PREFIX = "models"
LINEAR_SUM_ASSIGNMENT = "linear_sum_assignment"


def import_model_libraries() -> None:
    """Import the libraries that every model needs; cheap if they are already imported."""
    with pause_garbage_collection():
        with defer_linear_sum_assignment(), defer_boto3():
            importlib.import_module("transformers")
            with reuse_model_listing():
                importlib.import_module("transformers.models")
            importlib.import_module("transformers.modeling_utils")
        with defer_compilation():
            importlib.import_module("bitsandbytes")
        importlib.import_module("peft")


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, and exclude all objects that exist at the end from later collections.

    This also speeds up training: a full collection visits all live objects, and most of them belong to modules.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def reuse_model_listing() -> Iterator[None]:
    """Let `transformers.models` reuse the module listing that transformers made when it was imported.

    transformers reads the sources of all models, 1,600 files, once for each of the two, and the results are equal
    except for a prefix of the names. If a release works differently, this does nothing.
    """
    import transformers
    from transformers.utils import import_utils

    original: Any = getattr(import_utils, "define_import_structure", None)
    folder = Path(str(transformers.__file__)).parent / "models"
    cache_info: Any = getattr(original, "cache_info", lambda: None)()
    structure = original(folder, prefix=MODELS_PREFIX) if cache_info else {}
    if not structure or original.cache_info().hits == cache_info.hits or "transformers.models" in sys.modules:
        yield
        return

    def filtered(path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return original(path, prefix)
        prefix_dot = f"{MODELS_PREFIX}."
        return {
            requirement: selected
            for requirement, entries in structure.items()
            if (
                selected := {
                    name.removeprefix(prefix_dot): set(names)
                    for name, names in entries.items()
                    if name.startswith(prefix_dot)
                }
            )
        }

    import_utils.define_import_structure = filtered
    try:
        yield
    finally:
        import_utils.define_import_structure = original


@contextmanager
def defer_compilation() -> Iterator[None]:
    """Compile functions decorated with `torch.compile` inside this context only when they are called."""
    import torch

    original_compile = torch.compile

    def compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if model is None:
            return lambda function: compile_later(function, **options)
        target: Callable[..., Any] = model
        cached: list[Callable[..., Any]] = []

        @functools.wraps(target)
        def call(*arguments: Any, **named: Any) -> Any:
            if not cached:
                cached.append(original_compile(target, **options))
            return cached[0](*arguments, **named)

        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = original_compile


def defer_linear_sum_assignment() -> AbstractContextManager[None]:
    """Load scipy only when `scipy.optimize.linear_sum_assignment`, imported in this context, is called."""
    return _defer_module(SCIPY_OPTIMIZE, {LINEAR_SUM_ASSIGNMENT})


def defer_boto3() -> AbstractContextManager[None]:
    """Load boto3 and its 150 modules, imported in this context, only when they are used.

    accelerate imports them, if installed, for a dialogue that sets up jobs on SageMaker.
    """
    spec = None if BOTO3 in sys.modules else importlib.util.find_spec(BOTO3)
    return nullcontext() if spec is None else _defer_module(BOTO3, set(), spec.submodule_search_locations)


@contextmanager
def _defer_module(name: str, functions: Set[str], path: list[str] | None = None) -> Iterator[None]:
    """Load a module, imported in this context, only when one of `functions` is called or an attribute is read.

    The placeholder is removed afterwards. `path` is the search path of its submodules, if any may be imported.
    """
    if name in sys.modules:
        yield
        return

    def load() -> ModuleType:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]
        return importlib.import_module(name)

    def make_forwarder(function: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return getattr(load(), function)(*arguments, **named)

        return call

    def get_attribute(attribute: str) -> Any:
        if attribute.startswith("__"):  # looked up by the import system
            raise AttributeError(attribute)
        return getattr(load(), attribute)

    placeholder = ModuleType(name, f"Placeholder for {name}.")
    placeholder.__spec__ = ModuleSpec(name, None)
    if path is not None:
        placeholder.__path__ = path
    vars(placeholder).update(
        {function: make_forwarder(function) for function in functions} | {"__getattr__": get_attribute}
    )
    sys.modules[name] = placeholder
    try:
        yield
    finally:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]
