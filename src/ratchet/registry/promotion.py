"""Executes promotions and rollbacks: intent → version → alias → ledger → champion file → outbox.

In the project's own registry, moving the alias is a compare-and-set, and commits the promotion. On a server, the commit
is the new line of the shared ledger, and the alias follows it (`ModelVersionRegistry.commit`). The steps before the
commit can be dropped. The steps after the commit can be repeated: every step first checks whether it is already done,
and no step can be refused. If a process dies before the commit, the next command drops the intent, and the champion is
unchanged. If the process dies later, the next command completes the promotion. The intent is removed when all steps are
done.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet.config.promote import HookSettings
from ratchet.errors import ChampionError, DamagedFileError, PermissionRefusedError, TrackingError
from ratchet.registry import ledger, outbox
from ratchet.storage import files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.evaluation import EvaluationReport, MetricValue
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import (
    Action,
    Champion,
    ChampionFile,
    Decision,
    ForcedPromotion,
    Promotion,
    PromotionApprovals,
    Verdict,
    read_champion,
)

UNREGISTERED = 0
"""Version of a model that is not registered yet; MLflow counts from 1."""

LOCK_WAIT_S = 60.0
"""Maximum wait for another promotion; most promotions take seconds."""

MAX_TAG_CHARACTERS = 250
"""MLflow's limit of a tag's name."""

FORCED, FORCED_BY, FORCED_REASON, DECISION, APPROVED_BY, MISSING_APPROVALS = (
    f"ratchet.{name}"
    for name in ("forced", "forced_by", "forced_reason", "decision", "approved_by", "missing_approvals")
)

ADAPTER, RUN = "ratchet.adapter_digest", "ratchet.run_id"
"""Tags of a registered version: digest of the adapter, and id of the training run."""
EVENT = "ratchet.event"
"""Tag of a registered version with the id of its last promotion or rollback. It is set after the alias has moved."""


class PromotionIntent(Record):
    """Everything needed to complete a promotion or rollback later, when files and settings may have changed."""

    id: str
    """Id of the event; a repeated command creates a new id."""
    time: str
    """UTC, ISO 8601."""
    action: Action
    actor: str
    """Person or service that started the promotion or rollback."""
    project: str
    model_name: str
    """Name of the registered model."""
    champion: Champion
    """The new champion; its version is UNREGISTERED until the model is registered."""
    alias: int | None
    """Version that the alias named before; the alias moves only if it still names this version."""
    previous_version: int | None
    """Version that the champion file named before."""
    decision: Decision | None
    reason: str | None
    is_anchor: bool
    """Whether the new champion also becomes the anchor."""
    description: str | None = None
    """New description of the registered version; None keeps the old one."""
    hooks: tuple[HookSettings, ...] = ()
    server: str | None = None
    """Server with the registered model; None: the project's own registry."""
    approvals: PromotionApprovals | None = None

    def entry(self, version: int) -> Promotion:
        """Return the ledger's entry, not yet chained."""
        champion = self.champion
        return Promotion(
            id=self.id, time=self.time, action=self.action, actor=self.actor, version=version,
            model_digest=champion.model_digest, adapter_digest=champion.adapter_digest, run_id=champion.run_id,
            previous_version=self.previous_version, decision=self.decision, reason=self.reason,
            forced=champion.forced is not None, is_anchor=self.is_anchor, approvals=self.approvals, previous=None,
        )  # fmt: skip


class ModelVersionRegistry(Protocol):
    """The registered model (`tracking.mlflow.registry.MlflowModelRegistry`). All methods may raise TrackingError."""

    def champion(self) -> int | None:
        """Return the version that the alias names; None without an alias."""

    def find_version(self, model_digest: str) -> int | None:
        """Return the version of a model; None if it is not registered."""

    def commit(self, entry: Promotion, expected: int | None) -> None:
        """Make the entry's version champion.

        Raises ChampionError if another promotion took place: the alias no longer names `expected`, or on a server
        another entry follows the entry before this one.
        """

    def has_committed(self, event: str, version: int) -> bool:
        """Return whether an interrupted `commit` of the event with this id, for this version, was done."""

    def move_alias(self) -> None:
        """Repeat what follows a commit on a server: the alias names the version of the newest entry."""

    def model_uri(self, version: int, folder: Path) -> str:
        """Return the address of a version, for hooks: the folder, or on a server `models:/NAME/VERSION`."""

    def annotate_version(self, version: int, run_id: str, tags: Mapping[str, str], description: str | None) -> None:
        """Write tags and a description to a version, and the tags to the MLflow run of this run id."""


OpenRegistry = Callable[[PromotionIntent], ModelVersionRegistry]
"""Opens the registered model of an intent. Raises ChampionError if its registry is not the one in use now."""


def acquire_lock(layout: ProjectLayout) -> FileLock:
    """Take the lock for promotions, rollbacks and their recovery. Raises LockHeldError after a timeout."""
    return FileLock(layout.mlruns / "promote.lock", "promotion").acquire(wait_s=LOCK_WAIT_S)


def execute_promotion(
    layout: ProjectLayout, registry: ModelVersionRegistry, intent: PromotionIntent, register: Callable[[], int]
) -> tuple[Promotion, str]:
    """Execute a promotion or rollback.

    Args:
        layout: the project.
        registry: the registered model.
        intent: the promotion or rollback.
        register: registers the model if necessary, and returns its version.

    Returns:
        The ledger's entry, and the name of the event in the outbox.

    Raises:
        ChampionError: another promotion took place meanwhile; nothing happened.
        PermissionRefusedError: the user has not the role for it; nothing happened.
        TrackingError: MLflow is not available; repeat the command to complete the promotion.
    """
    intent.save(layout.promotion_intent)
    version = intent.champion.version
    try:
        if version == UNREGISTERED:
            version = register()
    except TrackingError:
        remove_intent(layout.promotion_intent)
        raise
    entry = ledger.chain_entry(ledger.read_entries(layout.promotions), intent.entry(version))
    try:
        registry.commit(entry, intent.alias)
    except (ChampionError, PermissionRefusedError):
        remove_intent(layout.promotion_intent)
        raise
    return finish_promotion(layout, registry, intent, version)


def finish_promotion(
    layout: ProjectLayout, registry: ModelVersionRegistry, intent: PromotionIntent, version: int
) -> tuple[Promotion, str]:
    """Do all steps that follow the commit; they may be repeated. Returns the same as `execute_promotion`."""
    registry.move_alias()
    champion = intent.champion.model_copy(update={"version": version})
    entry = ledger.append_entry(layout.promotions, intent.entry(version))
    entries = ledger.read_entries(layout.promotions)
    current = read_champion(layout.champion)
    if current.ledger != entry.digest and entries[-1] == entry:  # a server's later entries may be here already
        if current.is_empty and intent.action == "rollback":  # it repairs the file; the ledger has its history
            current = ledger.replay_entries(entries[:-1])
        ledger.update_champion(current, intent.action, champion, intent.is_anchor, entry.digest).save(layout.champion)
    registry.annotate_version(version, champion.run_id, promotion_tags(entry), intent.description)
    line = 1 + next(n for n, e in enumerate(entries) if e.id == entry.id)
    source = registry.model_uri(version, layout.promoted_model(champion.model_digest))
    event = outbox.build_event(entry, line, intent.project, intent.model_name, source)
    name = outbox.add_event(layout.outbox, event, intent.hooks)
    remove_intent(layout.promotion_intent)
    return entry, name


@dataclass(frozen=True)
class InterruptedPromotion:
    """An interrupted promotion or rollback."""

    intent: PromotionIntent
    version: int | None
    """Version of the model; None: the model is not registered yet."""
    is_committed: bool
    """Whether the commit was done, so that the promotion is completed instead of dropped."""

    def describe(self) -> str:
        """Describe the recovery for the user."""
        intent = self.intent
        noun = "promotion" if intent.action == "promote" else "rollback"
        subject = f"the {noun} of model {intent.champion.model_digest[:12]}, started on {intent.time} by {intent.actor}"
        if self.is_committed:
            return f"{subject}, was interrupted after version {self.version} had become champion: completed"
        return f"{subject}, was interrupted before the champion had changed: dropped without any effect"


def find_interrupted(layout: ProjectLayout, open_registry: OpenRegistry) -> InterruptedPromotion | None:
    """Find an interrupted promotion, and whether to complete or drop it; None if there is none. Changes nothing."""
    intent = read_intent(layout.promotion_intent)
    if intent is None:
        return None
    registry = open_registry(intent)
    version = intent.champion.version or registry.find_version(intent.champion.model_digest)
    if version is None:
        return InterruptedPromotion(intent, None, is_committed=False)
    # Check the ledger, too, because a user may have moved the alias after the interruption.
    is_in_ledger = any(entry.id == intent.id for entry in ledger.read_entries(layout.promotions))
    is_committed = is_in_ledger or registry.has_committed(intent.id, version)
    return InterruptedPromotion(intent, version, is_committed)


def recover_interrupted(layout: ProjectLayout, open_registry: OpenRegistry) -> str | None:
    """Complete or drop an interrupted promotion; the caller holds the promotion lock.

    Returns:
        A description for the user; None if there was no interrupted promotion.
    """
    interrupted = find_interrupted(layout, open_registry)
    if interrupted is None:
        return None
    if interrupted.is_committed and interrupted.version is not None:
        finish_promotion(layout, open_registry(interrupted.intent), interrupted.intent, interrupted.version)
    else:
        remove_intent(layout.promotion_intent)
    return interrupted.describe()


def pull_shared(layout: ProjectLayout, shared: Sequence[Promotion], server: str) -> list[Promotion]:
    """Add the entries on a server to the project's ledger, and update its champion file; the caller holds the lock.

    A crash between the two files is completed by the next call.

    Returns:
        The entries that the ledger lacked.

    Raises:
        DamagedFileError: the two ledgers contradict each other, or the champion file names an unknown entry.
    """
    entries = ledger.read_entries(layout.promotions)
    missing = ledger.find_missing(layout.promotions, entries, shared, server)
    entries += missing
    if missing:
        ledger.write_entries(layout.promotions, entries)
    file = read_champion(layout.champion)
    heads = [entry.digest for entry in entries]
    is_behind = file.ledger in heads or file.is_empty
    start = heads.index(file.ledger) + 1 if file.ledger in heads else len(entries) - len(missing)
    if is_behind and (newer := entries[start:]) and any(entry in shared for entry in newer):
        file = ledger.replay_entries(entries) if file.is_empty else ledger.replay_entries(entries, start, file)
        file.save(layout.champion)
    return missing


def read_intent(path: Path) -> PromotionIntent | None:
    """Read the intent of an interrupted promotion, if any. Raises DamagedFileError if it cannot be read."""
    if not path.exists():
        return None
    try:
        return PromotionIntent.load(path)
    except DamagedFileError:
        raise DamagedFileError(
            f"{path}: cannot be read; it records an interrupted promotion. If no promotion is running, remove the "
            "file, then check `ratchet promotions`"
        ) from None


def remove_intent(path: Path) -> None:
    """Remove the intent. If the file exists again after a crash, completing the promotion again changes nothing."""
    files.before("unlink", path)
    path.unlink(missing_ok=True)
    files.fsync_directory(path.parent)


def plan_steps(
    layout: ProjectLayout, intent: PromotionIntent, version: int | None, *first_steps: str
) -> tuple[str, ...]:
    """List the steps of `execute_promotion` for a dry run.

    Args:
        layout: the project.
        intent: the promotion or rollback.
        version: the registered version; None if the model is not registered yet.
        first_steps: steps that come before.
    """
    target = f"version {version}" if version is not None else "a new version"
    steps = [*first_steps, f"write the intent to {layout.promotion_intent}"]
    if version is None:
        steps.append(f"register model {intent.champion.model_digest[:12]} as {target} of {intent.model_name}")
    source = f"version {intent.alias}" if intent.alias else "no version"
    if intent.server:
        if intent.action == "promote":
            steps.append(f"upload the files that {intent.server} lacks")
        steps.append(f"add the entry to the ledger on {intent.server}")
    steps.append(f"move the alias champion from {source} to {target}")
    reason = f": {intent.reason}" if intent.reason else ""
    steps.append(f"add a line to {layout.promotions}, by {intent.actor}{reason}")
    steps.append(f"write {target} to {layout.champion}{', also as the anchor' if intent.is_anchor else ''}")
    if forced := intent.champion.forced:
        steps.append(f"mark folder, version and MLflow run as FORCED despite {forced.obstacle}")
    steps += [f"call {outbox.hook_label(hook)}" for hook in intent.hooks if intent.action in hook.events]
    return tuple(steps)


def describe_last_promotion(entries: Sequence[Promotion]) -> str:
    """Describe who promoted last, and when."""
    return f" (last changed by {entries[-1].actor} on {entries[-1].time})" if entries else ""


def new_event_id() -> str:
    """Create an event id: 128 random bits."""
    return secrets.token_hex(16)


# ----------------------------------------------------------------------------------------------------- champion file


def find_version(file: ChampionFile, version: int) -> Champion | None:
    """Find a version in the champion file."""
    champions = (file.champion, *file.previous, file.anchor)
    return next((c for c in champions if c is not None and c.version == version), None)


def version_label(champion: Champion) -> str:
    """Describe a version for the user, including whether it was forced."""
    forced = ", FORCED" if champion.forced else ""
    return f"version {champion.version} (model {champion.model_digest[:12]}, run {champion.run_id}{forced})"


# ------------------------------------------------------------------------------------------- tags and descriptions


def model_tags(bundle: ModelBundle, verdict: Verdict, report: EvaluationReport, page: str | None) -> dict[str, str]:
    """Return the tags of a newly registered version: components of the model, metrics, and the gate's decision.

    `page` is the address of the gate's page; None on a server, because the page shows rows of the data.
    """
    tags = {
        ADAPTER: bundle.adapter_digest,
        "ratchet.base_digest": bundle.base_digest,
        "ratchet.data_digest": bundle.data_digest,
        RUN: bundle.run_id,
        DECISION: verdict.decision,
    }
    if page is not None:
        tags["ratchet.gate_page"] = page
    for name, metric in _metrics(report).items():
        # A valid tag name has only some characters, and no path components like `..`.
        first, *others = re.sub(r"[^/\w.\-: ]", "_", name).split("/")
        key = "/".join(["ratchet.metric." + first, *("_" if part in ("", ".", "..") else part for part in others)])
        tags[key[:MAX_TAG_CHARACTERS].rstrip("/")] = repr(metric.value)
    return tags


def promotion_tags(entry: Promotion) -> dict[str, str]:
    """Return the tags that a promotion or rollback sets on the version and on the MLflow run."""
    tags, approvals = {EVENT: entry.id}, entry.approvals
    if entry.action == "rollback":
        return tags | {"ratchet.rolled_back_by": entry.actor, "ratchet.rollback_reason": entry.reason or ""}
    return tags | {
        DECISION: entry.decision or "",
        "ratchet.promoted_by": entry.actor,
        "ratchet.promoted_at": entry.time,
        FORCED: str(entry.forced).lower(),
        FORCED_BY: entry.actor if entry.forced else "",
        FORCED_REASON: (entry.reason or "") if entry.forced else "",
        APPROVED_BY: ", ".join(approver.actor for approver in approvals.approvers) if approvals else "",
        MISSING_APPROVALS: str(approvals.missing) if approvals else "0",
    }


def parse_forced(tags: dict[str, str]) -> ForcedPromotion | None:
    """Read a forced promotion from a version's tags (see `promotion_tags`)."""
    if tags.get(FORCED) != "true":
        return None
    content = {"actor": tags[FORCED_BY], "reason": tags[FORCED_REASON], "decision": tags[DECISION]}
    return ForcedPromotion.model_validate(content | {"missing_approvals": tags.get(MISSING_APPROVALS, "0")})


def describe_version(
    champion: Champion, actor: str, time: str, bundle: ModelBundle, verdict: Verdict, report: EvaluationReport
) -> str:
    """Describe a version in Markdown, for its page in MLflow."""
    forced = champion.forced
    first = f"Promoted on {time} by {actor}. Decision of the gate: {verdict.decision}."
    if forced:
        first = f"**FORCED** on {time} by {forced.actor} despite {forced.obstacle}: {forced.reason}"
    metrics = ", ".join(f"{name} {metric.value:.4g}" for name, metric in sorted(_metrics(report).items()))
    components = (
        f"Run {bundle.run_id}: adapter {bundle.adapter_digest[:12]} on base {bundle.base_digest[:12]}, "
        f"data {bundle.data_digest[:12]}, merged into the {bundle.merge_target}, {bundle.dtype}."
    )
    return "\n\n".join((first, components, f"Evaluation: {metrics}." if metrics else "No metrics."))


def _metrics(report: EvaluationReport) -> dict[str, MetricValue]:
    """Return the metrics of the exported model if it was scored, otherwise of the adapter."""
    scores = report.scores.get("merged") or report.scores.get("candidate")
    return scores.metrics if scores else {}
