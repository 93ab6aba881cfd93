"""How much memory a training will need, part by part and phase by phase, and what would fit; no weight is loaded."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ratchet.config.schema import Settings
from ratchet.config.units import choose_unit, format_bytes
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
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.training import MemoryForecast, PhaseMemory
from ratchet.training import microbatch_budget

BAR_COLUMNS = 60
BLOCKS = "█▒▓░▚▄▞▀▙▐▜▌"
"""Of the parts of a bar, told apart without colours; they come again when there are more parts."""

LEGEND_COLUMNS = 90

ACCURACY = (
    "How close such forecasts come to what is measured: docs/memory.md; `python benchmarks/memory.py` measures it."
)


@dataclass(frozen=True)
class ForecastOptions:
    """What the command line asks for; None is what the project says."""

    base: Path | None = None
    """A model directory, or a config.json alone."""
    rows: int | None = None
    """Sequences of a micro-batch."""
    tokens: int | None = None
    """Of the longest sequence."""
    device: Literal["cpu", "cuda"] | None = None
    memory_bytes: int | None = None
    """Of the device; None: what this machine has at hand."""
    as_json: bool = False
    html: Path | None = None
    """A page to write, beside the answer."""
    ranks: int | None = None
    """That train together, each on a GPU; on CPUs, processes of one machine."""


@dataclass(frozen=True)
class ForecastResult:
    """The forecast and what it is held against."""

    architecture: str
    forecast: MemoryForecast
    available_bytes: int | None
    """For each rank; None when the device is not here and nobody said how large it is."""
    largest: LargestFittingSizes | None
    packed: bool
    sharing: int
    """Ranks that live in the same memory."""

    @property
    def needed_bytes(self) -> int:
        """By each rank."""
        return self.forecast.needed_bytes(self.sharing)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the memory at hand, as far as that is known."""
        return None if self.available_bytes is None else self.needed_bytes <= self.available_bytes

    @property
    def limits(self) -> dict[str, int | None]:
        """The largest that fits, by what it is called in params.yaml."""
        if self.largest is None:
            return {}
        length = "train.pack_tokens" if self.packed else "prepare.max_tokens"
        return {
            "machine.micro_batch_rows": self.largest.micro_batch_rows,
            length: self.largest.row_tokens,
            "train.rank": self.largest.rank,
        }


def forecast(layout: ProjectLayout | None, settings: Settings, options: ForecastOptions) -> str:
    """The verb.

    Args:
        layout: of the project; None outside of one, where `options.base` must be given.
        settings: of the project, or the defaults.
        options: of the command line.

    Raises:
        SettingsError: no base is known, an option is no sensible number, or train settings do not fit the base.
        BaseModelError: the base's configuration cannot be read.
    """
    numbers = {
        "--rows": options.rows, "--tokens": options.tokens, "--memory": options.memory_bytes, "--ranks": options.ranks,
    }  # fmt: skip
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise SettingsError(f"{name}: {value}: write a number from 1 on")
    answer = _compute_forecast(layout, settings, options)
    if options.html is not None:
        room = None
        if answer.available_bytes is not None:
            room = MemoryHeadroom(answer.available_bytes, answer.limits, answer.sharing)
        files.write_atomic(options.html, training_page.write_forecast_page(answer.forecast, room, (ACCURACY,)))
    return _format_json(answer) if options.as_json else _format_text(answer)


def _compute_forecast(layout: ProjectLayout | None, settings: Settings, options: ForecastOptions) -> ForecastResult:
    plan = model_spec.load(*_locate_base(layout, settings, options))
    settings, device = _apply_options(settings, options)
    train, machine = settings.train, settings.machine
    work, notes = _largest_workload(layout, settings, options)
    work = replace(work, device=device, sharing=work.sharing if device == "cpu" else 1)
    at_hand = options.memory_bytes or _available_bytes(device)
    available = None if at_hand is None else at_hand // work.sharing
    try:
        if available is not None and (way := _choose_fallback(plan, settings, work, available)):
            machine = way.machine
            notes = (f"Not even one row would fit otherwise: {way.cost}.", *notes)
        found = simulation.forecast(plan, train, machine, work)
        most = None if available is None else largest.find_largest_sizes(plan, train, machine, work, available)
    except RatchetError:
        raise
    except Exception as error:  # a model of a kind that nobody has seen
        raise BaseModelError(
            f"{plan.class_name}: there is no forecast for this model, its step cannot be executed without data "
            f"({type(error).__name__}: {str(error)[:300]}); it may train all the same"
        ) from error
    found = found.model_copy(update={"notes": (*found.notes, *notes)})
    return ForecastResult(plan.class_name, found, available, most, work.packed, work.sharing)


def _apply_options(settings: Settings, options: ForecastOptions) -> tuple[Settings, Literal["cpu", "cuda"]]:
    """The settings with what the command line asks for, and the device."""
    machine = settings.machine
    device = options.device or (_local_device() if machine.device == "auto" else machine.device)
    changed: dict[str, Any] = {"device": device}
    if options.rows is not None:
        changed["micro_batch_rows"] = options.rows
    if options.ranks is not None:
        changed |= {"gpus": options.ranks, "nodes": "1"}
    return settings.model_copy(update={"machine": machine.model_copy(update=changed)}), device


def _choose_fallback(
    plan: ModelSpec, settings: Settings, work: MemoryWorkload, available: int
) -> MemoryFallback | None:
    """What a run would choose where not even one row fits; None where one does, or nothing helps."""
    train, machine = settings.train, settings.machine
    least = simulation.forecast(plan, train, machine, work.single_row())
    if least.needed_bytes(work.sharing) <= available:
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
    wanted = settings.base
    if layout.base_card.is_file() and (card := BaseCard.load(layout.base_card)).source == wanted.source:
        return base_model.locate(layout, card), card.remote_code
    directory = (layout.root / Path(wanted.source).expanduser()).resolve()
    if wanted.source != base_model.TINY and directory.is_dir():
        return directory, wanted.trust_remote_code is not None
    raise SettingsError(
        f"base.source: {wanted.source}: stage base has not run, so the model's shape is not known; run `ratchet base`, "
        "or name a model directory or its config.json with --base"
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
    """The one that would be in memory, and what is to be said of it. Raises BaseModelError where it is gone."""
    if not settings.train.distill.stays:
        return None, ()
    if layout is None:
        return None, ("train.distill.teacher: not counted, for it lies in a project, and this is none.",)
    found = model_spec.load(teacher_reference.teacher_directory(layout, settings.train))
    return found, (f"The teacher is asked during training, so it is in memory too: {found.parameters:,} parameters.",)


# --------------------------------------------------------------------------------------------------------- the answer


def _format_json(answer: ForecastResult) -> str:
    """Equal questions give equal text, but for `available_bytes`, which is the machine's."""
    return json.dumps(
        {
            "format": 1,
            "architecture": answer.architecture,
            "peak_bytes": answer.forecast.peak.total_bytes,
            "peak_phase": answer.forecast.peak.phase,
            "available_bytes": answer.available_bytes,
            "fits": answer.fits,
            "largest": None if answer.largest is None else asdict(answer.largest),
            "forecast": answer.forecast.model_dump(mode="json"),
        },
        indent=2,
    )


def _format_text(answer: ForecastResult) -> str:
    found = answer.forecast
    share = found.trainable_parameters / max(1, found.total_parameters)
    lines = [
        f"{answer.architecture}: {', '.join(training_page.describe_forecast(found))}",
        f"{found.trainable_parameters:,} of {found.total_parameters:,} parameters learn ({share:.2%})",
        "",
        *_format_table(found),
        "",
        *_draw_bars(found),
        "",
        *_format_verdict(answer),
        *(f"note: {note}" for note in found.notes),
        ACCURACY,
    ]
    return "\n".join(lines)


def _memory_part_names(found: MemoryForecast) -> list[str]:
    return list(dict.fromkeys(part for phase in found.phases for part in phase.parts))


def _format_table(found: MemoryForecast) -> list[str]:
    """Parts by phase, in one unit."""
    size, unit = choose_unit(found.peak.total_bytes)
    heads = [phase.phase.replace("_", " ") for phase in found.phases]
    rows = [(part, [phase.parts.get(part, 0) for phase in found.phases]) for part in _memory_part_names(found)]
    rows.append(("in all", [phase.total_bytes for phase in found.phases]))
    first = max(len(name) for name, _ in [*rows, (unit, [])])
    lines = [f"{unit:<{first}}  " + "  ".join(f"{head:>10}" for head in heads)]
    for name, counts in rows:
        cells = (f"{count / size:,.2f}" if count else "-" for count in counts)
        lines.append(f"{name:<{first}}  " + "  ".join(f"{cell:>10}" for cell in cells))
    return lines


def _draw_bars(found: MemoryForecast) -> list[str]:
    """A bar for each phase, all on the scale of the highest, and what its blocks mean."""
    blocks = {part: BLOCKS[number % len(BLOCKS)] for number, part in enumerate(_memory_part_names(found))}
    lines = [
        f"{one.phase.replace('_', ' '):<11}{_draw_bar(one, blocks, found.peak.total_bytes):<{BAR_COLUMNS}}  "
        f"{format_bytes(one.total_bytes):>10}"
        for one in found.phases
    ]
    return [*lines, *_wrap_entries([f"{block} {part}" for part, block in blocks.items()])]


def _draw_bar(one: PhaseMemory, blocks: dict[str, str], most: int) -> str:
    """Each border between two parts stands where it belongs, so that rounding does not add up."""
    drawn, sum_bytes = "", 0
    for part, block in blocks.items():
        sum_bytes += one.parts.get(part, 0)
        drawn += block * (round(BAR_COLUMNS * sum_bytes / max(1, most)) - len(drawn))
    return drawn


def _wrap_entries(entries: Sequence[str]) -> list[str]:
    lines = [""]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + len(entry) + 3 > LEGEND_COLUMNS:
            lines.append("")
        lines[-1] += f"   {entry}" if lines[-1] else entry
    return lines


def _format_verdict(answer: ForecastResult) -> list[str]:
    peak = answer.forecast.peak
    needed = f"peak {format_bytes(peak.total_bytes)} in phase {peak.phase.replace('_', ' ')}"
    host = (
        [f"memory of the host: {format_bytes(answer.forecast.host_bytes)}"] if answer.forecast.device == "cuda" else []
    )
    if answer.available_bytes is None:
        return [f"{needed}; no GPU is here to compare it with: name its memory with --memory, such as 24GiB", *host]
    each = f" for each of {answer.sharing} ranks" if answer.sharing > 1 else ""
    left = answer.available_bytes - answer.needed_bytes
    fits = (
        f"it fits, {format_bytes(left)} are left"
        if left >= 0
        else f"it does not fit, {format_bytes(-left)} are missing"
    )
    limits = ", ".join(
        f"{name} {'(not even 1)' if count is None else f'{count:,}'}" for name, count in answer.limits.items()
    )
    return [
        f"{needed}, {format_bytes(answer.available_bytes)} at hand{each}: {fits}",
        *host,
        f"largest that fits, each for itself: {limits}",
        "(tried: rows up to train.batch_rows, tokens up to the base's positions, rank up to a matrix's smaller side)",
    ]
