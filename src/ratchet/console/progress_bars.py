"""Progress lines in a terminal for what takes longer than two seconds; nothing where nobody watches."""

import sys
from typing import Any


def create_bar(what: str, unit: str, total: int | None = None) -> Any:
    """A line on standard error that removes itself. `disable` is said, since the environment may silence tqdm."""
    from tqdm import tqdm  # reads the environment when it is imported: not before the command line has written there

    return tqdm(
        desc=what, unit=f" {unit}", unit_scale=True, total=total, delay=2, mininterval=0.5, leave=False,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


class ProgressBars:
    """One line at a time: a new one whenever another thing is done."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._what = ""
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far `what` is."""
        if what != self._what:
            self.close()
            self._what, self._bar = what, create_bar(f"{self._verb}: {what}", "", total)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the line."""
        if self._bar is not None:
            self._bar.close()
        self._what, self._bar = "", None
