"""Sign a folder, and judge a signature: by whom, over which bytes, and whether the project trusts them.

Covered is every file but the signature itself and the seal's manifest, which is written after it. Names and digests of
all of them are in the signature, so a file that was changed, added or taken away is named.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

from ratchet.errors import DamagedFileError, SettingsError
from ratchet.registry.signing import dsse, keys
from ratchet.registry.signing.dsse import DsseEnvelope, NotSignedError
from ratchet.registry.signing.keys import SHOWN, Keyring
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ModelBundle

SIGNATURE = "model.sig"

SIGSTORE = "sigstore"
"""Who signed, as long as it is not known which identity that was."""

UNCOVERED = (SIGNATURE, files.MANIFEST, files.FOREIGN)
"""At the top of the folder; files of these names below it are covered."""

State = Literal["trusted", "unsigned", "unknown", "revoked", "damaged"]


class Signer(Protocol):
    """Who signs: with a key (keys.py), or through sigstore (identity.py)."""

    @property
    def by(self) -> str:
        """Who it is, for people."""
        ...

    @property
    def told(self) -> str | None:
        """What the user should know before it signs."""
        ...

    def signed(self, payload: bytes) -> str:
        """The signature's file for a statement."""
        ...


@dataclass(frozen=True)
class TrustedSignature:
    """A signature that was checked, and whose maker is trusted."""

    by: str
    """Fingerprint of the key, or the identity."""
    files: Mapping[str, str]
    """SHA-256 of each file that it covers, by name: what a part of the folder, elsewhere, can be compared with."""


@dataclass(frozen=True)
class SignatureVerdict:
    """What there is to say of a folder's signature."""

    state: State
    by: str = ""
    """Fingerprint or identity; unproved where the state is `unknown` or `damaged`."""
    text: str = ""
    """What is wrong, and what to do; who signed where nothing is."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What it covers, once it is proved."""


def sign_folder(folder: Path, signer: Signer, known: Mapping[str, str] | None = None) -> None:
    """Sign every file of a folder, before it is sealed.

    Args:
        folder: a scratch directory; the signature is written into it.
        signer: who signs.
        known: SHA-256 of files that the caller vouches for, which are not read.

    Raises:
        DamagedFileError: something in the folder is neither a file nor a folder.
        SettingsError: the signer cannot sign.
    """
    path = folder / SIGNATURE
    if path.is_symlink() or path.exists():
        path.unlink()
    found = _covered_digests(folder, known or {})
    text = signer.signed(dsse.build_statement(_statement_name(folder, found), found, UNCOVERED))
    files.write_blocks(path, [[text.encode()]])


def check_signature(folder: Path, layout: ProjectLayout, known: Mapping[str, str] | None = None) -> TrustedSignature:
    """Require that somebody whom the project trusts signed a folder as it is.

    Args:
        folder: of a promoted model, or a copy of it.
        layout: whose keys.json says who is trusted.
        known: SHA-256 of files that were just compared with the seal's manifest, which are not read again.

    Raises:
        DamagedFileError: it is not signed, or a file is not as it was signed; the message names it.
        SettingsError: signed by somebody whom the project does not trust, or no longer.
    """
    return require_trusted(judge_folder(folder, keys.read_keyring(layout.keyring), known))


def require_trusted(found: SignatureVerdict) -> TrustedSignature:
    """Raise what `check_signature` raises, for a judgement that is not `trusted`."""
    if found.state == "trusted":
        return TrustedSignature(found.by, found.files)
    raise (DamagedFileError if found.state in ("damaged", "unsigned") else SettingsError)(found.text)


def judge_folder(folder: Path, trusted: Keyring, known: Mapping[str, str] | None = None) -> SignatureVerdict:
    """What there is to say of a folder's signature; see `check_signature`."""
    maker = read_signature(folder, trusted)
    if maker.state != "trusted":
        return maker
    try:
        if problem := _describe_difference(maker.files, _covered_digests(folder, known or {})):
            raise DamagedFileError(f"{folder}/{problem}; bring the folder back, or promote the model again")
    except DamagedFileError as error:
        return SignatureVerdict("damaged", maker.by, str(error))
    return maker


def read_signature(folder: Path, trusted: Keyring) -> SignatureVerdict:
    """What there is to say of a signature alone: whose it is, and over which files. None of them is looked at.

    For a part of a signed folder, which brought the signature along: whoever calls compares what is there.
    """
    path = folder / SIGNATURE
    maker, payload = _identify_signer(path, trusted)
    if maker.state != "trusted":
        return maker
    try:
        return SignatureVerdict("trusted", maker.by, maker.text, dsse.parse_digests(payload))
    except NotSignedError as error:
        return SignatureVerdict("damaged", maker.by, f"{path}: {error}")


def _identify_signer(path: Path, trusted: Keyring) -> tuple[SignatureVerdict, bytes]:
    """Who signed, and which statement; not yet whether it is about the files that are here."""
    if not path.exists() and not path.is_symlink():
        return SignatureVerdict(
            "unsigned", text=f"{path.parent}: not signed (no {SIGNATURE}); promote the model again"
        ), b""
    try:
        if path.is_symlink():
            raise NotSignedError("a link")
        found = dsse.parse_envelope(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, NotSignedError) as error:
        return SignatureVerdict("damaged", text=f"{path}: {error}; promote the model again"), b""
    judge_maker = _judge_key if found.fingerprint is not None else _judge_identity
    return judge_maker(path, found, trusted), found.payload


def _judge_key(path: Path, found: DsseEnvelope, trusted: Keyring) -> SignatureVerdict:
    name = str(found.fingerprint)
    key = trusted.key(name)
    if key is None:
        return SignatureVerdict(
            "unknown", name,
            f"{path}: signed by key {name[:SHOWN]}, which is not trusted here; `ratchet keys` lists those that "
            "are, and `ratchet keys --trust FILE` adds one",
        )  # fmt: skip
    public = keys.load_public_key(key)
    try:
        public.verify(found.signature, dsse.encode_payload(found.payload), ec.ECDSA(keys.signature_hash(public)))
    except InvalidSignature:
        return SignatureVerdict(
            "damaged", name, f"{path}: key {name[:SHOWN]} did not sign this; it was changed, or forged"
        )
    if key.revoked is not None:
        return SignatureVerdict(
            "revoked", name, f"{path}: signed by key {name[:SHOWN]}, which is revoked: {key.revoked}"
        )
    return SignatureVerdict("trusted", name, f"signed by key {name[:SHOWN]} (trusted)")


def _judge_identity(path: Path, found: DsseEnvelope, trusted: Keyring) -> SignatureVerdict:
    from ratchet.registry.signing import identity  # sigstore takes half a second to import

    try:
        who = identity.verify_identity(found, trusted.identities)
    except SettingsError as error:
        return SignatureVerdict("unknown", SIGSTORE, f"{path}: {error}")
    except DamagedFileError as error:
        return SignatureVerdict("damaged", SIGSTORE, f"{path}: {error}")
    if who.revoked is not None:
        return SignatureVerdict(
            "revoked", who.identity, f"{path}: signed by {who.identity}, who is revoked: {who.revoked}"
        )
    return SignatureVerdict("trusted", who.identity, f"signed by {who.identity} of {who.issuer} (trusted)")


def _describe_difference(signed: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first file that is not as it was signed, and how."""
    for name in sorted(signed.keys() | here.keys()):
        if name not in here:
            return f"{name}: missing, although it was signed"
        if name not in signed:
            return f"{name}: was added after the model was signed"
        if signed[name] != here[name]:
            return f"{name}: changed after the model was signed"
    return None


def _covered_digests(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of every file that is covered. Raises DamagedFileError for what is neither file nor folder."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DamagedFileError(
                f"{path}: {'a link' if path.is_symlink() else 'no file'}, and only files can be signed"
            )
        if name in UNCOVERED:
            if not path.is_file():
                raise DamagedFileError(f"{path}: a folder, where a file of this name belongs")
        elif path.is_file():
            found[name] = known[name] if name in known else digests.hash_file(path)
    return found


def _statement_name(folder: Path, found: Mapping[str, str]) -> str:
    """What people see of the model: the beginning of its digest; of a folder without one, of all its files."""
    bundle = folder / "bundle.json"
    whole = ModelBundle.load(bundle).model_digest if bundle.is_file() else digests.hash_files(found)
    return whole[:SHOWN]
