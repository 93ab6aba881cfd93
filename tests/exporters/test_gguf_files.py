"""Tests GGUF files: their bytes, and refusals during writing."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import load_file, save_file

import gguf_models
from ratchet.config.export import BuiltInGgufType
from ratchet.errors import BaseModelError
from ratchet.exporters.gguf import writer
from ratchet.exporters.gguf import writer as gguf_tensors
from ratchet.models.runtimes import llama_server
from ratchet.storage import files

Q = GGMLQuantizationType
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
TYPES: list[BuiltInGgufType] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("hf"), seed=1)


def made(folder: Path, family: str = "llama", **changes: Any) -> Path:
    model = gguf_models.make(family, vocab_size=gguf_models.ROWS, **changes)
    return gguf_models.save(model, gguf_models.byte_level(), folder)


def written(directory: Path, folder: Path, type_: BuiltInGgufType = "f32") -> Path:
    writer.write_gguf(directory, folder / "model.gguf", type_, gguf_models.nothing)
    return folder / "model.gguf"


def tensors(file: Path) -> dict[str, Any]:
    return {one.name: one for one in GGUFReader(file).tensors}


@pytest.mark.parametrize("type_", TYPES)
def test_every_type_contains_the_quantized_weights(type_: BuiltInGgufType, directory: Path, tmp_path: Path) -> None:
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
    with llama_server.open_runtime(file, 1, 64) as runtime:
        assert np.isfinite(runtime.log_probabilities([5, 6], [1])).all()


WIDE = {"hidden_size": 256, "intermediate_size": 256}


@pytest.mark.parametrize(
    ("family", "changes", "type_", "types", "notes"),
    [
        ("llama-tied", {}, "q4_0", {HEAD: None, EMBEDDING: Q.Q8_0}, ("Q8_0 instead of Q4_0: " + EMBEDDING,)),
        (
            "llama", {"intermediate_size": 80}, "q8_0", {"blk.0.ffn_down.weight": Q.F16, "blk.0.ffn_up.weight": Q.Q8_0},
            ("F16 instead of Q8_0: blk.0.ffn_down.weight, blk.1.ffn_down.weight",),
        ),
        ("llama", WIDE, "tq1_0", {"blk.0.ffn_up.weight": Q.TQ1_0, EMBEDDING: Q.F16, HEAD: Q.F16}, None),
        ("llama", WIDE, "tq2_0", {"blk.0.ffn_up.weight": Q.TQ2_0, EMBEDDING: Q.F16, HEAD: Q.F16}, None),
    ],
    ids=["tied head", "rows that blocks do not divide", "tq1_0", "tq2_0"],
)  # fmt: skip
def test_tensors_that_do_not_fit_a_type_have_another(
    family: str, changes: dict[str, Any], type_: BuiltInGgufType, types: dict[str, Any], notes: Any, tmp_path: Path
) -> None:
    directory = made(tmp_path / "hf", family, **changes)
    writer.require_exportable(directory, [type_], False)
    told = writer.write_gguf(directory, tmp_path / "model.gguf", type_, gguf_models.nothing)
    found = tensors(tmp_path / "model.gguf")
    assert {name: found[name].tensor_type if name in found else None for name in types} == types
    assert notes is None or told == notes


def test_only_queries_and_keys_are_reordered() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four rows with the halves (0 1 | 2 3) and (4 5 | 6 7)
    assert gguf_tensors.interleave_halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("type_", ["f32", "q5_1"])
def test_equal_directories_give_equal_bytes_for_any_shards(
    type_: BuiltInGgufType, directory: Path, tmp_path: Path
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


def test_the_chunk_size_changes_no_byte(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(directory, tmp_path, "q8_0").read_bytes()
    monkeypatch.setattr(gguf_tensors, "CHUNK_BYTES", 9000)  # 35 rows of 64 numbers; a head has 16 rows
    assert written(directory, tmp_path, "q8_0").read_bytes() == whole


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tensors, "CHUNK_BYTES", 2**18)
    peaks = []
    for layers in (2, 8):
        folder = tmp_path / str(layers)
        directory = made(folder / "hf", num_hidden_layers=layers, hidden_size=256)
        tracemalloc.start()
        size = written(directory, folder).stat().st_size
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**18
    assert size > 4 * peaks[1]


def test_progress_reaches_the_size(directory: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    for type_ in ("f32", "q4_1"):
        file = tmp_path / f"{type_}.gguf"
        writer.write_gguf(directory, file, type_, lambda *what: told.append(what))
        assert told[-1] == (f"gguf {type_}", file.stat().st_size, file.stat().st_size)
    assert [done for _, done, _ in told if _ == told[0][2]] == sorted(done for _, done, _ in told if _ == told[0][2])


def test_facts_come_from_the_model_card(directory: Path, tmp_path: Path) -> None:
    front = ['license: "other"', 'license_name: "Ours \\"v1\\""', 'base_model: "org/base-1b"', 'tags: ["lora"]']
    own = Path(shutil.copytree(directory, tmp_path / "own"))
    (own / "README.md").write_text("\n".join(["---", *front, "---", "", "# base-1b, fine-tuned", ""]))
    fields = GGUFReader(written(own, tmp_path, "q8_0")).fields
    facts = {name: field.contents() for name, field in fields.items() if name.startswith("general.")}
    assert facts == {
        "general.architecture": "llama", "general.type": "model", "general.name": "base-1b, fine-tuned",
        "general.license": "other", "general.license.name": 'Ours "v1"', "general.base_model.count": 1,
        "general.base_model.0.name": "base-1b", "general.base_model.0.repo_url": "https://huggingface.co/org/base-1b",
        "general.file_type": 7, "general.quantization_version": 2,
    }  # fmt: skip


def spoiled(directory: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Return a copy of the directory with changed weights."""
    copy = Path(shutil.copytree(directory, tmp_path / "spoiled"))
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


UP = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[dict[str, torch.Tensor]], Any]


def number(value: float) -> Change:
    return lambda weights: weights[UP][3, 5].fill_(value)


def a_layer_more(weights: dict[str, torch.Tensor]) -> None:
    weights |= {name.replace("layers.1", "layers.2"): one.clone() for name, one in weights.items()}


@pytest.mark.parametrize(
    ("change", "type_", "message"),
    [
        (lambda weights: weights.pop(UP), "f16", r"lack blk\.1\.ffn_up\.weight;"),
        (lambda weights: weights.pop("lm_head.weight"), "f16", r"lack output\.weight;"),
        (
            lambda weights: weights.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}), "f16",
            r"self_attn\.sinks, which llama\.cpp does not have in a Llama",
        ),
        (a_layer_more, "f16", r"layers\.2\..*in a Llama with 2 layers"),
        (
            lambda weights: weights.update({"model.embed_tokens.weight": torch.zeros(600, 64)}), "f16",
            "found an embedding of 600 x 64; config.json has 640 x 64",
        ),
        (number(float("nan")), "f32", rf"{UP} contains NaN or infinity"),
        (number(float("nan")), "q8_0", rf"{UP} contains NaN or infinity"),
    ],
    ids=["missing tensor", "missing head", "unknown tensor", "a layer more", "other shape", "NaN", "NaN, quantised"],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name(
    change: Change, type_: BuiltInGgufType, message: str, directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(BaseModelError, match=message):
        written(spoiled(directory, tmp_path, change), tmp_path, type_)


def test_numbers_beyond_f16_are_refused_where_they_would_be_infinite(directory: Path, tmp_path: Path) -> None:
    large = spoiled(directory, tmp_path, number(70000.0))
    with pytest.raises(
        BaseModelError, match=r"contains 70000, but the F16 maximum is 65504; use bf16 or f32 in export\.gguf"
    ):
        written(large, tmp_path, "f16")
    assert written(large, tmp_path, "bf16").exists()


def test_a_truncated_file_is_refused(directory: Path, tmp_path: Path) -> None:
    copy = spoiled(directory, tmp_path, lambda weights: None)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(BaseModelError, match=r"model\.safetensors: damaged or truncated"):
        written(copy, tmp_path)


def test_a_full_disk_leaves_no_file_behind(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written in a folder that is sealed, as in the export."""
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


def test_bfloat16_weights_are_unchanged(tmp_path: Path) -> None:
    directory = made(tmp_path / "hf", dtype=torch.bfloat16)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    found = tensors(written(directory, tmp_path, "bf16"))["blk.0.ffn_up.weight"]
    due = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(quants.dequantize(found.data, found.tensor_type), due.float().numpy())
