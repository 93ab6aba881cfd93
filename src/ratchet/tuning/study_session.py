"""Opens a study of a project: for sweep workers, the sweep command, and the adoption of a trial."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from ratchet.config.settings import Settings
from ratchet.errors import DataError, SettingsError
from ratchet.models import start_adapter
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import SweepReport
from ratchet.training.run_spec import build_run_spec
from ratchet.tuning import final_round
from ratchet.tuning import report as reports
from ratchet.tuning.scheduler import final_study_name
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import StudyStorage, open_storage
from ratchet.tuning.study import TrialStore, compute_identity


@dataclass(frozen=True)
class StudySession:
    """An open study of a project, with its settings."""

    layout: ProjectLayout
    settings: Settings
    storage: StudyStorage
    store: TrialStore
    space: SearchSpace
    identity: dict[str, Any]

    @classmethod
    @contextmanager
    def open(cls, layout: ProjectLayout, settings: Settings, fork: bool = False, create: bool = True) -> Iterator[Self]:
        """Open the study of these settings.

        `fork` creates a new version of the study if its settings differ from these; `create`, a study if there is none.

        Raises:
            SettingsError: the search space is invalid; the study has other settings and `fork` is not set; or a new
                study would start from an earlier champion than `ratchet train`.
            DataError: stage base or prepare has not run; or the study does not exist and `create` is not set.
            DamagedFileError, LockHeldError, StorageError: see StudyStorage and TrialStore.
        """
        space = SearchSpace.from_settings(settings)
        spec = build_run_spec(layout, settings)
        identity = compute_identity(settings, spec.data_digest, spec.base_digest, spec.train.init_adapter)
        storage = open_storage(layout, settings.machine.study_storage)
        try:
            newest = TrialStore.newest(storage, settings.sweep.name)
            if newest is None and not create:
                raise DataError(f"no study {settings.sweep.name} in {storage.where}; run `ratchet sweep` first")
            if newest is None or fork:
                _require_current_champion(layout, settings)
            store = TrialStore.open(storage, settings.sweep.name, identity, space, fork)
            yield cls(layout, settings, storage, store, space, identity)
        finally:
            storage.close()

    def resume_after_failures(self) -> str:
        """Resume a study that was stopped because of failures, and return why; empty if it was not stopped.

        Even if it was not stopped, failed trials and failed trainings of the final round are tried once more. Those
        that failed twice for the same reason are not.
        """
        seeds = TrialStore.newest(self.storage, final_study_name(self.store.study))
        for store in filter(None, (self.store, seeds)):
            with store.locked():
                if any(trial.state == "failed" for trial in store.trials()):
                    store.note(final_round.RETRIED, len(store.trials()))
        with self.store.locked():
            if reason := str(self.store.notes().get(final_round.STOPPED, "")):
                if not reason.startswith(final_round.FINAL_FAILURE):
                    self.store.note(final_round.FORGIVEN, len(self.store.trials()))
                self.store.note(final_round.STOPPED, "")
        return reason

    def report(self, with_importances: bool = True) -> SweepReport:
        """Return the current report of the study."""
        return reports.build_report(self.store, self.settings, self.space, self.identity, with_importances)


def _require_current_champion(layout: ProjectLayout, settings: Settings) -> None:
    """Raise SettingsError if trials would start from the champion with which stage train began, and another model has
    been promoted since. A study keeps its champion, so that it can be resumed after a promotion."""
    if settings.train.init_adapter != start_adapter.CHAMPION:
        return
    began, current = start_adapter.find_champion(layout), start_adapter.read_champion_start(layout)
    if began.digest != current.digest:
        raise SettingsError(
            f"{start_adapter.INIT_ADAPTER}: found {start_adapter.CHAMPION}, but stage train began with version "
            f"{began.version}, and version {current.version} is the champion now; run `ratchet train` first, or set "
            "the RunId of the model to start from"
        )


class FinalRoundProgress:
    """Progress of the final round: trainings of finalists with further seeds, which are not in the sweep report."""

    def __init__(self, session: StudySession) -> None:
        self._session = session
        self._seed_trials: TrialStore | None = None
        self._reported_states: dict[int, str] = {}

    def list_news(self, report: SweepReport) -> Iterator[str]:
        """Yield a line for each training that has started or ended since the last call."""
        if not report.trials or not all(trial.is_over for trial in report.trials):
            return
        if self._seed_trials is None:
            self._seed_trials = TrialStore.newest(self._session.storage, final_study_name(self._session.store.study))
        for trial in self._seed_trials.trials() if self._seed_trials else ():
            if self._reported_states.get(trial.number) == trial.state:
                continue
            self._reported_states[trial.number] = trial.state
            settings = ", ".join(f"{key.removeprefix('train.')} {value}" for key, value in trial.values.items())
            outcome = f" ({trial.reason})" if trial.reason else ""
            if trial.objectives:
                outcome = f" ({trial.objectives[0]:.4g})"
            yield f"final round: {settings}: {'started' if trial.state == 'running' else trial.state}{outcome}"
