"""Tests that failures during decoding (memory, NaN, stop) do not change other answers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding_cases import DRAWN, GREEDY, EventRecorder, answered, expected, model_of, ragged
from ratchet.models.decoding.decoder import BatchDecoder, DecodingRequest, DecodingResult, PaddedTokenBudget


class Full:
    """Raises MemoryError in some passes."""

    def __init__(self, fails: Any) -> None:
        self.fails, self.passes, self.failures = fails, 0, 0

    def __call__(self, tokens: int) -> None:
        self.passes += 1
        if self.fails(self.passes, tokens):
            self.failures += 1
            raise MemoryError(f"no room for {tokens} tokens")


@pytest.mark.long
def test_memory_that_runs_out_in_any_pass_changes_nothing() -> None:
    model, asked = model_of("llama"), ragged(24)[:4]
    counted = Full(lambda number, tokens: False)
    whole = answered(model, asked, DRAWN, before=counted)
    assert whole == expected("llama", DRAWN, 24)[:4]
    for failing in range(1, counted.passes + 1, 4):
        full = Full(lambda number, tokens, failing=failing: number == failing)
        found = answered(model, asked, DRAWN, before=full)
        # A pass over a single row is not repeated; that row is dropped.
        lost = {one.index for one in found if one.finish == "memory"}
        assert len(lost) <= full.failures == 1
        assert [one for one in found if one.index not in lost] == [one for one in whole if one.index not in lost]


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_batches_shrink_until_they_fit(family: str) -> None:
    recorder, model = EventRecorder(), model_of(family)
    full = Full(lambda _, tokens: tokens > 61)
    assert answered(model, ragged(), DRAWN, 10_000, recorder, full) == expected(family, DRAWN)
    assert full.failures
    first = recorder.of_kind("budget")[0]
    assert first["action"] == "shrink"
    assert first["tokens"] == int(0.8 * first["failed_tokens"])


@pytest.mark.long
def test_a_prompt_that_does_not_fit_alone_is_reported_and_the_others_are_answered() -> None:
    found = answered(model_of("llama"), ragged(), GREEDY, before=Full(lambda _, tokens: tokens > 38))
    assert any(one.finish == "memory" for one in found)
    for one, whole, asked in zip(found, expected("llama", GREEDY), ragged(), strict=True):
        fits = len(asked.ids) + len(whole.ids) - 1 <= 38
        assert one == (whole if fits else DecodingResult(asked.index, (), "memory", 0.0))


def test_a_budget_grows_again_and_waits_longer_after_each_failure() -> None:
    budget = PaddedTokenBudget(1000, wait_passes=2).shrunk(800, repeated=False)
    assert budget.tokens == 640
    assert budget.shrunk(600, repeated=True).tokens == 300
    for _ in range(2):
        assert budget.after_success(is_limiting=False).tokens == 640
        budget = budget.after_success(is_limiting=True)
    assert budget.tokens == 800
    assert budget.shrunk(800, repeated=False).wait_passes == 4
    assert PaddedTokenBudget(1).shrunk(1, repeated=True).tokens == 1


def test_other_failures_are_not_taken_for_memory() -> None:
    passes = Full(lambda *_: False)

    def broken(tokens: int) -> None:
        passes(tokens)
        if passes.passes > 15:
            raise RuntimeError("illegal instruction")

    with pytest.raises(RuntimeError, match="illegal instruction"):
        answered(model_of("llama"), ragged(), GREEDY, before=broken)


def test_a_nan_row_ends_and_does_not_affect_others() -> None:
    """One token's embedding is NaN, which affects the texts with this token, and their places in the batch."""
    model, asked = model_of("llama"), ragged()
    poison = 95
    clean = [one for one in asked if poison not in one.ids]
    whole = answered(model, clean, DRAWN)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    spoilt = [
        DecodingRequest(1000 + i, (*one.ids[:5], poison, *one.ids[5:]), one.stream) for i, one in enumerate(clean)
    ]
    mixed = [one for pair in zip(spoilt, clean, strict=True) for one in pair]
    found = answered(model, mixed, DRAWN, recorder=(recorder := EventRecorder()))
    assert found[::2] == [DecodingResult(one.index, (), "invalid", 0.0) for one in spoilt]
    for one, before in zip(found[1::2], whole, strict=True):
        cut = before.ids.index(poison) + 1 if poison in before.ids[:-1] else None
        assert one == before if cut is None else (one.ids, one.finish) == (before.ids[:cut], "invalid")
    assert recorder.beats


def test_a_model_of_no_numbers_answers_nothing() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    assert answered(model, ragged(), GREEDY) == [DecodingResult(one.index, (), "invalid", 0.0) for one in ragged()]


def test_tokens_that_a_model_forbids_are_never_taken() -> None:
    """Minus infinity is an ordinary logit."""
    model = model_of("llama")
    forward = model.forward

    def forbidding(*given: Any, **named: Any) -> Any:
        found = forward(*given, **named)
        found.logits[..., 7:60] = -torch.inf
        return found

    model.forward = forbidding
    found = answered(model, ragged(), DRAWN)
    assert not {token for one in found for token in one.ids} & set(range(7, 60))
    assert found == answered(model, ragged(), replace(DRAWN, max_rows=1))


def test_the_context_ends_answers_and_longer_prompts_get_no_answer() -> None:
    model = model_of("llama", max_position_embeddings=30)
    endless = replace(GREEDY, end_token_ids=())
    found = answered(model, ragged(), endless)
    for one, asked in zip(found, ragged(), strict=True):
        room = max(0, 30 - len(asked.ids))
        assert len(one.ids) == min(20, room)
        assert one.finish == ("length" if room >= 20 else "context")


def test_nothing_is_computed_after_stop() -> None:
    model, recorder, passes = model_of("llama"), EventRecorder(), Full(lambda *_: False)
    decoder = BatchDecoder(
        model, replace(GREEDY, end_token_ids=(), window=4), None, recorder.record, recorder.beat, passes
    )
    pulled = list[DecodingRequest]()

    def prompts() -> Iterator[DecodingRequest]:
        for one in ragged():
            pulled.append(one)
            yield one

    assert list(decoder.generate(prompts(), lambda: recorder.beats >= 9)) == []
    assert len(pulled) == 8  # the second window is read while the first one is running
    assert recorder.beats == 9


def test_no_prompts_and_empty_ones() -> None:
    model = model_of("llama")
    assert answered(model, [], GREEDY) == []
    with pytest.raises(ValueError, match="prompt 3 has no tokens"):
        answered(model, [DecodingRequest(3, (), "s")], GREEDY)
