"""Executes promotions and rollbacks: intent → version → alias → ledger → champion file → outbox.

Moving the alias commits the promotion; it is a compare-and-set. Steps before it can be dropped, steps after it can be
repeated: they cannot be refused, and each first checks whether it is done. So a process that dies anywhere leaves one
of two states: the promotion did not happen (the intent is dropped), or the next command completes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ratchet.errors import ChampionError, TrackingError
from ratchet.registry import ledger, outbox, promotion_record
from ratchet.registry.promotion_record import UNREGISTERED, PromotionIntent
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.records.gate import Promotion, read_champion

LOCK_WAIT_S = 60.0
"""Maximum wait for another promotion; most take seconds."""


def acquire_lock(layout: ProjectLayout) -> FileLock:
    """Take the lock for promotions, rollbacks and their recovery. Raises LockHeldError after a timeout."""
    return FileLock(layout.mlruns / "promote.lock", "promotion").acquire(wait_s=LOCK_WAIT_S)


class ModelVersionRegistry(Protocol):
    """The registered model (`tracking.mlflow.registry.MlflowModelRegistry`). All methods may raise TrackingError."""

    def champion(self) -> int | None:
        """The version that the alias names."""

    def find_version(self, model_digest: str) -> int | None:
        """The version of a model."""

    def set_champion(self, version: int, expected: int | None) -> None:
        """Move the alias. Raises ChampionError if it is no longer at `expected`."""

    def annotate_version(self, version: int, run_id: str, tags: Mapping[str, str], description: str | None) -> None:
        """Write tags and a description to a version, and the tags to the MLflow run of this run id."""


OpenRegistry = Callable[[str], ModelVersionRegistry]
"""Opens the registered model with this name."""


@dataclass(frozen=True)
class InterruptedPromotion:
    """An interrupted promotion or rollback."""

    intent: PromotionIntent
    version: int | None
    """Version of its model; None: not registered yet."""
    is_committed: bool
    """Whether the alias moved, so that the promotion is completed instead of dropped."""

    def describe(self) -> str:
        """Describe the recovery for the user."""
        intent = self.intent
        noun = "promotion" if intent.action == "promote" else "rollback"
        subject = f"the {noun} of model {intent.champion.model_digest[:12]}, started on {intent.time} by {intent.actor}"
        if self.is_committed:
            return f"{subject}, was interrupted after the alias had moved to version {self.version}: completed"
        return f"{subject}, was interrupted before the alias moved: dropped without any effect"


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
        ChampionError: the alias was moved by another process; nothing happened.
        TrackingError: MLflow's database is not available; repeat the command to complete the promotion.
    """
    intent.save(layout.promotion_intent)
    version = intent.champion.version
    try:
        if version == UNREGISTERED:
            version = register()
    except TrackingError:
        promotion_record.remove_intent(layout.promotion_intent)
        raise
    try:
        registry.set_champion(version, intent.alias)
    except ChampionError:
        promotion_record.remove_intent(layout.promotion_intent)
        raise
    return finish_promotion(layout, registry, intent, version)


def finish_promotion(
    layout: ProjectLayout, registry: ModelVersionRegistry, intent: PromotionIntent, version: int
) -> tuple[Promotion, str]:
    """Do all steps after the alias moved; this may be repeated. Returns as `execute_promotion`."""
    champion = intent.champion.model_copy(update={"version": version})
    entry = ledger.append_entry(layout.promotions, intent.entry(version))
    current = read_champion(layout.champion)
    if current.ledger != entry.digest:
        promotion_record.update_champion(current, intent.action, champion, intent.is_anchor, entry.digest).save(
            layout.champion
        )
    folder = layout.promoted_model(champion.model_digest)
    registry.annotate_version(version, champion.run_id, promotion_record.promotion_tags(intent), intent.description)
    line = 1 + next(n for n, e in enumerate(ledger.read_entries(layout.promotions)) if e.id == entry.id)
    event = outbox.build_event(entry, line, intent.project, intent.model_name, folder.as_uri())
    name = outbox.add_event(layout.outbox, event, intent.hooks)
    promotion_record.remove_intent(layout.promotion_intent)
    return entry, name


def find_interrupted(layout: ProjectLayout, open_registry: OpenRegistry) -> InterruptedPromotion | None:
    """Find an interrupted promotion, and whether it is completed or dropped; None if there is none. Changes nothing."""
    intent = promotion_record.read_intent(layout.promotion_intent)
    if intent is None:
        return None
    registry = open_registry(intent.model_name)
    version = intent.champion.version or registry.find_version(intent.champion.model_digest)
    if version is None:
        return InterruptedPromotion(intent, None, is_committed=False)
    # The ledger counts, too, because the alias may have been moved by hand since.
    is_in_ledger = any(entry.id == intent.id for entry in ledger.read_entries(layout.promotions))
    return InterruptedPromotion(intent, version, is_committed=is_in_ledger or registry.champion() == version)


def recover_interrupted(layout: ProjectLayout, open_registry: OpenRegistry) -> str | None:
    """Complete or drop an interrupted promotion; the caller holds the promotion lock.

    Returns:
        A description for the user; None if there was none.
    """
    interrupted = find_interrupted(layout, open_registry)
    if interrupted is None:
        return None
    if interrupted.is_committed and interrupted.version is not None:
        finish_promotion(layout, open_registry(interrupted.intent.model_name), interrupted.intent, interrupted.version)
    else:
        promotion_record.remove_intent(layout.promotion_intent)
    return interrupted.describe()
