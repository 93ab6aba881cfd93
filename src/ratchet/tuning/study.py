"""A study, opened: what workers, the command that started them, and adoption all begin with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from ratchet.config.schema import Settings
from ratchet.errors import DataError
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import SweepReport
from ratchet.training.run_spec import build_run_spec
from ratchet.tuning import final_round
from ratchet.tuning import report as account
from ratchet.tuning.scheduler import final_study_name
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import StudyStorage, open_storage
from ratchet.tuning.study_versions import compute_identity
from ratchet.tuning.trial_store import TrialStore


@dataclass(frozen=True)
class StudySession:
    """One study of a project, with the settings that it searches around."""

    layout: ProjectLayout
    settings: Settings
    storage: StudyStorage
    register: TrialStore
    space: SearchSpace
    identity: dict[str, Any]

    @classmethod
    @contextmanager
    def open(cls, layout: ProjectLayout, settings: Settings, fork: bool = False, make: bool = True) -> Iterator[Self]:
        """Open the study that these settings mean.

        Args:
            layout: the project.
            settings: with what is searched.
            fork: whether another study may be made where these settings are not those of the one that is there.
            make: whether the first one may be made.

        Raises:
            SettingsError: a space that cannot be searched, or one that is not the study's (`fork` makes another study).
            DataError: stage base or prepare has not run; or there is no study, and none is to be made.
            DamagedFileError, LockHeldError, StorageError: see studies.storage and studies.register.
        """
        space = SearchSpace.of(settings)
        spec = build_run_spec(layout, settings)
        wanted = compute_identity(settings, spec.data_digest, spec.base_digest)
        storage = open_storage(layout, settings.machine.studies)
        try:
            if not make and TrialStore.newest(storage, settings.sweep.name) is None:
                raise DataError(f"no study {settings.sweep.name} in {storage.where}: `ratchet sweep` begins it")
            register = TrialStore.open(storage, settings.sweep.name, wanted, space, fork)
            yield cls(layout, settings, storage, register, space, wanted)
        finally:
            storage.close()

    def forgive(self) -> str:
        """Let a study go on that failures have stopped; returns why it was stopped, or nothing."""
        with self.register.locked():
            if text := str(self.register.notes().get(final_round.STOPPED, "")):
                self.register.note(final_round.FORGIVEN, len(self.register.trials()))
                self.register.note(final_round.STOPPED, "")
        return text

    def report(self, whole: bool = True) -> SweepReport:
        """The study as it stands now."""
        return account.build_report(self.register, self.settings, self.space, self.identity, whole)


class FinalRoundProgress:
    """News of finalists' trainings with further seeds, which no report tells of before they are compared."""

    def __init__(self, desk: StudySession) -> None:
        self._desk = desk
        self._register: TrialStore | None = None
        self._told: dict[int, str] = {}

    def of(self, report: SweepReport) -> Iterator[str]:
        """A line for each training that has begun or ended since the last call."""
        if not report.trials or not all(trial.is_over for trial in report.trials):
            return
        if self._register is None:
            self._register = TrialStore.newest(self._desk.storage, final_study_name(self._desk.register.study))
        for trial in self._register.trials() if self._register else ():
            if self._told.get(trial.number) == trial.state:
                continue
            self._told[trial.number] = trial.state
            chosen = ", ".join(f"{knob.removeprefix('train.')} {value}" for knob, value in trial.values.items())
            value = (
                f" ({trial.objectives[0]:.4g})" if trial.objectives else f" ({trial.reason})" if trial.reason else ""
            )
            yield f"finals: {chosen}: {'begun' if trial.state == 'running' else trial.state}{value}"
