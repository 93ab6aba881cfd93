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
from ratchet.storage.records.evaluation import MetricValue

__all__ = [
    "FEWSHOT_SEED",
    "HarnessResultCache",
    "HarnessScores",
    "HarnessTaskResult",
    "find_task_files",
    "fingerprint_tasks",
    "read_documents",
    "run",
]

FEWSHOT_SEED = 1234
"""Seed that selects the few-shot examples: the default of the harness, fixed here because scores depend on the seed."""

PYTHON_SEED, NUMPY_SEED = 0, 1234
"""Seeds that the harness command sets before it loads tasks; some tasks shuffle their documents."""

CHUNK_BATCHES = 4
"""Number of batches that are stored together; a kill loses at most this many batches."""

DIRECTIONS: dict[Any, Better] = {True: "higher", False: "lower"}

DIGESTS = ("doc_hash", "prompt_hash", "target_hash")
"""Fields of a sample that the harness computes as digests."""


Request = tuple[list[int], Any]
"""Tokens of the prompt, and tokens of the continuation or generation settings."""

Items = Mapping[str, Any]
"""Output of a harness metric for each document, by document name: a number, or input of the metric's aggregation."""


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
    """Score `model` on the tasks of `settings`.

    Args:
        model: The loaded model.
        tokenizer: Its tokenizer.
        settings: evaluate.harness.
        root: Directory that paths of data files in the tasks are relative to.
        tasks_dir: Folder with the project's tasks.
        batch_rows: Requests per batch.
        results_cache: Results of this model with these numerics; its keys contain neither model nor numerics.

    Raises:
        SettingsError: A task is not defined or cannot run, its data are missing, or two documents are identical.
    """
    from ratchet.data import token_files  # Imports `datasets`, which task digests do not need.

    if duplicates := set(settings.tasks) & set(settings.builtin_tasks):
        raise SettingsError(
            f"evaluate.harness: {min(duplicates)!r} is in tasks and in builtin_tasks; rename the project's own task"
        )
    results: list[HarnessTaskResult] = []
    with contextlib.chdir(root), _seed_random_state():
        if settings.tasks:
            with token_files.use_fresh_cache():
                loader = _HarnessTaskLoader("evaluate.harness.tasks", tasks_dir)
                language_model = _build_language_model(model, tokenizer, batch_rows, results_cache)
                results += [_run_task_or_group(language_model, name, loader, settings) for name in settings.tasks]
        if settings.builtin_tasks:
            loader = _HarnessTaskLoader("evaluate.harness.builtin_tasks", None)
            language_model = _build_language_model(model, tokenizer, batch_rows, results_cache)
            results += [_run_task_or_group(language_model, name, loader, settings) for name in settings.builtin_tasks]
    return results


def read_documents(names: Sequence[str], root: Path, tasks_dir: Path, excluded_folder: Path) -> dict[str, list[str]]:
    """Read the text of every document of the named tasks.

    Args:
        names: Tasks defined in `tasks_dir`.
        root: Directory that paths of data files in the tasks are relative to.
        tasks_dir: Folder with the project's tasks.
        excluded_folder: Tasks with data files in this folder (the project's own test rows) are left out.

    Returns:
        By task: all texts of each document, joined.

    Raises:
        SettingsError: A task is not defined, or its data are missing.
    """
    folder = re.escape(f"{excluded_folder.relative_to(root).as_posix()}/")
    # Matches the folder as a YAML value, not in a comment.
    uses_folder = re.compile(rf"^[^#\n]*(?:[-:\[,])\s*[\"']?(?:\./)?{folder}", re.MULTILINE)
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in find_task_files(tasks_dir)}
    included = [name for name in names if not uses_folder.search(texts.get(name, ""))]
    if not included:
        return {}
    loader = _HarnessTaskLoader("prepare.leakage.tasks", tasks_dir)
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
        choices = task.doc_to_choice if task.OUTPUT_TYPE == "multiple_choice" else None
        harness_samples = HarnessSamples(name, samples, task.aggregation(), task.higher_is_better(), choices)
        return harness_samples.build_result(contract, allows_duplicates=loader.folder is None)
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


def mean(items: Sequence[Any]) -> Any:
    """Return the mean of numbers."""
    return sum(items) / len(items)


@dataclass(frozen=True)
class HarnessSamples:
    """Samples of a task as the harness logs them: one per document and filter."""

    task: str
    samples: Sequence[Mapping[str, Any]]
    aggregations: Mapping[str, Callable[[Sequence[Any]], Any]]
    """Function that aggregates the items of a metric, by metric."""
    directions: Mapping[str, bool | None]
    """Whether higher is better, by metric; None or missing if the task does not define it."""
    choices: Callable[[Any], Sequence[str]] | None
    """Returns the choices of a document, for multiple-choice tasks."""

    def build_result(self, contract: Any, allows_duplicates: bool) -> HarnessTaskResult:
        """Build the result of the task.

        Args:
            contract: Everything that affects the scores apart from the documents, as JSON.
            allows_duplicates: Number identical documents instead of refusing them.

        Raises:
            SettingsError: Documents are identical, or a score is not a number.
        """
        names = self._document_names(allows_duplicates)
        items: dict[tuple[str, str], dict[str, Any]] = {}
        for sample in self.samples:
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric}.{sample['filter']}"
                items.setdefault((metric, name), {})[names[sample["doc_id"]]] = sample[metric]
        scores = tuple(self._build_scores(metric, name, by_document) for (metric, name), by_document in items.items())
        first = {names[sample["doc_id"]]: sample for sample in reversed(self.samples)}
        requests = [[first[key][part] for part in DIGESTS] + [_hash_arguments(first[key])] for key in names.values()]
        return HarnessTaskResult(
            task=self.task,
            digest=digests.hash_json([contract, requests]),
            chance=self._chance([first[key] for key in names.values()]),
            scores=scores,
            documents=[self._build_document(key, first[key], scores) for key in names.values()],
        )

    def _document_names(self, allows_duplicates: bool) -> dict[int, str]:
        """Return the name of each document by its id: its hash, numbered from the second occurrence on."""
        counts: dict[str, int] = {}
        names: dict[int, str] = {}
        for sample in self.samples:
            if sample["doc_id"] in names:
                continue
            name = sample["doc_hash"]
            counts[name] = counts.get(name, 0) + 1
            names[sample["doc_id"]] = name if counts[name] == 1 else f"{name}#{counts[name]}"
        if not allows_duplicates and (duplicates := [name for name, count in counts.items() if count > 1]):
            numbers = [index + 1 for index, name in names.items() if name.split("#")[0] == duplicates[0]]
            raise SettingsError(
                f"task {self.task}: documents {' and '.join(map(str, numbers))} are identical "
                f"({duplicates[0][:12]}); remove all but one, because duplicates make a difference look too certain"
            )
        return names

    def _build_scores(self, metric: str, name: str, items: Items) -> HarnessScores:
        better = DIRECTIONS.get(self.directions.get(metric), "unknown")
        aggregation = self.aggregations.get(metric) or mean  # The default of the harness.
        kind = getattr(aggregation, "__name__", "custom function")
        try:
            if kind in ("mean", "nanmean"):
                return HarnessScores(self.task, name, better, {key: float(item) for key, item in items.items()})
            if kind == "brier_score":  # A mean over documents, but the harness computes it from all at once.
                values = {key: float(aggregation([item])) for key, item in items.items()}
                return HarnessScores(self.task, name, better, values)
            if kind == "perplexity":
                nats = {key: -float(item) for key, item in items.items()}
                return HarnessScores(self.task, name, better, nats, "perplexity", dict.fromkeys(nats, 1.0))
            if kind == "weighted_perplexity":
                nats = {key: -float(item[0]) for key, item in items.items()}
                weights = {key: float(item[1]) for key, item in items.items()}
                return HarnessScores(self.task, name, better, nats, "perplexity", weights)
            aggregate = bootstrap_metric(aggregation, list(items.values()), better, f"the harness's {kind}")
        except (TypeError, ValueError) as error:
            raise SettingsError(f"task {self.task}: metric {name} is not a number ({error})") from error
        return HarnessScores(self.task, name, better, {}, "aggregate", aggregate=aggregate)

    def _chance(self, samples: Sequence[Mapping[str, Any]]) -> float | None:
        """Compute the mean over documents of the share of right choices."""
        if self.choices is None:
            return None
        shares = []
        for sample in samples:
            right = len(sample["target"]) if isinstance(sample["target"], list) else 1
            shares.append(right / len(self.choices(sample["doc"])))
        return sum(shares) / len(shares)

    def _build_document(self, name: str, sample: Mapping[str, Any], scores: Sequence[HarnessScores]) -> dict[str, Any]:
        responses = [response for request in sample["resps"] for response in request]
        choices = list(self.choices(sample["doc"])) if self.choices else []
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


def _hash_arguments(sample: Mapping[str, Any]) -> str:
    """Hash all prompts and continuations of a sample, because choices need not come from the document."""
    return digests.hash_bytes(repr(sample["arguments"]).encode("utf-8", "surrogatepass"))


def merge_tasks(name: str, parts: Sequence[HarnessTaskResult], metrics: Sequence[str]) -> HarnessTaskResult:
    """Merge a group of tasks into one task with all of their documents, equally weighted.

    Args:
        name: Name of the group.
        parts: Results of its tasks.
        metrics: Metrics that the group declares as the mean over all documents; other metrics are left out.

    Raises:
        SettingsError: A metric is not a mean over documents in one of the tasks, or a task does not have it.
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

    def limits(language_model: HFLM) -> likelihoods.LikelihoodLimits:
        return likelihoods.LikelihoodLimits(batch_rows, language_model.max_length, tokenizer.pad_token_id)

    class CachedLanguageModel(HFLM):  # type: ignore[misc]
        """Computes likelihoods by models.likelihoods and texts by HFLM, in batches planned over all requests."""

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            pairs: list[Request] = [(list(prompt), list(continuation)) for _, prompt, continuation in requests]
            self.batch_size_per_gpu = batch_rows
            if pairs:
                scores = likelihoods.score_pairs(model, pairs, limits(self), results_cache.get_or_compute)
                if scores is not None:
                    return [(score.nats, score.is_greedy) for score in scores]

            def compute(chunk: list[int], key: str) -> Any:
                results = super(CachedLanguageModel, self)._loglikelihood_tokens(
                    [requests[i] for i in chunk], disable_tqdm=True
                )
                return [[float(nats), bool(is_greedy)] for nats, is_greedy in results]

            batches = _batch_by_context(pairs, batch_rows)
            results = _compute_with_cache(results_cache, "likelihood", batch_rows, pairs, batches, compute)
            return [(nats, is_greedy) for nats, is_greedy in results]

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
            prompts: list[Request] = [(list(self.tok_encode(r.args[0])), r.args[1]) for r in requests]
            texts = [r.args[0] for r in requests]

            def compute(chunk: list[int], key: str) -> Any:
                if any(prompts[i][1].get("do_sample") for i in chunk):
                    set_torch_seed(int(key[:15], 16))  # Seeded per chunk: a restart samples the same answers.
                return super(CachedLanguageModel, self).generate_until([requests[i] for i in chunk], disable_tqdm=True)

            batches = _batch_by_settings(prompts, texts, batch_rows)
            return _compute_with_cache(results_cache, "text", batch_rows, prompts, batches, compute)

    with _prevent_embedding_tying(model):
        return CachedLanguageModel(pretrained=model, tokenizer=tokenizer, batch_size=batch_rows, backend="causal")


@contextlib.contextmanager
def _prevent_embedding_tying(model: Any) -> Iterator[None]:
    """Prevent lm-eval from tying the embeddings of a loaded model again.

    Version 0.4.13 ties them when it wraps a model, which fails if peft trains some embedding rows.
    """
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights


def _compute_with_cache(
    results_cache: HarnessResultCache,
    kind: str,
    batch_rows: int,
    requests: Sequence[Request],
    batches: Sequence[Sequence[int]],
    compute: Callable[[list[int], str], Any],
) -> list[Any]:
    """Compute results in chunks of whole batches.

    Args:
        results_cache: Stored results.
        kind: Kind of the requests.
        batch_rows: Requests per batch.
        requests: The requests.
        batches: Batches of indices of `requests`, each index once.
        compute: Computes a chunk from its indices and its key.

    Returns:
        The results in the order of `requests`.
    """
    results: list[Any] = [None] * len(requests)
    for i in range(0, len(batches), CHUNK_BATCHES):
        chunk = [index for batch in batches[i : i + CHUNK_BATCHES] for index in batch]
        key = digests.hash_json([kind, batch_rows, [requests[index] for index in chunk]])
        chunk_results = results_cache.get_or_compute(key, partial(compute, chunk, key))
        for index, result in zip(chunk, chunk_results, strict=True):
            results[index] = result
    return results


def _batch_by_context(requests: Sequence[Request], batch_rows: int) -> list[list[int]]:
    """Batch requests as HFLM does: requests that differ only in their last token are computed once."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (prompt, continuation) in enumerate(requests):
        groups.setdefault(tuple(prompt + continuation[:-1]), []).append(index)
    first = {max(group, key=lambda index: len(requests[index][1])): group for group in groups.values()}
    order = sorted(first, key=lambda index: _descending_length_key(requests[index][0] + requests[index][1]))
    return [[i for index in order[k : k + batch_rows] for i in first[index]] for k in range(0, len(order), batch_rows)]


def _descending_length_key(ids: list[int]) -> tuple[int, tuple[int, ...]]:
    return -len(ids), tuple(ids)


def _batch_by_settings(requests: Sequence[Request], texts: Sequence[str], batch_rows: int) -> list[list[int]]:
    """Batch prompts as HFLM does: by generation settings, longest first."""
    groups: dict[str, list[int]] = {}
    for index, (_, settings) in enumerate(requests):
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(index)
    batches = []
    for group in groups.values():
        order = sorted(group, key=lambda index: (-len(requests[index][0]), texts[index]))
        batches += [order[k : k + batch_rows] for k in range(0, len(order), batch_rows)]
    return batches
