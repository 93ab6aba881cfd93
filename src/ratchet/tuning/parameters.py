"""Single settings of params.yaml: the values each accepts, and which of them a sweep may search."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ratchet.config.fields import Section
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError

Kind = Literal["int", "float", "map", "other"]

LEARNING = "train."
"""Prefix of the settings that a sweep may search."""

SEED = "train.seed"

MAX_NAMES = 8
"""Names in a message."""


@dataclass(frozen=True)
class SettingField:
    """One setting of params.yaml, without its value."""

    key: str
    """Dotted key, such as `train.adalora.target_rank`."""
    field: FieldInfo = field(repr=False)

    @property
    def kind(self) -> Kind:
        """`map`: names with values. `other`: texts, lists of texts, booleans."""
        annotation = self.field.annotation
        if get_origin(annotation) is dict:
            return "map"
        kinds = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
        kinds = tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds)
        return "float" if float in kinds else "int" if int in kinds else "other"

    @property
    def options(self) -> tuple[Any, ...]:
        """All values of a boolean or literal; else empty."""
        annotation = self.field.annotation
        if annotation is bool:
            return (False, True)
        return get_args(annotation) if get_origin(annotation) is Literal else ()

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = Annotated[self.field.annotation, self.field]
        return TypeAdapter(kind, config=ConfigDict(strict=True))

    def validate(self, value: Any) -> Any:
        """Return the value as settings store it (a list as a tuple, a whole number as a float if it is one).

        Only this setting is checked; combinations are checked when all values are known.

        Raises:
            ValueError: this setting does not accept the value.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"found {format_value(value)}: {describe_error(error)}") from None

    def get(self, settings: Settings) -> Any:
        """Return its value in these settings."""
        node: Any = settings
        for name in self.key.split("."):
            node = getattr(node, name)
        return self.validate(node)


def format_value(value: Any) -> str:
    """Return a value as it is written in params.yaml."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def describe_error(error: ValueError) -> str:
    """Return a validation error on one line, each problem with its setting or section."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(dict.fromkeys(_describe_problem(dict(problem)) for problem in error.errors(include_url=False)))


def _describe_problem(problem: dict[str, Any]) -> str:
    known, place = {*_all_settings(), *_section_names()}, ""
    for part in problem["loc"]:  # it ends in tags of unions, which are not in params.yaml
        longer = f"{place}.{part}" if place else str(part)
        if longer not in known:
            break
        place = longer
    message = str(problem["msg"]).removeprefix("Value error, ")
    if place in _section_names() and f"{place}.{re.split('[.: ]', message, maxsplit=1)[0]}" in known:
        return f"{place}.{message}"  # a message about a whole section names its keys
    message = message if problem["type"] == "value_error" else _lower_first(message)
    return f"{place}: {message}" if place else message


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def make_space_error(key: str, problem: str) -> SettingsError:
    """Return an error about a parameter of the search space."""
    return SettingsError(f"params.yaml: sweep.space.{key}: {problem}")


def find_searchable_setting(key: str) -> SettingField:
    """Return the setting with this key.

    Raises:
        SettingsError: it does not exist, or cannot be searched; the message has the reason.
    """
    section = key.split(".", maxsplit=1)[0]
    if section in Settings.model_fields and not f"{key}.".startswith(LEARNING):
        raise make_space_error(key, _explain_unsearchable(section, key))
    if key in _section_names():
        below = [name for name in _all_settings() if name.startswith(f"{key}.")]
        more = f" and {len(below) - MAX_NAMES} more" if len(below) > MAX_NAMES else ""
        raise make_space_error(key, f"found a section; expected a setting: {', '.join(below[:MAX_NAMES])}{more}")
    if key not in _all_settings():
        raise make_space_error(key, f"unknown setting; {_suggest_name(key)}")
    if key == SEED:
        raise make_space_error(
            key, "a seed cannot be searched: a lucky seed is no better model; finalists are trained with several seeds"
        )
    found = _all_settings()[key]
    if found.kind == "map":
        raise make_space_error(key, "has a value for each name and cannot be searched")
    return found


def _explain_unsearchable(section: str, key: str) -> str:
    if section == "machine":
        return "section machine does not change results and cannot be searched; set it in section machine"
    if section in ("base", "prepare"):
        return (
            "trials use the same data and the same base, which are prepared once; compare other data or bases in "
            f"another project or with `dvc exp run -S {key}=...`"
        )
    return f"section {section} does not affect training; only settings of section train can be searched"


def find_train_setting(name: str) -> SettingField:
    """Return a setting of section train by its key, with or without `train.`.

    Raises:
        ValueError: it does not exist.
    """
    for key in (name, f"{LEARNING}{name}"):
        if key.startswith(LEARNING) and key in _all_settings():
            return _all_settings()[key]
    raise ValueError(f"{name} is not a setting of section train; {_suggest_name(name, LEARNING)}")


def _suggest_name(name: str, within: str = "") -> str:
    """Return similar settings as a question; settings of section train come first."""
    keys = sorted(
        (key for key in _all_settings() if key.startswith(within)), key=lambda key: not key.startswith(LEARNING)
    )
    last = name.rpartition(".")[2]
    found = [key for key in keys if key.endswith(f".{last}")]
    by_last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    found = found or [by_last[one] for one in difflib.get_close_matches(last, by_last, n=3)]
    found = found or difflib.get_close_matches(name, keys, n=3)
    return f"did you mean {' or '.join(found[:3])}?" if found else "only settings of section train can be searched"


@cache
def _all_settings() -> dict[str, SettingField]:
    return {
        f"{prefix}{name}": SettingField(f"{prefix}{name}", info) for prefix, name, info in _iterate_fields(Settings, "")
    }


@cache
def _section_names() -> frozenset[str]:
    parents: Iterable[str] = (key.rpartition(".")[0] for key in _all_settings())
    return frozenset(parents)


def _iterate_fields(section: type[Section], prefix: str) -> Iterator[tuple[str, str, FieldInfo]]:
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _iterate_fields(kind, f"{prefix}{name}.")
        else:
            yield prefix, name, info


# One dimension of a search space.

STEP_TOLERANCE = 1e-9
"""Tolerance of floating-point arithmetic, in steps."""


@dataclass(frozen=True)
class SearchDimension:
    """Values of one searched setting."""

    name: str
    """Dotted key, such as `train.rank`."""
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    """Both inclusive; whole numbers if kind is int. Used for ranges only."""
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()
    """None, booleans, numbers, texts, or tuples of texts. Used if kind is choice."""

    @property
    def points(self) -> int | None:
        """Number of values; None for a continuous range."""
        if self.kind == "choice":
            return len(self.choices)
        if self.kind == "int":
            return int((self.high - self.low) // int(self.step or 1)) + 1
        return None if self.step is None else int((self.high - self.low) / self.step + STEP_TOLERANCE) + 1

    def contains(self, value: Any) -> bool:
        """Return whether this is one of the values."""
        if self.kind == "choice":
            return any(value == one and type(value) is type(one) for one in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        if self.kind == "int" and value != int(value):
            return False
        if self.step is None:
            return True
        steps = (value - self.low) / self.step
        return abs(steps - round(steps)) < STEP_TOLERANCE
