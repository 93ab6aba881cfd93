"""Tests added tokens: in the tokenizer, as embedding rows initialized from pieces, never shrinking."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_utils import PreTrainedModel

import families
from ratchet.config.train import Train
from ratchet.errors import BaseModelError
from ratchet.models import loading, tiny_model, vocabulary
from ratchet.models.tiny_model import TURN_END
from ratchet.storage.records.base import BaseCard

NEW = ("<tool>", "naïve approach")
TEXTS = ["a naive approach to tools", "tool by tool, an approach", "naive tools approach a tool"] * 4


@pytest.fixture
def tokenizer() -> Any:
    return tiny_model.train_tokenizer(TEXTS, 320)


def model_with(rows: int, family: str = "llama") -> PreTrainedModel:
    return families.make(family, vocab_size=rows)


def embeddings(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def card(*added: str) -> BaseCard:
    return BaseCard(
        source="tiny", revision=None, digest="0" * 64, files={}, architecture="LlamaForCausalLM", parameters=1,
        licence=None, added_tokens=added,
    )  # fmt: skip


def test_a_token_is_matched_as_written_and_stays_in_answers(tokenizer: Any) -> None:
    size = vocabulary.required_rows(tokenizer)
    pieces = vocabulary.add_tokens(tokenizer, NEW)
    assert sorted(pieces) == [size, size + 1]
    assert [tokenizer.decode(pieces[tokenizer.convert_tokens_to_ids(token)]) for token in NEW] == list(NEW)
    ids = tokenizer.encode("a<tool> naïve approach", add_special_tokens=False)
    assert set(pieces) <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool> naïve approach"


def test_a_token_that_is_known_stays_what_it_is(tokenizer: Any) -> None:
    before = tokenizer.get_vocab()
    assert vocabulary.add_tokens(tokenizer, [TURN_END, "a", TURN_END]) == {}
    assert tokenizer.get_vocab() == before
    assert vocabulary.list_new_token_ids(tokenizer, card(TURN_END)) == [tokenizer.eos_token_id]
    with pytest.raises(BaseModelError, match=r"base\.added_tokens: <tool> is not in the tokenizer"):
        vocabulary.list_new_token_ids(tokenizer, card("<tool>"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "gpt-j", "phi"])
def test_new_rows_begin_as_the_mean_of_their_pieces(family: str, tokenizer: Any) -> None:
    """gpt2, gemma2 and opt tie their head to the embeddings; gpt-j and phi have a head with a bias."""
    size = vocabulary.required_rows(tokenizer)
    model = model_with(size, family)
    tied = embeddings(model)[0] is embeddings(model)[1]
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        bias.data.normal_()
    old = [tensor.detach().clone() for tensor in (*embeddings(model), *([] if bias is None else [bias]))]
    ids = [[1, 5, 9, size - 1]]
    before = model(input_ids=torch.tensor(ids)).logits
    pieces = vocabulary.add_tokens(tokenizer, NEW)
    state = torch.get_rng_state()
    assert vocabulary.grow_embeddings(model, vocabulary.required_rows(tokenizer), pieces) == [size, size + 1]

    head = model.get_output_embeddings()
    new = [*embeddings(model), *([] if bias is None else [head.bias])]
    for was, now in zip(old, new, strict=True):
        assert torch.equal(was, now[:size])
        for row, parts in pieces.items():
            torch.testing.assert_close(now[row], was[parts].mean(dim=0))
    assert (new[0] is new[1]) == tied
    assert model.config.vocab_size == size + 2
    assert torch.equal(state, torch.get_rng_state())
    after = model(input_ids=torch.tensor(ids)).logits
    assert after.shape[-1] == size + 2
    torch.testing.assert_close(after[..., :size], before)


def test_growing_is_deterministic_and_without_pieces_begins_at_the_mean() -> None:
    models_ = [model_with(50), model_with(50)]
    for model in models_:
        assert vocabulary.grow_embeddings(model, 53) == [50, 51, 52]
        torch.rand(7)
    assert all(torch.equal(a, b) for a, b in zip(*map(embeddings, models_), strict=True))
    embedding = embeddings(models_[0])[0]
    torch.testing.assert_close(embedding[50:], embedding[:50].mean(dim=0).expand(3, -1))


def test_padded_rows_are_used_before_anything_grows(tokenizer: Any) -> None:
    size = vocabulary.required_rows(tokenizer)
    model = model_with(size + 20)
    old = [tensor.detach().clone() for tensor in embeddings(model)]
    assert vocabulary.grow_embeddings(model, size) == []
    assert all(map(torch.equal, old, embeddings(model)))
    pieces = vocabulary.add_tokens(tokenizer, NEW)
    assert vocabulary.grow_embeddings(model, vocabulary.required_rows(tokenizer), pieces) == []
    embedding = embeddings(model)[0]
    assert len(embedding) == model.config.vocab_size == size + 20
    changed = (embedding != old[0]).any(dim=1).nonzero().flatten().tolist()
    assert changed == sorted(pieces)
    assert vocabulary.list_new_token_ids(tokenizer, card(*NEW), model) == sorted(pieces)


def test_a_tokenizer_that_knows_more_than_the_model_is_the_same_case(tokenizer: Any) -> None:
    model = model_with(vocabulary.required_rows(tokenizer) - 3)
    grown = vocabulary.grow_embeddings(model, vocabulary.required_rows(tokenizer))
    assert len(grown) == 3
    assert vocabulary.list_new_token_ids(tokenizer, card(), model) == grown
    assert vocabulary.list_new_token_ids(tokenizer, card(TURN_END), model) == sorted([*grown, tokenizer.eos_token_id])


def test_a_head_that_is_longer_than_the_embedding_keeps_its_rows() -> None:
    model = model_with(50)
    head = torch.nn.Linear(families.HIDDEN, 60, bias=False)
    model.set_output_embeddings(head)
    old = head.weight.detach().clone()
    assert vocabulary.grow_embeddings(model, 52) == [50, 51]
    embedding, now = embeddings(model)
    assert (len(embedding), len(now)) == (60, 60)
    assert torch.equal(old, now)


def test_ids_with_gaps_need_rows_up_to_the_greatest(tokenizer: Any) -> None:
    class Gaps:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 7}

    assert vocabulary.required_rows(Gaps()) == 8
    assert vocabulary.required_rows(tokenizer) == len(tokenizer)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model_with(96).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_model_in_four_bits_grows_for_its_head_is_not(directory: Path) -> None:
    model = loading.load(directory, None, Train(), torch.device("cpu"))
    learning = [parameter.requires_grad for parameter in model.parameters()]
    assert vocabulary.grow_embeddings(model, 98, {96: [3, 4], 97: [5]}) == [96, 97]
    embedding, head = embeddings(model)
    torch.testing.assert_close(embedding[96], embedding[3:5].mean(dim=0))
    assert model(input_ids=torch.tensor([[96, 97]])).logits.shape[-1] == len(head) == 98
    assert [parameter.requires_grad for parameter in model.parameters()] == learning


def test_a_head_in_four_bits_cannot_grow(directory: Path) -> None:
    everything = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["embed_tokens"])
    model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=everything, dtype=torch.float32)
    assert vocabulary.grow_embeddings(model, 90) == []
    for size, pieces in ((98, None), (96, {90: [1]})):
        with pytest.raises(BaseModelError, match="stored in 4 bits"):
            vocabulary.grow_embeddings(model, size, pieces)


def test_growing_leaves_the_random_numbers_of_the_models_gpu_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers draws values for new rows on the model's device."""
    model, gpu, states = model_with(50), torch.device("cuda", 1), {"now": "before"}
    resize = model.resize_token_embeddings

    def draw(*arguments: Any, **options: Any) -> Any:
        states["now"] = "after"
        return resize(*arguments, **options)

    monkeypatch.setattr(model, "resize_token_embeddings", draw)
    monkeypatch.setattr(PreTrainedModel, "device", gpu)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: (device, states["now"]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update(now=state[1], device=device))
    assert vocabulary.grow_embeddings(model, 53) == [50, 51, 52]
    assert states == {"now": "before", "device": gpu}
