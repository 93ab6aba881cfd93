"""Which values a setting can have in some trial: one dimension's values, and what ties and conditions make of them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from math import prod
from types import MappingProxyType
from typing import Any

from ratchet.config.schema import Settings
from ratchet.config.sweep import SweepParameter
from ratchet.errors import SettingsError
from ratchet.storage.records.sweep import ParameterAxis
from ratchet.tuning.parameters import (
    SearchDimension,
    SettingField,
    describe_error,
    find_searchable_setting,
    find_train_setting,
    format_value,
    make_space_error,
)

ROUNDING = 1e-9
"""By how much of a value (or of a step) arithmetic of samplers may miss what it means."""


def snap_value(dimension: SearchDimension, value: Any) -> Any:
    """The one value of the dimension that is meant, as settings hold it.

    Samplers compute in floating point and on logarithms (0.30000000000000004 for the third step of 0.1), and JSON has
    lists only; the same value must be the same text everywhere, for it becomes part of a RunId.

    Raises:
        ValueError: the dimension has no such value.
    """
    found = _match_choice(dimension, value) if dimension.kind == "choice" else (_snap_number(dimension, value),)
    if not found or not dimension.holds(found[0]):
        raise ValueError(f"{dimension.name}: {format_value(value)} is none of {describe_dimension(dimension)}")
    return found[0]


def _match_choice(dimension: SearchDimension, value: Any) -> tuple[Any, ...]:
    meant = tuple(value) if isinstance(value, list) else value
    return tuple(one for one in dimension.choices if one == meant and isinstance(one, bool) == isinstance(meant, bool))


def _snap_number(dimension: SearchDimension, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high = dimension.low, dimension.high
    room = ROUNDING * max(abs(low), abs(high))
    if low - room <= value <= high + room:
        value = min(max(value, low), high)
    if not low <= value <= high:
        return None
    if dimension.kind == "float" and dimension.step is None:
        return float(value)
    steps = (value - low) / (dimension.step or 1)
    return stepped_value(dimension, round(steps)) if abs(steps - round(steps)) <= ROUNDING * max(1.0, steps) else None


def stepped_value(dimension: SearchDimension, index: int) -> int | float:
    """A value of a stepped range, counted from its lower end, computed in decimals."""
    if dimension.kind == "int":
        return int(dimension.low) + index * int(dimension.step or 1)
    return float(Decimal(repr(float(dimension.low))) + index * Decimal(repr(float(dimension.step or 0))))


def to_decimal_fraction(number: float) -> Fraction:
    """The decimal number that was meant: 3 times 0.3 is 0.9, which floating point misses."""
    return Fraction(repr(number))


def is_exactly_stepped(low: float, high: float, step: float) -> bool:
    """Whether steps lead from one end to the other as both are written; Optuna counts in decimals, too."""
    first, last, each = (Decimal(repr(float(number))) for number in (low, high, step))
    return (last - first) % each == 0


def describe_dimension(dimension: SearchDimension) -> str:
    """For people: `4 to 64`, `lora, dora`."""
    if dimension.kind == "choice":
        return ", ".join(map(format_value, dimension.choices))
    whole = "whole numbers " if dimension.kind == "int" else ""
    step = f" in steps of {format_value(dimension.step)}" if dimension.step not in (None, 1) else ""
    return f"{whole}{format_value(dimension.low)} to {format_value(dimension.high)}{step}"


def grid_values(dimension: SearchDimension, points: int) -> list[Any]:
    """Values for a grid, smallest first: all of them where they can be counted, else `points` at even distances.

    Distances are even on the dimension's own scale; numbers between the ends are rounded to twelve digits, so that
    every machine's logarithm gives the same. A range of whole numbers that has a step of its own counts as countable.
    """
    count = dimension.points
    if dimension.kind == "choice":
        return list(dimension.choices)
    if count is not None and (dimension.step is not None or count <= points):
        return [stepped_value(dimension, index) for index in range(count)]
    low, high = dimension.low, dimension.high
    shares = [index / (points - 1) for index in range(1, points - 1)]
    inner = [low * (high / low) ** share if dimension.log else low + (high - low) * share for share in shares]
    inner = [round(value) if dimension.kind == "int" else float(f"{value:.12g}") for value in inner]
    return list(dict.fromkeys(snap_value(dimension, value) for value in (low, *inner, high)))


def all_values(dimension: SearchDimension) -> list[Any]:
    """Every value of a dimension whose values can be counted."""
    return grid_values(dimension, dimension.points or 0)


@dataclass(frozen=True)
class ParameterDomain:
    """Values that a setting has in some trial of a sweep."""

    dimension: SearchDimension | None = None
    """Where they are drawn, be it for another setting that this one is tied to."""
    factor: Fraction = Fraction(1)
    """Of the ties that lead there."""
    ends: tuple[Any, ...] = ()
    """The drawn values that tell of all: a tie that is exact and in bounds on them is so everywhere."""
    others: tuple[Any, ...] = ()
    """As in params.yaml, where it is not searched (at all, or in some trials)."""

    @property
    def is_continuous(self) -> bool:
        """Whether it takes values between any two others, so that no whole number can follow it exactly."""
        drawn = self.dimension
        return drawn is not None and drawn.points is None and drawn.low < drawn.high

    def holds(self, value: Any) -> bool:
        """Whether some trial may have this value."""
        if value in self.others:
            return True
        if self.dimension is None:
            return False
        if self.factor != 1:
            value = float(to_decimal_fraction(value) / self.factor)
        try:
            snap_value(self.dimension, value)
        except ValueError:
            return False
        return True

    def described(self) -> str:
        """For people."""
        drawn = self.dimension
        times = "" if self.factor == 1 else f"{self.factor} times "
        texts = [f"{times}{describe_dimension(drawn)}"] if drawn else []
        return ", ".join(dict.fromkeys((*texts, *map(format_value, self.others))))


def make_domain(dimension: SearchDimension) -> ParameterDomain:
    """Of a free setting that every trial draws."""
    if dimension.kind == "choice":
        ends = dimension.choices
    else:
        last = dimension.points
        ends = (
            dimension.low,
            *((stepped_value(dimension, 1),) if last is not None and last > 1 else ()),
            dimension.high,
        )
    return ParameterDomain(dimension, ends=tuple(ends))


# Ties: a setting that follows from another one, such as alpha = 2 * rank.

_NUMBER = r"\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?|\.\d+(?:[eE][+-]?\d{1,2})?"
_KNOB = r"[A-Za-z_][A-Za-z0-9_.]*"
_PRODUCT = re.compile(rf"(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<knob>{_KNOB})")
_QUOTIENT = re.compile(rf"(?P<knob>{_KNOB})\s*(?P<sign>[*/])\s*(?P<factor>{_NUMBER})")


@dataclass(frozen=True)
class DerivedParameter:
    """`factor` times another setting."""

    source: str
    """Dotted key."""
    factor: Fraction
    kind: str
    """Of the setting that follows (knobs.Kind)."""

    @staticmethod
    def parse(text: str, target: SettingField) -> "DerivedParameter":
        """Read `2 * train.rank`, `train.rank * 2`, `train.rank / 2` or `train.rank`; `train.` may be left out.

        Raises:
            ValueError: none of these, or the other setting does not exist.
        """
        found = _PRODUCT.fullmatch(text.strip()) or _QUOTIENT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no tie; write NUMBER * SETTING, SETTING / NUMBER or SETTING")
        parts = found.groupdict()
        factor = Fraction(parts["factor"] or 1)
        if not factor:
            raise ValueError(f"{text!r}: 0 ties nothing")
        factor = 1 / factor if parts.get("sign") == "/" else factor
        if factor != 1 and target.kind == "other":
            raise ValueError(f"{text!r}: {target.key} is no number; it can follow another setting only as that is")
        return DerivedParameter(find_train_setting(parts["knob"]).key, factor, target.kind)

    @property
    def text(self) -> str:
        """The same tie always in the same words."""
        if self.factor == 1:
            return self.source
        if self.factor.denominator == 1:
            return f"{self.factor} * {self.source}"
        if self.factor.numerator == 1:
            return f"{self.source} / {self.factor.denominator}"
        return f"{float(self.factor)!r} * {self.source}"

    def value(self, source: Any) -> Any:
        """What follows from a value of the other setting: exact in decimals, never rounded to a whole number.

        Raises:
            ValueError: nothing does: no number, or no whole number where the setting is one.
        """
        if self.kind == "other":
            return source
        if isinstance(source, bool) or not isinstance(source, int | float):
            raise ValueError(f"{self.source} may be {format_value(source)}, which is no number")
        exact = to_decimal_fraction(source) * self.factor
        if self.kind == "float":
            try:
                return float(exact)
            except OverflowError:
                raise ValueError(
                    f"{self.source} may be {format_value(source)}, and what follows is out of bounds"
                ) from None
        if exact.denominator != 1:
            raise ValueError(
                f"{self.source} may be {format_value(source)}, and {format_value(float(exact))} is no whole number, "
                f"which this setting must be; give {self.source} a step or choices of which every one fits"
            )
        return int(exact)

    def domain(self, target: SettingField, source: ParameterDomain) -> ParameterDomain:
        """Values that the setting takes where the other has those of `source`.

        Raises:
            ValueError: one of them is none for this setting.
        """
        if target.kind == "int" and source.is_continuous:
            raise ValueError(
                f"{self.source} takes any value in its range, and this setting is a whole number; give {self.source} "
                "a step or choices of which every one fits"
            )

        def follow(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(self._accepted(target, value) for value in values)

        return ParameterDomain(
            source.dimension, source.factor * self.factor, follow(source.ends), follow(source.others)
        )

    def _accepted(self, target: SettingField, source: Any) -> Any:
        value = self.value(source)
        try:
            return target.accepted(value)
        except ValueError as error:
            raise ValueError(f"where {self.source} is {format_value(source)}: {error}") from None


# The search space as written: checked knob by knob against the settings, and brought into the order of drawing.


@dataclass(frozen=True)
class SearchParameter:
    """One setting that trials have values of their own for."""

    setting: SettingField
    rule: SearchDimension | DerivedParameter
    """Where its values come from."""
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of other settings, all of which must be so; empty: in every trial."""

    @property
    def name(self) -> str:
        """Dotted key."""
        return self.setting.key

    @property
    def sources(self) -> tuple[str, ...]:
        """Settings that must be known before this one."""
        return (*self.when, *((self.rule.source,) if isinstance(self.rule, DerivedParameter) else ()))


def read_parameters(settings: Settings) -> tuple[SearchParameter, ...]:
    """The variables of `sweep.space`, each after those that it depends on, else in the order of params.yaml.

    One whose condition no trial can meet (it asks for another value of a setting that is not searched) is left out.

    Raises:
        SettingsError: one line for each knob that makes no sense.
    """
    written = settings.sweep.space
    if not written:
        raise SettingsError(
            "params.yaml: sweep.space is empty: name a setting of section train and its values, such as "
            "train.rank: {low: 4, high: 64, log: true}"
        )
    found, problems = [], []
    for key, knob in written.items():
        try:
            found.append(_build_parameter(key, knob))
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    kept = _select_applicable(_sort_by_dependency(found), settings)
    if not any(isinstance(variable.rule, SearchDimension) for variable in kept):
        raise SettingsError(
            "params.yaml: sweep.space: nothing is searched: no setting with low and high, or with choices, is ever "
            f"drawn ({', '.join(written)}); give one values, or change the setting that its `when` asks for"
        )
    return kept


def _build_parameter(key: str, knob: SweepParameter) -> SearchParameter:
    setting = find_searchable_setting(key)
    try:
        return SearchParameter(setting, _build_rule(setting, knob), _read_conditions(knob))
    except ValueError as error:
        raise make_space_error(key, str(error)) from None


def _read_conditions(knob: SweepParameter) -> dict[str, tuple[Any, ...]]:
    """Wanted values by dotted key, as settings hold them."""
    found: dict[str, tuple[Any, ...]] = {}
    try:
        for name, values in knob.when.items():
            source = find_train_setting(name)
            if source.key in found:
                raise ValueError(f"{source.key} twice; give one list of its values")
            wanted = values if isinstance(values, tuple) else (values,)
            found[source.key] = tuple(_accept_value(source, name, value) for value in wanted)
            if not wanted:
                raise ValueError(f"{name}: an empty list, so this would never be searched")
    except ValueError as error:
        raise ValueError(f"when: {error}") from None
    return found


def _build_rule(setting: SettingField, knob: SweepParameter) -> SearchDimension | DerivedParameter:
    if knob.tie is not None:
        try:
            return DerivedParameter.parse(knob.tie, setting)
        except ValueError as error:
            raise ValueError(f"tie: {error}") from None
    if knob.choices:
        choices = tuple(_accept_value(setting, "choices", value) for value in knob.choices)
        if twice := [one for one in dict.fromkeys(choices) if choices.count(one) > 1]:
            raise ValueError(f"choices: {format_value(twice[0])} twice")
        return SearchDimension(setting.key, "choice", choices=choices)
    return _build_range(setting, knob)


def _accept_value(setting: SettingField, where: str, value: Any) -> Any:
    try:
        return setting.accepted(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _build_range(setting: SettingField, knob: SweepParameter) -> SearchDimension:
    if setting.kind not in ("int", "float"):
        such = f", such as choices: {format_value(setting.words)}" if setting.words else ""
        raise ValueError(f"low and high are for numbers, and this setting is none; list its values{such}")
    given = {"low": knob.low, "high": knob.high, "step": knob.step}
    numbers = {name: float(value) for name, value in given.items() if value is not None}
    if setting.kind == "int":
        for name, value in numbers.items():
            if not value.is_integer():
                raise ValueError(f"{name}: found {value!r}, and this setting is a whole number; write one")
        numbers = {name: int(value) for name, value in numbers.items()}
    ends = {name: _accept_value(setting, name, numbers[name]) for name in ("low", "high")}
    found = SearchDimension(
        setting.key, "int" if setting.kind == "int" else "float", **ends, log=knob.log, step=numbers.get("step")
    )
    if found.step is None:
        return found
    last = stepped_value(
        found, (found.points or 1) - 1
    )  # the highest that steps reach: Optuna warns where `high` is another
    if not is_exactly_stepped(found.low, last, found.step):
        raise ValueError(
            f"step: {found.step!r} from {found.low!r} on gives numbers with more digits than are kept; write it shorter"
        )
    return SearchDimension(setting.key, found.kind, low=found.low, high=last, step=found.step)


def _sort_by_dependency(found: list[SearchParameter]) -> list[SearchParameter]:
    names = {variable.name for variable in found}
    graph = {variable.name: [one for one in variable.sources if one in names] for variable in found}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = list(reversed(error.args[1]))
        raise make_space_error(
            circle[0], f"waits for itself: {' -> '.join(circle)}; break the circle in one `tie` or `when`"
        ) from None
    ordered: list[SearchParameter] = []
    while len(ordered) < len(found):
        known = {variable.name for variable in ordered}
        ordered.append(next(one for one in found if one.name not in known and known.issuperset(graph[one.name])))
    return ordered


def _select_applicable(ordered: list[SearchParameter], settings: Settings) -> tuple[SearchParameter, ...]:
    """The variables that some trial draws, with the conditions that are not met by every trial anyway."""
    domains: dict[str, ParameterDomain] = {}
    kept, problems = [], []
    for variable in ordered:
        try:
            when = _open_conditions(variable, domains, settings)
            if when is None:
                continue
            domain = _compute_domain(variable, domains, settings)
        except ValueError as error:
            problems.append(str(make_space_error(variable.name, str(error))))
            continue
        if when:
            domain = ParameterDomain(
                domain.dimension, domain.factor, domain.ends, (*domain.others, variable.setting.of(settings))
            )
        domains[variable.name] = domain
        kept.append(SearchParameter(variable.setting, variable.rule, when))
    if problems:
        raise SettingsError("\n".join(problems))
    return tuple(kept)


def _open_conditions(
    variable: SearchParameter, domains: Mapping[str, ParameterDomain], settings: Settings
) -> dict[str, tuple[Any, ...]] | None:
    """Conditions that some trials meet and others do not; None where no trial can."""
    still_open = {}
    for source, wanted in variable.when.items():
        domain = domains.get(source)
        if domain is None:  # not searched: the same in every trial
            if find_train_setting(source).of(settings) not in wanted:
                return None
            continue
        if never := [value for value in wanted if not domain.holds(value)]:
            raise ValueError(f"when: {source} is never {format_value(never[0])}; it may be {domain.described()}")
        still_open[source] = wanted
    return still_open


def _compute_domain(
    variable: SearchParameter, domains: Mapping[str, ParameterDomain], settings: Settings
) -> ParameterDomain:
    if isinstance(variable.rule, SearchDimension):
        return make_domain(variable.rule)
    source = variable.rule.source
    fixed = ParameterDomain(others=(find_train_setting(source).of(settings),))
    try:
        return variable.rule.domain(variable.setting, domains.get(source, fixed))
    except ValueError as error:
        raise ValueError(f"tie: {error}") from None


# The search space of a sweep: which settings a trial gives values to, and what follows from them.

MOST_POINTS = 100_000
"""Of a grid, and of points that are counted one by one; no sweep has so many trials."""

Pick = Callable[[SearchDimension], Any]
"""Gives a free setting its value."""

Options = Callable[[SearchDimension], Sequence[Any]]
"""Gives a free setting several."""


@dataclass(frozen=True)
class SearchSpace:
    """Settings that are searched, and in which order their values are decided."""

    variables: tuple[SearchParameter, ...]
    """Each after those that it depends on; then as in params.yaml."""
    fixed: Mapping[str, Any]
    """Settings that some trial, or every one, has as they are in params.yaml, and that ties and conditions ask for."""

    @staticmethod
    def of(settings: Settings) -> "SearchSpace":
        """The space of `sweep.space`.

        Raises:
            SettingsError: a knob that is unknown or not to be searched, values that it cannot take, a tie or a
                condition that leads nowhere; one line each.
        """
        variables = read_parameters(settings)
        always = {variable.name for variable in variables if not variable.when}
        keys = dict.fromkeys(key for variable in variables for key in (variable.name, *variable.sources))
        return SearchSpace(variables, {key: find_train_setting(key).of(settings) for key in keys if key not in always})

    def axes(self) -> tuple[ParameterAxis, ...]:
        """The searched settings, as pictures need them; ties among them."""
        return tuple(map(_build_axis, self.variables))

    def dimensions(self) -> tuple[SearchDimension, ...]:
        """The free settings, in the order in which they are drawn."""
        return tuple(variable.rule for variable in self.variables if isinstance(variable.rule, SearchDimension))

    def dimension(self, name: str) -> SearchDimension:
        """Of a free setting, by its dotted key.

        Raises:
            KeyError: it is none.
        """
        return {dimension.name: dimension for dimension in self.dimensions()}[name]

    def draw(self, pick: Pick) -> dict[str, Any]:
        """Values of one trial: free settings as `pick` says, each asked for after those that it depends on; and ties.

        Settings whose condition is not met are left out: the trial has them as they are in params.yaml.

        Raises:
            ValueError: `pick` gave a value that the dimension does not have.
        """
        return next(self._walk(lambda dimension: (snap_value(dimension, pick(dimension)),)))

    def free(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a trial's values that were drawn; drawing them again gives the trial."""
        return {one.name: snap_value(one, values[one.name]) for one in self.dimensions() if one.name in values}

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a trial of this space can have exactly these values (those of a study before it, perhaps)."""
        plain = {key: _to_tuples(value) for key, value in values.items()}
        try:
            return self.draw(lambda dimension: plain[dimension.name]) == plain
        except (KeyError, ValueError):
            return False

    def grid(self, points: int) -> list[dict[str, Any]]:
        """Every combination, the last free setting changing fastest; ranges without step are given `points` values.

        Raises:
            SettingsError: more combinations than any sweep tries.
        """
        found = list(islice(self._walk(lambda dimension: grid_values(dimension, points)), MOST_POINTS + 1))
        if len(found) > MOST_POINTS:
            raise SettingsError(
                f"params.yaml: sweep.sampler: the grid has more than {MOST_POINTS:,} points ({points} of each range); "
                "search fewer settings, lower sampler.points, or take sampler tpe"
            )
        return found

    def size(self) -> int | None:
        """How many trials with different values there can be; None: without end, or too many to count."""
        counts = {dimension.name: dimension.points for dimension in self.dimensions()}
        if None in counts.values():
            return None
        deciding = self._deciding()
        options = self._walk(lambda one: all_values(one) if one.name in deciding else all_values(one)[:1])
        size = 0
        for number, values in enumerate(options):
            if number >= MOST_POINTS:
                return None
            size += prod(count or 1 for name, count in counts.items() if name in values and name not in deciding)
        return size

    def document(self) -> dict[str, Any]:
        """All that decides which trials there can be, as JSON; equal for equal spaces, however they are written."""
        return {variable.name: self._entry(variable) for variable in self.variables}

    def _entry(self, variable: SearchParameter) -> dict[str, Any]:
        rule = variable.rule
        entry: dict[str, Any]
        if isinstance(rule, DerivedParameter):
            entry = {"tie": rule.text}
        elif rule.kind == "choice":
            entry = {"choices": _to_lists(rule.choices)}
        else:
            entry = {"low": rule.low, "high": rule.high, "log": rule.log, "step": rule.step}
        if variable.when:
            entry["when"] = {source: sorted(_to_lists(wanted), key=repr) for source, wanted in variable.when.items()}
            entry["otherwise"] = _to_lists(self.fixed[variable.name])
        return entry

    def _walk(
        self, options: Options, index: int = 0, values: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[dict[str, Any]]:
        """Every way to give values to the variables from `index` on, where each free one has these options."""
        if index == len(self.variables):
            yield dict(values)
            return
        variable = self.variables[index]
        rule = variable.rule
        if not all(self._value(source, values) in wanted for source, wanted in variable.when.items()):
            yield from self._walk(options, index + 1, values)
            return
        for value in (
            (rule.value(self._value(rule.source, values)),) if isinstance(rule, DerivedParameter) else options(rule)
        ):
            yield from self._walk(options, index + 1, {**values, variable.name: value})

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        return values[name] if name in values else self.fixed[name]

    def _deciding(self) -> set[str]:
        """Settings whose values decide, directly or through ties, whether others are searched."""
        found: set[str] = set()
        for variable in reversed(self.variables):  # those that depend come after what they depend on
            found.update(variable.when)
            if isinstance(variable.rule, DerivedParameter) and variable.name in found:
                found.add(variable.rule.source)
        return found


def apply_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings of a trial; values may come from JSON.

    Raises:
        SettingsError: there is no such setting, or the values do not go together.
    """
    tree = settings.model_dump()
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node: Any = tree
        for name in sections:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict) or leaf not in node:
            raise SettingsError(f"{key}: no such setting")
        node[leaf] = _to_tuples(value)
    try:
        return Settings.model_validate(tree)
    except ValueError as error:
        chosen = ", ".join(f"{key} {format_value(value)}" for key, value in values.items())
        raise SettingsError(f"{chosen}: {describe_error(error)}") from None


def _build_axis(variable: SearchParameter) -> ParameterAxis:
    rule, conditional = variable.rule, bool(variable.when)
    if isinstance(rule, DerivedParameter):
        return ParameterAxis(knob=variable.name, kind="tie", tie=rule.text, conditional=conditional)
    if rule.kind == "choice":
        return ParameterAxis(knob=rule.name, kind="choice", choices=rule.choices, conditional=conditional)
    return ParameterAxis(
        knob=rule.name, kind=rule.kind, low=rule.low, high=rule.high, log=rule.log, conditional=conditional
    )


def _to_tuples(value: Any) -> Any:
    """JSON's lists as the tuples of settings."""
    return tuple(value) if isinstance(value, list) else value


def _to_lists(value: Any) -> Any:
    return [_to_lists(one) for one in value] if isinstance(value, tuple) else value
