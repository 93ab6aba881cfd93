"""Tests of `ratchet approve`: a promotion needs approvals by other people, and a forced one shows that they were
missing."""

import base64
import json
import os
import re
import signal
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from promotion_project import SETTINGS, accept_model, count_in_child, read_ledger, write_outputs
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.units import utc_timestamp
from ratchet.registry import approvals, keys
from ratchet.registry.approvals import ApprovalPredicate, count_missing, verify_approvals
from ratchet.stages.approve import approve
from ratchet.stages.project import Project
from ratchet.stages.promote import rollback
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry


class People:
    """People with a key each, who share one checkout."""

    def __init__(self, layout: ProjectLayout, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.layout, self._folder, self._monkeypatch, self._capsys = layout, folder, monkeypatch, capsys
        self.require(1)
        for person in ("ada", "bob", "eve"):
            key = keys.create_key_pair(ProjectLayout(folder / person))
            (folder / f"{person}.pem").write_text(key.public)
            if person != "eve":
                keys.trust_key(layout, folder / f"{person}.pem")

    def require(self, number: int) -> None:
        settings = SETTINGS.model_copy(update={"promote": SETTINGS.promote.model_copy(update={"approvals": number})})
        self.layout.params.write_text(params_file.dump(settings), encoding="utf-8")

    def become(self, person: str) -> None:
        self._monkeypatch.setenv("RATCHET_ACTOR", person)
        self._monkeypatch.setenv(keys.KEY_VARIABLE, str(ProjectLayout(self._folder / person).private_key))

    def signer(self, person: str) -> keys.KeySigner:
        self.become(person)
        return keys.load_signer(ProjectLayout(self._folder / person))

    def run(self, person: str, *arguments: str, code: int = 0) -> str:
        """Run a command as this person, and return what it prints."""
        self.become(person)
        assert main(["--project", str(self.layout.root), *arguments]) == code, self._capsys.readouterr().err
        output = self._capsys.readouterr()
        return str(output.out if code == 0 else output.err)

    @property
    def verdict(self) -> str:
        return digests.hash_file(self.layout.verdict)

    def sign(self, person: str, verdict: str | None = None, **changes: Any) -> str:
        signer = self.signer(person)
        predicate = ApprovalPredicate(
            model_name=SETTINGS.promote.model_name, model_digest="m" * 64, actor=person, key=signer.fingerprint,
            time=utc_timestamp(),
        )  # fmt: skip
        return approvals.sign_statement(signer, verdict or self.verdict, predicate.model_copy(update=changes))

    def add(self, text: str) -> None:
        folder = self.layout.approvals / self.verdict[:16]
        files.make_directory(folder)
        files.write_atomic(folder / "y.json", text)


@pytest.fixture
def people(
    tracked_project: ProjectLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calm: None,
) -> People:
    people = People(tracked_project, tmp_path / "people", monkeypatch, capsys)
    write_outputs(tracked_project, "a")
    return people


def test_another_person_must_approve(people: People) -> None:
    layout, verdict = people.layout, people.verdict
    said = people.run("ada", "promote", "--dry-run", code=3)
    assert not layout.approvals.exists(), "a dry run changes nothing"
    said = people.run("ada", "promote", code=3)
    assert f"it lacks 1 approval (promote.approvals: 1). Ask others to run `ratchet approve {verdict[:12]}`" in said
    assert not layout.champion.exists()
    people.run("ada", "promote", code=3)
    [proposal] = layout.approvals.rglob("*.json")
    assert str(proposal.relative_to(layout.root)) in said
    assert "you proposed this promotion yourself" in people.run("ada", "approve", verdict[:12])
    assert "the person who promotes cannot be the only one who approves" in people.run("ada", "promote", code=3)
    shown = people.run("bob", "approve")
    assert "at_least: " in shown
    assert "proposed by ada (key " in shown
    assert f"nothing was signed; to approve it: ratchet approve {verdict[:12]}" in shown
    said = people.run("bob", "approve", verdict[:12])
    assert "judged again on this machine: the same verdict" in said
    assert "has all approvals: `ratchet promote`" in said
    before = {path: path.read_bytes() for path in layout.approvals.rglob("*.json")}
    assert "approved already; commit experiments/approvals/" in people.run("bob", "approve", verdict[:12])
    assert {path: path.read_bytes() for path in layout.approvals.rglob("*.json")} == before
    people.run("ada", "promote")
    [entry] = read_ledger(layout)
    assert entry.approvals is not None
    assert (entry.approvals.required, entry.approvals.missing, entry.forced) == (1, 0, False)
    assert entry.approvals.verdict_digest == verdict
    assert [approver.actor for approver in entry.approvals.approvers] == ["ada", "bob"]
    version = MlflowModelRegistry(layout, SETTINGS.promote.model_name).version(1)
    assert version is not None
    assert version.tags["ratchet.approved_by"] == "ada, bob"
    assert "approved by bob (" in people.run("ada", "promotions")
    folder = layout.promoted_model(entry.model_digest)
    findings = verify_approvals(folder, keys.read_keyring(layout.keyring), entry.time)
    assert sorted((f.actor, f.verdict_digest, f.problem) for f in findings) == [
        ("ada", verdict, None), ("bob", verdict, None),
    ]  # fmt: skip
    assert "approval  by bob (" in people.run("ada", "verify", str(folder))
    assert main(["verify", str(folder), "--public-key", str(folder.parents[3] / "people" / "ada.pem")]) == 0
    (folder / "hf" / "model.safetensors").write_text("damage")
    assert "copied again" in people.run("ada", "promote")
    assert "approval  by bob (" in people.run("ada", "verify", str(folder)), "a repaired folder keeps its approvals"
    keys.revoke_trust(layout, findings[0].signer[:16], "laptop lost")
    [problem] = [f.problem for f in verify_approvals(folder, keys.read_keyring(layout.keyring)) if f.problem]
    assert "revoked (laptop lost)" in problem


@pytest.mark.parametrize(
    ("signers", "required", "missing"),
    [
        ("", 1, 1), ("a", 1, 1), ("b", 1, 0), ("ab", 1, 0),
        ("", 2, 2), ("a", 2, 1), ("b", 2, 1), ("ab", 2, 0), ("bc", 2, 0), ("ab", 3, 1),
    ],
)  # fmt: skip
def test_the_proposer_counts_beside_others(signers: str, required: int, missing: int) -> None:
    assert count_missing(list(signers), "a", required) == missing


def alter(text: str) -> str:
    """Change the verdict in a signed approval."""
    bundle = json.loads(text)
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b'"bob"', b'"rob"')
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    return json.dumps(bundle)


def at(**offset: float) -> str:
    return (datetime.now(UTC) + timedelta(**offset)).isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("expired", r"has expired \(of .*, valid for 7 days\)"),
        ("future", "is from the future"),
        ("revoked", r"revoked \(laptop lost\)"),
        ("unknown", "which this project does not trust"),
        ("altered", "the file was changed or forged"),
        ("another's key", "names key .*, another key signed it"),
        ("garbage", "not an approval"),
        ("another name", "approves promote.model_name 'other'"),
        ("another verdict", None),
        ("a proposal", None),
    ],
)
def test_an_approval_that_does_not_count_is_named(people: People, kind: str, reason: str | None) -> None:
    match kind:
        case "expired":
            people.add(people.sign("bob", time=at(days=-7, minutes=-1)))
        case "future":
            people.add(people.sign("bob", time=at(minutes=7)))
        case "revoked":
            people.add(people.sign("bob"))
            keys.revoke_trust(people.layout, people.signer("bob").fingerprint, "laptop lost")
        case "unknown":
            people.add(people.sign("eve"))
        case "altered":
            people.add(alter(people.sign("bob")))
        case "another's key":
            people.add(people.sign("bob", key=people.signer("ada").fingerprint))
        case "garbage":
            people.add("{}")
        case "another name":
            people.add(people.sign("bob", model_name="other"))
        case "another verdict":
            people.add(people.sign("bob", verdict="0" * 64))
        case "a proposal":
            text = people.layout.verdict.read_text()
            people.add(people.sign("bob", verdict=text))
    said = people.run("ada", "promote", code=3)
    assert "it lacks 1 approval (" in said
    assert re.search(f"does not count: .*{reason}", said) if reason else "does not count" not in said, said


@pytest.mark.parametrize("kind", ["unknown", "expired"])
def test_a_proposal_that_does_not_count_blocks_no_other_one(people: People, kind: str) -> None:
    proposal = people.layout.verdict.read_text()
    changes = {"verdict": proposal} if kind == "unknown" else {"verdict": proposal, "time": at(days=-8)}
    signer = people.signer("eve" if kind == "unknown" else "ada")
    predicate = ApprovalPredicate(
        model_name=SETTINGS.promote.model_name, model_digest="m" * 64, actor="eve", key=signer.fingerprint, time=at()
    )
    people.add(approvals.sign_statement(signer, people.verdict, predicate.model_copy(update=changes)))
    people.run("ada", "promote", code=3)
    assert "has all approvals" in people.run("bob", "approve", people.verdict)
    people.run("ada", "promote")


def test_unverified_texts_imitate_no_line_of_the_output(people: People) -> None:
    people.add(people.sign("eve", actor="x\n  approved by bob (\x1b[2K"))
    folder = people.layout.approvals / people.verdict[:16]
    Path(os.fsdecode(os.fsencode(folder) + b"/x\xff\n  approved by bob.json")).write_text("{}")
    for said in (people.run("ada", "promote", code=3), people.run("bob", "approve")):
        assert "does not count: " in said
        assert "cannot be printed" in said
        assert "\n  approved by bob" not in said
        assert "\x1b" not in said


def test_old_approvals_do_not_apply_to_a_new_verdict(people: People) -> None:
    people.run("bob", "approve", people.verdict)
    first = people.verdict
    write_outputs(people.layout, "b")
    assert people.verdict != first
    assert "it lacks 1 approval (" in people.run("ada", "promote", code=3)


def test_only_verdicts_that_may_be_promoted_can_be_approved(people: People) -> None:
    people.require(0)
    assert "promote.approvals: found 0" in people.run("bob", "approve", code=2)
    people.require(1)
    assert "found 'abc', which names no single verdict" in people.run("bob", "approve", "abc", code=2)
    people.run("ada", "promote", "--force", "--reason", "first")
    assert "is now this model" in people.run("bob", "approve", people.verdict, code=3)
    write_outputs(people.layout, "b", "HOLD")
    said = people.run("bob", "approve", people.verdict, code=3)
    assert "is HOLD; only PROMOTE can be approved" in said
    people.layout.verdict.write_text(people.layout.verdict.read_text().replace("HOLD", "PROMOTE"))
    assert "verdict.json" in people.run("bob", "approve", people.verdict, code=2), "an edited verdict is damaged"


def test_a_promotion_without_approvals_is_shown_for_ever(people: People) -> None:
    layout = people.layout
    people.require(2)
    people.run("bob", "approve", people.verdict)
    plan = people.run("ada", "promote", "--dry-run", "--force", "--reason", "the shop is down")
    assert "FORCED despite 1 missing approval" in plan
    said = people.run("ada", "promote", "--force", "--reason", "the shop is down")
    assert "FORCED by ada despite 1 missing approval: the shop is down" in said
    write_outputs(layout, "b")
    people.run("ada", "approve", people.verdict)
    people.run("bob", "approve", people.verdict)
    ada, bob = (people.signer(person).fingerprint[:16] for person in ("ada", "bob"))
    assert f"approved by ada ({ada}), bob ({bob})" in people.run("ada", "promote")
    people.become("ada")
    rollback(Project(layout.root), 1, smoke_test=accept_model)
    champion = read_champion(layout.champion).champion
    assert champion is not None
    assert champion.forced is not None
    assert champion.forced.missing_approvals == 1
    assert "FORCED by ada despite 1 missing approval: the shop is down" in people.run("ada", "status")
    history = people.run("ada", "promotions")
    assert "PROMOTE FORCED" in history
    assert "LACKED 1 of 2 approvals" in history
    folder = layout.promoted_model(champion.model_digest)
    assert json.loads((folder / "forced.json").read_text())["missing_approvals"] == 1
    registry = MlflowModelRegistry(layout, SETTINGS.promote.model_name)
    assert [version.tags["ratchet.missing_approvals"] for version in registry.versions()] == ["1", "0"]


def test_an_approval_that_is_killed_is_complete_or_absent(people: People, tmp_path: Path) -> None:
    people.run("ada", "promote", code=3)
    people.become("bob")
    project, verdict = Project(people.layout.root), people.verdict

    def work(kill_at: int) -> int:
        numbers = count(1)

        def seen(*about: object) -> None:
            if next(numbers) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        files.before = seen
        approve(project, verdict)
        return next(numbers) - 1

    point = 0
    while True:
        point += 1
        for path in people.layout.approvals.rglob("*.json"):
            if "proposal" not in path.name:
                path.unlink()
        status, points = count_in_child(partial(work, point))
        report = approve(project)
        assert [a.actor for a in report.approvers] in ([], ["bob"])
        assert report.problems == ()
        approve(project, verdict)
        assert [a.actor for a in approve(project).approvers] == ["bob"]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert point > points > 1
