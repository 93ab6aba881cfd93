"""Checks the types of arguments of the Python API. Its callers often run no type checker."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from ratchet.errors import SettingsError

_DESCRIPTIONS = {
    bool: "True or False",
    int: "an integer",
    str: "a string",
    NoneType: "None",
    Mapping: 'a mapping such as {"train.rank": 16}',
    Callable: "a function",
}


def require_argument_types(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a call by the function's annotations.

    An annotation that is a string counts as `str`, a bool not as an integer, and a string not as a sequence. Python
    reports missing and unknown arguments.

    Raises:
        SettingsError: an argument has another type; the message has the name and the value.
    """
    signature = inspect.signature(function)
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].annotation
        if not _is_valid(value, kind):
            raise SettingsError(f"ratchet.{function.__name__}: {name}: found {value!r}; expected {_describe(kind)}")


def _is_valid(value: object, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is_valid(value, part) for part in parts)
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_is_valid(v, parts[0]) for v in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is_valid(name, parts[0]) for name in value)
    if origin is Callable:
        return callable(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, str if isinstance(kind, str) else kind)


def _describe(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return " or ".join(_describe(part) for part in parts)
    if origin is Sequence:
        return f"a list whose items are each {_describe(parts[0])}"
    if isinstance(kind, str):
        return _DESCRIPTIONS[str]
    return _DESCRIPTIONS.get(origin or kind) or f"a {kind.__module__.partition('.')[0]}.{kind.__name__}"
