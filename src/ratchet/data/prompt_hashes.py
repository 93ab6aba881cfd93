"""Hashes of prompts, by which rows of two prepared datasets are compared. Equivalent prompts have equal hashes."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ratchet.data import token_files
from ratchet.data.splits import SplitName, normalize_text

TRAINED_SPLITS: tuple[SplitName, ...] = ("train", "validation")
"""Splits on which a run is trained; the validation rows select the best checkpoint."""


def hash_prompt(prompt: str) -> int:
    """Return 64 bits of the SHA-256 of a prompt, as `normalize_text` folds it.

    Of a million prompts and 10,000 others, two have equal hashes with a probability of 1e-9.
    """
    return int.from_bytes(hashlib.sha256(normalize_text(prompt).encode("utf-8", "surrogatepass")).digest()[:8])


def hash_trained_prompts(data: Path) -> NDArray[np.uint64]:
    """Return the sorted hashes of the prompts of all training and validation rows. A million rows take seconds.

    Raises DamagedFileError for an unreadable file, and DataError if an earlier version of Ratchet prepared the rows.
    """
    prompts = (prompt for split in TRAINED_SPLITS for prompt in token_files.read_prompts(data, split))
    return np.unique(np.fromiter(map(hash_prompt, prompts), np.uint64))
