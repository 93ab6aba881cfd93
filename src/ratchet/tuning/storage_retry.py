"""A study that does not answer for a while ends no sweep: trials go on, and what is to be told is told later."""

import time
from collections.abc import Callable
from typing import TypeVar

from ratchet.errors import LockHeldError, StorageError
from ratchet.runs.log import print_message

Answer = TypeVar("Answer")

AGAIN_S = 1.0


def retry_storage(act: Callable[[], Answer], wait_s: float, look: Callable[[], None]) -> Answer:
    """Do something with the study, again and again while its storage does not answer.

    Args:
        act: may be repeated.
        wait_s: after so many seconds without an answer the last failure is raised.
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
