"""`ratchet chaos`: prove on this project that faults change nothing: train a reference, inject faults, compare."""

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ratchet.config.settings import Settings
from ratchet.config.train import EarlyStoppingSettings
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import SettingsError
from ratchet.reports import plots
from ratchet.reports.plots import TimelineLane
from ratchet.runs.fault_injection import plan
from ratchet.stages import fault_campaign
from ratchet.stages.fault_campaign import FaultCampaign, FaultTrialResult
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import files
from ratchet.storage.code_version import code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, Record
from ratchet.storage.records.data import DatasetCard

VALIDATIONS = 3
"""In one training."""

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "safetensors")


@dataclass(frozen=True)
class ChaosOptions:
    """Which faults to inject, and into what."""

    kills: int = 5
    """Kills with each kind of signal."""
    seed: int = 0
    """Seed of every schedule."""
    faults: tuple[str, ...] | None = None
    """Rows of `plan.ROWS`; None: all."""
    steps: int = 24
    """Optimizer steps of each training."""
    keep: bool = False
    """Whether the projects of all trials are kept."""
    output: Path | None = None
    """Directory for chaos.json and timeline.png; None: experiments/chaos."""


class ChaosReport(Record):
    """Trainings under injected faults, compared with an undisturbed one."""

    seed: int
    rows: tuple[dict[str, Any], ...]
    """A summary for each kind of fault."""
    trials: int
    failures: tuple[str, ...]
    """Differences and problems, each with the name of its trial."""
    failed_trials: int
    output: Path

    @property
    def has_passed(self) -> bool:
        """Whether every trial was exact and recovered without help."""
        return self.failed_trials == 0


def chaos(
    project: Project,
    options: ChaosOptions = ChaosOptions(),
    on_progress: Callable[[str], None] = ignore_progress,
) -> ChaosReport:
    """Train a short reference, then the same under faults, and compare. The project itself is not changed.

    Args:
        project: the project; its stages base and prepare have run.
        options: which faults to inject.
        on_progress: receives a line for each trial.

    Raises:
        SettingsError: an option is out of range.
        DataError, DamagedFileError: an earlier stage has not run.
        RunFailedError: the undisturbed training failed.
    """
    layout, settings = project.layout, project.settings
    numbers = plan.allocate_counts(plan.FAULT_CATEGORIES if options.faults is None else options.faults, options.kills)
    plan.draw_plan(
        options.seed, numbers, plan.TrainingShape(options.steps, options.steps, 1)
    )  # refuses before anything is read
    for card, path in ((BaseCard, layout.base_card), (DatasetCard, layout.dataset_card)):
        card.load(path)
    output = _choose_output(layout, options)
    short = shorten_training(layout, settings, options.steps)
    trials = plan.draw_plan(options.seed, numbers, fault_campaign.plan_shape(layout, short, options.steps))
    on_progress(f"seed {options.seed}: {len(trials)} trials of {options.steps} steps, besides undisturbed ones")
    folder = layout.runs / f".chaos-{os.getpid()}"
    trying = FaultCampaign(layout, short, folder, on_progress, options.keep)
    try:
        results = trying.run(trials)
    except BaseException:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # unless it holds something
            output.rmdir()
        raise
    if not options.keep and all(result.folder is None for result in results):
        shutil.rmtree(folder, ignore_errors=True)
    report = _build_report(options, trying, results)
    files.write_json(output / "chaos.json", report)
    plots.draw_timeline([_timeline_lane(result) for result in results], output / "timeline.png")
    failed = [result for result in results if not (result.exact and result.recovered)]
    failures = []
    for result in failed:
        failures += [f"{result.trial.name}: {text}" for text in (*result.differences, *result.problems)]
        failures.append(f"{result.trial.name}: its project is kept in {result.folder}")
    return ChaosReport(
        seed=options.seed,
        rows=tuple(report["rows"]),
        trials=len(results),
        failures=tuple(failures),
        failed_trials=len(failed),
        output=output,
    )


def shorten_training(layout: ProjectLayout, settings: Settings, steps: int) -> Settings:
    """The project's own settings, with so many optimizer steps and some validations in between.

    Raises:
        DataError, DamagedFileError, SettingsError: the data is missing, or these settings cannot train on it.
    """
    files.verify_sealed(layout.data, "data")
    rows = token_files.load_rows(layout.data, "train")
    sequences = BatchPlan(rows.lengths, settings.train).sequences
    changes = {
        "epochs": steps * settings.train.batch_size / sequences,
        "validate_every_steps": max(1, steps // VALIDATIONS),
        "early_stopping": EarlyStoppingSettings(),
    }
    return settings.model_copy(update={"train": settings.train.model_copy(update=changes)})


def _choose_output(layout: ProjectLayout, options: ChaosOptions) -> Path:
    output = options.output or layout.experiments / "chaos"
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output: {output} cannot be made ({error.strerror}); name another directory") from None
    return output


def _build_report(options: ChaosOptions, trying: FaultCampaign, results: Sequence[FaultTrialResult]) -> dict[str, Any]:
    clock = trying.clock
    return {
        "format": 1,
        "seed": options.seed,
        "kills": options.kills,
        "steps": options.steps,
        "reference": {"first_step_s": clock.first_step_s, "finished_s": clock.finished_s} if clock else None,
        "machine": trying.facts | {"system": platform.platform(), "cpus": os.cpu_count()},
        "versions": {name: version(name) for name in LIBRARIES}
        | {"ratchet": code_version(), "python": platform.python_version()},
        "rows": summarize_results(results),
        "trials": [_trial_entry(result) for result in results],
    }


def summarize_results(results: Sequence[FaultTrialResult]) -> list[dict[str, Any]]:
    """One line for each kind of fault."""
    lines = []
    for name in dict.fromkeys(result.trial.category for result in results):
        found = [result for result in results if result.trial.category == name]
        recoveries = sorted(s for result in found for s in result.seen.recoveries_s)
        lines.append(
            {
                "row": name,
                "text": plan.FAULT_CATEGORIES[name].description,
                "trials": len(found),
                "faults": sum(result.seen.delivered + len(result.trial.faults) for result in found),
                "exact": sum(result.exact for result in found),
                "recovered": sum(result.recovered for result in found),
                "reference_has_faults": any(result.trial.reference_has_faults for result in found),
                "slowest_recovery_s": recoveries[-1] if recoveries else None,
                "most_lost_steps": max((n for result in found for n in result.seen.lost_steps), default=0),
            }
        )
    return lines


def _trial_entry(result: FaultTrialResult) -> dict[str, Any]:
    trial, seen = result.trial, result.seen
    return {
        "name": trial.name,
        "row": trial.category,
        "exact": result.exact,
        "recovered": result.recovered,
        "differences": list(result.differences),
        "problems": list(result.problems),
        "external_faults": [asdict(blow) for blow in trial.external_faults],
        "faults": [fault.model_dump(mode="json") for fault in trial.faults],
        "guards": dict(trial.guards),
        "reference_has_faults": trial.reference_has_faults,
        "delivered": seen.delivered,
        "missed": seen.missed,
        "damage": seen.notes,
        "recoveries_s": seen.recoveries_s,
        "lost_steps": seen.lost_steps,
        "stops_s": seen.stops_s,
        "events": dict(sorted(seen.kinds.items())),
        "marks": seen.marks,
        "wall_s": result.wall_s,
        "folder": None if result.folder is None else str(result.folder),
    }


def _timeline_lane(result: FaultTrialResult) -> TimelineLane:
    seen = result.seen
    return TimelineLane(
        name=result.trial.name,
        attempts=[(attempt[0], attempt[-1]) for attempt in seen.attempts],
        steps=seen.steps,
        checkpoints=[at for at, _ in seen.checkpoints],
        marks=seen.marks,
        succeeded=result.exact and result.recovered,
    )
