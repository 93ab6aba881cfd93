"""Tests plots and pages of a training and of a forecast; the tests read the values back from the pages."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from page_reading import heard, read, section
from ratchet.config.train import Objective, Train
from ratchet.config.units import GIB
from ratchet.reports import curves, plots, training_page
from ratchet.reports.training_page import MemoryHeadroom
from ratchet.runs.journal import Journal
from ratchet.storage.records.training import (
    PHASES,
    AdapterAnalysis,
    MemoryForecast,
    ModuleAnalysis,
    PhaseMemory,
    TrainReport,
    parse_module_name,
)

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
         "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def analysis(layers: int = 2, kinds: tuple[str, ...] = KINDS, steps: int = 10, rank: int = 4) -> AdapterAnalysis:
    """Build the analysis of a training of so many layers, in which the first module hardly changes."""
    draw = random.Random(0)
    modules = {}
    for layer in range(layers):
        for kind in kinds:
            size = 1e-4 if not modules else draw.uniform(0.5, 2)
            values = tuple(size / (k + 1) for k in range(rank))
            modules[f"model.layers.{layer}.{kind}"] = ModuleAnalysis(
                rank=rank, parameters=1000, gradient_norms=tuple(size * draw.uniform(0.5, 2) for _ in range(steps)),
                weight_norm=50.0, update_norm=math.hypot(*values), singular_values=values, effective_rank=rank * 0.8,
            )  # fmt: skip
    still = tuple(list(modules)[:1])
    return AdapterAnalysis(
        steps=tuple(range(1, 2 * steps, 2)), modules=modules, unchanged_modules=still, advice=("Try <b>half</b>.",)
    )


def nothing() -> ModuleAnalysis:
    return ModuleAnalysis(
        rank=4, parameters=0, gradient_norms=(), weight_norm=0, update_norm=0, singular_values=(), effective_rank=0
    )


EMPTY = AdapterAnalysis(steps=(), modules={}, unchanged_modules=(), advice=())


def forecast(unit: int = GIB, parts: int = 4) -> MemoryForecast:
    """Build a forecast: each phase has one part more than the one before, up to `parts`, each of `unit` bytes."""
    names = [f"part {number}" for number in range(parts)]
    phases = [
        PhaseMemory(phase=phase, parts=dict.fromkeys(names[: number + 1], unit)) for number, phase in enumerate(PHASES)
    ]
    return MemoryForecast(
        device="cuda", rows=2, row_tokens=512, learned_tokens=100, activation_checkpointing=True, phases=tuple(phases),
        host_bytes=3 * GIB, trainable_parameters=8_388_608, total_parameters=6_746_804_224,
        notes=("Half of the tokens <are> learned from.",),
    )  # fmt: skip


REPORT = TrainReport(
    run_id="0123456789ab", adapter_digest="a" * 64, base_digest="b" * 64, data_digest="d" * 64, steps=90,
    planned_steps=100, best_step=60, kept_step=60, validation_loss={30: 2.0, 60: 1.5, 90: 1.6}, final_train_loss=1.2,
    trained_tokens=12345, input_tokens=23456, trainable_parameters=1000, total_parameters=100_000,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize(
    "drawn",
    [
        analysis(),
        analysis(layers=1, kinds=KINDS[:1], steps=1),
        analysis(layers=3, kinds=KINDS[:5]),
        analysis(steps=0),
        AdapterAnalysis(steps=(1,), modules={"lm_head": nothing()}, unchanged_modules=(), advice=()),
        EMPTY,
        AdapterAnalysis(
            steps=(1, 2),
            modules={"model.layers.0.q": nothing(), **analysis(steps=2).modules},
            unchanged_modules=(),
            advice=(),
        ),
    ],
    ids=["usual", "one-module", "three-rows", "no-steps", "outside-layers", "nothing", "some-without-gradients"],
)
def test_every_analysis_can_be_drawn(drawn: AdapterAnalysis) -> None:
    for figure in (plots.build_gradient_map(drawn), plots.build_update_figure(drawn)):
        assert figure["layout"]["height"] > 100
    kinds = {parse_module_name(name).kind for name in drawn.modules}
    titles = [note["text"] for note in plots.build_gradient_map(drawn)["layout"]["annotations"]]
    assert (len(titles), set(titles)) == (len(kinds), kinds)
    names = [one["name"] for one in plots.build_update_figure(drawn)["data"] if one.get("showlegend")]
    assert set(names) == kinds


def test_a_large_model_makes_a_figure_of_the_same_size() -> None:
    """A model of 224 modules gets one panel per kind of module at any depth, so no figure outgrows a page."""
    large = analysis(layers=32, steps=50, rank=16)
    assert len(large.modules) == 224
    small, figure = plots.build_gradient_map(analysis()), plots.build_gradient_map(large)
    assert figure["layout"]["height"] == small["layout"]["height"] < 700
    assert [len(one["z"]) for one in figure["data"]] == [32] * 7
    domains = {
        axis: [value["domain"] for name, value in figure["layout"].items() if name.startswith(axis)]
        for axis in ("xaxis", "yaxis")
    }
    assert {axis: (min(found)[0], max(end for _, end in found)) for axis, found in domains.items()} == {
        "xaxis": (0, pytest.approx(1)), "yaxis": (pytest.approx(0), pytest.approx(1)),
    }, "the panels fill the figure"  # fmt: skip


def test_the_map_has_the_gradients_and_one_scale() -> None:
    one = analysis(kinds=KINDS[:2])
    figure = plots.build_gradient_map(one)
    assert figure == plots.build_gradient_map(analysis(kinds=KINDS[:2]))
    norms = [list(module.gradient_norms) for name, module in one.modules.items() if name.endswith(KINDS[0])]
    assert [[10**value for value in row] for row in figure["data"][0]["z"]] == [pytest.approx(row) for row in norms]
    assert {one["coloraxis"] for one in figure["data"]} == {"coloraxis"}
    scale = figure["layout"]["coloraxis"]
    assert scale["cmin"] < scale["cmax"]


@pytest.mark.parametrize(
    ("objective", "unit"),
    [("sft", "nats per answer token"), ("dpo", "DPO, per pair of answers"), ("kto", "KTO, per answer")],
)
def test_the_loss_curve_has_a_page_of_its_own(tmp_path: Path, objective: Objective, unit: str) -> None:
    train = Train(objective=objective)
    journal = Journal(tmp_path / "journal.jsonl", 1)
    for step in (1, 2, 3):
        journal.append("step", step=step, loss=2.0 / step)
    journal.append("validation", step=3, loss=1.0)
    journal.close()
    figure = plots.build_loss_figure(tmp_path / "journal.jsonl", train)
    assert figure["layout"]["yaxis"]["title"]["text"] == f"loss ({unit})"
    assert [(one["name"], one["x"], one["y"]) for one in figure["data"]] == [
        ("training", [1, 2, 3], [2.0, 1.0, 2.0 / 3]), ("validation", [3], [1.0]),
    ]  # fmt: skip
    plots.draw_loss_curve(tmp_path / "journal.jsonl", tmp_path / "loss.html", train)
    page = (tmp_path / "loss.html").read_text(encoding="utf-8")
    assert len(page) < 2_100_000
    [text] = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert json.loads(text)["data"][1]["y"] == [1.0]


def curve(average_precision: float) -> dict[str, Any]:
    return {"precision": [0.5, 0.8, 1.0], "recall": [1.0, 0.5, 0.0], "average_precision": average_precision}


def test_precision_and_recall_of_the_worst_labels(tmp_path: Path) -> None:
    nothing = {"precision": [], "recall": [], "average_precision": math.nan}
    names = ["_hidden", "costs $5 and $6", "x" * 60, "<b>", "e", "f"]
    labels = {name: curve(k / 10) for k, name in enumerate(names)} | {"better": curve(0.9), "none": nothing}
    plots.draw_precision_recall(labels, tmp_path / "curves.html")
    page = read((tmp_path / "curves.html").read_text(encoding="utf-8"))
    shown = [heard(one) for one in page.iterfind(".//p[@class='key']/span")]
    assert shown == [f"{name} {k / 10:.3f}" for k, name in enumerate(names)]
    lines = [one.get("points") for one in page.iter("polyline")]
    assert lines == ["1000.0,500.0 500.0,800.0 0.0,1000.0"] * 6
    assert "The 6 lowest of 7 labels." in heard(page)
    looks = {one.get("class") for one in page.iter("polyline")}
    assert len(looks) == 6, "no two lines look alike"


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "kind", "numbers"),
    [
        ("model.layers.3.self_attn.q_proj", "self_attn.q_proj", (3,)),
        ("transformer.h.11.attn.c_attn", "attn.c_attn", (11,)),
        ("model.layers.3.mlp.experts.7.w1", "mlp.experts.w1", (3, 7)),
        ("model.layers.3.mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", (3,)),
        ("lm_head", "lm_head", ()),
        ("model.layers.3", "model.layers.3", (3,)),
    ],
)
def test_a_name_says_where_a_module_stands(name: str, kind: str, numbers: tuple[int, ...]) -> None:
    assert parse_module_name(name) == (kind, numbers)
    assert parse_module_name(name).layer == (numbers[0] if numbers else -1)


# --------------------------------------------------------------------------------------------------------------- pages


def cells(element: ElementTree.Element) -> list[list[str]]:
    return [[heard(cell) for cell in row] for row in element.iterfind(".//tbody/tr")]


def widths(bar: ElementTree.Element) -> list[float]:
    return [float(re.findall(r"width:([\d.]+)%", part.get("style", ""))[0]) for part in bar.iterfind("./i")]


def test_the_page_of_a_training_has_its_figures_pictures_and_advice() -> None:
    loss = plots.build_figure([{"x": [1], "y": [2.0]}], 300)
    page = training_page.write_train_page(REPORT, analysis(), forecast(), {"steady": 5 * GIB}, loss)
    sections = [heard(title) for title in read(page).iterfind(".//h2")]
    assert sections == ["Loss", "Recommendations for the next run", "Gradients", "Updates", "Modules", "Memory"]
    found = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert found[0] == loss
    assert [len(one["data"]) for one in found[1:]] == [7, 22], "three panels of seven kinds, and the ring of one"
    assert all(box.get("aria-label") for box in read(page).iter("div") if box.get("class") == "plot")
    assert heard(section(page, "recommendations-for-the-next-run")).endswith("Try <b>half</b>.")
    assert cells(section(page, "loss"))[1] == ["60", "", "1.5000", "kept"]
    figures = {heard(one[0]): heard(one[1]) for one in read(page).iterfind(".//header/dl/div")}
    assert figures == {
        "Validation loss": "1.5000nats per answer token, step 60",
        "Steps": "90of 100 planned",
        "Trained": "1.0 %1,000 of 100,000 parameters",
        "Barely moved": "1of 14 modules",
    }


def test_modules_are_summed_up_by_kind_and_listed_one_by_one() -> None:
    page = training_page.write_train_page(REPORT, analysis(layers=32), None, {})
    kinds, every = section(page, "modules").findall(".//table")
    assert [row[:3] for row in cells(kinds)] == [[kind, "32", "4"] for kind in KINDS]
    assert [row[5] for row in cells(kinds)] == ["1", *["–"] * 6]  # noqa: RUF001
    assert len(cells(every)) == 224
    first = cells(every)[0]
    assert (first[0], first[1], first[-1]) == ("model.layers.0.self_attn.q_proj", "4", "barely moved")


def test_bars_of_memory_are_on_one_scale_and_what_was_measured_is_marked() -> None:
    page = training_page.write_train_page(REPORT, analysis(), forecast(parts=4), {"steady": 5 * GIB})
    phases, parts = section(page, "memory").findall(".//table")
    bars = phases.findall(".//td/span[@class='bar']")
    assert [sum(widths(bar)) for bar in bars] == pytest.approx([20, 40, 60, 80, 80, 80], abs=0.01)
    marks = [bar.find("./b") for bar in bars]
    assert [mark is not None for mark in marks] == [False, False, False, False, True, False]
    assert marks[4] is not None
    assert marks[4].get("style") == "left:100.000%"
    assert cells(phases)[4] == ["steady", "", "4.00 GiB", "5.00 GiB", "-20.0%"]
    assert cells(phases)[5][3:] == ["–", "–"]  # noqa: RUF001
    assert cells(parts)[-1] == ["total", "1.00", "2.00", "3.00", "4.00", "4.00", "4.00"]
    assert cells(parts)[3] == ["part 3", "–", "–", "–", "1.00", "1.00", "1.00"]  # noqa: RUF001


def test_the_page_of_a_forecast_says_what_fits() -> None:
    limits = {"machine.micro_batch_size": 3, "train.rank": None}
    page = training_page.write_forecast_page(forecast(), MemoryHeadroom(24 * GIB, limits), ("How close they come.",))
    assert heard(next(read(page).iter("h1"))).startswith("2 rows of 512 tokens on a GPU")
    assert cells(section(page, "maximum-settings")) == [
        ["machine.micro_batch_size", "3"],
        ["train.rank", "not even one"],
    ]
    assert "it fits" in heard(read(page))
    assert [heard(item) for item in section(page, "notes").iter("li")] == [
        "Half of the tokens <are> learned from.", "How close they come.",
    ]  # fmt: skip
    small = training_page.write_forecast_page(forecast(), MemoryHeadroom(GIB, limits), ())
    assert "it does not fit" in heard(read(small))
    unknown = training_page.write_forecast_page(forecast(), None, ())
    assert "set it with --memory" in heard(section(unknown, "maximum-settings"))


@pytest.mark.parametrize(
    ("measured", "said"),
    [({}, "No memory was forecast or measured."), ({"first_step": 3 * GIB}, "first step3.00 GiB")],
    ids=["nothing", "measured-only"],
)
def test_page_without_a_forecast(measured: dict[str, int], said: str) -> None:
    page = training_page.write_train_page(REPORT, EMPTY, None, measured)
    assert said in heard(section(page, "memory"))
    assert "No module was adapted." in heard(section(page, "modules"))
    assert "No recommendations." in heard(section(page, "recommendations-for-the-next-run"))


ELSEWHERE = re.compile(
    r"""(?:src|srcset|href|action|data|poster)\s*=\s*["'](?!#)|url\(|@import|https?:|<link|<iframe"""
)


def test_pages_load_nothing_and_escape_names() -> None:
    name = "layers.0.<script>alert(1)</script>"
    hostile = AdapterAnalysis(steps=(), modules={name: nothing()}, unchanged_modules=(name,), advice=(name,))
    pages = [
        training_page.write_train_page(REPORT, analysis(), forecast(), {}),
        training_page.write_train_page(REPORT, hostile, None, {name: 5}),
        training_page.write_forecast_page(forecast(), MemoryHeadroom(24 * GIB, {}), ()),
    ]
    for page in pages:
        assert ELSEWHERE.findall(re.sub(r"<script.*?</script>", "", page, flags=re.S)) == []
        assert "default-src 'none'; " in page
    assert "<script" not in pages[2]
    assert pages[0] == training_page.write_train_page(REPORT, analysis(), forecast(), {})
    assert heard(read(pages[1])).count("<script>alert(1)</script>") >= 3
    assert "alert(1)</script>" not in pages[1]


def test_the_farthest_outlier_of_each_step_is_listed_first() -> None:
    quiet = curves.CurveSeries(0, 1, [1, 2, 3, 4], [1.0, 1.1, 1.0, 1.1], [1.0, 1.1, 1.0, 1.1], [1.0, 1.1, 1.0, 1.1])
    low, high = [1.0, -900.0, 1.0, 1.1], [1.0, 700.0, 800.0, 600.0]
    plot = curves._build_plot(curves.KINDS[0], [curves.CurveSeries(1, 1, quiet.step, quiet.mean, low, high), quiet])
    assert [(series.side, step, value) for series, step, value in plot.outliers] == [
        (1, 2, -900.0),
        (1, 3, 800.0),
        (1, 4, 600.0),
    ]
