"""Tests loss and gradient with a chunked head against those of the whole logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ModernBertDecoderConfig,
)  # fmt: skip

import families
from ratchet.config.train import Train
from ratchet.models import adapters, chunked_loss, model_spec
from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, answer_nll
from ratchet.models.memory.trace import AllocationTrace, BatchShape

ROWS, TOKENS, FACTOR = 3, 40, 0.01
LEARNED = 30 + 15 + 29
"""Positions of the batch that are learned from."""
MIXED = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "opt": {"dropout": 0.0}}
MIXED["gpt-bigcode"] = MIXED["gpt2"]
"""Families whose configs have dropout of their own, without it."""


def batch_of() -> SequenceBatch:
    """Return rows whose trained positions differ."""
    input_ids = torch.randint(3, 90, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = input_ids.clone()
    labels[0, :10] = labels[1, :25] = labels[2, 30:] = -100
    return SequenceBatch(input_ids, labels, None)


def learning(base: Model, **settings: object) -> Model:
    """Attach an adapter with nonzero matrices; with zeros, most gradients would be zero."""
    chosen = {"rank": 4, "quantization": "none", "dropout": 0.0} | settings
    model = adapters.attach(base, Train(**chosen), "digest").train()  # type: ignore[arg-type]
    torch.manual_seed(3)
    for _, parameter in adapters.trainable_parameters(model):
        parameter.data.normal_(0, 0.05)
    return model


def with_adapter(family: str, **settings: object) -> Model:
    plan = model_spec.from_config(families.FAMILIES[family]())
    leaves = {x.name.rsplit(".", 1)[-1] for x in plan.layers if x.role in ("attention", "mlp") and x.kind != "experts"}
    targets = tuple(sorted(leaves or {"in_proj"}))
    return learning(families.make(family, **MIXED.get(family, {})), **{"target_modules": targets} | settings)


def seeded(made: Callable[[Any], Model], config: Any) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return made(config)


def gradients(model: Model) -> list[Tensor]:
    found = [parameter.grad for _, parameter in adapters.trainable_parameters(model)]
    model.zero_grad()
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def same_as_the_whole(model: Model, before: Callable[[], object] = lambda: None) -> None:
    """Check that loss and gradient by pieces equal those of the whole logits; call `before` between the two."""
    batch = batch_of()
    whole = answer_nll(model, batch.input_ids, batch.labels).sum()
    (whole * FACTOR).backward()
    expected = gradients(model)
    before()
    found = chunked_loss.forward_backward(model, batch, FACTOR)
    assert float(found) == pytest.approx(float(whole.detach()), rel=1e-6)
    largest = max(float(one.abs().max()) for one in expected)
    for ours, theirs in zip(gradients(model), expected, strict=True):
        assert float((ours - theirs).abs().max()) <= 5e-6 * largest


@pytest.mark.parametrize("width", [7, 10_000], ids=["pieces", "at-once"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_pieces_give_the_loss_and_the_gradient_of_the_whole(
    family: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", width * families.VOCABULARY)
    model, batch = with_adapter(family), batch_of()
    same_as_the_whole(model)
    with torch.no_grad():
        whole = float(answer_nll(model.eval(), batch.input_ids, batch.labels).sum())
        assert float(chunked_loss.compute_nll(model, batch)) == pytest.approx(whole, rel=1e-6)


def test_what_learns_in_the_head_learns_from_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", 7 * families.VOCABULARY)
    same_as_the_whole(with_adapter("llama", target_modules=("q_proj", "lm_head")))


def test_a_head_alone_learns_without_a_backward_pass_through_the_body() -> None:
    model, batch = with_adapter("llama", target_modules=("lm_head",)), batch_of()
    done: list[str] = []

    @contextmanager
    def during(what: str) -> Iterator[None]:
        done.append(what)
        yield

    chunked_loss.forward_backward(model, batch, FACTOR, during)
    assert done == ["forward", "loss"]
    assert all(float(one.abs().max()) > 0 for one in gradients(model))


def test_a_model_whose_logits_come_from_elsewhere_is_computed_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapter("llama")
    whole = model.get_base_model()
    monkeypatch.setattr(whole, "get_decoder", lambda: whole)
    same_as_the_whole(model)


def test_a_class_whose_decoder_is_a_part_of_its_head_is_computed_in_one() -> None:
    config = ModernBertDecoderConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, pad_token_id=0
    )
    base = seeded(AutoModelForCausalLM.from_config, config)
    assert not list(base.get_decoder().children())
    model = learning(base, target_modules=("Wi",))
    same_as_the_whole(model)
    ids = batch_of().input_ids
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        found = [columns for _, columns in ForwardPass(model, ids, (0, TOKENS)).pieces()]
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = with_adapter("llama")
    body = model.get_base_model().get_decoder()
    before = dict(body.__dict__)
    chunked_loss.forward_backward(model, batch_of(), FACTOR)
    assert body.__dict__ == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_last_block_is_computed_where_it_is_learned_from(recompute: bool) -> None:
    model = with_adapter("llama", target_modules="all")
    seen: dict[str, set[int]] = {}

    def see(name: str, _: object, inputs: tuple[Tensor], __: object) -> None:
        seen.setdefault(name, set()).add(inputs[0].shape[:-1].numel())

    def watch() -> None:
        if recompute:
            adapters.enable_activation_checkpointing(model)
        for name, module in model.get_base_model().get_decoder().layers.named_modules():
            if name.endswith("_proj.base_layer"):
                module.register_forward_hook(partial(see, name))

    same_as_the_whole(model, watch)
    last = max(name.split(".")[0] for name in seen)
    for name, positions in seen.items():
        everywhere = name.split(".")[0] != last or "k_proj" in name or "v_proj" in name
        assert positions == {ROWS * TOKENS if everywhere else LEARNED}, name


class Looped(LlamaModel):  # type: ignore[misc]
    """A body that runs its blocks twice, as custom model code may."""

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **more: object) -> object:
        if inputs_embeds is None:
            inputs_embeds = super().forward(input_ids=input_ids, **more).last_hidden_state
        return super().forward(inputs_embeds=inputs_embeds, **more)


class Foreign(LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = Looped(config)


def test_a_last_block_that_others_may_read_is_computed_everywhere() -> None:
    same_as_the_whole(learning(seeded(Foreign, families.FAMILIES["llama"]()), target_modules="all"))


def test_a_last_block_next_to_projections_is_computed_at_trained_positions() -> None:
    """Gemma 3n processes the output of its last block at each position separately."""
    config = Gemma3nTextConfig(
        vocab_size=96, vocab_size_per_layer_input=96, hidden_size=64, hidden_size_per_layer_input=8,
        intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        laurel_rank=4, num_kv_shared_layers=1, activation_sparsity_pattern=[0.9, 0.0, 0.9],
    )  # fmt: skip
    base = seeded(AutoModelForCausalLM.from_config, config)
    model = learning(base, target_modules=("q_proj", "down_proj"))
    seen: list[int] = []
    base.model.layers[-1].mlp.down_proj.register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].shape[:-1].numel())
    )
    same_as_the_whole(model)
    assert seen == [ROWS * TOKENS, LEARNED]


def test_the_whole_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test compares the peak memory with the head in pieces of four positions and with the whole head at once."""

    def most(positions: int) -> int:
        monkeypatch.setattr(chunked_loss, "LEARNED_ELEMENTS", positions * 50_000)
        model = learning(families.make("llama", vocab_size=50_000), target_modules=("q_proj",))
        ledger = AllocationTrace(model, BatchShape(ROWS, TOKENS, ROWS * TOKENS, False, "cpu"), records_graph=True)
        with ledger:
            chunked_loss.forward_backward(model, batch_of(), FACTOR)
        return max(peak.total_bytes for peak in ledger.peaks.values())

    logits_bytes = LEARNED * 50_000 * 4
    assert most(4) < 0.25 * logits_bytes < logits_bytes < most(10_000)
