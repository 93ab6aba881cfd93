"""Rows of the sources, checked one by one, encoded and spooled.

The tokens go to disk at once. What must be known of all rows to choose among them (hashes, lengths, splits) stays in
arrays of a few hundred bytes a row, so that a million rows need well under a gigabyte.
"""

import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.data import Prepare
from ratchet.data import deduplication, tokenization
from ratchet.data.balance import CategoryBalancer
from ratchet.data.conversation import (
    Conversation,
    EncodedConversation,
    MalformedRecord,
    RefusedConversation,
    SourceRow,
    list_content_kinds,
    missing_part_reason,
)
from ratchet.data.leakage import BenchmarkIndex, LeakageMatch
from ratchet.data.passthrough_columns import PassthroughFields
from ratchet.data.row_ledger import RowLedger
from ratchet.data.splits import SplitAssigner
from ratchet.data.token_files import PreparedRow, PreparedRowSpool
from ratchet.data.tokenization import ConversationEncoder
from ratchet.errors import DataError
from ratchet.storage import digests

CHUNK_ROWS = 2048
"""Rows encoded at once: enough to keep all cores busy, few enough to be held twice."""


class TextSpool:
    """Texts by row, in a file of their own: the few that are compared in full are read back from there."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (as long as this object)
        self._ends = array("Q", [0])

    def add(self, texts: Iterable[str]) -> None:
        """Append the texts of the next rows."""
        for text in texts:
            data = text.encode()
            self._file.write(data)
            self._ends.append(self._ends[-1] + len(data))

    def close(self) -> None:
        """Give the file up."""
        self._file.close()

    def __getitem__(self, row: int) -> str:
        self._file.seek(self._ends[row])
        text = self._file.read(self._ends[row + 1] - self._ends[row]).decode()
        self._file.seek(0, 2)
        return text


@dataclass
class IngestedRows:
    """What is kept of the rows that are fit to be learned from, by their index in the spool."""

    ids: "array[int]" = field(default_factory=lambda: array("Q"))
    """First 64 bits of the sample id."""
    keys: list[bytes] = field(default_factory=list)
    """Exact keys, a chunk's worth in each entry."""
    bands: list[NDArray[np.uint64]] = field(default_factory=list)
    divided: "array[int]" = field(default_factory=lambda: array("q"))
    """Index into what the divider assigns."""
    lengths: "array[int]" = field(default_factory=lambda: array("i"))
    trained: "array[int]" = field(default_factory=lambda: array("i"))
    cut: "array[int]" = field(default_factory=lambda: array("i"))
    """Tokens cut off."""
    sources: "array[int]" = field(default_factory=lambda: array("h"))
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    """Index into `label_names`; all 0 for a text task."""
    fields: "array[int]" = field(default_factory=lambda: array("Q"))
    """Hash of group and fields: of rows that say the same, it tells which one is kept."""
    where: list[str] = field(default_factory=list)
    taught: "array[int]" = field(default_factory=lambda: array("b"))
    """1: an answer of a teacher."""
    leaks: dict[int, list[LeakageMatch]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


class RowIngestion:
    """Takes rows; afterwards `taken`, `divider` and `ledger` tell about them.

    Args:
        settings: of stage prepare.
        tokenizer: of the base model, with the chat template in use.
        benchmarks: evaluation sets to look for, if any.
        folder: room for temporary files.
        taught: of each source, whether it is answers of a teacher; none is when this is empty.
    """

    def __init__(
        self, settings: Prepare, tokenizer: Any, benchmarks: BenchmarkIndex | None, folder: Path,
        taught: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self.settings = settings
        self.encoder = ConversationEncoder(tokenizer, settings.turns)
        self.benchmarks = benchmarks
        self.signatures = (
            deduplication.MinHashSignatures(settings.duplicates) if settings.duplicates.near is not None else None
        )
        self.texts = TextSpool(folder)
        self.spool = PreparedRowSpool(folder / "spool")
        self.divider = SplitAssigner(settings, taught)
        self.categories = CategoryBalancer(settings.balance, settings.task == "labels")
        self.fields = PassthroughFields(settings.keep, settings.split.group)
        self.ledger = RowLedger()
        self.taken = IngestedRows()
        self.label_names: dict[str, int] = {}
        self.rows_by_source = [0] * len(settings.sources)
        self.left_out: dict[str, bool] = {}
        """Whether the template leaves system messages, tools or tool results out, where a row has any."""
        self.unanswered = 0
        """Messages behind the last answer of their conversation, which were left out."""

    def close(self) -> None:
        """Give up all files; what was taken in stays known."""
        self.texts.close()
        self.spool.close()

    def read(self, rows: Iterator[SourceRow | MalformedRecord]) -> None:
        """Take all rows.

        Raises:
            DataError: a source or the template cannot be used, or prepare.too_long is `raise` and a row is.
        """
        with ThreadPoolExecutor(max_workers=1) as beside:  # encoding is mostly Rust, which leaves Python to us
            while chunk := list(islice(rows, CHUNK_ROWS)):
                usable = [self._usable(item) for item in chunk]
                self._take([pair for pair in usable if pair is not None], beside)

    def _usable(self, item: SourceRow | MalformedRecord) -> tuple[SourceRow, int] | None:
        """A row with its index in the divider, or None when it is booked as dropped."""
        self.ledger.rows_in += 1
        self.rows_by_source[item.source] += 1
        if isinstance(item, MalformedRecord):
            self.ledger.drop("malformed", item.where, item.detail)
            return None
        if missing := missing_part_reason(item):
            self.ledger.drop(missing, item.where)
            return None
        if fault := self.divider.fault(item) or self.fields.fault(item) or self.categories.fault(item):
            self.ledger.drop("malformed", item.where, fault)
            return None
        self.unanswered += item.conversation.unanswered
        return item, self.divider.add(item)

    def _take(self, pairs: Sequence[tuple[SourceRow, int]], beside: ThreadPoolExecutor) -> None:
        rows = [row for row, _ in pairs]
        if self.settings.system == "merge":
            conversations = [tokenization.merge_system_messages(row.conversation) for row in rows]
        else:
            conversations = [row.conversation for row in rows]
        self._look_for_what_is_left_out(conversations)
        encoding = beside.submit(self.encoder.encode, [(r.where, c) for r, c in zip(rows, conversations, strict=True)])
        texts = [conversation.text for conversation in conversations]
        bands = self.signatures.of(texts) if self.signatures else np.empty((len(texts), 0), dtype=np.uint64)
        matches = [self.benchmarks.matches(text) for text in texts] if self.benchmarks else [[] for _ in texts]
        samples: list[PreparedRow] = []
        fit = []
        first = len(self.taken)
        for k, encoded in enumerate(encoding.result()):
            found = self._fit(rows[k].where, encoded)
            if found is None:
                continue
            fit.append(k)
            group, fields = self.fields.group_of(rows[k]), self.fields.of(rows[k])
            samples.append(PreparedRow.of(conversations[k], found, group, fields))
            if matches[k]:
                self.taken.leaks[first + len(samples) - 1] = matches[k]
        if not fit:
            return
        self.spool.add(samples, first)
        self._remember([pairs[k] for k in fit], samples, [encoding.result()[k] for k in fit])
        self.taken.keys.append(b"".join(deduplication.exact_key(f"{conversations[k].system}\0{texts[k]}") for k in fit))
        self.taken.bands.append(bands[fit])
        self.texts.add(texts[k] for k in fit)

    def _look_for_what_is_left_out(self, conversations: Sequence[Conversation]) -> None:
        """Look once at each kind of thing that a template may leave out."""
        for conversation in conversations:
            if (kinds := list_content_kinds(conversation)) - self.left_out.keys():
                self.left_out |= self.encoder.leaves_out(conversation)
                self.left_out |= dict.fromkeys(kinds - self.left_out.keys(), False)

    def _fit(self, where: str, encoded: EncodedConversation | RefusedConversation) -> EncodedConversation | None:
        """What is to be learned from a row, cut where the settings say so; None when it is booked as dropped."""
        settings, ledger = self.settings, self.ledger
        if isinstance(encoded, RefusedConversation):
            ledger.drop(encoded.reason, where, encoded.detail)
            return None
        length = len(encoded.input_ids)
        if length > settings.max_tokens:
            if settings.too_long == "raise":
                raise DataError(
                    f"{where}: {length:,} tokens, more than prepare.max_tokens ({settings.max_tokens:,}); "
                    "raise it, or set prepare.too_long to drop or truncate"
                )
            if settings.too_long == "drop":
                ledger.drop("too_long", where, f"{length:,} tokens")
                return None
            shorter = tokenization.truncate_conversation(encoded, settings.max_tokens)
            if shorter is None:
                ledger.drop("fully_masked", where, f"no answer within {settings.max_tokens:,} of {length:,} tokens")
                return None
            encoded = shorter
        if not encoded.trained:
            ledger.drop("fully_masked", where)
            return None
        if encoded.trained - len(encoded.labels) // 2 < settings.min_answer_tokens:  # else there is no need to count
            found = encoded.trained - encoded.answers  # each ends with a token for that
            if found < settings.min_answer_tokens:
                ledger.drop("too_short", where, f"{found} answer tokens")
                return None
        return encoded

    def _remember(
        self,
        pairs: Sequence[tuple[SourceRow, int]],
        samples: Sequence[PreparedRow],
        whole: Sequence[EncodedConversation | RefusedConversation],
    ) -> None:
        taken = self.taken
        for (row, divided), sample, before in zip(pairs, samples, whole, strict=True):
            taken.ids.append(int(sample.id, 16))
            taken.divided.append(divided)
            taken.lengths.append(len(sample.encoded.input_ids))
            taken.trained.append(sample.encoded.trained)
            original = len(before.input_ids) if isinstance(before, EncodedConversation) else 0
            taken.cut.append(max(0, original - len(sample.encoded.input_ids)))
            taken.sources.append(row.source)
            label = row.conversation.response if self.settings.task == "labels" else ""
            taken.labels.append(self.label_names.setdefault(label, len(self.label_names)))
            taken.fields.append(int(digests.hash_json([sample.group, sample.fields])[:16], 16))
            taken.where.append(row.where)
            taken.taught.append(self.divider.is_taught(row.source))
            self.categories.add(row)
