"""Benchmark leakage: rows that share a run of words with an evaluation set.

As in Brown et al. 2020 (Language Models are Few-Shot Learners, appendix C): texts are compared without case,
punctuation and white space, by n-grams of 13 words. They took a smaller n, down to 8, for benchmarks of shorter
documents; here a document that is shorter, but has at least 8 words, counts as one n-gram. And no n-gram is forgiven
for being frequent (they ignored those in more than 10 training documents, as boilerplate): every overlap is reported
with its words. So documents should be what a benchmark asks and answers, without an instruction that is the same in all
of them: every row that begins with the same instruction would match it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from ratchet.data.deduplication import split_words

LEAST_WORDS = 8
"""Of a document that is looked for inside longer texts (Brown et al. 2020, appendix C)."""

_ROOT = 0xD1342543DE82EF95  # odd, so that its powers can be divided by modulo 2^64
_SEED = 13
_UNKNOWN = -1
_LEAST_POWERS = 1024
_SPARE_BITS = 3  # at most one entry in 8 is set


def _powers(root: int, count: int) -> NDArray[np.uint64]:
    """The first powers of a number, from the zeroth on, modulo 2^64."""
    factors = np.full(count, root, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


@dataclass(frozen=True)
class LeakageMatch:
    """Words, in order, that a text shares with a benchmark."""

    benchmark: str
    words: str


@dataclass(frozen=True)
class _NgramIndex:
    """The distinct n-grams of one length, by hash: whose they are, and where their words stand."""

    hashes: NDArray[np.uint64]
    benchmarks: NDArray[np.int32]
    starts: NDArray[np.int64]
    shift: np.uint64
    seen: NDArray[np.bool_]
    """Whether any hash has these leading bits: nearly all n-grams without a match end here."""

    def like(self, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, int, int]]:
        """Every n-gram whose hash is among these, in their order: position there, benchmark, start."""
        places = np.flatnonzero(self.seen[hashes >> self.shift])
        if not len(places):
            return
        wanted = hashes[places]
        first = np.searchsorted(self.hashes, wanted)
        first[first == len(self.hashes)] = 0
        for at in np.flatnonzero(self.hashes[first] == wanted).tolist():
            for entry in range(int(first[at]), len(self.hashes)):
                if self.hashes[entry] != wanted[at]:
                    break
                yield int(places[at]), int(self.benchmarks[entry]), int(self.starts[entry])


class BenchmarkIndex:
    """The documents of evaluation sets, ready to be looked for. Needs some 100 bytes a word of theirs.

    A document is one sequence of words: n-grams run over its line breaks, as they do over those of a row (a line break
    more or less hides no leak), and never from one document into the next. A document too short for an n-gram is
    `unchecked`: it matches only a row, or a single line of one, that has its words and no others; one of a single word,
    such as an answer `yes`, matches only a whole row.
    """

    documents: dict[str, int]
    """Documents of each benchmark."""
    unchecked: dict[str, int]
    """Those of them that are too short for an n-gram."""

    def __init__(self, documents: Mapping[str, Sequence[str]], ngram_words: int) -> None:
        self.documents = {name: len(texts) for name, texts in documents.items()}
        self.unchecked = dict.fromkeys(documents, 0)
        self._names = list(documents)
        self._ids: dict[str, int] = {}
        self._short: dict[tuple[str, ...], list[int]] = {}
        self._powers = self._inverses = np.ones(1, dtype=np.uint64)
        tokens: list[NDArray[np.int32]] = []
        spans: dict[int, list[tuple[int, int, int]]] = {}
        total = 0
        for number, name in enumerate(self._names):
            for text in documents[name]:
                found = split_words(text)
                if len(found) < min(ngram_words, LEAST_WORDS):
                    self._add_short(found, number)
                    continue
                ids = [self._ids.setdefault(word, len(self._ids)) for word in found]
                spans.setdefault(min(ngram_words, len(ids)), []).append((number, total, total + len(ids)))
                tokens.append(np.array(ids, dtype=np.int32))
                total += len(ids)
        self._tokens = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32)
        # One more than there are words: the last, in place -1, stands for all words that no document has.
        self._numbers = np.random.PCG64(_SEED).random_raw(len(self._ids) + 1)
        sums = self._running_sums(self._tokens)
        self._ngrams = {length: self._collect(sums, length, spans[length]) for length in sorted(spans, reverse=True)}
        shorter = [span for length in spans if length < ngram_words for span in spans[length]]
        opening = [(number, start, start + LEAST_WORDS) for number, start, _ in shorter]
        self._ngram_words = ngram_words
        self._openings = self._collect(sums, LEAST_WORDS, opening) if opening else None
        self._powers = self._inverses = np.ones(1, dtype=np.uint64)  # as many as there are words: too many for a row

    def _add_short(self, found: list[str], number: int) -> None:
        self.unchecked[self._names[number]] += 1
        whose = self._short.setdefault(tuple(found), []) if found else []
        if number not in whose:
            whose.append(number)

    def _collect(self, sums: NDArray[np.uint64], length: int, spans: list[tuple[int, int, int]]) -> _NgramIndex:
        """The n-grams of some documents (benchmark, start, end), each once a benchmark."""
        counts = np.array([end - start - length + 1 for _, start, end in spans])
        first = np.repeat([start for _, start, _ in spans], counts)
        starts = first + np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        hashes = self._hashes(sums, length)[starts]
        benchmarks = np.repeat(np.array([number for number, _, _ in spans], dtype=np.int32), counts)
        order = np.lexsort((starts, benchmarks, hashes))
        hashes, benchmarks, starts = hashes[order], benchmarks[order], starts[order]
        new = np.concatenate(([True], (hashes[1:] != hashes[:-1]) | (benchmarks[1:] != benchmarks[:-1])))
        bits = max(len(hashes), 2).bit_length() + _SPARE_BITS
        seen = np.zeros(2**bits, dtype=np.bool_)
        seen[hashes >> (shift := np.uint64(64 - bits))] = True
        return _NgramIndex(hashes[new], benchmarks[new], starts[new], shift, seen)

    def _running_sums(self, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Sums over the words before each place, of numbers times powers of the root, modulo 2^64."""
        if len(ids) >= len(self._powers):
            size = max(2 * len(self._powers), len(ids) + 1, _LEAST_POWERS)
            self._powers = _powers(_ROOT, size)
            self._inverses = _powers(pow(_ROOT, -1, 2**64), size)
        sums = np.zeros(len(ids) + 1, dtype=np.uint64)
        np.cumsum(self._numbers[ids] * self._powers[: len(ids)], out=sums[1:])
        return sums

    def _hashes(self, sums: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
        """Hash of each n-gram, in time that does not depend on n (Karp and Rabin 1987, with running sums)."""
        hashes: NDArray[np.uint64] = (sums[length:] - sums[:-length]) * self._inverses[: len(sums) - length]
        return hashes

    def matches(self, text: str) -> list[LeakageMatch]:
        """The first words that a text shares with each benchmark, in the benchmarks' order; at most one each."""
        if not self._names:
            return []
        lines = [split_words(line) for line in text.splitlines()] if self._short else [split_words(text)]
        found = [word for line in lines for word in line]
        shared: dict[int, str] = {}
        ids = np.fromiter(map(self._ids.get, found, repeat(_UNKNOWN)), dtype=np.int32, count=len(found))
        sums = self._running_sums(ids)
        for length in self._lengths(sums):
            for position, number, start in self._ngrams[length].like(self._hashes(sums, length)):
                here, there = slice(position, position + length), slice(start, start + length)
                if number not in shared and np.array_equal(ids[here], self._tokens[there]):
                    shared[number] = " ".join(found[here])
        for sequence in (found, *(line for line in lines if 1 < len(line) < LEAST_WORDS)):
            for number in self._short.get(tuple(sequence), ()):
                shared.setdefault(number, " ".join(sequence))
        return [LeakageMatch(self._names[number], shared[number]) for number in sorted(shared)]

    def _lengths(self, sums: NDArray[np.uint64]) -> Iterator[int]:
        """Lengths of n-grams to look for: those of shorter documents only where some document's opening words stand."""
        if self._ngram_words in self._ngrams and self._ngram_words < len(sums):
            yield self._ngram_words
        if self._openings is None or len(sums) <= LEAST_WORDS:
            return
        if next(self._openings.like(self._hashes(sums, LEAST_WORDS)), None):
            yield from (length for length in self._ngrams if length < min(self._ngram_words, len(sums)))
