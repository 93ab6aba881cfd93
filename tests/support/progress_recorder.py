"""A reporter that keeps the progress that is reported."""


class ProgressRecorder:
    """Receives progress (`ratchet.storage.progress.ProgressReporter`)."""

    def __init__(self) -> None:
        self.states: list[tuple[str, int, int | None, str]] = []
        """Task, completed units, all units and unit of each report."""

    def report(self, task: str, done: int, total: int | None, unit: str) -> None:
        """Keep a report."""
        self.states.append((task, done, total, unit))

    def clear(self) -> None:
        """Ignore the request, because nothing is drawn."""

    def last_of(self) -> dict[str, tuple[int, int | None]]:
        """Return the last numbers of each task, in the order of the first reports."""
        return {task: (done, total) for task, done, total, _ in self.states}
