"""Seals the result of a training: adapter, best and last checkpoint, report, analysis and model card."""

from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import DamagedFileError, NonFiniteStateError
from ratchet.models import adapters, model_card
from ratchet.runs.directory import CHECKPOINT, RESULT
from ratchet.storage import digests, files
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.training import AdapterAnalysis
from ratchet.training import analysis, checkpoint
from ratchet.training.trainer import TrainingLoop

REPORT, ANALYSIS, CARD = "train.json", "analysis.json", "README.md"


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of weights, each counted once, however it is stored."""

    trainable: int
    total: int
    quantized: int
    """Weights stored in 4 bits."""


def seal(loop: TrainingLoop, adapter_analysis: AdapterAnalysis, base: BaseCard, parameters: ParameterCounts) -> str:
    """Seal the result of a completed training; return the adapter's digest.

    Args:
        loop: the training loop; its model has the kept weights, see `analyse_kept_weights`.
        adapter_analysis: analysis of these weights.
        base: card of the base.
        parameters: numbers of weights.

    Raises:
        OSError: the disk is full or failing.
    """
    context, state = loop.context, loop.state
    with files.sealed_directory(context.paths.result, RESULT) as scratch:
        adapters.save(context.model, scratch / "adapter", context.spec.base_digest)
        for name, step in (("best", state.best_step), ("last", state.step)):
            files.link_tree(context.paths.checkpoint(step), scratch / "checkpoints" / name)
        report = _build_report(loop, scratch / "adapter", parameters)
        report.save(scratch / REPORT)
        adapter_analysis.save(scratch / ANALYSIS)
        card = model_card.render_for_adapter(base, context.settings, report, adapter_analysis)
        files.write_atomic(scratch / CARD, card)
    return report.adapter_digest


def analyse_kept_weights(loop: TrainingLoop) -> AdapterAnalysis:
    """Load the kept weights into the model and analyse them. All ranks must call it if the base is sharded.

    Raises:
        NonFiniteStateError: a checkpoint that belongs to the result was damaged since it was sealed.
    """
    context, state = loop.context, loop.state
    for step in {state.best_step, state.step}:
        try:
            files.verify_sealed(context.paths.checkpoint(step), CHECKPOINT)
        except DamagedFileError as error:  # the next attempt skips it and trains its steps again
            raise NonFiniteStateError(str(error)) from None
    checkpoint.load_weights(context.paths.checkpoint(_select_kept_step(loop)), context.model)
    return analysis.analyse(context.model, state, context.settings)


def _select_kept_step(loop: TrainingLoop) -> int:
    return loop.state.best_step if loop.context.settings.final_checkpoint == "best" else loop.state.step


def _build_report(loop: TrainingLoop, saved: Path, parameters: ParameterCounts) -> TrainReport:
    spec, state = loop.context.spec, loop.state
    return TrainReport(
        run_id=spec.run_id,
        adapter_digest=digests.hash_tree(saved, sorted(p.name for p in saved.iterdir())),
        base_digest=spec.base_digest,
        data_digest=spec.data_digest,
        steps=state.step,
        planned_steps=loop.plan.steps,
        best_step=state.best_step,
        kept_step=_select_kept_step(loop),
        validation_loss=state.validation_loss,
        final_train_loss=state.train_loss,
        trained_tokens=state.trained_tokens,
        input_tokens=state.input_tokens,
        trainable_parameters=parameters.trainable,
        total_parameters=parameters.total,
        quantized_parameters=parameters.quantized,
    )
