"""What every model is asked: the test rows, their labels and parts, and text that has nothing to do with the task."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ratchet.config.evaluation import Evaluate
from ratchet.config.schema import Settings
from ratchet.data import general_text as general
from ratchet.data import token_files
from ratchet.data import tokenization as chat_template
from ratchet.data.conversation import MASKED, Conversation, EncodedConversation, extract_text
from ratchet.data.splits import SplitName
from ratchet.errors import DataError, SettingsError
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import EvaluatedRow

MOST_VALUES = 50
"""Values of one category by which results are given: the most frequent; a field of more is rather a text."""


@dataclass(frozen=True)
class TestRows:
    """The test rows, in the order of their ids, and how many of them are answered with generated text."""

    __test__ = False  # no test of pytest's

    ids: list[str]
    conversations: list[Conversation]
    input_ids: list[list[int]]
    labels: list[list[int]]
    groups: list[str | None]
    fields: list[Mapping[str, str]]
    generated: int
    """The first so many: ids are digests of content, so they are a random sample, the same for every model."""

    @property
    def expected(self) -> list[str]:
        """The true answers of the rows that are answered, ends stripped as a generated answer's are."""
        return [conversation.response.strip() for conversation in self.conversations[: self.generated]]

    def answer_tokens(self, row: int) -> int:
        """Tokens of a row that are learned from."""
        return sum(label != MASKED for label in self.labels[row][1:])

    def records(self, categories: Sequence[str]) -> Iterator[EvaluatedRow]:
        """The rows as they are written beside their scores."""
        for i, (key, conversation) in enumerate(zip(self.ids, self.conversations, strict=True)):
            learned = self.answer_tokens(i)
            yield EvaluatedRow(
                id=key,
                prompt=extract_text(conversation.question.messages[-1]),
                expected=conversation.response,
                group=self.groups[i],
                fields={name: self.fields[i].get(name, "") for name in categories},
                prompt_tokens=len(self.input_ids[i]) - 1 - learned,
                answer_tokens=learned,
            )

    def parts(self, settings: Evaluate) -> dict[str, list[int]]:
        """Rows by length and by category, under names that people read; parts without rows are left out."""
        lengths = [len(ids) for ids in self.input_ids]
        bounds = [0, *settings.length_bins]
        found = {f"{a + 1}-{b} tokens": [i for i, n in enumerate(lengths) if a < n <= b] for a, b in pairwise(bounds)}
        found[f"over {bounds[-1]} tokens"] = [i for i, n in enumerate(lengths) if n > bounds[-1]]
        for name in settings.categories:
            rows: dict[str, list[int]] = {}
            for i, fields in enumerate(self.fields):
                rows.setdefault(fields.get(name, ""), []).append(i)
            frequent = sorted(rows, key=lambda value: (-len(rows[value]), value))[:MOST_VALUES]
            found |= {f"{name} = {value or '(none)'}": rows[value] for value in sorted(frequent)}
        return {name: indices for name, indices in found.items() if indices}


def read(layout: ProjectLayout, settings: Settings, split: SplitName = "test") -> TestRows:
    """The test rows of stage prepare, or those of another split, every byte checked.

    Raises:
        DamagedFileError, DataError: they are not there, or not as they were written.
        SettingsError: evaluate.categories names a field that prepare.keep does not.
    """
    if unknown := [name for name in settings.evaluate.categories if name not in settings.prepare.keep]:
        kept = ", ".join(settings.prepare.keep) or "nothing"
        raise SettingsError(f"evaluate.categories: {unknown[0]!r} is not kept (prepare.keep: {kept}); list it there")
    files.verify_sealed(layout.data, "data")
    dataset = token_files.open_split(layout.data, split)
    ids = list(dataset["id"])
    return TestRows(
        ids=ids,
        conversations=[Conversation.from_json(text) for text in dataset["conversation"]],
        input_ids=dataset["input_ids"][:],
        labels=dataset["labels"][:],
        groups=list(dataset["group"]),
        fields=[json.loads(text) for text in dataset["fields"]],
        generated=min(len(ids), settings.evaluate.generate_rows or len(ids)),
    )


def validation_ids(layout: ProjectLayout) -> tuple[str, ...]:
    """Ids of the rows by which the best checkpoint was chosen."""
    return tuple(token_files.open_split(layout.data, "validation")["id"])


def has_same_tokens(rows: TestRows, tokenizer: Any, settings: Settings) -> bool:
    """Whether a model's tokens are those of the prepared rows, cut ones up to where they were cut."""
    try:
        encoder = chat_template.ConversationEncoder(tokenizer, settings.prepare.turns)
        own = encoder.encode(list(zip(rows.ids, rows.conversations, strict=True)))
    except DataError:
        return False
    return all(
        isinstance(one, EncodedConversation) and one.input_ids[: len(ids) - 1] == ids[:-1]
        for one, ids in zip(own, rows.input_ids, strict=True)
    )


def read_general_text(layout: ProjectLayout, settings: Settings) -> str:
    """The text of evaluate.general. Raises SettingsError when its file is not there, or is no text."""
    name = settings.evaluate.general.text
    if name is None:
        return general.read_bundled_text()
    path = layout.tasks / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"evaluate.general.text: no file {name} below {layout.tasks}") from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise SettingsError(f"evaluate.general.text: {path} is no UTF-8 text ({error})") from None


def encode_labels(rows: TestRows, tokenizer: Any, labels: Sequence[str]) -> list[list[int]] | None:
    """Token ids of each label as the whole answer, end of turn included.

    None where the template writes an answer otherwise than behind its prompt, or does so for one row and not another:
    then there is no answer to give a likelihood of.
    """
    found: list[list[list[int]]] = []
    for conversation in (rows.conversations[0], rows.conversations[-1]):
        prompt = chat_template.encode_prompt(tokenizer, conversation.question)
        asked = [
            (label, Conversation([*conversation.messages[:-1], {"role": "assistant", "content": label}]))
            for label in labels
        ]
        encoded = chat_template.ConversationEncoder(tokenizer, "last").encode(asked)
        answers = []
        for one in encoded:
            if not isinstance(one, EncodedConversation) or one.input_ids[: len(prompt)] != prompt:
                return None
            last = max(i for i, label in enumerate(one.labels) if label != MASKED)
            answers.append(one.input_ids[len(prompt) : last + 1])
        found.append(answers)
    return found[0] if found[0] == found[1] else None


def gate_set_digest(ids: Sequence[str], documents: Mapping[str, Sequence[str]]) -> str:
    """Fingerprint of what a model is judged by: test rows, and documents of each harness task."""
    return digests.hash_json({"rows": sorted(ids), "tasks": {name: sorted(found) for name, found in documents.items()}})
