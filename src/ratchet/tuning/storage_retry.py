"""Repeats operations on a study while its storage does not answer, so that a short outage does not end a sweep."""

import time
from collections.abc import Callable
from typing import TypeVar

from ratchet.errors import LockHeldError, StorageError
from ratchet.runs.log import print_message

Answer = TypeVar("Answer")

AGAIN_S = 1.0


def retry_storage(act: Callable[[], Answer], wait_s: float, look: Callable[[], None]) -> Answer:
    """Run an operation; repeat it while the storage does not answer.

    Args:
        act: the operation; it must be safe to repeat.
        wait_s: seconds without an answer after which the last failure is raised.
        look: called between two tries; may raise to end it.

    Raises:
        StorageError, LockHeldError: it did not answer for so long.
    """
    since_s: float | None = None
    while True:
        try:
            return act()
        except (StorageError, LockHeldError) as error:
            now_s = time.monotonic()
            if since_s is None:
                since_s = now_s
                print_message(f"{error} (tried again for {wait_s:g} s)")
            if now_s - since_s >= wait_s:
                raise
        look()
        time.sleep(AGAIN_S)
