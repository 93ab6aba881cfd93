"""Versions of a study: `sweep`, `sweep.2`, `sweep.3`; each has one identity (settings, data, base, space).

A new version copies the trials of the previous one that are valid in its space. It is created in steps that a crash may
interrupt: the study, its format attribute, its identity, the copied trials, and last their number. The next process
continues where it stopped.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.study import StudyDirection

from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.runs.directory import RECIPE_VERSION
from ratchet.storage import digests
from ratchet.storage.records.evaluation import GENERATED_METRICS
from ratchet.storage.records.sweep import Trial
from ratchet.tuning import trial_serialization
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import StudyStorage

_SAME = ("format", "data", "base", "recipe", "rows")
"""Parts of an identity that must be equal to compare results. Sampler and pruner may differ."""


@dataclass(frozen=True)
class StudyMigration:
    """Maps trials of one identity to another."""

    old: Mapping[str, Any]
    new: Mapping[str, Any]
    space: SearchSpace
    """Space of the new identity."""

    @property
    def is_comparable(self) -> bool:
        """Whether trials can be copied at all: same data, base, recipe, rows and objectives."""
        alike = all(self.old.get(key) == self.new[key] for key in _SAME)
        return alike and sorted(self.old["objectives"]) == sorted(self.new["objectives"])

    def values(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the values of an old trial in the new space; None if no trial there is the same training.

        A setting that was fixed and is searched now keeps its value. A setting that was searched and is fixed now must
        have had the fixed value. The same applies to settings whose condition is not met.
        """
        everything = {**_fixed_settings(self.old), **values}
        try:
            drawn = self.space.draw(lambda dimension: everything[dimension.name])
        except (KeyError, ValueError):
            return None
        return drawn if {**_fixed_settings(self.new), **drawn} == everything else None

    def objectives(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Return objectives in the new order."""
        return tuple(values[self.old["objectives"].index(one)] for one in self.new["objectives"]) if values else ()


def carry_over_trials(storage: StudyStorage, old: int, new: int, descent: StudyMigration) -> int:
    """Copy trials of study `old` that are over, have a result and are in the new space to study `new`.

    It may be repeated after an interruption; the caller holds the storage's lock. Returns the number of copied trials.

    Raises:
        DamagedFileError: another program has added a trial to one of the studies.
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
    """Return the new number of a trial; if it was not copied, that of the trial that it continues."""
    while number is not None and number not in numbers:
        number = trials[number].continues
    return None if number is None else numbers[number]


def _fixed_settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed settings of a study by dotted key."""
    otherwise = {
        parameter: entry["otherwise"] for parameter, entry in identity["space"].items() if "otherwise" in entry
    }
    return {
        parameter: tuple(v) if isinstance(v, list) else v
        for parameter, v in (*_flatten_tree(identity["train"]), *otherwise.items())
    }


def _flatten_tree(tree: Mapping[str, Any], prefix: str = "train") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten_tree(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


# The identity of a study, and differences between two.

FORMAT = 1

ABSENT = object()

_DIGEST = re.compile(r"[0-9a-f]{40,}")


def compute_identity(settings: Settings, data_digest: str, base_digest: str) -> dict[str, Any]:
    """Return the identity of a study as JSON: all that makes trials comparable and their sequence reproducible.

    It does not contain limits (trials, hours, tokens, max_repeated_failures), finalists, storage and name. For searched
    settings it has only the values of params.yaml that trials may use.

    Raises:
        SettingsError: the search space is invalid.
    """
    space, sweep = SearchSpace.from_settings(settings), settings.sweep
    train = settings.train.identity()
    for axis in space.axes():
        _, *sections, leaf = axis.name.split(".")
        node = train
        for name in sections:
            node = node[name]
        del node[leaf]
    answered = any(aim.metric in GENERATED_METRICS for aim in sweep.objectives)
    answers = {"max_new_tokens": settings.evaluate.max_new_tokens} if answered else {}
    return answers | {
        "format": FORMAT,
        "space": _canonicalize(space.document()),
        "objectives": [[aim.metric, aim.resolved_direction] for aim in sweep.objectives],
        "sampler": _canonicalize(sweep.sampler.model_dump(mode="json")),
        "pruner": _canonicalize(sweep.pruner.model_dump(mode="json")),
        "train": _canonicalize(train),
        "data": data_digest,
        "base": base_digest,
        "recipe": RECIPE_VERSION,
        "rows": sweep.generation_rows,
    }


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each dotted key that differs, such as `space.train.rank.high: 64 -> 128`, sorted."""
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
    """Return the canonical form: whole numbers as int, because defaults are int and files may have floats."""
    if isinstance(value, Mapping):
        return {str(key): _canonicalize(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_canonicalize(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


# Versions.

STUDY_FORMAT = 1
"""Format of studies; a higher one was written by a newer Ratchet."""
FORMAT_KEY, IDENTITY_KEY, VERSIONS_KEY = "ratchet.format", "ratchet.identity", "ratchet.versions"
PARENT_KEY = "ratchet.parent"
CARRIED_KEY = "ratchet.carried"
_DIRECTIONS = {"minimize": StudyDirection.MINIMIZE, "maximize": StudyDirection.MAXIMIZE}
_LIBRARIES = {"optuna": "optuna", "cmaes": "cmaes", "ratchet": "ratchet-llm"}


@dataclass(frozen=True)
class StudyVersion:
    """A version of a study in a storage."""

    name: str
    study_id: int
    attributes: Mapping[str, Any]

    @property
    def identity(self) -> dict[str, Any] | None:
        """Its identity; None if a crash left the study without one."""
        found: dict[str, Any] | None = self.attributes.get(IDENTITY_KEY)
        return found


def list_versions(storage: StudyStorage, name: str) -> list[StudyVersion]:
    """Return all versions, oldest first.

    Raises:
        SettingsError: a study of that name belongs to another program.
        DamagedFileError: a version was written by a newer Ratchet.
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
        if (form := found.attributes.get(FORMAT_KEY, STUDY_FORMAT)) > STUDY_FORMAT:
            raise DamagedFileError(
                f"{storage.where}: the study {here!r} was written by a newer version of Ratchet (format {form}, this "
                f"one knows {STUDY_FORMAT}); update Ratchet on this machine"
            )
        yield found


def find_or_create(
    storage: StudyStorage, name: str, identity: Mapping[str, Any], space: SearchSpace, fork: bool
) -> StudyVersion:
    """Return the newest version with this identity; create one if there is none.

    Args:
        storage: the storage.
        name: name of the study, without a version.
        identity: see `compute_identity`.
        space: the search space; a fork copies trials of the previous version that are in it.
        fork: create a new version if the existing ones have other identities.

    Raises:
        SettingsError: all existing versions have other identities, and `fork` is not set.
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
        incomplete = there[-1:] if there and there[-1].identity is None else []
        if incomplete and storage.optuna.get_study_directions(incomplete[0].study_id) == directions:
            following, study_id = incomplete[0].name, incomplete[0].study_id
        else:
            study_id = _create_study(storage, following, directions)
        _write_attributes(storage, study_id, wanted, parents[-1].name if parents else None)
        return _complete_carry_over(storage, _read_version(storage, following, study_id), wanted, space)


def _explain_refusal(newest: StudyVersion, wanted: Mapping[str, Any], following: str) -> str:
    changes = "".join(f"\n  {line}" for line in list_differences(newest.identity or {}, wanted))
    return (
        f"params.yaml: the study {newest.name!r} was created with other settings:{changes}\n"
        f"Undo these changes to continue it; or run `ratchet sweep --fork` to create {following!r} with those of its "
        "trials that are still valid; or set another sweep.name"
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
            f"{storage.where}: another program has created a study {name!r} at the same time; choose another sweep.name"
        ) from None


def _write_attributes(storage: StudyStorage, study_id: int, identity: Mapping[str, Any], parent: str | None) -> None:
    described = {
        FORMAT_KEY: STUDY_FORMAT,
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
    """Copy the trials that a new version still lacks."""
    if CARRIED_KEY not in made.attributes:
        parent = made.attributes[PARENT_KEY]
        carried = 0
        if parent is not None:
            old = _read_version(storage, parent, storage.optuna.get_study_id_from_name(parent))
            descent = StudyMigration(old.identity or {}, identity, space)
            carried = carry_over_trials(storage, old.study_id, made.study_id, descent)
        storage.optuna.set_study_user_attr(made.study_id, CARRIED_KEY, carried)
    return _read_version(storage, made.name, made.study_id)
