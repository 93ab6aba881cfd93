"""What is fetched from a mirror: how much of it has come is told now and then, and a request to stop ends it."""

import time
from collections.abc import Callable

from ratchet.errors import InterruptedRunError
from ratchet.run import status

TOLD_EVERY_S = 5.0


class Arrival:
    """Of one sealed directory after the other.

    Args:
        run_id: what is fetched belongs to.
        stopping: asked at each piece, whether to break off.
        tell: told now and then, in words.
    """

    def __init__(self, run_id: str, stopping: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self._run_id, self._stopping, self._tell = run_id, stopping, tell
        self._what, self._expected_bytes, self._come_bytes = "", 0, 0
        self._told_s = time.monotonic()

    def expect(self, what: str, size: int) -> None:
        """From now on come the `size` bytes of `what`."""
        self._what, self._expected_bytes, self._come_bytes = what, size, 0

    def come(self, count: int) -> None:
        """So many bytes more. Raises InterruptedRunError when asked to stop."""
        if self._stopping():
            raise InterruptedRunError(f"run {self._run_id}: stopped while it was fetched from its mirror; repeat")
        self._come_bytes = min(self._expected_bytes, self._come_bytes + count)  # what was wrong comes again
        if (now := time.monotonic()) - self._told_s >= TOLD_EVERY_S:
            self._told_s = now
            of = f"{status.size(self._come_bytes)} of {status.size(self._expected_bytes)}"
            self._tell(f"{self._what}: {of} fetched from the mirror")
