"""Tests splits: they are stable, have exact fractions, and are equal for equal prompts."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ratchet.config.prepare import Prepare, SplitSettings
from ratchet.data.conversation import Conversation, SourceRow
from ratchet.data.splits import LENGTH, SPLITS, SplitAssigner, assign_split, normalize_text
from ratchet.errors import DataError

PROMPTS = [f"request number {i} about {random.Random(i).choice('abcdefgh')}" for i in range(10_000)]


def shares(split: SplitSettings) -> dict[str, float]:
    found = [assign_split(prompt, split) for prompt in PROMPTS]
    return {name: found.count(name) / len(found) for name in SPLITS}


@pytest.mark.parametrize(("validation", "test"), [(0.1, 0.15), (0.05, 0.05), (0.3, 0.3), (0.01, 0.9), (0.45, 0.5)])
def test_the_fractions_hold(validation: float, test: float) -> None:
    found = shares(SplitSettings(validation=validation, test=test))
    for name, wanted in {"validation": validation, "test": test, "train": 1 - validation - test}.items():
        five_sigma = 5 * math.sqrt(wanted * (1 - wanted) / len(PROMPTS))
        assert abs(found[name] - wanted) < five_sigma, name


@pytest.mark.parametrize(
    "other",
    [
        "where is my card",
        "WHERE IS MY CARD",
        "  Where is\tmy\n\ncard ",
        "Where is my\u00a0card",
        "where\u3000is my card",
    ],
)
def test_the_same_request_in_other_case_or_spacing_is_in_the_same_split(other: str) -> None:
    assert normalize_text(other) == normalize_text("Where is my card")
    for seed in range(50):
        assert assign_split(other, SplitSettings(seed=seed)) == assign_split(
            "Where is my card", SplitSettings(seed=seed)
        )


def test_only_case_and_the_amount_of_white_space_are_ignored() -> None:
    assert normalize_text("STRASSE") == normalize_text("straße")
    assert len({normalize_text(prompt) for prompt in PROMPTS}) == len(PROMPTS)
    assert normalize_text("re sent") != normalize_text("resent")


def test_another_seed_gives_another_split() -> None:
    one, two = SplitSettings(seed=0), SplitSettings(seed=1)
    moved = sum(assign_split(p, one) != assign_split(p, two) for p in PROMPTS) / len(PROMPTS)
    expected = 1 - (0.15**2 + 0.1**2 + 0.75**2)  # the share of rows for which two independent draws differ
    assert moved == pytest.approx(expected, abs=0.03)


def test_test_rows_stay_when_the_fractions_change() -> None:
    def tests(split: SplitSettings) -> set[str]:
        return {p for p in PROMPTS if assign_split(p, split) == "test"}

    assert tests(SplitSettings(validation=0.1)) == tests(SplitSettings(validation=0.4))
    assert tests(SplitSettings(test=0.1)) < tests(SplitSettings(test=0.2))


def test_splits_of_known_prompts_are_stable_across_versions() -> None:
    """Golden values: another split would make test rows of old models into training rows of new ones."""
    found = {prompt: assign_split(prompt, SplitSettings()) for prompt in "aflnqt"}
    assert found == {"a": "train", "f": "validation", "l": "test", "n": "validation", "q": "test", "t": "test"}


def row(prompt: str, source: int = 0, answer: str = "yes", **fields: Any) -> SourceRow:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return SourceRow("rows.jsonl:1", Conversation(messages), source, fields)


def divided(
    rows: Sequence[SourceRow], split: SplitSettings, sources: Sequence[Any] = ("data/raw/rows.jsonl",)
) -> list[str]:
    assigner = SplitAssigner(Prepare(sources=tuple(sources), split=split))
    for one in rows:
        assert assigner.find_problem(one) is None
        assigner.add(one)
    return [SPLITS[code] for code in assigner.assign()]


SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
TEXTS = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=60)


@SETTINGS
@given(TEXTS, TEXTS, st.randoms(use_true_random=False))
def test_added_rows_do_not_move_other_rows(old: list[str], new: list[str], shuffle: random.Random) -> None:
    before = dict(zip(old, divided([row(text) for text in old], SplitSettings()), strict=True))
    everything = [*old, *new]
    shuffle.shuffle(everything)
    after = dict(zip(everything, divided([row(text) for text in everything], SplitSettings()), strict=True))
    assert {text: after[text] for text in before} == before
    assert before == {text: assign_split(text, SplitSettings()) for text in old}


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 8), st.text(min_size=1, max_size=9)), min_size=1, max_size=60))
def test_groups_stay_together_and_added_rows_move_none(pairs: list[tuple[int, str]]) -> None:
    rows = [row(text, user=user) for user, text in pairs]
    found = divided(rows, SplitSettings(group="user"))
    homes: dict[int, set[str]] = {}
    for (user, _), split in zip(pairs, found, strict=True):
        homes.setdefault(user, set()).add(split)
    assert all(len(splits) == 1 for splits in homes.values())
    assert divided(rows[: len(rows) // 2 + 1], SplitSettings(group="user")) == found[: len(rows) // 2 + 1]


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 10_000)), min_size=1, max_size=200))
def test_fractions_hold_exactly_in_every_stratum(pairs: list[tuple[str, int]]) -> None:
    wanted = SplitSettings(validation=0.2, test=0.2, stratify="kind")
    unique = sorted({(number, kind) for kind, number in pairs})
    rows = [row(f"{kind} {number}", kind=kind) for number, kind in unique]
    found = divided(rows, wanted)
    for kind in "abcd":
        splits = Counter(split for split, one in zip(found, rows, strict=True) if one.fields["kind"] == kind)
        size = splits.total()
        if size < 3:
            assert set(splits) <= {"train"}
        else:
            assert splits["test"] == splits["validation"] == max(1, round(size * 0.2))
            assert splits["train"] >= 1


def test_fractions_hold_exactly_in_every_combination_of_several_fields() -> None:
    kinds = [(language, size) for language in ("en", "de") for size in ("small", "large", "a, b")]
    rows = [row(f"{n}", language=language, size=size) for n in range(40) for language, size in kinds[n % 2 :: 2]]
    wanted = SplitSettings.model_validate({"validation": 0.1, "test": 0.2, "stratify": ["language", "size"]})
    assigner = SplitAssigner(Prepare(split=wanted))
    for one in rows:
        assert assigner.find_problem(one) is None
        assigner.add(one)
    assert sorted(assigner.strata) == sorted(f"language={a!r}, size={b!r}" for a, b in kinds)
    found = [SPLITS[code] for code in assigner.assign()]
    for kind in kinds:
        splits = Counter(s for s, one in zip(found, rows, strict=True) if (*one.fields.values(),)[-2:] == kind)
        assert splits == {"train": 14, "validation": 2, "test": 4}
    assert "no field 'size'" in str(assigner.find_problem(row("x", language="en")))
    with_length = SplitSettings.model_validate({"stratify": ["language", "length"]})
    assert len({*divided(rows, with_length)}) == 3
    assert SplitSettings.model_validate({"stratify": None}) == SplitSettings()  # as earlier versions wrote it


def test_small_strata_are_training_rows_and_one_training_row_remains() -> None:
    rows = [row(f"{i}", kind="rare" if i == 0 else "often") for i in range(40)]
    assert divided(rows, SplitSettings(stratify="kind"))[0] == "train"
    three = divided(
        [row(f"{i}", kind="one") for i in range(3)], SplitSettings(validation=0.4, test=0.5, stratify="kind")
    )
    assert sorted(three) == ["test", "train", "validation"]
    rows = [row(f"{i}", kind="one") for i in range(4)]
    for validation, test in ((0.85, 0.1), (0.1, 0.85), (0.6, 0.2)):
        found = divided(rows, SplitSettings(validation=validation, test=test, stratify="kind"))
        assert set(found) == {"test", "train", "validation"}


def test_equal_prompts_in_two_strata_stay_together() -> None:
    rows = [row(f"{i}", kind=kind) for i in range(50) for kind in ("x", "y")]
    found = divided(rows, SplitSettings(stratify="kind"))
    assert found[0::2] == found[1::2]


def test_length_strata_are_powers_of_two_of_characters() -> None:
    rows = [row("long " * 40 + str(i)) if i % 2 else row(f"s{i}", answer="") for i in range(80)]
    found = divided(rows, SplitSettings(stratify=LENGTH, test=0.25, validation=0.25))
    for parity in (0, 1):
        assert Counter(found[parity::2]) == {"train": 20, "validation": 10, "test": 10}


def test_by_time_the_newest_rows_are_test_and_a_prompt_counts_as_its_latest() -> None:
    rows = [row(f"{day}", at=f"2024-01-{day:02}") for day in range(1, 31)] + [row("1", at="2024-02-01")]
    found = divided(rows, SplitSettings(time="at", validation=0.1, test=0.1))
    assert found[0] == found[-1] == "test"  # the prompt occurs again as the newest row
    assert [day for day, split in enumerate(found[:30], 1) if split == "test"] == [1, 29, 30]
    assert [day for day, split in enumerate(found[:30], 1) if split == "validation"] == [26, 27, 28]
    numbers = divided([row(str(n), at=n) for n in range(10)], SplitSettings(time="at", validation=0.1, test=0.1))
    assert numbers == ["train"] * 8 + ["validation", "test"]


def test_a_source_with_a_split_replaces_the_fraction_of_that_split() -> None:
    sources = ({"files": "data/raw/a"}, {"files": "data/raw/b", "split": "test"})
    rows = [row(f"{i}", source=i % 2) for i in range(400)]
    found = divided(rows, SplitSettings(), sources)
    assert set(found[1::2]) == {"test"}
    assert set(found[0::2]) == {"train", "validation"}


@pytest.mark.parametrize(
    ("split", "fields", "words"),
    [
        (SplitSettings(group="user"), {}, "no field 'user' (prepare.split.group)"),
        (SplitSettings(group="user"), {"user": " "}, "field 'user' (prepare.split.group) is empty"),
        (SplitSettings(group="user"), {"user": math.nan}, "field 'user' (prepare.split.group) is empty"),
        (SplitSettings(stratify="kind"), {"kind": None}, "no field 'kind'"),
        (SplitSettings(stratify="kind"), {"kind": ["a"]}, "holds a list"),
        (SplitSettings(time="at"), {"at": "yesterday"}, "neither a date nor a number: 'yesterday'"),
        (SplitSettings(time="at"), {"at": "nan"}, "neither a date"),
        (SplitSettings(time="at"), {"at": 10**400}, "neither a date"),
        (SplitSettings(time="at"), {"at": True}, "neither a date"),
    ],
)
def test_a_row_without_a_usable_field_is_refused(split: SplitSettings, fields: dict[str, Any], words: str) -> None:
    assert words in SplitAssigner(Prepare(split=split)).find_problem(row("p", **fields))


def test_dates_and_numbers_in_one_field_are_refused() -> None:
    with pytest.raises(DataError, match="dates in some rows and numbers in others"):
        divided([row("a", at="2024-01-31"), row("b", at="20240201")], SplitSettings(time="at"))


def test_split_settings_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="group and time: exclude each other"):
        SplitSettings(group="a", time="b")


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [row(f"{i}", kind=str(i % 7), at=i % 13) for i in range(300)]
    shuffled = np.random.default_rng(0).permutation(len(rows))
    for split in (
        SplitSettings(),
        SplitSettings(stratify="kind"),
        SplitSettings(time="at"),
        SplitSettings(stratify=LENGTH),
    ):
        before, after = divided(rows, split), divided([rows[i] for i in shuffled], split)
        assert [before[i] for i in shuffled] == after
