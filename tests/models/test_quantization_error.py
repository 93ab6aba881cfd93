"""Tests quantization errors against the same figures calculated by hand on small real models."""

import json
import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor
from transformers import AutoModelForCausalLM

from families import make
from ratchet.config.train import Train
from ratchet.models import loading, quantization_error
from ratchet.models.device import Model
from ratchet.reports import plots
from ratchet.storage.records.training import QuantizationCost, QuantizationReport

CPU = torch.device("cpu")
M = -100
ROWS: list[quantization_error.Row] = [
    ([1, 5, 9, 3, 7, 2, 8, 4], [M, M, M, 3, 7, 2, 8, 4]),
    ([6, 2, 11, 13], [6, M, M, 13]),  # the first label has no token before it and is never predicted
    (list(range(20, 60)), [M] * 30 + list(range(50, 60))),
]
ANSWERS = 5 + 1 + 10
SETTINGS = Train(compute_dtype="float32")


def saved(family: str, folder: Path, **shape: int) -> Path:
    """Save a model with random weights eight times as large as usual; otherwise its logits would differ too little."""
    model = make(family, **shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return folder


def loader(path: Path) -> Callable[[Train], Model]:
    return lambda settings: loading.load(path, None, settings, CPU)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Double quantization saves more than its table of 1 KiB per layer at this width.
    return saved("llama", tmp_path_factory.mktemp("llama"), hidden_size=256, intermediate_size=192)


@pytest.fixture(scope="module")
def costs(llama: Path) -> dict[str, QuantizationCost]:
    return {one.name: one for one in quantization_error.measure_cost(loader(llama), SETTINGS, ROWS, lambda _: None)}


@pytest.fixture
def full(llama: Path) -> Model:
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()


def distributions(model: Model) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [answer positions, vocabulary] in float64, and the target tokens."""
    found, targets = [], []
    with torch.no_grad():
        for ids, labels in ROWS:
            logits = model(input_ids=torch.tensor([ids])).logits[0].double()
            for place in range(1, len(ids)):
                if labels[place] != M:
                    found.append(logits[place - 1].log_softmax(-1))
                    targets.append(labels[place])
    return torch.stack(found), torch.tensor(targets)


def rounded(weight: Tensor, kind: str, double: bool) -> Tensor:
    """Quantize and dequantize a weight with bitsandbytes' own functions."""
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type=kind)
    return dequantize_4bit(packed, state)


def test_all_variants_are_measured_full_precision_first(costs: dict[str, QuantizationCost]) -> None:
    assert list(costs) == ["full", "nf4", "nf4+dq", "fp4", "fp4+dq"]
    assert quantization_error.count_answer_tokens(ROWS) == ANSWERS
    full = costs["full"]
    assert (full.kl, full.greedy_agreement, full.layers) == (0.0, 1.0, {})
    errors = {
        name: sum(layer.weight_error for layer in costs[name].layers.values()) for name in quantization_error.VARIANTS
    }
    assert errors["nf4"] < errors["fp4"]
    assert costs["nf4+dq"].weight_bytes < costs["nf4"].weight_bytes < full.weight_bytes


@pytest.mark.parametrize("name", ["full", *quantization_error.VARIANTS])
def test_loss_divergence_and_agreement_are_those_worked_out_by_hand(
    name: str, llama: Path, full: Model, costs: dict[str, QuantizationCost]
) -> None:
    other = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    if name != "full":
        for layer in costs[name].layers:
            module = other.get_submodule(layer)
            module.weight.data = rounded(module.weight.data, name[:3], name.endswith("dq"))
    known, targets = distributions(full)
    found, _ = distributions(other)
    assert len(targets) == ANSWERS
    one = costs[name]
    assert one.loss == pytest.approx(-found[range(ANSWERS), targets].mean().item(), rel=1e-4)
    by_hand = (known.exp() * (known - found)).sum(-1).mean().item()
    assert one.kl == pytest.approx(by_hand, rel=1e-3, abs=1e-7)
    assert (by_hand > 1e-3) == (name != "full"), "the quantities compared must not all be nothing"
    assert one.greedy_agreement == (known.argmax(-1) == found.argmax(-1)).double().mean().item()


@pytest.mark.parametrize("name", quantization_error.VARIANTS)
def test_errors_of_a_layer_are_those_of_its_matrix_on_what_it_really_gets(
    name: str, full: Model, costs: dict[str, QuantizationCost]
) -> None:
    layer = "model.layers.1.mlp.down_proj"
    module = full.get_submodule(layer)
    inputs: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0].detach()))
    distributions(full)
    x, weight = torch.cat(inputs).double(), module.weight.detach()
    error = (rounded(weight, name[:3], name.endswith("dq")) - weight).double()
    one = costs[name].layers[layer]
    assert one.weight_error == pytest.approx((error.norm() / weight.double().norm()).item(), rel=1e-5)
    assert one.output_error == pytest.approx(((x @ error.T).norm() / (x @ weight.double().T).norm()).item(), rel=1e-3)
    assert one.weight_error > 0.05


@pytest.mark.parametrize("name", quantization_error.VARIANTS)
def test_bytes_are_those_of_packed_weights_and_their_constants(
    name: str, full: Model, costs: dict[str, QuantizationCost]
) -> None:
    saved_bytes = 0
    for layer, one in costs[name].layers.items():
        weight = full.get_submodule(layer).weight
        assert one.bytes_full == 4 * weight.numel()
        blocks = -(-weight.numel() // 64)
        # With double quantization: one byte per block, 4 bytes per 256 blocks, a table of 256 numbers and an offset.
        # Otherwise: 4 bytes per block.
        constants = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4 if name.endswith("dq") else 4 * blocks
        assert one.bytes_stored == weight.numel() // 2 + constants + 4 * 16
        saved_bytes += one.bytes_full - one.bytes_stored
    assert costs["full"].weight_bytes == sum(t.nbytes for t in (*full.parameters(), *full.buffers()))
    assert costs[name].weight_bytes == costs["full"].weight_bytes - saved_bytes


@pytest.mark.long
@pytest.mark.parametrize(("family", "width"), [("gpt2", "n_embd"), ("mixtral", "hidden_size")])
def test_transposed_layers_and_mixtures_of_experts(family: str, width: str, tmp_path: Path) -> None:
    path = saved(family, tmp_path, **{width: 64})
    _, nf4, _, fp4, _ = quantization_error.measure_cost(loader(path), SETTINGS, ROWS, lambda _: None)
    # Relative errors of normally distributed weights in blocks of 64, rounded to the nearest table entry: 9.2 % and
    # 12.2 %.
    for one, expected in ((nf4, 0.092), (fp4, 0.122)):
        assert one.layers
        for layer in one.layers.values():
            assert layer.weight_error == pytest.approx(expected, rel=0.1)
            assert layer.output_error == pytest.approx(expected, rel=0.5)


def test_only_two_models_are_held_at_a_time(llama: Path) -> None:
    loaded: list[weakref.ref[Any]] = []
    held = []

    def load(settings: Train) -> Model:
        model = loading.load(llama, None, settings, CPU)
        loaded.append(weakref.ref(model))
        held.append(sum(one() is not None for one in loaded))
        return model

    quantization_error.measure_cost(load, SETTINGS, ROWS[1:2], lambda _: None)
    assert held == [1, 2, 2, 2, 2]


def test_the_picture_is_drawn(tmp_path: Path, costs: dict[str, QuantizationCost]) -> None:
    report = QuantizationReport(
        base_digest="b", data_digest="d", rows=len(ROWS), tokens=ANSWERS, dtype="float32", costs=tuple(costs.values())
    )
    plots.draw_quantization_report(report, tmp_path / "cost.html")
    page = (tmp_path / "cost.html").read_text(encoding="utf-8")
    [text] = re.findall(r'<script type="application/json">(.*?)</script>', page)
    sizes = [one for one in json.loads(text)["data"] if one.get("mode") == "markers"]
    assert [one["name"] for one in sizes] == [cost.name for cost in report.costs[1:]]
    assert [one["y"][0] for one in sizes] == pytest.approx([cost.kl for cost in report.costs[1:]], rel=1e-5)
    assert math.isfinite(report.costs[1].kl)
