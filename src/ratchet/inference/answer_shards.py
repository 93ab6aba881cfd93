"""The answers of a run on their way into sealed shards: nothing that was answered is answered again, or lost.

An answer is a line of the ledger first. It is written at once, so that it survives the death of the process, and made
durable about every second (`keep`), so that the death of the machine costs a second of work. Where consecutive places
are answered, `shard_rows` of them are sealed together, in the order of the prompts. The ledger's lines of sealed shards
are dropped when the next worker starts. Lines are written as the journal's are (run/journal.py): one that was torn by a
crash or a full disk is passed over, and its prompt answered again; a disk that takes nothing keeps nobody from working.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from ratchet.errors import DamagedFileError
from ratchet.inference.spec import ANSWERS, SHARD, GenerationAnswer, GenerationPaths
from ratchet.runs.journal import Journal, JournalReader
from ratchet.storage import files

KIND = "answer"
_HERE, _SEALED = 1, 2


class AnswerLedger:
    """All answers of a run so far. One process writes it, who holds the run's lock.

    Args:
        paths: of the run.
        attempt: number of this one; stands in the lines.
        total: places that there are.
        told: of a damaged shard, and of torn lines.
    """

    def __init__(self, paths: GenerationPaths, attempt: int, total: int, told: Callable[[str], None]) -> None:
        self._paths, self._total = paths, total
        files.make_directory(paths.shards)
        files.remove_partials(paths.shards)
        self._state = bytearray(total)
        """By place: nothing, _HERE or _SEALED."""
        self._sealed = dict(_verified_shards(paths, told))
        """By first place: how many."""
        for first, count in self._sealed.items():
            self._state[first : first + count] = bytes([_SEALED]) * count
        self._waiting = self._read(told)
        self._drop_sealed(attempt, told)
        self._journal, self._closed = Journal(paths.ledger, attempt), False

    def has(self, place: int) -> bool:
        """Whether a place is answered."""
        return self._state[place] != 0

    @property
    def count(self) -> int:
        """Answers so far."""
        return len(self._waiting) + sum(self._sealed.values())

    def add(self, answer: GenerationAnswer) -> None:
        """Take an answer; one that is there already stays as it is."""
        if not self.has(answer.place):
            self._take(answer)
            self._journal.append(KIND, **asdict(answer))

    def _take(self, answer: GenerationAnswer) -> None:
        self._waiting[answer.place] = answer
        self._state[answer.place] = _HERE

    def keep(self) -> None:
        """Make all that was added durable. Raises OSError when the disk does not take it."""
        self._journal.sync()

    def seal(self, rows: int) -> int:
        """Seal every `rows` consecutive answers that are there, fewer only before what is sealed already, and at the
        end; returns how many answers were sealed.

        Raises:
            OSError: the disk does not take it; nothing is lost, and a later call tries again.
        """
        sealed = 0
        for first, beyond in list(self._gaps()):
            for begin in range(first, beyond, rows):
                end = min(begin + rows, beyond)
                if self._state.find(0, begin, end) >= 0:
                    break
                self._seal(begin, end)
                sealed += end - begin
        return sealed

    def all(self) -> Iterator[GenerationAnswer]:
        """Every answer, in the order of places. All must be sealed, and each once."""
        next_place = 0
        for first in sorted(self._sealed):
            for answer in _read_answers(self._paths.shard(first)):
                if answer.place != next_place:
                    where = self._paths.shard(first)
                    raise DamagedFileError(f"{where}: place {answer.place} stands where {next_place} is due; remove it")
                yield answer
                next_place += 1
        if next_place != self._total:
            raise DamagedFileError(f"{self._paths.shards}: {next_place} of {self._total} answers; repeat")

    def close(self) -> None:
        """Write what waits. May be called twice."""
        if not self._closed:
            self._closed = True
            self._journal.close()

    def remove(self) -> None:
        """Give back the space: the result holds all of it."""
        self.close()
        for first in sorted(self._sealed):
            files.remove_sealed(self._paths.shard(first))
        self._paths.ledger.unlink(missing_ok=True)

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Places that are in no shard: first, and the one behind the last."""
        at = 0
        for first in [*sorted(self._sealed), self._total]:
            if first > at:
                yield at, first
            at = max(at, first + self._sealed.get(first, 0))

    def _seal(self, begin: int, end: int) -> None:
        with files.sealed_directory(self._paths.shard(begin), SHARD) as scratch:
            lines = [self._waiting[place].line().encode() for place in range(begin, end)]
            files.write_blocks(scratch / ANSWERS, [lines])
        self._sealed[begin] = end - begin
        self._state[begin:end] = bytes([_SEALED]) * (end - begin)
        for place in range(begin, end):
            del self._waiting[place]

    def _read(self, told: Callable[[str], None]) -> dict[int, GenerationAnswer]:
        """What the ledger has of places that are in no shard; of two lines of one place the first counts."""
        self._waiting = {}
        reader, torn = JournalReader(self._paths.ledger), 0
        for event in reader.read():
            try:
                answer = GenerationAnswer.of(event.data)
            except (TypeError, ValueError):
                torn += 1
                continue
            if 0 <= answer.place < self._total and not self.has(answer.place):
                self._take(answer)
        if torn := torn + reader.damaged_lines:
            told(f"{self._paths.ledger}: {torn} damaged line(s) passed over; what they answered is answered again")
        return self._waiting

    def _drop_sealed(self, attempt: int, told: Callable[[str], None]) -> None:
        """Begin the ledger anew with what is in no shard. Before the rename all is in the old one, after it in this."""
        if not self._paths.ledger.exists():
            return
        aside = self._paths.ledger.with_name(f"{files.PARTIAL}{self._paths.ledger.name}")
        try:
            aside.unlink(missing_ok=True)
            journal = Journal(aside, attempt)
            try:
                for answer in self._waiting.values():
                    journal.append(KIND, **asdict(answer))
                journal.sync()
            finally:
                journal.close()
            files.before("rename", self._paths.ledger)
            aside.replace(self._paths.ledger)
            files.fsync_directory(self._paths.root)
        except OSError as error:  # a full disk: the old one serves as well, it is only longer
            told(f"{self._paths.ledger} stays as it is, with lines of sealed shards: {error}")


def _verified_shards(paths: GenerationPaths, told: Callable[[str], None]) -> Iterator[tuple[int, int]]:
    """First place and count of each shard that is whole; one that is damaged is removed, and answered again."""
    end = 0
    for folder in sorted(paths.shards.iterdir(), key=lambda path: (len(path.name), path.name)):
        try:
            files.verify_sealed(folder, SHARD)
            places = [answer.place for answer in _read_answers(folder)]
            first = int(folder.name.removeprefix("shard-"))
            if places != list(range(first, first + len(places))) or first < end or not places:
                raise DamagedFileError(f"{folder}: holds other places than its name says")
        except (DamagedFileError, ValueError, TypeError) as error:
            told(f"a shard is damaged, and what it held is answered again: {error}")
            files.remove_sealed(folder)
            continue
        end = first + len(places)
        yield first, len(places)


def _read_answers(folder: Path) -> Iterator[GenerationAnswer]:
    with (folder / ANSWERS).open("rb") as stream:
        for line in stream:
            yield GenerationAnswer.of(json.loads(line))
