"""Tests key pairs: they are created once, readable by their owner alone, and only trusted keys sign."""

import json
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from ratchet.errors import DamagedFileError, SettingsError
from ratchet.registry import keys
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)
    monkeypatch.delenv(keys.PASSWORD_VARIABLE, raising=False)


def private_file(
    path: Path, password: bytes | None = None, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | None = None
) -> Path:
    """Write a private key in the format of other tools."""
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private = key or ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, how))
    path.chmod(0o600)
    return path


def public_file(private: Path, password: bytes | None = None) -> Path:
    key = serialization.load_pem_private_key(private.read_bytes(), password)
    path = private.with_suffix(".pub")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return path


def test_a_new_pair_is_private_and_its_fingerprint_is_of_the_public_file(
    project: ProjectLayout, tmp_path: Path
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project.root, check=True)
    key = keys.create_key_pair(project)
    assert stat.S_IMODE(project.private_key.stat().st_mode) == 0o600
    asked = ["git", "ls-files", "--others", "--exclude-standard", ".ratchet"]
    seen = subprocess.run(asked, cwd=project.root, check=True, capture_output=True, text=True).stdout.split()
    assert seen == [".ratchet/.gitignore", ".ratchet/keys.json"]
    assert json.loads(project.keyring.read_text())["keys"] == [
        {"fingerprint": key.fingerprint, "format": 1, "public": key.public, "revoked": None}
    ]
    assert "PRIVATE" not in project.keyring.read_text()
    (tmp_path / "key.pem").write_text(key.public)
    summed = subprocess.run(["sha256sum", str(tmp_path / "key.pem")], check=True, capture_output=True, text=True).stdout
    assert summed.split()[0] == key.fingerprint


def test_a_project_without_keys_gets_one_and_reports_it_once(project: ProjectLayout) -> None:
    assert keys.describe_signer(project).startswith("create a key pair")
    assert not project.keyring.exists()
    first = keys.load_signer(project)
    assert first.notice is not None
    assert f"created the key pair {first.fingerprint[:16]}" in first.notice
    second = keys.load_signer(project)
    assert (second.fingerprint, second.notice) == (first.fingerprint, None)
    assert keys.describe_signer(project) == f"sign the model with key {first.fingerprint[:16]}"


def test_a_clone_without_a_private_key_is_refused_until_it_makes_one(project: ProjectLayout) -> None:
    keys.create_key_pair(project)
    project.private_key.unlink()
    with pytest.raises(SettingsError, match=r"`ratchet keys --new`, then commit keys.json.*RATCHET_SIGNING_KEY"):
        keys.load_signer(project)
    mine = keys.create_key_pair(project)
    assert keys.load_signer(project).fingerprint == mine.fingerprint
    assert len(keys.read_keyring(project.keyring).keys) == 2


@pytest.mark.parametrize("password", [None, b"a long secret"], ids=["plain", "encrypted"])
def test_a_key_from_elsewhere_signs_once_the_project_trusts_it(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: bytes | None
) -> None:
    keys.create_key_pair(project)
    private = private_file(tmp_path / "ours.pem", password, ec.generate_private_key(ec.SECP384R1()))
    monkeypatch.setenv(keys.KEY_VARIABLE, str(private))
    if password:
        monkeypatch.setenv(keys.PASSWORD_VARIABLE, password.decode())
    with pytest.raises(SettingsError, match=r"does not trust key \w{16}; .*openssl pkey -in ours.pem -pubout"):
        keys.load_signer(project)
    trusted = keys.trust_key(project, public_file(private, password))
    assert keys.load_signer(project).fingerprint == trusted.fingerprint
    keys.revoke_trust(project, trusted.fingerprint, "left the company")
    with pytest.raises(SettingsError, match=rf"key {trusted.fingerprint[:16]} is revoked \(left the company\)"):
        keys.load_signer(project)


def test_the_first_named_key_is_trusted(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.KEY_VARIABLE, "-----BEGIN PRIVATE KEY-----\nsecret")
    with pytest.raises(SettingsError, match="found the text of a key; expected the path of a file") as raised:
        keys.load_signer(project)
    assert "secret" not in str(raised.value)
    monkeypatch.setenv(keys.KEY_VARIABLE, str(private_file(tmp_path / "ours.pem")))
    assert keys.describe_signer(project).startswith("trust the key in ")
    told = keys.load_signer(project).notice
    assert told is not None
    assert told.startswith("the project now trusts key ")
    assert keys.load_signer(project).notice is None
    assert not project.private_key.exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_private_key_that_others_can_access_is_refused(project: ProjectLayout, mode: int) -> None:
    keys.create_key_pair(project)
    project.private_key.chmod(mode)
    with pytest.raises(SettingsError, match=rf"other users can read this private key \(mode {mode:o}\).*chmod 600"):
        keys.load_signer(project)


def test_messages_contain_no_password_and_no_key(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = private_file(tmp_path / "ours.pem", b"right horse")
    monkeypatch.setenv(keys.KEY_VARIABLE, str(private))
    said = []
    for given in (None, "", "wrong horse"):
        if given is not None:
            monkeypatch.setenv(keys.PASSWORD_VARIABLE, given)
        with pytest.raises(SettingsError, match=r"ours\.pem: .*RATCHET_SIGNING_PASSWORD") as raised:
            keys.load_signer(project)
        said.append(str(raised.value))
    lines = private.read_text().splitlines()[1:-1]
    assert not any(word in text for text in said for word in ("horse", *lines))


def text_file(path: Path) -> Path:
    path.write_text("no key")
    path.chmod(0o600)
    return path


OTHER_KIND = ed25519.Ed25519PrivateKey.generate()
OTHER_CURVE = ec.generate_private_key(ec.SECP256K1())
WRONG = {
    "absent": (lambda path: path, r"cannot be read \(No such file"),
    "a folder": (lambda path: path.mkdir(0o700) or path, r"cannot be read \(Is a directory"),
    "a text": (text_file, "expected a private key in PEM format"),
    "another kind of key": (lambda path: private_file(path, None, OTHER_KIND), "expected an elliptic-curve key"),
    "another curve": (lambda path: private_file(path, None, OTHER_CURVE), "expected an elliptic-curve key"),
}


@pytest.mark.parametrize("what", WRONG)
def test_unusable_keys_are_refused(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    make, says = WRONG[what]
    monkeypatch.setenv(keys.KEY_VARIABLE, str(make(tmp_path / "x.pem")))
    with pytest.raises(SettingsError, match=rf"x\.pem: .*{says}"):
        keys.load_signer(project)
    assert not project.keyring.exists()


def test_a_trusted_key_is_not_replaced_but_a_revoked_one_is(project: ProjectLayout) -> None:
    first = keys.create_key_pair(project)
    with pytest.raises(SettingsError, match=r"found the trusted key .*`ratchet keys --revoke"):
        keys.create_key_pair(project)
    assert keys.load_signer(project).fingerprint == first.fingerprint
    keys.revoke_trust(project, first.fingerprint[:6], "too old")
    second = keys.create_key_pair(project)
    assert keys.load_signer(project).fingerprint == second.fingerprint != first.fingerprint
    known = keys.read_keyring(project.keyring)
    assert {key.fingerprint: key.revoked for key in known.keys} == {
        first.fingerprint: "too old", second.fingerprint: None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("fingerprint", "f" * 64), "fingerprint f{16} does not match its public key"),
        (("public", "no key"), "expected a public key in PEM format"),
        (("revoked", 1), "not a Keyring"),
    ],
    ids=["fingerprint", "key", "type"],
)
def test_a_keyring_that_was_edited_is_refused(project: ProjectLayout, edit: tuple[str, object], says: str) -> None:
    keys.create_key_pair(project)
    value = json.loads(project.keyring.read_text())
    value["keys"][0][edit[0]] = edit[1]
    project.keyring.write_text(json.dumps(value))
    with pytest.raises(DamagedFileError, match=rf"keys\.json: .*{says}"):
        keys.load_signer(project)


def test_keys_json_does_not_depend_on_the_order_of_trust(project: ProjectLayout, tmp_path: Path) -> None:
    publics = [public_file(private_file(tmp_path / f"{n}.pem")) for n in range(3)]
    other = ProjectLayout(tmp_path / "other")
    for path in publics:
        keys.trust_key(project, path)
    for path in reversed(publics):
        keys.trust_key(other, path)
    assert project.keyring.read_bytes() == other.keyring.read_bytes()
