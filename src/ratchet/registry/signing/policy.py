"""Signing and judging the folders of promoted models on behalf of a project."""

from dataclasses import dataclass
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.errors import DamagedError
from ratchet.registry.signing import identity, keys, signature
from ratchet.registry.signing.keys import Keyring
from ratchet.registry.signing.signature import Judgement, Signer
from ratchet.storage import files
from ratchet.storage.layout import Layout


def signer(layout: Layout, settings: Settings) -> Signer:
    """Who signs here. Raises SettingsError where nobody can, or nobody whom the project trusts."""
    return identity.signer(layout) if settings.promote.signing == "sigstore" else keys.signer(layout)


def plan(layout: Layout, settings: Settings) -> str:
    """What `signer` would do, changing nothing."""
    return "sign the model through sigstore" if settings.promote.signing == "sigstore" else keys.plan(layout)


@dataclass(frozen=True)
class Vouching:
    """One signer, and the keys that the project trusts."""

    layout: Layout
    signer: Signer

    @property
    def name(self) -> str:
        """Of the signature's file in a folder."""
        return signature.SIGNATURE

    def sign(self, folder: Path) -> None:
        """Write the signature over every other file."""
        signature.sign(folder, self.signer)

    def holds(self, folder: Path) -> bool:
        """Whether a folder whose seal was just verified is as somebody whom the project trusts signed it."""
        return _judged(folder, files.read_manifest(folder), keys.read(self.layout.keyring)).state == "trusted"


def doubt(layout: Layout, folder: Path) -> str | None:
    """What is wrong with a promoted model's folder, in a sentence; None: it is whole, and signed by who is trusted.

    A project that never trusted anybody has models of the time before there were signatures: those are taken.
    """
    try:
        manifest = files.verify(folder)
    except DamagedError as error:
        return str(error)
    trusted = keys.read(layout.keyring)
    found = _judged(folder, manifest, trusted)
    fine = found.state == "trusted" or (found.state == "unsigned" and trusted.trusts_nobody_yet)
    return None if fine else found.text


def _judged(folder: Path, verified: files.Manifest, trusted: Keyring) -> Judgement:
    """The signature of a folder whose files were just compared with its manifest: none is read again."""
    return signature.judge(folder, trusted, {name: entry[0] for name, entry in verified.files.items()})
