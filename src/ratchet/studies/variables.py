"""The search space as written: checked knob by knob against the settings, and brought into the order of drawing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ratchet.config import Settings
from ratchet.config_sweep import Knob
from ratchet.errors import SettingsError
from ratchet.studies.dimension import Dimension
from ratchet.studies.domains import Domain, drawn_from, nth, stepped_exactly
from ratchet.studies.knobs import Setting, referred, refused, searchable, shown
from ratchet.studies.ties import Tie


@dataclass(frozen=True)
class Variable:
    """One setting that trials have values of their own for."""

    setting: Setting
    rule: Dimension | Tie
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
        return (*self.when, *((self.rule.source,) if isinstance(self.rule, Tie) else ()))


def read(settings: Settings) -> tuple[Variable, ...]:
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
            found.append(_variable(key, knob))
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    kept = _that_apply(_ordered(found), settings)
    if not any(isinstance(variable.rule, Dimension) for variable in kept):
        raise SettingsError(
            "params.yaml: sweep.space: nothing is searched: no setting with low and high, or with choices, is ever "
            f"drawn ({', '.join(written)}); give one values, or change the setting that its `when` asks for"
        )
    return kept


def _variable(key: str, knob: Knob) -> Variable:
    setting = searchable(key)
    try:
        return Variable(setting, _rule(setting, knob), _conditions(knob))
    except ValueError as error:
        raise refused(key, str(error)) from None


def _conditions(knob: Knob) -> dict[str, tuple[Any, ...]]:
    """Wanted values by dotted key, as settings hold them."""
    found: dict[str, tuple[Any, ...]] = {}
    try:
        for name, values in knob.when.items():
            source = referred(name)
            if source.key in found:
                raise ValueError(f"{source.key} twice; give one list of its values")
            wanted = values if isinstance(values, tuple) else (values,)
            found[source.key] = tuple(_accepted(source, name, value) for value in wanted)
            if not wanted:
                raise ValueError(f"{name}: an empty list, so this would never be searched")
    except ValueError as error:
        raise ValueError(f"when: {error}") from None
    return found


def _rule(setting: Setting, knob: Knob) -> Dimension | Tie:
    if knob.tie is not None:
        try:
            return Tie.parse(knob.tie, setting)
        except ValueError as error:
            raise ValueError(f"tie: {error}") from None
    if knob.choices:
        choices = tuple(_accepted(setting, "choices", value) for value in knob.choices)
        if twice := [one for one in dict.fromkeys(choices) if choices.count(one) > 1]:
            raise ValueError(f"choices: {shown(twice[0])} twice")
        return Dimension(setting.key, "choice", choices=choices)
    return _range(setting, knob)


def _accepted(setting: Setting, where: str, value: Any) -> Any:
    try:
        return setting.accepted(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _range(setting: Setting, knob: Knob) -> Dimension:
    if setting.kind not in ("int", "float"):
        such = f", such as choices: {shown(setting.words)}" if setting.words else ""
        raise ValueError(f"low and high are for numbers, and this setting is none; list its values{such}")
    given = {"low": knob.low, "high": knob.high, "step": knob.step}
    numbers = {name: float(value) for name, value in given.items() if value is not None}
    if setting.kind == "int":
        for name, value in numbers.items():
            if not value.is_integer():
                raise ValueError(f"{name}: found {value!r}, and this setting is a whole number; write one")
        numbers = {name: int(value) for name, value in numbers.items()}
    ends = {name: _accepted(setting, name, numbers[name]) for name in ("low", "high")}
    found = Dimension(
        setting.key, "int" if setting.kind == "int" else "float", **ends, log=knob.log, step=numbers.get("step")
    )
    if found.step is None:
        return found
    last = nth(found, (found.points or 1) - 1)  # the highest that steps reach: Optuna warns where `high` is another
    if not stepped_exactly(found.low, last, found.step):
        raise ValueError(
            f"step: {found.step!r} from {found.low!r} on gives numbers with more digits than are kept; write it shorter"
        )
    return Dimension(setting.key, found.kind, low=found.low, high=last, step=found.step)


def _ordered(found: list[Variable]) -> list[Variable]:
    names = {variable.name for variable in found}
    graph = {variable.name: [one for one in variable.sources if one in names] for variable in found}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = list(reversed(error.args[1]))
        raise refused(
            circle[0], f"waits for itself: {' -> '.join(circle)}; break the circle in one `tie` or `when`"
        ) from None
    ordered: list[Variable] = []
    while len(ordered) < len(found):
        known = {variable.name for variable in ordered}
        ordered.append(next(one for one in found if one.name not in known and known.issuperset(graph[one.name])))
    return ordered


def _that_apply(ordered: list[Variable], settings: Settings) -> tuple[Variable, ...]:
    """The variables that some trial draws, with the conditions that are not met by every trial anyway."""
    domains: dict[str, Domain] = {}
    kept, problems = [], []
    for variable in ordered:
        try:
            when = _open_conditions(variable, domains, settings)
            if when is None:
                continue
            domain = _domain(variable, domains, settings)
        except ValueError as error:
            problems.append(str(refused(variable.name, str(error))))
            continue
        if when:
            domain = Domain(
                domain.dimension, domain.factor, domain.ends, (*domain.others, variable.setting.of(settings))
            )
        domains[variable.name] = domain
        kept.append(Variable(variable.setting, variable.rule, when))
    if problems:
        raise SettingsError("\n".join(problems))
    return tuple(kept)


def _open_conditions(
    variable: Variable, domains: Mapping[str, Domain], settings: Settings
) -> dict[str, tuple[Any, ...]] | None:
    """Conditions that some trials meet and others do not; None where no trial can."""
    still_open = {}
    for source, wanted in variable.when.items():
        domain = domains.get(source)
        if domain is None:  # not searched: the same in every trial
            if referred(source).of(settings) not in wanted:
                return None
            continue
        if never := [value for value in wanted if not domain.holds(value)]:
            raise ValueError(f"when: {source} is never {shown(never[0])}; it may be {domain.described()}")
        still_open[source] = wanted
    return still_open


def _domain(variable: Variable, domains: Mapping[str, Domain], settings: Settings) -> Domain:
    if isinstance(variable.rule, Dimension):
        return drawn_from(variable.rule)
    source = variable.rule.source
    fixed = Domain(others=(referred(source).of(settings),))
    try:
        return variable.rule.domain(variable.setting, domains.get(source, fixed))
    except ValueError as error:
        raise ValueError(f"tie: {error}") from None
