"""Prove on this project that faults change nothing: train a short reference, then the same under faults; compare."""

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ratchet.config.schema import Settings
from ratchet.config.train import EarlyStoppingSettings
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import SettingsError
from ratchet.reports.plots import TimelineLane
from ratchet.runs.fault_injection import plan
from ratchet.stages import fault_campaign
from ratchet.stages.fault_campaign import FaultCampaign, FaultTrialResult
from ratchet.storage import files
from ratchet.storage.code_version import code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard

VALIDATIONS = 3
"""In one training."""

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "safetensors")

Draw = Callable[[Sequence[TimelineLane], Path], None]


@dataclass(frozen=True)
class ChaosOptions:
    """What the command line says."""

    kills: int = 5
    """Of each kind of signal."""
    seed: int = 0
    """Of every schedule."""
    faults: tuple[str, ...] | None = None
    """Rows of `plan.ROWS`; None: all."""
    steps: int = 24
    """Optimizer steps of each training."""
    keep: bool = False
    """Leave the projects of all trials."""
    output: Path | None = None
    """For chaos.json and timeline.png; by default experiments/chaos."""


def chaos(
    layout: ProjectLayout, settings: Settings, options: ChaosOptions, draw: Draw, say: Callable[[str], None]
) -> tuple[bool, str]:
    """Whether all trials were exact and recovered without a hand, and the table that says so.

    Args:
        layout: stages base and prepare have run; nothing of the project is changed.
        settings: the project's; trainings are as short as `options` say.
        options: see there.
        draw: makes the picture; see reports/plots.py.
        say: told what goes on.

    Raises:
        SettingsError: an option cannot be.
        DataError, DamagedFileError: a stage before has not run.
        RunFailedError: the undisturbed training failed.
    """
    numbers = plan.allocate_counts(plan.ROWS if options.faults is None else options.faults, options.kills)
    plan.draw_plan(
        options.seed, numbers, plan.TrainingShape(options.steps, options.steps, 1)
    )  # refuses before anything is read
    for card, path in ((BaseCard, layout.base_card), (DatasetCard, layout.dataset_card)):
        card.load(path)
    output = _choose_output(layout, options)
    short = shorten_training(layout, settings, options.steps)
    trials = plan.draw_plan(options.seed, numbers, fault_campaign.plan_shape(layout, short, options.steps))
    say(f"seed {options.seed}: {len(trials)} trials of {options.steps} steps, besides undisturbed ones")
    folder = layout.runs / f".chaos-{os.getpid()}"
    trying = FaultCampaign(layout, short, folder, say, options.keep)
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
    draw([_timeline_lane(result) for result in results], output / "timeline.png")
    well = all(result.exact and result.recovered for result in results)
    return well, "\n".join([_format_table(report["rows"]), *_format_conclusion(options, results, output)])


def shorten_training(layout: ProjectLayout, settings: Settings, steps: int) -> Settings:
    """The project's own settings, with so many optimizer steps and some validations in between.

    Raises:
        DataError, DamagedFileError, SettingsError: the data is missing, or these settings cannot train on it.
    """
    files.verify_sealed(layout.data, "data")
    rows = token_files.load_rows(layout.data, "train")
    sequences = BatchPlan(rows.lengths, settings.train).sequences
    changes = {
        "epochs": steps * settings.train.batch_rows / sequences,
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
    for name in dict.fromkeys(result.trial.row for result in results):
        found = [result for result in results if result.trial.row == name]
        recoveries = sorted(s for result in found for s in result.seen.recoveries_s)
        lines.append(
            {
                "row": name,
                "text": plan.ROWS[name].text,
                "trials": len(found),
                "faults": sum(result.seen.delivered + len(result.trial.faults) for result in found),
                "exact": sum(result.exact for result in found),
                "recovered": sum(result.recovered for result in found),
                "same_fault": any(result.trial.same_fault for result in found),
                "slowest_recovery_s": recoveries[-1] if recoveries else None,
                "most_lost_steps": max((n for result in found for n in result.seen.lost_steps), default=0),
            }
        )
    return lines


def _trial_entry(result: FaultTrialResult) -> dict[str, Any]:
    trial, seen = result.trial, result.seen
    return {
        "name": trial.name,
        "row": trial.row,
        "exact": result.exact,
        "recovered": result.recovered,
        "differences": list(result.differences),
        "problems": list(result.problems),
        "blows": [asdict(blow) for blow in trial.blows],
        "faults": [fault.model_dump(mode="json") for fault in trial.faults],
        "guards": dict(trial.guards),
        "same_fault": trial.same_fault,
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
        well=result.exact and result.recovered,
    )


def _format_table(lines: Sequence[dict[str, Any]]) -> str:
    """`*` marks rows that are compared with an undisturbed training under the same fault."""
    text = [f"  {'row':<12}{'trials':>7}{'faults':>8}{'exact':>8}{'unaided':>9}{'recovery':>10}   what"]
    for line in lines:
        slowest = line["slowest_recovery_s"]
        shown = "-" if slowest is None else f"{slowest:.1f} s"
        exact, unaided = (f"{line[key]}/{line['trials']}" for key in ("exact", "recovered"))
        name = line["row"] + "*" * line["same_fault"]
        text.append(
            f"  {name:<12}{line['trials']:>7}{line['faults']:>8}{exact:>8}{unaided:>9}{shown:>10}   {line['text']}"
        )
    return "\n".join(text)


def _format_conclusion(options: ChaosOptions, results: Sequence[FaultTrialResult], output: Path) -> list[str]:
    """What the table means, and what is to be looked at."""
    bad = [result for result in results if not (result.exact and result.recovered)]
    lines = []
    if any(result.trial.same_fault for result in results):
        lines.append("  * compared with an undisturbed training under the same fault (nan: where it is never finite)")
    for result in bad:
        lines += [f"  {result.trial.name}: {text}" for text in (*result.differences, *result.problems)]
        lines.append(f"  {result.trial.name}: its project is kept in {result.folder}")
    state = f"{len(bad)} of {len(results)} trials FAILED" if bad else f"all {len(results)} trials are exact and unaided"
    return [*lines, f"seed {options.seed}: {state}; {output / 'chaos.json'}, timeline.png"]
