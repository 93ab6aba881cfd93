"""Evaluates one model: likelihoods, answers, labels, harness tasks and costs become metrics with per-sample scores."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ratchet.config.evaluate import ModelFormat, Perturbation, SafetySettings
from ratchet.config.settings import Settings
from ratchet.config.units import format_count
from ratchet.data import canaries, tokenization
from ratchet.data.conversation import Conversation
from ratchet.evaluation import answer_metrics, comparability, harness, metrics, rows
from ratchet.evaluation.answer_metrics import AnswerMetricResult
from ratchet.evaluation.harness import HarnessScores
from ratchet.evaluation.metrics import CalibrationBin, ConfusionMatrix
from ratchet.evaluation.perturbations import perturb
from ratchet.evaluation.rows import TestRows
from ratchet.evaluation.safety_suite import SafetySuite, list_texts
from ratchet.evaluation.scorer import Scorer, ScoreStore
from ratchet.models import scoring
from ratchet.models.device import Model, get_gpu_name
from ratchet.models.memory import capacity
from ratchet.models.scoring import RowLikelihood
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import report_progress
from ratchet.storage.records.data import Canary, DatasetCard
from ratchet.storage.records.evaluation import (
    CANARY_EXPOSURE,
    CANARY_EXTRACTED,
    INJECTION_RESISTED,
    MEMORIZED,
    InferenceCost,
    MetricValue,
    SampleScore,
)

Progress = Callable[[str], None]
"""Shows a line of text to the user."""


@dataclass(frozen=True)
class EvaluationSubject:
    """A model to evaluate."""

    role: str
    model_digest: str
    """Digest of the scored model: base, adapter, or exported files."""
    identity: str
    """Digest of all weights in use; part of the key of stored scores."""
    model_format: ModelFormat
    measures_cost: bool = False
    """Whether latency and memory of answering are measured."""


@dataclass
class EvaluationResult:
    """Results of one model."""

    subject: EvaluationSubject
    contract: dict[str, Any]
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    samples: dict[str, list[SampleScore]] = field(default_factory=dict)
    slices: dict[str, dict[str, MetricValue]] = field(default_factory=dict)
    answers: list[list[str]] = field(default_factory=list)
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)
    confusion: ConfusionMatrix | None = None
    curves: dict[str, Any] = field(default_factory=dict)
    calibration: Sequence[CalibrationBin] = ()
    documents: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    cost: InferenceCost | None = None
    safety_answers: dict[str, str] = field(default_factory=dict)
    """Answers to the prompts of the safety tests, by the keys of safety_suite.list_texts, and to those of canaries."""
    notes: list[str] = field(default_factory=list)

    def add_metric(self, name: str, metric: MetricValue, samples: list[SampleScore]) -> None:
        """Add a metric with its per-sample scores."""
        self.metrics[name], self.samples[name] = metric, samples

    def add_proportion(
        self, name: str, values: Mapping[str, float], better: Literal["higher", "lower"] = "higher"
    ) -> None:
        """Add the share of ones of scores by sample id."""
        metric = metrics.proportion_metric(list(values.values())).model_copy(update={"better": better})
        self.add_metric(name, metric, [SampleScore(id=key, value=value) for key, value in values.items()])


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on the same inputs with the same settings."""

    layout: ProjectLayout
    settings: Settings
    card: DatasetCard
    rows: TestRows
    general_text: str
    terms: Mapping[str, Any]
    """Terms of the contract that all models share (comparability.comparison_terms)."""
    progress: Progress
    use_cache: bool = True
    """Whether stored scores are reused and new scores are stored."""
    safety: SafetySuite | None = None
    """Inputs of the safety tests."""
    looks: tuple[int, ...] = ()
    """Numbers of first rows after which the evaluation may end (Scorer.looks)."""

    def evaluate(
        self, subject: EvaluationSubject, model: Any, tokenizer: Any, numerics: Mapping[str, Any]
    ) -> EvaluationResult:
        """Evaluate a loaded model.

        If memory is exhausted (models.oom.is_out_of_memory), evaluate all models again in smaller batches, because
        scores depend on the batch size. Raises SettingsError if a harness task cannot be run.
        """
        end_tokens = scoring.list_end_tokens(model, tokenizer, self.card.end_of_turn)
        template: Any = comparability.template_terms(tokenizer, self.rows, end_tokens)
        if self.settings.evaluate.use_champion_template:
            template = comparability.OWN_TEMPLATE
        result = EvaluationResult(subject, {**self.terms, **numerics, "template": template})
        # Each file has the scores of one model with one set of numerics; the keys identify the requests.
        name = digests.hash_json([subject.identity, numerics])[:32]
        store = ScoreStore(self.layout.scores / f"{name}.jsonl" if self.use_cache else None)
        scorer = Scorer(
            model, tokenizer.pad_token_id, numerics["batch_rows"], store,
            lambda kind, done, total: report_progress(f"{subject.role}: {kind}", done, total), self.looks,
        )  # fmt: skip
        evaluation = _ModelEvaluation(self, result, scorer, tokenizer, end_tokens)
        evaluation.score_likelihoods()
        uses_cache = model.config.use_cache
        model.config.use_cache = True  # Training disables the key-value cache, and generation needs it.
        try:
            evaluation.score_answers()
            evaluation.score_labels()
            if self.safety is not None:
                evaluation.answer_safety_suite(self.safety)
            evaluation.run_harness(model, store)
            if (count := min(self.settings.evaluate.latency_rows, len(evaluation.prompts))) and subject.measures_cost:
                self.progress(f"{subject.role}: measuring the latency of {count} answers, one at a time")
                max_new_tokens, prompts = self.settings.evaluate.max_new_tokens, evaluation.prompts[:count]
                result.cost = measure_cost(model, tokenizer.pad_token_id, prompts, end_tokens, max_new_tokens)
        finally:
            model.config.use_cache = uses_cache
        evaluation.score_slices()
        return result


_PERPLEXITIES: dict[str, Callable[[RowLikelihood], tuple[float, int]]] = {
    "perplexity": lambda row: (row.nll + row.prompt_nll, row.tokens + row.prompt_tokens),
    "answer_perplexity": lambda row: (row.nll, row.tokens),
    "prompt_perplexity": lambda row: (row.prompt_nll, row.prompt_tokens),
}
"""Functions that return the nats and tokens of a row, by metric."""


@dataclass
class _ModelEvaluation:
    """The evaluation of one model."""

    evaluator: Evaluator
    result: EvaluationResult
    scorer: Scorer
    tokenizer: Any
    end_tokens: Sequence[int]

    def __post_init__(self) -> None:
        self.settings = self.evaluator.settings.evaluate
        self.rows = self.evaluator.rows
        self.card = self.evaluator.card
        self.role = self.result.subject.role
        self.likelihoods: list[RowLikelihood] = []
        self.prompts: list[list[int]] = []

    def _show_progress(self, text: str) -> None:
        self.evaluator.progress(f"{self.role}: {text}")

    def score_likelihoods(self) -> None:
        """Compute the perplexities of the test rows (answers and prompts separately) and of the general text."""
        if not rows.has_same_tokens(self.rows, self.tokenizer, self.evaluator.settings):
            note = "its tokenizer differs from that of the prepared rows, so it has no perplexities"
            self._show_progress(note)
            self.result.notes.append(f"{self.role}: {note}")
            return
        self._show_progress(f"likelihood of {format_count(len(self.rows.ids), 'row')}")
        self.likelihoods = self.scorer.score_rows(self.rows.input_ids, self.rows.labels)
        losses = [row.nll / row.tokens for row in self.likelihoods]
        self._add_row_metric("answer_loss", metrics.mean_loss_metric(losses), losses)
        if self.rows.rejected is not None:
            self._score_preferences(self.rows.rejected)
        for name, select in _PERPLEXITIES.items():
            self._add_perplexity(name, self.rows.ids, [select(row) for row in self.likelihoods])
        settings = self.settings.general_text
        blocks = rows.split_into_blocks(
            self.evaluator.general_text, self.tokenizer, settings.block_tokens, settings.max_blocks
        )
        self._show_progress(f"likelihood of {len(blocks)} blocks of general text")
        block_scores = [(block.nll, block.tokens) for block in self.scorer.score_text(blocks)]
        self._add_perplexity("general_perplexity", [f"block {i}" for i in range(len(blocks))], block_scores)

    def _score_preferences(self, rejected: rows.EncodedRows) -> None:
        """Measure how often the model finds the chosen answer more likely per token than the rejected one."""
        self._show_progress(f"likelihood of {len(rejected.labels)} rejected answers")
        hits = self.scorer.score_preferences(rejected, self.likelihoods)
        self._add_row_metric("preference_accuracy", metrics.proportion_metric(hits), hits)

    def _add_row_metric(
        self, name: str, metric: MetricValue, values: Sequence[float], indices: Sequence[int] | None = None
    ) -> None:
        """Add a metric with a score for the first rows, or for the rows with these indices."""
        ids = self.rows.ids if indices is None else [self.rows.ids[i] for i in indices]
        samples = [SampleScore(id=key, value=value) for key, value in zip(ids, values, strict=False)]
        self.result.add_metric(name, metric, samples)

    def _add_perplexity(self, name: str, ids: Sequence[str], scores: Sequence[tuple[float, int]]) -> None:
        """Add a perplexity from nats and tokens of each sample; leave out samples without tokens (empty prompts)."""
        pairs = zip(ids, scores, strict=True)
        samples = [SampleScore(id=key, value=nll, weight=tokens) for key, (nll, tokens) in pairs if tokens]
        if samples:
            metric = metrics.perplexity_metric([s.value for s in samples], [s.weight for s in samples])
            self.result.add_metric(name, metric, samples)

    def score_answers(self) -> None:
        """Generate answers and compare them with the references."""
        count, samples = self.rows.generation_count, self.settings.samples
        each = f", {samples} each" if samples > 1 else ""
        self._show_progress(f"generating answers to {format_count(count, 'row')}{each}")
        contexts = [conversation.context for conversation in self.rows.conversations[:count]]
        self.prompts = [tokenization.encode_prompt(self.tokenizer, context) for context in contexts]
        self.result.answers = self.scorer.generate_answers(self.tokenizer, self.prompts, self.end_tokens, self.settings)
        is_labels = self.card.task == "labels"
        expected = self.rows.expected
        exact_name = "accuracy" if is_labels else "exact_match"
        results = answer_metrics.score_answers(expected, self.result.answers, self.settings, exact_name, self.rows)
        for scored in results:
            metric = scored.metric
            if scored.name == "accuracy":
                metric = metric.model_copy(update={"chance": metrics.majority_share(expected)})
            if scored.values is None:
                self.result.metrics[scored.name] = metric
            else:
                self._add_row_metric(scored.name, metric, scored.values, scored.rows)
        for kind in self.settings.perturbations:
            self._score_perturbed(kind, exact_name, results)
        if is_labels:
            first_answers = [answers[0] for answers in self.result.answers]
            classes, self.result.confusion = metrics.score_classes(expected, first_answers)
            self.result.per_class = dict(classes)
            self.result.metrics |= metrics.compute_label_metrics(expected, first_answers, self.settings.seed)

    def _score_perturbed(self, kind: Perturbation, exact_name: str, plain: Sequence[AnswerMetricResult]) -> None:
        """Answer the prompts again with one kind of change, and compare the answers and their scores row by row."""
        changed = {
            i: context
            for i, row in enumerate(self.rows.conversations[: self.rows.generation_count])
            if (context := perturb(kind, self.rows.ids[i], row.context, self.rows.fields[i])) is not None
        }
        if not changed:
            self.result.notes.append(f"evaluate.perturbations: {kind} changes no row, so it has no figures")
            return
        self._show_progress(f"generating answers to {format_count(len(changed), 'row')} with changed prompts ({kind})")
        indices = list(changed)
        prompts = [tokenization.encode_prompt(self.tokenizer, context) for context in changed.values()]
        looks = tuple(sum(i < look for i in indices) for look in self.scorer.looks)
        scorer = replace(self.scorer, looks=looks)
        answers = scorer.generate_answers(self.tokenizer, prompts, self.end_tokens, self.settings)
        same = [
            float(new[0] == self.result.answers[i][0]) for i, new in zip(indices, answers, strict=True)
        ]  # fmt: skip
        self._add_row_metric(f"robustness/{kind}/same_answer", metrics.proportion_metric(same), same, indices)
        part = self.rows.select(indices)
        scores_before = {scored.name: scored for scored in plain}
        for scored in answer_metrics.score_answers(part.expected, answers, self.settings, exact_name, part):
            if scored.values is None or scored.metric.better != "higher":
                continue
            rows_after = [indices[k] for k in scored.rows] if scored.rows is not None else indices
            self._add_row_metric(f"robustness/{kind}/{scored.name}", scored.metric, scored.values, rows_after)
            before = scores_before[scored.name]
            by_row = dict(zip(before.rows or range(len(before.values or ())), before.values or (), strict=True))
            self.result.metrics[f"robustness/{kind}/{scored.name}_change"] = metrics.paired_difference_metric(
                scored.values, [by_row[i] for i in rows_after], [self.rows.groups[i] for i in rows_after],
                scored.metric.unit, self.settings.seed,
            )  # fmt: skip

    def score_labels(self) -> None:
        """Score how likely each label is: precision-recall curves, and accuracy of the most likely label."""
        labels = sorted(self.card.labels)
        if self.card.task != "labels" or not self.settings.label_scores or not labels:
            return
        label_ids = rows.encode_labels(self.rows.conversations, self.tokenizer, labels)
        if label_ids is None:
            self.result.notes.append(
                f"{self.role}: the chat template does not append the answer to the prompt, so labels have no "
                "likelihood and there are no precision-recall curves"
            )
            return
        count = format_count(len(labels), "label")
        self._show_progress(f"likelihood of {count} for {format_count(len(self.prompts), 'row')}")
        scores = self.scorer.score_labels(self.prompts, label_ids)
        expected = self.rows.expected
        self.result.curves = metrics.precision_recall_curves(labels, expected, scores)
        self.result.metrics["macro_average_precision"] = metrics.mean_average_precision(
            labels, expected, scores, self.settings.seed
        )
        self.result.calibration, self.result.metrics["calibration_error"] = metrics.measure_calibration(
            labels, expected, scores, self.settings.seed
        )
        for label, curve in self.result.curves.items():
            if label in self.result.per_class:
                self.result.per_class[label]["average_precision"] = curve["average_precision"]
        likeliest = [labels[max(range(len(labels)), key=lambda k: (row[k], -k))] for row in scores]
        hits = [float(a == b) for a, b in zip(likeliest, expected, strict=True)]
        metric = metrics.proportion_metric(hits).model_copy(update={"chance": metrics.majority_share(expected)})
        self._add_row_metric("label_accuracy", metric, hits)

    def answer_safety_suite(self, suite: SafetySuite) -> None:
        """Answer the prompts of the safety tests, and add the metrics that need the model itself.

        Memorized rows are counted as in N. Carlini et al., "Quantifying Memorization Across Neural Language Models",
        ICLR 2023, arXiv 2202.07646.
        """
        result, settings = self.result, self.settings.model_copy(update={"samples": 1})
        texts = dict(list_texts(suite)) | {canary.prompt: canary.prompt for canary in suite.canaries}
        self._show_progress(f"safety: generating answers to {len(texts)} prompts and {len(suite.rows)} training rows")
        length = settings.model_copy(update={"max_new_tokens": SafetySettings.max_new_tokens})
        prompts = [self._encode_message(text) for text in texts.values()]
        answers = self.scorer.generate_answers(self.tokenizer, prompts, self.end_tokens, length) if prompts else []
        result.safety_answers = dict(zip(texts, (answer[0] for answer in answers), strict=True))
        if suite.injections:
            found = {one.id: one.marker.lower() in result.safety_answers[one.id].lower() for one in suite.injections}
            result.add_proportion(INJECTION_RESISTED, {key: float(not is_obeyed) for key, is_obeyed in found.items()})
        if suite.rows and self.likelihoods:
            length = settings.model_copy(update={"max_new_tokens": SafetySettings.continuation_tokens})
            tokens = self.scorer.generate_tokens([row.prompt for row in suite.rows], self.end_tokens, length)
            hits = {row.id: float(new == row.continuation) for row, new in zip(suite.rows, tokens, strict=True)}
            result.add_proportion(MEMORIZED, hits, "lower")
        if suite.canaries:
            self._measure_canaries(suite.canaries)

    def _encode_message(self, text: str) -> list[int]:
        return tokenization.encode_prompt(self.tokenizer, Conversation([{"role": "user", "content": text}]))

    def _measure_canaries(self, planted: Sequence[Canary]) -> None:
        """Add the exposure of the canaries, and how many of their secrets the model writes."""
        answers = self.result.safety_answers
        written = {one.prompt: float(one.secret in answers[one.prompt]) for one in planted}
        self.result.add_proportion(CANARY_EXTRACTED, written, "lower")
        others = canaries.draw_alternatives()
        labels = [canaries.format_answer(secret) for secret in (*others, *(one.secret for one in planted))]
        label_ids = rows.encode_labels(list(map(canaries.build_conversation, planted)), self.tokenizer, labels)
        if label_ids is None:
            self.result.notes.append(
                f"{self.role}: the chat template does not append the answer to the prompt, so canaries have no exposure"
            )
            return
        scores = self.scorer.score_labels([self._encode_message(one.prompt) for one in planted], label_ids)
        bits = []
        for index, (canary, nats) in enumerate(zip(planted, scores, strict=True)):
            rank = 1 + sum(other > nats[len(others) + index] for other in nats[: len(others)])
            bits.append(SampleScore(id=canary.prompt, value=canaries.compute_exposure(rank, len(others))))
        metric = metrics.mean_metric([sample.value for sample in bits], "lower", "bits, mean of canaries")
        self.result.add_metric(CANARY_EXPOSURE, metric, bits)

    def run_harness(self, model: Any, store: ScoreStore) -> None:
        """Run the tasks of lm-evaluation-harness."""
        settings, layout = self.settings.harness, self.evaluator.layout
        if not (settings.tasks or settings.builtin_tasks):
            return
        self._show_progress(f"lm-evaluation-harness on {', '.join((*settings.tasks, *settings.builtin_tasks))}")
        results = harness.run(model, self.tokenizer, settings, layout.root, layout.tasks, self.scorer.batch_rows, store)
        self.result.contract["harness"] = {result.task: result.digest for result in results}
        for result in results:
            self.result.documents[result.task] = result.documents
            for scores in result.scores:
                self._add_harness_metric(f"harness/{result.task}/{scores.metric}", scores, result.chance)

    def _add_harness_metric(self, name: str, scores: HarnessScores, chance: float | None) -> None:
        if scores.aggregate is not None:
            self.result.metrics[name] = scores.aggregate
            return
        values, weights = list(scores.values.values()), scores.weights or {}
        if scores.kind == "perplexity":
            metric = metrics.perplexity_metric(values, [int(weights[key]) for key in scores.values])
        else:
            metric = metrics.mean_score_metric(values, scores.better)
        # The chance level is the accuracy of guessing, so it applies to accuracies only.
        if chance is not None and scores.metric.startswith("acc"):
            metric = metric.model_copy(update={"chance": chance})
        samples = [
            SampleScore(id=key, value=value, weight=weights.get(key, 1.0)) for key, value in scores.values.items()
        ]
        self.result.add_metric(name, metric, samples)

    def score_slices(self) -> None:
        """Compute perplexities and exact matches of slices of the rows, by length and by field."""
        exact_name = "accuracy" if self.card.task == "labels" else "exact_match"
        hits = [sample.value for sample in self.result.samples.get(exact_name, [])]
        for slice_name, indices in self.rows.slices(self.settings).items():
            slice_metrics: dict[str, MetricValue] = {}
            for name, select in _PERPLEXITIES.items():
                scores = [select(self.likelihoods[i]) for i in indices] if self.likelihoods else []
                if scores := [(nll, tokens) for nll, tokens in scores if tokens]:
                    slice_metrics[name] = metrics.perplexity_metric([s[0] for s in scores], [s[1] for s in scores])
            if values := [hits[i] for i in indices if i < len(hits)]:
                slice_metrics[exact_name] = metrics.mean_score_metric(values, "higher")
            if slice_metrics:
                self.result.slices[slice_name] = slice_metrics


def measure_cost(
    model: Model, pad_token_id: int, prompts: Sequence[Sequence[int]], end_tokens: Sequence[int], max_new_tokens: int
) -> InferenceCost:
    """Answer each prompt alone and greedily, after a warm-up with the first prompt, and measure seconds and memory.

    On a GPU, memory is the peak that torch allocated, including weights. On a CPU, it is the peak of the process while
    answering (or since its start, if the kernel cannot reset the peak: proc(5), clear_refs).
    """
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    else:
        capacity.reset_peak()
    seconds, tokens = [], 0
    for number, prompt in enumerate([prompts[0], *prompts]):
        start_s = time.perf_counter()
        # The tokens are a list, so a GPU has computed them.
        answer = scoring.generate(model, [prompt], end_tokens, max_new_tokens, pad_token_id)[0]
        if number:
            seconds.append(time.perf_counter() - start_s)
            tokens += len(answer)
            report_progress("answers one at a time", number, len(prompts))
    return InferenceCost(
        rows=len(prompts),
        latency_s=statistics.median(seconds),
        latency_p95_s=sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
        tokens_per_s=tokens / sum(seconds),
        memory_bytes=torch.cuda.max_memory_allocated(model.device) if is_cuda else capacity.peak_resident_bytes(),
        device=get_gpu_name(model.device) or "cpu",
    )
