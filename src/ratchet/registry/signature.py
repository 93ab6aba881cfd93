"""Signs the folders of promoted models and verifies their signatures: signer, covered files, and trust.

A signature covers every file except itself, the seal's manifest, which is written after the signature, and a file that
MLflow adds (UNCOVERED). The signature contains the names and digests of all covered files, so that messages can name a
changed, added or removed file.

A signer uses a private key, or an identity that sigstore certifies. Signing through sigstore needs its servers;
verification works offline with the trust roots that the installed `sigstore` contains or has fetched.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, SettingsError, first_line
from ratchet.registry import keys
from ratchet.registry.keys import (
    SHOWN_DIGITS,
    DsseEnvelope,
    Keyring,
    KeySigner,
    NotSignedError,
    SigningIdentity,
)
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ModelBundle

SIGNATURE = "model.sig"
"""Name of the signature file."""

SIGSTORE = "sigstore"
"""Value of `SignatureVerdict.signer` for a sigstore signature without a trusted identity."""

UNCOVERED = (SIGNATURE, files.MANIFEST, files.FOREIGN)
"""Files at the top of the folder that the signature does not cover. In subfolders, files with these names are
covered."""

TOKEN_VARIABLE = "SIGSTORE_ID_TOKEN"  # noqa: S105 (its name, not its value)
"""Environment variable with the signer's OpenID Connect token. In jobs of several CI services, sigstore finds the token
without it."""

_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
"""Certificate extension with the address of the identity's issuer (sigstore/fulcio, docs/oid-info.md)."""

State = Literal["trusted", "unsigned", "unknown", "revoked", "damaged"]


@dataclass(frozen=True)
class SignatureVerdict:
    """Result of a verification."""

    state: State
    signer: str = ""
    """Fingerprint or identity; unproven if the state is `unknown` or `damaged`."""
    message: str = ""
    """The problem and how to fix it; for a trusted signature, who signed."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each covered file by name, if the signature is valid; for comparison with copies of some files."""


# ------------------------------------------------------------------------------------------------------------- signing


def load_signer(layout: ProjectLayout, settings: Settings) -> "Signer":
    """Load the signer of the settings. Raises SettingsError if the signer is missing or not trusted by the project."""
    return load_identity_signer(layout) if settings.promote.signing == "sigstore" else keys.load_signer(layout)


def describe_signer(layout: ProjectLayout, settings: Settings) -> str:
    """Describe the effect of `load_signer` and signing, without changing anything."""
    return "sign the model through sigstore" if settings.promote.signing == "sigstore" else keys.describe_signer(layout)


def sign_folder(folder: Path, signer: "Signer") -> None:
    """Sign every file of a folder before it is sealed.

    Args:
        folder: a scratch directory; the signature is written into it.
        signer: signs the statement.

    Raises:
        DamagedFileError: the folder contains something that is neither a file nor a folder.
        SettingsError: the signer cannot sign.
    """
    path = folder / SIGNATURE
    if path.is_symlink() or path.exists():
        path.unlink()
    covered = _covered_digests(folder, {})
    bundle = folder / "bundle.json"
    digest = ModelBundle.load(bundle).model_digest if bundle.is_file() else digests.hash_files(covered)
    text = signer.sign(keys.build_statement(digest[:SHOWN_DIGITS], covered, UNCOVERED))
    files.write_blocks(path, [[text.encode()]])


# -------------------------------------------------------------------------------------------------------- verification


def find_problem(layout: ProjectLayout, folder: Path) -> str | None:
    """Describe the problem of a promoted model's folder; None if it is complete and has a trusted signature.

    Unsigned models are accepted if the keyring is empty: Ratchet stored them before it had signatures.
    """
    try:
        manifest = files.verify_sealed(folder)
    except DamagedFileError as error:
        return str(error)
    keyring = keys.read_keyring(layout.keyring)
    verdict = verify_folder(folder, keyring, manifest.file_digests)
    is_accepted = verdict.state == "trusted" or (verdict.state == "unsigned" and keyring.is_empty)
    return None if is_accepted else verdict.message


def check_signature(folder: Path, layout: ProjectLayout, known: Mapping[str, str] | None = None) -> SignatureVerdict:
    """Require that a folder is unchanged since a trusted signer signed it.

    Args:
        folder: folder of a promoted model, or a copy of it.
        layout: the project, whose keys.json contains the trusted signers.
        known: SHA-256 of files that were just compared with the seal's manifest; they are not read again.

    Raises:
        DamagedFileError: the folder is not signed, or a file was changed, added or removed; the message names it.
        SettingsError: the project does not trust the signer, or has revoked the signer.
    """
    return require_trusted(verify_folder(folder, keys.read_keyring(layout.keyring), known))


def require_trusted(verdict: SignatureVerdict) -> SignatureVerdict:
    """Return a verdict that is `trusted`; otherwise raise the errors of `check_signature`."""
    if verdict.state == "trusted":
        return verdict
    raise (DamagedFileError if verdict.state in ("damaged", "unsigned") else SettingsError)(verdict.message)


def verify_folder(folder: Path, keyring: Keyring, known: Mapping[str, str] | None = None) -> SignatureVerdict:
    """Verify a folder's signature and its files; see `check_signature`."""
    verdict = read_signature(folder, keyring)
    if verdict.state != "trusted":
        return verdict
    try:
        actual = _covered_digests(folder, known or {})
    except DamagedFileError as error:
        return SignatureVerdict("damaged", verdict.signer, str(error))
    for name in sorted(verdict.files.keys() | actual.keys()):
        if verdict.files.get(name) == actual.get(name):
            continue
        problem = "changed after the model was signed"
        if name not in actual:
            problem = "missing, although it was signed"
        elif name not in verdict.files:
            problem = "was added after the model was signed"
        message = f"{folder}/{name}: {problem}; restore the folder, or promote the model again"
        return SignatureVerdict("damaged", verdict.signer, message)
    return verdict


def read_signature(folder: Path, keyring: Keyring) -> SignatureVerdict:
    """Verify only the signature: its signer and its list of files, but not the files.

    Use this function for a folder with only some of the signed files, and compare these files with the list.
    """
    path = folder / SIGNATURE
    if not path.exists() and not path.is_symlink():
        message = f"{folder}: found no signature ({SIGNATURE}); promote the model again"
        return SignatureVerdict("unsigned", message=message)
    try:
        if path.is_symlink():
            raise NotSignedError("found a link; expected a file")
        envelope = keys.parse_envelope(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, NotSignedError) as error:
        return SignatureVerdict("damaged", message=f"{path}: {error}; promote the model again")
    verdict = verify_signer(str(path), envelope, keyring)
    if verdict.state != "trusted":
        return verdict
    try:
        return replace(verdict, files=keys.parse_digests(envelope.payload))
    except NotSignedError as error:
        return SignatureVerdict("damaged", verdict.signer, f"{path}: {error}; promote the model again")


def verify_signer(
    where: str, envelope: DsseEnvelope, keyring: Keyring, remedy: str = "promote the model again"
) -> SignatureVerdict:
    """Verify who signed a statement, and whether the project trusts the signer.

    Args:
        where: the file, or the server, for messages.
        envelope: the signature file.
        keyring: the trusted keys and identities.
        remedy: what to do if the signature does not count.
    """
    verify = _verify_key if envelope.fingerprint is not None else _verify_identity
    return verify(where, envelope, keyring, remedy)


def _verify_key(where: str, envelope: DsseEnvelope, keyring: Keyring, remedy: str) -> SignatureVerdict:
    name = str(envelope.fingerprint)
    shown = name[:SHOWN_DIGITS]
    key = keyring.find_key(name)
    if key is None:
        message = (
            f"{where}: signed by key {shown}, which this project does not trust; list trusted keys with `ratchet "
            "keys`, or add the key with `ratchet keys --trust FILE`"
        )
        return SignatureVerdict("unknown", name, message)
    try:
        keys.verify_envelope(key, envelope)
    except InvalidSignature:
        message = f"{where}: the signature of key {shown} is invalid: the file was changed or forged; {remedy}"
        return SignatureVerdict("damaged", name, message)
    if key.revoked is not None:
        message = f"{where}: signed by key {shown}, which is revoked ({key.revoked}); {remedy}"
        return SignatureVerdict("revoked", name, message)
    return SignatureVerdict("trusted", name, f"signed by key {shown} (trusted)")


def _verify_identity(where: str, envelope: DsseEnvelope, keyring: Keyring, remedy: str) -> SignatureVerdict:
    try:
        signer = verify_identity(envelope, keyring.identities)
    except SettingsError as error:
        return SignatureVerdict("unknown", SIGSTORE, f"{where}: {error}")
    except DamagedFileError as error:
        return SignatureVerdict("damaged", SIGSTORE, f"{where}: {error}; {remedy}")
    if signer.revoked is not None:
        message = f"{where}: signed by {signer.identity}, which is revoked ({signer.revoked}); {remedy}"
        return SignatureVerdict("revoked", signer.identity, message)
    return SignatureVerdict("trusted", signer.identity, f"signed by {signer.identity} of {signer.issuer} (trusted)")


def _covered_digests(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of every covered file. Raises DamagedFileError for links and special files."""
    covered: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            kind = "a link" if path.is_symlink() else "a special file"
            raise DamagedFileError(f"{path}: found {kind}; only regular files can be signed; remove it")
        if name in UNCOVERED:
            if not path.is_file():
                raise DamagedFileError(f"{path}: found a folder; expected a file; remove it")
        elif path.is_file():
            covered[name] = known[name] if name in known else digests.hash_file(path)
    return covered


# ------------------------------------------------------------------------------------------------ sigstore identities


@dataclass(frozen=True)
class IdentitySigner:
    """Signer through sigstore, with an identity that the project trusts."""

    name: str
    notice: str | None
    signer: str
    """Identity in the token. In some CI services the certified identity differs, as in a workflow of GitHub."""
    _token: Any
    _trusted: tuple[SigningIdentity, ...]

    def sign(self, payload: bytes) -> str:
        """Return the signature file of a statement. Raises SettingsError if sigstore does not sign it."""
        from sigstore import dsse, models, sign

        try:
            context = sign.SigningContext.from_trust_config(models.ClientTrustConfig.production())
            with context.signer(self._token) as open_signer:
                text = str(open_signer.sign_dsse(dsse.Statement(payload)).to_json())
        except Exception as error:  # the libraries of sigstore have no common base class of exceptions
            raise SettingsError(
                f"promote.signing: sigstore did not sign ({type(error).__name__}: {first_line(error)}); retry with "
                "access to its servers, or sign with a key"
            ) from None
        signer = verify_identity(keys.parse_envelope(text), self._trusted)  # the certified identity, not the token's
        if signer.revoked is not None:
            raise SettingsError(
                f"promote.signing: {signer.identity} is revoked ({signer.revoked}); sign with another identity"
            )
        return text


Signer = KeySigner | IdentitySigner
"""Signer of statements, with a key or through sigstore."""


def load_identity_signer(layout: ProjectLayout) -> IdentitySigner:
    """Load the signer for the identity in the environment's token.

    Raises:
        SettingsError: the project trusts no identity, or the environment contains no valid token.
    """
    from sigstore import oidc

    trusted = keys.read_keyring(layout.keyring).identities
    if all(identity.revoked is not None for identity in trusted):
        raise SettingsError(
            "promote.signing: sigstore: this project trusts no identity; add one with "
            "`ratchet keys --trust-identity IDENTITY --issuer URL`"
        )
    try:
        token = os.environ.get(TOKEN_VARIABLE) or oidc.detect_credential()
        if not token:
            raise SettingsError(
                f"promote.signing: sigstore: found no identity token; put one into {TOKEN_VARIABLE}, or promote in a "
                "CI job that has an identity"
            )
        parsed = oidc.IdentityToken(token)
    except oidc.IdentityError as error:
        raise SettingsError(
            f"promote.signing: sigstore: the identity token is invalid ({first_line(error)}); request a new one"
        ) from None
    name = f"{parsed.identity} of {parsed.federated_issuer}"
    return IdentitySigner(name, None, str(parsed.identity), parsed, trusted)


def verify_identity(signed: DsseEnvelope, trusted: Sequence[SigningIdentity]) -> SigningIdentity:
    """Verify a sigstore signature, and return its identity, which may be revoked.

    Raises:
        DamagedFileError: sigstore's authority or log does not confirm the signature, or the signature is of another
            statement.
        SettingsError: the project never trusted the identity, or sigstore's trust roots cannot be read.
    """
    from sigstore import errors, models, verify
    from sigstore.verify import policy

    logging.getLogger("sigstore").setLevel(logging.ERROR)  # it warns about offline verification, which is intended
    recorder = _CertificateRecorder()
    try:
        verifier = verify.Verifier(trusted_root=models.ClientTrustConfig.production(offline=True).trusted_root)
    except (OSError, errors.Error) as error:
        raise SettingsError(
            f"sigstore's trust roots cannot be read ({first_line(error)}); reinstall the package sigstore"
        ) from None
    try:
        kind, payload = verifier.verify_dsse(models.Bundle.from_json(signed.text), recorder)
        if (kind, payload) != (keys.PAYLOAD_TYPE, signed.payload):
            raise NotSignedError("the signature belongs to another statement")
    except (errors.Error, models.InvalidBundle, ValueError) as error:
        raise DamagedFileError(f"sigstore does not confirm the signature ({first_line(error)})") from None
    for identity in trusted:
        try:
            policy.Identity(identity=identity.identity, issuer=identity.issuer).verify(recorder.certificate)
        except errors.VerificationError:
            continue
        return identity
    raise SettingsError(
        f"signed by {recorder.identity}, which this project does not trust; add it with `ratchet keys --trust-identity`"
    )


class _CertificateRecorder:
    """A sigstore policy that accepts and stores every certificate. `verify_identity` then checks the identity in it."""

    certificate: x509.Certificate

    def verify(self, cert: x509.Certificate) -> None:
        """Store the certificate."""
        self.certificate = cert

    @property
    def identity(self) -> str:
        """Identity and issuer in the certificate."""
        extensions = self.certificate.extensions
        extension = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        kinds = (x509.RFC822Name, x509.UniformResourceIdentifier)
        names = [str(name) for kind in kinds for name in extension.get_values_for_type(kind)]
        issuers = [item.value.value.decode(errors="replace") for item in extensions if item.oid == _ISSUER]
        identity = ", ".join(names) or "an unnamed identity"
        return f"{identity} of {issuers[0]}" if issuers else identity
