"""`ratchet promotions`: reads the history of champions, and checks that ledger, champion file and registry agree."""

from collections.abc import Sequence
from contextlib import nullcontext

from ratchet.config import units
from ratchet.errors import ChampionError, DamagedFileError
from ratchet.registry import ledger, outbox, promotion
from ratchet.registry.outbox import HookDelivery
from ratchet.stages.project import Project
from ratchet.stages.promote import check_alias, recover_interrupted
from ratchet.storage.layout import ProjectLayout
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
    """Read the history. Before that, finish or drop an interrupted promotion, fetch promotions that others made on a
    server, and call hooks that wait for an event.

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
    registry = MlflowModelRegistry.open(layout, settings)
    outbox.check_hooks(settings.promote.hooks, require_keys=deliver)
    problems, notes = list[str](), list[str]()
    entries: list[Promotion] = []
    # In a new clone no promotion can be running, and reading creates no folder.
    must_lock = layout.mlruns.is_dir() or registry.server is not None
    with promotion.acquire_lock(layout) if must_lock else nullcontext():
        try:
            with notify_promotions(project):
                notes += recover_interrupted(layout, registry)
            entries = ledger.read_entries(layout.promotions)
            if registry.shared is not None:  # outside `notify_promotions`: those who promoted have sent notifications
                notes += _pull(layout, registry.shared.read(), registry.where)
                entries = ledger.read_entries(layout.promotions)
            file = read_champion(layout.champion)
            ledger.check_champion(layout, entries, file)
            if registry.exists:
                check_alias(layout, registry, file, target=None)
            elif file.champion:
                database = layout.mlflow_database
                notes.append(f"the alias was not compared: this checkout has no registry ({database})")
        except (DamagedFileError, ChampionError) as error:
            problems.append(str(error))
    if deliver:
        count = outbox.retry_failed(layout.outbox, settings.promote.hooks) if layout.outbox.is_dir() else 0
        events = units.format_count(count, "event")
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


def _pull(layout: ProjectLayout, shared: Sequence[Promotion], server: str) -> list[str]:
    """Fetch promotions that others made on the server. Returns a sentence about each, and the files to commit."""
    pulled = promotion.pull_shared(layout, shared, server)
    notes = [
        f"fetched from {server}: {entry.action} of version {entry.version} by {entry.actor}, {entry.time}"
        for entry in pulled
    ]
    names = [str(path.relative_to(layout.root)) for path in (layout.champion, layout.promotions)]
    return [*notes, f"commit {' and '.join(names)}"] if notes else []
