"""Progress bars for tasks longer than two seconds. Only terminals show them."""

import sys
from typing import Any


def create_bar(what: str, unit: str, total: int | None = None) -> Any:
    """Create a bar on standard error that removes itself. `disable` is explicit because the environment may silence
    tqdm."""
    from tqdm import tqdm  # reads the environment at import, so only after the command line has changed it

    return tqdm(
        desc=what, unit=f" {unit}", unit_scale=True, total=total, delay=2, mininterval=0.5, leave=False,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


class ProgressBars:
    """Shows one bar at a time, a new one for each task."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._what = ""
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the progress of `what`."""
        if what != self._what:
            self.close()
            self._what, self._bar = what, create_bar(f"{self._verb}: {what}", "", total)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._what, self._bar = "", None
