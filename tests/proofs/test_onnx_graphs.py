"""Proves the README's sentence "Exports are tested before they ship" for ONNX: for each architecture, the graph
computes the same values as the model, and each export gives the same bytes."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_format
import pytest
import torch
from transformers import AutoModelForCausalLM

from onnx_export_cases import (
    LAYERS,
    Session,
    exported,  # noqa: F401 (a fixture)
    rows,
    written,
)

PACKAGES = ("exporters", "models")
CASES = [
    (1, 1, 0, ()), (1, 2, 0, ()), (3, 7, 0, ()), (2, 33, 0, ()), (2, 30, 3, (7,)), (3, 41, 2, (33, 40)),
    (1, 4, 0, (1, 2, 3)),
]  # fmt: skip
"""Batch size, length, padding on the left, and the positions at which a row is cut into pieces that use the cache. No
cut row has pieces on both sides of SHORT: the cache would keep keys of the other frequency set, as it does in
transformers."""


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


def test_another_process_writes_the_same_bytes_and_no_file_knows_the_machine(exported: Any, tmp_path: Path) -> None:
    source, target = exported("llama")
    again = tmp_path / "elsewhere"
    code = (
        "import sys; from pathlib import Path; from ratchet.exporters import onnx\n"
        "onnx.write_onnx(Path(sys.argv[1]), Path(sys.argv[2]), 'fp32', lambda *_: None)"
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
