"""The search space of a sweep: ranges, choices, parameters derived from others (`tie`), and conditions (`when`).

The last sections convert values to positions from 0 to 1, and to Optuna's distributions.
"""

import difflib
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, cached_property, partial
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ratchet.config.fields import Section
from ratchet.config.params_file import apply_changes, get_value
from ratchet.config.settings import Settings
from ratchet.config.sweep import SweepParameter
from ratchet.errors import SettingsError
from ratchet.storage.records.sweep import ParameterAxis

LEARNING = "train."
"""Prefix of the settings that a sweep may search."""

MAX_NAMES = 8
"""Maximum number of names in a message."""

MAX_POINTS = 100_000
"""Maximum number of points in a grid, and of values that are checked one by one."""

STEP_TOLERANCE = 1e-9
"""Allowed rounding error of a position in a stepped range, in steps."""

ROUNDING = 1e-9
"""Allowed rounding error of a sampler's value, relative to the larger end of the range or to the number of steps."""

_NUMBER = r"\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?|\.\d+(?:[eE][+-]?\d{1,2})?"
_SETTING = r"[A-Za-z_][A-Za-z0-9_.]*"
_PRODUCT = re.compile(rf"(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<setting>{_SETTING})")
_QUOTIENT = re.compile(rf"(?P<setting>{_SETTING})\s*(?P<sign>[*/])\s*(?P<factor>{_NUMBER})")
Kind = Literal["int", "float", "map", "other"]


# Settings of params.yaml: the values that each accepts, and which of them a sweep may search.


@dataclass(frozen=True)
class SettingField:
    """A setting of params.yaml, without its value."""

    key: str
    """Dotted key, such as `train.adalora.target_rank`."""
    field: FieldInfo = field(repr=False)

    @property
    def kind(self) -> Kind:
        """Kind of the setting's values. `map`: names with values; `other`: texts, lists of texts, booleans."""
        annotation = self.field.annotation
        if get_origin(annotation) is dict:
            return "map"
        kinds = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
        kinds = tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds)
        return "float" if float in kinds else "int" if int in kinds else "other"

    @property
    def options(self) -> tuple[Any, ...]:
        """All values of a boolean or a literal; empty for other settings."""
        annotation = self.field.annotation
        if annotation is bool:
            return (False, True)
        return get_args(annotation) if get_origin(annotation) is Literal else ()

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = Annotated[self.field.annotation, self.field]
        return TypeAdapter(kind, config=ConfigDict(strict=True))

    def validate(self, value: Any, where: str = "") -> Any:
        """Return the value as settings store it: a list as a tuple, a whole number of a float setting as a float.

        Only this setting is checked. Combinations are checked when all values are known. `where` is for the message.

        Raises:
            ValueError: the setting does not accept the value.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            messages = [str(problem["msg"]).removeprefix("Value error, ") for problem in error.errors()]
            problems = dict.fromkeys(message[:1].lower() + message[1:] for message in messages)
            prefix = f"{where}: " if where else ""
            raise ValueError(f"{prefix}found {format_value(value)}: {'; '.join(problems)}") from None

    def get(self, settings: Settings) -> Any:
        """Return the value of this setting in `settings`."""
        return self.validate(get_value(settings, self.key))


def format_value(value: Any) -> str:
    """Return a value as it is written in params.yaml."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def make_space_error(key: str, problem: str) -> SettingsError:
    """Return an error about a parameter of the search space."""
    return SettingsError(f"params.yaml: sweep.space.{key}: {problem}")


def find_searchable_setting(key: str) -> SettingField:
    """Return the setting with this key.

    Raises:
        SettingsError: the setting does not exist, or cannot be searched; the message has the reason.
    """
    section = key.split(".", maxsplit=1)[0]
    if section in Settings.model_fields and not f"{key}.".startswith(LEARNING):
        if section == "machine":
            problem = "section machine does not change results and cannot be searched; set it in section machine"
        elif section in ("base", "prepare"):
            problem = (
                "trials use the same data and the same base, which are prepared once; compare other data or bases in "
                f"another project or with `dvc exp run -S {key}=...`"
            )
        else:
            problem = f"section {section} does not affect training; only settings of section train can be searched"
        raise make_space_error(key, problem)
    if below := [name for name in _all_settings() if name.startswith(f"{key}.")]:
        more = f" and {len(below) - MAX_NAMES} more" if len(below) > MAX_NAMES else ""
        raise make_space_error(key, f"found a section; expected a setting: {', '.join(below[:MAX_NAMES])}{more}")
    if key not in _all_settings():
        raise make_space_error(key, f"unknown setting; {_suggest_name(key)}")
    if key == "train.seed":
        raise make_space_error(
            key, "a seed cannot be searched: a lucky seed is no better model; finalists are trained with several seeds"
        )
    if key == "train.objective":
        raise make_space_error(key, "losses of different objectives cannot be compared; sweep each by itself")
    setting = _all_settings()[key]
    if setting.kind == "map":
        raise make_space_error(key, "has a value for each name and cannot be searched")
    return setting


def _find_preference_problems(settings: Settings) -> Iterator[str]:
    """Yield why a sweep over preference tunings would compare losses that cannot be compared."""
    sweep = settings.sweep
    if settings.train.objective == "sft":
        return
    if any(aim.metric == "validation_loss" for aim in sweep.objectives):
        yield (
            f"params.yaml: sweep.objectives: found validation_loss, but the loss of {settings.train.objective} depends "
            "on train.beta and on the reference; set [{metric: preference_accuracy}], or, if answers have labels, "
            "[{metric: token_f1}]"
        )
    if "train.beta" in sweep.space and sweep.resolved_pruner.kind != "none":
        yield str(
            make_space_error(
                "train.beta", "trials are pruned by their loss, which depends on it; set sweep.pruner: {kind: none}"
            )
        )


def find_train_setting(name: str) -> SettingField:
    """Return a setting of section train by its key, with or without `train.`.

    Raises:
        ValueError: the setting does not exist.
    """
    for key in (name, f"{LEARNING}{name}"):
        if key.startswith(LEARNING) and key in _all_settings():
            return _all_settings()[key]
    raise ValueError(f"{name} is not a setting of section train; {_suggest_name(name, LEARNING)}")


def _suggest_name(name: str, within: str = "") -> str:
    """Return a question with similar settings; settings of section train come first."""
    keys = sorted((key for key in _all_settings() if key.startswith(within)), key=lambda k: not k.startswith(LEARNING))
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(keys)}
    similar = [by_leaf[match] for match in difflib.get_close_matches(name.rpartition(".")[2], by_leaf, n=3)]
    return f"did you mean {' or '.join(similar)}?" if similar else "only settings of section train can be searched"


@cache
def _all_settings() -> dict[str, SettingField]:
    return {
        f"{prefix}{name}": SettingField(f"{prefix}{name}", info) for prefix, name, info in _iterate_fields(Settings, "")
    }


def _iterate_fields(section: type[Section], prefix: str) -> Iterator[tuple[str, str, FieldInfo]]:
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _iterate_fields(kind, f"{prefix}{name}.")
        else:
            yield prefix, name, info


# One dimension of a search space.


@dataclass(frozen=True)
class SearchDimension:
    """The values of one searched setting."""

    name: str
    """Dotted key, such as `train.rank`."""
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    """Ends of a range, inclusive; whole numbers if kind is int."""
    log: bool = False
    """Whether the scale of a range is logarithmic."""
    step: float | None = None
    """Distance between two values of a range; None: 1 if kind is int, otherwise the range is continuous."""
    choices: tuple[Any, ...] = ()
    """Values if kind is choice: None, booleans, numbers, texts, or tuples of texts."""

    @property
    def points(self) -> int | None:
        """Number of values; None for a continuous range."""
        if self.kind == "choice":
            return len(self.choices)
        if self.kind == "int":
            return int((self.high - self.low) // int(self.step or 1)) + 1
        return None if self.step is None else int((self.high - self.low) / self.step + STEP_TOLERANCE) + 1


def snap_value(dimension: SearchDimension, value: Any) -> Any:
    """Return the closest value of the dimension, as settings store it.

    Samplers compute in floating point and with logarithms (0.30000000000000004 for the third step of 0.1), and JSON has
    no tuples. The same value must have the same text everywhere, because it is part of a RunId.

    Raises:
        ValueError: no value of the dimension is close enough.
    """
    if dimension.kind == "choice":
        value = to_tuples(value)
        is_bool = isinstance(value, bool)
        for choice in dimension.choices:
            if choice == value and isinstance(choice, bool) == is_bool:
                return choice
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high = dimension.low, dimension.high
        tolerance = ROUNDING * max(abs(low), abs(high))
        if low - tolerance <= value <= high + tolerance:
            value = min(max(value, low), high)
            if dimension.points is None:
                return float(value)
            steps = (value - low) / (dimension.step or 1)
            if abs(steps - round(steps)) <= ROUNDING * max(1.0, steps):
                return value_at(dimension, round(steps))
    raise ValueError(f"{dimension.name}: found {format_value(value)}; expected {describe_dimension(dimension)}")


def value_at(dimension: SearchDimension, index: int) -> Any:
    """Return a value of a finite dimension by its index from 0; steps are computed in decimals."""
    if dimension.kind == "choice":
        return dimension.choices[index]
    if dimension.kind == "int":
        return int(dimension.low) + index * int(dimension.step or 1)
    return float(Decimal(repr(float(dimension.low))) + index * Decimal(repr(float(dimension.step or 0))))


def describe_dimension(dimension: SearchDimension) -> str:
    """Return the dimension as text: `4 to 64`, `lora, dora`."""
    if dimension.kind == "choice":
        return ", ".join(map(format_value, dimension.choices))
    prefix = "whole numbers " if dimension.kind == "int" else ""
    step = f" in steps of {format_value(dimension.step)}" if dimension.step not in (None, 1) else ""
    return f"{prefix}{format_value(dimension.low)} to {format_value(dimension.high)}{step}"


def grid_values(dimension: SearchDimension, points: int) -> list[Any]:
    """Return the values of a dimension for a grid; those of a range are ascending.

    A choice, a range with an explicit step, and a range with at most `points` values have all their values. Any other
    range has `points` values that are evenly spaced on its scale. Values between the ends are rounded to twelve digits,
    because logarithms may differ between machines.
    """
    count = dimension.points
    if count is not None and (dimension.kind == "choice" or dimension.step is not None or count <= points):
        return list(iterate_values(dimension))
    low, high = dimension.low, dimension.high
    shares = [index / (points - 1) for index in range(1, points - 1)]
    inner = [low * (high / low) ** share if dimension.log else low + (high - low) * share for share in shares]
    inner = [round(value) if dimension.kind == "int" else float(f"{value:.12g}") for value in inner]
    return list(dict.fromkeys(snap_value(dimension, value) for value in (low, *inner, high)))


def iterate_values(dimension: SearchDimension) -> Iterator[Any]:
    """Yield all values of a finite dimension, in order."""
    return (value_at(dimension, index) for index in range(dimension.points or 0))


@dataclass(frozen=True)
class ParameterDomain:
    """Values that a setting may have in the trials of a sweep."""

    values: tuple[Any, ...] = ()
    """All drawn or derived values; of a range with too many values, those that show whether all are valid."""
    range: Literal["continuous", "stepped"] | None = None
    """Kind of a range of which `values` are not all values; otherwise None."""
    text: str = ""
    """Description of `values`."""
    others: tuple[Any, ...] = ()
    """Values that come from params.yaml, in trials that do not draw or derive a value."""

    def contains(self, value: Any) -> bool:
        """Return whether some trial may have this value."""
        if value in self.others or value in self.values:
            return True
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return self.range is not None and is_number and min(self.values) <= value <= max(self.values)

    def describe(self) -> str:
        """Return the values as text."""
        return ", ".join(dict.fromkeys(filter(None, (self.text, *map(format_value, self.others)))))


def make_domain(dimension: SearchDimension) -> ParameterDomain:
    """Return the domain of a setting that every trial draws."""
    text, last = describe_dimension(dimension), dimension.points
    if last is not None and last <= MAX_POINTS:
        return ParameterDomain(tuple(iterate_values(dimension)), None, text)
    if last is not None:
        return ParameterDomain((dimension.low, value_at(dimension, 1), dimension.high), "stepped", text)
    return ParameterDomain(
        (dimension.low, dimension.high), "continuous" if dimension.low < dimension.high else None, text
    )


# Derived parameters, such as alpha = 2 * rank.


@dataclass(frozen=True)
class DerivedParameter:
    """A setting with the value of another setting, times `factor`."""

    source: str
    """Dotted key of the other setting."""
    factor: Fraction
    kind: str
    """Kind of the derived setting (`Kind`)."""

    @staticmethod
    def parse(text: str, target: SettingField) -> "DerivedParameter":
        """Parse `2 * train.rank`, `train.rank * 2`, `train.rank / 2` or `train.rank`; `train.` may be left out.

        Raises:
            ValueError: the text is invalid, or the other setting does not exist.
        """
        match = _PRODUCT.fullmatch(text.strip()) or _QUOTIENT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"found {text!r}; expected NUMBER * SETTING, SETTING / NUMBER or SETTING")
        parts = match.groupdict()
        factor = Fraction(parts["factor"] or 1)
        if not factor:
            raise ValueError(f"found {text!r}; expected a factor other than 0")
        factor = 1 / factor if parts.get("sign") == "/" else factor
        if factor != 1 and target.kind == "other":
            raise ValueError(f"found {text!r}; {target.key} is not a number, so it can only equal another setting")
        return DerivedParameter(find_train_setting(parts["setting"]).key, factor, target.kind)

    @property
    def text(self) -> str:
        """Canonical text of the expression."""
        if self.factor == 1:
            return self.source
        if self.factor.denominator == 1:
            return f"{self.factor} * {self.source}"
        if self.factor.numerator == 1:
            return f"{self.source} / {self.factor.denominator}"
        return f"{float(self.factor)!r} * {self.source}"

    def value(self, source: Any) -> Any:
        """Return the value that is derived from a value of the source, computed in decimals and not rounded.

        Raises:
            ValueError: the source is not a number, or the result is not a whole number although it must be one.
        """
        if self.kind == "other":
            return source
        if isinstance(source, bool) or not isinstance(source, int | float):
            raise ValueError(f"{self.source} may be {format_value(source)}, which is not a number")
        exact = Fraction(repr(source)) * self.factor  # in decimals, 3 times 0.3 is 0.9
        if self.kind == "float":
            try:
                return float(exact)
            except OverflowError:
                raise ValueError(
                    f"{self.source} may be {format_value(source)}, and the derived value is out of range"
                ) from None
        if exact.denominator != 1:
            raise ValueError(
                f"{self.source} may be {format_value(source)}, and {format_value(float(exact))} is not a whole "
                f"number, which this setting must be; give {self.source} a step or choices that all fit"
            )
        return int(exact)

    def domain(self, target: SettingField, source: ParameterDomain) -> ParameterDomain:
        """Return the domain of the derived setting.

        Raises:
            ValueError: the setting does not accept one of the values, or it is a whole number and the source is a
                continuous range.
        """
        if target.kind == "int" and source.range == "continuous":
            raise ValueError(
                f"{self.source} takes any value in its range, and this setting is a whole number; give {self.source} "
                "a step or choices that all fit"
            )

        def derive(value: Any) -> Any:
            derived = self.value(value)
            try:
                return target.validate(derived)
            except ValueError as error:
                raise ValueError(f"if {self.source} is {format_value(value)}: {error}") from None

        values, others = tuple(map(derive, source.values)), tuple(map(derive, source.others))
        text = source.text if self.factor == 1 or not values else f"{self.factor} times {source.text}"
        return ParameterDomain(values, source.range, text, others)


# Reading `sweep.space`: hyperparameters are checked against the settings, and sorted in the order of drawing.


@dataclass(frozen=True)
class SearchParameter:
    """A setting that trials set."""

    setting: SettingField
    rule: SearchDimension | DerivedParameter
    """Dimension if its values are drawn, or the expression from which they are derived."""
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Conditions: the required values of other settings. If there are none, every trial sets this setting."""

    @property
    def name(self) -> str:
        """Dotted key."""
        return self.setting.key

    @property
    def sources(self) -> tuple[str, ...]:
        """Settings that must be decided before this one."""
        return (*self.when, *((self.rule.source,) if isinstance(self.rule, DerivedParameter) else ()))


def _read_conditions(parameter: SweepParameter) -> dict[str, tuple[Any, ...]]:
    """Return the required values by dotted key, as settings store them."""
    conditions: dict[str, tuple[Any, ...]] = {}
    try:
        for name, values in parameter.when.items():
            source = find_train_setting(name)
            if source.key in conditions:
                raise ValueError(f"found {source.key} twice; write one list of its values")
            required = values if isinstance(values, tuple) else (values,)
            conditions[source.key] = tuple(source.validate(value, name) for value in required)
            if not required:
                raise ValueError(f"{name}: found an empty list; expected at least one value")
    except ValueError as error:
        raise ValueError(f"when: {error}") from None
    return conditions


def _build_rule(setting: SettingField, parameter: SweepParameter) -> SearchDimension | DerivedParameter:
    if parameter.tie is not None:
        try:
            return DerivedParameter.parse(parameter.tie, setting)
        except ValueError as error:
            raise ValueError(f"tie: {error}") from None
    if parameter.choices:
        choices = tuple(setting.validate(value, "choices") for value in parameter.choices)
        if duplicates := [choice for choice in dict.fromkeys(choices) if choices.count(choice) > 1]:
            raise ValueError(f"choices: found {format_value(duplicates[0])} twice; remove one")
        return SearchDimension(setting.key, "choice", choices=choices)
    return _build_range(setting, parameter)


def _build_range(setting: SettingField, parameter: SweepParameter) -> SearchDimension:
    if setting.kind not in ("int", "float"):
        example = f", such as choices: {format_value(setting.options)}" if setting.options else ""
        raise ValueError(f"found low and high, but this setting is not a number; list its values{example}")
    fields = {"low": parameter.low, "high": parameter.high, "step": parameter.step}
    numbers = {name: float(value) for name, value in fields.items() if value is not None}
    if setting.kind == "int":
        for name, value in numbers.items():
            if not value.is_integer():
                raise ValueError(f"{name}: found {value!r}; expected a whole number")
        numbers = {name: int(value) for name, value in numbers.items()}
    ends = {name: setting.validate(numbers[name], name) for name in ("low", "high")}
    dimension = SearchDimension(
        setting.key, "int" if setting.kind == "int" else "float", **ends, log=parameter.log, step=numbers.get("step")
    )
    if dimension.step is None:
        return dimension
    # The new upper end is the highest value that steps reach, because Optuna warns if `high` is not such a value.
    last = value_at(dimension, (dimension.points or 1) - 1)
    first, end, step = (Decimal(repr(float(number))) for number in (dimension.low, last, dimension.step))
    if (end - first) % step:  # Optuna checks this in decimals too
        raise ValueError(
            f"step: steps of {dimension.step!r} from {dimension.low!r} need more digits than a float "
            "has; use fewer digits"
        )
    return SearchDimension(setting.key, dimension.kind, low=dimension.low, high=last, step=dimension.step)


def _sort_by_dependency(parameters: list[SearchParameter]) -> list[SearchParameter]:
    names = {variable.name for variable in parameters}
    graph = {variable.name: [key for key in variable.sources if key in names] for variable in parameters}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = list(reversed(error.args[1]))
        raise make_space_error(
            circle[0], f"depends on itself: {' -> '.join(circle)}; remove one `tie` or `when` of the circle"
        ) from None
    ordered: list[SearchParameter] = []
    while len(ordered) < len(parameters):
        placed = {variable.name for variable in ordered}
        ordered.append(next(v for v in parameters if v.name not in placed and placed.issuperset(graph[v.name])))
    return ordered


def _select_applicable(ordered: list[SearchParameter], settings: Settings) -> tuple[SearchParameter, ...]:
    """Return the parameters that some trial sets, with the conditions that not every trial meets."""
    domains: dict[str, ParameterDomain] = {}
    kept, problems = [], []
    for variable in ordered:
        try:
            when = _open_conditions(variable, domains, settings)
            if when is None:
                continue
            if isinstance(variable.rule, SearchDimension):
                domain = make_domain(variable.rule)
            else:
                source = variable.rule.source
                fixed = ParameterDomain(others=(find_train_setting(source).get(settings),))
                try:
                    domain = variable.rule.domain(variable.setting, domains.get(source, fixed))
                except ValueError as error:
                    raise ValueError(f"tie: {error}") from None
        except ValueError as error:
            problems.append(str(make_space_error(variable.name, str(error))))
            continue
        if when:
            domain = replace(domain, others=(*domain.others, variable.setting.get(settings)))
        domains[variable.name] = domain
        kept.append(SearchParameter(variable.setting, variable.rule, when))
    if problems:
        raise SettingsError("\n".join(problems))
    return tuple(kept)


def _open_conditions(
    variable: SearchParameter, domains: Mapping[str, ParameterDomain], settings: Settings
) -> dict[str, tuple[Any, ...]] | None:
    """Return the conditions that some trials meet and others do not; None if no trial can meet them."""
    still_open = {}
    for source, required in variable.when.items():
        domain = domains.get(source)
        if domain is None:  # not searched: the same in every trial
            if find_train_setting(source).get(settings) not in required:
                return None
            continue
        if impossible := [value for value in required if not domain.contains(value)]:
            raise ValueError(
                f"when: {source}: found {format_value(impossible[0])}, which it never is; expected {domain.describe()}"
            )
        still_open[source] = required
    return still_open


# The search space.


@dataclass(frozen=True)
class SearchSpace:
    """The searched settings, in the order in which their values are decided."""

    variables: tuple[SearchParameter, ...]
    """Searched and derived settings. A parameter comes after those on which it depends; otherwise, the order is that of
    params.yaml. A parameter whose condition no trial can meet is left out."""
    fixed: Mapping[str, Any]
    """Values of params.yaml that derived parameters and conditions may use."""

    @staticmethod
    def from_settings(settings: Settings) -> "SearchSpace":
        """Return the space of `sweep.space`.

        Raises:
            SettingsError: a setting is unknown, cannot be searched, does not accept a value, or has an invalid tie or
                condition; the message has one line for each of them.
        """
        space = settings.sweep.space
        if not space:
            raise SettingsError(
                "params.yaml: sweep.space: found no settings; add a setting of section train with its values, such as "
                "train.rank: {low: 4, high: 64, log: true}"
            )
        parameters, problems = [], list(_find_preference_problems(settings))
        for key, parameter in space.items():
            try:
                setting = find_searchable_setting(key)
                rule = _build_rule(setting, parameter)
                parameters.append(SearchParameter(setting, rule, _read_conditions(parameter)))
            except SettingsError as error:
                problems.append(str(error))
            except ValueError as error:
                problems.append(str(make_space_error(key, str(error))))
        if problems:
            raise SettingsError("\n".join(problems))
        variables = _select_applicable(_sort_by_dependency(parameters), settings)
        if not any(isinstance(variable.rule, SearchDimension) for variable in variables):
            raise SettingsError(
                "params.yaml: sweep.space: no setting is searched: none with low and high, or with choices, is ever "
                f"drawn ({', '.join(space)}); give one of them values, or change the setting that its `when` requires"
            )
        always = {variable.name for variable in variables if not variable.when}
        keys = dict.fromkeys(key for variable in variables for key in (variable.name, *variable.sources))
        return SearchSpace(variables, {key: find_train_setting(key).get(settings) for key in keys if key not in always})

    def axes(self) -> tuple[ParameterAxis, ...]:
        """Return the axes of all searched and derived settings, for plots."""
        axes = []
        for variable in self.variables:
            rule, conditional = variable.rule, bool(variable.when)
            if isinstance(rule, DerivedParameter):
                axis = ParameterAxis(name=variable.name, kind="tie", tie=rule.text, conditional=conditional)
            elif rule.kind == "choice":
                axis = ParameterAxis(name=rule.name, kind="choice", choices=rule.choices, conditional=conditional)
            else:
                axis = ParameterAxis(
                    name=rule.name, kind=rule.kind, low=rule.low, high=rule.high, log=rule.log, conditional=conditional
                )
            axes.append(axis)
        return tuple(axes)

    def dimensions(self) -> tuple[SearchDimension, ...]:
        """Return the dimensions in the order in which they are drawn."""
        return tuple(variable.rule for variable in self.variables if isinstance(variable.rule, SearchDimension))

    def dimension(self, name: str) -> SearchDimension:
        """Return a dimension by its dotted key.

        Raises:
            KeyError: this setting is not drawn.
        """
        return {dimension.name: dimension for dimension in self.dimensions()}[name]

    def draw(self, pick: Callable[[SearchDimension], Any]) -> dict[str, Any]:
        """Return the values of one trial; `pick` chooses the value of each dimension, in the order of `dimensions`.

        Settings whose condition is not met are left out: the trial uses their values in params.yaml.

        Raises:
            ValueError: `pick` returned a value that the dimension does not have.
        """
        return next(self._walk(lambda dimension: (snap_value(dimension, pick(dimension)),)))

    def select_drawn(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the drawn values of a trial, which determine the derived ones."""
        return {d.name: snap_value(d, values[d.name]) for d in self.dimensions() if d.name in values}

    def contains(self, values: Mapping[str, Any]) -> bool:
        """Return whether the space has the values of a trial. A person may have chosen others (`change_values`), or
        another start of the training (`train.init_adapter`)."""
        if not values.keys() <= {variable.name for variable in self.variables}:
            return False
        try:
            self.select_drawn(values)
        except ValueError:
            return False
        return True

    def change_values(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a trial with the changes of a person; derived values follow.

        A new value of a range may be outside of it, and between its steps, if the setting accepts it. A choice must be
        one of the listed choices, because Optuna does not store another.

        Raises:
            SettingsError: a changed setting is not drawn, does not accept the value or does not apply to this trial, or
                another setting needs a value.
        """
        drawn, unused = dict(values), {}
        for name, value in changes.items():
            dimension = self._find_dimension(name)
            if dimension.name in unused:
                raise SettingsError(f"{dimension.name}: found two values; remove one")
            unused[dimension.name] = drawn[dimension.name] = self._validate_change(dimension, value)

        def pick(dimension: SearchDimension) -> tuple[Any]:
            unused.pop(dimension.name, None)
            if dimension.name not in drawn:
                raise SettingsError(f"{dimension.name}: has no value, but applies to a trial with these values; set it")
            return (drawn[dimension.name],)

        try:
            changed = next(self._walk(pick))
        except ValueError as error:
            raise SettingsError(f"{error}") from None
        for name in unused:
            when = next(variable.when for variable in self.variables if variable.name == name)
            needs = " and ".join(f"{source} is {' or '.join(map(format_value, v))}" for source, v in when.items())
            raise SettingsError(f"{name}: does not apply to a trial with these values; it applies if {needs}")
        return changed

    def _find_dimension(self, name: str) -> SearchDimension:
        """Return the dimension of a setting, with or without `train.`. Raises SettingsError if it is not drawn."""
        dimensions = {dimension.name: dimension for dimension in self.dimensions()}
        for key in (name, f"{LEARNING}{name}"):
            if key in dimensions:
                return dimensions[key]
            for variable in self.variables:
                if variable.name == key and isinstance(variable.rule, DerivedParameter):
                    raise SettingsError(f"{key}: follows from {variable.rule.text}; set {variable.rule.source} instead")
        raise SettingsError(f"{name}: not a setting of the search space; expected one of: {', '.join(dimensions)}")

    def _validate_change(self, dimension: SearchDimension, value: Any) -> Any:
        """Return a value that a person has chosen as settings store it. Raises SettingsError if it is invalid."""
        try:
            value = find_train_setting(dimension.name).validate(value, dimension.name)
            if dimension.kind == "choice":
                return snap_value(dimension, value)
        except ValueError as error:
            raise SettingsError(f"{error}") from None
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (dimension.log and value <= 0):
            expected = "a number > 0, because the range is logarithmic" if dimension.log else "a number"
            raise SettingsError(f"{dimension.name}: found {format_value(value)}; expected {expected}")
        return value

    def to_params(self, values: Mapping[str, Any]) -> "Params":
        """Return the drawn values of a trial as Optuna stores them; none for a trial outside of the space."""
        if not self.contains(values):
            return {}, {}
        drawn = self.select_drawn(values)
        distributions = {name: to_distribution(self.dimension(name)) for name in drawn}
        return {name: encode_value(value) for name, value in drawn.items()}, distributions

    def grid(self, points: int) -> list[dict[str, Any]]:
        """Return all combinations; the last dimension changes fastest. Ranges without step have `points` values.

        Raises:
            SettingsError: there are more than MAX_POINTS combinations.
        """
        combinations = list(islice(self._walk(lambda dimension: grid_values(dimension, points)), MAX_POINTS + 1))
        if len(combinations) > MAX_POINTS:
            raise SettingsError(
                f"params.yaml: sweep.sampler: the grid has more than {MAX_POINTS:,} points ({points} of each range); "
                "search fewer settings, list choices instead of ranges, or set sampler.kind: tpe"
            )
        return combinations

    @property
    def is_finite(self) -> bool:
        """Whether there is no continuous range."""
        return all(dimension.points is not None for dimension in self.dimensions())

    def iterate_points(self) -> Iterator[dict[str, Any]]:
        """Yield all points of a finite space; the last dimension changes fastest."""
        return self._walk(iterate_values)

    def document(self) -> dict[str, Any]:
        """Return the space as JSON; it is equal for equal spaces, even if params.yaml differs."""
        document: dict[str, Any] = {}
        for variable in self.variables:
            rule = variable.rule
            entry: dict[str, Any]
            if isinstance(rule, DerivedParameter):
                entry = {"tie": rule.text}
            elif rule.kind == "choice":
                entry = {"choices": _to_lists(rule.choices)}
            else:
                entry = {"low": rule.low, "high": rule.high, "log": rule.log, "step": rule.step}
            if variable.when:
                when = {source: sorted(_to_lists(required), key=repr) for source, required in variable.when.items()}
                entry |= {"when": when, "otherwise": _to_lists(self.fixed[variable.name])}
            document[variable.name] = entry
        return document

    def _walk(
        self,
        options: Callable[[SearchDimension], Iterable[Any]],
        index: int = 0,
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> Iterator[dict[str, Any]]:
        """Yield `values` with each combination of values of the parameters from `index` on.

        `options` returns the values of a dimension.
        """
        if index == len(self.variables):
            yield dict(values)
            return
        variable, known = self.variables[index], {**self.fixed, **values}
        rule = variable.rule
        if not all(known[source] in required for source, required in variable.when.items()):
            yield from self._walk(options, index + 1, values)
            return
        for value in (rule.value(known[rule.source]),) if isinstance(rule, DerivedParameter) else options(rule):
            yield from self._walk(options, index + 1, {**values, variable.name: value})


def apply_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings of a trial; values may come from JSON.

    Raises:
        SettingsError: a setting does not exist, or the combination of values is invalid.
    """
    for key in values:
        if key not in _all_settings():
            raise SettingsError(f"{key}: unknown setting")
    try:
        return apply_changes(settings, {key: to_tuples(value) for key, value in values.items()})
    except SettingsError as error:
        chosen = ", ".join(f"{key} {format_value(value)}" for key, value in values.items())
        raise SettingsError(f"{chosen}: {'; '.join(str(error).splitlines())}") from None


def longest_epochs(space: SearchSpace, settings: Settings) -> float:
    """Return the number of epochs of the longest training in the space."""
    # A derived parameter has its extremes where its source has them.
    extremes = [space.draw(partial(_extreme_value, side)) for side in (0, -1)]
    candidates = [values.get("train.epochs", settings.train.epochs) for values in extremes]
    candidates += [_extreme_value(-1, d) for d in space.dimensions() if d.name == "train.epochs"]
    return max(map(float, candidates))


def _extreme_value(side: int, dimension: SearchDimension) -> Any:
    """Return the smallest (side 0) or largest (side -1) value of a dimension.

    If not all choices are numbers, it is the first or last choice.
    """
    if dimension.kind != "choice":
        return (dimension.low, dimension.high)[side]
    numbers = [value for value in dimension.choices if isinstance(value, int | float) and not isinstance(value, bool)]
    return sorted(numbers)[side] if len(numbers) == len(dimension.choices) else dimension.choices[side]


def to_tuples(value: Any) -> Any:
    """Return a JSON list as a tuple, as settings have it."""
    return tuple(value) if isinstance(value, list) else value


def _to_lists(value: Any) -> Any:
    return [_to_lists(item) for item in value] if isinstance(value, tuple) else value


# Positions from 0 to 1.


def to_unit(dimension: SearchDimension, value: float) -> float:
    """Return the position of a value in its range, from 0 to 1 (see `_scale_bounds` for finite ranges)."""
    low, high = _scale_bounds(dimension)
    position = math.log(value) if dimension.log else float(value)
    return (position - low) / (high - low) if high > low else 0.5


def from_unit(dimension: SearchDimension, position: float) -> Any:
    """Return the value at a position; a position outside of 0 to 1 is clipped. A finite range has the closest value."""
    low, high = _scale_bounds(dimension)
    value = low + min(max(position, 0.0), 1.0) * (high - low)
    value = math.exp(value) if dimension.log else value
    points = dimension.points
    if points is None:
        return min(max(value, dimension.low), dimension.high)
    index = round((value - dimension.low) / (dimension.step or 1))
    return value_at(dimension, min(max(index, 0), points - 1))


def draw_value(dimension: SearchDimension, source: random.Random) -> Any:
    """Draw a value uniformly on the dimension's scale."""
    if dimension.kind == "choice":
        return source.choice(dimension.choices)
    return from_unit(dimension, source.random())


def _scale_bounds(dimension: SearchDimension) -> tuple[float, float]:
    """Return the ends of a range on its scale, which is linear or logarithmic.

    A finite range is half a step wider at both ends. So the end values have as large a share of the linear scale as all
    other values.
    """
    points = dimension.points
    if points is None:
        low, high = dimension.low, dimension.high
    else:
        half = (dimension.step or 1) / 2
        low, high = dimension.low - half, value_at(dimension, points - 1) + half
    return (math.log(low), math.log(high)) if dimension.log else (low, high)


# Optuna's distributions, and values as Optuna stores them (JSON, without lists as choices).


Params = tuple[dict[str, Any], dict[str, BaseDistribution]]
"""Drawn values of a trial as Optuna stores them, and their distributions."""


def to_distribution(dimension: SearchDimension) -> BaseDistribution:
    """Return the dimension as an Optuna distribution."""
    if dimension.kind == "choice":
        return CategoricalDistribution([encode_value(value) for value in dimension.choices])
    if dimension.kind == "int":
        low, high = int(dimension.low), int(dimension.high)
        return IntDistribution(low, high, log=dimension.log, step=int(dimension.step or 1))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def encode_value(value: Any) -> Any:
    """Return a value as Optuna stores it: a list of names becomes its JSON text."""
    return json.dumps(value) if isinstance(value, list | tuple) else value


def decode_value(dimension: SearchDimension, value: Any) -> Any:
    """Return the value that `encode_value` has encoded."""
    if dimension.kind != "choice":
        return value
    for choice in dimension.choices:
        encoded = encode_value(choice)
        if encoded == value and type(encoded) is type(value):  # because 1 == 1.0 == True
            return choice
    return value
