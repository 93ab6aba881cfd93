"""Results of a sweep: trials, finalists, winner. Unlike records of stages, these records contain times and machine
names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ratchet.config.sweep import Direction
from ratchet.storage.records.base import Record

if TYPE_CHECKING:
    import pandas as pd

TrialState = Literal["running", "complete", "pruned", "infeasible", "failed"]
"""`infeasible`: the memory forecast refused the trial, memory ran out, or training diverged. Samplers treat this as a
violated constraint. `failed`: the trial failed for another reason, which is no evidence about its values."""


RequestAction = Literal["stop", "pause", "resume", "clone"]
"""Action that a person requests for a trial, as an option of `ratchet sweep`."""


class TrialRequest(Record):
    """Request of a person about a trial."""

    action: RequestAction
    study: str
    """Study in which the request was made; `trial` is a number of this study."""
    trial: int
    by: str
    """The person: RATCHET_ACTOR, git's user.email or the login name."""
    at: float
    """Unix time, in seconds."""
    values: dict[str, Any] = Field(default_factory=dict)
    """All values of the new trial that a clone requests, by dotted key."""


class TrialExecution(Record):
    """Execution of a trial by a worker."""

    worker: str
    """Host and process, such as `node7/4711`."""
    started: float
    """Unix time, in seconds."""
    last_seen: float
    """Time of the last heartbeat."""


class TrainingCost(Record):
    """Cost of a training, from its journal. If a trial continues another trial, its cost is that of both trials."""

    trained_tokens: int = 0
    """Number of answer tokens trained on; repeated steps count once."""
    planned_tokens: int = 0
    """Number of answer tokens of the full training. Pruning saved the difference from `trained_tokens`."""
    steps: int = 0
    planned_steps: int = 0
    train_seconds: float = 0.0
    """Time in steps and validations, in seconds."""
    memory_bytes: int = 0
    """Peak memory over all phases; 0 if it was not measured."""
    adapter_bytes: int = 0
    """Size of the saved adapter; 0 if there is none."""
    trainable_parameters: int = 0
    attempts: int = 0
    """Number of worker processes started."""


class Trial(Record):
    """A trial of a study."""

    number: int
    """Optuna's trial number, from 0."""
    values: dict[str, Any]
    """Values by dotted name of the setting, tied settings included."""
    run_id: str | None
    """RunId of the training; None if the settings are invalid."""
    state: TrialState
    objectives: tuple[float, ...] = ()
    """Objective values in the order of the study's objectives; empty unless the trial is complete."""
    curve: dict[int, float] = Field(default_factory=dict)
    """Validation loss in nats per token, by number of rows trained on."""
    constraints: dict[str, float] = Field(default_factory=dict)
    """Constraint values; above 0: violated. `memory`: needed / available - 1 (1.0 if unknown); `diverged`: 1.0."""
    cause: str = ""
    """Failure class of an infeasible or failed trial. `stopped` or `paused`: a person has ended this pruned trial while
    it ran, so its end is no evidence about its values."""
    reason: str = ""
    """Reason for the state, for display."""
    continues: int | None = None
    """Number of a pruned or failed trial, whose training this trial continues from its checkpoint, in the same run."""
    request: TrialRequest | None = None
    """Request of a person for this trial (`--clone`). None: the sampler chose its values, or it continues a trial."""
    decision: Literal["", "stopped", "paused"] = ""
    """Decision of a person that this training ends, or that it is not continued until it is resumed."""
    adapter_digest: str | None = None
    checkpoints: dict[int, str] = Field(default_factory=dict)
    """Manifest digest of each remaining checkpoint, by step."""
    cost: TrainingCost = TrainingCost()
    executions: tuple[TrialExecution, ...] = ()
    """Executions in order. There are several if a worker was lost."""
    started: float = 0.0
    """Unix time."""
    ended: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the trial has ended."""
        return self.state != "running"

    @property
    def is_ended_by_person(self) -> bool:
        """Whether a person has ended this trial while it ran."""
        return self.state == "pruned" and self.cause in ("stopped", "paused")

    def minimized_objectives(self, objectives: Sequence["SweepObjective"]) -> tuple[float, ...]:
        """Return the objectives of a complete trial with a sign so that less is better."""
        pairs = zip(self.objectives, objectives, strict=True)
        return tuple(value if objective.direction == "minimize" else -value for value, objective in pairs)


class ParameterAxis(Record):
    """A searched setting, with the data for plots."""

    name: str
    kind: Literal["float", "int", "choice", "tie"]
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()
    tie: str | None = None
    conditional: bool = False


class SweepObjective(Record):
    """An objective of the study."""

    metric: str
    direction: Direction


class FinalistComparison(Record):
    """Comparison of the leading finalist with another finalist: mean over seeds, paired by validation row."""

    other: int
    """Trial number of the other finalist."""
    difference: float
    """Difference between the means of the leader and the other finalist; positive if the leader is better."""
    low: float
    """One-sided lower bound of the difference. Above 0, the leader is significantly better."""
    p: float
    """One-sided p-value after Holm's correction over all comparisons."""
    seed_error: float
    """Standard error due to seeds."""
    row_error: float
    """Standard error due to rows."""
    better: bool
    """Whether the leader is significantly better."""
    method: str


class Finalist(Record):
    """A trial that was trained with several seeds."""

    number: int
    values: dict[str, Any]
    run_ids: tuple[str, ...]
    """RunIds by seed. The first is the RunId of the trial."""
    means: tuple[float, ...]
    """Value of the metric on the validation rows, by seed."""
    mean: float
    cost: TrainingCost
    dropped: str = ""
    """Reason why the finalist was not trained with more seeds; empty if it was trained with more seeds."""


class FinalRound(Record):
    """Final round of a sweep: finalists and winner."""

    metric: str
    direction: Direction
    rows: int
    finalists: tuple[Finalist, ...]
    """Finalists by mean, best first; dropped finalists are last."""
    comparisons: tuple[FinalistComparison, ...]
    """Comparisons of the first finalist with each other finalist."""
    winner: int
    """Trial number of the winner."""
    reason: str


class SweepReport(Record):
    """Report on a study."""

    study: str
    """Name and version of the study, such as `sweep` or `sweep.2`."""
    storage: Literal["sqlite", "postgres", "journal"]
    """Kind of the storage; `journal` is that of earlier versions."""
    objectives: tuple[SweepObjective, ...]
    axes: tuple[ParameterAxis, ...]
    sampler: str
    """Kind, seed and settings of the sampler, as text."""
    pruner: str
    versions: dict[str, str]
    """Versions of the libraries that propose values: optuna, cmaes."""
    data_digest: str
    base_digest: str
    planned_trials: int
    """Planned number of trials, including trials that a fork took over, and clones that a person requested."""
    trials: tuple[Trial, ...]
    """Trials by number."""
    importances: dict[str, float] = Field(default_factory=dict)
    """Share of the variance of the first objective that each setting explains; empty if there are too few trials."""
    best: tuple[int, ...] = ()
    """Number of the best trial; with several objectives, numbers of the Pareto front."""
    final_round: FinalRound | None = None
    winner: int | None = None
    requests: tuple[TrialRequest, ...] = ()
    """Requests of people about trials, in order."""
    stopped: str = ""
    """Reason why the sweep ended before its budget was used up; empty if it used up the budget."""

    def to_dataframe(self) -> "pd.DataFrame":
        """Return a table with one row per trial: number, state, hyperparameters, objectives, RunId."""
        import pandas as pd

        rows = []
        for trial in self.trials:
            scores = dict.fromkeys((objective.metric for objective in self.objectives), float("nan"))
            scores |= {
                objective.metric: score
                for objective, score in zip(self.objectives, trial.objectives or (), strict=False)
            }
            rows.append({"trial": trial.number, "state": trial.state, **trial.values, **scores, "run_id": trial.run_id})
        return pd.DataFrame(rows).set_index("trial") if rows else pd.DataFrame()
