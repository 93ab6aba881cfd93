"""`ratchet promotions`: who was champion when, and whether ledger, champion file and registry still say the same."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from ratchet.config.schema import Settings
from ratchet.errors import DamagedFileError
from ratchet.registry import hooks, ledger, outbox, promotion
from ratchet.registry.outbox import EventDelivery
from ratchet.storage import html
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import ChampionFile, Promotion, read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry


def promotions(
    layout: ProjectLayout, settings: Settings, deliver: bool = False, as_json: bool = False
) -> tuple[bool, str]:
    """Finish or drop what an interrupted promotion has left, tell hooks that wait, and show the timeline.

    Args:
        deliver: try again to tell hooks that were given up, as the settings name them now.
        as_json: {entries, broken, notes} instead of a table.

    Returns:
        False when the chain is broken, or ledger, champion file and alias differ; and what to show.

    Raises:
        LockHeldError: a promotion is at work.
        TrackingError: MLflow's database cannot be used.
        SettingsError: a hook that cannot be told.
    """
    hooks.check_hooks(settings.promote.hooks, tell=deliver)
    broken, notes = [], []
    entries: list[Promotion] = []
    with _promotion_lock(layout):
        try:
            if told := promotion.recover_interrupted(
                layout, lambda model_name: MlflowModelRegistry(layout, model_name)
            ):
                notes.append(told)
            entries = ledger.read_entries(layout.promotions)
            file = read_champion(layout.champion)
            ledger.check_champion(layout.promotions, entries, file)
            broken += _find_disagreements(layout, settings, file, notes)
        except DamagedFileError as error:
            broken.append(str(error))
    notes += _deliver_notifications(layout, settings, deliver)
    events = {delivered.id: delivered for delivered in outbox.read_deliveries(layout.outbox)}
    if as_json:
        shown = [entry.model_dump(mode="json") | {"hooks": _hook_entries(events.get(entry.id))} for entry in entries]
        found = {"entries": shown, "broken": broken, "notes": notes}
        return not broken, json.dumps(found, ensure_ascii=False, indent=2)
    if entries:
        chain = f"{html.format_count(len(entries), 'line')}, newest entry {entries[-1].digest[:12]}"
        notes.append(f"read: {chain}" if broken else f"the chain is whole: {chain}")
    table = (
        _format_timeline(entries, events) if entries else ["nothing was promoted yet" if not broken else "no timeline"]
    )
    return not broken, "\n".join([*table, *notes, *(f"BROKEN: {text}" for text in broken)])


def _promotion_lock(layout: ProjectLayout) -> AbstractContextManager[object]:
    if not layout.mlruns.is_dir():  # a fresh clone: nothing can be at work, and looking makes nothing
        return nullcontext()
    return promotion.acquire_lock(layout)


def _find_disagreements(layout: ProjectLayout, settings: Settings, file: ChampionFile, notes: list[str]) -> list[str]:
    """What the registry says otherwise. Where there is none (a clone), that is noted, and nothing is wrong."""
    if not layout.mlflow_database.exists():
        if file.champion:
            notes.append(f"the registry is not here ({layout.mlflow_database}): the alias was not compared")
        return []
    alias = MlflowModelRegistry(layout, settings.promote.model_name).champion()
    filed = file.champion.version if file.champion else None
    if alias == filed:
        return []
    named, at = (f"version {number}" if number is not None else "no version" for number in (filed, alias))
    ways = " or ".join(f"`ratchet rollback {number}`" for number in (filed, alias) if number is not None)
    return [f"{layout.champion} names {named}, but the registry's alias is at {at}; choose: {ways}"]


def _deliver_notifications(layout: ProjectLayout, settings: Settings, again: bool) -> list[str]:
    notes = []
    if again:
        asked = outbox.retry_failed(layout.outbox, settings.promote.hooks) if layout.outbox.is_dir() else 0
        notes.append(f"telling hooks again of {html.format_count(asked, 'event')}" if asked else "no hook was given up")
    if problem := outbox.deliver_pending(layout.outbox, layout.root):
        notes.append(f"warning: {problem}")
    return notes


def _hook_entries(event: EventDelivery | None) -> list[dict[str, object]]:
    if event is None:
        return []
    waiting: list[dict[str, object]] = [{"hook": hooks.hook_label(hook), "told": None} for hook in event.waiting]
    return [*(t.model_dump(mode="json", exclude={"format"}) for t in event.told), *waiting]


def _format_timeline(entries: Sequence[Promotion], events: Mapping[str, EventDelivery]) -> list[str]:
    """The timeline, oldest first; what does not fit into a column follows in a line of its own."""
    rows = [("time", "action", "version", "from", "model", "verdict", "by")]
    more: list[list[str]] = [[]]
    for entry in entries:
        before = "-" if entry.before is None else str(entry.before)
        verdict = (entry.decision or "-") + (" FORCED" if entry.forced else "")
        rows.append((entry.time, entry.action, str(entry.version), before, entry.model_digest[:12], verdict, entry.by))
        more.append(_format_details(entry, events.get(entry.id)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, following in zip(rows, more, strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"    {line}" for line in following]
    return lines


def _format_details(entry: Promotion, event: EventDelivery | None) -> list[str]:
    lines = []
    if entry.reason:
        lines.append(f"reason: {entry.reason}")
    if entry.anchored:
        lines.append("became the anchor")
    if event:
        lines += [f"{t.hook}: {'told' if t.told else 'NOT told'} ({t.detail})" for t in event.told]
        lines += [f"{hooks.hook_label(hook)}: waiting" for hook in event.waiting]
    return lines
