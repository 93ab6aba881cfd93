"""Tests of `ratchet keys`, which lists and changes the trusted keys."""

from pathlib import Path

import pytest

from ratchet.cli.keys import format_keys
from ratchet.cli.main import main
from ratchet.errors import SettingsError
from ratchet.registry import keys as signing_keys
from ratchet.stages.keys import KeyringChange, KeyringReport, KeysOptions, keys
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signing_keys.KEY_VARIABLE, raising=False)


@pytest.fixture
def colleague_key(tmp_path: Path) -> Path:
    """Create a colleague's public key; return its path."""
    key = signing_keys.create_key_pair(ProjectLayout(tmp_path / "other"))
    path = tmp_path / "colleague.pem"
    path.write_text(key.public)
    return path


def test_no_key_is_trusted_at_first(project: ProjectLayout) -> None:
    text = "no key is trusted yet; the first promotion or `ratchet keys --new` creates one"
    assert format_keys(keys(project)) == text
    assert not project.keyring.exists()


def test_keys_are_created_trusted_listed_and_revoked(project: ProjectLayout, colleague_key: Path) -> None:
    report = keys(project, KeysOptions(new=True))
    made = format_keys(report).splitlines()
    (own,) = signing_keys.read_keyring(project.keyring).keys
    assert report.change == KeyringChange(action="created", key=own.fingerprint)
    assert (report.own_key, report.own_key_problem) == (own.fingerprint, None)
    assert made[0].startswith(f"key {own.fingerprint[:16]} is created and trusted; commit .ratchet/keys.json")
    assert made[1:] == [f"key {own.fingerprint[:16]}  trusted  (yours)"]
    told = format_keys(keys(project, KeysOptions(trust=colleague_key))).splitlines()
    other = signing_keys.read_public_key(colleague_key).fingerprint
    assert told[0] == f"key {other[:16]} is trusted; commit .ratchet/keys.json"
    keys(project, KeysOptions(revoke=other[:10], reason="left"))
    assert sorted(format_keys(keys(project)).splitlines()) == sorted(
        [f"key {own.fingerprint[:16]}  trusted  (yours)", f"key {other[:16]}  revoked: left"]
    )
    with pytest.raises(SettingsError, match=r"was revoked \(left\)"):  # --trust does not undo a revocation
        keys(project, KeysOptions(trust=colleague_key))
    with pytest.raises(SettingsError, match=r"is already revoked \(left\)"):
        keys(project, KeysOptions(revoke=other, reason="again"))
    assert f"key {other[:16]}  revoked: left" in format_keys(keys(project)).splitlines()


def test_the_command_prints_the_record_as_json(project: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--project", str(project.root), "keys", "--new", "--json"]) == 0
    assert KeyringReport.model_validate_json(capsys.readouterr().out).own_key == signing_keys.own_fingerprint(project)


def test_a_key_that_others_may_read_is_reported(project: ProjectLayout) -> None:
    signing_keys.create_key_pair(project)
    project.private_key.chmod(0o644)
    report = keys(project)
    assert report.own_key is None
    assert "chmod" in str(report.own_key_problem)
    assert "no key can sign on this machine" in format_keys(report)


def test_identities_are_trusted_listed_and_revoked(project: ProjectLayout) -> None:
    who, issuer = "ann@example.org", "https://accounts.example.org"
    assert f"{who} of {issuer}  trusted" in format_keys(keys(project, KeysOptions(trust_identity=who, issuer=issuer)))
    report = keys(project, KeysOptions(revoke=who, reason="left"))
    assert report.change == KeyringChange(action="revoked", identity=who)
    assert f"{who} is revoked" in format_keys(report)
    assert f"{who} of {issuer}  revoked: left" in format_keys(keys(project))


def test_the_machines_key_is_listed_even_if_it_is_not_trusted(project: ProjectLayout, colleague_key: Path) -> None:
    signing_keys.create_key_pair(project)
    project.keyring.unlink()
    keys(project, KeysOptions(trust=colleague_key))
    assert any(line.endswith("not trusted  (yours)") for line in format_keys(keys(project)).splitlines())


WRONG: dict[str, tuple[KeysOptions, str]] = {
    "two at once": (KeysOptions(new=True, revoke="abcdef", reason="x"), "give only one of"),
    "no reason": (KeysOptions(revoke="abcdef"), "belong together"),
    "a reason alone": (KeysOptions(reason="x"), "belong together"),
    "an empty reason": (KeysOptions(revoke="abcdef", reason="  "), "found no reason"),
    "an unknown fingerprint": (
        KeysOptions(revoke="abcdef", reason="x"),
        r"'abcdef' matches no key of this project; known keys: \w+",
    ),
    "a short fingerprint": (KeysOptions(revoke="", reason="x"), "too short to identify a key"),
    "no issuer": (KeysOptions(trust_identity="a@b.c"), "belong together"),
    "an issuer without https": (KeysOptions(trust_identity="a@b.c", issuer="http://x"), "https address"),
    "no file": (KeysOptions(trust=Path("nowhere.pem")), r"nowhere\.pem: cannot be read"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_options_are_refused_and_nothing_changes(project: ProjectLayout, what: str) -> None:
    signing_keys.create_key_pair(project)
    before = project.keyring.read_bytes()
    options, says = WRONG[what]
    with pytest.raises(SettingsError, match=says):
        keys(project, options)
    assert project.keyring.read_bytes() == before


def test_a_file_without_a_public_key_is_refused(project: ProjectLayout, tmp_path: Path) -> None:
    path = tmp_path / "x.pem"
    signing_keys.create_key_pair(project)
    for content, says in (
        (b"hello", "expected a public key in PEM format"),
        (project.private_key.read_bytes(), "found a private key"),
    ):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=rf"x\.pem: {says}"):
            keys(project, KeysOptions(trust=path))
