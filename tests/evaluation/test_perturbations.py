"""Tests changed prompts: each kind changes what it says, the same way every time, and nothing else."""

import pytest

from ratchet.config.evaluate import Perturbation
from ratchet.data.conversation import Conversation
from ratchet.evaluation.perturbations import perturb

TEXT = "Where is my parcel, number 12? It should have come yesterday, they said."
CONTEXT = Conversation([{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}])


def changed(kind: Perturbation, text: str = TEXT, row: str = "a", fields: dict[str, str] | None = None) -> str | None:
    context = Conversation([CONTEXT.messages[0], {"role": "user", "content": text}])
    found = perturb(kind, row, context, fields or {})
    if found is None:
        return None
    assert found.messages[0] == CONTEXT.messages[0] and len(found.messages) == 2
    return str(found.messages[-1]["content"])


def test_form_changes() -> None:
    assert changed("case") == TEXT.lower()
    assert changed("case", "all small") == "ALL SMALL"
    assert changed("punctuation") == "Where is my parcel number 12 It should have come yesterday they said"
    assert changed("punctuation", "No mark, yes:no 1.5 ") == "No mark yes:no 1.5 "
    assert changed("punctuation", "No mark") == "No mark."
    spaced = changed("whitespace")
    assert spaced is not None and spaced != TEXT and spaced.split() == TEXT.split()
    assert changed("whitespace", "word") is None
    assert changed("paraphrase") is None
    assert changed("paraphrase", fields={"paraphrase": "My parcel is late."}) == "My parcel is late."
    assert changed("paraphrase", fields={"paraphrase": TEXT}) is None


@pytest.mark.parametrize("kind", ["typos", "whitespace"])
def test_random_changes_depend_on_the_row_alone(kind: Perturbation) -> None:
    seen = {changed(kind, row=str(number)) for number in range(40)}
    assert len(seen) > 10 and TEXT not in seen
    assert changed(kind, row="7") == changed(kind, row="7")


def test_typos_keep_first_and_last_letters_and_most_words() -> None:
    words = TEXT.split()
    for number in range(40):
        text = changed("typos", row=str(number))
        assert text is not None
        found = text.split()
        differing = [(a, b) for a, b in zip(words, found, strict=True) if a != b]
        assert 1 <= len(differing) <= 6
        for before, after in differing:
            assert (before[0], before[-1]) == (after[0], after[-1]) and abs(len(before) - len(after)) <= 1
    assert changed("typos", "12 ?") is None
