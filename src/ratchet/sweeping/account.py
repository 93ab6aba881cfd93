"""Everything about a study as one record, for pages, MLflow, terminal and adoption."""

from collections.abc import Sequence
from typing import Any

from ratchet import digest
from ratchet.config import Settings
from ratchet.records_sweep import Finals, Measure, SweepReport, Trial
from ratchet.studies import importance, proposals
from ratchet.studies.register import Register
from ratchet.studies.space import Space
from ratchet.sweeping.search import STOPPED

FINALS = "finals"
"""Note of a study: its Finals, once they are decided."""


def measures(settings: Settings) -> tuple[Measure, ...]:
    """What trials are judged by."""
    return tuple(Measure(metric=aim.metric, direction=aim.better) for aim in settings.sweep.objectives)


def report(
    register: Register, settings: Settings, space: Space, identity: dict[str, Any], whole: bool = True
) -> SweepReport:
    """The study as it stands now; without importances, which take seconds, unless it is to be `whole`."""
    history, judged, notes = register.trials(), measures(settings), register.notes()
    leading = best(history, judged)
    finals = Finals.model_validate(notes[FINALS]) if FINALS in notes else None
    return SweepReport(
        study=register.study,
        storage=register.kind,
        objectives=judged,
        axes=space.axes(),
        sampler=proposals.describe(settings.sweep.sampler, space),
        pruner=_pruner(settings),
        versions=proposals.versions(),
        data_digest=str(identity["data"])[: digest.SHORT],
        base_digest=str(identity["base"])[: digest.SHORT],
        wanted_trials=settings.sweep.trials,
        trials=tuple(history),
        importances=importance.importances(space, judged, history, settings.sweep.sampler.seed) if whole else {},
        best=leading,
        finals=finals,
        winner=winner(settings, leading, finals),
        stopped=str(notes.get(STOPPED, "")),
    )


def winner(settings: Settings, leading: Sequence[int], finals: Finals | None) -> int | None:
    """The trial that the sweep names; None as long as finalists are still compared, or where a front has several."""
    if finals is not None:
        return finals.winner
    compared = settings.sweep.finalists.top > 1
    return leading[0] if len(leading) == 1 and not compared else None


def best(history: Sequence[Trial], judged: Sequence[Measure]) -> tuple[int, ...]:
    """The best complete trial; of several objectives the Pareto front, by number. The earlier of equals."""
    signs = [1.0 if one.direction == "minimize" else -1.0 for one in judged]
    points = {
        trial.number: tuple(sign * value for sign, value in zip(signs, trial.objectives, strict=True))
        for trial in history
        if trial.state == "complete"
    }
    if len(signs) == 1:
        return (min(points, key=lambda number: (points[number], number)),) if points else ()
    return tuple(n for n, point in points.items() if not any(_dominates(other, point) for other in points.values()))


def _dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _pruner(settings: Settings) -> str:
    chosen = settings.sweep.pruner
    if chosen.kind == "none":
        return "none"
    if chosen.kind == "median":
        return f"median, from {chosen.first:g} of the longest training on, after {chosen.startup} trials"
    return f"{chosen.kind}: first rung at {chosen.first:g} of the longest training, one in {chosen.reduction} goes on"
