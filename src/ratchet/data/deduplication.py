"""Finds exact and near-duplicates by exact keys, MinHash band keys, and clusters that are verified by shingles.

Two texts are near-duplicates if the Jaccard similarity of their sets of word shingles is at least
`deduplication.jaccard_threshold` (Broder 1997, On the resemblance and containment of documents). MinHash with banding
finds candidates in linear time (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3). Each candidate
pair is then verified with the exact Jaccard similarity, so no row is dropped by a hash collision.
"""

import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from ratchet.config.prepare import DeduplicationSettings
from ratchet.data.row_table import find_shared, sort_unique

_ASCII_WORDS = bytes(byte if chr(byte).isalnum() else ord(" ") for byte in range(128)).lower().ljust(256)
_INVISIBLE = re.compile("[\u00ad\u200c\u200d\u2060\ufeff]")  # inside words: soft hyphen, (non-)joiners, byte order mark
# Scripts written without spaces between words: Han with its marks, kana, bopomofo, hangul, Thai, Lao, Khmer, Burmese.
_UNSPACED = (
    "\u3005-\u3007\u3021-\u3029\u3038-\u303c\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\U0001b000-\U0001b16f"
    "\u3105-\u312f\u31a0-\u31bf\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\ud7b0-\ud7fb"
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf\u1780-\u17b3\u1000-\u103f\u1050-\u108f"
)

_SEED = 20  # seed of the permutations; another seed finds other pairs close to the threshold
_BATCH_WORDS = 60_000  # number of words hashed at once; their arrays stay in the processor's cache
_CACHED_WORDS = 100_000  # number of words in the cache of word hashes, some 15 MB
_CACHED_WORD_LETTERS = 40  # length limit of a word in the cache of word hashes, in characters
_CACHED_SHINGLES = 200_000  # number of shingles in the shingle cache, some 25 MB
_MISSED_WEIGHT = 0.95  # weight of missed pairs in `choose_banding`; false candidates have the weight 0.05
_BUCKET_ROWS = 64  # maximum number of kept rows in one bucket
_PROGRESS_ROWS = 1000  # number of rows between two progress reports

SortRows = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Function that sorts ascending row indices by preference: the row to keep first."""


def split_words(text: str) -> list[str]:
    """Split a text into normalized words (NFKC, case folded): runs of letters, digits and combining marks.

    In scripts without spaces between words, each character with its marks is one word.
    """
    if text.isascii():
        return text.encode("ascii").translate(_ASCII_WORDS).decode("ascii").split()
    folded = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold()
    return _word_pattern().findall(unicodedata.normalize("NFKC", folded))


@cache
def _word_pattern() -> re.Pattern[str]:
    """Compile the pattern of a word.

    `re` has no class for combining marks, but the pattern must include them, or it would split words of Indic scripts.
    """
    marks = [code for code in range(0x300, 0xE01F0) if unicodedata.category(chr(code))[0] == "M"]
    ranges = []
    for _, run in groupby(enumerate(marks), key=lambda pair: pair[1] - pair[0]):
        codes = [code for _, code in run]
        ranges.append(f"{chr(codes[0])}-{chr(codes[-1])}")
    mark, letter = f"[{''.join(ranges)}]", f"[^\\W_{_UNSPACED}]"
    return re.compile(f"[{_UNSPACED}]{mark}*|{letter}+(?:{mark}+{letter}*)*")


def exact_key(conversation_text: str) -> bytes:
    """Return 16 bytes, which are equal for texts that differ only in case and in the amount of white space."""
    folded = " ".join(conversation_text.casefold().split())
    return blake2b(folded.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _comparable_words(text: str) -> list[str]:
    """Return the words of a text; a text without words, such as emoji, is a single word that no other text has."""
    return split_words(text) or [" ".join(unicodedata.normalize("NFKC", text).casefold().split())]


def shingle_text(text: str, shingle_words: int) -> frozenset[str]:
    """Return the runs of `shingle_words` consecutive words; a shorter text is a single shingle."""
    words = _comparable_words(text)
    if len(words) <= shingle_words:
        return frozenset((" ".join(words),))
    return frozenset(map(" ".join, zip(*(words[start:] for start in range(shingle_words)), strict=False)))


def _is_similar(first: frozenset[str], second: frozenset[str], threshold: float) -> bool:
    """Return whether the Jaccard similarity of two sets that are not empty reaches the threshold.

    The ratio of their sizes is an upper bound of the similarity, so the ratio is tested first.
    """
    smaller, larger = sorted((len(first), len(second)))
    if smaller / larger < threshold:
        return False
    shared = len(first & second)
    return shared / (smaller + larger - shared) >= threshold


# ----- MinHash signatures


def _mix_bits(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all 64 bits with the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


class _WordHashes(dict[str, int]):
    """Cache of 64-bit hashes of words, which are equal in every process, unlike Python's own hashes."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        if len(self) >= _CACHED_WORDS:
            self.clear()
        if len(word) <= _CACHED_WORD_LETTERS:
            self[word] = value
        return value


def choose_banding(threshold: float, permutations: int) -> tuple[int, int]:
    """Choose the number of bands and of permutations per band that have the least weighted error at a threshold.

    A pair of similarity s shares at least one of b bands of r rows with probability 1 - (1 - s^r)^b (Mining of Massive
    Datasets, 3.4). The error has two parts: the area under this curve at similarities below the threshold (false
    candidates), and the area above the curve at similarities from the threshold on (missed pairs). Missed pairs have
    the larger weight, because a false candidate costs only a comparison. For a threshold of 0.8, 128 permutations give
    16 bands of 8, which find 95 % of the pairs at 0.8 and 99.99 % at 0.9.
    """
    similarity = (np.arange(1000) + 0.5) / 1000
    below = similarity < threshold

    def error(choice: tuple[int, int]) -> float:
        bands, rows = choice
        probability = 1 - (1 - similarity**rows) ** bands
        missed = float((1 - probability)[~below].sum())
        return _MISSED_WEIGHT * missed + (1 - _MISSED_WEIGHT) * float(probability[below].sum())

    return min(((b, r) for b in range(1, permutations + 1) for r in range(1, permutations // b + 1)), key=error)


class MinHashSignatures:
    """Function from texts to MinHash band keys (8 bytes per band and row). Texts that share a key are candidates."""

    bands: int

    def __init__(self, settings: DeduplicationSettings) -> None:
        if settings.jaccard_threshold is None:
            raise ValueError(
                "deduplication.jaccard_threshold is null, which disables the search; MinHash needs a threshold"
            )
        self.bands, self._rows_per_band = choose_banding(settings.jaccard_threshold, settings.permutations)
        self._shingle_words = settings.shingle_words
        self._word_hashes = _WordHashes()
        self._padding = self._word_hashes[""]
        # Fixed pseudo-random odd numbers. As multipliers they make a sum depend on the order of its terms.
        counts = np.arange(1, max(self._shingle_words, self._rows_per_band) + 1, dtype=np.uint64)
        self._multipliers = _mix_bits(counts * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)

    def band_keys(self, texts: Sequence[str]) -> NDArray[np.uint64]:
        """Return keys [rows, bands]. A key depends only on its text, and is the same on every machine."""
        parts = [self._hash_bands(*self._shingle_hashes(*part)) for part in self._hashed_words(texts)]
        return np.concatenate(parts) if parts else np.empty((0, self.bands), dtype=np.uint64)

    def _hashed_words(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the word hashes of many rows as one list, with the number of words per row; short rows are padded."""
        hashes: list[int] = []
        lengths: list[int] = []
        hash_word = self._word_hashes.__getitem__
        for text in texts:
            words = _comparable_words(text)
            hashes.extend(map(hash_word, words))
            hashes.extend([self._padding] * (self._shingle_words - len(words)))
            lengths.append(max(len(words), self._shingle_words))
            if len(hashes) >= _BATCH_WORDS:
                yield hashes, lengths
                hashes, lengths = [], []
        if lengths:
            yield hashes, lengths

    def _shingle_hashes(self, hashes: list[int], lengths: list[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the hashes of all shingles, and the offsets of the rows in them, [rows + 1]."""
        width = self._shingle_words
        word_hashes = np.array(hashes, dtype=np.uint64)
        sums = np.convolve(word_hashes, self._multipliers[:width][::-1], "valid")
        inside = np.ones(len(sums), dtype=np.bool_)
        ends = np.cumsum(lengths)
        for k in range(1, width):  # a shingle that begins at ends - k would extend into the next row
            inside[ends[:-1] - k] = False
        offsets = np.zeros(len(lengths) + 1, dtype=np.uint64)
        offsets[1:] = np.cumsum(np.array(lengths) - width + 1)
        return _mix_bits(sums[inside]), offsets

    def _hash_bands(self, hashes: NDArray[np.uint64], offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
        count = self.bands * self._rows_per_band
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, count, _SEED)
        minima = np.array(matrix.to_rows(), dtype=np.uint64).reshape(-1, self.bands, self._rows_per_band)
        sums: NDArray[np.uint64] = (minima * self._multipliers[: self._rows_per_band]).sum(axis=2, dtype=np.uint64)
        return _mix_bits(sums)


# ----- Clusters of near-duplicates


@dataclass(frozen=True, slots=True)
class RowCluster:
    """Indices of a row that is kept, and of the rows that are dropped because they are similar to it."""

    kept: int
    dropped: tuple[int, ...]


def _number_buckets(
    band_keys: Iterable[NDArray[Any]], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Return the rows in the mask that share a key of a band, ascending; their buckets; and the rows in each bucket.

    Buckets are [rows returned, bands], and -1 where no other row has the key.
    """
    found: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = []
    sizes, total = [np.empty(0, dtype=np.int64)], 0
    for keys in band_keys:
        sharing, numbers = find_shared(keys, mask)
        found.append((sharing, numbers + total))
        sizes.append(np.bincount(numbers))
        total += len(sizes[-1])
    rows = sort_unique(np.concatenate([np.empty(0, dtype=np.int64), *(sharing for sharing, _ in found)]))
    buckets = np.full((len(rows), len(found)), -1, dtype=np.int32)
    for band, (sharing, numbers) in enumerate(found):
        buckets[np.searchsorted(rows, sharing), band] = numbers
    return rows, buckets, np.concatenate(sizes)


class _ShingleCache:
    """Shingles of rows, with a least-recently-used cache."""

    def __init__(self, text_of: Callable[[int], str], shingle_words: int) -> None:
        self._text_of = text_of
        self._shingle_words = shingle_words
        self._cache: OrderedDict[int, frozenset[str]] = OrderedDict()
        self._total = 0

    def __call__(self, row: int) -> frozenset[str]:
        if row in self._cache:
            self._cache.move_to_end(row)
            return self._cache[row]
        shingles = self._cache[row] = shingle_text(self._text_of(row), self._shingle_words)
        self._total += len(shingles)
        while self._total > _CACHED_SHINGLES and len(self._cache) > 1:
            self._total -= len(self._cache.popitem(last=False)[1])
        return shingles


def cluster_duplicates(
    band_keys: Iterable[NDArray[np.uint64]],
    mask: NDArray[np.bool_],
    sort_rows: SortRows,
    text_of: Callable[[int], str],
    settings: DeduplicationSettings,
    progress: Callable[[int], None],
) -> list[RowCluster]:
    """Find near-duplicates; return one cluster for each kept row that has similar rows, best row first.

    Rows are processed in the order of `sort_rows`, which gives each row a unique rank. A row is dropped if it is
    similar to a kept row in one of its buckets; otherwise it is kept. So every dropped row is similar to a kept row
    (not only through a chain of other rows), and the result does not depend on the order of the rows.

    A bucket stores at most its first 64 kept rows. More than 64 rows that are not similar to each other share a key
    only if they have the same boilerplate, and then a comparison of all pairs would take quadratic time. Kept rows that
    a full bucket does not store are still compared through other buckets: two rows share the more buckets, the more
    similar they are. Memory is 25 bytes per row, and up to 21 more per band for each row that shares a bucket.

    `band_keys` yields the keys of all rows for one band at a time, and `mask` selects the rows to compare. `text_of`
    returns a row's text, and is called for candidates only; `progress` is called now and then with the number of
    processed rows.
    """
    threshold = settings.jaccard_threshold
    if threshold is None:
        progress(int(np.count_nonzero(mask)))
        return []
    shingles_of = _ShingleCache(text_of, settings.shingle_words)
    return cluster_similar_rows(
        band_keys, mask, sort_rows, lambda row, kept: _is_similar(shingles_of(row), shingles_of(kept), threshold),
        progress,
    )  # fmt: skip


def cluster_similar_rows(
    band_keys: Iterable[NDArray[Any]],
    mask: NDArray[np.bool_],
    sort_rows: SortRows,
    is_similar: Callable[[int, int], bool],
    progress: Callable[[int], None],
) -> list[RowCluster]:
    """Find clusters as `cluster_duplicates` does, with another test of the similarity of a row and a kept row."""
    sharing, buckets, sizes = _number_buckets(band_keys, mask)
    rows = sort_rows(sharing)  # below, a position is an index into `rows`
    places = np.searchsorted(sharing, rows)
    # The last row of a bucket is not stored, because no later row is compared with it.
    offsets = np.concatenate([[0], np.cumsum(np.minimum(sizes - 1, _BUCKET_ROWS))])
    kept_in, kept_counts = np.empty(offsets[-1], dtype=np.int32), np.zeros(len(sizes), dtype=np.uint8)
    kept_of = np.full(len(rows), -1, dtype=np.int32)
    for position, row in enumerate(rows.tolist()):
        own = buckets[places[position]]
        own = own[own >= 0]
        shared: Counter[int] = Counter()
        for start, count in zip(offsets[own].tolist(), kept_counts[own].tolist(), strict=True):
            shared.update(kept_in[start : start + count].tolist())
        # Kept rows that share more buckets are compared first, then those with a better rank.
        for candidate, _ in sorted(shared.items(), key=lambda pair: (-pair[1], pair[0])):
            if is_similar(row, int(rows[candidate])):
                kept_of[position] = candidate
                break
        else:
            free = own[offsets[own] + kept_counts[own] < offsets[own + 1]]
            kept_in[offsets[free] + kept_counts[free]] = position
            kept_counts[free] += 1
        if position % _PROGRESS_ROWS == 0:
            progress(position)
    progress(int(np.count_nonzero(mask)))
    dropped = np.flatnonzero(kept_of >= 0)
    dropped = dropped[np.argsort(kept_of[dropped], kind="stable")]
    return [
        RowCluster(int(rows[kept]), tuple(int(rows[position]) for position in positions))
        for kept, positions in groupby(dropped, key=lambda position: int(kept_of[position]))
    ]
