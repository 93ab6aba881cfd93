"""Ports for the servers that tests start."""

import socket


def free_port() -> int:
    """Return a port of loopback that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
