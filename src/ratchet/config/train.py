"""Section `train` of params.yaml: quantization, adapter, optimizer and schedule of the training."""

import copy
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.fields import (
    Count,
    Fraction,
    Name,
    Names,
    NotNegative,
    Positive,
    PositiveCount,
    PositiveShare,
    Section,
    Share,
    ShareOrBound,
    convert_to_tuple,
    parse_number,
)


class EarlyStoppingSettings(Section):
    """When training stops before the last step."""

    patience: Count = 0
    """Validations in a row without improvement before training stops. 0: no such limit."""
    threshold: NotNegative = 0.0
    """Smallest decrease of the validation loss that counts as improvement, in nats per token."""
    plateau_validations: Annotated[Annotated[int, Field(ge=4)] | None, BeforeValidator(parse_number)] = None
    """Training stops if this many last validations show no improving trend (Mann-Kendall, p < 0.05). null: no test."""
    metrics: Annotated[tuple[Literal["loss", "token_accuracy"], ...], BeforeValidator(convert_to_tuple)] = ("loss",)
    """Training stops early only if none of these metrics of the validation improves: loss, token_accuracy."""

    @model_validator(mode="after")
    def _require_metric(self) -> "EarlyStoppingSettings":
        if not self.metrics:
            raise ValueError("metrics: found []; expected loss, token_accuracy, or both")
        return self

    @property
    def is_active(self) -> bool:
        """Whether training may stop early."""
        return self.patience > 0 or self.plateau_validations is not None


class GuardSettings(Section):
    """Reaction to non-finite and exploding gradients and to abnormal losses, before the optimizer step."""

    on_non_finite: Literal["skip", "roll_back", "stop"] = "skip"
    """Reaction if loss or gradient norm is NaN or infinite, and again when the step is recomputed."""
    on_spike: Literal["report", "skip", "roll_back"] = "report"
    """Reaction if the gradient norm is far above recent ones. `roll_back` discards the steps since a snapshot."""
    on_loss_spike: Literal["ignore", "report", "skip", "roll_back"] = "ignore"
    """Reaction if the loss of a step is far above recent ones."""
    on_rising_loss: Literal["ignore", "report", "roll_back", "stop"] = "ignore"
    """Reaction if the losses of the last window_steps rise, by the test of Mann (1945) and Kendall, p below 0.0001."""
    spike_deviations: Positive = 20.0
    """A spike: loss or unclipped gradient norm this many scaled median absolute deviations above the running median."""
    window_steps: Annotated[int, Field(ge=8), BeforeValidator(parse_number)] = 50
    """Good steps for median and deviation, and steps in which bad ones are counted."""
    max_bad_steps: Count = 5
    """Bad steps allowed within window_steps; one more stops the run with a diagnosis."""
    learning_rate_factor: PositiveShare = 1.0
    """At each bad step, multiply the learning rate of the following steps by this."""
    recovery_steps: Count = 0
    """Good steps after which one such multiplication is undone. 0: the rate stays lower for the rest of the run."""
    snapshot_every_steps: PositiveCount = 50
    """Steps between snapshots for `roll_back`. Without a `roll_back` rule no snapshot is taken."""

    @model_validator(mode="after")
    def _check_window(self) -> "GuardSettings":
        if self.on_rising_loss != "ignore" and self.window_steps < 10:
            raise ValueError(
                f"window_steps: found {self.window_steps}; on_rising_loss needs at least 10, because fewer losses "
                "that rise at every step may do so by chance"
            )
        return self

    @property
    def uses_roll_back(self) -> bool:
        """Whether any reaction is `roll_back`."""
        return "roll_back" in (self.on_non_finite, self.on_spike, self.on_loss_spike, self.on_rising_loss)

    @property
    def uses_losses(self) -> bool:
        """Whether any rule needs the losses of previous steps."""
        return (self.on_loss_spike, self.on_rising_loss) != ("ignore", "ignore")


class AdaLoraSettings(Section):
    """AdaLoRA's schedule (Zhang et al. 2023, section 3.3): ranks shrink from train.rank to target_rank on average."""

    target_rank: PositiveCount = 8
    """Average rank at the end; less than train.rank."""
    warmup_ratio: Share = 0.1
    """Fraction of all steps before ranks start to shrink."""
    final_ratio: Share = 0.3
    """Fraction of all steps at the end in which ranks do not change."""
    every_steps: PositiveCount = 10
    """Steps between two reductions."""
    beta1: ClassVar[float] = 0.85
    """Smoothing of the sensitivity of each weight (beta 1 of the paper)."""
    beta2: ClassVar[float] = 0.85
    """Smoothing of its uncertainty (beta 2 of the paper)."""
    orth_reg_weight: ClassVar[float] = 0.5
    """Weight of the orthogonality penalty on singular vectors (gamma of the paper)."""


class GradientCompressionSettings(Section):
    """Compression of the gradients that ranks exchange. With one rank nothing is sent."""

    method: Literal["none", "bf16", "fp16", "int8", "powersgd"] = "none"
    """16-bit or 8-bit numbers, or low-rank matrices (powersgd)."""
    warmup_ratio: Fraction = 0.1
    """Fraction of all steps at the start without compression. Used only by powersgd."""
    block_size: PositiveCount = 256
    """Numbers that share one scale. Used only by int8."""
    rank: PositiveCount = 12
    """Rank of the matrices that are sent; less than train.rank. Used only by powersgd."""
    bucket_bytes: Annotated[int, Field(ge=4), BeforeValidator(parse_number)] = 26_214_400
    """Size of the buckets in which gradients are sent, in bytes (float32)."""

    def uncompressed_steps(self, steps: int) -> int:
        """Return the number of first steps, of `steps` in all, whose gradients are sent without compression."""
        return math.ceil(self.warmup_ratio * steps) if self.method == "powersgd" else 0


class DistillSettings(Section):
    """Knowledge distillation: training on a teacher's probabilities too (Hinton et al. 2015)."""

    teacher: Name | None = None
    """Directory of a teacher model with the base's tokenizer. null: no distillation."""
    mode: Literal["offline", "online"] = "offline"
    """offline: `ratchet distill` saves the teacher's outputs beforehand. online: the teacher runs during training."""
    quantization: Literal["none", "nf4", "fp4"] = "none"
    """Storage of the teacher's linear layers: 4 bits (nf4, fp4), or train.compute_dtype (none)."""
    weight: PositiveShare = 0.5
    """Weight of the teacher's part of the loss; the answers of the data have the rest. 1: only the teacher's part."""
    temperature: Positive = 1.0
    """Both models' logits are divided by this. Above 1, unlikely tokens count more."""
    direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || student). reverse: KL(student || teacher), which is mode-seeking (MiniLLM)."""
    top_k: PositiveCount | None = 32
    """Most likely tokens saved per answer position (6 bytes each); the rest is one sum. null (online only): all."""

    @property
    def is_online(self) -> bool:
        """Whether the teacher is in memory during training."""
        return self.teacher is not None and self.mode == "online"

    @model_validator(mode="after")
    def _check_top_k(self) -> "DistillSettings":
        if self.top_k is None and self.mode == "offline":
            raise ValueError(
                "top_k: found null, but the probabilities of all tokens need too much disk space; set a number such "
                "as 32, or mode: online"
            )
        return self


Objective = Literal["sft", "dpo", "ipo", "orpo", "kto"]
PREFERENCE_STATISTICS = (
    "reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward", "chosen_log_probability",
    "rejected_log_probability", "kl",
)  # fmt: skip
"""Statistics of preference tuning (see `PreferenceLoss.statistics`)."""


def pattern_expression(key: str) -> str:
    """Return peft's regular expression for a key of rank_pattern or alpha_pattern (get_pattern_key)."""
    return rf"(.*\.)?({key})$"


def find_pattern_key(layer: str, keys: Iterable[str]) -> str | None:
    """Return the first key of a pattern that matches the name of a layer; None if none does."""
    return next((key for key in keys if re.match(pattern_expression(key), layer)), None)


class Train(Section):
    """Fine-tuning: quantization, adapter, optimizer and schedule."""

    objective: Objective = "sft"
    """sft: learn the answers. dpo, ipo, orpo: prefer the chosen ones of pairs. kto: prefer those labelled true."""
    beta: Positive = 0.1
    """dpo, ipo, kto: how strongly the model is kept near the reference. orpo: weight of the odds ratio."""
    quantization: Literal["nf4", "fp4", "none"] = "nf4"
    """Storage of the frozen base's linear layers: 4 bits (NF4 or FP4, Dettmers et al. 2023), or none (plain LoRA)."""
    double_quantization: bool = True
    """Quantize the quantization constants too (saves about 0.4 bits per parameter)."""
    quantization_storage: Literal["uint8", "bfloat16", "float16", "float32"] = "uint8"
    """Type of the tensors that hold 4-bit weights. Sharding over GPUs needs the type of the other weights."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of matrix products. `auto`: bfloat16 if the GPU supports it, float16 on other GPUs, float32 on CPUs."""
    adapter: Literal["lora", "dora", "adalora"] = "lora"
    """LoRA (Hu et al. 2021), DoRA (plus magnitudes, Liu et al. 2024), AdaLoRA (adaptive ranks, Zhang et al. 2023)."""
    rank: PositiveCount = 16
    """Rank r of the LoRA matrices; for AdaLoRA, the initial rank."""
    alpha: Positive = 32
    """LoRA scale: the update is multiplied by alpha / rank."""
    use_rslora: bool = False
    """rsLoRA (Kalajdzievski 2023): multiply the update by alpha / sqrt(rank) instead."""
    rank_pattern: dict[Name, PositiveCount] = Field(default_factory=dict)
    """Ranks of particular modules: names or regular expressions, matched against the end of the module's name."""
    alpha_pattern: dict[Name, Positive] = Field(default_factory=dict)
    """Alphas of particular modules, in the same way."""
    initialization: Literal["zero", "gaussian", "orthogonal", "eva", "loftq", "pissa"] = "zero"
    """zero, gaussian: B = 0, A uniform or normal. Others: see the documentation. Only loftq starts as another model."""
    init_adapter: Name | None = None
    """Start from trained weights: a RunId, adapter, checkpoint, hub id (org/name@commit) or `champion`. null: new."""
    adalora: AdaLoraSettings = AdaLoraSettings()
    """AdaLoRA's rank schedule. Used only if adapter is adalora."""
    adapter_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the trained adapter weights."""
    dropout: Fraction = 0.0
    """Dropout probability on the input of the LoRA matrices."""
    target_modules: str | Annotated[Names, Field(min_length=1)] = "all"
    """Layers with an adapter: `attention`, `mlp`, `all` (both), a list of module names, or a regular expression."""
    epochs: Annotated[Positive, Field(le=1e6)] = 3
    """Passes over the training rows; may be a fraction."""
    batch_size: PositiveCount = 32
    """Rows (packs, if packed) per optimizer step over all devices, independent of the micro-batch size."""
    batching: Literal["shuffled", "by_length", "packed"] = "shuffled"
    """Batches of random rows, of rows of similar length (less padding), or of packs that hold several separate rows."""
    pack_tokens: PositiveCount = 1024
    """Length of a pack in tokens; at least prepare.max_tokens. Used only if batching is packed."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation: fused kernels (sdpa) or matrix products (eager). `auto`: sdpa if supported."""
    learning_rate: Positive = 2e-4
    """Peak learning rate."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False), BeforeValidator(parse_number)] = 1.0
    """LoRA+ (Hayou et al. 2024): the learning rate of the B matrices is this times learning_rate. 1: the same."""
    schedule: Literal["cosine", "linear", "constant", "polynomial", "exponential", "warmup_stable_decay"] = "cosine"
    """Decay of the learning rate after warm-up. warmup_stable_decay: constant, then a cooldown (Hägele et al. 2024)."""
    final_learning_rate_share: ShareOrBound = 0.0
    """The learning rate decays to this share of learning_rate; above 0 for `exponential`. Not used by `constant`."""
    polynomial_power: Positive = 2.0
    """Power of the share of steps that are left. Used only if schedule is polynomial; 1 is the same as linear."""
    cooldown_ratio: PositiveShare = 0.2
    """Fraction of all steps at the end in which the rate decays. Used only if schedule is warmup_stable_decay."""
    warmup_ratio: Fraction = 0.05
    """Fraction of all steps in which the learning rate rises linearly."""
    warmup_steps: Annotated[Count | None, BeforeValidator(parse_number)] = None
    """The same as a number of optimizer steps. null: warmup_ratio applies."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """torch's AdamW, or bitsandbytes' with 8-bit states (paged: states can move to host memory; GPU only)."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of the adapter weights."""
    max_grad_norm: Positive = 1.0
    """Clip gradients to this global L2 norm."""
    guards: GuardSettings = GuardSettings()
    """Reaction to non-finite and exploding gradients and to abnormal losses, before the optimizer step."""
    validate_every_steps: PositiveCount = 50
    """Optimizer steps between validations. The last step is always validated."""
    validate_every_epochs: Annotated[Positive | None, BeforeValidator(parse_number)] = None
    """The same as a share of an epoch (0.25: four times), rounded to steps. null: validate_every_steps applies."""
    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()
    """When training stops before the last step."""
    final_checkpoint: Literal["best", "last"] = "best"
    """Checkpoint that becomes the adapter: lowest validation loss, or the last step."""
    seed: Count = 0
    """Seed of adapter initialization, row order and dropout."""
    gradient_compression: GradientCompressionSettings = GradientCompressionSettings()
    """Compression of the gradients that ranks exchange. With one rank nothing is sent."""
    distill: DistillSettings = DistillSettings()
    """Knowledge distillation: training on a teacher's probabilities too (Hinton et al. 2015)."""

    def identity(self) -> dict[str, Any]:
        """Return the section as JSON for digests."""
        return train_identity(self.model_dump(mode="json"))

    @property
    def base_weight_format(self) -> str:
        """Storage of the base's weights in training and evaluation, such as `nf4+dq uint8` or `none`."""
        if self.quantization == "none":
            return "none"
        return f"{self.quantization}{'+dq' if self.double_quantization else ''} {self.quantization_storage}"

    @model_validator(mode="after")
    def _check_combinations(self) -> "Train":
        if problem := _find_conflict(self):
            raise ValueError(problem)
        return self

    @property
    def rows_per_example(self) -> int:
        """Number of answers that the objective compares; each is a row of tokens."""
        return 1 if self.objective in ("sft", "kto") else 2

    @property
    def loss_unit(self) -> str:
        """Unit of the loss."""
        return {"sft": "nats per answer token", "kto": "per answer"}.get(self.objective, "per pair of answers")

    @property
    def loss_description(self) -> str:
        """Unit of the loss and, unless it is `sft`, the objective, for charts."""
        return self.loss_unit if self.objective == "sft" else f"{self.objective.upper()}, {self.loss_unit}"

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares the model with a copy of its weights from before the first step."""
        return self.objective in ("dpo", "ipo", "kto")

    @property
    def grouping_obstacle(self) -> str | None:
        """Why a run with these settings cannot share its base with other runs of a process; None if it can."""
        if self.objective != "sft":
            return f"objective: {self.objective} compares answers of a batch"
        if self.initialization == "pissa":
            return "initialization: pissa changes the weights of the base"
        if self.distill.teacher is not None:
            return "distill.teacher: the teacher would be loaded for each run"
        return None


REMOVED: Mapping[str, dict[str, Any]] = {
    "gradient_compression": {"topk_fraction": 0.4},
    "adalora": {"beta1": 0.85, "beta2": 0.85, "orth_reg_weight": 0.5},
}
"""Settings that were removed, with their former defaults, by section."""

ADDED = (
    "final_learning_rate_share",
    "polynomial_power",
    "cooldown_ratio",
    "warmup_steps",
    "validate_every_epochs",
    "early_stopping.plateau_validations",
    "early_stopping.metrics",
    "guards.on_loss_spike",
    "guards.on_rising_loss",
    "guards.recovery_steps",
)
"""Settings that are newer than many runs. They are part of the identity only if they differ from their default."""


def train_identity(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the section (as JSON) that determines the result.

    `distill` is included only if a teacher is set, and its `mode` only if it is `online`, and `init_adapter` only if it
    is set, `objective` and `beta` only if the objective is not `sft`, and the settings in ADDED only if they differ
    from their defaults, because many runs are older than these settings. Settings that were removed are included with
    their former default. So runs keep their identity.
    """
    identity, distill = copy.deepcopy(dict(train)), train.get("distill")
    for section, removed in REMOVED.items():
        if isinstance(values := identity.get(section), dict):
            identity[section] = removed | values
    defaults = Train().model_dump(mode="json")
    for name in ADDED:
        section, _, leaf = name.rpartition(".")
        values, default = (identity.get(section), defaults[section]) if section else (identity, defaults)
        if isinstance(values, dict) and leaf in values and values[leaf] == default[leaf]:
            del values[leaf]
    if identity.get("init_adapter") is None:
        identity.pop("init_adapter", None)
    if identity.get("objective") == "sft":
        del identity["objective"], identity["beta"]
    if isinstance(distill, dict):
        del identity["distill"]
        if distill.get("teacher") is not None:
            is_offline = distill.get("mode", "offline") == "offline"
            identity["distill"] = {key: value for key, value in distill.items() if not (is_offline and key == "mode")}
    return identity


def _find_conflict(train: Train) -> str | None:
    """Return why settings exclude each other, or None."""
    if problem := _find_initialization_conflict(train) or _find_optimizer_conflict(train):
        return problem
    if isinstance(train.target_modules, str):
        try:
            re.compile(train.target_modules)
        except re.error as error:
            return (
                f"target_modules: found {train.target_modules!r}; expected attention, mlp, all, a list of module "
                f"names, or a regular expression ({error})"
            )
    return _find_objective_conflict(train) or (_find_adalora_conflict(train) if train.adapter == "adalora" else None)


def _find_objective_conflict(train: Train) -> str | None:
    if train.objective != "sft" and train.distill.teacher is not None:
        return f"objective: {train.objective} has no teacher; set train.distill.teacher: null, or train.objective: sft"
    if train.objective != "sft" and "token_accuracy" in train.early_stopping.metrics:
        return (
            f"early_stopping.metrics: found token_accuracy, which train.objective: {train.objective} does not "
            "compute; set [loss], or train.objective: sft"
        )
    if train.objective == "kto" and train.batch_size == 1:
        return (
            "batch_size: found 1; objective: kto compares each answer with those to other prompts of its batch; set at "
            "least 2"
        )
    return None


def _find_initialization_conflict(train: Train) -> str | None:
    name = train.initialization
    if train.init_adapter is not None and (name != "zero" or train.adapter == "adalora"):
        key, value = ("adapter", "adalora") if name == "zero" else ("initialization", name)
        return (
            f"init_adapter: trained weights have no state of train.{key}: {value}; set train.init_adapter: null, or "
            f"another train.{key}"
        )
    if name == "pissa":
        return _find_pissa_conflict(train)
    if name != "zero" and train.adapter == "adalora":
        return (
            f"initialization: {name} is for LoRA's two matrices, and adalora has three; set train.initialization: zero"
        )
    if name == "loftq" and (train.quantization == "none" or train.adapter == "dora"):
        found = f"train.quantization: {train.quantization} and train.adapter: {train.adapter}"
        return f"initialization: loftq needs 4-bit weights and train.adapter: lora, found {found}; set those, or zero"
    if name == "orthogonal" and (odd := [rank for rank in (train.rank, *train.rank_pattern.values()) if rank % 2]):
        return f"initialization: orthogonal splits the rank into halves; found rank {odd[0]}; set an even one"
    return None


def _find_pissa_conflict(train: Train) -> str | None:
    if train.quantization != "none":
        return (
            f"initialization: pissa subtracts singular vectors from the base's weights, which peft supports for 16 and "
            f"32 bits only, not {train.quantization}; set train.quantization: none, or train.initialization: zero"
        )
    if train.adapter != "lora":
        return f"initialization: pissa supports plain LoRA only, not {train.adapter}; set train.adapter: lora"
    return None


def _find_optimizer_conflict(train: Train) -> str | None:
    if train.schedule == "exponential" and train.final_learning_rate_share == 0:
        return (
            "final_learning_rate_share: found 0, which an exponential decay never reaches; set a share above 0, such "
            "as 0.1, or another train.schedule"
        )
    if train.adapter_dtype == "float16" and train.optimizer == "adamw":
        return (
            "adapter_dtype: with float16, AdamW's first step gives NaN (its epsilon rounds to 0); set bfloat16 or "
            "float32"
        )
    return None


def _find_adalora_conflict(train: Train) -> str | None:
    if train.adalora.target_rank >= train.rank:
        return (
            f"adalora.target_rank: found {train.adalora.target_rank}; expected less than the initial rank "
            f"({train.rank})"
        )
    if train.adalora.warmup_ratio + train.adalora.final_ratio >= 1:
        return "adalora: warmup_ratio + final_ratio leave no steps in which ranks can shrink; set a sum below 1"
    if train.use_rslora or train.rank_pattern or train.alpha_pattern:
        return (
            "adapter: adalora adapts ranks itself; remove train.use_rslora, train.rank_pattern and train.alpha_pattern"
        )
    if train.loraplus_lr_ratio != 1:
        return "loraplus_lr_ratio: LoRA+ needs LoRA's two matrices, and adalora has three; set it to 1"
    if train.guards.uses_roll_back:
        return "guards: roll_back would restore ranks that adalora has removed; set skip or stop"
    return None
