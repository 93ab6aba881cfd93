"""Describes prompts by their character n-grams, so that other prompts can be compared with them without a model.

The features are hashed n-grams of a text in lower case, weighted by their logarithmic count and their rarity among the
described prompts (tf-idf).
"""

import unicodedata
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

NGRAM_SIZES = (3, 4, 5)
FEATURES = 1 << 14
"""Number of features. A prompt of 100 characters has some 300 n-grams."""
MAX_CHARACTERS = 2000
"""Only this much of a prompt is compared, which bounds the time."""
NEIGHBOURS = 3
"""Number of most similar described prompts whose mean similarity counts."""

NgramCounts = NDArray[np.uint16]
"""Pairs of feature and count, by feature."""
_BASE, _MIX = np.uint64(0x100000001B3), np.uint64(0x9E3779B97F4A7C15)


def count_ngrams(text: str) -> NgramCounts:
    """Count the hashed n-grams of a text. Case, Unicode compatibility forms and white space make no difference."""
    folded = f" {' '.join(unicodedata.normalize('NFKC', text[:MAX_CHARACTERS]).casefold().split())} "
    codes = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    hashes = []
    for size in NGRAM_SIZES:
        values = np.full(max(0, len(codes) - size + 1), size, np.uint64)
        for start in range(size):
            values = values * _BASE + codes[start : start + len(values)]
        hashes.append((values * _MIX) >> np.uint64(64 - FEATURES.bit_length() + 1))
    features, counts = np.unique(np.concatenate(hashes), return_counts=True)
    return np.stack([features, np.minimum(counts, 65535)], axis=1).astype(np.uint16)


class PromptProfile:
    """A set of described prompts."""

    def __init__(self, prompts: Sequence[NgramCounts]) -> None:
        self._prompts = prompts
        documents = np.zeros(FEATURES)
        for counts in prompts:
            documents[counts[:, 0]] += 1
        self._rarity = np.log((1 + len(prompts)) / (1 + documents)) + 1
        """Inverse document frequency of each feature."""

    @cached_property
    def _vectors(self) -> NDArray[np.float32]:
        """Weight of each feature (row) in each prompt (column); prompts have length 1."""
        vectors = np.zeros((FEATURES, len(self._prompts)), np.float32)
        for column, counts in enumerate(self._prompts):
            vectors[counts[:, 0], column] = self._weigh(counts)
        return vectors

    def _weigh(self, counts: NgramCounts) -> NDArray[np.float32]:
        weights = (1 + np.log(counts[:, 1])) * self._rarity[counts[:, 0]]
        return np.asarray(weights / max(float(np.linalg.norm(weights)), 1e-12), np.float32)

    def measure_similarity(self, text: str) -> float:
        """Return the mean similarity (cosine) of a text with the most similar described prompts, from 0 to 1."""
        counts = count_ngrams(text)
        similarities = np.sort(self._weigh(counts) @ self._vectors[counts[:, 0]])[-NEIGHBOURS:]
        return float(similarities.mean())
