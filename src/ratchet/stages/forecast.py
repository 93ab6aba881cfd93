"""`ratchet forecast`: the memory that a training needs, by part and phase, and the largest sizes that fit.

Loads no weights.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ratchet.config.settings import Settings
from ratchet.errors import BaseModelError, RatchetError, SettingsError
from ratchet.models import base_model, loading, model_spec, teacher_reference
from ratchet.models.memory import capacity
from ratchet.models.memory import forecast as memory_forecast
from ratchet.models.memory.forecast import (
    LargestFittingSizes,
    MemoryFallback,
    MemoryForecastBuilder,
    MemoryWorkload,
)
from ratchet.models.model_spec import ModelSpec
from ratchet.reports import training_page
from ratchet.reports.training_page import MemoryHeadroom
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.training import MemoryForecast
from ratchet.training import microbatch_budget

ACCURACY = "`python benchmarks/memory.py` compares such forecasts with measured training runs."

MAX_ROWS, MAX_TOKENS, MAX_RANKS = 10_000, 10_000_000, 10_000
"""Greatest values of options. With much larger ones, sizes overflow and lists of rows fill the memory."""
MAX_POSITIONS = 10**9
"""Greatest number of tokens in a micro-batch; the forecast of a larger one takes too long."""


@dataclass(frozen=True)
class ForecastOptions:
    """Inputs of a forecast. Where an input is None, the project's settings apply."""

    base: Path | None = None
    """A model directory, or a single config.json."""
    rows: int | None = None
    """Number of rows of a micro-batch."""
    tokens: int | None = None
    """Number of tokens of the longest row."""
    device: Literal["cpu", "cuda"] | None = None
    memory_bytes: int | None = None
    """Memory of the device; None: the available memory of this machine."""
    html: Path | None = None
    """HTML page to write."""
    ranks: int | None = None
    """Number of ranks that train together: one per GPU, or processes of one machine on CPUs."""


class ForecastReport(Record):
    """A forecast, compared with the available memory."""

    architecture: str
    forecast: MemoryForecast
    peak_bytes: int
    peak_phase: str
    needed_bytes: int
    """Memory that each rank needs."""
    available_bytes: int | None
    """Available memory for each rank; None if this machine has no such device and no size was given."""
    fits: bool | None
    """Whether the needed memory is available; None if that is unknown."""
    largest: LargestFittingSizes | None
    """The largest size of each kind that fits while the other sizes stay the same."""
    packed: bool
    local_ranks: int
    """Number of ranks that share the same memory."""

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
        options: inputs that replace the settings.

    Raises:
        SettingsError: no base is known, an option is out of range, or the train settings do not fit the base.
        BaseModelError: the base's configuration cannot be read.
    """
    numbers = {
        "--rows": (options.rows, MAX_ROWS), "--tokens": (options.tokens, MAX_TOKENS),
        "--memory": (options.memory_bytes, None), "--ranks": (options.ranks, MAX_RANKS),
    }  # fmt: skip
    for name, (value, greatest) in numbers.items():
        if value is not None and (value < 1 or value > (greatest or value)):
            expected = "1 or more" if greatest is None else f"1 to {greatest:,}"
            raise SettingsError(f"{name}: found {value:,}; expected {expected}")
    report = _compute_forecast(layout, settings, options)
    if options.html is not None:
        headroom = None
        if report.available_bytes is not None:
            headroom = MemoryHeadroom(report.available_bytes, report.limits, report.local_ranks)
        files.write_atomic(options.html, training_page.write_forecast_page(report.forecast, headroom, (ACCURACY,)))
    return report


def _compute_forecast(layout: ProjectLayout | None, settings: Settings, options: ForecastOptions) -> ForecastReport:
    spec = model_spec.load(*locate_base(layout, settings, options.base))
    device = options.device or (_local_device() if settings.machine.device == "auto" else settings.machine.device)
    changes: dict[str, Any] = {"device": device}
    if options.rows is not None:
        changes["micro_batch_size"] = options.rows
    if options.ranks is not None:
        changes |= {"gpus": options.ranks, "nodes": "1"}
    train, machine = settings.train, settings.machine.model_copy(update=changes)
    settings = settings.model_copy(update={"machine": machine})
    work, notes = _largest_workload(layout, settings, options)
    work = replace(work, device=device, local_ranks=work.local_ranks if device == "cpu" else 1)
    device_bytes = options.memory_bytes or _available_bytes(device)
    available = None if device_bytes is None else device_bytes // work.local_ranks
    try:
        builder = MemoryForecastBuilder(spec, train, machine, work)
        result, largest = builder.forecast(), None
        if available is not None:
            is_too_large = result.needed_bytes(work.local_ranks) > available
            if is_too_large and (fallback := _choose_fallback(builder, available)):
                notes = (f"Not even one row would fit otherwise: {fallback.cost}.", *notes)
                builder = MemoryForecastBuilder(spec, train, fallback.machine, work)
                result = builder.forecast()
            needed = result.needed_bytes(work.local_ranks)
            largest = memory_forecast.find_largest_sizes(builder, needed, available)
    except RatchetError:
        raise
    except Exception as error:  # an unknown kind of model
        raise BaseModelError(
            f"{spec.class_name}: there is no forecast for this model, its step cannot be executed without data "
            f"({type(error).__name__}: {str(error)[:300]}); training it may still be possible"
        ) from error
    result = result.model_copy(update={"notes": (*result.notes, *notes)})
    needed = result.needed_bytes(work.local_ranks)
    return ForecastReport(
        architecture=spec.class_name,
        forecast=result,
        peak_bytes=result.peak.total_bytes,
        peak_phase=result.peak.phase,
        needed_bytes=needed,
        available_bytes=available,
        fits=None if available is None else needed <= available,
        largest=largest,
        packed=work.packed,
        local_ranks=work.local_ranks,
    )


def _choose_fallback(builder: MemoryForecastBuilder, available: int) -> MemoryFallback | None:
    """Return the fallback that a run would choose if not even one row fits; None if a row fits or no fallback helps."""
    work = builder.work
    if builder.with_work(work.single_row()).forecast().needed_bytes(work.local_ranks) <= available:
        return None
    return memory_forecast.choose_fallback(builder.spec, builder.settings, builder.machine, work, available)


def _local_device() -> Literal["cpu", "cuda"]:
    return "cuda" if loading.pick_device("auto").type == "cuda" else "cpu"


def locate_base(layout: ProjectLayout | None, settings: Settings, base: Path | None) -> tuple[Path, bool]:
    """Return the location of the base's configuration, and whether the base's own code may run. `base`: see --base."""
    if base is not None:
        if not base.exists():
            raise SettingsError(f"--base {base}: no such file; name a model directory or its config.json")
        return base, False
    if layout is None:
        raise SettingsError("no Ratchet project here: name a base with --base (a model directory or its config.json)")
    if (location := base_model.locate_before_stage(layout, settings.base)) is not None:
        return location
    raise SettingsError(
        f"base.source: {settings.base.source}: stage base has not run, so the model's shape is not known; run "
        "`ratchet base`, or name a model directory or its config.json with --base"
    )


def _available_bytes(device: Literal["cpu", "cuda"]) -> int | None:
    """Return the memory that a training could use on this machine; None if it has no such device."""
    if device == "cpu":
        return capacity.measure_host().available_bytes
    return capacity.measure_device(loading.pick_device("cuda")).available_bytes if _local_device() == "cuda" else None


def _largest_workload(
    layout: ProjectLayout | None, settings: Settings, options: ForecastOptions
) -> tuple[MemoryWorkload, tuple[str, ...]]:
    """Return the largest micro-batch of a training, and notes about assumptions."""
    data = layout.data if layout is not None and layout.dataset_card.is_file() else None
    teacher, notes = load_teacher_spec(layout, settings)
    work = microbatch_budget.make_work_estimator(data, loading.pick_device("cpu"), teacher)(settings)
    if options.rows is not None:
        work = replace(work, rows=options.rows)
    share = work.learned_tokens / work.row_tokens
    if (positions := work.rows * (options.tokens or work.row_tokens)) > MAX_POSITIONS:
        raise SettingsError(
            f"{work.rows:,} rows of {options.tokens or work.row_tokens:,} tokens: a micro-batch has {positions:,} "
            f"tokens; expected at most {MAX_POSITIONS:,}: lower --tokens, or --rows (default: machine.micro_batch_size)"
        )
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
            f"No data is prepared: the forecast assumes rows of {length:,} tokens and learns from {share:.0%} of them.",
        )
    elif options.tokens is not None:
        notes = (*notes, f"The forecast learns from {share:.0%} of the tokens, as in the longest rows of the data.")
    if data is not None and options.base is not None:
        notes = (*notes, "The lengths of rows are those of the prepared data, in tokens of the project's own base.")
    return work, notes


def load_teacher_spec(layout: ProjectLayout | None, settings: Settings) -> tuple[ModelSpec | None, tuple[str, ...]]:
    """Load the shape of a teacher that runs during training. Raises BaseModelError if it is missing.

    Returns the shape, or None without such a teacher, and notes.
    """
    if not settings.train.distill.is_online:
        return None, ()
    if layout is None:
        return None, ("train.distill.teacher is not counted: its path is relative to a project.",)
    spec = model_spec.load(teacher_reference.teacher_directory(layout, settings.train))
    return spec, (f"The teacher runs during training, so its memory is counted: {spec.parameters:,} parameters.",)
