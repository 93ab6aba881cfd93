"""Tests continuation scores with shared prefixes against lm-evaluation-harness."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

import families
from ratchet.models import likelihoods, tiny_model
from ratchet.models.likelihoods import ContinuationScore, LikelihoodLimits

MOST_TOKENS = 64
BATCH_ROWS = 4
Pairs = list[tuple[list[int], list[int]]]


def words(draw: random.Random, least: int, most: int) -> list[int]:
    return [draw.randrange(3, families.VOCABULARY) for _ in range(draw.randint(least, most))]


def ragged_pairs() -> Pairs:
    """Draw prompts with a common header and several endings: some of one token, some repeated, some too long."""
    draw = random.Random(2)
    header = words(draw, 20, 20)
    pairs: Pairs = []
    for _ in range(7):
        prompt = header + words(draw, 4, 30)
        pairs += [(prompt, words(draw, 1, 6)) for _ in range(3)]
    pairs += [(pairs[0][0], [token]) for token in (5, 6, 7)]
    pairs += [pairs[1], (header + words(draw, 70, 70), words(draw, 3, 3)), (header, words(draw, 25, 25))]
    draw.shuffle(pairs)
    return pairs


def alone_pairs() -> Pairs:
    """Add requests that share nothing with the others; the harness replaces an empty prompt by the token 2."""
    draw = random.Random(3)
    return [
        *ragged_pairs(),
        ([2], words(draw, 5, 5)),
        ([2], words(draw, 1, 1)),
        (words(draw, 9, 9), words(draw, 64, 64)),
    ]


class Kept:
    """Keeps computed results."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.made = 0

    def take(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.results:
            self.made += 1
            self.results[key] = make()
        return self.results[key]

    @property
    def way(self) -> Any:
        """Return the first stored result: which parts of its cache the model can share."""
        return next(iter(self.results.values()))


def ours(model: Any, pairs: Pairs, batch_rows: int = BATCH_ROWS, kept: Kept | None = None) -> list[ContinuationScore]:
    found = likelihoods.score_pairs(model, pairs, LikelihoodLimits(batch_rows, MOST_TOKENS, 0), (kept or Kept()).take)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_model.train_tokenizer(["one two three"] * 3, 270)


def harness(model: Any, tokenizer: Any, pairs: Pairs) -> list[tuple[float, bool]]:
    asked = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH_ROWS, backend="causal", max_length=MOST_TOKENS)
    found: list[tuple[float, bool]] = asked._loglikelihood_tokens(
        [(("", ""), prompt, rest) for prompt, rest in pairs], disable_tqdm=True
    )
    return found


def assert_same(found: list[ContinuationScore], expected: list[tuple[float, bool]]) -> None:
    # The scores are sums of up to 64 float32 numbers of about 5 nats each.
    assert [one.nats for one in found] == pytest.approx([nats for nats, _ in expected], rel=2e-6, abs=1e-5)
    assert [one.is_greedy for one in found] == [greedy for _, greedy in expected]


WAYS = {"mpt": "even", "mamba": "none"}
"""MPT counts the distance of tokens in a row, filling included; Mamba has no keys and values."""


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("pairs", [ragged_pairs(), alone_pairs()], ids=["behind a header", "without"])
def test_likelihoods_are_those_of_the_harness(family: str, pairs: Pairs, tokenizer: Any) -> None:
    model, kept = families.make(family, tie_word_embeddings=False), Kept()
    assert_same(ours(model, pairs, kept=kept), harness(model, tokenizer, pairs))
    assert kept.way == WAYS.get(family, "ragged")


def test_the_likeliest_continuations_are_greedy(tokenizer: Any) -> None:
    model = families.make("llama")
    pairs = []
    for prompt, rest in ragged_pairs():
        ids = model.generate(torch.tensor([prompt[-40:]]), max_new_tokens=3, do_sample=False, eos_token_id=None)
        pairs += [(prompt[-40:], ids[0, -3:].tolist()), (prompt[-40:], rest)]
    found = ours(model, pairs)
    assert [one.is_greedy for one in found[::2]] == [True] * (len(pairs) // 2)
    assert_same(found, harness(model, tokenizer, pairs))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("window", [8, 40])
def test_windows_shorter_than_the_texts_make_no_difference(family: str, window: int, tokenizer: Any) -> None:
    model, pairs = families.make(family, sliding_window=window), alone_pairs()
    assert_same(ours(model, pairs), harness(model, tokenizer, pairs))


@pytest.mark.parametrize("batch_rows", [1, 3, 50])
def test_scores_do_not_depend_on_the_batch_size(batch_rows: int) -> None:
    model, pairs = families.make("llama"), alone_pairs()
    assert_same(ours(model, pairs, batch_rows), [(one.nats, one.is_greedy) for one in ours(model, pairs)])


def test_results_do_not_depend_on_the_cache() -> None:
    """Results are equal to the last bit, so an evaluation that was killed ends like one without interruption."""
    model, pairs, whole = families.make("llama"), alone_pairs(), Kept()
    expected = ours(model, pairs, 1, whole)
    assert whole.made > 3
    for lost in list(whole.results):
        kept = Kept()
        kept.results = {key: value for key, value in whole.results.items() if key != lost}
        assert ours(model, pairs, 1, kept) == expected
        assert kept.made == 1


def test_cached_results_of_other_pairs_are_not_used() -> None:
    model, pairs, kept = families.make("llama"), ragged_pairs(), Kept()
    ours(model, pairs, kept=kept)
    before = kept.made
    changed = [*pairs[:-1], (pairs[-1][0], [*pairs[-1][1][:-1], 94])]
    assert_same(ours(model, changed, kept=kept), [(one.nats, one.is_greedy) for one in ours(model, changed)])
    assert kept.made > before
    before = kept.made
    ours(model, pairs, BATCH_ROWS + 1, kept)
    assert kept.made > before + 1


def test_a_prompt_is_read_once_and_only_its_endings_behind_it() -> None:
    model, draw = families.make("llama"), random.Random(4)
    header, tokens = words(draw, 16, 16), []
    prompts = [header + words(draw, 20, 20) for _ in range(6)]
    pairs = [(prompt, [k, k + 1, 9]) for prompt in prompts for k in range(10, 14)]
    kept = Kept()
    ours(model, pairs, kept=kept)
    chunks = {key: value for key, value in kept.results.items() if value is not kept.way}
    # The result of the trial is kept, so the model need not repeat it.
    kept.results = {key: value for key, value in kept.results.items() if key not in chunks}
    model.model.layers[0].register_forward_hook(lambda _, inputs, output: tokens.append(inputs[0].shape[:2].numel()))
    ours(model, pairs, kept=kept)
    assert sum(tokens) == 16 + 6 * 20 + 6 * 4 * 2


def test_a_model_whose_cache_is_wrong_reads_whole_texts(tokenizer: Any) -> None:
    """The evaluation finds this by a trial; in this model, cached keys are wrong."""
    model, pairs, kept = families.make("llama", initializer_range=0.3), ragged_pairs(), Kept()
    expected = harness(model, tokenizer, pairs)

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        if output.past_key_values is not None:
            for layer in output.past_key_values.layers:
                layer.keys = layer.keys * 1.3

    model.model.register_forward_hook(spoil)
    assert_same(ours(model, pairs, kept=kept), expected)
    assert kept.way == "none"


def test_a_model_that_runs_its_body_twice_is_left_to_the_harness() -> None:
    model = families.make("llama")
    body, forward = model.model, model.forward

    def twice(*given: Any, **named: Any) -> Any:
        body(input_ids=torch.tensor([[1]]), use_cache=False)
        return forward(*given, **named)

    model.forward = twice
    assert (
        likelihoods.score_pairs(model, ragged_pairs(), LikelihoodLimits(BATCH_ROWS, MOST_TOKENS, 0), Kept().take)
        is None
    )


def test_exhausted_memory_is_no_missing_ability() -> None:
    """The caller repeats the evaluation with smaller batches."""
    model = families.make("llama")

    def exhausted(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.forward = exhausted
    with pytest.raises(torch.OutOfMemoryError):
        ours(model, ragged_pairs())
