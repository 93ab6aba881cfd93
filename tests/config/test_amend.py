"""Values change in params.yaml; everything else of its text stays, to the byte."""

import difflib
from typing import Any

import pytest

from ratchet.config import params_file
from ratchet.config.schema import Settings
from ratchet.errors import SettingsError


def differing(before: str, after: str) -> list[str]:
    """Lines taken away and added, in the order of a diff."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[0] in "+-"]


FULL = params_file.dump(Settings())


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("train.rank", 8, "  rank: 16", "  rank: 8"),
        ("train.learning_rate", 1e-05, "  learning_rate: 0.0002", "  learning_rate: 1.0e-05"),
        ("train.targets", "attention", "  targets: all", "  targets: attention"),
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
    assert differing(FULL, after) == [f"- {old}", f"+ {new}"]
    assert params_file.parse(after) == params_file.apply_changes(Settings(), {key: value})


def test_comments_quotes_blank_lines_and_order_stay() -> None:
    text = "# mine\nmachine: {threads: 2}\n\ntrain:\n  alpha: '7'  # seven\n  rank:   4 # four\n\n\n# the end\n"
    after = params_file.amend_text(text, {"train.rank": 8, "machine.threads": 1})
    assert after == text.replace("4 # four", "8 # four").replace("{threads: 2}", "{threads: 1}")


def test_a_list_becomes_a_word_on_its_key_s_own_line() -> None:
    text = "train:\n  targets:\n    - q_proj  # why not\n    - v_proj\n  rank: 4"
    assert params_file.amend_text(text, {"train.targets": "all"}) == "train:\n  targets: all\n  rank: 4"


def test_a_key_that_is_not_written_comes_at_the_end_of_its_section_with_its_sentence() -> None:
    text = "train:\n    rank: 4\n\n# rest\nmachine:\n    threads: 2\n"
    after = params_file.amend_text(text, {"train.epochs": 2.0, "machine.micro_batch_rows": 1, "prepare.max_tokens": 99})
    assert after.splitlines() == [
        "train:",
        "    rank: 4",
        "    # Passes over the training rows; may be a fraction.",
        "    epochs: 2",
        "",
        "# rest",
        "machine:",
        "    threads: 2",
        "    # Rows (packs, when packed: 1 is frugal) computed at once; another number rounds sums, draws dropout, "
        "otherwise.",
        "    micro_batch_rows: 1",
        "prepare:",
        "  # Longest conversation, template included, in tokens.",
        "  max_tokens: 99",
    ]


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("train: {rank: &r 4, batch_rows: *r}\n", {"train.rank": 8}),
        ("train: {rank: 4}\n", {"train.alpha": 9.0}),
        ("{}\n", {"train.rank": 8}),
    ],
    ids=["anchor", "section-on-one-line", "empty"],
)
def test_what_cannot_be_changed_alone_is_left_to_its_owner(text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="cannot be changed without touching other keys"):
        params_file.amend_text(text, changes)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("train:\n  rank: zero\n", {"train.rank": 8}, "train.rank: found 'zero'"),
        ("train: [\n", {"train.rank": 8}, "not valid YAML"),
        ("train:\n  rank: 4\n", {"train.initialization": "pissa"}, "initialization: pissa"),
        ("train:\n  rank: 4\n", {"train.rank": -1}, "greater than or equal to 1"),
    ],
    ids=["invalid-before", "no-yaml", "conflict", "out-of-range"],
)
def test_settings_that_are_not_valid_before_or_after_are_refused(
    text: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        params_file.amend_text(text, changes)
