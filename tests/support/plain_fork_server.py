"""A fork server without libraries, and a worker whose work is the code in an environment variable.

`python PATH/plain_fork_server.py SOCKET PARENT_PID` takes the place of `fork_server.SERVER` in tests.
"""

import os
import socket
import sys

from ratchet.runs import fork_server

CODE = "PLAIN_WORKER_CODE"
COMMAND = (sys.executable, __file__)


def main(arguments: list[str]) -> int:
    """Be a worker."""
    exec(os.environ[CODE], {"arguments": arguments})  # noqa: S102 (the code of a test)
    return 0


if __name__ == "__main__":
    if __spec__ is not None:  # started as `python -m plain_fork_server`
        sys.exit(main(sys.argv[1:]))
    fork_server.serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), lambda: None)
