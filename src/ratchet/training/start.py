"""Entry of the training process: `python -m ratchet.training.start RUN_DIRECTORY ATTEMPT SUPERVISOR_PID`.

Light on purpose: its first act is to tie its life to the supervisor's, seconds before torch is imported.
"""

import os
import signal
import sys
from pathlib import Path

from ratchet.errors import EXIT_INTERRUPTED
from ratchet.run.directory import RunPaths
from ratchet.run.supervisor import StopRequest, die_with_parent


def main(arguments: list[str]) -> int:
    """Train; returns the exit code."""
    root, attempt, supervisor = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before we asked
        return EXIT_INTERRUPTED
    stop = StopRequest()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    from ratchet.training.worker import work

    return work(RunPaths(root), attempt, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
