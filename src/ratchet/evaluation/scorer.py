"""Scores that survive a kill: what was asked and what came of it, a JSON line each, appended and never rewritten."""

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ratchet.config.evaluation import Evaluate
from ratchet.data.batches import split_micro_batches
from ratchet.errors import StorageError
from ratchet.models import scoring
from ratchet.models import scoring as label_room
from ratchet.models.decoding import token_choice
from ratchet.models.loading import Model
from ratchet.models.memory import capacity, parameters
from ratchet.models.scoring import RowLikelihood
from ratchet.storage import digests, disk, files

JSON = Any
"""What JSON can hold, and floats that it cannot: NaN and the infinities."""

_HEAD, _MIDDLE = b'{"sha256":"', b'",'
_BODY = len(_HEAD) + 64 + len(_MIDDLE)
_ODD = "\0float"
"""The one key of an object that stands for a float which JSON has no word for."""


class ScoreStore:
    """Results by key, in a file that is made at the first write; without one, nothing is kept.

    A line is durable before its result is used, and holds a digest of its own: one that a kill cut off or a disk
    damaged counts as never written, and costs only itself. Two processes may use one file: lines are appended by single
    writes, and what one of them does not know of it computes for itself.
    """

    def __init__(self, path: Path | None) -> None:
        """Read what is there. Raises StorageError when `path` is no file."""
        self.path = path
        self._lines: dict[str, tuple[int, int]] = {}
        if path is not None:
            self._read(path)

    def take(self, key: str, make: Callable[[], JSON]) -> JSON:
        """What is stored under `key`; else what `make` gives, stored before it is returned.

        Either way it is what JSON makes of it: tuples are lists, keys of objects texts. Floats are exact, NaN and
        infinities as well.

        Raises:
            OSError: the disk takes nothing; what was stored before is not touched. Or what `make` raises.
            ValueError, TypeError: `make` gave what JSON cannot hold.
        """
        if (place := self._lines.get(key)) is not None and self.path is not None:
            found = _decode_line(_read_bytes(self.path, *place))
            if found is not None and found[0] == key:
                return found[1]
        body = _encode_body(key, make())
        if self.path is not None:
            self._lines[key] = _append_line(self.path, _HEAD + digests.hash_bytes(body).encode() + _MIDDLE + body)
        return _decode_body(body)[1]

    def get(self, key: str) -> JSON | None:
        """What is stored under `key`; None: nothing is."""
        if (place := self._lines.get(key)) is None or self.path is None:
            return None
        found = _decode_line(_read_bytes(self.path, *place))
        return found[1] if found is not None and found[0] == key else None

    def _read(self, path: Path) -> None:
        """Remember where each whole line is; of two with one key, the first."""
        try:
            stream = path.open("rb")
        except FileNotFoundError:
            return
        except IsADirectoryError:
            raise StorageError(f"{path}: is a directory, where scores are to be kept; remove it") from None
        with stream:
            place = 0
            for line in stream:
                if (found := _decode_line(line.rstrip(b"\n"))) is not None:
                    self._lines.setdefault(found[0], (place, len(line.rstrip(b"\n"))))
                place += len(line)


def _encode_body(key: str, value: JSON) -> bytes:
    """The line from its key on. ASCII: texts of a data set may hold what UTF-8 cannot (half a surrogate pair)."""
    return json.dumps({"key": key, "value": _to_json_value(value)}, allow_nan=False, separators=(",", ":")).encode()[1:]


def _decode_line(line: bytes) -> tuple[str, JSON] | None:
    """Key and value of a line; None when it is not as it was written."""
    sha, body = line[len(_HEAD) : _BODY - len(_MIDDLE)], line[_BODY:]
    if not line.startswith(_HEAD) or sha != digests.hash_bytes(body).encode():
        return None
    return _decode_body(body)


def _decode_body(body: bytes) -> tuple[str, JSON]:
    read = json.loads(b"{" + body, object_hook=_restore_nonfinite)
    return str(read["key"]), read["value"]


def _to_json_value(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return {_ODD: repr(value)}
    if isinstance(value, dict):
        if _ODD in value:
            raise ValueError(f"an object to be stored has the key {_ODD!r}")
        return {key: _to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(one) for one in value]
    return value


def _restore_nonfinite(found: dict[str, Any]) -> Any:
    return float(found[_ODD]) if _ODD in found else found


def _read_bytes(path: Path, place: int, length: int) -> bytes:
    """Empty when the file has gone."""
    try:
        with path.open("rb") as stream:
            stream.seek(place)
            return stream.read(length)
    except FileNotFoundError:
        return b""


def _append_line(path: Path, line: bytes) -> tuple[int, int]:
    """Write a line durably; its place and length. Raises OSError, with the path, when the disk does not take it."""
    try:
        new = not path.exists()
        files.make_directory(path.parent)
        files.before("write", path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            end = _write_at_end(fd, line + b"\n")
        finally:
            os.close(fd)
        files.before("fsync", path)
        disk.fsync(path)
        if new:
            files.fsync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error
    return end - len(line) - 1, len(line)


def _write_at_end(fd: int, data: bytes) -> int:
    """Append; where it ends. A line that was cut off before this one is closed first."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        data = b"\n" + data
    while data:  # a disk that is nearly full takes a part, and says at the next call what is wrong
        data = data[os.write(fd, data) :]
    return os.lseek(fd, 0, os.SEEK_CUR)


# Asks one model about all rows, batch by batch; what it said before a kill is taken from the store.

Tokens = Sequence[int]
Batch = list[int]
"""Indices of rows that are computed at once."""


@dataclass(frozen=True)
class Scorer:
    """Scores any model in exactly the same way.

    Batches are planned over all rows before the first is computed, so an evaluation that was broken off goes on with
    the batches that it began with. A key of the store names all that a batch is asked, to the last token: an entry of
    other rows, other settings or another batch size is never taken.
    """

    model: Model
    pad: int
    """Token that rows are filled with."""
    batch_rows: int
    store: ScoreStore
    """Of this model, in this arithmetic: neither is in the keys."""
    progress: Callable[[int, int], None]
    """Told how many rows are done, and of how many."""

    def likelihoods(self, input_ids: Sequence[Tokens], labels: Sequence[Tokens]) -> list[RowLikelihood]:
        """Likelihood of each row, answer (what has a label) and prompt apart, in the order of the rows."""

        def ask(rows: Batch) -> dict[str, Any]:
            return {"rows": [[list(input_ids[i]), list(labels[i])] for i in rows]}

        def compute(rows: Batch) -> list[tuple[float, int, float, int]]:
            found = scoring.score_rows(
                self.model, [input_ids[i] for i in rows], [labels[i] for i in rows], self.pad
            )  # fmt: skip
            return [(one.nll, one.tokens, one.prompt_nll, one.prompt_tokens) for one in found]

        batches = split_micro_batches(list(range(len(input_ids))), [len(ids) for ids in input_ids], self.batch_rows)
        return [RowLikelihood(*found) for found in self._each("likelihoods", batches, ask, compute)]

    def text(self, blocks: Sequence[Tokens]) -> list[RowLikelihood]:
        """Likelihood of plain text: every token of a block but its first counts as answer."""
        return self.likelihoods(blocks, blocks)

    def answers(
        self, tokenizer: Any, prompts: Sequence[Tokens], ends: Sequence[int], wanted: Evaluate
    ) -> list[list[str]]:  # fmt: skip
        """Answers to each prompt (ids that end where the assistant begins), in their order, stripped.

        A prompt's draws depend on nothing but the seed, the prompt, and which of several equal ones it is.

        Args:
            tokenizer: turns tokens into text; special ones are left out.
            ends: tokens that end an answer.
            wanted: max_new_tokens; samples (one is greedy, more are drawn); temperature and seed of what is drawn.
        """
        samples = wanted.samples
        pairs = [(i, sample) for i in range(len(prompts)) for sample in range(samples)]
        names = _unique_prompt_keys(prompts)

        def streams(batch: Batch) -> list[str]:
            return [token_choice.noise_stream_key(wanted.seed, names[pairs[k][0]], pairs[k][1]) for k in batch]

        def ask(batch: Batch) -> dict[str, Any]:
            drawn = {"temperature": wanted.temperature, "streams": streams(batch)} if samples > 1 else None
            asked = [list(prompts[pairs[k][0]]) for k in batch]
            return {"prompts": asked, "ends": sorted(ends), "max_new_tokens": wanted.max_new_tokens, "drawn": drawn}

        def compute(batch: Batch) -> list[list[int]]:
            asked = [prompts[pairs[k][0]] for k in batch]
            draw = (
                token_choice.GumbelLogitsWarper(streams(batch), wanted.temperature, max(map(len, asked)))
                if samples > 1
                else None
            )
            return scoring.generate(self.model, asked, ends, wanted.max_new_tokens, self.pad, draw)

        lengths = [len(prompts[i]) for i, _ in pairs]
        batches = split_micro_batches(list(range(len(pairs))), lengths, self.batch_rows)
        found = self._each("answers", batches, ask, compute)
        texts = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in found]
        return [texts[start : start + samples] for start in range(0, len(texts), samples)]

    def label_scores(self, prompts: Sequence[Tokens], labels: Sequence[Tokens]) -> list[list[float]]:
        """Log-probability in nats of each label (its ids, end of turn included) as the whole answer to each prompt."""
        asked_labels = [list(label) for label in labels]

        def ask(rows: Batch) -> dict[str, Any]:
            asked = [list(prompts[i]) for i in rows]
            return {"prompts": asked, "labels": asked_labels, "batch_rows": self.batch_rows}

        def compute(rows: Batch) -> list[list[float]]:
            return label_room.score_labels(
                self.model, [prompts[i] for i in rows], labels, self.batch_rows, self.pad
            )  # fmt: skip

        return self._each("label_scores", list(self._of_one_length(prompts)), ask, compute)

    def _of_one_length(self, rows: Sequence[Tokens]) -> Iterator[Batch]:
        """Batches in which nothing is filled, longest first."""
        by_length: dict[int, Batch] = {}
        for i, ids in enumerate(rows):
            by_length.setdefault(len(ids), []).append(i)
        for length in sorted(by_length, reverse=True):
            some = by_length[length]
            yield from (some[start : start + self.batch_rows] for start in range(0, len(some), self.batch_rows))

    def _each(
        self,
        kind: str,
        batches: Sequence[Batch],
        ask: Callable[[Batch], dict[str, Any]],
        compute: Callable[[Batch], Sequence[Any]],
    ) -> list[Any]:
        """What came of each row, in the order of the rows: from the store, or computed and stored.

        Args:
            kind: of the question.
            batches: all rows, each in one of them.
            ask: what a batch is asked, as JSON: the key of its results.
            compute: its results.
        """
        total, done = sum(map(len, batches)), 0
        found: list[Any] = [None] * total
        for batch in batches:
            key = f"{kind} {digests.hash_json({'pad': self.pad, **ask(batch)})}"
            results = self.store.take(key, partial(compute, batch))
            for row, result in zip(batch, results, strict=True):
                found[row] = result
            done += len(batch)
            self.progress(done, total)
        return found


def _unique_prompt_keys(prompts: Sequence[Tokens]) -> list[str]:
    """A name for each prompt that does not depend on the others; equal ones are numbered, so that each draws anew."""
    seen: Counter[str] = Counter()
    names = []
    for prompt in prompts:
        fingerprint = digests.hash_json(list(prompt))
        names.append(f"{fingerprint}/{seen[fingerprint]}")
        seen[fingerprint] += 1
    return names


# How many rows are scored at once: a power of two that follows from machine and model, the same every time.

MOST_ROWS = 64
"""More make nothing faster, and fill shorter rows for longer ones."""
SHARE = 0.5
"""Of the memory beside the weights that rows may take: others use the machine as well, and blocks are never packed
without gaps. What is free at the moment is not asked: scores move with the rows of a batch, if only by rounding."""


def choose_batch_rows(wanted: int | Literal["auto"], model: Model, longest_tokens: int, vocabulary: int) -> int:
    """Rows of a batch. `auto` takes the greatest power of two whose rows, all as long as the longest, should fit.

    Args:
        wanted: `machine` says it, or leaves it to us.
        model: loaded; its weights and its device count.
        longest_tokens: of any row that will be scored, generated tokens included.
        vocabulary: logits of a position.

    Returns:
        At least 1. Where even so many do not fit, memory runs out (model.memory.is_exhausted), and half as many may.
    """
    if wanted != "auto":
        return wanted
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    room = SHARE * (
        capacity.measure_device(model.device).total_bytes - sum(t.nbytes for t in parameters.list_unique_tensors(model))
    )
    rows = 1
    needed = estimate_row_bytes(whole.config.get_text_config(), longest_tokens, vocabulary)
    while rows < MOST_ROWS and 2 * rows * needed <= room:
        rows *= 2
    return rows


def estimate_row_bytes(config: Any, tokens: int, vocabulary: int) -> int:
    """Bound of what a row holds while it is scored without gradients, in bytes.

    Keys and values of all layers twice (a cache that grows is copied), the widest layer's inputs and outputs, attention
    scores if they are written out, and some copies of the logits of one position; all in float32. Wider pieces of
    logits are bounded for a batch as a whole (model.columns.CHUNK_ELEMENTS).
    """
    hidden = int(config.hidden_size)
    layers = int(config.num_hidden_layers)
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    inner = _largest_layer_size(config, "intermediate_size", 4 * hidden)
    key_heads = _largest_layer_size(config, "num_key_value_heads", heads)
    head = int(getattr(config, "head_dim", None) or -(-hidden // heads))
    cache = 2 * 2 * layers * key_heads * head * tokens
    width = (8 * hidden + 3 * inner) * tokens
    scores = 2 * heads * tokens * tokens if getattr(config, "_attn_implementation", None) == "eager" else 0
    return 4 * (cache + width + scores + 4 * vocabulary)


def _largest_layer_size(config: Any, name: str, otherwise: int) -> int:
    """A size that some models give layer by layer."""
    found = getattr(config, name, None)
    return int(max(found) if isinstance(found, list | tuple) else found or otherwise)
