"""Trials that a new generation of a study takes over from the one before it: those that mean the same there."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.study import StudyDirection

from ratchet.config.schema import Settings
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.runs.directory import RECIPE_VERSION
from ratchet.storage import digests
from ratchet.storage.records.evaluation import ANSWERED
from ratchet.storage.records.sweep import Trial
from ratchet.tuning import trial_serialization
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import StudyStorage

_SAME = ("format", "data", "base", "recipe", "rows")
"""Parts of an identity without which results cannot be compared. How values are proposed and pruned may differ."""


@dataclass(frozen=True)
class StudyMigration:
    """From one identity to another."""

    old: Mapping[str, Any]
    new: Mapping[str, Any]
    space: SearchSpace
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
        everything = {**_fixed_settings(self.old), **values}
        try:
            drawn = self.space.draw(lambda dimension: everything[dimension.name])
        except (KeyError, ValueError):
            return None
        return drawn if {**_fixed_settings(self.new), **drawn} == everything else None

    def objectives(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """In the new order."""
        return tuple(values[self.old["objectives"].index(one)] for one in self.new["objectives"]) if values else ()


def carry_over_trials(storage: StudyStorage, old: int, new: int, descent: StudyMigration) -> int:
    """Add to the study `new` what is over in the study `old`, has told something, and lies in the space of the new one.

    May be called again after it was interrupted; the caller holds the storage. Returns how many there are now.

    Raises:
        DamagedFileError: another program has put a trial into one of the two.
    """
    if not descent.is_comparable:
        return 0
    name = storage.optuna.get_study_name_from_id(old)
    stored_trials = storage.optuna.get_all_trials(old, deepcopy=False)
    trials = {frozen.number: trial_serialization.deserialize_trial(name, frozen) for frozen in stored_trials}
    numbers = {
        frozen.user_attrs[trial_serialization.ORIGIN][1]: frozen.number
        for frozen in storage.optuna.get_all_trials(new, deepcopy=False)
        if trial_serialization.ORIGIN in frozen.user_attrs
    }
    for number, trial in sorted(trials.items()):
        values = None if trial.state in ("running", "failed") else descent.values(trial.values)
        if number in numbers or values is None:
            continue
        changes = {
            "values": values,
            "objectives": descent.objectives(trial.objectives),
            "continues": _map_trial_number(trial.continues, trials, numbers),
        }
        free = trial_serialization.select_searched(descent.space, values)
        copy = trial_serialization.serialize_finished(trial.model_copy(update=changes), free, origin=(name, number))
        numbers[number] = storage.optuna.get_trial(storage.optuna.create_new_trial(new, copy)).number
    return len(numbers)


def _map_trial_number(number: int | None, trials: Mapping[int, Trial], numbers: Mapping[int, int]) -> int | None:
    """Of a trial that another one refers to; of the one that it continues itself, where it is left behind."""
    while number is not None and number not in numbers:
        number = trials[number].continues
    return None if number is None else numbers[number]


def _fixed_settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a study by dotted key, as trials have them that say nothing of them."""
    otherwise = {knob: entry["otherwise"] for knob, entry in identity["space"].items() if "otherwise" in entry}
    return {
        knob: tuple(v) if isinstance(v, list) else v
        for knob, v in (*_flatten_tree(identity["train"]), *otherwise.items())
    }


def _flatten_tree(tree: Mapping[str, Any], prefix: str = "train") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten_tree(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


# What a study is: all that must not change between two starts of it, and what has changed where it did.

FORMAT = 1

ABSENT = object()

_DIGEST = re.compile(r"[0-9a-f]{40,}")


def compute_identity(settings: Settings, data_digest: str, base_digest: str) -> dict[str, Any]:
    """What makes trials comparable and their sequence the same, as JSON.

    Not in it: how long the search goes on (trials, hours, tokens, stop_after), what is done with the best (finalists),
    where and under which name. Of searched settings only the values that trials leave as they are in params.yaml.

    Raises:
        SettingsError: the search space makes no sense.
    """
    space, sweep = SearchSpace.of(settings), settings.sweep
    train = settings.train.identity()
    for axis in space.axes():
        _, *sections, leaf = axis.knob.split(".")
        node = train
        for name in sections:
            node = node[name]
        del node[leaf]
    answered = any(aim.metric in ANSWERED for aim in sweep.objectives)
    answers = {"max_new_tokens": settings.evaluate.max_new_tokens} if answered else {}
    return answers | {
        "format": FORMAT,
        "space": _canonicalize(space.document()),
        "objectives": [[aim.metric, aim.better] for aim in sweep.objectives],
        "sampler": _canonicalize(sweep.sampler.model_dump(mode="json")),
        "pruner": _canonicalize(sweep.pruner.model_dump(mode="json")),
        "train": _canonicalize(train),
        "data": data_digest,
        "base": base_digest,
        "recipe": RECIPE_VERSION,
        "rows": sweep.rows,
    }


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each dotted key that differs, such as `space.train.rank.high: 64 -> 128`, sorted."""
    return sorted(_iterate_differences(_canonicalize(old), _canonicalize(new), ""))


def _iterate_differences(old: Any, new: Any, key: str) -> Iterator[str]:
    if _is_same(old, new):
        return
    nodes = [node for node in (old, new) if node is not ABSENT]
    if all(isinstance(node, dict) for node in nodes) and any(nodes):
        before, after = (node if isinstance(node, dict) else {} for node in (old, new))
        for name in dict.fromkeys((*before, *after)):
            path = f"{key}.{name}" if key else str(name)
            yield from _iterate_differences(before.get(name, ABSENT), after.get(name, ABSENT), path)
    else:
        yield f"{key}: {_format_value(old)} -> {_format_value(new)}"


def _is_same(old: Any, new: Any) -> bool:
    if ABSENT in (old, new):
        return old is new
    return digests.canonical_json(old) == digests.canonical_json(new)  # true is not 1


def _format_value(value: Any) -> str:
    if value is ABSENT:
        return "(none)"
    if isinstance(value, str):
        return value[: digests.SHORT] if _DIGEST.fullmatch(value) else value
    return json.dumps(value, ensure_ascii=False)


def _canonicalize(value: Any) -> Any:
    """The same JSON for the same meaning: whole numbers without a point, for defaults have none and files may."""
    if isinstance(value, Mapping):
        return {str(key): _canonicalize(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_canonicalize(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


# Generations of a study: `sweep`, `sweep.2`, `sweep.3`; each has one identity, and is never searched under another.
#
# A generation is made in an order that a crash may end anywhere: the study, what marks it as ours, its identity, then
# the
# trials of the one before it, and last the number of those. Whoever comes next goes on where it stopped.

GENERATION_FORMAT = 1
"""Of studies; a higher one was written by a newer Ratchet."""
FORMAT_KEY, IDENTITY_KEY, VERSIONS_KEY = "ratchet.format", "ratchet.identity", "ratchet.versions"
PARENT_KEY = "ratchet.parent"
CARRIED_KEY = "ratchet.carried"
_DIRECTIONS = {"minimize": StudyDirection.MINIMIZE, "maximize": StudyDirection.MAXIMIZE}
_LIBRARIES = {"optuna": "optuna", "cmaes": "cmaes", "ratchet": "ratchet-llm"}


@dataclass(frozen=True)
class StudyVersion:
    """A study in a storage."""

    name: str
    study_id: int
    attributes: Mapping[str, Any]

    @property
    def identity(self) -> dict[str, Any] | None:
        """None where a crash left a study without."""
        found: dict[str, Any] | None = self.attributes.get(IDENTITY_KEY)
        return found


def list_versions(storage: StudyStorage, name: str) -> list[StudyVersion]:
    """All there are, oldest first.

    Raises:
        SettingsError: a study of that name belongs to another program.
        DamagedFileError: one was written by a newer Ratchet.
        StorageError: the storage does not answer.
    """
    return list(_iterate_versions(storage, name))


def _iterate_versions(storage: StudyStorage, name: str) -> Iterator[StudyVersion]:
    with storage.connected():
        studies = {study.study_name: study for study in storage.optuna.get_all_studies()}
    for number in count(1):
        here = _version_name(name, number)
        if here not in studies:
            return
        found = StudyVersion(here, studies[here]._study_id, studies[here].user_attrs)
        if FORMAT_KEY not in found.attributes and (found.attributes or _has_trials(storage, found)):
            raise SettingsError(
                f"{storage.where}: the study {here!r} was made by another program; choose another "
                "sweep.name in params.yaml"
            )
        if (form := found.attributes.get(FORMAT_KEY, GENERATION_FORMAT)) > GENERATION_FORMAT:
            raise DamagedFileError(
                f"{storage.where}: the study {here!r} was written by a newer version of Ratchet (format {form}, this "
                f"one knows {GENERATION_FORMAT}); update Ratchet on this machine"
            )
        yield found


def find_or_create(
    storage: StudyStorage, name: str, identity: Mapping[str, Any], space: SearchSpace, fork: bool
) -> StudyVersion:
    """The newest generation of exactly this identity; a new one where there is none and one may be made.

    Args:
        storage: where.
        name: of the study, without a generation.
        identity: see `studies.identity`.
        space: that it tells of; trials of the generation before that lie in it are carried over by a fork.
        fork: whether a new generation may follow others.

    Raises:
        SettingsError: there are generations, all of other identities, and `fork` is not set.
        SettingsError, DamagedFileError: see `list_versions`.
        LockHeldError, StorageError: see `StudyStorage.locked`.
    """
    wanted = json.loads(json.dumps(identity))
    with storage.locked(), storage.connected():
        there = list_versions(storage, name)
        same = [one for one in there if one.identity == wanted]
        if same:
            return _complete_carry_over(storage, same[-1], wanted, space)
        parents = [one for one in there if one.identity is not None]
        following = _version_name(name, len(there) + 1)
        if parents and not fork:
            raise SettingsError(_explain_refusal(parents[-1], wanted, following))
        directions = [_DIRECTIONS[direction] for _, direction in wanted["objectives"]]
        unborn = there[-1:] if there and there[-1].identity is None else []
        if unborn and storage.optuna.get_study_directions(unborn[0].study_id) == directions:
            following, study_id = unborn[0].name, unborn[0].study_id
        else:
            study_id = _create_study(storage, following, directions)
        _write_attributes(storage, study_id, wanted, parents[-1].name if parents else None)
        return _complete_carry_over(storage, _read_version(storage, following, study_id), wanted, space)


def _explain_refusal(newest: StudyVersion, wanted: Mapping[str, Any], following: str) -> str:
    changes = "".join(f"\n  {line}" for line in list_differences(newest.identity or {}, wanted))
    return (
        f"params.yaml: the study {newest.name!r} searches something else than what is written now:{changes}\n"
        f"Take the changes back to go on with it; or start {following!r}, which takes over those of its trials that "
        "still count, with `ratchet sweep --fork`; or give another sweep.name"
    )


def _version_name(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def _has_trials(storage: StudyStorage, study: StudyVersion) -> bool:
    with storage.connected():
        return bool(storage.optuna.get_n_trials(study.study_id))


def _create_study(storage: StudyStorage, name: str, directions: list[StudyDirection]) -> int:
    try:
        return storage.optuna.create_new_study(directions, name)
    except DuplicatedStudyError:
        raise SettingsError(
            f"{storage.where}: another program has made a study {name!r} at the same moment; choose another sweep.name"
        ) from None


def _write_attributes(storage: StudyStorage, study_id: int, identity: Mapping[str, Any], parent: str | None) -> None:
    described = {
        FORMAT_KEY: GENERATION_FORMAT,
        VERSIONS_KEY: _library_versions(),
        PARENT_KEY: parent,
        IDENTITY_KEY: identity,
    }
    for key, value in described.items():
        storage.optuna.set_study_user_attr(study_id, key, value)


def _library_versions() -> dict[str, str]:
    found = {}
    for library, distribution in _LIBRARIES.items():
        try:
            found[library] = version(distribution)
        except PackageNotFoundError:
            found[library] = "not installed"
    return found


def _read_version(storage: StudyStorage, name: str, study_id: int) -> StudyVersion:
    return StudyVersion(name, study_id, dict(storage.optuna.get_study_user_attrs(study_id)))


def _complete_carry_over(
    storage: StudyStorage, made: StudyVersion, identity: Mapping[str, Any], space: SearchSpace
) -> StudyVersion:
    """Carry over what a new generation still lacks."""
    if CARRIED_KEY not in made.attributes:
        parent = made.attributes[PARENT_KEY]
        carried = 0
        if parent is not None:
            old = _read_version(storage, parent, storage.optuna.get_study_id_from_name(parent))
            descent = StudyMigration(old.identity or {}, identity, space)
            carried = carry_over_trials(storage, old.study_id, made.study_id, descent)
        storage.optuna.set_study_user_attr(made.study_id, CARRIED_KEY, carried)
    return _read_version(storage, made.name, made.study_id)
