"""Proves the README's sentence "Exports are tested before they ship": each exported format is executed and compared
with the trained model."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny_project
from export_cases import (
    EVERY,
    PLAIN,
    run,  # noqa: F401 (a fixture)
    trained,  # noqa: F401 (a fixture)
    with_export,
)
from ratchet.config.export import AdditionalAdapterSettings
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.conversation import Conversation
from ratchet.errors import DamagedFileError
from ratchet.exporters import conversion
from ratchet.exporters.merge import merger
from ratchet.stages.project import Project
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ModelBundle

PACKAGES = ("exporters", "models")


def test_every_form_is_run_and_is_the_model_that_was_trained(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    bundle = run(with_export(EVERY))
    assert [one.name for one in bundle.artifacts] == ["hf", "gguf/f32", "gguf/q8_0", "onnx/fp32", "onnx/int8"]
    close = {one.name: one.distance for one in bundle.artifacts}
    for name in ("hf", "gguf/f32", "onnx/fp32"):
        assert close[name].max_difference < 1e-3
        assert close[name].greedy_agreement == 1
    for name in ("gguf/q8_0", "onnx/int8"):
        assert 1e-9 < close[name].kl < 0.05
    for one in bundle.artifacts:
        assert one.texts_tokenised == one.texts > 64
        assert one.task is not None
        assert one.task.rows == 12
        assert one.task.low <= one.task.difference <= one.task.high
        assert len(one.probes) >= 6
        assert all(len(probe.margins) == len(probe.answer_ids) for probe in one.probes)
        assert one.tokens_per_second > 0
    runtimes = [one.runtime.split()[0] for one in bundle.artifacts]
    assert runtimes == ["transformers", "llama.cpp", "llama.cpp", "onnxruntime", "onnxruntime"]
    f32 = bundle.artifact("gguf/f32")
    assert f32 is not None
    assert f32.second_reader_difference == 0

    # The bundle describes the files correctly, and the identity covers each file.
    paths = {"hf": "hf", "gguf/f32": "gguf/model-f32.gguf", "onnx/int8": "onnx/int8"}
    for name, where in paths.items():
        artifact = bundle.artifact(name)
        assert artifact is not None
        assert artifact.digest == conversion.format_fingerprint(trained.export / where)
        assert artifact.size_bytes == conversion.format_size_bytes(trained.export / where)
    assert bundle.model_digest == digests.hash_json({one.name: one.digest for one in bundle.artifacts})
    files.verify_sealed(trained.export, "export")

    assert bundle.lineage is not None
    assert bundle.lineage.data_licence == "CC-BY-4.0"
    assert bundle.lineage.sbom_digest == digests.hash_file(trained.sbom)
    names = {one["name"] for one in json.loads(trained.sbom.read_bytes())["components"]}
    assert {"torch", "peft", "ratchet-llm"} <= names

    # No file contains a path of this machine, a secret or a row of the data.
    row = token_files.open_split(trained.data, "test")[0]
    asked = str(Conversation.from_json(row["conversation"]).messages[0]["content"])
    planted = [str(trained.root), "hf_secretsecretsecret", asked, str(Path.home())]
    for path in sorted(p for p in trained.export.rglob("*") if p.is_file()):
        content = path.read_bytes()
        assert [text for text in planted if len(text) > 5 and text.encode() in content] == [], path

    again = run(with_export(EVERY))
    assert again.model_digest == bundle.model_digest


def test_both_ways_to_merge_are_measured_and_the_closer_one_is_taken(run: Callable[[Settings], ModelBundle]) -> None:
    bundle = run(with_export(PLAIN))
    assert bundle.merge is not None
    trials = {trial.merge_base: trial for trial in bundle.merge.trials}
    assert bundle.merge_base == "dequantized"
    assert trials["dequantized"].parity.max_logit_difference <= 1e-4
    assert trials["original"].parity.max_logit_difference > 100 * trials["dequantized"].parity.max_logit_difference
    assert bundle.parity == trials["dequantized"].parity
    assert all(trial.check.adapter_effect > 0.01 for trial in bundle.merge.trials)
    other = run(with_export(PLAIN.model_copy(update={"merge_base": "original"})))
    assert other.merge_base == "original"
    assert other.parity == trials["original"].parity


def test_adapters_with_weights_and_a_subset_of_modules(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout
) -> None:
    """Two copies of the adapter with weight 0.5 equal the whole adapter. Modules outside the subset do not change."""
    whole = run(with_export(PLAIN.model_copy(update={"merge_base": "dequantized"})))
    expected = load_file(trained.merged_model / "model.safetensors")
    also = AdditionalAdapterSettings(adapter="experiments/train/adapter", weight=0.5)
    halves = PLAIN.model_copy(update={"merge_base": "dequantized", "weight": 0.5, "additional_adapters": (also,)})
    bundle = run(with_export(halves, formats=("merged",)))
    assert bundle.merge is not None
    assert list(bundle.merge.adapters.values()) == [1.0]
    assert bundle.parity.max_logit_difference <= 1e-4
    for name, tensor in load_file(trained.merged_model / "model.safetensors").items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name

    some = PLAIN.model_copy(update={"merge_base": "dequantized", "modules": (r".*\.down_proj",)})
    bundle = run(with_export(some, formats=("merged",)))
    assert bundle.merge is not None
    assert bundle.merge.changed == 2
    assert bundle.parity.max_logit_difference <= 1e-4
    changed = load_file(trained.merged_model / "model.safetensors")
    assert torch.equal(changed["model.layers.0.mlp.down_proj.weight"], expected["model.layers.0.mlp.down_proj.weight"])
    up = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(changed[up], expected[up])
    assert whole.merge is not None
    assert whole.merge.changed == 14


def damaged(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., merger.MergeResult]:
    """Return a merge that damages its output after writing it."""
    merge = merger.merge_model

    def wrong(recipe: Any, directory: Path, progress: Any) -> merger.MergeResult:
        done = merge(recipe, directory, progress)
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return done

    return wrong


def test_a_merge_that_is_off_in_one_module_is_refused_by_its_name(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(with_export(PLAIN))
    name = "model.layers.1.self_attn.v_proj.weight"

    def little(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name] * 1.01

    def base(tensors: dict[str, torch.Tensor]) -> None:
        with safe_open(trained.tiny_model / "model.safetensors", "pt") as own:
            for key in tensors:
                tensors[key] = own.get_tensor(key).clone()

    monkeypatch.setattr(merger, "merge_model", damaged(little))
    with pytest.raises(DamagedFileError, match=r"model\.layers\.1\.self_attn\.v_proj"):
        run(with_export(PLAIN.model_copy(update={"merge_base": "dequantized"})))
    monkeypatch.undo()
    monkeypatch.setattr(merger, "merge_model", damaged(base))
    with pytest.raises(DamagedFileError, match=r"the merged model equals the base"):
        run(with_export(PLAIN.model_copy(update={"merge_base": "original"})))
    files.verify_sealed(trained.export, "export")
    assert ModelBundle.load(trained.bundle) == before


def test_a_full_disk_leaves_the_old_bundle_whole(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(with_export(PLAIN))

    def full(operation: str, path: Path, *_: object) -> None:
        if path.suffix == ".gguf":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "before", full)
    with pytest.raises(OSError, match="No space left"):
        run(with_export(EVERY))
    monkeypatch.undo()
    files.verify_sealed(trained.export, "export")
    assert ModelBundle.load(trained.bundle) == before
    assert [p.name for p in trained.experiments.iterdir() if p.name.startswith(files.PARTIAL)] == []


def test_a_kill_in_the_middle_leaves_the_old_bundle_whole(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout
) -> None:
    before = run(with_export(PLAIN))
    tiny_project.save(trained, with_export(EVERY))
    command = [sys.executable, "-m", "ratchet", "--project", str(trained.root), "export"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list(trained.experiments.glob(f"{files.PARTIAL}*/gguf/*.gguf")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    files.verify_sealed(trained.export, "export")
    assert ModelBundle.load(trained.bundle) == before
    run(with_export(PLAIN))
    assert [p.name for p in trained.experiments.iterdir() if p.name.startswith(files.PARTIAL)] == []


def test_what_was_changed_and_sealed_again_is_not_what_was_measured(
    run: Callable[[Settings], ModelBundle], trained: ProjectLayout
) -> None:
    from ratchet.stages import evaluate

    run(with_export(PLAIN.model_copy(update={"merge_base": "dequantized"})))
    path = trained.merged_model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    (trained.export / files.MANIFEST).unlink()
    files.seal_directory(trained.export, "export")
    with pytest.raises(DamagedFileError, match=r"differs from format hf in bundle\.json"):
        evaluate.evaluate(Project.from_parts(trained, with_export(PLAIN)))
