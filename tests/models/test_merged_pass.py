"""Tests of merged passes: several adapters on one base compute what each of them computes alone."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ratchet.config.train import Train
from ratchet.models import adapters, chunked_loss
from ratchet.models.loss import SequenceBatch
from ratchet.models.merged_pass import MergedModel, MergedPasses, RandomStream, SharedBase, find_obstacle

CPU = torch.device("cpu")
VOCABULARY = 300
TOLERANCE = 1e-5


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=512, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).requires_grad_(False).eval()


def train(**changes: Any) -> Train:
    return Train(**({"quantization": "none", "rank": 8} | changes))


def adapted(base: SharedBase, settings: Train) -> Any:
    """Return a model with an adapter whose update is not zero."""
    model = adapters.attach(base.copy(), settings, "0" * 64, (), 10)
    draw = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for name, parameter in adapters.trainable_parameters(model):
            if "lora_B" in name or "lora_E" in name:
                parameter.normal_(0, 0.05, generator=draw)
    return model.train()


def batch(rows: int, tokens: int, packed: bool = False) -> SequenceBatch:
    draw = torch.Generator().manual_seed(rows * tokens)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=draw)
    labels = ids.clone()
    labels[:, : tokens // 2] = -100
    positions = torch.cat([torch.arange(tokens - tokens // 3), torch.arange(tokens // 3)])
    return SequenceBatch(ids, labels, positions.expand(rows, tokens).contiguous() if packed else None)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients, and remove them from the model."""
    found = {n: p.grad for n, p in adapters.trainable_parameters(model) if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def require_equal(models: list[Any], batches: list[SequenceBatch], base: SharedBase) -> None:
    """Check that losses and gradients of a merged pass equal those of separate passes."""
    alone = []
    for seed, (model, rows) in enumerate(zip(models, batches, strict=True)):
        torch.manual_seed(seed)
        loss = chunked_loss.forward_backward(model, rows, 0.5 + seed)
        alone.append((float(loss), gradients(model)))
    members = [MergedModel(model, RandomStream(CPU)) for model in models]
    for seed, member in enumerate(members):
        member.random.seed(seed)
    passes = MergedPasses(base)
    for _ in range(2):
        losses = passes.forward_backward(members, batches, [0.5 + seed for seed in range(len(models))])
        for loss, model, (expected_loss, expected) in zip(losses, models, alone, strict=True):
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            found = gradients(model)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.linalg.norm(found[name] - tensor) <= TOLERANCE * torch.linalg.norm(tensor) + 1e-9, name
        for seed, member in enumerate(members):
            member.random.seed(seed)


def test_adapters_of_any_kind_compute_what_they_compute_alone() -> None:
    base = SharedBase(llama())
    settings = [
        train(rank=4, seed=1), train(rank=16, dropout=0.2, seed=2), train(adapter="dora", seed=3),
        train(adapter="dora", dropout=0.3, seed=4), train(adapter="adalora", rank=12, seed=5),
        train(use_rslora=True, target_modules=["q_proj", "v_proj"], seed=6),
        train(rank_pattern={"q_proj": 3}, seed=7), train(target_modules="mlp", seed=8),
    ]  # fmt: skip
    models = [adapted(base, one) for one in settings]
    batches = [batch(2, 20), batch(3, 31), batch(1, 12), batch(2, 25), batch(2, 9), batch(4, 22), batch(2, 16, True)]
    require_equal(models, [*batches, batch(5, 14)], base)


def test_quantized_layers_and_recomputed_activations_give_the_same() -> None:
    from bitsandbytes.nn import Linear4bit

    model = llama()
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    packed = Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
                    packed.load_state_dict(layer.state_dict())
                    packed.support_avx512bf16_for_cpu = False
                    setattr(part, name, packed.to("cpu"))
    base = SharedBase(model.requires_grad_(False))
    models = [adapted(base, train(quantization="nf4", seed=seed)) for seed in (1, 2)]
    adapters.enable_activation_checkpointing(models[0])
    require_equal(models, [batch(2, 20), batch(3, 12)], base)


def test_copies_share_the_weights_of_the_base() -> None:
    base = SharedBase(llama())
    models = [adapted(base, train(seed=seed)) for seed in (1, 2)]
    pointers = [
        {tensor.data_ptr() for name, tensor in model.named_parameters() if "lora_" not in name} for model in models
    ]
    assert pointers[0] == pointers[1]
    assert base.size_bytes >= 4 * sum(p.numel() for p in base.copy().parameters())


def test_an_own_stream_continues_where_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    stream = RandomStream(CPU)
    stream.seed(5)
    torch.manual_seed(6)
    outside = torch.rand(1)
    torch.manual_seed(6)
    with stream.use():
        first = torch.rand(2)
    saved = stream.state()
    assert torch.equal(torch.rand(1), outside), "the stream has changed that of the process"
    with stream.use():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), expected)
    stream.restore(saved)
    with stream.use():
        assert torch.equal(torch.rand(2), second)


def test_what_cannot_be_merged_is_recognised() -> None:
    base = SharedBase(llama())
    assert find_obstacle(adapted(base, train())) is None
    assert "head" in str(find_obstacle(adapted(base, train(target_modules=["lm_head"]))))
    with_tokens = adapters.attach(base.copy(), train(), "0" * 64, (1, 2), 10)
    assert "embedding" in str(find_obstacle(with_tokens))
    dropout = SharedBase(llama(attention_dropout=0.1))
    assert "dropout" in str(find_obstacle(adapted(dropout, train())))
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=64)
    conv1d = SharedBase(GPT2LMHeadModel(config).requires_grad_(False))
    assert "no linear layer" in str(find_obstacle(adapted(conv1d, train(target_modules=["c_attn"]))))
