"""Records of training: memory forecasts, analysis of quantization and adapters, profiles.

A profile is a measurement on one machine. It is not reproducible, and not part of the output of a stage.
"""

from typing import Literal, NamedTuple

from ratchet.errors import SettingsError
from ratchet.storage.records.base import Record

Phase = Literal["baseline", "loaded", "adapters", "first_step", "steady", "evaluation"]
"""Phases of a training process, in order: import of libraries; loading of the base; creation of adapter and optimizer;
first optimizer step; later steps; validation."""
PHASES: tuple[Phase, ...] = ("baseline", "loaded", "adapters", "first_step", "steady", "evaluation")

UNSHARDED = "base before sharding"
"""Name of a memory part: the share of a fully loaded base that a rank does not keep. Only one rank of a machine at a
time has this part in memory."""

PROFILE, TRACE, PAGE = "profile.json", "trace.json.gz", "profile.md"
"""Files of a profile. Open the trace with Perfetto or chrome://tracing."""

MIN_PROFILE_STEPS = 4
"""Minimum number of steps for a profile: one to warm up, two for a median, one to trace."""

PartName = Literal["data", "forward", "loss", "backward", "optimizer", "snapshot", "evaluation", "waiting"]
PARTS: tuple[PartName, ...] = (
    "data", "forward", "loss", "backward", "optimizer", "snapshot", "evaluation", "waiting",
)  # fmt: skip
"""Parts of a step. data: batch plan, padding and copies to the device. forward: body of the model. loss: head and cross
entropy, with the gradient of the head. backward: gradient of the body. optimizer: clipping and step. snapshot: copy of
the state for a checkpoint. evaluation: one validation. waiting: time in between (journal, guards)."""


class TrainReport(Record):
    """Result of training. Deterministic: equal inputs give equal reports, also after interruptions."""

    run_id: str
    adapter_digest: str
    base_digest: str
    data_digest: str
    steps: int
    """Number of optimizer steps; fewer than planned if training stopped early."""
    planned_steps: int
    best_step: int
    kept_step: int
    """Step whose weights are the adapter."""
    validation_loss: dict[int, float]
    """Loss in nats per answer token, by step of the validation."""
    final_train_loss: float
    trained_tokens: int
    input_tokens: int
    trainable_parameters: int
    total_parameters: int
    quantized_parameters: int = 0
    """Number of weights of the base that were stored in 4 bits."""


class ModuleLocation(NamedTuple):
    """Position of a module in the model."""

    kind: str
    """Name without indices, such as `self_attn.q_proj`; the full name outside numbered layers."""
    indices: tuple[int, ...]
    """Layer index, then indices within the layer (experts); empty outside numbered layers."""

    @property
    def layer(self) -> int:
        """Index of the layer, from 0; -1 outside numbered layers."""
        return self.indices[0] if self.indices else -1


def parse_module_name(name: str) -> ModuleLocation:
    """Parse the name of a module: `model.layers.3.mlp.experts.7.w1` has kind `mlp.experts.w1` and indices (3, 7)."""
    parts = name.split(".")
    is_index = [part.isdecimal() for part in parts]
    if not any(is_index):
        return ModuleLocation(name, ())
    within = parts[is_index.index(True) :]
    kind = ".".join(part for part in within if not part.isdecimal())
    return ModuleLocation(kind or name, tuple(int(part) for part in within if part.isdecimal()))


class PhaseMemory(Record):
    """Peak memory of a phase of a training process, on the training device."""

    phase: Phase
    parts: dict[str, int]
    """Bytes at the peak, by use, such as weights, activations, logits."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


class MemoryForecast(Record):
    """Forecast of the memory of a training process for one micro-batch, made without loading weights."""

    device: Literal["cpu", "cuda"]
    ranks: int = 1
    """Number of ranks on all machines."""
    rows: int
    """Number of sequences in the micro-batch."""
    row_tokens: int
    """Length of the longest sequence in tokens; the other sequences are padded to this length."""
    learned_tokens: int
    """Number of positions per row at which logits are computed."""
    activation_checkpointing: bool
    shard_base: bool = False
    """Whether the base is sharded over the ranks."""
    phases: tuple[PhaseMemory, ...]
    """Memory by phase, in the order of PHASES."""
    host_bytes: int
    """Peak host memory; on a CPU, the same as the overall peak."""
    trainable_parameters: int
    total_parameters: int
    """Number of parameters of base and adapter, independent of their storage."""
    notes: tuple[str, ...] = ()
    """Assumptions of the forecast."""

    def phase_memory(self, phase: Phase) -> PhaseMemory:
        """Return the memory of a phase."""
        return next(memory for memory in self.phases if memory.phase == phase)

    @property
    def peak(self) -> PhaseMemory:
        """The phase with the most memory."""
        return max(self.phases, key=lambda memory: memory.total_bytes)

    def needed_bytes(self, local_ranks: int = 1) -> int:
        """Return the memory that each of `local_ranks` processes that share it needs at the peak, in bytes.

        UNSHARDED is divided by their number, because only one process at a time has this part in memory.
        """

        def process_bytes(phase: PhaseMemory) -> int:
            unsharded = phase.parts.get(UNSHARDED, 0)
            return phase.total_bytes - unsharded + unsharded // local_ranks

        return max(map(process_bytes, self.phases))


class LayerQuantizationCost(Record):
    """Effect of quantization on a linear layer."""

    bytes_full: int
    bytes_stored: int
    weight_error: float
    """Relative weight error: Frobenius norm of the change over that of the weights."""
    output_error: float
    """Relative output error on the validation rows, in the same norm."""


class QuantizationCost(Record):
    """Effect of a storage of the base, measured on the validation rows."""

    name: str
    """`full`, `nf4`, `nf4+dq`, `fp4`, `fp4+dq` (dq: double quantization)."""
    weight_bytes: int
    """Stored size of the whole model, quantization constants included."""
    loss: float
    """Mean negative log-likelihood per answer token, in nats; perplexity is its exponential."""
    kl: float
    """Mean KL divergence of the next-token distributions from those of full precision, in nats."""
    greedy_agreement: float
    """Share of answer positions with the same most likely token as in full precision."""
    layers: dict[str, LayerQuantizationCost]


class QuantizationReport(Record):
    """Comparison of full precision with storage in 4 bits, before training."""

    base_digest: str
    data_digest: str
    rows: int
    tokens: int
    """Number of compared answer positions."""
    dtype: str
    """Type of the full-precision weights and of matrix products."""
    costs: tuple[QuantizationCost, ...]


class ModuleAnalysis(Record):
    """Effect of training on a module with an adapter."""

    rank: int
    parameters: int
    """Number of trainable parameters."""
    gradient_norms: tuple[float, ...]
    """L2 norm of the unclipped gradient at each step of the analysis."""
    weight_norm: float
    """Frobenius norm of the frozen weights."""
    update_norm: float
    """Frobenius norm of the update."""
    singular_values: tuple[float, ...]
    """The largest singular values of the update, descending; at most `rank` of them."""
    effective_rank: float
    """Exponential of the entropy of the normalized singular values (Roy and Vetterli 2007); 0 without an update."""

    @property
    def update_ratio(self) -> float:
        """Norm of the update relative to that of the weights."""
        return self.update_norm / self.weight_norm if self.weight_norm else 0.0


class AdapterAnalysis(Record):
    """Effect of training on each module. Deterministic, as is the run."""

    steps: tuple[int, ...]
    """Optimizer steps at which gradient norms were recorded."""
    modules: dict[str, ModuleAnalysis]
    """Analysis of each module, by its name in the base model."""
    unchanged_modules: tuple[str, ...]
    """Names of modules that hardly changed."""
    advice: tuple[str, ...]
    """Advice for the next run, each with the numbers behind it."""


def require_steps(planned: int) -> None:
    """Raise SettingsError if a training has too few optimizer steps for a profile."""
    if planned < MIN_PROFILE_STEPS:
        raise SettingsError(
            f"train --profile: found {planned} optimizer steps; expected at least {MIN_PROFILE_STEPS}; raise "
            "train.epochs or lower train.batch_size"
        )


class StepPart(Record):
    """Time of a part of a step."""

    name: PartName
    duration_s: float
    """Duration in seconds: the median over the measured steps. For `snapshot`, it is the median over three snapshots;
    for `evaluation`, the duration of one validation."""
    every_steps: float
    """Number of steps between two executions of this part."""
    share: float
    """Share of the time of an average step."""

    @property
    def step_s(self) -> float:
        """Average seconds per step."""
        return self.duration_s / self.every_steps


class OperatorTime(Record):
    """Time of a torch operator, without the operators that it calls."""

    name: str
    calls: float
    """Number of calls per step."""
    self_s: float
    """Seconds per step, in the traced steps."""
    share: float
    """Share of this operator in the time of all operators."""


class RooflineLimits(Record):
    """Roofline model: computation and memory traffic of a step, and the measured speed of the machine at both."""

    flops: float
    """Number of floating-point operations of a step: matrix products and attention, as executed."""
    model_flops_per_s: float
    """FLOP/s measured on matrix products of the model's shapes, in its compute type."""
    square_flops_per_s: float
    """FLOP/s measured on a product of large square matrices."""
    datasheet_flops_per_s: float | None
    """FLOP/s of dense 16-bit products in the data sheet; None for devices and types without one."""
    moved_bytes: dict[str, float]
    """Bytes moved in a step, by kind."""
    bandwidth_bytes_per_s: float
    """Bytes/s measured on a large copy, reads and writes counted."""

    @property
    def compute_s(self) -> float:
        """Seconds for the operations of a step, at the speed of the model's shapes."""
        return self.flops / self.model_flops_per_s

    @property
    def transfer_s(self) -> float:
        """Seconds for the memory traffic of a step."""
        return sum(self.moved_bytes.values()) / self.bandwidth_bytes_per_s

    @property
    def min_step_s(self) -> float:
        """Lower bound of the step time, with these shapes on this machine, in seconds."""
        return max(self.compute_s, self.transfer_s)


class TrainingProfile(Record):
    """Profile of several optimizer steps of a run."""

    run_id: str
    device: str
    compute_dtype: str
    threads: int
    torch: str
    warmup_steps: int
    """Number of warm-up steps, which allocate memory and compile kernels. They are not counted."""
    measured_steps: int
    traced_steps: int
    """Number of steps recorded by operator. These steps are slower, so they count only in `operators`."""
    step_s: float
    """Median duration of the measured steps."""
    quartiles_s: tuple[float, float]
    """Quartiles of the duration of the measured steps."""
    synchronised_step_s: float | None
    """Median duration in seconds of steps with a GPU synchronization between parts. The times in `parts` need this
    synchronization. None on a CPU."""
    parts: tuple[StepPart, ...]
    """Parts in the order of PARTS."""
    operators: tuple[OperatorTime, ...]
    """The slowest operators, slowest first."""
    micro_batches: float
    """Mean number of micro-batches per measured step. The next three fields are means per measured step too."""
    input_tokens: float
    padded_tokens: float
    trained_tokens: float
    limits: RooflineLimits
    saved_activation_bytes: int
    """Peak size in bytes of the activations that are saved for the backward pass of a micro-batch."""
    peak_bytes: int
    """Peak memory of the training device in the measured steps."""
    save_s: float
    """Time to save a snapshot as a checkpoint in a background thread, in seconds."""
    notes: tuple[str, ...] = ()

    @property
    def padding_share(self) -> float:
        """Share of padding in the computed tokens."""
        return 1 - self.input_tokens / self.padded_tokens

    @property
    def flops_utilization(self) -> float | None:
        """Share of the data sheet's FLOP/s that a step reaches with all executed operations, recomputed activations
        included.

        Without activation checkpointing, this is the model FLOPs utilization of Chowdhery et al. (2022).
        """
        sheet = self.limits.datasheet_flops_per_s
        return None if sheet is None else self.limits.flops / self.step_s / sheet
