"""Tests signatures: the files they cover, their keys, and errors of either."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import signed_folder
from ratchet.errors import DamagedFileError, InputError, SettingsError
from ratchet.registry import keys, signature
from ratchet.registry.signature import SIGNATURE, SignatureVerdict
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout


@pytest.fixture
def signed(project: ProjectLayout, tmp_path: Path) -> Path:
    """Return a folder that the project's key signed."""
    folder = signed_folder.make(tmp_path / "model")
    signature.sign_folder(folder, keys.load_signer(project))
    return folder


def judged(folder: Path, layout: ProjectLayout) -> SignatureVerdict:
    return signature.verify_folder(folder, keys.read_keyring(layout.keyring))


def test_a_signature_is_trusted_lists_all_files_and_does_not_depend_on_the_folder(
    project: ProjectLayout, signed: Path, tmp_path: Path
) -> None:
    found = signature.check_signature(signed, project)
    assert found.signer == keys.own_fingerprint(project)
    assert set(found.files) == {"gruß.txt", "hf-notes.txt", "hf/manifest.json", "hf/model one.safetensors"}
    files.seal_directory(signed, "model")  # the manifest is written after the signature, which does not cover it
    assert signature.check_signature(signed, project) == found
    other = signed_folder.make(tmp_path / ".partial-other-123")
    signature.sign_folder(other, keys.load_signer(project))
    assert (other / SIGNATURE).read_bytes() == (signed / SIGNATURE).read_bytes()
    assert str(tmp_path) not in base64.b64decode(payload(signed)).decode()


def payload(folder: Path) -> str:
    return str(json.loads((folder / SIGNATURE).read_text())["dsseEnvelope"]["payload"])


def test_the_reference_implementation_accepts_our_signatures(
    project: ProjectLayout, signed: Path, tmp_path: Path
) -> None:
    files.seal_directory(signed, "model")
    key = signed_folder.public_key(project, tmp_path / "key.pem")
    asked = ("verify", "key", str(signed), "--signature", str(signed / SIGNATURE), "--public_key", str(key))
    done = signed_folder.model_signing(signed, *asked)
    assert (done.returncode, done.stdout.strip()) == (0, "Verification succeeded"), done.stderr
    (signed / "hf-notes.txt").write_text("m")
    done = signed_folder.model_signing(signed, *asked)
    assert done.returncode == 1
    assert "Hash mismatch for 'hf-notes.txt'" in done.stderr


def test_we_accept_signatures_of_the_reference_implementation(project: ProjectLayout, tmp_path: Path) -> None:
    keys.load_signer(project)
    folder = signed_folder.make(tmp_path / "model")
    out, key = str(folder / SIGNATURE), str(project.private_key)
    done = signed_folder.model_signing(folder, "sign", "key", str(folder), "--private_key", key, "--signature", out)
    assert done.returncode == 0, done.stderr
    assert judged(folder, project).state == "trusted"
    (folder / "late.txt").write_text("x")
    assert judged(folder, project).message.startswith(f"{folder}/late.txt: was added after")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def resign(folder: Path, edit: Callable[[dict[str, object]], None]) -> None:
    value = json.loads((folder / SIGNATURE).read_text())
    edit(value)
    (folder / SIGNATURE).write_text(json.dumps(value))


def in_folder_of_manifest(folder: Path) -> None:
    (folder / "manifest.json").mkdir()
    (folder / "manifest.json" / "hidden.bin").write_text("x")


def other_statement(folder: Path) -> None:
    changed = base64.b64decode(payload(folder)).replace(b"hf-notes.txt", b"hf-other.txt")
    resign(folder, lambda v: v["dsseEnvelope"].update(payload=base64.b64encode(changed).decode()))  # type: ignore[attr-defined]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda f: flip(f / "hf" / "model one.safetensors"), r"hf/model one\.safetensors: changed after"),
    "a file more": (lambda f: (f / "hf" / "x.py").write_text("x"), r"hf/x\.py: was added after the model was signed"),
    "a file that git would ignore": (lambda f: (f / ".gitattributes").write_text("x"), r"\.gitattributes: was added"),
    "a file less": (lambda f: (f / "gruß.txt").unlink(), r"gruß\.txt: missing, although it was signed"),
    "a file renamed": (lambda f: (f / "gruß.txt").rename(f / "gruss.txt"), r"gruss\.txt: was added"),
    "a link to a file": (lambda f: (f / "y").symlink_to(f / "hf-notes.txt"), r"y: found a link; only regular files"),
    "a link to a folder": (lambda f: (f / "y").symlink_to(f / "hf"), r"y: found a link; only regular files"),
    "a pipe": (lambda f: os.mkfifo(f / "y"), r"y: found a special file; only regular files"),
    "a folder where the manifest belongs": (in_folder_of_manifest, r"manifest\.json: found a folder; expected a file"),
    "a statement about other files": (
        other_statement, r"model\.sig: the signature of key \w{16} is invalid: the file was changed",
    ),
    "a cut signature": (lambda f: os.truncate(f / SIGNATURE, 100), r"model\.sig: not a signature"),
    "an empty signature": (lambda f: (f / SIGNATURE).write_text(""), r"model\.sig: not a signature"),
    "a list for a signature": (lambda f: (f / SIGNATURE).write_text("[[]]"), r"model\.sig: not a signature"),
    "bytes that are no text": (lambda f: (f / SIGNATURE).write_bytes(b"\xff\xfe"), r"model\.sig: "),
    "another kind of bundle": (lambda f: resign(f, lambda v: v.update(mediaType="x")), r"this version cannot read"),
    "a signature that is a link": (lambda f: (f / SIGNATURE).rename(f / "s") and (f / SIGNATURE).symlink_to(f / "s"),
                                   r"model\.sig: found a link"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(project: ProjectLayout, signed: Path, damage: str) -> None:
    inflict, says = DAMAGE[damage]
    inflict(signed)
    found = judged(signed, project)
    assert found.state == "damaged"
    with pytest.raises(DamagedFileError, match=says) as raised:
        signature.check_signature(signed, project)
    assert str(raised.value).startswith(str(signed))


def test_every_bit_of_the_signed_statement_counts(project: ProjectLayout, signed: Path) -> None:
    path, good = signed / SIGNATURE, (signed / SIGNATURE).read_text()
    value = json.loads(good)
    content = base64.b64decode(value["dsseEnvelope"]["payload"])
    for place in range(0, len(content), 7):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        value["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
        path.write_text(json.dumps(value))
        assert judged(signed, project).state == "damaged", place


def test_unknown_revoked_and_missing_signatures_are_not_damage(
    project: ProjectLayout, signed: Path, tmp_path: Path
) -> None:
    stranger = ProjectLayout(tmp_path / "elsewhere")
    keys.create_key_pair(stranger)
    name = keys.own_fingerprint(project) or ""
    found = judged(signed, stranger)
    assert (found.state, found.signer) == ("unknown", name)
    with pytest.raises(
        SettingsError, match=rf"signed by key {name[:16]}, which this project does not trust; .*`ratchet keys`"
    ):
        signature.check_signature(signed, stranger)
    keys.revoke_trust(project, name[:8], "laptop  stolen\nin Graz")
    assert judged(signed, project).state == "revoked"
    with pytest.raises(SettingsError, match=rf"signed by key {name[:16]}, which is revoked \(laptop stolen in Graz\)"):
        signature.check_signature(signed, project)
    (signed / SIGNATURE).unlink()
    assert judged(signed, project).state == "unsigned"
    with pytest.raises(DamagedFileError, match=r"model: found no signature \(model.sig\)"):
        signature.check_signature(signed, project)


def test_a_signature_is_not_valid_for_another_key(project: ProjectLayout, signed: Path) -> None:
    """The signature names a trusted key, but another key made it."""
    trusted = keys.own_fingerprint(project)
    keys.revoke_trust(project, str(trusted), "lost")
    keys.create_key_pair(project)
    other = keys.own_fingerprint(project)
    resign(signed, lambda v: v["verificationMaterial"]["publicKey"].update(hint=other))  # type: ignore[index]
    found = judged(signed, project)
    assert (found.state, found.signer) == ("damaged", other)
    assert "is invalid" in found.message


def test_verified_digests_are_not_computed_again(project: ProjectLayout, signed: Path) -> None:
    known = {name: sha for name, (sha, _) in files.seal_directory(signed, "model").files.items()}
    flip(signed / "hf-notes.txt")
    assert (
        signature.verify_folder(signed, keys.read_keyring(project.keyring), known).state == "trusted"
    )  # the caller knows the digest of this file
    known["hf-notes.txt"] = "0" * 64
    assert signature.verify_folder(signed, keys.read_keyring(project.keyring), known).state == "damaged"


def test_the_list_is_read_without_the_files(project: ProjectLayout, signed: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "part"
    elsewhere.mkdir()
    (elsewhere / SIGNATURE).write_bytes((signed / SIGNATURE).read_bytes())
    found = signature.require_trusted(signature.read_signature(elsewhere, keys.read_keyring(project.keyring)))
    assert found == signature.check_signature(signed, project)
    assert judged(elsewhere, project).state == "damaged"


def test_a_link_is_not_signed_and_nothing_is_written(project: ProjectLayout, tmp_path: Path) -> None:
    folder = signed_folder.make(tmp_path / "model")
    (folder / "x").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match=r"x: found a link; only regular files can be signed"):
        signature.sign_folder(folder, keys.load_signer(project))
    assert not (folder / SIGNATURE).exists()
