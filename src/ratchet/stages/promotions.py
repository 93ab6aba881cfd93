"""`ratchet promotions`: reads the history of champions, and checks that ledger, champion file and registry agree."""

from contextlib import AbstractContextManager, nullcontext

from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError
from ratchet.registry import ledger, outbox, promotion
from ratchet.registry.outbox import HookDelivery
from ratchet.stages.project import Project
from ratchet.storage import html
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import ChampionFile, Promotion, read_champion
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
        project: the project.
        deliver: also retry hooks whose deliveries failed for good, with today's settings.

    Raises:
        LockHeldError: a promotion is running.
        TrackingError: MLflow's database cannot be used.
        SettingsError: a hook cannot be called.
    """
    from ratchet.stages.callbacks import notify_promotions

    with notify_promotions(project):
        return _read_history(project.layout, project.settings, deliver)


def _read_history(layout: ProjectLayout, settings: Settings, deliver: bool) -> PromotionHistory:
    outbox.check_hooks(settings.promote.hooks, require_keys=deliver)
    problems, notes = list[str](), list[str]()
    entries: list[Promotion] = []
    with _acquire_lock(layout):
        try:
            recovered = promotion.recover_interrupted(
                layout, lambda model_name: MlflowModelRegistry(layout, model_name)
            )
            notes += [recovered] if recovered else []
            entries = ledger.read_entries(layout.promotions)
            file = read_champion(layout.champion)
            ledger.check_champion(layout.promotions, entries, file)
            if layout.mlflow_database.exists():
                problems += _find_disagreement(layout, settings, file)
            elif file.champion:
                notes.append(f"the alias was not compared: this checkout has no registry ({layout.mlflow_database})")
        except DamagedFileError as error:
            problems.append(str(error))
    notes += _deliver_events(layout, settings, deliver)
    events = {event.id: event for event in outbox.read_deliveries(layout.outbox)}
    history = []
    for entry in entries:
        event = events.get(entry.id)
        deliveries = event.results if event else ()
        pending = tuple(map(outbox.hook_label, event.waiting)) if event else ()
        history.append(PromotionHistoryEntry(promotion=entry, deliveries=deliveries, pending_hooks=pending))
    return PromotionHistory(entries=tuple(history), problems=tuple(problems), notes=tuple(notes))


def _acquire_lock(layout: ProjectLayout) -> AbstractContextManager[object]:
    if not layout.mlruns.is_dir():  # a new clone: no promotion can be running, and reading creates no folder
        return nullcontext()
    return promotion.acquire_lock(layout)


def _find_disagreement(layout: ProjectLayout, settings: Settings, file: ChampionFile) -> list[str]:
    """Return a problem if champion file and registry name different versions."""
    alias = MlflowModelRegistry(layout, settings.promote.model_name).champion()
    numbers = file.champion.version if file.champion else None, alias
    if numbers[0] == alias:
        return []
    in_file, in_registry = (f"version {number}" if number is not None else "no version" for number in numbers)
    commands = " or ".join(f"`ratchet rollback {number}`" for number in numbers if number is not None)
    return [
        f"{layout.champion} names {in_file}, but the registry's alias points to {in_registry}; choose one: {commands}"
    ]


def _deliver_events(layout: ProjectLayout, settings: Settings, retry_failed: bool) -> list[str]:
    """Call the hooks that wait for an event, and with `retry_failed` also hooks that failed. Returns notes."""
    notes = []
    if retry_failed:
        count = outbox.retry_failed(layout.outbox, settings.promote.hooks) if layout.outbox.is_dir() else 0
        notes.append(
            f"calling hooks again for {html.format_count(count, 'event')}" if count else "no failed hook to call again"
        )
    if problem := outbox.deliver_pending(layout.outbox, layout.root):
        notes.append(f"warning: {problem}")
    return notes
