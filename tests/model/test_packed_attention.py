"""Rows of a pack do not see one another: logits, loss and gradient are those of rows alone, or packing is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ratchet.config_train import Train
from ratchet.data.batches import Rows
from ratchet.data.conversation import MASKED
from ratchet.errors import SettingsError
from ratchet.model import adapter, quantized
from ratchet.model.loss import Sequences, answer_nll, require_rows_apart
from ratchet.model.quantized import Model

CPU = torch.device("cpu")
VOCABULARY = 96
LENGTHS = (20, 17, 9, 1, 5, 2, 30)
PACKS = [[3, 1, 2], [6], [0, 5, 4]]
ATTENTION = ("sdpa", "eager")

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
WINDOW: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SHAPE, **WINDOW, head_dim=8),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}
MIXING: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], block_multiple_of=16),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **{k: v for k, v in SHAPE.items() if k != "initializer_range"},
        lru_width=32, attention_window_size=16, block_types=["recurrent", "attention"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Rows:
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    return Rows.from_lists(ids, [[MASKED] * (len(row) // 3) + row[len(row) // 3 :] for row in ids])


def model_of(config: Any, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    model.config.use_cache = False
    return model


def logits_of(model: Model, batch: Sequences) -> Tensor:
    inputs = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    with torch.no_grad():
        logits: Tensor = model(input_ids=batch.input_ids, use_cache=False, **inputs).logits
    return logits


def spans(sequence: list[int]) -> list[tuple[int, int, int]]:
    """Each row of a sequence with the place where it begins and ends."""
    found, start = [], 0
    for row in sequence:
        found.append((row, start, start + LENGTHS[row]))
        start += LENGTHS[row]
    return found


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_loss_of_a_row_are_the_same_in_packs_and_alone(name: str, attention: str, rows: Rows) -> None:
    """In a micro-batch of three packs of different length, so that two of them are padded."""
    model = model_of(CONFIGS[name](), attention)
    batch = Sequences.of(rows, PACKS, CPU)
    logits = logits_of(model, batch)
    with torch.no_grad():
        nll = answer_nll(model, batch.input_ids, batch.labels, batch.position_ids)
    largest = float(logits.abs().max())
    for k, pack in enumerate(PACKS):
        for row, start, stop in spans(pack):
            alone = Sequences.of(rows, [[row]], CPU)
            assert alone.position_ids is None
            assert torch.allclose(logits[k, start:stop], logits_of(model, alone)[0], atol=1e-5 * largest, rtol=0)
            with torch.no_grad():
                expected = answer_nll(model, alone.input_ids, alone.labels)[0]
            assert torch.allclose(nll[k, start : stop - 1], expected, atol=1e-4, rtol=1e-5)
            assert start == 0 or nll[k, start - 1] == 0  # what the row before would say next
    assert int((nll != 0).sum()) == sum(rows.trained(pack) for pack in PACKS)


@pytest.mark.parametrize("attention", ATTENTION)
def test_without_positions_a_row_would_see_those_before_it(attention: str, rows: Rows) -> None:
    """The comparison above can fail."""
    model = model_of(CONFIGS["llama"](), attention)
    batch = Sequences.of(rows, [[1, 2]], CPU)
    assert batch.position_ids is not None
    read_as_one = logits_of(model, Sequences(batch.input_ids, batch.labels, None))
    apart = logits_of(model, batch)
    assert torch.allclose(read_as_one[0, :17], apart[0, :17], atol=1e-5)
    assert (read_as_one[0, 17:] - apart[0, 17:]).abs().max() > 0.1


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_gradient_of_a_packed_step_is_that_of_its_rows(name: str, attention: str, rows: Rows) -> None:
    model = model_of(CONFIGS[name](), attention)
    trained = rows.trained(range(len(LENGTHS)))

    def gradients(sequences: list[list[int]]) -> list[Tensor]:
        model.zero_grad()
        batch = Sequences.of(rows, sequences, CPU)
        (answer_nll(model, batch.input_ids, batch.labels, batch.position_ids).sum() / trained).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    packed, unpacked = gradients(PACKS), gradients([[row] for row in range(len(LENGTHS))])
    assert len(packed) == len(unpacked) > 10
    largest = max(float(gradient.abs().max()) for gradient in unpacked)
    for a, b in zip(packed, unpacked, strict=True):
        assert torch.allclose(a, b, atol=1e-5 * largest, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_models_that_keep_rows_apart_may_be_packed(name: str, attention: str, dtype: torch.dtype, rows: Rows) -> None:
    model = model_of(CONFIGS[name](), attention, dtype)
    model.train()
    before = torch.get_rng_state()
    require_rows_apart(model, rows, [6, 0, 1, 2, 3], CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXING)
def test_models_with_layers_that_carry_rows_over_are_refused(name: str, dtype: torch.dtype, rows: Rows) -> None:
    model = model_of(MIXING[name](), dtype=dtype)
    with pytest.raises(SettingsError, match=r"train\.batching: packed, but this model mixes the rows.*set by_length"):
        require_rows_apart(model, rows, [6, 0, 1], CPU)


def test_a_model_without_position_ids_is_refused(rows: Rows) -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(SettingsError, match="takes no position ids"):
        require_rows_apart(model_of(config, "eager"), rows, [6, 0, 1], CPU)


def without_mask(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any) -> Any:
    """Causal attention that looks at no mask, as a foreign kernel might."""
    return sdpa_attention_forward(module, query, key, value, None, **rest | {"is_causal": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_ignores_masks_is_refused(dtype: torch.dtype, rows: Rows) -> None:
    AttentionInterface.register("without_mask", without_mask)
    try:
        model = model_of(CONFIGS["llama"](), "without_mask", dtype)
        with pytest.raises(SettingsError, match="mixes the rows of a pack"):
            require_rows_apart(model, rows, [6, 0, 1], CPU)
    finally:
        AttentionInterface._global_mapping.pop("without_mask")


def test_a_model_that_reads_positions_otherwise_is_refused(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute positions that go on through the pack: no row sees another, and yet none is what it is alone."""
    model = model_of(CONFIGS["gpt2"]())
    table = model.transformer.wpe
    original = table.forward
    monkeypatch.setattr(table, "forward", lambda positions: original(torch.arange(positions.shape[1])[None]))
    with pytest.raises(SettingsError, match="reads a row in a pack otherwise than alone"):
        require_rows_apart(model, rows, [6, 0], CPU)


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_model_is_loaded_with_the_attention_that_is_set(attention: str, rows: Rows, tmp_path: Path) -> None:
    wide = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
    }  # bitsandbytes reads narrower matrices wrongly on some CPUs
    model_of(transformers.LlamaConfig(**CONFIGS["llama"]().to_dict() | wide)).save_pretrained(tmp_path)
    settings = Train.model_validate({"attention": attention, "rank": 4})
    model = adapter.attach(quantized.load(tmp_path, None, settings, CPU), settings, "base")
    assert model.get_base_model().config._attn_implementation == attention
    require_rows_apart(model, rows, [6, 0, 1], CPU)  # 4 bits and adapters change nothing of it
    plain = quantized.load_plain(tmp_path, torch.float32, CPU)
    assert plain.config._attn_implementation == "sdpa"


def test_attention_that_the_model_does_not_have_is_refused_with_the_setting(tmp_path: Path) -> None:
    config = transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64
    )
    model_of(config, "eager").save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"train\.attention: sdpa, but the model of .* has none; set eager"):
        quantized.load(tmp_path, None, Train(quantization="none", attention="sdpa"), CPU)
    for attention in ("eager", "auto"):
        loaded = quantized.load(tmp_path, None, Train(quantization="none", attention=attention), CPU)
        assert loaded.config._attn_implementation == "eager"
    assert quantized.load_plain(tmp_path, torch.float32, CPU).config._attn_implementation == "eager"
