"""Tests the grouping of texts by common prefix: each text in one group, and fewer tokens than separately."""

import random

import pytest

from ratchet.models import likelihoods
from ratchet.models.likelihoods import CacheSharing, LikelihoodPlan, PrefixGroup, PromptContinuation

HEADER = tuple(range(100, 120))
PASSAGES = [tuple(range(200 + 50 * i, 230 + 50 * i + 2 * i)) for i in range(4)]
ENDINGS = [(1, 2, 9), (3, 9), (4, 5, 6, 9), (9,)]


def text(*parts: tuple[int, ...]) -> PromptContinuation:
    """Build a continuation: the last part is scored, all earlier parts are the prompt."""
    return PromptContinuation.from_tokens([token for part in parts[:-1] for token in part], parts[-1], 500)


OTHER = text((7,), (8, 9))
"""Begins as no other does."""


def members(plan: LikelihoodPlan) -> list[set[int]]:
    return [set(group.text_indices) for batch in plan.batches for group in batch]


def cost(plan: LikelihoodPlan, texts: list[PromptContinuation]) -> int:
    """Return the number of tokens that the model reads."""
    total = plan.prefix_length
    for group in (group for batch in plan.batches for group in batch):
        branches = {texts[place].ids[group.trunk_length :] for place in group.text_indices}
        total += group.trunk_length - plan.prefix_length + sum(map(len, branches))
    return total


def test_continuations_of_one_prompt_stand_together_and_the_header_is_read_once() -> None:
    texts = [text(HEADER, passage, ending) for ending in ENDINGS for passage in PASSAGES]
    plan = likelihoods.plan_batches(texts, 2, CacheSharing.RAGGED)
    assert plan.prefix_length == len(HEADER)
    assert sorted(map(sorted, members(plan))) == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert [[group.trunk_length for group in batch] for batch in plan.batches] == [[56, 54], [52, 50]]
    assert cost(plan, texts) == 20 + sum(map(len, PASSAGES)) + 4 * (2 + 1 + 3)


def test_prompts_that_begin_alike_but_not_all_of_them_still_group_by_prompt() -> None:
    texts = [text(HEADER, passage, ending) for passage in PASSAGES for ending in ENDINGS] + [OTHER]
    plan = likelihoods.plan_batches(texts, 4, CacheSharing.RAGGED)
    assert plan.prefix_length == 0
    assert {0, 1, 2, 3} in members(plan)
    assert {16} in members(plan)


def test_one_ending_after_several_prompts_shares_what_the_prompts_have_in_common() -> None:
    texts = [text(PASSAGES[0], (one,), (50, 51, 52)) for one in (1, 2)] + [OTHER]
    assert likelihoods.plan_batches(texts, 4, CacheSharing.RAGGED).batches == (
        (PrefixGroup(30, (0, 1)),),
        (PrefixGroup(2, (2,)),),
    )


def test_a_prompt_that_another_continues_is_its_trunk() -> None:
    texts = [text(PASSAGES[0], (1,)), text(PASSAGES[0], (2, 3, 4)), text(PASSAGES[0], (5,)), OTHER]
    assert likelihoods.plan_batches(texts, 4, CacheSharing.RAGGED).batches == (
        (PrefixGroup(30, (0, 2, 1)),),
        (PrefixGroup(2, (3,)),),
    )


def test_without_a_cache_only_what_is_wholly_the_same_is_read_once() -> None:
    texts = [text(HEADER, passage, (token,)) for passage in PASSAGES for token in (1, 2)]
    texts += [text(HEADER, PASSAGES[0], (3, 4))]
    plan = likelihoods.plan_batches(texts, 3, CacheSharing.NONE)
    assert plan.prefix_length == 0
    assert sorted(map(sorted, members(plan))) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert [len(batch) for batch in plan.batches] == [3, 2]


@pytest.mark.parametrize(
    ("way", "window"), [(CacheSharing.EVEN, None), (CacheSharing.RAGGED, 59)], ids=["even", "window"]
)
def test_with_even_sharing_only_trunks_of_one_length_share_a_batch(way: CacheSharing, window: int | None) -> None:
    texts = [text(HEADER, passage, ending) for passage in (*PASSAGES, tuple(range(900, 930))) for ending in ENDINGS]
    plan = likelihoods.plan_batches(texts, 8, way, window)
    assert [[group.trunk_length for group in batch] for batch in plan.batches] == [[56], [54], [52], [50, 50]]
    wide = likelihoods.plan_batches(texts, 8, CacheSharing.RAGGED, 60)
    assert [len(batch) for batch in wide.batches] == [5]


def test_no_scored_position_is_in_the_common_prefix() -> None:
    """In windows of plain text, for example, every token is scored."""
    texts = [text((5,), (*HEADER, *passage)) for passage in PASSAGES]
    assert likelihoods.plan_batches(texts, 4, CacheSharing.RAGGED).prefix_length == 0


@pytest.mark.parametrize("seed", range(60))
def test_any_texts_are_in_one_group_each_and_cost_no_more_than_apart(seed: int) -> None:
    draw = random.Random(seed)
    texts = []
    for _ in range(draw.randint(1, 30)):
        ids = [int(draw.random() < 0.15) for _ in range(draw.randint(2, 60))]
        split = draw.randint(1, len(ids) - 1)
        texts.append(text(tuple(ids[:split]), tuple(ids[split:])))
    plan = likelihoods.plan_batches(texts, draw.randint(1, 6), CacheSharing.RAGGED)
    assert sorted(place for group in members(plan) for place in group) == list(range(len(texts)))
    for group in (group for batch in plan.batches for group in batch):
        assert len({texts[place].ids[: group.trunk_length] for place in group.text_indices}) == 1
    assert cost(plan, texts) <= sum(len(ids) for ids in {one.ids for one in texts})


def test_what_is_too_long_loses_its_beginning() -> None:
    assert PromptContinuation.from_tokens([1, 2, 3, 4], [5, 6], 3) == PromptContinuation((3, 4, 5), (5, 6))
    assert PromptContinuation.from_tokens([1, 2, 3], [5, 6], 9) == PromptContinuation((1, 2, 3, 5), (5, 6))
    assert PromptContinuation.from_tokens([1], [5, 6], 2).first == 0


@pytest.mark.parametrize(
    ("prompt", "continuation", "message"),
    [
        ([], [1], "has no tokens"),
        ([1], [], "has no tokens"),
        ([1], [2, 3, 4], "3 tokens, but the model reads at most 2"),
    ],
)
def test_what_cannot_be_read_is_refused(prompt: list[int], continuation: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptContinuation.from_tokens(prompt, continuation, 2)
