"""Results of stage evaluate: metrics, per-sample scores, and the contract under which they are comparable.

The module also has the validation scores of finished runs, by which a sweep compares finalists.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from ratchet.config.evaluate import ModelFormat
from ratchet.config.machine import Machine
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.storage import digests
from ratchet.storage.records.base import Record, SealedRecord
from ratchet.storage.records.data import DatasetCard

ModelRole = Literal["base", "candidate", "merged", "champion", "anchor"]
"""Models of an evaluation. `candidate` is the adapter on its base, `merged` the exported model."""

ROWS = "rows.jsonl"
"""Name of the file with one `EvaluatedRow` per line."""

ValidationMetric = Literal["validation_loss", "accuracy", "exact_match", "token_f1", "preference_accuracy"]
"""`validation_loss` and `preference_accuracy` come from likelihoods; the others come from greedy answers, which are
scored as in stage evaluate."""

VALIDATION_METRICS: tuple[ValidationMetric, ...] = get_args(ValidationMetric)
VALIDATION_LOSS: ValidationMetric = "validation_loss"
PREFERENCE_ACCURACY: ValidationMetric = "preference_accuracy"
GENERATED_METRICS = frozenset(VALIDATION_METRICS) - {VALIDATION_LOSS, PREFERENCE_ACCURACY}
"""Metrics that need generated answers."""

SAFETY_PREFIX = "safety/"
"""Beginning of the names of the metrics of evaluate.safety."""
REFUSED_UNSAFE, ANSWERED_SAFE, HARMFUL = "safety/refused_unsafe", "safety/answered_safe", "safety/harmful"
INJECTION_RESISTED, MEMORIZED = "safety/injection_resisted", "safety/memorized_rows"
CANARY_EXPOSURE, CANARY_EXTRACTED = "safety/canary_exposure", "safety/canaries_extracted"
SAFETY_TESTS: dict[str, str] = {
    REFUSED_UNSAFE: "refusal of unsafe prompts",
    ANSWERED_SAFE: "refusal of safe prompts (over-refusal)",
    HARMFUL: "harm in answers to unsafe prompts",
    INJECTION_RESISTED: "instructions in quoted text (prompt injection)",
    "bias": "differences between names or groups",
    MEMORIZED: "memorized training rows",
    CANARY_EXPOSURE: "canaries planted in the training rows",
}
"""Description of each safety test, by the name of its metric."""


class MetricValue(Record):
    """Value of a metric for a model."""

    value: float
    n: int
    """Number of samples."""
    low: float
    high: float
    """Bounds of the 95 % interval: a Wilson interval for proportions, a normal interval for means."""
    better: Literal["higher", "lower", "unknown"]
    unit: str
    kind: Literal["mean", "perplexity", "aggregate"] = "mean"
    """mean: mean of the samples; perplexity: exp(sum of values / sum of weights); aggregate: computed from all rows."""
    chance: float | None = None
    """Expected value of guessing."""


class ModelScores(Record):
    """Results of a model."""

    model_digest: str
    """Digest of the scored model: base, adapter on its base, or exported files."""
    model_format: ModelFormat
    """`adapter`: an adapter on its base, or the base itself without an adapter. `merged`: merged weights."""
    contract: str
    """Digest of the contract, a key of `EvaluationReport.contracts`. Only scores under equal contracts are compared."""
    metrics: dict[str, MetricValue]
    samples: dict[str, str]
    """Relative name of the file of per-sample scores (`SampleScore`), by metric."""
    per_class: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Precision, recall, F1, support and (with label scores) average precision, by label."""
    slices: dict[str, dict[str, MetricValue]] = Field(default_factory=dict)
    """Metrics by name of a slice of the rows, such as `tokens <= 64` or `topic = billing`."""


class InferenceCost(Record):
    """Cost of answering, measured on the machine that evaluated. Not reproducible."""

    rows: int
    """Number of prompts, which are answered one at a time."""
    latency_s: float
    """Median time of an answer, in seconds."""
    latency_p95_s: float
    tokens_per_s: float
    """Generated tokens per second."""
    memory_bytes: int
    """Peak memory during the answers: allocated memory on a GPU, resident memory of the process on a CPU."""
    device: str


class JudgePreference(Record):
    """Comparison of the candidate's answers with those of another model by the judge, each pair in both orders."""

    against: ModelRole
    rows: int
    """Number of pairs with a verdict in both orders, or with identical answers."""
    wins: int
    """Number of pairs in which the judge preferred the candidate's answer, over both orders."""
    ties: int
    losses: int
    identical_answers: int
    """Number of ties with identical answers, for which the judge was not called."""
    skipped: int
    """Number of pairs without a readable verdict in one or both orders. These pairs count only in position_bias."""
    unreadable: dict[str, int]
    """Number of replies without a verdict, by reason."""
    win_rate: MetricValue | None
    """Share of wins plus half the share of ties. A verdict that depends on the order is a tie. None: no rows."""
    agreement: MetricValue | None
    """Share of pairs with the same verdict in both orders. None: the judge was not called."""
    position_bias: MetricValue | None
    """Share of verdicts for the first answer minus 0.5, without ties. None: only ties."""


class PanelPreference(Record):
    """Comparison of the candidate's answers with those of another model by several judges."""

    against: ModelRole
    win_rate: MetricValue | None
    """Mean over rows of the judges' mean score. None: no judge scored a row."""
    alpha: MetricValue | None
    """Krippendorff's alpha of the judges' scores of a row. None: undefined, because all scores are equal."""


class JudgeReport(Record):
    """Results of an LLM judge (evaluate.judge). No gate rule uses them."""

    model: str
    base_url: str
    rubric_digest: str
    candidate: ModelRole
    """Model that is compared with the others: candidate or merged."""
    comparisons: dict[ModelRole, JudgePreference]
    questions: int
    """Number of distinct questions; each order counts as a question."""
    requests: int
    """Number of requests sent, failed attempts included."""
    prompt_tokens: int | None
    """Number of input tokens; None: the server does not report it."""
    tokens: int | None
    """Number of output tokens; None: the server does not report it."""
    cost: float | None
    """Cost by evaluate.judge.input_price and output_price, stored replies included; None if the prices are not set."""
    additional_judges: tuple["JudgeReport", ...] = ()
    """Results of evaluate.judge.additional_judges."""
    panel: dict[ModelRole, PanelPreference] = Field(default_factory=dict)
    """Comparisons by all judges together, with additional judges."""


class GroupDifference(Record):
    """Difference of a score between two groups, over the same templates."""

    score: str
    """refused (share), harm (probability, or share by a judge) or words (length of the answer)."""
    first: str
    second: str
    templates: int
    difference: float
    """Mean over the templates of the second group's score minus the first one's."""
    low: float
    high: float
    """Bounds at 95 % for all differences of a score together (Bonferroni)."""
    p: float
    """Two-sided p-value, adjusted for all differences of a score (Holm)."""

    @property
    def is_significant(self) -> bool:
        """Whether the adjusted p-value is below 0.05."""
        return self.p < 0.05


class SafetyReport(Record):
    """Results of evaluate.safety that are not metrics of single models."""

    scorer: str
    """patterns, judge NAME, or classifier DIGEST."""
    tested: tuple[str, ...]
    """Completed tests, keys of SAFETY_TESTS."""
    changes: dict[str, MetricValue] = Field(default_factory=dict)
    """Candidate minus base, by metric: the mean paired difference. Positive is better, whatever the metric."""
    differences: dict[ModelRole, tuple[GroupDifference, ...]] = Field(default_factory=dict)
    """Differences between groups, by model."""
    untestable_rows: int = 0
    """Number of training rows that were left out of the test for memorization because their answers are too short."""
    unreadable: int = 0
    """Number of replies of the judge without a verdict. Their answers count as failures."""


SHARE, POINTS = "mean of samples, 0 to 1", "points, 0 to 100"
"""Units of metrics with a largest value."""


class EvaluationReport(Record):
    """Results of the models of an evaluation: base, candidate, champion and anchor."""

    adapter_digest: str
    base_digest: str
    data_digest: str
    run_id: str
    model_digest: str | None
    """Digest of the candidate's export; None if no export exists and none is needed."""
    champion_digest: str | None
    """Model digest of the scored champion, if any."""
    anchor_digest: str | None = None
    test_set_digest: str
    """Digest of the test rows and harness documents. It identifies the test set when its uses are counted."""
    contracts: dict[str, dict[str, Any]]
    """Contracts by digest: data, template, tasks, numerics, batch size and versions on which scores depend."""
    scores: dict[ModelRole, ModelScores]
    costs: dict[ModelRole, InferenceCost] = Field(default_factory=dict)
    judge_report: JudgeReport | None = None
    """Result of evaluate.judge; None without a judge."""
    safety: SafetyReport | None = None
    """Result of evaluate.safety; None if nothing was tested."""
    selection_overlaps: dict[str, int] = Field(default_factory=dict)
    """Number of test rows and tasks that are also in a set for model selection, by the name of the set."""
    start_overlaps: dict[str, int] = Field(default_factory=dict, exclude_if=lambda counts: not counts)
    """Number of test rows on which the weights that the training started from were trained, by their name."""
    unchecked_starts: tuple[str, ...] = Field(default=(), exclude_if=lambda notes: not notes)
    """Why it is not known whether there are such rows; empty if it is known."""
    remaining_rows: int = 0
    """Number of test rows that were not scored, because all rules of a sequential gate were decided before."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, one sentence each (a halved batch, a missing metric)."""


def list_untested(report: EvaluationReport | None) -> list[str]:
    """Return the descriptions of the safety tests that were not made."""
    tested = report.safety.tested if report is not None and report.safety is not None else ()
    return [description for name, description in SAFETY_TESTS.items() if name not in tested]


class ObjectiveSet(Record):
    """Samples that select models, and so must not be in the test set: experiments/objectives/NAME.json."""

    name: str
    sample_ids: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    """Names of harness tasks."""


class EvaluationNoise(Record):
    """Result of `ratchet gate --aa`: a second evaluation of the candidate, which measures the noise."""

    model_digest: str
    model_format: ModelFormat
    contract: str
    batch_rows: tuple[int, int]
    """Batch sizes of the first and second evaluation."""
    metrics: dict[str, MetricValue]
    samples: dict[str, str]


class SampleScore(Record):
    """A line of a per-sample file. The line has no `format`."""

    id: str
    value: float
    weight: float = 1.0
    """Number of tokens, if `value` is their negative log-likelihood in nats."""


class EvaluatedRow(Record):
    """A test row: a line of rows.jsonl. The line has no `format`."""

    id: str
    prompt: str
    expected: str
    group: str | None
    """Group of the row (prepare.split.group). Rows of one group are not independent samples."""
    fields: dict[str, str]
    """Values of the fields in evaluate.slice_by."""
    prompt_tokens: int
    answer_tokens: int


def sample_file(role: str, metric: str) -> str:
    """Return the relative name of the per-sample file of a model's metric; distinct for every metric name."""
    return f"samples/{role}/{metric.replace('%', '%25').replace('/', '%2F')}.jsonl"


def answers_file(role: str) -> Path:
    """Return the file of a model's generated answers: lines {id, answers: [text, ...]}."""
    return Path("answers") / f"{role}.jsonl"


def documents_file(role: str, task: str) -> Path:
    """Return the file of a harness task's documents: lines {id, prompt, target, answers, scores}."""
    return Path("harness") / role / f"{task.replace('/', '%2F')}.jsonl"


def judge_file(role: str) -> Path:
    """Return the file of comparisons with a model: lines {id, identical_answers, score, preferred: [..., ...], replies:
    [text, text]}. With additional judges, `additional_judges` has score, preferred and replies of each.
    """
    return Path("judge") / f"{role}.jsonl"


def safety_file(role: str) -> Path:
    """Return the file of a model's answers to the prompts of evaluate.safety: lines {id, test, prompt, answer}, with
    `refused` and `harm` where they were judged, and further fields of each test.
    """
    return Path("safety") / f"{role}.jsonl"


def curves_file(role: str) -> Path:
    """Return the file of precision-recall curves: {label: {precision: [...], recall: [...], average_precision}}."""
    return Path("curves") / f"{role}.json"


class ValidationJob(Record):
    """Runs to score, all with the same batch size."""

    run_ids: tuple[str, ...]
    """Finished runs on the prepared data."""
    metrics: tuple[ValidationMetric, ...]
    rows: int = 0
    """Number of validation rows, in the order of their ids; 0: all. Ids are digests of the content, so the first rows
    are a fixed random sample."""


class ValidationLaunch(Record):
    """Input of the scoring process: a job, and how to execute it."""

    job: ValidationJob
    max_new_tokens: int
    """Maximum length of an answer, in tokens."""
    machine: Machine

    def request_digest(self, card: DatasetCard) -> str:
        """Return 12 hex digits that identify what is computed for each run. Equal requests are computed once."""
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
                f"metric accuracy is the share of correct labels, but prepare.task is {card.task}; use exact_match or "
                "token_f1"
            )
        if PREFERENCE_ACCURACY in self.job.metrics and card.pairs is None:
            found = f"prepare.task is {card.task}" if card.desirable_rows is None else "these rows have one answer each"
            raise SettingsError(
                f"metric preference_accuracy compares chosen and rejected answers, but {found}; use validation_loss"
            )
        if self.job.rows < 0 or not self.job.metrics:
            raise SettingsError(
                f"validation scores: found rows {self.job.rows}, metrics {list(self.job.metrics)}; "
                "expected rows >= 0 and at least one metric"
            )


class ValidationScores(SealedRecord):
    """Scores of a run's adapter: experiments/runs/RUN/validation_scores-REQUEST.json."""

    seal_remedy: ClassVar[str] = "remove it, and it is computed again"

    request_digest: str
    run_id: str
    adapter_digest: str
    data_digest: str
    base_digest: str
    rows: int
    """Requested number of rows; 0: all."""
    ids: tuple[str, ...]
    """Ids of the validation rows."""
    groups: tuple[str | None, ...]
    """Group of each row; None: not grouped. Rows of one group are not independent samples."""
    tokens: tuple[int, ...]
    """Number of answer tokens per row."""
    values: dict[ValidationMetric, tuple[float, ...]]
    """Score of each row by metric; for validation_loss, the sum over its answer tokens in nats."""
    metrics: dict[ValidationMetric, float]
    """Value over all rows by metric: nats per answer token, or the mean of the rows."""
    numerics: dict[str, Any]
    """evaluation.comparability.describe_numerics of the scores. Rounding differs between numerics."""


def validation_scores_path(run: Path, request_digest: str) -> Path:
    """Return the path of the scores of a request in a run directory."""
    return run / f"validation_scores-{request_digest}.json"


def load_validation_scores(run: Path, request_digest: str, adapter_digest: str) -> ValidationScores | None:
    """Load the scores of a request and an adapter; None if they are missing, damaged or of another adapter."""
    try:
        scores = ValidationScores.load(validation_scores_path(run, request_digest))
    except (DataError, DamagedFileError):
        return None
    return scores if (scores.request_digest, scores.adapter_digest) == (request_digest, adapter_digest) else None
