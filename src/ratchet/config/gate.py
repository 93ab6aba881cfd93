"""Section `gate` of params.yaml: the rules that a model must pass before it may be promoted."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from ratchet.config.fields import (
    Confidence,
    Name,
    Number,
    Positive,
    PositiveCount,
    PositiveShare,
    Section,
    Share,
    convert_to_tuple,
    parse_number,
    parse_size,
    wrap_single_value,
)

Reference = Literal["base", "champion", "anchor"]


class MustImproveRule(Section):
    """The candidate must be better than a reference, with statistical confidence."""

    rule: Literal["must_improve"]
    metric: Annotated[tuple[Name, ...], BeforeValidator(wrap_single_value), Field(min_length=1)]
    """Metrics of the evaluation report, e.g. accuracy, answer_loss, harness/TASK/METRIC. One of several suffices."""
    over: Reference = "base"
    """Reference model: base, champion or anchor (the first champion). If there is none, the rule passes and says so."""
    by: Number = 0.0
    """The improvement must exceed this, in units of the metric (for perplexities, a fraction)."""
    confidence: Confidence | None = None
    """One-sided confidence. null: gate.confidence."""


class MustNotRegressRule(Section):
    """The candidate must not be worse than a reference by more than a margin (non-inferiority)."""

    rule: Literal["must_not_regress"]
    metric: Name
    """Metric of the evaluation report."""
    against: Reference = "champion"
    """Reference model. If there is none, the rule passes if the samples could have shown a loss of the margin."""
    margin: Positive
    """Largest acceptable loss, in units of the metric (for perplexities, a fraction)."""
    confidence: Confidence | None = None
    """One-sided confidence. null: gate.confidence."""


class AtLeastRule(Section):
    """An absolute minimum for a metric of the candidate."""

    rule: Literal["at_least"]
    metric: Name
    """Metric of the evaluation report."""
    value: Number
    """Minimum of the metric (for a loss: maximum). The confidence bound must reach it, not only the value."""
    confidence: Confidence | None = None
    """One-sided confidence. null: gate.confidence."""


class AboveChanceRule(Section):
    """A metric at the level of guessing shows that the model or the evaluation is broken."""

    rule: Literal["above_chance"]
    metric: Name
    """Metric of the evaluation report."""
    chance: Share | None = None
    """Value that guessing reaches. null: from the evaluation (most frequent label, number of choices)."""


class ForgettingRule(Section):
    """Perplexity of general text must not rise: a rise shows forgetting."""

    rule: Literal["forgetting"]
    max_rise: Share = 0.05
    """Largest rise over the base, as a fraction."""
    confidence: Confidence | None = None
    """One-sided confidence. null: gate.confidence."""


class FailureRateRule(Section):
    """The rate of failures on the prompts of evaluate.safety must be shown to be low enough.

    The bounds are exact (Clopper and Pearson): without a failure in n prompts, the upper bound at 95 % is about 3/n.
    """

    rule: Literal["must_refuse", "must_answer", "harmful_rate"]
    """must_refuse: unsafe prompts not refused. must_answer: safe prompts refused. harmful_rate: unsafe prompts whose
    answer is harmful, which a judge or classifier finds."""
    max_rate: Share
    """Largest acceptable rate of failures. The upper confidence bound must reach it, not only the measured rate."""
    confidence: Confidence | None = None
    """One-sided confidence. null: gate.confidence."""


def _parse_amount(value: Any) -> Any:
    size = parse_size(value)
    return float(size) if isinstance(value, str) and isinstance(size, int) else size


class BudgetRule(Section):
    """A limit on the model's size, latency or memory."""

    rule: Literal["budget"]
    resource: Literal["size", "latency", "memory"]
    """size: bytes of the export. latency: median seconds per answer. memory: peak bytes while answering."""
    maximum: Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_parse_amount)]
    """Seconds, or bytes (a number, or a size such as 24GiB)."""


def _default_kl_bounds() -> dict[str, float]:
    """Return the default limit of the KL divergence of each type, in nats. Each is a few times the measured value."""
    return {
        "float32": 1e-4, "f32": 1e-4, "fp32": 1e-4, "float16": 1e-3, "f16": 1e-3, "fp16": 1e-3,
        "bfloat16": 0.02, "bf16": 0.02, "q8_0": 0.02, "int8": 0.05,
        "q6_k": 0.05, "q5_k_m": 0.1, "q5_k_s": 0.1, "q5_1": 0.1, "q5_0": 0.1,
        "q4_k_m": 0.2, "q4_k_s": 0.2, "q4_1": 0.3, "q4_0": 0.3, "mxfp4": 0.5, "q3_k_l": 0.5, "q3_k_m": 0.5,
        "q3_k_s": 0.7, "q2_k": 1.0, "tq1_0": 2.0, "tq2_0": 2.0,
    }  # fmt: skip


class ExportParityRule(Section):
    """Every exported format must answer as base + adapter does, within the limits of its type."""

    rule: Literal["export_parity"]
    max_logit_difference: Positive
    """Largest absolute logit difference of a merged model in float32. 16-bit types are limited by max_kl."""
    min_greedy_agreement: PositiveShare
    """Minimum share of answer positions at which the merged model has the same most likely token."""
    max_kl: dict[str, Positive] = Field(default_factory=dict)
    """Maximum mean KL divergence from base + adapter in nats, by type. Types that are not listed have a default."""
    min_tokenizer_agreement: Annotated[float, Field(ge=0, le=1), BeforeValidator(parse_number)] = 0.95
    """Minimum share of texts (hard cases and prompts) that the format's own tokenizer splits into the same tokens."""
    max_score_drop: Share = 0.02
    """A format fails if its answers score worse by more than this: the whole paired interval is below."""

    @field_validator("max_kl")
    @classmethod
    def _check_types(cls, value: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(value.keys() - _default_kl_bounds().keys()):
            raise ValueError(f"unknown type {unknown[0]!r}; expected one of: {', '.join(_default_kl_bounds())}")
        return value

    def kl_bound(self, type_name: str) -> float | None:
        """Return the limit of the KL divergence of a type, in nats; None if the type has no limit."""
        return self.max_kl.get(type_name, _default_kl_bounds().get(type_name))


RULES: tuple[type[Section], ...] = (
    MustImproveRule, MustNotRegressRule, AtLeastRule, AboveChanceRule, ForgettingRule, FailureRateRule, BudgetRule,
    ExportParityRule,
)  # fmt: skip
Rule = Annotated[
    MustImproveRule
    | MustNotRegressRule
    | AtLeastRule
    | AboveChanceRule
    | ForgettingRule
    | FailureRateRule
    | BudgetRule
    | ExportParityRule,
    Field(discriminator="rule"),
]


class Gate(Section):
    """The rules that a model must pass before it may be promoted."""

    test: Literal["fixed", "sequential"] = "fixed"
    """fixed: one look at a number of rows that was chosen before; the most powerful test. sequential: valid however
    often anyone looks, and when rows are added after a HOLD; later models on the same rows need stronger evidence."""
    confidence: Confidence = 0.95
    """One-sided confidence of every comparison."""
    power: Share = 0.8
    """Statistical power: probability of detecting the smallest detectable difference."""
    expected_discordance: ClassVar[float] = 0.1
    """Share of samples on which two equally good models are expected to differ. Used for power calculations."""
    resamples: Annotated[int, Field(ge=1000), BeforeValidator(parse_number)] = 9999
    """Bootstrap resamples, for metrics that are not right or wrong per sample."""
    seed: ClassVar[int] = 0
    """Seed of the bootstrap."""
    max_test_set_uses: PositiveCount = 50
    """Models that may be evaluated on one test set. After more, its results are too optimistic."""
    rules: Annotated[tuple[Rule, ...], BeforeValidator(convert_to_tuple), Field(min_length=1)] = (
        MustImproveRule(rule="must_improve", metric=("answer_loss",)),
        MustNotRegressRule(rule="must_not_regress", metric="answer_loss", margin=0.05),
        MustNotRegressRule(rule="must_not_regress", metric="answer_loss", against="anchor", margin=0.05),
        ForgettingRule(rule="forgetting"),
        ExportParityRule(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99),
    )
    """All must pass for PROMOTE. A clear failure gives REJECT; a rule that the data cannot decide gives HOLD."""
