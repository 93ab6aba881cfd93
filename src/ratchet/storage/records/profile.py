"""Where the time of a training goes, as JSON. Of one machine at one time: in no stage's out, and not the same twice."""

from typing import Literal

from ratchet.errors import SettingsError
from ratchet.storage.records.base import Record

PROFILE, TRACE, PAGE = "profile.json", "trace.json.gz", "profile.md"
"""What a profile leaves behind; the trace is opened by Perfetto or chrome://tracing."""

LEAST_STEPS = 4
"""That can be profiled: one to warm up, two for a median, one to trace."""


def require_steps(planned: int) -> None:
    """Raise SettingsError where a training has too few optimizer steps to be profiled."""
    if planned < LEAST_STEPS:
        raise SettingsError(
            f"train --profile measures at least {LEAST_STEPS} optimizer steps, and params.yaml plans {planned}: "
            "raise train.epochs or lower train.batch_rows"
        )


PartName = Literal["data", "forward", "loss", "backward", "optimizer", "snapshot", "evaluation", "waiting"]
PARTS: tuple[PartName, ...] = (
    "data", "forward", "loss", "backward", "optimizer", "snapshot", "evaluation", "waiting",
)  # fmt: skip
"""Batch plan, padding and copies to the device; body; head and cross entropy, with the head's gradient; gradient of the
body; clipping and step; copy of the state for a checkpoint; one validation; what lies between (journal, guards)."""


class Part(Record):
    """One of the things that a step's time goes into."""

    name: PartName
    each_s: float
    """Seconds of one, the median over the measured steps, of three snapshots; there is a single validation."""
    every_steps: float
    """One in so many steps."""
    share: float
    """Of the time of a step, with its part of what is not done at each."""

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.each_s / self.every_steps


class Operator(Record):
    """An operator of torch, by the time in itself and not in those that it calls."""

    name: str
    calls: float
    """A step."""
    self_s: float
    """Seconds a step, in the traced steps."""
    share: float
    """Of all operators' time."""


class Floors(Record):
    """What a step must compute and move, and how fast this machine does either."""

    flops: float
    """Floating-point operations of a step: matrix products and attention, as they are executed."""
    shapes_flops_s: float
    """Measured on products of the model's own shapes, in the type that it computes in."""
    square_flops_s: float
    """Measured on a product of large square matrices."""
    sheet_flops_s: float | None
    """Dense products in 16 bits by the maker's data sheet; None where the device or the type is another."""
    moved_bytes: dict[str, float]
    """Of a step, by what they are."""
    bandwidth_bytes_s: float
    """Measured on a large copy, reading and writing counted."""

    @property
    def flops_s(self) -> float:
        """Seconds that the operations of a step take at the rate of the model's own shapes."""
        return self.flops / self.shapes_flops_s

    @property
    def bytes_s(self) -> float:
        """Seconds that its bytes take."""
        return sum(self.moved_bytes.values()) / self.bandwidth_bytes_s

    @property
    def floor_s(self) -> float:
        """No step is faster than this, with these shapes on this machine."""
        return max(self.flops_s, self.bytes_s)


class Profile(Record):
    """Some optimizer steps of a run, measured."""

    run_id: str
    device: str
    compute_dtype: str
    threads: int
    torch: str
    warm_steps: int
    """Not counted: they allocate, and compile kernels."""
    measured_steps: int
    traced_steps: int
    """Recorded operator by operator, which makes them slower; counted in `operators` only."""
    step_s: float
    """Median of the measured steps."""
    quartiles_s: tuple[float, float]
    """Of the same."""
    synchronised_step_s: float | None
    """The same on a GPU that is waited for at every border between parts; `parts` are measured so."""
    parts: tuple[Part, ...]
    """In the order of PARTS."""
    operators: tuple[Operator, ...]
    """The most expensive ones, greatest first."""
    micro_batches: float
    """A step, the mean over the measured steps; so are the next three."""
    input_tokens: float
    padded_tokens: float
    trained_tokens: float
    floors: Floors
    saved_activation_bytes: int
    """Kept for the backward pass of one micro-batch, at most."""
    peak_bytes: int
    """Of memory in the measured steps, on the device that trains."""
    save_s: float
    """Sealing a snapshot as a checkpoint, in a thread beside training."""
    notes: tuple[str, ...] = ()

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are none."""
        return 1 - self.input_tokens / self.padded_tokens

    @property
    def of_sheet(self) -> float | None:
        """Share of the data sheet's rate that a step reaches (model FLOP utilisation, Chowdhery et al. 2022)."""
        sheet = self.floors.sheet_flops_s
        return None if sheet is None else self.floors.flops / self.step_s / sheet
