"""Which split a row belongs to: a function of its own content and the seed alone.

Adding or removing rows never moves another row, and rows with the same prompt are never divided, so that a test row
cannot also be a training row.
"""

from typing import Literal

from ratchet import digest
from ratchet.config_data import Split

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


def normalised(text: str) -> str:
    """Text without the differences that make no other request: case and white space."""
    return " ".join(text.casefold().split())


def split_of(prompt: str, split: Split) -> SplitName:
    """The split of a row with this prompt: its SHA-256 read as a number in [0, 1), against the wanted fractions."""
    position = int(digest.of_bytes(f"{split.seed}\0{normalised(prompt)}".encode())[:16], 16) / 16.0**16
    if position < split.test:
        return "test"
    return "validation" if position < split.test + split.validation else "train"
