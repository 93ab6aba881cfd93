"""What lm-evaluation-harness says of each document, as scores that can be paired and documents that can be shown."""

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

from ratchet.config.evaluation import HarnessSettings
from ratchet.data.conversation import join_leaf_texts
from ratchet.data.harness_tasks import find_task_files, fingerprint_tasks
from ratchet.errors import SettingsError
from ratchet.evaluation.metric_modules.figures import Better, bootstrap_metric
from ratchet.storage import digests
from ratchet.storage.records.evaluation import MetricValue

DIRECTIONS: dict[Any, Better] = {True: "higher", False: "lower"}

Items = Mapping[str, Any]
"""What the harness's function of a metric said of each document: a number, or what its aggregation wants."""


def mean(items: Sequence[Any]) -> Any:
    """Of numbers."""
    return sum(items) / len(items)


@dataclass(frozen=True)
class HarnessScores:
    """Per-document scores of one metric of one task."""

    task: str
    metric: str
    """Name of the metric; with `.filter` when the task has named filters."""
    better: Better
    values: dict[str, float]
    """Score by the document's hash; for perplexities nats of the whole document; empty for figures."""
    kind: Literal["mean", "perplexity", "figure"] = "mean"
    weights: dict[str, float] | None = None
    """For perplexities: what the nats are counted per (1, words or bytes of a document)."""
    figure: MetricValue | None = None
    """For what is no function of documents' scores (F1, BLEU of a corpus, bits per byte)."""


@dataclass(frozen=True)
class HarnessTaskResult:
    """One task, or one group of tasks, on one model."""

    task: str
    digest: str
    """Contract: configuration, documents, prompts and targets, few-shot seed, tokens of the first prompt."""
    chance: float | None
    """Share of choices that guessing gets right; None where there is nothing to choose from."""
    scores: tuple[HarnessScores, ...]
    documents: list[dict[str, Any]]
    """{id, prompt, target, answers, scores: {metric: value}}, and `likelihoods` (nats) of what was scored."""


@dataclass(frozen=True)
class HarnessSamples:
    """A task's samples as the harness logs them: one a document and filter."""

    task: str
    samples: Sequence[Mapping[str, Any]]
    aggregations: Mapping[str, Callable[[Sequence[Any]], Any]]
    """What makes a metric's figure of its items, by metric."""
    directions: Mapping[str, bool | None]
    """Whether higher is better, by metric; None or nothing where nobody has said."""
    choices: Callable[[Any], Sequence[str]] | None
    """What can be chosen for a document, in tasks of choice."""

    def result(self, contract: Any, repeats: bool) -> HarnessTaskResult:
        """Everything that is kept of the task.

        Args:
            contract: what made the scores beside the documents, as JSON.
            repeats: count documents that are the same, instead of refusing them.

        Raises:
            SettingsError: documents are the same, or a score is no number.
        """
        names = self._names(repeats)
        items: dict[tuple[str, str], dict[str, Any]] = {}
        for sample in self.samples:
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric}.{sample['filter']}"
                items.setdefault((metric, name), {})[names[sample["doc_id"]]] = sample[metric]
        scores = tuple(self._scores(metric, name, found) for (metric, name), found in items.items())
        first = {names[sample["doc_id"]]: sample for sample in reversed(self.samples)}
        asked = [[first[key][part] for part in HASHES] + [_join_prompt_texts(first[key])] for key in names.values()]
        return HarnessTaskResult(
            task=self.task,
            digest=digests.hash_json([contract, asked]),
            chance=self._chance([first[key] for key in names.values()]),
            scores=scores,
            documents=[self._document(key, first[key], scores) for key in names.values()],
        )

    def _names(self, repeats: bool) -> dict[int, str]:
        """The name of each document: its hash, with a number from its second occurrence on."""
        seen: dict[str, int] = {}
        found: dict[int, str] = {}
        for sample in self.samples:
            if sample["doc_id"] in found:
                continue
            name = sample["doc_hash"]
            seen[name] = seen.get(name, 0) + 1
            found[sample["doc_id"]] = name if seen[name] == 1 else f"{name}#{seen[name]}"
        if not repeats and (twice := [name for name, count in seen.items() if count > 1]):
            places = [place + 1 for place, name in found.items() if name.split("#")[0] == twice[0]]
            raise SettingsError(
                f"task {self.task}: documents {' and '.join(map(str, places))} are the same ({twice[0][:12]}); "
                "keep one of them, for a pair that counts twice makes a difference look surer than it is"
            )
        return found

    def _scores(self, metric: str, name: str, items: Items) -> HarnessScores:
        better = DIRECTIONS.get(self.directions.get(metric), "unknown")
        aggregation = self.aggregations.get(metric) or mean  # as the harness does where nothing is said
        kind = getattr(aggregation, "__name__", "own function")
        try:
            if kind in ("mean", "nanmean"):
                return HarnessScores(self.task, name, better, {key: float(item) for key, item in items.items()})
            if kind == "brier_score":  # a mean of documents, computed from all at once
                values = {key: float(aggregation([item])) for key, item in items.items()}
                return HarnessScores(self.task, name, better, values)
            if kind == "perplexity":
                nats = {key: -float(item) for key, item in items.items()}
                return HarnessScores(self.task, name, better, nats, "perplexity", dict.fromkeys(nats, 1.0))
            if kind == "weighted_perplexity":
                nats = {key: -float(item[0]) for key, item in items.items()}
                return HarnessScores(
                    self.task, name, better, nats, "perplexity", {key: float(item[1]) for key, item in items.items()}
                )
            figure = bootstrap_metric(aggregation, list(items.values()), better, f"the harness's {kind}")
        except (TypeError, ValueError) as error:
            raise SettingsError(f"task {self.task}: metric {name} gives no number ({error})") from error
        return HarnessScores(self.task, name, better, {}, "figure", figure=figure)

    def _chance(self, samples: Sequence[Mapping[str, Any]]) -> float | None:
        """Mean over documents of the share of their choices that is right."""
        if self.choices is None:
            return None
        shares = []
        for sample in samples:
            right = len(sample["target"]) if isinstance(sample["target"], list) else 1
            shares.append(right / len(self.choices(sample["doc"])))
        return sum(shares) / len(shares)

    def _document(self, name: str, sample: Mapping[str, Any], scores: Sequence[HarnessScores]) -> dict[str, Any]:
        said = [answer for one in sample["resps"] for answer in one]
        choices = list(self.choices(sample["doc"])) if self.choices else []
        target = sample["target"]
        if isinstance(target, int) and 0 <= target < len(choices):
            target = choices[target]
        document: dict[str, Any] = {
            "id": name,
            "prompt": str(sample["arguments"][0][0]),
            "target": str(target),
            "answers": [answer for answer in said if isinstance(answer, str)],
            "scores": {one.metric: one.values[name] for one in scores if name in one.values},
        }
        nats = [
            float(one[0]) if isinstance(one, tuple | list) else float(one) for one in said if not isinstance(one, str)
        ]
        if nats:
            document["likelihoods"] = nats
        if choices and len(nats) >= len(choices):
            likeliest = max(range(len(choices)), key=lambda place: nats[place])
            document["answers"] = [str(choices[likeliest])]
        return document


HASHES = ("doc_hash", "prompt_hash", "target_hash")


def _join_prompt_texts(sample: Mapping[str, Any]) -> str:
    """Of every prompt and continuation: choices may come from elsewhere than the document."""
    return digests.hash_bytes(repr(sample["arguments"]).encode("utf-8", "surrogatepass"))


def merge_tasks(name: str, parts: Sequence[HarnessTaskResult], metrics: Sequence[str]) -> HarnessTaskResult:
    """A group of tasks as one: all documents of all its tasks, each counting the same.

    Args:
        metrics: those that the group declares as the mean over all documents; others are left to the tasks.

    Raises:
        SettingsError: a metric is no mean of documents in one of the tasks, or is not given by all of them.
    """
    found = []
    for metric in dict.fromkeys(
        one.metric for part in parts for one in part.scores if _base_metric_name(one) in metrics
    ):
        inner = [one for part in parts for one in part.scores if one.metric == metric]
        if len(inner) < len(parts) or any(one.kind != "mean" for one in inner):
            raise SettingsError(
                f"task group {name}: {metric} is no mean of documents in all of its tasks; "
                f"name them instead: {', '.join(part.task for part in parts)}"
            )
        values = {f"{one.task}/{key}": value for one in inner for key, value in one.values.items()}
        found.append(replace(inner[0], task=name, values=values))
    documents = [{**one, "id": f"{part.task}/{one['id']}"} for part in parts for one in part.documents]
    chances = [(part.chance, len(part.documents)) for part in parts if part.chance is not None]
    chance = sum(c * n for c, n in chances) / sum(n for _, n in chances) if len(chances) == len(parts) else None
    contract = digests.hash_json({part.task: part.digest for part in parts})
    return HarnessTaskResult(name, contract, chance, tuple(found), documents)


def _base_metric_name(scores: HarnessScores) -> str:
    return scores.metric.split(".", maxsplit=1)[0]


# Tasks of lm-evaluation-harness on a model that is loaded already: the project's own, and its library's by name.
#
# The harness's own cache is not used: it is keyed by task and not by model, so that a second model would be given the
# first one's scores (EleutherAI/lm-evaluation-harness issue 4063), and it holds pickles. What survives a kill instead
# is
# each chunk of requests, under a key of everything that was asked. A task is run without the others, so its batches,
# and
# with them the last digits of its scores, do not depend on what else is run.

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
"""Which examples a few-shot task shows; the harness's own default, fixed here because scores depend on it."""

PYTHON_SEED, NUMPY_SEED = 0, 1234
"""What the harness's command sets before it loads tasks; some shuffle their documents."""

CHUNK_BATCHES = 4
"""Batches that are kept, and lost by a kill, together."""

Asked = tuple[list[int], Any]
"""What a request says: tokens of the prompt, and tokens of the continuation or settings of generation."""


class HarnessResultCache(Protocol):
    """Where results are kept between attempts."""

    def take(self, key: str, make: Callable[[], Any]) -> Any:
        """What is kept under `key`, else what `make` returns (JSON), kept from now on."""


def read_documents(names: Sequence[str], root: Path, tasks_dir: Path, besides: Path) -> dict[str, list[str]]:
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
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in find_task_files(tasks_dir)}
    foreign = [name for name in names if not own.search(texts.get(name, ""))]
    if not foreign:
        return {}
    shelf = _HarnessTaskLoader("prepare.leakage.tasks", tasks_dir)
    with contextlib.chdir(root):
        # The documents themselves: a prompt has the task's instruction in it, which is no leak.
        return {
            name: [
                join_leaf_texts(document)
                for task in shelf.load(name)["tasks"].values()
                for document in _evaluation_documents(task)
            ]
            for name in foreign
        }


def _evaluation_documents(task: Any) -> Any:
    return task.test_docs() if task.has_test_docs() else task.validation_docs()


@cache
def _index_bundled_tasks() -> Any:
    """The index of the harness's own tasks: 14,683 files in 0.4.13, 20 s, so only when asked for, and once."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


class _HarnessTaskLoader:
    """Tasks to be had: of the project's folder, or (no folder) those that come with the harness."""

    def __init__(self, knob: str, folder: Path | None) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings tell users of its own command what to pass
        from lm_eval.tasks import TaskManager

        self.knob, self.folder = knob, folder
        self.known = TaskManager(include_path=str(folder), include_defaults=False) if folder else _index_bundled_tasks()

    def load(self, name: str) -> Any:
        """The task or group by this name. Raises SettingsError: not there, or it or its data cannot be read."""
        if name not in self.known.all_tasks:
            raise SettingsError(f"{self.knob}: {self._unknown(name)}")
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                return self.known.load([name])  # a task is a program, and its data a file: both raise what they like
        except Exception as error:
            cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if self.folder:
                text = f"{self.knob}: {self.folder}: the harness cannot load {name} ({cause})"
            else:
                text = (
                    f"{self.knob}: the data of {name} cannot be had ({cause}); they are fetched from a network once: "
                    "run this where there is one, or take the task out"
                )
            raise SettingsError(text) from error

    def _unknown(self, name: str) -> str:
        if self.folder is None:
            near = difflib.get_close_matches(name, self.known.all_tasks)
            return f"lm-evaluation-harness has no task {name!r}" + (f"; perhaps {' or '.join(near)}" if near else "")
        if (path := self.folder / f"{name}.yaml").is_file():
            return f"{path}: no task of the harness, or one of another name (its key `task`)"
        return f"no task {name!r} in {self.folder}; there are: {', '.join(self.known.all_tasks) or 'none'}"


def run(  # noqa: PLR0913, PLR0917 (a model, what is asked of it, where that is, and how)
    model: Any,
    tokenizer: Any,
    settings: HarnessSettings,
    root: Path,
    tasks_dir: Path,
    batch_rows: int,
    recall: HarnessResultCache,
) -> list[HarnessTaskResult]:
    """Score `model` on the tasks that `settings` names.

    Args:
        root: paths of data files in the tasks are relative to this directory.
        batch_rows: requests computed at once.
        recall: what was asked of this very model, computing in this very way, before.

    Raises:
        SettingsError: a task is not defined or cannot be used, its data cannot be had, or two documents are the same.
    """
    from ratchet.data import token_files  # loads `datasets`, which whoever asks for a fingerprint need not wait for

    if both := set(settings.tasks) & set(settings.library):
        raise SettingsError(f"evaluate.harness: {min(both)!r} is in tasks and in library; rename the project's own")
    found: list[HarnessTaskResult] = []
    with contextlib.chdir(root), _seed_random_state():
        if settings.tasks:
            with token_files.use_fresh_cache():
                shelf = _HarnessTaskLoader("evaluate.harness.tasks", tasks_dir)
                asked = _build_language_model(model, tokenizer, batch_rows, recall)
                found += [_run_task_or_group(asked, name, shelf, settings) for name in settings.tasks]
        if settings.library:
            shelf = _HarnessTaskLoader("evaluate.harness.library", None)
            asked = _build_language_model(model, tokenizer, batch_rows, recall)
            found += [_run_task_or_group(asked, name, shelf, settings) for name in settings.library]
    return found


@contextlib.contextmanager
def _seed_random_state() -> Iterator[None]:
    """Random numbers as the harness's command has them, so that a task that shuffles shows everyone the same."""
    before, numbers = random.getstate(), np.random.get_state()
    random.seed(PYTHON_SEED)
    np.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)


def _build_language_model(model: Any, tokenizer: Any, batch_rows: int, recall: HarnessResultCache) -> Any:
    """The harness's own model class, which asks `recall` before it computes a chunk of batches."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import set_torch_seed

    from ratchet.models import likelihoods

    def limits(asked: HFLM) -> likelihoods.LikelihoodLimits:
        return likelihoods.LikelihoodLimits(batch_rows, asked.max_length, tokenizer.pad_token_id)

    class Recalling(HFLM):  # type: ignore[misc]
        """Likelihoods are computed by model/likelihoods.py, texts by HFLM; in batches planned over all requests."""

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            asked: list[Asked] = [(list(prompt), list(rest)) for _, prompt, rest in requests]
            self.batch_size_per_gpu = batch_rows
            if asked and (ours := likelihoods.score_pairs(model, asked, limits(self), recall.take)) is not None:
                return [(one.nats, one.greedy) for one in ours]

            def make(chunk: list[int], key: str) -> Any:
                found = super(Recalling, self)._loglikelihood_tokens([requests[i] for i in chunk], disable_tqdm=True)
                return [[float(nats), bool(greedy)] for nats, greedy in found]

            found = _compute_with_cache(
                recall, "likelihood", batch_rows, asked, _batch_by_context(asked, batch_rows), make
            )
            return [(nats, greedy) for nats, greedy in found]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            try:
                return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
            except likelihoods.UnscorablePairError as error:
                where = f"document {requests[error.place].doc_id + 1}"
                raise ValueError(f"{where}: {error}; change that document, or take it out") from None

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            # HFLM asks for as many windows as a batch has rows, in the order of the documents: all are to be sorted.
            self.batch_size_per_gpu = sys.maxsize
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            finally:
                self.batch_size_per_gpu = batch_rows

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            asked: list[Asked] = [(list(self.tok_encode(r.args[0])), r.args[1]) for r in requests]
            texts = [r.args[0] for r in requests]

            def make(chunk: list[int], key: str) -> Any:
                if any(asked[i][1].get("do_sample") for i in chunk):
                    set_torch_seed(int(key[:15], 16))  # a stream a chunk: what was drawn before a kill is drawn again
                return super(Recalling, self).generate_until([requests[i] for i in chunk], disable_tqdm=True)

            return _compute_with_cache(
                recall, "text", batch_rows, asked, _batch_by_settings(asked, texts, batch_rows), make
            )

    with _prevent_embedding_tying(model):
        return Recalling(pretrained=model, tokenizer=tokenizer, batch_size=batch_rows, backend="causal")


@contextlib.contextmanager
def _prevent_embedding_tying(model: Any) -> Iterator[None]:
    """Let nobody tie embeddings of a model that was loaded whole.

    lm-eval 0.4.13 ties them once more when it takes a model over, which fails where peft lets some of their rows learn.
    """
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights


def _compute_with_cache(
    recall: HarnessResultCache,
    kind: str,
    batch_rows: int,
    asked: Sequence[Asked],
    batches: Sequence[Sequence[int]],
    make: Callable[[list[int], str], Any],
) -> list[Any]:
    """Results in the order of `asked`, computed in chunks of whole batches.

    Args:
        batches: positions in `asked`, each once.
        make: computes a chunk, given its positions and its key.
    """
    found: list[Any] = [None] * len(asked)
    for i in range(0, len(batches), CHUNK_BATCHES):
        chunk = [place for batch in batches[i : i + CHUNK_BATCHES] for place in batch]
        key = digests.hash_json([kind, batch_rows, [asked[place] for place in chunk]])
        for place, result in zip(chunk, recall.take(key, partial(make, chunk, key)), strict=True):
            found[place] = result
    return found


def _batch_by_context(asked: Sequence[Asked], batch_rows: int) -> list[list[int]]:
    """Batches of requests as HFLM makes them: continuations of one token share the computation of their prompt."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, (prompt, rest) in enumerate(asked):
        groups.setdefault(tuple(prompt + rest[:-1]), []).append(place)
    first = {max(group, key=lambda place: len(asked[place][1])): group for group in groups.values()}
    order = sorted(first, key=lambda place: _descending_length_key(asked[place][0] + asked[place][1]))
    return [[i for place in order[k : k + batch_rows] for i in first[place]] for k in range(0, len(order), batch_rows)]


def _descending_length_key(ids: list[int]) -> tuple[int, tuple[int, ...]]:
    return -len(ids), tuple(ids)


def _batch_by_settings(asked: Sequence[Asked], texts: Sequence[str], batch_rows: int) -> list[list[int]]:
    """Batches of prompts as HFLM makes them: those with the same settings of generation, longest first."""
    groups: dict[str, list[int]] = {}
    for place, (_, settings) in enumerate(asked):
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(place)
    found = []
    for group in groups.values():
        order = sorted(group, key=lambda place: (-len(asked[place][0]), texts[place]))
        found += [order[k : k + batch_rows] for k in range(0, len(order), batch_rows)]
    return found


def _run_task_or_group(
    asked: Any, name: str, shelf: _HarnessTaskLoader, settings: HarnessSettings
) -> HarnessTaskResult:
    """One task, or one group as the mean of all documents of its tasks."""
    loaded = shelf.load(name)
    if name in loaded["tasks"]:
        return _run_task(asked, name, loaded["tasks"][name], shelf, settings)
    group = loaded.get("groups", {}).get(name)
    weighted = [one.metric for one in (group and group.aggregate_metric_list) or () if one.weight_by_size]
    if not weighted:
        raise SettingsError(
            f"{shelf.knob}: {name} is several tasks without a mean over all their documents; "
            f"name them instead: {', '.join(loaded['tasks'])}"
        )
    parts = [_run_task(asked, inner, task, shelf, settings) for inner, task in loaded["tasks"].items()]
    return merge_tasks(name, parts, weighted)


def _run_task(
    asked: Any, name: str, task: Any, shelf: _HarnessTaskLoader, settings: HarnessSettings
) -> HarnessTaskResult:
    import lm_eval

    from ratchet.models import likelihoods

    # The calls that lm_eval.simple_evaluate makes; it would also ask git and pip about this machine.
    shots = task.get_config("num_fewshot")
    if shots is None or (settings.fewshot is not None and shots != 0):  # a task that says 0 means it
        task.set_config(key="num_fewshot", value=settings.fewshot or 0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars that cannot be turned off
            results = lm_eval.evaluate(
                lm=asked,
                task_dict={"tasks": {name: task}},
                limit=settings.limit,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                bootstrap_iters=0,
                log_samples=True,
            )
        samples = results["samples"][name]
        first = asked.tok_encode(samples[0]["arguments"][0][0])
        contract = [lm_eval.__version__, likelihoods.METHOD, _serialize_config(task), FEWSHOT_SEED, first]
        choices = task.doc_to_choice if task.OUTPUT_TYPE == "multiple_choice" else None
        kept = HarnessSamples(name, samples, task.aggregation(), task.higher_is_better(), choices)
        return kept.result(contract, repeats=shelf.folder is None)
    except (KeyError, ValueError, TypeError, AssertionError, FileNotFoundError) as error:
        raise SettingsError(f"{shelf.knob}: the harness cannot run {name}: {error or type(error).__name__}") from error


def _serialize_config(task: Any) -> Any:
    """A task's configuration as JSON, without the place that it was read from."""
    config = json.loads(json.dumps(task.dump_config(), default=_serialize_value))
    if isinstance(config.get("metadata"), dict):
        config["metadata"].pop("config_source", None)
    return config


def _serialize_value(value: Any) -> str:
    """What a configuration holds beside JSON: functions, by their source, which is the same in every process."""
    return inspect.getsource(value) if inspect.isroutine(value) or inspect.isclass(value) else str(value)
