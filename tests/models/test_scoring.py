"""Tests likelihoods against a float64 reference, logits in pieces, and greedy answers, on tiny real models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

import families
from ratchet.config.train import Train
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import BaseModelError
from ratchet.models import adapters, chunked_loss, loading, scoring
from ratchet.models.device import Model
from ratchet.models.scoring import RowLikelihood

PAD = 0
SEED = torch.Generator().manual_seed(3)
LENGTHS = [2, 31, 7, 16, 1, 24]
ROWS = [torch.randint(3, families.VOCABULARY, (n,), generator=SEED).tolist() for n in LENGTHS]
LABELS = [[IGNORE_INDEX if i < len(ids) // 2 else token for i, token in enumerate(ids)] for ids in ROWS]


def reference(model: Model) -> list[tuple[float, int, float, int]]:
    """Compute reference scores row by row, without padding, with the model, log_softmax and sums in float64."""
    model = model.double()
    model.config._experts_implementation = "eager"  # other implementations lack float64
    found = []
    for ids, labels in zip(ROWS, LABELS, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        nll = -torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:]).view(-1, 1)).squeeze(1)
        learned = torch.tensor([label != IGNORE_INDEX for label in labels[1:]], dtype=torch.bool)
        found.append((float(nll[learned].sum()), int(learned.sum()), float(nll[~learned].sum()), int((~learned).sum())))
    return found


def close(found: list[RowLikelihood], expected: list[tuple[float, int, float, int]], tolerance: float = 1e-6) -> None:
    for one, (nll, tokens, prompt_nll, prompt_tokens) in zip(found, expected, strict=True):
        assert (one.tokens, one.prompt_tokens) == (tokens, prompt_tokens)
        assert (one.nll, one.prompt_nll) == pytest.approx((nll, prompt_nll), rel=tolerance)


@contextmanager
def small_pieces(monkeypatch: pytest.MonkeyPatch, positions: int) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(chunked_loss, "CHUNK_ELEMENTS", positions * families.VOCABULARY * len(ROWS))
        yield


def rough(family: str, **changes: Any) -> Model:
    """Make a model with confident predictions; with weights of the usual size, all tokens would be equally likely."""
    model = families.make(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("family", families.FAMILIES)
def test_likelihoods_are_those_of_float64_in_pieces_of_any_size(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rough(family)
    whole = scoring.score_rows(model, ROWS, LABELS, PAD)
    with small_pieces(monkeypatch, 4):
        pieces = scoring.score_rows(model, ROWS, LABELS, PAD)
    expected = reference(model)
    tolerance = 1e-5 if family == "mamba" else 1e-6  # Mamba's own class also computes its states in float32
    close(whole, expected, tolerance)
    close(pieces, expected, tolerance)


def test_what_is_done_to_logits_after_the_head_is_done_to_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 caps the logits, Cohere scales them."""
    for family, changes in (("gemma2", {"final_logit_softcapping": 0.5}), ("cohere", {"logit_scale": 0.5})):
        model, plain = (rough(family, **given) for given in (changes, {}))
        with small_pieces(monkeypatch, 4):
            found = scoring.score_rows(model, ROWS, LABELS, PAD)
        close(found, reference(model))
        assert found[1].nll != pytest.approx(scoring.score_rows(plain, ROWS, LABELS, PAD)[1].nll, rel=1e-3)


def test_logits_are_never_whole_and_the_body_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.make("llama")
    heads, bodies = [], []
    model.lm_head.register_forward_hook(lambda module, inputs, output: heads.append(output.shape[1]))
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: bodies.append(1))
    with small_pieces(monkeypatch, 7):
        scoring.score_rows(model, ROWS, LABELS, PAD)
    assert (heads, len(bodies)) == ([7, 7, 7, 7, 2], 1)
    assert "forward" not in vars(model.model)


def test_a_model_whose_body_is_not_to_be_found_is_scored_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom model code may return the model itself as its body; its logits are then computed whole and sliced."""
    model = families.make("llama")
    monkeypatch.setattr(model, "get_decoder", lambda: model)
    with small_pieces(monkeypatch, 7):
        close(scoring.score_rows(model, ROWS, LABELS, PAD), reference(families.make("llama")))


def test_a_model_that_runs_its_body_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.make("llama")
    once = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: (once(**given), once(**given))[1])
    with pytest.raises(BaseModelError, match="LlamaForCausalLM: runs its layers 2 times for one text"):
        scoring.score_rows(model, ROWS, LABELS, PAD)


def test_padding_and_order_of_a_batch_change_nothing_but_rounding() -> None:
    model = rough("qwen2")
    expected = [astuple(one) for one in scoring.score_rows(model, ROWS, LABELS, PAD)]
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 4], [3], [4]):
        rows, labels = [ROWS[i] for i in order], [LABELS[i] for i in order]
        close(scoring.score_rows(model, rows, labels, 17), [expected[i] for i in order])


@pytest.mark.usefixtures("without_kernels")
def test_base_and_adapter_are_scored_on_the_same_tokens(saved_family: Callable[[str], Path]) -> None:
    train = Train.model_validate({"quantization": "nf4", "rank": 4, "dropout": 0.0})
    plain = loading.load(saved_family("llama"), None, train, torch.device("cpu"))
    expected = scoring.score_rows(plain, ROWS, LABELS, PAD)
    model = adapters.attach(plain, train, "digest").eval()
    with torch.no_grad():
        for _, parameter in adapters.trainable_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    tuned = scoring.score_rows(model, ROWS, LABELS, PAD)
    with model.disable_adapter():
        assert scoring.score_rows(model, ROWS, LABELS, PAD) == expected
    assert [(a.tokens, a.prompt_tokens) for a in tuned] == [(b.tokens, b.prompt_tokens) for b in expected]
    assert tuned[1].nll != pytest.approx(expected[1].nll, rel=1e-3)


def test_rows_of_a_single_token_have_no_likelihood() -> None:
    assert (
        scoring.score_rows(families.make("llama"), [[5], [6]], [[5], [IGNORE_INDEX]], PAD)
        == [RowLikelihood(0, 0, 0, 0)] * 2
    )


def by_hand(model: Model, prompt: list[int], ends: list[int], count: int) -> list[int]:
    """Decode greedily without a cache."""
    ids = list(prompt)
    while len(ids) - len(prompt) < count and not (len(ids) > len(prompt) and ids[-1] in ends):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mamba"])
def test_an_answer_is_greedy_until_an_end_token(family: str) -> None:
    model = rough(family)
    prompts = [ids for ids in ROWS if len(ids) > 1] if family != "mamba" else [ROWS[1]]
    expected = [by_hand(model, prompt, [], 9) for prompt in prompts]
    assert scoring.generate(model, prompts, [], 9, PAD) == expected
    end = expected[0][3]
    cut = [by_hand(model, prompt, [end], 9) for prompt in prompts]
    assert len(cut[0]) < 9
    assert scoring.generate(model, prompts, [end], 9, PAD) == cut


def test_a_models_generation_config_is_ignored() -> None:
    plain, model = rough("llama"), rough("llama")
    model.generation_config.update(repetition_penalty=50.0, do_sample=True, temperature=2.0, max_new_tokens=1)
    own = model.generation_config
    assert scoring.generate(model, ROWS, [], 9, PAD) == scoring.generate(plain, ROWS, [], 9, PAD)
    assert model.generation_config is own
