"""Optuna studies of a project: their versions, and the store of their trials (records, leases, reports, notes).

Attributes of a trial, each JSON: `values`, `run_id`, `continues`, `serialize_running` (fixed when it begins), `lease`,
`heartbeat.N` (leases.py), `outcome_fields` (all results; they are valid only if the trial's state is final, because the
writer may die before), `from` (study and number of the original, for a copy of a fork).

A new version copies the trials of the previous one that are valid in its space. It is created in steps that a crash may
interrupt: the study, its format attribute, its identity, the copied trials, and last their number. The next process
continues where it stopped.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, SettingsError, StorageError, first_line
from ratchet.runs.directory import RECIPE_VERSION
from ratchet.storage import digests
from ratchet.storage.records.evaluation import GENERATED_METRICS
from ratchet.storage.records.sweep import Trial
from ratchet.storage.records.sweep import TrialState as State
from ratchet.tuning import search_space
from ratchet.tuning.leases import LEASE, SweepWorker, TrialLease, TrialLeaseLostError, TrialLeaseMonitor, next_heartbeat
from ratchet.tuning.search_space import SearchDimension, SearchSpace
from ratchet.tuning.storage import StudyStorage

Free = Mapping[str, tuple[SearchDimension, Any]]
"""Values that were searched, with where they may lie."""

OUTCOME = "outcome"
ORIGIN = "from"
_AT_THE_END = {"state", "cause", "reason", "adapter_digest", "checkpoints", "cost", "constraints", "ended"}
_GONE = "same_as"
"""Of outcomes that earlier versions stored: always null."""
_STATES: dict[State, TrialState] = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "infeasible": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
_FOREIGN: dict[TrialState, State] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def select_searched(space: SearchSpace, values: Mapping[str, Any]) -> Free:
    """Return the drawn values of a trial with their dimensions."""
    return {name: (space.dimension(name), value) for name, value in space.select_drawn(values).items()}


def to_optuna_state(trial: Trial) -> TrialState:
    """Return Optuna's state of a trial."""
    return _STATES[trial.state]


def serialize_running(trial: Trial, free: Free, lease: TrialLease) -> FrozenTrial:
    """Return a running trial, to be stored in one operation."""
    params, spaces = _split_params(free)
    attributes = {**_start_fields(trial), LEASE: lease.document()}
    return create_trial(state=TrialState.RUNNING, params=params, distributions=spaces, user_attrs=attributes)


def serialize_finished(trial: Trial, free: Free, origin: tuple[str, int] | None = None) -> FrozenTrial:
    """Return a trial that is over, to be stored in one operation; `origin`: study and number of the original."""
    params, spaces = _split_params(free)
    attributes = {**_start_fields(trial), OUTCOME: outcome_fields(trial)}
    attributes[OUTCOME]["executions"] = [take.model_dump(mode="json") for take in trial.executions]
    return create_trial(
        state=to_optuna_state(trial),
        values=objective_values(trial),
        params=params,
        distributions=spaces,
        user_attrs=attributes if origin is None else {**attributes, ORIGIN: list(origin)},
        intermediate_values=dict(trial.curve),
        constraints=dict(trial.constraints),
    )


def objective_values(trial: Trial) -> list[float] | None:
    """Return the objectives for Optuna, which has them for complete trials only."""
    return list(trial.objectives) if trial.state == "complete" else None


def outcome_fields(trial: Trial) -> dict[str, Any]:
    """Outcome of a finished trial, in addition to its curve and objectives."""
    return trial.model_dump(mode="json", include=_AT_THE_END)


def constraint_attributes(trial: Trial, earlier: FrozenTrial) -> dict[str, float]:
    """Constraints under Optuna's keys, those that an earlier, interrupted end had set back to satisfied."""
    wanted = {**dict.fromkeys(earlier.constraints, 0.0), **trial.constraints}
    return create_trial(state=TrialState.FAIL, constraints=wanted).system_attrs


def deserialize_trial(study: str, frozen: FrozenTrial) -> Trial:
    """The record of a stored trial. Raises DamagedFileError for one that Ratchet has not written."""
    attributes = frozen.user_attrs
    if "values" not in attributes:
        raise DamagedFileError(
            f"study {study}, trial {frozen.number}: another program has put it there, and what it means to train is "
            "not known; start a new study with `ratchet sweep --fork`, or with another sweep.name"
        )
    lease = TrialLease.from_attributes(attributes)
    known: dict[str, Any] = {
        "number": frozen.number,
        "values": {parameter: _to_tuples(value) for parameter, value in attributes["values"].items()},
        "run_id": attributes["run_id"],
        "continues": attributes["continues"],
        "started": attributes["started"],
        "curve": dict(sorted(frozen.intermediate_values.items())),
        "executions": lease.executions(attributes) if lease else (),
    }
    if not frozen.state.is_finished():
        return Trial(state="running", **known)
    if OUTCOME not in attributes:
        known |= {
            "state": _FOREIGN[frozen.state],
            "reason": "ended by another program",
            "constraints": frozen.constraints,
        }
        known["ended"] = frozen.datetime_complete.timestamp() if frozen.datetime_complete else None
    values = frozen.values if frozen.state == TrialState.COMPLETE else ()
    told = {key: value for key, value in attributes.get(OUTCOME, {}).items() if key != _GONE}
    try:
        return Trial.model_validate({**known, **told, "objectives": values})
    except ValueError as error:
        raise DamagedFileError(f"study {study}, trial {frozen.number}: {first_line(error)}") from error


def _start_fields(trial: Trial) -> dict[str, Any]:
    return trial.model_dump(mode="json", include={"values", "run_id", "continues", "started"})


def _split_params(free: Free) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    params = {parameter: search_space.encode_value(value) for parameter, (_, value) in free.items()}
    return params, {parameter: search_space.to_distribution(dimension) for parameter, (dimension, _) in free.items()}


def _to_tuples(value: Any) -> Any:
    """A value as settings hold it: JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


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
    trials = {frozen.number: deserialize_trial(name, frozen) for frozen in stored_trials}
    numbers = {
        frozen.user_attrs[ORIGIN][1]: frozen.number
        for frozen in storage.optuna.get_all_trials(new, deepcopy=False)
        if ORIGIN in frozen.user_attrs
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
        free = select_searched(descent.space, values)
        copy = serialize_finished(trial.model_copy(update=changes), free, origin=(name, number))
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


_NOTE = "note."


class TrialStore:
    """One version of a study in a storage; thread-safe.

    All methods raise StorageError or LockHeldError if the storage does not answer or another process holds it too long,
    and DamagedFileError if it is damaged. Writes are atomic and survive the death of the process.
    """

    def __init__(self, storage: StudyStorage, generation: StudyVersion) -> None:
        self.storage = storage
        self.study = generation.name
        """Name with version, such as `sweep.2`."""
        self.identity: Mapping[str, Any] = generation.identity or {}
        """See `study_versions.compute_identity`."""
        self.versions: Mapping[str, str] = generation.attributes.get(VERSIONS_KEY, {})
        """Versions of the libraries that created the study: optuna, cmaes, ratchet."""
        self.carried: int = generation.attributes.get(CARRIED_KEY, 0)
        """Number of trials copied from the previous version by a fork; they have the first numbers."""
        self._study_id = generation.study_id
        self._optuna = storage.optuna
        self._over: dict[int, Trial] = {}
        self._monitor = TrialLeaseMonitor()

    @classmethod
    def open(
        cls, storage: StudyStorage, name: str, identity: Mapping[str, Any], space: SearchSpace, fork: bool = False
    ) -> "TrialStore":
        """Open the newest version with this identity, or create it; see `study_versions.find_or_create`.

        Raises:
            SettingsError: the study has another identity and `fork` is not set, or belongs to another program.
        """
        return cls(storage, find_or_create(storage, name, identity, space, fork))

    @classmethod
    def newest(cls, storage: StudyStorage, name: str) -> "TrialStore | None":
        """Open the newest version, whatever its identity; None if there is none."""
        found = [one for one in list_versions(storage, name) if one.identity is not None]
        return cls(storage, found[-1]) if found else None

    def locked(self) -> AbstractContextManager[None]:
        """See `StudyStorage.locked`."""
        return self.storage.locked()

    def trials(self) -> list[Trial]:
        """Return all trials, by number. Trials that are over are read once."""
        with self.storage.connected():
            there = self._optuna.get_all_trials(self._study_id, deepcopy=False)
        found = []
        for frozen in there:
            trial = self._over.get(frozen.number) or deserialize_trial(self.study, frozen)
            if trial.is_over:
                self._over[trial.number] = trial
            found.append(trial)
        return sorted(found, key=lambda trial: trial.number)

    def begin(
        self,
        values: Mapping[str, Any],
        free: Free,
        run_id: str | None,
        worker: SweepWorker,
        continues: int | None = None,
    ) -> int:
        """Add a trial that this worker runs from now on; return its number.

        Args:
            values: all values that the trial sets, derived ones included.
            free: the drawn values (`trial_serialization.select_searched`).
            run_id: the run that trains them.
            worker: holder of the lease.
            continues: number of the pruned trial that this one continues.
        """
        lease = TrialLease.first(worker)
        trial = Trial(
            number=0, values=dict(values), run_id=run_id, state="running", continues=continues, started=lease.started[0]
        )
        return self._store(serialize_running(trial, free, lease))

    def add(self, trial: Trial, free: Free) -> int:
        """Add a trial that is over; return its number."""
        if not trial.is_over:
            raise ValueError("a running trial must be added with begin()")
        self._check(trial)
        return self._store(serialize_finished(trial, free))

    def report(self, number: int, rows: int, value: float) -> None:
        """Store the validation loss after so many rows, unless it is known: a resumed run measures some again.

        Raises:
            TrialLeaseLostError: the trial is over.
        """
        with self._over_is_lost(number):
            trial_id, frozen = self._frozen(number)
            if rows not in frozen.intermediate_values:
                self._optuna.set_trial_intermediate_value(trial_id, rows, float(value))

    def finish(self, number: int, outcome: Trial, worker: SweepWorker) -> None:
        """Store the result of a trial. After an interruption it may be repeated, by this worker or the next one.

        Args:
            number: number of the trial.
            outcome: its record; `number`, `values`, `run_id`, `continues`, `started` and `executions` are ignored.
            worker: holder of the lease.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        if not outcome.is_over:
            raise ValueError("finish() needs the record of a trial that is over")
        self._check(outcome)
        with self.locked(), self._over_is_lost(number):
            trial_id, frozen, _ = self._held(number, worker)
            for rows in sorted(outcome.curve.keys() - frozen.intermediate_values.keys()):
                self._optuna.set_trial_intermediate_value(trial_id, rows, outcome.curve[rows])
            self._optuna.set_trial_user_attr(trial_id, OUTCOME, outcome_fields(outcome))
            for key, value in constraint_attributes(outcome, frozen).items():
                self._optuna.set_trial_system_attr(trial_id, key, value)
            state, values = to_optuna_state(outcome), objective_values(outcome)
            if not self._optuna.set_trial_state_values(trial_id, state, values):
                raise StorageError(f"{self.storage.where}: trial {number} could not be stored; run the command again")

    def renew(self, number: int, worker: SweepWorker) -> None:
        """Store a heartbeat. It needs no lock, so it works while others hold the storage.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        with self._over_is_lost(number):
            trial_id, frozen, lease = self._held(number, worker)
            self._optuna.set_trial_user_attr(
                trial_id, lease.heartbeat_key, next_heartbeat(lease.heartbeat(frozen.user_attrs))
            )
            self._held(number, worker)  # it may have been taken over in between; the heartbeat key is not shared

    def release(self, number: int, worker: SweepWorker) -> None:
        """Release a trial that is not finished: any worker may take it over at once.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        with self.locked(), self._over_is_lost(number):
            trial_id, _, lease = self._held(number, worker)
            self._optuna.set_trial_user_attr(trial_id, LEASE, lease.release().document())

    def take_over(self, worker: SweepWorker, lease_timeout_s: float) -> Trial | None:
        """Take over the first trial whose holder released it, died, or sent no heartbeat for `lease_timeout_s`.

        A timeout needs two calls that far apart, because time is measured by this process's own clock.
        """
        with self.locked(), self.storage.connected():
            running = self._optuna.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.RUNNING,))
            for frozen in sorted(running, key=lambda frozen: frozen.number):
                lease = TrialLease.from_attributes(frozen.user_attrs)
                heartbeat = None if lease is None else lease.heartbeat(frozen.user_attrs)
                unchanged_s = 0.0 if heartbeat is None else self._monitor.unchanged_s(frozen.number, heartbeat)
                if lease and (lease.released or lease.workers[-1].is_gone(worker) or unchanged_s >= lease_timeout_s):
                    trial_id = frozen._trial_id
                    self._optuna.set_trial_user_attr(trial_id, LEASE, lease.taken_by(worker).document())
                    return deserialize_trial(self.study, self._optuna.get_trial(trial_id))
        return None

    def note(self, key: str, value: Any) -> None:
        """Store a JSON value with the study; it replaces an earlier value of this key."""
        json.dumps(value, allow_nan=False)  # fail here, not in a reader
        with self.storage.connected():
            self._optuna.set_study_user_attr(self._study_id, _NOTE + key, value)

    def notes(self) -> dict[str, Any]:
        """Return all notes, by key."""
        with self.storage.connected():
            attributes = self._optuna.get_study_user_attrs(self._study_id)
        return {key.removeprefix(_NOTE): value for key, value in attributes.items() if key.startswith(_NOTE)}

    def _store(self, frozen: FrozenTrial) -> int:
        with self.storage.connected():
            return self._optuna.get_trial(self._optuna.create_new_trial(self._study_id, frozen)).number

    def _check(self, trial: Trial) -> None:
        wanted = len(self.identity["objectives"])
        if trial.state == "complete" and len(trial.objectives) != wanted:
            raise ValueError(f"a complete trial of this study has {wanted} objectives, not {len(trial.objectives)}")

    def _frozen(self, number: int) -> tuple[int, FrozenTrial]:
        trial_id = self._optuna.get_trial_id_from_study_id_trial_number(self._study_id, number)
        return trial_id, self._optuna.get_trial(trial_id)

    def _held(self, number: int, worker: SweepWorker) -> tuple[int, FrozenTrial, TrialLease]:
        trial_id, frozen = self._frozen(number)
        lease = TrialLease.from_attributes(frozen.user_attrs)
        if frozen.state.is_finished():
            raise TrialLeaseLostError(f"{self.study}, trial {number}: it is over; {worker.name} stores nothing more")
        if lease is None or not lease.is_held_by(worker):
            holder = "no worker" if lease is None or lease.released else lease.workers[-1].name
            raise TrialLeaseLostError(
                f"{self.study}, trial {number}: {holder} holds it now; {worker.name} sent no heartbeat for longer than "
                "machine.lease_timeout_s, or released it, and stores nothing more"
            )
        return trial_id, frozen, lease

    @contextmanager
    def _over_is_lost(self, number: int) -> Iterator[None]:
        try:
            with self.storage.connected():
                yield
        except UpdateFinishedTrialError as error:
            raise TrialLeaseLostError(f"{self.study}, trial {number}: it is over; nothing more is stored") from error
