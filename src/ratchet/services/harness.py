"""Tasks of the project, run by lm-evaluation-harness on a model that is loaded already; no network, no result cache.

Each model is scored anew: the harness's own cache is keyed by task and not by model, so that a second model would be
given the first one's scores (EleutherAI/lm-evaluation-harness issue 4063).
"""

import contextlib
import io
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config_evaluation import Harness
from ratchet.data.conversation import leaves
from ratchet.errors import SettingsError

FEWSHOT_SEED = 1234
"""Which examples a few-shot task shows; the harness's own default, fixed here because scores depend on it."""


@dataclass(frozen=True)
class HarnessScores:
    """Per-document scores of one metric of one task."""

    task: str
    metric: str
    """Name of the metric; with `.filter` when the task has named filters."""
    higher_is_better: bool
    values: dict[str, float]
    """Score by the document's hash."""


def task_files(tasks_dir: Path) -> list[Path]:
    """The YAML files of the project's tasks."""
    return sorted(tasks_dir.glob("*.yaml")) if tasks_dir.is_dir() else []


def documents(names: Sequence[str], root: Path, tasks_dir: Path, besides: Path) -> dict[str, list[str]]:
    """Every document of the named tasks: all its texts, a line each.

    Args:
        names: tasks defined in `tasks_dir`.
        root: paths of data files in the tasks are relative to this directory.
        besides: folder whose files are not looked at; tasks over them (the project's own test rows) are left out.

    Raises:
        SettingsError: a task is not defined, or its data cannot be had.
    """
    folder = re.escape(f"{besides.relative_to(root).as_posix()}/")
    own = re.compile(rf"^[^#\n]*(?:[-:\[,])\s*[\"']?(?:\./)?{folder}", re.MULTILINE)  # a value, in no comment
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in task_files(tasks_dir)}
    foreign = [name for name in names if not own.search(texts.get(name, ""))]
    if not foreign:
        return {}
    with contextlib.chdir(root), _loaded(foreign, tasks_dir, "prepare.leakage.tasks") as (_, loaded):
        # The documents themselves: a prompt has the task's instruction in it, which is no leak.
        return {name: [leaves(document) for document in _documents(task)] for name, task in loaded["tasks"].items()}


def _documents(task: Any) -> Any:
    return task.test_docs() if task.has_test_docs() else task.validation_docs()


@contextlib.contextmanager
def _loaded(names: Sequence[str], tasks_dir: Path, knob: str) -> Iterator[tuple[Any, Any]]:
    """The harness and the tasks by these names; its complaints become SettingsErrors."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings tell users of its own command what to pass
    import lm_eval
    from lm_eval.tasks import TaskManager

    try:
        known = TaskManager(include_path=str(tasks_dir), include_defaults=False)
        if unknown := [name for name in names if name not in known.all_tasks]:
            raise SettingsError(
                f"{knob}: no task {unknown[0]!r} in {tasks_dir}; there are: {', '.join(known.all_tasks) or 'none'}"
            )
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            loaded = known.load(list(names))  # a task is a program, and its data a file: both raise what they like
    except SettingsError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise SettingsError(f"{knob}: {tasks_dir}: the harness cannot load {', '.join(names)} ({cause})") from error
    try:
        yield lm_eval, loaded
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise SettingsError(f"{tasks_dir}: the harness cannot run {', '.join(names)}: {error}") from error


def run(
    model: Any, tokenizer: Any, settings: Harness, root: Path, tasks_dir: Path, batch_rows: int
) -> list[HarnessScores]:
    """Score `model` on the tasks that `settings` names.

    Args:
        root: paths of data files in the tasks are relative to this directory.

    Raises:
        SettingsError: a task is not defined in `tasks_dir`, or the harness cannot use it.
    """
    if not settings.tasks:
        return []
    with contextlib.chdir(root), _loaded(settings.tasks, tasks_dir, "evaluate.harness.tasks") as (lm_eval, loaded):
        from lm_eval.models.huggingface import HFLM

        with _as_tied_as_it_is(model):
            language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_rows, backend="causal")
        # The calls that lm_eval.simple_evaluate makes; it would also ask git and pip about this machine.
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars that cannot be turned off
            results = lm_eval.evaluate(
                lm=language_model,
                task_dict=loaded,
                limit=settings.limit,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                bootstrap_iters=0,
                log_samples=True,
            )
    return [scores for task in settings.tasks for scores in _by_metric(task, results)]


@contextlib.contextmanager
def _as_tied_as_it_is(model: Any) -> Iterator[None]:
    """Let nobody tie embeddings of a model that was loaded whole.

    lm-eval 0.4.13 ties them once more when it takes a model over, which fails where peft lets some of their rows learn.
    """
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights


def _by_metric(task: str, results: dict[str, Any]) -> Sequence[HarnessScores]:
    directions = results["higher_is_better"][task]
    found: dict[str, HarnessScores] = {}
    for sample in results["samples"][task]:
        for metric in sample["metrics"]:
            name = metric if sample["filter"] == "none" else f"{metric}.{sample['filter']}"
            scores = found.setdefault(name, HarnessScores(task, name, bool(directions[metric]), {}))
            if sample["doc_hash"] in scores.values:
                raise SettingsError(f"task {task}: two documents are the same ({sample['doc_hash'][:12]}); remove one")
            scores.values[sample["doc_hash"]] = float(sample[metric])
    return list(found.values())
