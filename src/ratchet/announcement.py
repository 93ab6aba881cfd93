"""Who is told of what the gate has decided, and of changes of the champion: a webhook, and Prometheus of the former."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ratchet.config import Settings
from ratchet.errors import DamagedError
from ratchet.layout import Layout
from ratchet.promotion import ledger
from ratchet.records_gate import Promotion, Verdict
from ratchet.services.webhook import Webhook


@contextmanager
def of_verdict(layout: Layout, settings: Settings) -> Iterator[None]:
    """While the gate is at work: tell what it has decided, once it has. Raises SettingsError for a bad address."""
    webhook = Webhook.of_environment(settings.machine, layout.root.name)
    yield
    verdict = Verdict.load(layout.verdict)
    if settings.machine.metrics_file is not None:
        from ratchet.services.prometheus import write_verdict

        write_verdict(Path(settings.machine.metrics_file), verdict)
    if webhook is not None:
        text = f"gate: {verdict.decision} for model {verdict.model_digest[:12]} of run {verdict.run_id}"
        webhook.tell("gated", text, run=verdict.run_id, decision=verdict.decision, model_digest=verdict.model_digest)


@contextmanager
def of_promotions(layout: Layout, settings: Settings) -> Iterator[None]:
    """While promotion, rollback or what finishes them is at work: tell of every change of the champion.

    Also of one that a command had begun which died. Raises SettingsError for a bad address, before anything is done.
    """
    webhook = Webhook.of_environment(settings.machine, layout.root.name)
    if webhook is None:
        yield
        return
    before = len(_promotions(layout))
    try:
        yield
    finally:
        for entry in _promotions(layout)[before:]:
            again = "again, by rollback" if entry.action == "rollback" else "now"
            forced = ", against the verdict" if entry.forced else ""
            text = f"version {entry.version} of {settings.promote.model_name} is champion {again}{forced} ({entry.by})"
            webhook.tell(
                "promoted", text, action=entry.action, version=entry.version, before=entry.before, by=entry.by,
                model_digest=entry.model_digest, reason=entry.reason,
            )  # fmt: skip


def _promotions(layout: Layout) -> Sequence[Promotion]:
    """The ledger; nothing of one that is damaged, which is for others to say."""
    try:
        return ledger.read(layout.promotions)
    except DamagedError:
        return ()
