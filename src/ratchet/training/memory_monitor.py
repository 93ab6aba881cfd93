"""Forecasts the memory of a training before anything is loaded, and measures it phase by phase."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ratchet.config import units
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows, divide_sequences, list_rows
from ratchet.errors import DamagedFileError, InsufficientMemoryError, RatchetError
from ratchet.models import oom
from ratchet.models.memory import capacity, forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal
from ratchet.storage.records.training import MemoryForecast, Phase

REPORT_AGAIN_RATIO = 1.02
"""Growth of a phase's peak that is reported: a phase that is entered again is reported again only if its peak is more
than this factor times the reported peak."""
SAFE_SHARE = 0.9
"""Share of the available memory that the chosen micro-batch may need by the forecast, because forecasts have been up to
a tenth too low."""


@dataclass
class PhaseMemoryPeaks:
    """Peaks of one phase, in bytes."""

    peak_bytes: int = 0
    """On a GPU, all memory in use on the device, including other processes; on a CPU, the same as `host_bytes`."""
    allocated_bytes: int = 0
    host_bytes: int = 0


class MemoryMonitor:
    """Divides the time of a worker into consecutive phases, and writes the memory peak of each phase to the journal."""

    def __init__(self, journal: Journal, device: torch.device, warnings: Sequence[float]) -> None:
        self.journal = journal
        self.device = device
        self.peaks: dict[Phase, PhaseMemoryPeaks] = {}
        self._pending_warnings = sorted(warnings)
        self._phase: Phase | None = None
        self._total_bytes = capacity.measure_device(device).total_bytes
        self._begin("baseline")

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`; do nothing if it is the current phase."""
        if phase != self._phase:
            self.close()
            self._begin(phase)

    def leave(self, phase: Phase) -> None:
        """End `phase` if it is the current phase."""
        if phase == self._phase:
            self.close()

    def close(self) -> None:
        """End the current phase and report its peak."""
        if self._phase is None:
            return
        phase, self._phase = self._phase, None
        peaks, reported = self._measure(), self.peaks.get(phase)
        if reported is not None and peaks.peak_bytes <= REPORT_AGAIN_RATIO * reported.peak_bytes:
            return
        self.peaks[phase] = peaks
        self.journal.append(
            "memory_peak", phase=phase, peak_bytes=peaks.peak_bytes, allocated_bytes=peaks.allocated_bytes,
            host_bytes=peaks.host_bytes, device=self.device.type, device_bytes=self._total_bytes,
        )  # fmt: skip
        share = peaks.peak_bytes / self._total_bytes
        if exceeded := [limit for limit in self._pending_warnings if share >= limit]:
            self._pending_warnings = [limit for limit in self._pending_warnings if share < limit]
            where = "GPU" if self.device.type == "cuda" else "machine"
            self.journal.append(
                "alert",
                text=f"memory: {share:.0%} of the {where}'s {units.format_bytes(self._total_bytes)} are in use "
                f"in phase {phase} (the alert is due at {max(exceeded):.0%})",
            )

    def read_used_share(self) -> float:
        """Return the used share of the device's memory now; on a GPU, including the cache of torch's allocator, which
        holds what the largest step needed, and other processes."""
        now = capacity.measure_device(self.device)
        return 1 - (now.available_bytes - capacity.allocated_bytes(self.device)) / now.total_bytes

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        capacity.reset_peak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _measure(self) -> PhaseMemoryPeaks:
        host = capacity.peak_resident_bytes()
        if self.device.type != "cuda":
            return PhaseMemoryPeaks(host, 0, host)
        reserved = torch.cuda.max_memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        # Memory that belongs to no tensor: CUDA context, work spaces of libraries, other processes.
        other_bytes = max(0, total - free - torch.cuda.memory_reserved(self.device))
        return PhaseMemoryPeaks(reserved + other_bytes, torch.cuda.max_memory_allocated(self.device), host)


# The forecast before anything is loaded.


def compute_largest_work(
    plan: BatchPlan, train: TokenRows, validation: TokenRows, machine: Machine, device: torch.device
) -> MemoryWorkload:
    """Return the largest micro-batches that these rows can form, which are the micro-batches of the longest
    sequences."""
    answers = plan.rows_per_example
    longest = _longest_rows(train, machine.micro_batch_size, answers)
    if plan.batching == "packed":
        steps = range(-(-plan.sequences // plan.batch_size))
        packs = [sequence for step in steps for sequence in plan.batch(step)]
        longest = sorted(packs, key=train.count_tokens, reverse=True)[: machine.micro_batch_size]
    sequences = _limit_to_micro_batch(longest, train, machine)
    longest = _longest_rows(validation, machine.micro_batch_size, answers)
    validation_sequences = divide_sequences(_limit_to_micro_batch(longest, validation, machine))
    if plan.batching != "packed":
        sequences = divide_sequences(sequences)
    return MemoryWorkload(
        rows=len(sequences),
        row_tokens=max(map(train.count_tokens, sequences)),
        learned_tokens=_count_trained_positions(train, sequences),
        packed=any(len(sequence) > 1 for sequence in sequences),
        device="cuda" if device.type == "cuda" else "cpu",
        validation_rows=len(validation_sequences),
        validation_tokens=max(map(validation.count_tokens, validation_sequences), default=1),
        validation_learned_tokens=_count_trained_positions(validation, validation_sequences),
        rows_per_example=1 if plan.batching == "packed" else answers,
    )


def _limit_to_micro_batch(sequences: list[list[int]], rows: TokenRows, machine: Machine) -> list[list[int]]:
    """Return as many sequences as a micro-batch may contain. The first one must be the longest; all are padded to
    it."""
    limit = machine.micro_batch_tokens
    if limit is None or not sequences:
        return sequences
    return sequences[: max(1, limit // max(1, rows.count_tokens(sequences[0])))]


def _longest_rows(rows: TokenRows, count: int, rows_per_example: int) -> list[list[int]]:
    """Return the rows of the examples with the longest rows."""
    lengths = rows.lengths.reshape(-1, rows_per_example).max(axis=1)
    return [list_rows([int(example)], rows_per_example) for example in (-lengths).argsort(kind="stable")[:count]]


def _count_trained_positions(rows: TokenRows, sequences: Sequence[Sequence[int]]) -> int:
    """Return the average number of trained positions of a sequence; only these positions have logits."""
    return max(1, -(-sum(map(rows.count_trained, sequences)) // max(1, len(sequences))))


@dataclass(frozen=True)
class InitialMemoryPlan:
    """Memory options of a training's first step, chosen by the forecast."""

    micro_batch_tokens: int | None = None
    """Limit of padded tokens per micro-batch on a CPU, if the configured micro-batch does not fit; None: no limit.

    A GPU needs no limit, because an allocation that does not fit fails, and then the micro-batch is made smaller. On a
    CPU, such an allocation succeeds, because Linux overcommits memory, and later the OOM killer kills a process.
    """
    recompute: bool = False
    shard_base: bool = False
    """Whether the base is sharded among all ranks. This is the choice of one rank by its own memory; if any rank
    chooses to shard, all ranks do (worker.py)."""


def require_memory(
    paths: RunPaths, base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, journal: Journal
) -> InitialMemoryPlan:
    """Write the forecast to the journal once per run, and refuse a training that does not fit even row by row.

    Smaller micro-batches are chosen first, because they cost the least time. If even a single row would not fit,
    activations are recomputed (machine.activation_checkpointing), the base is sharded (machine.shard_base), or both.
    Only a setting that is `auto` is changed in this way. Raises InsufficientMemoryError if the training does not fit,
    and `machine.on_insufficient_memory` is `refuse`.
    """
    if machine.shard_base is True and work.ranks == 1:
        journal.append("notice", text="machine.shard_base: true has no effect with a single rank")
    run_forecast = _get_forecast(paths, base, settings, machine, work, journal)
    if run_forecast is None:
        return _make_initial_plan(machine, work)
    # An earlier attempt may have chosen these options; then they are in the run's forecast.
    options = {name: True for name in ("activation_checkpointing", "shard_base") if getattr(run_forecast, name)}
    machine = machine.model_copy(update=options)
    available = capacity.measure_device(torch.device(work.device)).available_bytes // work.local_ranks
    available -= work.reserved_bytes
    peak = run_forecast.needed_bytes(work.local_ranks)
    if peak <= available:
        return _make_initial_plan(machine, work)
    minimum = _minimum_bytes(base, settings, machine, work)
    if minimum <= available:
        rows = _find_fitting_rows(base, settings, machine, work, available)
        plan = "micro-batches shrink when they do not fit" if rows is None else f"starting with {rows} rows"
        journal.append(
            "notice",
            text=f"memory: {work.rows} rows at a time would need {units.format_bytes(peak)}, "
            f"{units.format_bytes(available)} are available; {plan}",
        )
        return _make_initial_plan(machine, work, None if rows is None else rows * work.row_tokens)
    if fallback := forecast.choose_fallback(base, settings, machine, work, available):
        text = f"({units.format_bytes(minimum)} of {units.format_bytes(available)}): {fallback.cost}"
        journal.append("notice", text=f"memory: a single row would not fit {text}")
        return require_memory(paths, base, settings, fallback.machine, work, journal)
    for fallback in forecast.list_fallbacks(settings, machine, work.ranks):
        machine = fallback.machine  # the last fallback needs the least memory
    minimum = _minimum_bytes(base, settings, machine, work)
    text = (
        f"this training needs about {units.format_bytes(minimum)} even with one row at a time, and "
        f"{units.format_bytes(available)} are available.\n"
        f"{oom.describe_alternatives(base, settings, machine, work.single_row())}"
    )
    if machine.on_insufficient_memory == "refuse":
        raise InsufficientMemoryError(
            f"{text}\nNothing was loaded. To train anyway, run `ratchet train --force` or set "
            "machine.on_insufficient_memory: report",
            minimum,
            available,
        )
    journal.append("alert", text=text)
    return _make_initial_plan(machine, work)


def _make_initial_plan(
    machine: Machine, work: MemoryWorkload, micro_batch_tokens: int | None = None
) -> InitialMemoryPlan:
    recompute = machine.activation_checkpointing is True
    return InitialMemoryPlan(micro_batch_tokens, recompute, forecast.is_base_sharded(machine, work.ranks))


def _minimum_bytes(base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload) -> int:
    """Return the bytes that a training with one row at a time needs on one rank."""
    return forecast.forecast(base, settings, machine, work.single_row()).needed_bytes(work.local_ranks)


def _find_fitting_rows(
    base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, available: int
) -> int | None:
    """Return how many rows fit into SAFE_SHARE of the memory, halved until they do; None on a GPU, where an allocation
    that does not fit fails and the micro-batch is then made smaller."""
    if work.device == "cuda":
        return None
    rows = work.rows
    while rows > 1:
        rows //= 2
        fewer = replace(work, rows=rows, validation_rows=min(rows, work.validation_rows))
        needed = forecast.forecast(base, settings, machine, fewer).needed_bytes(work.local_ranks)
        if needed <= SAFE_SHARE * available:
            break
    return rows


def suggest_memory_changes(
    base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, tokens: int
) -> str:
    """Return advice for a row of `tokens` tokens that did not fit; without numbers if no forecast is possible."""
    single = replace(work.single_row(), row_tokens=tokens, learned_tokens=min(tokens, work.learned_tokens))
    try:
        return oom.describe_alternatives(base, settings, machine, single)
    except Exception as error:  # this error must not replace the message about memory
        return (
            "Set machine.activation_checkpointing: true, or a smaller prepare.max_tokens, train.rank or base model "
            f"(no forecast is possible for this model: {type(error).__name__}: {str(error)[:200]})."
        )


def _get_forecast(
    paths: RunPaths, base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, journal: Journal
) -> MemoryForecast | None:
    """Return the saved forecast of this workload, or make and save one; None if no forecast is possible."""
    path = paths.forecast
    if path.exists():
        try:
            known = MemoryForecast.load(path)
        except DamagedFileError as error:
            journal.append("notice", text=f"{error}")
        else:
            if _is_forecast_of(known, work, machine):
                return known
    try:
        new_forecast = forecast.forecast(base, settings, machine, work)
    except RatchetError:
        raise
    except Exception as error:  # for an unknown kind of model, the forecast may fail although training works
        journal.append("notice", text=f"no memory forecast for this model ({type(error).__name__}: {str(error)[:300]})")
        return None
    new_forecast.save(path)
    available = capacity.measure_device(torch.device(work.device)).available_bytes // work.local_ranks
    journal.append("memory_forecast", forecast=new_forecast.model_dump(mode="json"), available_bytes=available)
    return new_forecast


def _is_forecast_of(known: MemoryForecast, work: MemoryWorkload, machine: Machine) -> bool:
    """Return whether a forecast describes this workload, with options that the settings allow."""
    size = (known.device, known.ranks, known.rows, known.row_tokens, known.learned_tokens)
    shard_base = machine.shard_base if work.ranks > 1 else False
    pairs = (machine.activation_checkpointing, known.activation_checkpointing), (shard_base, known.shard_base)
    is_same_size = size == (work.device, work.ranks, work.rows, work.row_tokens, work.learned_tokens)
    return is_same_size and all(setting in ("auto", choice) for setting, choice in pairs)
