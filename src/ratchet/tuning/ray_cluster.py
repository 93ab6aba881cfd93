"""Starts sweep workers on a Ray cluster; the only module that imports Ray.

Ray adds and removes nodes, and chooses the node of each worker. On the node, an actor starts the same worker process as
without Ray, which may train several trials together, and waits until this process ends. The study and its leases decide
which worker has which trial, also after the loss of a node, so correctness does not depend on Ray. Each node needs
Ratchet, and the project under the same path (on a shared disk, or a copy with its prepared data). The study must be in
a database.
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

from ratchet.config.machine import Machine, RaySettings
from ratchet.errors import EXIT_BUG, EXIT_INPUT, SettingsError, first_line
from ratchet.storage.digests import code_version
from ratchet.tuning.worker_pool import WORKER_MODULE, SweepWorkerProcess

REPORT_WAIT_AFTER_S = 30.0
"""Seconds after which a message reports that a worker still waits for a node."""
CONNECT_TIMEOUT_S = 10.0
"""Seconds after which an attempt to connect to the head of a cluster fails."""
MAX_OUTPUT_BYTES = 65536
"""Maximum number of bytes of a worker's output, counted from its end, that are copied to the sweep command after the
worker has ended."""
INSTALL = "pip install -c constraints.txt -e '.[ray]'"
"""Command that installs Ray."""


def adapt_machine_to_nodes(machine: Machine) -> Machine:
    """Return the machine settings of each worker: as many threads as it has CPUs, unless `threads` is set."""
    return machine.model_copy(update={"threads": machine.threads or max(1, int(machine.ray.cpus))})


class RayWorkerActor:
    """Actor on a node that starts a worker and waits for it. Its methods run in separate threads."""

    def __init__(self, project: str, settings: str, code: str, number: int) -> None:
        self._project, self._settings, self._code, self._number = project, settings, code, number
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stop_requested = False

    def node_name(self) -> str:
        """Return the name of this node. The call has a result as soon as the actor has a node."""
        return socket.gethostname()

    def run_worker(self) -> tuple[int, str]:
        """Run the worker, and return its exit code and the end of its output."""
        if problem := self._find_problem():
            return EXIT_INPUT, f"node {socket.gethostname()}: {problem}\n"
        with tempfile.TemporaryDirectory(prefix="ratchet-worker-") as folder, tempfile.TemporaryFile() as output:
            settings = Path(folder) / "params.yaml"
            settings.write_text(self._settings, encoding="utf-8")
            # Ray limits the titles of processes to their first length, which would hide the run of a forked process.
            environment = {name: value for name, value in os.environ.items() if name != "SPT_NOENV"}
            # The worker stops when the thread that started it ends, so this thread must wait for it.
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", WORKER_MODULE, self._project, str(settings), str(os.getpid()),
                    str(self._number),
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment,
            )  # fmt: skip
            if self._is_stop_requested:
                self._process.terminate()
            code = self._process.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
            return code, output.read().decode(errors="replace")

    def _find_problem(self) -> str:
        """Return the reason why no worker can start on this node; empty if a worker can start."""
        if (version := code_version()) != self._code:
            return f"has Ratchet {version}, the command has {self._code}; install the same version on every node"
        if not (Path(self._project) / "params.yaml").is_file():
            return (
                f"no project in {self._project}; every node needs it under the same path: on a shared disk, or as "
                "a copy with its data (git clone, dvc pull)"
            )
        return ""

    def stop(self) -> None:
        """Ask the worker to seal its checkpoint and end."""
        self._is_stop_requested = True
        if self._process is not None:
            self._process.terminate()


class RayWorkerProcess:
    """A worker on a node of the cluster, with the interface of a process.

    Its output is appended to the log after it has ended. `on_wait` is called if it has no node after
    REPORT_WAIT_AFTER_S.
    """

    def __init__(self, ray: Any, actor: Any, log: Path, on_wait: Callable[[], None]) -> None:
        self.lost = ""
        self._ray, self._actor, self._log, self._on_wait = ray, actor, log, on_wait
        self._node_name, self._result = actor.node_name.remote(), actor.run_worker.remote()
        self._code: int | None = None
        self._is_killed = False
        self._report_at_s = time.monotonic() + REPORT_WAIT_AFTER_S

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self._code is None and self._is_ready(self._result):
            self._conclude()
        if self._code is None and time.monotonic() > self._report_at_s:
            self._report_at_s = float("inf")
            if not self._is_ready(self._node_name):
                self._on_wait()
        return self._code

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired if it still runs after `timeout` seconds."""
        if self._code is None:
            self._is_ready(self._result, timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(WORKER_MODULE, timeout)
        return code

    def terminate(self) -> None:
        """Ask the worker to end; kill it if it still waits for a node."""
        if self._is_ready(self._node_name):
            self._actor.stop.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the worker."""
        self._is_killed = True
        self._ray.kill(self._actor)

    def _is_ready(self, result: Any, timeout_s: float = 0) -> bool:
        return bool(self._ray.wait([result], timeout=timeout_s)[0])

    def _conclude(self) -> None:
        output = ""
        try:
            self._code, output = self._ray.get(self._result)
        except self._ray.exceptions.RayError as error:
            self._code, output = EXIT_BUG, f"{error}\n"
            if self._is_killed:
                self._code = -signal.SIGKILL
            elif isinstance(error, self._ray.exceptions.RayActorError) and not error.actor_init_failed:
                try:
                    name = self._ray.get(self._node_name, timeout=0)
                except self._ray.exceptions.RayError:  # the actor has no node yet
                    name = "without a name yet"
                self.lost = f"node {name} was lost"
        self._ray.kill(self._actor)  # otherwise the actor keeps its resources on the node
        with self._log.open("a", encoding="utf-8") as log:
            log.write(output)


class RayWorkerLauncher:
    """WorkerLauncher on the cluster of `machine.ray`. The project has the same path here and on each node.

    Raises:
        SettingsError: see `connect`.
    """

    def __init__(
        self, ray_settings: RaySettings, project: Path, settings: str, on_progress: Callable[[str], None]
    ) -> None:
        self._ray = connect(ray_settings.address)
        self.max_losses = ray_settings.max_restarts
        self._project, self._settings, self._on_progress = str(project), settings, on_progress
        cluster: Mapping[str, float] = self._ray.cluster_resources()
        gpus = float("GPU" in cluster) if ray_settings.gpus == "auto" else ray_settings.gpus
        self._resources = {"CPU": ray_settings.cpus, "GPU": gpus} | ray_settings.resources
        actor_class: Any = self._ray.remote(RayWorkerActor)
        # The pool alone restarts workers, because it counts restarts. The actor needs two threads, because `stop` runs
        # while `run_worker` waits.
        self._actor_class = actor_class.options(
            num_cpus=ray_settings.cpus,
            num_gpus=gpus,
            resources=ray_settings.resources,
            max_restarts=0,
            max_concurrency=2,
        )
        if not any(self._fits(node) for node in self._ray.nodes()):
            on_progress(
                f"no node of the cluster has {self._describe_resources()} now; workers wait for one "
                "(an autoscaler may add it)"
            )

    def start(self, number: int, log: Path) -> SweepWorkerProcess:
        """Ask the cluster for a node, and start the worker on it."""
        log.touch()
        actor = self._actor_class.remote(self._project, self._settings, code_version(), number)
        return RayWorkerProcess(
            self._ray,
            actor,
            log,
            lambda: self._on_progress(f"worker {number} waits for a node with {self._describe_resources()}"),
        )

    def close(self) -> None:
        """Disconnect from the cluster."""
        self._ray.shutdown()

    def _fits(self, node: Mapping[str, Any]) -> bool:
        resources = node["Resources"]
        return bool(node["Alive"]) and all(resources.get(name, 0) >= count for name, count in self._resources.items())

    def _describe_resources(self) -> str:
        return ", ".join(f"{count:g} {name}" for name, count in self._resources.items() if count)


def connect(address: str) -> Any:
    """Connect to the cluster if Ray is not connected yet, and return the library.

    Raises:
        SettingsError: Ray is not installed, no cluster answers, or the cluster has other versions of Python or Ray.
    """
    try:
        import ray
    except ImportError as error:
        raise SettingsError(f"--engine ray: Ray is not installed; run {INSTALL}") from error
    if ray.is_initialized():
        return ray
    try:
        # If no process listens at the address, Ray would try for many minutes.
        head = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        host, _, port = head.rpartition("/")[2].rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise SettingsError(
            f"machine.ray.address: {address}: {first_line(error)}; start a cluster (`ray start --head`, and on each "
            "node `ray start --address=HOST:PORT`), all with the same versions of Python and Ray"
        ) from error
    return ray
