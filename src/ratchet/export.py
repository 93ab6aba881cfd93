"""Adapter → merged model → Hugging Face directory, reloaded from disk and compared with base + adapter."""

from pathlib import Path
from typing import Any

from ratchet import digest, files
from ratchet.card import DatasetCard
from ratchet.config import Settings
from ratchet.data import template, tokens
from ratchet.data.conversation import Conversation
from ratchet.errors import DamagedError
from ratchet.formats import hf, modelcard
from ratchet.layout import Layout
from ratchet.model import adapter, merge, quantized, scoring, source
from ratchet.records import BaseCard, TrainReport
from ratchet.records_export import Bundle, Parity
from ratchet.records_model import Analysis
from ratchet.run.directory import RunPaths, RunSpec
from ratchet.services import plots
from ratchet.services.tracking import Tracking


def export(layout: Layout, settings: Settings) -> str:
    """Run the stage.

    Raises:
        DamagedError: the adapter on disk is not the one that the training report names.
        BaseModelError: the base is gone or changed.
    """
    base, trained = BaseCard.load(layout.base_card), TrainReport.load(layout.train_report)
    card = DatasetCard.load(layout.dataset_card)
    RunSpec(train=settings.train, data_digest=card.digest, base_digest=base.digest).require(trained)
    base_path = source.locate(layout, base)
    source.check(base_path, base.files)
    files.verify(layout.train, "train")
    names = sorted(p.name for p in layout.adapter.iterdir())
    if digest.of_tree(layout.adapter, names) != trained.adapter_digest:
        raise DamagedError(f"{layout.adapter}: not the adapter of run {trained.run_id}; run `dvc repro -f train`")
    quantized.use_threads(settings.machine.threads)
    device = quantized.pick_device(settings.machine.device)
    dtype = quantized.pick_dtype(settings.export.dtype, device)
    test = tokens.read(layout.data, "test")
    some = test.select(range(min(settings.export.parity_rows, len(test))))
    input_ids, labels = some["input_ids"][:], some["labels"][:]

    tokenizer = source.load_tokenizer(base_path, layout.own_template, base.added_tokens, base.remote_code)
    adapted = adapter.load(quantized.load(base_path, base, settings.train, device), layout.adapter)
    reference = scoring.logits_of(adapted, input_ids)
    merged = merge.merge(adapted, base_path, settings.export.merge_base, dtype, base.remote_code)
    del adapted
    with files.sealed_directory(layout.export, "export") as scratch:
        model_directory = scratch / layout.merged_model.name
        readme = modelcard.of_model(base, settings.train, trained, settings.export, _analysis(layout))
        hf.write(merged, tokenizer, scoring.end_tokens(merged, tokenizer, card.end_of_turn), readme, model_directory)
        del merged
        reloaded, reloaded_tokenizer = hf.reopen(model_directory, dtype, device, base.remote_code)
        _check_tokenizer(tokenizer, reloaded_tokenizer, Conversation.from_json(test["conversation"][0]).question)
        parity = _parity(scoring.compare_logits(reference, reloaded, input_ids, labels), len(input_ids))
        bundle = _bundle(model_directory, base, trained, settings, parity)
        bundle.save(scratch / layout.bundle.name)
    _track(layout, settings, bundle)
    return describe(bundle)


def _analysis(layout: Layout) -> Analysis | None:
    """What training did, for the model card; a run of an earlier version has none."""
    path = layout.train / "analysis.json"
    return Analysis.load(path) if path.exists() else None


def _check_tokenizer(before: Any, after: Any, question: Conversation) -> None:
    if template.prompt_ids(before, question) != template.prompt_ids(after, question):
        raise DamagedError("the exported tokenizer encodes a test row differently from the base's")


def _parity(found: scoring.LogitDifference, rows: int) -> Parity:
    return Parity(
        rows=rows,
        tokens=found.positions,
        max_logit_difference=found.greatest,
        mean_logit_difference=found.mean,
        greedy_agreement=found.agreeing / found.answer_positions,
    )


def _bundle(directory: Path, base: BaseCard, trained: TrainReport, settings: Settings, parity: Parity) -> Bundle:
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return Bundle(
        model_digest=digest.of_tree(directory, names),
        adapter_digest=trained.adapter_digest,
        base_digest=base.digest,
        data_digest=trained.data_digest,
        run_id=trained.run_id,
        merge_base=settings.export.merge_base,
        dtype=settings.export.dtype,
        size_bytes=sum((directory / name).stat().st_size for name in names),
        base_form=settings.train.base_form,
        parity=parity,
    )


def _track(layout: Layout, settings: Settings, bundle: Bundle) -> None:
    figures = {
        "export/max_logit_difference": bundle.parity.max_logit_difference,
        "export/mean_logit_difference": bundle.parity.mean_logit_difference,
        "export/greedy_agreement": bundle.parity.greedy_agreement,
        "export/size_bytes": float(bundle.size_bytes),
    }
    tracking = Tracking(layout, settings.promote.model_name)
    run = tracking.observer(RunPaths(layout.runs / bundle.run_id), settings, plots.loss_curve)
    tracking.report(run, figures, {"export": [layout.bundle]}, {"ratchet.model_digest": bundle.model_digest})


def describe(bundle: Bundle) -> str:
    """The bundle in a few lines, for the terminal."""
    p = bundle.parity
    return (
        f"model {bundle.model_digest[:12]}: {bundle.size_bytes / 1e6:.1f} MB in {bundle.dtype}, merged into the "
        f"{bundle.merge_base} base\n"
        f"  reloaded from disk against base + adapter on {p.rows} rows ({p.tokens} positions): logits differ by "
        f"{p.max_logit_difference:.2g} at most, {p.mean_logit_difference:.2g} on average; same greedy token at "
        f"{p.greedy_agreement:.2%} of the answer positions"
    )
