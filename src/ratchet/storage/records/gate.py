"""The gate's answer and what came of it, as JSON: verdict, champion, promotion ledger, events."""

from pathlib import Path
from typing import Literal

from ratchet.storage.records.base import Record

Outcome = Literal["pass", "fail", "undecided", "invalid"]
Decision = Literal["PROMOTE", "HOLD", "REJECT", "INVALID"]
Action = Literal["promote", "rollback"]


class ModelComparison(Record):
    """Two models on the same samples. Signs are turned so that a positive difference is an improvement."""

    metric: str
    against: Literal["base", "champion", "anchor"]
    form: str
    """In which the candidate was compared."""
    difference: float
    """Mean of the paired differences; for perplexities the fraction by which it fell, 1 - new/old."""
    low: float
    high: float
    """One-sided bounds, each at `confidence`."""
    confidence: float
    n: int
    groups: int | None = None
    """Clusters, where rows share a group."""
    better: int | None = None
    """Samples that only the candidate has right; None where scores are not of right and wrong."""
    worse: int | None = None
    """Samples that only the reference has right."""
    bound: float
    """What the difference is held against: `by`, or minus the margin."""
    p: float
    """One-sided p-value of the hypothesis that the rule wants refuted."""
    p_adjusted: float | None = None
    """After Holm, where several improvements are claimed."""
    detectable: float
    """Smallest difference that so many samples detect at the planned power."""
    needed: int | None = None
    """Samples that it would take; None where these suffice."""
    method: str
    """E.g. `Tango score interval`, `McNemar mid-p`, `paired BCa bootstrap`."""


class RuleResult(Record):
    """What one rule found."""

    rule: str
    metric: str
    outcome: Outcome
    text: str
    comparisons: tuple[ModelComparison, ...] = ()


class Verdict(Record):
    """The gate's answer for exactly one model."""

    decision: Decision
    model_digest: str
    adapter_digest: str
    run_id: str
    is_champion: bool
    """The candidate is the champion already."""
    champion_digest: str | None
    anchor_digest: str | None = None
    reasons: tuple[RuleResult, ...]
    gate_set: str = ""
    lookups: int = 0
    """Models looked at with this gate set, this one included."""
    lookups_allowed: int = 0
    """gate.lookups."""
    rules: str = ""
    """Fingerprint of the section gate that it was judged by."""
    judged_before: tuple[Decision, ...] = ()
    """What the gate said of this model on these samples under other rules: margins belong before the look."""


class ForcedPromotion(Record):
    """Promotion against the verdict."""

    by: str
    """Who: RATCHET_ACTOR, git's user, or the login name."""
    reason: str
    decision: Decision
    """What the verdict was."""


class Champion(Record):
    """A promoted version."""

    version: int
    """Of the registered model in MLflow."""
    model_digest: str
    adapter_digest: str
    run_id: str
    forced: ForcedPromotion | None = None


class ChampionFile(Record):
    """experiments/champion.json: who is champion, and who was before, newest first."""

    champion: Champion | None = None
    previous: tuple[Champion, ...] = ()
    anchor: Champion | None = None
    """The first champion, unless another was named: new ones must not fall behind it either."""
    ledger: str | None = None
    """Digest of the newest entry of the promotion ledger."""

    @property
    def champion_digest(self) -> str | None:
        """Model digest of the champion, if there is one."""
        return self.champion.model_digest if self.champion else None

    @property
    def anchor_digest(self) -> str | None:
        """Model digest of the anchor, if there is one."""
        return self.anchor.model_digest if self.anchor else None


class Promotion(Record):
    """A line of experiments/promotions.jsonl."""

    id: str
    """Of the event; also the idempotency key of what is sent to hooks."""
    time: str
    """UTC, ISO 8601."""
    action: Action
    by: str
    version: int
    model_digest: str
    adapter_digest: str
    run_id: str
    before: int | None
    """Version that was champion until then."""
    decision: Decision | None = None
    """Of the verdict; None for a rollback."""
    reason: str | None = None
    """Why, where it was forced or given."""
    forced: bool = False
    anchored: bool = False
    """It was made the anchor, too."""
    previous: str | None
    """Digest of the entry before; None for the first."""
    digest: str = ""
    """Of this entry without this field, as canonical JSON."""


class GateSetLookup(Record):
    """A line of experiments/lookups.jsonl: a model whose scores on a gate set were seen, or judged."""

    gate_set: str
    model: str
    """Adapter digest."""
    run_id: str
    rules: str | None = None
    """Fingerprint of the section gate that it was judged by; None where its scores were seen."""
    decision: Decision | None = None


def read_champion(path: Path) -> ChampionFile:
    """The champion file; one that is not there means that nothing was promoted yet."""
    return ChampionFile.load(path) if path.exists() else ChampionFile()
