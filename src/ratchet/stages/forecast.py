"""`ratchet forecast`: the memory that a training needs, by part and phase, and what would fit. Loads no weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ratchet.config.settings import Settings
from ratchet.errors import BaseModelError, RatchetError, SettingsError
from ratchet.models import base_model, loading, model_spec, teacher_reference
from ratchet.models.memory import capacity
from ratchet.models.memory import forecast as frugal
from ratchet.models.memory import forecast as largest
from ratchet.models.memory import forecast as simulation
from ratchet.models.memory.forecast import LargestFittingSizes, MemoryFallback, MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.reports import training_page
from ratchet.reports.training_page import MemoryHeadroom
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.training import MemoryForecast
from ratchet.training import microbatch_budget

ACCURACY = "`python benchmarks/memory.py` compares such forecasts with measured training runs."


@dataclass(frozen=True)
class ForecastOptions:
    """Inputs of a forecast; None stands for the value of the project's settings."""

    base: Path | None = None
    """A model directory, or a config.json alone."""
    rows: int | None = None
    """Rows of a micro-batch."""
    tokens: int | None = None
    """Tokens of the longest row."""
    device: Literal["cpu", "cuda"] | None = None
    memory_bytes: int | None = None
    """Memory of the device; None: what is available on this machine."""
    html: Path | None = None
    """Page to write."""
    ranks: int | None = None
    """Ranks that train together, each on a GPU; on CPUs, processes of one machine."""


class ForecastReport(Record):
    """A forecast, and the memory that it is compared with."""

    architecture: str
    forecast: MemoryForecast
    peak_bytes: int
    peak_phase: str
    needed_bytes: int
    """Memory that each rank needs."""
    available_bytes: int | None
    """Memory for each rank; None when this machine has no such device and no size was given."""
    fits: bool | None
    """Whether the needed memory is available; None when that is unknown."""
    largest: LargestFittingSizes | None
    """The largest sizes that fit, each with the others unchanged."""
    packed: bool
    local_ranks: int
    """Ranks that share the same memory."""

    @property
    def limits(self) -> dict[str, int | None]:
        """The largest value that fits, by setting of params.yaml."""
        if self.largest is None:
            return {}
        length = "train.pack_tokens" if self.packed else "prepare.max_tokens"
        return {
            "machine.micro_batch_size": self.largest.micro_batch_size,
            length: self.largest.row_tokens,
            "train.rank": self.largest.rank,
        }


def forecast(
    layout: ProjectLayout | None, settings: Settings, options: ForecastOptions = ForecastOptions()
) -> ForecastReport:
    """Forecast the memory of a training.

    Args:
        layout: the project; None outside one, where `options.base` is required.
        settings: the project's settings, or the defaults.
        options: what to forecast.

    Raises:
        SettingsError: no base is known, an option is out of range, or the train settings do not fit the base.
        BaseModelError: the base's configuration cannot be read.
    """
    numbers = {
        "--rows": options.rows, "--tokens": options.tokens, "--memory": options.memory_bytes, "--ranks": options.ranks,
    }  # fmt: skip
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise SettingsError(f"{name}: found {value}; expected 1 or more")
    report = _compute_forecast(layout, settings, options)
    if options.html is not None:
        headroom = None
        if report.available_bytes is not None:
            headroom = MemoryHeadroom(report.available_bytes, report.limits, report.local_ranks)
        files.write_atomic(options.html, training_page.write_forecast_page(report.forecast, headroom, (ACCURACY,)))
    return report


def _compute_forecast(layout: ProjectLayout | None, settings: Settings, options: ForecastOptions) -> ForecastReport:
    plan = model_spec.load(*_locate_base(layout, settings, options))
    settings, device = _apply_options(settings, options)
    train, machine = settings.train, settings.machine
    work, notes = _largest_workload(layout, settings, options)
    work = replace(work, device=device, local_ranks=work.local_ranks if device == "cpu" else 1)
    at_hand = options.memory_bytes or _available_bytes(device)
    available = None if at_hand is None else at_hand // work.local_ranks
    try:
        if available is not None and (way := _choose_fallback(plan, settings, work, available)):
            machine = way.machine
            notes = (f"Not even one row would fit otherwise: {way.cost}.", *notes)
        found = simulation.forecast(plan, train, machine, work)
        most = None if available is None else largest.find_largest_sizes(plan, train, machine, work, available)
    except RatchetError:
        raise
    except Exception as error:  # an unknown kind of model
        raise BaseModelError(
            f"{plan.class_name}: there is no forecast for this model, its step cannot be executed without data "
            f"({type(error).__name__}: {str(error)[:300]}); it may train all the same"
        ) from error
    found = found.model_copy(update={"notes": (*found.notes, *notes)})
    needed = found.needed_bytes(work.local_ranks)
    return ForecastReport(
        architecture=plan.class_name,
        forecast=found,
        peak_bytes=found.peak.total_bytes,
        peak_phase=found.peak.phase,
        needed_bytes=needed,
        available_bytes=available,
        fits=None if available is None else needed <= available,
        largest=most,
        packed=work.packed,
        local_ranks=work.local_ranks,
    )


def _apply_options(settings: Settings, options: ForecastOptions) -> tuple[Settings, Literal["cpu", "cuda"]]:
    """The settings with what the command line asks for, and the device."""
    machine = settings.machine
    device = options.device or (_local_device() if machine.device == "auto" else machine.device)
    changed: dict[str, Any] = {"device": device}
    if options.rows is not None:
        changed["micro_batch_size"] = options.rows
    if options.ranks is not None:
        changed |= {"gpus": options.ranks, "nodes": "1"}
    return settings.model_copy(update={"machine": machine.model_copy(update=changed)}), device


def _choose_fallback(
    plan: ModelSpec, settings: Settings, work: MemoryWorkload, available: int
) -> MemoryFallback | None:
    """The way to save memory that a run would choose when not one row fits; None if one fits, or nothing helps."""
    train, machine = settings.train, settings.machine
    least = simulation.forecast(plan, train, machine, work.single_row())
    if least.needed_bytes(work.local_ranks) <= available:
        return None
    return frugal.choose_fallback(plan, train, machine, work, available)


def _local_device() -> Literal["cpu", "cuda"]:
    return "cuda" if loading.pick_device("auto").type == "cuda" else "cpu"


def _locate_base(layout: ProjectLayout | None, settings: Settings, options: ForecastOptions) -> tuple[Path, bool]:
    """Where the base's configuration is, and whether code that came with it may run."""
    if options.base is not None:
        if not options.base.exists():
            raise SettingsError(f"--base {options.base}: no such file; name a model directory or its config.json")
        return options.base, False
    if layout is None:
        raise SettingsError("no Ratchet project here: name a base with --base (a model directory or its config.json)")
    if (location := base_model.locate_before_stage(layout, settings.base)) is not None:
        return location
    raise SettingsError(
        f"base.source: {settings.base.source}: stage base has not run, so the model's shape is not known; run "
        "`ratchet base`, or name a model directory or its config.json with --base"
    )


def _available_bytes(device: Literal["cpu", "cuda"]) -> int | None:
    """Memory that a training could have on this machine; None when it has no such device."""
    if device == "cpu":
        return capacity.measure_host().available_bytes
    return capacity.measure_device(loading.pick_device("cuda")).available_bytes if _local_device() == "cuda" else None


def _largest_workload(
    layout: ProjectLayout | None, settings: Settings, options: ForecastOptions
) -> tuple[MemoryWorkload, tuple[str, ...]]:
    """The largest micro-batch of a training, and what had to be assumed."""
    data = layout.data if layout is not None and layout.dataset_card.is_file() else None
    teacher, notes = _load_teacher_spec(layout, settings)
    work = microbatch_budget.make_work_estimator(data, loading.pick_device("cpu"), teacher)(settings)
    if options.rows is not None:
        work = replace(work, rows=options.rows)
    share = work.learned_tokens / work.row_tokens
    if options.tokens is not None:
        learned = max(1, round(share * options.tokens))
        work = replace(
            work, row_tokens=options.tokens, learned_tokens=learned, validation_tokens=options.tokens,
            validation_learned_tokens=learned,
        )  # fmt: skip
    if data is None:
        length = work.row_tokens
        notes = (
            *notes,
            f"No data is prepared: rows of {length:,} tokens, {share:.0%} of them learned from, were taken.",
        )
    elif options.tokens is not None:
        notes = (*notes, f"{share:.0%} of the tokens are learned from, as in the longest rows of the data.")
    if data is not None and options.base is not None:
        notes = (*notes, "Lengths of rows are those of the prepared data, in tokens of the project's own base.")
    return work, notes


def _load_teacher_spec(layout: ProjectLayout | None, settings: Settings) -> tuple[ModelSpec | None, tuple[str, ...]]:
    """The teacher that is in memory during training, and notes about it. Raises BaseModelError when it is missing."""
    if not settings.train.distill.is_online:
        return None, ()
    if layout is None:
        return None, ("train.distill.teacher is not counted: its path is relative to a project.",)
    found = model_spec.load(teacher_reference.teacher_directory(layout, settings.train))
    return found, (f"The teacher runs during training, so its memory is counted: {found.parameters:,} parameters.",)
