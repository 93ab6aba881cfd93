"""`ratchet evaluate --quantization`: what 4 bits cost the base, on a fixed sample of the validation rows."""

import math
import statistics
from collections.abc import Callable

from ratchet import files
from ratchet.card import DatasetCard
from ratchet.config import Settings
from ratchet.data import tokens
from ratchet.errors import BaseModelError
from ratchet.evaluation.report import table
from ratchet.layout import Layout
from ratchet.model import cost, prequantized, quantized, source
from ratchet.records import BaseCard
from ratchet.records_model import QuantizationReport
from ratchet.services import cost_plot


def quantization(layout: Layout, settings: Settings, progress: Callable[[str], None]) -> str:
    """`ratchet evaluate --quantization`: full precision against 4 bits, on a fixed sample of the validation rows.

    Raises:
        BaseModelError: the base is quantised already, or not the one that the data was prepared for.
    """
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    if card.base_digest != base.digest:
        raise BaseModelError(f"{layout.data}: prepared for another base model; run `dvc repro prepare`")
    path = source.locate(layout, base)
    source.check(path, base.files)
    if (stored := prequantized.found(source.config_of(path), str(path))) is not None:
        raise BaseModelError(
            f"base.source: {base.source} is stored in {stored.kind} already, so there is no full precision to compare "
            "with; take the model that it was made from"
        )
    files.verify(layout.data, "data")
    dataset = tokens.read(layout.data, "validation").select_columns(["input_ids", "labels"])
    # Rows are sorted by a hash of their content: the first so many are a random sample.
    sample = dataset[: settings.evaluate.quantization_rows]
    rows = list(zip(sample["input_ids"], sample["labels"], strict=True))
    quantized.use_threads(settings.machine.threads)
    device = quantized.pick_device(settings.machine.device)
    costs = cost.measure(lambda train: quantized.load(path, base, train, device), settings.train, rows, progress)
    report = QuantizationReport(
        base_digest=base.digest,
        data_digest=card.digest,
        rows=len(rows),
        tokens=cost.answer_tokens(rows),
        dtype=str(quantized.pick_dtype(settings.train.compute_dtype, device)).removeprefix("torch."),
        costs=costs,
    )
    with files.sealed_directory(layout.quantization, "quantization") as scratch:
        report.save(scratch / "quantization.json")
        cost_plot.draw(report, scratch / "quantization.png")
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
    return f"{head}\n{table(rows)}"
