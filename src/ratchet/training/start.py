"""Entry of a training process: `python -m ratchet.training.start RUN_DIRECTORY ATTEMPT PARENT_PID HEARTBEAT`.

HEARTBEAT is a descriptor, or where those of several ranks are found (heartbeat.py: address_of). The parent is the
supervisor, or the agent that starts the ranks of a machine.

Light on purpose: its first act is to tie its life to the supervisor's, seconds before torch is imported.
"""

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

from ratchet.errors import EXIT_INTERRUPTED
from ratchet.run.directory import Launch, RunPaths
from ratchet.run.heartbeat import Heartbeat
from ratchet.run.signals import die_with_parent
from ratchet.training.stopping import Stopping


def main(arguments: list[str]) -> int:
    """Train, and end the process. Returns an exit code only when there is nothing to train for."""
    paths, attempt, parent = RunPaths(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        return EXIT_INTERRUPTED
    stop = Stopping().install()
    machine = Launch.load(paths.launch).machine
    limits = machine.stall_s, machine.stall_first_s
    if ":" in arguments[3]:
        heartbeat = Heartbeat.attach_at(arguments[3], int(os.environ["LOCAL_RANK"]), *limits)
    else:
        heartbeat = Heartbeat.attach(int(arguments[3]), *limits)
    heartbeat.beat("load")
    # Who finds us without a sign of life asks where every thread is before killing us. C code: works without the GIL.
    stacks = paths.stacks.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    from ratchet.model import libraries

    libraries.load()
    with libraries.uncollected():
        from ratchet.training.worker import work

    exit_code = work(paths, attempt, stop, heartbeat)
    with contextlib.suppress(OSError):  # worker.log may lie on a disk that is full
        sys.stdout.flush()
    os._exit(exit_code)  # all is on disk: taking torch apart takes seconds, and shows no sign of life


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
