"""Facts about a model and its memory that cross a stage or a process, as JSON: see records.py for what all share."""

from typing import Literal

from ratchet.errors import SettingsError
from ratchet.storage.records.base import Record

Phase = Literal["baseline", "loaded", "adapters", "first_step", "steady", "evaluation"]
"""Of a training process: libraries imported; base in place (loading it included); adapter and optimizer made; first
optimizer step; later ones; validation."""
PHASES: tuple[Phase, ...] = ("baseline", "loaded", "adapters", "first_step", "steady", "evaluation")

UNSHARDED = "base before sharding"
"""A part: what a rank will not keep of a base that it has loaded whole. On a machine one rank at a time has it."""


class PhaseMemory(Record):
    """The most memory that is held at once in one phase of a training process, on the device that trains."""

    phase: Phase
    parts: dict[str, int]
    """Bytes by what they are for, such as weights, activations, logits; what is held when the sum is greatest."""

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


class MemoryForecast(Record):
    """What a training process will need, for one micro-batch; made without loading weights."""

    device: Literal["cpu", "cuda"]
    ranks: int = 1
    """Processes that compute a step together, on all machines."""
    rows: int
    """Sequences of the micro-batch."""
    row_tokens: int
    """Tokens of its longest sequence; the others are padded to it."""
    learned_tokens: int
    """Positions of a row at which logits are computed."""
    activation_checkpointing: bool
    shard_base: bool = False
    """Each rank keeps a share of the base."""
    phases: tuple[PhaseMemory, ...]
    """In the order of PHASES."""
    host_bytes: int
    """The most memory of the host at any time; on a CPU the same as the peak."""
    trainable_parameters: int
    total_parameters: int
    """Base and adapter, each weight counted once, however it is stored."""
    notes: tuple[str, ...] = ()
    """What the forecast had to assume."""

    def of(self, phase: Phase) -> PhaseMemory:
        """One phase."""
        return next(one for one in self.phases if one.phase == phase)

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most."""
        return max(self.phases, key=lambda one: one.total_bytes)

    def needed_bytes(self, sharing: int = 1) -> int:
        """The peak of such a process; of several in the same memory, the part of each.

        Args:
            sharing: processes in that memory. What one holds at a time (UNSHARDED) is divided among them.
        """

        def needed(phase: PhaseMemory) -> int:
            whole = phase.parts.get(UNSHARDED, 0)
            return phase.total_bytes - whole + whole // sharing

        return max(map(needed, self.phases))


class LayerQuantizationCost(Record):
    """What quantisation does to one linear layer."""

    bytes_full: int
    bytes_stored: int
    weight_error: float
    """Frobenius norm of the change of the weights, over that of the weights."""
    output_error: float
    """The same of the layer's outputs on the validation rows."""


class QuantizationCost(Record):
    """What one way of storing the base costs, on the validation rows."""

    name: str
    """`full`, `nf4`, `nf4+dq`, `fp4`, `fp4+dq` (dq: double quantisation)."""
    weight_bytes: int
    """Of the whole model as it is stored, constants of quantisation included."""
    loss: float
    """Mean negative log-likelihood per answer token, in nats; perplexity is its exponential."""
    kl: float
    """Mean Kullback-Leibler divergence of next-token distributions from those of full precision, in nats."""
    greedy_agreement: float
    """Fraction of answer positions at which full precision finds the same token most likely."""
    layers: dict[str, LayerQuantizationCost]


class QuantizationReport(Record):
    """Full precision against 4 bits, before any training."""

    base_digest: str
    data_digest: str
    rows: int
    tokens: int
    """Answer positions compared."""
    dtype: str
    """Of full precision, and of matrix products."""
    costs: tuple[QuantizationCost, ...]


class ModuleAnalysis(Record):
    """What training did to one module with an adapter."""

    rank: int
    parameters: int
    """That learn."""
    gradient_norms: tuple[float, ...]
    """L2 norm of the gradient before clipping at the steps of the analysis."""
    weight_norm: float
    """Frobenius norm of the frozen weights."""
    update_norm: float
    """Frobenius norm of what was added to them."""
    singular_values: tuple[float, ...]
    """Of what was added, descending, at most `rank` of them."""
    effective_rank: float
    """Exponential of the entropy of normalised singular values (Roy and Vetterli 2007); 0 if nothing was added."""

    @property
    def update_ratio(self) -> float:
        """Update over weight."""
        return self.update_norm / self.weight_norm if self.weight_norm else 0.0


class AdapterAnalysis(Record):
    """What training did to the model, module by module. Deterministic, like the run."""

    steps: tuple[int, ...]
    """Optimizer steps at which gradient norms were taken."""
    modules: dict[str, ModuleAnalysis]
    """By name in the base model."""
    still: tuple[str, ...]
    """Modules that barely moved."""
    advice: tuple[str, ...]
    """For the next run; each with the figures that it rests on."""


# Where the time of a training goes, as JSON. Of one machine at one time: in no stage's out, and not the same twice.

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


class StepPart(Record):
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


class OperatorTime(Record):
    """An operator of torch, by the time in itself and not in those that it calls."""

    name: str
    calls: float
    """A step."""
    self_s: float
    """Seconds a step, in the traced steps."""
    share: float
    """Of all operators' time."""


class RooflineLimits(Record):
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


class TrainingProfile(Record):
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
    parts: tuple[StepPart, ...]
    """In the order of PARTS."""
    operators: tuple[OperatorTime, ...]
    """The most expensive ones, greatest first."""
    micro_batches: float
    """A step, the mean over the measured steps; so are the next three."""
    input_tokens: float
    padded_tokens: float
    trained_tokens: float
    floors: RooflineLimits
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
