"""Stores the answers of a generation in a ledger and in sealed shards, so that no saved answer is lost or recomputed.

Each answer is first a line of the ledger. The line is written at once, so it survives a crash of the process, and is
synced about every second (`sync`), so a crash of the machine loses about a second of work. Complete runs of
`shard_rows` consecutive answers are sealed as a shard, in the order of the prompts. The next worker removes the lines
of sealed answers from the ledger. Lines have the journal's format: a line that a crash or a full disk damaged is
skipped, and its prompt answered again. A full disk does not stop the worker.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from ratchet.errors import DamagedFileError
from ratchet.inference.spec import ANSWERS, SHARD_KIND, GenerationAnswer, GenerationPaths
from ratchet.runs.journal import Journal, JournalReader
from ratchet.storage import files

EVENT_KIND = "answer"
_IN_LEDGER, _SEALED = 1, 2


class AnswerLedger:
    """All answers of a run. Only the process that holds the run's lock may write it.

    Args:
        paths: paths of the generation.
        attempt: number of this attempt, for the lines.
        total: number of answers of the complete generation.
        on_notice: called with a message about a damaged shard or damaged lines.
    """

    def __init__(self, paths: GenerationPaths, attempt: int, total: int, on_notice: Callable[[str], None]) -> None:
        self._paths, self._total = paths, total
        files.make_directory(paths.shards)
        files.remove_partials(paths.shards)
        self._state = bytearray(total)
        """For each index: 0, _IN_LEDGER or _SEALED."""
        self._sealed = dict(_verified_shards(paths, on_notice))
        """Number of answers of each shard, by its first index."""
        for first, count in self._sealed.items():
            self._state[first : first + count] = bytes([_SEALED]) * count
        self._unsealed: dict[int, GenerationAnswer] = {}
        self._read_ledger(on_notice)
        self._rewrite_ledger(attempt, on_notice)
        self._journal, self._closed = Journal(paths.ledger, attempt), False

    def has(self, index: int) -> bool:
        """Return whether an answer exists."""
        return self._state[index] != 0

    @property
    def count(self) -> int:
        """Number of answers."""
        return len(self._unsealed) + sum(self._sealed.values())

    def add(self, answer: GenerationAnswer) -> None:
        """Add an answer, unless one with its index exists."""
        if not self.has(answer.index):
            self._store(answer)
            self._journal.append(EVENT_KIND, **asdict(answer))

    def _store(self, answer: GenerationAnswer) -> None:
        self._unsealed[answer.index] = answer
        self._state[answer.index] = _IN_LEDGER

    def sync(self) -> None:
        """Sync all added answers to disk. Raises OSError if that fails."""
        self._journal.sync()

    def seal(self, rows: int) -> int:
        """Seal all complete runs of `rows` consecutive answers; return the number of newly sealed answers.

        A run may be shorter before an existing shard and at the end.

        Raises:
            OSError: a shard cannot be written; nothing is lost, and a later call tries again.
        """
        sealed = 0
        for first, stop in list(self._gaps()):
            for begin in range(first, stop, rows):
                end = min(begin + rows, stop)
                if self._state.find(0, begin, end) >= 0:
                    break
                self._seal(begin, end)
                sealed += end - begin
        return sealed

    def read_all(self) -> Iterator[GenerationAnswer]:
        """Yield every answer in the order of indices. All must be sealed.

        Raises:
            DamagedFileError: a shard holds another index than expected, or answers are missing.
        """
        next_index = 0
        for first in sorted(self._sealed):
            for answer in _read_answers(self._paths.shard(first)):
                if answer.index != next_index:
                    where = self._paths.shard(first)
                    raise DamagedFileError(
                        f"{where}: found answer {answer.index}, expected {next_index}; remove the shard"
                    )
                yield answer
                next_index += 1
        if next_index != self._total:
            raise DamagedFileError(
                f"{self._paths.shards}: found {next_index} of {self._total} answers; run `ratchet generate` again"
            )

    def close(self) -> None:
        """Close the ledger. May be called more than once."""
        if not self._closed:
            self._closed = True
            self._journal.close()

    def remove(self) -> None:
        """Delete ledger and shards, after the result was sealed."""
        self.close()
        for first in sorted(self._sealed):
            files.remove_sealed(self._paths.shard(first))
        self._paths.ledger.unlink(missing_ok=True)

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of indices that are not in a shard, as (first, one past the last)."""
        at = 0
        for first in [*sorted(self._sealed), self._total]:
            if first > at:
                yield at, first
            at = max(at, first + self._sealed.get(first, 0))

    def _seal(self, begin: int, end: int) -> None:
        with files.sealed_directory(self._paths.shard(begin), SHARD_KIND) as scratch:
            lines = [self._unsealed[index].to_line().encode() for index in range(begin, end)]
            files.write_blocks(scratch / ANSWERS, [lines])
        self._sealed[begin] = end - begin
        self._state[begin:end] = bytes([_SEALED]) * (end - begin)
        for index in range(begin, end):
            del self._unsealed[index]

    def _read_ledger(self, on_notice: Callable[[str], None]) -> None:
        """Read the answers that are not in a shard; the first of several lines with the same index counts."""
        reader, damaged = JournalReader(self._paths.ledger), 0
        for event in reader.read():
            try:
                answer = GenerationAnswer.from_event(event.data)
            except (TypeError, ValueError):
                damaged += 1
                continue
            if 0 <= answer.index < self._total and not self.has(answer.index):
                self._store(answer)
        if damaged := damaged + reader.damaged_lines:
            on_notice(f"{self._paths.ledger}: {damaged} damaged line(s) skipped; their prompts are answered again")

    def _rewrite_ledger(self, attempt: int, on_notice: Callable[[str], None]) -> None:
        """Replace the ledger by one without sealed answers. The rename makes this atomic."""
        if not self._paths.ledger.exists():
            return
        temporary = self._paths.ledger.with_name(f"{files.PARTIAL}{self._paths.ledger.name}")
        try:
            temporary.unlink(missing_ok=True)
            journal = Journal(temporary, attempt)
            try:
                for answer in self._unsealed.values():
                    journal.append(EVENT_KIND, **asdict(answer))
                journal.sync()
            finally:
                journal.close()
            files.before("rename", self._paths.ledger)
            temporary.replace(self._paths.ledger)
            files.fsync_directory(self._paths.root)
        except OSError as error:  # a full disk: the old ledger is valid too, but longer
            on_notice(f"{self._paths.ledger}: cannot be compacted, so it keeps the lines of sealed answers: {error}")


def _verified_shards(paths: GenerationPaths, on_notice: Callable[[str], None]) -> Iterator[tuple[int, int]]:
    """Yield first index and number of answers of each valid shard; remove a damaged shard."""
    end = 0
    for folder in sorted(paths.shards.iterdir(), key=lambda path: (len(path.name), path.name)):
        try:
            files.verify_sealed(folder, SHARD_KIND)
            indices = [answer.index for answer in _read_answers(folder)]
            first = int(folder.name.removeprefix("shard-"))
            if indices != list(range(first, first + len(indices))) or first < end or not indices:
                raise DamagedFileError(f"{folder}: holds other answers than its name says")
        except (DamagedFileError, ValueError, TypeError) as error:
            on_notice(f"a shard is damaged, so its prompts are answered again: {error}")
            files.remove_sealed(folder)
            continue
        end = first + len(indices)
        yield first, len(indices)


def _read_answers(folder: Path) -> Iterator[GenerationAnswer]:
    with (folder / ANSWERS).open("rb") as stream:
        for line in stream:
            yield GenerationAnswer.from_event(json.loads(line))
