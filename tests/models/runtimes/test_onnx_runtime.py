"""Tests exported ONNX directories in onnxruntime against transformers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_format
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from onnx_models import save
from ratchet.errors import DamagedFileError
from ratchet.exporters import onnx as onnx_writer
from ratchet.exporters.verification.parity import ModelRuntime
from ratchet.models.runtimes import onnx
from tiny_gguf import expected

TEXTS = ("<|turn|>Where is my order?<eos>", "  two  spaces\n\ttab", "3.14159 kg", "naïve 🦙👩‍🚀", "", "<bos><bos>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the directory of a model and that of its export."""
    root = tmp_path_factory.mktemp("runtime")
    source = save("llama", root / "hf", num_hidden_layers=1, initializer_range=0.5)
    onnx_writer.write_onnx(source, root / "onnx", "fp32", lambda *_: None)
    return source, root / "onnx"


@pytest.fixture(scope="module")
def runtime(model: tuple[Path, Path]) -> Iterator[ModelRuntime]:
    with onnx.open_runtime(model[1], threads=1) as found:
        yield found


def expected_of(source: Path, ids: list[int], positions: list[int]) -> Any:
    return expected(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), ids)[positions]


def test_tokens_are_those_of_transformers_and_special_ones_count(
    runtime: ModelRuntime, model: tuple[Path, Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model[0])
    for text in TEXTS:
        assert runtime.token_ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert runtime.token_ids(TEXTS[0])[0] == tokenizer.convert_tokens_to_ids("<|turn|>")
    assert runtime.name == f"onnxruntime {onnxruntime.__version__}"


def test_limits_and_padding_of_the_tokenizer_are_not_applied(model: tuple[Path, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(model[1], tmp_path / "copy")
    told = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    told["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    with onnx.open_runtime(directory, threads=1) as runtime:
        assert len(runtime.token_ids("a long text of many words")) > 3


def test_distributions_are_those_of_transformers(runtime: ModelRuntime, model: tuple[Path, Path]) -> None:
    ids = np.random.default_rng(2).integers(4, 300, 30).tolist()
    found = runtime.log_probabilities(ids, [0, 7, 28])
    assert runtime.log_probabilities(ids, []).shape == (0, 320)
    assert found.shape == (3, 320)
    assert found.dtype == np.float32
    assert np.abs(found - expected_of(model[0], ids, [0, 7, 28])).max() < 2e-5
    assert np.allclose(np.exp(found.astype(np.float64)).sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 4, 9, 29], ids=lambda tokens: f"{tokens}-tokens")
def test_long_rows_in_pieces_are_the_same(
    at_once: int, runtime: ModelRuntime, model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(3).integers(4, 300, 30).tolist()
    positions = [0, 3, 4, 8, 28, 29]
    monkeypatch.setattr(onnx, "_MAX_LOGITS", at_once * 320)
    found = runtime.log_probabilities(ids, positions)
    assert np.abs(found - expected_of(model[0], ids, positions)).max() < 2e-5


def test_answers_are_the_greedy_ones_of_transformers(runtime: ModelRuntime, model: tuple[Path, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model[0], dtype=torch.float32).eval()
    prompt = [5, 17, 200, 9]
    whole = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 4, dtype=torch.int64), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, 4:].tolist()  # fmt: skip
    assert len(set(whole)) > 3, "a model that repeats itself proves little"
    place = next(place for place, one in enumerate(whole) if place > 3 and one not in whole[:place])
    assert runtime.generate(prompt, 24, []) == whole
    assert runtime.generate(prompt, 24, [319, whole[place]]) == whole[: place + 1]
    assert runtime.generate(prompt, 3, []) == whole[:3]
    assert runtime.generate(prompt, 0, []) == []


def test_neither_torch_nor_transformers_is_imported(model: tuple[Path, Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from ratchet.models.runtimes import onnx\n"
        "with onnx.open_runtime(Path(sys.argv[1]), 1) as runtime:\n"
        "    print(len(runtime.generate(runtime.token_ids('a bill'), 4, [])))\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'onnxscript'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(model[1])], capture_output=True, text=True, check=False
    )
    assert (done.stdout.split("\n"), done.stderr) == (["4", "[]", ""], "")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
def test_a_file_that_is_missing_or_damaged_is_named(
    name: str, damage: str, model: tuple[Path, Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(model[1], tmp_path / "copy")
    path = directory / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"no such thing")
    said = rf"{'tokenizer.json' if name == 'tokenizer.json' else 'model.onnx'}: .*export it again"
    with pytest.raises(DamagedFileError, match=said) as raised, onnx.open_runtime(directory, threads=1):
        pass
    assert "\n" not in str(raised.value)


def test_a_graph_of_another_kind_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(model[1], tmp_path / "copy")
    value = [onnx_format.helper.make_tensor_value_info(name, 1, ["n"]) for name in ("pixels", "labels")]
    node = onnx_format.helper.make_node("Identity", ["pixels"], ["labels"])
    graph = onnx_format.helper.make_graph([node], "other", value[:1], value[1:])
    made = onnx_format.helper.make_model(graph, opset_imports=[onnx_format.helper.make_opsetid("", 18)], ir_version=10)
    onnx_format.save(made, str(directory / "model.onnx"))
    with pytest.raises(DamagedFileError, match="found inputs pixels"), onnx.open_runtime(directory, threads=1):
        pass


def test_a_token_that_the_model_does_not_have_is_an_error_and_no_crash(runtime: ModelRuntime) -> None:
    with pytest.raises(DamagedFileError, match="on 2 tokens after 0"):
        runtime.generate([5, 10**6], 2, [])
