"""Tests that the detected decoder layers are those that run one after the other."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, Gemma3nTextConfig, ModernBertDecoderConfig, XLMConfig

import families
from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.models import adapters, chunked_loss
from ratchet.models.device import Model
from ratchet.models.model_spec import find_blocks
from ratchet.training import sharding
from ratchet.training.distributed import RankEnvironment, RankGroup

XLM = {"vocab_size": 96, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128}
"""It holds the parts of its layers in four lists."""
GEMMA_3N = {
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size": 64, "hidden_size_per_layer_input": 8,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "laurel_rank": 4, "num_kv_shared_layers": 0,
}  # fmt: skip
"""It holds its layers, and lists of projections beside them."""


def made(config: object) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def run_order(model: Model, modules: nn.ModuleList) -> list[int]:
    """Return the numbers of those modules, in the order of their calls."""
    called: list[int] = []
    for number, module in enumerate(modules):
        module.register_forward_hook(partial(lambda number, *_: called.append(number), number))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 20)[None])
    return called


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_has_its_layers(family: str) -> None:
    model = families.make(family)
    name, blocks = find_blocks(model)
    assert model.get_submodule(name) is blocks
    assert run_order(model, blocks) == list(range(families.LAYERS))
    inside = sum(one.numel() for one in blocks.parameters())
    outside = {id(one): one.numel() for part in (model.get_input_embeddings(), model.get_output_embeddings())
               for one in part.parameters()}  # fmt: skip
    rest = sum(one.numel() for one in model.parameters()) - inside - sum(outside.values())
    assert rest <= families.POSITIONS * families.HIDDEN + 6 * families.HIDDEN, "embeddings of positions, norms"


def test_with_an_adapter_the_name_is_the_one_in_the_whole() -> None:
    base = families.make("llama")
    model = adapters.attach(base, Train(rank=2, target_modules=("q_proj",), quantization="none"), "digest")
    name, blocks = find_blocks(model)
    assert name == "base_model.model.model.layers"
    assert blocks is base.model.layers


def test_lists_of_projections_are_not_blocks() -> None:
    model = made(Gemma3nTextConfig(**GEMMA_3N))
    name, blocks = find_blocks(model)
    assert (name, run_order(model, blocks)) == ("model.layers", [0, 1])


@pytest.mark.parametrize("made_of", [ModernBertDecoderConfig, BertConfig], ids=lambda one: one.__name__)
def test_layers_are_found_where_the_class_calls_something_else_its_decoder(made_of: Any) -> None:
    config = made_of(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                     is_decoder=True, pad_token_id=0)  # fmt: skip
    model = made(config)
    name, blocks = find_blocks(model)
    assert model.get_submodule(name) is blocks
    assert run_order(model, blocks) == [0, 1, 2]


def test_a_model_with_parts_of_layers_in_several_lists_has_no_blocks_and_is_not_shared() -> None:
    model = made(XLMConfig(**XLM))
    name, blocks = find_blocks(model)
    assert (name, len(blocks)) == ("", 0)
    with chunked_loss.restrict_last_block(model, torch.tensor([3]), torch.Size([1, 17])):
        assert not any(module._forward_hooks for module in model.modules())
    adapted = adapters.attach(model, Train(rank=2, target_modules=("q_lin",), quantization="none"), "digest")
    device = torch.device("cpu")
    with pytest.raises(
        SettingsError,
        match=r"machine\.shard_base: a XLMWithLMHeadModel cannot be sharded: its layers .*; set it to false",
    ):
        sharding.shard_base(adapted, RankGroup(RankEnvironment(), device, lambda: None, 1.0), device)
