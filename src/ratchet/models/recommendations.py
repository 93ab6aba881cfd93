"""Recommends changes of params.yaml, each with reason and source; good values get no recommendation.

A rule changes a value only if the value is outside the range that published work supports. Rules are applied in order,
and each rule sees the changes of earlier rules.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.config.units import format_bytes
from ratchet.data.batches import split_micro_batches
from ratchet.errors import SettingsError
from ratchet.models import targets
from ratchet.models.memory import parameters as storage
from ratchet.models.memory.trace import Device
from ratchet.models.model_spec import LayerSpec, ModelSpec
from ratchet.storage.records.data import DatasetCard, LengthDistribution

QLORA_PAPER = "Dettmers et al. 2023, QLoRA, arXiv:2305.14314"
LORA_WITHOUT_REGRET = "Schulman et al. 2025, LoRA Without Regret, thinkingmachines.ai/blog/lora"
TINKER_PRIMER = "Thinking Machines 2025, LoRA primer of Tinker, tinker-docs.thinkingmachines.ai"
LORA_LEARNS_LESS = "Biderman et al. 2024, LoRA Learns Less and Forgets Less, arXiv:2405.09673"
RSLORA_PAPER = "Kalajdzievski 2023, rsLoRA, arXiv:2312.03732"
LORA_PLUS_PAPER = "Hayou et al. 2024, LoRA+, arXiv:2402.12354"
REPEATED_DATA_PAPER = "Muennighoff et al. 2023, Scaling Data-Constrained Language Models, arXiv:2305.16264"
DATASET_CARD_SOURCE = "counted on this project's dataset card"
BASE_CONFIG_SOURCE = "read from the base's config.json"
BITSANDBYTES_SOURCE = "bitsandbytes 0.50: paged memory requires CUDA"
CHECKPOINTING_PAPER = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174"
FSDP_PAPER = "Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277"
EIGHT_BIT_PAPER = "Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861"
FORECAST_SOURCE = "forecast for this machine"

LEARNING_RATE_TOLERANCE = 4.0
"""Learning rates within this factor of the reference are accepted, because optima are flat and differ between tasks."""
SCALE_RANGE = (0.25, 4.0)
"""Accepted range of alpha / rank: from QLoRA's 16 / 64 to twice the value 2 of Biderman et al."""
MAX_RANK = 256
"""Largest proposed rank, and the largest in most experiments of Biderman et al. and Schulman et al."""
MIN_STEPS = 100
"""Number of steps below which a model learns little, because the warm-up takes some of them and B starts at zero."""
SMALL_BATCH_ROWS = 16
"""Smallest recommended number of rows in a batch: the batch size of QLoRA's runs with 7B and 13B models."""
MIN_KTO_BATCH = 2
"""Smallest recommended batch size for `kto`, which compares each answer with those to other prompts of its batch."""
USEFUL_EPOCHS = 4.0
MAX_EPOCHS = 16.0
"""Muennighoff et al.: up to 4 epochs are nearly as useful as new data; after 16 epochs there is little gain."""
MAX_PADDED_SHARE = 0.25
"""Share of computation spent on padding above which rows should be grouped by length."""
MAX_LOST_SHARE = 0.01
"""Share of rows lost because of their length above which a rule applies."""
MEMORY_SHARE = 0.9
"""Share of the available memory that proposed settings may need by the forecast, which may be a tenth too low."""
MIN_ROW_TOKENS = 64
"""Smallest row length that is proposed, in tokens."""
MICRO_BATCH_SIZE, ACTIVATION_CHECKPOINTING, SHARD_BASE = (
    "machine.micro_batch_size",
    "machine.activation_checkpointing",
    "machine.shard_base",
)

Values = dict[str, Any]
"""New values of settings by key, such as `train.rank`."""


@dataclass(frozen=True)
class SettingProposal:
    """A recommended value of one setting."""

    key: str
    before: Any
    value: Any
    reason: str
    source: str


@dataclass(frozen=True)
class RecommendationInputs:
    """Inputs of the rules. Unknown inputs are None; rules that need them do not apply."""

    settings: Settings
    device: Device
    spec: ModelSpec | None
    data: DatasetCard | None
    base_loss: float | None = None
    """Loss of the base on validation rows, in nats per answer token."""

    @property
    def rows(self) -> LengthDistribution | None:
        """Token lengths of the training rows."""
        return self.data.lengths.get("train") if self.data else None


@dataclass(frozen=True)
class RecommendedChange:
    """New values of settings that change together for one reason."""

    values: Values
    """The first key is the main change; the other settings change because of it."""
    reason: str
    source: str


Rule = Callable[[RecommendationInputs], RecommendedChange | None]


def apply_rules(
    facts: RecommendationInputs, rules: Sequence[Rule]
) -> tuple[RecommendationInputs, list[RecommendedChange]]:
    """Apply the rules in order; return the inputs with all changes applied, and the changes."""
    changes = []
    for rule in rules:
        change = rule(facts)
        if change is not None:
            facts = replace(facts, settings=params_file.apply_changes(facts.settings, change.values))
            changes.append(change)
    return facts, changes


def merge_into_proposals(settings: Settings, changes: Sequence[RecommendedChange]) -> list[SettingProposal]:
    """Merge changes by key: a setting that several rules change gets one proposal with all reasons."""
    proposals: dict[str, SettingProposal] = {}
    for change in changes:
        main_key = next(iter(change.values))
        for key, value in change.values.items():
            section, _, name = key.partition(".")
            before = getattr(getattr(settings, section), name)
            reason = change.reason if key == main_key else f"goes with {main_key}"
            source = change.source
            if earlier := proposals.pop(key, None):
                reason = f"{earlier.reason}; {reason}"
                source = "; ".join(dict.fromkeys([*earlier.source.split("; "), *source.split("; ")]))
            if value != before:
                proposals[key] = SettingProposal(key, before, value, reason, source)
    return list(proposals.values())


# Rules about quantization, the adapter and the optimizer.


def recommend_number_format(facts: RecommendationInputs) -> RecommendedChange | None:
    if facts.settings.train.quantization != "fp4":
        return None
    reason = "NF4 preserves more of a model than FP4 with as many bits; `ratchet evaluate --quantization` measures it"
    return RecommendedChange({"train.quantization": "nf4"}, reason, f"{QLORA_PAPER}, table 2")


def recommend_target_layers(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend adapters on all linear layers instead of attention only."""
    current, chosen = facts.settings.train.target_modules, tuple[LayerSpec, ...]()
    if current in ("all", "mlp"):
        return None
    values = {"train.target_modules": "all"}
    if facts.spec is not None:
        try:
            chosen = targets.choose(facts.spec.layers, current, facts.spec.others)
        except SettingsError as error:
            return RecommendedChange(
                values, f"no such layers ({str(error).removeprefix('train.target_modules: ')})", BASE_CONFIG_SOURCE
            )
    if any(layer.role != "attention" for layer in chosen) or not (chosen or current == "attention"):
        return None
    described = f"{len(chosen)} attention layers" if chosen else "attention"
    reason = (
        f"adapters are only on {described}; adapters on the MLP too learn more, and with equal numbers of parameters "
        "attention alone learns less"
    )
    return RecommendedChange(values, reason, f"{LORA_WITHOUT_REGRET}; {LORA_LEARNS_LESS}; {QLORA_PAPER}, figure 2")


def limit_rank_to_matrix(facts: RecommendationInputs) -> RecommendedChange | None:
    """Limit the rank to the smaller side of the smallest matrix."""
    if facts.spec is None:
        return None
    train = facts.settings.train
    try:
        chosen = targets.choose(facts.spec.layers, train.target_modules, facts.spec.others)
    except SettingsError:
        return None
    layer = min(chosen, key=lambda spec: min(spec.inputs, spec.outputs))
    side = min(layer.inputs, layer.outputs)
    if train.rank <= side:
        return None
    reason = f"{layer.name} is [{layer.outputs}, {layer.inputs}]: its updates have at most rank {side}"
    return _change_rank(facts, 2 ** int(math.log2(side)), reason, BASE_CONFIG_SOURCE)


def recommend_rank_for_data(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend at least as many trainable parameters as trained tokens, or fewer if the base predicts them well.

    The limit is the information to be learned. The source estimates it as one bit per token; a base with a lower loss
    leaves less. A higher loss of a base that does not know the format of the answers says little, because it falls
    within the first steps.
    """
    train, rows = facts.settings.train, facts.rows
    if facts.spec is None or rows is None or train.adapter == "adalora":
        return None
    parameters = storage.count_trainable_parameters(facts.spec, train)
    bits = rows.trained * min(1.0, (math.inf if facts.base_loss is None else facts.base_loss) / math.log(2))
    if parameters >= bits:
        return None
    side = min(min(layer.inputs, layer.outputs) for layer in facts.spec.layers if layer.role in ("attention", "mlp"))
    needed = train.rank * 2 ** math.ceil(math.log2(bits / parameters))
    rank = min(needed, MAX_RANK, 2 ** int(math.log2(side)))
    if rank <= train.rank:
        return None
    reason = (
        f"{parameters:,} parameters learn from {rows.trained:,} answer tokens: an adapter with fewer parameters than "
        "tokens lacks capacity, and learns less than full fine-tuning"
    )
    if facts.base_loss is not None:
        reason += f" (the base has a loss of {facts.base_loss:.3g} nats per token: about {bits:,.0f} bits to learn)"
    return _change_rank(facts, rank, reason, f"{LORA_WITHOUT_REGRET}; {TINKER_PRIMER}")


def _change_rank(facts: RecommendationInputs, rank: int, reason: str, source: str) -> RecommendedChange:
    """Change the rank at the same scale, so that the learning rate stays appropriate."""
    train = facts.settings.train
    ratio = rank / train.rank
    alpha = train.alpha * (math.sqrt(ratio) if train.use_rslora else ratio)
    values: dict[str, Any] = {"train.rank": rank, "train.alpha": round(alpha, 3)}
    return RecommendedChange(values, reason, source)


def recommend_scale(facts: RecommendationInputs) -> RecommendedChange | None:
    """Keep alpha / rank (alpha / sqrt(rank) with rsLoRA) within the range of published recipes."""
    train = facts.settings.train
    if train.adapter == "adalora" or train.alpha_pattern or train.rank_pattern:
        return None
    divisor = math.sqrt(train.rank) if train.use_rslora else train.rank
    scale = train.alpha / divisor
    if SCALE_RANGE[0] <= scale <= SCALE_RANGE[1]:
        return None
    formula = "alpha / sqrt(rank)" if train.use_rslora else "alpha / rank"
    reason = f"{formula} is {scale:.3g}; published recipes with known learning rates use {SCALE_RANGE[0]:g} to 2"
    source = f"{LORA_LEARNS_LESS}; {QLORA_PAPER}" + (f"; {RSLORA_PAPER}" if divisor < train.rank else "")
    return RecommendedChange({"train.alpha": round(2 * divisor, 1)}, reason, source)


def recommend_learning_rate(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend a learning rate for the model's size."""
    train = facts.settings.train
    if facts.spec is None:
        return None
    reference, reason, source = _reference_rate(facts.spec)
    if reference / LEARNING_RATE_TOLERANCE <= train.learning_rate <= reference * LEARNING_RATE_TOLERANCE:
        return None
    side = "above" if train.learning_rate > reference else "below"
    factor = max(train.learning_rate / reference, reference / train.learning_rate)
    return RecommendedChange({"train.learning_rate": reference}, f"{factor:.3g} times {side} {reason}", source)


def _reference_rate(spec: ModelSpec) -> tuple[float, str, str]:
    """Return the reference rate with description and source: QLoRA's rate from 1B parameters on, a fit by width below.

    The fit, 5e-4 (2000 / width) ^ 0.781, was made by Thinking Machines for Llama models of at least 1B parameters, so
    smaller models use an extrapolation. For Ratchet's tiny base of width 256 the fit gives 2.5e-3, which is rounded to
    2e-3; the best measured rate is 2e-3.
    """
    size = f"a model of {spec.parameters / 1e9:.3g}B parameters"
    if spec.parameters >= 1e9:
        rate = 2e-4 if spec.parameters < 20e9 else 1e-4
        return rate, f"{rate:g}, which works well for {size} (ten times the rate of full fine-tuning)", (
            f"{QLORA_PAPER}, appendix B; {LORA_WITHOUT_REGRET}"
        )  # fmt: skip
    text_config = spec.config.get_text_config()
    width = getattr(text_config, "hidden_size", None) or 2000
    fitted = float(f"{5e-4 * (2000 / width) ** 0.781:.0e}")
    description = f"{fitted:g}, the fit for LoRA at width {width} (extrapolated below 1B)"
    return fitted, description, f"{LORA_WITHOUT_REGRET}; {TINKER_PRIMER}"


def recommend_lora_plus_ratio(facts: RecommendationInputs) -> RecommendedChange | None:
    """Limit the LoRA+ ratio to the range of its paper."""
    if facts.settings.train.loraplus_lr_ratio <= 64:
        return None
    reason = f"B has {facts.settings.train.loraplus_lr_ratio:g} times the learning rate; the paper proposes 16"
    return RecommendedChange({"train.loraplus_lr_ratio": 16.0}, reason, LORA_PLUS_PAPER)


def recommend_optimizer_paging(facts: RecommendationInputs) -> RecommendedChange | None:
    """Replace paged optimizers where paging is unavailable."""
    if facts.settings.train.optimizer != "paged_adamw_8bit" or facts.device == "cuda":
        return None
    return RecommendedChange({"train.optimizer": "adamw"}, "paged memory requires a GPU", BITSANDBYTES_SOURCE)


def recommend_batch_size(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend smaller batches for more steps."""
    train, steps = facts.settings.train, _count_steps(facts)
    fewest = MIN_KTO_BATCH if train.objective == "kto" else 1
    smallest = max(fewest, round(SMALL_BATCH_ROWS / _rows_per_sequence(facts)))
    if steps is None or steps >= MIN_STEPS or train.batch_size <= smallest:
        return None
    size = train.batch_size
    while size > smallest and steps * train.batch_size / size < MIN_STEPS:
        size = max(smallest, size // 2)
    reason = f"only {steps} optimizer steps in total, and large batches hurt LoRA more than full fine-tuning"
    return RecommendedChange({"train.batch_size": size}, reason, f"{LORA_WITHOUT_REGRET}; {QLORA_PAPER}, appendix B")


def recommend_epochs(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend more epochs for little data, and fewer epochs if the last ones teach little."""
    train, steps = facts.settings.train, _count_steps(facts)
    if train.epochs > MAX_EPOCHS and not train.early_stopping.is_active:
        reason = f"{train.epochs:g} epochs teach little after the first 4, and early stopping is off"
        return RecommendedChange({"train.epochs": USEFUL_EPOCHS}, reason, f"{REPEATED_DATA_PAPER} (of pre-training)")
    if steps is None or steps >= MIN_STEPS or train.epochs >= USEFUL_EPOCHS:
        return None
    needed = min(USEFUL_EPOCHS, float(math.ceil(train.epochs * MIN_STEPS / steps)))
    reason = f"only {steps} optimizer steps in total; up to 4 epochs are nearly as useful as new rows"
    return RecommendedChange({"train.epochs": needed}, reason, f"{REPEATED_DATA_PAPER} (of pre-training)")


def _count_steps(facts: RecommendationInputs) -> int | None:
    """Return the number of optimizer steps, estimated if rows are packed; None without data."""
    train = facts.settings.train
    if facts.data is None:
        return None
    sequences = _count_rows(facts.data) / _rows_per_sequence(facts)
    return max(1, math.ceil(max(1, round(sequences * train.epochs)) / train.batch_size))


def _rows_per_sequence(facts: RecommendationInputs) -> float:
    """Return 1, or the mean number of rows per pack if packs are full."""
    train, rows = facts.settings.train, facts.rows
    if train.batching != "packed" or facts.data is None or rows is None or not rows.total:
        return 1.0
    return max(1.0, train.pack_tokens * _count_rows(facts.data) / (rows.total * train.rows_per_example))


def _count_rows(data: DatasetCard) -> int:
    """Return the number of training rows of an epoch."""
    return data.splits["train"] + data.repeated


# Rules about the lengths of rows.


def _max_positions(facts: RecommendationInputs) -> int | None:
    """Return the model's number of positions; None if it is unknown."""
    return None if facts.spec is None else facts.spec.context_length


def limit_length_to_positions(facts: RecommendationInputs) -> RecommendedChange | None:
    """Limit the row length to the model's number of positions."""
    positions = _max_positions(facts)
    if not positions or facts.settings.prepare.max_tokens <= positions:
        return None
    reason = f"the base was trained on {positions:,} positions"
    return RecommendedChange({"prepare.max_tokens": positions}, reason, BASE_CONFIG_SOURCE)


def recommend_row_length(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend longer rows if many rows are lost because of their length."""
    if facts.data is None or facts.rows is None:
        return None
    dropped = facts.data.dropped.get("too_long")
    truncated = sum(truncation.rows for truncation in facts.data.truncated.values())
    lost = truncated + (dropped.count if dropped else 0)
    if lost <= MAX_LOST_SHARE * facts.data.rows_in:
        return None
    max_tokens = facts.settings.prepare.max_tokens
    needed = min(2 * max_tokens, _max_positions(facts) or 2 * max_tokens)
    if needed <= max_tokens:
        return None
    values = {"prepare.max_tokens": needed}
    train = facts.settings.train
    pack_tokens = needed * train.rows_per_example  # a pack has both answers of a pair
    if train.batching == "packed" and train.pack_tokens < pack_tokens:
        values["train.pack_tokens"] = pack_tokens
    share = lost / facts.data.rows_in
    reason = f"{lost:,} rows ({share:.1%}) are longer than {max_tokens:,} tokens and were dropped or truncated"
    return RecommendedChange(values, reason, DATASET_CARD_SOURCE)


def recommend_pack_length(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend packs that are large enough for the longest row."""
    train = facts.settings.train
    needed = facts.settings.prepare.max_tokens * train.rows_per_example
    if train.batching != "packed" or train.pack_tokens >= needed:
        return None
    kind = "pairs" if train.rows_per_example > 1 else "rows"
    reason = f"{kind} have up to {needed:,} tokens (prepare.max_tokens), but a pack holds only {train.pack_tokens:,}"
    return RecommendedChange({"train.pack_tokens": needed}, reason, "rows and pairs are never split between packs")


def recommend_length_grouping(facts: RecommendationInputs) -> RecommendedChange | None:
    """Recommend grouping rows by length if much computation is padding."""
    train = facts.settings.train
    if facts.rows is None or not facts.rows.histogram or train.batching != "shuffled":
        return None
    # Estimate the share of padding in 50 batches drawn from the histogram of lengths.
    rng, batch_rows = random.Random(0), train.batch_size
    lengths_of_bins, counts = [max(1, edge) for edge in facts.rows.histogram], list(facts.rows.histogram.values())
    padded = real = 0
    for _ in range(50):
        lengths = rng.choices(lengths_of_bins, counts, k=batch_rows)
        for rows in split_micro_batches(list(range(batch_rows)), lengths, facts.settings.machine.micro_batch_size):
            padded += len(rows) * max(lengths[row] for row in rows)
            real += sum(lengths[row] for row in rows)
    share = 1 - real / padded
    if share <= MAX_PADDED_SHARE:
        return None
    reason = f"{share:.0%} of the computation would be padding"
    return RecommendedChange({"train.batching": "by_length"}, reason, DATASET_CARD_SOURCE)


RULES: tuple[Rule, ...] = (
    recommend_number_format, recommend_target_layers, limit_rank_to_matrix, recommend_rank_for_data, recommend_scale,
    recommend_learning_rate, recommend_lora_plus_ratio, recommend_optimizer_paging, recommend_batch_size,
    recommend_epochs, limit_length_to_positions, recommend_row_length, recommend_pack_length,
    recommend_length_grouping,
)  # fmt: skip
"""All rules that need no forecast, in order of application."""


# Rules about memory: settings with which a training fits, and settings that use spare memory.
#
# Cheap changes come first. Fewer rows at a time cost some time, activation checkpointing costs about a third more time
# (Chen et al. 2016), and a sharded base costs network traffic. Then come fewer bits, and last shorter rows.


@dataclass(frozen=True)
class MemoryConstraint:
    """Memory available to the training process, and a function that forecasts how much the process needs."""

    available_bytes: int
    needed_bytes: Callable[[Settings], int]
    """Returns the forecast peak of a training with the given settings."""
    row_tokens: int
    """Tokens of the longest sequence with the current settings."""
    ranks: int = 1


@dataclass(frozen=True)
class MemoryFit:
    """Result of fitting the settings to the memory."""

    needed_bytes: int
    changes: tuple[RecommendedChange, ...]
    reduced_bytes: int
    """Forecast peak with the changes; if none is sufficient, with all changes that were tried."""
    fits: bool
    """True if the training fits with the changes; if False, no change is sufficient."""


def fit_to_memory(settings: Settings, device: Device, constraint: MemoryConstraint) -> MemoryFit:
    """Find changes with which the training fits, or changes that use spare memory of a GPU.

    Raises SettingsError if the settings do not fit the base.
    """
    search = _MemoryFitSearch(settings, constraint)
    needed = search.needed_bytes()
    if needed > constraint.available_bytes:
        return search.reduce_memory(needed)
    changes = search.use_spare_memory() if device == "cuda" else []
    return MemoryFit(needed, tuple(changes), search.needed_bytes() if changes else needed, fits=True)


class _MemoryFitSearch:
    """Search that changes settings step by step and forecasts the memory they need."""

    def __init__(self, settings: Settings, constraint: MemoryConstraint) -> None:
        self.settings = settings
        self.constraint = constraint
        self.budget_bytes = int(MEMORY_SHARE * constraint.available_bytes)
        self.shortage = ""

    def needed_bytes(self, values: Values | None = None) -> int:
        """Return the forecast peak with the current settings, of which `values` replaces some."""
        return self.constraint.needed_bytes(params_file.apply_changes(self.settings, values or {}))

    def reduce_memory(self, needed: int) -> MemoryFit:
        """Reduce the rows at a time; then, with one row, apply further changes until the training fits.

        If further changes were needed, the rows at a time are increased again as far as memory permits.
        """
        rows = self.settings.machine.micro_batch_size
        available = format_bytes(self.constraint.available_bytes)
        self.shortage = f"needs {format_bytes(needed)}, but {available} are available"
        count, reduced = self._reduce_rows(rows, needed)
        changes: list[RecommendedChange] = []
        for values, change, source in self._list_reductions():
            if reduced <= self.budget_bytes:
                break
            before, reduced = reduced, self.needed_bytes(values | {MICRO_BATCH_SIZE: 1})
            self.settings = params_file.apply_changes(self.settings, values)
            changes.append(
                RecommendedChange(values, f"{self.shortage}; {change}: {format_bytes(before - reduced)} less", source)
            )
        if reduced > self.budget_bytes:
            shortening, reduced = self._shorten_rows()
            changes += shortening
        if reduced > self.budget_bytes:
            return MemoryFit(needed, (), reduced, fits=False)
        while (
            changes
            and count * 2 <= rows
            and (larger := self.needed_bytes({MICRO_BATCH_SIZE: count * 2})) <= self.budget_bytes
        ):
            count, reduced = count * 2, larger
        if count < rows:
            reason = f"{self.shortage}; {count} rows fit at once, with the same training result"
            changes.insert(0, RecommendedChange({MICRO_BATCH_SIZE: count}, reason, FORECAST_SOURCE))
        return MemoryFit(needed, tuple(changes), reduced, fits=True)

    def _reduce_rows(self, rows: int, needed: int) -> tuple[int, int]:
        """Return the number of rows that fit at a time, and their forecast peak; 1 row if not even one fits."""
        single = self.needed_bytes({MICRO_BATCH_SIZE: 1}) if rows > 1 else needed
        if single > self.budget_bytes:
            return 1, single
        count = 1 << ((rows - 1).bit_length() - 1)  # the next smaller power of two
        while count > 1 and (needed := self.needed_bytes({MICRO_BATCH_SIZE: count})) > self.budget_bytes:
            count //= 2
        return (count, needed) if count > 1 else (1, single)

    def _list_reductions(self) -> list[tuple[Values, str, str]]:
        train, machine = self.settings.train, self.settings.machine
        four_bits = train.model_copy(update={"quantization": "nf4"})  # as a later reduction sets it
        can_shard = self.constraint.ranks > 1 and targets.sharding_obstacle(four_bits) is None
        sharded = f"the frozen base sharded among {self.constraint.ranks} ranks, with network traffic for every pass"
        quantized: Values = {"train.quantization": "nf4"}
        if train.initialization == "pissa":
            quantized["train.initialization"] = "zero"
        reductions: list[tuple[bool, Values, str, str]] = [
            (
                machine.activation_checkpointing is not True, {ACTIVATION_CHECKPOINTING: True},
                "activations recomputed instead of kept, for a third more time", CHECKPOINTING_PAPER,
            ),
            (can_shard and machine.shard_base is not True, {SHARD_BASE: True}, sharded, FSDP_PAPER),
            (train.quantization == "none", quantized, "the frozen base in 4 bits", QLORA_PAPER),
            (
                train.distill.is_online and train.distill.quantization == "none",
                {"train.distill.quantization": "nf4"}, "the teacher in 4 bits", QLORA_PAPER,
            ),
            (
                not train.double_quantization, {"train.double_quantization": True},
                "quantization constants in 8 bits", QLORA_PAPER,
            ),
            (
                train.optimizer == "adamw", {"train.optimizer": "adamw_8bit"},
                "optimizer states in 8 bits", EIGHT_BIT_PAPER,
            ),
        ]  # fmt: skip
        return [
            (values, change, f"{paper}; {FORECAST_SOURCE}")
            for is_possible, values, change, paper in reductions
            if is_possible
        ]

    def _shorten_rows(self) -> tuple[list[RecommendedChange], int]:
        """Halve the row length until one row at a time fits."""
        shortest = self.needed_bytes(self._values_for_length(MIN_ROW_TOKENS))
        if shortest > self.budget_bytes:
            return [], shortest
        length = 1 << ((self.constraint.row_tokens - 1).bit_length() - 1)
        while length > MIN_ROW_TOKENS:
            if (needed := self.needed_bytes(self._values_for_length(length))) <= self.budget_bytes:
                shortest = needed
                break
            length //= 2
        values = {key: value for key, value in self._values_for_length(length).items() if key != MICRO_BATCH_SIZE}
        self.settings = params_file.apply_changes(self.settings, values)
        reason = f"{self.shortage}; rows of {2 * length:,} tokens do not fit with any other change"
        return [RecommendedChange(values, reason, FORECAST_SOURCE)], shortest

    def _values_for_length(self, length: int) -> Values:
        train = self.settings.train
        packs = {"train.pack_tokens": length * train.rows_per_example} if train.batching == "packed" else {}
        return {MICRO_BATCH_SIZE: 1, "prepare.max_tokens": length} | packs

    def use_spare_memory(self) -> list[RecommendedChange]:
        """Use spare memory of a GPU: turn off activation checkpointing, or compute more rows at a time."""
        changes = []
        if self.settings.machine.activation_checkpointing is True:
            needed = self.needed_bytes({ACTIVATION_CHECKPOINTING: False})
            if needed <= self.budget_bytes:
                values: Values = {ACTIVATION_CHECKPOINTING: False}
                self.settings = params_file.apply_changes(self.settings, values)
                reason = (
                    f"activations fit ({format_bytes(needed)}) without recomputation, which takes a third more time"
                )
                changes.append(RecommendedChange(values, reason, f"{CHECKPOINTING_PAPER}; {FORECAST_SOURCE}"))
        rows = count = self.settings.machine.micro_batch_size
        while (
            count * 2 <= self.settings.train.batch_size
            and self.needed_bytes({MICRO_BATCH_SIZE: count * 2}) <= self.budget_bytes
        ):
            count *= 2
        if count > rows:
            self.settings = params_file.apply_changes(self.settings, {MICRO_BATCH_SIZE: count})
            reason = f"{count} rows fit at once, which a GPU computes faster than separate rows"
            changes.append(RecommendedChange({MICRO_BATCH_SIZE: count}, reason, FORECAST_SOURCE))
        return changes
