"""Tests calculated bytes and parameters against models that were really loaded and adapted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig, LlamaConfig, PretrainedConfig

from families import FAMILIES, HIDDEN, INNER, LAYERS, make
from ratchet.config.train import AdaLoraSettings, Train
from ratchet.errors import SettingsError
from ratchet.models import adapters, loading, model_spec
from ratchet.models.memory import parameters
from ratchet.models.memory.parameters import BaseTensorSizes

ADAPTABLE = [family for family in FAMILIES if family != "mamba"]
Saved = Callable[[str], Path]


def loaded(path: Path, settings: Train) -> Any:
    """Load the model as training does."""
    return loading.load(path, None, settings, torch.device("cpu"))


def measured(model: Any) -> tuple[int, int, int]:
    """Return the bytes of 4-bit weights, of their quantization constants, and of other tensors, by their storage."""
    quantized, constants, plain = {}, {}, {}
    for tensor in (*model.parameters(), *model.buffers()):
        state = getattr(tensor, "quant_state", None)
        (plain if state is None else quantized)[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        holders = [] if state is None else [state, *([state.state2] if state.nested else [])]
        parts = [part for holder in holders for part in vars(holder).values() if isinstance(part, torch.Tensor)]
        constants |= {part.data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(quantized.values()), sum(constants.values()), sum(plain.values())


def figures(stored: BaseTensorSizes) -> tuple[int, int, int]:
    return stored.quantized_bytes, stored.constants_bytes, stored.plain_bytes


@pytest.mark.parametrize("family", ADAPTABLE)  # mamba does not compute in 4 bits and is refused
def test_bytes_are_those_of_a_really_quantised_model(family: str, saved_family: Saved) -> None:
    settings = Train(quantization="nf4", double_quantization=True, compute_dtype="bfloat16")
    model = loaded(saved_family(family), settings)
    stored = parameters.estimate_base_sizes(model_spec.load(saved_family(family)), settings, compute_bytes=2)
    assert figures(stored) == measured(model)
    quantised = [name for name, module in model.named_modules() if type(module).__name__ == "TiledLinear4bit"]
    assert list(stored.quantized_modules) == quantised


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("held_in", ["uint8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_bytes_are_exact_for_every_kind_and_storage_type(
    family: str, held_in: Any, kind: Any, double: bool, saved_family: Saved
) -> None:
    settings = Train(
        quantization=kind, quantization_storage=held_in, double_quantization=double, compute_dtype="float32"
    )
    stored = parameters.estimate_base_sizes(model_spec.load(saved_family(family)), settings, compute_bytes=4)
    assert figures(stored) == measured(loaded(saved_family(family), settings))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-j", "mixtral", "mamba"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_without_quantisation(family: str, dtype: Any, saved_family: Saved) -> None:
    settings = Train(quantization="none", compute_dtype=dtype)
    stored = parameters.estimate_base_sizes(
        model_spec.load(saved_family(family)), settings, getattr(torch, dtype).itemsize
    )
    assert figures(stored) == measured(loaded(saved_family(family), settings))
    assert stored.quantized_bytes == stored.constants_bytes == 0
    assert stored.quantized_modules == stored.unquantized_layers == ()


@pytest.mark.parametrize(("inputs", "outputs"), [(33, 7), (5, 3), (130, 66), (257, 257)])
@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_odd_shapes_are_padded_as_bitsandbytes_pads_them(inputs: int, outputs: int, double: bool) -> None:
    """The cases are partial blocks of 64, a byte with one element, and more constants than one block of 256."""
    from bitsandbytes.nn import Linear4bit

    class Odd(torch.nn.Module):
        _keep_in_fp32_modules = None
        all_tied_weights_keys: dict[str, str] = {}  # noqa: RUF012 (as in transformers)

        def __init__(self, made: Any) -> None:
            super().__init__()
            self.config = PretrainedConfig()
            self.layer = made(inputs, outputs, bias=False)
            self.norm = torch.nn.LayerNorm(3)

        def get_output_embeddings(self) -> None:
            return None

    settings = Train(quantization="nf4", double_quantization=double)
    real = Odd(lambda *shape, bias: Linear4bit(*shape, bias, compress_statistics=double, quant_type="nf4")).to("cpu")
    with torch.device("meta"):
        assert figures(parameters.measure_base_sizes(Odd(torch.nn.Linear), settings)) == measured(real)


def test_a_matrix_that_the_storage_type_cannot_hold_is_refused() -> None:
    made = model_spec.from_config(FAMILIES["llama"](intermediate_size=47, hidden_size=36, num_attention_heads=6))
    assert parameters.estimate_base_sizes(made, Train(quantization_storage="bfloat16"), compute_bytes=4)
    with pytest.raises(SettingsError, match=r"quantization_storage: float32: .*gate_proj has 846 bytes in 4 bits"):
        parameters.estimate_base_sizes(made, Train(quantization_storage="float32"), compute_bytes=4)


def test_a_4_bit_checkpoint_names_its_unquantized_modules(saved_family: Saved, tmp_path: Path) -> None:
    settings = Train(quantization_storage="bfloat16", compute_dtype="float32")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "down_proj"],
    )
    made = AutoModelForCausalLM.from_pretrained(
        saved_family("llama"), dtype=torch.float32, device_map={"": "cpu"}, quantization_config=quantization
    )
    made.save_pretrained(tmp_path)
    model = loaded(tmp_path, settings)
    stored = parameters.estimate_base_sizes(model_spec.load(tmp_path), settings, compute_bytes=4)
    assert figures(stored) == measured(model)
    assert {name.rsplit(".", 1)[-1] for name in stored.unquantized_layers} == {"down_proj"}


def test_what_transformers_leaves_plain_is_named(saved_family: Saved) -> None:
    def plain(family: str) -> set[str]:
        made = parameters.estimate_base_sizes(model_spec.load(saved_family(family)), Train(), compute_bytes=2)
        return {name.rsplit(".", 1)[-1] for name in made.unquantized_layers}

    assert plain("llama") == plain("gpt2") == set()
    assert plain("mixtral") == {"gate_up_proj", "down_proj"}
    assert plain("falcon") == set()


def test_layers_that_a_family_keeps_in_float32_stay_so(tmp_path: Path) -> None:
    llama = FAMILIES["llama"]().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = GptOssConfig(
        **{key: llama[key] for key in keys}, num_local_experts=4, head_dim=16, pad_token_id=0, num_key_value_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for name in ("bfloat16", "float16"):
        settings = Train(compute_dtype=name)
        stored = parameters.estimate_base_sizes(model_spec.load(tmp_path), settings, compute_bytes=2)
        assert figures(stored) == measured(loaded(tmp_path, settings)), name


def test_largest_tensors_and_blocks_of_the_allocator(saved_family: Saved) -> None:
    made = model_spec.load(saved_family("llama-tied"))
    stored = parameters.estimate_base_sizes(made, Train(), compute_bytes=4)
    assert stored.largest_source_bytes == INNER * HIDDEN * 4  # before it is packed
    wide = parameters.estimate_base_sizes(
        model_spec.from_config(FAMILIES["llama"](intermediate_size=4096)), Train(), compute_bytes=4
    )
    assert wide.largest_source_bytes == 4096 * HIDDEN * 4
    assert stored.total_bytes == sum(figures(stored)) == stored.allocated_bytes(1)
    model = loaded(saved_family("llama-tied"), Train(compute_dtype="float32"))
    blocks = [-(-tensor.nbytes // 512) * 512 for tensor in parameters.list_unique_tensors(model)]
    assert stored.allocated_bytes(512) == sum(blocks)
    assert sum(tensor.nbytes for tensor in parameters.list_unique_tensors(model)) == sum(measured(model))


def counted(family: str, settings: Train, new_tokens: Sequence[int] = ()) -> int:
    """Return the number of trainable parameters; check it with a model that has the adapter."""
    model = adapters.attach(make(family), settings, "digest", new_tokens)
    made = model_spec.from_config(FAMILIES[family]())
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert parameters.count_trainable_parameters(made, settings, len(new_tokens)) == learning
    total = sum(parameter.numel() for parameter in model.parameters())
    assert parameters.count_total_parameters(made, settings, len(new_tokens)) == total
    return learning


@pytest.mark.parametrize(
    ("family", "group"), [*((one, "all") for one in ADAPTABLE), ("llama", "attention"), ("mixtral", "mlp")]
)
def test_parameters_of_lora_are_those_of_an_attached_model(family: str, group: str) -> None:
    counted(family, Train(rank=3, target_modules=group))


DENSE = [family for family in ADAPTABLE if family not in ("mixtral", "qwen3-moe")]


@pytest.mark.parametrize("adapter", ["dora", "adalora"])
@pytest.mark.parametrize("family", DENSE)
def test_parameters_of_dora_and_adalora_are_those_of_an_attached_model(family: str, adapter: Any) -> None:
    counted(family, Train(rank=3, adapter=adapter, adalora=AdaLoraSettings(target_rank=2)))


def test_parameters_with_patterns_and_named_embeddings() -> None:
    counted("llama", Train(rank=3, rank_pattern={"q_proj": 5, "layers.0.mlp.up_proj": 7}))
    counted("gpt-j", Train(rank=2, target_modules=("wte", "lm_head", "fc_in")))


@pytest.mark.parametrize(("family", "matrices"), [("llama", 2), ("llama-tied", 1)])
def test_rows_of_new_tokens_learn_in_embedding_and_head(family: str, matrices: int) -> None:
    learning = counted(family, Train(rank=2, target_modules=("q_proj",)), [90, 91, 95])
    assert learning == 2 * LAYERS * 2 * HIDDEN + matrices * 3 * HIDDEN


def test_llama_2_7b_with_the_published_figures() -> None:
    # The values are from config.json of meta-llama/Llama-2-7b-hf.
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    )
    made = model_spec.from_config(config)
    settings = Train(rank=16, target_modules=("q_proj", "v_proj"))
    assert parameters.count_trainable_parameters(made, settings) == 8_388_608
    assert parameters.count_total_parameters(made, settings) == 6_746_804_224
    stored = parameters.estimate_base_sizes(made, settings, compute_bytes=2)
    in_4_bits = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert stored.quantized_bytes == in_4_bits // 2
    # Dettmers et al. 2023, section 3: 0.127 bits per parameter for constants, 8/64 + 32/(64 * 256). The table of codes
    # comes on top.
    constants_bits = stored.constants_bytes * 8 / in_4_bits
    assert constants_bits == pytest.approx(0.127, abs=5e-4)
    assert stored.plain_bytes == 2 * (2 * 32000 * 4096 + 65 * 4096) + 2 * 64 * 4
