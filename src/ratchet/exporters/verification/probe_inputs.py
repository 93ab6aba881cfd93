"""Chooses the inputs that every format is verified with: rows and positions, prompts, and texts for tokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.config.settings import Settings
from ratchet.data import tokenization
from ratchet.data.conversation import IGNORE_INDEX, Conversation
from ratchet.errors import DataError
from ratchet.models.runtimes.tokenizer_probes import TEXTS

PROMPT_TEXTS = 32
"""Prompts of test rows among the texts whose tokens are compared."""

Metric = Literal["accuracy", "exact_match", "token_f1"]


@dataclass(frozen=True)
class ProbeInputs:
    """Inputs for base + adapter and for each exported format."""

    rows: list[list[int]]
    """Token ids of each row."""
    positions: list[list[int]]
    """For each row, ascending: positions whose next token is an answer token."""
    targets: list[list[int]]
    """The next tokens at these positions."""
    prompts: list[list[int]]
    """Token ids that end where the assistant's answer begins."""
    expected: list[str]
    """The correct answer to each prompt, stripped."""
    metric: Metric
    end_ids: list[int]
    """Tokens that end an answer."""
    max_new_tokens: int
    groups: list[str | None] = field(default_factory=list)
    """Group of each prompt; rows of one group are not independent samples."""
    texts: list[str] = field(default_factory=lambda: list(TEXTS))
    """Difficult texts and prompts that every format's own tokenizer must split into the same tokens."""


def choose_probe_inputs(test: Any, tokenizer: Any, settings: Settings, end_ids: Sequence[int]) -> ProbeInputs:
    """Choose evenly from the test rows; the same rows give the same inputs.

    Prompts come from rows that the evaluation answers, in the same encoding. If the chosen rows have more answer
    positions than `export.parity_positions`, each row keeps an evenly spread share of its positions; rows are dropped
    only if there are fewer positions than rows.

    Args:
        test: test rows from `token_files.open_split`.
        tokenizer: the tokenizer of base + adapter.
        settings: the sections export and evaluate and the setting prepare.task are used.
        end_ids: tokens that end an answer.

    Raises:
        DataError: no test row has an answer position, or the chat template rejects a row.
    """
    export, count = settings.export, len(test)
    answered = min(count, settings.evaluate.generation_rows or count)
    rows = [test[i] for i in spread_indices(count, export.parity_rows)]
    task_rows = [test[i] for i in spread_indices(answered, export.task_rows)]
    conversations = [Conversation.from_json(row["conversation"]) for row in task_rows]
    with_answers = [(row["input_ids"], found) for row in rows if (found := _answer_positions(row["labels"]))]
    if not with_answers:
        raise DataError("prepare.split.test: no test row has an answer token to compare; prepare more test rows")
    chosen = _thin_positions(with_answers, export.parity_positions)
    return ProbeInputs(
        rows=[list(ids) for ids, _ in chosen],
        positions=[positions for _, positions in chosen],
        targets=[[ids[one + 1] for one in positions] for ids, positions in chosen],
        prompts=[tokenization.encode_prompt(tokenizer, conversation.context) for conversation in conversations],
        expected=[conversation.response.strip() for conversation in conversations],
        metric=task_metric(settings),
        end_ids=list(end_ids),
        max_new_tokens=settings.evaluate.max_new_tokens,
        groups=[row["group"] for row in task_rows],
        texts=build_probe_texts(
            tokenizer, [tokenization.encode_prompt(tokenizer, one.context) for one in conversations[:PROMPT_TEXTS]]
        ),
    )


def build_probe_texts(tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return difficult texts and decoded prompts, each after a special token as in a conversation.

    At the beginning of a text SentencePiece inserts a space, and not every format can express that in a file; in a
    conversation something always precedes the text.
    """
    prefix = tokenizer.eos_token or ""
    return [*(prefix + text for text in TEXTS), *(tokenizer.decode(list(ids)) for ids in prompts)]


def task_metric(settings: Settings) -> Metric:
    """The metric that scores answers: accuracy for labels; for texts token F1 if it is evaluated, else exact match."""
    if settings.prepare.task == "labels":
        return "accuracy"
    return "token_f1" if "token_f1" in settings.evaluate.metrics else "exact_match"


def spread_indices(count: int, limit: int) -> list[int]:
    """Return at most `limit` indices below `count`, ascending and evenly spread."""
    number = min(count, limit)
    return [i * count // number for i in range(number)]


def _answer_positions(labels: Sequence[int]) -> list[int]:
    """Positions whose next token is an answer token: position p predicts token p + 1."""
    return [index - 1 for index, label in enumerate(labels) if index and label != IGNORE_INDEX]


def _thin_positions(rows: Sequence[tuple[Any, list[int]]], budget: int) -> list[tuple[Any, list[int]]]:
    """Reduce positions to a budget: short rows keep all of theirs, longer rows get equal shares."""
    rows = [rows[i] for i in spread_indices(len(rows), budget)]
    left, share = budget, {}
    for done, i in enumerate(sorted(range(len(rows)), key=lambda i: (len(rows[i][1]), i))):
        share[i] = min(len(rows[i][1]), left // (len(rows) - done))
        left -= share[i]
    return [
        (ids, [positions[k] for k in spread_indices(len(positions), share[i])])
        for i, (ids, positions) in enumerate(rows)
    ]
