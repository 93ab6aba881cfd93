"""Tests stage export with every format: results run, errors name their cause, and the old export stays complete."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_project
from export_cases import (
    EVERY,
    PLAIN,
    run,  # noqa: F401 (a fixture)
    trained,  # noqa: F401 (a fixture)
    with_export,
)
from ratchet.config.export import AdditionalAdapterSettings, Export, GgufSettings
from ratchet.config.settings import Settings
from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.inputs import ExportJob
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
    config = json.loads((other / "adapter_config.json").read_bytes())
    (other / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "f" * 64}))
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
