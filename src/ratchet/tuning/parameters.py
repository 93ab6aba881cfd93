"""Settings one by one: what each accepts, and which of them a sweep may search."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ratchet.config.fields import Section
from ratchet.config.schema import Settings
from ratchet.errors import SettingsError

Kind = Literal["int", "float", "map", "other"]

LEARNING = "train."
"""Settings below it decide what is learned from the same data on the same base."""

SEED = "train.seed"

MOST_NAMES = 8
"""In a message."""


@dataclass(frozen=True)
class SettingField:
    """One leaf of params.yaml, without its value."""

    key: str
    """Dotted, such as `train.adalora.target_rank`."""
    field: FieldInfo = field(repr=False)

    @property
    def kind(self) -> Kind:
        """`map`: names with a value each. `other`: words, lists of words, true and false."""
        annotation = self.field.annotation
        if get_origin(annotation) is dict:
            return "map"
        kinds = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
        kinds = tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds)
        return "float" if float in kinds else "int" if int in kinds else "other"

    @property
    def words(self) -> tuple[Any, ...]:
        """All values, where they can be listed; else none."""
        annotation = self.field.annotation
        if annotation is bool:
            return (False, True)
        return get_args(annotation) if get_origin(annotation) is Literal else ()

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = Annotated[self.field.annotation, self.field]
        return TypeAdapter(kind, config=ConfigDict(strict=True))

    def accepted(self, value: Any) -> Any:
        """The value as settings hold it (a list as a tuple, a float where whole numbers are floats).

        Only this one setting is looked at: what goes with other settings is known when all values are.

        Raises:
            ValueError: it is none that this setting can take.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"found {format_value(value)}: {describe_error(error)}") from None

    def of(self, settings: Settings) -> Any:
        """Its value in these settings."""
        node: Any = settings
        for name in self.key.split("."):
            node = getattr(node, name)
        return self.accepted(node)


def format_value(value: Any) -> str:
    """A value as in params.yaml."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def describe_error(error: ValueError) -> str:
    """What was wrong, on one line; of pydantic's findings each with the setting or section that it is about."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(dict.fromkeys(_describe_finding(dict(found)) for found in error.errors(include_url=False)))


def _describe_finding(found: dict[str, Any]) -> str:
    known, place = {*_all_settings(), *_section_names()}, ""
    for part in found["loc"]:  # ends in tags of unions, which are no place in params.yaml
        longer = f"{place}.{part}" if place else str(part)
        if longer not in known:
            break
        place = longer
    message = str(found["msg"]).removeprefix("Value error, ")
    if place in _section_names() and f"{place}.{re.split('[.: ]', message, maxsplit=1)[0]}" in known:
        return f"{place}.{message}"  # of a section as a whole: it names its own keys
    message = message if found["type"] == "value_error" else _lower_first(message)
    return f"{place}: {message}" if place else message


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def make_space_error(key: str, problem: str) -> SettingsError:
    """What is wrong with a knob of the search space."""
    return SettingsError(f"params.yaml: sweep.space.{key}: {problem}")


def find_searchable_setting(key: str) -> SettingField:
    """The setting that a sweep is to search.

    Raises:
        SettingsError: there is none of this name, or searching it would make no sense; the message says why.
    """
    section = key.split(".", maxsplit=1)[0]
    if section in Settings.model_fields and not f"{key}.".startswith(LEARNING):
        raise make_space_error(key, _explain_unsearchable(section, key))
    if key in _section_names():
        below = [name for name in _all_settings() if name.startswith(f"{key}.")]
        more = f" and {len(below) - MOST_NAMES} more" if len(below) > MOST_NAMES else ""
        raise make_space_error(key, f"a section, not a setting; it has {', '.join(below[:MOST_NAMES])}{more}")
    if key not in _all_settings():
        raise make_space_error(key, f"no such setting; {_suggest_name(key)}")
    if key == SEED:
        raise make_space_error(
            key, "a seed is luck, and the luckiest is no better model; finalists are trained with several seeds anyway"
        )
    found = _all_settings()[key]
    if found.kind == "map":
        raise make_space_error(
            key, "gives each name a value of its own, which neither a range nor a list of choices can"
        )
    return found


def _explain_unsearchable(section: str, key: str) -> str:
    if section == "machine":
        return (
            "section machine says how, not what is learned: it changes no result, so there is nothing to search; set "
            "it in machine"
        )
    if section in ("base", "prepare"):
        return (
            "trials are compared on the same rows and the same base, which are prepared once; other data or another "
            f"base is another project, or an experiment (`dvc exp run -S {key}=...`)"
        )
    return f"section {section} changes nothing that is learned; only settings of section train can be searched"


def find_train_setting(name: str) -> SettingField:
    """The setting of section train that a tie or a condition names, with or without `train.`.

    Raises:
        ValueError: there is none.
    """
    for key in (name, f"{LEARNING}{name}"):
        if key.startswith(LEARNING) and key in _all_settings():
            return _all_settings()[key]
    raise ValueError(f"{name} is no setting of section train; {_suggest_name(name, LEARNING)}")


def _suggest_name(name: str, within: str = "") -> str:
    """What may have been meant, for people; of equals a setting of section train."""
    keys = sorted(
        (key for key in _all_settings() if key.startswith(within)), key=lambda key: not key.startswith(LEARNING)
    )
    last = name.rpartition(".")[2]
    found = [key for key in keys if key.endswith(f".{last}")]
    by_last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    found = found or [by_last[one] for one in difflib.get_close_matches(last, by_last, n=3)]
    found = found or difflib.get_close_matches(name, keys, n=3)
    return f"did you mean {' or '.join(found[:3])}?" if found else "what can be searched are settings of section train"


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


# One free setting of a search space, without the library that searches it.

STEP_TOLERANCE = 1e-9
"""Of floating point, in steps."""


@dataclass(frozen=True)
class SearchDimension:
    """Values that one setting may be given."""

    name: str
    """Dotted key, such as `train.rank`."""
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    """Both inclusive; whole numbers where kind is int. Read only for ranges."""
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()
    """None, booleans, numbers, texts, or tuples of texts. Read only where kind is choice."""

    @property
    def points(self) -> int | None:
        """How many values there are; None where they are not counted."""
        if self.kind == "choice":
            return len(self.choices)
        if self.kind == "int":
            return int((self.high - self.low) // int(self.step or 1)) + 1
        return None if self.step is None else int((self.high - self.low) / self.step + STEP_TOLERANCE) + 1

    def holds(self, value: Any) -> bool:
        """Whether this is one of the values."""
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
