"""Manages a project's keyring, its key pair, and the format of signature files.

The keyring contains the keys and identities that may sign the project's models. It is in git (`.ratchet/keys.json`), so
its history shows which signers were trusted at any time, and who changed the keyring.

The private key is in `.ratchet/private.pem`, which git and DVC ignore, or in the file that RATCHET_SIGNING_KEY names.
The key is refused if other users can read the file. Only its public part leaves this module.

A signature file is a sigstore bundle with a DSSE envelope, whose in-toto statement lists the signed files. The format
is OpenSSF Model Signing 1.0, so its `model_signing` command and other implementations can verify the files. Sources:
the in-toto Statement v1 (in-toto/attestation, spec/v1), the DSSE protocol 1.0 (secure-systems-lab/dsse, protocol.md),
sigstore's bundle v0.3 (sigstore/protobuf-specs), and for the predicate sigstore/model-transparency
(model_signing.signing).
"""

import base64
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ratchet.errors import DamagedFileError, SettingsError
from ratchet.storage import files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record

KEY_VARIABLE = "RATCHET_SIGNING_KEY"
"""Environment variable with the path of a PEM file, whose private key is used instead of the project's."""

PASSWORD_VARIABLE = "RATCHET_SIGNING_PASSWORD"  # noqa: S105 (its name, not its value)
"""Environment variable with the password of an encrypted private key."""

LOCK_WAIT_S = 10.0
"""Maximum wait for another process that changes the keys."""

SHOWN_DIGITS = 16
"""Number of hex digits of a fingerprint in messages."""

MIN_DIGITS = 6
"""Minimum number of hex digits of a fingerprint that a user must enter."""

_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
"""Hash algorithm of each curve, as in sigstore (protobuf-specs, PublicKeyDetails)."""

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"


class PublicKey(Record):
    """A public key in the keyring."""

    fingerprint: str
    """SHA-256 of `public`, by which signatures name their key (OpenSSF Model Signing 1.0)."""
    public: str
    """PEM, SubjectPublicKeyInfo."""
    revoked: str | None = None
    """Reason for the revocation; None: trusted."""


class SigningIdentity(Record):
    """An identity that sigstore's certificate authority certifies."""

    identity: str
    """E-mail address, or the address of a workflow."""
    issuer: str
    """Address of the identity's OpenID Connect issuer."""
    revoked: str | None = None
    """Reason for the revocation; None: trusted."""


class Keyring(Record):
    """All keys and identities that a project trusts or has trusted."""

    keys: tuple[PublicKey, ...] = ()
    identities: tuple[SigningIdentity, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the keyring contains no signer; only then may a promotion create a key."""
        return not self.keys and not self.identities

    def find_key(self, fingerprint: str) -> PublicKey | None:
        """Find a key by its complete fingerprint; None if the keyring does not contain the key."""
        return next((key for key in self.keys if key.fingerprint == fingerprint), None)

    def find_by_prefix(self, prefix: str) -> PublicKey:
        """Find a key by the beginning of its fingerprint. Raises SettingsError if there is none, or several."""
        digits = prefix.strip().lower()
        matching = [key for key in self.keys if key.fingerprint.startswith(digits)]
        if len(digits) < MIN_DIGITS or len(matching) != 1:
            known = ", ".join(key.fingerprint[:SHOWN_DIGITS] for key in self.keys) or "none"
            problem = "matches no key of this project" if not matching else "is too short to identify a key"
            raise SettingsError(f"{prefix!r} {problem}; known keys: {known}")
        return matching[0]

    def with_key(self, key: PublicKey) -> "Keyring":
        """Return a keyring with this key, which replaces an entry with the same fingerprint."""
        others = [other for other in self.keys if other.fingerprint != key.fingerprint]
        return self.model_copy(update={"keys": tuple(sorted([*others, key], key=lambda entry: entry.fingerprint))})

    def with_identity(self, identity: SigningIdentity) -> "Keyring":
        """Return a keyring with this identity, which replaces an entry with the same identity and issuer."""
        pair = (identity.identity, identity.issuer)
        others = [other for other in self.identities if (other.identity, other.issuer) != pair]
        ordered = sorted([*others, identity], key=lambda entry: (entry.identity, entry.issuer))
        return self.model_copy(update={"identities": tuple(ordered)})


def read_keyring(path: Path) -> Keyring:
    """Read a project's keyring; a missing file is an empty keyring.

    Raises:
        DamagedFileError: the file is not a keyring, or a fingerprint does not match its key.
    """
    if not path.exists():
        return Keyring()
    keyring = Keyring.load(path)
    for key in keyring.keys:
        try:
            parsed = parse_public_key(key.public.encode(), str(path))
        except SettingsError as error:
            raise DamagedFileError(f"{error}; restore the file from git") from None
        if parsed.fingerprint != key.fingerprint or parsed.public != key.public:
            raise DamagedFileError(
                f"{path}: fingerprint {key.fingerprint[:SHOWN_DIGITS]} does not match its public key; restore the file "
                "from git"
            )
    return keyring


def read_public_key(path: Path) -> PublicKey:
    """Read the public key in a PEM file. Raises SettingsError if the file has none."""
    try:
        return parse_public_key(path.read_bytes(), str(path))
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); expected a PEM file with a public key"
        ) from None


def parse_public_key(pem: bytes, where: str) -> PublicKey:
    """Parse a public key.

    Args:
        pem: the key.
        where: file with the key, for messages.

    Raises:
        SettingsError: `pem` is not a public key, or the key is of a kind that cannot sign models.
    """
    if b"PRIVATE KEY" in pem:
        raise SettingsError(
            f"{where}: found a private key; expected its public part, which `openssl pkey -in FILE -pubout` prints"
        )
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(f"{where}: expected a public key in PEM format") from None
    return build_key_record(key, where)


def build_key_record(key: object, where: str) -> PublicKey:
    """Build the keyring's record of a key. Raises SettingsError unless its curve is P-256, P-384 or P-521."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise SettingsError(f"{where}: expected an elliptic-curve key (P-256, P-384, P-521); create one with openssl")
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PublicKey(fingerprint=hashlib.sha256(pem).hexdigest(), public=pem.decode())


def verify_envelope(key: PublicKey, envelope: "DsseEnvelope") -> None:
    """Verify a signature by a key from `read_keyring`. Raises cryptography's InvalidSignature."""
    public = serialization.load_pem_public_key(key.public.encode())
    assert isinstance(public, ec.EllipticCurvePublicKey)  # noqa: S101 (build_key_record has checked it)
    scheme = ec.ECDSA(_HASHES[public.curve.name])
    public.verify(envelope.signature, encode_payload(envelope.payload), scheme)


def trust_key(layout: ProjectLayout, file: Path) -> PublicKey:
    """Add the public key in a PEM file to the keyring. Raises SettingsError if it is invalid, or was revoked."""
    key = read_public_key(file)
    with _acquire_lock(layout):
        keyring = read_keyring(layout.keyring)
        record = keyring.find_key(key.fingerprint)
        if record is not None and record.revoked is not None:
            raise SettingsError(
                f"{file}: key {key.fingerprint[:SHOWN_DIGITS]} was revoked ({record.revoked}); if that was a mistake, "
                f"set its `revoked` in {layout.keyring} to null and commit the file"
            )
        keyring.with_key(key).save(layout.keyring)
    return key


def trust_identity(layout: ProjectLayout, identity: str, issuer: str) -> SigningIdentity:
    """Add a sigstore identity to the keyring. Raises SettingsError if the identity or its issuer is malformed."""
    if not issuer.startswith("https://") or not identity.strip() or identity != identity.strip():
        raise SettingsError(
            f"found identity {identity!r} and issuer {issuer!r}; expected an e-mail address or the address of a "
            "workflow, and the https address of its issuer, e.g. https://accounts.google.com"
        )
    record = SigningIdentity(identity=identity, issuer=issuer)
    with _acquire_lock(layout):
        read_keyring(layout.keyring).with_identity(record).save(layout.keyring)
    return record


def revoke_trust(layout: ProjectLayout, name: str, reason: str) -> str:
    """Revoke a key or an identity.

    Args:
        layout: the project.
        name: the beginning of a fingerprint, or an identity.
        reason: reason for the revocation.

    Returns:
        The fingerprint or the identity.

    Raises:
        SettingsError: no signer has this name, it is already revoked, or the reason is empty.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise SettingsError("--revoke: found no reason; add --reason TEXT")
    with _acquire_lock(layout):
        keyring = read_keyring(layout.keyring)
        signers: list[PublicKey | SigningIdentity] = [i for i in keyring.identities if i.identity == name]
        for signer in signers or [keyring.find_by_prefix(name)]:
            if signer.revoked is not None:
                raise SettingsError(f"{name}: is already revoked ({signer.revoked})")
            revoked = signer.model_copy(update={"revoked": reason})
            keyring = keyring.with_key(revoked) if isinstance(revoked, PublicKey) else keyring.with_identity(revoked)
        keyring.save(layout.keyring)
    return name if signers else keyring.find_by_prefix(name).fingerprint


def _acquire_lock(layout: ProjectLayout) -> FileLock:
    return FileLock(layout.stage_lock("keys"), f"the keys of {layout.root}").acquire(wait_s=LOCK_WAIT_S)


# ----------------------------------------------------------------------------------------------------- signing keys


@dataclass(frozen=True)
class KeySigner:
    """Signer with a private key."""

    fingerprint: str
    notice: str | None
    """Message to the user: a key was created, or became trusted."""
    _private: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def signer(self) -> str:
        """The fingerprint, which verification returns as the signer (`signature.SignatureVerdict`)."""
        return self.fingerprint

    @property
    def name(self) -> str:
        """Description of the signer."""
        return f"key {self.fingerprint[:SHOWN_DIGITS]}"

    def sign(self, payload: bytes) -> str:
        """Return the signature file of a statement; equal statements give equal files."""
        # Deterministic (RFC 6979): signing needs no random source, and equal files have equal signatures.
        scheme = ec.ECDSA(_HASHES[self._private.curve.name], deterministic_signing=True)
        signature = self._private.sign(encode_payload(payload), scheme)
        bundle = {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {"publicKey": {"hint": self.fingerprint}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
        return json.dumps(bundle)


def create_key_pair(layout: ProjectLayout) -> PublicKey:
    """Create the project's key pair and add it to the keyring. A revoked private key is replaced.

    Raises:
        SettingsError: the project has a key that is not revoked.
    """
    with _acquire_lock(layout):
        keyring = read_keyring(layout.keyring)
        path = layout.private_key
        if path.exists():
            existing = _load_private_key(path, None)
            record = keyring.find_key(build_key_record(existing.public_key(), str(path)).fingerprint)
            if record is None:
                raise SettingsError(
                    f"{path}: found a key that is not in keys.json; move it away, or add its public part with "
                    "`ratchet keys --trust FILE`"
                )
            if record.revoked is None:
                name = record.fingerprint[:SHOWN_DIGITS]
                raise SettingsError(
                    f"{path}: found the trusted key {name}; to replace it, first run "
                    f"`ratchet keys --revoke {name} --reason TEXT`"
                )
            path.unlink()
        files.make_directory(path.parent)
        files.write_atomic(path.parent / ".gitignore", f"/{path.name}\n")
        private = ec.generate_private_key(ec.SECP256R1())
        format_, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # no other user can read it at any time
        files.write_blocks(path, [[private.private_bytes(serialization.Encoding.PEM, format_, encryption)]])
        files.fsync_directory(path.parent)
        key = build_key_record(private.public_key(), str(path))
        keyring.with_key(key).save(layout.keyring)
    return key


def load_signer(layout: ProjectLayout) -> KeySigner:
    """Load the signer with the project's key. If the keyring is empty, create a key pair, or trust the existing key.

    Raises:
        SettingsError: the key is missing, cannot be opened, can be read by other users, or is not trusted.
    """
    keyring = read_keyring(layout.keyring)
    path = _private_key_path(layout)
    if path is None:
        if not keyring.is_empty:
            raise SettingsError(
                f"{layout.private_key}: found no private key; create your own (`ratchet keys --new`, then commit "
                f"{layout.keyring.name}), or set {KEY_VARIABLE} to the file of a trusted key"
            )
        key = create_key_pair(layout)
        notice = (
            f"created the key pair {key.fingerprint[:SHOWN_DIGITS]}: commit {layout.keyring}, and back up "
            f"{layout.private_key}"
        )
        return KeySigner(key.fingerprint, notice, _load_private_key(layout.private_key, None))
    private = _load_private_key(path, os.environ.get(PASSWORD_VARIABLE))
    key = build_key_record(private.public_key(), str(path))
    record, name = keyring.find_key(key.fingerprint), key.fingerprint[:SHOWN_DIGITS]
    if record is None and keyring.is_empty:
        with _acquire_lock(layout):
            read_keyring(layout.keyring).with_key(key).save(layout.keyring)
        return KeySigner(key.fingerprint, f"the project now trusts key {name}: commit {layout.keyring}", private)
    if record is None:
        raise SettingsError(
            f"{path}: this project does not trust key {name}; to trust it, write its public part to a file "
            f"(openssl pkey -in {path.name} -pubout), run `ratchet keys --trust FILE`, and commit {layout.keyring.name}"
        )
    if record.revoked is not None:
        raise SettingsError(
            f"{path}: key {name} is revoked ({record.revoked}); run `ratchet keys --new`, and commit "
            f"{layout.keyring.name}"
        )
    return KeySigner(key.fingerprint, None, private)


def describe_signer(layout: ProjectLayout) -> str:
    """Describe the effect of `load_signer` and signing, changing nothing. Raises SettingsError as `load_signer`."""
    if not read_keyring(layout.keyring).is_empty:
        return f"sign the model with {load_signer(layout).name}"
    path = _private_key_path(layout)
    if path is None:
        return f"create a key pair ({layout.private_key}), trust it, and sign the model with it"
    return f"trust the key in {path}, and sign the model with it"


def own_fingerprint(layout: ProjectLayout) -> str | None:
    """Return the fingerprint of the key that would sign; None without a key. Raises SettingsError as `load_signer`."""
    if (path := _private_key_path(layout)) is None:
        return None
    private = _load_private_key(path, os.environ.get(PASSWORD_VARIABLE))
    return build_key_record(private.public_key(), str(path)).fingerprint


def _private_key_path(layout: ProjectLayout) -> Path | None:
    """Return the path of the private key; None if the project has no private key and KEY_VARIABLE is not set."""
    named = os.environ.get(KEY_VARIABLE, "")
    if named.lstrip().startswith("-----BEGIN"):
        raise SettingsError(
            f"{KEY_VARIABLE}: found the text of a key; expected the path of a file with it, which only you can read"
        )
    if named:
        return Path(named).expanduser()
    return layout.private_key if layout.private_key.exists() else None


def _load_private_key(path: Path, password: str | None) -> ec.EllipticCurvePrivateKey:
    """Load a private key. Messages contain neither the key nor the password."""
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{path}: the private key cannot be read ({error.strerror}); check the file's permissions"
        ) from None
    if mode & 0o077:
        raise SettingsError(
            f"{path}: other users can read this private key (mode {stat.S_IMODE(mode):o}); run `chmod 600` on it, and "
            "revoke it if others may have read it"
        )
    is_encrypted = False
    try:
        try:
            private = serialization.load_pem_private_key(content, None)
        except TypeError:
            is_encrypted = True
            if not password:
                raise SettingsError(
                    f"{path}: this private key is encrypted; set {PASSWORD_VARIABLE} to its password"
                ) from None
            private = serialization.load_pem_private_key(content, password.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(
            f"{path}: the password in {PASSWORD_VARIABLE} does not open this private key; correct it"
            if is_encrypted
            else f"{path}: expected a private key in PEM format"
        ) from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{path}: expected an elliptic-curve key (P-256, P-384, P-521); create one with openssl")
    build_key_record(private.public_key(), str(path))
    return private


# --------------------------------------------------------------------------------------------------- signature files


class NotSignedError(ValueError):
    """The file is not a signature file in the supported format; the message has the reason."""


@dataclass(frozen=True)
class DsseEnvelope:
    """A parsed signature file; nothing in it is verified."""

    payload: bytes
    """The signed statement."""
    signature: bytes
    fingerprint: str | None
    """Fingerprint of the key that the file names; None if the file contains a sigstore certificate instead."""
    text: str
    """Content of the whole file."""


def build_statement(name: str, digests: Mapping[str, str], ignored: tuple[str, ...]) -> bytes:
    """Build the statement to be signed; equal files give equal bytes. The caller hashes the files.

    Args:
        name: name of the model, for display only.
        digests: SHA-256 of each file by relative POSIX name.
        ignored: names of files in the same folder that the signature does not cover.
    """
    names = sorted(digests, key=PurePosixPath)
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[file]) for file in names)).hexdigest()
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(ignored),
            },
            "resources": [{"name": file, "algorithm": "sha256", "digest": digests[file]} for file in names],
        },
    }  # fmt: skip
    return json.dumps(statement, indent=2, ensure_ascii=False).encode()


def parse_digests(payload: bytes) -> dict[str, str]:
    """Parse the SHA-256 of every file in a statement. Raises NotSignedError for a statement in another format."""
    try:
        statement = json.loads(payload)
        types = (statement["_type"], statement["predicateType"])
        serialization = statement["predicate"]["serialization"]
        resources = statement["predicate"]["resources"]
        rows = [(str(row["name"]), str(row["algorithm"]), str(row["digest"])) for row in resources]
        root, subjects = statement["subject"][0]["digest"]["sha256"], len(statement["subject"])
        total = hashlib.sha256(b"".join(bytes.fromhex(sha) for _, _, sha in rows)).hexdigest()
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise NotSignedError(f"its statement is not about a model ({error!r})") from None
    if types != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise NotSignedError(f"its statement: found predicate type {types[1]!r}; expected {PREDICATE_TYPE!r}")
    if serialization.get("method") != "files" or serialization.get("allow_symlinks") or subjects != 1:
        raise NotSignedError("its statement does not list whole files")
    digests = {name: sha for name, algorithm, sha in rows if algorithm == "sha256"}
    if len(digests) != len(rows):
        raise NotSignedError("its statement lists a file twice, or a digest other than SHA-256")
    if total != root:
        raise NotSignedError("its statement's total digest does not match the files that it lists")
    return digests


def encode_payload(payload: bytes) -> bytes:
    """Encode the bytes that a key signs: DSSE's pre-authentication encoding `DSSEv1 LENGTH TYPE LENGTH PAYLOAD`."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def parse_envelope(text: str) -> DsseEnvelope:
    """Parse a signature file. Raises NotSignedError if the text has another format."""
    try:
        bundle = json.loads(text)
        envelope, material = bundle["dsseEnvelope"], bundle["verificationMaterial"]
        payload = base64.b64decode(envelope["payload"], validate=True)  # binascii.Error is a ValueError
        (signature,) = (base64.b64decode(entry["sig"], validate=True) for entry in envelope["signatures"])
        hint = material["publicKey"]["hint"] if "publicKey" in material else None
        types = (bundle["mediaType"], envelope["payloadType"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotSignedError(f"not a signature file ({error!r})") from None
    if types != (MEDIA_TYPE, PAYLOAD_TYPE):
        raise NotSignedError(f"found a bundle with types {types[0]!r}, {types[1]!r}, which this version cannot read")
    if hint is None and "certificate" not in material:
        raise NotSignedError("found neither a key nor a certificate")
    return DsseEnvelope(payload, signature, None if hint is None else str(hint), text)
