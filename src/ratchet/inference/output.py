"""Writes and reads the output of a generation: one record per answer, as JSON lines or Parquet, with a card."""

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

OUTPUT_ENDINGS = (".jsonl", ".parquet")
BLOCK_ROWS = 1000
LABEL_LOG_PROBABILITIES = "label_log_probabilities"
"""Key of a record if generate.labels is set: nats by label, or null if the backend cannot compute them."""
OBJECT_COLUMNS = ("fields", LABEL_LOG_PROBABILITIES)
"""Keys with objects as values, which Parquet stores as JSON text."""


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
            yield [_encode_line(record) for record in block]

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


def _encode_line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def require_writable(output: Path) -> None:
    """Raise SettingsError if a path's ending is not a supported format, or if the file cannot be created."""
    if output.suffix not in OUTPUT_ENDINGS:
        raise SettingsError(
            f"--output {output}: found ending {output.suffix!r}; expected {' or '.join(OUTPUT_ENDINGS)}"
        )
    if not os.path.isfile(output):  # noqa: PTH113 (returns False for a name that is too long)
        disk.require_writable(output, "--output")
        disk.require_writable(card_path(output), "--output: its card")


def is_complete(output: Path, spec: GenerationSpec, digest_with: Callable[[Generate], str | None]) -> bool:
    """Return whether a file is the unchanged output of this generation.

    Args:
        output: the file.
        spec: specification of the generation.
        digest_with: returns the digest of the prompts of the same records with other settings; None if there are none.

    Raises:
        SettingsError: the file exists and has another origin; the message says what differs.
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

    def contents(temporary: Path) -> None:
        if output.suffix == ".parquet":
            files.before("write", temporary)
            with disk.name_file_in_errors(temporary):
                _write_parquet(source, temporary, card.spec)
            disk.fsync(temporary)
        else:
            with source.open("rb") as stream:
                files.write_blocks(temporary, _batch_lines(stream))

    card = card.model_copy(update={"model_name": model_name, "faults": faults})
    return output_card.write_output(output, contents, card)


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
        schema = schema.append(pa.field(LABEL_LOG_PROBABILITIES, text))
    with source.open("rb") as stream, pq.ParquetWriter(target, schema) as writer:
        for block in _batch_lines(stream):
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
        DamagedFileError: the file does not match the SHA-256 on its card, or holds other records.
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
