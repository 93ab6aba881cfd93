"""What lm-evaluation-harness says of each document, as scores that can be paired and documents that can be shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ratchet.errors import SettingsError
from ratchet.evaluation.metric_modules.figures import Better, resampled
from ratchet.storage import digests
from ratchet.storage.records.evaluation import Metric

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
    figure: Metric | None = None
    """For what is no function of documents' scores (F1, BLEU of a corpus, bits per byte)."""


@dataclass(frozen=True)
class TaskResult:
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
class Scored:
    """A task's samples as the harness logs them: one a document and filter."""

    task: str
    samples: Sequence[Mapping[str, Any]]
    aggregations: Mapping[str, Callable[[Sequence[Any]], Any]]
    """What makes a metric's figure of its items, by metric."""
    directions: Mapping[str, bool | None]
    """Whether higher is better, by metric; None or nothing where nobody has said."""
    choices: Callable[[Any], Sequence[str]] | None
    """What can be chosen for a document, in tasks of choice."""

    def result(self, contract: Any, repeats: bool) -> TaskResult:
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
        asked = [[first[key][part] for part in HASHES] + [_asked(first[key])] for key in names.values()]
        return TaskResult(
            task=self.task,
            digest=digests.of_json([contract, asked]),
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
            figure = resampled(aggregation, list(items.values()), better, f"the harness's {kind}")
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


def _asked(sample: Mapping[str, Any]) -> str:
    """Of every prompt and continuation: choices may come from elsewhere than the document."""
    return digests.of_bytes(repr(sample["arguments"]).encode("utf-8", "surrogatepass"))


def joined(name: str, parts: Sequence[TaskResult], metrics: Sequence[str]) -> TaskResult:
    """A group of tasks as one: all documents of all its tasks, each counting the same.

    Args:
        metrics: those that the group declares as the mean over all documents; others are left to the tasks.

    Raises:
        SettingsError: a metric is no mean of documents in one of the tasks, or is not given by all of them.
    """
    found = []
    for metric in dict.fromkeys(one.metric for part in parts for one in part.scores if _plain_name(one) in metrics):
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
    contract = digests.of_json({part.task: part.digest for part in parts})
    return TaskResult(name, contract, chance, tuple(found), documents)


def _plain_name(scores: HarnessScores) -> str:
    return scores.metric.split(".", maxsplit=1)[0]
