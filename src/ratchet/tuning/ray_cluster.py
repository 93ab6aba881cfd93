"""Workers of a sweep on a Ray cluster: the only module that imports Ray.

Ray chooses the node, brings nodes and takes them away; on the node an actor starts the same worker process as ever and
waits for it. Everything else (who has which trial, what happens to the trials of a node that vanishes) is the study's
and its leases', so nothing of ours needs Ray to be right. On each node: Ratchet, and the project under the same path (a
common disk, or a copy of it with its prepared data); the study is in a database.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ratchet.config.schema import Machine, RaySettings
from ratchet.errors import EXIT_BUG, EXIT_INPUT, SettingsError, first_line
from ratchet.storage.code_version import code_version
from ratchet.tuning.worker_pool import WORKER, SweepWorkerProcess

PATIENCE_S = 30.0
"""Until somebody is told that a worker waits for a node."""
ANSWER_S = 10.0
"""For the head of a cluster to answer."""
TOLD_BYTES = 65536
"""Of what a worker said, at most; its end comes over to the command when the worker has ended."""
INSTALL = "pip install -c constraints.txt -e '.[ray]'"


def adapt_machine_to_nodes(machine: Machine) -> Machine:
    """The machine as each worker may use it: as many threads as it has CPUs there, unless a number is set."""
    return machine.model_copy(update={"threads": machine.threads or max(1, int(machine.ray.cpus))})


class RayWorkerActor:
    """On the node: starts a worker and waits for it. An actor whose two methods run in threads of their own."""

    def __init__(self, project: str, settings: str, code: str) -> None:
        self._project, self._settings, self._code = project, settings, code
        self._process: subprocess.Popen[bytes] | None = None
        self._is_asked = False

    def where(self) -> str:
        """Name of this node; who has the answer knows that the actor has been placed."""
        return socket.gethostname()

    def work(self) -> tuple[int, str]:
        """The worker's exit code, and the end of what it said."""
        if unfit := self._unfit():
            return EXIT_INPUT, f"node {socket.gethostname()}: {unfit}\n"
        with tempfile.TemporaryDirectory(prefix="ratchet-worker-") as folder, tempfile.TemporaryFile() as said:
            written = Path(folder) / "params.yaml"
            written.write_text(self._settings, encoding="utf-8")
            # The worker is asked to end when the thread that started it does: this one stays until it has ended.
            self._process = subprocess.Popen(
                [sys.executable, *WORKER[1:], self._project, str(written), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
            if self._is_asked:
                self._process.terminate()
            code = self._process.wait()
            said.seek(max(0, said.seek(0, os.SEEK_END) - TOLD_BYTES))
            return code, said.read().decode(errors="replace")

    def _unfit(self) -> str:
        """Why no worker can be started here; "" if one can."""
        if (here := code_version()) != self._code:
            return f"has Ratchet {here}, the command {self._code}; install the same on every node"
        if not (Path(self._project) / "params.yaml").is_file():
            return (
                f"no project in {self._project}; every node needs it under the same path: a common disk, or a copy "
                "with its data (git clone, dvc pull)"
            )
        return ""

    def stop(self) -> None:
        """Ask the worker to seal what it has, and to end."""
        self._is_asked = True
        if self._process is not None:
            self._process.terminate()


class RayWorkerProcess:
    """A worker on some node, as its crew sees it.

    Args:
        ray: the library.
        seat: the actor.
        log: gets what the worker said, once it has ended.
        waiting: told when no node has been found for it after a while.
    """

    def __init__(self, ray: Any, seat: Any, log: Path, waiting: Callable[[], None]) -> None:
        self.lost = ""
        self._ray, self._seat, self._log, self._waiting = ray, seat, log, waiting
        self._where, self._work = seat.where.remote(), seat.work.remote()
        self._code: int | None = None
        self._is_killed = False
        self._patient_until_s = time.monotonic() + PATIENCE_S

    def poll(self) -> int | None:
        """Its exit code, once it has one."""
        if self._code is None and self._has(self._work):
            self._conclude()
        if self._code is None and time.monotonic() > self._patient_until_s:
            self._patient_until_s = float("inf")
            if not self._has(self._where):
                self._waiting()
        return self._code

    def wait(self, timeout: float) -> int:
        """The exit code; raises subprocess.TimeoutExpired when it has none after so many seconds."""
        if self._code is None and not self._has(self._work, timeout):
            raise subprocess.TimeoutExpired(WORKER[-1], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(WORKER[-1], timeout)
        return code

    def terminate(self) -> None:
        """Ask it to end; one that still waits for a node is taken back."""
        if self._has(self._where):
            self._seat.stop.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """End it now."""
        self._is_killed = True
        self._ray.kill(self._seat)

    def _has(self, answer: Any, timeout_s: float = 0) -> bool:
        return bool(self._ray.wait([answer], timeout=timeout_s)[0])

    def _conclude(self) -> None:
        said = ""
        try:
            self._code, said = self._ray.get(self._work)
        except self._ray.exceptions.RayError as error:
            self._code, said = EXIT_BUG, f"{error}\n"
            if self._is_killed:
                self._code = -signal.SIGKILL
            elif isinstance(error, self._ray.exceptions.RayActorError) and not error.actor_init_failed:
                self.lost = f"node {self._node()} was lost"
        self._ray.kill(self._seat)  # or it kept its share of the node
        with self._log.open("a", encoding="utf-8") as log:
            log.write(said)

    def _node(self) -> str:
        try:
            return str(self._ray.get(self._where, timeout=0))
        except self._ray.exceptions.RayError:  # it was on its way there
            return "with no name yet"


class RayWorkerLauncher:
    """An engine (crew.Engine) on the cluster that `machine.ray` names.

    Args:
        chosen: what each worker gets, and where.
        project: root of the project, here and on each node.
        settings: params.yaml of the sweep, for the workers.
        say: told what happens.

    Raises SettingsError as `connect`.
    """

    def __init__(self, chosen: RaySettings, project: Path, settings: str, say: Callable[[str], None]) -> None:
        self._ray = connect(chosen.address)
        self.losses = chosen.restarts
        self._project, self._settings, self._say = str(project), settings, say
        there: Mapping[str, float] = self._ray.cluster_resources()
        gpus = float("GPU" in there) if chosen.gpus == "auto" else chosen.gpus
        self._asked = {"CPU": chosen.cpus, "GPU": gpus} | chosen.resources
        seat: Any = self._ray.remote(RayWorkerActor)
        # Started again by the crew alone, which counts; two threads, so that `stop` is heard while `work` waits.
        self._seat = seat.options(
            num_cpus=chosen.cpus, num_gpus=gpus, resources=chosen.resources, max_restarts=0, max_concurrency=2
        )
        if not any(self._fits(node) for node in self._ray.nodes()):
            say(f"no node of the cluster has {self._words()} now; workers wait for one (an autoscaler may bring it)")

    def start(self, number: int, log: Path) -> SweepWorkerProcess:
        """Ask the cluster for a node, and start the worker there."""
        log.touch()
        seat = self._seat.remote(self._project, self._settings, code_version())
        return RayWorkerProcess(
            self._ray, seat, log, lambda: self._say(f"worker {number} waits for a node with {self._words()}")
        )

    def close(self) -> None:
        """Leave the cluster, which stays."""
        self._ray.shutdown()

    def _fits(self, node: Mapping[str, Any]) -> bool:
        has = node["Resources"]
        return bool(node["Alive"]) and all(has.get(name, 0) >= count for name, count in self._asked.items())

    def _words(self) -> str:
        return ", ".join(f"{count:g} {name}" for name, count in self._asked.items() if count)


def _require_listener(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would try for many minutes. `auto` it looks for by itself."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()


def connect(address: str) -> Any:
    """Ray, connected to this cluster, if it is not yet.

    Raises:
        SettingsError: Ray is not installed, no cluster answers, or it has other versions.
    """
    try:
        import ray
    except ImportError as error:
        raise SettingsError(f"--engine ray: Ray is not installed ({INSTALL})") from error
    if ray.is_initialized():
        return ray
    try:
        _require_listener(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise SettingsError(
            f"machine.ray.address: {address}: {first_line(error)}; start a cluster (`ray start --head`, and on each "
            "node `ray start --address=HOST:PORT`), all with the same versions of Python and Ray"
        ) from error
    return ray
