"""`ratchet deploy`: a server always reads a complete, signed release: the old one or the new one."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from promoted_models import NAME, SETTINGS, make_champion, promote_fake_model, store_fake_model
from ratchet.cli.deploy import format_deployment
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.promote import Promote
from ratchet.config.units import utc_timestamp
from ratchet.errors import ChampionError, DamagedFileError, InputError, LockHeldError, SettingsError, StorageError
from ratchet.registry import approvals, keys, ledger, model_store, signature
from ratchet.registry.deployment import release as places
from ratchet.registry.deployment import release as releases
from ratchet.registry.signature import SIGNATURE
from ratchet.stages.audit import audit
from ratchet.stages.deploy import DeployOptions, DeployResult, check_release, deploy
from ratchet.stages.project import Project
from ratchet.stages.verify import verify
from ratchet.storage import files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import ForcedPromotion, read_champion

QUIET = DeployOptions(smoke_test=False)
"""The models of these tests are a few bytes that no server can load."""


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ACTOR", "ada@example.org")


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return tmp_path / "srv" / "model"


def deploy_to(layout: ProjectLayout, directory: Path, options: DeployOptions = QUIET) -> DeployResult:
    return deploy(Project.from_parts(layout, SETTINGS), directory, options)


def content(served: Path, link: str = "current") -> str:
    """Return the text of the model file that a server reads."""
    return (served / link / "gguf" / "model-q8_0.gguf").read_text().removeprefix("gguf/q8_0 of ")


def history(served: Path) -> list[dict[str, Any]]:
    path = served / "deployments.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def release_names(served: Path) -> list[str]:
    return sorted(p.name for p in (served / "releases").iterdir())


def test_the_champion_is_deployed_with_what_its_server_needs(project: ProjectLayout, served: Path) -> None:
    bundle = promote_fake_model(project, "a")
    result = deploy_to(project, served)
    assert (result.status, result.current, result.warnings) == ("deployed", served / "current", ())
    text = format_deployment(result)
    assert f"version 1 (model {bundle.model_digest[:12]}, gguf/q8_0) is current" in text
    assert "no smoke test: no server was started" in text
    assert {p.relative_to(served / "current").as_posix() for p in (served / "current").rglob("*") if p.is_file()} == {
        "gguf/model-q8_0.gguf", "Modelfile", "SERVE.md", "README.md", "bundle.json", "sbom.json", "model.sig",
        "release.json", "manifest.json",
    }  # fmt: skip
    assert str((served / "current").readlink()) == f"releases/1-{bundle.model_digest[:12]}-gguf-q8_0"
    assert not (served / "previous").exists()
    release = check_release(project, served / "current")
    assert (release.version, release.artifact_name, release.model_name) == (1, "gguf/q8_0", NAME)
    [entry] = history(served)
    assert entry | {"time": ""} == {
        "time": "", "action": "deploy", "actor": "ada@example.org", "release": release.name, "version": 1, "format": 1,
        "model_digest": bundle.model_digest, "artifact_name": "gguf/q8_0", "previous_release": None, "smoke_test": None,
        "event": "event0",
        "forced": None, "damage": None,
    }  # fmt: skip

    before = {p: p.lstat().st_mtime_ns for p in served.rglob("*") if not p.is_dir() and not p.name.startswith(".")}
    result = deploy_to(project, served)
    assert result.status == "unchanged"
    assert "already" in format_deployment(result)
    assert {p: p.lstat().st_mtime_ns for p in before} == before
    assert len(history(served)) == 1

    weights = served / "current" / "gguf" / "model-q8_0.gguf"
    assert weights.stat().st_nlink == 1
    weights.write_text("overwritten by a server")
    files.verify_sealed(project.promoted_model(bundle.model_digest), "model")


def test_the_command_prints_the_record_as_json(
    project: ProjectLayout, served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    promote_fake_model(project, "a")
    assert main(["--project", str(project.root), "deploy", str(served), "--no-smoke", "--json"]) == 0
    result = DeployResult.model_validate_json(capsys.readouterr().out)
    assert (result.status, result.deployment.version, result.deployment.smoke_test) == ("deployed", 1, None)
    assert result.guide.is_file()


@pytest.mark.parametrize("exchange", [True, False], ids=["names exchanged", "no exchange"])
def test_rollback_swaps_current_and_previous(
    project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "exchange_names", lambda a, b: False)
    for model in "ab":
        promote_fake_model(project, model)
        deploy_to(project, served)
    assert (content(served), content(served, "previous")) == ("b", "a")
    inode = (served / "previous" / "gguf" / "model-q8_0.gguf").stat().st_ino
    result = deploy_to(project, served, DeployOptions(rollback=True))
    assert result.status == "rolled_back"
    assert "every byte is as signed" in format_deployment(result)
    assert (content(served), content(served, "previous")) == ("a", "b")
    assert (served / "current" / "gguf" / "model-q8_0.gguf").stat().st_ino == inode
    deploy_to(project, served, DeployOptions(rollback=True))
    assert content(served) == "b"
    assert [(e["action"], e["version"]) for e in history(served)] == [
        ("deploy", 1), ("deploy", 2), ("rollback", 1), ("rollback", 2),
    ]  # fmt: skip


def test_old_releases_are_removed_but_never_the_linked_ones(project: ProjectLayout, served: Path) -> None:
    for model in "abcde":
        promote_fake_model(project, model)
        deploy_to(project, served)
    assert [name.split("-")[0] for name in release_names(served)] == ["3", "4", "5"]
    deploy_to(project, served, DeployOptions(rollback=True))
    deploy_to(project, served, DeployOptions(version=1, smoke_test=False))
    assert (content(served), content(served, "previous")) == ("a", "d")
    assert [name.split("-")[0] for name in release_names(served)] == ["1", "4", "5"]


def test_a_version_that_was_rolled_back_is_deployed_only_by_its_number(project: ProjectLayout, served: Path) -> None:
    a, _ = promote_fake_model(project, "a"), promote_fake_model(project, "b")
    deploy_to(project, served, DeployOptions(version=1, smoke_test=False))
    assert content(served) == "a"
    with pytest.raises(ChampionError, match="version 7 was never promoted; known: 1, 2"):
        deploy_to(project, served, DeployOptions(version=7, smoke_test=False))
    deploy_to(project, served)
    assert content(served) == "b"
    make_champion(project, a.model_digest, "rollback", reason="it swears")
    deploy_to(project, served)
    assert content(served) == "a"
    with pytest.raises(ChampionError, match=r"version 2 was rolled back on .* by ada \(it swears\).*--version 2"):
        deploy_to(project, served, DeployOptions(rollback=True))
    result = deploy_to(project, served, DeployOptions(version=2, smoke_test=False))
    assert "warning: version 2 was rolled back" in format_deployment(result)
    assert content(served) == "b"


def test_a_broken_ledger_does_not_prevent_a_rollback(project: ProjectLayout, served: Path) -> None:
    for model in "ab":
        promote_fake_model(project, model)
        deploy_to(project, served)
    project.promotions.write_text(project.promotions.read_text().replace('"actor":"ada"', '"actor":"eve"'))
    with pytest.raises(DamagedFileError, match=r"promotions\.jsonl:1: changed"):
        deploy_to(project, served)
    result = deploy_to(project, served, DeployOptions(rollback=True))
    assert len(result.warnings) == 1
    assert "warning:" in format_deployment(result)
    assert content(served) == "a"


FORCED = ForcedPromotion(actor="ada@example.org", reason="the fair opens tomorrow", decision="REJECT")
SAID = "FORCED by ada@example.org despite the gate's decision REJECT: the fair opens tomorrow"


def test_a_forced_promotion_is_marked_everywhere(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a")
    assert "FORCED" not in format_deployment(deploy_to(project, served))
    assert "FORCED" not in (served / "current" / "README.md").read_text()
    promote_fake_model(project, "b", forced=FORCED)
    assert f"\n  warning: {SAID}" in format_deployment(deploy_to(project, served))
    assert f"\n  warning: {SAID}" in format_deployment(deploy_to(project, served))
    for name in ("README.md", "SERVE.md"):
        assert f"\n**{SAID}**\n" in (served / "current" / name).read_text()
    assert releases.FORCED == model_store.FORCED
    assert ForcedPromotion.load(served / "current" / model_store.FORCED) == FORCED
    assert check_release(project, served / "current").forced == FORCED
    assert [entry["forced"] for entry in history(served)] == [None, FORCED.model_dump(mode="json")]
    assert "FORCED" not in format_deployment(deploy_to(project, served, DeployOptions(rollback=True)))
    assert f"\n  warning: {SAID}" in format_deployment(deploy_to(project, served, DeployOptions(rollback=True)))


def seal_again(folder: Path) -> None:
    """Write the manifest of a changed release again. This needs no key."""
    (folder / files.MANIFEST).unlink()
    files.seal_directory(folder, "release")


def test_a_release_cannot_hide_that_it_was_forced(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a", forced=FORCED)
    deploy_to(project, served)
    folder = (served / "current").resolve()
    release = check_release(project, folder)
    others = {name: origin for name, origin in release.origins.items() if name != "forced.json"}
    changes: list[dict[str, Any]] = [
        {"forced": None},
        {"forced": FORCED.model_copy(update={"reason": "all is well"})},
        {"forced": None, "origins": others},
    ]
    for change in changes:
        if "origins" in change:
            (folder / "forced.json").unlink()
        release.model_copy(update=change).save(folder / "release.json")
        seal_again(folder)
        with pytest.raises(DamagedFileError, match=r"release\.json: does not record that the promotion was forced"):
            check_release(project, folder)


def change_origins(folder: Path, origins: dict[str, str]) -> None:
    """Change the unsigned records of a release, so that they fit its files."""
    content = json.loads((folder / "release.json").read_bytes())
    (folder / "release.json").write_bytes(files.json_bytes(content | {"origins": origins}))
    seal_again(folder)


def read_origins(folder: Path) -> dict[str, str]:
    origins: dict[str, str] = json.loads((folder / "release.json").read_bytes())["origins"]
    return origins


def swap_model(folder: Path) -> None:
    """Put the bytes of another signed format in the place of the model."""
    model = folder / "gguf" / "model-f16.gguf"
    model.write_text(model.read_text().replace("gguf/f16", "gguf/q4_0"))
    change_origins(folder, read_origins(folder) | {"gguf/model-f16.gguf": "gguf/model-q4_0.gguf"})


def remove_model(folder: Path) -> None:
    (folder / "gguf" / "model-f16.gguf").unlink()
    change_origins(folder, {k: v for k, v in read_origins(folder).items() if not k.startswith("gguf/")})


def remove_server_file(folder: Path) -> None:
    (folder / "Modelfile").unlink()
    change_origins(folder, {k: v for k, v in read_origins(folder).items() if k != "Modelfile"})


def add_other_file(folder: Path) -> None:
    """Add a signed file of another format, which a server could read by mistake."""
    (folder / "gguf" / "model.gguf").write_text("gguf/q4_0 of b")
    change_origins(folder, read_origins(folder) | {"gguf/model.gguf": "gguf/model-q4_0.gguf"})


def link_folder(folder: Path) -> None:
    outside = folder.parents[2] / "evil"
    outside.mkdir(exist_ok=True)
    (folder / "extra").symlink_to(outside)


def link_model(folder: Path) -> None:
    model = folder / "gguf" / "model-f16.gguf"
    model.rename(folder.parents[2] / model.name)
    model.symlink_to(folder.parents[2] / model.name)


def link_release(folder: Path) -> None:
    outside = folder.parents[2] / f"release-{folder.stat().st_ino}"
    folder.rename(outside)
    folder.symlink_to(outside)


def change_kind(folder: Path) -> None:
    """Let the release claim to be something that is never signed."""
    (folder / "gguf" / "model-f16.gguf").write_text("evil")
    (folder / files.MANIFEST).unlink()
    files.seal_directory(folder, "data")


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "model swapped": (swap_model, "model-f16.gguf: is a copy of gguf/model-q4_0.gguf; expected gguf/model-f16.gguf"),
    "model removed": (remove_model, "gguf/model-f16.gguf: missing, although format gguf/f16 has it"),
    "server file removed": (remove_server_file, "Modelfile: missing, although format gguf/f16 has it"),
    "file added": (add_other_file, "gguf/model.gguf: does not belong to format gguf/f16"),
    "link to a folder": (link_folder, "extra: found a link; a release has only files and folders"),
    "link to the model": (link_model, "model-f16.gguf: found a link"),
    "link to the release": (link_release, "-gguf-f16: found a link"),
    "other kind": (change_kind, "found a sealed 'data'; expected 'release'"),
}
"""Changes that need write access to the release and no key, with the message about each."""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_release_whose_unsigned_records_were_forged_is_damaged(
    project: ProjectLayout, served: Path, name: str
) -> None:
    forge, says = FORGERIES[name]
    of_format = DeployOptions(format="gguf/f16", smoke_test=False)
    promote_fake_model(project, "b", ("hf", "gguf/f16", "gguf/q4_0"))
    deploy_to(project, served, of_format)
    folder = (served / "current").resolve()
    forge(folder)
    for path in (served / "current", served):
        report = verify([path], project=project.root)
        assert not report.is_intact
        problems = [f"{one.path}: {one.text}" for one in report.findings if one.status == "damaged"]
        assert any(says in problem for problem in problems), problems
    facts = audit(Project.from_parts(project, SETTINGS), None, [served]).list_facts("contradicted")
    assert any(says in fact.proof for fact in facts if fact.section == "deployment"), facts
    deploy_to(project, served, DeployOptions(format="hf", smoke_test=False))
    with pytest.raises(DamagedFileError, match=re.escape(says)):
        deploy_to(project, served, DeployOptions(rollback=True))
    assert (served / "current" / "hf").is_dir()
    result = deploy_to(project, served, of_format)
    assert "is replaced: " in format_deployment(result)
    assert verify([served / "current"], project=project.root).is_intact
    forge(folder)
    result = deploy_to(project, served, of_format)
    assert result.status == "deployed"
    assert f"the release that was current until now was damaged: {folder}" in format_deployment(result)
    assert (folder / "gguf" / "model-f16.gguf").read_text() == "gguf/f16 of b"


def test_verify_reports_a_link_to_a_foreign_folder(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    (served / "current").unlink()
    (served / "current").symlink_to(tmp_path)
    report = verify([served], project=project.root)
    assert [finding.status for finding in report.findings].count("damaged") == 1
    assert f"found a link to {tmp_path}; expected a link to a release" in report.findings[0].text


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forms", "wanted", "found"),
    [
        (("hf",), None, "hf"),
        (("hf", "gguf/q4_0", "gguf/q8_0"), None, "gguf/q4_0"),
        (("hf", "gguf/q4_0", "gguf/q8_0"), "gguf/q8_0", "gguf/q8_0"),
        (("hf", "gguf/q8_0", "onnx/int8"), "onnx", "onnx/int8"),
        (("hf", "gguf/q8_0", "onnx/int8"), "hf", "hf"),
    ],
)
def test_the_requested_format_is_deployed(
    project: ProjectLayout, served: Path, forms: tuple[str, ...], wanted: str | None, found: str
) -> None:
    promote_fake_model(project, "a", forms)
    deploy_to(project, served, DeployOptions(format=wanted, smoke_test=False))
    release = check_release(project, served / "current")
    assert release.artifact_name == found
    place = f"gguf/model-{found[5:]}.gguf" if found.startswith("gguf/") else found
    assert (served / "current" / place).exists()
    others = {"hf", "gguf", "onnx"} - {found.split("/", maxsplit=1)[0]}
    assert not any((served / "current" / other).exists() for other in others)


def test_a_directory_keeps_its_format_even_if_its_record_is_damaged(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served, DeployOptions(format="hf", smoke_test=False))
    (served / "current" / "release.json").write_text("{")
    assert "release.json" in format_deployment(deploy_to(project, served))
    assert check_release(project, served / "current").artifact_name == "hf"
    promote_fake_model(project, "b")
    deploy_to(project, served)
    assert check_release(project, served / "current").artifact_name == "hf"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("onnx", "has hf, gguf/q4_0, gguf/q8_0"),
        ("gguf", "matches gguf/q4_0, gguf/q8_0; choose one"),
        ("gguf/q2_k", "has hf, gguf/q4_0, gguf/q8_0"),
    ],
)
def test_a_missing_format_is_refused(project: ProjectLayout, served: Path, wanted: str, message: str) -> None:
    promote_fake_model(project, "a", ("hf", "gguf/q4_0", "gguf/q8_0"))
    with pytest.raises(SettingsError, match=message):
        deploy_to(project, served, DeployOptions(format=wanted, smoke_test=False))


# --- refused deployments change nothing -------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change the last byte of a file and keep its size. Write a new file, because the old one may be hard-linked
    elsewhere."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))


def rebuild(folder: Path, *leave_out: str, then: Callable[[Path], object] = lambda scratch: None) -> None:
    """Seal the directory of a promoted model again, without the files `leave_out` and after `then` has changed the
    copy."""
    with files.sealed_directory(folder, "model") as scratch:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in (files.MANIFEST, *leave_out):
                files.link_or_copy(path, scratch / name)
        then(scratch)


def test_damaged_unsigned_and_untrusted_models_are_not_deployed(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    folder = project.promoted_model(promote_fake_model(project, "b").model_digest)
    whole = project.root / "whole"
    shutil.copytree(folder, whole)

    def refused(kind: type[InputError], message: str) -> None:
        with pytest.raises(kind, match=message):
            deploy_to(project, served)
        assert content(served) == "a"
        assert len(release_names(served)) == 1

    def restore() -> None:
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)

    flip(folder / "gguf" / "model-q8_0.gguf")
    refused(DamagedFileError, r"model-q8_0\.gguf: content differs")
    rebuild(folder)
    refused(DamagedFileError, r"model-q8_0\.gguf: changed after the model was signed")
    restore()
    rebuild(folder, SIGNATURE)
    refused(DamagedFileError, "found no signature")
    restore()
    [key] = json.loads(project.keyring.read_text())["keys"]
    keys.revoke_trust(project, key["fingerprint"], "it was on a stolen laptop")
    refused(SettingsError, "revoked.*stolen laptop")
    with pytest.raises(SettingsError, match="revoked"):
        check_release(project, served / "current")
    project.keyring.write_text('{"format": 1, "keys": [], "identities": []}')
    refused(SettingsError, "which this project does not trust")
    shutil.rmtree(folder)
    refused(ChampionError, r"does not exist\. Git does not track mlruns/")


def approve_model(layout: ProjectLayout, model_digest: str, approver: keys.KeySigner) -> None:
    """Add a signed approval to a promoted model's folder, as a promotion with promote.approvals does."""
    predicate = approvals.ApprovalPredicate(
        model_name=NAME, model_digest=model_digest, actor="bob", time=utc_timestamp(), key=approver.fingerprint
    )

    def add(scratch: Path) -> None:
        files.make_directory(scratch / approvals.FOLDER)
        text = approvals.sign_statement(approver, "e" * 64, predicate)
        files.write_atomic(scratch / approvals.FOLDER / "bob.json", text)
        signature.sign_folder(scratch, keys.load_signer(layout))

    rebuild(layout.promoted_model(model_digest), SIGNATURE, then=add)


def test_a_version_that_a_revoked_key_approved_is_not_deployed(
    project: ProjectLayout, served: Path, tmp_path: Path
) -> None:
    bob = ProjectLayout(tmp_path / "bob")
    (tmp_path / "bob.pem").write_text(keys.create_key_pair(bob).public)
    first = promote_fake_model(project, "a")
    keys.trust_key(project, tmp_path / "bob.pem")
    project.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")
    approver = keys.load_signer(bob)
    approve_model(project, first.model_digest, approver)
    deploy_to(project, served)
    promote_fake_model(project, "b")
    deploy_to(project, served)
    keys.revoke_trust(project, approver.fingerprint, "laptop lost")
    says = (
        r"version 1: an approval of its promotion does not count: .*bob\.json: signed by key .*revoked "
        r"\(laptop lost\).*Deploy another version \(--version N\), or promote a model with new approvals"
    )
    for options in (DeployOptions(version=1, smoke_test=False), DeployOptions(rollback=True)):
        with pytest.raises(SettingsError, match=says):
            deploy_to(project, served, options)
        assert content(served) == "b"
    (project.promoted_model(first.model_digest) / "bundle.json").unlink()
    result = deploy_to(project, served, DeployOptions(rollback=True))  # an emergency does not wait for the registry
    assert "bundle.json: not found" in format_deployment(result)
    assert content(served) == "a"
    deploy_to(project, served, DeployOptions(rollback=True))
    project.params.unlink()  # a machine that knows only the key of the model
    project.promoted_model(first.model_digest).rename(tmp_path / "damaged")
    approve_model(project, promote_fake_model(project, "a").model_digest, approver)
    deploy_to(project, served)
    assert content(served) == "a"


def test_rollback_refuses_a_changed_release_and_deploy_makes_it_again(project: ProjectLayout, served: Path) -> None:
    for model in "ab":
        promote_fake_model(project, model)
        deploy_to(project, served)
    for name in ("gguf/model-q8_0.gguf", "Modelfile", "release.json"):
        flip(served / "previous" / name)
        with pytest.raises(DamagedFileError, match=Path(name).name):
            deploy_to(project, served, DeployOptions(rollback=True))
        assert content(served) == "b"
        deploy_to(project, served, DeployOptions(version=1, smoke_test=False))  # recreates the damaged release
        deploy_to(project, served)


@pytest.mark.parametrize("name", ["gguf/model-q8_0.gguf", "Modelfile", "release.json", "manifest.json"])
def test_a_damaged_release_that_servers_were_reading_is_reported(
    project: ProjectLayout, served: Path, name: str
) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    flip(served / "current" / name)
    text = format_deployment(deploy_to(project, served))
    path = (served / "current").resolve() / name
    assert f"warning: the release that was current until now was damaged: {path}: " in text
    assert f"who can write in {served / 'releases'}" in text
    assert check_release(project, served / "current").artifact_name == "gguf/q8_0"
    assert [str(path) in str(entry["damage"]) for entry in history(served)] == [False, True]
    assert "was damaged" not in format_deployment(deploy_to(project, served))
    flip(served / "current" / name)
    promote_fake_model(project, "b")
    assert f"was damaged: {path}: " in format_deployment(deploy_to(project, served))
    assert content(served) == "b"
    assert [str(path) in str(entry["damage"]) for entry in history(served)] == [False, True, True]


def test_a_release_that_was_changed_and_sealed_again_is_damaged(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    folder = (served / "current").resolve()
    for name in ("Modelfile", "bundle.json", "gguf/model-q8_0.gguf"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        seal_again(folder)
        with pytest.raises(DamagedFileError, match=rf"{name}: differs from the signed file"):
            check_release(project, folder)
        assert f"{name}: differs from the signed file" in format_deployment(deploy_to(project, served))
        check_release(project, folder)
    assert content(served) == "a"
    (folder / "sitecustomize.py").write_text("import os")
    with pytest.raises(DamagedFileError, match=r"sitecustomize\.py: not in the manifest"):
        check_release(project, folder)
    seal_again(folder)
    with pytest.raises(DamagedFileError, match="does not list the files in its folder"):
        check_release(project, folder)


def test_a_changed_release_that_is_not_current_is_made_again(project: ProjectLayout, served: Path) -> None:
    """A release that was changed and sealed again, which needs only write access, is written again. The same is true
    if the release has the signature of another model."""
    a = promote_fake_model(project, "a")
    deploy_to(project, served, DeployOptions(format="gguf", smoke_test=False))
    folder = (served / "current").resolve()
    deploy_to(project, served, DeployOptions(format="hf", smoke_test=False))
    b = promote_fake_model(project, "b")
    make_champion(project, a.model_digest)
    for name, content_ in (
        ("gguf/model-q8_0.gguf", b"tampered"),
        (SIGNATURE, (project.promoted_model(b.model_digest) / SIGNATURE).read_bytes()),
    ):
        (folder / name).write_bytes(content_)
        seal_again(folder)
        text = format_deployment(deploy_to(project, served, DeployOptions(format="gguf", smoke_test=False)))
        assert f"warning: an earlier release of this name is replaced: {folder / name}: differs from " in text
        assert content(served) == "a"
        check_release(project, served / "current")
        deploy_to(project, served, DeployOptions(format="hf", smoke_test=False))


def test_a_file_that_is_not_the_measured_one_is_refused(project: ProjectLayout, served: Path) -> None:
    """The model is signed, but bundle.json has another digest for the file, as in a manually assembled export."""
    bundle = promote_fake_model(project, "a")
    other = bundle.artifacts[1].model_copy(update={"digest": "0" * 64})
    changed = bundle.model_copy(update={"artifacts": (bundle.artifacts[0], other)})

    def sign(scratch: Path) -> None:
        changed.save(scratch / "bundle.json")
        signature.sign_folder(scratch, keys.load_signer(project))

    rebuild(project.promoted_model(bundle.model_digest), SIGNATURE, "bundle.json", then=sign)
    with pytest.raises(DamagedFileError, match=r"differs from format gguf/q8_0 in bundle\.json"):
        deploy_to(project, served)


def test_directories_with_other_contents_are_refused(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    promote_fake_model(project, "a")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SettingsError, match="found a file; expected a directory"):
        deploy_to(project, file)
    for mine in ("index.html", "releases/2024"):
        (served / mine).mkdir(parents=True)
        with pytest.raises(SettingsError, match=rf"found {mine} and no deployment"):
            deploy_to(project, served)
        assert [p.name for p in served.iterdir()] == [mine.partition("/")[0]]
        shutil.rmtree(served)
    deploy_to(project, served)
    other = SETTINGS.model_copy(update={"promote": Promote(model_name="another")})
    with pytest.raises(SettingsError, match=f"serves model {NAME}, but this project's model is another"):
        deploy(Project.from_parts(project, other), served, QUIET)
    (served / "current").unlink()
    (served / "current").mkdir()
    with pytest.raises(DamagedFileError, match=r"current: found .*; expected a link to a release"):
        deploy_to(project, served)


def test_other_files_among_the_releases_stay(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    place = served / "releases"
    precious = place / "mydata" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    (place / "notes.txt").write_text("p")
    alike = place / "7-0123456789ab-hf"  # the name of a release, without a manifest
    alike.mkdir()
    (place / "8-0123456789ab-hf").symlink_to(tmp_path)
    foreign = {"mydata", "notes.txt", alike.name, "8-0123456789ab-hf"}
    for model in "bcde":
        promote_fake_model(project, model)
        deploy_to(project, served)
    assert [name.split("-")[0] for name in release_names(served) if name not in foreign] == ["3", "4", "5"]
    assert foreign < set(release_names(served))
    assert precious.read_text() == "precious"
    (alike / "release.json").write_text("{}")
    files.seal_directory(alike, "release")  # simulates a deployment killed before it updated the link `current`
    promote_fake_model(project, "f")
    deploy_to(project, served)
    assert not alike.exists()


def test_directories_that_cannot_be_created_are_refused(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    promote_fake_model(project, "a")
    file = tmp_path / "params.yaml"
    file.write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    served.mkdir(parents=True)
    (served / places.LOCK).mkdir()
    for where in (
        Path("/proc/x/y"), file / "x", file / "x" / "y", tmp_path / ("n" * 300), tmp_path / "loop",
        tmp_path / "x" / ".." / "loop", served,
    ):  # fmt: skip
        with pytest.raises(StorageError, match="choose another directory"):
            deploy_to(project, where)
    assert file.read_text() == ""


def test_paths_are_printed_as_the_user_wrote_them(
    project: ProjectLayout, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote_fake_model(project, "a")
    monkeypatch.chdir(project.root)
    inside = Path("..") / "dep"
    assert f"in {project.root.parent / 'dep' / 'current'}" in format_deployment(deploy_to(project, inside))
    (tmp_path / "link").symlink_to(tmp_path)
    assert f"in {tmp_path / 'link' / 'b' / 'current'}" in format_deployment(deploy_to(project, tmp_path / "link" / "b"))


def test_a_directory_with_a_damaged_owner_file(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    owner = served / "deployment.json"
    whole = json.loads(owner.read_text())
    for text in ('{"x":', "[]", "\udc00".encode(errors="surrogatepass").decode("latin-1")):
        owner.write_text(text)
        with pytest.raises(
            DamagedFileError, match=rf"cannot be read, so the deployed model is unknown.* is {NAME}, write "
        ) as refused:
            deploy_to(project, served)
        assert json.loads(str(refused.value).split(", write ")[1].split(" into the file")[0]) == whole
        assert "Owner" not in str(refused.value)


def test_a_broken_history_is_refused_before_anything_changes(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    with (served / "deployments.jsonl").open("a") as stream:
        stream.write("somebody was here")
    promote_fake_model(project, "b")
    with pytest.raises(DamagedFileError, match=r"deployments\.jsonl:2: not a deployment .*; remove that line"):
        deploy_to(project, served, DeployOptions(format="gguf", smoke_test=False))
    assert content(served) == "a"
    assert len(release_names(served)) == 1


def test_nothing_to_deploy_or_to_roll_back_to(project: ProjectLayout, served: Path) -> None:
    with pytest.raises(ChampionError, match="no champion yet"):
        deploy_to(project, served)
    assert not served.exists()
    promote_fake_model(project, "a")
    with pytest.raises(SettingsError, match="nothing is deployed in it"):
        deploy_to(project, served, DeployOptions(rollback=True))
    deploy_to(project, served)
    with pytest.raises(ChampionError, match="no release before the current one"):
        deploy_to(project, served, DeployOptions(rollback=True))
    with pytest.raises(SettingsError, match="leave out --format and --version"):
        deploy_to(project, served, DeployOptions(rollback=True, version=1))


def test_two_deployments_at_once(project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "LOCK_WAIT_S", 0.1)
    promote_fake_model(project, "a")
    served.mkdir(parents=True)
    with FileLock(served / places.LOCK, "it"), pytest.raises(LockHeldError, match=f"in use by process {os.getpid()}"):
        deploy_to(project, served)


def full_at(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """Simulate a full disk: writing fails for every file with `names` in its name."""

    def full(operation: str, path: Path) -> None:
        if operation == "write" and names in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "before", full)


def test_a_full_disk(project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promote_fake_model(project, "a")
    deploy_to(project, served)
    promote_fake_model(project, "b")
    with monkeypatch.context() as patched:
        patched.setattr(files, "RESERVE_BYTES", 2**62)
        with pytest.raises(OSError, match="more in reserve, but only"):
            deploy_to(project, served)
    full_at(monkeypatch, "model-q8_0.gguf")
    with pytest.raises(OSError, match="No space left"):
        deploy_to(project, served)
    assert content(served) == "a"
    assert len(release_names(served)) == 1


@pytest.mark.parametrize("exchange", [True, False], ids=["names exchanged", "no exchange"])
def test_a_rollback_on_a_full_disk_reports_what_is_current(
    project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "exchange_names", lambda a, b: False)
    for model in "ab":
        promote_fake_model(project, model)
        deploy_to(project, served)
    back = DeployOptions(rollback=True)
    full_at(monkeypatch, ".rollback.json")
    with pytest.raises(
        StorageError, match=f"{served}: cannot be created or written .No space left on device.; fix this"
    ):
        deploy_to(project, served, back)
    assert content(served) == "b"
    full_at(monkeypatch, "deployments.jsonl")
    with pytest.raises(StorageError, match=r"current: points to 1-\S+ now, but .* cannot be written .No space left"):
        deploy_to(project, served, back)
    assert (content(served), content(served, "previous")) == ("a", "b")
    full_at(monkeypatch, "nothing")
    result = deploy_to(project, served, back)
    assert result.status == "rollback_finished"
    assert "is current again in" in format_deployment(result)
    assert (content(served), content(served, "previous")) == ("a", "b")
    assert [(e["action"], e["version"]) for e in history(served)] == [("deploy", 1), ("deploy", 2), ("rollback", 1)]
    deploy_to(project, served, back)
    assert content(served) == "b"
    (served / ".rollback.json").write_text("{")
    with pytest.raises(DamagedFileError, match=r"\.rollback\.json: not a rollback record .*; remove it"):
        deploy_to(project, served, back)


def test_a_deployment_whose_history_cannot_be_written_reports_that_it_is_current(
    project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote_fake_model(project, "a")
    with monkeypatch.context() as patched:
        full_at(patched, "deployments.jsonl")
        with pytest.raises(StorageError, match=r"current: points to 1-\S+ now"):
            deploy_to(project, served)
    assert content(served) == "a"
    assert "already" in format_deployment(deploy_to(project, served))
    assert [entry["action"] for entry in history(served)] == ["deploy"]


def test_a_model_of_an_earlier_version(project: ProjectLayout, served: Path) -> None:
    source = project.root / "made"
    (source / "hf").mkdir(parents=True)
    (source / "hf" / "config.json").write_text("{}\n")
    with pytest.raises(DamagedFileError, match=r"config\.json: expected a model's config"):
        store_fake_model(project, source, ())
    (source / "hf" / "config.json").write_text('{"n_positions": 64}')
    bundle = store_fake_model(project, source, ())
    assert bundle.artifacts == ()
    make_champion(project, bundle.model_digest)
    with pytest.raises(SettingsError, match="an earlier version exported it"):
        deploy_to(project, served)


def test_a_directory_without_a_card_of_all_formats(project: ProjectLayout, served: Path) -> None:
    """A model promoted by an earlier version has only the card of the Hugging Face format. Another format must not
    get this card."""
    folder = project.promoted_model(promote_fake_model(project, "a").model_digest)
    rebuild(
        folder, SIGNATURE, "README.md", then=lambda scratch: signature.sign_folder(scratch, keys.load_signer(project))
    )
    deploy_to(project, served)
    assert not (served / "current" / "README.md").exists()
    deploy_to(project, served, DeployOptions(format="hf", smoke_test=False))
    assert (served / "current" / "hf" / "README.md").read_text() == "# a\n"
    assert check_release(project, served / "current").artifact_name == "hf"


def test_a_ledger_and_champion_file_that_disagree_are_refused(project: ProjectLayout, served: Path) -> None:
    promote_fake_model(project, "a")
    one = project.champion.read_bytes()
    promote_fake_model(project, "b")
    assert len(ledger.read_entries(project.promotions)) == 2
    project.champion.write_bytes(one)
    assert read_champion(project.champion).champion is not None
    with pytest.raises(DamagedFileError, match="earlier commit"):
        deploy_to(project, served)
