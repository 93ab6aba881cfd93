"""Everything about a study as one record, for pages, MLflow, terminal and adoption."""

from typing import Any

from ratchet import digest
from ratchet.config import Settings
from ratchet.records_sweep import Finals, SweepReport
from ratchet.studies import importance, proposals, pruning
from ratchet.studies.register import Register
from ratchet.studies.space import Space
from ratchet.sweeping import ranking
from ratchet.sweeping.budget import STOPPED
from ratchet.sweeping.finale import FINALS


def report(
    register: Register, settings: Settings, space: Space, identity: dict[str, Any], whole: bool = True
) -> SweepReport:
    """The study as it stands now; without importances, which take seconds, unless it is to be `whole`."""
    history, judged, notes = register.trials(), ranking.measures(settings.sweep), register.notes()
    finals = Finals.model_validate(notes[FINALS]) if FINALS in notes else None
    return SweepReport(
        study=register.study,
        storage=register.storage.kind,
        objectives=judged,
        axes=space.axes(),
        sampler=proposals.describe(settings.sweep.sampler, space),
        pruner=pruning.describe(settings.sweep.pruner),
        versions=proposals.versions(),
        data_digest=str(identity["data"])[: digest.SHORT],
        base_digest=str(identity["base"])[: digest.SHORT],
        wanted_trials=settings.sweep.trials + register.carried,
        trials=tuple(history),
        importances=importance.importances(space, judged, history, settings.sweep.sampler.seed) if whole else {},
        best=ranking.leaders(history, judged),
        finals=finals,
        winner=finals.winner if finals and all(trial.is_over for trial in history) else None,
        stopped=str(notes.get(STOPPED, "")),
    )
