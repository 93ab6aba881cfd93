"""What answering costs here: seconds, tokens a second and memory, one prompt at a time, as one user would wait."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ratchet.config.evaluation import Form
from ratchet.config.schema import Settings
from ratchet.data import general_text, tokenization
from ratchet.evaluation import answer_metrics, comparability, harness, metrics, rows
from ratchet.evaluation.harness import HarnessScores
from ratchet.evaluation.metrics import ConfusionMatrix
from ratchet.evaluation.rows import TestRows
from ratchet.evaluation.scorer import Scorer, ScoreStore
from ratchet.models import scoring
from ratchet.models.loading import Model
from ratchet.models.memory import capacity
from ratchet.models.scoring import RowLikelihood
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import InferenceCost, MetricValue, SampleScore


def measure_cost(
    model: Model, pad: int, prompts: Sequence[Sequence[int]], ends: Sequence[int], max_new_tokens: int
) -> InferenceCost:  # fmt: skip
    """Answer at least one prompt, each alone and greedily; the first is answered once before, for warming up.

    Memory is what torch has allocated on a GPU at most, weights included; on a CPU it is what the process holds, at
    most while answering (since it began, where the kernel cannot forget an older peak: proc(5), clear_refs).
    """
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    else:
        capacity.reset_peak()
    seconds, tokens = [], 0
    for number, prompt in enumerate([prompts[0], *prompts]):
        _synchronize_device(model.device)
        begun = time.perf_counter()
        answer = scoring.generate(model, [prompt], ends, max_new_tokens, pad)[0]
        _synchronize_device(model.device)
        if number:
            seconds.append(time.perf_counter() - begun)
            tokens += len(answer)
    return InferenceCost(
        rows=len(prompts),
        latency_s=statistics.median(seconds),
        latency_p95_s=sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
        tokens_per_s=tokens / sum(seconds),
        memory_bytes=torch.cuda.max_memory_allocated(model.device) if cuda else capacity.peak_resident_bytes(),
        device=torch.cuda.get_device_name(model.device) if cuda else "cpu",
    )


def _synchronize_device(device: torch.device) -> None:
    """Until the GPU has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# One model examined: likelihoods, answers, labels, harness tasks and costs become figures with their samples.

Progress = Callable[[str], None]
TOLD_EVERY_S = 15.0
"""Between two lines about the same piece of work."""


@dataclass(frozen=True)
class EvaluationSubject:
    """A model to be examined."""

    who: str
    model_digest: str
    """Of what is scored: base, adapter, or exported files."""
    identity: str
    """What its scores are kept under: the digest of all weights that are at work."""
    form: Form
    costs: bool = False
    """Whether answering is timed."""


@dataclass
class EvaluationResult:
    """What one model showed, before it is written."""

    subject: EvaluationSubject
    contract: dict[str, Any]
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    samples: dict[str, list[SampleScore]] = field(default_factory=dict)
    slices: dict[str, dict[str, MetricValue]] = field(default_factory=dict)
    answers: list[list[str]] = field(default_factory=list)
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)
    confusion: ConfusionMatrix | None = None
    curves: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    cost: InferenceCost | None = None
    notes: list[str] = field(default_factory=list)

    def take(self, name: str, metric: MetricValue, samples: list[SampleScore]) -> None:
        self.metrics[name] = metric
        self.samples[name] = samples


@dataclass(frozen=True)
class Evaluator:
    """What all models are asked, and how."""

    layout: ProjectLayout
    settings: Settings
    card: DatasetCard
    rows: TestRows
    general_text: str
    terms: Mapping[str, Any]
    """What is the same for all of them (contract.terms)."""
    progress: Progress
    kept: bool = True
    """Whether scores may be taken from, and are kept for, other evaluations."""

    def of(
        self, subject: EvaluationSubject, model: Any, tokenizer: Any, arithmetic: comparability.NumericsSpec
    ) -> EvaluationResult:
        """Examine a loaded model.

        Raises:
            Whatever says that memory is exhausted (model.memory.is_exhausted): examine all models anew, in smaller
            batches.
            SettingsError: a harness task cannot be run.
        """
        ends = scoring.list_end_tokens(model, tokenizer, self.card.end_of_turn)
        asked = comparability.template_terms(tokenizer, self.rows, ends)
        own = self.settings.evaluate.own_templates
        result = EvaluationResult(
            subject,
            {**self.terms, **arithmetic.document(), "template": comparability.OWN if own else asked},
        )
        store = self._store(subject, arithmetic)
        scorer = Scorer(
            model, tokenizer.pad_token_id, arithmetic.batch_rows, store, _ProgressMeter(self.progress, subject.who)
        )
        work = _ModelEvaluation(self, result, scorer, tokenizer, ends)
        work.likelihoods()
        with _enable_kv_cache(model):
            work.answers()
            work.label_scores()
            work.harness(model, store)
            work.cost(model, store)
        work.slices()
        return result

    def _store(self, subject: EvaluationSubject, arithmetic: comparability.NumericsSpec) -> ScoreStore:
        # What was asked is in the keys; a file holds what one model said in one kind of arithmetic.
        name = digests.hash_json([subject.identity, arithmetic.document()])[:32]
        return ScoreStore(self.layout.scores / f"{name}.jsonl" if self.kept else None)


@dataclass
class _ModelEvaluation:
    """One model's examination while it goes on."""

    examination: Evaluator
    result: EvaluationResult
    scorer: Scorer
    tokenizer: Any
    ends: Sequence[int]

    def __post_init__(self) -> None:
        self.settings = self.examination.settings.evaluate
        self.rows = self.examination.rows
        self.card = self.examination.card
        self.found: list[RowLikelihood] = []
        self.prompts: list[list[int]] = []

    def say(self, text: str) -> None:
        self.examination.progress(f"{self.result.subject.who}: {text}")

    def likelihoods(self) -> None:
        """Perplexity of the test rows, answers and prompts apart, and of the general text."""
        if not rows.has_same_tokens(self.rows, self.tokenizer, self.examination.settings):
            self.say("its tokenizer differs, so likelihoods of tokens are not compared")
            self.result.notes.append(
                f"{self.result.subject.who} has other tokens than the prepared rows: its perplexities are not given"
            )
            return
        self.say(f"likelihood of {len(self.rows.ids)} rows")
        self.found = self.scorer.likelihoods(self.rows.input_ids, self.rows.labels)
        per_token = [one.nll / one.tokens for one in self.found]
        self._take("answer_loss", metrics.mean_loss_metric(per_token), per_token)
        for name, pick in _PERPLEXITIES.items():
            self._take_perplexity(name, self.rows.ids, [pick(one) for one in self.found])
        wanted = self.settings.general
        blocks = general_text.split_into_blocks(
            self.examination.general_text, self.tokenizer, wanted.block_tokens, wanted.blocks
        )
        self.say(f"likelihood of {len(blocks)} blocks of general text")
        of_text = [(one.nll, one.tokens) for one in self.scorer.text(blocks)]
        self._take_perplexity("general_perplexity", [f"block {i}" for i in range(len(blocks))], of_text)

    def _take(self, name: str, metric: MetricValue, values: Sequence[float]) -> None:
        samples = [SampleScore(id=key, value=value) for key, value in zip(self.rows.ids, values, strict=False)]
        self.result.take(name, metric, samples)

    def _take_perplexity(self, name: str, ids: Sequence[str], found: Sequence[tuple[float, int]]) -> None:
        """Rows without such a token (an empty prompt) are no samples of it."""
        kept = [(key, nll, count) for key, (nll, count) in zip(ids, found, strict=True) if count]
        if not kept:
            return
        samples = [SampleScore(id=key, value=nll, weight=count) for key, nll, count in kept]
        self.result.take(name, metrics.perplexity_metric([k[1] for k in kept], [k[2] for k in kept]), samples)

    def answers(self) -> None:
        """Generated answers against the true ones."""
        count, wanted = self.rows.generated, self.settings
        self.say(f"answering {count} rows" + (f", {wanted.samples} times each" if wanted.samples > 1 else ""))
        self.prompts = [tokenization.encode_prompt(self.tokenizer, c.question) for c in self.rows.conversations[:count]]
        self.result.answers = self.scorer.answers(self.tokenizer, self.prompts, self.ends, wanted)
        labels = self.card.task == "labels"
        expected = self.rows.expected
        for one in answer_metrics.score_answers(
            expected, self.result.answers, wanted, "accuracy" if labels else "exact_match"
        ):
            metric = one.metric
            if labels and one.name == "accuracy":
                metric = metric.model_copy(update={"chance": metrics.majority_share(expected)})
            if one.values is None:
                self.result.metrics[one.name] = metric
            else:
                self._take(one.name, metric, one.values)
        if labels:
            first = [answers[0] for answers in self.result.answers]
            classes, self.result.confusion = metrics.score_classes(expected, first)
            self.result.per_class = dict(classes)
            self.result.metrics |= metrics.compute_label_metrics(expected, first, wanted.seed)

    def label_scores(self) -> None:
        """How likely each label is: precision-recall curves, and how often the likeliest label is the true one."""
        labels = sorted(self.card.labels)
        if self.card.task != "labels" or not self.settings.label_scores or not labels:
            return
        ids = rows.encode_labels(self.rows, self.tokenizer, labels)
        if ids is None:
            self.result.notes.append(
                f"{self.result.subject.who}: the chat template writes an answer not simply behind its prompt, "
                "so labels have no likelihood and there are no precision-recall curves"
            )
            return
        self.say(f"likelihood of {len(labels)} labels for {len(self.prompts)} rows")
        found = self.scorer.label_scores(self.prompts, ids)
        expected = self.rows.expected
        self.result.curves = metrics.precision_recall_curves(labels, expected, found)
        self.result.metrics["macro_average_precision"] = metrics.mean_average_precision(
            labels, expected, found, self.settings.seed
        )
        for label, curve in self.result.curves.items():
            if label in self.result.per_class:
                self.result.per_class[label]["average_precision"] = curve["average_precision"]
        likeliest = [labels[max(range(len(labels)), key=lambda k: (row[k], -k))] for row in found]
        hits = [float(a == b) for a, b in zip(likeliest, expected, strict=True)]
        metric = metrics.proportion_metric(hits).model_copy(update={"chance": metrics.majority_share(expected)})
        self._take("label_accuracy", metric, hits)

    def harness(self, model: Any, store: ScoreStore) -> None:
        """Tasks of lm-evaluation-harness."""
        wanted, layout = self.settings.harness, self.examination.layout
        if not (wanted.tasks or wanted.library):
            return
        self.say(f"lm-evaluation-harness on {', '.join((*wanted.tasks, *wanted.library))}")
        found = harness.run(model, self.tokenizer, wanted, layout.root, layout.tasks, self.scorer.batch_rows, store)
        self.result.contract["harness"] = {one.task: one.digest for one in found}
        for one in found:
            self.result.documents[one.task] = one.documents
            for scores in one.scores:
                self._take_harness(f"harness/{one.task}/{scores.metric}", scores, one.chance)

    def _take_harness(self, name: str, scores: HarnessScores, chance: float | None) -> None:
        if scores.figure is not None:
            self.result.metrics[name] = scores.figure
            return
        values, weights = list(scores.values.values()), scores.weights or {}
        if scores.kind == "perplexity":
            metric = metrics.perplexity_metric(values, [int(weights[key]) for key in scores.values])
        else:
            metric = metrics.mean_score_metric(values, scores.better)
        # Chance is what guessing gets right; it is known for nothing but the share of right choices.
        if chance is not None and scores.metric.startswith("acc"):
            metric = metric.model_copy(update={"chance": chance})
        samples = [SampleScore(id=key, value=one, weight=weights.get(key, 1.0)) for key, one in scores.values.items()]
        self.result.take(name, metric, samples)

    def cost(self, model: Any, store: ScoreStore) -> None:
        """Seconds and memory of answering, one prompt at a time."""
        count = min(self.settings.latency_rows, len(self.prompts))
        if not (self.result.subject.costs and count):
            return
        self.say(f"timing {count} answers, one at a time")
        found = measure_cost(
            model, self.tokenizer.pad_token_id, self.prompts[:count], self.ends, self.settings.max_new_tokens
        )
        self.result.cost = found

    def slices(self) -> None:
        """The same figures for parts of the rows: by length, and by category."""
        exact = "accuracy" if self.card.task == "labels" else "exact_match"
        hits = [sample.value for sample in self.result.samples.get(exact, [])]
        for part, indices in self.rows.parts(self.settings).items():
            found: dict[str, MetricValue] = {}
            for name, pick in _PERPLEXITIES.items():
                some = [pick(self.found[i]) for i in indices] if self.found else []
                if kept := [(nll, count) for nll, count in some if count]:
                    found[name] = metrics.perplexity_metric([k[0] for k in kept], [k[1] for k in kept])
            if values := [hits[i] for i in indices if i < len(hits)]:
                found[exact] = metrics.mean_score_metric(values, "higher")
            if found:
                self.result.slices[part] = found


_PERPLEXITIES: dict[str, Callable[[RowLikelihood], tuple[float, int]]] = {
    "perplexity": lambda one: (one.nll + one.prompt_nll, one.tokens + one.prompt_tokens),
    "answer_perplexity": lambda one: (one.nll, one.tokens),
    "prompt_perplexity": lambda one: (one.prompt_nll, one.prompt_tokens),
}


class _ProgressMeter:
    """Tells how far a long piece of work is, every so often."""

    def __init__(self, progress: Progress, who: str) -> None:
        self.progress = progress
        self.who = who
        self.told_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done < total and time.monotonic() - self.told_s > TOLD_EVERY_S:
            self.progress(f"{self.who}: {done:,} of {total:,}")
            self.told_s = time.monotonic()


@contextmanager
def _enable_kv_cache(model: Any) -> Any:
    """Key-value caching is off while training and needed for generating."""
    before = model.config.use_cache
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = before
