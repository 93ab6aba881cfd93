"""Describes prompts by their character n-grams, so that other prompts can be compared with them without a model.

The features are hashed n-grams of a text in lower case, weighted by their logarithmic count and their rarity among the
described prompts (tf-idf). No prompt can be read from a profile, which stores hashes only.
"""

import unicodedata
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def count_ngrams(text: str) -> dict[int, int]:
    """Count the hashed n-grams of a text. Case, Unicode compatibility forms and white space make no difference."""
    folded = f" {' '.join(unicodedata.normalize('NFKC', text[:MAX_CHARACTERS]).casefold().split())} "
    grams = (folded[i : i + size] for size in NGRAM_SIZES for i in range(max(1, len(folded) - size + 1)))
    return Counter(zlib.crc32(gram.encode("utf-8", "surrogatepass")) % FEATURES for gram in grams)


@dataclass(frozen=True)
class PromptProfile:
    """A set of described prompts."""

    counts: Sequence[Mapping[int, int]]
    """Number of each n-gram in each prompt."""

    @cached_property
    def _rarity(self) -> NDArray[np.float32]:
        """Inverse document frequency of each feature."""
        documents = np.zeros(FEATURES)
        for counts in self.counts:
            documents[list(counts)] += 1
        return np.asarray(np.log((1 + len(self.counts)) / (1 + documents)) + 1, np.float32)

    @cached_property
    def _vectors(self) -> NDArray[np.float32]:
        """Unit vector of each prompt."""
        vectors = np.zeros((len(self.counts), FEATURES), np.float32)
        for vector, counts in zip(vectors, self.counts, strict=True):
            features, weights = self._weigh(counts)
            vector[features] = weights
        return vectors

    def _weigh(self, counts: Mapping[int, int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        features = np.fromiter(counts, np.int64, len(counts))
        weights = (1 + np.log(np.fromiter(counts.values(), np.float32, len(counts)))) * self._rarity[features]
        return features, weights / max(float(np.linalg.norm(weights)), 1e-12)

    def measure_similarity(self, text: str) -> float:
        """Return the mean similarity (cosine) of a text with the most similar described prompts, from 0 to 1."""
        features, weights = self._weigh(count_ngrams(text))
        similarities = np.sort(self._vectors[:, features] @ weights)[-NEIGHBOURS:]
        return float(similarities.mean())
