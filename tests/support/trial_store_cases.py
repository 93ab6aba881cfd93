"""The trial store on both storages keeps each trial, no matter which process is killed and when."""

from collections.abc import Mapping
from typing import Any

import pytest

from ratchet.config.settings import Settings
from ratchet.config.sweep import Sweep, SweepParameter
from ratchet.storage.records.sweep import Trial
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import StudyStorage
from ratchet.tuning.study import TrialStore, compute_identity

DATA, TINY_BASE = "d" * 64, "b" * 64
WIDE = {
    "train.rank": SweepParameter(low=2, high=64, log=True),
    "train.alpha": SweepParameter(tie="2 * train.rank"),
    "train.learning_rate": SweepParameter(low=1e-4, high=1e-2, log=True),
}
LONG = 3600.0
"""A lease timeout in seconds that does not expire during a test."""


def settings(space: dict[str, SweepParameter] = WIDE, **sweep: Any) -> Settings:
    return Settings(sweep=Sweep(space=space, **sweep))


def opened(
    storage: StudyStorage, wanted: Settings, fork: bool = False, data: str = DATA, name: str = "sweep"
) -> TrialStore:
    return TrialStore.open(
        storage, name, compute_identity(wanted, data, TINY_BASE), SearchSpace.from_settings(wanted), fork
    )


@pytest.fixture
def store(storage: StudyStorage) -> TrialStore:
    return opened(storage, settings())


@pytest.fixture
def here() -> SweepWorker:
    return SweepWorker.current()


def values(rank: int = 8, learning_rate: float = 1e-3) -> dict[str, Any]:
    return {"train.rank": rank, "train.alpha": 2 * rank, "train.learning_rate": learning_rate}


def begin(
    store: TrialStore, worker: SweepWorker, chosen: Mapping[str, Any] | None = None, continues: int | None = None
) -> int:
    chosen = chosen or values()
    return store.begin(chosen, SearchSpace.from_settings(settings()).to_params(chosen), "run-1", worker, continues)


def ended(state: str = "complete", **changes: Any) -> Trial:
    """Return the outcome of a trial."""
    if state == "complete":
        changes = {"objectives": (1.5,), **changes}
    told = {"number": 0, "values": values(), "run_id": "run-1", "state": state, "started": 1.0, "ended": 2.5, **changes}
    return Trial.model_validate(told)


class Dying:
    """Simulates the death of a process: raises KeyboardInterrupt before the nth write to the storage."""

    def __init__(self, backend: Any, write: int) -> None:
        self.writes = 0
        self._backend = backend
        self._write = write

    def replace(self, patched: pytest.MonkeyPatch, *names: str) -> None:
        for name in names:
            patched.setattr(self._backend, name, self._dying(getattr(self._backend, name)))

    def _dying(self, real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.writes += 1
            if self.writes == self._write:
                raise KeyboardInterrupt
            return real(*arguments, **named)

        return call


NARROW = WIDE | {"train.rank": SweepParameter(low=4, high=16, log=True)}


def populate(store: TrialStore, here: SweepWorker) -> None:
    """Add one trial of each kind. 0: complete; 1: pruned; 2: continues 1; 3: infeasible; 4: failed; 5: complete; 6:
    running; 7: complete with rank 32; 8: continues 1 and failed; 9: continues 8."""
    free = SearchSpace.from_settings(settings())
    told = [
        ended(curve={70: 2.0}), ended("pruned", values=values(4)), ended(values=values(4), continues=1),
        ended("infeasible", values=values(16), constraints={"memory": 1.0}), ended("failed"), ended(),
    ]  # fmt: skip
    for trial in told:
        store.add(trial, free.to_params(trial.values))
    begin(store, here)
    later = (
        ended(values=values(32)), ended("failed", values=values(4), continues=1), ended(values=values(4), continues=8)
    )  # fmt: skip
    for trial in later:
        store.add(trial, free.to_params(trial.values))
