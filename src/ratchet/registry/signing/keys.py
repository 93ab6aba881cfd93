"""Whom a project trusts to sign its models: public keys and identities, and those that it no longer trusts.

The keyring lies in git (`.ratchet/keys.json`), so its history says who was trusted when, and who changed that.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ratchet.errors import DamagedFileError, SettingsError
from ratchet.registry.signing import dsse
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
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


class PublicKey(Record):
    """A public key."""

    fingerprint: str
    """SHA-256 of `public`, which is also how a signature names its key (OpenSSF Model Signing 1.0)."""
    public: str
    """PEM, SubjectPublicKeyInfo."""
    revoked: str | None = None
    """Why it is trusted no longer."""


class SigningIdentity(Record):
    """Somebody whom sigstore's certificate authority knows."""

    identity: str
    """E-mail address, or the address of a workflow."""
    issuer: str
    """Address of who vouches for the identity (OpenID Connect)."""
    revoked: str | None = None
    """Why it is trusted no longer."""


class Keyring(Record):
    """Everybody who ever was trusted here."""

    keys: tuple[PublicKey, ...] = ()
    identities: tuple[SigningIdentity, ...] = ()

    @property
    def trusts_nobody_yet(self) -> bool:
        """Whether it never trusted anybody: then whoever promotes first may make a key."""
        return not self.keys and not self.identities

    def key(self, fingerprint: str) -> PublicKey | None:
        """By its whole fingerprint."""
        return next((key for key in self.keys if key.fingerprint == fingerprint), None)

    def named(self, beginning: str) -> PublicKey:
        """By as much of its fingerprint as tells it from others. Raises SettingsError when that is none, or several."""
        wanted = beginning.strip().lower()
        found = [key for key in self.keys if key.fingerprint.startswith(wanted)]
        if len(wanted) < LEAST or len(found) != 1:
            known = ", ".join(key.fingerprint[:SHOWN] for key in self.keys) or "none"
            what = "is no key of this project" if not found else "says too little to tell a key"
            raise SettingsError(f"{beginning!r} {what}; known: {known}")
        return found[0]

    def with_key(self, key: PublicKey) -> "Keyring":
        """The same with this key, in the place of what is known under its fingerprint."""
        others = [one for one in self.keys if one.fingerprint != key.fingerprint]
        return self.model_copy(update={"keys": tuple(sorted([*others, key], key=lambda one: one.fingerprint))})

    def with_identity(self, identity: SigningIdentity) -> "Keyring":
        """The same with this identity, in the place of what is known of it."""
        others = [one for one in self.identities if (one.identity, one.issuer) != (identity.identity, identity.issuer)]
        ordered = sorted([*others, identity], key=lambda one: (one.identity, one.issuer))
        return self.model_copy(update={"identities": tuple(ordered)})


def read_keyring(path: Path) -> Keyring:
    """The keyring of a project; one that is not there trusts nobody.

    Raises:
        DamagedFileError: it is none, or a fingerprint in it is not that of its key.
    """
    if not path.exists():
        return Keyring()
    keyring = Keyring.load(path)
    for key in keyring.keys:
        try:
            found = parse_public_key(key.public.encode(), str(path))
        except SettingsError as error:
            raise DamagedFileError(f"{error}; take the file from git again") from None
        if found.fingerprint != key.fingerprint or found.public != key.public:
            raise DamagedFileError(
                f"{path}: {key.fingerprint[:SHOWN]} is not the fingerprint of the key beside it; "
                "take the file from git again"
            )
    return keyring


def read_public_key(path: Path) -> PublicKey:
    """The public key in a PEM file. Raises SettingsError when there is none."""
    try:
        return parse_public_key(path.read_bytes(), str(path))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); name a PEM file with a public key") from None


def parse_public_key(pem: bytes, where: str) -> PublicKey:
    """A public key that was read from `where`. Raises SettingsError for what is none, or none that signs models."""
    if b"PRIVATE KEY" in pem:
        raise SettingsError(f"{where}: holds a private key; its public part is wanted: openssl pkey -in FILE -pubout")
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(f"{where}: holds no public key in PEM form") from None
    return build_key_record(key, where)


def build_key_record(key: object, where: str) -> PublicKey:
    """What the keyring says of a key. Raises SettingsError unless it is an elliptic one of P-256, P-384 or P-521."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise SettingsError(f"{where}: models are signed with elliptic keys (P-256, P-384, P-521), and this is none")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = key.public_bytes(serialization.Encoding.PEM, form)
    return PublicKey(fingerprint=hashlib.sha256(pem).hexdigest(), public=pem.decode())


def load_public_key(key: PublicKey) -> ec.EllipticCurvePublicKey:
    """The key itself, of a record that was read here."""
    found = serialization.load_pem_public_key(key.public.encode())
    assert isinstance(found, ec.EllipticCurvePublicKey)  # noqa: S101 (of_key saw to it)
    return found


def signature_hash(key: ec.EllipticCurvePublicKey) -> hashes.HashAlgorithm:
    """What a signature by this key is computed over."""
    return _HASHES[key.curve.name]


def build_keyring(keys: Sequence[PublicKey]) -> Keyring:
    """A keyring of these keys alone, as when somebody names the key that must have signed."""
    return Keyring(keys=tuple(keys))


# Key pairs that sign promoted models: made here, found again, trusted, revoked.
#
# The private key lies in `.ratchet/private.pem`, where git and DVC do not look, or where RATCHET_SIGNING_KEY says; it
# is
# read by its owner alone, or not used. Only its public part leaves this module.

KEY_VARIABLE = "RATCHET_SIGNING_KEY"
"""Environment variable: path of a PEM file with the private key that signs, in the place of the project's."""
PASSWORD_VARIABLE = "RATCHET_SIGNING_PASSWORD"  # noqa: S105 (its name, not its value)
"""Environment variable: what an encrypted private key is opened with."""

LOCK_WAIT_S = 10.0


@dataclass(frozen=True)
class KeySigner:
    """Signs with a private key."""

    fingerprint: str
    told: str | None
    """What the user should know: that a key was made or became trusted."""
    _sign: Callable[[bytes], bytes]

    @property
    def by(self) -> str:
        """Who signs, for people."""
        return f"key {self.fingerprint[:SHOWN]}"

    def signed(self, payload: bytes) -> str:
        """The signature's file for a statement; equal statements give equal files."""
        return dsse.build_bundle(payload, self._sign(dsse.encode_payload(payload)), self.fingerprint)


def create_key_pair(layout: ProjectLayout) -> PublicKey:
    """Make the project's key pair, and trust it.

    A key that is there and was revoked is replaced.

    Raises:
        SettingsError: there is a key already.
    """
    with _acquire_lock(layout):
        known = read_keyring(layout.keyring)
        path = layout.private_key
        if path.exists():
            own = _load_private_key(path, None)
            found = known.key(build_key_record(own.public_key(), str(path)).fingerprint)
            if found is None or found.revoked is None:
                raise SettingsError(f"{path}: there is a key already{_suggest_fix(found)}")
            path.unlink()
        files.make_directory(path.parent)
        files.write_atomic(path.parent / ".gitignore", f"/{path.name}\n")
        private = ec.generate_private_key(ec.SECP256R1())
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # nobody else may read it for an instant
        files.write_blocks(path, [[private.private_bytes(serialization.Encoding.PEM, form, plain)]])
        files.fsync_directory(path.parent)
        key = build_key_record(private.public_key(), str(path))
        known.with_key(key).save(layout.keyring)
    return key


def _suggest_fix(found: PublicKey | None) -> str:
    if found is None:
        return ", which keys.json does not know; move it away, or trust it: `ratchet keys --trust` its public part"
    name = found.fingerprint[:SHOWN]
    return f", {name}, and it is trusted; to replace it: `ratchet keys --revoke {name} --reason TEXT` first"


def trust_key(layout: ProjectLayout, file: Path) -> PublicKey:
    """Trust the public key in a PEM file. Raises SettingsError when it holds none, or one that was revoked."""
    key = read_public_key(file)
    with _acquire_lock(layout):
        known = read_keyring(layout.keyring)
        found = known.key(key.fingerprint)
        if found is not None and found.revoked is not None:
            raise SettingsError(
                f"{file}: key {key.fingerprint[:SHOWN]} was revoked ({found.revoked}); if that was a mistake, set its "
                f"`revoked` in {layout.keyring} to null and commit that"
            )
        known.with_key(key).save(layout.keyring)
    return key


def trust_identity(layout: ProjectLayout, identity: str, issuer: str) -> SigningIdentity:
    """Trust what somebody signs through sigstore. Raises SettingsError when issuer or identity cannot be one."""
    if not issuer.startswith("https://") or not identity.strip() or identity != identity.strip():
        raise SettingsError(
            f"identity {identity!r}, issuer {issuer!r}: name an e-mail address or the address of a workflow, and the "
            "https address of who vouches for it, e.g. https://accounts.google.com"
        )
    one = SigningIdentity(identity=identity, issuer=issuer)
    with _acquire_lock(layout):
        read_keyring(layout.keyring).with_identity(one).save(layout.keyring)
    return one


def revoke_trust(layout: ProjectLayout, named: str, reason: str) -> str:
    """Trust a key (by its fingerprint, or the beginning of it) or an identity no longer; returns whom.

    Raises:
        SettingsError: there is none of this name, it is revoked already, or the reason says nothing.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise SettingsError("--revoke wants a reason: --reason TEXT")
    with _acquire_lock(layout):
        known = read_keyring(layout.keyring)
        identities = [one for one in known.identities if one.identity == named]
        keys = [] if identities else [known.named(named)]
        reasons = [*(one.revoked for one in identities), *(one.revoked for one in keys)]
        if gone := [one for one in reasons if one is not None]:
            raise SettingsError(f"{named}: revoked already ({gone[0]})")
        for identity in identities:
            known = known.with_identity(identity.model_copy(update={"revoked": reason}))
        for key in keys:
            known = known.with_key(key.model_copy(update={"revoked": reason}))
        known.save(layout.keyring)
    return named if identities else keys[0].fingerprint


def load_signer(layout: ProjectLayout) -> KeySigner:
    """Whoever signs here with a key. A project that never trusted anybody gets a key pair, or trusts the one at hand.

    Raises:
        SettingsError: no key is at hand, it cannot be opened, others may read it, or the project does not trust it.
    """
    known = read_keyring(layout.keyring)
    path = _private_key_path(layout)
    if path is None:
        if not known.trusts_nobody_yet:
            raise SettingsError(
                f"{layout.private_key}: no key to sign with, and the keys that this project trusts are elsewhere; "
                f"make one of yours (`ratchet keys --new`, then commit {layout.keyring.name}), or name the file of one "
                f"in {KEY_VARIABLE}"
            )
        made = create_key_pair(layout)
        told = f"made the key pair {made.fingerprint[:SHOWN]}: commit {layout.keyring}, and keep {layout.private_key}"
        return _build_signer(_load_private_key(layout.private_key, None), made, told)
    private = _load_private_key(path, os.environ.get(PASSWORD_VARIABLE))
    key = build_key_record(private.public_key(), str(path))
    found, name = known.key(key.fingerprint), key.fingerprint[:SHOWN]
    if found is None and known.trusts_nobody_yet:
        with _acquire_lock(layout):
            read_keyring(layout.keyring).with_key(key).save(layout.keyring)
        return _build_signer(private, key, f"trusts key {name} from now on: commit {layout.keyring}")
    if found is None:
        raise SettingsError(
            f"{path}: this project does not trust key {name}; if it should: put its public part into a file "
            f"(openssl pkey -in {path.name} -pubout), `ratchet keys --trust FILE`, and commit {layout.keyring.name}"
        )
    if found.revoked is not None:
        raise SettingsError(
            f"{path}: key {name} is revoked ({found.revoked}); `ratchet keys --new`, and commit {layout.keyring.name}"
        )
    return _build_signer(private, key, None)


def describe_signer(layout: ProjectLayout) -> str:
    """What `load_signer` would do, changing nothing: for a dry run. Raises SettingsError as it does."""
    if _private_key_path(layout) is None and read_keyring(layout.keyring).trusts_nobody_yet:
        return f"make a key pair ({layout.private_key}), trust it, and sign the model with it"
    if read_keyring(layout.keyring).trusts_nobody_yet:
        return f"trust the key in {_private_key_path(layout)}, and sign the model with it"
    return f"sign the model with {load_signer(layout).by}"


def own_fingerprint(layout: ProjectLayout) -> str | None:
    """Of the key that would sign here; None where there is none. Raises SettingsError when it cannot be opened."""
    path = _private_key_path(layout)
    if path is None:
        return None
    return build_key_record(
        _load_private_key(path, os.environ.get(PASSWORD_VARIABLE)).public_key(), str(path)
    ).fingerprint


def _build_signer(private: ec.EllipticCurvePrivateKey, key: PublicKey, told: str | None) -> KeySigner:
    # RFC 6979: no random number that a bad source could repeat, and equal files have equal signatures.
    scheme = ec.ECDSA(signature_hash(private.public_key()), deterministic_signing=True)
    return KeySigner(key.fingerprint, told, lambda data: private.sign(data, scheme))


def _private_key_path(layout: ProjectLayout) -> Path | None:
    """Where the private key is that signs here, if anywhere."""
    named = os.environ.get(KEY_VARIABLE)
    if named:
        return Path(named).expanduser()
    return layout.private_key if layout.private_key.exists() else None


def _load_private_key(path: Path, password: str | None) -> ec.EllipticCurvePrivateKey:
    """A private key. Nothing of it, nor of the password, is in any message."""
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: the private key cannot be read ({error.strerror})") from None
    if mode & 0o077:
        raise SettingsError(
            f"{path}: others may read this private key (mode {stat.S_IMODE(mode):o}), so it proves nothing; "
            f"chmod 600 it, and if others could see it, revoke it"
        )
    private = _parse_private_key(path, content, password)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{path}: models are signed with elliptic keys (P-256, P-384, P-521), and this is none")
    build_key_record(private.public_key(), str(path))
    return private


def _parse_private_key(path: Path, content: bytes, password: str | None) -> object:
    try:
        return serialization.load_pem_private_key(content, None)
    except TypeError:  # it is encrypted
        if not password:
            raise SettingsError(
                f"{path}: this private key is encrypted; put its password into {PASSWORD_VARIABLE}"
            ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(f"{path}: holds no private key in PEM form") from None
    try:
        return serialization.load_pem_private_key(content, password.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(f"{path}: the password in {PASSWORD_VARIABLE} does not open this private key") from None


def _acquire_lock(layout: ProjectLayout) -> FileLock:
    return FileLock(layout.stage_lock("keys"), f"the keys of {layout.root}").acquire(wait_s=LOCK_WAIT_S)
