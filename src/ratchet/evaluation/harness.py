"""Runs tasks of lm-evaluation-harness on a loaded model and collects per-document scores that can be paired.

The cache of the harness is not used: its keys contain the task but not the model, so a second model would get the
scores of the first (EleutherAI/lm-evaluation-harness issue 4063). That cache also stores pickles. Instead, each chunk
of requests is stored under a key of the chunk's complete content. Each task runs separately, so its batches, and with
them the last digits of its scores, do not depend on the other tasks.
"""

import contextlib
import difflib
import inspect
import io
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ratchet.config.evaluate import HarnessSettings
from ratchet.data.conversation import join_leaf_texts
from ratchet.data.harness_tasks import find_task_files, fingerprint_tasks
from ratchet.errors import SettingsError
from ratchet.evaluation.metrics import Better, bootstrap_metric
from ratchet.storage import digests
from ratchet.storage.progress import report_step
from ratchet.storage.records.evaluation import MetricValue

__all__ = ["FEWSHOT_SEED", "HarnessResultCache", "HarnessScores", "HarnessTaskResult", "find_task_files",
           "fingerprint_tasks", "read_documents", "run"]  # fmt: skip

FEWSHOT_SEED = 1234
"""Seed that selects the few-shot examples: the default of the harness, fixed here because scores depend on the seed."""
PYTHON_SEED, NUMPY_SEED = 0, 1234
"""Seeds that the harness command sets before it loads tasks; some tasks shuffle their documents."""
_DIRECTIONS: dict[Any, Better] = {True: "higher", False: "lower"}

CHUNK_BATCHES = 4
"""Number of batches that are stored together; a kill loses at most this many batches."""


class HarnessResultCache(Protocol):
    """Stores results across restarts."""

    def get_or_compute(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the value stored under `key`, or store and return the result of `compute` (JSON)."""


@dataclass(frozen=True)
class HarnessScores:
    """Per-document scores of one metric of one task."""

    task: str
    metric: str
    """Name of the metric, followed by `.` and the name of the filter unless that is `none`."""
    better: Better
    values: dict[str, float]
    """Score by document name; for perplexities, nats of the whole document; empty for aggregates."""
    kind: Literal["mean", "perplexity", "aggregate"] = "mean"
    weights: dict[str, float] | None = None
    """For perplexities: the units that the nats are counted per (1, or words or bytes of a document)."""
    aggregate: MetricValue | None = None
    """For metrics of all documents together (F1, corpus BLEU, bits per byte)."""


@dataclass(frozen=True)
class HarnessTaskResult:
    """Result of one task or task group on one model."""

    task: str
    digest: str
    """Digest of configuration, documents, prompts, targets, few-shot seed and tokens of the first prompt."""
    chance: float | None
    """Share of right choices by guessing; None for tasks without choices."""
    scores: tuple[HarnessScores, ...]
    documents: list[dict[str, Any]]
    """{id, prompt, target, answers, scores: {metric: value}}, and `likelihoods` in nats of scored continuations."""


def run(  # noqa: PLR0913, PLR0917 (the model, the tasks and where they are, and how to compute)
    model: Any,
    tokenizer: Any,
    settings: HarnessSettings,
    root: Path,
    tasks_dir: Path,
    batch_rows: int,
    results_cache: HarnessResultCache,
) -> list[HarnessTaskResult]:
    """Score `model` on the tasks of `settings` in `tasks_dir`; paths of data files in the tasks are relative to `root`.

    `results_cache` has results of this model with these numerics; its keys contain neither model nor numerics. Raises
    SettingsError if a task is not defined or cannot run, its data are missing, or two documents are identical.
    """
    from ratchet.data import token_files  # Imports `datasets`, which task digests do not need.

    if duplicates := set(settings.tasks) & set(settings.builtin_tasks):
        raise SettingsError(
            f"evaluate.harness: {min(duplicates)!r} is in tasks and in builtin_tasks; rename the project's own task"
        )
    results: list[HarnessTaskResult] = []
    kinds = ("tasks", settings.tasks, tasks_dir), ("builtin_tasks", settings.builtin_tasks, None)
    with contextlib.chdir(root), _seed_random_state():
        for key, names, folder in (kind for kind in kinds if kind[1]):
            with token_files.use_fresh_cache() if folder else contextlib.nullcontext():
                loader = _HarnessTaskLoader(f"evaluate.harness.{key}", folder)
                language_model = _build_language_model(model, tokenizer, batch_rows, results_cache)
                for name in names:
                    with report_step(f"lm-evaluation-harness: {name}"):
                        results.append(_run_task_or_group(language_model, name, loader, settings))
    return results


def read_documents(
    setting: str, names: Sequence[str], root: Path, tasks_dir: Path, excluded_folder: Path
) -> dict[str, list[str]]:
    """Return, by task, the texts of every document of the named tasks in `tasks_dir`, joined.

    Tasks with data files in `excluded_folder` (the project's own test rows) are left out. Paths of data files in the
    tasks are relative to `root`. Raises SettingsError if a task is not defined, or its data are missing; the message
    names the setting that lists the tasks.
    """
    folder = re.escape(f"{excluded_folder.relative_to(root).as_posix()}/")
    # Matches the folder as a YAML value, not in a comment.
    uses_folder = re.compile(rf"^[^#\n]*(?:[-:\[,])\s*[\"']?(?:\./)?{folder}", re.MULTILINE)
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in find_task_files(tasks_dir)}
    included = [name for name in names if not uses_folder.search(texts.get(name, ""))]
    if not included:
        return {}
    loader = _HarnessTaskLoader(setting, tasks_dir)
    with contextlib.chdir(root):
        # The documents, not the prompts: the instruction of a task in every prompt is not leakage.
        return {
            name: [
                join_leaf_texts(document)
                for task in loader.load(name)["tasks"].values()
                for document in (task.test_docs() if task.has_test_docs() else task.validation_docs())
            ]
            for name in included
        }


@contextlib.contextmanager
def _seed_random_state() -> Iterator[None]:
    """Set the seeds of the harness command, so that tasks shuffle documents the same way; restore the state after."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(PYTHON_SEED)
    np.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@cache
def _index_bundled_tasks() -> Any:
    """Index the tasks of the harness once, and only if needed: 14,683 files in 0.4.13 take 20 s."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


class _HarnessTaskLoader:
    """Loads tasks of the project's folder or, without a folder, the tasks that come with the harness."""

    def __init__(self, setting: str, folder: Path | None) -> None:
        # The warnings of the harness are about options of its command.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        from lm_eval.tasks import TaskManager

        self.setting, self.folder = setting, folder
        self.task_index = (
            TaskManager(include_path=str(folder), include_defaults=False) if folder else _index_bundled_tasks()
        )

    def load(self, name: str) -> Any:
        """Load a task or group. Raises SettingsError if it is not defined, or if definition or data cannot be read."""
        if name not in self.task_index.all_tasks:
            raise SettingsError(f"{self.setting}: {self._describe_unknown_task(name)}")
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                return self.task_index.load([name])
        except Exception as error:  # Tasks are programs and their data are files: they can raise any exception.
            cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if self.folder:
                text = f"{self.setting}: {self.folder}: the harness cannot load {name} ({cause})"
            else:
                text = (
                    f"{self.setting}: the data of {name} are not available ({cause}); run this once with network "
                    "access to download them, or remove the task"
                )
            raise SettingsError(text) from error

    def _describe_unknown_task(self, name: str) -> str:
        if self.folder is None:
            near = difflib.get_close_matches(name, self.task_index.all_tasks)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            return f"lm-evaluation-harness has no task {name!r}{hint}"
        if (path := self.folder / f"{name}.yaml").is_file():
            return f"{path}: not a task of the harness, or its key `task` has another name"
        return f"found no task {name!r} in {self.folder}; available: {', '.join(self.task_index.all_tasks) or 'none'}"


def _run_task_or_group(
    language_model: Any, name: str, loader: _HarnessTaskLoader, settings: HarnessSettings
) -> HarnessTaskResult:
    """Run one task, or one group as the mean over all documents of its tasks."""
    loaded = loader.load(name)
    if name in loaded["tasks"]:
        return _run_task(language_model, name, loaded["tasks"][name], loader, settings)
    group = loaded.get("groups", {}).get(name)
    aggregates = (group and group.aggregate_metric_list) or ()
    metrics = [aggregate.metric for aggregate in aggregates if aggregate.weight_by_size]
    if not metrics:
        raise SettingsError(
            f"{loader.setting}: {name} is a group without a mean over all documents; "
            f"name its tasks instead: {', '.join(loaded['tasks'])}"
        )
    parts = [_run_task(language_model, part, task, loader, settings) for part, task in loaded["tasks"].items()]
    return merge_tasks(name, parts, metrics)


def _run_task(
    language_model: Any, name: str, task: Any, loader: _HarnessTaskLoader, settings: HarnessSettings
) -> HarnessTaskResult:
    import lm_eval

    from ratchet.models import likelihoods

    # The calls of lm_eval.simple_evaluate, which would also run git and pip to describe this machine.
    num_fewshot = task.get_config("num_fewshot")
    # A task that sets 0 examples keeps 0.
    if num_fewshot is None or (settings.num_fewshot is not None and num_fewshot != 0):
        task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # Progress bars that cannot be disabled.
            results = lm_eval.evaluate(
                lm=language_model,
                task_dict={"tasks": {name: task}},
                limit=settings.limit,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                bootstrap_iters=0,
                log_samples=True,
            )
        samples = results["samples"][name]
        first_prompt = language_model.tok_encode(samples[0]["arguments"][0][0])
        contract = [lm_eval.__version__, likelihoods.METHOD, _serialize_config(task), FEWSHOT_SEED, first_prompt]
        return _build_result(name, task, samples, contract, allows_duplicates=loader.folder is None)
    except (KeyError, ValueError, TypeError, AssertionError, FileNotFoundError) as error:
        raise SettingsError(
            f"{loader.setting}: the harness cannot run {name}: {error or type(error).__name__}"
        ) from error


def _serialize_config(task: Any) -> Any:
    """Convert a task's configuration to JSON without the path of its file."""
    config = json.loads(json.dumps(task.dump_config(), default=_serialize_value))
    if isinstance(config.get("metadata"), dict):
        config["metadata"].pop("config_source", None)
    return config


def _serialize_value(value: Any) -> str:
    """Convert a value that is not JSON: a function to its source, which is the same in every process."""
    return inspect.getsource(value) if inspect.isroutine(value) or inspect.isclass(value) else str(value)


# Per-document scores from the samples that the harness logs.


def _build_result(
    name: str, task: Any, samples: Sequence[Mapping[str, Any]], contract: Any, allows_duplicates: bool
) -> HarnessTaskResult:
    """Build the result of a task from the samples that the harness logs: one per document and filter.

    `contract` is everything that affects the scores apart from the documents, as JSON. Raises SettingsError if a score
    is not a number, or if documents are identical, unless `allows_duplicates` numbers them.
    """
    names = _name_documents(name, samples, allows_duplicates)
    items: dict[tuple[str, str], dict[str, Any]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            metric_name = metric if sample["filter"] == "none" else f"{metric}.{sample['filter']}"
            items.setdefault((metric, metric_name), {})[names[sample["doc_id"]]] = sample[metric]
    aggregations, directions = task.aggregation(), task.higher_is_better()
    scores = []
    for (metric, metric_name), by_document in items.items():
        better = _DIRECTIONS.get(directions.get(metric), "unknown")
        scores.append(_build_scores(name, metric_name, better, aggregations.get(metric), by_document))
    by_id = {sample["doc_id"]: sample for sample in reversed(samples)}
    first = {document_name: by_id[document_id] for document_id, document_name in names.items()}
    choices, shares = {}, []
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = {key: list(task.doc_to_choice(sample["doc"])) for key, sample in first.items()}
        right = {key: len(s["target"]) if isinstance(s["target"], list) else 1 for key, s in first.items()}
        shares = [right[key] / len(choices[key]) for key in first]
    # All prompts and continuations are hashed, too, because choices need not come from the document.
    arguments = {key: repr(sample["arguments"]).encode("utf-8", "surrogatepass") for key, sample in first.items()}
    requests = [
        [sample["doc_hash"], sample["prompt_hash"], sample["target_hash"], digests.hash_bytes(arguments[key])]
        for key, sample in first.items()
    ]
    return HarnessTaskResult(
        task=name,
        digest=digests.hash_json([contract, requests]),
        chance=sum(shares) / len(shares) if shares else None,
        scores=tuple(scores),
        documents=[_build_document(key, sample, choices.get(key, []), scores) for key, sample in first.items()],
    )


def _name_documents(task: str, samples: Sequence[Mapping[str, Any]], allows_duplicates: bool) -> dict[int, str]:
    """Return the name of each document by its id: its hash, numbered from the second occurrence on."""
    counts: dict[str, int] = {}
    names: dict[int, str] = {}
    for sample in samples:
        if sample["doc_id"] in names:
            continue
        name = sample["doc_hash"]
        counts[name] = counts.get(name, 0) + 1
        names[sample["doc_id"]] = name if counts[name] == 1 else f"{name}#{counts[name]}"
    if not allows_duplicates and (duplicates := [name for name, count in counts.items() if count > 1]):
        numbers = [index + 1 for index, name in names.items() if name.split("#")[0] == duplicates[0]]
        raise SettingsError(
            f"task {task}: documents {' and '.join(map(str, numbers))} are identical "
            f"({duplicates[0][:12]}); remove all but one, because duplicates make a difference look too certain"
        )
    return names


def _build_scores(task: str, metric: str, better: Better, aggregation: Any, items: Mapping[str, Any]) -> HarnessScores:
    """Build the scores of one metric.

    `items` has the output of the harness's metric by document name: a number, or input of the metric's aggregation,
    which is the mean by default.
    """
    kind = getattr(aggregation, "__name__", "custom function") if aggregation else "mean"
    try:
        if kind in ("mean", "nanmean"):
            return HarnessScores(task, metric, better, {key: float(item) for key, item in items.items()})
        if kind == "brier_score":  # A mean over documents, but the harness computes it from all at once.
            values = {key: float(aggregation([item])) for key, item in items.items()}
            return HarnessScores(task, metric, better, values)
        if kind in ("perplexity", "weighted_perplexity"):
            pairs = {key: item if kind == "weighted_perplexity" else (item, 1.0) for key, item in items.items()}
            nats = {key: -float(pair[0]) for key, pair in pairs.items()}
            weights = {key: float(pair[1]) for key, pair in pairs.items()}
            return HarnessScores(task, metric, better, nats, "perplexity", weights)
        aggregate = bootstrap_metric(aggregation, list(items.values()), better, f"the harness's {kind}")
    except (TypeError, ValueError) as error:
        raise SettingsError(f"task {task}: metric {metric} is not a number ({error})") from error
    return HarnessScores(task, metric, better, {}, "aggregate", aggregate=aggregate)


def _build_document(
    name: str, sample: Mapping[str, Any], choices: Sequence[str], scores: Sequence[HarnessScores]
) -> dict[str, Any]:
    responses = [response for request in sample["resps"] for response in request]
    target = sample["target"]
    if isinstance(target, int) and 0 <= target < len(choices):
        target = choices[target]
    document: dict[str, Any] = {
        "id": name,
        "prompt": str(sample["arguments"][0][0]),
        "target": str(target),
        "answers": [response for response in responses if isinstance(response, str)],
        "scores": {score.metric: score.values[name] for score in scores if name in score.values},
    }
    nats = [
        float(response[0]) if isinstance(response, tuple | list) else float(response)
        for response in responses
        if not isinstance(response, str)
    ]
    if nats:
        document["likelihoods"] = nats
    if choices and len(nats) >= len(choices):
        likeliest = max(range(len(choices)), key=lambda index: nats[index])
        document["answers"] = [str(choices[likeliest])]
    return document


def merge_tasks(name: str, parts: Sequence[HarnessTaskResult], metrics: Sequence[str]) -> HarnessTaskResult:
    """Merge a group of tasks into one task with all of their documents, equally weighted.

    `metrics` are those that the group declares as the mean over all documents; others are left out. Raises
    SettingsError if a metric is not a mean over documents in one of the tasks, or a task does not have it.
    """
    merged = []
    for metric in dict.fromkeys(
        scores.metric for part in parts for scores in part.scores if scores.metric.split(".", maxsplit=1)[0] in metrics
    ):
        metric_scores = [scores for part in parts for scores in part.scores if scores.metric == metric]
        if len(metric_scores) < len(parts) or any(scores.kind != "mean" for scores in metric_scores):
            raise SettingsError(
                f"task group {name}: {metric} is not a mean over documents in all of its tasks; "
                f"name the tasks instead: {', '.join(part.task for part in parts)}"
            )
        values = {f"{scores.task}/{key}": value for scores in metric_scores for key, value in scores.values.items()}
        merged.append(replace(metric_scores[0], task=name, values=values))
    documents = [{**document, "id": f"{part.task}/{document['id']}"} for part in parts for document in part.documents]
    chances = [(part.chance, len(part.documents)) for part in parts if part.chance is not None]
    chance = sum(c * n for c, n in chances) / sum(n for _, n in chances) if len(chances) == len(parts) else None
    digest = digests.hash_json({part.task: part.digest for part in parts})
    return HarnessTaskResult(name, digest, chance, tuple(merged), documents)


# The language model of the harness, with stored results and batches planned over all requests.


def _build_language_model(model: Any, tokenizer: Any, batch_rows: int, results_cache: HarnessResultCache) -> Any:
    """Build the model class of the harness, which looks up `results_cache` before it computes a chunk of batches."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import set_torch_seed

    from ratchet.models import likelihoods

    class CachedLanguageModel(HFLM):  # type: ignore[misc]
        """Computes likelihoods by models.likelihoods and texts by HFLM, in batches planned over all requests."""

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            pairs = [(list(prompt), list(continuation)) for _, prompt, continuation in requests]
            self.batch_size_per_gpu = batch_rows
            if not pairs:
                return []
            limits = likelihoods.LikelihoodLimits(batch_rows, self.max_length, tokenizer.pad_token_id)
            scores = likelihoods.score_pairs(model, pairs, limits, results_cache.get_or_compute)
            if scores is not None:
                return [(score.nats, score.is_greedy) for score in scores]

            def compute() -> Any:  # By HFLM, for models without logits at single positions.
                results = super(CachedLanguageModel, self)._loglikelihood_tokens(requests, disable_tqdm=True)
                return [[float(nats), bool(is_greedy)] for nats, is_greedy in results]

            key = digests.hash_json(["likelihood", batch_rows, pairs])
            return [(nats, is_greedy) for nats, is_greedy in results_cache.get_or_compute(key, compute)]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            try:
                return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
            except likelihoods.UnscorablePairError as error:
                document = f"document {requests[error.index].doc_id + 1}"
                raise ValueError(f"{document}: {error}; shorten or remove that document") from None

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            # HFLM requests one batch of windows at a time, in document order. Request all, so that windows are sorted.
            self.batch_size_per_gpu = sys.maxsize
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            finally:
                self.batch_size_per_gpu = batch_rows

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            prompts = [(list(self.tok_encode(request.args[0])), request.args[1]) for request in requests]

            def compute(chunk: list[int], key: str) -> Any:
                if any(prompts[i][1].get("do_sample") for i in chunk):
                    set_torch_seed(int(key[:15], 16))  # Seeded per chunk: a restart samples the same answers.
                return super(CachedLanguageModel, self).generate_until([requests[i] for i in chunk], disable_tqdm=True)

            # Batches as HFLM makes them: by generation settings, longest first.
            groups: dict[str, list[int]] = {}
            for index, (_, settings) in enumerate(prompts):
                groups.setdefault(json.dumps(settings, sort_keys=True), []).append(index)
            batches = []
            for group in groups.values():
                order = sorted(group, key=lambda index: (-len(prompts[index][0]), requests[index].args[0]))
                batches += [order[k : k + batch_rows] for k in range(0, len(order), batch_rows)]
            answers: list[Any] = [None] * len(requests)
            for start in range(0, len(batches), CHUNK_BATCHES):
                chunk = [index for batch in batches[start : start + CHUNK_BATCHES] for index in batch]
                key = digests.hash_json(["text", batch_rows, [prompts[index] for index in chunk]])
                texts = results_cache.get_or_compute(key, partial(compute, chunk, key))
                for index, text in zip(chunk, texts, strict=True):
                    answers[index] = text
            return answers

    # lm-eval 0.4.13 ties the embeddings of a model that it wraps, which fails if peft trains some embedding rows.
    model.tie_weights = lambda *_, **__: None
    try:
        return CachedLanguageModel(pretrained=model, tokenizer=tokenizer, batch_size=batch_rows, backend="causal")
    finally:
        del model.tie_weights
