"""Records of the gate and of promotion: verdict, champion, promotion ledger, uses of test sets."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config import units
from ratchet.storage.records.base import Record

Outcome = Literal["pass", "fail", "undecided", "invalid"]
Decision = Literal["PROMOTE", "HOLD", "REJECT", "INVALID"]
Action = Literal["promote", "rollback"]


class ModelComparison(Record):
    """Comparison of two models on the same samples. A positive difference is an improvement, whatever the metric."""

    metric: str
    against: Literal["base", "champion", "anchor"]
    role: str
    """Form of the candidate: adapter or merged."""
    difference: float
    """Mean of the paired differences; for perplexities, the relative reduction 1 - new/old."""
    low: float
    high: float
    """One-sided bounds; each bound has the confidence level `confidence`."""
    confidence: float
    n: int
    groups: int | None = None
    """Number of clusters, if rows share groups."""
    better: int | None = None
    """Number of samples that only the candidate has right; None if scores are not right or wrong."""
    worse: int | None = None
    """Number of samples that only the reference has right; None if scores are not right or wrong."""
    bound: float
    """Threshold for the difference: `by` of a rule must_improve, or minus the `margin` of a rule must_not_regress."""
    p: float
    """One-sided p-value of the null hypothesis of the rule."""
    p_adjusted: float | None = None
    """`p` after Holm's correction, if several metrics are tested."""
    detectable: float
    """Smallest difference that `n` samples detect at the planned power."""
    required_samples: int | None = None
    """Number of samples required to decide; None if the present samples suffice."""
    method: str
    """Statistical method, e.g. `Tango score interval`, `McNemar mid-p`, `paired BCa bootstrap`, `betting`."""
    min_units: int = 0
    """Number of samples (or groups) from which this method may decide."""
    is_sequential: bool = False
    """Whether bounds and p-value hold however often anyone looks, and when rows are added."""
    low_confidence: float | None = None
    """Confidence of `low` if it is higher than `confidence`, because earlier models were tested on these samples."""


class RuleResult(Record):
    """Result of a rule of the gate."""

    rule: str
    metric: str
    outcome: Outcome
    text: str
    comparisons: tuple[ModelComparison, ...] = ()


class Verdict(Record):
    """Verdict of the gate for a model."""

    decision: Decision
    model_digest: str
    adapter_digest: str
    run_id: str
    is_champion: bool
    """Whether the candidate is already the champion."""
    champion_digest: str | None
    anchor_digest: str | None = None
    reasons: tuple[RuleResult, ...]
    test_set_digest: str = ""
    test_set_uses: int = 0
    """Number of models that were evaluated on this test set, this model included."""
    max_test_set_uses: int = 0
    """Setting gate.max_test_set_uses; 0 for sequential tests, which have no such limit."""
    rules: str = ""
    """Digest of the settings (section gate) that judged the model."""
    earlier_decisions: tuple[Decision, ...] = ()
    """Earlier decisions about this model on these samples, under different rules."""
    remaining_rows: int = 0
    """Number of test rows that were not scored."""
    notes: tuple[str, ...] = Field(default=(), exclude_if=lambda notes: not notes)
    """Notes about what the gate could not check."""
    alpha_share: float | None = None
    """Share of 1 - confidence at which a sequential test may promote this model, because earlier models were tested on
    these samples; None for fixed tests."""


class Approver(Record):
    """A person whose approval counted for a promotion."""

    signer: str
    """Fingerprint of the key, or the identity, that signed the approval."""
    actor: str
    """Name that the signer gave."""
    time: str
    """Time of the approval in UTC, ISO 8601."""


class PromotionApprovals(Record):
    """The approvals of a promotion."""

    required: int
    """Setting promote.approvals."""
    missing: int
    """Number of approvals that a forced promotion lacked."""
    verdict_digest: str
    """SHA-256 of the approved verdict.json."""
    approvers: tuple[Approver, ...]


def describe_overridden(decision: Decision | None) -> str:
    """Describe what a forced promotion or push overrides. If the decision is PROMOTE, the model was rolled back."""
    if decision is None:
        return "the lack of a current verdict about this adapter"
    return "a rollback of this model" if decision == "PROMOTE" else f"the gate's decision {decision}"


class ForcedPromotion(Record):
    """A promotion that overrides the verdict, an earlier rollback, or missing approvals."""

    actor: str
    """Name of the person: RATCHET_ACTOR, git's user, or the login name."""
    reason: str
    decision: Decision
    """Decision of the overridden verdict."""
    missing_approvals: int = Field(default=0, exclude_if=lambda number: number == 0)
    """Number of approvals that were missing."""

    @property
    def obstacle(self) -> str:
        """Description of what was overridden."""
        missing = units.format_count(self.missing_approvals, "missing approval")
        if not self.missing_approvals:
            return describe_overridden(self.decision)
        return missing if self.decision == "PROMOTE" else f"{describe_overridden(self.decision)} and {missing}"


class Champion(Record):
    """A promoted version of the model."""

    version: int
    """Version of the registered model in MLflow."""
    model_digest: str
    adapter_digest: str
    run_id: str
    forced: ForcedPromotion | None = None


class ChampionFile(Record):
    """Content of experiments/champion.json: the champion, its anchor, and previous champions."""

    champion: Champion | None = None
    previous: tuple[Champion, ...] = ()
    """Previous champions, newest first."""
    anchor: Champion | None = None
    """Fixed reference for all later champions: the first champion, unless another model was set."""
    ledger: str | None = None
    """Digest of the newest entry of the promotion ledger."""

    @property
    def is_empty(self) -> bool:
        """Whether no model was promoted yet, or the file was emptied."""
        return self == ChampionFile()

    @property
    def champion_digest(self) -> str | None:
        """Model digest of the champion, if any."""
        return self.champion.model_digest if self.champion else None

    @property
    def anchor_digest(self) -> str | None:
        """Model digest of the anchor, if any."""
        return self.anchor.model_digest if self.anchor else None


class Promotion(Record):
    """An entry of the promotion ledger: a line of experiments/promotions.jsonl."""

    id: str
    """Id of the promotion; also the idempotency key for hooks."""
    time: str
    """Time in UTC, ISO 8601."""
    action: Action
    actor: str
    version: int
    model_digest: str
    adapter_digest: str
    run_id: str
    previous_version: int | None
    """Version of the previous champion."""
    decision: Decision | None = None
    """Decision in the verdict; None for a rollback."""
    reason: str | None = None
    """Reason that the user gave, if any."""
    forced: bool = False
    is_anchor: bool = False
    """Whether the model also became the anchor."""
    approvals: PromotionApprovals | None = Field(default=None, exclude_if=lambda value: value is None)
    """Approvals of a promotion; None if the project required none, and then not part of the line and its digest."""
    previous: str | None
    """Digest of the previous entry; None for the first entry."""
    digest: str = ""
    """Digest of the other fields of this entry, as canonical JSON."""


class TestSetUse(Record):
    """A use of a test set, to evaluate or judge a model: a line of experiments/test_set_uses.jsonl."""

    test_set_digest: str
    model: str
    """Digest of the adapter."""
    run_id: str
    rules: str | None = None
    """Digest of the settings (section gate) that judged the model; None if the model was only evaluated."""
    decision: Decision | None = None


class TestSetRows(Record):
    """Rows of a test set: a line of experiments/test_set_uses.jsonl for a new test set, or for rows added to one."""

    __test__: ClassVar[bool] = False
    digest: str
    """Digest of all rows and documents of the test set from now on."""
    previous: str | None = None
    """Digest before these rows were added; None for a new test set."""
    rows: tuple[str, ...]
    """Ids of the added test rows."""
    tasks: dict[str, tuple[str, ...]]
    """Ids of the added documents, by harness task."""


def read_champion(path: Path) -> ChampionFile:
    """Read the champion file. Returns an empty record if no model was promoted yet."""
    return ChampionFile.load(path) if path.exists() else ChampionFile()
