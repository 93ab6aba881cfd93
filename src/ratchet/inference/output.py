"""What a generation gives: one record an answer, sealed with the run, and written where it was asked for."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ratchet.config.generate import Generate
from ratchet.errors import DamagedFileError, SettingsError, first_line
from ratchet.inference import prompts
from ratchet.inference.answer_shards import AnswerLedger
from ratchet.inference.prompts import Prompt
from ratchet.inference.reasoning import ReasoningParts, split_reasoning
from ratchet.inference.spec import ANSWERS, CARD, GenerationAnswer, GenerationCard, GenerationPaths, GenerationSpec
from ratchet.runs.directory import RESULT
from ratchet.storage import digests, disk, files, output_card
from ratchet.storage.output_card import card_path

ENDINGS = (".jsonl", ".parquet")
BLOCK_ROWS = 1000
LABELS = "label_log_probabilities"
"""Of a record: nats by label, or null where whoever answered cannot say; there if generate.labels are."""
AS_JSON = ("fields", LABELS)
"""Objects, which Parquet holds as JSON text."""


def seal_result(paths: GenerationPaths, spec: GenerationSpec, ledger: AnswerLedger) -> None:
    """Seal all records in the order of the prompts, with the card.

    Raises:
        DamagedFileError: not all answers are there.
        OSError: the disk does not take it; nothing is left behind.
    """
    finish, counted = Counter[str](), Counter[str]()

    def lines() -> Iterator[list[bytes]]:
        records = _ordered_records(paths, spec, ledger)
        while block := list(islice(records, BLOCK_ROWS)):
            for record in block:
                finish[record["finish"]] += 1
                counted["prompt_tokens"] += record["prompt_tokens"] or 0
                counted["tokens"] += record["tokens"] or 0
            yield [_encode_line(record) for record in block]

    with files.sealed_directory(paths.result, RESULT) as scratch:
        files.write_blocks(scratch / ANSWERS, lines())
        answers = finish.total()
        card = GenerationCard(
            spec=spec, id=spec.run_id, model_name="", prompts=answers // spec.generate.samples, faults=0,
            answers=answers, finish=dict(sorted(finish.items())), prompt_tokens=counted["prompt_tokens"],
            tokens=counted["tokens"],
        )  # fmt: skip
        card.save(scratch / CARD)


def _ordered_records(paths: GenerationPaths, spec: GenerationSpec, ledger: AnswerLedger) -> Iterator[dict[str, Any]]:
    answers, samples = ledger.all(), spec.generate.samples
    for prompt in prompts.read_prompts(paths.prompts):
        for sample in range(samples):
            answer = next(answers, None)
            if answer is None:
                raise DamagedFileError(f"{paths.shards}: fewer answers than prompts; repeat")
            yield _build_record(prompt, sample, answer, spec)
    next(answers, None)  # to its end, where it counts


def _build_record(prompt: Prompt, sample: int, answer: GenerationAnswer, spec: GenerationSpec) -> dict[str, Any]:
    parts = split_reasoning(answer.said, spec.generate.reasoning_marks, answer.opened)
    if answer.reasoning is not None:
        parts = ReasoningParts(answer.reasoning.strip(), answer.said.strip())
    record: dict[str, Any] = {
        "id": prompt.id, "sample": sample, "prompt_digest": prompt.digest, "text": answer.said,
        "reasoning": parts.reasoning, "answer": parts.answer, "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens, "finish": answer.finish,
        "mean_log_probability": None if answer.tokens == 0 else answer.nats,
        "model": spec.model.digest[: digests.SHORT], "reference": prompt.reference, "fields": dict(prompt.fields),
    }  # fmt: skip
    if labels := spec.generate.labels:
        known = None if answer.labels is None else dict(zip(labels, answer.labels, strict=True))
        record[LABELS] = known
    return record


def _encode_line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def require_writable(output: Path) -> None:
    """Raise SettingsError for a name whose ending says no format, or under which no file can be made."""
    if output.suffix not in ENDINGS:
        raise SettingsError(f"--output {output}: ends with neither of {', '.join(ENDINGS)}; name it so")
    if not os.path.isfile(output):  # noqa: PTH113 (False of a name that is too long); one that is there stays
        disk.require_writable(output, "--output")
        disk.require_writable(card_path(output), "--output: its card")


def is_complete(output: Path, spec: GenerationSpec, digest_with: Callable[[Generate], str | None]) -> bool:
    """Whether the output of this very generation is written, as it was written.

    Args:
        output: the file.
        spec: of the generation.
        digest_with: of the prompts that other settings make of the same records; None: they cannot.

    Raises:
        SettingsError: something else has its name; the message says what differs.
    """

    def told(card: GenerationCard, names: list[str]) -> list[str]:
        if {"generate.keep", "generate.system"} & {*names} and digest_with(card.spec.generate) == (
            card.spec.prompts_digest
        ):  # of the same records: these settings alone have made other prompts
            return [name for name in names if name != "prompts_digest"]
        return names

    return output_card.is_output_current(output, spec, GenerationCard, "generate", told)


def read_card(output: Path) -> GenerationCard:
    """The card of an output that is to be read.

    Raises:
        SettingsError: no such file, or no card of a generation beside it.
    """
    if output.is_dir():
        raise SettingsError(f"{output}: is a directory; name a file in it")
    if not output.is_file():
        raise SettingsError(f"{output}: no such file; `ratchet generate PROMPTS --output {output.name}` writes it")
    found = output_card.read_card(output, GenerationCard)
    if found is None:
        raise SettingsError(
            f"{output}: no output of `ratchet generate` ({output_card.explain_missing_card(output)}); "
            "give back the card that was written with it, or run its `ratchet generate` again"
        )
    return found


def write_output(paths: GenerationPaths, output: Path, model_name: str, faults: int) -> GenerationCard:
    """Write records and card where they are wanted; after a crash the file is whole, or not there.

    Raises:
        OSError: the disk does not take it; no half-written file is left behind.
    """
    source, about = paths.result / ANSWERS, GenerationCard.load(paths.result / CARD)

    def contents(aside: Path) -> None:
        if output.suffix == ".parquet":
            files.before("write", aside)
            with disk.name_file_in_errors(aside):
                _write_parquet(source, aside, about.spec)
            disk.fsync(aside)
        else:
            with source.open("rb") as stream:
                files.write_blocks(aside, _batch_lines(stream))

    about = about.model_copy(update={"model_name": model_name, "faults": faults})
    return output_card.write_output(output, contents, about)


def _batch_lines(stream: Iterable[bytes]) -> Iterator[list[bytes]]:
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
        schema = schema.append(pa.field(LABELS, text))
    with source.open("rb") as stream, pq.ParquetWriter(target, schema) as writer:
        for block in _batch_lines(stream):
            writer.write_table(pa.Table.from_pylist([_flatten_record(line) for line in block], schema=schema))


def _flatten_record(line: bytes) -> dict[str, Any]:
    """A record whose objects are JSON text."""
    record: dict[str, Any] = json.loads(line)
    for name in AS_JSON:
        if record.get(name) is not None:
            record[name] = json.dumps(record[name], ensure_ascii=False)
    return record


def read_records(output: Path, card: GenerationCard) -> Iterator[dict[str, Any]]:
    """The records of an output, whatever its format; objects are objects again.

    Raises:
        DamagedFileError: it is not as it was written, by the SHA-256 on its card; or holds other records than it says.
    """
    if digests.hash_file(output) != card.output:
        raise DamagedFileError(f"{output}: was changed since it was written; run its `ratchet generate` again")
    try:
        yield from _read_parquet(output) if output.suffix == ".parquet" else _read_lines(output)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{output}: holds no records of `ratchet generate` ({first_line(error)})") from None


def _read_lines(output: Path) -> Iterator[dict[str, Any]]:
    with output.open("rb") as stream:
        for line in stream:
            yield json.loads(line)


def _read_parquet(output: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(output) as table:
        for batch in table.iter_batches(BLOCK_ROWS):
            for record in batch.to_pylist():
                found = {name: json.loads(record[name]) for name in AS_JSON if record.get(name) is not None}
                yield record | found
