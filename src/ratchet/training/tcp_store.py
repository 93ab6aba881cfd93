"""Serves the store of torch's rendezvous: `python -m ratchet.training.tcp_store HOST:PORT SUPERVISOR_PID`."""

import os
import signal
import sys

from ratchet.runs.signals import die_with_parent


def main(arguments: list[str]) -> int:
    """Serve the store until the supervisor ends."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(arguments[1]):
        return 0
    from torch.distributed import DistNetworkError, TCPStore

    host, port = arguments[0].rsplit(":", 1)
    try:
        store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    except DistNetworkError:  # another process already serves the store
        return 0
    while store.port:
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
