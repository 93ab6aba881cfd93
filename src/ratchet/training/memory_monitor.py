"""How much memory a training holds, phase by phase: measured, told to the journal, and compared with the forecast."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ratchet.config import units
from ratchet.config.schema import Machine
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, Rows
from ratchet.errors import DamagedError, RatchetError, TooLargeError
from ratchet.models import oom
from ratchet.models.memory import capacity, forecast, ranks
from ratchet.models.memory.forecast import Work
from ratchet.models.model_spec import Blueprint
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal
from ratchet.storage.records.training import MemoryForecast, Phase

TOLD_AGAIN = 1.02
"""A phase that comes again is told again only when it held this many times what it held before."""


@dataclass
class Measured:
    """What one phase has held at most, in bytes."""

    peak_bytes: int = 0
    allocated_bytes: int = 0
    """Of tensors, on a GPU."""
    host_bytes: int = 0
    """Resident memory of the process."""


class Monitor:
    """Divides the time of a worker into phases. One phase at a time; each begins where the one before ends."""

    def __init__(self, journal: Journal, device: torch.device, warnings: Sequence[float]) -> None:
        self.journal = journal
        self.device = device
        self.found: dict[Phase, Measured] = {}
        self._left = sorted(warnings)
        self._phase: Phase | None = None
        self._total_bytes = capacity.of(device).total_bytes
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
        capacity.forget_peak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _measure(self) -> Measured:
        host = capacity.peak_resident_bytes()
        if self.device.type != "cuda":
            return Measured(host, 0, host)
        reserved = torch.cuda.max_memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        # Context and libraries' work spaces: what is in use and no tensor's. Of other processes too, if there are any.
        beside = max(0, total - free - torch.cuda.memory_reserved(self.device))
        return Measured(reserved + beside, torch.cuda.max_memory_allocated(self.device), host)

    def _warn(self, phase: Phase, used: int) -> None:
        share = used / self._total_bytes
        passed = [limit for limit in self._left if share >= limit]
        self._left = [limit for limit in self._left if share < limit]
        if passed:
            where = "GPU" if self.device.type == "cuda" else "machine"
            self.journal.append(
                "alert",
                text=f"memory: {share:.0%} of the {where}'s {units.written(self._total_bytes)} are in use in phase "
                f"{phase} (warned of from {max(passed):.0%} on, machine.memory_warnings)",
            )


# Whether this training fits, asked before anything is loaded: the forecast of memory, in a run.

WELL = 0.9
"""Of the memory at hand: forecasts have been a tenth too low."""


def work_of(plan: BatchPlan, train: Rows, validation: Rows, machine: Machine, device: torch.device) -> Work:
    """The largest micro-batches that these rows can make: those of the longest sequences."""
    sequences = _within(_longest(plan, train, machine.micro_batch_rows), train, machine)
    checked = _within(_longest_rows(validation, machine.micro_batch_rows), validation, machine)
    return Work(
        rows=len(sequences),
        row_tokens=max(map(train.tokens, sequences)),
        learned_tokens=_learned(train, sequences),
        packed=any(len(sequence) > 1 for sequence in sequences),
        device="cuda" if device.type == "cuda" else "cpu",
        validation_rows=len(checked),
        validation_tokens=max(map(validation.tokens, checked), default=1),
        validation_learned_tokens=_learned(validation, checked),
    )


def _longest(plan: BatchPlan, rows: Rows, count: int) -> list[list[int]]:
    if plan.batching != "packed":
        return _longest_rows(rows, count)
    steps = range(-(-plan.sequences // plan.batch_rows))
    packs = [sequence for step in steps for sequence in plan.batch(step)]
    return sorted(packs, key=rows.tokens, reverse=True)[:count]


def _within(sequences: list[list[int]], rows: Rows, machine: Machine) -> list[list[int]]:
    """As many of the longest as may be computed at once: the first one gives their length."""
    most = machine.micro_batch_tokens
    if most is None or not sequences:
        return sequences
    return sequences[: max(1, most // max(1, rows.tokens(sequences[0])))]


def _longest_rows(rows: Rows, count: int) -> list[list[int]]:
    return [[int(row)] for row in (-rows.lengths).argsort(kind="stable")[:count]]


def _learned(rows: Rows, sequences: Sequence[Sequence[int]]) -> int:
    """Positions at which one of these sequences is learned from, on average: there logits are computed."""
    return max(1, -(-sum(map(rows.trained, sequences)) // max(1, len(sequences))))


@dataclass(frozen=True)
class Beginning:
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


def require_room(
    paths: RunPaths, base: Blueprint, settings: Train, machine: Machine, work: Work, journal: Journal
) -> Beginning:
    """Tell the forecast to the journal once a run, and refuse what cannot fit even with one row at a time.

    Smaller micro-batches cost least time. Only if not a single row would fit otherwise, and where it is left to us
    (`auto`), activations are recomputed (machine.activation_checkpointing), or ranks share the base
    (machine.shard_base), or both.

    Raises:
        TooLargeError: it does not fit, and `machine.on_forecast` is `refuse`.
    """
    if machine.shard_base is True and work.ranks == 1:
        journal.append("notice", text="machine.shard_base: true, but there is one rank, so nothing is shared")
    found = _forecast(paths, base, settings, machine, work, journal)
    if found is None:
        return _beginning(machine, work)
    machine = _as_begun(machine, found)
    available = capacity.of(torch.device(work.device)).available_bytes // work.sharing
    peak = found.needed_bytes(work.sharing)
    if peak <= available:
        return _beginning(machine, work)
    least = _least(base, settings, machine, work)
    if least <= available:
        rows = _rows_that_fit(base, settings, machine, work, available)
        begin = "micro-batches are made smaller when they do not fit" if rows is None else f"beginning with {rows}"
        journal.append(
            "notice",
            text=f"memory: {work.rows} rows at a time would need {units.written(peak)}, {units.written(available)} are "
            f"at hand; {begin}",
        )
        return _beginning(machine, work, None if rows is None else rows * work.row_tokens)
    if way := forecast.first_that_fits(base, settings, machine, work, available):
        text = f"({units.written(least)} of {units.written(available)}): {way.cost}"
        journal.append("notice", text=f"memory: not even one row would fit {text}")
        return require_room(paths, base, settings, way.machine, work, journal)
    for way in forecast.ways(settings, machine, work.ranks):
        machine = way.machine  # the last needs least
    least = _least(base, settings, machine, work)
    text = (
        f"this training needs about {units.written(least)} even with one row at a time, and "
        f"{units.written(available)} are at hand.\n{oom.advice(base, settings, machine, work.single_row())}"
    )
    if machine.on_forecast == "refuse":
        raise TooLargeError(
            f"{text}\nNothing was loaded. `ratchet train --force` or machine.on_forecast: report goes on all the same",
            least,
            available,
        )
    journal.append("alert", text=text)
    return _beginning(machine, work)


def _beginning(machine: Machine, work: Work, first_tokens: int | None = None) -> Beginning:
    recompute = machine.activation_checkpointing is True
    return Beginning(first_tokens, recompute, ranks.is_shared(machine, work.ranks))


def _as_begun(machine: Machine, known: MemoryForecast) -> Machine:
    """With what an earlier attempt has chosen: it holds for the run."""
    chosen = {"activation_checkpointing": known.activation_checkpointing, "shard_base": known.shard_base}
    return machine.model_copy(update={name: True for name, value in chosen.items() if value})


def _least(base: Blueprint, settings: Train, machine: Machine, work: Work) -> int:
    """What a row at a time needs, of the memory of one rank."""
    return forecast.forecast(base, settings, machine, work.single_row()).needed_bytes(work.sharing)


def _rows_that_fit(base: Blueprint, settings: Train, machine: Machine, work: Work, available: int) -> int | None:
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


def advice(base: Blueprint, settings: Train, machine: Machine, work: Work, tokens: int) -> str:
    """What to change when a single row of so many tokens did not fit; without figures if there is no forecast."""
    single = replace(work.single_row(), row_tokens=tokens, learned_tokens=min(tokens, work.learned_tokens))
    try:
        return oom.advice(base, settings, machine, single)
    except Exception as error:  # what the user needs to hear is that memory ran out
        return (
            "Set machine.activation_checkpointing: true, or a smaller prepare.max_tokens, train.rank or base model "
            f"(no forecast for this model: {type(error).__name__}: {str(error)[:200]})."
        )


def _forecast(
    paths: RunPaths, base: Blueprint, settings: Train, machine: Machine, work: Work, journal: Journal
) -> MemoryForecast | None:
    """The forecast of this run, made by the first attempt that is of this size; None when there can be none."""
    path = paths.forecast
    if path.exists():
        try:
            known = MemoryForecast.load(path)
        except DamagedError as error:
            journal.append("notice", text=f"{error}")
        else:
            if _is_of(known, work, machine):
                return known
    try:
        found = forecast.forecast(base, settings, machine, work)
    except RatchetError:
        raise
    except Exception as error:  # a model of a kind that nobody has seen: it may train all the same
        journal.append("notice", text=f"no memory forecast for this model ({type(error).__name__}: {str(error)[:300]})")
        return None
    found.save(path)
    available = capacity.of(torch.device(work.device)).available_bytes // work.sharing
    journal.append("forecast", forecast=found.model_dump(mode="json"), available_bytes=available)
    return found


def _is_of(known: MemoryForecast, work: Work, machine: Machine) -> bool:
    """Whether it is of this work, and made in a way that the settings leave open."""
    size = (known.device, known.ranks, known.rows, known.row_tokens, known.learned_tokens)
    share = machine.shard_base if work.ranks > 1 else False
    pairs = (machine.activation_checkpointing, known.activation_checkpointing), (share, known.shard_base)
    same = size == (work.device, work.ranks, work.rows, work.row_tokens, work.learned_tokens)
    return same and all(asked in ("auto", made) for asked, made in pairs)
