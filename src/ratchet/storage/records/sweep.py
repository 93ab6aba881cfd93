"""What a sweep has found: trials, finalists, winner. Unlike the records of stages these tell of times and machines."""

from typing import Any, Literal

from pydantic import Field

from ratchet.config.sweep import Direction
from ratchet.storage.records.base import Record

TrialState = Literal["running", "complete", "pruned", "infeasible", "failed"]
"""`infeasible`: refused by the memory forecast, out of memory, or diverged; a violated constraint, which samplers learn
from. `failed`: anything else that went wrong; says nothing about the values."""


class TrialExecution(Record):
    """A worker that had the trial, and for how long."""

    worker: str
    """Host and process, such as `node7/4711`."""
    begun: float
    """Unix time, in seconds."""
    seen: float
    """When it last gave a sign of life."""


class TrainingCost(Record):
    """What a training came to, from its journal; of a trial that was continued, all of it."""

    trained_tokens: int = 0
    """Answer tokens learned from, those done twice counted once."""
    planned_tokens: int = 0
    """The same had it gone to the end; what pruning saved is the difference."""
    steps: int = 0
    planned_steps: int = 0
    train_seconds: float = 0.0
    """In steps and validations."""
    memory_bytes: int = 0
    """Most that any phase held; 0 where nothing was measured."""
    adapter_bytes: int = 0
    """Of the sealed adapter's weights; 0 where there is none."""
    trainable_parameters: int = 0
    attempts: int = 0
    """Trainer processes that were started for it."""


class Trial(Record):
    """One trial of a study."""

    number: int
    """From 0; Optuna's."""
    values: dict[str, Any]
    """By dotted key, ties included: what to write into params.yaml."""
    run_id: str | None
    """Of the run that trains these values; None where the settings refuse them."""
    state: TrialState
    objectives: tuple[float, ...] = ()
    """In the order of the study's aims; of complete trials only."""
    curve: dict[int, float] = Field(default_factory=dict)
    """Validation loss, in nats per token, by rows learned from until then."""
    constraints: dict[str, float] = Field(default_factory=dict)
    """Above 0: violated. `memory`: bytes needed over bytes at hand, less 1 (1.0 where unknown); `diverged`: 1.0."""
    cause: str = ""
    """Class of the failure (run.recovery.FailureClass) of one that is infeasible or failed."""
    reason: str = ""
    """Why it ended so, for people."""
    continues: int | None = None
    """Number of the trial that this one goes on with, from its checkpoint: pruned, or failed and forgiven; same run."""
    adapter_digest: str | None = None
    checkpoints: dict[int, str] = Field(default_factory=dict)
    """Digest of the manifest of each checkpoint that is kept, by step."""
    cost: TrainingCost = TrainingCost()
    takes: tuple[TrialExecution, ...] = ()
    """Workers that had it, in order; more than one: somebody died."""
    begun: float = 0.0
    """Unix time."""
    ended: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody works on it any more."""
        return self.state != "running"


class ParameterAxis(Record):
    """One searched setting, as pictures need it."""

    knob: str
    kind: Literal["float", "int", "choice", "tie"]
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()
    tie: str | None = None
    conditional: bool = False


class SweepObjective(Record):
    """What trials were judged by."""

    metric: str
    direction: Direction


class FinalistComparison(Record):
    """The leading finalist against another: mean over seeds, paired by validation row."""

    other: int
    """Trial number."""
    difference: float
    """Of the means; positive: the leader is better."""
    low: float
    """One-sided lower bound of the difference; above 0: really better."""
    p: float
    """One-sided, after Holm's correction for all comparisons."""
    seed_error: float
    """Part of the standard error that comes from seeds."""
    row_error: float
    """Part that comes from rows."""
    better: bool
    """Whether the leader is better beyond doubt."""
    method: str


class Finalist(Record):
    """A trial that was trained with several seeds."""

    number: int
    values: dict[str, Any]
    run_ids: tuple[str, ...]
    """By seed: the first is the trial's own."""
    means: tuple[float, ...]
    """Metric on the validation rows, by seed."""
    mean: float
    cost: TrainingCost
    dropped: str = ""
    """Why it got no further seeds."""


class FinalRound(Record):
    """The finalists and which of them won."""

    metric: str
    direction: Direction
    rows: int
    finalists: tuple[Finalist, ...]
    """Best mean first, those that were dropped at the end."""
    comparisons: tuple[FinalistComparison, ...]
    """Of the first with each of the others."""
    winner: int
    """Trial number."""
    reason: str


class SweepReport(Record):
    """Everything about one study, for pages, MLflow and people."""

    study: str
    """Name and generation, such as `sweep` or `sweep.2`."""
    storage: Literal["journal", "postgres"]
    objectives: tuple[SweepObjective, ...]
    axes: tuple[ParameterAxis, ...]
    sampler: str
    """Kind, seed, settings, for people."""
    pruner: str
    versions: dict[str, str]
    """Libraries that proposed values: optuna, cmaes."""
    data_digest: str
    base_digest: str
    wanted_trials: int
    """Those included that a fork has taken over."""
    trials: tuple[Trial, ...]
    """By number."""
    importances: dict[str, float] = Field(default_factory=dict)
    """Share of the variance of the first objective that each knob explains; empty where too few trials say so."""
    best: tuple[int, ...] = ()
    """Trial number of the best; of several objectives those of the Pareto front."""
    finals: FinalRound | None = None
    winner: int | None = None
    stopped: str = ""
    """Why the sweep ended before its budget was spent; empty where it did not."""
