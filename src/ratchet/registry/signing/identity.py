"""Signs with an identity through sigstore, whose authority certifies it and whose public log records the signature.

Signing needs sigstore's servers. Verification works offline with the trust roots that the installed `sigstore` contains
or has fetched.
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
"""Environment variable with the signer's OpenID Connect token. In jobs of several CI services sigstore finds a token by
itself."""

_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
"""Certificate extension with the address of the identity's issuer (sigstore/fulcio, docs/oid-info.md)."""


@dataclass(frozen=True)
class IdentitySigner:
    """Signs through sigstore with an identity that the project trusts."""

    name: str
    notice: str | None
    _token: Any
    _trusted: tuple[SigningIdentity, ...]

    def sign(self, payload: bytes) -> str:
        """Return the signature file of a statement. Raises SettingsError if sigstore does not answer or refuses."""
        from sigstore import dsse, models, sign

        try:
            context = sign.SigningContext.from_trust_config(models.ClientTrustConfig.production())
            with context.signer(self._token) as open_signer:
                text = str(open_signer.sign_dsse(dsse.Statement(payload)).to_json())
        except Exception as error:  # TUF, requests, certificate authority and log have unrelated exceptions
            raise SettingsError(
                f"promote.signing: sigstore did not sign ({type(error).__name__}: {first_line(error)}); retry with "
                "access to its servers, or sign with a key"
            ) from None
        signer = verify_identity(envelope.parse_envelope(text), self._trusted)  # as certified, not as in the token
        if signer.revoked is not None:
            raise SettingsError(
                f"promote.signing: {signer.identity} is revoked ({signer.revoked}); sign with another identity"
            )
        return text


def load_signer(layout: ProjectLayout) -> IdentitySigner:
    """Load the signer for the identity in the environment's token.

    Raises:
        SettingsError: the project trusts no identity, or the environment contains no valid token.
    """
    from sigstore import oidc

    trusted = keys.read_keyring(layout.keyring).identities
    if all(one.revoked is not None for one in trusted):
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
    return IdentitySigner(f"{parsed.identity} of {parsed.federated_issuer}", None, parsed, trusted)


def verify_identity(signed: DsseEnvelope, trusted: Sequence[SigningIdentity]) -> SigningIdentity:
    """Verify a signature, and return its identity.

    Raises:
        DamagedFileError: sigstore's authority or log does not confirm it, or it belongs to another statement.
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
        if (kind, payload) != (envelope.PAYLOAD_TYPE, signed.payload):
            raise NotSignedError("the signature belongs to another statement")
    except (errors.Error, models.InvalidBundle, ValueError) as error:
        raise DamagedFileError(
            f"sigstore does not confirm the signature ({first_line(error)}); promote the model again"
        ) from None
    for one in trusted:
        try:
            policy.Identity(identity=one.identity, issuer=one.issuer).verify(recorder.certificate)
        except errors.VerificationError:
            continue
        return one
    raise SettingsError(
        f"signed by {recorder.identity}, which this project does not trust; add it with `ratchet keys --trust-identity`"
    )


class _CertificateRecorder:
    """A sigstore policy that accepts every certificate and stores it; the identity in it is checked later."""

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
        issuers = [one.value.value.decode(errors="replace") for one in extensions if one.oid == _ISSUER]
        identity = ", ".join(names) or "an unnamed identity"
        return f"{identity} of {issuers[0]}" if issuers else identity
