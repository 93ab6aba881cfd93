"""The register of a study: who trains what, and what came of it. Trial records go in and out; Optuna keeps them."""

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
    """One generation of a study in a storage; may be asked from several threads.

    All methods raise StorageError or LockHeldError when the storage does not answer or another process holds it for
    long, and DamagedFileError when it is damaged. A write is atomic and survives the death of the process.
    """

    def __init__(self, storage: StudyStorage, generation: StudyVersion) -> None:
        self.storage = storage
        self.study = generation.name
        """Name and generation, such as `sweep.2`."""
        self.identity: Mapping[str, Any] = generation.identity or {}
        """See `studies.identity`."""
        self.versions: Mapping[str, str] = generation.attributes.get(study_versions.VERSIONS_KEY, {})
        """Of the libraries that the study was begun with: optuna, cmaes, ratchet."""
        self.carried: int = generation.attributes.get(study_versions.CARRIED_KEY, 0)
        """Trials that a fork took over; they have the first numbers."""
        self._study_id = generation.study_id
        self._optuna = storage.optuna
        self._over: dict[int, Trial] = {}
        self._watch = TrialLeaseMonitor()

    @classmethod
    def open(
        cls, storage: StudyStorage, name: str, identity: Mapping[str, Any], space: SearchSpace, fork: bool = False
    ) -> "TrialStore":
        """The newest generation of exactly this identity, made where there is none; see `generations.find_or_make`.

        Raises:
            SettingsError: the study has another identity, and `fork` is not set; or it is another program's.
        """
        return cls(storage, study_versions.find_or_create(storage, name, identity, space, fork))

    @classmethod
    def newest(cls, storage: StudyStorage, name: str) -> "TrialStore | None":
        """The last generation, whatever its identity, to read what came of it; None where there is none."""
        found = [one for one in study_versions.list_versions(storage, name) if one.identity is not None]
        return cls(storage, found[-1]) if found else None

    def locked(self) -> AbstractContextManager[None]:
        """See `StudyStorage.locked`."""
        return self.storage.locked()

    def trials(self) -> list[Trial]:
        """All trials, by number. Those that are over are read once."""
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
        """Add a trial that this worker trains from now on. Returns its number.

        Args:
            values: all that the trial sets, ties included.
            free: those that were searched (`stored.searched`).
            run_id: of the run that trains them.
            worker: who holds the lease.
            continues: number of the pruned trial that this one goes on with.
        """
        lease = TrialLease.first(worker)
        trial = Trial(
            number=0, values=dict(values), run_id=run_id, state="running", continues=continues, begun=lease.begun[0]
        )
        return self._store(trial_serialization.serialize_running(trial, free, lease))

    def add(self, trial: Trial, free: Free) -> int:
        """Add a trial that is over already, such as one that is the same as another. Returns its new number."""
        if not trial.is_over:
            raise ValueError("a trial that runs is begun, not added")
        self._check(trial)
        return self._store(trial_serialization.serialize_finished(trial, free))

    def report(self, number: int, rows: int, value: float) -> None:
        """Note the validation loss after so many rows, unless it is known: a resumed run measures some again.

        Raises:
            TrialLeaseLostError: the trial is over.
        """
        with self._over_is_lost(number):
            trial_id, frozen = self._frozen(number)
            if rows not in frozen.intermediate_values:
                self._optuna.set_trial_intermediate_value(trial_id, rows, float(value))

    def finish(self, number: int, outcome: Trial, worker: SweepWorker) -> None:
        """Write what came of a trial. May be repeated when it was interrupted, by this worker or by the next one.

        Args:
            number: of the trial.
            outcome: its record; `number`, `values`, `run_id`, `continues`, `begun` and `takes` in it are not looked at.
            worker: who holds the lease.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        if not outcome.is_over:
            raise ValueError("a trial that is finished is over")
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
                raise StorageError(f"{self.storage.where}: trial {number} was not written; repeat the command")

    def renew(self, number: int, worker: SweepWorker) -> None:
        """Give a sign of life; needs no lock, so that it comes even while others hold the storage.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        with self._over_is_lost(number):
            trial_id, frozen, lease = self._held(number, worker)
            self._optuna.set_trial_user_attr(trial_id, lease.sign_key, next_heartbeat(lease.sign(frozen.user_attrs)))
            self._held(number, worker)  # was it taken over in between? The sign that was given is nobody else's

    def release(self, number: int, worker: SweepWorker) -> None:
        """Give a trial back that is not finished: anybody may take it over at once.

        Raises:
            TrialLeaseLostError: another worker has the trial, or it is over.
        """
        with self.locked(), self._over_is_lost(number):
            trial_id, _, lease = self._held(number, worker)
            self._optuna.set_trial_user_attr(trial_id, LEASE, lease.given_back().document())

    def take_over(self, worker: SweepWorker, lease_s: float) -> Trial | None:
        """Take up the first trial whose holder gave it back, died, or gave no sign of life for `lease_s` seconds.

        The last needs two calls at least so far apart, for time is measured by this process's own clock.
        """
        with self.locked(), self.storage.connected():
            running = self._optuna.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.RUNNING,))
            for frozen in sorted(running, key=lambda frozen: frozen.number):
                lease = TrialLease.of(frozen.user_attrs)
                still = 0.0 if lease is None else self._watch.still_for(frozen.number, lease.sign(frozen.user_attrs))
                if lease and (lease.released or lease.workers[-1].is_gone(worker) or still >= lease_s):
                    trial_id = frozen._trial_id
                    self._optuna.set_trial_user_attr(trial_id, LEASE, lease.taken_by(worker).document())
                    return trial_serialization.deserialize_trial(self.study, self._optuna.get_trial(trial_id))
        return None

    def note(self, key: str, value: Any) -> None:
        """Keep a JSON value with the study, in the place of an earlier one of this key."""
        json.dumps(value, allow_nan=False)  # refused here, not by whoever reads it
        with self.storage.connected():
            self._optuna.set_study_user_attr(self._study_id, _NOTE + key, value)

    def notes(self) -> dict[str, Any]:
        """What was noted, by key."""
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
        lease = TrialLease.of(frozen.user_attrs)
        if frozen.state.is_finished():
            raise TrialLeaseLostError(
                f"{self.study}, trial {number}: it is over; what {worker.name} knows of it is not written"
            )
        if lease is None or not lease.is_held_by(worker):
            holder = "nobody" if lease is None or lease.released else lease.workers[-1].name
            raise TrialLeaseLostError(
                f"{self.study}, trial {number}: {holder} has it now; {worker.name} gave no sign of life for longer "
                "than machine.lease_s, or gave it back, and writes nothing more about it"
            )
        return trial_id, frozen, lease

    @contextmanager
    def _over_is_lost(self, number: int) -> Iterator[None]:
        try:
            with self.storage.connected():
                yield
        except UpdateFinishedTrialError as error:
            raise TrialLeaseLostError(
                f"{self.study}, trial {number}: it is over; nothing more is written about it"
            ) from error
