"""`ratchet evaluate --quantization`: what 4 bits cost the base, on a fixed sample of the validation rows."""

import math
import statistics
from collections.abc import Callable

from ratchet.config.schema import Settings
from ratchet.data import token_files
from ratchet.errors import BaseModelError
from ratchet.models import base_model, loading, prequantized, quantization_error
from ratchet.reports import plots
from ratchet.stages.evaluate import format_table
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.training import QuantizationReport


def measure_quantization(layout: ProjectLayout, settings: Settings, progress: Callable[[str], None]) -> str:
    """`ratchet evaluate --quantization`: full precision against 4 bits, on a fixed sample of the validation rows.

    Raises:
        BaseModelError: the base is quantised already, or not the one that the data was prepared for.
    """
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    if card.base_digest != base.digest:
        raise BaseModelError(f"{layout.data}: prepared for another base model; run `dvc repro prepare`")
    path = base_model.locate(layout, base)
    base_model.verify_files(path, base.files)
    if (stored := prequantized.detect(base_model.read_config(path), str(path))) is not None:
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
        lambda train: loading.load(path, base, train, device), settings.train, rows, progress
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
    return f"{describe_quantization(report)}\n  {layout.quantization / 'quantization.png'}"


def describe_quantization(report: QuantizationReport) -> str:
    """A table for the terminal: a row a way of storing the base."""
    full = report.costs[0].weight_bytes
    rows = [["", "bytes", "of full", "loss", "perplexity", "KL", "same token", "layer error", "worst layer"]]
    for one in report.costs:
        errors = {name: layer.output_error for name, layer in one.layers.items()}
        worst = max(errors, key=lambda name: errors[name], default="-")
        rows.append(
            [
                one.name, f"{one.weight_bytes:,}", f"{one.weight_bytes / full:.1%}", f"{one.loss:.4f}",
                f"{math.exp(one.loss):.3f}", f"{one.kl:.4f}", f"{one.greedy_agreement:.1%}",
                f"{statistics.median(errors.values()):.1%}" if errors else "-",
                f"{worst} {errors[worst]:.1%}" if errors else "-",
            ]
        )  # fmt: skip
    head = (
        f"4 bits against full precision ({report.dtype}): {report.rows} validation rows, {report.tokens} answer tokens"
    )
    return f"{head}\n{format_table(rows)}"
