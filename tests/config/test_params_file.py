"""Edits of params.yaml change the values and keep all other bytes of the text."""

import difflib
from typing import Any

import pytest

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError


def changed_lines(before: str, after: str) -> list[str]:
    """Return the removed and added lines, in the order of a diff."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[0] in "+-"]


FULL = params_file.dump(Settings())


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("train.rank", 8, "  rank: 16", "  rank: 8"),
        ("train.learning_rate", 1e-05, "  learning_rate: 0.0002", "  learning_rate: 1.0e-05"),
        ("train.target_modules", "attention", "  target_modules: all", "  target_modules: attention"),
        ("train.adalora.target_rank", 4, "    target_rank: 8", "    target_rank: 4"),
        (
            "machine.activation_checkpointing",
            True,
            "  activation_checkpointing: auto",
            "  activation_checkpointing: true",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) and "." in value and ":" not in value else "",
)
def test_one_line_changes(key: str, value: Any, old: str, new: str) -> None:
    after = params_file.amend_text(FULL, {key: value})
    assert changed_lines(FULL, after) == [f"- {old}", f"+ {new}"]
    assert params_file.parse(after) == params_file.apply_changes(Settings(), {key: value})


def test_comments_quotes_blank_lines_and_order_stay() -> None:
    text = "# mine\nmachine: {threads: 2}\n\ntrain:\n  alpha: '7'  # seven\n  rank:   4 # four\n\n\n# the end\n"
    after = params_file.amend_text(text, {"train.rank": 8, "machine.threads": 1})
    assert after == text.replace("4 # four", "8 # four").replace("{threads: 2}", "{threads: 1}")


def test_a_list_is_replaced_by_a_word_on_the_line_of_its_key() -> None:
    text = "train:\n  target_modules:\n    - q_proj  # why not\n    - v_proj\n  rank: 4"
    assert params_file.amend_text(text, {"train.target_modules": "all"}) == "train:\n  target_modules: all\n  rank: 4"


def test_a_missing_key_is_added_at_the_end_of_its_section_with_its_comment() -> None:
    text = "train:\n    rank: 4\n\n# rest\nmachine:\n    threads: 2\n"
    after = params_file.amend_text(text, {"train.epochs": 2.0, "machine.micro_batch_size": 1, "prepare.max_tokens": 99})
    assert after.splitlines() == [
        "train:",
        "    rank: 4",
        "    # Passes over the training rows; may be a fraction. Default: 3.",
        "    epochs: 2",
        "",
        "# rest",
        "machine:",
        "    threads: 2",
        "    # Rows (packs, if packed: 1 saves memory) computed at once. Another size changes rounding and dropout "
        "draws.",
        "    # Default: 8.",
        "    micro_batch_size: 1",
        "prepare:",
        "  # Maximum length of a conversation in tokens, template included. Default: 256.",
        "  max_tokens: 99",
    ]


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("train: {rank: &r 4, batch_size: *r}\n", {"train.rank": 8}),
        ("train: {rank: 4}\n", {"train.alpha": 9.0}),
        ("{}\n", {"train.rank": 8}),
    ],
    ids=["anchor", "section-on-one-line", "empty"],
)
def test_a_change_that_would_affect_other_settings_is_refused(text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="cannot be changed without touching other settings"):
        params_file.amend_text(text, changes)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("train:\n  rank: zero\n", {"train.rank": 8}, "train.rank: found 'zero'"),
        ("train: [\n", {"train.rank": 8}, "not valid YAML"),
        ("train:\n  rank: 4\n", {"train.initialization": "pissa"}, "initialization: pissa"),
        ("train:\n  rank: 4\n", {"train.rank": -1}, "train.rank: found -1; expected an integer >= 1"),
    ],
    ids=["invalid-before", "no-yaml", "conflict", "out-of-range"],
)
def test_settings_that_are_invalid_before_or_after_the_change_are_refused(
    text: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        params_file.amend_text(text, changes)
