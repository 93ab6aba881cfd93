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
_MIN_LENGTH = 1e-12
"""Smallest divisor when vectors are scaled to length 1. A text without n-grams has length 0."""
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
        self._documents = np.zeros(FEATURES)
        """Number of prompts with each feature."""
        for counts in prompts:
            self._documents[counts[:, 0]] += 1
        self._rarity = _compute_rarity(self._documents, len(prompts))
        self._places = {counts.tobytes(): place for place, counts in enumerate(prompts)}
        self._own_similarities: dict[int, float] = {}
        """Similarity of a described prompt with the others, by its place; computed when it is first needed."""

    @cached_property
    def _vectors(self) -> NDArray[np.float32]:
        """Weight of each feature (row) in each prompt (column); prompts have length 1."""
        vectors = np.zeros((FEATURES, len(self._prompts)), np.float32)
        for column, counts in enumerate(self._prompts):
            vectors[counts[:, 0], column] = _weigh(counts, self._rarity)
        return vectors

    def measure_similarity(self, text: str) -> float:
        """Return the mean similarity (cosine) of a text with the most similar described prompts, from 0 to 1.

        A text that is one of the described prompts is compared with the others, because it would be similar to itself.
        So the described prompts have the similarities of other prompts of the same kind.
        """
        counts = count_ngrams(text)
        place = self._places.get(counts.tobytes())
        if place is None or len(self._prompts) == 1:
            return _average_highest(_weigh(counts, self._rarity) @ self._vectors[counts[:, 0]])
        if place not in self._own_similarities:
            self._own_similarities[place] = _average_highest(self._compare_with_others(place))
        return self._own_similarities[place]

    def _compare_with_others(self, place: int) -> NDArray[np.float32]:
        """Compute the similarities of a described prompt with the others, as if it were not described."""
        own, documents = self._prompts[place], self._documents.copy()
        documents[own[:, 0]] -= 1
        rarity = _compute_rarity(documents, len(self._prompts) - 1)
        features, amounts, numbers = self._entries
        weights = amounts * rarity[features]
        vector = np.zeros(FEATURES)
        vector[own[:, 0]] = _weigh(own, rarity)
        products = np.bincount(numbers, weights * vector[features], len(self._prompts))
        lengths = np.sqrt(np.bincount(numbers, weights * weights, len(self._prompts)))
        return np.delete(products / np.maximum(lengths, _MIN_LENGTH), place).astype(np.float32)

    @cached_property
    def _entries(self) -> tuple[NDArray[np.uint16], NDArray[np.float64], NDArray[np.int64]]:
        """Feature, logarithmic count and number of the prompt, for all features of all prompts."""
        joined = np.concatenate(self._prompts)
        numbers = np.repeat(np.arange(len(self._prompts)), list(map(len, self._prompts)))
        return joined[:, 0], 1 + np.log(joined[:, 1]), numbers


def _compute_rarity(documents: NDArray[np.float64], prompts: int) -> NDArray[np.float64]:
    """Return the inverse document frequency of each feature."""
    return np.asarray(np.log((1 + prompts) / (1 + documents)) + 1)


def _weigh(counts: NgramCounts, rarity: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the weights of a prompt's features, a vector of length 1."""
    weights = (1 + np.log(counts[:, 1])) * rarity[counts[:, 0]]
    return np.asarray(weights / max(float(np.linalg.norm(weights)), _MIN_LENGTH), np.float32)


def _average_highest(similarities: NDArray[np.float32]) -> float:
    return float(np.sort(similarities)[-NEIGHBOURS:].mean())
