"""Verdict of the gate, champion, and promotion ledger."""

from pathlib import Path
from typing import Literal

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
    """Mean of the paired differences; for perplexities the relative reduction, 1 - new/old."""
    low: float
    high: float
    """One-sided bounds, each at `confidence`."""
    confidence: float
    n: int
    groups: int | None = None
    """Number of clusters, if rows share groups."""
    better: int | None = None
    """Samples that only the candidate has right; None if scores are not right or wrong."""
    worse: int | None = None
    """Samples that only the reference has right; None if scores are not right or wrong."""
    bound: float
    """Value that the difference is compared with: `by`, or minus the margin."""
    p: float
    """One-sided p-value of the null hypothesis of the rule."""
    p_adjusted: float | None = None
    """p after Holm's correction, if several metrics are tested."""
    detectable: float
    """Smallest difference that `n` samples detect at the planned power."""
    required_samples: int | None = None
    """Samples required to decide; None if these suffice."""
    method: str
    """Statistical method, e.g. `Tango score interval`, `McNemar mid-p`, `paired BCa bootstrap`."""


class RuleResult(Record):
    """Result of one rule."""

    rule: str
    metric: str
    outcome: Outcome
    text: str
    comparisons: tuple[ModelComparison, ...] = ()


class Verdict(Record):
    """Verdict of the gate for one model."""

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
    """Models that were evaluated on this test set, including this one."""
    max_test_set_uses: int = 0
    """Setting gate.max_test_set_uses."""
    rules: str = ""
    """Digest of section gate of the settings."""
    earlier_decisions: tuple[Decision, ...] = ()
    """Decisions about this model on these samples under different rules."""


class ForcedPromotion(Record):
    """A promotion that overrides the verdict."""

    actor: str
    """Person: RATCHET_ACTOR, git's user, or the login name."""
    reason: str
    decision: Decision
    """Decision of the overridden verdict."""


class Champion(Record):
    """A promoted version."""

    version: int
    """Version of the registered model in MLflow."""
    model_digest: str
    adapter_digest: str
    run_id: str
    forced: ForcedPromotion | None = None


class ChampionFile(Record):
    """experiments/champion.json: the champion, and previous ones, newest first."""

    champion: Champion | None = None
    previous: tuple[Champion, ...] = ()
    anchor: Champion | None = None
    """Fixed reference for all later champions: the first champion, unless another one was set."""
    ledger: str | None = None
    """Digest of the newest entry of the promotion ledger."""

    @property
    def champion_digest(self) -> str | None:
        """Model digest of the champion, if any."""
        return self.champion.model_digest if self.champion else None

    @property
    def anchor_digest(self) -> str | None:
        """Model digest of the anchor, if any."""
        return self.anchor.model_digest if self.anchor else None


class Promotion(Record):
    """An entry (line) of the promotion ledger, experiments/promotions.jsonl."""

    id: str
    """Id of the event; also the idempotency key for hooks."""
    time: str
    """Time in UTC, ISO 8601."""
    action: Action
    actor: str
    version: int
    model_digest: str
    adapter_digest: str
    run_id: str
    previous_version: int | None
    """Version of the champion before."""
    decision: Decision | None = None
    """Decision of the verdict; None for a rollback."""
    reason: str | None = None
    """Reason, if one was given."""
    forced: bool = False
    is_anchor: bool = False
    """Whether the model also became the anchor."""
    previous: str | None
    """Digest of the previous entry; None for the first."""
    digest: str = ""
    """Digest of this entry without this field, as canonical JSON."""


class TestSetUse(Record):
    """A line of experiments/test_set_uses.jsonl: a model was evaluated or judged on a test set."""

    test_set_digest: str
    model: str
    """Digest of the adapter."""
    run_id: str
    rules: str | None = None
    """Digest of the section gate by which it was judged; None if it was only evaluated."""
    decision: Decision | None = None


def read_champion(path: Path) -> ChampionFile:
    """Read the champion file; an empty record if nothing was promoted yet."""
    return ChampionFile.load(path) if path.exists() else ChampionFile()
