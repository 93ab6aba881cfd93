"""Imports torch, transformers, bitsandbytes and peft without parts that Ratchet never uses.

Importing them normally takes 5 s of a worker's start (2 cores of a cloud machine). This module saves the following
parts of this time, measured one after another:

- 0.9 s for torch's inductor, which bitsandbytes loads to decorate functions that are never called on CPUs and seldom on
  GPUs;
- 0.4 s for scipy, from which transformers needs one function for object detection;
- 0.1 s for boto3, from which accelerate needs functions for its command for SageMaker;
- 1.3 s for garbage collection among a million objects of modules, none of which is garbage;
- 0.7 s for torch's compiler (lazy_dynamo.py), distributed tensors and sympy, which both import. Distributed tensors are
  left out only in Ratchet's own processes.

All functions still work, because deferred modules are loaded on first use. Where distributed tensors are left out,
transformers cannot distribute models; Ratchet distributes them itself.
"""

import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet.models.lazy_dynamo import defer_dynamo

SCIPY_OPTIMIZE = "scipy.optimize"
BOTO3 = "boto3"
TRACE_WRAPPED_OP = "torch._dynamo._trace_wrapped_higher_order_op"
MODELS_PREFIX = "models"


def set_library_defaults() -> None:
    """Set environment variables of libraries for this process and its workers; variables already set keep their value.

    Call this before torch is imported.
    """
    # Let threads that wait for each other sleep; by default, libgomp lets them spin. On two idle processors, a step
    # takes 1.7 times as long with sleeping threads as with spinning threads. Next to one busy process, however, a step
    # takes 40 times as long with spinning threads (docs/evidence_speed.md, "Threads that wait").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # By default, oneDNN and ideep each cache up to 1024 kernels, one for each shape of a product, with their work
    # space. With batches of many lengths, a training of a model with 0.1M parameters held 550 MB after 57 steps. A
    # layer and its adapter need up to 16 shapes. Training is not faster with 32 kernels, and slower with 8
    # (docs/evidence_speed.md).
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "16")
    os.environ.setdefault("TQDM_DISABLE", "1")  # Ratchet reports progress itself


def import_model_libraries(in_own_process: bool = False) -> None:
    """Import the libraries that every model needs, and let oneDNN compute products in this process where it is faster
    (`cpu_products.use_onednn`). Repeated calls are cheap.

    Args:
        in_own_process: whether only Ratchet uses the libraries in this process (see `import_transformers`).
    """
    import_transformers(in_own_process)
    with pause_garbage_collection():
        with defer_compilation():
            importlib.import_module("bitsandbytes")
        with defer_module(BOTO3):
            importlib.import_module("peft")
    from ratchet.models import cpu_products

    cpu_products.use_onednn()
    if in_own_process:  # peft needs the same assumption as transformers (`ignore_distributed_tensors`)
        vars(importlib.import_module("peft.tuners.tuners_utils"))["_torch_supports_distributed"] = False


def import_transformers(in_own_process: bool = False) -> None:
    """Set the libraries' defaults (`set_library_defaults`), then import torch and transformers.

    Args:
        in_own_process: whether only Ratchet uses transformers in this process. It is then imported without support for
            distributed tensors.
    """
    set_library_defaults()
    with pause_garbage_collection(), defer_function(SCIPY_OPTIMIZE, "linear_sum_assignment"), defer_module(BOTO3):
        importlib.import_module("torch")
        defer_dynamo()
        importlib.import_module("transformers")
        if in_own_process:
            ignore_distributed_tensors()
        with reuse_model_listing():
            importlib.import_module("transformers.models")
        with defer_function(TRACE_WRAPPED_OP, "TransformGetItemToIndex"):  # needed only for masks under vmap
            importlib.import_module("transformers.masking_utils")  # every model imports it
        importlib.import_module("transformers.modeling_utils")


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, and exclude all objects that exist at the end from later collections.

    This also speeds up training: a full collection visits all live objects, and most of them belong to modules.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def ignore_distributed_tensors() -> None:
    """Make modules of transformers that are imported later assume that torch.distributed is not available, so that they
    do not import its tensors. Other code that reads `torch.distributed.tensor` loads it.
    """
    from torch import distributed

    for name in ("transformers.utils.import_utils", "transformers.utils"):
        vars(importlib.import_module(name))["is_torch_distributed_available"] = lambda: False

    def load(name: str) -> ModuleType:
        if name != "tensor":
            raise AttributeError(f"module {distributed.__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{distributed.__name__}.{name}")

    vars(distributed).setdefault("__getattr__", load)


@contextmanager
def reuse_model_listing() -> Iterator[None]:
    """Make `transformers.models` reuse the module listing that `transformers` computed on import.

    Each of the two packages reads the sources of all models (1,600 files), and their results differ only in a prefix of
    the names. If a release of transformers works differently, this context changes nothing.
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

    def reuse_structure(path: Any, prefix: str | None = None) -> Any:
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

    import_utils.define_import_structure = reuse_structure
    try:
        yield
    finally:
        import_utils.define_import_structure = original


@contextmanager
def defer_compilation() -> Iterator[None]:
    """Make functions that are decorated with `torch.compile` inside this context compile on their first call."""
    import torch

    original_compile = torch.compile

    def compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if model is None:
            return lambda function: compile_later(function, **options)
        target: Callable[..., Any] = model
        cached: list[Callable[..., Any]] = []

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not cached:
                cached.append(original_compile(target, **options))
            return cached[0](*args, **kwargs)

        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = original_compile


@contextmanager
def defer_function(module: str, name: str) -> Iterator[None]:
    """Make an import of a function or class inside this context load its module only when the function is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    with defer_module(module, **{name: call}):
        yield


@contextmanager
def defer_module(name: str, **attributes: Any) -> Iterator[None]:
    """Make an import of a module in this context load it only when an attribute is read.

    Importers get a placeholder, which is removed from sys.modules when the context ends or the module is loaded.

    Args:
        attributes: attributes of the placeholder, which do not load the module.
    """
    if name in sys.modules:
        yield
        return

    def remove_placeholder() -> None:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]

    def get_attribute(attribute: str) -> Any:
        if attribute.startswith("__"):  # looked up by the import system
            raise AttributeError(attribute)
        remove_placeholder()
        return getattr(importlib.import_module(name), attribute)

    placeholder = ModuleType(name, f"Placeholder for {name}.")
    placeholder.__spec__ = ModuleSpec(name, None)
    vars(placeholder).update(attributes | {"__getattr__": get_attribute})
    sys.modules[name] = placeholder
    try:
        yield
    finally:
        remove_placeholder()
