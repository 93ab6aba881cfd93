"""Who promotes, and what people may write beside it."""

import getpass
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ratchet.errors import DamagedFileError, SettingsError
from ratchet.storage import digests, files, html
from ratchet.storage.records.gate import ChampionFile, Promotion

VARIABLE = "RATCHET_ACTOR"
"""Environment variable that says who promotes, such as a service's name and the person behind it."""

LONGEST_REASON = 2000
"""Characters: it is kept in MLflow's tags, which have a limit."""


def current_actor(root: Path) -> str:
    """RATCHET_ACTOR, else git's user.email, else the login name; in a container without names, the user's number."""
    if named := _clean_line(os.environ.get(VARIABLE, "")):
        return named
    try:
        asked = subprocess.run(
            ["git", "config", "user.email"], cwd=root, capture_output=True, text=True, errors="replace", check=False
        )
        if email := _clean_line(asked.stdout):
            return email
    except OSError:
        pass  # no git here: the login name says who, too
    try:
        return _clean_line(getpass.getuser()) or f"user {os.getuid()}"
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def normalize_reason(text: str | None) -> str | None:
    """A reason as it is kept: one line. Raises SettingsError for one that says nothing, or too much."""
    if text is None:
        return None
    said = _clean_line(text)
    if not said:
        raise SettingsError("--reason: is empty; say in a sentence why")
    if len(said) > LONGEST_REASON:
        raise SettingsError(f"--reason: {len(said):,} characters; say it in at most {LONGEST_REASON:,}")
    return said


def _clean_line(text: str) -> str:
    """One line without characters that a terminal or a page would obey."""
    return html.escape_invisible(" ".join(text.split()))


# The promotion ledger: a JSON line for each promotion and rollback, each with the digest of the one before.
#
# A line that was changed, removed, added or moved breaks the chain from there on; a tail that was cut off is noticed
# because the champion file names the newest entry. Lines are only ever added, but the file is replaced as a whole:
# after
# a crash it has the new line or not, never half of it.

_CURE = "git has it as it was: compare with `git log -p` of it, and bring that back"


def read_entries(path: Path) -> list[Promotion]:
    """All entries, oldest first. Raises DamagedFileError naming the line that breaks the chain."""
    if not path.exists():
        return []
    text = path.read_bytes()
    entries: list[Promotion] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if problem := _find_problem(line, entries):
            raise DamagedFileError(f"{path}:{number}: {problem}; {_CURE}")
        entries.append(Promotion.model_validate_json(line))
    return entries


def append_entry(path: Path, entry: Promotion) -> Promotion:
    """Chain an entry to the newest one and add it; returns it with its digests. One that is there already is returned.

    The caller holds the promotion lock. Raises DamagedFileError when the chain is broken; nothing is appended then.
    """
    entries = read_entries(path)
    if found := next((e for e in entries if e.id == entry.id), None):
        return found
    unsigned = entry.model_copy(update={"previous": entries[-1].digest if entries else None, "digest": ""})
    signed = unsigned.model_copy(update={"digest": entry_digest(unsigned)})
    files.write_atomic(path, (path.read_bytes() if entries else b"") + _encode_entry(signed))
    return signed


def entry_digest(entry: Promotion) -> str:
    """SHA-256 of an entry's canonical JSON without the field `digest`."""
    return digests.hash_json(entry.model_dump(mode="json", exclude={"digest"}))


def check_champion(path: Path, entries: Sequence[Promotion], file: ChampionFile) -> None:
    """Raise DamagedFileError unless the champion file names the newest entry, and that entry the champion.

    A file that names neither champion nor entry was begun anew: its next champion is chained to what is there.
    """
    champion, head = file.champion, file.ledger
    if champion is None and head is None:
        return
    if head is None:
        if entries:
            raise DamagedFileError(f"{path}: has {len(entries)} entries, but the champion file names none; {_CURE}")
        return  # promoted before there was a ledger
    numbers = {entry.digest: number for number, entry in enumerate(entries, start=1)}
    if head not in numbers:
        raise DamagedFileError(
            f"{path}:{len(entries) + 1}: the champion file names entry {head[:12]}, which is not there: "
            f"the tail was cut off, or the two files are of different commits; {_CURE}"
        )
    if numbers[head] != len(entries):
        raise DamagedFileError(
            f"{path}:{numbers[head] + 1}: the champion file knows no entry after line {numbers[head]}: "
            f"it is of an earlier commit, or lines were added by hand; {_CURE}"
        )
    newest = entries[-1]
    if champion is None or (champion.version, champion.model_digest) != (newest.version, newest.model_digest):
        named = "no champion" if champion is None else f"version {champion.version}"
        raise DamagedFileError(
            f"{path}:{len(entries)}: version {newest.version} became champion, the champion file names {named}; {_CURE}"
        )


def _encode_entry(entry: Promotion) -> bytes:
    return (digests.canonical_json(entry.model_dump(mode="json")) + "\n").encode()


def _find_problem(line: bytes, before: Sequence[Promotion]) -> str | None:
    """What is wrong with a line that follows these entries."""
    try:
        entry = Promotion.model_validate(json.loads(line))
    except ValueError as error:
        return f"no entry of the ledger ({' '.join(str(error).splitlines()[:2])})"
    if _encode_entry(entry) != line:
        return "not written as the ledger writes it"
    if entry.digest != entry_digest(entry):
        return f"changed: its content has digest {entry_digest(entry)[:12]}, it says {entry.digest[:12] or 'none'}"
    expected = before[-1].digest if before else None
    if entry.previous != expected:
        says, is_ = (entry.previous or "none")[:12], (expected or "none")[:12]
        return f"the chain is broken: it follows entry {says}, but the line before is entry {is_}"
    if any(entry.id == other.id for other in before):
        return f"event {entry.id} is there twice"
    return None


def find_withdrawal(entries: Sequence[Promotion], model_digest: str) -> Promotion | None:
    """The rollback by which this model ceased to be champion, unless it has become champion again since."""
    models: dict[int, str] = {}
    back: dict[str, Promotion] = {}
    for entry in entries:
        models[entry.version] = entry.model_digest
        if entry.action == "rollback" and entry.before in models:
            back[models[entry.before]] = entry
        back.pop(entry.model_digest, None)
    return back.get(model_digest)
