"""Tests that the model spec, read without weights, equals that of the loaded model, for every family."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BitsAndBytesConfig,
    Gemma3Config,
    GptOssConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    WhisperConfig,
)

from families import FAMILIES, HIDDEN, INNER, LAYERS, T5, VOCABULARY, make
from ratchet.errors import BaseModelError
from ratchet.models import model_spec
from ratchet.models.model_spec import LayerSpec, ModelSpec

ATTENTION = "q_proj k_proj v_proj o_proj"
OUT = "q_proj k_proj v_proj out_proj"
GATED = "gate_proj up_proj down_proj"
FUSED = "query_key_value dense"
WIDENED = "dense_h_to_4h dense_4h_to_h"
EXPERTS = "gate_up_proj down_proj"

# Projection names as the authors of each family chose them.
PROJECTIONS = {
    "llama": (ATTENTION, GATED),
    "llama-tied": (ATTENTION, GATED),
    "mistral": (ATTENTION, GATED),
    "mixtral": (ATTENTION, EXPERTS),
    "qwen2": (ATTENTION, GATED),
    "qwen3": (ATTENTION, GATED),
    "qwen3-moe": (ATTENTION, EXPERTS),
    "gemma2": (ATTENTION, GATED),
    "gemma3": (ATTENTION, GATED),
    "phi3": ("qkv_proj o_proj", "gate_up_proj down_proj"),
    "phi": ("q_proj k_proj v_proj dense", "fc1 fc2"),
    "olmo2": (ATTENTION, GATED),
    "stablelm": (ATTENTION, GATED),
    "cohere": (ATTENTION, GATED),
    "gpt2": ("c_attn c_proj", "c_fc c_proj"),
    "gpt-bigcode": ("c_attn c_proj", "c_fc c_proj"),
    "gpt-j": (OUT, "fc_in fc_out"),
    "gpt-neo": (OUT, "c_fc c_proj"),
    "gpt-neox": (FUSED, WIDENED),
    "falcon": (FUSED, WIDENED),
    "opt": (OUT, "fc1 fc2"),
    "bloom": (FUSED, WIDENED),
    "mpt": ("Wqkv out_proj", "up_proj down_proj"),
    "mamba": ("", ""),
}


def named(config: PretrainedConfig) -> ModelSpec:
    return model_spec.from_config(config)


def by_role(layers: tuple[LayerSpec, ...]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for layer in layers:
        found[layer.role].append(layer.name.rsplit(".", 1)[-1])
    return found


def oss() -> GptOssConfig:
    """Build a gpt-oss config. gpt-oss stores experts as [experts, inputs, outputs], with biases, partly in float32."""
    shape = FAMILIES["mixtral"]().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return GptOssConfig(**{key: shape[key] for key in keys}, num_local_experts=4, head_dim=8, pad_token_id=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_of_every_family_are_found_by_their_place(family: str) -> None:
    attention, mlp = (sorted(text.split() * LAYERS) for text in PROJECTIONS[family])
    found = by_role(named(FAMILIES[family]()).layers)
    assert sorted(found["attention"]) == attention
    assert sorted(found["mlp"]) == mlp
    assert len(found["head"]) == 1
    assert found["embedding"]
    assert family == "mamba" or found["other"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_equals_the_model_with_weights(family: str) -> None:
    model = make(family, vocab_size=VOCABULARY + 32)
    made = named(FAMILIES[family](vocab_size=VOCABULARY + 32))
    assert made.embedding_rows == model.get_input_embeddings().num_embeddings == VOCABULARY + 32
    assert made.layers == model_spec.list_layers(model)
    assert made.others == model_spec.describe(model).others
    assert made.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert made.tied_head == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert made.class_name == type(model).__name__
    assert made.is_causal


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "opt"])
def test_layers_of_a_4_bit_model_equal_its_spec(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    model = type(make(family)).from_pretrained(
        tmp_path, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    assert any(getattr(parameter, "quant_state", None) for parameter in model.parameters())
    assert model_spec.list_layers(model) == model_spec.load(tmp_path).layers


def test_shapes_are_inputs_and_outputs_of_the_product_in_any_layout_of_weights() -> None:
    gpt2 = {layer.name: layer for layer in named(FAMILIES["gpt2"]()).layers}
    assert gpt2["transformer.h.0.mlp.c_fc"] == LayerSpec(
        "transformer.h.0.mlp.c_fc", "conv1d", "mlp", HIDDEN, 4 * HIDDEN, 1, bias=True
    )
    mixtral = {layer.name: layer for layer in named(FAMILIES["mixtral"]()).layers}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert mixtral[name] == LayerSpec(name, "experts", "mlp", HIDDEN, 2 * INNER, 4, bias=False)
    found = {layer.name: layer for layer in named(oss()).layers}
    assert found[name] == LayerSpec(name, "experts", "mlp", HIDDEN, 2 * INNER, 4, bias=True)


def test_routers_and_gates_of_experts_are_in_no_group() -> None:
    llama = FAMILIES["llama"]().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = Qwen2MoeConfig(**{key: llama[key] for key in keys}, num_key_value_heads=2, num_experts=4)
    found = by_role(named(config).layers)
    assert found["router"] == ["shared_expert_gate"] * LAYERS
    assert set(found["mlp"]) == {"gate_up_proj", "down_proj", "gate_proj", "up_proj"}


def test_vision_towers_of_multimodal_models_are_in_no_group() -> None:
    text = FAMILIES["gemma3"]().to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = named(Gemma3Config(text_config=text, vision_config=vision))
    towers = [layer for layer in made.layers if "vision" in layer.name and layer.kind == "linear"]
    assert towers
    assert {layer.role for layer in towers} == {"other"}
    found = by_role(made.layers)
    assert sorted(found["attention"]) == sorted(ATTENTION.split() * LAYERS)
    assert sorted(found["mlp"]) == sorted(GATED.split() * LAYERS)
    assert made.embedding_rows == VOCABULARY, "its config has the number in the part for text only"


def test_a_directory_and_a_config_file_give_the_same_spec(tmp_path: Path) -> None:
    model = tmp_path / "a model"
    FAMILIES["qwen2"]().save_pretrained(model)
    bare = tmp_path / "falcon.json"  # the file name has no effect
    bare.write_bytes((model / "config.json").read_bytes())
    from_directory, from_file = model_spec.load(model), model_spec.load(bare)
    assert from_directory.layers == from_file.layers == named(FAMILIES["qwen2"]()).layers
    assert from_directory.class_name == from_file.class_name == "Qwen2ForCausalLM"


def test_a_model_of_it_is_on_meta_in_the_types_that_loading_gives() -> None:
    made = named(FAMILIES["llama"]())
    model = made.model(torch.bfloat16, "eager")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert not model.config.use_cache
    assert made.config.dtype == torch.float32, "the config of the spec is unchanged"


def test_parameters_that_transformers_keeps_in_float32_are_so_on_meta(tmp_path: Path) -> None:
    config = oss()
    model = named(config).model(torch.float16)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    real = type(model)(config)
    real.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    assert types == {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert set(types.values()) == {torch.float16, torch.float32}


def test_an_encoder_decoder_is_detected_and_training_refused(tmp_path: Path) -> None:
    T5().save_pretrained(tmp_path)
    made = model_spec.load(tmp_path)
    assert not made.is_causal
    found = by_role(made.layers)
    assert sorted(found["attention"]) == sorted(["q", "k", "v", "o"] * 3 * LAYERS)
    assert sorted(found["mlp"]) == sorted(["wi", "wo"] * 2 * LAYERS)
    with pytest.raises(BaseModelError, match=r"T5ForConditionalGeneration \(t5\) is an encoder-decoder.*causal"):
        made.require_causal()


def test_an_encoder_is_not_causal_unless_it_is_a_decoder() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with pytest.raises(BaseModelError, match=r"BertLMHeadModel \(bert\) is not a decoder"):
        named(BertConfig(**shape)).require_causal()
    named(BertConfig(**shape, is_decoder=True)).require_causal()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "model_type is missing"),
        ('{"hidden_size": 8}', "model_type is missing"),
        ('{"model_type": "novel-9"}', "does not know model_type novel-9; install a newer transformers"),
        (
            '{"model_type": "novel-9", "auto_map": {"AutoConfig": "code.Config"}}',
            "set base.trust_remote_code to the value of base.source to run the model's own code",
        ),
        ('{"model_type": "vit", "architectures": ["ViTModel"]}', r"vit \(ViTModel\) is not a causal language model"),
        (WhisperConfig().to_json_string(), "Whisper|whisper"),
        ('{"model_type": "llama", "hidden_size": "big"}', "transformers (cannot read it|builds no model of it)"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "transformers (cannot read it|builds no model of it)"),
    ],
    ids=["cut-short", "list", "no-type", "unknown", "own-code", "not-causal", "speech", "wrong-type", "no-heads"],
)
def test_a_bad_config_is_one_message_that_names_the_file(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(BaseModelError, match=said) as refused:
        model_spec.load(tmp_path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_file_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"config\.json: no such file; expected a model directory"):
        model_spec.load(tmp_path)
    with pytest.raises(BaseModelError, match="no such file"):
        model_spec.load(tmp_path / "none.json")
