"""Importing torch, transformers, bitsandbytes and peft without what no model of ours ever calls.

They take 5 s of a worker's start as they come (2 cores of a cloud machine). Of that, here is not spent, measured one
after the other: .9 s on torch's inductor, which bitsandbytes loads to decorate functions that are never called on CPUs
and seldom on GPUs; .4 s on scipy, of which transformers wants one function, for detecting objects in pictures; .1 s on
boto3, which accelerate imports where it finds it; 1.3 s on looking for garbage among a million objects of modules, none
of which ever is.

Nothing is taken away: what is put off here is loaded when somebody calls it.
"""

import functools
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CLOUD = "boto3"
OPTIMIZE = "scipy.optimize"
_MODELS = "models"
_ASSIGNMENT = "linear_sum_assignment"


def import_model_libraries() -> None:
    """Import the libraries that every model needs; costs nothing when they are there."""
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
    """No search for garbage meanwhile; and what is there afterwards is not searched again either.

    That spares training, too: a full collection looks at all objects that live, and modules are most of them.
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
    """What transformers found out about its folder of models while it was imported serves for `transformers.models`.

    It reads the sources of all models, 1,600 files, once for each of the two, and the answers are the same but for a
    prefix of the names. A release that asks in another way is left alone.
    """
    import transformers
    from transformers.utils import import_utils

    asked: Any = getattr(import_utils, "define_import_structure", None)
    folder = Path(str(transformers.__file__)).parent / "models"
    before: Any = getattr(asked, "cache_info", lambda: None)()
    known = asked(folder, prefix=_MODELS) if before else {}
    if not known or asked.cache_info().hits == before.hits or "transformers.models" in sys.modules:
        yield
        return

    def answer(place: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(place) != folder / "__init__.py":
            return asked(place, prefix)
        start = f"{_MODELS}."
        return {
            needs: own
            for needs, there in known.items()
            if (
                own := {name.removeprefix(start): set(found) for name, found in there.items() if name.startswith(start)}
            )
        }

    import_utils.define_import_structure = answer
    try:
        yield
    finally:
        import_utils.define_import_structure = asked


@contextmanager
def defer_compilation() -> Iterator[None]:
    """Functions that are decorated with `torch.compile` meanwhile are compiled when they are called."""
    import torch

    compiled = torch.compile

    def put_off(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if model is None:
            return lambda function: put_off(function, **options)
        given: Callable[..., Any] = model
        made: list[Callable[..., Any]] = []

        @functools.wraps(given)
        def call(*arguments: Any, **named: Any) -> Any:
            if not made:
                made.append(compiled(given, **options))
            return made[0](*arguments, **named)

        return call

    torch.compile = put_off
    try:
        yield
    finally:
        torch.compile = compiled


def defer_linear_sum_assignment() -> AbstractContextManager[None]:
    """`scipy.optimize.linear_sum_assignment`, imported meanwhile, loads scipy when it is called."""
    return _defer_module(OPTIMIZE, {_ASSIGNMENT})


def defer_boto3() -> AbstractContextManager[None]:
    """boto3 and its 150 modules, imported meanwhile, are loaded when something of them is used.

    accelerate imports them, where they are installed, for a dialogue that sets up jobs on SageMaker.
    """
    there = None if CLOUD in sys.modules else importlib.util.find_spec(CLOUD)
    return nullcontext() if there is None else _defer_module(CLOUD, set(), there.submodule_search_locations)


@contextmanager
def _defer_module(name: str, functions: Set[str], path: list[str] | None = None) -> Iterator[None]:
    """A module, imported meanwhile, is loaded when one of `functions` is called or something else of it is asked for.

    Afterwards nothing stands in its place. `path` is where its submodules lie, if any may be imported meanwhile.
    """
    if name in sys.modules:
        yield
        return

    def true() -> ModuleType:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return importlib.import_module(name)

    def later(function: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return getattr(true(), function)(*arguments, **named)

        return call

    def asked_for(attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system's own questions
            raise AttributeError(attribute)
        return getattr(true(), attribute)

    stand_in = ModuleType(name, f"Stands where {name} will stand.")
    stand_in.__spec__ = ModuleSpec(name, None)
    if path is not None:
        stand_in.__path__ = path
    vars(stand_in).update({function: later(function) for function in functions} | {"__getattr__": asked_for})
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
