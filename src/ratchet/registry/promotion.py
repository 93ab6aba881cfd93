"""The road of a promotion, and of a rollback: intent → version → alias → ledger → champion file → outbox.

The alias is the moment of truth: it is moved by compare-and-set, and what comes before it can be forgotten, what comes
after it can be done again. Steps after it ask nobody and refuse nothing; each looks first whether it is done. So there
is one end state wherever a process dies: that of before (the intent is dropped), or that of after (it is finished).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ratchet.errors import ChampionError, TrackingError
from ratchet.registry import ledger, outbox, promotion_record
from ratchet.registry import promotion_record as intents
from ratchet.registry.promotion_record import UNREGISTERED, PromotionIntent
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.records.gate import Promotion, read_champion

LOCK_WAIT_S = 60.0
"""How long somebody else's promotion is waited for; most take seconds."""


def acquire_lock(layout: ProjectLayout) -> FileLock:
    """The lock of whoever promotes, rolls back, or finishes what was left. Raises LockHeldError after a while."""
    return FileLock(layout.mlruns / "promote.lock", "promotion").acquire(wait_s=LOCK_WAIT_S)


class ModelVersionRegistry(Protocol):
    """The registered model: services.registry.Registry. Everything may raise TrackingError."""

    def champion(self) -> int | None:
        """The version that the alias points at."""

    def number_of(self, model_digest: str) -> int | None:
        """The version of a model."""

    def set_champion(self, version: int, expected: int | None) -> None:
        """Move the alias, unless it is no longer at `expected`: ChampionError."""

    def tell(self, version: int, run_id: str, tags: Mapping[str, str], description: str | None) -> None:
        """Write tags and words to a version, and the tags to the MLflow run of this run id."""


Registries = Callable[[str], ModelVersionRegistry]
"""The registered model of a name."""


@dataclass(frozen=True)
class InterruptedPromotion:
    """What a command that died has left."""

    intent: PromotionIntent
    version: int | None
    """Of the model that it was about; None: not even registered."""
    forward: bool
    """It is finished, not dropped."""

    def describe(self) -> str:
        """For people."""
        intent = self.intent
        about = (
            f"the {_noun(intent)} of model {intent.champion.model_digest[:12]}, begun on {intent.time} by {intent.by}"
        )
        if self.forward:
            return f"{about}, was interrupted when the alias was at version {self.version} already: finished"
        return f"{about}, was interrupted before the alias moved: dropped, nothing of it happened"


def execute_promotion(
    layout: ProjectLayout, registry: ModelVersionRegistry, intent: PromotionIntent, register: Callable[[], int]
) -> tuple[Promotion, str]:
    """Do it. Returns the ledger's entry and the name of the event.

    Args:
        register: registers the model if it is not yet, and returns its version.

    Raises:
        ChampionError: somebody else moved the alias meanwhile; nothing happened.
        TrackingError: MLflow's database cannot be used; repeating the command finishes it, or does it.
    """
    intent.save(layout.intent)
    version = intent.champion.version
    try:
        if version == UNREGISTERED:
            version = register()
    except TrackingError:
        intents.remove_intent(layout.intent)
        raise
    try:
        registry.set_champion(version, intent.alias)
    except ChampionError:
        intents.remove_intent(layout.intent)
        raise
    return finish_promotion(layout, registry, intent, version)


def finish_promotion(
    layout: ProjectLayout, registry: ModelVersionRegistry, intent: PromotionIntent, version: int
) -> tuple[Promotion, str]:
    """What follows the alias. May be repeated from any point; returns the ledger's entry and the name of the event."""
    champion = intent.champion.model_copy(update={"version": version})
    entry = ledger.append_entry(layout.promotions, intent.entry(version))
    before = read_champion(layout.champion)
    if before.ledger != entry.digest:
        after = promotion_record.champion_after(before, intent.action, champion, intent.anchored, entry.digest)
        after.save(layout.champion)
    folder = layout.promoted_model(champion.model_digest)
    registry.tell(version, champion.run_id, promotion_record.promotion_tags(intent), intent.description)
    line = 1 + next(n for n, e in enumerate(ledger.read_entries(layout.promotions)) if e.id == entry.id)
    event = outbox.build_event(entry, line, intent.project, intent.model_name, folder.as_uri())
    name = outbox.add_event(layout.outbox, event, intent.hooks)
    intents.remove_intent(layout.intent)
    return entry, name


def find_interrupted(layout: ProjectLayout, registries: Registries) -> InterruptedPromotion | None:
    """What a command that died has left, and what is to become of it; None: nothing. Changes nothing."""
    intent = intents.read_intent(layout.intent)
    if intent is None:
        return None
    registry = registries(intent.model_name)
    version = intent.champion.version or registry.number_of(intent.champion.model_digest)
    if version is None:
        return InterruptedPromotion(intent, None, forward=False)
    # The ledger is asked too: the alias may have been moved by hand since.
    told = any(entry.id == intent.id for entry in ledger.read_entries(layout.promotions))
    return InterruptedPromotion(intent, version, forward=told or registry.champion() == version)


def recover_interrupted(layout: ProjectLayout, registries: Registries) -> str | None:
    """Finish or drop what a command that died has left; returns what to tell. The caller holds the promotion lock."""
    found = find_interrupted(layout, registries)
    if found is None:
        return None
    if found.forward and found.version is not None:
        finish_promotion(layout, registries(found.intent.model_name), found.intent, found.version)
    else:
        intents.remove_intent(layout.intent)
    return found.describe()


def _noun(intent: PromotionIntent) -> str:
    return "promotion" if intent.action == "promote" else "rollback"
