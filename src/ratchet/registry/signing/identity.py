"""Signatures by an identity instead of a key: sigstore's authority vouches for it, a public log holds that it signed.

Signing asks sigstore's servers. Judging asks nobody: it uses the roots of trust that the installed `sigstore` brings
along, or has fetched since.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cryptography import x509

from ratchet.errors import DamagedFileError, SettingsError, first_line
from ratchet.registry.signing import dsse as envelope
from ratchet.registry.signing import keys
from ratchet.registry.signing.dsse import DsseEnvelope, NotSignedError
from ratchet.registry.signing.keys import SigningIdentity
from ratchet.storage.layout import ProjectLayout

TOKEN_VARIABLE = "SIGSTORE_ID_TOKEN"  # noqa: S105 (its name, not its value)
"""Environment variable with a token that says who is signing (OpenID Connect). In the jobs of several CI services
sigstore finds one by itself."""

_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
"""Extension of a certificate: address of who vouches for the identity (sigstore/fulcio, docs/oid-info.md)."""


@dataclass(frozen=True)
class IdentitySigner:
    """Signs through sigstore, as one of the identities that the project trusts."""

    by: str
    told: str | None
    _token: Any
    _trusted: tuple[SigningIdentity, ...]

    def signed(self, payload: bytes) -> str:
        """The signature's file for a statement. Raises SettingsError when sigstore does not answer, or refuses."""
        from sigstore import dsse, models, sign

        try:
            context = sign.SigningContext.from_trust_config(models.ClientTrustConfig.production())
            with context.signer(self._token) as open_signer:
                text = str(open_signer.sign_dsse(dsse.Statement(payload)).to_json())
        except Exception as error:  # of TUF, requests, the certificate authority and the log, unrelated to each other
            raise SettingsError(
                f"promote.signing: sigstore did not sign ({type(error).__name__}: {first_line(error)}); repeat it "
                "where its servers can be reached, or sign with a key"
            ) from None
        who = verify_identity(
            envelope.parse_envelope(text), self._trusted
        )  # its certificate says who that was, not the token
        if who.revoked is not None:
            raise SettingsError(f"promote.signing: {who.identity} is revoked ({who.revoked})")
        return text


def load_signer(layout: ProjectLayout) -> IdentitySigner:
    """Whoever the environment says is signing.

    Raises:
        SettingsError: the project trusts no identity, or the environment has no token, or one that cannot be used.
    """
    from sigstore import oidc

    trusted = keys.read_keyring(layout.keyring).identities
    if all(one.revoked is not None for one in trusted):
        raise SettingsError(
            "promote.signing: sigstore: this project trusts no identity yet; "
            "`ratchet keys --trust-identity WHO --issuer URL` adds one"
        )
    try:
        token = os.environ.get(TOKEN_VARIABLE) or oidc.detect_credential()
        if not token:
            raise SettingsError(
                f"promote.signing: sigstore: nothing here says who is signing; put a token into {TOKEN_VARIABLE}, "
                "or promote in a CI job that has an identity"
            )
        opened = oidc.IdentityToken(token)
    except oidc.IdentityError as error:
        raise SettingsError(f"promote.signing: sigstore: the token cannot be used ({first_line(error)})") from None
    return IdentitySigner(f"{opened.identity} of {opened.federated_issuer}", None, opened, trusted)


def verify_identity(found: DsseEnvelope, trusted: Sequence[SigningIdentity]) -> SigningIdentity:
    """Whose signature this is.

    Raises:
        DamagedFileError: it is not one that sigstore's log and authority know, or not of this statement.
        SettingsError: it is somebody's whom the project never trusted, or sigstore's roots cannot be read.
    """
    from sigstore import errors, models, verify
    from sigstore.verify import policy

    logging.getLogger("sigstore").setLevel(logging.ERROR)  # it warns that it asks nobody, which is what we want
    noted = _CertificateRecorder()
    try:
        verifier = verify.Verifier(trusted_root=models.ClientTrustConfig.production(offline=True).trusted_root)
    except (OSError, errors.Error) as error:
        raise SettingsError(f"sigstore's roots of trust cannot be read ({first_line(error)})") from None
    try:
        kind, payload = verifier.verify_dsse(models.Bundle.from_json(found.text), noted)
        if (kind, payload) != (envelope.PAYLOAD_TYPE, found.payload):
            raise NotSignedError("it is about another statement")
    except (errors.Error, models.InvalidBundle, ValueError) as error:
        raise DamagedFileError(f"no signature that sigstore vouches for ({first_line(error)})") from None
    for one in trusted:
        try:
            policy.Identity(identity=one.identity, issuer=one.issuer).verify(noted.certificate)
        except errors.VerificationError:
            continue
        return one
    raise SettingsError(f"signed by {noted.names}, who is not trusted here; `ratchet keys --trust-identity` adds one")


class _CertificateRecorder:
    """Takes every certificate, and keeps it: who it names is looked at afterwards."""

    certificate: x509.Certificate

    def verify(self, cert: x509.Certificate) -> None:
        self.certificate = cert

    @property
    def names(self) -> str:
        """Who it is, and who vouches for it, as the certificate has them."""
        found = self.certificate.extensions
        extension = found.get_extension_for_class(x509.SubjectAlternativeName).value
        kinds = (x509.RFC822Name, x509.UniformResourceIdentifier)
        who = ", ".join(str(name) for kind in kinds for name in extension.get_values_for_type(kind)) or "somebody"
        issuers = [one.value.value.decode(errors="replace") for one in found if one.oid == _ISSUER]
        return f"{who} of {issuers[0]}" if issuers else who
