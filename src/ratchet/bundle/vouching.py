"""Signing and judging the folders of promoted models on behalf of a project."""

from dataclasses import dataclass
from pathlib import Path

from ratchet.bundle import keyring, signature
from ratchet.bundle.signature import Signer
from ratchet.layout import Layout


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
        """Whether the folder is as somebody whom the project trusts signed it."""
        return signature.judge(folder, keyring.read(self.layout.keyring)).state == "trusted"
