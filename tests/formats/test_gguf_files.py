"""The file itself: what is in it, byte for byte, and what is refused while it is written."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import load_file, save_file

import gguf_models
from ratchet import files
from ratchet.config_export import PlainType
from ratchet.errors import BaseModelError
from ratchet.formats import gguf, gguf_tensors
from ratchet.runtimes import llama

Q = GGMLQuantizationType
TYPES: list[PlainType] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = gguf_models.make("llama", seed=1, vocab_size=gguf_models.ROWS)
    return gguf_models.save(model, gguf_models.byte_level(), tmp_path_factory.mktemp("hf"))


def written(directory: Path, folder: Path, type_: PlainType = "f32") -> Path:
    gguf.write(directory, folder / "model.gguf", type_, gguf_models.nothing)
    return folder / "model.gguf"


def tensors(file: Path) -> dict[str, Any]:
    return {one.name: one for one in GGUFReader(file).tensors}


@pytest.mark.parametrize("type_", TYPES)
def test_every_type_holds_what_its_quantiser_makes_of_the_weights(
    type_: PlainType, directory: Path, tmp_path: Path
) -> None:
    file = written(directory, tmp_path, type_)
    found, weights = tensors(file), load_file(directory / "model.safetensors")
    wanted = gguf_tensors.TYPES[type_][0]
    down = found["blk.1.ffn_down.weight"]
    assert down.tensor_type == wanted
    due = quants.dequantize(quants.quantize(weights["model.layers.1.mlp.down_proj.weight"].numpy(), wanted), wanted)
    assert np.array_equal(quants.dequantize(down.data, down.tensor_type), due)
    norm = found["blk.0.attn_norm.weight"]
    assert norm.tensor_type == Q.F32
    assert np.array_equal(norm.data, weights["model.layers.0.input_layernorm.weight"].numpy())
    assert found["output.weight"].tensor_type == (wanted if wanted in (Q.F32, Q.F16, Q.BF16) else Q.Q8_0)
    assert found["token_embd.weight"].tensor_type == wanted
    with llama.opened(file, 1, 64) as runtime:
        assert np.isfinite(runtime.log_probabilities([5, 6], [1])).all()


def test_a_tied_embedding_is_the_head_and_as_exact(tmp_path: Path) -> None:
    model = gguf_models.make("llama-tied", vocab_size=gguf_models.ROWS)
    directory = gguf_models.save(model, gguf_models.byte_level(), tmp_path / "hf")
    notes = gguf.write(directory, tmp_path / "model.gguf", "q4_0", gguf_models.nothing)
    found = tensors(tmp_path / "model.gguf")
    assert "output.weight" not in found
    assert found["token_embd.weight"].tensor_type == Q.Q8_0
    assert notes == ("Q8_0 in the place of Q4_0: token_embd.weight",)


def test_rows_that_blocks_do_not_divide_are_f16_and_said_to_be(tmp_path: Path) -> None:
    model = gguf_models.make("llama", vocab_size=gguf_models.ROWS, intermediate_size=80)
    directory = gguf_models.save(model, gguf_models.byte_level(), tmp_path / "hf")
    notes = gguf.write(directory, tmp_path / "model.gguf", "q8_0", gguf_models.nothing)
    found = tensors(tmp_path / "model.gguf")
    assert found["blk.0.ffn_down.weight"].tensor_type == Q.F16
    assert found["blk.0.ffn_up.weight"].tensor_type == Q.Q8_0
    assert notes == ("F16 in the place of Q8_0: blk.0.ffn_down.weight, blk.1.ffn_down.weight",)


@pytest.mark.parametrize("type_", ["tq1_0", "tq2_0"])
def test_ternary_files_keep_embedding_and_head_in_f16(type_: PlainType, tmp_path: Path) -> None:
    model = gguf_models.make("llama", vocab_size=gguf_models.ROWS, hidden_size=256, intermediate_size=256)
    directory = gguf_models.save(model, gguf_models.byte_level(), tmp_path / "hf")
    gguf.require(directory, [type_], None)
    found = tensors(written(directory, tmp_path, type_))
    assert found["blk.0.ffn_up.weight"].tensor_type == gguf_tensors.TYPES[type_][0]
    assert found["token_embd.weight"].tensor_type == found["output.weight"].tensor_type == Q.F16


def test_queries_and_keys_change_places_and_nothing_else() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four: halves (0 1 | 2 3), (4 5 | 6 7)
    assert gguf_tensors.neighbours(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("type_", ["f32", "q5_1"])
def test_equal_directories_give_equal_bytes_however_they_are_divided(
    type_: PlainType, directory: Path, tmp_path: Path
) -> None:
    sharded = tmp_path / "elsewhere"
    model = gguf_models.make("llama", seed=1, vocab_size=gguf_models.ROWS)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(sharded, max_shard_size="100KB")
    gguf_models.byte_level().save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, other = written(directory, tmp_path / "a", type_), written(sharded, tmp_path / "b", type_)
    assert one.read_bytes() == other.read_bytes()
    assert str(tmp_path).encode() not in one.read_bytes()


def test_pieces_change_no_byte(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(directory, tmp_path, "q8_0").read_bytes()
    monkeypatch.setattr(gguf_tensors, "AT_ONCE_BYTES", 9000)  # 35 rows of 64 numbers; whole heads are 16
    assert written(directory, tmp_path, "q8_0").read_bytes() == whole


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tensors, "AT_ONCE_BYTES", 2**18)
    peaks = []
    for layers in (2, 8):
        folder = tmp_path / str(layers)
        model = gguf_models.make("llama", vocab_size=gguf_models.ROWS, num_hidden_layers=layers, hidden_size=256)
        directory = gguf_models.save(model, gguf_models.byte_level(), folder / "hf")
        tracemalloc.start()
        size = written(directory, folder).stat().st_size
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**18
    assert size > 4 * peaks[1]


def test_the_size_is_known_before_and_progress_reaches_it(directory: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    for type_ in ("f32", "q4_1"):
        file = tmp_path / f"{type_}.gguf"
        gguf.write(directory, file, type_, lambda *what: told.append(what))
        assert file.stat().st_size == gguf.size_bytes(directory, type_)
        assert told[-1] == (f"gguf {type_}", file.stat().st_size, file.stat().st_size)
    assert [done for _, done, _ in told if _ == told[0][2]] == sorted(done for _, done, _ in told if _ == told[0][2])


def test_facts_come_from_the_model_card(directory: Path, tmp_path: Path) -> None:
    front = ['license: "other"', 'license_name: "Ours \\"v1\\""', 'base_model: "org/base-1b"', 'tags: ["lora"]']
    card = "\n".join(["---", *front, "---", "", "# base-1b, fine-tuned", ""])
    try:
        (directory / "README.md").write_text(card)
        fields = GGUFReader(written(directory, tmp_path, "q8_0")).fields
    finally:
        (directory / "README.md").unlink()
    facts = {name: field.contents() for name, field in fields.items() if name.startswith("general.")}
    assert facts == {
        "general.architecture": "llama", "general.type": "model", "general.name": "base-1b, fine-tuned",
        "general.license": "other", "general.license.name": 'Ours "v1"', "general.base_model.count": 1,
        "general.base_model.0.name": "base-1b", "general.base_model.0.repo_url": "https://huggingface.co/org/base-1b",
        "general.file_type": 7, "general.quantization_version": 2,
    }  # fmt: skip


def spoiled(directory: Path, tmp_path: Path, change: Any) -> Path:
    """A copy whose weights were changed."""
    copy = tmp_path / "spoiled"
    copy.mkdir()
    for one in directory.iterdir():
        (copy / one.name).write_bytes(one.read_bytes())
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def refused(directory: Path, tmp_path: Path, change: Any, message: str, type_: PlainType = "f16") -> None:
    with pytest.raises(BaseModelError, match=message):
        written(spoiled(directory, tmp_path, change), tmp_path, type_)


UP = "model.layers.1.mlp.up_proj.weight"


def test_a_missing_tensor_is_named(directory: Path, tmp_path: Path) -> None:
    refused(directory, tmp_path, lambda weights: weights.pop(UP), r"blk\.1\.ffn_up\.weight is missing")


def test_a_missing_head_is_named(directory: Path, tmp_path: Path) -> None:
    refused(directory, tmp_path, lambda weights: weights.pop("lm_head.weight"), r"output\.weight is missing")


def test_a_tensor_that_llama_cpp_does_not_know_is_named(directory: Path, tmp_path: Path) -> None:
    def more(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)

    refused(directory, tmp_path, more, r"self_attn\.sinks: llama\.cpp knows no such tensor in a Llama")


def test_a_layer_too_many_is_refused(directory: Path, tmp_path: Path) -> None:
    def more(weights: dict[str, torch.Tensor]) -> None:
        weights |= {name.replace("layers.1", "layers.2"): one.clone() for name, one in weights.items()}

    refused(directory, tmp_path, more, r"layers\.2\..*in a Llama of 2 layers")


def test_another_shape_than_the_configs_is_refused(directory: Path, tmp_path: Path) -> None:
    def shorter(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"] = torch.zeros(600, 64)

    refused(directory, tmp_path, shorter, "the embedding is 600 x 64, config.json says 640 x 64")


@pytest.mark.parametrize("type_", ["f32", "q8_0"])
def test_numbers_that_are_none_are_refused(type_: PlainType, directory: Path, tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[UP][3, 5] = float("nan")

    refused(directory, tmp_path, spoil, rf"{UP} holds NaN or infinity", type_)


def test_numbers_beyond_f16_are_refused_where_they_would_be_infinite(directory: Path, tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[UP][3, 5] = 70000.0

    refused(directory, tmp_path, spoil, r"holds 70000, and F16 ends at 65504; take bf16 or f32 in export\.gguf\.types")
    assert written(tmp_path / "spoiled", tmp_path, "bf16").exists()


def test_a_file_cut_short_is_refused(directory: Path, tmp_path: Path) -> None:
    copy = spoiled(directory, tmp_path, lambda weights: None)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(BaseModelError, match=r"model\.safetensors: damaged or cut short"):
        written(copy, tmp_path)


def test_a_full_disk_leaves_no_file_behind(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that is sealed, as the export does it."""
    count = 0

    def full(operation: str, path: Path) -> None:
        nonlocal count
        count += path.suffix == ".gguf"
        if operation == "write" and count > 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "before", full)
    with (
        pytest.raises(OSError, match="No space left"),
        files.sealed_directory(tmp_path / "export", "export") as scratch,
    ):
        written(directory, scratch)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_weights_stay_what_they_are(tmp_path: Path) -> None:
    model = gguf_models.make("llama", vocab_size=gguf_models.ROWS, dtype=torch.bfloat16)
    directory = gguf_models.save(model, gguf_models.byte_level(), tmp_path / "hf")
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    found = tensors(written(directory, tmp_path, "bf16"))["blk.0.ffn_up.weight"]
    due = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(quants.dequantize(found.data, found.tensor_type), due.float().numpy())
