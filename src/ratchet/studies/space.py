"""The search space of a sweep: which settings a trial gives values to, and what follows from them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from types import MappingProxyType
from typing import Any

from ratchet.config import Settings
from ratchet.errors import SettingsError
from ratchet.records_sweep import Axis
from ratchet.studies.dimension import Dimension
from ratchet.studies.domains import all_values, settled, spread
from ratchet.studies.knobs import referred, said, shown
from ratchet.studies.ties import Tie
from ratchet.studies.variables import Variable, read

MOST_POINTS = 100_000
"""Of a grid, and of points that are counted one by one; no sweep has so many trials."""

Pick = Callable[[Dimension], Any]
"""Gives a free setting its value."""

Options = Callable[[Dimension], Sequence[Any]]
"""Gives a free setting several."""


@dataclass(frozen=True)
class Space:
    """Settings that are searched, and in which order their values are decided."""

    variables: tuple[Variable, ...]
    """Each after those that it depends on; then as in params.yaml."""
    fixed: Mapping[str, Any]
    """Settings that some trial, or every one, has as they are in params.yaml, and that ties and conditions ask for."""

    @staticmethod
    def of(settings: Settings) -> "Space":
        """The space of `sweep.space`.

        Raises:
            SettingsError: a knob that is unknown or not to be searched, values that it cannot take, a tie or a
                condition that leads nowhere; one line each.
        """
        variables = read(settings)
        always = {variable.name for variable in variables if not variable.when}
        keys = dict.fromkeys(key for variable in variables for key in (variable.name, *variable.sources))
        return Space(variables, {key: referred(key).of(settings) for key in keys if key not in always})

    def axes(self) -> tuple[Axis, ...]:
        """The searched settings, as pictures need them; ties among them."""
        return tuple(map(_axis, self.variables))

    def dimensions(self) -> tuple[Dimension, ...]:
        """The free settings, in the order in which they are drawn."""
        return tuple(variable.rule for variable in self.variables if isinstance(variable.rule, Dimension))

    def dimension(self, name: str) -> Dimension:
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
        return next(self._walk(lambda dimension: (settled(dimension, pick(dimension)),)))

    def free(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a trial's values that were drawn; drawing them again gives the trial."""
        return {one.name: settled(one, values[one.name]) for one in self.dimensions() if one.name in values}

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a trial of this space can have exactly these values (those of a study before it, perhaps)."""
        plain = {key: _plain(value) for key, value in values.items()}
        try:
            return self.draw(lambda dimension: plain[dimension.name]) == plain
        except (KeyError, ValueError):
            return False

    def grid(self, points: int) -> list[dict[str, Any]]:
        """Every combination, the last free setting changing fastest; ranges without step are given `points` values.

        Raises:
            SettingsError: more combinations than any sweep tries.
        """
        found = list(islice(self._walk(lambda dimension: spread(dimension, points)), MOST_POINTS + 1))
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

    def _entry(self, variable: Variable) -> dict[str, Any]:
        rule = variable.rule
        entry: dict[str, Any]
        if isinstance(rule, Tie):
            entry = {"tie": rule.text}
        elif rule.kind == "choice":
            entry = {"choices": _listed(rule.choices)}
        else:
            entry = {"low": rule.low, "high": rule.high, "log": rule.log, "step": rule.step}
        if variable.when:
            entry["when"] = {source: sorted(_listed(wanted), key=repr) for source, wanted in variable.when.items()}
            entry["otherwise"] = _listed(self.fixed[variable.name])
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
        for value in (rule.value(self._value(rule.source, values)),) if isinstance(rule, Tie) else options(rule):
            yield from self._walk(options, index + 1, {**values, variable.name: value})

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        return values[name] if name in values else self.fixed[name]

    def _deciding(self) -> set[str]:
        """Settings whose values decide, directly or through ties, whether others are searched."""
        found: set[str] = set()
        for variable in reversed(self.variables):  # those that depend come after what they depend on
            found.update(variable.when)
            if isinstance(variable.rule, Tie) and variable.name in found:
                found.add(variable.rule.source)
        return found


def settings_with(settings: Settings, values: Mapping[str, Any]) -> Settings:
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
        node[leaf] = _plain(value)
    try:
        return Settings.model_validate(tree)
    except ValueError as error:
        chosen = ", ".join(f"{key} {shown(value)}" for key, value in values.items())
        raise SettingsError(f"{chosen}: {said(error)}") from None


def _axis(variable: Variable) -> Axis:
    rule, conditional = variable.rule, bool(variable.when)
    if isinstance(rule, Tie):
        return Axis(knob=variable.name, kind="tie", tie=rule.text, conditional=conditional)
    if rule.kind == "choice":
        return Axis(knob=rule.name, kind="choice", choices=rule.choices, conditional=conditional)
    return Axis(knob=rule.name, kind=rule.kind, low=rule.low, high=rule.high, log=rule.log, conditional=conditional)


def _plain(value: Any) -> Any:
    """JSON's lists as the tuples of settings."""
    return tuple(value) if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    return [_listed(one) for one in value] if isinstance(value, tuple) else value
