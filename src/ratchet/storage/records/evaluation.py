"""Results of stage evaluate: metrics, per-sample scores, and the contract under which they are comparable."""

from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field

from ratchet.config.evaluate import ModelFormat
from ratchet.config.machine import Machine
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.storage import digests
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import DatasetCard

ModelRole = Literal["base", "candidate", "merged", "champion", "anchor"]
"""The models of an evaluation. `candidate` is the adapter on its base, `merged` the same as exported."""


class MetricValue(Record):
    """A metric of a model."""

    value: float
    n: int
    low: float
    high: float
    """Bounds of the 95 % interval: Wilson for proportions, normal for means."""
    better: Literal["higher", "lower", "unknown"]
    unit: str
    kind: Literal["mean", "perplexity", "aggregate"] = "mean"
    """mean: of the samples; perplexity: exp(sum of values / sum of weights); aggregate: of all rows together."""
    chance: float | None = None
    """Value that guessing reaches."""


class ModelScores(Record):
    """One model's results."""

    model_digest: str
    """Digest of the scored model: base, adapter on its base, or exported files."""
    model_format: ModelFormat
    """As an adapter on its base (for the base: without adapters), or as merged weights."""
    contract: str
    """Digest of `EvaluationReport.contracts[contract]`; only scores under equal contracts are compared."""
    metrics: dict[str, MetricValue]
    samples: dict[str, str]
    """Files of per-sample scores (`SampleScore`) by metric, as relative names."""
    per_class: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Precision, recall, F1, support and (with label scores) average precision per label."""
    slices: dict[str, dict[str, MetricValue]] = Field(default_factory=dict)
    """Metrics of slices of the rows, by name: `tokens <= 64`, `topic = billing`."""


class InferenceCost(Record):
    """Measured cost of answering on the machine that evaluated. Not reproducible."""

    rows: int
    """Number of prompts, answered one at a time."""
    latency_s: float
    """Median time of an answer, in seconds."""
    latency_p95_s: float
    tokens_per_s: float
    """Generated tokens per second."""
    memory_bytes: int
    """Peak memory while answering: allocated on a GPU, resident in the process on a CPU."""
    device: str


class JudgePreference(Record):
    """The judge's comparison of the candidate's answers with another model's, each pair in both orders."""

    against: ModelRole
    rows: int
    """Pairs with a verdict in both orders, or with identical answers."""
    wins: int
    """Pairs in which the candidate's answer was preferred, over both orders."""
    ties: int
    losses: int
    identical_answers: int
    """Ties with identical answers, for which the judge was not called."""
    skipped: int
    """Pairs without a readable verdict in one or both orders; they count only in position_bias."""
    unreadable: dict[str, int]
    """Replies without a verdict, by reason."""
    win_rate: MetricValue | None
    """Wins plus half the ties; a pair whose verdict depends on the order is a tie. None: no rows."""
    agreement: MetricValue | None
    """Share of pairs with the same verdict in both orders. None: the judge was not called."""
    position_bias: MetricValue | None
    """Share of verdicts for the first answer minus 0.5, without ties. None: only ties."""


class JudgeReport(Record):
    """Results of the LLM judge (evaluate.judge). No gate rule uses them."""

    model: str
    base_url: str
    rubric_digest: str
    candidate: ModelRole
    """Compared model: candidate or merged."""
    comparisons: dict[ModelRole, JudgePreference]
    questions: int
    """Distinct questions, both orders counted."""
    requests: int
    """Requests sent, failed attempts included."""
    prompt_tokens: int | None
    """Input tokens; None: the server does not report them."""
    tokens: int | None
    cost: float | None
    """By evaluate.judge.input_price and output_price, including stored replies; None if the prices are not set."""


class EvaluationReport(Record):
    """Results of base, candidate, champion and anchor."""

    adapter_digest: str
    base_digest: str
    data_digest: str
    run_id: str
    model_digest: str | None
    """Digest of the candidate's export; None if there is none and none is needed."""
    champion_digest: str | None
    """Model digest of the scored champion, if any."""
    anchor_digest: str | None = None
    test_set_digest: str
    """Digest of the test rows and harness documents; uses of the test set are counted by it."""
    contracts: dict[str, dict[str, Any]]
    """Contracts by digest: data, template, tasks, numerics, batch size and versions that scores depend on."""
    scores: dict[ModelRole, ModelScores]
    costs: dict[ModelRole, InferenceCost] = Field(default_factory=dict)
    judge_report: JudgeReport | None = None
    """Result of evaluate.judge; None without a judge."""
    selection_overlaps: dict[str, int] = Field(default_factory=dict)
    """Number of test rows and tasks that also belong to a set for model selection, by the name of that set."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, one sentence each (a halved batch, a missing metric)."""


class ObjectiveSet(Record):
    """Samples used to select models, so they must not be in the test set: experiments/objectives/NAME.json."""

    name: str
    sample_ids: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    """Names of harness tasks."""


class EvaluationNoise(Record):
    """Result of `ratchet gate --aa`: a second evaluation of the candidate, which shows the noise."""

    model_digest: str
    model_format: ModelFormat
    contract: str
    batch_rows: tuple[int, int]
    """Batch sizes of the first and second evaluation."""
    metrics: dict[str, MetricValue]
    samples: dict[str, str]


class SampleScore(Record):
    """A line of a per-sample file, without `format`."""

    id: str
    value: float
    weight: float = 1.0
    """Number of tokens, if `value` is their negative log-likelihood in nats."""


class EvaluatedRow(Record):
    """A line of rows.jsonl, without `format`: a test row."""

    id: str
    prompt: str
    expected: str
    group: str | None
    """Group of the row (prepare.split.group). Rows of one group are not independent samples."""
    fields: dict[str, str]
    """Values of the fields in evaluate.slice_by."""
    prompt_tokens: int
    answer_tokens: int


def sample_file(who: str, metric: str) -> str:
    """Return the relative name of a metric's per-sample file; distinct for every metric name."""
    return f"samples/{who}/{metric.replace('%', '%25').replace('/', '%2F')}.jsonl"


ROWS = "rows.jsonl"
"""File of `EvaluatedRow`s."""


def answers_file(who: str) -> Path:
    """Return the file of generated answers: lines {id, answers: [text, ...]}."""
    return Path("answers") / f"{who}.jsonl"


def documents_file(who: str, task: str) -> Path:
    """Return the file of a harness task's documents: lines {id, prompt, target, answers, scores}."""
    return Path("harness") / who / f"{task.replace('/', '%2F')}.jsonl"


def judge_file(who: str) -> Path:
    """Lines {id, identical_answers, score, preferred: [..., ...], replies: [text, text]} of the comparison."""
    return Path("judge") / f"{who}.jsonl"


def curves_file(who: str) -> Path:
    """Return the file of precision-recall curves: {label: {precision: [...], recall: [...], average_precision}}."""
    return Path("curves") / f"{who}.json"


# Scores of a finished run on each validation row, by which finalists of a sweep are compared.

ValidationMetric = Literal["validation_loss", "accuracy", "exact_match", "token_f1"]
"""`validation_loss` comes from likelihoods, the others from greedy answers, scored as in stage evaluate."""

VALIDATION_METRICS: tuple[ValidationMetric, ...] = get_args(ValidationMetric)
VALIDATION_LOSS: ValidationMetric = "validation_loss"
GENERATED_METRICS = frozenset(VALIDATION_METRICS) - {VALIDATION_LOSS}
"""Metrics that need generated answers."""


class ValidationJob(Record):
    """Runs to score, all with one batch size."""

    run_ids: tuple[str, ...]
    """Finished runs on the prepared data."""
    metrics: tuple[ValidationMetric, ...]
    rows: int = 0
    """Number of validation rows, the first by id: ids are content digests, so this is a fixed random sample. 0: all."""


class ValidationLaunch(Record):
    """A job and how to execute it: the input of the scoring process."""

    job: ValidationJob
    max_new_tokens: int
    """Maximum length of an answer, in tokens."""
    machine: Machine

    def request_digest(self, card: DatasetCard) -> str:
        """Return 12 hex digits that identify what is computed of each run; equal requests are computed once."""
        return digests.hash_json(
            {
                "metrics": sorted(self.job.metrics),
                "rows": self.job.rows,
                "max_new_tokens": self.max_new_tokens if GENERATED_METRICS & set(self.job.metrics) else None,
                "data": card.digest,
                "fields": card.fields_digest,
                "base": card.base_digest,
            }
        )[: digests.SHORT]

    def require_measurable(self, card: DatasetCard) -> None:
        """Raise SettingsError for metrics that this dataset does not support."""
        if "accuracy" in self.job.metrics and card.task != "labels":
            raise SettingsError(
                "accuracy is the share of right labels, and prepare.task is text; take exact_match or token_f1"
            )
        if self.job.rows < 0 or not self.job.metrics:
            raise SettingsError(
                f"validation scores: found rows {self.job.rows}, metrics {list(self.job.metrics)}; "
                "expected rows >= 0 and at least one metric"
            )


class ValidationScores(Record):
    """Scores of one run's adapter: experiments/runs/RUN/validation_scores-REQUEST.json."""

    request_digest: str
    run_id: str
    adapter_digest: str
    data_digest: str
    base_digest: str
    rows: int
    """Number of rows as requested; 0: all."""
    ids: tuple[str, ...]
    """Ids of the validation rows."""
    groups: tuple[str | None, ...]
    """Group of each row; None: not grouped. Rows of one group are not independent samples."""
    tokens: tuple[int, ...]
    """Number of answer tokens per row."""
    values: dict[ValidationMetric, tuple[float, ...]]
    """Score of each row; for validation_loss, the total nats of its answer tokens."""
    metrics: dict[ValidationMetric, float]
    """Value over all rows: nats per answer token, or the mean of the rows."""
    numerics: dict[str, Any]
    """evaluation.comparability.NumericsSpec of the scores, which change with it by rounding."""
    seal: str = ""
    """Digest of all other fields."""

    def sealed(self) -> Self:
        """Return a copy with its digest, ready to save."""
        return self.model_copy(update={"seal": self._digest()})

    def _digest(self) -> str:
        return digests.hash_json(self.model_dump(mode="json", exclude={"seal"}))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record. Raises as `Record.load`, and DamagedFileError if the digest differs."""
        found = super().load(path)
        if found.seal != found._digest():
            raise DamagedFileError(f"{path}: not as it was written (its digest differs); remove it, it is made again")
        return found


def validation_scores_path(run: Path, request_digest: str) -> Path:
    """Return the path of the scores of a request in a run directory."""
    return run / f"validation_scores-{request_digest}.json"


def load_validation_scores(run: Path, request_digest: str, adapter_digest: str) -> ValidationScores | None:
    """Load the scores of a request and an adapter; None if they are missing, damaged or of another adapter."""
    try:
        found = ValidationScores.load(validation_scores_path(run, request_digest))
    except (DataError, DamagedFileError):
        return None
    return found if (found.request_digest, found.adapter_digest) == (request_digest, adapter_digest) else None
