"""How many ranks a training has on this machine. Asks the driver's files, not torch: the supervisor does without it."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from ratchet.config.schema import Machine
from ratchet.errors import SettingsError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_local_ranks(machine: Machine) -> int:
    """`machine.gpus`; `auto`: one for each GPU that this process may see, one where there is none."""
    if machine.gpus != "auto":
        return machine.gpus
    return 1 if machine.device == "cpu" else max(1, count_visible_gpus())


def count_visible_gpus(devices: Path = Path("/dev")) -> int:
    """GPUs of NVIDIA that CUDA would show (CUDA C++ Programming Guide, CUDA_VISIBLE_DEVICES: those before the first
    that is none)."""
    there = sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in devices.glob("nvidia*"))
    chosen = os.environ.get(VISIBLE)
    if chosen is None or not there:
        return there
    names = [name.strip() for name in chosen.split(",")]
    shown = names[: names.index("-1")] if "-1" in names else names
    return len([name for name in shown if name])


def has_agent(machine: Machine) -> bool:
    """Whether ranks are started by an agent: there are several, here or elsewhere."""
    return count_local_ranks(machine) > 1 or machine.node_range != (1, 1)


# The place where machines meet: a small server on one of them, which outlives attempts. Imports no torch.

SERVER = (sys.executable, "-m", "ratchet.training.tcp_store")
ANSWER_S = 5.0
"""For a machine to take a connection."""
SPEAK_S = 0.5
"""For a service to say something. Where machines meet nobody speaks first, nor answers to what we ask."""


class RendezvousServer:
    """Serves `machine.rendezvous`, where that is an address of this machine, until it is closed."""

    def __init__(self, machine: Machine) -> None:
        self._address = machine.meeting_place
        self._server: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Somebody serves it: we do, if it is ours and nobody else does."""
        if self._address and is_local_address(self._address):
            self.close()
            line = [*SERVER, self._address, str(os.getpid())]
            self._server = subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Serve it no more."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def is_local_address(address: str) -> bool:
    """Whether this machine can listen there: it is none of another machine's, and no process has it."""
    host, port = address.rsplit(":", 1)
    with contextlib.closing(socket.socket()) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except OSError:
            return False
    return True


def explain_unreachable(address: str) -> str:
    """Why nothing can be reached there, in words; empty: somebody takes connections, and may be a meeting.

    Raises SettingsError when it is another service.
    """
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            if _sends_data(connection):
                raise SettingsError(
                    f"machine.rendezvous {address}: another service has this port; take one that is free"
                )
    except socket.gaierror as error:
        return f"the host {host} cannot be resolved: {error.strerror}"
    except OSError as error:
        return f"nobody answers there: {error.strerror or error}"
    return ""


def _sends_data(connection: socket.socket) -> bool:
    """Whether there is a service that greets, or answers to HTTP."""
    connection.settimeout(SPEAK_S)
    try:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return bool(connection.recv(1))
    except OSError:
        return False
