"""Trials that a new generation of a study takes over from the one before it: those that mean the same there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.records_sweep import Trial
from ratchet.studies import stored
from ratchet.studies.space import Space
from ratchet.studies.storage import Storage

_SAME = ("format", "data", "base", "recipe", "rows")
"""Parts of an identity without which results cannot be compared. How values are proposed and pruned may differ."""


@dataclass(frozen=True)
class Descent:
    """From one identity to another."""

    old: Mapping[str, Any]
    new: Mapping[str, Any]
    space: Space
    """Of the new one."""

    @property
    def is_comparable(self) -> bool:
        """Whether trials of the old one can count in the new one at all: same data, base, recipe, rows, objectives."""
        alike = all(self.old.get(key) == self.new[key] for key in _SAME)
        return alike and sorted(self.old["objectives"]) == sorted(self.new["objectives"])

    def values(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """The values of an old trial as one of the new space has them; None where none means the same training.

        A setting that was fixed and is searched now has the value that it had; one that was searched and is fixed now
        must have had the value that it is fixed at. The same for those whose condition is not met.
        """
        everything = {**_unsearched(self.old), **values}
        try:
            drawn = self.space.draw(lambda dimension: everything[dimension.name])
        except (KeyError, ValueError):
            return None
        return drawn if {**_unsearched(self.new), **drawn} == everything else None

    def objectives(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """In the new order."""
        return tuple(values[self.old["objectives"].index(one)] for one in self.new["objectives"]) if values else ()


def carry_over(storage: Storage, old: int, new: int, descent: Descent) -> int:
    """Add to the study `new` what is over in the study `old`, has told something, and lies in the space of the new one.

    May be called again after it was interrupted; the caller holds the storage. Returns how many there are now.

    Raises:
        DamagedError: another program has put a trial into one of the two.
    """
    if not descent.is_comparable:
        return 0
    name = storage.optuna.get_study_name_from_id(old)
    stored_trials = storage.optuna.get_all_trials(old, deepcopy=False)
    trials = {frozen.number: stored.record(name, frozen) for frozen in stored_trials}
    numbers = {
        frozen.user_attrs[stored.ORIGIN][1]: frozen.number
        for frozen in storage.optuna.get_all_trials(new, deepcopy=False)
        if stored.ORIGIN in frozen.user_attrs
    }
    for number, trial in sorted(trials.items()):
        values = None if trial.state in ("running", "failed") else descent.values(trial.values)
        if number in numbers or values is None:
            continue
        changes = {
            "values": values,
            "objectives": descent.objectives(trial.objectives),
            "continues": _renumbered(trial.continues, trials, numbers),
        }
        free = stored.searched(descent.space, values)
        copy = stored.finished(trial.model_copy(update=changes), free, origin=(name, number))
        numbers[number] = storage.optuna.get_trial(storage.optuna.create_new_trial(new, copy)).number
    return len(numbers)


def _renumbered(number: int | None, trials: Mapping[int, Trial], numbers: Mapping[int, int]) -> int | None:
    """Of a trial that another one refers to; of the one that it continues itself, where it is left behind."""
    while number is not None and number not in numbers:
        number = trials[number].continues
    return None if number is None else numbers[number]


def _unsearched(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a study by dotted key, as trials have them that say nothing of them."""
    otherwise = {knob: entry["otherwise"] for knob, entry in identity["space"].items() if "otherwise" in entry}
    return {knob: tuple(v) if isinstance(v, list) else v for knob, v in (*_flat(identity["train"]), *otherwise.items())}


def _flat(tree: Mapping[str, Any], prefix: str = "train") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value
