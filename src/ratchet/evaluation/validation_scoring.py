"""Scores the adapters of finished runs on validation rows.

Each form of the base (`RunAdapter.form`) is loaded once; only the adapters are swapped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.config.evaluate import Evaluate
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.data import tokenization
from ratchet.errors import BaseModelError, DataError, DivergenceError, MemoryExhaustedError, first_line
from ratchet.evaluation import answer_metrics, rows
from ratchet.evaluation.comparability import describe_numerics
from ratchet.evaluation.model_loader import ADAPTER, EvaluationBatchSize
from ratchet.evaluation.scorer import Scorer, ScoreStore
from ratchet.models import adapters, base_model, loading, oom, scoring
from ratchet.runs.directory import RESULT, RunPaths, RunSpec, storage_errors
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import (
    GENERATED_METRICS,
    PREFERENCE_ACCURACY,
    VALIDATION_LOSS,
    ValidationLaunch,
    ValidationMetric,
    ValidationScores,
    load_validation_scores,
    validation_scores_path,
)
from ratchet.storage.records.training import TrainReport

EXACT, TOKEN_F1 = "exact_match", "token_f1"
_LIKELIHOODS = {VALIDATION_LOSS, PREFERENCE_ACCURACY}
_ANSWER_METRICS: tuple[str, ...] = ("token_f1",)


@dataclass(frozen=True)
class RunAdapter:
    """A finished run whose adapter is scored."""

    paths: RunPaths
    train: Train
    """Settings of the run's own spec; params.yaml may have changed since."""
    adapter_digest: str

    @property
    def form(self) -> tuple[str, str, str]:
        """Settings that two runs must share to use the same base in memory."""
        return self.train.base_weight_format, self.train.compute_dtype, self.train.attention


def score_runs(layout: ProjectLayout, launch: ValidationLaunch) -> list[ValidationScores]:
    """Score the runs of a job and store the scores in their directories; existing scores are reused.

    If memory runs out, the batch size is halved and all missing scores are computed again, so that all scores have the
    same batch size. The scores are in the order of the job.

    Raises BaseModelError, DamagedFileError or DataError if data, base and runs do not fit together or were changed,
    SettingsError if a metric is not defined for these data, DivergenceError if scores are not finite,
    MemoryExhaustedError if not even a single row fits, and StorageError if a run directory cannot be written.
    """
    base, card = BaseCard.load(layout.base_card), DatasetCard.load(layout.dataset_card)
    if card.base_digest != base.digest:
        raise BaseModelError(f"{layout.data}: prepared for another base model; run `dvc repro prepare`")
    launch.require_measurable(card)
    digest = launch.request_digest(card)
    runs = {run_id: _read_run_adapter(RunPaths(layout.runs / run_id), card) for run_id in launch.job.run_ids}
    scores = {
        run_id: load_validation_scores(run.paths.root, digest, run.adapter_digest) for run_id, run in runs.items()
    }
    missing = [runs[run_id] for run_id, existing in scores.items() if existing is None]
    if missing:
        session = _ValidationScoringSession(layout, launch, base, card)
        for run, new in zip(missing, session.score_all(missing), strict=True):
            with storage_errors(run.paths.root):
                new.save(validation_scores_path(run.paths.root, digest))
            scores[run.paths.root.name] = new
    return [run_scores for run_id in launch.job.run_ids if (run_scores := scores[run_id]) is not None]


def _read_run_adapter(paths: RunPaths, card: DatasetCard) -> RunAdapter:
    files.verify_sealed(paths.result, RESULT)
    spec, report = RunSpec.load(paths.spec), TrainReport.load(paths.result / "train.json")
    spec.require(report)
    if (spec.data_digest, spec.base_digest) != (card.digest, card.base_digest):
        raise DataError(
            f"run {paths.root.name} was trained on other data or another base than the project has now, so it cannot "
            "be scored on the current validation rows; restore data and base with `git checkout` and `dvc checkout`"
        )
    return RunAdapter(paths, spec.train, report.adapter_digest)


class _ValidationScoringSession:
    """Verified inputs of all runs: rows of the validation split, base files and tokenizer."""

    def __init__(self, layout: ProjectLayout, launch: ValidationLaunch, base: BaseCard, card: DatasetCard) -> None:
        self.layout, self.launch, self.base, self.card = layout, launch, base, card
        path = base_model.locate(layout, base)
        base_model.verify_files(path, base.files)
        loading.use_threads(launch.machine.threads)
        self.device = loading.pick_device(launch.machine.device)
        self.rows = rows.read(layout, Settings(), "validation", launch.job.rows)
        if not self.rows.ids:
            raise DataError(f"{layout.data}: found no validation rows; set prepare.split.validation above 0")
        self.tokenizer = base_model.load_project_tokenizer(layout, base)
        self._needs_answers = bool(GENERATED_METRICS & set(launch.job.metrics))

    def score_all(self, runs: Sequence[RunAdapter]) -> list[ValidationScores]:
        """Score every run with the same batch size; if a run does not fit, score all runs again in smaller batches."""
        longest = max(map(len, self.rows.input_ids)) + (self.launch.max_new_tokens if self._needs_answers else 0)
        size = EvaluationBatchSize(self.launch.machine.evaluation_batch_size, longest)
        while True:
            try:
                return self._score_in_batches(runs, size)
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
                cause = first_line(error)
            subject = "a single row" if size.rows else "the model"
            if not size.halve():
                raise MemoryExhaustedError(
                    f"validation scores: not enough memory for {subject} ({cause}); lower evaluate.max_new_tokens or "
                    "prepare.max_tokens, or use a machine with more memory"
                )
            oom.release_memory()

    def _score_in_batches(self, runs: Sequence[RunAdapter], size: EvaluationBatchSize) -> list[ValidationScores]:
        scores: dict[str, ValidationScores] = {}
        for form in dict.fromkeys(run.form for run in runs):
            model = None
            for run in (run for run in runs if run.form == form):
                folder = run.paths.result / ADAPTER
                if model is None:
                    base = loading.load(base_model.locate(self.layout, self.base), self.base, run.train, self.device)
                    model = adapters.load(base, folder)
                    del base
                else:
                    model = adapters.swap(model, folder)
                scores[run.paths.root.name] = self._score_run(run, model, size)
            del model
            oom.release_memory()  # Only one form of the base must fit into memory at a time.
        return [scores[run.paths.root.name] for run in runs]

    def _score_run(self, run: RunAdapter, model: loading.Model, size: EvaluationBatchSize) -> ValidationScores:
        settings = Settings(train=run.train, machine=self.launch.machine)
        numerics = describe_numerics("adapter", settings, self.device, size.choose_for(model))
        # The same store as in stage evaluate: after a kill, only missing results are computed.
        identity = digests.hash_json([self.base.digest, run.adapter_digest])
        name = digests.hash_json([identity, numerics])[:32]
        store = ScoreStore(self.layout.scores / f"{name}.jsonl")
        scorer = Scorer(
            model, self.tokenizer.pad_token_id, numerics["batch_rows"], store, lambda kind, done, total: None
        )
        with storage_errors(self.layout.scores):
            values = self._score_rows(scorer)
        ids = self.rows.ids
        for metric, row_values in values.items():
            if infinite := [ids[i] for i, value in enumerate(row_values) if not math.isfinite(value)]:
                raise DivergenceError(
                    f"run {run.paths.root.name}: {metric} is not finite for {len(infinite)} of {len(row_values)} "
                    f"validation rows, first {infinite[0]}; check train.compute_dtype (float16 overflows) and the "
                    "learning rate"
                )
        tokens = tuple(map(self.rows.answer_tokens, range(len(ids))))
        return ValidationScores(
            request_digest=self.launch.request_digest(self.card),
            run_id=run.paths.root.name,
            adapter_digest=run.adapter_digest,
            data_digest=self.card.digest,
            base_digest=self.base.digest,
            rows=self.launch.job.rows,
            ids=tuple(ids),
            groups=tuple(self.rows.groups),
            tokens=tokens,
            values=values,
            metrics={
                metric: math.fsum(row_values) / (sum(tokens) if metric == VALIDATION_LOSS else len(row_values))
                for metric, row_values in values.items()
            },
            numerics=numerics,
        ).sealed()

    def _score_rows(self, scorer: Scorer) -> dict[ValidationMetric, tuple[float, ...]]:
        """Return the score of each row, by metric."""
        metrics, scores = self.launch.job.metrics, dict[str, Sequence[float] | None]()
        likelihoods = scorer.score_rows(self.rows.input_ids, self.rows.labels) if _LIKELIHOODS & set(metrics) else []
        if VALIDATION_LOSS in metrics:
            scores[VALIDATION_LOSS] = [row.nll for row in likelihoods]
        if PREFERENCE_ACCURACY in metrics and self.rows.rejected is not None:
            scores[PREFERENCE_ACCURACY] = scorer.score_preferences(self.rows.rejected, likelihoods)
        if self._needs_answers:
            settings = Evaluate(
                max_new_tokens=self.launch.max_new_tokens, metrics=_ANSWER_METRICS if TOKEN_F1 in metrics else ()
            )
            prompts = [tokenization.encode_prompt(self.tokenizer, row.context) for row in self.rows.conversations]
            end_tokens = scoring.list_end_tokens(scorer.model, self.tokenizer, self.card.end_of_turn)
            answers = scorer.generate_answers(self.tokenizer, prompts, end_tokens, settings)
            scored = answer_metrics.score_answers(self.rows.expected, answers, settings, EXACT)
            scores |= {result.name: result.values for result in scored}
            scores["accuracy"] = scores[EXACT]  # The same metric has two names: for labels, and for free text.
        return {metric: tuple(values) for metric in metrics if (values := scores[metric]) is not None}
