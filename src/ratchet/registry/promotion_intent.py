"""What a promotion that has begun is about to do: written before anything that others see, removed when all is done.

The alias decides. An intent whose alias has not moved is dropped, and then nothing happened; one whose alias has moved
is finished by whatever command comes next (`promotion.road`).
"""

import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from ratchet.config.gate import Hook
from ratchet.errors import DamagedError
from ratchet.storage import files
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Action, Champion, ChampionFile, Decision, Promotion

UNREGISTERED = 0
"""Version of a model that is not registered yet; MLflow counts from 1."""


class Intent(Record):
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
    hooks: tuple[Hook, ...] = ()

    def entry(self, version: int) -> Promotion:
        """The line for the ledger, not yet chained."""
        champion = self.champion
        return Promotion(
            id=self.id, time=self.time, action=self.action, by=self.by, version=version,
            model_digest=champion.model_digest, adapter_digest=champion.adapter_digest, run_id=champion.run_id,
            before=self.before, decision=self.decision, reason=self.reason, forced=champion.forced is not None,
            anchored=self.anchored, previous=None,
        )  # fmt: skip


def new_id() -> str:
    """An event's id: 128 random bits."""
    return secrets.token_hex(16)


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read(path: Path) -> Intent | None:
    """What a command that died has left, or None. Raises DamagedError when that cannot be read."""
    if not path.exists():
        return None
    try:
        return Intent.load(path)
    except DamagedError:
        raise DamagedError(
            f"{path}: unreadable; it says which promotion was interrupted. If no promotion is at work, remove it, "
            "then compare with `ratchet promotions`"
        ) from None


def drop(path: Path) -> None:
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


def known(file: ChampionFile, version: int) -> Champion | None:
    """What the champion file says of a version, if it names it."""
    named = (file.champion, *file.previous, file.anchor)
    return next((c for c in named if c is not None and c.version == version), None)


def name(champion: Champion) -> str:
    """A version for people; one that was forced says so."""
    forced = ", FORCED" if champion.forced else ""
    return f"version {champion.version} (model {champion.model_digest[:12]}, run {champion.run_id}{forced})"
