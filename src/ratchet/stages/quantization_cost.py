"""`ratchet evaluate --quantization`: what 4 bits cost the base, on a fixed sample of the validation rows."""

from collections.abc import Callable
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.errors import BaseModelError
from ratchet.models import base_model, loading, quantization_error
from ratchet.reports import plots
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, Record
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.training import QuantizationReport


class QuantizationResult(Record):
    """Result of `ratchet evaluate --quantization`."""

    report: QuantizationReport
    picture: Path


def measure_quantization(project: Project, on_progress: Callable[[str], None] = ignore_progress) -> QuantizationResult:
    """Compare full precision with 4 bits on a fixed sample of the validation rows.

    Raises:
        BaseModelError: the base is stored in 4 bits, or it is not the one that the data were prepared for.
        LockHeldError: another process evaluates this project.
    """
    with project.lock("evaluate"):
        return _measure(project.layout, project.settings, on_progress)


def _measure(layout: ProjectLayout, settings: Settings, on_progress: Callable[[str], None]) -> QuantizationResult:
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    if card.base_digest != base.digest:
        raise BaseModelError(f"{layout.data}: prepared for another base model; run `dvc repro prepare`")
    path = base_model.locate(layout, base)
    base_model.verify_files(path, base.files)
    if (stored := base_model.detect_stored_quantization(base_model.read_config(path), str(path))) is not None:
        raise BaseModelError(
            f"base.source: {base.source} is stored in {stored.kind} already, so there is no full precision to compare "
            "with; take the model that it was made from"
        )
    files.verify_sealed(layout.data, "data")
    dataset = token_files.open_split(layout.data, "validation").select_columns(["input_ids", "labels"])
    # Rows are sorted by a hash of their content: the first so many are a random sample.
    sample = dataset[: settings.evaluate.quantization_rows]
    rows = list(zip(sample["input_ids"], sample["labels"], strict=True))
    loading.use_threads(settings.machine.threads)
    device = loading.pick_device(settings.machine.device)
    costs = quantization_error.measure_cost(
        lambda train: loading.load(path, base, train, device), settings.train, rows, on_progress
    )
    report = QuantizationReport(
        base_digest=base.digest,
        data_digest=card.digest,
        rows=len(rows),
        tokens=quantization_error.count_answer_tokens(rows),
        dtype=str(loading.pick_dtype(settings.train.compute_dtype, device)).removeprefix("torch."),
        costs=costs,
    )
    with files.sealed_directory(layout.quantization, "quantization") as scratch:
        report.save(scratch / "quantization.json")
        plots.draw_quantization_report(report, scratch / "quantization.png")
    return QuantizationResult(report=report, picture=layout.quantization / "quantization.png")
