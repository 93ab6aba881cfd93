"""Tests stage export with every format: results run, errors name their cause, and the old export stays complete."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_project
from export_cases import (
    EVERY,
    PLAIN,
    run,  # noqa: F401 (a fixture)
    trained,  # noqa: F401 (a fixture)
    with_export,
)
from ratchet.cli.export import format_bundle
from ratchet.config.export import (
    AdditionalAdapterSettings,
    BitsAndBytesSettings,
    Export,
    GgufSettings,
    OnnxSettings,
)
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.inputs import ExportJob
from ratchet.models import answer_process, base_model
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ModelBundle


def test_a_modified_update_requires_merged_evaluation() -> None:
    with pytest.raises(ValueError, match=r"evaluate.formats: \[merged\]"):
        Settings(export=Export(weight=0.5))


def test_too_little_disk_space_is_reported_before_anything_is_loaded(
    run: Callable[[Settings], ModelBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.storage import files

    real = os.statvfs("/")

    def nothing(*_: object) -> os.statvfs_result:
        return os.statvfs_result((*real[:4], 1, *real[5:10]))

    monkeypatch.setattr(files.os, "statvfs", nothing)
    with pytest.raises(OSError, match=r"needs .* bytes"):
        run(with_export(EVERY))


def test_an_adapter_of_another_base_is_refused_before_anything_is_loaded(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout
) -> None:
    other = trained.root / "other"
    files.make_directory(other)
    for path in trained.adapter.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(tensors, other / "adapter_model.safetensors", metadata={base_model.BASE_DIGEST: "f" * 64})
    wanted = PLAIN.model_copy(update={"additional_adapters": (AdditionalAdapterSettings(adapter="other"),)})
    with pytest.raises(BaseModelError, match="f" * 12):
        run(with_export(wanted, formats=("merged",)))
    with pytest.raises(SettingsError, match=r"export\.additional_adapters: gone: found no adapter_config"):
        run(
            with_export(
                PLAIN.model_copy(update={"additional_adapters": (AdditionalAdapterSettings(adapter="gone"),)}),
                formats=("merged",),
            )
        )
    with pytest.raises(SettingsError, match=r"nowhere"):
        run(with_export(PLAIN.model_copy(update={"modules": ("nowhere",)}), formats=("merged",)))


@pytest.mark.long
def test_what_each_of_several_adapters_lost_is_measured_on_its_own_rows(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout, tmp_path: Path
) -> None:
    other = tiny_project.prepared(tmp_path / "other")
    tiny_project.adapted(other, seed=9, strength=0.3)
    shutil.copytree(other.adapter, trained.root / "second")
    shutil.copytree(other.data, trained.root / "second data")
    second = AdditionalAdapterSettings(adapter="second", weight=0.5, prepared_data="second data")
    wanted = PLAIN.model_copy(
        update={"additional_adapters": (second,), "merge_method": "ties", "merge_base": "dequantized"}
    )
    bundle = run(with_export(wanted, formats=("merged",)))
    assert bundle.merge is not None and (bundle.merge.method, bundle.merge.density) == ("ties", 0.5)
    own, added = bundle.merge.retention
    assert (own.adapter, added.adapter, own.weight, added.weight) == ("trained", "second", 1, 0.5)
    assert own.rows == added.rows == len(token_files.open_split(trained.data, "validation"))
    assert own.base == added.base and own.merged == added.merged, "here both have the same rows"
    assert own.alone != added.alone
    for part in (own, added):
        assert part.low <= part.merged - part.alone <= part.high
    assert bundle.parity.greedy_agreement == 1, "the reference combines the adapters in the same way"
    text = format_bundle(bundle)
    assert "combined by ties, density 0.5; loss of each adapter's answers" in text
    assert f"second (weight 0.5, {added.rows} rows): base {added.base:.3f}, alone {added.alone:.3f}" in text
    gone = wanted.model_copy(update={"additional_adapters": (second.model_copy(update={"prepared_data": "gone"}),)})
    with pytest.raises(SettingsError, match=r"additional_adapters: prepared_data: found no card\.json in gone"):
        run(with_export(gone, formats=("merged",)))
    with pytest.raises(ValueError, match="merge_method: found ties for a single adapter"):
        Export(merge_method="ties")


@pytest.mark.long
def test_8_bits_of_bitsandbytes_and_half_floats_are_opened_and_compared(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout
) -> None:
    wanted = PLAIN.model_copy(
        update={
            "merge_base": "dequantized",
            "bitsandbytes": BitsAndBytesSettings(types=("int8",)),
            "onnx": OnnxSettings(types=("fp16",)),
        }
    )
    bundle = run(with_export(wanted))
    int8, fp16 = bundle.artifact("bitsandbytes/int8"), bundle.artifact("onnx/fp16")
    assert int8 is not None and fp16 is not None
    assert int8.distance.kl < 0.05 and fp16.distance.kl < 1e-3, "within the gate's limits"
    assert int8.distance.kl > 0 < fp16.distance.kl
    assert int8.size_bytes < 0.6 * bundle.size_bytes > fp16.size_bytes
    assert "bitsandbytes" in int8.runtime and int8.texts_tokenised == int8.texts
    folder = trained.export / "bitsandbytes" / "int8"
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    assert stored[f"{name}.weight"].dtype == torch.int8 and f"{name}.SCB" in stored
    probe = int8.probes[0]
    request = {"question": probe.question, "prompt": probe.prompt_ids, "tokens": len(probe.answer_ids)}
    [answer] = answer_process.generate_answers(folder, [request], 1)  # as a server opens it
    assert tuple(answer["answer"]) == probe.answer_ids and tuple(answer["prompt"]) == probe.prompt_ids


def test_a_type_that_needs_a_tool_is_refused_without_it(
    run: Callable[[Settings], ModelBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match=r"q4_k_m needs llama.cpp's llama-quantize"):
        run(with_export(PLAIN.model_copy(update={"gguf": GgufSettings(types=("q4_k_m",))})))


def test_the_tried_merge_bases_follow_from_the_base(trained: ProjectLayout) -> None:
    job = ExportJob.__new__(ExportJob)
    for wanted, quantization, expected in (
        ("auto", "nf4", ("original", "dequantized")), ("auto", "none", ("dequantized",)),
        ("original", "nf4", ("original",)),
    ):  # fmt: skip
        settings = with_export(PLAIN.model_copy(update={"merge_base": wanted}))
        train = settings.train.model_copy(update={"quantization": quantization})
        object.__setattr__(job, "settings", settings.model_copy(update={"train": train}))
        object.__setattr__(job, "base", type("Card", (), {"quantization": None})())
        assert job.merge_bases == expected


def test_a_base_that_a_format_does_not_support_is_refused_before_training(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from ratchet.config.base import Base
    from ratchet.stages import base

    small = tiny_project.prepared(tmp_path / "small").tiny_model
    model = tmp_path / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(small)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    settings = tiny_project.SETTINGS.model_copy(update={"base": Base(source=str(model)), "export": EVERY})
    layout = tiny_project.write(tmp_path / "project", settings)
    with pytest.raises(SettingsError, match=r"gpt2; supported: Llama, Mistral, Qwen2"):
        base.base(Project.from_parts(layout, settings))
    assert not layout.base.exists()
    onnx = EVERY.model_copy(update={"gguf": GgufSettings()})
    base.base(Project.from_parts(layout, settings.model_copy(update={"export": onnx})))
