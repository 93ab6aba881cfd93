"""`ratchet keys`: who may sign, seen and changed."""

from pathlib import Path

import pytest

from ratchet.errors import SettingsError
from ratchet.registry.signing import keys as keyring
from ratchet.registry.signing import keys as pairs
from ratchet.stages.keys import KeysOptions, keys
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pairs.KEY_VARIABLE, raising=False)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A colleague's public key."""
    key = pairs.create_key_pair(ProjectLayout(tmp_path / "other"))
    path = tmp_path / "colleague.pem"
    path.write_text(key.public)
    return path


def test_no_key_is_trusted_at_first(project: ProjectLayout) -> None:
    assert keys(project) == "no key is trusted yet; the first promotion makes one, or `ratchet keys --new`"
    assert not project.keyring.exists()


def test_keys_come_are_listed_and_go(project: ProjectLayout, elsewhere: Path) -> None:
    made = keys(project, KeysOptions(new=True)).splitlines()
    (own,) = keyring.read_keyring(project.keyring).keys
    assert made[0].startswith(f"key {own.fingerprint[:16]} is made and trusted; commit .ratchet/keys.json")
    assert made[1:] == [f"key {own.fingerprint[:16]}  trusted  (yours)"]
    told = keys(project, KeysOptions(trust=elsewhere)).splitlines()
    other = keyring.read_public_key(elsewhere).fingerprint
    assert told[0] == f"key {other[:16]} is trusted; commit .ratchet/keys.json"
    keys(project, KeysOptions(revoke=other[:10], reason="left"))
    assert sorted(keys(project).splitlines()) == sorted(
        [f"key {own.fingerprint[:16]}  trusted  (yours)", f"key {other[:16]}  revoked: left"]
    )
    with pytest.raises(SettingsError, match=r"was revoked \(left\)"):  # nothing takes that back in passing
        keys(project, KeysOptions(trust=elsewhere))
    with pytest.raises(SettingsError, match=r"revoked already \(left\)"):
        keys(project, KeysOptions(revoke=other, reason="again"))
    assert f"key {other[:16]}  revoked: left" in keys(project).splitlines()


def test_a_key_that_others_may_read_is_reported(project: ProjectLayout) -> None:
    pairs.create_key_pair(project)
    project.private_key.chmod(0o644)
    assert "no key signs here" in keys(project)
    assert "chmod" in keys(project)


def test_identities_come_are_listed_and_go(project: ProjectLayout) -> None:
    who, issuer = "ann@example.org", "https://accounts.example.org"
    assert f"{who} of {issuer}  trusted" in keys(project, KeysOptions(trust_identity=who, issuer=issuer))
    assert f"{who} is revoked" in keys(project, KeysOptions(revoke=who, reason="left"))
    assert f"{who} of {issuer}  revoked: left" in keys(project)


def test_an_own_key_that_is_not_trusted_is_shown(project: ProjectLayout, elsewhere: Path) -> None:
    pairs.create_key_pair(project)
    project.keyring.unlink()
    keys(project, KeysOptions(trust=elsewhere))
    assert any(line.endswith("not trusted  (yours)") for line in keys(project).splitlines())


WRONG: dict[str, tuple[KeysOptions, str]] = {
    "two at once": (KeysOptions(new=True, revoke="abcdef", reason="x"), "one at a time"),
    "no reason": (KeysOptions(revoke="abcdef"), "belong together"),
    "a reason alone": (KeysOptions(reason="x"), "belong together"),
    "an empty reason": (KeysOptions(revoke="abcdef", reason="  "), "wants a reason"),
    "an unknown fingerprint": (
        KeysOptions(revoke="abcdef", reason="x"),
        r"'abcdef' is no key of this project; known: \w+",
    ),
    "a short fingerprint": (KeysOptions(revoke="", reason="x"), "says too little"),
    "no issuer": (KeysOptions(trust_identity="a@b.c"), "belong together"),
    "an issuer without https": (KeysOptions(trust_identity="a@b.c", issuer="http://x"), "https address"),
    "no file": (KeysOptions(trust=Path("nowhere.pem")), r"nowhere\.pem: cannot be read"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_done_is_said_and_nothing_changes(project: ProjectLayout, what: str) -> None:
    pairs.create_key_pair(project)
    before = project.keyring.read_bytes()
    options, says = WRONG[what]
    with pytest.raises(SettingsError, match=says):
        keys(project, options)
    assert project.keyring.read_bytes() == before


def test_a_file_without_a_public_key_is_refused(project: ProjectLayout, tmp_path: Path) -> None:
    path = tmp_path / "x.pem"
    pairs.create_key_pair(project)
    for content, says in ((b"hello", "holds no public key"), (project.private_key.read_bytes(), "holds a private key")):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=rf"x\.pem: {says}"):
            keys(project, KeysOptions(trust=path))
