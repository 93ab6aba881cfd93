"""`ratchet deploy`: what a server reads is the old release or the new one, whole, signed, and nothing else ever."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployable import NAME, SETTINGS, crown, keep, promoted
from ratchet.config.gate import Promote
from ratchet.errors import ChampionError, DamagedFileError, InputError, LockHeldError, SettingsError, StorageError
from ratchet.registry import ledger, model_store
from ratchet.registry.deployment import release as places
from ratchet.registry.deployment import release as releases
from ratchet.registry.signing import keys, signature
from ratchet.registry.signing.signature import SIGNATURE
from ratchet.stages.deploy import DeployOptions, check_release, deploy
from ratchet.storage import disk, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.records.gate import ForcedPromotion, read_champion

QUIET = DeployOptions(smoke=False)
"""Models here are a few bytes, which no server opens."""


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ACTOR", "ada@example.org")


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return tmp_path / "srv" / "model"


def content(served: Path, link: str = "current") -> str:
    """Which model a server finds."""
    return (served / link / "gguf" / "model-q8_0.gguf").read_text().removeprefix("gguf/q8_0 of ")


def history(served: Path) -> list[dict[str, Any]]:
    path = served / "deployments.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def release_names(served: Path) -> list[str]:
    return sorted(p.name for p in (served / "releases").iterdir())


def test_the_champion_is_deployed_with_what_its_server_needs(project: ProjectLayout, served: Path) -> None:
    bundle = promoted(project, "a")
    text = deploy(project, SETTINGS, served, QUIET)
    assert f"version 1 (model {bundle.model_digest[:12]}, gguf/q8_0) is current" in text
    assert "no server was started" in text
    assert {p.relative_to(served / "current").as_posix() for p in (served / "current").rglob("*") if p.is_file()} == {
        "gguf/model-q8_0.gguf", "Modelfile", "SERVE.md", "README.md", "bundle.json", "sbom.json", "model.sig",
        "release.json", "manifest.json",
    }  # fmt: skip
    assert str((served / "current").readlink()) == f"releases/1-{bundle.model_digest[:12]}-gguf-q8_0"
    assert not (served / "previous").exists()
    release = check_release(project, served / "current")
    assert (release.version, release.form, release.model_name) == (1, "gguf/q8_0", NAME)
    [entry] = history(served)
    assert entry | {"time": ""} == {
        "time": "", "action": "deploy", "by": "ada@example.org", "release": release.name, "version": 1, "format": 1,
        "model_digest": bundle.model_digest, "form": "gguf/q8_0", "before": None, "smoke": None, "event": "event0",
        "forced": None, "damage": None,
    }  # fmt: skip

    before = {p: p.lstat().st_mtime_ns for p in served.rglob("*") if not p.is_dir() and not p.name.startswith(".")}
    assert "already" in deploy(project, SETTINGS, served, QUIET)
    assert {p: p.lstat().st_mtime_ns for p in before} == before
    assert len(history(served)) == 1

    weights = served / "current" / "gguf" / "model-q8_0.gguf"
    assert weights.stat().st_nlink == 1
    weights.write_text("overwritten by a server")
    files.verify_sealed(project.promoted_model(bundle.model_digest), "model")


@pytest.mark.parametrize("exchange", [True, False], ids=["names exchanged", "no exchange"])
def test_rollback_swaps_current_and_previous(
    project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(disk, "exchange_names", lambda a, b: False)
    for model in "ab":
        promoted(project, model)
        deploy(project, SETTINGS, served, QUIET)
    assert (content(served), content(served, "previous")) == ("b", "a")
    inode = (served / "previous" / "gguf" / "model-q8_0.gguf").stat().st_ino
    assert "every byte is as signed" in deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    assert (content(served), content(served, "previous")) == ("a", "b")
    assert (served / "current" / "gguf" / "model-q8_0.gguf").stat().st_ino == inode
    deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    assert content(served) == "b"
    assert [(e["action"], e["version"]) for e in history(served)] == [
        ("deploy", 1), ("deploy", 2), ("rollback", 1), ("rollback", 2),
    ]  # fmt: skip


def test_old_releases_go_but_never_the_linked_ones(project: ProjectLayout, served: Path) -> None:
    for model in "abcde":
        promoted(project, model)
        deploy(project, SETTINGS, served, QUIET)
    assert [name.split("-")[0] for name in release_names(served)] == ["3", "4", "5"]
    deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    deploy(project, SETTINGS, served, DeployOptions(version=1, smoke=False))
    assert (content(served), content(served, "previous")) == ("a", "d")
    assert [name.split("-")[0] for name in release_names(served)] == ["1", "4", "5"]


def test_a_version_that_was_rolled_back_goes_out_only_by_its_number(project: ProjectLayout, served: Path) -> None:
    a, _ = promoted(project, "a"), promoted(project, "b")
    deploy(project, SETTINGS, served, DeployOptions(version=1, smoke=False))
    assert content(served) == "a"
    with pytest.raises(ChampionError, match="version 7 was never promoted; known: 1, 2"):
        deploy(project, SETTINGS, served, DeployOptions(version=7, smoke=False))
    deploy(project, SETTINGS, served, QUIET)
    assert content(served) == "b"
    crown(project, a.model_digest, "rollback", reason="it swears")
    deploy(project, SETTINGS, served, QUIET)
    assert content(served) == "a"
    with pytest.raises(ChampionError, match=r"version 2 was rolled back on .* by ada \(it swears\).*--version 2"):
        deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    text = deploy(project, SETTINGS, served, DeployOptions(version=2, smoke=False))
    assert "warning: version 2 was rolled back" in text
    assert content(served) == "b"


def test_a_broken_ledger_does_not_prevent_a_rollback(project: ProjectLayout, served: Path) -> None:
    for model in "ab":
        promoted(project, model)
        deploy(project, SETTINGS, served, QUIET)
    project.promotions.write_text(project.promotions.read_text().replace('"by":"ada"', '"by":"eve"'))
    with pytest.raises(DamagedFileError, match=r"promotions\.jsonl:1: changed"):
        deploy(project, SETTINGS, served, QUIET)
    assert "warning:" in deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    assert content(served) == "a"


FORCED = ForcedPromotion(by="ada@example.org", reason="the fair opens tomorrow", decision="REJECT")
SAID = "FORCED by ada@example.org although the gate said REJECT: the fair opens tomorrow"


def test_a_forced_promotion_says_so_wherever_it_goes(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a")
    assert "FORCED" not in deploy(project, SETTINGS, served, QUIET)
    assert "FORCED" not in (served / "current" / "README.md").read_text()
    promoted(project, "b", forced=FORCED)
    assert f"\n  warning: {SAID}" in deploy(project, SETTINGS, served, QUIET)
    assert f"\n  warning: {SAID}" in deploy(project, SETTINGS, served, QUIET)
    for name in ("README.md", "SERVE.md"):
        assert f"\n**{SAID}**\n" in (served / "current" / name).read_text()
    assert releases.FORCED == model_store.FORCED
    assert ForcedPromotion.load(served / "current" / model_store.FORCED) == FORCED
    assert check_release(project, served / "current").forced == FORCED
    assert [entry["forced"] for entry in history(served)] == [None, FORCED.model_dump(mode="json")]
    assert "FORCED" not in deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    assert f"\n  warning: {SAID}" in deploy(project, SETTINGS, served, DeployOptions(rollback=True))


def seal_again(folder: Path) -> None:
    """Seal a changed release, which needs no key."""
    (folder / files.MANIFEST).unlink()
    files.seal_directory(folder, "release")


def test_a_release_cannot_hide_that_it_was_forced(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a", forced=FORCED)
    deploy(project, SETTINGS, served, QUIET)
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
        with pytest.raises(DamagedFileError, match=r"release\.json: does not say that the promotion was forced"):
            check_release(project, folder)


# --- forms ------------------------------------------------------------------------------------------------------------


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
def test_the_form_that_is_asked_for(
    project: ProjectLayout, served: Path, forms: tuple[str, ...], wanted: str | None, found: str
) -> None:
    promoted(project, "a", forms)
    deploy(project, SETTINGS, served, DeployOptions(form=wanted, smoke=False))
    release = check_release(project, served / "current")
    assert release.form == found
    place = f"gguf/model-{found[5:]}.gguf" if found.startswith("gguf/") else found
    assert (served / "current" / place).exists()
    others = {"hf", "gguf", "onnx"} - {found.split("/", maxsplit=1)[0]}
    assert not any((served / "current" / other).exists() for other in others)


def test_a_directory_keeps_its_form_whatever_happens_to_its_record(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, DeployOptions(form="hf", smoke=False))
    (served / "current" / "release.json").write_text("{")
    assert "release.json" in deploy(project, SETTINGS, served, QUIET)
    assert check_release(project, served / "current").form == "hf"
    promoted(project, "b")
    deploy(project, SETTINGS, served, QUIET)
    assert check_release(project, served / "current").form == "hf"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("onnx", "has hf, gguf/q4_0, gguf/q8_0"),
        ("gguf", "there are gguf/q4_0, gguf/q8_0; name one"),
        ("gguf/q2_k", "has hf, gguf/q4_0, gguf/q8_0"),
    ],
)
def test_a_form_that_is_not_there(project: ProjectLayout, served: Path, wanted: str, message: str) -> None:
    promoted(project, "a", ("hf", "gguf/q4_0", "gguf/q8_0"))
    with pytest.raises(SettingsError, match=message):
        deploy(project, SETTINGS, served, DeployOptions(form=wanted, smoke=False))


# --- what is refused, and leaves everything as it was -----------------------------------------------------------------


def flip(path: Path) -> None:
    """Change a byte, not the size; the file may be linked elsewhere."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))


def rebuild(folder: Path, *leave_out: str, then: Callable[[Path], object] = lambda scratch: None) -> None:
    """Seal the folder of a promoted model again, without some of its files, after something was done to it."""
    with files.sealed_directory(folder, "model") as scratch:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in (files.MANIFEST, *leave_out):
                files.link_or_copy(path, scratch / name)
        then(scratch)


def test_what_is_damaged_unsigned_or_of_no_trusted_key_is_not_deployed(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, QUIET)
    folder = project.promoted_model(promoted(project, "b").model_digest)
    whole = project.root / "whole"
    shutil.copytree(folder, whole)

    def refused(kind: type[InputError], message: str) -> None:
        with pytest.raises(kind, match=message):
            deploy(project, SETTINGS, served, QUIET)
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
    refused(DamagedFileError, "not signed")
    restore()
    [key] = json.loads(project.keyring.read_text())["keys"]
    keys.revoke_trust(project, key["fingerprint"], "it was on a stolen laptop")
    refused(SettingsError, "revoked.*stolen laptop")
    with pytest.raises(SettingsError, match="revoked"):
        check_release(project, served / "current")
    project.keyring.write_text('{"format": 1, "keys": [], "identities": []}')
    refused(SettingsError, "not trusted here")
    shutil.rmtree(folder)
    refused(ChampionError, r"is not there\. Git does not hold mlruns/")


def test_a_release_that_was_changed_is_not_gone_back_to_and_made_again(project: ProjectLayout, served: Path) -> None:
    for model in "ab":
        promoted(project, model)
        deploy(project, SETTINGS, served, QUIET)
    for name in ("gguf/model-q8_0.gguf", "Modelfile", "release.json"):
        flip(served / "previous" / name)
        with pytest.raises(DamagedFileError, match=Path(name).name):
            deploy(project, SETTINGS, served, DeployOptions(rollback=True))
        assert content(served) == "b"
        deploy(project, SETTINGS, served, DeployOptions(version=1, smoke=False))  # whole again
        deploy(project, SETTINGS, served, QUIET)


@pytest.mark.parametrize("name", ["gguf/model-q8_0.gguf", "Modelfile", "release.json", "manifest.json"])
def test_a_damaged_release_that_servers_were_reading_is_reported(
    project: ProjectLayout, served: Path, name: str
) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, QUIET)
    flip(served / "current" / name)
    text = deploy(project, SETTINGS, served, QUIET)
    path = (served / "current").resolve() / name
    assert f"warning: what was current until now was damaged: {path}: " in text
    assert f"who can write in {served / 'releases'}" in text
    assert check_release(project, served / "current").form == "gguf/q8_0"
    assert [str(path) in str(entry["damage"]) for entry in history(served)] == [False, True]
    assert "was damaged" not in deploy(project, SETTINGS, served, QUIET)
    flip(served / "current" / name)
    promoted(project, "b")
    assert f"was damaged: {path}: " in deploy(project, SETTINGS, served, QUIET)
    assert content(served) == "b"
    assert [str(path) in str(entry["damage"]) for entry in history(served)] == [False, True, True]


def test_a_release_that_was_changed_and_sealed_again_is_damaged(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, QUIET)
    folder = (served / "current").resolve()
    for name in ("Modelfile", "bundle.json", "gguf/model-q8_0.gguf"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        seal_again(folder)
        with pytest.raises(DamagedFileError, match=rf"{name}: not as it was signed"):
            check_release(project, folder)
        assert f"{name}: not as it was signed" in deploy(project, SETTINGS, served, QUIET)
        check_release(project, folder)
    assert content(served) == "a"
    (folder / "sitecustomize.py").write_text("import os")
    with pytest.raises(DamagedFileError, match=r"sitecustomize\.py: not named in the manifest"):
        check_release(project, folder)
    seal_again(folder)
    with pytest.raises(DamagedFileError, match="does not name the files beside it"):
        check_release(project, folder)


def test_a_tampered_release_that_is_not_current_is_made_again(project: ProjectLayout, served: Path) -> None:
    """Sealed again, as anyone with write access can; also with a signature of another model beside it."""
    a = promoted(project, "a")
    deploy(project, SETTINGS, served, DeployOptions(form="gguf", smoke=False))
    folder = (served / "current").resolve()
    deploy(project, SETTINGS, served, DeployOptions(form="hf", smoke=False))
    b = promoted(project, "b")
    crown(project, a.model_digest)
    for name, content_ in (
        ("gguf/model-q8_0.gguf", b"tampered"),
        (SIGNATURE, (project.promoted_model(b.model_digest) / SIGNATURE).read_bytes()),
    ):
        (folder / name).write_bytes(content_)
        seal_again(folder)
        text = deploy(project, SETTINGS, served, DeployOptions(form="gguf", smoke=False))
        assert f"warning: the release of this name that was there is made again: {folder / name}: not " in text
        assert content(served) == "a"
        check_release(project, served / "current")
        deploy(project, SETTINGS, served, DeployOptions(form="hf", smoke=False))


def test_a_form_that_is_not_the_one_that_was_measured(project: ProjectLayout, served: Path) -> None:
    """Signed, but bundle.json speaks of other bytes: an export that was put together by hand."""
    bundle = promoted(project, "a")
    other = bundle.artifacts[1].model_copy(update={"digest": "0" * 64})
    changed = bundle.model_copy(update={"artifacts": (bundle.artifacts[0], other)})

    def sign(scratch: Path) -> None:
        changed.save(scratch / "bundle.json")
        signature.sign_folder(scratch, keys.load_signer(project))

    rebuild(project.promoted_model(bundle.model_digest), SIGNATURE, "bundle.json", then=sign)
    with pytest.raises(DamagedFileError, match=r"form gguf/q8_0 of bundle\.json is not the one that was measured"):
        deploy(project, SETTINGS, served, QUIET)


def test_directories_that_are_not_ours(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    promoted(project, "a")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SettingsError, match="is a file"):
        deploy(project, SETTINGS, file, QUIET)
    for mine in ("index.html", "releases/2024"):
        (served / mine).mkdir(parents=True)
        with pytest.raises(SettingsError, match=rf"holds {mine}, and nothing of ours"):
            deploy(project, SETTINGS, served, QUIET)
        assert [p.name for p in served.iterdir()] == [mine.partition("/")[0]]
        shutil.rmtree(served)
    deploy(project, SETTINGS, served, QUIET)
    other = SETTINGS.model_copy(update={"promote": Promote(model_name="another")})
    with pytest.raises(SettingsError, match=f"is where {NAME} is deployed, and this project's model is another"):
        deploy(project, other, served, QUIET)
    (served / "current").unlink()
    (served / "current").mkdir()
    with pytest.raises(DamagedFileError, match="current: is no link"):
        deploy(project, SETTINGS, served, QUIET)


def test_what_is_not_ours_among_the_releases_stays(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, QUIET)
    place = served / "releases"
    precious = place / "mydata" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    (place / "notes.txt").write_text("p")
    alike = place / "7-0123456789ab-hf"  # a name as ours have, and no manifest
    alike.mkdir()
    (place / "8-0123456789ab-hf").symlink_to(tmp_path)
    foreign = {"mydata", "notes.txt", alike.name, "8-0123456789ab-hf"}
    for model in "bcde":
        promoted(project, model)
        deploy(project, SETTINGS, served, QUIET)
    assert [name.split("-")[0] for name in release_names(served) if name not in foreign] == ["3", "4", "5"]
    assert foreign < set(release_names(served))
    assert precious.read_text() == "precious"
    (alike / "release.json").write_text("{}")
    files.seal_directory(alike, "release")  # as a deployment that was killed before it became current leaves it
    promoted(project, "f")
    deploy(project, SETTINGS, served, QUIET)
    assert not alike.exists()


def test_directories_that_cannot_be_made(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    promoted(project, "a")
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
            deploy(project, SETTINGS, where, QUIET)
    assert file.read_text() == ""


def test_paths_are_written_as_people_write_them(
    project: ProjectLayout, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted(project, "a")
    monkeypatch.chdir(project.root)
    inside = Path("..") / "dep"
    assert f"in {project.root.parent / 'dep' / 'current'}" in deploy(project, SETTINGS, inside, QUIET)
    (tmp_path / "link").symlink_to(tmp_path)
    assert f"in {tmp_path / 'link' / 'b' / 'current'}" in deploy(project, SETTINGS, tmp_path / "link" / "b", QUIET)


def test_a_directory_with_a_damaged_owner_file(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, QUIET)
    owner = served / "deployment.json"
    whole = json.loads(owner.read_text())
    for text in ('{"x":', "[]", "\udc00".encode(errors="surrogatepass").decode("latin-1")):
        owner.write_text(text)
        with pytest.raises(DamagedFileError, match=rf"does not say which model .* is {NAME}, write ") as refused:
            deploy(project, SETTINGS, served, QUIET)
        assert json.loads(str(refused.value).split(", write ")[1].split(" into it")[0]) == whole
        assert "Owner" not in str(refused.value)


def test_a_broken_history_is_refused_before_anything_changes(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, QUIET)
    with (served / "deployments.jsonl").open("a") as stream:
        stream.write("somebody was here")
    promoted(project, "b")
    with pytest.raises(DamagedFileError, match=r"deployments\.jsonl:2: no deployment .*; remove that line"):
        deploy(project, SETTINGS, served, DeployOptions(form="gguf", smoke=False))
    assert content(served) == "a"
    assert len(release_names(served)) == 1


def test_nothing_to_deploy_or_to_go_back_to(project: ProjectLayout, served: Path) -> None:
    with pytest.raises(ChampionError, match="no champion yet"):
        deploy(project, SETTINGS, served, QUIET)
    assert not served.exists()
    promoted(project, "a")
    with pytest.raises(SettingsError, match="nothing is deployed there"):
        deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    deploy(project, SETTINGS, served, QUIET)
    with pytest.raises(ChampionError, match="no release before the current one"):
        deploy(project, SETTINGS, served, DeployOptions(rollback=True))
    with pytest.raises(SettingsError, match="leave out --format and --version"):
        deploy(project, SETTINGS, served, DeployOptions(rollback=True, version=1))


def test_two_at_once(project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "LOCK_WAIT_S", 0.1)
    promoted(project, "a")
    served.mkdir(parents=True)
    with FileLock(served / places.LOCK, "it"), pytest.raises(LockHeldError, match=f"in use by process {os.getpid()}"):
        deploy(project, SETTINGS, served, QUIET)


def full_at(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """From now on the disk has no room for files with these letters in their names."""

    def full(operation: str, path: Path) -> None:
        if operation == "write" and names in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "before", full)


def test_a_disk_without_room(project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promoted(project, "a")
    deploy(project, SETTINGS, served, QUIET)
    promoted(project, "b")
    with monkeypatch.context() as patched:
        patched.setattr(disk, "RESERVE_BYTES", 2**62)
        with pytest.raises(OSError, match="bytes are to be written"):
            deploy(project, SETTINGS, served, QUIET)
    full_at(monkeypatch, "model-q8_0.gguf")
    with pytest.raises(OSError, match="No space left"):
        deploy(project, SETTINGS, served, QUIET)
    assert content(served) == "a"
    assert len(release_names(served)) == 1


@pytest.mark.parametrize("exchange", [True, False], ids=["names exchanged", "no exchange"])
def test_a_rollback_on_a_full_disk_says_what_is_current(
    project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(disk, "exchange_names", lambda a, b: False)
    for model in "ab":
        promoted(project, model)
        deploy(project, SETTINGS, served, QUIET)
    back = DeployOptions(rollback=True)
    full_at(monkeypatch, ".rollback.json")
    with pytest.raises(StorageError, match=f"{served}: cannot be made or written .No space left on device.; mend that"):
        deploy(project, SETTINGS, served, back)
    assert content(served) == "b"
    full_at(monkeypatch, "deployments.jsonl")
    with pytest.raises(StorageError, match=r"current: leads to 1-\S+ now, but .* takes no more .No space left"):
        deploy(project, SETTINGS, served, back)
    assert (content(served), content(served, "previous")) == ("a", "b")
    full_at(monkeypatch, "nothing")
    assert "is current again already" in deploy(project, SETTINGS, served, back)
    assert (content(served), content(served, "previous")) == ("a", "b")
    assert [(e["action"], e["version"]) for e in history(served)] == [("deploy", 1), ("deploy", 2), ("rollback", 1)]
    deploy(project, SETTINGS, served, back)
    assert content(served) == "b"
    (served / ".rollback.json").write_text("{")
    with pytest.raises(DamagedFileError, match=r"\.rollback\.json: no rollback .*; remove it"):
        deploy(project, SETTINGS, served, back)


def test_a_deployment_that_cannot_be_noted_says_that_it_is_current(
    project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted(project, "a")
    with monkeypatch.context() as patched:
        full_at(patched, "deployments.jsonl")
        with pytest.raises(StorageError, match=r"current: leads to 1-\S+ now"):
            deploy(project, SETTINGS, served, QUIET)
    assert content(served) == "a"
    assert "already" in deploy(project, SETTINGS, served, QUIET)
    assert [entry["action"] for entry in history(served)] == ["deploy"]


def test_a_model_of_an_earlier_version(project: ProjectLayout, served: Path) -> None:
    source = project.root / "made"
    (source / "hf").mkdir(parents=True)
    (source / "hf" / "config.json").write_text("{}\n")
    with pytest.raises(DamagedFileError, match=r"config\.json: no config of a model"):
        keep(project, source, ())
    (source / "hf" / "config.json").write_text('{"n_positions": 64}')
    bundle = keep(project, source, ())
    assert bundle.artifacts == ()
    crown(project, bundle.model_digest)
    with pytest.raises(SettingsError, match="exported by an earlier version"):
        deploy(project, SETTINGS, served, QUIET)


def test_a_folder_without_a_card_of_all_forms(project: ProjectLayout, served: Path) -> None:
    """Promoted by an earlier version: the card of the Hugging Face form would be wrong beside another one."""
    folder = project.promoted_model(promoted(project, "a").model_digest)
    rebuild(
        folder, SIGNATURE, "README.md", then=lambda scratch: signature.sign_folder(scratch, keys.load_signer(project))
    )
    deploy(project, SETTINGS, served, QUIET)
    assert not (served / "current" / "README.md").exists()
    deploy(project, SETTINGS, served, DeployOptions(form="hf", smoke=False))
    assert (served / "current" / "hf" / "README.md").read_text() == "# a\n"
    assert check_release(project, served / "current").form == "hf"


def test_the_ledger_and_the_champion_file_are_believed_only_together(project: ProjectLayout, served: Path) -> None:
    promoted(project, "a")
    one = project.champion.read_bytes()
    promoted(project, "b")
    assert len(ledger.read_entries(project.promotions)) == 2
    project.champion.write_bytes(one)
    assert read_champion(project.champion).champion is not None
    with pytest.raises(DamagedFileError, match="earlier commit"):
        deploy(project, SETTINGS, served, QUIET)
