"""Records of `ratchet monitor`: reference, state, alarms and report. None contains a text of a prompt or an answer."""

from typing import ClassVar, Literal

from pydantic import Field

from ratchet.storage.records.base import Record, SealedRecord
from ratchet.storage.records.evaluation import ModelRole

MonitorTestName = Literal["inputs", "prompt length", "answer length", "refusals", "scores"]

_REMEDY = "restore it, or remove {folder}: then the monitoring of this version begins again"


class ReferenceSample(Record):
    """Values of one test in the evaluation."""

    places: dict[int, int]
    """Number of rows by place: a value that is rounded to an integer from 0."""
    mean: float
    rows: int


class MonitorReference(SealedRecord):
    """Figures of the evaluation of a version, kept from the first look on: reference.json."""

    seal_remedy: ClassVar[str] = _REMEDY

    version: int
    model_digest: str
    role: ModelRole
    """Role of the model in the evaluation."""
    evaluation: str
    """Digest of the evaluation."""
    score_metric: str | None
    """Metric of the scores; None: the evaluation has none that could be compared."""
    largest_score: float
    is_lower_better: bool
    profile: tuple[str, ...]
    """Hashed n-grams of the prompts with which inputs are compared: base64 of pairs of 16-bit numbers per prompt."""
    samples: dict[MonitorTestName, ReferenceSample]


class MonitorAlarm(Record):
    """An alarm of a test."""

    test: MonitorTestName
    number: int
    """Number of the value at which the alarm was raised."""
    time: str | None
    """Time of this request, as logged."""
    start: int
    """Number of the value at which the change has most likely begun."""
    start_time: str | None
    value: float
    """Mean since the start of the change."""
    reference: float
    """Mean in the evaluation, or of the accepted requests."""
    evidence: float
    is_accepted: bool = False
    """Whether the reference is accepted requests."""
    is_notified: bool = False
    """Whether the webhook has received it."""
    action: str | None = None
    """Result of `on_alarm: rollback`; None: nothing was due or done."""

    def describe(self) -> str:
        """Describe the alarm in one line."""
        when = f" ({self.start_time})" if self.start_time else ""
        compared = "accepted requests" if self.is_accepted else "evaluation"
        return (
            f"{self.test}: {self.value:.4g} since number {self.start:,}{when}; {compared} {self.reference:.4g}; "
            f"evidence {self.evidence:,.0f}"
        )


class MonitorTestState(Record):
    """State of one test (`quality_gate.change_detection.ChangeDetector`)."""

    places: dict[int, int]
    evidence: tuple[float, ...]
    growth: tuple[float, ...]
    starts: tuple[int, ...]
    start_times: tuple[float, ...]
    sums: tuple[float, ...]
    observed: int
    threshold: float
    """Evidence that raises an alarm; fixed when the test began."""
    total: float = 0.0
    """Sum of all values since the test began."""
    learning: int = 0
    """Number of values that still become the reference before the test begins."""
    accepted: int = 0
    """Number of values that became the reference after `--accept`; 0: the evaluation is the reference."""
    accepted_total: float = 0.0
    """Sum of these values."""
    resets: int = 0
    alarm: MonitorAlarm | None = None


class LogFileProgress(Record):
    """How far a log file was read."""

    name: str
    offset: int
    """Number of bytes read, complete lines only."""
    lines: int
    first_line: str
    """SHA-256 of the first line."""
    head: str
    """SHA-256 of the first bytes (at most 64 KiB) of what was read."""
    tail: str
    """SHA-256 of the last bytes (at most 64 KiB) of what was read."""


class MonitorReset(Record):
    """An acknowledgement of alarms."""

    time: str
    actor: str
    reason: str
    tests: tuple[MonitorTestName, ...]
    is_accepted: bool
    """Whether the following requests became the reference."""


class MonitorState(SealedRecord):
    """State of the tests of a version, and how far each log was read: state.json."""

    seal_remedy: ClassVar[str] = _REMEDY

    version: int
    model_digest: str
    files: tuple[LogFileProgress, ...] = ()
    traces_until_ms: dict[str, int] = Field(default_factory=dict)
    """Largest time of a trace that was read, in Unix milliseconds, by experiment of MLflow."""
    requests: int = 0
    request_ids: str = ""
    """Ids of the requests that were counted, hashed to 8 bytes each; base64."""
    scored_ids: str = ""
    """Ids of the requests whose score was counted, likewise."""
    duplicates: int = 0
    """Number of lines about requests that had been counted."""
    earlier: int = 0
    """Number of requests of another version, or from before the promotion; they are not counted."""
    unusable: int = 0
    """Number of lines that are no request."""
    tests: dict[MonitorTestName, MonitorTestState] = Field(default_factory=dict)
    resets: tuple[MonitorReset, ...] = ()


class MonitorTestReport(Record):
    """Result of one test."""

    test: MonitorTestName
    observed: int
    """Number of values compared."""
    value: float | None
    """Mean of the values, or since the start of the change after an alarm; None: no value yet."""
    reference: float
    """Mean in the evaluation, or of the accepted requests."""
    reference_rows: int
    """Number of values of the reference."""
    evidence: float
    threshold: float
    """Evidence that raises an alarm."""
    learning: int = 0
    is_accepted: bool = False
    """Whether the reference is accepted requests."""
    alarm: MonitorAlarm | None = None


class MonitorReport(Record):
    """Result of `ratchet monitor`."""

    version: int
    model_digest: str
    role: ModelRole
    score_metric: str | None
    requests: int
    new_requests: int
    """Number of requests counted by this call."""
    duplicates: int
    earlier: int
    unusable: int
    requests_per_false_alarm: int
    tests: tuple[MonitorTestReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def alarms(self) -> tuple[MonitorAlarm, ...]:
        """Alarms that are not acknowledged yet."""
        return tuple(test.alarm for test in self.tests if test.alarm is not None)
