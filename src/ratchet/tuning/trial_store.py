"""Stores the trials of a study through Optuna's storage: records, leases, reports and notes."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from ratchet.errors import StorageError
from ratchet.storage.records.sweep import Trial
from ratchet.tuning import study_versions, trial_serialization
from ratchet.tuning.leases import LEASE, SweepWorker, TrialLease, TrialLeaseLostError, TrialLeaseMonitor, next_heartbeat
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import StudyStorage
from ratchet.tuning.study_versions import StudyVersion
from ratchet.tuning.trial_serialization import Free

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
        self.versions: Mapping[str, str] = generation.attributes.get(study_versions.VERSIONS_KEY, {})
        """Versions of the libraries that created the study: optuna, cmaes, ratchet."""
        self.carried: int = generation.attributes.get(study_versions.CARRIED_KEY, 0)
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
        return cls(storage, study_versions.find_or_create(storage, name, identity, space, fork))

    @classmethod
    def newest(cls, storage: StudyStorage, name: str) -> "TrialStore | None":
        """Open the newest version, whatever its identity; None if there is none."""
        found = [one for one in study_versions.list_versions(storage, name) if one.identity is not None]
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
            trial = self._over.get(frozen.number) or trial_serialization.deserialize_trial(self.study, frozen)
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
        return self._store(trial_serialization.serialize_running(trial, free, lease))

    def add(self, trial: Trial, free: Free) -> int:
        """Add a trial that is over; return its number."""
        if not trial.is_over:
            raise ValueError("a running trial must be added with begin()")
        self._check(trial)
        return self._store(trial_serialization.serialize_finished(trial, free))

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
            self._optuna.set_trial_user_attr(
                trial_id, trial_serialization.OUTCOME, trial_serialization.outcome_fields(outcome)
            )
            for key, value in trial_serialization.constraint_attributes(outcome, frozen).items():
                self._optuna.set_trial_system_attr(trial_id, key, value)
            state, values = trial_serialization.to_optuna_state(outcome), trial_serialization.objective_values(outcome)
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
                    return trial_serialization.deserialize_trial(self.study, self._optuna.get_trial(trial_id))
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
