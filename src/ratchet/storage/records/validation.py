"""Scores of a finished run on validation rows, row by row, and how they are asked for: what finalists differ in."""

from pathlib import Path
from typing import Any, Literal, Self, get_args

from ratchet.config.schema import Machine
from ratchet.errors import DamagedError, DataError, SettingsError
from ratchet.storage import digests
from ratchet.storage.records.base import Record
from ratchet.storage.records.dataset_card import DatasetCard

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
        return digests.of_json(
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


class HeldOut(Record):
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
        return digests.of_json(self.model_dump(mode="json", exclude={"seal"}))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what was saved sealed. Raises DataError or DamagedError as any record, and for a digest that differs."""
        found = super().load(path)
        if found.seal != found._digest():
            raise DamagedError(f"{path}: not as it was written (its digest differs); remove it, it is made again")
        return found


def path_in(run: Path, question: str) -> Path:
    """Where a run's directory keeps its answer to a question."""
    return run / f"held_out-{question}.json"


def answered(run: Path, question: str, adapter_digest: str) -> HeldOut | None:
    """What is kept of this question and this very adapter; None where nothing is, or nothing that can be trusted."""
    try:
        found = HeldOut.load(path_in(run, question))
    except (DataError, DamagedError):
        return None
    return found if (found.question, found.adapter_digest) == (question, adapter_digest) else None
