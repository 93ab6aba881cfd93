"""One function or class for each extension point of Ratchet."""

from collections.abc import Mapping, Sequence
from typing import Any


def first_word(answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Metric: 1 for each answer that begins with the first word of its reference, else 0. Higher is better."""
    return [float(a.split()[:1] == r.split()[:1]) for a, r in zip(answers, references, strict=True)]


def short_answers(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Filter: drop conversations whose last answer has fewer than three characters."""
    return "answer of fewer than 3 characters" if len(messages[-1]["content"]) < 3 else None


def brevity(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str | None]) -> list[float]:
    """Reward: 1 for an empty answer, falling to 0.5 at 100 characters."""
    return [100 / (100 + len(answer)) for answer in answers]


class CsvLogger:
    """Logger: writes metrics.csv. It begins with an empty folder and receives each row of the run once."""

    def __init__(self, run: Any) -> None:
        self._path = run.folder / "metrics.csv"

    def log(self, rows: Sequence[Any]) -> None:
        """Receive the next rows: step, time and values by name, as in MLflow."""
        with self._path.open("a", encoding="utf-8") as stream:
            for row in rows:
                stream.writelines(f"{row.step},{name},{value}\n" for name, value in row.values.items())

    def finish(self, status: str) -> None:
        """Receive the end of the run: FINISHED, FAILED or KILLED."""


class LossFile:
    """Callback: appends the loss of each step to loss.txt in the run directory.

    It receives the whole journal again when a run is resumed, so it skips the steps that the file has.
    """

    name = "loss_file"

    def __init__(self, run: Any) -> None:
        self._path = run.path / "loss.txt"
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        self._step = int(lines[-1].split()[0]) if lines else 0

    def on_events(self, events: Sequence[Any]) -> None:
        """Receive the next events of the journal, in order."""
        with self._path.open("a", encoding="utf-8") as stream:
            for event in events:
                if event.kind == "step" and event.data["step"] > self._step:
                    self._step = event.data["step"]
                    stream.write(f"{self._step} {event.data['loss']:.6f}\n")

    def on_end(self, status: str) -> None:
        """Receive the end of the run: FINISHED, FAILED or KILLED."""
