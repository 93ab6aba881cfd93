"""Reads the history of a run from its journal block by block, in bounded memory: curves, events and totals.

A journal may have millions of lines. Nearly all are steps that one program wrote with the same layout, so Arrow parses
them as a table, two blocks in parallel. Other lines, and blocks with unexpected content, are parsed line by line with
the same result.
"""

import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from ratchet.runs.directory import RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.journal import JournalEvent, parse_line
from ratchet.runs.status import RunProgress
from ratchet.storage import digests
from ratchet.storage.records.base import Record, flatten
from ratchet.storage.records.training import AdapterAnalysis, MemoryForecast, TrainReport

BLOCK_BYTES = 1 << 23
"""Bytes that each reader parses at a time. Peak memory is a small multiple of this size."""
READERS = 2
"""Number of parser threads. Arrow releases the GIL."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "loss", "learning_rate", "grad_norm", "trained_tokens", "input_tokens", "step_s"),
    "validation": ("step", "loss", "seconds"),
    "checkpoint_saved": ("step", "seconds", "blocked_s"),
}
"""Event kinds that are read as columns, with their columns. An event is damaged if its step or its loss is not finite,
or its step is negative."""

Numbers = NDArray[np.float64]
Columns = Mapping[str, Numbers]

_STRUCTURE = bytes.maketrans(b",{}", b":::")
"""Table that replaces structural characters by colons. The fields of a line of flat JSON are then keys and values in
turn."""
_STEP_EVENT, _OTHER_EVENT = b'"event":"step"', re.compile(rb'"event":(?!"step")')
"""Patterns of step events and of other events. If another event has as many keys as a step, Arrow cannot parse its
values as numbers. A second parse then adds a colon to all other events, so that their number of fields differs from
that of steps."""

MAX_BUCKETS = 1024
"""Maximum number of buckets of a curve. When more are needed, the bucket width doubles."""
MOST_MARKS = 40
"""Maximum number of stored events per kind. All events are counted."""
STEP_VALUES = ("loss", "grad_norm", "learning_rate", "input_tokens", "step_s")
VALIDATION_VALUES = ("loss",)
TEXT_SHOWN = 300
"""Maximum number of characters of an event's text."""
T = TypeVar("T", bound=Record)
_EXECUTION_FIELDS = {
    "device": "device", "compute_dtype": "compute dtype", "threads": "threads", "ranks": "ranks", "torch": "torch",
}  # fmt: skip
"""Fields of the `worker_ready` event that describe the execution, and their names in the report."""


@dataclass(frozen=True)
class JournalBlock:
    """A block of journal lines."""

    columns: Mapping[str, Columns]
    """Columns by event kind, in journal order. NaN marks a missing value."""
    others: Sequence[tuple[JournalEvent, int]]
    """All other events, each with the number of steps that precede it in the block."""
    lines: int
    damaged: int
    """Number of lines that are not valid events, or lack fields of their kind."""
    single_lines: int
    """Number of lines parsed one by one, which takes five times as long as a table."""


def read_blocks(path: Path, size_bytes: int = BLOCK_BYTES) -> Iterator[JournalBlock]:
    """Yield the complete lines of a journal in blocks, in order. A missing journal yields none."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return
    waiting: deque[Future[JournalBlock]] = deque()
    with stream, ThreadPoolExecutor(READERS) as readers:
        for data in _read_complete_lines(stream, size_bytes):
            waiting.append(readers.submit(_parse_block, data))
            if len(waiting) > READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read_complete_lines(stream: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """Yield blocks of complete lines. An unfinished last line is omitted."""
    rest = b""
    while data := stream.read(size_bytes):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        else:
            rest += data


def _parse_block(data: bytes) -> JournalBlock:
    ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
    uniform = _parse_uniform_steps(data, len(ends))
    if uniform is None:
        return _build_block(_JournalLineParser().read(data.split(b"\n")[:-1]))
    steps, rows, keys = uniform

    def line(row: int) -> bytes:
        return data[ends[row - 1] + 1 if row else 0 : ends[row] + 1]

    others = np.delete(np.arange(len(ends)), rows)
    before = np.searchsorted(rows, others).tolist()
    parser = _JournalLineParser()
    for row, count in zip(others.tolist(), before, strict=True):
        parser.add(line(row), count)
    # A worker writes all of its steps with one layout, so only the first step of each worker is compared with `keys`.
    first_steps = {
        count
        for event, count in parser.others
        if event.kind in ("attempt_started", "worker_ready") and count < len(rows)
    }
    if parser.columns["step"]["step"] or any(_line_keys(line(int(rows[count]))) != keys for count in first_steps):
        return _build_block(_JournalLineParser().read(data.split(b"\n")[:-1]))
    return _build_block(parser, steps)


def _parse_uniform_steps(data: bytes, lines: int) -> tuple[Columns, NDArray[np.int64], Sequence[str]] | None:
    """Parse all steps that have the layout of the first step as CSV. Return columns, line numbers, and keys.

    Returns None if the first step is not flat JSON with all columns of a step, or the block has values that do not fit.
    Arrow reads CSV twice as fast as JSON: 0.7 s of CPU time for a million steps.
    """
    if not _is_text(data):  # Arrow passes deviating rows to `skip` as str, so it must be able to decode them
        return None
    position = data.find(_STEP_EVENT)
    first = data[data.rfind(b"\n", 0, position) + 1 : data.find(b"\n", position) + 1] if position >= 0 else b""
    keys = _line_keys(first)
    if keys is None or first.translate(_STRUCTURE).count(b":") != 2 * len(keys) + 1:
        return None
    if not {"event", *KINDS["step"]} <= set(keys):
        return None
    columns = {name: f"{2 * keys.index(name) + 2}" for name in ("event", *KINDS["step"])}
    parsed = _parse_table(data, columns, len(keys)) or _parse_table(
        _OTHER_EVENT.sub(b'"event"::', data), columns, len(keys)
    )
    if parsed is None:
        return None
    table, deviating = parsed
    rows = np.delete(np.arange(table.num_rows + len(deviating)), deviating)
    if len(rows) + len(deviating) != lines:
        return None
    is_step = pc.fill_null(pc.equal(table[columns["event"]], b'"step"'), False).to_numpy()
    return (
        {name: table[columns[name]].to_numpy()[is_step] for name in KINDS["step"]},
        rows[is_step],
        keys,
    )


def _parse_table(data: bytes, columns: Mapping[str, str], key_count: int) -> tuple[pa.Table, list[int]] | None:
    """Parse lines with a fixed number of keys as a table. Return the table and the numbers of all deviating lines.

    Returns None if a value is not a number.

    Args:
        data: Block of lines.
        columns: Column name of each required key.
        key_count: Number of keys of a line.
    """
    deviating: list[int] = []

    def skip(row: csv.InvalidRow) -> str:
        deviating.append(row.number - 1)
        return "skip"

    names = [f"{number}" for number in range(2 * key_count + 2)]
    types = {column: pa.binary() if name == "event" else pa.float64() for name, column in columns.items()}
    parsing = csv.ParseOptions(
        delimiter=":", quote_char=False, double_quote=False, invalid_row_handler=skip, ignore_empty_lines=False
    )
    try:
        table = csv.read_csv(
            pa.BufferReader(data.translate(_STRUCTURE)),
            csv.ReadOptions(column_names=names, block_size=len(data), use_threads=False),
            parsing,
            csv.ConvertOptions(column_types=types, include_columns=list(types), check_utf8=False),
        )
    except pa.ArrowException:
        return None
    return table, deviating


def _is_text(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _line_keys(line: bytes) -> Sequence[str] | None:
    """Return the keys of a line that is a flat object, in order."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return tuple(document) if isinstance(document, dict) else None


class _JournalLineParser:
    """Parser of single lines."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in names} for kind, names in KINDS.items()
        }
        self.others: list[tuple[JournalEvent, int]] = []
        self.lines = self.damaged = 0

    def read(self, lines: Sequence[bytes]) -> "_JournalLineParser":
        """Parse all lines of a block."""
        for line in lines:
            self.add(line + b"\n", len(self.columns["step"]["step"]))
        return self

    def add(self, line: bytes, steps_before: int) -> None:
        """Parse one line."""
        self.lines += 1
        event, is_damaged = parse_line(line)
        self.damaged += is_damaged
        if event is None:
            return
        if event.kind not in self.columns:
            self.others.append((event, steps_before))
            return
        for name, values in self.columns[event.kind].items():
            values.append(_parse_number(event.data.get(name)))


def _parse_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _build_block(parser: _JournalLineParser, steps: Columns | None = None) -> JournalBlock:
    """Build the block, without events that lack required fields."""
    columns: dict[str, Columns] = {
        kind: {name: np.asarray(values, dtype=np.float64) for name, values in by_name.items()}
        for kind, by_name in parser.columns.items()
    }
    if steps is not None:
        columns["step"] = steps
    others, lines, damaged = parser.others, parser.lines, parser.damaged
    lines += len(steps["step"]) if steps is not None else 0
    columns_by_kind: dict[str, Columns] = {}
    for kind, by_name in columns.items():
        is_valid = np.isfinite(by_name["step"]) & (by_name["step"] >= 0)
        if "loss" in by_name:
            is_valid &= np.isfinite(by_name["loss"])
        damaged += int((~is_valid).sum())
        if kind == "step" and not is_valid.all():
            kept = np.cumsum(is_valid)
            others = [(event, int(kept[count - 1]) if count else 0) for event, count in others]
        columns_by_kind[kind] = {name: values[is_valid] for name, values in by_name.items()}
    return JournalBlock(columns_by_kind, others, lines, damaged, parser.lines)


@dataclass(frozen=True)
class HistoryCurve:
    """A curve in buckets of steps. A bucket has its last step, the tokens and seconds until this step, and values."""

    width: int
    """Steps per bucket. 1 means that nothing was aggregated."""
    step: Numbers
    tokens: Numbers
    """Cumulative trained answer tokens."""
    seconds: Numbers
    """Cumulative seconds in steps and validations."""
    mean: Columns
    """Means by name of the value."""
    low: Columns
    """Minima by name of the value; for averaged runs, mean minus one standard deviation."""
    high: Columns
    """Maxima by name of the value; for averaged runs, mean plus one standard deviation."""

    def __len__(self) -> int:
        return len(self.step)


class BucketedSeries:
    """Series of steps in buckets of equal width. `add` appends steps, which must increase from call to call."""

    def __init__(self, names: Sequence[str], most: int = MAX_BUCKETS) -> None:
        self._names, self._most, self.width = tuple(names), most, 1
        self._count = np.zeros(most)
        self._ends = {axis: np.zeros(most) for axis in ("step", "tokens", "seconds")}
        self._sums = {name: np.zeros(most) for name in names}
        self._low = {name: np.full(most, np.nan) for name in names}
        self._high = {name: np.full(most, np.nan) for name in names}

    def add(self, axes: Columns, values: Columns) -> None:
        """Append steps.

        Args:
            axes: Step (from 0 on, increasing), tokens and seconds of each step.
            values: Values of each step, by name.
        """
        if not len(axes["step"]):
            return
        steps = axes["step"].astype(np.int64)
        while steps[-1] // self.width >= self._most:
            self._widen()
        bucket = steps // self.width
        starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
        ends = np.r_[starts[1:], len(bucket)]
        place = bucket[starts]
        self._count[place] += ends - starts
        for axis, stored in self._ends.items():
            stored[place] = axes[axis][ends - 1]
        for name in self._names:
            self._sums[name][place] += np.add.reduceat(values[name], starts)
            for extremes, combine in ((self._low[name], np.fmin), (self._high[name], np.fmax)):
                extremes[place] = combine(extremes[place], combine.reduceat(values[name], starts))

    def _widen(self) -> None:
        """Join each bucket with its neighbour."""
        half = self._most // 2
        self.width *= 2
        has_second = self._count[1::2] > 0
        for array in self._ends.values():
            array[:half] = np.where(has_second, array[1::2], array[::2])
        for array in (self._count, *self._sums.values()):
            array[:half] = array[::2] + array[1::2]
        for name in self._names:
            self._low[name][:half] = np.fmin(self._low[name][::2], self._low[name][1::2])
            self._high[name][:half] = np.fmax(self._high[name][::2], self._high[name][1::2])
        for array in (self._count, *self._ends.values(), *self._sums.values()):
            array[half:] = 0.0
        for array in (*self._low.values(), *self._high.values()):
            array[half:] = np.nan

    def line(self, most: int | None = None) -> HistoryCurve:
        """Return the curve, reduced to at most `most` buckets (at least two)."""
        while most is not None and (self._count > 0).sum() > max(2, most):
            self._widen()
        filled = self._count > 0
        mean = {name: sums[filled] / self._count[filled] for name, sums in self._sums.items()}
        return HistoryCurve(
            self.width, self._ends["step"][filled], self._ends["tokens"][filled], self._ends["seconds"][filled], mean,
            {name: values[filled] for name, values in self._low.items()},
            {name: values[filled] for name, values in self._high.items()},
        )  # fmt: skip


def average_curves(curves: Sequence[HistoryCurve], points: int) -> HistoryCurve:
    """Return mean, and mean plus and minus one standard deviation, of several runs at up to `points` steps.

    The result ends where the shortest run ends. Values between points are interpolated linearly.

    Args:
        curves: At least two curves, none of them empty.
        points: Maximum number of points of the result.
    """
    first, last = max(curve.step[0] for curve in curves), min(curve.step[-1] for curve in curves)
    grid = np.unique(np.linspace(first, max(first, last), points).round())

    def interpolate(curve: HistoryCurve, values: Numbers) -> Numbers:
        interpolated: Numbers = np.interp(grid, curve.step, values)
        return interpolated

    axes = {
        name: np.mean([interpolate(curve, getattr(curve, name)) for curve in curves], axis=0)
        for name in ("tokens", "seconds")
    }
    mean, low, high = {}, {}, {}
    for name in curves[0].mean:
        stacked = np.stack([interpolate(curve, curve.mean[name]) for curve in curves])
        mean[name], spread = stacked.mean(axis=0), stacked.std(axis=0, ddof=1)
        low[name], high[name] = mean[name] - spread, mean[name] + spread
    return HistoryCurve(max(curve.width for curve in curves), grid, axes["tokens"], axes["seconds"], mean, low, high)


# History of a run: curves, events and totals, from one pass over its journal.


@dataclass(frozen=True)
class HistoryEvent:
    """An event of a run."""

    step: int
    """Step of the event; if the event has no step of its own, the last step before it."""
    kind: str
    """`resumed`, `skipped`, `rolled back`, `repeated`, `spike`, `shrunk`, `grown`, `died`, `stopped` or `alert`."""
    text: str


@dataclass
class RunHistory:
    """Content of a journal. `add` reads the next block."""

    steps: BucketedSeries = field(default_factory=lambda: BucketedSeries(STEP_VALUES))
    validations: BucketedSeries = field(default_factory=lambda: BucketedSeries(VALIDATION_VALUES))
    progress: RunProgress = field(default_factory=RunProgress)
    """Progress of the run, from all events except steps, validations and checkpoints."""
    ready: Mapping[str, Any] = field(default_factory=dict)
    """Data of the last `worker_ready` event."""
    marks: list[HistoryEvent] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind, including those that were not stored."""
    lines: int = 0
    damaged: int = 0
    step: int = 0
    """Last completed step."""
    loss: float | None = None
    """Loss of the last step."""
    trained_tokens: float = 0.0
    input_tokens: float = 0.0
    step_s: float = 0.0
    """Seconds in steps; a repeated step is counted once."""
    seconds: float = 0.0
    """Seconds in steps and validations."""
    repeated_steps: int = 0
    """Number of steps repeated after an attempt had ended."""
    validation: tuple[int, float] | None = None
    """Step and loss of the last validation."""
    best: tuple[int, float] | None = None
    """Step and loss of the validation with the lowest loss."""
    checkpoints: int = 0
    blocked_s: float = 0.0
    """Seconds for which checkpoints blocked training."""

    def add(self, block: JournalBlock) -> None:
        """Read the next block."""
        self.lines += block.lines
        self.damaged += block.damaged
        steps, validations = block.columns["step"], block.columns["validation"]
        before = np.r_[float(self.step), steps["step"]]
        for event, count in block.others:
            self._add_event(event, int(before[count]))
        self._add_steps(steps, validations)
        saved = block.columns["checkpoint_saved"]
        self.checkpoints += len(saved["step"])
        # Format 1 had no blocked_s: it saved in the training thread.
        waits = np.where(np.isfinite(saved["blocked_s"]), saved["blocked_s"], np.nan_to_num(saved["seconds"]))
        self.blocked_s += float(waits.sum())

    def _add_steps(self, raw: Columns, raw_validations: Columns) -> None:
        is_new_step = _find_new_steps(raw["step"], self.step)
        steps = {name: values[is_new_step] for name, values in raw.items()}
        self.repeated_steps += int((~is_new_step).sum())
        last = self.validation[0] if self.validation else -1
        is_new_validation = _find_new_steps(raw_validations["step"], last)
        validations = {name: values[is_new_validation] for name, values in raw_validations.items()}
        trained, inputs, step_s = (np.nan_to_num(steps[name]) for name in ("trained_tokens", "input_tokens", "step_s"))
        # A validation's time is counted before the step that follows it.
        pauses, spent = np.nan_to_num(validations["seconds"]), np.append(step_s, 0.0)
        follows = np.searchsorted(steps["step"], validations["step"], side="right")
        np.add.at(spent, follows, pauses)
        tokens, seconds = self.trained_tokens + np.cumsum(trained), self.seconds + np.cumsum(spent)
        self.steps.add({"step": steps["step"], "tokens": tokens, "seconds": seconds[:-1]}, steps)
        tokens_until = np.r_[self.trained_tokens, tokens][follows]
        self.validations.add(
            {
                "step": validations["step"],
                "tokens": tokens_until,
                "seconds": seconds[follows] - np.append(step_s, 0.0)[follows],
            },
            validations,
        )
        if len(steps["step"]):
            self.step, self.loss = int(steps["step"][-1]), float(steps["loss"][-1])
        self.trained_tokens += float(trained.sum())
        self.input_tokens += float(inputs.sum())
        self.step_s += float(step_s.sum())
        self.seconds = float(seconds[-1])
        self._update_validation(validations["step"], validations["loss"])

    def _update_validation(self, steps: Numbers, losses: Numbers) -> None:
        if not len(steps):
            return
        self.validation = int(steps[-1]), float(losses[-1])
        lowest = int(np.argmin(losses))
        if self.best is None or losses[lowest] < self.best[1]:
            self.best = int(steps[lowest]), float(losses[lowest])

    def _add_event(self, event: JournalEvent, step: int) -> None:
        """Record an event that is not read as a column. `step` is the last step before the event."""
        self.progress.update(event)
        data = event.data
        if event.kind == "worker_ready":
            self.ready = data
            start = data.get("start_step")
            if event.attempt > 1 and isinstance(start, int):
                self._mark(start, "resumed", f"attempt {event.attempt} resumed after step {start:,}")
        elif event.kind == "step_skipped":
            kind = "rolled back" if data.get("action") == "roll_back" else "skipped"
            self._mark(_event_step(data, step), kind, str(data.get("reason", "")))
        elif event.kind == "microbatch_budget":
            kind = "grown" if data.get("action") == "grow" else "shrunk"
            self._mark(_event_step(data, step), kind, f"micro-batches of phase {data.get('phase', '?')}")
        elif event.kind in ("step_repeated", "gradient_spike"):
            kind = "repeated" if event.kind == "step_repeated" else "spike"
            self._mark(_event_step(data, step), kind, str(data.get("reason", "")))
        elif event.kind == "worker_exited":
            kind = str(data.get("failure_class", "")).replace("_", " ")
            self._mark(step, "died", f"attempt {event.attempt}: {kind}, {data.get('text', '')}")
        elif event.kind in ("interrupted", "pruned", "alert"):
            kind = "alert" if event.kind == "alert" else "stopped"
            self._mark(_event_step(data, step), kind, str(data.get("text", "on request")))

    def _mark(self, step: int, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= MOST_MARKS:
            self.marks.append(HistoryEvent(step, kind, text[:TEXT_SHOWN]))


def _event_step(data: Mapping[str, Any], default: int) -> int:
    step = data.get("step")
    return step if isinstance(step, int) else default


def _find_new_steps(steps: Numbers, last: float) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return a mask of the new steps. The other steps are repetitions: a resumed run repeats some step numbers."""
    reached = np.maximum.accumulate(np.r_[float(last), steps])
    is_new: np.ndarray[Any, np.dtype[np.bool_]] = steps > reached[:-1]
    return is_new


def read_history(journal: Path) -> RunHistory:
    """Read the history of a run. A missing journal gives an empty history."""
    history = RunHistory()
    for block in read_blocks(journal):
        history.add(block)
    return history


# Summary of a run: settings, history and result.


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run. The content of a missing file is None."""

    paths: RunPaths
    spec: RunSpec | None
    launch: TrainingLaunchSpec | None
    """Launch settings of the last attempt."""
    report: TrainReport | None
    analysis: AdapterAnalysis | None
    forecast: MemoryForecast | None
    history: RunHistory
    running: bool

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.paths.root.name

    @property
    def exists(self) -> bool:
        """Whether the run directory exists on this machine."""
        return self.paths.root.is_dir()

    @property
    def state(self) -> str:
        """State of the run as text."""
        progress = self.history.progress
        if not self.exists:
            return "directory not found"
        if self.report is not None:
            return "finished" if self.report.steps >= self.report.planned_steps else "finished (stopped early)"
        if self.running:
            return "running"
        if not self.history.lines:
            return "not started"
        return "stopped on request" if progress.stopped else "not finished"

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings that affect learning, by dotted key."""
        if self.spec is None:
            return {}
        flat = flatten(self.spec.train.model_dump(mode="json"), "train.")
        flat |= {"data": self.spec.data_digest[: digests.SHORT], "base": self.spec.base_digest[: digests.SHORT]}
        return flat | {"recipe version": self.spec.recipe_version}

    @cached_property
    def execution(self) -> Mapping[str, Any]:
        """Settings of execution that may affect rounding or cost. Addresses are omitted."""
        ready = self.history.ready
        execution = {name: ready[key] for key, name in _EXECUTION_FIELDS.items() if ready.get(key) is not None}
        if self.launch is not None:
            machine = self.launch.machine
            execution |= {
                "base model": self.launch.base.source,
                "rows per micro-batch": machine.micro_batch_size,
                "tokens per micro-batch": machine.micro_batch_tokens,
                "checkpoint every": machine.checkpoint_every,
            }
        return execution | ({"code": version} if (version := self.history.progress.code_version) else {})

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the lowest validation loss, from the report if it exists, else from the journal."""
        if self.report is not None and self.report.best_step in self.report.validation_loss:
            return self.report.best_step, self.report.validation_loss[self.report.best_step]
        return self.history.best

    @property
    def tokens_per_s(self) -> float | None:
        """Input tokens per second of a step, over all steps."""
        return self.history.input_tokens / self.history.step_s if self.history.step_s else None

    @property
    def peak_bytes(self) -> int | None:
        """Measured peak memory of the phase with the largest peak."""
        return max(self.history.progress.memory.peaks.values(), default=None)

    @property
    def forecast_bytes(self) -> int | None:
        """Forecast peak memory of the phase with the largest peak."""
        return self.forecast.peak.total_bytes if self.forecast else None

    @property
    def trainable_parameters(self) -> int | None:
        """Number of trainable parameters, from the report, else from the last worker."""
        if self.report is not None:
            return self.report.trainable_parameters
        count = self.history.ready.get("trainable_parameters")
        return count if isinstance(count, int) else None


def read_run_summary(paths: RunPaths) -> RunSummary:
    """Read the summary of a run, which may be unfinished or missing.

    Raises:
        DamagedFileError: A file is damaged or of a newer version. The message names the file.
    """
    paths.require_known_format()
    return RunSummary(
        paths=paths,
        spec=_load_record(RunSpec, paths.spec),
        launch=_load_record(TrainingLaunchSpec, paths.launch),
        report=_load_record(TrainReport, paths.result / "train.json"),
        analysis=_load_record(AdapterAnalysis, paths.result / "analysis.json"),
        forecast=_load_record(MemoryForecast, paths.forecast),
        history=read_history(paths.journal),
        running=paths.root.is_dir() and paths.lock().is_held(),
    )


def _load_record(kind: type[T], path: Path) -> T | None:
    return kind.load(path) if path.exists() else None
