"""Entry of the training process: `python -m ratchet.training.start RUN_DIRECTORY ATTEMPT SUPERVISOR_PID`.

Light on purpose: its first act is to tie its life to the supervisor's, seconds before torch is imported.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from ratchet.errors import EXIT_INTERRUPTED
from ratchet.run.directory import RunPaths
from ratchet.run.supervisor import die_with_parent


def main(arguments: list[str]) -> int:
    """Train; returns the exit code."""
    root, attempt, supervisor = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before we asked
        return EXIT_INTERRUPTED
    stop = threading.Event()

    def request(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, request)
    signal.signal(signal.SIGINT, request)
    from ratchet.training.worker import work

    return work(RunPaths(root), attempt, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
