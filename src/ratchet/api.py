"""The Python API: one function for each stage and command, and `Run`, which gives access to a training run on disk.

The functions print nothing, return records and raise the exceptions of `ratchet.errors`. Each function does the same as
the command of the same name, with the same locks: a notebook and a terminal can work on one project. A function raises
SettingsError if an argument has the wrong type. On AMD CPUs with AVX-512, functions that use a model replace
torch's float32 products in the whole process (docs/evidence_speed.md).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ratchet.config import arguments
from ratchet.config.extras import explained_imports
from ratchet.console import progress
from ratchet.errors import SettingsError
from ratchet.models.lazy_imports import set_library_defaults
from ratchet.runs import directory
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RunPaths
from ratchet.runs.run import Run
from ratchet.stages import init as init_stage
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Verdict
from ratchet.storage.records.sweep import SweepReport

if TYPE_CHECKING:
    from ratchet.stages.approve import ApprovalReport
    from ratchet.stages.audit import AuditReport
    from ratchet.stages.chat import Chat
    from ratchet.stages.compare import CompareResult
    from ratchet.stages.generate import GenerateResult
    from ratchet.stages.promote import PromotionResult
    from ratchet.stages.push import PushResult
    from ratchet.stages.sweep import TrialRequestResult
    from ratchet.storage.records.monitor import MonitorReport
    from ratchet.storage.records.push import PushKind
    from ratchet.storage.records.sweep import RequestAction
    from ratchet.tuning.report import AdoptedTrial

__all__ = [
    "Project", "Run", "adopt", "approve", "audit", "base", "chat", "compare", "control_trial", "evaluate", "export",
    "gate", "generate", "init", "list_runs", "load_run", "monitor", "prepare", "promote", "push", "rollback", "sweep",
    "train",
]  # fmt: skip

Progress = Callable[[str], None]
Overrides = Mapping[str, Any]

set_library_defaults()

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _check_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function refuse arguments of the wrong type, and name the library to install if an import fails."""

    @functools.wraps(function)
    def checked_function(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        arguments.require_argument_types(function, args, kwargs)
        with explained_imports():
            return function(*args, **kwargs)

    return checked_function


init = _check_arguments(init_stage.init)


@_check_arguments
def base(project: Project, on_progress: Progress = ignore_progress) -> BaseCard:
    """Resolve and pin the base model, or build the tiny one. Raises BaseModelError, DataError, SettingsError."""
    from ratchet.stages import base as stage

    with progress.show_progress(write_line=on_progress):
        return stage.base(project, on_progress)


@_check_arguments
def prepare(project: Project) -> DatasetCard:
    """Turn source files into split, templated, tokenized rows. Raises DataError, SettingsError, BaseModelError."""
    from ratchet.stages import prepare as stage

    return stage.prepare(project)


@_check_arguments
def train(
    project: Project,
    overrides: Overrides | None = None,
    callbacks: Sequence[Callable[[Run], RunCallback]] = (),
) -> Run:
    """Fine-tune under supervision, or resume an interrupted run.

    Args:
        project: a project whose stages base and prepare have run.
        overrides: settings of this training in place of the project's, such as `{"train.rank": 16}`. Later stages do
            not see them: to export and evaluate this run, give the overrides to `Project` instead. Only settings of
            the sections train and machine are accepted.
        callbacks: functions that take the run and return a callback, which receives the events of the run's journal.

    Raises:
        InputError: settings, data or base model cannot be used.
        InterruptedRunError: stopped on request after a checkpoint was saved; call it again to resume.
        RunFailedError: the training failed repeatedly; the message has the diagnosis.
    """
    from ratchet.stages import train as stage
    from ratchet.stages.callbacks import open_callbacks

    project = _override_training(project, overrides)
    for name in overrides or {}:
        if name.split(".", 1)[0] not in ("train", "machine"):
            raise SettingsError(
                f"override {name}: ratchet.train accepts only settings of the sections train and machine; give it to "
                "ratchet.Project"
            )
    with open_callbacks(project) as defaults:

        def create_callbacks(paths: RunPaths) -> list[RunCallback]:
            return [*defaults.for_run(paths), *(create(Run(paths)) for create in callbacks)]

        result = stage.train(project, create_callbacks, defaults.publish)
    return load_run(project, result.report.run_id)


def _override_training(project: Project, overrides: Overrides | None) -> Project:
    """Return the project with overrides. Raises SettingsError for settings of stages that come before the training."""
    project = project.with_overrides(overrides)
    for name in overrides or {}:
        if name.split(".")[0] in ("base", "prepare"):
            raise SettingsError(
                f"override {name}: stages base and prepare have run without it; give it to ratchet.Project, and call "
                "ratchet.base and ratchet.prepare again"
            )
    return project


@_check_arguments
def evaluate(project: Project, on_progress: Progress = ignore_progress) -> EvaluationReport:
    """Score base, candidate and champion on the test rows. Raises DataError, ChampionError, SettingsError."""
    from ratchet.stages import evaluate as stage

    with progress.show_progress(write_line=on_progress):
        return stage.evaluate(project, on_progress).report


@_check_arguments
def export(project: Project) -> ModelBundle:
    """Merge the adapter, write every format, run each of them and compare. Raises DataError, DamagedFileError."""
    from ratchet.stages import export as stage

    return stage.export(project)


@_check_arguments
def gate(project: Project) -> Verdict:
    """Decide whether the model may be promoted: PROMOTE, HOLD, REJECT or INVALID. Raises DataError."""
    from ratchet.stages import gate as stage

    return stage.gate(project)


@_check_arguments
def sweep(
    project: Project, workers: int = 1, overrides: Overrides | None = None, on_progress: Progress = ignore_progress
) -> SweepReport:
    """Search hyperparameters, or resume an interrupted sweep.

    Args:
        project: the project; section sweep of its settings has the search space.
        workers: number of workers; each runs one trial, or `sweep.concurrent_trials`, at a time.
        overrides: settings of this sweep in place of the project's, such as `{"sweep.trials": 20}`; settings of base
            and prepare are refused, because these stages have run already.
        on_progress: receives lines about the progress.

    Raises:
        SettingsError: the space cannot be searched, or differs from that of the study.
        StorageError: the folder of the runs cannot be created.
        InterruptedRunError: stopped on request; call it again to resume.
        RunFailedError: trials or workers fail repeatedly.
    """
    from ratchet.stages import sweep as stage

    with progress.show_progress(write_line=on_progress):
        return stage.sweep(_override_training(project, overrides), workers=int(workers), on_progress=on_progress).report


@_check_arguments
def adopt(project: Project, trial: int | None = None) -> "AdoptedTrial":
    """Write the hyperparameters of a trial into params.yaml; `trial` None: the winner's. Raises DataError,
    SettingsError."""
    from ratchet.stages import sweep as stage

    return stage.adopt_trial(project, None if trial is None else int(trial))


@_check_arguments
def control_trial(
    project: Project, action: "RequestAction", trial: int, changes: Overrides | None = None, is_warm: bool = False
) -> "TrialRequestResult":
    """Stop, pause, resume or clone a trial of the sweep, while the sweep runs or later.

    Args:
        project: the project of the sweep.
        action: `stop` ends the trial for good, `pause` until `resume`; `clone` requests a trial with the values of this
            trial and `changes`, in addition to those of `sweep.trials`.
        trial: number of the trial.
        changes: changed values of a clone, such as `{"train.learning_rate": 1e-4}`.
        is_warm: start a clone from the best weights of the trial. These values must not be changed then: rank, alpha,
            targets and kind of the adapter.

    Raises:
        DataError: there is no study or no such trial, or the state of the trial does not allow the action.
        SettingsError: a changed value cannot be used, or the study has other settings than the project.
    """
    from ratchet.stages import sweep as stage

    return stage.control_trial(project, action, int(trial), changes, is_warm)


@_check_arguments
def generate(
    project: Project, prompts: str | Path, output: str | Path, model: str = "adapter",
    on_progress: Progress = ignore_progress,
) -> "GenerateResult":  # fmt: skip
    """Answer every prompt of a file, or resume.

    Args:
        project: the project; section generate of its settings defines the sampling.
        prompts: JSON, JSONL, CSV, TSV or Parquet.
        output: a .jsonl or .parquet file, one record per answer.
        model: base, adapter, merged, champion, v3, a directory, a .gguf file or a server's URL.
        on_progress: receives lines about the progress.

    Raises:
        InputError: prompts, model or output cannot be used.
        InterruptedRunError: stopped on request; call it again to resume.
    """
    from ratchet.stages import generate as stage

    return stage.generate(project, Path(prompts), Path(output), model, on_progress)


@_check_arguments
def chat(project: Project, model: str = "adapter", on_progress: Progress = ignore_progress) -> "Chat":
    """Load a model and begin a conversation: `ask(text)` returns an answer, `close()` releases the model.

    Args:
        project: the project; section generate of its settings defines the sampling.
        model: base, adapter, merged, champion, v3, a directory, a .gguf file or a server's URL.
        on_progress: receives notices, such as a batch that was made smaller.

    Raises:
        InputError: the model cannot be used.
    """
    from ratchet.stages.chat import Chat

    return Chat(project, model, on_progress)


@_check_arguments
def compare(project: Project, names: Sequence[str | Run], output: str | Path | None = None) -> "CompareResult":
    """Compare runs, trials or versions and write a page. Raises DataError if a name matches nothing."""
    from ratchet.stages import compare as stage

    texts = [name.id if isinstance(name, Run) else name for name in names]
    return stage.compare(project, texts, None if output is None else Path(output))


@_check_arguments
def promote(project: Project, *, force: bool = False, reason: str | None = None) -> "PromotionResult":
    """Register the exported model and make it champion. Repeating the call changes nothing.

    Args:
        project: a project whose stage gate has run.
        force: promote against the verdict or without approvals; the ledger records the user and the reason.
        reason: the reason for a forced promotion.

    Raises:
        GateError: the verdict is not PROMOTE, is about another model or champion, or approvals are missing.
        ChampionError: champion file and registry disagree.
    """
    from ratchet.stages import promote as stage

    return stage.promote(project, stage.PromoteOptions(force=force, reason=reason))


@_check_arguments
def approve(project: Project, verdict: str | None = None) -> "ApprovalReport":
    """Sign an approval of the promotion that a verdict allows. Repeating the call changes nothing.

    Args:
        project: its setting promote.approvals says how many approvals a promotion needs.
        verdict: the first digits of the verdict's digest; None: only return the verdict, and sign nothing.

    Raises:
        GateError: the verdict is not PROMOTE, or was compared with another champion.
        SettingsError: the project needs no approvals, no verdict has these digits, or there is no trusted key.
    """
    from ratchet.stages import approve as stage

    return stage.approve(project, verdict)


@_check_arguments
def rollback(project: Project, version: int | None = None, *, reason: str | None = None) -> "PromotionResult":
    """Make an earlier version champion again; `version` None: the previous champion.

    Raises:
        ChampionError: the version was never promoted, or champion file, ledger and registry disagree.
        GateError: the version was itself rolled back, and `reason` is None.
    """
    from ratchet.stages import promote as stage

    return stage.rollback(project, version, stage.PromoteOptions(reason=reason))


@_check_arguments
def audit(project: Project, version: int | None = None, releases: Sequence[str | Path] = ()) -> "AuditReport":
    """Check every fact about a promoted version: its data, training, judgement, promotion and deployments.

    Args:
        project: the project, or a clone of it.
        version: the registered version; None: the champion.
        releases: deployment directories to check, in addition to those that the project lists.

    Raises:
        ChampionError: the version was never promoted.
        SettingsError: a path in `releases` is not a deployment directory.
    """
    from ratchet.stages import audit as stage

    return stage.audit(project, version, [Path(path) for path in releases])


@_check_arguments
def monitor(project: Project, logs: Sequence[str | Path], version: int | None = None) -> "MonitorReport":
    """Compare the answers that a server logs with the evaluation of a version. Repeating the call counts no line twice.

    Args:
        project: the project; section monitor of its settings says what an alarm does.
        logs: JSON lines, folders of them, or `mlflow:EXPERIMENT`.
        version: the version; None: the champion.

    Raises:
        ChampionError: the version was never promoted, or there is no champion yet.
        DataError: a log is missing or was changed, or the evaluation of the version is not on this machine.
        LockHeldError: another process monitors this version.
    """
    from ratchet.stages import monitor as stage

    return stage.monitor(project, logs, stage.MonitorOptions(version))


@_check_arguments
def push(  # noqa: PLR0913 (the flags of the command, as keywords)
    project: Project, repository: str, kind: "PushKind" = "adapter", *, is_private: bool = False,
    license: str | None = None, languages: Sequence[str] = (), datasets: Sequence[str] = (), force: bool = False,
    reason: str | None = None, on_progress: Progress = ignore_progress,
) -> "PushResult":  # fmt: skip
    """Upload the exported model to the Hugging Face hub as one commit, or resume an interrupted upload.

    Args:
        project: a project whose stages export and gate have run.
        repository: OWNER/NAME; created if it does not exist. The token comes from HF_TOKEN or `hf auth login`.
        kind: adapter, merged or gguf.
        is_private: create a private repository.
        license: licence of the model, for the model card; None: that of the base.
        languages: languages for the model card, such as `["en"]`.
        datasets: datasets on the hub for the model card, in addition to those of prepare.sources.
        force: push against the gate; the model card shows the user and the reason.
        reason: the reason for a forced push.
        on_progress: receives lines about the progress.

    Raises:
        GateError: the gate did not decide PROMOTE about this adapter, or the model was rolled back.
        HubError: the hub cannot be reached or refuses; nothing was committed.
        InputError: settings, a stage's output or the repository cannot be used.
    """
    from ratchet.registry.hub_card import CardMetadata
    from ratchet.stages import push as stage

    metadata = CardMetadata(license, tuple(languages), tuple(datasets))
    options = stage.PushOptions(kind, is_private, force, reason, metadata)
    return stage.push(project, repository, options, on_progress)


@_check_arguments
def load_run(project: Project, run_id: str) -> Run:
    """Return the run with this id, or the only run whose id begins with it. Raises DataError if there is none."""
    return Run(directory.find_run(project.layout.runs, run_id))


@_check_arguments
def list_runs(project: Project) -> list[Run]:
    """Return all runs of the project, the newest first."""
    return [
        Run(paths) for paths in sorted(directory.list_runs(project.layout.runs), key=directory.recency, reverse=True)
    ]
