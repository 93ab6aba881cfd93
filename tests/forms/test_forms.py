"""Stage export with every format: what is written is run, what is wrong is named, and what was there stays whole."""

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
from ratchet import digest, export, files
from ratchet.config import Settings
from ratchet.config_export import Also, Export, Gguf, Onnx
from ratchet.data import tokens
from ratchet.data.conversation import Conversation
from ratchet.errors import BaseModelError, DamagedError, SettingsError
from ratchet.forms import converted
from ratchet.forms.job import Job
from ratchet.layout import Layout
from ratchet.merging import stream
from ratchet.records_export import Bundle

PLAIN = Export(task_rows=12, parity_rows=8)
EVERY = PLAIN.model_copy(
    update={
        "merge_base": "dequantized",
        "gguf": Gguf(types=("f32", "q8_0")),
        "onnx": Onnx(types=("fp32", "int8")),
        "data_licence": "CC-BY-4.0",
    }
)


def with_export(wanted: Export, **evaluate: Any) -> Settings:
    changed = tiny_project.SETTINGS.evaluate.model_copy(update=evaluate)
    return tiny_project.SETTINGS.model_copy(update={"export": wanted, "evaluate": changed})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A project whose adapter is strong enough to show."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("forms") / "project")
    tiny_project.adapted(layout)
    return layout


@pytest.fixture
def run(trained: Layout, monkeypatch: pytest.MonkeyPatch) -> Callable[[Settings], Bundle]:
    """Stage export without MLflow, which has tests of its own."""
    monkeypatch.setattr(export, "_track", lambda *_: None)

    def exported(settings: Settings) -> Bundle:
        export.export(trained, settings)
        return Bundle.load(trained.bundle)

    return exported


def test_every_form_is_run_and_is_the_model_that_was_trained(
    run: Callable[[Settings], Bundle], trained: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    bundle = run(with_export(EVERY))
    assert [one.name for one in bundle.artifacts] == ["hf", "gguf/f32", "gguf/q8_0", "onnx/fp32", "onnx/int8"]
    close = {one.name: one.closeness for one in bundle.artifacts}
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
    assert f32.witness_difference == 0

    # What the bundle says of files is so, and identity covers every one of them.
    paths = {"hf": "hf", "gguf/f32": "gguf/model-f32.gguf", "onnx/int8": "onnx/int8"}
    for name, where in paths.items():
        artifact = bundle.artifact(name)
        assert artifact is not None
        assert artifact.digest == converted.fingerprint(trained.export / where)
        assert artifact.size_bytes == converted.size(trained.export / where)
    assert bundle.model_digest == digest.of_json({one.name: one.digest for one in bundle.artifacts})
    files.verify(trained.export, "export")

    assert bundle.lineage is not None
    assert bundle.lineage.data_licence == "CC-BY-4.0"
    assert bundle.lineage.sbom_digest == digest.of_file(trained.sbom)
    names = {one["name"] for one in json.loads(trained.sbom.read_bytes())["components"]}
    assert {"torch", "peft", "ratchet-llm"} <= names

    # No path of this machine, no secret and no row of the data is in any file.
    row = tokens.read(trained.data, "test")[0]
    asked = str(Conversation.from_json(row["conversation"]).messages[0]["content"])
    planted = [str(trained.root), "hf_secretsecretsecret", asked, str(Path.home())]
    for path in sorted(p for p in trained.export.rglob("*") if p.is_file()):
        content = path.read_bytes()
        assert [text for text in planted if len(text) > 5 and text.encode() in content] == [], path

    again = run(with_export(EVERY))
    assert again.model_digest == bundle.model_digest


def test_both_ways_to_merge_are_measured_and_the_closer_one_is_taken(run: Callable[[Settings], Bundle]) -> None:
    bundle = run(with_export(PLAIN))
    assert bundle.merge is not None
    trials = {trial.merge_base: trial for trial in bundle.merge.trials}
    assert bundle.merge_base == "dequantized"
    assert trials["dequantized"].parity.max_logit_difference <= 1e-4
    assert trials["original"].parity.max_logit_difference > 100 * trials["dequantized"].parity.max_logit_difference
    assert bundle.parity == trials["dequantized"].parity
    assert all(trial.check.moved > 0.01 for trial in bundle.merge.trials)
    other = run(with_export(PLAIN.model_copy(update={"merge_base": "original"})))
    assert other.merge_base == "original"
    assert other.parity == trials["original"].parity


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


def test_a_kill_in_the_middle_leaves_the_old_bundle_whole(run: Callable[[Settings], Bundle], trained: Layout) -> None:
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
    files.verify(trained.export, "export")
    assert Bundle.load(trained.bundle) == before
    run(with_export(PLAIN))
    assert [p.name for p in trained.experiments.iterdir() if p.name.startswith(files.PARTIAL)] == []


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
