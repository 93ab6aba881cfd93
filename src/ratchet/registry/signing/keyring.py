"""Whom a project trusts to sign its models: public keys and identities, and those that it no longer trusts.

The keyring lies in git (`.ratchet/keys.json`), so its history says who was trusted when, and who changed that.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ratchet.errors import DamagedError, SettingsError
from ratchet.storage.records.base import Record

SHOWN = 16
"""Hex digits of a fingerprint that people are shown."""
LEAST = 6
"""Hex digits of a fingerprint that people must give."""

_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
"""What is signed on each curve, as sigstore has it: its protobuf-specs, PublicKeyDetails."""


class Key(Record):
    """A public key."""

    fingerprint: str
    """SHA-256 of `public`, which is also how a signature names its key (OpenSSF Model Signing 1.0)."""
    public: str
    """PEM, SubjectPublicKeyInfo."""
    revoked: str | None = None
    """Why it is trusted no longer."""


class Identity(Record):
    """Somebody whom sigstore's certificate authority knows."""

    identity: str
    """E-mail address, or the address of a workflow."""
    issuer: str
    """Address of who vouches for the identity (OpenID Connect)."""
    revoked: str | None = None
    """Why it is trusted no longer."""


class Keyring(Record):
    """Everybody who ever was trusted here."""

    keys: tuple[Key, ...] = ()
    identities: tuple[Identity, ...] = ()

    @property
    def trusts_nobody_yet(self) -> bool:
        """Whether it never trusted anybody: then whoever promotes first may make a key."""
        return not self.keys and not self.identities

    def key(self, fingerprint: str) -> Key | None:
        """By its whole fingerprint."""
        return next((key for key in self.keys if key.fingerprint == fingerprint), None)

    def named(self, beginning: str) -> Key:
        """By as much of its fingerprint as tells it from others. Raises SettingsError when that is none, or several."""
        wanted = beginning.strip().lower()
        found = [key for key in self.keys if key.fingerprint.startswith(wanted)]
        if len(wanted) < LEAST or len(found) != 1:
            known = ", ".join(key.fingerprint[:SHOWN] for key in self.keys) or "none"
            what = "is no key of this project" if not found else "says too little to tell a key"
            raise SettingsError(f"{beginning!r} {what}; known: {known}")
        return found[0]

    def with_key(self, key: Key) -> "Keyring":
        """The same with this key, in the place of what is known under its fingerprint."""
        others = [one for one in self.keys if one.fingerprint != key.fingerprint]
        return self.model_copy(update={"keys": tuple(sorted([*others, key], key=lambda one: one.fingerprint))})

    def with_identity(self, identity: Identity) -> "Keyring":
        """The same with this identity, in the place of what is known of it."""
        others = [one for one in self.identities if (one.identity, one.issuer) != (identity.identity, identity.issuer)]
        ordered = sorted([*others, identity], key=lambda one: (one.identity, one.issuer))
        return self.model_copy(update={"identities": tuple(ordered)})


def read(path: Path) -> Keyring:
    """The keyring of a project; one that is not there trusts nobody.

    Raises:
        DamagedError: it is none, or a fingerprint in it is not that of its key.
    """
    if not path.exists():
        return Keyring()
    keyring = Keyring.load(path)
    for key in keyring.keys:
        try:
            found = of_public(key.public.encode(), str(path))
        except SettingsError as error:
            raise DamagedError(f"{error}; take the file from git again") from None
        if found.fingerprint != key.fingerprint or found.public != key.public:
            raise DamagedError(
                f"{path}: {key.fingerprint[:SHOWN]} is not the fingerprint of the key beside it; "
                "take the file from git again"
            )
    return keyring


def of_file(path: Path) -> Key:
    """The public key in a PEM file. Raises SettingsError when there is none."""
    try:
        return of_public(path.read_bytes(), str(path))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); name a PEM file with a public key") from None


def of_public(pem: bytes, where: str) -> Key:
    """A public key that was read from `where`. Raises SettingsError for what is none, or none that signs models."""
    if b"PRIVATE KEY" in pem:
        raise SettingsError(f"{where}: holds a private key; its public part is wanted: openssl pkey -in FILE -pubout")
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(f"{where}: holds no public key in PEM form") from None
    return of_key(key, where)


def of_key(key: object, where: str) -> Key:
    """What the keyring says of a key. Raises SettingsError unless it is an elliptic one of P-256, P-384 or P-521."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise SettingsError(f"{where}: models are signed with elliptic keys (P-256, P-384, P-521), and this is none")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = key.public_bytes(serialization.Encoding.PEM, form)
    return Key(fingerprint=hashlib.sha256(pem).hexdigest(), public=pem.decode())


def public_key(key: Key) -> ec.EllipticCurvePublicKey:
    """The key itself, of a record that was read here."""
    found = serialization.load_pem_public_key(key.public.encode())
    assert isinstance(found, ec.EllipticCurvePublicKey)  # noqa: S101 (of_key saw to it)
    return found


def hash_of(key: ec.EllipticCurvePublicKey) -> hashes.HashAlgorithm:
    """What a signature by this key is computed over."""
    return _HASHES[key.curve.name]


def trusting(keys: Sequence[Key]) -> Keyring:
    """A keyring of these keys alone, as when somebody names the key that must have signed."""
    return Keyring(keys=tuple(keys))
