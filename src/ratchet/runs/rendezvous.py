"""Ranks and rendezvous of a training on one or several machines: number of ranks, rendezvous server, comparison of
machines.

This module does not import torch. It counts GPUs by the files of their driver.
"""

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

from ratchet.config.machine import Machine
from ratchet.errors import SettingsError
from ratchet.runs.gpus import count_visible_gpus
from ratchet.storage.records.base import find_differing_keys, flatten

REQUIREMENT = "Every machine needs the same params.yaml, prepared data, base model and libraries"
DISPLAY_NAMES = {
    "run.data_digest": "prepared data (digest)", "run.base_digest": "base model (digest)",
    "run.recipe_version": "training recipe of this version of Ratchet", "environment.compute_dtype": "compute dtype",
}  # fmt: skip
DIGEST_LENGTH = 12

SERVER = (sys.executable, "-m", "ratchet.training.tcp_store")
CONNECT_TIMEOUT_S = 5.0
GREETING_TIMEOUT_S = 0.5
"""Time in which another service would greet or answer HTTP. A rendezvous server does neither."""


def describe_difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Describe the differences between two machines; empty if there is none.

    In the JSON object of a machine, `run` is the spec of the run, and `environment` has versions of libraries and
    machine settings by name.
    """
    texts = []
    for name in find_differing_keys(first, other):
        section, _, key = name.partition(".")
        label = f"machine.{key}" if key in Machine.model_fields else f"version of {key}"
        if section == "run":
            label = key
        values = [flatten(machine).get(name, "nothing") for machine in (first, other)]
        if name.endswith("_digest"):
            values = [str(value)[:DIGEST_LENGTH] for value in values]
        texts.append(f"{DISPLAY_NAMES.get(name, label)}: {values[0]} and {values[1]}")
    return "; ".join(texts)


def count_local_ranks(machine: Machine) -> int:
    """Return `machine.gpus`; for `auto`, the number of visible GPUs, or 1 without GPUs."""
    if machine.gpus != "auto":
        return machine.gpus
    return 1 if machine.device == "cpu" else max(1, count_visible_gpus())


def has_agent(machine: Machine) -> bool:
    """Return whether an elastic agent starts the ranks, because there are several, on this machine or on others."""
    return count_local_ranks(machine) > 1 or machine.node_range != (1, 1)


class RendezvousServer:
    """Rendezvous server at `machine.rendezvous`, if this machine has that address. The server outlives attempts."""

    def __init__(self, machine: Machine) -> None:
        self._address = machine.active_rendezvous
        self._server: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Start the server if this machine has the address and no process listens there."""
        if self._address and _can_listen(self._address):
            self.close()
            command = [*SERVER, self._address, str(os.getpid())]
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def _can_listen(address: str) -> bool:
    """Return whether this machine can listen at the address: this machine has it, and no process uses it."""
    host, port = address.rsplit(":", 1)
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def explain_unreachable(address: str) -> str:
    """Return why the address cannot be reached; empty if a process that may be a rendezvous server accepts connections.

    Raises SettingsError if another service uses the port.
    """
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            # Another service greets or answers HTTP. A rendezvous server does neither.
            connection.settimeout(GREETING_TIMEOUT_S)
            with contextlib.suppress(OSError):
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                if connection.recv(1):
                    raise SettingsError(f"machine.rendezvous: {address} is used by another service; set a free port")
    except socket.gaierror as error:
        return f"the host {host} cannot be resolved: {error.strerror}"
    except OSError as error:
        return f"no server answers: {error.strerror or error}"
    return ""
