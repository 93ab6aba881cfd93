"""Signing and judging the folders of promoted models on behalf of a project."""

from dataclasses import dataclass
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.errors import DamagedFileError
from ratchet.registry.signing import identity, keys, signature
from ratchet.registry.signing.keys import Keyring
from ratchet.registry.signing.signature import SignatureVerdict, Signer
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout


def load_signer(layout: ProjectLayout, settings: Settings) -> Signer:
    """Who signs here. Raises SettingsError where nobody can, or nobody whom the project trusts."""
    return identity.load_signer(layout) if settings.promote.signing == "sigstore" else keys.load_signer(layout)


def describe_signer(layout: ProjectLayout, settings: Settings) -> str:
    """What `load_signer` would do, changing nothing."""
    return "sign the model through sigstore" if settings.promote.signing == "sigstore" else keys.describe_signer(layout)


@dataclass(frozen=True)
class ProjectSigner:
    """One signer, and the keys that the project trusts."""

    layout: ProjectLayout
    signer: Signer

    @property
    def name(self) -> str:
        """Of the signature's file in a folder."""
        return signature.SIGNATURE

    def sign(self, folder: Path) -> None:
        """Write the signature over every other file."""
        signature.sign_folder(folder, self.signer)

    def holds(self, folder: Path) -> bool:
        """Whether a folder whose seal was just verified is as somebody whom the project trusts signed it."""
        return (
            _judge_verified(folder, files.read_manifest(folder), keys.read_keyring(self.layout.keyring)).state
            == "trusted"
        )


def find_problem(layout: ProjectLayout, folder: Path) -> str | None:
    """What is wrong with a promoted model's folder, in a sentence; None: it is whole, and signed by who is trusted.

    A project that never trusted anybody has models of the time before there were signatures: those are taken.
    """
    try:
        manifest = files.verify_sealed(folder)
    except DamagedFileError as error:
        return str(error)
    trusted = keys.read_keyring(layout.keyring)
    found = _judge_verified(folder, manifest, trusted)
    fine = found.state == "trusted" or (found.state == "unsigned" and trusted.trusts_nobody_yet)
    return None if fine else found.text


def _judge_verified(folder: Path, verified: files.Manifest, trusted: Keyring) -> SignatureVerdict:
    """The signature of a folder whose files were just compared with its manifest: none is read again."""
    return signature.judge_folder(folder, trusted, {name: entry[0] for name, entry in verified.files.items()})
