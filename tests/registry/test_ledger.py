"""Tests the ledger: every change is detected, and the error names its line."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError
from ratchet.registry import ledger
from ratchet.storage import digests
from ratchet.storage.records.gate import Champion, ChampionFile, Promotion, PromotionApprovals


def entry(number: int) -> Promotion:
    return Promotion(
        id=f"event {number}", time="2026-01-01T00:00:00+00:00", action="promote", actor='Zoë "digest":"ff",',
        version=number, model_digest=f"{number}" * 64, adapter_digest="a" * 64, run_id="run", previous_version=None,
        previous=None,
    )  # fmt: skip


def champions(version: int, head: str | None) -> ChampionFile:
    found = Champion(version=version, model_digest=f"{version}" * 64, adapter_digest="a" * 64, run_id="run")
    return ChampionFile(champion=found, ledger=head)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        ledger.append_entry(tmp_path / "promotions.jsonl", entry(number))
    return tmp_path / "promotions.jsonl"


def test_each_entry_names_the_one_before(path: Path) -> None:
    first, second, third = ledger.read_entries(path)
    assert (first.previous, second.previous, third.previous) == (None, first.digest, second.digest)
    ledger.check_champion(path, [first, second, third], champions(3, third.digest))
    assert ledger.read_entries(path.with_name("none")) == []


def test_an_event_is_added_once(path: Path) -> None:
    before = path.read_bytes()
    assert ledger.append_entry(path, entry(2)) == ledger.read_entries(path)[1]
    assert path.read_bytes() == before


def test_the_chain_is_verified_with_sed_and_sha256sum(path: Path) -> None:
    """The commands in docs/promotion.md verify the chain."""
    recipe = (
        """sed 's/"digest":"[0-9a-f]*",//' "$1" | while IFS= read -r line; do printf %s "$line" | sha256sum; done"""
    )
    done = subprocess.run(["sh", "-c", recipe, "sh", str(path)], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [e.digest for e in ledger.read_entries(path)]


def forged(first: str, second: str, third: str) -> list[str]:
    """Change a line and give it a matching digest."""
    changed = json.loads(second) | {"actor": "Bob"}
    changed["digest"] = ledger.entry_digest(Promotion.model_validate(changed))
    return [first, digests.canonical_json(changed) + "\n", third]


def repeated(first: str, second: str, third: str) -> list[str]:
    """Append the first event again, as a valid next entry."""
    entry = json.loads(first) | {"previous": json.loads(third)["digest"]}
    entry["digest"] = ledger.entry_digest(Promotion.model_validate(entry))
    return [first, second, third, digests.canonical_json(entry) + "\n"]


DAMAGE: dict[str, tuple[Callable[..., list[str]], int, str]] = {
    "changed": (lambda a, b, c: [a, b.replace("Zoë", "Bob"), c], 2, "changed: its content has digest"),
    "forged": (forged, 3, "the chain is broken"),
    "removed": (lambda a, b, c: [a, c], 2, "the chain is broken"),
    "swapped": (lambda a, b, c: [a, c, b], 2, "the chain is broken"),
    "beheaded": (lambda a, b, c: [b, c], 1, "the chain is broken: it names previous entry .*; expected none"),
    "doubled": (lambda a, b, c: [a, b, c, c], 4, "the chain is broken"),
    "repeated": (repeated, 4, "event event 1 is in the ledger twice"),
    "blank": (lambda a, b, c: [a, "\n", b, c], 2, "not an entry of the ledger"),
    "reformatted": (lambda a, b, c: [a, b.replace(",", ", "), c], 2, "not in the ledger's JSON layout"),
    "torn": (lambda a, b, c: [a, b, c[:50]], 3, "not an entry of the ledger"),
    "unended": (lambda a, b, c: [a, b, c.rstrip()], 3, "not in the ledger's JSON layout"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_at_its_line(path: Path, what: str) -> None:
    damage, line, message = DAMAGE[what]
    path.write_text("".join(damage(*path.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8")
    with pytest.raises(DamagedFileError, match=rf"promotions\.jsonl:{line}: {message}"):
        ledger.read_entries(path)
    before = path.read_bytes()
    with pytest.raises(DamagedFileError):
        ledger.append_entry(path, entry(4))
    assert path.read_bytes() == before


def test_the_champion_file_must_name_the_newest_entry(path: Path) -> None:
    entries = ledger.read_entries(path)
    cases = [
        (entries[:2], champions(3, entries[2].digest), r":3: .*the end of the ledger was removed"),
        (entries, champions(2, entries[1].digest), r":3: the champion file ends at line 2"),
        (
            entries,
            champions(1, entries[2].digest),
            r":3: version 3 became champion, but the champion file names version 1",
        ),
        (entries, ChampionFile(ledger=entries[2].digest), r":3: .*names no champion"),
        (entries, champions(3, None), "has 3 entries, but the champion file names none"),
        ([], champions(3, entries[2].digest), r":1: .*the end of the ledger was removed"),
    ]
    for found, file, message in cases:
        with pytest.raises(DamagedFileError, match=message):
            ledger.check_champion(path, found, file)
    ledger.check_champion(path, entries, ChampionFile())  # a new champion file
    ledger.check_champion(path, [], champions(1, None))  # promoted before the ledger existed


def test_entries_without_approvals_keep_the_digest_of_earlier_versions() -> None:
    first = entry(1).model_copy(update={"actor": "ada", "id": "event 1"})
    assert ledger.entry_digest(first) == "0342a687d8fa49e522056aee2fa23ef5b50e53107549ea7de265c358f0f2716b"
    assert b"approvals" not in ledger.encode_entry(first)
    approved = PromotionApprovals(required=1, missing=0, verdict_digest="v" * 64, approvers=())
    assert ledger.entry_digest(first.model_copy(update={"approvals": approved})) != ledger.entry_digest(first)
