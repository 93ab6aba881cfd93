"""Ranks and rendezvous of a training. Reads files of the driver instead of asking torch, which it never imports."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from ratchet.config.machine import Machine
from ratchet.errors import SettingsError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_local_ranks(machine: Machine) -> int:
    """`machine.gpus`; for `auto`, one rank per visible GPU, and one without GPUs."""
    if machine.gpus != "auto":
        return machine.gpus
    return 1 if machine.device == "cpu" else max(1, count_visible_gpus())


def count_visible_gpus(devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs that CUDA would show (CUDA C++ Programming Guide, CUDA_VISIBLE_DEVICES: those before the
    first invalid one)."""
    present = sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in devices.glob("nvidia*"))
    chosen = os.environ.get(VISIBLE)
    if chosen is None or not present:
        return present
    names = [name.strip() for name in chosen.split(",")]
    shown = names[: names.index("-1")] if "-1" in names else names
    return len([name for name in shown if name])


def has_agent(machine: Machine) -> bool:
    """Whether an elastic agent starts the ranks: there are several, on this machine or on others."""
    return count_local_ranks(machine) > 1 or machine.node_range != (1, 1)


SERVER = (sys.executable, "-m", "ratchet.training.tcp_store")
CONNECT_TIMEOUT_S = 5.0
GREETING_TIMEOUT_S = 0.5
"""A rendezvous server neither greets a client nor answers HTTP; another service does one of them within this time."""


class RendezvousServer:
    """A small server at `machine.rendezvous`, if that is an address of this machine. It outlives attempts."""

    def __init__(self, machine: Machine) -> None:
        self._address = machine.active_rendezvous
        self._server: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Start the server if the address is ours and no process serves it."""
        if self._address and is_local_address(self._address):
            self.close()
            command = [*SERVER, self._address, str(os.getpid())]
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def is_local_address(address: str) -> bool:
    """Whether this machine can listen at the address: it is not another machine's, and no process uses it."""
    host, port = address.rsplit(":", 1)
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def explain_unreachable(address: str) -> str:
    """Why the address cannot be reached; empty if a process accepts connections and may be a rendezvous server.

    Raises SettingsError if another service uses the port.
    """
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            if _sends_data(connection):
                raise SettingsError(f"machine.rendezvous: {address} is used by another service; set a free port")
    except socket.gaierror as error:
        return f"the host {host} cannot be resolved: {error.strerror}"
    except OSError as error:
        return f"no server answers: {error.strerror or error}"
    return ""


def _sends_data(connection: socket.socket) -> bool:
    """Whether the service greets, or answers HTTP."""
    connection.settimeout(GREETING_TIMEOUT_S)
    try:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return bool(connection.recv(1))
    except OSError:
        return False
