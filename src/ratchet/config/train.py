"""Section `train` of params.yaml: what is learned from the prepared data, and how."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.fields import (
    Count,
    Fraction,
    Name,
    NotNegative,
    Positive,
    PositiveCount,
    Section,
    Share,
    convert_to_tuple,
    parse_number,
)


class EarlyStoppingSettings(Section):
    """When to stop before the last step."""

    patience: Count = 0
    """Validations in a row without improvement before training stops; 0 never stops early."""
    threshold: NotNegative = 0.0
    """Improvement of validation loss that counts, in nats per token."""


class GuardSettings(Section):
    """What is done about a step whose loss or gradient is not as it should be, before the optimizer sees it."""

    on_non_finite: Literal["skip", "roll_back", "stop"] = "skip"
    """Loss or gradient norm is NaN or infinite, and is so again when the step is computed a second time."""
    on_spike: Literal["report", "skip", "roll_back"] = "report"
    """The gradient norm is far above those of the steps before; `roll_back` leaves out the steps since the snapshot."""
    spike_deviations: Positive = 20.0
    """How far: gradient norm before clipping above the running median, in scaled median absolute deviations."""
    window_steps: Annotated[int, BeforeValidator(parse_number), Field(ge=8)] = 50
    """Good steps that median and deviation are taken over, and steps in which bad ones are counted."""
    patience: Count = 5
    """Bad steps within window_steps that are put up with; one more stops the run with a diagnosis."""
    rate_factor: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1)] = 1.0
    """The learning rate of the rest of the run is multiplied by this at each bad step."""
    snapshot_every_steps: PositiveCount = 50
    """Steps between the snapshots that `roll_back` goes back to; none is taken when no rule rolls back."""

    @property
    def roll_back(self) -> bool:
        """Whether any rule goes back to a snapshot."""
        return "roll_back" in (self.on_non_finite, self.on_spike)


class AdaLoraSettings(Section):
    """AdaLoRA's schedule (Zhang et al. 2023, section 3.3): ranks are cut from train.rank to target_rank on average."""

    target_rank: PositiveCount = 8
    """Average rank at the end; below train.rank."""
    begin: Share = 0.1
    """Fraction of all steps before anything is cut."""
    end: Share = 0.3
    """Fraction of all steps at the end in which ranks stay as they are."""
    every_steps: PositiveCount = 10
    """Steps between two cuts."""
    sensitivity: Share = 0.85
    """Smoothing of the sensitivity of each weight (beta 1 of the paper)."""
    uncertainty: Share = 0.85
    """Smoothing of its uncertainty (beta 2 of the paper)."""
    orthogonality: NotNegative = 0.5
    """Weight of the penalty that keeps singular vectors orthogonal (gamma of the paper)."""


class GradientCompressionSettings(Section):
    """How gradients are made smaller where several ranks train together; with one rank nothing is sent."""

    method: Literal["none", "bf16", "fp16", "int8", "powersgd", "topk"] = "none"
    """Numbers of 16 or 8 bits, matrices of low rank, or the largest numbers only. docs/compression.md compares them."""
    warmup: Fraction = 0.1
    """Fraction of all steps whose gradients are sent whole at first; read only when method is powersgd or topk."""
    block: PositiveCount = 256
    """Numbers that share one scale; read only when method is int8."""
    rank: PositiveCount = 12
    """Rank of the matrices that are sent; below train.rank. Read only when method is powersgd."""
    share: Share = 0.4
    """Of all numbers, those that are sent in a step; what is left adds up. Read only when method is topk."""
    bucket_bytes: Annotated[int, BeforeValidator(parse_number), Field(ge=4)] = 26_214_400
    """Gradients are sent in pieces of so many bytes (float32)."""

    def whole_steps(self, steps: int) -> int:
        """How many of all `steps` are sent whole at first."""
        return math.ceil(self.warmup * steps) if self.method in ("powersgd", "topk") else 0


class DistillSettings(Section):
    """Learning from a larger model's probabilities too (Hinton et al. 2015); docs/distillation.md."""

    teacher: Name | None = None
    """Directory of a model with the base's tokenizer. null: none."""
    asked: Literal["before", "during"] = "before"
    """Before training, by `ratchet distill`, which writes to disk; or during it, in memory beside the student."""
    quantization: Literal["none", "nf4", "fp4"] = "none"
    """Storage of the teacher's linear layers while it is asked: 4 bits, or as compute_dtype says."""
    weight: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1)] = 0.5
    """Of the teacher's part of the loss; the given answers have the rest. 1: answers count only through the teacher."""
    temperature: Positive = 1.0
    """Logits of both models are divided by it; above 1 unlikely tokens count more."""
    direction: Literal["forward", "reverse"] = "forward"
    """KL(teacher || student), or KL(student || teacher), which leaves out what the student cannot do (MiniLLM)."""
    top_k: PositiveCount | None = 32
    """Most probable tokens kept of each answer position, 6 bytes each on disk; the rest is one. null (during): all."""

    @property
    def stays(self) -> bool:
        """Whether the teacher is in memory while the student learns."""
        return self.teacher is not None and self.asked == "during"

    @model_validator(mode="after")
    def _fits_on_disk(self) -> "DistillSettings":
        if self.top_k is None and self.asked == "before":
            raise ValueError(
                "top_k: null: probabilities of every token are too many for the disk; set a number such as 32, or "
                "asked: during"
            )
        return self


class Train(Section):
    """What is learned from the prepared data, and how."""

    quantization: Literal["nf4", "fp4", "none"] = "nf4"
    """Storage of the frozen base's linear layers: 4 bits (NF4 or FP4, Dettmers et al. 2023), or none (plain LoRA)."""
    double_quantization: bool = True
    """Quantise the quantisation constants too (saves about 0.4 bits a parameter)."""
    quantization_storage: Literal["uint8", "bfloat16", "float16", "float32"] = "uint8"
    """Type of the tensors that hold 4-bit weights; sharding over GPUs wants the type of the other weights."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of matrix products; `auto`: bfloat16 where the GPU has it, float16 on other GPUs, float32 on CPUs."""
    adapter: Literal["lora", "dora", "adalora"] = "lora"
    """LoRA (Hu et al. 2021), DoRA (magnitudes too, Liu et al. 2024) or AdaLoRA (ranks too, Zhang et al. 2023)."""
    rank: PositiveCount = 16
    """Rank r of the LoRA matrices; for AdaLoRA the one to begin with."""
    alpha: Positive = 32
    """LoRA scale: the update is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """rsLoRA (Kalajdzievski 2023): multiply by alpha / sqrt(rank) instead."""
    rank_pattern: dict[Name, PositiveCount] = Field(default_factory=dict)
    """Another rank for some modules: names or regular expressions, matched against the end of the module's name."""
    alpha_pattern: dict[Name, Positive] = Field(default_factory=dict)
    """The same for alpha."""
    initialization: Literal["zero", "pissa"] = "zero"
    """B = 0 (nothing changes at first), or PiSSA (principal singular vectors, Meng et al. 2024; no 4 bits)."""
    adalora: AdaLoraSettings = AdaLoraSettings()
    """How AdaLoRA shares out ranks; read only when adapter is adalora."""
    adapter_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the matrices that learn."""
    dropout: Fraction = 0.0
    """Dropout probability on the input of the LoRA matrices."""
    targets: str | Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = "all"
    """Layers with an adapter: `attention`, `mlp`, `all` (both), a list of module names, or a regular expression."""
    epochs: Positive = 3
    """Passes over the training rows; may be a fraction."""
    batch_rows: PositiveCount = 32
    """Rows (packs, when packed) in one optimizer step, however many micro-batches, devices or restarts it takes."""
    batching: Literal["shuffled", "by_length", "packed"] = "shuffled"
    """Rows of a batch: drawn at random; of like length (less padding); or packed, several to a sequence, kept apart."""
    pack_tokens: PositiveCount = 1024
    """Tokens of one pack; at least prepare.max_tokens. Read only when batching is packed."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention by fused kernels (sdpa) or plain matrix products (eager); `auto`: sdpa where the model has it."""
    learning_rate: Positive = 2e-4
    """Peak learning rate."""
    rate_ratio: Annotated[float, BeforeValidator(parse_number), Field(ge=1, allow_inf_nan=False)] = 1.0
    """LoRA+ (Hayou et al. 2024): the matrices B learn at this multiple of learning_rate; 1: all alike."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay from the peak to zero after the warm-up."""
    warmup: Fraction = 0.05
    """Fraction of all steps in which the learning rate rises linearly."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """AdamW of torch, or of bitsandbytes with 8-bit states (paged: they may move to host memory; GPU only)."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of the adapter matrices."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global L2 norm."""
    guards: GuardSettings = GuardSettings()
    """What is done about steps that go wrong."""
    validate_every_steps: PositiveCount = 50
    """Optimizer steps between two validations; the last step is always validated."""
    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()
    """When to stop before the last step."""
    keep: Literal["best", "last"] = "best"
    """Which checkpoint becomes the adapter: lowest validation loss, or the last step."""
    seed: Count = 0
    """Seed of adapter initialisation, order of rows, and dropout."""
    compression: GradientCompressionSettings = GradientCompressionSettings()
    """How gradients are made smaller where several ranks train together."""
    distill: DistillSettings = DistillSettings()
    """Learning from a larger model's probabilities, beside the answers."""

    def identity(self) -> dict[str, Any]:
        """As JSON, for digests."""
        return train_identity(self.model_dump(mode="json"))

    @property
    def base_form(self) -> str:
        """How the base's weights are held while an adapter is trained on them, and evaluated: `nf4+dq uint8`."""
        if self.quantization == "none":
            return "none"
        return f"{self.quantization}{'+dq' if self.double_quantization else ''} {self.quantization_storage}"

    @model_validator(mode="after")
    def _fits_together(self) -> "Train":
        if problem := _find_conflict(self):
            raise ValueError(problem)
        return self


def train_identity(train: Mapping[str, Any]) -> dict[str, Any]:
    """What of the section, as JSON, decides. `distill` only where somebody teaches, and of it `asked` only where it is
    during training: what is not named came later than many runs."""
    found, distill = dict(train), train.get("distill")
    if isinstance(distill, dict):
        del found["distill"]
        if distill.get("teacher") is not None:
            early = distill.get("asked", "before") == "before"
            found["distill"] = {name: value for name, value in distill.items() if not (early and name == "asked")}
    return found


def _find_conflict(train: Train) -> str | None:
    """What cannot go together, and why; None when everything can."""
    four_bits = train.quantization != "none"
    if train.initialization == "pissa" and four_bits:
        return (
            f"initialization: pissa takes singular vectors off the base's weights, and peft does so with weights in 16 "
            f"or 32 bits only, not {train.quantization}; set quantization: none, or initialization: zero"
        )
    if train.initialization == "pissa" and train.adapter != "lora":
        return f"initialization: pissa is one of plain LoRA, not of {train.adapter}; set adapter: lora"
    if train.adapter_dtype == "float16" and train.optimizer == "adamw":
        return (
            "adapter_dtype: float16 makes NaN of AdamW's first step (its epsilon is 0 there); set bfloat16 or float32"
        )
    if train.adapter == "adalora":
        return _find_adalora_conflict(train)
    return None


def _find_adalora_conflict(train: Train) -> str | None:
    if train.adalora.target_rank >= train.rank:
        return (
            f"adalora.target_rank: {train.adalora.target_rank} must be below rank ({train.rank}), which it begins with"
        )
    if train.adalora.begin + train.adalora.end >= 1:
        return "adalora: begin and end together leave no steps to cut ranks in; their sum must be below 1"
    if train.rank_stabilized or train.rank_pattern or train.alpha_pattern:
        return "adapter: adalora finds ranks itself; it takes no rank_stabilized, rank_pattern or alpha_pattern"
    if train.rate_ratio != 1:
        return "rate_ratio: LoRA+ is defined for the two matrices of LoRA, not for adalora's three; set it to 1"
    if train.guards.roll_back:
        return "guards: roll_back would bring back ranks that adalora has cut; set skip or stop"
    return None
