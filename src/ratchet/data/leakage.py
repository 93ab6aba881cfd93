"""Detects benchmark leakage: rows that share a sequence of words with an evaluation set.

The method follows Brown et al. 2020 (Language Models are Few-Shot Learners, appendix C): texts are compared without
case, punctuation and white space, by n-grams of 13 words. There are two differences:

- For benchmarks with shorter documents, Brown et al. used a smaller n, down to 8. Here a shorter document with at least
  8 words counts as one n-gram.
- Brown et al. ignored n-grams in more than 10 training documents as boilerplate. Here every overlap is reported with
  its words. So a benchmark's documents should contain its questions and answers without a shared instruction, which
  would match every row that begins with the same instruction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from ratchet.data.deduplication import split_words

MIN_WORDS = 8
"""Minimum length, in words, of a document that is searched for inside longer texts (Brown et al. 2020, appendix C)."""
_SEED = 13
_UNKNOWN = -1
_SPARE_BITS = 3  # `_NgramIndex.seen` has at least 8 entries per n-gram, so at most one entry in 8 is set


def _draw_numbers(count: int) -> NDArray[np.uint64]:
    return np.random.PCG64(_SEED).random_raw(count)


@dataclass(frozen=True)
class LeakageMatch:
    """A sequence of words that a text shares with a benchmark."""

    benchmark: str
    words: str


@dataclass(frozen=True)
class _NgramIndex:
    """The distinct n-grams of one length, sorted by hash, with their benchmark and the position of their words."""

    hashes: NDArray[np.uint64]
    benchmarks: NDArray[np.int32]
    starts: NDArray[np.int64]
    shift: np.uint64
    seen: NDArray[np.bool_]
    """For each value of the leading bits, whether any hash has it. That rules out nearly all n-grams without match."""

    def find_matches(self, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, int, int]]:
        """Yield (position in `hashes`, benchmark, start of the n-gram) for each hash and each n-gram with this hash."""
        positions = np.flatnonzero(self.seen[hashes >> self.shift])
        if not len(positions):
            return
        candidates = hashes[positions]
        first = np.searchsorted(self.hashes, candidates)
        first[first == len(self.hashes)] = 0
        for k in np.flatnonzero(self.hashes[first] == candidates).tolist():
            for entry in range(int(first[k]), len(self.hashes)):
                if self.hashes[entry] != candidates[k]:
                    break
                yield int(positions[k]), int(self.benchmarks[entry]), int(self.starts[entry])


class BenchmarkIndex:
    """Index of the documents of evaluation sets. It needs about 100 bytes per word.

    A document is one sequence of words. Its n-grams, like those of a row, ignore line breaks, so that a different line
    break does not hide a leak. An n-gram never spans two documents. A document that is too short for an n-gram (fewer
    than `MIN_WORDS`, or than `ngram_words` if that is smaller) counts as `unchecked`: it matches only a row, or one
    line of a row, with exactly the same words. A document of a single word, such as the answer `yes`, matches only a
    complete row.
    """

    documents: dict[str, int]
    """Number of documents in each benchmark."""
    unchecked: dict[str, int]
    """Number of documents in each benchmark that are too short for an n-gram."""

    def __init__(self, documents: Mapping[str, Sequence[str]], ngram_words: int) -> None:
        self.documents = {name: len(texts) for name, texts in documents.items()}
        self.unchecked = dict.fromkeys(documents, 0)
        self._names = list(documents)
        self._ids: dict[str, int] = {}
        self._short: dict[tuple[str, ...], list[int]] = {}
        tokens: list[NDArray[np.int32]] = []
        spans: dict[int, list[tuple[int, int, int]]] = {}
        total = 0
        for number, name in enumerate(self._names):
            for text in documents[name]:
                words = split_words(text)
                if len(words) < min(ngram_words, MIN_WORDS):
                    self.unchecked[name] += 1
                    benchmarks = self._short.setdefault(tuple(words), []) if words else []
                    if number not in benchmarks:
                        benchmarks.append(number)
                    continue
                ids = [self._ids.setdefault(word, len(self._ids)) for word in words]
                spans.setdefault(min(ngram_words, len(ids)), []).append((number, total, total + len(ids)))
                tokens.append(np.array(ids, dtype=np.int32))
                total += len(ids)
        self._tokens = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32)
        # The hash of an n-gram is the sum of its words' numbers, each times the multiplier of its place. There is one
        # more number than there are words: the last one, at index -1, is for words that no document has.
        width = max(ngram_words, MIN_WORDS)
        drawn = _draw_numbers(width + len(self._ids) + 1)
        self._multipliers, self._numbers = drawn[:width] | np.uint64(1), drawn[width:]
        numbers = self._numbers[self._tokens]
        self._ngrams = {length: self._collect(numbers, length, spans[length]) for length in sorted(spans, reverse=True)}
        shorter = [span for length in spans if length < ngram_words for span in spans[length]]
        openings = [(number, start, start + MIN_WORDS) for number, start, _ in shorter]
        self._ngram_words = ngram_words
        self._openings = self._collect(numbers, MIN_WORDS, openings) if openings else None

    def _collect(self, numbers: NDArray[np.uint64], length: int, spans: list[tuple[int, int, int]]) -> _NgramIndex:
        """Index the n-grams of documents, each given as (benchmark, start, end), without repetitions in a benchmark."""
        counts = np.array([end - start - length + 1 for _, start, end in spans])
        first = np.repeat([start for _, start, _ in spans], counts)
        starts = first + np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        hashes = self._hash_ngrams(numbers, length)[starts]
        benchmarks = np.repeat(np.array([number for number, _, _ in spans], dtype=np.int32), counts)
        order = np.lexsort((starts, benchmarks, hashes))
        hashes, benchmarks, starts = hashes[order], benchmarks[order], starts[order]
        is_new = np.concatenate(([True], (hashes[1:] != hashes[:-1]) | (benchmarks[1:] != benchmarks[:-1])))
        bits = max(len(hashes), 2).bit_length() + _SPARE_BITS
        seen = np.zeros(2**bits, dtype=np.bool_)
        seen[hashes >> (shift := np.uint64(64 - bits))] = True
        return _NgramIndex(hashes[is_new], benchmarks[is_new], starts[is_new], shift, seen)

    def _hash_ngrams(self, numbers: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
        return np.convolve(numbers, self._multipliers[:length], "valid")  # modulo 2^64

    def matches(self, text: str) -> list[LeakageMatch]:
        """Return at most one match per benchmark, in the order of the benchmarks: the first shared words found."""
        if not self._names:
            return []
        lines = [split_words(line) for line in text.splitlines()] if self._short else [split_words(text)]
        words = [word for line in lines for word in line]
        shared: dict[int, str] = {}
        ids = np.fromiter(map(self._ids.get, words, repeat(_UNKNOWN)), dtype=np.int32, count=len(words))
        numbers = self._numbers[ids]
        for length in self._lengths_to_search(numbers):
            for position, number, start in self._ngrams[length].find_matches(self._hash_ngrams(numbers, length)):
                in_text, in_document = slice(position, position + length), slice(start, start + length)
                if number not in shared and np.array_equal(ids[in_text], self._tokens[in_document]):
                    shared[number] = " ".join(words[in_text])
        for sequence in (words, *(line for line in lines if 1 < len(line) < MIN_WORDS)):
            for number in self._short.get(tuple(sequence), ()):
                shared.setdefault(number, " ".join(sequence))
        return [LeakageMatch(self._names[number], shared[number]) for number in sorted(shared)]

    def _lengths_to_search(self, numbers: NDArray[np.uint64]) -> Iterator[int]:
        """Yield the n-gram lengths to search for.

        The lengths of shorter documents are searched for only if the text contains the first words of such a document.
        """
        if self._ngram_words in self._ngrams and self._ngram_words <= len(numbers):
            yield self._ngram_words
        if self._openings is None or len(numbers) < MIN_WORDS:
            return
        if next(self._openings.find_matches(self._hash_ngrams(numbers, MIN_WORDS)), None):
            yield from (length for length in self._ngrams if length < min(self._ngram_words, len(numbers) + 1))
