"""Tests that packed rows do not interact, and that packing is refused for models where they do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import families
from ratchet.config.train import Train
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import SettingsError
from ratchet.models import adapters, loading
from ratchet.models.chunked_loss import compute_loss
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, answer_nll, require_packing_isolation
from ratchet.models.packed_attention import attend_within_rows

CPU = torch.device("cpu")
LENGTHS = (20, 17, 9, 1, 5, 2, 30)
PACKS = [[3, 1, 2], [6], [0, 5, 4]]
ATTENTION = ("sdpa", "eager")

SHAPE: dict[str, Any] = {
    "vocab_size": families.VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MIXING: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], block_multiple_of=16),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **SHAPE, lru_width=32, attention_window_size=16, block_types=["recurrent", "attention"]
    ),
}


@pytest.fixture(scope="module")
def rows() -> TokenRows:
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, families.VOCABULARY, length).tolist() for length in LENGTHS]
    return TokenRows.from_lists(ids, [[IGNORE_INDEX] * (len(row) // 3) + row[len(row) // 3 :] for row in ids])


def model_of(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """Make a model with weights ten times as large as usual, so that leaks between rows are visible.

    Gemma has one layer with a sliding window.
    """
    if family == "gemma3":
        changes |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    changes |= {"initializer_range": 0.2, "attn_implementation": attention, "use_cache": False}
    return families.make(family, 1, dtype, **changes)


def logits_of(model: Model, batch: SequenceBatch) -> Tensor:
    inputs = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    with torch.no_grad():
        logits: Tensor = model(input_ids=batch.input_ids, use_cache=False, **inputs).logits
    return logits


def spans(sequence: list[int]) -> list[tuple[int, int, int]]:
    """Return each row of a sequence with its start and end."""
    found, start = [], 0
    for row in sequence:
        found.append((row, start, start + LENGTHS[row]))
        start += LENGTHS[row]
    return found


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt-neox", "gpt2", "qwen3-moe"])
def test_logits_and_loss_of_a_row_are_the_same_in_packs_and_alone(family: str, attention: str, rows: TokenRows) -> None:
    """The micro-batch has three packs of different length, so two of them are padded."""
    model = model_of(family, attention)
    batch = SequenceBatch.from_sequences(rows, PACKS, CPU)
    logits = logits_of(model, batch)
    with torch.no_grad():
        nll = answer_nll(model, batch.input_ids, batch.labels, batch.position_ids)
    largest = float(logits.abs().max())
    for k, pack in enumerate(PACKS):
        for row, start, stop in spans(pack):
            alone = SequenceBatch.from_sequences(rows, [[row]], CPU)
            assert alone.position_ids is None
            assert torch.allclose(logits[k, start:stop], logits_of(model, alone)[0], atol=1e-5 * largest, rtol=0)
            with torch.no_grad():
                expected = answer_nll(model, alone.input_ids, alone.labels)[0]
            assert torch.allclose(nll[k, start : stop - 1], expected, atol=1e-4, rtol=1e-5)
            assert start == 0 or nll[k, start - 1] == 0  # the token after the previous row is not trained
    assert int((nll != 0).sum()) == sum(rows.count_trained(pack) for pack in PACKS)


@pytest.mark.parametrize("attention", ATTENTION)
def test_without_positions_a_row_would_see_those_before_it(attention: str, rows: TokenRows) -> None:
    """This test shows that the comparison above can fail."""
    model = model_of("llama", attention)
    batch = SequenceBatch.from_sequences(rows, [[1, 2]], CPU)
    assert batch.position_ids is not None
    read_as_one = logits_of(model, SequenceBatch(batch.input_ids, batch.labels, None))
    apart = logits_of(model, batch)
    assert torch.allclose(read_as_one[0, :17], apart[0, :17], atol=1e-5)
    assert (read_as_one[0, 17:] - apart[0, 17:]).abs().max() > 0.1


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_gradient_of_a_packed_step_is_that_of_its_rows(family: str, attention: str, rows: TokenRows) -> None:
    model = model_of(family, attention)
    trained = rows.count_trained(range(len(LENGTHS)))

    def gradients(sequences: list[list[int]]) -> list[Tensor]:
        model.zero_grad()
        batch = SequenceBatch.from_sequences(rows, sequences, CPU)
        (answer_nll(model, batch.input_ids, batch.labels, batch.position_ids).sum() / trained).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    packed, unpacked = gradients(PACKS), gradients([[row] for row in range(len(LENGTHS))])
    assert len(packed) == len(unpacked) > 10
    largest = max(float(gradient.abs().max()) for gradient in unpacked)
    for a, b in zip(packed, unpacked, strict=True):
        assert torch.allclose(a, b, atol=1e-5 * largest, rtol=0)


@contextmanager
def recorded_attention() -> Iterator[list[tuple[int, bool]]]:
    """Record the number of queries of each fused attention, and whether it has a mask."""
    calls: list[tuple[int, bool]] = []
    original = functional.scaled_dot_product_attention

    def record(query: Tensor, *heads: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        calls.append((query.shape[2], attn_mask is not None))
        return original(query, *heads, attn_mask=attn_mask, **options)

    functional.scaled_dot_product_attention = record
    try:
        yield calls
    finally:
        functional.scaled_dot_product_attention = original


@pytest.mark.usefixtures("without_kernels")
def test_on_a_cpu_attention_is_computed_row_by_row(rows: TokenRows) -> None:
    """A row of one token and padding need no attention. A layer with a window sees whole packs, and has a mask."""
    batch = SequenceBatch.from_sequences(rows, PACKS, CPU)
    by_row = [(LENGTHS[row], False) for pack in PACKS for row in pack if LENGTHS[row] > 1]
    for family, expected in (("llama", 2 * by_row), ("gemma3", [(30, True), *by_row])):
        with recorded_attention() as calls:
            compute_loss(model_of(family), batch, None)
        assert calls == expected
    with recorded_attention() as calls:
        logits_of(model_of("llama"), batch)  # transformers alone
    assert calls == [(30, True)] * 2


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_that_are_computed_again_attend_within_rows_too(family: str, rows: TokenRows) -> None:
    batch = SequenceBatch.from_sequences(rows, PACKS, CPU)
    found = []
    for recomputes in (False, True):
        model = model_of(family).train()
        if recomputes:
            model.activation_checkpointing_enable()
        with recorded_attention() as calls:
            compute_loss(model, batch, 1.0).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((len(calls), gradients))
    (once, kept), (twice, computed_again) = found
    assert twice == 2 * once
    assert len(kept) > 10
    assert all(map(torch.equal, kept, computed_again))


def test_a_bias_of_positions_is_that_of_the_row() -> None:
    """The reference is attention over the whole pack with a mask."""
    draw = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 2, 9, 8, generator=draw) for _ in range(3))
    bias = torch.randn(1, 2, 9, 9, generator=draw)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0]])
    row_of = (position_ids == 0).cumsum(1)
    mask = (row_of[0, :, None] == row_of[0]).tril()[None, None]
    expected = sdpa_attention_forward(torch.nn.Module(), query, key, value, mask, position_bias=bias)[0]
    with attend_within_rows(model_of("llama"), position_ids, position_ids):
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output = attend(torch.nn.Module(), query, key, value, None, position_bias=bias)[0]
    assert attend is not ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert torch.allclose(output, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_models_that_keep_rows_apart_may_be_packed(
    family: str, attention: str, dtype: torch.dtype, rows: TokenRows
) -> None:
    model = model_of(family, attention, dtype).train()
    before = torch.get_rng_state()
    require_packing_isolation(model, rows, [6, 0, 1, 2, 3], CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXING)
def test_models_with_layers_that_carry_rows_over_are_refused(name: str, dtype: torch.dtype, rows: TokenRows) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(MIXING[name](), dtype=dtype).eval()
    with pytest.raises(SettingsError, match=r"train\.batching: packed, but this model mixes the rows.*set by_length"):
        require_packing_isolation(model, rows, [6, 0, 1], CPU)


def test_a_model_without_position_ids_is_refused(rows: TokenRows) -> None:
    with pytest.raises(SettingsError, match="does not accept position ids"):
        require_packing_isolation(families.make("mamba"), rows, [6, 0, 1], CPU)


def without_mask(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any) -> Any:
    """Compute causal attention without the mask, as a custom kernel might."""
    return sdpa_attention_forward(module, query, key, value, None, **rest | {"is_causal": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_ignores_masks_is_refused(dtype: torch.dtype, rows: TokenRows) -> None:
    AttentionInterface.register("without_mask", without_mask)
    try:
        model = model_of("llama", "without_mask", dtype)
        with pytest.raises(SettingsError, match="mixes the rows of a pack"):
            require_packing_isolation(model, rows, [6, 0, 1], CPU)
    finally:
        AttentionInterface._global_mapping.pop("without_mask")


def test_a_model_that_reads_positions_otherwise_is_refused(rows: TokenRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions continue through the pack: rows do not see each other, but differ from rows alone."""
    model = model_of("gpt2")
    table = model.transformer.wpe
    original = table.forward
    monkeypatch.setattr(table, "forward", lambda positions: original(torch.arange(positions.shape[1])[None]))
    with pytest.raises(SettingsError, match="computes a row differently in a pack"):
        require_packing_isolation(model, rows, [6, 0], CPU)


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_model_is_loaded_with_the_attention_that_is_set(attention: str, rows: TokenRows, tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    settings = Train.model_validate({"attention": attention, "rank": 4})
    model = adapters.attach(loading.load(tmp_path, None, settings, CPU), settings, "base")
    assert model.get_base_model().config._attn_implementation == attention
    require_packing_isolation(model, rows, [6, 0, 1], CPU)  # 4-bit weights and adapters do not break the isolation
    plain = loading.load_plain(tmp_path, torch.float32, CPU)
    assert plain.config._attn_implementation == "sdpa"


def test_attention_that_the_model_does_not_have_is_refused_with_the_setting(tmp_path: Path) -> None:
    model_of("gpt-j", "eager").save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"train\.attention: sdpa: not supported by the model of .*; set eager"):
        loading.load(tmp_path, None, Train(quantization="none", attention="sdpa"), CPU)
    for attention in ("eager", "auto"):
        loaded = loading.load(tmp_path, None, Train(quantization="none", attention=attention), CPU)
        assert loaded.config._attn_implementation == "eager"
    assert loading.load_plain(tmp_path, torch.float32, CPU).config._attn_implementation == "eager"
