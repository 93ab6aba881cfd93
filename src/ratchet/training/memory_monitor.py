"""How much memory a training holds, phase by phase: measured, told to the journal, and compared with the forecast."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ratchet.config import units
from ratchet.config.schema import Machine
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.errors import DamagedFileError, InsufficientMemoryError, RatchetError
from ratchet.models import oom
from ratchet.models.memory import capacity, forecast, ranks
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal
from ratchet.storage.records.training import MemoryForecast, Phase

TOLD_AGAIN = 1.02
"""A phase that comes again is told again only when it held this many times what it held before."""


@dataclass
class PhaseMemoryPeaks:
    """What one phase has held at most, in bytes."""

    peak_bytes: int = 0
    allocated_bytes: int = 0
    """Of tensors, on a GPU."""
    host_bytes: int = 0
    """Resident memory of the process."""


class MemoryMonitor:
    """Divides the time of a worker into phases. One phase at a time; each begins where the one before ends."""

    def __init__(self, journal: Journal, device: torch.device, warnings: Sequence[float]) -> None:
        self.journal = journal
        self.device = device
        self.found: dict[Phase, PhaseMemoryPeaks] = {}
        self._left = sorted(warnings)
        self._phase: Phase | None = None
        self._total_bytes = capacity.measure_device(device).total_bytes
        self._begin("baseline")

    def enter(self, phase: Phase) -> None:
        """The phase before is over, and told; nothing is done when it is the same."""
        if phase != self._phase:
            self.close()
            self._begin(phase)

    def leave(self, phase: Phase) -> None:
        """This phase is over, if it is the one that we are in."""
        if phase == self._phase:
            self.close()

    def close(self) -> None:
        """The last phase is over."""
        if self._phase is None:
            return
        phase, self._phase = self._phase, None
        now, known = self._measure(), self.found.get(phase)
        if known is not None and now.peak_bytes <= TOLD_AGAIN * known.peak_bytes:
            return
        self.found[phase] = now
        self.journal.append(
            "memory", phase=phase, peak_bytes=now.peak_bytes, allocated_bytes=now.allocated_bytes,
            host_bytes=now.host_bytes, device=self.device.type, device_bytes=self._total_bytes,
        )  # fmt: skip
        self._warn(phase, now.peak_bytes)

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
        # Context and libraries' work spaces: what is in use and no tensor's. Of other processes too, if there are any.
        beside = max(0, total - free - torch.cuda.memory_reserved(self.device))
        return PhaseMemoryPeaks(reserved + beside, torch.cuda.max_memory_allocated(self.device), host)

    def _warn(self, phase: Phase, used: int) -> None:
        share = used / self._total_bytes
        passed = [limit for limit in self._left if share >= limit]
        self._left = [limit for limit in self._left if share < limit]
        if passed:
            where = "GPU" if self.device.type == "cuda" else "machine"
            self.journal.append(
                "alert",
                text=f"memory: {share:.0%} of the {where}'s {units.format_bytes(self._total_bytes)} are in use "
                f"in phase {phase} (warned of from {max(passed):.0%} on, machine.memory_warnings)",
            )


# Whether this training fits, asked before anything is loaded: the forecast of memory, in a run.

WELL = 0.9
"""Of the memory at hand: forecasts have been a tenth too low."""


def compute_largest_work(
    plan: BatchPlan, train: TokenRows, validation: TokenRows, machine: Machine, device: torch.device
) -> MemoryWorkload:
    """The largest micro-batches that these rows can make: those of the longest sequences."""
    sequences = _limit_to_micro_batch(_longest_sequences(plan, train, machine.micro_batch_rows), train, machine)
    checked = _limit_to_micro_batch(_longest_rows(validation, machine.micro_batch_rows), validation, machine)
    return MemoryWorkload(
        rows=len(sequences),
        row_tokens=max(map(train.tokens, sequences)),
        learned_tokens=_count_trained_positions(train, sequences),
        packed=any(len(sequence) > 1 for sequence in sequences),
        device="cuda" if device.type == "cuda" else "cpu",
        validation_rows=len(checked),
        validation_tokens=max(map(validation.tokens, checked), default=1),
        validation_learned_tokens=_count_trained_positions(validation, checked),
    )


def _longest_sequences(plan: BatchPlan, rows: TokenRows, count: int) -> list[list[int]]:
    if plan.batching != "packed":
        return _longest_rows(rows, count)
    steps = range(-(-plan.sequences // plan.batch_rows))
    packs = [sequence for step in steps for sequence in plan.batch(step)]
    return sorted(packs, key=rows.tokens, reverse=True)[:count]


def _limit_to_micro_batch(sequences: list[list[int]], rows: TokenRows, machine: Machine) -> list[list[int]]:
    """As many of the longest as may be computed at once: the first one gives their length."""
    most = machine.micro_batch_tokens
    if most is None or not sequences:
        return sequences
    return sequences[: max(1, most // max(1, rows.tokens(sequences[0])))]


def _longest_rows(rows: TokenRows, count: int) -> list[list[int]]:
    return [[int(row)] for row in (-rows.lengths).argsort(kind="stable")[:count]]


def _count_trained_positions(rows: TokenRows, sequences: Sequence[Sequence[int]]) -> int:
    """Positions at which one of these sequences is learned from, on average: there logits are computed."""
    return max(1, -(-sum(map(rows.trained, sequences)) // max(1, len(sequences))))


@dataclass(frozen=True)
class InitialMemoryPlan:
    """How a training begins, by its forecast."""

    first_tokens: int | None = None
    """Of the largest micro-batch, padded, where the one that is set does not fit on a CPU; else None.

    On a GPU what does not fit fails, and is made smaller; on a CPU Linux promises memory that is not there, and then
    kills whom it likes.
    """
    recompute: bool = False
    """Activations."""
    shard_base: bool = False
    """Among all ranks: each keeps a share. Ranks may find differently (their memory differs), and have to agree."""


def require_memory(
    paths: RunPaths, base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, journal: Journal
) -> InitialMemoryPlan:
    """Tell the forecast to the journal once a run, and refuse what cannot fit even with one row at a time.

    Smaller micro-batches cost least time. Only if not a single row would fit otherwise, and where it is left to us
    (`auto`), activations are recomputed (machine.activation_checkpointing), or ranks share the base
    (machine.shard_base), or both.

    Raises:
        InsufficientMemoryError: it does not fit, and `machine.on_forecast` is `refuse`.
    """
    if machine.shard_base is True and work.ranks == 1:
        journal.append("notice", text="machine.shard_base: true, but there is one rank, so nothing is shared")
    found = _get_forecast(paths, base, settings, machine, work, journal)
    if found is None:
        return _make_initial_plan(machine, work)
    machine = _apply_earlier_choice(machine, found)
    available = capacity.measure_device(torch.device(work.device)).available_bytes // work.sharing
    peak = found.needed_bytes(work.sharing)
    if peak <= available:
        return _make_initial_plan(machine, work)
    least = _minimum_bytes(base, settings, machine, work)
    if least <= available:
        rows = _find_fitting_rows(base, settings, machine, work, available)
        begin = "micro-batches are made smaller when they do not fit" if rows is None else f"beginning with {rows}"
        journal.append(
            "notice",
            text=f"memory: {work.rows} rows at a time would need {units.format_bytes(peak)}, "
            f"{units.format_bytes(available)} are at hand; {begin}",
        )
        return _make_initial_plan(machine, work, None if rows is None else rows * work.row_tokens)
    if way := forecast.choose_fallback(base, settings, machine, work, available):
        text = f"({units.format_bytes(least)} of {units.format_bytes(available)}): {way.cost}"
        journal.append("notice", text=f"memory: not even one row would fit {text}")
        return require_memory(paths, base, settings, way.machine, work, journal)
    for way in forecast.list_fallbacks(settings, machine, work.ranks):
        machine = way.machine  # the last needs least
    least = _minimum_bytes(base, settings, machine, work)
    text = (
        f"this training needs about {units.format_bytes(least)} even with one row at a time, and "
        f"{units.format_bytes(available)} are at hand.\n"
        f"{oom.describe_alternatives(base, settings, machine, work.single_row())}"
    )
    if machine.on_forecast == "refuse":
        raise InsufficientMemoryError(
            f"{text}\nNothing was loaded. `ratchet train --force` or machine.on_forecast: report goes on all the same",
            least,
            available,
        )
    journal.append("alert", text=text)
    return _make_initial_plan(machine, work)


def _make_initial_plan(machine: Machine, work: MemoryWorkload, first_tokens: int | None = None) -> InitialMemoryPlan:
    recompute = machine.activation_checkpointing is True
    return InitialMemoryPlan(first_tokens, recompute, ranks.is_base_sharded(machine, work.ranks))


def _apply_earlier_choice(machine: Machine, known: MemoryForecast) -> Machine:
    """With what an earlier attempt has chosen: it holds for the run."""
    chosen = {"activation_checkpointing": known.activation_checkpointing, "shard_base": known.shard_base}
    return machine.model_copy(update={name: True for name, value in chosen.items() if value})


def _minimum_bytes(base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload) -> int:
    """What a row at a time needs, of the memory of one rank."""
    return forecast.forecast(base, settings, machine, work.single_row()).needed_bytes(work.sharing)


def _find_fitting_rows(
    base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, available: int
) -> int | None:
    """Half of the rows, or half of that ..., until they fit well; None on a GPU, which says itself when they do not."""
    if work.device == "cuda":
        return None
    rows = work.rows
    while rows > 1:
        rows //= 2
        fewer = replace(work, rows=rows, validation_rows=min(rows, work.validation_rows))
        needed = forecast.forecast(base, settings, machine, fewer).needed_bytes(work.sharing)
        if needed <= WELL * available:
            break
    return rows


def suggest_memory_changes(
    base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, tokens: int
) -> str:
    """What to change when a single row of so many tokens did not fit; without figures if there is no forecast."""
    single = replace(work.single_row(), row_tokens=tokens, learned_tokens=min(tokens, work.learned_tokens))
    try:
        return oom.describe_alternatives(base, settings, machine, single)
    except Exception as error:  # what the user needs to hear is that memory ran out
        return (
            "Set machine.activation_checkpointing: true, or a smaller prepare.max_tokens, train.rank or base model "
            f"(no forecast for this model: {type(error).__name__}: {str(error)[:200]})."
        )


def _get_forecast(
    paths: RunPaths, base: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, journal: Journal
) -> MemoryForecast | None:
    """The forecast of this run, made by the first attempt that is of this size; None when there can be none."""
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
        found = forecast.forecast(base, settings, machine, work)
    except RatchetError:
        raise
    except Exception as error:  # a model of a kind that nobody has seen: it may train all the same
        journal.append("notice", text=f"no memory forecast for this model ({type(error).__name__}: {str(error)[:300]})")
        return None
    found.save(path)
    available = capacity.measure_device(torch.device(work.device)).available_bytes // work.sharing
    journal.append("forecast", forecast=found.model_dump(mode="json"), available_bytes=available)
    return found


def _is_forecast_of(known: MemoryForecast, work: MemoryWorkload, machine: Machine) -> bool:
    """Whether it is of this work, and made in a way that the settings leave open."""
    size = (known.device, known.ranks, known.rows, known.row_tokens, known.learned_tokens)
    share = machine.shard_base if work.ranks > 1 else False
    pairs = (machine.activation_checkpointing, known.activation_checkpointing), (share, known.shard_base)
    same = size == (work.device, work.ranks, work.rows, work.row_tokens, work.learned_tokens)
    return same and all(asked in ("auto", made) for asked, made in pairs)
