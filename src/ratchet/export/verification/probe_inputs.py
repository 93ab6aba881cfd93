"""What every form is asked: rows and positions at which distributions are compared, and prompts that it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.config.schema import Settings
from ratchet.data import tokenization
from ratchet.data.conversation import MASKED, Conversation
from ratchet.errors import DataError
from ratchet.models.runtimes.tokenizer_probes import TEXTS

PROMPTS = 32
"""Real ones among the texts whose tokens are compared."""

Metric = Literal["accuracy", "exact_match", "token_f1"]


@dataclass(frozen=True)
class ProbeInputs:
    """Asked of base + adapter once, and of each exported form."""

    rows: list[list[int]]
    """Token ids of each row."""
    positions: list[list[int]]
    """Of each row, ascending: where the next token is one that the model learned to say."""
    targets: list[list[int]]
    """That token."""
    prompts: list[list[int]]
    """Ids that end where the assistant begins."""
    expected: list[str]
    """The true answer to each prompt, stripped."""
    metric: Metric
    ends: list[int]
    """Tokens that end an answer."""
    max_new_tokens: int
    groups: list[str | None] = field(default_factory=list)
    """Of each prompt: rows of one group are no independent samples."""
    texts: list[str] = field(default_factory=lambda: list(TEXTS))
    """That every form's own tokenizer must cut into the same tokens: hard ones, and prompts."""


def choose_probe_inputs(test: Any, tokenizer: Any, settings: Settings, ends: Sequence[int]) -> ProbeInputs:
    """Choose from the test rows, evenly over all of them; the same rows give the same material.

    Prompts are those of rows that the evaluation answers, written as it writes them. Where the chosen rows have more
    answer positions than `export.parity_positions`, each row keeps as many of its own as its share allows, evenly
    spread; there are fewer rows only where positions are fewer than rows.

    Args:
        test: test rows as `data.tokens.read` opens them.
        tokenizer: of base + adapter.
        settings: of them export, evaluate and prepare.task are read.
        ends: tokens that end an answer.

    Raises:
        DataError: no test row has an answer to compare at, or the chat template refuses a row.
    """
    wanted, count = settings.export, len(test)
    answered = min(count, settings.evaluate.generate_rows or count)
    rows = [test[i] for i in spread_indices(count, wanted.parity_rows)]
    asked = [test[i] for i in spread_indices(answered, wanted.task_rows)]
    conversations = [Conversation.from_json(row["conversation"]) for row in asked]
    learned = [(row["input_ids"], found) for row in rows if (found := _answer_positions(row["labels"]))]
    if not learned:
        raise DataError("no test row has an answer token to compare at; prepare more test rows (prepare.split.test)")
    chosen = _thin_positions(learned, wanted.parity_positions)
    return ProbeInputs(
        rows=[list(ids) for ids, _ in chosen],
        positions=[found for _, found in chosen],
        targets=[[ids[one + 1] for one in found] for ids, found in chosen],
        prompts=[tokenization.encode_prompt(tokenizer, conversation.question) for conversation in conversations],
        expected=[conversation.response.strip() for conversation in conversations],
        metric=task_metric(settings),
        ends=list(ends),
        max_new_tokens=settings.evaluate.max_new_tokens,
        groups=[row["group"] for row in asked],
        texts=build_probe_texts(
            tokenizer, [tokenization.encode_prompt(tokenizer, one.question) for one in conversations[:PROMPTS]]
        ),
    )


def build_probe_texts(tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Hard texts and prompts as text, as they stand in conversations: behind a special token.

    At the very beginning of a text SentencePiece puts a space, and formats differ in whether a file can say so; in a
    conversation something always stands before.
    """
    before = tokenizer.eos_token or ""
    return [*(before + text for text in TEXTS), *(tokenizer.decode(list(ids)) for ids in prompts)]


def task_metric(settings: Settings) -> Metric:
    """By what answers are scored: labels by accuracy; texts by token F1 if it is measured, else by equality."""
    if settings.prepare.task == "labels":
        return "accuracy"
    return "token_f1" if "token_f1" in settings.evaluate.measures else "exact_match"


def spread_indices(count: int, wanted: int) -> list[int]:
    """At most `wanted` of the indices below `count`, ascending, evenly over all of them."""
    kept = min(count, wanted)
    return [i * count // kept for i in range(kept)]


def _answer_positions(labels: Sequence[int]) -> list[int]:
    """Position p says token p + 1."""
    return [place - 1 for place, label in enumerate(labels) if place and label != MASKED]


def _thin_positions(rows: Sequence[tuple[Any, list[int]]], budget: int) -> list[tuple[Any, list[int]]]:
    """As many positions as the budget allows: short rows keep all of theirs, longer ones an equal share."""
    rows = [rows[i] for i in spread_indices(len(rows), budget)]
    left, share = budget, {}
    for done, i in enumerate(sorted(range(len(rows)), key=lambda i: (len(rows[i][1]), i))):
        share[i] = min(len(rows[i][1]), left // (len(rows) - done))
        left -= share[i]
    return [(ids, [found[k] for k in spread_indices(len(found), share[i])]) for i, (ids, found) in enumerate(rows)]
