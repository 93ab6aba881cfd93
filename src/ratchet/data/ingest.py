"""Checks and encodes the rows of all sources, balances the training rows, and spools the tokens to disk.

Every row is counted: it is either accepted, or dropped for one reason. Tokens go to disk at once, and so do the values
of all rows that the later selection needs (hashes, lengths, splits); the selection reads one column of them at a time.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ratchet.config.extensions import load_extension
from ratchet.config.prepare import BalanceSettings, DropReason, Prepare
from ratchet.data import deduplication, tokenization
from ratchet.data.conversation import (
    Conversation,
    EncodedConversation,
    MalformedRecord,
    RefusedConversation,
    SourceRow,
    missing_part_reason,
)
from ratchet.data.leakage import BenchmarkIndex, LeakageMatch
from ratchet.data.quality import QualityChecks
from ratchet.data.readers import type_name
from ratchet.data.row_table import RowTable, TextSpool
from ratchet.data.schema_detection import (
    NAMES_SHOWN,
    FieldNames,
    PassthroughFields,
    find_text_flaw,
    format_field_value,
)
from ratchet.data.splits import SplitAssigner
from ratchet.data.token_files import PreparedRow, PreparedRowSpool
from ratchet.data.tokenization import ConversationEncoder
from ratchet.errors import DataError, SettingsError
from ratchet.storage import digests
from ratchet.storage.records.data import BalanceReport, DroppedRows

CHUNK_ROWS = 2048
"""Number of rows encoded at once: enough to keep all cores busy, few enough to hold two chunks in memory."""
EXAMPLES = 5
"""Maximum number of example positions for each reason."""
MAX_DETAIL_CHARACTERS = 160
"""Length limit of one example, in characters."""

# Reasons without a limit, because the removal is intended.
SAMPLED_OUT = "sampled_out"
"""Reason for rows that a source weight below 1 removes."""
BALANCED_OUT = "balanced_out"
"""Reason for surplus training rows of a category (prepare.balance)."""
HELD_OUT = "teacher_held_out"
"""Reason for teacher answers to held-out prompts: such answers are not ground truth, and training on them leaks."""
LABEL = "label"
"""Value of prepare.balance.by that selects the response if prepare.task is labels."""
MAX_CATEGORIES = 1000
"""Maximum number of different values of a field that is used as a category."""


@dataclass(frozen=True)
class _Chunk:
    """Rows that are encoded in a thread."""

    rows: Sequence[tuple[SourceRow, int]]
    """Each with its index in the split assigner."""
    conversations: list[Conversation]
    encoding: Future[list[EncodedConversation | RefusedConversation]]
    """All conversations; then, for pairs, all conversations with the rejected answer."""


class RowIngestion:
    """Ingestion of the rows of all sources; the results are in `accepted`, `split_assigner` and `ledger`.

    `benchmarks` are evaluation sets that are searched for leaked rows (None: no search), `folder` is for temporary
    files, and `teacher_sources` has for each source whether it contains teacher answers (empty if none does).
    """

    def __init__(
        self, settings: Prepare, tokenizer: Any, benchmarks: BenchmarkIndex | None, folder: Path,
        teacher_sources: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self.settings, self.benchmarks, self.folder = settings, benchmarks, folder
        self.preference: Literal["pair", "label"] | None = None
        """How the rows say which answers are better, by the first row; None unless prepare.task is preferences."""
        self._first_preference = ""  # position of that row
        self.quality = QualityChecks(settings)
        self.encoder = ConversationEncoder(tokenizer, "last" if settings.task == "preferences" else settings.turns)
        self._executor = ThreadPoolExecutor(max_workers=1)
        searches_near_duplicates = settings.deduplication.jaccard_threshold is not None
        self.signatures = deduplication.MinHashSignatures(settings.deduplication) if searches_near_duplicates else None
        bands = [(str(band), "u8") for band in range(self.signatures.bands)] if self.signatures else []
        self.band_keys = RowTable(folder, np.dtype(bands))
        """MinHash band keys of the accepted rows, a column for each band."""
        self.text_spool = TextSpool(folder)
        self.row_spool = PreparedRowSpool(folder / "spool")
        self.split_assigner = SplitAssigner(settings, teacher_sources, folder)
        self.balancer = CategoryBalancer(settings.balance, settings.task == "labels")
        self.passthrough = PassthroughFields(settings.extra_fields, settings.split.group)
        self.filters = [(name, load_extension("ratchet.filters", name, "prepare.filters")) for name in settings.filters]
        self.ledger = RowLedger()
        self.flaws = RowLedger()
        """Rows that a check of their text finds, by check; a row may be in several, and is not always dropped."""
        self.accepted = IngestedRows(folder)
        self.label_names: dict[str, int] = {}
        self.rows_by_source = [0] * len(settings.sources)
        self.unanswered_messages = 0
        """Number of messages that were removed because they come after the last answer of their conversation."""

    @property
    def has_pairs(self) -> bool:
        """Whether each row has a chosen and a rejected answer."""
        return self.preference == "pair"

    def close(self) -> None:
        """Delete the temporary files."""
        for part in (self.band_keys, self.text_spool, self.row_spool, self.split_assigner, self.accepted):
            part.close()

    def ingest(self, rows: Iterator[SourceRow | MalformedRecord]) -> None:
        """Check, encode and spool all rows.

        Raises DataError if a source or the template cannot be used, or a row is too long and prepare.too_long is
        `raise`.
        """
        previous: _Chunk | None = None
        try:  # encoding is mostly Rust, which releases the GIL: the next chunk is encoded while one is added
            while chunk := list(islice(rows, CHUNK_ROWS)):
                usable = [self._check_row(item) for item in chunk]
                begun = self._begin_chunk([pair for pair in usable if pair is not None])
                if previous is not None:
                    self._add_chunk(previous)
                previous = begun
            if previous is not None:
                self._add_chunk(previous)
        finally:
            self._executor.shutdown(cancel_futures=True)

    def _check_row(self, item: SourceRow | MalformedRecord) -> tuple[SourceRow, int] | None:
        """Return a usable row with its index in the split assigner; None if the row was recorded as dropped."""
        self.ledger.rows_in += 1
        self.rows_by_source[item.source] += 1
        if isinstance(item, MalformedRecord):
            self.ledger.drop("malformed", item.where, item.detail)
            return None
        if self.settings.task != "preferences":
            if item.conversation.rejected is not None:
                item = replace(item, conversation=replace(item.conversation, rejected=None))
        elif problem := self._find_preference_problem(item):
            self.ledger.drop("malformed", item.where, problem)
            return None
        if missing := missing_part_reason(item):
            self.ledger.drop(missing, item.where)
            return None
        checks = (self.split_assigner, self.passthrough, self.balancer)
        if problem := next(filter(None, (check.find_problem(item) for check in checks)), None):
            self.ledger.drop("malformed", item.where, problem)
            return None
        if found := self._find_drop_reason(item):
            self.ledger.drop(found[0], item.where, found[1])
            return None
        self.unanswered_messages += item.conversation.unanswered
        return item, self.split_assigner.add(item)

    def _find_preference_problem(self, row: SourceRow) -> str | None:
        """Return why a row has no preference, or has it in another form than the first row; None if it fits."""
        conversation = row.conversation
        if conversation.rejected is None and conversation.is_desirable is None:
            return "it has no rejected answer, and no label true or false (prepare.task: preferences)"
        form: Literal["pair", "label"] = "label" if conversation.rejected is None else "pair"
        if self.preference is None:
            self.preference, self._first_preference = form, row.where
        if form == self.preference:
            return None
        forms = {"pair": "a rejected answer", "label": "a label"}
        return (
            f"it has {forms[form]}, but the first row ({self._first_preference}) has {forms[self.preference]}; prepare "
            "one form only"
        )

    def _find_drop_reason(self, row: SourceRow) -> tuple[DropReason, str] | None:
        """Note the flaws of a row; return the first one for which it is dropped, or the reason of a filter."""
        flaws = list(self.quality.find_flaws(row))
        for check, detail in flaws:
            self.flaws.drop(check, row.where, detail)
        if found := next((flaw for flaw in flaws if flaw[0] in self.settings.quality.drop), None):
            return found
        return ("filtered", reason) if (reason := self._find_filter_reason(row)) else None

    def _find_filter_reason(self, row: SourceRow) -> str | None:
        """Return the reason why a filter of prepare.filters drops the row; None if all filters keep it."""
        for name, find_reason in self.filters:
            try:
                reason = find_reason(row.conversation.messages)
            except Exception as error:
                raise SettingsError(
                    f"prepare.filters: {name} failed at {row.where}: {type(error).__name__}: {error}"
                ) from error
            if reason is None:
                continue
            if not isinstance(reason, str) or not reason.strip():
                raise SettingsError(
                    f"prepare.filters: {name} returned {reason!r} at {row.where}; expected a reason as text, or None "
                    "to keep the row"
                )
            return f"{name}: {reason}"
        return None

    def _begin_chunk(self, rows: Sequence[tuple[SourceRow, int]]) -> _Chunk:
        """Begin to encode rows, each given with its index in the split assigner."""
        conversations = [row.conversation for row, _ in rows]
        if self.settings.system == "merge":
            conversations = list(map(tokenization.merge_system_messages, conversations))
        places = [(row.where, conversation) for (row, _), conversation in zip(rows, conversations, strict=True)]
        encoding = self._executor.submit(self._encode, places)
        return _Chunk(rows, conversations, encoding)

    def _encode(self, places: Sequence[tuple[str, Conversation]]) -> list[EncodedConversation | RefusedConversation]:
        """Encode conversations, each given with its position. Only the executor's thread uses the encoder."""
        for _, conversation in places:
            self.encoder.note_omissions(conversation)
        rejected = [(where, conversation.with_rejected) for where, conversation in places] if self.has_pairs else []
        return self.encoder.encode([*places, *rejected])

    def _add_chunk(self, chunk: _Chunk) -> None:
        """Spool the rows of a chunk that can be used, and record the others as dropped."""
        pairs, conversations = chunk.rows, chunk.conversations
        texts = [conversation.text for conversation in conversations]
        bands = self.signatures.band_keys(texts) if self.signatures else np.empty((len(texts), 0), dtype=np.uint64)
        matches = [self.benchmarks.matches(text) for text in texts] if self.benchmarks else [[] for _ in texts]
        first, samples = len(self.accepted), []
        kept: list[int] = []
        encoded_answers = chunk.encoding.result()
        for k, encoded in enumerate(encoded_answers[: len(pairs)]):
            row, split_index = pairs[k]
            conversation, final = self._apply_limits(row.where, conversations[k], encoded)
            rejected = None
            if isinstance(final, RefusedConversation):
                self.ledger.drop(final.reason, row.where, final.detail)
                continue
            if self.has_pairs:
                _, rejected = self._apply_limits(row.where, conversations[k], encoded_answers[len(pairs) + k])
            if isinstance(rejected, RefusedConversation):
                self.ledger.drop(rejected.reason, row.where, f"rejected answer: {rejected.detail}")
                continue
            if conversation is not conversations[k]:
                conversations[k], texts[k] = conversation, conversation.text
            full_length = len(encoded.input_ids) if isinstance(encoded, EncodedConversation) else 0
            kept.append(k)
            group, fields = self.passthrough.group_of(row), self.passthrough.take(row)
            samples.append(PreparedRow.from_conversation(conversations[k], final, group, fields, rejected))
            label = row.conversation.response if self.settings.task == "labels" else ""
            exact_key = deduplication.exact_key(f"{conversation.system}\0{texts[k]}")
            self.accepted.add(
                samples[-1],
                row,
                matches[k],
                exact_high=int.from_bytes(exact_key[:8]),
                exact_low=int.from_bytes(exact_key[8:]),
                split_index=split_index,
                truncated_tokens=full_length - len(final.input_ids),
                label=self.label_names.setdefault(label, len(self.label_names)),
                category=self.balancer.add(row),
                is_desirable=conversation.is_desirable is not False,
                from_teacher=self.split_assigner.is_from_teacher(row.source),
            )
        if kept:
            self.row_spool.add(samples, first)
            if self.signatures:
                self.band_keys.extend(bands[kept].view(self.band_keys.dtype)[:, 0])
            self.text_spool.add(texts[k] for k in kept)

    def _apply_limits(
        self, where: str, conversation: Conversation, encoded: EncodedConversation | RefusedConversation
    ) -> tuple[Conversation, EncodedConversation | RefusedConversation]:
        """Return a row, truncated if the settings require it, or the reason to drop the row."""
        if isinstance(encoded, EncodedConversation) and len(encoded.input_ids) > self.settings.max_tokens:
            conversation, encoded = self._shorten(where, conversation, encoded)
        if isinstance(encoded, RefusedConversation):
            return conversation, encoded
        if not encoded.trained_tokens:
            return conversation, RefusedConversation("fully_masked", "")
        # At most every second token begins an answer, so this cheap bound spares the exact count for most rows.
        if encoded.trained_tokens - len(encoded.labels) // 2 < self.settings.min_answer_tokens:
            answer_tokens = encoded.trained_tokens - encoded.answer_count  # without the end-of-turn tokens
            if answer_tokens < self.settings.min_answer_tokens:
                return conversation, RefusedConversation("too_short", f"{answer_tokens} answer tokens")
        return conversation, encoded

    def _shorten(
        self, where: str, conversation: Conversation, encoded: EncodedConversation
    ) -> tuple[Conversation, EncodedConversation | RefusedConversation]:
        """Treat a conversation that is too long as prepare.too_long says."""
        max_tokens, length = self.settings.max_tokens, len(encoded.input_ids)
        match self.settings.too_long:
            case "drop":
                return conversation, RefusedConversation("too_long", f"{length:,} tokens")
            case "raise":
                raise DataError(
                    f"{where}: {length:,} tokens, more than prepare.max_tokens ({max_tokens:,}); "
                    "raise it, or set prepare.too_long to drop or truncate"
                )
            case "truncate":
                truncated = tokenization.truncate_conversation(encoded, max_tokens)
                detail = f"no answer within {max_tokens:,} of {length:,} tokens"
                return conversation, truncated or RefusedConversation("fully_masked", detail)
            case "truncate_prompt" | "truncate_both" as too_long:
                cut: Literal["prompt", "both"] = "prompt" if too_long == "truncate_prompt" else "both"
                detail = f"{length:,} tokens, and without the texts that may be cut more than {max_tokens:,}"
                shortened = self._executor.submit(
                    self.encoder.shorten, where, conversation, length, max_tokens, cut
                ).result()
                return shortened or (conversation, RefusedConversation("too_long", detail))


_ACCEPTED = np.dtype(
    [
        ("id", "u8"), ("exact_high", "u8"), ("exact_low", "u8"), ("field_hash", "u8"), ("split_index", "i8"),
        ("length", "i4"), ("trained_tokens", "i4"), ("rejected_tokens", "i4"), ("truncated_tokens", "i4"),
        ("label", "i4"), ("category", "i4"), ("source", "i2"), ("is_desirable", "?"), ("from_teacher", "?"),
    ]
)  # fmt: skip
"""Columns of `IngestedRows.values`:

- `id`: first 64 bits of the sample id.
- `exact_high`, `exact_low`: the key for exact deduplication.
- `field_hash`: hash of group and passthrough fields, which decides which of several equal rows is kept.
- `split_index`: row index in the split assigner.
- `length`, `trained_tokens`: numbers of tokens.
- `rejected_tokens`: number of trained tokens of the rejected answer; 0 without one.
- `truncated_tokens`: number of tokens that truncation removed.
- `label`: index into `RowIngestion.label_names`; all 0 for a text task.
- `category`: category of prepare.balance, as `CategoryBalancer` numbers them.
- `source`: index into prepare.sources.
- `is_desirable`: false if the answer is labelled undesirable.
- `from_teacher`: whether the row is an answer of a teacher.
"""


@lru_cache(maxsize=1024)  # most rows have no fields
def _hash_fields(group: str | None, fields: str) -> int:
    return int(digests.hash_json([group, fields])[:16], 16)


class IngestedRows:
    """Values of the accepted rows, by index in the row spool; temporary files hold them."""

    def __init__(self, folder: Path) -> None:
        self.values = RowTable(folder, _ACCEPTED)
        self.where = TextSpool(folder)
        """Position in the source."""
        self.leaked_rows = array("q")
        """Rows that overlap with an evaluation set."""
        self.first_leaks = TextSpool(folder)
        """For each of these rows: its first overlap, `benchmark: words`."""
        self.leaks: dict[str, list[str]] = defaultdict(list)
        """For each benchmark: `where: words` of the first overlaps."""
        self.leak_counts: Counter[str] = Counter()
        """Number of rows that overlap with each benchmark."""

    def __len__(self) -> int:
        return len(self.values)

    def add(self, sample: PreparedRow, row: SourceRow, matches: Sequence[LeakageMatch], **values: int) -> None:
        """Add a row with its overlaps, and those of its values that follow neither from the sample nor from the row."""
        if matches:
            self.leaked_rows.append(len(self))
            self.first_leaks.add([f"{matches[0].benchmark}: {matches[0].words}"])
        for match in matches:
            self.leak_counts[match.benchmark] += 1
            if len(self.leaks[match.benchmark]) < EXAMPLES:
                self.leaks[match.benchmark].append(f"{row.where}: {match.words}")
        self.values.add(
            id=int(sample.id, 16),
            field_hash=_hash_fields(sample.group, sample.fields),
            length=len(sample.encoded.input_ids),
            trained_tokens=sample.encoded.trained_tokens,
            rejected_tokens=0 if sample.rejected is None else sample.rejected.trained_tokens,
            source=row.source,
            **values,
        )
        self.where.add([row.where])

    def close(self) -> None:
        """Delete the temporary files."""
        for part in (self.values, self.where, self.first_leaks):
            part.close()


class RowLedger:
    """Counts of dropped (or flawed) rows by reason, with the positions of the first few."""

    def __init__(self) -> None:
        self.rows_in = 0
        self._counts: Counter[str] = Counter()
        self._examples: defaultdict[str, list[str]] = defaultdict(list)

    def drop(self, reason: str, where: str, detail: str = "") -> None:
        """Record a dropped row: its reason, its position in its source, and an explanation for the examples."""
        self.drop_rows(reason, 1, [(where, detail)])

    def drop_rows(self, reason: str, count: int, places: Iterable[tuple[str, str]]) -> None:
        """Record dropped rows; of `places` (position, explanation) only those of examples are read."""
        if not count:
            return
        self._counts[reason] += count
        for where, detail in islice(places, EXAMPLES - len(self._examples[reason])):
            text = f"{where}: {detail}" if detail else where
            too_long = len(text) > MAX_DETAIL_CHARACTERS
            self._examples[reason].append(text[: MAX_DETAIL_CHARACTERS - 3] + "..." if too_long else text)

    @property
    def dropped(self) -> dict[str, DroppedRows]:
        """Count and examples for every reason."""
        return {
            reason: DroppedRows(count=count, examples=tuple(self._examples[reason]))
            for reason, count in sorted(self._counts.items())
        }

    @property
    def rows_out(self) -> int:
        """Number of rows that were not dropped."""
        return self.rows_in - self._counts.total()

    def check(self, limits: Mapping[DropReason, float | None], truncated: int) -> None:
        """Raise DataError, with examples, if more rows were lost for a reason than prepare.limits allows.

        `truncated` is the number of truncated rows, which have a limit although they are not dropped.
        """
        counts = {**self._counts, "truncated": truncated}
        lines, names = [f"  {'reason':<15}{'rows':>9} {'share':>8} {'limit':>8}"], []
        for reason, limit in limits.items():
            if limit is not None and (count := counts.get(reason, 0)) > limit * self.rows_in:
                names.append(f"prepare.limits.{reason}")
                lines.append(f"  {reason:<15}{count:>9,} {count / self.rows_in:>8.2%} {limit:>8.2%}")
                lines += [f"      {example}" for example in self._examples.get(reason, [])]
        if not names:
            return
        if "prepare.limits.near_duplicate" in names:
            lines.append(
                "  (rows that share a long instruction are similar: raise prepare.deduplication.jaccard_threshold, or "
                "set it to null)"
            )
        raise DataError(
            f"prepare: more of the {self.rows_in:,} rows were lost or truncated than the limits allow; fix the rows, "
            f"or raise {', '.join(names)}:\n" + "\n".join(lines)
        )


# ----- Balance of the training rows (prepare.balance)


class CategoryBalancer:
    """Collector of the categories of all rows, which computes how often each training row is used (prepare.balance).

    After balancing, each category has the same number of training rows: those with the smallest hash of seed and id. So
    the choice depends neither on the order of the rows nor on other categories, and a new row replaces at most one row.
    If prepare.balance.on_shortage is `take`, a category with too few rows keeps all of them and has fewer rows.
    """

    def __init__(self, settings: BalanceSettings, has_labels: bool) -> None:
        self._settings, self._by = settings, settings.by
        self._by_label = has_labels and settings.by == LABEL
        self._code_of: dict[str, int] = {}
        self._fields = FieldNames()
        self._field_seen = False

    def find_problem(self, row: SourceRow) -> str | None:
        """Return the reason why a row has no category; None if the row has a category."""
        if self._by is None or self._by_label:
            return None
        self._fields.add(row.fields)
        self._field_seen |= self._by in row.fields
        name, value = f"field {self._by!r} (prepare.balance.by)", row.fields.get(self._by)
        text = format_field_value(value)
        if text is None:
            return f"{name} is {type_name(value)}, expected text, number or true/false"
        if not text:
            return f"no {name}"
        problem = find_text_flaw(text)
        return f"{name} {problem}" if problem else None

    def add(self, row: SourceRow) -> int:
        """Add the next row, which must be valid (see `find_problem`); return the number of its category."""
        if self._by is None:
            return 0
        name = row.conversation.response if self._by_label else format_field_value(row.fields.get(self._by)) or ""
        return self._code_of.setdefault(name, len(self._code_of))

    def count_copies(
        self, train: NDArray[np.bool_], values: RowTable
    ) -> tuple[NDArray[np.int32], BalanceReport | None]:
        """Compute how often each row is used. Without balancing, every row is used once, and the report is None.

        `train` is the mask of the training rows among all accepted rows, whose `values` are those of `IngestedRows`.
        Raises DataError if no row has the field, the field has too many values, or a category has too few rows and
        prepare.balance.on_shortage is `refuse`.
        """
        copies = np.ones(len(train), dtype=np.int32)
        if self._by is None:
            return copies, None
        if not self._by_label and not self._field_seen and self._fields.names:
            hint = f"; {LABEL} selects the response only if prepare.task is labels" if self._by == LABEL else ""
            raise DataError(f"params.yaml: prepare.balance.by: {self._fields.describe_missing(self._by)}{hint}")
        if len(self._code_of) > MAX_CATEGORIES:
            raise DataError(
                f"params.yaml: prepare.balance.by: {self._by!r} has {len(self._code_of):,} different values; expected "
                f"at most {MAX_CATEGORIES:,} categories; name another field"
            )
        rows = np.flatnonzero(train)
        if not len(rows):
            return copies, None
        codes = values.column("category", train)
        counts = np.bincount(codes, minlength=len(self._code_of))
        names = sorted((name, code) for name, code in self._code_of.items() if counts[code])
        before = {name: int(counts[code]) for name, code in names}
        target_rows = min(before.values()) if self._settings.rows == "smallest" else self._settings.rows
        short = [f"{name} ({count:,})" for name, count in before.items() if count < target_rows]
        if short and self._settings.on_shortage == "refuse":
            raise DataError(
                f"params.yaml: prepare.balance.rows: {target_rows:,}, but {len(short):,} categories have "
                f"fewer training rows: {', '.join(short[:NAMES_SHOWN])}; lower it, add rows, or set "
                "prepare.balance.on_shortage to take or repeat"
            )
        names_of_rows = (f"{self._settings.seed}\0{i:016x}" for i in values.column("id", train))
        keys = (int(digests.hash_bytes(name.encode())[:16], 16) for name in names_of_rows)
        order = np.lexsort((np.fromiter(keys, dtype=np.uint64, count=len(rows)), codes))
        for members in np.split(rows[order], np.cumsum(counts)[:-1]):
            if len(members) >= target_rows or (len(members) and self._settings.on_shortage == "repeat"):
                repetitions, rest = divmod(target_rows, len(members))
                copies[members] = repetitions + (np.arange(len(members)) < rest)
        sums = np.bincount(codes, weights=copies[rows], minlength=len(counts))
        after = {name: int(sums[code]) for name, code in names}
        return copies, BalanceReport(
            by=self._by, rows=target_rows, on_shortage=self._settings.on_shortage, before=before, after=after
        )


def describe_balance(report: BalanceReport) -> Iterator[str]:
    """Yield notes for the dataset card: that a field has mostly unique values, or that balancing has no effect."""
    single = sum(count == 1 for count in report.before.values())
    if 2 * single > len(report.before) > 1:
        yield (
            f"{single:,} of {len(report.before):,} categories of {report.by!r} (prepare.balance.by) have only one "
            "training row: the field has mostly unique values, so it is probably not a category"
        )
    if report.before == report.after and any(count < report.rows for count in report.before.values()):
        yield (
            f"balancing has no effect: no category has more than {report.rows:,} training rows (prepare.balance.rows), "
            f"the largest has {max(report.before.values()):,}; set a smaller number or smallest, or set "
            "prepare.balance.on_shortage to repeat"
        )
