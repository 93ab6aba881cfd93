"""Progress of long operations. The code that works reports it; the command that runs decides how to show it.

Any code may call `report_progress`, in any thread and as often as it likes: a call takes about a microsecond. Nothing
is shown unless a reporter is set. The command line sets one (`console/progress.py`), and so do functions of the Python
API that take `on_progress`. Lines of text about single events are not progress: they go to `on_progress`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

Unit = Literal["", "bytes"]


class ProgressReporter(Protocol):
    """Receives the progress of this process."""

    def report(self, task: str, done: int, total: int | None, unit: Unit) -> None:
        """See `report_progress`."""

    def clear(self) -> None:
        """See `clear_progress`."""


_reporter: ProgressReporter | None = None


def report_progress(task: str, done: int, total: int | None = None, unit: Unit = "") -> None:
    """Report the state of a task. One task is shown at a time: the one that was reported last.

    Args:
        task: a few words, such as `rows read`; another name, or a smaller `done`, starts another task.
        done: number of completed units.
        total: number of all units; the task ends when all are completed. None: unknown.
        unit: `bytes`, or empty for things that the name of the task names.
    """
    if _reporter is not None:
        _reporter.report(task, done, total, unit)


def clear_progress() -> None:
    """End the current task, and remove its bar from the terminal before anything else is drawn there."""
    if _reporter is not None:
        _reporter.clear()


@contextmanager
def use_reporter(reporter: ProgressReporter) -> Iterator[None]:
    """Send the progress in this context to a reporter, in place of the outer one."""
    global _reporter  # noqa: PLW0603 (threads of libraries report downloads, so a context variable does not suffice)
    outer, _reporter = _reporter, reporter
    try:
        yield
    finally:
        _reporter = outer


@contextmanager
def report_step(task: str) -> Iterator[None]:
    """Report a task that has no units to count: the display shows how long it takes."""
    report_progress(task, 0, 1)
    yield
    report_progress(task, 1, 1)


@contextmanager
def count_bytes(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is called with the size of each completed piece of a task of `total` bytes."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        report_progress(task, done, total, "bytes")

    yield add
