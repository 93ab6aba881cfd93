"""Proves the README's sentence "What ships has been run": each exported form is run and compared with the trained
model.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_project
from forms_cases import (
    EVERY,
    PLAIN,
    run,  # noqa: F401 (a fixture)
    trained,  # noqa: F401 (a fixture)
    with_export,
)
from ratchet import digest, files
from ratchet.config import Settings
from ratchet.data import tokens
from ratchet.data.conversation import Conversation
from ratchet.forms import converted
from ratchet.layout import Layout
from ratchet.records_export import Bundle

PACKAGES = ("forms", "merging", "formats", "proof", "runtimes")


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
