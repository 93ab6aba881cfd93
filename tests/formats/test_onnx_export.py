"""Export to ONNX: the written graph is the model's own step, in onnxruntime, at any length, batch and past."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_format
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from onnx_models import save
from ratchet.errors import BaseModelError, SettingsError
from ratchet.formats import onnx, onnx_int8

WINDOW = 16
SHORT = 32
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + place for place in range(8)],
}  # fmt: skip
"""Phi-3's two sets of frequencies: which is taken depends on the last position of a piece."""
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "llama-tied": {"num_hidden_layers": 1, "dtype": torch.bfloat16},
    "mistral": {"num_hidden_layers": 1, "sliding_window": WINDOW},
    "qwen2": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": WINDOW},
    "phi3": {"num_hidden_layers": 1, "original_max_position_embeddings": SHORT, "rope_parameters": LONG},
    "gpt2": {"n_layer": 1},
}


def silent(what: str, done: int, total: int) -> None:
    """Nobody watches."""


TOLD: dict[Path, list[tuple[str, int, int]]] = {}
"""What the progress of each export was told."""


def written(source: Path, target: Path, type: Any = "fp32") -> Path:
    told = TOLD.setdefault(target, [])
    onnx.write(source, target, type, lambda *about: told.append(about))
    return target


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Model directory and its fp32 export, each family once."""
    root = tmp_path_factory.mktemp("onnx")
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            source = save(family, root / family / "hf", **LAYERS[family])
            if family == "gpt2":
                without_prefix(source / "model.safetensors")
            made[family] = source, written(source, root / family / "onnx")
        return made[family]

    return get


def without_prefix(path: Path) -> None:
    """Names as GPT-2's own checkpoint has them, which are not those of the class."""
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


class Session:
    """What is asked of model.onnx, with numpy alone."""

    def __init__(self, directory: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.run = onnxruntime.InferenceSession(
            str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"]
        ).run
        graph = onnx_format.load(str(directory / "model.onnx"), load_external_data=False).graph
        self.past = {
            one.name: tuple(part.dim_value for part in one.type.tensor_type.shape.dim)
            for one in graph.input
            if one.name.startswith("past_key_values.")
        }

    def logits(self, ids: Any, mask: Any, positions: Any, cuts: tuple[int, ...]) -> Any:
        """Logits of whole rows that go in piece by piece, each after the cache of those before."""
        past = {name: np.zeros((len(ids), s[1], 0, s[3]), np.float32) for name, s in self.past.items()}
        found = []
        for start, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
            fed = {
                "input_ids": ids[:, start:end],
                "attention_mask": mask[:, :end],
                "position_ids": positions[:, start:end],
            }
            logits, *present = self.run(None, fed | past)
            past = dict(zip(past, present, strict=True))
            found.append(logits)
        return np.concatenate(found, axis=1)


def rows(batch: int, length: int, padding: int) -> tuple[Any, Any, Any]:
    """Token ids, mask and positions; the first row is padded on the left."""
    ids = np.random.default_rng(length).integers(4, 300, (batch, length))
    mask = np.ones_like(ids)
    mask[0, :padding] = 0
    ids[0, :padding] = 0
    return ids, mask, np.maximum(mask.cumsum(axis=1) - 1, 0)


CASES = [
    (1, 1, 0, ()), (1, 2, 0, ()), (3, 7, 0, ()), (2, 33, 0, ()), (2, 30, 3, (7,)), (3, 41, 2, (33, 40)),
    (1, 4, 0, (1, 2, 3)),
]  # fmt: skip
"""Batch, length, padding on the left, and where a row is cut into pieces that use the cache; no cut row has pieces on
both sides of SHORT, for then keys of one set stay in the cache, in transformers as here."""


@pytest.mark.parametrize("family", LAYERS)
def test_the_graph_is_the_models_step_at_any_length_batch_and_past(family: str, exported: Any) -> None:
    source, target = exported(family)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    session = Session(target)
    for batch, length, padding, cuts in CASES:
        ids, mask, positions = rows(batch, length, padding)
        with torch.no_grad():
            expected = model(
                input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions)
            ).logits.numpy()
        found = session.logits(ids, mask, positions, cuts)
        assert found.shape == expected.shape
        assert np.abs(found - expected)[mask == 1].max() < 2e-6, (batch, length, padding, cuts)


def test_what_left_the_window_has_no_effect_and_what_is_in_it_has(exported: Any) -> None:
    """Were the window not in the graph, this model would still agree with itself: so it is looked for."""
    _, target = exported("mistral")
    session = Session(target)
    ids, mask, positions = rows(1, 2 * WINDOW, 0)
    last = session.logits(ids, mask, positions, (WINDOW + 3,))[0, -1]
    outside, inside = ids.copy(), ids.copy()
    outside[0, WINDOW - 1], inside[0, WINDOW + 1] = 5, 5
    assert np.array_equal(session.logits(outside, mask, positions, (WINDOW + 3,))[0, -1], last)
    assert not np.array_equal(session.logits(inside, mask, positions, (WINDOW + 3,))[0, -1], last)


def test_inputs_and_outputs_have_the_names_and_free_dimensions_that_servers_expect(exported: Any) -> None:
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


def test_the_directory_is_whole_valid_and_as_large_as_foretold(exported: Any) -> None:
    source, target = exported("llama-tied")
    onnx_format.checker.check_model(str(target / "model.onnx"), full_check=True)
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.onnx", "model.onnx.data",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    size = sum(path.stat().st_size for path in target.iterdir())
    assert size <= onnx.size_bytes(source, "fp32") < 2 * size
    stored = onnx_format.load(str(target / "model.onnx")).graph.initializer
    assert {onnx_format.TensorProto.DataType.Name(one.data_type) for one in stored} <= {"FLOAT", "INT64", "BOOL"}
    weights = [one.name for one in stored if one.name.startswith("model.")]
    assert len(weights) == len(set(weights)) > 0
    assert "lm_head.weight" not in weights, "a tied head is stored once"


def test_another_process_writes_the_same_bytes_and_no_file_knows_the_machine(exported: Any, tmp_path: Path) -> None:
    source, target = exported("llama")
    again = tmp_path / "elsewhere"
    code = (
        "import sys; from pathlib import Path; from ratchet.formats import onnx\n"
        "onnx.write(Path(sys.argv[1]), Path(sys.argv[2]), 'fp32', lambda *_: None)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(source), str(again)],
        cwd=tmp_path, env={"PATH": "", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for path in sorted(target.iterdir()):
        content = path.read_bytes()
        assert hashlib.sha256(content).digest() == hashlib.sha256((again / path.name).read_bytes()).digest(), path.name
        for place in (sys.prefix, str(source), str(tmp_path), str(Path.home()), "site-packages", "ratchet", ".py"):
            assert place.encode() not in content, (path.name, place)


def test_int8_stays_close_is_a_third_of_the_size_and_says_what_is_in_it(exported: Any, tmp_path: Path) -> None:
    source, plain = exported("llama-tied")
    target = written(source, tmp_path / "int8", "int8")
    onnx_format.checker.check_model(str(target / "model.onnx"), full_check=True)
    size = sum(path.stat().st_size for path in target.iterdir())
    assert size <= onnx.size_bytes(source, "int8") < 2 * size
    assert (target / "model.onnx.data").stat().st_size < 0.5 * (plain / "model.onnx.data").stat().st_size

    stored = onnx_format.load(str(target / "model.onnx"), load_external_data=False).graph.initializer
    eight = [one.name for one in stored if one.data_type == onnx_format.TensorProto.INT8]
    layer = "model.layers.0"
    products = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
    assert sorted(eight) == sorted(
        ["model.embed_tokens.weight.rows.int8", "model.embed_tokens.weight.product.int8"]
        + [f"{layer}.{name}.weight.product.int8" for name in (*products, "mlp.up_proj", "mlp.down_proj")]
    )
    floats = [one for one in stored if one.data_type == onnx_format.TensorProto.FLOAT and len(one.dims) == 2]
    assert [one.name for one in floats if not one.name.endswith(".scale")] == []

    ids, mask, positions = rows(3, 40, 0)
    expected = Session(plain).logits(ids, mask, positions, ())
    found = Session(target).logits(ids, mask, positions, (30,))
    spread = expected.std()
    assert 0 < np.abs(found - expected).max() < 0.1 * spread


def test_numbers_in_8_bits_are_off_by_half_a_step_at_most() -> None:
    matrix = np.random.default_rng(0).normal(size=(70, 96)).astype(np.float32)
    matrix[3, 32:64] = 0
    for axis, given in ((1, matrix), (0, matrix.T)):
        numbers, scales = onnx_int8.to_int8(given, axis, 32)
        assert numbers.shape == given.shape
        assert numbers.min() == -127 or numbers.max() == 127
        wide = np.repeat(scales, 32, axis=axis)
        assert (np.abs(numbers * wide - given) <= wide * 0.501).all()
    assert [onnx_int8.block_of(width) for width in (64, 48, 72)] == [32, 16, None]


def test_slices_do_not_change_what_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(1).normal(size=(33, 64)).astype(np.float32)
    whole = onnx_int8.to_int8(matrix, 1, 32)
    monkeypatch.setattr(onnx_int8, "_SLICE_NUMBERS", 200)
    for one, other in zip(whole, onnx_int8.to_int8(matrix, 1, 32), strict=True):
        assert np.array_equal(one, other)


def config(directory: Path, **values: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


@pytest.mark.parametrize("kind", ["mixtral", "mamba", "t5", "made_up"])
def test_a_kind_that_is_not_carried_is_refused_from_its_config_alone(kind: str, tmp_path: Path) -> None:
    directory = config(tmp_path / "model", model_type=kind, architectures=["Some"])
    with pytest.raises(
        SettingsError, match=rf"export\.onnx\.types: .*is a {kind} \(Some\).*carried are .*llama.*qwen2"
    ):
        onnx.require(directory)
    with pytest.raises(SettingsError, match="not carried"):
        onnx.write(directory, tmp_path / "out", "fp32", silent)
    assert not (tmp_path / "out").exists()


def test_frequencies_that_follow_the_length_are_refused(tmp_path: Path) -> None:
    old = config(tmp_path / "old", model_type="llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    new = config(tmp_path / "new", model_type="llama", rope_parameters={"full": {"rope_type": "dynamic"}})
    plain = config(tmp_path / "plain", model_type="llama", rope_parameters={"rope_type": "llama3"})
    for directory in (old, new):
        with pytest.raises(SettingsError, match="rope_type dynamic"):
            onnx.require(directory)
    onnx.require(plain)


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["none", "torn", "list"])
def test_a_config_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(BaseModelError, match=r"config\.json: "):
        onnx.require(tmp_path)


def test_a_model_without_a_fast_tokenizer_is_refused_before_it_is_traced(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"no tokenizer\.json"):
        onnx.write(config(tmp_path / "model", model_type="llama"), tmp_path / "out", "fp32", silent)


def test_what_torch_cannot_trace_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save("mamba", tmp_path / "model")
    monkeypatch.setattr(onnx, "CARRIED", (*onnx.CARRIED, "mamba"))
    with pytest.raises(BaseModelError, match="torch cannot export a MambaForCausalLM to ONNX: ") as raised:
        onnx.write(source, tmp_path / "out", "fp32", silent)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_progress_counts_bytes_up_to_all_of_them(exported: Any) -> None:
    _, target = exported("gpt2")
    seen = TOLD[target]
    assert [done for what, done, _ in seen if "tracing" in what] == [0, 1]
    counts = [(done, total) for what, done, total in seen if "weights" in what]
    assert [done for done, _ in counts] == sorted({done for done, _ in counts})
    assert counts[-1][0] == counts[-1][1] == (target / "model.onnx.data").stat().st_size
