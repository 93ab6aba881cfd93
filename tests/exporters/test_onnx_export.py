"""Tests the export to ONNX: in onnxruntime, the graph computes the model's own step at any length, batch and past."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_format
import pytest

from onnx_export_cases import (
    TOLD,
    WINDOW,
    Session,
    exported,  # noqa: F401 (a fixture)
    rows,
    written,
)
from onnx_models import save
from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters import onnx


def silent(what: str, done: int, total: int) -> None:
    """Ignore the progress."""


@pytest.mark.long
def test_only_tokens_in_the_window_have_an_effect(exported: Any) -> None:
    """Without the window in the graph, the model would still agree with itself, so this test checks the window."""
    _, target = exported("mistral")
    session = Session(target)
    ids, mask, positions = rows(1, 2 * WINDOW, 0)
    last = session.logits(ids, mask, positions, (WINDOW + 3,))[0, -1]
    outside, inside = ids.copy(), ids.copy()
    outside[0, WINDOW - 1], inside[0, WINDOW + 1] = 5, 5
    assert np.array_equal(session.logits(outside, mask, positions, (WINDOW + 3,))[0, -1], last)
    assert not np.array_equal(session.logits(inside, mask, positions, (WINDOW + 3,))[0, -1], last)


def test_inputs_and_outputs_have_the_names_and_dynamic_dimensions_that_servers_expect(exported: Any) -> None:
    graph = onnx_format.load(str(exported("llama")[1] / "model.onnx"), load_external_data=False).graph

    def described(values: Any) -> dict[str, list[Any]]:
        return {
            one.name: [part.dim_param or part.dim_value for part in one.type.tensor_type.shape.dim] for one in values
        }

    assert described(graph.input) == {
        "input_ids": ["batch", "length"],
        "attention_mask": ["batch", "past + length"],
        "position_ids": ["batch", "length"],
        "past_key_values.0.key": ["batch", 2, "past", 16],
        "past_key_values.0.value": ["batch", 2, "past", 16],
    }
    assert described(graph.output) == {
        "logits": ["batch", "length", 320],
        "present.0.key": ["batch", 2, "past + length", 16],
        "present.0.value": ["batch", 2, "past + length", 16],
    }


def test_the_directory_is_complete_and_valid(exported: Any) -> None:
    _, target = exported("llama-tied")
    onnx_format.checker.check_model(str(target / "model.onnx"), full_check=True)
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.onnx", "model.onnx.data",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    stored = onnx_format.load(str(target / "model.onnx")).graph.initializer
    assert {onnx_format.TensorProto.DataType.Name(one.data_type) for one in stored} <= {"FLOAT", "INT64", "BOOL"}
    weights = [one.name for one in stored if one.name.startswith("model.")]
    assert len(weights) == len(set(weights)) > 0
    assert "lm_head.weight" not in weights, "a tied head is stored once"


@pytest.mark.parametrize(
    ("family", "type", "transposed"),
    [
        pytest.param("llama", "fp32", [], marks=pytest.mark.long),
        ("llama-tied", "fp32", ["model.embed_tokens.weight"]),
        pytest.param("llama-tied", "int8", [], marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_no_weight_is_transposed_when_a_runtime_starts(
    family: str, type: Any, transposed: list[str], exported: Any, tmp_path: Path
) -> None:
    """Only a head that is tied to the embedding is read transposed, because it is stored once; int8 stores it twice."""
    source, target = exported(family)
    if type == "int8":
        target = written(source, tmp_path / "int8", type)
    graph = onnx_format.load(str(target / "model.onnx"), load_external_data=False).graph
    stored = {tensor.name for tensor in graph.initializer}
    assert (
        len([node for node in graph.node if node.op_type == "MatMul" and node.input[1] in stored]) >= 7
        or type == "int8"
    )
    assert [
        node.input[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in stored
    ] == transposed


@pytest.mark.long
def test_matrices_in_16_bits_are_rounded_and_too_large_ones_refused(exported: Any, tmp_path: Path) -> None:
    source, target = exported("llama-tied")
    half = written(source, tmp_path / "half", "fp16")
    onnx_format.checker.check_model(str(half / "model.onnx"), full_check=True)
    full = {one.name: one for one in onnx_format.load(str(target / "model.onnx")).graph.initializer}
    rounded = 0
    for one in onnx_format.load(str(half / "model.onnx")).graph.initializer:
        values = onnx_format.numpy_helper.to_array(one)
        expected = onnx_format.numpy_helper.to_array(full[one.name.removesuffix(".fp16")])
        rounded += values.dtype == np.float16
        assert np.array_equal(values, expected.astype(values.dtype))
        assert values.dtype == np.float16 or expected.dtype != np.float32 or expected.ndim < 2
    assert rounded >= 8
    tensor = onnx.OnnxTensor("w", (1, 2), np.float32, lambda: np.array([[1.0, 1e5]], np.float32))
    with pytest.raises(BaseModelError, match="w has a weight above 65504"):
        onnx._read_as_float16(tensor)


def test_numbers_in_8_bits_are_off_by_half_a_step_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(0).normal(size=(70, 96)).astype(np.float32)
    matrix[3, 32:64] = 0
    whole = onnx.quantize_matrix(matrix, 1, 32)
    for axis, given in ((1, matrix), (0, matrix.T)):
        numbers, scales = onnx.quantize_matrix(given, axis, 32)
        assert numbers.shape == given.shape
        assert numbers.min() == -127 or numbers.max() == 127
        wide = np.repeat(scales, 32, axis=axis)
        assert (np.abs(numbers * wide - given) <= wide * 0.501).all()
    assert [onnx.block_width(width) for width in (64, 48, 72)] == [32, 16, None]
    monkeypatch.setattr(onnx, "_SLICE_NUMBERS", 200)  # the slice size does not change the result
    for one, other in zip(whole, onnx.quantize_matrix(matrix, 1, 32), strict=True):
        assert np.array_equal(one, other)


def config(directory: Path, **values: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


@pytest.mark.parametrize("kind", ["mixtral", "mamba", "t5", "made_up"])
def test_an_unsupported_model_type_is_refused_from_its_config_alone(kind: str, tmp_path: Path) -> None:
    directory = config(tmp_path / "model", model_type=kind, architectures=["Some"])
    with pytest.raises(
        SettingsError, match=rf"export\.onnx\.types: .*found model type {kind} \(Some\).*supports .*llama.*qwen2"
    ):
        onnx.require_exportable(directory)
    with pytest.raises(SettingsError, match="ONNX export supports"):
        onnx.write_onnx(directory, tmp_path / "out", "fp32", silent)
    assert not (tmp_path / "out").exists()


def test_frequencies_that_follow_the_length_are_refused(tmp_path: Path) -> None:
    old = config(tmp_path / "old", model_type="llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    new = config(tmp_path / "new", model_type="llama", rope_parameters={"full": {"rope_type": "dynamic"}})
    plain = config(tmp_path / "plain", model_type="llama", rope_parameters={"rope_type": "llama3"})
    for directory in (old, new):
        with pytest.raises(SettingsError, match="rope_type dynamic"):
            onnx.require_exportable(directory)
    onnx.require_exportable(plain)


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["none", "torn", "list"])
def test_a_config_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(BaseModelError, match=r"config\.json"):
        onnx.require_exportable(tmp_path)


def test_a_model_without_a_fast_tokenizer_is_refused_before_it_is_traced(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"no tokenizer\.json"):
        onnx.write_onnx(config(tmp_path / "model", model_type="llama"), tmp_path / "out", "fp32", silent)


def test_a_model_that_torch_cannot_trace_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save("mamba", tmp_path / "model")
    monkeypatch.setattr(onnx, "SUPPORTED_MODEL_TYPES", (*onnx.SUPPORTED_MODEL_TYPES, "mamba"))
    with pytest.raises(BaseModelError, match="torch cannot export a MambaForCausalLM to ONNX: ") as raised:
        onnx.write_onnx(source, tmp_path / "out", "fp32", silent)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_progress_counts_bytes_up_to_all_of_them(exported: Any) -> None:
    _, target = exported("gpt2")
    seen = TOLD[target]
    assert [done for what, done, _ in seen if "tracing" in what] == [0, 1]
    counts = [(done, total) for what, done, total in seen if "weights" in what]
    assert [done for done, _ in counts] == sorted({done for done, _ in counts})
    assert counts[-1][0] == counts[-1][1] == (target / "model.onnx.data").stat().st_size
