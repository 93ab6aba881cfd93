"""Stores the trials of a project's Optuna studies, and manages versions of studies.

A trial has these attributes in Optuna, each as JSON:

    values, run_id, continues, started   set once, when the trial begins
    request                              request of a person that began the trial; missing or null if there is none
    lease, heartbeat.N                   see leases.py
    outcome                              all results; valid only if the trial's state is final, because its writer may
                                         die between the two writes
    from                                 study and number of the original, if a fork has copied the trial

Requests of people about trials (trial_requests.py) are notes of the study: `request.0`, `request.1` ...; they are never
changed.

A study has a new version for each new identity (`compute_identity`). A new version gets copies of the trials of the
previous version that are valid in its own space. Their number is stored last: a version without it was interrupted by a
crash, and the next process creates it again.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, SettingsError, StorageError, first_line
from ratchet.runs.directory import RECIPE_VERSION
from ratchet.storage import digests
from ratchet.storage.records.evaluation import GENERATED_METRICS
from ratchet.storage.records.sweep import Trial, TrialRequest
from ratchet.storage.records.sweep import TrialState as State
from ratchet.tuning.leases import LEASE, Heartbeat, SweepWorker, TrialLease, TrialLeaseLostError
from ratchet.tuning.search_space import Params, SearchSpace, to_tuples
from ratchet.tuning.storage import StudyStorage
from ratchet.tuning.trial_requests import apply_requests, carry_over_requests

OUTCOME = "outcome"
"""Key of the attribute that contains the results of a trial."""

ORIGIN = "from"
"""Key of the attribute of a copied trial that contains study and number of the original."""

_START_FIELDS = {"values", "run_id", "continues", "started", "request"}
_OUTCOME_FIELDS = {"state", "cause", "reason", "adapter_digest", "checkpoints", "cost", "constraints", "ended"}
_REMOVED_FIELD = "same_as"
"""Field that earlier versions of Ratchet stored in outcomes; it was always null, and is ignored."""

_STATES: dict[State, TrialState] = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "infeasible": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}

_FOREIGN_STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
"""State in Ratchet of a trial that another program has ended, by its state in Optuna."""

_NOTE = "note."
"""Prefix of the attributes of a study that contain its notes (`TrialStore.note`)."""

_REQUEST = "request."
"""Prefix of the notes that contain the requests of people."""

FORMAT = 1
"""Format of identities."""

STUDY_FORMAT = 1
"""Format of studies; a newer Ratchet writes a higher one."""

FORMAT_KEY, IDENTITY_KEY, VERSIONS_KEY = "ratchet.format", "ratchet.identity", "ratchet.versions"
PARENT_KEY = "ratchet.parent"
CARRIED_KEY = "ratchet.carried"
_DIRECTIONS = {"minimize": StudyDirection.MINIMIZE, "maximize": StudyDirection.MAXIMIZE}
_LIBRARIES = {"optuna": "optuna", "cmaes": "cmaes", "scipy": "scipy", "ratchet": "ratchet-llm"}
"""Distributions whose versions are stored with a study."""

_COMPARABLE_PARTS = ("format", "data", "base", "recipe", "rows")
"""Parts of two identities that must be equal, so that results are comparable. Sampler and pruner may differ."""

_DIGEST = re.compile(r"[0-9a-f]{40,}")


# Versions of a study.


def list_versions(storage: StudyStorage, name: str) -> "list[TrialStore]":
    """Return all versions of a study, oldest first, without one whose creation was interrupted.

    Raises:
        SettingsError: a study with this name belongs to another program.
        DamagedFileError: a newer Ratchet wrote a version.
        StorageError: the storage does not answer.
    """
    with storage.connected():
        studies = {study.study_name: study for study in storage.optuna.get_all_studies()}
        versions: list[TrialStore] = []
        while (study := studies.get(_version_name(name, len(versions) + 1))) is not None:
            attributes = study.user_attrs
            if FORMAT_KEY not in attributes and (attributes or storage.optuna.get_n_trials(study._study_id)):
                raise SettingsError(
                    f"{storage.where}: the study {study.study_name!r} was created by another program; choose another "
                    "sweep.name in params.yaml"
                )
            if (form := attributes.get(FORMAT_KEY, STUDY_FORMAT)) > STUDY_FORMAT:
                raise DamagedFileError(
                    f"{storage.where}: the study {study.study_name!r} was written by a newer version of Ratchet "
                    f"(format {form}, this one knows {STUDY_FORMAT}); update Ratchet on this machine"
                )
            if CARRIED_KEY not in attributes:
                break
            versions.append(TrialStore(storage, study.study_name, study._study_id, attributes))
    return versions


def _create_version(
    storage: StudyStorage, name: str, identity: Mapping[str, Any], parent: "TrialStore | None", space: SearchSpace
) -> "TrialStore":
    backend = storage.optuna
    for study in backend.get_all_studies():
        if study.study_name == name:  # its creation was interrupted
            backend.delete_study(study._study_id)
    try:
        study_id = backend.create_new_study([_DIRECTIONS[direction] for _, direction in identity["objectives"]], name)
    except DuplicatedStudyError:
        raise SettingsError(
            f"{storage.where}: another program has created a study {name!r} at the same time; choose another sweep.name"
        ) from None
    attributes = {
        FORMAT_KEY: STUDY_FORMAT,
        VERSIONS_KEY: {library: version(distribution) for library, distribution in _LIBRARIES.items()},
        PARENT_KEY: parent.study if parent else None,
        IDENTITY_KEY: identity,
    }
    for key, value in attributes.items():
        backend.set_study_user_attr(study_id, key, value)
    carried = _carry_over_trials(parent, study_id, identity, space) if parent else 0
    backend.set_study_user_attr(study_id, CARRIED_KEY, carried)
    return TrialStore(storage, name, study_id, {**attributes, CARRIED_KEY: carried})


def _version_name(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


# The trials of a version.


class TrialStore:
    """Trials of one version of a study in a storage; thread-safe.

    All methods may raise StorageError if the storage does not answer, LockHeldError if another process holds its lock
    too long, and DamagedFileError if the storage is damaged. Writes are atomic and durable.
    """

    def __init__(self, storage: StudyStorage, study: str, study_id: int, attributes: Mapping[str, Any]) -> None:
        self.storage = storage
        self.study = study
        """Name with version, such as `sweep.2`."""
        self.identity: Mapping[str, Any] = attributes[IDENTITY_KEY]
        """See `compute_identity`."""
        self.versions: Mapping[str, str] = attributes.get(VERSIONS_KEY, {})
        """Versions of the libraries that created the study: optuna, cmaes, scipy, ratchet."""
        self.carried: int = attributes.get(CARRIED_KEY, 0)
        """Number of trials that a fork has copied from the previous version; the copies have the first numbers."""
        self._study_id = study_id
        self._optuna = storage.optuna
        self._over: dict[int, Trial] = {}
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        """Last heartbeat of each running trial, and the time at which this process saw it first."""

    @staticmethod
    def open(
        storage: StudyStorage, name: str, identity: Mapping[str, Any], space: SearchSpace, fork: bool = False
    ) -> "TrialStore":
        """Open the newest version with this identity; create one if there is none.

        With `fork`, a new version is created even if there are versions with other identities. It gets copies of the
        trials of the newest of them that are in the space.

        Raises:
            SettingsError: all versions have other identities and `fork` is not set, or the study belongs to another
                program.
        """
        wanted = json.loads(json.dumps(identity))
        with storage.locked(), storage.connected():
            versions = list_versions(storage, name)
            if same := [study for study in versions if study.identity == wanted]:
                return same[-1]
            new_name = _version_name(name, len(versions) + 1)
            if versions and not fork:
                changes = "".join(f"\n  {line}" for line in list_differences(versions[-1].identity, wanted))
                raise SettingsError(
                    f"params.yaml: the study {versions[-1].study!r} was created with other settings:{changes}\n"
                    f"Undo these changes to continue it; or run `ratchet sweep --fork` to create {new_name!r} with the "
                    "trials that are still valid; or set another sweep.name"
                )
            return _create_version(storage, new_name, wanted, versions[-1] if versions else None, space)

    @staticmethod
    def newest(storage: StudyStorage, name: str) -> "TrialStore | None":
        """Open the newest version of any identity; None if there is none."""
        versions = list_versions(storage, name)
        return versions[-1] if versions else None

    def locked(self) -> AbstractContextManager[None]:
        """Exclude all other threads, processes and machines; see `StudyStorage.locked`."""
        return self.storage.locked()

    def trials(self) -> list[Trial]:
        """Return all trials, by number, with the decisions of people about them.

        The record of a trial that is over is built once, and then reused.
        """
        with self.storage.connected():
            records = self._optuna.get_all_trials(self._study_id, deepcopy=False)
        trials = []
        for frozen in records:
            trial = self._over.get(frozen.number) or deserialize_trial(self.study, frozen)
            if trial.is_over:
                self._over[trial.number] = trial
            trials.append(trial)
        return apply_requests(sorted(trials, key=lambda trial: trial.number), self.requests())

    def begin(
        self,
        values: Mapping[str, Any],
        params: Params,
        run_id: str | None,
        worker: SweepWorker,
        continues: int | None = None,
        request: TrialRequest | None = None,
    ) -> int:
        """Add a running trial of this worker, which may continue a pruned or failed trial; return its number.

        `values` are all values that the trial sets, `params` the drawn ones (`SearchSpace.to_params`).
        """
        lease = TrialLease((worker,), (time.time(),))
        attributes = {
            "values": dict(values), "run_id": run_id, "continues": continues, "started": lease.started[0],
            LEASE: lease.document(), "request": request.model_dump(mode="json") if request else None,
        }  # fmt: skip
        return self._store(
            create_trial(state=TrialState.RUNNING, params=params[0], distributions=params[1], user_attrs=attributes)
        )

    def add(self, trial: Trial, params: Params) -> int:
        """Add a trial that is over; return its number."""
        if not trial.is_over:
            raise ValueError("a running trial must be added with begin()")
        self._check(trial)
        return self._store(_serialize_finished(trial, params))

    def report(self, number: int, rows: int, value: float) -> None:
        """Store the validation loss after a number of rows.

        A loss that is already stored is kept, because a resumed run repeats some validations.

        Raises:
            TrialLeaseLostError: the trial is over.
        """
        with self._convert_errors(number):
            trial_id, frozen = self._read_record(number)
            if rows not in frozen.intermediate_values:
                self._optuna.set_trial_intermediate_value(trial_id, rows, float(value))

    def finish(self, number: int, outcome: Trial, worker: SweepWorker) -> None:
        """Store the result of a trial. After an interruption, this worker or the next holder may call it again.

        The fields `number`, `values`, `run_id`, `continues`, `started` and `executions` of `outcome` are ignored.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        if not outcome.is_over:
            raise ValueError("finish() needs the record of a trial that is over")
        self._check(outcome)
        with self.locked(), self._convert_errors(number):
            trial_id, frozen, _ = self._require_lease(number, worker)
            for rows in sorted(outcome.curve.keys() - frozen.intermediate_values.keys()):
                self._optuna.set_trial_intermediate_value(trial_id, rows, outcome.curve[rows])
            fields = outcome.model_dump(mode="json", include=_OUTCOME_FIELDS)
            self._optuna.set_trial_user_attr(trial_id, OUTCOME, fields)
            # Constraints of an interrupted call are reset to 0.
            constraints = {**dict.fromkeys(frozen.constraints, 0.0), **outcome.constraints}
            for key, value in create_trial(state=TrialState.FAIL, constraints=constraints).system_attrs.items():
                self._optuna.set_trial_system_attr(trial_id, key, value)
            if not self._optuna.set_trial_state_values(trial_id, _STATES[outcome.state], _objective_values(outcome)):
                raise StorageError(f"{self.storage.where}: trial {number} could not be stored; run the command again")

    def renew(self, number: int, worker: SweepWorker) -> None:
        """Store a heartbeat. This method takes no lock, so it works while another process holds the storage.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        with self._convert_errors(number):
            trial_id, frozen, lease = self._require_lease(number, worker)
            heartbeat = lease.heartbeat(frozen.user_attrs)[1] + 1, time.time()  # its counter, and the time for display
            self._optuna.set_trial_user_attr(trial_id, lease.heartbeat_key, heartbeat)
            self._require_lease(number, worker)  # another worker may have taken the trial over before the heartbeat

    def release(self, number: int, worker: SweepWorker) -> None:
        """Release an unfinished trial, so that any worker may take it over at once.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        with self.locked(), self._convert_errors(number):
            trial_id, _, lease = self._require_lease(number, worker)
            self._optuna.set_trial_user_attr(trial_id, LEASE, replace(lease, released=True).document())

    def take_over(self, worker: SweepWorker, lease_timeout_s: float, only: int | None = None) -> Trial | None:
        """Take over the first trial whose holder released it, died, or sent no heartbeat for `lease_timeout_s`.

        With `only`, no other trial than that with this number is taken over.
        This process measures the time itself, so it detects a timeout only in a second call, `lease_timeout_s` later.
        """
        with self.locked(), self.storage.connected():
            running = self._optuna.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.RUNNING,))
            for frozen in sorted(running, key=lambda frozen: frozen.number):
                lease = TrialLease.from_attributes(frozen.user_attrs)
                if lease is None or only not in (None, frozen.number):
                    continue
                heartbeat, now_s = lease.heartbeat(frozen.user_attrs), time.monotonic()
                last_change = self._heartbeats.get(frozen.number)
                if last_change is None or last_change[0] != heartbeat:
                    last_change = self._heartbeats[frozen.number] = (heartbeat, now_s)
                is_expired = now_s - last_change[1] >= lease_timeout_s
                if lease.released or lease.workers[-1].is_gone(worker) or is_expired:
                    trial_id = frozen._trial_id
                    taken = TrialLease((*lease.workers, worker), (*lease.started, time.time()))
                    self._optuna.set_trial_user_attr(trial_id, LEASE, taken.document())
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

    def requests(self) -> list[TrialRequest]:
        """Return the requests of people about trials, in order."""
        found = {key: value for key, value in self.notes().items() if key.startswith(_REQUEST)}
        try:
            return [TrialRequest.model_validate(found[f"{_REQUEST}{index}"]) for index in range(len(found))]
        except (KeyError, ValueError) as error:
            raise DamagedFileError(
                f"study {self.study}: a request about a trial cannot be read ({first_line(error)}); a newer version of "
                "Ratchet may have stored it: update Ratchet on this machine"
            ) from error

    def add_request(self, request: TrialRequest) -> None:
        """Add a request of a person. The caller holds the lock of the study."""
        self.note(f"{_REQUEST}{len(self.requests())}", request.model_dump(mode="json"))

    def _store(self, frozen: FrozenTrial) -> int:
        with self.storage.connected():
            return self._optuna.get_trial(self._optuna.create_new_trial(self._study_id, frozen)).number

    def _check(self, trial: Trial) -> None:
        count = len(self.identity["objectives"])
        if trial.state == "complete" and len(trial.objectives) != count:
            raise ValueError(f"found {len(trial.objectives)} objectives of a complete trial; expected {count}")

    def _read_record(self, number: int) -> tuple[int, FrozenTrial]:
        trial_id = self._optuna.get_trial_id_from_study_id_trial_number(self._study_id, number)
        return trial_id, self._optuna.get_trial(trial_id)

    def _require_lease(self, number: int, worker: SweepWorker) -> tuple[int, FrozenTrial, TrialLease]:
        """Return Optuna's id and record of a trial, and its lease, which this worker must hold."""
        trial_id, frozen = self._read_record(number)
        lease = TrialLease.from_attributes(frozen.user_attrs)
        if frozen.state.is_finished():
            raise TrialLeaseLostError(f"{self.study}, trial {number}: it is over; {worker.name} stores nothing more")
        if lease is None or lease.released or lease.workers[-1] != worker:
            holder = "no worker" if lease is None or lease.released else lease.workers[-1].name
            raise TrialLeaseLostError(
                f"{self.study}, trial {number}: {holder} holds it now; {worker.name} sent no heartbeat for longer than "
                "machine.lease_timeout_s, or released it, and stores nothing more"
            )
        return trial_id, frozen, lease

    @contextmanager
    def _convert_errors(self, number: int) -> Iterator[None]:
        """Convert errors of the storage to StorageError, and a write to an ended trial to TrialLeaseLostError."""
        try:
            with self.storage.connected():
                yield
        except UpdateFinishedTrialError as error:
            raise TrialLeaseLostError(f"{self.study}, trial {number}: it is over; nothing more is stored") from error


# The identity of a study, and differences between two.


def compute_identity(
    settings: Settings, data_digest: str, base_digest: str, start_digest: str | None = None
) -> dict[str, Any]:
    """Return the identity of a study as JSON: everything that affects the results of trials or their sequence.

    `start_digest` is the digest of the weights of train.init_adapter, as in a run's spec, so that the identity does not
    depend on their path.

    The identity does not contain limits (trials, hours, tokens, max_repeated_failures), finalists, storage and name. Of
    the searched settings, it contains only the values of params.yaml that trials may use.

    Raises:
        SettingsError: the search space is invalid.
    """
    space, sweep = SearchSpace.from_settings(settings), settings.sweep
    train = settings.train.model_copy(update={"init_adapter": start_digest}).identity()
    for axis in space.axes():
        _, *sections, leaf = axis.name.split(".")
        node = train
        for name in sections:
            node = node.get(name, {})
        node.pop(leaf, None)  # the identity omits newer settings that have their default
    needs_answers = any(aim.metric in GENERATED_METRICS for aim in sweep.objectives)
    answers = {"max_new_tokens": settings.evaluate.max_new_tokens} if needs_answers else {}
    return answers | {
        "format": FORMAT,
        "space": _canonicalize(space.document()),
        "objectives": [[aim.metric, aim.resolved_direction] for aim in sweep.objectives],
        "sampler": _canonicalize(sweep.resolved_sampler.model_dump(mode="json")),
        "pruner": _canonicalize(sweep.resolved_pruner.model_dump(mode="json")),
        "train": _canonicalize(train),
        "data": data_digest,
        "base": base_digest,
        "recipe": RECIPE_VERSION,
        "rows": sweep.generation_rows,
    }


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each dotted key that differs, such as `space.train.rank.high: 64 -> 128`, sorted."""
    before, after = (dict(_flatten_tree(_canonicalize(identity))) for identity in (old, new))
    keys = sorted(before.keys() | after.keys())
    lines = []
    for key in keys:
        # In JSON, true differs from 1. A section that is empty on one side is no difference of its own.
        first, second = (json.dumps(values[key]) if key in values else None for values in (before, after))
        if first != second and not any(other.startswith(f"{key}.") for other in keys):
            texts = ["(none)" if key not in values else _format_value(values[key]) for values in (before, after)]
            lines.append(f"{key}: {texts[0]} -> {texts[1]}")
    return lines


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value[: digests.SHORT] if _DIGEST.fullmatch(value) else value
    return json.dumps(value, ensure_ascii=False)


def _canonicalize(value: Any) -> Any:
    """Return the canonical form: whole numbers are int, because defaults are int and files may have floats."""
    if isinstance(value, Mapping):
        return {str(key): _canonicalize(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonicalize(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


# Copies of trials in a new version.


def _carry_over_trials(parent: TrialStore, study_id: int, identity: Mapping[str, Any], space: SearchSpace) -> int:
    """Copy the trials of a version that have a result and are in the new space to a study; return their number.

    Trials can be copied if the comparable parts of both identities, and the objectives in any order, are equal.
    """
    old_objectives, new_objectives = parent.identity["objectives"], identity["objectives"]
    are_equal = all(parent.identity.get(key) == identity[key] for key in _COMPARABLE_PARTS)
    if not are_equal or sorted(old_objectives) != sorted(new_objectives):
        return 0
    order = [old_objectives.index(objective) for objective in new_objectives]
    old_settings, new_settings = _fixed_settings(parent.identity), _fixed_settings(identity)
    trials = {trial.number: trial for trial in parent.trials()}
    numbers: dict[int, int] = {}
    for number, trial in trials.items():
        values = _convert_values({**old_settings, **trial.values}, new_settings, space)
        if values is None or trial.state in ("running", "failed"):
            continue
        continues = trial.continues
        while continues is not None and continues not in numbers:  # not copied: use the trial that it continues
            continues = trials[continues].continues
        changes = {
            "values": values,
            "objectives": tuple(trial.objectives[index] for index in order) if trial.objectives else (),
            "continues": None if continues is None else numbers[continues],
        }
        params = space.to_params(values)
        copy = _serialize_finished(trial.model_copy(update=changes), params, origin=(parent.study, number))
        parent.storage.optuna.create_new_trial(study_id, copy)
        numbers[number] = len(numbers)
    study = parent.storage.optuna.get_study_name_from_id(study_id)
    decisions = carry_over_requests(study, list(trials.values()), parent.requests(), numbers)
    for index, request in enumerate(decisions):
        key, content = f"{_NOTE}{_REQUEST}{index}", request.model_dump(mode="json")
        parent.storage.optuna.set_study_user_attr(study_id, key, content)
    return len(numbers)


def _convert_values(
    all_values: Mapping[str, Any], fixed: Mapping[str, Any], space: SearchSpace
) -> dict[str, Any] | None:
    """Return the values of an old trial in the new space; None if no trial in this space is the same training.

    A setting that was fixed and is now searched keeps its value. A setting that was searched and is now fixed must have
    the fixed value in the old trial. A setting whose condition is not met counts as fixed.
    """
    try:
        drawn = space.draw(lambda dimension: all_values[dimension.name])
    except (KeyError, ValueError):
        return None
    return drawn if {**fixed, **drawn} == all_values else None


def _fixed_settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed settings of a study by dotted key."""
    fixed = dict(_flatten_tree(identity["train"], "train."))
    fixed |= {key: entry["otherwise"] for key, entry in identity["space"].items() if "otherwise" in entry}
    return {key: to_tuples(value) for key, value in fixed.items()}


def _flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their dotted keys; an empty section is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten_tree(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# The stored form of trials.


def _serialize_finished(trial: Trial, params: Params, origin: tuple[str, int] | None = None) -> FrozenTrial:
    """Return a trial that is over as Optuna's record; `origin` is study and number of the original of a copy."""
    outcome = trial.model_dump(mode="json", include={*_OUTCOME_FIELDS, "executions"})
    attributes = {**trial.model_dump(mode="json", include=_START_FIELDS), OUTCOME: outcome}
    return create_trial(
        state=_STATES[trial.state],
        values=_objective_values(trial),
        params=params[0],
        distributions=params[1],
        user_attrs=attributes if origin is None else {**attributes, ORIGIN: list(origin)},
        intermediate_values=dict(trial.curve),
        constraints=dict(trial.constraints),
    )


def _objective_values(trial: Trial) -> list[float] | None:
    """Return the objectives for Optuna; None unless the trial is complete, because Optuna accepts no others."""
    return list(trial.objectives) if trial.state == "complete" else None


def deserialize_trial(study: str, frozen: FrozenTrial) -> Trial:
    """Return the record of a stored trial. Raises DamagedFileError if it is invalid or from another program."""
    attributes = frozen.user_attrs
    if "values" not in attributes:
        raise DamagedFileError(
            f"study {study}, trial {frozen.number}: another program has added this trial, so its settings are unknown; "
            "start a new study with `ratchet sweep --fork`, or with another sweep.name"
        )
    lease = TrialLease.from_attributes(attributes)
    fields: dict[str, Any] = {
        "number": frozen.number,
        "values": {parameter: to_tuples(value) for parameter, value in attributes["values"].items()},
        "run_id": attributes["run_id"],
        "continues": attributes["continues"],
        "started": attributes["started"],
        "request": attributes.get("request"),
        "curve": dict(sorted(frozen.intermediate_values.items())),
        "executions": lease.executions(attributes) if lease else (),
    }
    if not frozen.state.is_finished():
        return Trial(state="running", **fields)
    if OUTCOME not in attributes:
        fields |= {
            "state": _FOREIGN_STATES[frozen.state],
            "reason": "ended by another program",
            "constraints": frozen.constraints,
            "ended": frozen.datetime_complete.timestamp() if frozen.datetime_complete else None,
        }
    values = frozen.values if frozen.state == TrialState.COMPLETE else ()
    outcome = {key: value for key, value in attributes.get(OUTCOME, {}).items() if key != _REMOVED_FIELD}
    try:
        return Trial.model_validate({**fields, **outcome, "objectives": values})
    except ValueError as error:
        raise DamagedFileError(f"study {study}, trial {frozen.number}: {first_line(error)}") from error
