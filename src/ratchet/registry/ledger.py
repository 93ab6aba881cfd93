"""Reads and appends the promotion ledger: a chain of JSON lines, one for each promotion or rollback.

Each line contains the digest of the previous line. A changed, removed, inserted or moved line breaks the chain. A
truncated file is detected because the champion file names the newest entry. The champion file, in turn, must be the one
that the entries produce (`replay_entries`). Appending replaces the whole file, so that after a crash it contains the
new line completely or not at all.
"""

import json
from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from ratchet.errors import ChampionError, DamagedFileError, SettingsError
from ratchet.storage import digests, files
from ratchet.storage.actors import clean_line
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Action, Champion, ChampionFile, ForcedPromotion, Promotion

ACTOR_TAG = "ratchet.actor"
"""Tag of an MLflow run with the person or service that started the training."""

MAX_REASON_CHARACTERS = 2000
"""Maximum length of a reason, which is also stored in MLflow tags."""

_RESTORE = "compare the file with `git log -p`, and restore it from git"


def normalize_reason(text: str | None) -> str | None:
    """Convert a reason to one line. Raises SettingsError if it is empty or too long."""
    if text is None:
        return None
    reason = clean_line(text)
    if not reason:
        raise SettingsError("--reason: found an empty text; expected a sentence")
    if len(reason) > MAX_REASON_CHARACTERS:
        raise SettingsError(f"--reason: found {len(reason):,} characters; expected at most {MAX_REASON_CHARACTERS:,}")
    return reason


def check_forced_reason(is_forced: bool, text: str | None) -> str | None:
    """Return the reason of a forced action as one line; None if it is not forced.

    Raises SettingsError unless force and a valid reason are given together.
    """
    reason = normalize_reason(text)
    if is_forced and reason is None:
        raise SettingsError("--force needs a reason: add --reason TEXT")
    if reason is not None and not is_forced:
        raise SettingsError("--reason is only used with --force: give both or neither")
    return reason


def read_entries(path: Path) -> list[Promotion]:
    """Read all entries, oldest first. Raises DamagedFileError with the line that breaks the chain."""
    if not path.exists():
        return []
    return parse_lines(path.read_bytes().splitlines(keepends=True), str(path))


def parse_lines(lines: Iterable[bytes], where: str, is_whole: bool = True, advice: str = _RESTORE) -> list[Promotion]:
    """Parse lines of a ledger and check their chain.

    Args:
        lines: the lines, oldest first, each with its line break.
        where: the file, or the server, for messages.
        is_whole: whether the first line must be the first of the chain; a server may have only the newer part.
        advice: what to do about a broken chain.

    Raises:
        DamagedFileError: a line breaks the chain; the message has its number.
    """
    entries: list[Promotion] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = Promotion.model_validate(json.loads(line))
        except ValueError as error:
            reason = " ".join(str(error).splitlines()[:2])
            raise DamagedFileError(f"{where}:{number}: not an entry of the ledger ({reason}); {advice}") from None
        digest = entry_digest(entry)
        expected = entries[-1].digest if entries else None if is_whole else entry.previous
        problem = None
        if encode_entry(entry) != line:
            problem = "not in the ledger's JSON layout, so it was edited"
        elif entry.digest != digest:
            problem = f"changed: its content has digest {digest[:12]}, but it names {entry.digest[:12] or 'none'}"
        elif entry.previous != expected:
            named, last = (entry.previous or "none")[:12], (expected or "none")[:12]
            problem = f"the chain is broken: it names previous entry {named}; expected {last}"
        elif any(entry.id == other.id for other in entries):
            problem = f"event {entry.id} is in the ledger twice"
        if problem is not None:
            raise DamagedFileError(f"{where}:{number}: {problem}; {advice}")
        entries.append(entry)
    return entries


def append_entry(path: Path, entry: Promotion) -> Promotion:
    """Chain an entry to the newest one and append it; the caller holds the promotion lock.

    Returns:
        The new entry with its digests, or the existing entry if the ledger already has one with this id.

    Raises:
        DamagedFileError: the chain is broken; nothing is appended.
    """
    entries = read_entries(path)
    chained = chain_entry(entries, entry)
    if chained not in entries:
        files.write_atomic(path, b"".join(map(encode_entry, (*entries, chained))))
    return chained


def chain_entry(entries: Sequence[Promotion], entry: Promotion) -> Promotion:
    """Return the entry with its digests, as the next of these entries; or the existing entry with its id."""
    if existing := next((e for e in entries if e.id == entry.id), None):
        return existing
    chained = entry.model_copy(update={"previous": entries[-1].digest if entries else None, "digest": ""})
    return chained.model_copy(update={"digest": entry_digest(chained)})


def find_missing(path: Path, entries: Sequence[Promotion], shared: Sequence[Promotion], server: str) -> list[Promotion]:
    """Return the entries of a shared ledger that a project's own ledger lacks.

    The shared ledger begins with the first promotion on the server, which may follow earlier entries of the project.

    Raises:
        DamagedFileError: neither ledger is the continuation of the other; the message names the first difference.
    """
    if not shared:
        return []
    numbers = {entry.digest: number for number, entry in enumerate(entries)}
    start = numbers.get(shared[0].digest)
    if start is None:
        if (entries[-1].digest if entries else None) == shared[0].previous:
            return list(shared)
        raise DamagedFileError(
            f"{path}: the first promotion on {server} ({_describe_entry(shared[0])}) does not follow this ledger; "
            "pull the commit with the earlier promotions, or choose another promote.model_name for this project"
        )
    own = entries[start:]
    for number, (one, other) in enumerate(zip(own, shared, strict=False), start=start + 1):
        if one.digest != other.digest:
            raise DamagedFileError(
                f"{path}:{number}: has {_describe_entry(one)}, but {server} has {_describe_entry(other)}; {_RESTORE}"
            )
    if len(own) > len(shared):
        extra = _describe_entry(own[len(shared)])
        raise DamagedFileError(f"{path}:{start + len(shared) + 1}: has {extra}, which is not on {server}; {_RESTORE}")
    return list(shared[len(own) :])


def _describe_entry(entry: Promotion) -> str:
    return f"{entry.action} of version {entry.version} by {entry.actor} on {entry.time}"


def write_entries(path: Path, entries: Iterable[Promotion]) -> None:
    """Replace the ledger by these entries, whose chain is known to be intact."""
    files.write_atomic(path, b"".join(map(encode_entry, entries)))


def champion_of(entry: Promotion, entries: Sequence[Promotion]) -> Champion:
    """Return the champion that an entry made. A rollback restores the mark of a forced promotion.

    Args:
        entry: an entry of the ledger.
        entries: all entries up to this one.
    """
    promoted = [e for e in entries if e.action == "promote" and e.model_digest == entry.model_digest]
    origin = entry if entry.action == "promote" else (promoted[-1] if promoted else entry)
    forced = ForcedPromotion(
        actor=origin.actor, reason=origin.reason or "", decision=origin.decision or "HOLD",
        missing_approvals=origin.approvals.missing if origin.approvals else 0,
    )  # fmt: skip
    is_forced = origin.forced and origin.action == "promote"
    return Champion(
        version=entry.version, model_digest=entry.model_digest, adapter_digest=entry.adapter_digest,
        run_id=entry.run_id, forced=forced if is_forced else None,
    )  # fmt: skip


def update_champion(
    current: ChampionFile, action: Action, champion: Champion, is_anchor: bool, head: str
) -> ChampionFile:
    """Compute the champion file after a promotion or rollback; no file is written.

    Args:
        current: the current file.
        action: a promotion puts the old champion first among the previous ones; a rollback removes the old champion
            from the list, also if it only undoes an earlier rollback.
        champion: the new champion; the file names every version once.
        is_anchor: whether the new champion also becomes the anchor.
        head: digest of the ledger's entry.
    """
    candidates: Iterable[Champion] = current.previous
    if action == "promote" and current.champion:
        candidates = (current.champion, *current.previous)
    previous = {c.version: c for c in candidates if c.version != champion.version}
    return ChampionFile(
        champion=champion,
        previous=tuple(previous.values()),
        anchor=champion if is_anchor else current.anchor,
        ledger=head,
    )


def replay_entries(entries: Sequence[Promotion], start: int = 0, file: ChampionFile | None = None) -> ChampionFile:
    """Compute the champion file that the ledger's entries produce.

    A promotion without a previous version was made with an empty champion file, and starts a new history. A rollback
    without one repaired such a file, so the history before it still counts.

    Args:
        entries: all entries, oldest first.
        start: number of entries that `file` contains already.
        file: the champion file before the other entries; None: an empty one.
    """
    file = file or ChampionFile()
    for number, entry in enumerate(entries[start:], start=start + 1):
        if entry.previous_version is None and entry.action == "promote":
            file = ChampionFile()
        champion = champion_of(entry, entries[:number])
        file = update_champion(file, entry.action, champion, entry.is_anchor, entry.digest)
    return file


def entry_digest(entry: Promotion) -> str:
    """Return the SHA-256 of an entry's canonical JSON without the field `digest`."""
    return digests.hash_json(entry.model_dump(mode="json", exclude={"digest"}))


def check_champion(layout: ProjectLayout, entries: Sequence[Promotion], file: ChampionFile) -> None:
    """Check that the champion file is the one that the ledger's entries produce.

    An empty champion file is new. The next promotion is then chained to the newest entry.

    Raises:
        DamagedFileError: the champion file does not name the newest entry, or not the version of that entry.
        ChampionError: another field of the champion file differs from the entries.
    """
    path, champion, head = layout.promotions, file.champion, file.ledger
    if file.is_empty:
        return
    if champion is None and head is None:
        found = "previous models" if file.previous else "an anchor"
        raise ChampionError(f"{layout.champion}: has {found}, but no champion; restore the file from git")
    if head is None:
        if entries:
            raise DamagedFileError(f"{path}: has {len(entries)} entries, but the champion file names none; {_RESTORE}")
        return  # promoted before the ledger existed
    numbers = {entry.digest: number for number, entry in enumerate(entries, start=1)}
    if head not in numbers:
        raise DamagedFileError(
            f"{path}:{len(entries) + 1}: the champion file names entry {head[:12]}, which is missing: the end of the "
            f"ledger was removed, or the two files are from different commits; {_RESTORE}"
        )
    if numbers[head] != len(entries):
        raise DamagedFileError(
            f"{path}:{numbers[head] + 1}: the champion file ends at line {numbers[head]}: it is from an earlier "
            f"commit, or lines were added by hand; {_RESTORE}"
        )
    newest = entries[-1]
    if champion is None or (champion.version, champion.model_digest) != (newest.version, newest.model_digest):
        named = "no champion" if champion is None else f"version {champion.version}"
        raise DamagedFileError(
            f"{path}:{len(entries)}: version {newest.version} became champion, but the champion file names {named}; "
            f"{_RESTORE}"
        )
    check_fields(layout, entries, file)


def check_fields(layout: ProjectLayout, entries: Sequence[Promotion], file: ChampionFile) -> None:
    """Check each field of a champion file against the entries up to the one that it names.

    Nothing is checked for a file that names no entry of the ledger; `check_champion` refuses that.

    Raises:
        ChampionError: a field differs; the message names it.
    """
    count = next((number for number, entry in enumerate(entries, start=1) if entry.digest == file.ledger), 0)
    if not count:
        return
    counted = entries[:count]
    expected = replay_entries(counted)
    # A ledger that is younger than its first champion does not know what came before.
    is_whole = any(entry.previous_version is None for entry in counted)
    previous = file.previous if is_whole else file.previous[: len(expected.previous)]
    anchor = file.anchor if is_whole or expected.anchor is not None else None
    promoted = {entry.model_digest for entry in counted if entry.action == "promote"}
    fields = [
        ("champion", file.champion, expected.champion),
        ("anchor", anchor, expected.anchor),
        *(
            (f"previous[{number}]", found, other)
            for number, (found, other) in enumerate(zip_longest(previous, expected.previous))
        ),
    ]
    for name, found, other in fields:
        if (problem := _find_difference(name, found, other, promoted)) is not None:
            raise ChampionError(
                f"{layout.champion}: {problem}, according to {layout.promotions}; restore the file from git, or write "
                f"{{}} into it and run `ratchet rollback {counted[-1].version}`"
            )


def _find_difference(
    name: str, found: Champion | None, expected: Champion | None, promoted: Container[str]
) -> str | None:
    """Describe how a champion in the champion file differs from the ledger's; None if it does not.

    The ledger knows only of the models in `promoted` whether their promotion was forced: another checkout with the same
    registry may have promoted others.
    """
    if found is None or expected is None:
        if found is expected:
            return None
        shown = ("none" if one is None else f"version {one.version}" for one in (found, expected))
        return "{}: found {}; expected {}".format(name, *shown)
    for field in Champion.model_fields:
        values = getattr(found, field), getattr(expected, field)
        if values[0] != values[1] and (field != "forced" or found.model_digest in promoted):
            shown = (one.model_dump_json() if isinstance(one, Record) else str(one) for one in values)
            return "{}.{}: found {}; expected {}".format(name, field, *shown)
    return None


def encode_entry(entry: Promotion) -> bytes:
    """Encode an entry as a line of the ledger."""
    return (digests.canonical_json(entry.model_dump(mode="json")) + "\n").encode()


def find_withdrawal(entries: Sequence[Promotion], model_digest: str) -> Promotion | None:
    """Find the rollback that replaced this model as champion, unless it became champion again later.

    A rollback to a model that was itself withdrawn undoes that withdrawal. It does not say that the model between was
    bad, so it withdraws nothing.
    """
    models: dict[int, str] = {}
    withdrawals: dict[str, Promotion] = {}
    for entry in entries:
        models[entry.version] = entry.model_digest
        is_reinstatement = entry.model_digest in withdrawals
        if entry.action == "rollback" and entry.previous_version in models and not is_reinstatement:
            withdrawals[models[entry.previous_version]] = entry
        withdrawals.pop(entry.model_digest, None)
    return withdrawals.get(model_digest)
