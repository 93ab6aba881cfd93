"""Tests loading of weights: completeness, shapes, memory use, and that no code runs."""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import families
from ratchet.config.train import Train
from ratchet.errors import BaseModelError
from ratchet.models import base_model, loading, model_spec, weights

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 17, 5, 90, 41]])
PROJECTION = "model.layers.1.mlp.up_proj.weight"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
        return found


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    families.make("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / base_model.WEIGHTS)
    change(tensors)
    save_file(tensors, directory / base_model.WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: [tensors.pop(name) for name in (PROJECTION, "model.norm.weight")],
            r" is in none of the files \(and 1 more\)",
        ),
        (
            lambda tensors: tensors.update({PROJECTION: torch.ones(40, 32)}),
            ": found 40 x 32, but config.json expects 128 x 64",
        ),
    ],
    ids=["missing", "shape"],
)
def test_a_weight_that_is_missing_or_of_another_shape_is_named(llama: Path, change: Any, said: str) -> None:
    rewrite(llama, change)
    for quantization in ("nf4", "none"):
        with pytest.raises(BaseModelError, match=re.escape(PROJECTION) + said):
            loading.load(llama, None, Train(quantization=quantization), CPU)
    with pytest.raises(BaseModelError, match=re.escape(PROJECTION) + said):
        loading.load_plain(llama, torch.float32, CPU)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_shape_of_a_weight_in_4_bits_is_checked_too(tmp_path: Path, family: str) -> None:
    families.make(family).save_pretrained(tmp_path / "plain")
    loading.load(tmp_path / "plain", None, Train(), CPU).save_pretrained(tmp_path / "stored")
    config = json.loads((tmp_path / "stored" / "config.json").read_text())
    wider = {"n_inner": 72} if family == "gpt2" else {"intermediate_size": 72}
    (tmp_path / "stored" / "config.json").write_text(json.dumps(config | wider))
    with pytest.raises(BaseModelError, match=r"mlp\.\w+\.(weight|bias): found .*, but config\.json expects "):
        loading.load(tmp_path / "stored", None, Train(), CPU)


def test_weights_that_the_model_does_not_have_are_named(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.update({"model.layers.2.self_attn.q_proj.weight": torch.ones(2)}))
    unused = weights.check_stored_tensors(llama, model_spec.load(llama), None)
    assert unused == ("model.layers.2.self_attn.q_proj.weight",)


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_no_family_lacks_anything_of_what_it_saved(tmp_path: Path, family: str) -> None:
    families.make(family).save_pretrained(tmp_path)
    assert weights.check_stored_tensors(tmp_path, model_spec.load(tmp_path), None) == ()


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3-moe", "gemma2"])
def test_loaded_is_what_transformers_loads(tmp_path: Path, family: str) -> None:
    families.make(family).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(base_model.list_weight_files(tmp_path)) > 1
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = loading.load_plain(tmp_path, torch.float32, CPU)
    assert torch.equal(logits(loaded), logits(expected))
    assert loaded.generation_config == expected.generation_config


def test_files_next_to_the_weights_are_not_loaded(llama: Path) -> None:
    """transformers would load the adapter that an adapter_config.json names, but no digest covers it."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(llama), "r": 2, "target_modules": ["q_proj"]}
    (llama / "adapter_config.json").write_text(json.dumps(adapter))
    assert torch.equal(logits(loading.load_plain(llama, torch.float32, CPU)), logits(families.make("llama")))


def test_a_loaded_model_does_not_depend_on_its_files(llama: Path) -> None:
    model = loading.load_plain(llama, torch.float32, CPU)
    (llama / base_model.WEIGHTS).write_bytes(b"")  # if the weights were mapped, the next use would kill the process
    assert torch.equal(logits(model), logits(families.make("llama")))


LARGE = LlamaConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, vocab_size=8000,
    tie_word_embeddings=False,
)  # fmt: skip
MIB = 2**20


PEAKS = """
import sys
from pathlib import Path
import torch
from ratchet.config.train import Train
from ratchet.models import loading, weights
from ratchet.models.memory import capacity

small, large = map(Path, sys.argv[1:])
for quantization in ("nf4", "none"):
    settings = Train(quantization=quantization, compute_dtype="bfloat16")
    loading.load(small, None, settings, torch.device("cpu"))  # loads the libraries' code and caches
    weights.trim_heap()
    assert capacity.reset_peak()
    before = capacity.resident_bytes()
    model = loading.load(large, None, settings, torch.device("cpu"))
    print(capacity.peak_resident_bytes() - before)
    del model
"""


@pytest.mark.long
def test_no_second_copy_of_the_model_is_held(tmp_path: Path, llama: Path) -> None:
    """262 MiB of float32 weights are loaded in bfloat16. A complete second copy must never be in memory. The
    measurement needs its own process: in this one, the memory of other tests may be freed or reused."""
    LARGE.save_pretrained(tmp_path)
    skeleton = model_spec.load(tmp_path).model(torch.float32)
    tensors = {name: torch.full(tensor.shape, 0.5) for name, tensor in skeleton.state_dict().items()}
    stored_bytes = sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, tmp_path / base_model.WEIGHTS, metadata={"format": "pt"})
    del tensors
    assert stored_bytes > 260 * MIB
    command = [sys.executable, "-c", PEAKS, str(llama), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for held_bytes, peak_bytes in zip((55 * MIB, stored_bytes // 2), map(int, done.stdout.split()), strict=True):
        assert held_bytes * 0.8 < peak_bytes < held_bytes + 100 * MIB + weights.TRIM_EVERY_BYTES


def pickled(model: Any, directory: Path, shards: int = 1) -> Path:
    """Write a model directory with pickles, as transformers 4 does."""
    model.config.save_pretrained(directory)
    tensors = dict(model.state_dict())
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return directory
    places = {name: f"pytorch_model-{1 + n % shards:05d}-of-{shards:05d}.bin" for n, name in enumerate(tensors)}
    for file in set(places.values()):
        torch.save({name: tensors[name] for name in tensors if places[name] == file}, directory / file)
    (directory / base_model.PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_pickles_become_safetensors_with_the_same_weights(tmp_path: Path, family: str, shards: int) -> None:
    model = families.make(family)
    before = pickled(model, tmp_path / "before", shards)
    tied = weights.tied_names(model_spec.load(before))
    weights.convert_pickles(before, tmp_path / "after", tied)
    weights.convert_pickles(before, tmp_path / "again", tied)
    assert len(base_model.list_weight_files(tmp_path / "after")) == shards
    loaded = loading.load_plain(tmp_path / "after", torch.float32, CPU)
    assert torch.equal(logits(loaded), logits(model))
    written = {path.name: path.read_bytes() for path in (tmp_path / "after").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


def test_what_shares_memory_is_written_apart_and_what_is_tied_once(tmp_path: Path) -> None:
    tied = families.make("llama-tied")
    before = pickled(tied, tmp_path / "before")
    assert "lm_head.weight" in torch.load(before / "pytorch_model.bin", weights_only=True)
    weights.convert_pickles(before, tmp_path / "after", weights.tied_names(model_spec.load(before)))
    assert "lm_head.weight" not in base_model.read_tensor_shapes(tmp_path / "after")
    assert torch.equal(logits(loading.load_plain(tmp_path / "after", torch.float32, CPU)), logits(tied))
    whole = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": whole, "b": whole[1:], "c": whole.T}, before / "pytorch_model.bin")
    weights.convert_pickles(before, tmp_path / "views")
    with safe_open(tmp_path / "views" / base_model.WEIGHTS, framework="pt") as found:
        assert found.metadata() == {"format": "pt"}
        for name, tensor in {"a": whole, "b": whole[1:], "c": whole.T}.items():
            assert torch.equal(found.get_tensor(name), tensor)


class Runs:
    """An object that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare-2", "bare-4"])
def test_a_pickle_that_would_run_code_does_not(llama: Path, tmp_path: Path, form: str) -> None:
    mark = tmp_path / "it ran"
    held = {"model.norm.weight": torch.ones(2), "payload": Runs(mark)}
    file = llama / "pytorch_model.bin"
    if form.startswith("bare"):
        file.write_bytes(pickle.dumps(Runs(mark), protocol=int(form[-1])))
    else:
        torch.save(held, file, _use_new_zipfile_serialization=form == "zip")
    torch.load(file, weights_only=False) if form in ("zip", "legacy") else pickle.loads(file.read_bytes())  # noqa: S301
    assert mark.exists(), "the file is as dangerous as it should be"
    mark.unlink()
    (llama / base_model.WEIGHTS).unlink()
    with pytest.raises(BaseModelError, match=r"pytorch_model\.bin: refused: it holds more than tensors.*is not run"):
        weights.convert_pickles(llama, tmp_path / "after")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "damaged or truncated"),
        (b"\x80\x02}q\x00.", "damaged or truncated"),
        (b"PK\x03\x04 and no more", "damaged or truncated"),
        ([torch.ones(2)], "expected tensors by name, found list"),
        ({"state_dict": {"a": torch.ones(2)}}, "found dict with state_dict: dict"),
    ],
    ids=["empty", "no-torch", "cut", "list", "nested"],
)
def test_pickles_that_hold_no_weights(tmp_path: Path, content: Any, words: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(BaseModelError, match=re.escape(str(file)) + ".*" + re.escape(words)):
        weights.convert_pickles(tmp_path, tmp_path / "after")


def test_missing_pickles_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        weights.convert_pickles(tmp_path, tmp_path / "after")
    directory = pickled(families.make("llama"), tmp_path / "shards", shards=2)
    (directory / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(BaseModelError, match=r"1 of 2 shards missing, first pytorch_model-00002-of-00002\.bin"):
        weights.convert_pickles(directory, tmp_path / "after")
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_is_named_when_the_base_is_pinned(llama: Path, number: float) -> None:
    weights.require_finite(llama)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[PROJECTION][3, 5] = number

    rewrite(llama, spoil)
    with pytest.raises(BaseModelError, match=rf"{re.escape(PROJECTION)} holds NaN or infinite numbers"):
        weights.require_finite(llama)
