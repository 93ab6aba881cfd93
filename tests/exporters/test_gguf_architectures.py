"""Tests that llama.cpp computes the same from our files as transformers, for real classes with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gguf_models
from gguf_models import families
from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.gguf import architectures, writer
from ratchet.models.runtimes import llama_server
from tiny_gguf import expected, greedy

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0] * 8, "original_max_position_embeddings": 256, "factor": 4.0,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases": ("llama-tied", {"mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {}),
    "phi3, partial": ("phi3", {"rope_parameters": HALF}),
    "phi3, long": ("phi3", {"max_position_embeddings": 1024, "rope_parameters": LONG}),
}
GELU = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7}),
}
IDS = [int(one) for one in torch.randint(3, 600, (40,), generator=torch.Generator().manual_seed(0))]


def made(family: str, changes: dict[str, Any]) -> Any:
    """Make a model with weights so large that every part of the computation changes the logits."""
    model = gguf_models.make(family, seed=1, vocab_size=gguf_models.ROWS, **changes)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                value.add_(torch.randn(value.shape, generator=draw) * 0.2)
            else:
                value.mul_(6)
    return model


def file_of(model: Any, tmp_path: Path) -> Path:
    directory = gguf_models.save(model, gguf_models.byte_level(), tmp_path / "hf")
    writer.require_exportable(directory, ["f32"], False)
    writer.write_gguf(directory, tmp_path / "model.gguf", "f32", gguf_models.nothing)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("case", EXACT)
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    model = made(*EXACT[case])
    with llama_server.open_runtime(file_of(model, tmp_path), 1, 64) as runtime:
        found = runtime.log_probabilities(IDS, range(len(IDS)))
        answer = runtime.generate(IDS[:20], 12, [])
    assert np.abs(found - expected(model, IDS)).max() < 2e-5
    assert answer == greedy(model, IDS[:20], 12)


class FromTable(torch.nn.Module):
    """Computes GELU as ggml does on a CPU: from a table of F16 (ggml_vec_geglu_f32 in ggml-cpu/vec.h)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        looked_up = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x >= 10, x, torch.where(x <= -10, torch.zeros_like(x), looked_up))


@pytest.mark.parametrize("case", GELU)
def test_gemma_differs_by_the_gelu_of_the_runtime(case: str, tmp_path: Path) -> None:
    model = made(*GELU[case])
    with llama_server.open_runtime(file_of(model, tmp_path), 1, 64) as runtime:
        found = runtime.log_probabilities(IDS, range(len(IDS)))
    plain = np.abs(found - expected(model, IDS)).max()
    for layer in model.model.layers:
        layer.mlp.act_fn = FromTable()
    alike = np.abs(found - expected(model, IDS)).max()
    assert plain < 5e-3
    assert alike < plain / 2
    assert (found.argmax(1) == expected(model, IDS).argmax(1)).all()


def config_only(tmp_path: Path, family: str, **changes: Any) -> Path:
    """Write a base directory without weights; refusals do not need them."""
    gguf_models.config(family, vocab_size=gguf_models.ROWS, **changes).save_pretrained(tmp_path)
    gguf_models.byte_level().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor 2.0"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope_type llama3"),
        ("qwen3", {"attention_bias": True}, "attention_bias: true"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings: false"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar 24"),
        ("gemma2", {"query_pre_attn_scalar": 16, "final_logit_softcapping": None}, "no soft-capping"),
        ("gemma3", {"query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 2}, "layer_types"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_llama_cpp_computes_differently_are_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BaseModelError, match=message) as raised:
        writer.require_exportable(config_only(tmp_path, family, **changes), ["q8_0"], False)
    assert "config.json" in str(raised.value)


def test_an_unsupported_architecture_needs_the_converter_of_llama_cpp(tmp_path: Path) -> None:
    directory = config_only(tmp_path / "hf", "olmo2")
    with pytest.raises(SettingsError, match=r"olmo2.*Llama, Mistral, Qwen2, Qwen3, Gemma.*machine\.llama_cpp"):
        writer.require_exportable(directory, ["q8_0"], False)
    writer.require_exportable(directory, ["q8_0"], True)


def test_a_config_that_transformers_cannot_read_is_refused(tmp_path: Path) -> None:
    directory = config_only(tmp_path, "llama")
    (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    with pytest.raises(BaseModelError, match=r"config\.json: transformers rejects it"):
        writer.require_exportable(directory, ["f32"], False)


def test_the_context_ends_where_a_window_that_the_config_uses_would_begin(tmp_path: Path) -> None:
    for family in ("mistral", "phi3"):
        model = architectures.read_architecture(config_only(tmp_path / family, family, sliding_window=32))
        assert model.context_tokens == 32
        assert "window" in model.notes[0]
    model = architectures.read_architecture(
        config_only(tmp_path / "qwen2", "qwen2", sliding_window=32, use_sliding_window=False)
    )
    assert (model.context_tokens, model.notes) == (families.POSITIONS, ())


def test_types_that_fit_no_row_are_refused(tmp_path: Path) -> None:
    directory = config_only(tmp_path, "llama")
    writer.require_exportable(directory, ["q4_0", "q4_k_m"], False)
    with pytest.raises(SettingsError, match=r"export\.gguf\.types: tq1_0 needs row lengths that are multiples of 256"):
        writer.require_exportable(directory, ["q8_0", "tq1_0"], False)
