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

from ratchet.errors import DamagedError, SettingsError
from ratchet.registry.signing import dsse, keys
from ratchet.registry.signing.dsse import Envelope, NotSignedError
from ratchet.registry.signing.keys import SHOWN, Keyring
from ratchet.storage import digests, files
from ratchet.storage.layout import Layout
from ratchet.storage.records.export import Bundle

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
class Signed:
    """A signature that was checked, and whose maker is trusted."""

    by: str
    """Fingerprint of the key, or the identity."""
    files: Mapping[str, str]
    """SHA-256 of each file that it covers, by name: what a part of the folder, elsewhere, can be compared with."""


@dataclass(frozen=True)
class Judgement:
    """What there is to say of a folder's signature."""

    state: State
    by: str = ""
    """Fingerprint or identity; unproved where the state is `unknown` or `damaged`."""
    text: str = ""
    """What is wrong, and what to do; who signed where nothing is."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What it covers, once it is proved."""


def sign(folder: Path, signer: Signer, known: Mapping[str, str] | None = None) -> None:
    """Sign every file of a folder, before it is sealed.

    Args:
        folder: a scratch directory; the signature is written into it.
        signer: who signs.
        known: SHA-256 of files that the caller vouches for, which are not read.

    Raises:
        DamagedError: something in the folder is neither a file nor a folder.
        SettingsError: the signer cannot sign.
    """
    path = folder / SIGNATURE
    if path.is_symlink() or path.exists():
        path.unlink()
    found = _digests(folder, known or {})
    text = signer.signed(dsse.statement(_name(folder, found), found, UNCOVERED))
    files.write_blocks(path, [[text.encode()]])


def check(folder: Path, layout: Layout, known: Mapping[str, str] | None = None) -> Signed:
    """Require that somebody whom the project trusts signed a folder as it is.

    Args:
        folder: of a promoted model, or a copy of it.
        layout: whose keys.json says who is trusted.
        known: SHA-256 of files that were just compared with the seal's manifest, which are not read again.

    Raises:
        DamagedError: it is not signed, or a file is not as it was signed; the message names it.
        SettingsError: signed by somebody whom the project does not trust, or no longer.
    """
    return require(judge(folder, keys.read(layout.keyring), known))


def require(found: Judgement) -> Signed:
    """Raise what `check` raises, for a judgement that is not `trusted`."""
    if found.state == "trusted":
        return Signed(found.by, found.files)
    raise (DamagedError if found.state in ("damaged", "unsigned") else SettingsError)(found.text)


def judge(folder: Path, trusted: Keyring, known: Mapping[str, str] | None = None) -> Judgement:
    """What there is to say of a folder's signature; see `check`."""
    maker = listed(folder, trusted)
    if maker.state != "trusted":
        return maker
    try:
        if problem := _difference(maker.files, _digests(folder, known or {})):
            raise DamagedError(f"{folder}/{problem}; bring the folder back, or promote the model again")
    except DamagedError as error:
        return Judgement("damaged", maker.by, str(error))
    return maker


def listed(folder: Path, trusted: Keyring) -> Judgement:
    """What there is to say of a signature alone: whose it is, and over which files. None of them is looked at.

    For a part of a signed folder, which brought the signature along: whoever calls compares what is there.
    """
    path = folder / SIGNATURE
    maker, payload = _maker(path, trusted)
    if maker.state != "trusted":
        return maker
    try:
        return Judgement("trusted", maker.by, maker.text, dsse.listed(payload))
    except NotSignedError as error:
        return Judgement("damaged", maker.by, f"{path}: {error}")


def _maker(path: Path, trusted: Keyring) -> tuple[Judgement, bytes]:
    """Who signed, and which statement; not yet whether it is about the files that are here."""
    if not path.exists() and not path.is_symlink():
        return Judgement("unsigned", text=f"{path.parent}: not signed (no {SIGNATURE}); promote the model again"), b""
    try:
        if path.is_symlink():
            raise NotSignedError("a link")
        found = dsse.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, NotSignedError) as error:
        return Judgement("damaged", text=f"{path}: {error}; promote the model again"), b""
    judge_maker = _of_key if found.fingerprint is not None else _of_identity
    return judge_maker(path, found, trusted), found.payload


def _of_key(path: Path, found: Envelope, trusted: Keyring) -> Judgement:
    name = str(found.fingerprint)
    key = trusted.key(name)
    if key is None:
        return Judgement(
            "unknown", name,
            f"{path}: signed by key {name[:SHOWN]}, which is not trusted here; `ratchet keys` lists those that "
            "are, and `ratchet keys --trust FILE` adds one",
        )  # fmt: skip
    public = keys.public_key(key)
    try:
        public.verify(found.signature, dsse.encoded(found.payload), ec.ECDSA(keys.hash_of(public)))
    except InvalidSignature:
        return Judgement("damaged", name, f"{path}: key {name[:SHOWN]} did not sign this; it was changed, or forged")
    if key.revoked is not None:
        return Judgement("revoked", name, f"{path}: signed by key {name[:SHOWN]}, which is revoked: {key.revoked}")
    return Judgement("trusted", name, f"signed by key {name[:SHOWN]} (trusted)")


def _of_identity(path: Path, found: Envelope, trusted: Keyring) -> Judgement:
    from ratchet.registry.signing import identity  # sigstore takes half a second to import

    try:
        who = identity.signer_of(found, trusted.identities)
    except SettingsError as error:
        return Judgement("unknown", SIGSTORE, f"{path}: {error}")
    except DamagedError as error:
        return Judgement("damaged", SIGSTORE, f"{path}: {error}")
    if who.revoked is not None:
        return Judgement("revoked", who.identity, f"{path}: signed by {who.identity}, who is revoked: {who.revoked}")
    return Judgement("trusted", who.identity, f"signed by {who.identity} of {who.issuer} (trusted)")


def _difference(signed: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first file that is not as it was signed, and how."""
    for name in sorted(signed.keys() | here.keys()):
        if name not in here:
            return f"{name}: missing, although it was signed"
        if name not in signed:
            return f"{name}: was added after the model was signed"
        if signed[name] != here[name]:
            return f"{name}: changed after the model was signed"
    return None


def _digests(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of every file that is covered. Raises DamagedError for what is neither file nor folder."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DamagedError(f"{path}: {'a link' if path.is_symlink() else 'no file'}, and only files can be signed")
        if name in UNCOVERED:
            if not path.is_file():
                raise DamagedError(f"{path}: a folder, where a file of this name belongs")
        elif path.is_file():
            found[name] = known[name] if name in known else digests.of_file(path)
    return found


def _name(folder: Path, found: Mapping[str, str]) -> str:
    """What people see of the model: the beginning of its digest; of a folder without one, of all its files."""
    bundle = folder / "bundle.json"
    whole = Bundle.load(bundle).model_digest if bundle.is_file() else digests.of_files(found)
    return whole[:SHOWN]
