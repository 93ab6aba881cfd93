"""What stage evaluate found, as JSON: figures, per-sample scores, and the contract under which they were made."""

from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field

from ratchet.config.evaluation import Form
from ratchet.config.schema import Machine
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.storage import digests
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import DatasetCard

Who = Literal["base", "candidate", "merged", "champion", "anchor"]
"""The models of one evaluation. `merged` is the candidate as it was exported, `candidate` the same as an adapter."""


class MetricValue(Record):
    """One figure of one model, with the per-sample scores that it is made of."""

    value: float
    n: int
    low: float
    high: float
    """95 % interval of the value: Wilson for proportions, normal for means."""
    better: Literal["higher", "lower", "unknown"]
    unit: str
    kind: Literal["mean", "perplexity", "figure"] = "mean"
    """Of its samples: their mean; exp(sum of values / sum of weights); or no function of them (a corpus figure)."""
    chance: float | None = None
    """What guessing reaches."""


class ModelScores(Record):
    """One model's results."""

    model_digest: str
    """Fingerprint of what was scored: base, adapter on its base, or exported files."""
    form: Form
    """As an adapter on the base that it was trained on (the base: with adapters off), or as plain weights."""
    contract: str
    """Fingerprint of `EvalReport.contracts[contract]`; only equal contracts are compared."""
    metrics: dict[str, MetricValue]
    samples: dict[str, str]
    """Relative names of per-sample files, by metric; see `SampleScore`."""
    per_class: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Precision, recall, F1, support and (with label scores) average precision of each label."""
    slices: dict[str, dict[str, MetricValue]] = Field(default_factory=dict)
    """Metrics of parts of the rows, by part: `tokens <= 64`, `topic = billing`."""


class InferenceCost(Record):
    """What answering costs on the machine that evaluated: a measurement, not the same twice."""

    rows: int
    """Prompts, answered one at a time."""
    latency_s: float
    """Median seconds of an answer."""
    latency_p95_s: float
    tokens_per_s: float
    """Generated tokens in a second."""
    memory_bytes: int
    """Peak while answering: allocated on a GPU, resident in the process on a CPU."""
    device: str


class JudgePreference(Record):
    """What a judge said of the candidate's answers beside another model's, each pair in both orders."""

    against: Who
    rows: int
    """Pairs of answers with a verdict in both orders, or without need of one."""
    wins: int
    """Of them: the candidate's answer preferred, both orders taken together."""
    ties: int
    losses: int
    equal: int
    """Of the ties: both answers are the same text, so nobody was asked."""
    left_out: int
    """Pairs without a readable verdict in one order or both; they are in no figure but first_bias."""
    unreadable: dict[str, int]
    """Replies without a verdict, by reason."""
    win_rate: MetricValue | None
    """Wins, and half of what is neither; a pair that depends on the order is half. None: there are no rows."""
    agreement: MetricValue | None
    """Pairs on which both orders led to the same verdict; None: no pair was asked about."""
    first_bias: MetricValue | None
    """Share of verdicts for the answer that came first, beyond a half; ties aside. None: there are only ties."""


class JudgeReport(Record):
    """Generated answers compared by another model (evaluate.judge); no rule of the gate reads it."""

    model: str
    address: str
    rubric_digest: str
    candidate: Who
    """Whose answers were held against the others': candidate, or merged."""
    comparisons: dict[Who, JudgePreference]
    questions: int
    """Different ones, both orders counted."""
    requests: int
    """That they took, tries that failed included."""
    prompt_tokens: int | None
    """Sent for their answers; None: the server does not count."""
    tokens: int | None
    cost: float | None
    """By evaluate.judge.price_in and price_out; None: they are not known. What was kept from before is in it, too."""


class EvaluationReport(Record):
    """Base, candidate, champion and anchor."""

    adapter_digest: str
    base_digest: str
    data_digest: str
    run_id: str
    model_digest: str | None
    """Of the export that stands for the candidate; None where none was made of its adapter, and none was needed."""
    champion_digest: str | None
    """Model digest of the champion that was scored, if there is one."""
    anchor_digest: str | None = None
    gate_set: str
    """Fingerprint of the test rows and of the harness's documents: what look-ups are counted for."""
    contracts: dict[str, dict[str, Any]]
    """What made the scores comparable, by fingerprint: data, template, tasks, numbers, batch, versions."""
    scores: dict[Who, ModelScores]
    costs: dict[Who, InferenceCost] = Field(default_factory=dict)
    judged: JudgeReport | None = None
    """Of evaluate.judge; None: nobody was asked."""
    chosen_by: dict[str, int] = Field(default_factory=dict)
    """Test rows (or tasks) that also belong to a set by which models are chosen, by the name of that set."""
    notes: tuple[str, ...] = ()
    """What a reader should know, a sentence each (a batch that was halved, a metric that could not be had)."""


class ObjectiveSet(Record):
    """A set by which models are chosen, so that it must not be the gate's: experiments/objectives/NAME.json."""

    name: str
    sample_ids: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    """Harness tasks, by name."""


class EvaluationNoise(Record):
    """`ratchet gate --aa`: the candidate scored a second time; what differs is noise of the evaluation."""

    model_digest: str
    form: Form
    contract: str
    batch_rows: tuple[int, int]
    """Rows scored at once, the first time and the second."""
    metrics: dict[str, MetricValue]
    samples: dict[str, str]


class SampleScore(Record):
    """A line of a per-sample file, `format` left out."""

    id: str
    value: float
    weight: float = 1.0
    """Tokens, where `value` is their negative log-likelihood in nats."""


class EvaluatedRow(Record):
    """A line of rows.jsonl, `format` left out: a test row."""

    id: str
    prompt: str
    expected: str
    group: str | None
    """Rows of one group are no independent samples (prepare.split.group)."""
    fields: dict[str, str]
    """Values of evaluate.categories."""
    prompt_tokens: int
    answer_tokens: int


def sample_file(who: str, metric: str) -> str:
    """Where the per-sample scores of a metric lie in the evaluation: one name for one metric, whatever its letters."""
    return f"samples/{who}/{metric.replace('%', '%25').replace('/', '%2F')}.jsonl"


ROWS = "rows.jsonl"
"""`EvaluatedRow`s."""


def answers_file(who: str) -> Path:
    """Lines {id, answers: [text, ...]} of the rows that were answered."""
    return Path("answers") / f"{who}.jsonl"


def documents_file(who: str, task: str) -> Path:
    """Lines {id, prompt, target, answers, scores} of the harness's documents."""
    return Path("harness") / who / f"{task.replace('/', '%2F')}.jsonl"


def judged_file(who: str) -> Path:
    """Lines {id, equal, score, preferred: [..., ...], replies: [text, text]} of the comparison with this model."""
    return Path("judge") / f"{who}.jsonl"


def curves_file(who: str) -> Path:
    """JSON {label: {precision: [...], recall: [...], average_precision}} of a label task."""
    return Path("curves") / f"{who}.json"


# Scores of a finished run on validation rows, row by row, and how they are asked for: what finalists differ in.

HeldOutMetric = Literal["validation_loss", "accuracy", "exact_match", "token_f1"]
"""`validation_loss` from likelihoods; the others from greedy answers, scored as stage evaluate scores them."""

MEASURED: tuple[HeldOutMetric, ...] = get_args(HeldOutMetric)
LOSS: HeldOutMetric = "validation_loss"
ANSWERED = frozenset(MEASURED) - {LOSS}
"""What the model must answer rows for."""


class HeldOutJob(Record):
    """Runs to be scored, all in batches of one size."""

    run_ids: tuple[str, ...]
    """Finished runs on the prepared data."""
    metrics: tuple[HeldOutMetric, ...]
    rows: int = 0
    """The first so many validation rows by id: ids are digests of content, so a fixed random sample; 0 takes all."""


class HeldOutLaunch(Record):
    """A job and how it is carried out: all that the process which does so is told."""

    job: HeldOutJob
    max_new_tokens: int
    """Longest answer, in tokens."""
    machine: Machine

    def question(self, card: DatasetCard) -> str:
        """What each run is asked, as 12 hex digits: equal ones are answered once."""
        return digests.hash_json(
            {
                "metrics": sorted(self.job.metrics),
                "rows": self.job.rows,
                "max_new_tokens": self.max_new_tokens if ANSWERED & set(self.job.metrics) else None,
                "data": card.digest,
                "fields": card.fields_digest,
                "base": card.base_digest,
            }
        )[: digests.SHORT]

    def require_measurable(self, card: DatasetCard) -> None:
        """Raises SettingsError for what this data gives no figure of."""
        if "accuracy" in self.job.metrics and card.task != "labels":
            raise SettingsError(
                "accuracy is the share of right labels, and prepare.task is text; take exact_match or token_f1"
            )
        if self.job.rows < 0 or not self.job.metrics:
            raise SettingsError(
                f"held-out scores: {self.job.rows} rows, metrics {list(self.job.metrics)}: ask for some"
            )


class HeldOutScores(Record):
    """What one run's adapter scored: experiments/runs/RUN/held_out-QUESTION.json."""

    question: str
    run_id: str
    adapter_digest: str
    data_digest: str
    base_digest: str
    rows: int
    """As asked; 0: all."""
    ids: tuple[str, ...]
    """Of the validation rows."""
    groups: tuple[str | None, ...]
    """Rows of one group are no independent samples; None: a group of its own."""
    tokens: tuple[int, ...]
    """Answer tokens of each row."""
    values: dict[HeldOutMetric, tuple[float, ...]]
    """Score of each row; for validation_loss nats of all its answer tokens together."""
    figures: dict[HeldOutMetric, float]
    """Over all rows, as training and evaluation report them: nats per answer token, or the mean of the rows."""
    arithmetic: dict[str, Any]
    """How the model was computed (evaluation.contract.Arithmetic): scores move with it by rounding."""
    seal: str = ""
    """Digest of all else."""

    def sealed(self) -> Self:
        """The same with its digest, ready to be saved."""
        return self.model_copy(update={"seal": self._digest()})

    def _digest(self) -> str:
        return digests.hash_json(self.model_dump(mode="json", exclude={"seal"}))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a sealed record. Raises DataError or DamagedFileError as any record, and for a digest that differs."""
        found = super().load(path)
        if found.seal != found._digest():
            raise DamagedFileError(f"{path}: not as it was written (its digest differs); remove it, it is made again")
        return found


def held_out_path(run: Path, question: str) -> Path:
    """Where a run's directory keeps its answer to a question."""
    return run / f"held_out-{question}.json"


def read_held_out(run: Path, question: str, adapter_digest: str) -> HeldOutScores | None:
    """What is kept of this question and this very adapter; None where nothing is, or nothing that can be trusted."""
    try:
        found = HeldOutScores.load(held_out_path(run, question))
    except (DataError, DamagedFileError):
        return None
    return found if (found.question, found.adapter_digest) == (question, adapter_digest) else None
