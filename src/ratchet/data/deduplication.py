"""Rows that say the same: words, exact keys, MinHash band keys, and clusters of near-duplicates verified word by word.

Near means: the sets of word shingles of two texts have a Jaccard similarity of at least `duplicates.near` (Broder 1997,
On the resemblance and containment of documents). MinHash with banding finds candidates in linear time (Leskovec,
Rajaraman and Ullman, Mining of Massive Datasets, chapter 3); each candidate is then compared with the shingles
themselves, so nothing is dropped by chance.
"""

import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from ratchet.config.data import DeduplicationSettings

_ASCII_WORDS = bytes(byte if chr(byte).isalnum() else ord(" ") for byte in range(128)).lower().ljust(256)
_INVISIBLE = re.compile("[\u00ad\u200c\u200d\u2060\ufeff]")  # soft hyphen, (non-)joiners, byte order mark: inside words
# Scripts written without spaces between words: Han with its marks, kana, bopomofo, hangul, Thai, Lao, Khmer, Burmese.
_UNSPACED = (
    "\u3005-\u3007\u3021-\u3029\u3038-\u303c\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\U0001b000-\U0001b16f"
    "\u3105-\u312f\u31a0-\u31bf\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\ud7b0-\ud7fb"
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf\u1780-\u17b3\u1000-\u103f\u1050-\u108f"
)

_SEED = 20  # of the permutations; another seed finds other borderline pairs
_BATCH_WORDS = 60_000  # hashed at a time: the arrays stay in the processor's cache
_CACHED_WORDS = 100_000  # word hashes remembered, some 15 MB
_CACHED_LETTERS = 40  # of the longest word remembered
_CACHED_SHINGLES = 200_000  # remembered while candidates are compared, some 25 MB
_MISSED_WEIGHT = 0.95  # of pairs above the threshold that no band finds, against comparisons made for nothing
_CROWD = 64  # kept rows that one bucket remembers
_REPORT_ROWS = 1000


def split_words(text: str) -> list[str]:
    """Words in order: NFKC, case folded, runs of letters, digits and their accents; the rest only separates.

    Where a script has no spaces between words, each character with its accents is a word of its own.
    """
    if text.isascii():
        return text.encode("ascii").translate(_ASCII_WORDS).decode("ascii").split()
    folded = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold()
    return _word_pattern().findall(unicodedata.normalize("NFKC", folded))


@cache
def _word_pattern() -> re.Pattern[str]:
    """One word; `re` knows no class for combining marks, without which words of Indic scripts would fall apart."""
    marks = [code for code in range(0x300, 0xE01F0) if unicodedata.category(chr(code))[0] == "M"]
    ranges = []
    for _, run in groupby(enumerate(marks), key=lambda pair: pair[1] - pair[0]):
        codes = [code for _, code in run]
        ranges.append(f"{chr(codes[0])}-{chr(codes[-1])}")
    mark, letter = f"[{''.join(ranges)}]", f"[^\\W_{_UNSPACED}]"
    return re.compile(f"[{_UNSPACED}]{mark}*|{letter}+(?:{mark}+{letter}*)*")


def exact_key(conversation_text: str) -> bytes:
    """16 bytes, equal for texts that differ only in case and in how much white space stands where some stands."""
    folded = " ".join(conversation_text.casefold().split())
    return blake2b(folded.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _wordless_key(text: str) -> str:
    """What a text without words, such as emoji, is compared by; no shingle of words can equal it."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def shingle_text(text: str, shingle_words: int) -> frozenset[str]:
    """The runs of that many words in a text; a shorter text is one shingle, whole."""
    found = split_words(text)
    if len(found) <= shingle_words:
        return frozenset((" ".join(found) or _wordless_key(text),))
    return frozenset(map(" ".join, zip(*(found[start:] for start in range(shingle_words)), strict=False)))


def jaccard_similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """Shingles that both have, of those that either has; neither may be empty."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


# ---------------------------------------------------------------------------------------------------------- signatures


def _mix_bits(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all 64: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _odd_multipliers(count: int) -> NDArray[np.uint64]:
    """Odd numbers that look random, the same everywhere: they tell the places in a sum apart."""
    return _mix_bits(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


class _WordHashes(dict[str, int]):
    """64-bit hashes of words, the same in every process (Python's own are not)."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        if len(self) >= _CACHED_WORDS:
            self.clear()
        if len(word) <= _CACHED_LETTERS:
            self[word] = value
        return value


def choose_banding(near: float, permutations: int) -> tuple[int, int]:
    """Bands, and permutations per band, of those that fit the one with the least weighted error at a threshold.

    A pair of similarity s shares at least one of b bands of r rows with probability 1 - (1 - s^r)^b (Mining of Massive
    Datasets, 3.4). The error is the area under that curve below the threshold, and over it above. Missed pairs weigh
    most, as pairs found for nothing only cost a comparison: 128 permutations for 0.8 give 16 bands of 8, which
    find 95 % of the pairs at 0.8, and 99.99 % at 0.9.
    """
    similarity = (np.arange(1000) + 0.5) / 1000
    below = similarity < near

    def error(choice: tuple[int, int]) -> float:
        bands, rows = choice
        found = 1 - (1 - similarity**rows) ** bands
        missed = float((1 - found)[~below].sum())
        return _MISSED_WEIGHT * missed + (1 - _MISSED_WEIGHT) * float(found[below].sum())

    return min(((b, r) for b in range(1, permutations + 1) for r in range(1, permutations // b + 1)), key=error)


class MinHashSignatures:
    """MinHash band keys of texts: texts that share one are worth comparing. Needs 8 bytes a band and row."""

    bands: int

    def __init__(self, settings: DeduplicationSettings) -> None:
        if settings.near is None:
            raise ValueError("duplicates.near is null: near-duplicates are not looked for, so there is nothing to sign")
        self.bands, self._rows_per_band = choose_banding(settings.near, settings.permutations)
        self._shingle_words = settings.shingle_words
        self._word_hashes = _WordHashes()
        self._filler = self._word_hashes[""]
        self._multipliers = _odd_multipliers(max(self._shingle_words, self._rows_per_band))

    def of(self, texts: Sequence[str]) -> NDArray[np.uint64]:
        """Keys [rows, bands]; they depend on each text alone, and are the same in every process and machine."""
        parts = [self._band_keys(*self._shingle_hashes(*part)) for part in self._hashed_words(texts)]
        return np.concatenate(parts) if parts else np.empty((0, self.bands), dtype=np.uint64)

    def _hashed_words(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
        """Hashes of the words of many rows in one list, and how many each row has; short rows are filled up."""
        hashes: list[int] = []
        lengths: list[int] = []
        hash_of = self._word_hashes.__getitem__
        for text in texts:
            found = split_words(text) or [_wordless_key(text)]
            hashes.extend(map(hash_of, found))
            if len(found) < self._shingle_words:
                hashes.extend([self._filler] * (self._shingle_words - len(found)))
            lengths.append(max(len(found), self._shingle_words))
            if len(hashes) >= _BATCH_WORDS:
                yield hashes, lengths
                hashes, lengths = [], []
        if lengths:
            yield hashes, lengths

    def _shingle_hashes(self, hashes: list[int], lengths: list[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Hashes of the shingles, and where each row's begin and the last one's end."""
        width = self._shingle_words
        of_words = np.array(hashes, dtype=np.uint64)
        starts = len(of_words) - width + 1
        sums = np.zeros(starts, dtype=np.uint64)
        for place in range(width):
            sums += of_words[place : place + starts] * self._multipliers[place]
        inside = np.ones(starts, dtype=np.bool_)
        ends = np.cumsum(lengths)
        for back in range(1, width):  # shingles that begin here would run into the next row
            inside[ends[:-1] - back] = False
        offsets = np.zeros(len(lengths) + 1, dtype=np.uint64)
        offsets[1:] = np.cumsum(np.array(lengths) - width + 1)
        return _mix_bits(sums[inside]), offsets

    def _band_keys(self, hashes: NDArray[np.uint64], offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
        count = self.bands * self._rows_per_band
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, count, _SEED)
        minima = np.array(matrix.to_rows(), dtype=np.uint64).reshape(-1, self.bands, self._rows_per_band)
        sums: NDArray[np.uint64] = (minima * self._multipliers[: self._rows_per_band]).sum(axis=2, dtype=np.uint64)
        return _mix_bits(sums)


# ------------------------------------------------------------------------------------------------------------ clusters


@dataclass(frozen=True, slots=True)
class RowCluster:
    """Rows, by index, of which one is kept; each of the others is similar to it."""

    kept: int
    dropped: tuple[int, ...]


def _find_shared_keys(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows whose key another row has too, and the number of each one's bucket."""
    order = np.argsort(keys)
    ordered = keys[order]
    follows = np.zeros(len(keys) + 1, dtype=np.bool_)  # whether a key is that before it
    follows[1:-1] = ordered[1:] == ordered[:-1]
    shared = follows[1:] | follows[:-1]
    return order[shared], np.cumsum(~follows[:-1][shared]) - 1


class _BandBuckets:
    """Which rows share a band key, and the kept rows of each bucket; a place is a position among such rows, by rank."""

    def __init__(self, band_keys: NDArray[np.uint64], by_rank: NDArray[np.int64]) -> None:
        bucket_of = np.full(band_keys.shape, -1, dtype=np.int32)
        capacities = []
        total = 0
        for band in range(band_keys.shape[1]):
            rows, number = _find_shared_keys(band_keys[:, band])
            bucket_of[rows, band] = number + total
            # The last row of a bucket has nobody to be remembered for.
            capacities.append(np.minimum(np.bincount(number) - 1, _CROWD).astype(np.uint8))
            total += len(capacities[-1])
        shares: NDArray[np.bool_] = np.any(bucket_of >= 0, axis=1)
        self.handled = np.flatnonzero(shares[by_rank])
        """Rows of better rank than that at a place."""
        self.rows = by_rank[self.handled]
        self._of = bucket_of[self.rows]
        del bucket_of
        slots = sum(int(part.sum()) for part in capacities)
        self._offsets = np.zeros(total + 1, dtype=np.min_scalar_type(slots))
        np.cumsum(np.concatenate(capacities), out=self._offsets[1:])
        self._kept = np.empty(slots, dtype=np.int32)
        self._counts = np.zeros(total, dtype=np.uint8)

    def keep(self, place: int) -> None:
        """Remember a kept row in its buckets, while they have room."""
        for bucket in self._of[place].tolist():
            if bucket >= 0:
                slot = int(self._offsets[bucket]) + int(self._counts[bucket])
                if slot < self._offsets[bucket + 1]:
                    self._kept[slot] = place
                    self._counts[bucket] += 1

    def candidates(self, place: int) -> list[int]:
        """Places of kept rows in the buckets of a row: those that share most of them first, then by rank."""
        shared: Counter[int] = Counter()
        for bucket in self._of[place].tolist():
            if bucket >= 0 and (count := int(self._counts[bucket])):
                start = int(self._offsets[bucket])
                shared.update(self._kept[start : start + count].tolist())
        return [other for other, _ in sorted(shared.items(), key=lambda pair: (-pair[1], pair[0]))]


class _ShingleCache:
    """Shingles of rows, those last asked for remembered."""

    def __init__(self, text_of: Callable[[int], str], shingle_words: int) -> None:
        self._text_of = text_of
        self._shingle_words = shingle_words
        self._remembered: OrderedDict[int, frozenset[str]] = OrderedDict()
        self._total = 0

    def __call__(self, row: int) -> frozenset[str]:
        if row in self._remembered:
            self._remembered.move_to_end(row)
            return self._remembered[row]
        found = self._remembered[row] = shingle_text(self._text_of(row), self._shingle_words)
        self._total += len(found)
        while self._total > _CACHED_SHINGLES and len(self._remembered) > 1:
            self._total -= len(self._remembered.popitem(last=False)[1])
        return found


def cluster_duplicates(
    band_keys: NDArray[np.uint64],
    rank: NDArray[np.int64],
    text_of: Callable[[int], str],
    settings: DeduplicationSettings,
    progress: Callable[[int], None],
) -> list[RowCluster]:
    """Rows to drop, with the row that each is a near-duplicate of; best rank first.

    In the order of `rank` (unique; lower is kept rather) a row is dropped if it is similar to a kept row that it shares
    a bucket with, else kept. So nothing is dropped through a chain of others, two kept rows that were candidates are
    never similar, and the order of the rows does not matter. `text_of` gives a row's text and is asked for candidates
    only; `progress` is told now and then how many rows are done with.

    A bucket remembers its first 64 kept rows and no more: so many that are not similar to each other share a key only
    through boilerplate that all rows have, and comparing all pairs of them would take time quadratic in the rows. Rows
    beyond those still find each other in buckets that are not crowded, the surer the more similar they are. Memory
    beside the keys: 4 bytes a row and band, and up to 5 more a row and band where every row shares a bucket.
    """
    if settings.near is None or not len(band_keys):
        progress(len(band_keys))
        return []
    buckets = _BandBuckets(band_keys, np.argsort(rank))
    shingles_of = _ShingleCache(text_of, settings.shingle_words)
    rows = buckets.rows
    kept_of = np.full(len(rows), -1, dtype=np.int32)
    for place in range(len(rows)):
        row = int(rows[place])
        similar = (
            other
            for other in buckets.candidates(place)
            if _is_similar(shingles_of(row), shingles_of(int(rows[other])), settings.near)
        )
        if (kept := next(similar, None)) is None:
            buckets.keep(place)
        else:
            kept_of[place] = kept
        if place % _REPORT_ROWS == 0:
            progress(int(buckets.handled[place]))
    progress(len(band_keys))
    dropped = np.flatnonzero(kept_of >= 0)
    dropped = dropped[np.argsort(kept_of[dropped], kind="stable")]
    return [
        RowCluster(int(rows[kept]), tuple(int(rows[place]) for place in places))
        for kept, places in groupby(dropped, key=lambda place: int(kept_of[place]))
    ]


def _is_similar(one: frozenset[str], other: frozenset[str], near: float) -> bool:
    """Whether two sets reach the threshold; sets of too different sizes cannot."""
    fewer, more = sorted((len(one), len(other)))
    return fewer / more >= near and jaccard_similarity(one, other) >= near
