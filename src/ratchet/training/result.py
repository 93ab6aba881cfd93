"""What a training leaves behind: the adapter, its best and last checkpoint, and what there is to say about them."""

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
    """How many weights there are, each counted once, however it is stored."""

    trainable: int
    total: int
    quantized: int
    """In 4 bits."""


def seal(loop: TrainingLoop, found: AdapterAnalysis, base: BaseCard, parameters: ParameterCounts) -> str:
    """Seal the result of a training that is over; returns the adapter's digest.

    Args:
        loop: whose model has the weights that are kept, see `analyse_kept_weights`.
        found: that training did to them.
        base: the base's card.
        parameters: how many there are.

    Raises:
        OSError: the disk takes nothing.
    """
    task, state = loop.task, loop.state
    with files.sealed_directory(task.paths.result, RESULT) as scratch:
        adapters.save(task.model, scratch / "adapter", task.spec.base_digest)
        for name, step in (("best", state.best_step), ("last", state.step)):
            files.link_tree(task.paths.checkpoint(step), scratch / "checkpoints" / name)
        report = _build_report(loop, scratch / "adapter", parameters)
        report.save(scratch / REPORT)
        found.save(scratch / ANALYSIS)
        files.write_atomic(scratch / CARD, model_card.render_for_adapter(base, task.settings, report, found))
    return report.adapter_digest


def analyse_kept_weights(loop: TrainingLoop) -> AdapterAnalysis:
    """What training did to the weights that are kept, which the model has then. Where ranks share the base, all of
    them have to ask.

    Raises:
        NonFiniteStateError: a checkpoint that belongs to the result was damaged since it was sealed.
    """
    task, state = loop.task, loop.state
    for step in {state.best_step, state.step}:
        try:
            files.verify_sealed(task.paths.checkpoint(step), CHECKPOINT)
        except DamagedFileError as error:  # since it was sealed; the next attempt passes over it, and does it again
            raise NonFiniteStateError(str(error)) from None
    checkpoint.load_weights(task.paths.checkpoint(_select_kept_step(loop)), task.model)
    return analysis.analyse(task.model, state, task.settings)


def _select_kept_step(loop: TrainingLoop) -> int:
    return loop.state.best_step if loop.task.settings.keep == "best" else loop.state.step


def _build_report(loop: TrainingLoop, saved: Path, parameters: ParameterCounts) -> TrainReport:
    spec, state = loop.task.spec, loop.state
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
