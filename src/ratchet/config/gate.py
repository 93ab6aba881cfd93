"""Settings of stage gate and of promotion: what a model must show, and who is told when one succeeds."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ratchet.config.fields import (
    Count,
    Name,
    Number,
    Positive,
    PositiveCount,
    Section,
    Share,
    convert_to_tuple,
    parse_number,
)
from ratchet.config.units import parse_bytes
from ratchet.errors import SettingsError

Confidence = Annotated[float, BeforeValidator(parse_number), Field(gt=0.5, lt=1)]
Reference = Literal["base", "champion", "anchor"]


def _wrap_single_value(value: Any) -> Any:
    return (value,) if isinstance(value, str) else convert_to_tuple(value)


def _parse_amount(value: Any) -> Any:
    value = parse_number(value)
    if not isinstance(value, str):
        return value
    try:
        return float(parse_bytes(value, "at_most"))
    except SettingsError as error:
        raise ValueError(str(error)) from None


class MustImproveRule(Section):
    """The candidate must be better than a reference, beyond doubt."""

    rule: Literal["must_improve"]
    metric: Annotated[tuple[Name, ...], BeforeValidator(_wrap_single_value), Field(min_length=1)]
    """Metric of the evaluation report, e.g. accuracy, answer_loss, harness/TASK/METRIC; of several, one suffices."""
    over: Reference = "base"
    """Reference model: base, champion, or the anchor (the first champion). Without one the rule holds, and says so."""
    by: Number = 0.0
    """The improvement must exceed this, in units of the metric (for perplexities, a fraction)."""
    confidence: Confidence | None = None
    """One-sided confidence, where it is not gate.confidence."""


class MustNotRegressRule(Section):
    """The candidate must not be worse than a reference by more than a margin fixed beforehand."""

    rule: Literal["must_not_regress"]
    metric: Name
    """Name of a metric in the evaluation report."""
    against: Reference = "champion"
    """Reference model. Without one the rule holds if the samples could have shown a loss of the margin."""
    margin: Positive
    """Largest loss that is still acceptable, in units of the metric (for perplexities, a fraction)."""
    confidence: Confidence | None = None
    """One-sided confidence, where it is not gate.confidence."""


class AtLeastRule(Section):
    """An absolute floor for the candidate's own figure."""

    rule: Literal["at_least"]
    metric: Name
    """Name of a metric in the evaluation report."""
    value: Number
    """The metric must be at least this good (for a loss: at most); its bound must, not only its value."""
    confidence: Confidence | None = None
    """One-sided confidence, where it is not gate.confidence."""


class AboveChanceRule(Section):
    """An alarm: a figure that guessing would reach says that model or evaluation is broken."""

    rule: Literal["above_chance"]
    metric: Name
    """Name of a metric in the evaluation report."""
    chance: Share | None = None
    """What guessing reaches; null: as the evaluation found it (most frequent label, number of choices)."""


class ForgettingRule(Section):
    """Perplexity of general text must not rise: it shows what was unlearned."""

    rule: Literal["forgetting"]
    max_rise: Share = 0.05
    """Largest rise over the base, as a fraction."""
    confidence: Confidence | None = None
    """One-sided confidence, where it is not gate.confidence."""


class BudgetRule(Section):
    """A bound on what the model costs where it is used."""

    rule: Literal["budget"]
    of: Literal["size", "latency", "memory"]
    """size: bytes of the export; latency: median seconds of an answer; memory: peak bytes while answering."""
    at_most: Annotated[float, BeforeValidator(_parse_amount), Field(gt=0, allow_inf_nan=False)]
    """Seconds, or bytes (a number, or such as 24GiB)."""


def _default_kl_bounds() -> dict[str, float]:
    """Bounds of types that nobody gave another: a few times what was measured (docs/formats.md)."""
    return {
        "float32": 1e-4, "f32": 1e-4, "fp32": 1e-4, "float16": 1e-3, "f16": 1e-3, "bfloat16": 0.02, "bf16": 0.02,
        "q8_0": 0.02, "int8": 0.05, "q6_k": 0.05, "q5_k_m": 0.1, "q5_k_s": 0.1, "q5_1": 0.1, "q5_0": 0.1,
        "q4_k_m": 0.2, "q4_k_s": 0.2, "q4_1": 0.3, "q4_0": 0.3, "mxfp4": 0.5, "q3_k_l": 0.5, "q3_k_m": 0.5,
        "q3_k_s": 0.7, "q2_k": 1.0, "tq1_0": 2.0, "tq2_0": 2.0,
    }  # fmt: skip


class ExportParityRule(Section):
    """Every exported form must answer as base + adapter do, each within what its type allows."""

    rule: Literal["export_parity"]
    max_logit_difference: Positive
    """Of the merged model in float32: largest absolute difference of any logit. 16 bits are judged by max_kl."""
    min_greedy_agreement: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1)]
    """Of the merged model: fraction of answer positions at which both choose the same token."""
    max_kl: dict[str, Positive] = Field(default_factory=dict)
    """Mean divergence from base + adapter in nats that a type may have; those not named have ours (docs/formats.md)."""
    min_same_texts: Annotated[float, BeforeValidator(parse_number), Field(ge=0, le=1)] = 0.95
    """Fraction of texts (hard ones, and prompts) that a form's own tokenizer must cut into the same tokens."""
    max_task_loss: Share = 0.02
    """A form fails when its answers are shown to be worse by more: the whole paired interval lies below."""

    @field_validator("max_kl")
    @classmethod
    def _types_are_known(cls, given: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(given.keys() - _default_kl_bounds().keys()):
            raise ValueError(
                f"{unknown[0]!r} is no type of an exported form; there are: {', '.join(_default_kl_bounds())}"
            )
        return given

    def kl_of(self, type_name: str) -> float | None:
        """The bound of a type; None when it has none."""
        return self.max_kl.get(type_name, _default_kl_bounds().get(type_name))


RULES: tuple[type[Section], ...] = (
    MustImproveRule, MustNotRegressRule, AtLeastRule, AboveChanceRule, ForgettingRule, BudgetRule, ExportParityRule,
)  # fmt: skip
Rule = Annotated[
    MustImproveRule
    | MustNotRegressRule
    | AtLeastRule
    | AboveChanceRule
    | ForgettingRule
    | BudgetRule
    | ExportParityRule,
    Field(discriminator="rule"),
]


class Gate(Section):
    """What a model must show before it may be promoted."""

    confidence: Confidence = 0.95
    """One-sided confidence of every comparison."""
    power: Share = 0.8
    """Chance with which the smallest detectable difference is detected."""
    discordance: Share = 0.1
    """Share of samples on which two models that are equally good differ: what a comparison is planned with."""
    resamples: Annotated[int, BeforeValidator(parse_number), Field(ge=1000)] = 9999
    """Bootstrap resamples of a comparison that is not of right and wrong."""
    seed: Count = 0
    """Of the bootstrap."""
    lookups: PositiveCount = 50
    """Models that may be looked at with one set of test rows; after more, it says too little about the next."""
    rules: Annotated[tuple[Rule, ...], BeforeValidator(convert_to_tuple), Field(min_length=1)] = (
        MustImproveRule(rule="must_improve", metric=("answer_loss",)),
        MustNotRegressRule(rule="must_not_regress", metric="answer_loss", margin=0.05),
        MustNotRegressRule(rule="must_not_regress", metric="answer_loss", against="anchor", margin=0.05),
        ForgettingRule(rule="forgetting"),
        ExportParityRule(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99),
    )
    """All must hold for PROMOTE; one that clearly fails gives REJECT, one that the data cannot decide gives HOLD."""


class HookSettings(Section):
    """Who is told of a promotion: a web server, or a program of yours."""

    webhook: Name | None = None
    """Address (https, or http on loopback) that the event is sent to as JSON, signed when there is a key."""
    key_variable: Name = "RATCHET_WEBHOOK_KEY"
    """Environment variable with the key of the HMAC-SHA256 signature; never the key itself."""
    command: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """Program and arguments; it runs in the project's root and reads the event as JSON from its standard input."""
    events: Annotated[
        tuple[Literal["promote", "rollback"], ...], BeforeValidator(convert_to_tuple), Field(min_length=1)
    ] = (
        "promote",
        "rollback",
    )
    """Events to be told of."""
    timeout_s: Positive = 60.0
    """Longest wait for an answer, or for the program to end, in seconds."""
    retries: Count = 5
    """Further tries after one that failed, with waits that double from 1 s on."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "HookSettings":
        if bool(self.webhook) == bool(self.command):
            raise ValueError("a hook has either a webhook or a command")
        return self


class Promote(Section):
    """Where promoted models are registered, and who is told."""

    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "ratchet-model"
    """Name of the registered model in MLflow; also the name of the experiment that its runs are logged to."""
    signing: Literal["key", "sigstore"] = "key"
    """Promoted models are signed with this machine's key (`ratchet keys`), or by an identity through sigstore."""
    hooks: Annotated[tuple[HookSettings, ...], BeforeValidator(convert_to_tuple)] = ()
    """Told of every promotion and rollback, each exactly once."""
