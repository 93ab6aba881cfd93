"""Scores a model on rows in batches. Results are stored durably, so that a restart computes only what is missing."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ratchet.config.evaluate import Evaluate
from ratchet.data.batches import split_micro_batches
from ratchet.errors import StorageError
from ratchet.evaluation.rows import EncodedRows
from ratchet.models import scoring
from ratchet.models.decoding import token_choice
from ratchet.models.device import Model
from ratchet.models.memory import capacity, parameters
from ratchet.models.scoring import RowLikelihood
from ratchet.storage import digests, files

Tokens = Sequence[int]
Batch = list[int]
"""Indices of rows that are computed together."""
JSON = Any
"""JSON values, NaN and infinities."""
MAX_BATCH_ROWS = 64
"""Maximum number of rows of a batch; larger batches are not faster, and pad short rows more."""
MEMORY_SHARE = 0.5
"""Share that rows may use of the memory that the weights leave. Other processes need memory, and allocations leave
gaps. Total memory is measured instead of free memory, because free memory varies: the batch size would vary too, and
with it the scores, if only by rounding."""

# Format of a line: {"sha256":"<64 hex digits>","key":...,"value":...}
_HEAD, _MIDDLE = b'{"sha256":"', b'",'
_BODY = len(_HEAD) + 64 + len(_MIDDLE)
_NONFINITE_KEY = "\0float"
"""Only key of an object that represents NaN or an infinity."""


@dataclass(frozen=True)
class Scorer:
    """Scores rows with one model.

    Batches are planned over all rows before the first is computed, so a restarted evaluation continues with the same
    batches. A key of the store contains every token of the batch and every setting of the request, so results of
    other rows, settings or batch sizes are never reused.
    """

    model: Model
    pad_token_id: int
    """Token that fills the rows of a batch to the same length."""
    batch_rows: int
    store: "ScoreStore"
    """Stored results of this model with these numerics; the keys contain neither of these."""
    progress: Callable[[str, int, int], None]
    """Called with the kind of the scores, the number of finished rows and the number of all rows."""
    looks: tuple[int, ...] = ()
    """Numbers of first rows that may be scored alone. No batch has rows before and after such a look, so the scores of
    the first rows are found in the store when more rows are scored."""

    def score_rows(self, input_ids: Sequence[Tokens], labels: Sequence[Tokens]) -> list[RowLikelihood]:
        """Compute the likelihood of each row: answer tokens (those with a label) and prompt tokens separately."""

        def request(batch: Batch) -> dict[str, Any]:
            return {"rows": [[list(input_ids[i]), list(labels[i])] for i in batch]}

        def compute(batch: Batch) -> list[tuple[float, int, float, int]]:
            scores = scoring.score_rows(
                self.model, [input_ids[i] for i in batch], [labels[i] for i in batch], self.pad_token_id
            )
            return [(row.nll, row.tokens, row.prompt_nll, row.prompt_tokens) for row in scores]

        batches = self._split([len(ids) for ids in input_ids])
        return [RowLikelihood(*values) for values in self._compute_batches("likelihoods", batches, request, compute)]

    def score_preferences(self, rejected: EncodedRows, chosen: Sequence[RowLikelihood]) -> list[float]:
        """Return 1 for each pair whose chosen answer is more likely per token than the rejected one, else 0."""
        others = self.score_rows(rejected.input_ids, rejected.labels)
        return [float(a.nll / a.tokens < b.nll / b.tokens) for a, b in zip(chosen, others, strict=True)]

    def score_text(self, blocks: Sequence[Tokens]) -> list[RowLikelihood]:
        """Compute the likelihood of plain text: all tokens of a block but the first count as answer."""
        return self.score_rows(blocks, blocks)

    def generate_answers(
        self, tokenizer: Any, prompts: Sequence[Tokens], end_tokens: Sequence[int], settings: Evaluate
    ) -> list[list[str]]:
        """Generate answers to each prompt (token ids up to the start of the answer) and strip them; answers by prompt.

        See `generate_tokens`."""
        answers = self.generate_tokens(prompts, end_tokens, settings)
        texts = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in answers]
        return [texts[start : start + settings.samples] for start in range(0, len(texts), settings.samples)]

    def generate_tokens(
        self, prompts: Sequence[Tokens], end_tokens: Sequence[int], settings: Evaluate
    ) -> list[list[int]]:
        """Generate the tokens of `settings.samples` answers to each prompt; answers to one prompt are neighbours.

        Sampled answers depend only on the seed, the prompt, and its number among identical prompts. Of the settings,
        max_new_tokens, samples (1 is greedy, more are sampled), and temperature and seed of sampling are read.
        """
        samples, counts = settings.samples, Counter[str]()
        streams: list[str] = []  # Identical prompts are numbered, so that they get different samples.
        for prompt in prompts if samples > 1 else ():
            digest = digests.hash_json(list(prompt))
            name = f"{digest}/{counts[digest]}"
            counts[digest] += 1
            streams += [token_choice.noise_stream_key(settings.seed, name, sample) for sample in range(samples)]
        repeated = [prompt for prompt in prompts for _ in range(samples)]

        def request(batch: Batch) -> dict[str, Any]:
            sampling = (
                {"temperature": settings.temperature, "streams": [streams[k] for k in batch]} if streams else None
            )
            return {
                "prompts": [list(repeated[k]) for k in batch],
                "ends": sorted(end_tokens),
                "max_new_tokens": settings.max_new_tokens,
                "sampling": sampling,
            }

        def compute(batch: Batch) -> list[list[int]]:
            batch_prompts, warper = [repeated[k] for k in batch], None
            if streams:
                longest = max(map(len, batch_prompts))
                warper = token_choice.GumbelLogitsWarper([streams[k] for k in batch], settings.temperature, longest)
            return scoring.generate(
                self.model, batch_prompts, end_tokens, settings.max_new_tokens, self.pad_token_id, warper
            )

        batches = self._split(list(map(len, repeated)), settings.samples)
        return self._compute_batches("answers", batches, request, compute)

    def score_labels(self, prompts: Sequence[Tokens], labels: Sequence[Tokens]) -> list[list[float]]:
        """Compute the log-probability in nats of each label as the complete answer to each prompt.

        Labels are token ids including the end of the turn; prompts are token ids up to the start of the answer.
        """
        label_ids = [list(label) for label in labels]

        def request(batch: Batch) -> dict[str, Any]:
            return {"prompts": [list(prompts[i]) for i in batch], "labels": label_ids, "batch_rows": self.batch_rows}

        def compute(batch: Batch) -> list[list[float]]:
            return scoring.score_labels(
                self.model, [prompts[i] for i in batch], labels, self.batch_rows, self.pad_token_id
            )

        batches = []
        for part in self._split_at_looks(len(prompts)):
            by_length: dict[int, Batch] = {}  # Rows of equal length need no padding.
            for i in part:
                by_length.setdefault(len(prompts[i]), []).append(i)
            batches += [
                rows[start : start + self.batch_rows]
                for _, rows in sorted(by_length.items(), reverse=True)
                for start in range(0, len(rows), self.batch_rows)
            ]
        return self._compute_batches("label_scores", batches, request, compute)

    def _split(self, lengths: Sequence[int], samples: int = 1) -> list[Batch]:
        """Split rows of these lengths into batches; each row occurs `samples` times."""
        return [
            batch
            for part in self._split_at_looks(len(lengths), samples)
            for batch in split_micro_batches(list(part), lengths[part.start : part.stop], self.batch_rows)
        ]

    def _split_at_looks(self, count: int, samples: int = 1) -> list[range]:
        ends = sorted({min(count, look * samples) for look in self.looks} | {count})
        return [range(start, end) for start, end in pairwise([0, *ends])]

    def _compute_batches(
        self,
        kind: str,
        batches: Sequence[Batch],
        request: Callable[[Batch], dict[str, Any]],
        compute: Callable[[Batch], Sequence[Any]],
    ) -> list[Any]:
        """Return the result of each row, in the order of the rows, from the store or computed and stored.

        `request` returns the request of a batch as JSON, from which the key is computed.
        """
        total, done = sum(map(len, batches)), 0
        results: list[Any] = [None] * total
        for batch in batches:
            key = f"{kind} {digests.hash_json({'pad': self.pad_token_id, **request(batch)})}"
            batch_results = self.store.get_or_compute(key, partial(compute, batch))
            for row, result in zip(batch, batch_results, strict=True):
                results[row] = result
            done += len(batch)
            self.progress(kind.replace("_", " "), done, total)
        return results


def choose_batch_rows(setting: int | Literal["auto"], model: Model, longest_tokens: int, vocabulary: int) -> int:
    """Return the rows of a batch; `auto` is the largest power of two whose rows should fit with `longest_tokens`.

    The result depends only on machine and model, so it is the same every time. The rows may still not fit: scoring then
    runs out of memory (models.oom.is_out_of_memory), and half as many rows may fit.
    """
    if setting != "auto":
        return setting
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    available = MEMORY_SHARE * (
        capacity.measure_device(model.device).total_bytes - sum(t.nbytes for t in parameters.list_unique_tensors(model))
    )
    rows = 1
    row_bytes = estimate_row_bytes(base.config.get_text_config(), longest_tokens, vocabulary)
    while rows < MAX_BATCH_ROWS and 2 * rows * row_bytes <= available:
        rows *= 2
    return rows


def estimate_row_bytes(config: Any, tokens: int, vocabulary: int) -> int:
    """Estimate an upper limit of the bytes that scoring one row without gradients takes.

    The estimate counts keys and values of all layers twice (a growing cache is copied), inputs and outputs of the
    widest layer, attention scores if they are materialized, and some copies of the logits of one position, all in
    float32. Wider pieces of logits are limited per batch (models.chunked_loss).
    """

    def largest(name: str, default: int) -> int:
        size = getattr(config, name, None)  # Some models have one value per layer.
        return int(max(size) if isinstance(size, list | tuple) else size or default)

    hidden, heads = int(config.hidden_size), largest("num_attention_heads", 1)
    inner, key_heads = largest("intermediate_size", 4 * hidden), largest("num_key_value_heads", heads)
    cache = 2 * 2 * int(config.num_hidden_layers) * key_heads * largest("head_dim", -(-hidden // heads)) * tokens
    width = (8 * hidden + 3 * inner) * tokens
    scores = 2 * heads * tokens * tokens if getattr(config, "_attn_implementation", None) == "eager" else 0
    return 4 * (cache + width + scores + 4 * vocabulary)


# Storage of scores.


class ScoreStore:
    """Stores results by key as JSON lines in a file, which the first write creates; without a path, stores nothing.

    A line is durable before its result is used and has its own digest. A line that a kill truncated or a disk damaged
    counts as missing, and only this line is computed again. Two processes may share a file: lines are appended by
    single writes, and each process computes results that it has not read.
    """

    def __init__(self, path: Path | None) -> None:
        """Index the valid lines; of two with the same key, the first. Raises StorageError if `path` is a directory."""
        self.path = path
        self._lines: dict[str, tuple[int, int]] = {}
        """Offset and length of each line, by key."""
        if path is not None and path.is_dir():
            raise StorageError(f"{path}: found a directory, expected a file for scores; remove it")
        if path is not None and path.exists():
            with path.open("rb") as stream:
                offset = 0
                for text in stream:
                    if (line := _decode_line(text.rstrip(b"\n"))) is not None:
                        self._lines.setdefault(line[0], (offset, len(text.rstrip(b"\n"))))
                    offset += len(text)

    def get_or_compute(self, key: str, compute: Callable[[], JSON]) -> JSON:
        """Return the value stored under `key`, or store and return the result of `compute`.

        The value has passed through JSON: tuples become lists and object keys become strings. Floats are exact,
        including NaN and infinities. Raises OSError if the disk is full or fails (existing lines stay intact),
        ValueError or TypeError if JSON cannot represent the result, and any error of `compute`.
        """
        if (line := self._read(key)) is not None:
            return line[1]
        # In ASCII: texts may have half a surrogate pair, which is invalid UTF-8.
        document = {"key": key, "value": _to_json_value(compute())}
        body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()[1:]
        if self.path is not None:
            self._lines[key] = _append_line(self.path, _HEAD + digests.hash_bytes(body).encode() + _MIDDLE + body)
        return _decode_body(body)[1]

    def get(self, key: str) -> JSON | None:
        """Return the value stored under `key`, or None."""
        return line[1] if (line := self._read(key)) is not None else None

    def _read(self, key: str) -> tuple[str, JSON] | None:
        """Return key and value of a line; None if there is none, or if it was damaged or removed."""
        if key not in self._lines or self.path is None or not self.path.exists():
            return None
        offset, length = self._lines[key]
        with self.path.open("rb") as stream:
            stream.seek(offset)
            line = _decode_line(stream.read(length))
        return line if line is not None and line[0] == key else None


def _decode_line(line: bytes) -> tuple[str, JSON] | None:
    """Decode key and value of a line; None if it is truncated or damaged."""
    digest, body = line[len(_HEAD) : _BODY - len(_MIDDLE)], line[_BODY:]
    if not line.startswith(_HEAD) or digest != digests.hash_bytes(body).encode():
        return None
    return _decode_body(body)


def _decode_body(body: bytes) -> tuple[str, JSON]:
    fields = json.loads(b"{" + body, object_hook=_restore_nonfinite)
    return str(fields["key"]), fields["value"]


def _to_json_value(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return {_NONFINITE_KEY: repr(value)}
    if isinstance(value, dict):
        if _NONFINITE_KEY in value:
            raise ValueError(f"cannot store an object with the reserved key {_NONFINITE_KEY!r}")
        return {key: _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    return value


def _restore_nonfinite(value: dict[str, Any]) -> Any:
    return float(value[_NONFINITE_KEY]) if _NONFINITE_KEY in value else value


def _append_line(path: Path, line: bytes) -> tuple[int, int]:
    """Append a line durably and return its offset and length. Raises OSError with the path if the disk fails."""
    with files.name_file_in_errors(path):
        is_new = not path.exists()
        files.make_directory(path.parent)
        files.before("write", path)
        with path.open("a+b", buffering=0) as stream:
            data = line + b"\n"
            if stream.seek(0, os.SEEK_END):  # A truncated last line is terminated first.
                stream.seek(-1, os.SEEK_END)
                data = data if stream.read(1) == b"\n" else b"\n" + data
            while data:  # An almost full disk writes a part; the next write raises the error.
                data = data[stream.write(data) :]
            end = stream.tell()
        files.before("fsync", path)
        files.fsync(path)
        if is_new:
            files.fsync_directory(path.parent)
    return end - len(line) - 1, len(line)
