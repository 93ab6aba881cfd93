"""`ratchet promotions`: reads the history of champions, and checks that ledger, champion file and registry agree."""

from contextlib import nullcontext

from ratchet.errors import ChampionError, DamagedFileError
from ratchet.registry import ledger, outbox, promotion
from ratchet.registry.outbox import HookDelivery
from ratchet.stages.project import Project
from ratchet.stages.promote import check_alias, recover_interrupted
from ratchet.storage import html
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Promotion, read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry


class PromotionHistoryEntry(Record):
    """A line of the ledger, and the deliveries of its event to hooks."""

    promotion: Promotion
    deliveries: tuple[HookDelivery, ...] = ()
    """Hooks that received the event, or whose deliveries failed for good."""
    pending_hooks: tuple[str, ...] = ()
    """Hooks that have not been called yet."""


class PromotionHistory(Record):
    """Every promotion and rollback, oldest first."""

    entries: tuple[PromotionHistoryEntry, ...]
    problems: tuple[str, ...]
    """A damaged ledger, or a disagreement between ledger, champion file and registry."""
    notes: tuple[str, ...]


def promotions(project: Project, deliver: bool = False) -> PromotionHistory:
    """Read the history. Before that, finish or drop an interrupted promotion and call hooks that wait for an event.

    Args:
        project: section promote of its settings has the hooks.
        deliver: also retry hooks whose deliveries failed for good, with today's settings.

    Raises:
        LockHeldError: a promotion is running.
        TrackingError: MLflow's database cannot be used.
        SettingsError: a hook cannot be called.
    """
    from ratchet.stages.callbacks import notify_promotions

    layout, settings = project.layout, project.settings
    with notify_promotions(project):
        outbox.check_hooks(settings.promote.hooks, require_keys=deliver)
        problems, notes = list[str](), list[str]()
        entries: list[Promotion] = []
        # In a new clone no promotion can be running, and reading creates no folder.
        with promotion.acquire_lock(layout) if layout.mlruns.is_dir() else nullcontext():
            try:
                notes += recover_interrupted(layout)
                entries = ledger.read_entries(layout.promotions)
                file = read_champion(layout.champion)
                ledger.check_champion(layout.promotions, entries, file)
                if layout.mlflow_database.exists():
                    check_alias(layout, MlflowModelRegistry(layout, settings.promote.model_name), file, target=None)
                elif file.champion:
                    database = layout.mlflow_database
                    notes.append(f"the alias was not compared: this checkout has no registry ({database})")
            except (DamagedFileError, ChampionError) as error:
                problems.append(str(error))
        if deliver:
            count = outbox.retry_failed(layout.outbox, settings.promote.hooks) if layout.outbox.is_dir() else 0
            events = html.format_count(count, "event")
            notes.append(f"calling hooks again for {events}" if count else "no failed hook to call again")
        if problem := outbox.deliver_pending(layout.outbox, layout.root):
            notes.append(f"warning: {problem}")
    deliveries = {event.id: event for event in outbox.read_deliveries(layout.outbox)}
    history = []
    for entry in entries:
        event = deliveries.get(entry.id)
        results = event.results if event else ()
        pending = tuple(map(outbox.hook_label, event.waiting)) if event else ()
        history.append(PromotionHistoryEntry(promotion=entry, deliveries=results, pending_hooks=pending))
    return PromotionHistory(entries=tuple(history), problems=tuple(problems), notes=tuple(notes))
