"""What a promotion that has begun is about to do: written before anything that others see, removed when all is done.

The alias decides. An intent whose alias has not moved is dropped, and then nothing happened; one whose alias has moved
is finished by whatever command comes next (`promotion.road`).
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ratchet.config.gate import HookSettings
from ratchet.errors import DamagedFileError
from ratchet.registry import hooks
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.evaluation import EvaluationReport, MetricValue
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Action, Champion, ChampionFile, Decision, ForcedPromotion, Promotion, Verdict

UNREGISTERED = 0
"""Version of a model that is not registered yet; MLflow counts from 1."""


class PromotionIntent(Record):
    """Everything that is needed to finish, so that nothing is read again that may have changed meanwhile."""

    id: str
    """Of the event; a command that is repeated after its intent was dropped makes another."""
    time: str
    """UTC, ISO 8601."""
    action: Action
    by: str
    project: str
    model_name: str
    """Of the registered model; settings may change before somebody finishes."""
    champion: Champion
    """Who is to be champion; its version is UNREGISTERED until it has one."""
    alias: int | None
    """Version that the alias was at: it moves from there, or not at all."""
    before: int | None
    """Version that the champion file named."""
    decision: Decision | None
    reason: str | None
    anchored: bool
    """It becomes the anchor, too."""
    description: str | None = None
    """New words for the registered version; None leaves them."""
    hooks: tuple[HookSettings, ...] = ()

    def entry(self, version: int) -> Promotion:
        """The line for the ledger, not yet chained."""
        champion = self.champion
        return Promotion(
            id=self.id, time=self.time, action=self.action, by=self.by, version=version,
            model_digest=champion.model_digest, adapter_digest=champion.adapter_digest, run_id=champion.run_id,
            before=self.before, decision=self.decision, reason=self.reason, forced=champion.forced is not None,
            anchored=self.anchored, previous=None,
        )  # fmt: skip


def new_event_id() -> str:
    """An event's id: 128 random bits."""
    return secrets.token_hex(16)


def utc_now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_intent(path: Path) -> PromotionIntent | None:
    """What a command that died has left, or None. Raises DamagedFileError when that cannot be read."""
    if not path.exists():
        return None
    try:
        return PromotionIntent.load(path)
    except DamagedFileError:
        raise DamagedFileError(
            f"{path}: unreadable; it says which promotion was interrupted. If no promotion is at work, remove it, "
            "then compare with `ratchet promotions`"
        ) from None


def remove_intent(path: Path) -> None:
    """There is nothing left to do. A machine that dies now may bring it back; finishing twice changes nothing."""
    files.before("unlink", path)
    path.unlink(missing_ok=True)
    files.fsync_directory(path.parent)


# Who follows whom: the champion file after a promotion or a rollback. Pure.


def champion_after(before: ChampionFile, action: Action, champion: Champion, anchored: bool, head: str) -> ChampionFile:
    """The champion file once `champion` is champion.

    Args:
        before: the file as it is.
        action: a promoted model follows whoever was champion. After a rollback the one that it replaces was found
            wanting, and is not named as one to go back to.
        champion: names every version once.
        anchored: it becomes the anchor, too.
        head: digest of the ledger's entry about this.
    """
    line: Iterable[Champion] = before.previous
    if action == "promote" and before.champion:
        line = (before.champion, *before.previous)
    others = {c.version: c for c in line if c.version != champion.version}
    return ChampionFile(
        champion=champion,
        previous=tuple(others.values()),
        anchor=champion if anchored else before.anchor,
        ledger=head,
    )


def find_version(file: ChampionFile, version: int) -> Champion | None:
    """What the champion file says of a version, if it names it."""
    named = (file.champion, *file.previous, file.anchor)
    return next((c for c in named if c is not None and c.version == version), None)


def version_label(champion: Champion) -> str:
    """A version for people; one that was forced says so."""
    forced = ", FORCED" if champion.forced else ""
    return f"version {champion.version} (model {champion.model_digest[:12]}, run {champion.run_id}{forced})"


# What a registered version says of itself in MLflow: its tags and its description.

LONGEST_KEY = 250
"""Characters of a tag's name; MLflow refuses more."""

FORCED, FORCED_BY, FORCED_REASON, DECISION = (
    f"ratchet.{name}" for name in ("forced", "forced_by", "forced_reason", "decision")
)
ADAPTER, RUN = "ratchet.adapter_digest", "ratchet.run_id"


def model_tags(bundle: ModelBundle, verdict: Verdict, report: EvaluationReport, page: str) -> dict[str, str]:
    """Tags of a version when it is registered: what the model is made of, how it scored, what the gate said."""
    tags = {
        ADAPTER: bundle.adapter_digest,
        "ratchet.base_digest": bundle.base_digest,
        "ratchet.data_digest": bundle.data_digest,
        RUN: bundle.run_id,
        DECISION: verdict.decision,
        "ratchet.gate_page": page,
    }
    return tags | {_key(name): repr(metric.value) for name, metric in _metrics(report).items()}


def promotion_tags(intent: PromotionIntent) -> dict[str, str]:
    """Tags that a promotion or a rollback sets, on the version and on the MLflow run."""
    tags = {"ratchet.event": intent.id}
    if intent.action == "rollback":
        return tags | {"ratchet.returned_by": intent.by, "ratchet.returned_reason": intent.reason or ""}
    forced = intent.champion.forced
    return tags | {
        DECISION: intent.decision or "",
        "ratchet.promoted_by": intent.by,
        "ratchet.promoted_at": intent.time,
        FORCED: "true" if forced else "false",
        FORCED_BY: forced.by if forced else "",
        FORCED_REASON: forced.reason if forced else "",
    }


def parse_forced(tags: dict[str, str]) -> ForcedPromotion | None:
    """What `promotion_tags` said of force, read back from a version's tags."""
    if tags.get(FORCED) != "true":
        return None
    return ForcedPromotion.model_validate(
        {"by": tags[FORCED_BY], "reason": tags[FORCED_REASON], "decision": tags[DECISION]}
    )


def describe_version(
    champion: Champion, by: str, time: str, bundle: ModelBundle, verdict: Verdict, report: EvaluationReport
) -> str:
    """A version in words, as Markdown: MLflow shows it on the version's page."""
    forced = champion.forced
    first = f"Promoted on {time} by {by}; the gate said {verdict.decision}."
    if forced:
        first = f"**FORCED** on {time} by {forced.by} although the gate said {forced.decision}: {forced.reason}"
    figures = ", ".join(f"{name} {metric.value:.4g}" for name, metric in sorted(_metrics(report).items()))
    made_of = (
        f"Run {bundle.run_id}: adapter {bundle.adapter_digest[:12]} on base {bundle.base_digest[:12]}, "
        f"data {bundle.data_digest[:12]}, merged into the {bundle.into}, {bundle.dtype}."
    )
    return "\n\n".join((first, made_of, f"Evaluation: {figures}." if figures else "No figures."))


def _metrics(report: EvaluationReport) -> dict[str, MetricValue]:
    """Figures of the model as it is served: as exported, where that was scored."""
    scores = report.scores.get("merged") or report.scores.get("candidate")
    return scores.metrics if scores else {}


def _key(metric: str) -> str:
    """A tag's name that MLflow takes: few characters, and no path that leads elsewhere."""
    parts = re.sub(r"[^/\w.\-: ]", "_", metric).split("/")
    return "/".join(["ratchet.metric." + parts[0], *("_" if p in ("", ".", "..") else p for p in parts[1:])])[
        :LONGEST_KEY
    ].rstrip("/")


def describe_plan(layout: ProjectLayout, about: PromotionIntent, version: int | None, *first: str) -> str:
    """What `road.carry_out` would do, step by step."""
    to = f"version {version}" if version is not None else "a new version"
    steps = [*first, f"note the intent in {layout.intent}"]
    if version is None:
        steps.append(f"register model {about.champion.model_digest[:12]} as {to} of {about.model_name}")
    steps.append(f"move the alias champion from {f'version {about.alias}' if about.alias else 'nowhere'} to {to}")
    steps.append(f"add a line to {layout.promotions}, by {about.by}{': ' + about.reason if about.reason else ''}")
    steps.append(f"name {to} in {layout.champion}{', as the anchor too' if about.anchored else ''}")
    if forced := about.champion.forced:
        steps.append(f"mark folder, version and MLflow run as FORCED against {forced.decision}")
    steps += [f"tell {hooks.hook_label(hook)}" for hook in about.hooks if about.action in hook.events]
    return "\n".join(["dry run, nothing was changed; this would be done:", *(f"  {step}" for step in steps)])


def describe_last_promotion(entries: Sequence[Promotion]) -> str:
    """Who promoted last, and when."""
    return f" (last changed by {entries[-1].by} on {entries[-1].time})" if entries else ""
