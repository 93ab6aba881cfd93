"""What this project should change in params.yaml, each with its reason and source; nothing where a value is good.

A rule has a range that published work leaves open and speaks only outside of it: taste is not its business. Rules come
in the order in which they build on each other, each seeing what those before it have changed.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.config import params_file
from ratchet.config.schema import Settings
from ratchet.config.units import format_bytes
from ratchet.data.batches import split_micro_batches
from ratchet.errors import SettingsError
from ratchet.models import targets
from ratchet.models.memory import parameters as storage
from ratchet.models.memory.trace import Device
from ratchet.models.model_spec import LayerSpec, ModelSpec
from ratchet.storage.records.data import DatasetCard, LengthDistribution


@dataclass(frozen=True)
class SettingProposal:
    """One changed value."""

    key: str
    """As in params.yaml, such as `train.rank`."""
    before: Any
    value: Any
    reason: str
    source: str


@dataclass(frozen=True)
class RecommendationInputs:
    """What rules look at; what is not known is None, and the rules that need it are silent."""

    settings: Settings
    device: Device
    blueprint: ModelSpec | None
    data: DatasetCard | None

    @property
    def rows(self) -> LengthDistribution | None:
        """Lengths of the training rows."""
        return self.data.lengths.get("train") if self.data else None


@dataclass(frozen=True)
class RecommendedChange:
    """Values that belong together, for one reason."""

    values: dict[str, Any]
    """By key; the others go with the first."""
    reason: str
    source: str


Rule = Callable[[RecommendationInputs], RecommendedChange | None]


def apply_rules(
    facts: RecommendationInputs, rules: Sequence[Rule]
) -> tuple[RecommendationInputs, list[RecommendedChange]]:
    """Ask the rules in their order; returns the facts with all changes made, and the changes."""
    changes = []
    for rule in rules:
        change = rule(facts)
        if change is not None:
            facts = replace(facts, settings=params_file.apply_changes(facts.settings, change.values))
            changes.append(change)
    return facts, changes


def merge_into_proposals(settings: Settings, changes: Sequence[RecommendedChange]) -> list[SettingProposal]:
    """The changes key by key: what several rules have changed is said once, with all their reasons."""
    found: dict[str, SettingProposal] = {}
    for change in changes:
        first = next(iter(change.values))
        for key, value in change.values.items():
            section, _, name = key.partition(".")
            before = getattr(getattr(settings, section), name)
            reasons, sources = [change.reason if key == first else f"goes with {first}"], [change.source]
            if known := found.pop(key, None):
                reasons.insert(0, known.reason)
                sources.insert(0, known.source)
            if value != before:
                found[key] = SettingProposal(key, before, value, "; ".join(reasons), "; ".join(dict.fromkeys(sources)))
    return list(found.values())


# The rules of the doctor about learning and data; those about memory are in fitting.py.

QLORA = "Dettmers et al. 2023, QLoRA, arXiv:2305.14314"
REGRET = "Schulman et al. 2025, LoRA Without Regret, thinkingmachines.ai/blog/lora"
PRIMER = "Thinking Machines 2025, LoRA primer of Tinker, tinker-docs.thinkingmachines.ai"
LESS = "Biderman et al. 2024, LoRA Learns Less and Forgets Less, arXiv:2405.09673"
STABLE = "Kalajdzievski 2023, rsLoRA, arXiv:2312.03732"
PLUS = "Hayou et al. 2024, LoRA+, arXiv:2402.12354"
REPEATED = "Muennighoff et al. 2023, Scaling Data-Constrained Language Models, arXiv:2305.16264"
CARD = "counted on this project's dataset card"
BASE = "read from the base's config.json"
LIBRARY = "bitsandbytes 0.50: paged memory is CUDA's"

RATE_RANGE = 4.0
"""A learning rate within this factor of the reference is left alone: optima are flat, and differ between tasks."""
SCALES = (0.25, 4.0)
"""alpha / rank that is left alone: from QLoRA's 16 / 64 to twice the 2 of Biderman et al."""
RANK_MOST = 256
"""The largest rank that is proposed; Biderman et al. and Schulman et al. go no further in most of their experiments."""
ENOUGH_STEPS = 100
"""Optimizer steps below which a run has hardly begun: the warm-up takes part of them, and B begins at zero."""
SMALL_BATCH_ROWS = 16
"""Of QLoRA's runs with 7B and 13B models."""
EPOCHS_REPEATED = 4.0
EPOCHS_USELESS = 16.0
"""Muennighoff et al.: up to 4 passes teach nearly as much as new data, after 16 little more."""
PADDED_SHARE = 0.25
"""Of the computing that is spent on filling, from which on it is worth to sort rows by length."""
LOST_SHARE = 0.01
"""Of the rows that are lost for their length."""


# ---------------------------------------------------------------------------------------------------- the quantisation


def recommend_number_format(facts: RecommendationInputs) -> RecommendedChange | None:
    """NF4 rather than FP4."""
    if facts.settings.train.quantization != "fp4":
        return None
    reason = "NF4 keeps more of a model than FP4 in as many bits: `ratchet evaluate --quantization` measures it here"
    return RecommendedChange({"train.quantization": "nf4"}, reason, f"{QLORA}, table 2")


# --------------------------------------------------------------------------------------------------------- the adapter


def recommend_target_layers(facts: RecommendationInputs) -> RecommendedChange | None:
    """All linear layers, not attention alone."""
    wanted = facts.settings.train.targets
    if wanted in ("all", "mlp"):
        return None
    everything = {"train.targets": "all"}
    if facts.blueprint is None:
        chosen: tuple[LayerSpec, ...] = ()
        attention = wanted == "attention"
    else:
        try:
            chosen = targets.choose(facts.blueprint.layers, wanted, facts.blueprint.others)
        except SettingsError as error:
            return RecommendedChange(everything, f"no such layers ({str(error).removeprefix('train.targets: ')})", BASE)
        attention = all(layer.role == "attention" for layer in chosen)
    if not attention:
        return None
    named = f"{len(chosen)} layers of attention" if chosen else "attention"
    reason = (
        f"adapters are on {named} only; those on the MLP too learn more, and even at equal numbers of parameters "
        "attention alone learns less"
    )
    return RecommendedChange(everything, reason, f"{REGRET}; {LESS}; {QLORA}, figure 2")


def limit_rank_to_matrix(facts: RecommendationInputs) -> RecommendedChange | None:
    """No rank above the smaller side of a matrix: no such update exists."""
    if facts.blueprint is None:
        return None
    train = facts.settings.train
    try:
        chosen = targets.choose(facts.blueprint.layers, train.targets, facts.blueprint.others)
    except SettingsError:
        return None
    layer = min(chosen, key=lambda one: min(one.inputs, one.outputs))
    side = min(layer.inputs, layer.outputs)
    if train.rank <= side:
        return None
    reason = f"{layer.name} is [{layer.outputs}, {layer.inputs}]: no update of it has a rank above {side}"
    return _change_rank(facts, 2 ** int(math.log2(side)), reason, BASE)


def recommend_rank_for_data(facts: RecommendationInputs) -> RecommendedChange | None:
    """At least as many parameters that learn as tokens that are learned from."""
    train, rows = facts.settings.train, facts.rows
    if facts.blueprint is None or rows is None or train.adapter == "adalora":
        return None
    parameters = storage.count_trainable_parameters(facts.blueprint, train)
    if parameters >= rows.trained:
        return None
    side = min(min(one.inputs, one.outputs) for one in facts.blueprint.layers if one.role in ("attention", "mlp"))
    wanted = train.rank * 2 ** math.ceil(math.log2(rows.trained / parameters))
    rank = min(wanted, RANK_MOST, 2 ** int(math.log2(side)))
    if rank <= train.rank:
        return None
    reason = (
        f"{parameters:,} parameters learn from {rows.trained:,} answer tokens: with fewer parameters than tokens an "
        "adapter runs out of room, and learns less than the whole model would"
    )
    return _change_rank(facts, rank, reason, f"{REGRET}; {PRIMER}")


def _change_rank(facts: RecommendationInputs, rank: int, reason: str, source: str) -> RecommendedChange:
    """Another rank at the same scale, so that the learning rate stays right."""
    train = facts.settings.train
    ratio = rank / train.rank
    alpha = train.alpha * (math.sqrt(ratio) if train.rank_stabilized else ratio)
    values: dict[str, Any] = {"train.rank": rank, "train.alpha": round(alpha, 3)}
    return RecommendedChange(values, reason, source)


def recommend_scale(facts: RecommendationInputs) -> RecommendedChange | None:
    """alpha over rank (or its root) within what published recipes use."""
    train = facts.settings.train
    if train.adapter == "adalora" or train.alpha_pattern or train.rank_pattern:
        return None
    root = math.sqrt(train.rank) if train.rank_stabilized else train.rank
    found = train.alpha / root
    if SCALES[0] <= found <= SCALES[1]:
        return None
    over = "alpha / sqrt(rank)" if train.rank_stabilized else "alpha / rank"
    reason = f"{over} is {found:.3g}; recipes whose learning rates are known have {SCALES[0]:g} to 2"
    return RecommendedChange(
        {"train.alpha": round(2 * root, 1)}, reason, f"{LESS}; {QLORA}" + (f"; {STABLE}" * (root < train.rank))
    )


# ------------------------------------------------------------------------------------------------------- the optimizer


def recommend_learning_rate(facts: RecommendationInputs) -> RecommendedChange | None:
    """A learning rate for a model of this size."""
    train = facts.settings.train
    if facts.blueprint is None:
        return None
    wanted, reason, source = _reference_rate(facts.blueprint)
    if wanted / RATE_RANGE <= train.learning_rate <= wanted * RATE_RANGE:
        return None
    side = "above" if train.learning_rate > wanted else "below"
    factor = max(train.learning_rate / wanted, wanted / train.learning_rate)
    return RecommendedChange({"train.learning_rate": wanted}, f"{factor:.3g} times {side} {reason}", source)


def _reference_rate(blueprint: ModelSpec) -> tuple[float, str, str]:
    """QLoRA's rates from a billion parameters on; below, a fit by width: 5e-4 (2000 / width) ^ 0.781.

    The fit is that of Thinking Machines for Llama models, whose smallest had 1B: below, it is extrapolated. On our tiny
    bases of width 256 it gives 2.5e-3, where 2e-3 was found best.
    """
    size = f"a model of {blueprint.parameters / 1e9:.3g}B parameters"
    if blueprint.parameters >= 1e9:
        wanted = 2e-4 if blueprint.parameters < 20e9 else 1e-4
        return wanted, f"{wanted:g}, with which {size} learns well (ten times that of full fine-tuning)", (
            f"{QLORA}, appendix B; {REGRET}"
        )  # fmt: skip
    text_config = blueprint.config.get_text_config()
    width = getattr(text_config, "hidden_size", None) or 2000
    fitted = float(f"{5e-4 * (2000 / width) ** 0.781:.0e}")
    return fitted, f"{fitted:g}, the fit for LoRA at width {width} (extrapolated below 1B)", f"{REGRET}; {PRIMER}"


def recommend_lora_plus_ratio(facts: RecommendationInputs) -> RecommendedChange | None:
    """LoRA+ within what its paper tried."""
    if facts.settings.train.rate_ratio <= 64:
        return None
    reason = f"B learns at {facts.settings.train.rate_ratio:g} times the rate; the paper proposes 16"
    return RecommendedChange({"train.rate_ratio": 16.0}, reason, PLUS)


def recommend_optimizer_paging(facts: RecommendationInputs) -> RecommendedChange | None:
    """Paged optimizers only where there is paging."""
    if facts.settings.train.optimizer != "paged_adamw_8bit" or facts.device == "cuda":
        return None
    return RecommendedChange({"train.optimizer": "adamw"}, "without a GPU there is nothing to page from", LIBRARY)


def recommend_batch_size(facts: RecommendationInputs) -> RecommendedChange | None:
    """Enough steps, by smaller batches."""
    train, steps = facts.settings.train, _count_steps(facts)
    if steps is None or steps >= ENOUGH_STEPS or train.batch_rows <= SMALL_BATCH_ROWS:
        return None
    size = train.batch_rows
    while size > SMALL_BATCH_ROWS and steps * train.batch_rows / size < ENOUGH_STEPS:
        size = max(SMALL_BATCH_ROWS, size // 2)
    reason = f"{steps} optimizer steps in all are few, and LoRA suffers from large batches more than full fine-tuning"
    return RecommendedChange({"train.batch_rows": size}, reason, f"{REGRET}; {QLORA}, appendix B")


def recommend_epochs(facts: RecommendationInputs) -> RecommendedChange | None:
    """More passes over little data, no useless ones."""
    train, steps = facts.settings.train, _count_steps(facts)
    if train.epochs > EPOCHS_USELESS and not train.early_stopping.patience:
        reason = f"{train.epochs:g} passes over the same rows teach little after the first 4, and nothing stops them"
        return RecommendedChange({"train.epochs": EPOCHS_REPEATED}, reason, f"{REPEATED} (of pre-training)")
    if steps is None or steps >= ENOUGH_STEPS or train.epochs >= EPOCHS_REPEATED:
        return None
    needed = min(EPOCHS_REPEATED, float(math.ceil(train.epochs * ENOUGH_STEPS / steps)))
    reason = f"{steps} optimizer steps in all are few; up to 4 passes teach nearly as much as new rows would"
    return RecommendedChange({"train.epochs": needed}, reason, f"{REPEATED} (of pre-training)")


def _count_steps(facts: RecommendationInputs) -> int | None:
    """Optimizer steps of the whole run; not known of packs, whose number is not in the card."""
    train = facts.settings.train
    if facts.data is None or train.batching == "packed":
        return None
    rows = facts.data.splits["train"] + facts.data.repeated
    return max(1, math.ceil(max(1, round(rows * train.epochs)) / train.batch_rows))


# --------------------------------------------------------------------------------------------------------- the lengths


def limit_length_to_positions(facts: RecommendationInputs) -> RecommendedChange | None:
    """No rows longer than the model's positions."""
    if facts.blueprint is None:
        return None
    most = getattr(facts.blueprint.config.get_text_config(), "max_position_embeddings", None)
    if not most or facts.settings.prepare.max_tokens <= most:
        return None
    return RecommendedChange({"prepare.max_tokens": most}, f"the base was trained on {most:,} positions", BASE)


def recommend_row_length(facts: RecommendationInputs) -> RecommendedChange | None:
    """No more rows lost for their length than can be helped."""
    if facts.data is None or facts.rows is None:
        return None
    dropped = facts.data.dropped.get("too_long")
    cut = sum(one.rows for one in facts.data.truncated.values())
    lost = cut + (dropped.count if dropped else 0)
    if lost <= LOST_SHARE * facts.data.rows_in:
        return None
    most = None
    if facts.blueprint is not None:
        most = getattr(facts.blueprint.config.get_text_config(), "max_position_embeddings", None)
    wanted = 2 * facts.settings.prepare.max_tokens
    wanted = min(wanted, most) if most else wanted
    if wanted <= facts.settings.prepare.max_tokens:
        return None
    values = {"prepare.max_tokens": wanted}
    if facts.settings.train.batching == "packed" and facts.settings.train.pack_tokens < wanted:
        values["train.pack_tokens"] = wanted
    share = lost / facts.data.rows_in
    kept = facts.settings.prepare.max_tokens
    return RecommendedChange(
        values, f"{lost:,} rows ({share:.1%}) are longer than {kept:,} tokens and dropped or cut", CARD
    )


def recommend_pack_length(facts: RecommendationInputs) -> RecommendedChange | None:
    """Packs that hold the longest row."""
    train = facts.settings.train
    longest = facts.settings.prepare.max_tokens
    if train.batching != "packed" or train.pack_tokens >= longest:
        return None
    reason = f"a row may have {longest:,} tokens (prepare.max_tokens), a pack {train.pack_tokens:,}"
    return RecommendedChange({"train.pack_tokens": longest}, reason, "a pack holds whole rows")


def recommend_length_grouping(facts: RecommendationInputs) -> RecommendedChange | None:
    """Rows of like length together where much would be filled."""
    train = facts.settings.train
    if facts.rows is None or not facts.rows.histogram or train.batching != "shuffled":
        return None
    share = _padded_share(facts.rows.histogram, train.batch_rows, facts.settings.machine.micro_batch_rows)
    if share <= PADDED_SHARE:
        return None
    reason = f"{share:.0%} of the computing would go into filling rows up to the longest beside them"
    return RecommendedChange({"train.batching": "by_length"}, reason, CARD)


def _padded_share(histogram: dict[int, int], batch_rows: int, micro_batch_rows: int) -> float:
    """Share of filling among all positions, in 50 batches drawn from a histogram of lengths."""
    draw = random.Random(0)
    bins, counts = [max(1, edge) for edge in histogram], list(histogram.values())
    filled = own = 0
    for _ in range(50):
        lengths = draw.choices(bins, counts, k=batch_rows)
        for rows in split_micro_batches(list(range(batch_rows)), lengths, micro_batch_rows):
            filled += len(rows) * max(lengths[row] for row in rows)
            own += sum(lengths[row] for row in rows)
    return 1 - own / filled


RULES: tuple[Rule, ...] = (
    recommend_number_format, recommend_target_layers, limit_rank_to_matrix, recommend_rank_for_data, recommend_scale,
    recommend_learning_rate, recommend_lora_plus_ratio, recommend_optimizer_paging, recommend_batch_size,
    recommend_epochs, limit_length_to_positions, recommend_row_length, recommend_pack_length,
    recommend_length_grouping,
)  # fmt: skip
"""All that need no forecast, in the order in which they build on each other."""


# The rules of the doctor about memory: what makes a training fit into this machine, and what it could have instead.
#
# Cheap things come first: fewer rows at a time changes only the time, activation checkpointing costs about a third
# more
# of it (Chen et al. 2016), a base shared among ranks what their line needs; then come fewer bits, and only last
# shorter
# rows.

CHEN = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174"
FSDP = "Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277"
EIGHT_BITS = "Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861"
FORECAST = "forecast for this machine (docs/memory.md)"
SHARE = 0.9
"""Of the memory at hand that proposed settings may take by the forecast: it may be wrong by a tenth."""
LEAST_TOKENS = 64
"""No shorter rows are proposed."""
ROWS, CHECKPOINTING, SHARING = "machine.micro_batch_rows", "machine.activation_checkpointing", "machine.shard_base"

Values = dict[str, Any]


@dataclass(frozen=True)
class MemoryConstraint:
    """Memory for the training process, and what it would hold."""

    available_bytes: int
    needed_bytes: Callable[[Settings], int]
    """The peak of a training with some settings, by the forecast."""
    row_tokens: int
    """Of the longest sequence, with the settings as they are."""
    ranks: int = 1
    """That would train together."""


@dataclass(frozen=True)
class MemoryFit:
    """How the settings go into the memory."""

    needed_bytes: int
    """By the settings as they are."""
    changes: tuple[RecommendedChange, ...]
    least_bytes: int
    """With these changes."""
    fits: bool
    """With these changes; if not, nothing helps."""


def fit_to_memory(settings: Settings, device: Device, room: MemoryConstraint) -> MemoryFit:
    """What to change so that the training fits, or so that memory of a GPU that is there is used.

    Raises:
        SettingsError: the settings do not fit the base at all.
    """
    search = _MemoryFitSearch(settings, room)
    needed = search.needed_bytes()
    if needed > room.available_bytes:
        return search.smaller(needed)
    changes = search.faster() if device == "cuda" else []
    return MemoryFit(needed, tuple(changes), search.needed_bytes() if changes else needed, fits=True)


class _MemoryFitSearch:
    """Settings that are changed step by step, and what they need."""

    def __init__(self, settings: Settings, room: MemoryConstraint) -> None:
        self.settings = settings
        self.room = room
        self.budget_bytes = int(SHARE * room.available_bytes)
        self.asked = ""

    def needed_bytes(self, values: Values | None = None) -> int:
        """The peak of a training with the settings, or with some of them changed."""
        return self.room.needed_bytes(params_file.apply_changes(self.settings, values or {}))

    def smaller(self, needed: int) -> MemoryFit:
        """Fewer rows at a time; then, a row at a time, one thing after the other until it fits."""
        rows = self.settings.machine.micro_batch_rows
        self.asked = f"{format_bytes(needed)} would be needed, {format_bytes(self.room.available_bytes)} are at hand"
        count, least = self._fewer(rows, needed)
        changes: list[RecommendedChange] = []
        for values, what, source in self._rungs():
            if least <= self.budget_bytes:
                break
            before, least = least, self.needed_bytes(values | {ROWS: 1})
            self.settings = params_file.apply_changes(self.settings, values)
            changes.append(
                RecommendedChange(values, f"{self.asked}; {what}: {format_bytes(before - least)} less", source)
            )
        if least > self.budget_bytes:
            shorter, least = self._shorter()
            changes += shorter
        if least > self.budget_bytes:
            return MemoryFit(needed, (), least, fits=False)
        while changes and count * 2 <= rows and (more := self.needed_bytes({ROWS: count * 2})) <= self.budget_bytes:
            count, least = count * 2, more
        if count < rows:
            reason = f"{self.asked}; rows that fit at once: {count}. What is learned stays the same"
            changes.insert(0, RecommendedChange({ROWS: count}, reason, FORECAST))
        return MemoryFit(needed, tuple(changes), least, fits=True)

    def _fewer(self, rows: int, needed: int) -> tuple[int, int]:
        """Rows at a time that fit, and what they need; 1 where not even that does."""
        least = self.needed_bytes({ROWS: 1}) if rows > 1 else needed
        if least > self.budget_bytes:
            return 1, least
        count = 1 << ((rows - 1).bit_length() - 1)  # the next smaller power of two
        while count > 1 and (needed := self.needed_bytes({ROWS: count})) > self.budget_bytes:
            count //= 2
        return (count, needed) if count > 1 else (1, least)

    def _rungs(self) -> list[tuple[Values, str, str]]:
        train = self.settings.train
        found: list[tuple[Values, str, str]] = []
        if self.settings.machine.activation_checkpointing is not True:
            what = "activations computed twice instead of kept, for a third more time"
            found.append(({CHECKPOINTING: True}, what, f"{CHEN}; {FORECAST}"))
        four_bits = train.model_copy(update={"quantization": "nf4"})  # which may come next
        may_share = self.room.ranks > 1 and targets.sharding_obstacle(four_bits) is None
        if may_share and self.settings.machine.shard_base is not True:
            what = f"the frozen base shared among {self.room.ranks} ranks, whose layers then travel for every pass"
            found.append(({SHARING: True}, what, f"{FSDP}; {FORECAST}"))
        if train.quantization == "none":
            values: Values = {"train.quantization": "nf4"}
            if train.initialization == "pissa":
                values["train.initialization"] = "zero"
            found.append((values, "the frozen base in 4 bits", f"{QLORA}; {FORECAST}"))
        if train.distill.stays and train.distill.quantization == "none":
            values = {"train.distill.quantization": "nf4"}
            found.append((values, "the teacher in 4 bits", f"{QLORA}; {FORECAST}"))
        if not train.double_quantization:
            values = {"train.double_quantization": True}
            found.append((values, "constants of quantisation in 8 bits", f"{QLORA}; {FORECAST}"))
        if train.optimizer == "adamw":
            values = {"train.optimizer": "adamw_8bit"}
            found.append((values, "optimizer states in 8 bits", f"{EIGHT_BITS}; {FORECAST}"))
        return found

    def _shorter(self) -> tuple[list[RecommendedChange], int]:
        """Half as long, again and again, at one row at a time."""
        least = self.needed_bytes(self._of_length(LEAST_TOKENS))
        if least > self.budget_bytes:
            return [], least
        length = 1 << ((self.room.row_tokens - 1).bit_length() - 1)
        while length > LEAST_TOKENS and (needed := self.needed_bytes(self._of_length(length))) > self.budget_bytes:
            length //= 2
        values = {key: value for key, value in self._of_length(length).items() if key != ROWS}
        self.settings = params_file.apply_changes(self.settings, values)
        reason = f"{self.asked}; rows of {2 * length:,} tokens do not fit, whatever else is changed"
        return [RecommendedChange(values, reason, FORECAST)], needed if length > LEAST_TOKENS else least

    def _of_length(self, length: int) -> Values:
        packed = self.settings.train.batching == "packed"
        return {ROWS: 1, "prepare.max_tokens": length} | ({"train.pack_tokens": length} if packed else {})

    def faster(self) -> list[RecommendedChange]:
        """What a GPU with memory to spare could do without, or have more of."""
        changes = []
        if self.settings.machine.activation_checkpointing is True:
            needed = self.needed_bytes({CHECKPOINTING: False})
            if needed <= self.budget_bytes:
                self.settings = params_file.apply_changes(self.settings, {CHECKPOINTING: False})
                reason = (
                    f"activations fit ({format_bytes(needed)}) without being computed twice, which takes a third longer"
                )
                changes.append(RecommendedChange({CHECKPOINTING: False}, reason, f"{CHEN}; {FORECAST}"))
        rows = count = self.settings.machine.micro_batch_rows
        while count * 2 <= self.settings.train.batch_rows and self.needed_bytes({ROWS: count * 2}) <= self.budget_bytes:
            count *= 2
        if count > rows:
            self.settings = params_file.apply_changes(self.settings, {ROWS: count})
            reason = f"{count} rows fit at once, and a GPU computes them in less time than one after the other"
            changes.append(RecommendedChange({ROWS: count}, reason, FORECAST))
        return changes
