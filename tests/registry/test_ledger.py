"""Tests the ledger: every change is detected, and the error names its line."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import ChampionError, DamagedFileError
from ratchet.registry import ledger, promotion
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Champion, ChampionFile, Promotion, PromotionApprovals, read_champion


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
def layout(tmp_path: Path) -> ProjectLayout:
    layout = ProjectLayout(tmp_path)
    for number in (1, 2, 3):
        ledger.append_entry(layout.promotions, entry(number))
    return layout


@pytest.fixture
def path(layout: ProjectLayout) -> Path:
    return layout.promotions


def test_each_entry_names_the_one_before(layout: ProjectLayout) -> None:
    path = layout.promotions
    first, second, third = ledger.read_entries(path)
    assert (first.previous, second.previous, third.previous) == (None, first.digest, second.digest)
    ledger.check_champion(layout, [first, second, third], champions(3, third.digest))
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


def test_the_champion_file_must_name_the_newest_entry(layout: ProjectLayout) -> None:
    entries = ledger.read_entries(layout.promotions)
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
            ledger.check_champion(layout, found, file)
    ledger.check_champion(layout, entries, ChampionFile())  # a new champion file
    ledger.check_champion(layout, [], champions(1, None))  # promoted before the ledger existed


def test_entries_without_approvals_keep_the_digest_of_earlier_versions() -> None:
    first = entry(1).model_copy(update={"actor": "ada", "id": "event 1"})
    assert ledger.entry_digest(first) == "0342a687d8fa49e522056aee2fa23ef5b50e53107549ea7de265c358f0f2716b"
    assert b"approvals" not in ledger.encode_entry(first)
    approved = PromotionApprovals(required=1, missing=0, verdict_digest="v" * 64, approvers=())
    assert ledger.entry_digest(first.model_copy(update={"approvals": approved})) != ledger.entry_digest(first)


def test_each_field_of_the_champion_file_is_checked(tmp_path: Path) -> None:
    """Entries: version 1 becomes the anchor; 2; 3; a rollback to 2; a repair of an emptied file by a rollback to 2."""
    layout = ProjectLayout(tmp_path)
    steps: list[dict[str, Any]] = [
        {"version": 1, "is_anchor": True},
        {"version": 2, "previous_version": 1},
        {"version": 3, "previous_version": 2},
        {"version": 2, "previous_version": 3, "action": "rollback"},
        {"version": 2, "previous_version": None, "action": "rollback"},
    ]
    for number, step in enumerate(steps):
        made = entry(step["version"]).model_copy(update={"id": f"event {number}", "actor": "ada"} | step)
        ledger.append_entry(layout.promotions, made)
    entries = ledger.read_entries(layout.promotions)
    two, one = (champions(version, None).champion for version in (2, 1))
    whole = ChampionFile(champion=two, previous=(one,), anchor=one, ledger=entries[-1].digest)
    assert ledger.replay_entries(entries) == whole
    ledger.check_champion(layout, entries, whole)
    ledger.check_fields(layout, entries, ledger.replay_entries(entries[:3]))  # an earlier commit, as of `dvc repro`
    changes: list[tuple[dict[str, Any], str]] = [
        ({"anchor": None}, "anchor: found none; expected version 1"),
        ({"anchor": two}, "anchor.version: found 2; expected 1"),
        ({"anchor": one.model_copy(update={"run_id": "x"})}, "anchor.run_id: found x; expected run"),
        ({"previous": ()}, r"previous\[0\]: found none; expected version 1"),
        ({"previous": (one, champions(3, None).champion)}, r"previous\[1\]: found version 3; expected none"),
        ({"champion": two.model_copy(update={"adapter_digest": "b" * 64})}, "champion.adapter_digest: found bbb"),
    ]
    for change, message in changes:
        with pytest.raises(ChampionError, match=rf"champion\.json: {message}.*restore the file from git") as refused:
            ledger.check_champion(layout, entries, whole.model_copy(update=change))
        assert "write {} into it and run `ratchet rollback 2`" in str(refused.value)
    for change in ({"anchor": one}, {"previous": (one,)}):
        with pytest.raises(ChampionError, match="but no champion; restore the file from git"):
            ledger.check_champion(layout, entries, ChampionFile(**change))


def test_a_ledger_that_is_younger_than_its_champion_does_not_know_what_came_before(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    for version in (3, 4):
        made = entry(version).model_copy(update={"previous_version": version - 1})
        ledger.append_entry(layout.promotions, made)
    entries = ledger.read_entries(layout.promotions)
    one, two, three, four = (champions(version, None).champion for version in (1, 2, 3, 4))
    file = ChampionFile(champion=four, previous=(three, two, one), anchor=one, ledger=entries[-1].digest)
    ledger.check_champion(layout, entries, file)
    with pytest.raises(ChampionError, match=r"previous\[0\]\.version: found 2; expected 3"):
        ledger.check_champion(layout, entries, file.model_copy(update={"previous": (two, one)}))


def test_a_fetched_promotion_fills_an_emptied_champion_file(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    first = entry(1).model_copy(update={"is_anchor": True, "actor": "ada"})
    ledger.append_entry(layout.promotions, first)
    shared = ledger.read_entries(layout.promotions)
    second = entry(2).model_copy(update={"previous_version": 1, "actor": "bob"})
    shared.append(ledger.chain_entry(shared, second))
    ChampionFile().save(layout.champion)
    assert promotion.pull_shared(layout, shared, "the server") == [shared[1]]
    file = read_champion(layout.champion)
    ledger.check_champion(layout, ledger.read_entries(layout.promotions), file)
    assert file.anchor is not None
    assert ([one.version for one in file.previous], file.anchor.version) == ([1], 1)
