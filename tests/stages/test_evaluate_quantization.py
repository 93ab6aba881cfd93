"""Tests of `ratchet evaluate --quantization` in a small project."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiny_project
from ratchet.cli.evaluate import format_quantization
from ratchet.errors import BaseModelError, DataError
from ratchet.models import base_model, loading
from ratchet.stages.evaluate import measure_quantization
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.training import QuantizationReport

SETTINGS = tiny_project.SETTINGS


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("quantization") / "project", SETTINGS)


@dataclass(frozen=True)
class Measured:
    """Report, terminal text and progress lines of the first measurement."""

    report: QuantizationReport
    text: str
    lines: list[str]


@pytest.fixture(scope="module")
def measured(project: ProjectLayout) -> Measured:
    lines: list[str] = []
    result = measure_quantization(Project.from_parts(project, SETTINGS), lines.append)
    text = format_quantization(result)
    return Measured(QuantizationReport.load(project.quantization / "quantization.json"), text, lines)


def test_report_table_and_plot(project: ProjectLayout, measured: Measured) -> None:
    report = measured.report
    assert [one.name for one in report.costs] == ["full", "nf4", "nf4+dq", "fp4", "fp4+dq"]
    assert report.rows == 20
    assert report.base_digest == BaseCard.load(project.base_card).digest
    assert report.dtype == "float32"
    assert len(report.costs[1].layers) == 14, "seven matrices in each of two layers; the head stays as it is"
    assert "KL divergence" in (project.quantization / "quantization.html").read_text(encoding="utf-8")
    files.verify_sealed(project.quantization, "quantization")
    table = measured.text.splitlines()
    assert f"20 validation rows, {report.tokens} answer tokens" in table[0]
    assert table[2].split()[:3] == ["full", f"{report.costs[0].weight_bytes:,}", "100.0%"]
    assert table[3].split()[0] == "nf4"
    assert any(line.startswith("fp4+dq: 20 rows, 14 layers") for line in measured.lines)


@pytest.mark.usefixtures("measured")
def test_equal_projects_give_equal_bytes(project: ProjectLayout) -> None:
    first = (project.quantization / "quantization.json").read_bytes()
    measure_quantization(Project.from_parts(project, SETTINGS))
    assert (project.quantization / "quantization.json").read_bytes() == first


def test_missing_data_or_data_of_another_base_is_refused_and_the_report_stays(
    project: ProjectLayout, measured: Measured
) -> None:
    card = project.dataset_card.read_text()
    try:
        project.dataset_card.unlink()
        with pytest.raises(DataError, match="dvc repro prepare"):
            measure_quantization(Project.from_parts(project, SETTINGS))
        project.dataset_card.write_text(json.dumps(json.loads(card) | {"base_digest": "another"}))
        with pytest.raises(BaseModelError, match="prepared for another base model"):
            measure_quantization(Project.from_parts(project, SETTINGS))
    finally:
        project.dataset_card.write_text(card)
    assert QuantizationReport.load(project.quantization / "quantization.json") == measured.report


def test_a_quantized_base_is_refused(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project", SETTINGS)
    plain = layout.tiny_model
    model = loading.load(plain, None, SETTINGS.train, loading.pick_device("cpu"))
    model.save_pretrained(plain)
    card = BaseCard.load(layout.base_card)
    card.model_copy(update={"files": base_model.fingerprint(plain)}).save(layout.base_card)
    with pytest.raises(BaseModelError, match="is stored in nf4 already"):
        measure_quantization(Project.from_parts(layout, SETTINGS))
