"""Inputs of an evaluation: test rows, their labels and slices, and general text that is unrelated to the task."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ratchet.config.evaluate import Evaluate
from ratchet.config.settings import Settings
from ratchet.data import token_files, tokenization
from ratchet.data.conversation import IGNORE_INDEX, Conversation, EncodedConversation, extract_text
from ratchet.data.sources import require_watched_path
from ratchet.data.splits import SplitName
from ratchet.errors import DataError, SettingsError
from ratchet.models import base_model
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.evaluation import EvaluatedRow

TEXT = Path(__file__).with_name("general.txt")
"""About eighty short pieces of prose, written for this purpose, so that no model was trained on them."""
TASKS = "data/tasks"
"""Folder that DVC watches for stage evaluate, relative to the project."""
CONTEXT = "context"
"""Field of a row with the text that its answer is about."""
MIN_BLOCKS = 2
"""Minimum number of blocks; a single sample has no variance."""
MAX_SLICES_PER_FIELD = 50
"""Maximum number of slices of a field of evaluate.slice_by: the most frequent values. A field with free text has more
values."""


@dataclass(frozen=True)
class EncodedRows:
    """Conversations as tokens."""

    input_ids: list[list[int]]
    labels: list[list[int]]


@dataclass(frozen=True)
class TestRows:
    """The test rows, and how many of them are answered with generated text.

    They are in the order of their ids; for a sequential gate, rows that were added later come last.
    """

    __test__ = False  # Not a test class of pytest.

    ids: list[str]
    conversations: list[Conversation]
    input_ids: list[list[int]]
    labels: list[list[int]]
    groups: list[str | None]
    """Group of each row. Rows of one group are not independent."""
    fields: list[Mapping[str, str]]
    references: list[str]
    """Last answer of each row, stripped like generated answers. A tool call is written as the chat template does."""
    rejected: EncodedRows | None
    """Conversations with the rejected answers; None unless the rows are pairs."""
    generation_count: int
    """Number of first rows that get generated answers. Rows are ordered by id, and ids are digests of content, so the
    first rows are a random sample."""

    @property
    def expected(self) -> list[str]:
        """References of the rows with generated answers."""
        return self.references[: self.generation_count]

    def select(self, indices: Sequence[int]) -> "TestRows":
        """Return some of the rows, all of them answered."""
        return TestRows(
            ids=[self.ids[i] for i in indices],
            conversations=[self.conversations[i] for i in indices],
            input_ids=[self.input_ids[i] for i in indices],
            labels=[self.labels[i] for i in indices],
            groups=[self.groups[i] for i in indices],
            fields=[self.fields[i] for i in indices],
            references=[self.references[i] for i in indices],
            rejected=None,  # these rows are answered, not compared with rejected answers
            generation_count=len(indices),
        )

    def first(self, count: int) -> "TestRows":
        """Return the first rows."""
        return self.with_ids(self.ids[:count])

    def with_ids(self, ids: Sequence[str]) -> "TestRows":
        """Return the rows with these ids, in the order of the ids."""
        places = {id: place for place, id in enumerate(self.ids)}
        order = [places[id] for id in ids]
        rejected = self.rejected and EncodedRows(
            [self.rejected.input_ids[i] for i in order], [self.rejected.labels[i] for i in order]
        )
        generation_count = min(self.generation_count, len(ids))
        return replace(self.select(order), rejected=rejected, generation_count=generation_count)

    def source_text(self, row: int) -> str:
        """Return the text that an answer should keep to: the row's field `context`, or else all messages before it."""
        if given := self.fields[row].get(CONTEXT):
            return given
        return "\n".join(extract_text(message) for message in self.conversations[row].context.messages)

    def answer_tokens(self, row: int) -> int:
        """Count the tokens of a row that have a label."""
        return sum(label != IGNORE_INDEX for label in self.labels[row][1:])

    def iterate_records(self, fields: Sequence[str]) -> Iterator[EvaluatedRow]:
        """Iterate over the rows as they are stored with their scores; `fields` selects the stored fields."""
        for i, (key, conversation) in enumerate(zip(self.ids, self.conversations, strict=True)):
            answer_tokens = self.answer_tokens(i)
            yield EvaluatedRow(
                id=key,
                prompt=extract_text(conversation.context.messages[-1]),
                expected=self.references[i],
                group=self.groups[i],
                fields={name: self.fields[i].get(name, "") for name in fields},
                prompt_tokens=len(self.input_ids[i]) - 1 - answer_tokens,
                answer_tokens=answer_tokens,
            )

    def slices(self, settings: Evaluate) -> dict[str, list[int]]:
        """Return the indices of the rows of each slice, by length and by field, without empty slices."""
        lengths = [len(ids) for ids in self.input_ids]
        bounds = [0, *settings.length_bins]
        slices = {f"{a + 1}-{b} tokens": [i for i, n in enumerate(lengths) if a < n <= b] for a, b in pairwise(bounds)}
        slices[f"over {bounds[-1]} tokens"] = [i for i, n in enumerate(lengths) if n > bounds[-1]]
        for name in settings.slice_by:
            rows: dict[str, list[int]] = {}
            for i, fields in enumerate(self.fields):
                rows.setdefault(fields.get(name, ""), []).append(i)
            frequent = sorted(rows, key=lambda value: (-len(rows[value]), value))[:MAX_SLICES_PER_FIELD]
            slices |= {f"{name} = {value or '(none)'}": rows[value] for value in sorted(frequent)}
        return {name: indices for name, indices in slices.items() if indices}


def read(layout: ProjectLayout, settings: Settings, split: SplitName = "test", count: int = 0) -> TestRows:
    """Read and verify the rows of a prepared split; only the first `count` rows, unless it is 0.

    Raises DamagedFileError or DataError if the data are missing or were changed after they were written, and
    SettingsError if evaluate.slice_by names a field that is not in prepare.extra_fields.
    """
    if unknown := [name for name in settings.evaluate.slice_by if name not in settings.prepare.extra_fields]:
        available = ", ".join(settings.prepare.extra_fields) or "none"
        raise SettingsError(
            f"evaluate.slice_by: {unknown[0]!r} is not in prepare.extra_fields (found {available}); add it there"
        )
    files.verify_sealed(layout.data, "data")
    dataset = token_files.open_split(layout.data, split)
    dataset = dataset.select(range(min(count or len(dataset), len(dataset))))
    ids = list(dataset["id"])
    conversations = [Conversation.from_json(text) for text in dataset["conversation"]]
    labels = dataset["labels"][:]
    tokenizer = None
    if any(conversation.calls_tools for conversation in conversations):
        tokenizer = base_model.load_project_tokenizer(layout, BaseCard.load(layout.base_card))
    return TestRows(
        ids=ids,
        conversations=conversations,
        input_ids=dataset["input_ids"][:],
        labels=labels,
        groups=list(dataset["group"]),
        fields=[json.loads(text) for text in dataset["fields"]],
        rejected=EncodedRows(dataset["rejected_input_ids"][:], dataset["rejected_labels"][:])
        if "rejected_input_ids" in dataset.column_names
        else None,
        references=[tokenization.decode_answer(*row, tokenizer) for row in zip(conversations, labels, strict=True)],
        generation_count=min(len(ids), settings.evaluate.generation_rows or len(ids)),
    )


def read_validation_ids(layout: ProjectLayout) -> tuple[str, ...]:
    """Read the ids of the validation rows, by which the best checkpoint is selected."""
    return tuple(token_files.open_split(layout.data, "validation")["id"])


def has_same_tokens(rows: TestRows, tokenizer: Any, settings: Settings) -> bool:
    """Return whether a model's tokenizer gives the tokens of the prepared rows.

    Each prepared row is compared without its last token; a truncated row is compared only up to its end.
    """
    try:
        encoder = tokenization.ConversationEncoder(tokenizer, settings.prepare.turns)
        encoded = encoder.encode(list(zip(rows.ids, rows.conversations, strict=True)))
    except DataError:
        return False
    return all(
        isinstance(row, EncodedConversation) and row.input_ids[: len(ids) - 1] == ids[:-1]
        for row, ids in zip(encoded, rows.input_ids, strict=True)
    )


def encode_labels(
    conversations: Sequence[Conversation], tokenizer: Any, labels: Sequence[str]
) -> list[list[int]] | None:
    """Encode each label as a complete answer, including the end of the turn; return token ids by label.

    The result is None if the template does not append the answer to the prompt, or appends it differently in the first
    and the last row, because the likelihood of an answer is then undefined.
    """
    answers_of_rows: list[list[list[int]]] = []
    for conversation in (conversations[0], conversations[-1]):
        prompt = tokenization.encode_prompt(tokenizer, conversation.context)
        answered = [
            (label, Conversation([*conversation.messages[:-1], {"role": "assistant", "content": label}]))
            for label in labels
        ]
        answers = []
        for encoded in tokenization.ConversationEncoder(tokenizer, "last").encode(answered):
            if not isinstance(encoded, EncodedConversation) or encoded.input_ids[: len(prompt)] != prompt:
                return None
            last = max(i for i, label in enumerate(encoded.labels) if label != IGNORE_INDEX)
            answers.append(encoded.input_ids[len(prompt) : last + 1])
        answers_of_rows.append(answers)
    return answers_of_rows[0] if answers_of_rows[0] == answers_of_rows[1] else None


# General text.


def read_general_text(layout: ProjectLayout, settings: Settings) -> str:
    """Read the text of evaluate.general_text. Raises the errors of `read_task_text`."""
    name = settings.evaluate.general_text.file
    return read_bundled_text() if name is None else read_task_text(layout, name, "evaluate.general_text.file")


def read_task_text(layout: ProjectLayout, name: str, setting: str) -> str:
    """Read a text file that a setting names.

    Raises:
        DataError: it is not below data/tasks, where DVC detects changes.
        SettingsError: it is missing, or is not text.
    """
    path = require_watched_path(layout.root, str(Path(TASKS) / name), (TASKS,), setting)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{setting}: file {name} not found in {layout.tasks}; set a path relative to this directory"
        ) from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise SettingsError(f"{setting}: {path} is not a UTF-8 text file ({error})") from None


def read_bundled_text() -> str:
    """Return the bundled English prose; its pieces are separated by blank lines."""
    return TEXT.read_text(encoding="utf-8")


def split_into_blocks(text: str, tokenizer: Any, block_tokens: int, blocks: int) -> list[list[int]]:
    """Tokenize a text and split it into at most `blocks` blocks of `block_tokens` text tokens, the same every time.

    If the tokenizer adds tokens before a text (the BOS of Llama and Gemma), each block begins with them too, because
    such models never see a text without them. An incomplete last block is left out. Raises DataError if the text is too
    short for two blocks.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    complete = len(ids) // block_tokens
    if min(complete, blocks) < MIN_BLOCKS:
        raise DataError(
            f"evaluate.general_text: the text has {len(ids):,} tokens, enough for {complete} blocks of {block_tokens} "
            f"tokens, of which at most {blocks} are used (max_blocks); expected at least {MIN_BLOCKS} blocks, or 100 "
            "to show a change of a few per cent: name a longer text"
        )
    prefix = _prefix_ids(tokenizer)
    starts = range(0, min(complete, blocks) * block_tokens, block_tokens)
    return [[*prefix, *ids[start : start + block_tokens]] for start in starts]


def _prefix_ids(tokenizer: Any) -> Sequence[int]:
    """Return the ids that the tokenizer adds before any text."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special: list[int] = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)
    return with_special[:start]
