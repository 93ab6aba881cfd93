"""Stage export with every format: what is written is run, what is wrong is named, and what was there stays whole."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny_project
from forms_cases import (
    EVERY,
    PLAIN,
    run,  # noqa: F401 (a fixture)
    trained,  # noqa: F401 (a fixture)
    with_export,
)
from ratchet import files
from ratchet.config import Settings
from ratchet.config_export import Also, Export, Gguf
from ratchet.errors import BaseModelError, DamagedError, SettingsError
from ratchet.forms.job import Job
from ratchet.layout import Layout
from ratchet.merging import stream
from ratchet.records_export import Bundle


def test_adapters_with_weights_and_a_subset_of_modules(run: Callable[[Settings], Bundle], trained: Layout) -> None:
    """Half of the adapter and half of it again is the adapter; of other modules nothing arrives."""
    whole = run(with_export(PLAIN.model_copy(update={"merge_base": "dequantized"})))
    expected = load_file(trained.merged_model / "model.safetensors")
    also = Also(adapter="experiments/train/adapter", weight=0.5)
    halves = PLAIN.model_copy(update={"merge_base": "dequantized", "weight": 0.5, "also": (also,)})
    bundle = run(with_export(halves, forms=("merged",)))
    assert bundle.merge is not None
    assert list(bundle.merge.adapters.values()) == [1.0]
    assert bundle.parity.max_logit_difference <= 1e-4
    for name, tensor in load_file(trained.merged_model / "model.safetensors").items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name

    some = PLAIN.model_copy(update={"merge_base": "dequantized", "modules": (r".*\.down_proj",)})
    bundle = run(with_export(some, forms=("merged",)))
    assert bundle.merge is not None
    assert bundle.merge.changed == 2
    assert bundle.parity.max_logit_difference <= 1e-4
    changed = load_file(trained.merged_model / "model.safetensors")
    assert torch.equal(changed["model.layers.0.mlp.down_proj.weight"], expected["model.layers.0.mlp.down_proj.weight"])
    up = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(changed[up], expected[up])
    assert whole.merge is not None
    assert whole.merge.changed == 14


def test_another_update_than_the_adapters_is_not_judged_by_the_adapters_scores() -> None:
    with pytest.raises(ValueError, match=r"evaluate.forms: \[merged\]"):
        Settings(export=Export(weight=0.5))


def damaged(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., stream.Merged]:
    """The merge, and then somebody's mistake in what it wrote."""
    merge = stream.merge

    def wrong(recipe: Any, directory: Path, progress: Any) -> stream.Merged:
        done = merge(recipe, directory, progress)
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return done

    return wrong


def test_a_merge_that_is_off_in_one_module_is_refused_by_its_name(
    run: Callable[[Settings], Bundle], trained: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(with_export(PLAIN))
    name = "model.layers.1.self_attn.v_proj.weight"

    def little(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name] * 1.01

    def base(tensors: dict[str, torch.Tensor]) -> None:
        with safe_open(trained.tiny_model / "model.safetensors", "pt") as own:
            for key in tensors:
                tensors[key] = own.get_tensor(key).clone()

    monkeypatch.setattr(stream, "merge", damaged(little))
    with pytest.raises(DamagedError, match=r"model\.layers\.1\.self_attn\.v_proj"):
        run(with_export(PLAIN.model_copy(update={"merge_base": "dequantized"})))
    monkeypatch.undo()
    monkeypatch.setattr(stream, "merge", damaged(base))
    with pytest.raises(DamagedError, match=r"the merge equals the base"):
        run(with_export(PLAIN.model_copy(update={"merge_base": "original"})))
    files.verify(trained.export, "export")
    assert Bundle.load(trained.bundle) == before


def test_a_full_disk_leaves_the_old_bundle_whole(
    run: Callable[[Settings], Bundle], trained: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(with_export(PLAIN))

    def full(operation: str, path: Path, *_: object) -> None:
        if path.suffix == ".gguf":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "before", full)
    with pytest.raises(OSError, match="No space left"):
        run(with_export(EVERY))
    monkeypatch.undo()
    files.verify(trained.export, "export")
    assert Bundle.load(trained.bundle) == before
    assert [p.name for p in trained.experiments.iterdir() if p.name.startswith(files.PARTIAL)] == []


def test_too_little_room_is_told_before_anything_is_loaded(
    run: Callable[[Settings], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet import disk

    real = os.statvfs("/")

    def nothing(*_: object) -> os.statvfs_result:
        return os.statvfs_result((*real[:4], 1, *real[5:10]))

    monkeypatch.setattr(disk.os, "statvfs", nothing)
    with pytest.raises(OSError, match="are to be written"):
        run(with_export(EVERY))


def test_an_adapter_of_another_base_is_refused_before_anything_is_loaded(
    run: Callable[[Settings], Bundle], trained: Layout
) -> None:
    other = trained.root / "other"
    files.make_directory(other)
    for path in trained.adapter.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "adapter_config.json").read_bytes())
    (other / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "f" * 64}))
    wanted = PLAIN.model_copy(update={"also": (Also(adapter="other"),)})
    with pytest.raises(BaseModelError, match="f" * 12):
        run(with_export(wanted, forms=("merged",)))
    with pytest.raises(SettingsError, match=r"export\.also: gone: no saved adapter there"):
        run(with_export(PLAIN.model_copy(update={"also": (Also(adapter="gone"),)}), forms=("merged",)))
    with pytest.raises(SettingsError, match=r"nowhere"):
        run(with_export(PLAIN.model_copy(update={"modules": ("nowhere",)}), forms=("merged",)))


def test_a_type_that_needs_a_tool_is_refused_without_it(
    run: Callable[[Settings], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match=r"q4_k_m is made by llama.cpp's llama-quantize"):
        run(with_export(PLAIN.model_copy(update={"gguf": Gguf(types=("q4_k_m",))})))


def test_what_is_to_be_tried_follows_from_the_base(trained: Layout) -> None:
    job = Job.__new__(Job)
    for wanted, quantization, ways in (
        ("auto", "nf4", ("original", "dequantized")), ("auto", "none", ("dequantized",)),
        ("original", "nf4", ("original",)),
    ):  # fmt: skip
        settings = with_export(PLAIN.model_copy(update={"merge_base": wanted}))
        train = settings.train.model_copy(update={"quantization": quantization})
        object.__setattr__(job, "settings", settings.model_copy(update={"train": train}))
        object.__setattr__(job, "base", type("Card", (), {"quantization": None})())
        assert job.ways == ways


def test_a_base_that_a_format_cannot_carry_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from ratchet import base
    from ratchet.config import Base

    small = tiny_project.prepared(tmp_path / "small").tiny_model
    model = tmp_path / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(small)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    settings = tiny_project.SETTINGS.model_copy(update={"base": Base(source=str(model)), "export": EVERY})
    layout = tiny_project.write(tmp_path / "project", settings)
    with pytest.raises(SettingsError, match=r"gpt2.*carries Llama, Mistral, Qwen2"):
        base.base(layout, settings, lambda _: None)
    assert not layout.base.exists()
    onnx = EVERY.model_copy(update={"gguf": Gguf()})
    base.base(layout, settings.model_copy(update={"export": onnx}), lambda _: None)


def test_what_was_changed_and_sealed_again_is_not_what_was_measured(
    run: Callable[[Settings], Bundle], trained: Layout
) -> None:
    from ratchet import evaluate

    run(with_export(PLAIN.model_copy(update={"merge_base": "dequantized"})))
    path = trained.merged_model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    (trained.export / files.MANIFEST).unlink()
    files.seal(trained.export, "export")
    with pytest.raises(DamagedError, match=r"form hf of bundle\.json is not the one that was measured"):
        evaluate.evaluate(trained, with_export(PLAIN), lambda _: None)
