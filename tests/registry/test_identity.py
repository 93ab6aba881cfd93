"""Tests signatures through sigstore without its servers: refusals and their messages.

A signature of sigstore's public instance needs its servers, so no test makes one.
"""

import base64
import json
import time
from pathlib import Path

import pytest

import signed_folder
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.registry import keys, signature
from ratchet.storage.layout import ProjectLayout

WHO, ISSUER = "ann@example.org", "https://accounts.example.org"


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SIGSTORE_ID_TOKEN", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "BUILDKITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # sigstore keeps its trust roots in this directory


def token(**claims: object) -> str:
    """Return a token with an invalid signature; only sigstore's authority would check it."""
    now = int(time.time())
    plain = {"aud": "sigstore", "iss": ISSUER, "sub": WHO, "email": WHO, "iat": now, "exp": now + 600}
    parts = [{"alg": "HS256", "typ": "JWT"}, plain | claims]
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts), "c2ln"])


def test_without_a_trusted_identity_the_error_names_the_command(project: ProjectLayout) -> None:
    with pytest.raises(SettingsError, match=r"`ratchet keys --trust-identity IDENTITY --issuer URL`"):
        signature.load_identity_signer(project)
    keys.trust_identity(project, WHO, ISSUER)
    keys.revoke_trust(project, WHO, "left")
    with pytest.raises(SettingsError, match="trusts no identity"):
        signature.load_identity_signer(project)


@pytest.mark.parametrize("given", ["none", "garbage", "expired", "for another service"])
def test_an_unusable_token_is_refused_and_not_shown(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    keys.trust_identity(project, WHO, ISSUER)
    made = {
        "garbage": "hunter22", "expired": token(iat=1, exp=2), "for another service": token(aud="another.example.org"),
    }.get(given)  # fmt: skip
    if made is not None:
        monkeypatch.setenv("SIGSTORE_ID_TOKEN", made)
    says = "put one into SIGSTORE_ID_TOKEN" if made is None else "the identity token is invalid"
    with pytest.raises(SettingsError, match=says) as raised:
        signature.load_identity_signer(project)
    assert made is None or made not in str(raised.value)


def test_a_valid_token_names_the_signer(project: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.trust_identity(project, WHO, ISSUER)
    made = token()
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", made)
    found = signature.load_identity_signer(project)
    assert found.name == f"{WHO} of {ISSUER}"
    assert made not in repr(found)


def test_without_sigstores_servers_nothing_is_written(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys.trust_identity(project, WHO, ISSUER)
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token())
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # this address refuses connections, with or without a network
    folder = signed_folder.make(tmp_path / "model")
    with pytest.raises(SettingsError, match=r"promote\.signing: sigstore did not sign .* or sign with a key"):
        signature.sign_folder(folder, signature.load_identity_signer(project))
    assert not (folder / signature.SIGNATURE).exists()


@pytest.mark.parametrize("certificate", ["", "AAAA", "MIIB"])
def test_an_invalid_certificate_is_damage(project: ProjectLayout, tmp_path: Path, certificate: str) -> None:
    """The test replaces the key in a signature by a certificate."""
    folder = signed_folder.make(tmp_path / "model")
    signature.sign_folder(folder, keys.load_signer(project))
    keys.trust_identity(project, WHO, ISSUER)
    path = folder / signature.SIGNATURE
    value = json.loads(path.read_text())
    value["verificationMaterial"] = {"certificate": {"rawBytes": certificate}, "tlogEntries": []}
    path.write_text(json.dumps(value))
    found = signature.verify_folder(folder, keys.read_keyring(project.keyring))
    assert found.state == "damaged"
    with pytest.raises(DamagedFileError, match=r"model\.sig: sigstore does not confirm the signature"):
        signature.check_signature(folder, project)
