"""Who follows whom: the champion file after a promotion or a rollback. Pure."""

from collections.abc import Iterable

from ratchet.records_gate import Action, Champion, ChampionFile


def after(before: ChampionFile, action: Action, champion: Champion, anchored: bool, head: str) -> ChampionFile:
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
