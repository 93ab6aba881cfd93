"""Stores the answers of a generation, and writes and reads its output: JSON lines or Parquet, with a card.

Answers are stored in a ledger and in sealed shards, so that no saved answer is lost or computed again. Each answer is
first a line of the ledger. The line is written at once, so it survives a crash of the process, and is synced about
every second (`sync`), so a crash of the machine loses about a second of work. `shard_rows` consecutive answers are
sealed as a shard, in the order of the prompts. The next worker removes the lines of sealed answers from the ledger.
Lines have the journal's format. A line that a crash or a full disk damaged is skipped, and its prompt is answered
again. A full disk does not stop the worker.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from ratchet.config.generate import Generate
from ratchet.errors import DamagedFileError, SettingsError, first_line
from ratchet.inference import prompts
from ratchet.inference.prompts import Prompt
from ratchet.inference.spec import (
    ANSWERS,
    CARD,
    SHARD_KIND,
    GenerationAnswer,
    GenerationCard,
    GenerationPaths,
    GenerationSpec,
    ReasoningParts,
    split_reasoning,
)
from ratchet.runs.directory import RESULT
from ratchet.runs.journal import Journal, JournalReader
from ratchet.storage import digests, files, output_card
from ratchet.storage.output_card import card_path

EVENT_KIND = "answer"
_IN_LEDGER, _SEALED = 1, 2

OUTPUT_ENDINGS = (".jsonl", ".parquet")
BLOCK_ROWS = 1000
LABEL_LOG_PROBABILITIES = "label_log_probabilities"
"""Key of a record if generate.labels is set. The value has the log-probability of each label in nats, or is null if the
backend cannot compute these."""
OBJECT_COLUMNS = ("fields", LABEL_LOG_PROBABILITIES)
"""Keys with objects as values, which Parquet stores as JSON text."""


class AnswerLedger:
    """All answers of a run. Only the process that holds the run's lock may write it.

    Args:
        paths: paths of the generation.
        attempt: number of this attempt, written to each line.
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
        self._journal, self._closed = Journal(paths.ledger, attempt, redacts=False), False

    def has(self, index: int) -> bool:
        """Return whether an answer exists."""
        return self._state[index] != 0

    @property
    def count(self) -> int:
        """Number of answers."""
        return len(self._unsealed) + sum(self._sealed.values())

    def add(self, answer: GenerationAnswer) -> None:
        """Add an answer, unless an answer with its index exists."""
        if not self.has(answer.index):
            self._store(answer)
            self._journal.append(EVENT_KIND, **asdict(answer))

    def _store(self, answer: GenerationAnswer) -> None:
        self._unsealed[answer.index] = answer
        self._state[answer.index] = _IN_LEDGER

    def sync(self) -> None:
        """Sync all added answers to disk. Raises OSError if the sync fails."""
        self._journal.sync()

    def seal(self, rows: int) -> int:
        """Seal all complete groups of `rows` consecutive answers; return the number of newly sealed answers.

        A group may be shorter before an existing shard and at the end.

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
        """Yield every answer in the order of indices. All answers must be sealed.

        Raises:
            DamagedFileError: a shard contains an unexpected index, or answers are missing.
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
        end = 0
        for first in [*sorted(self._sealed), self._total]:
            if first > end:
                yield end, first
            end = max(end, first + self._sealed.get(first, 0))

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
        """Replace the ledger by a file without sealed answers. The rename makes this atomic."""
        if not self._paths.ledger.exists():
            return
        temporary = self._paths.ledger.with_name(f"{files.PARTIAL}{self._paths.ledger.name}")
        try:
            temporary.unlink(missing_ok=True)
            journal = Journal(temporary, attempt, redacts=False)
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
                raise DamagedFileError(f"{folder}: contains other answers than its name indicates")
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


def seal_result(paths: GenerationPaths, spec: GenerationSpec, ledger: AnswerLedger) -> None:
    """Seal all records, in the order of the prompts, with the card.

    Raises:
        DamagedFileError: answers are missing.
        OSError: the files cannot be written; no partial result is left behind.
    """
    finish, totals = Counter[str](), Counter[str]()

    def lines() -> Iterator[list[bytes]]:
        records = _ordered_records(paths, spec, ledger)
        while block := list(islice(records, BLOCK_ROWS)):
            for record in block:
                finish[record["finish"]] += 1
                totals["prompt_tokens"] += record["prompt_tokens"] or 0
                totals["tokens"] += record["tokens"] or 0
            yield [encode_line(record) for record in block]

    with files.sealed_directory(paths.result, RESULT) as scratch:
        files.write_blocks(scratch / ANSWERS, lines())
        answers = finish.total()
        card = GenerationCard(
            spec=spec, id=spec.run_id, model_name="", prompts=answers // spec.generate.samples, faults=0,
            answers=answers, finish=dict(sorted(finish.items())), prompt_tokens=totals["prompt_tokens"],
            tokens=totals["tokens"],
        )  # fmt: skip
        card.save(scratch / CARD)


def _ordered_records(paths: GenerationPaths, spec: GenerationSpec, ledger: AnswerLedger) -> Iterator[dict[str, Any]]:
    answers, samples = ledger.read_all(), spec.generate.samples
    for prompt in prompts.read_prompts(paths.prompts):
        for sample in range(samples):
            answer = next(answers, None)
            if answer is None:
                raise DamagedFileError(f"{paths.shards}: fewer answers than prompts; run `ratchet generate` again")
            yield _build_record(prompt, sample, answer, spec)
    next(answers, None)  # runs the check after the last answer


def _build_record(prompt: Prompt, sample: int, answer: GenerationAnswer, spec: GenerationSpec) -> dict[str, Any]:
    parts = split_reasoning(answer.text, spec.generate.reasoning_tags, answer.starts_in_reasoning)
    if answer.reasoning is not None:
        parts = ReasoningParts(answer.reasoning.strip(), answer.text.strip())
    record: dict[str, Any] = {
        "id": prompt.id, "sample": sample, "prompt_digest": prompt.digest, "text": answer.text,
        "reasoning": parts.reasoning, "answer": parts.answer, "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens, "finish": answer.finish,
        "mean_log_probability": None if answer.tokens == 0 else answer.mean_log_probability,
        "model": spec.model.digest[: digests.SHORT], "reference": prompt.reference, "fields": dict(prompt.fields),
    }  # fmt: skip
    if labels := spec.generate.labels:
        by_label = (
            None
            if answer.label_log_probabilities is None
            else dict(zip(labels, answer.label_log_probabilities, strict=True))
        )
        record[LABEL_LOG_PROBABILITIES] = by_label
    return record


def encode_line(record: Any) -> bytes:
    """Encode a line of JSON. Keys keep their order, since a template may render a tool call as JSON."""
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def require_writable(output: Path) -> None:
    """Raise SettingsError if a path's ending is not a supported format, or if the file cannot be created."""
    if output.suffix not in OUTPUT_ENDINGS:
        raise SettingsError(
            f"--output {output}: found ending {output.suffix!r}; expected {' or '.join(OUTPUT_ENDINGS)}"
        )
    if not os.path.isfile(output):  # noqa: PTH113 (returns False for a name that is too long)
        files.require_writable(output, "--output")
        files.require_writable(card_path(output), "--output: its card")


def is_complete(output: Path, spec: GenerationSpec, digest_with: Callable[[Generate], str | None]) -> bool:
    """Return whether a file is the unchanged output of this generation.

    Args:
        output: the file.
        spec: specification of the generation.
        digest_with: returns the digest of the prompts that these settings make of the same records; None if invalid.

    Raises:
        SettingsError: the file exists and has another origin; the message names the difference.
    """

    def ignore_prompts_digest(card: GenerationCard, names: list[str]) -> list[str]:
        if {"generate.extra_fields", "generate.system_prompt"} & {*names} and digest_with(card.spec.generate) == (
            card.spec.prompts_digest
        ):  # the records are the same, so only these settings changed the prompts
            return [name for name in names if name != "prompts_digest"]
        return names

    return output_card.is_output_current(output, spec, GenerationCard, "generate", ignore_prompts_digest)


def read_card(output: Path) -> GenerationCard:
    """Read the card of an output.

    Raises:
        SettingsError: the file does not exist, or has no valid card next to it.
    """
    if output.is_dir():
        raise SettingsError(f"{output}: found a directory, expected a file")
    if not output.is_file():
        raise SettingsError(f"{output}: no such file; `ratchet generate PROMPTS --output {output.name}` writes it")
    card = output_card.read_card(output, GenerationCard)
    if card is None:
        raise SettingsError(
            f"{output}: not an output of `ratchet generate` ({output_card.explain_missing_card(output)}); "
            "restore the card that was written with it, or run its `ratchet generate` again"
        )
    return card


def write_output(paths: GenerationPaths, output: Path, model_name: str, faults: int) -> GenerationCard:
    """Write the sealed records and their card to `output`, atomically.

    Raises:
        OSError: the file cannot be written; no partial file is left behind.
    """
    source, card = paths.result / ANSWERS, GenerationCard.load(paths.result / CARD)

    def write_contents(temporary: Path) -> None:
        if output.suffix == ".parquet":
            files.before("write", temporary)
            with files.name_file_in_errors(temporary):
                _write_parquet(source, temporary, card.spec)
            files.fsync(temporary)
        else:
            with source.open("rb") as stream:
                files.write_blocks(temporary, batch_lines(stream))

    card = card.model_copy(update={"model_name": model_name, "faults": faults})
    return output_card.write_output(output, write_contents, card)


def batch_lines(stream: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group lines into blocks for `files.write_blocks`."""
    lines = iter(stream)
    while block := list(islice(lines, BLOCK_ROWS)):
        yield block


def _write_parquet(source: Path, target: Path, spec: GenerationSpec) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, count = pa.string(), pa.int64()
    schema = pa.schema(
        [
            ("id", text), ("sample", count), ("prompt_digest", text), ("text", text), ("reasoning", text),
            ("answer", text), ("prompt_tokens", count), ("tokens", count), ("finish", text),
            ("mean_log_probability", pa.float64()), ("model", text), ("reference", text), ("fields", text),
        ]
    )  # fmt: skip
    if spec.generate.labels:
        schema = schema.append(pa.field(LABEL_LOG_PROBABILITIES, text))
    with source.open("rb") as stream, pq.ParquetWriter(target, schema) as writer:
        for block in batch_lines(stream):
            writer.write_table(pa.Table.from_pylist([_flatten_record(line) for line in block], schema=schema))


def _flatten_record(line: bytes) -> dict[str, Any]:
    """Parse a record and encode its objects as JSON text."""
    record: dict[str, Any] = json.loads(line)
    for name in OBJECT_COLUMNS:
        if record.get(name) is not None:
            record[name] = json.dumps(record[name], ensure_ascii=False)
    return record


def read_records(output: Path, card: GenerationCard) -> Iterator[dict[str, Any]]:
    """Yield the records of an output of either format.

    Raises:
        DamagedFileError: the file does not match the SHA-256 on its card, or contains other records.
    """
    if digests.hash_file(output) != card.output:
        raise DamagedFileError(f"{output}: the file changed since it was written; run its `ratchet generate` again")
    try:
        yield from _read_parquet(output) if output.suffix == ".parquet" else _read_lines(output)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{output}: does not hold records of `ratchet generate` ({first_line(error)})") from None


def _read_lines(output: Path) -> Iterator[dict[str, Any]]:
    with output.open("rb") as stream:
        for line in stream:
            yield json.loads(line)


def _read_parquet(output: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(output) as table:
        for batch in table.iter_batches(BLOCK_ROWS):
            for record in batch.to_pylist():
                objects = {name: json.loads(record[name]) for name in OBJECT_COLUMNS if record.get(name) is not None}
                yield record | objects
