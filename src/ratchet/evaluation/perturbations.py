"""Seeded changes of prompts that keep their meaning: typos, case, white space, punctuation, and paraphrases.

A change is a function of the row's id and the kind alone, so every model gets the same prompts, and so does a repeated
evaluation. Sources: typos by moved, missing and doubled letters as in Belinkov and Bisk, "Synthetic and Natural Noise
Both Break Neural Machine Translation", ICLR 2018; prompts that differ only in form as in Sclar et al., "Quantifying
Language Models' Sensitivity to Spurious Features in Prompt Design", ICLR 2024.
"""

import random
import re
from collections.abc import Callable, Mapping

from ratchet.config.evaluate import Perturbation
from ratchet.data.conversation import Conversation, extract_text

PARAPHRASE = "paraphrase"
"""Field of a row with another wording of its last message."""
TYPO_RATE = 0.1
"""Share of the words with a typo; at least one word of a prompt has one."""
SPACE_RATE = 0.2
"""Share of the spaces that are doubled; at least one is."""
WORD = re.compile(r"[^\W\d_]{3,}")
SPACE = re.compile(r"(?<=\S) (?=\S)")
MARK = re.compile(r"(?<=\w)[.,;:!?]+(?=\s|$)")


def perturb(kind: Perturbation, row_id: str, context: Conversation, fields: Mapping[str, str]) -> Conversation | None:
    """Return the prompt of a row with its last message changed; None if this change leaves it as it is.

    Args:
        kind: the change.
        row_id: id of the row, which determines the random numbers.
        context: messages up to the answer.
        fields: fields of the row, for paraphrases.
    """
    message = context.messages[-1]
    text = extract_text(message)
    changed = (
        fields.get(PARAPHRASE, "") if kind == "paraphrase" else _CHANGES[kind](text, random.Random(f"{kind} {row_id}"))
    )
    if not changed.strip() or changed == text:
        return None
    return Conversation([*context.messages[:-1], {**message, "content": changed}], context.tools)


def _add_typos(text: str, rng: random.Random) -> str:
    def misspell(word: re.Match[str]) -> str:
        letters = word[0]
        at = rng.randrange(1, len(letters) - 1)  # The first and last letter stay, as in most typos of people.
        kind = rng.choice(("move", "drop", "double"))
        if kind == "move" and at + 2 < len(letters) and letters[at] != letters[at + 1]:
            return letters[:at] + letters[at + 1] + letters[at] + letters[at + 2 :]
        return letters[:at] + (letters[at] * 2 if kind == "double" else "") + letters[at + 1 :]

    return _change_some(WORD, misspell, TYPO_RATE, text, rng)


def _double_spaces(text: str, rng: random.Random) -> str:
    return _change_some(SPACE, lambda _: "  ", SPACE_RATE, text, rng)


def _change_some(
    pattern: re.Pattern[str], change: Callable[[re.Match[str]], str], share: float, text: str, rng: random.Random
) -> str:
    """Change a share of the matches of a pattern, chosen at random, and at least one."""
    matches = list(pattern.finditer(text))
    if not matches:
        return text
    chosen = {rng.randrange(len(matches)), *(i for i in range(len(matches)) if rng.random() < share)}
    for i in sorted(chosen, reverse=True):
        text = text[: matches[i].start()] + change(matches[i]) + text[matches[i].end() :]
    return text


def _change_case(text: str, _: random.Random) -> str:
    """Write a text in small letters, or in capitals if it has no others."""
    return text.lower() if text.lower() != text else text.upper()


def _change_punctuation(text: str, _: random.Random) -> str:
    """Remove the marks after words, or add a full stop if there are none."""
    return MARK.sub("", text) if MARK.search(text) else f"{text.rstrip()}."


_CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "typos": _add_typos,
    "case": _change_case,
    "whitespace": _double_spaces,
    "punctuation": _change_punctuation,
}
