"""Starts the ranks of this machine, as torchrun does: `python -m ratchet.training.elastic_agent RUN_DIRECTORY ATTEMPT
SUPERVISOR_PID HEARTBEATS RANKS`.

torch's elastic agent joins the agents of other machines at `machine.rendezvous`, numbers the ranks, restarts them when
a machine joins, and ends all ranks when one ends. The supervisor of each machine decides whether to start another
attempt, whose agent then joins the next rendezvous.
"""

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config.machine import Machine
from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, EXIT_PEERS, SettingsError
from ratchet.runs import log
from ratchet.runs.directory import RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal
from ratchet.runs.rendezvous import REQUIREMENT, describe_difference, explain_unreachable
from ratchet.runs.restart_policy import FailureClass
from ratchet.runs.signals import die_with_parent

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousHandler

LAST_CALL_S = 3
"""Seconds in which further machines may join after the minimum number of machines has joined."""
KEEP_ALIVE_S, KEEP_ALIVE_ATTEMPTS = 1, 5
"""Seconds between keep-alive messages of an agent, and the number of missed messages after which it counts as lost."""
CONNECT_TIMEOUT_S = 60
RETRY_S = 1.0
REPORT_AFTER_S = 10.0
"""Seconds of waiting for the rendezvous or for other machines after which the journal gets a notice."""
RUN_KEY = "ratchet/run"
"""Key under which the first machine stores the spec of the run, so that other machines notice a different run."""
HEARTBEAT_S = 0.5
WORKER_MODULE = "ratchet.training.worker_main"


def main(arguments: list[str]) -> int:
    """Run the ranks; return the exit code of the first rank that failed by itself."""
    paths, attempt, supervisor = RunPaths(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        return EXIT_INTERRUPTED
    machine = TrainingLaunchSpec.load(paths.launch).machine
    log.capture_output(paths.logs, machine, attempt, None, "agent")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Without this variable, the agent of rank 0 publishes its address only in the first rendezvous (torch 2.13), and
    # machines that join later wait for that address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    worker_arguments = [str(paths.root), str(attempt), str(os.getpid()), arguments[3]]
    count = int(arguments[4])
    heartbeat = _AgentHeartbeat(arguments[3], count, machine)
    failure: FailureClass = "rendezvous"
    with contextlib.closing(Journal(paths.journal, attempt)) as journal:
        try:
            rendezvous = _connect_rendezvous(paths, machine, journal)
            heartbeat.journal = journal
            failure = "peers"
            return _combine_exit_codes(_run_ranks(rendezvous, machine, worker_arguments, count, heartbeat))
        except SignalException:
            return EXIT_INTERRUPTED  # the ranks were asked to stop and have ended
        except SettingsError as error:
            journal.append("worker_error", failure_class="data", text=str(error))
            return EXIT_INPUT
        except (RendezvousError, DistError) as error:
            if isinstance(error, RendezvousTimeoutError):
                failure = "rendezvous"
            text = (str(error).splitlines() or [type(error).__name__])[0]
            where = machine.rendezvous or "this machine"
            if failure == "peers":
                text = f"the connection to the rendezvous at {where} was lost: {text}"
            else:
                limit_s = machine.rendezvous_timeout_s
                text = f"{machine.nodes} machines did not meet at {where} within {limit_s:g} s ({text})"
            journal.append("worker_error", failure_class=failure, text=text)
            return EXIT_PEERS


def _connect_rendezvous(paths: RunPaths, machine: Machine, journal: Journal) -> "RendezvousHandler":
    """Connect to the rendezvous. If no process serves its store yet, try again until one does.

    Raises:
        RendezvousConnectionError: the rendezvous is not reachable within `machine.rendezvous_timeout_s`.
        SettingsError: another service uses the address, or the machines at the rendezvous train another run.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    address = machine.active_rendezvous
    if address is None:
        return _create_rendezvous(paths, machine)
    started_s, is_reported = time.monotonic(), False
    registration: _RendezvousRegistration | None = None
    while True:
        if registration is None and not (reason := explain_unreachable(address)):
            registration = _RendezvousRegistration(paths, address)
        if registration is None:
            time.sleep(RETRY_S)
        elif registration.is_answered(RETRY_S):
            try:
                return _create_rendezvous(paths, machine)
            except RendezvousConnectionError:
                registration, reason = None, "the connection was lost again"
        else:
            reason = "the address accepts connections but does not answer: does another service use this port?"
            registration = registration if registration.is_alive() else None
        waited_s = time.monotonic() - started_s
        if waited_s > machine.rendezvous_timeout_s:
            raise RendezvousConnectionError(reason)
        if waited_s > REPORT_AFTER_S and not is_reported:
            is_reported = True
            limit = f"trying for {machine.rendezvous_timeout_s:g} s (machine.rendezvous_timeout_s)"
            journal.append("notice", text=f"no rendezvous at {address} yet: {reason}; {limit}")


class _RendezvousRegistration(threading.Thread):
    """Stores the spec of the run at the rendezvous, or reads the spec that another machine stored.

    A thread does this, because torch (2.13) waits without a timeout for an answer after a connection is accepted.
    """

    def __init__(self, paths: RunPaths, address: str) -> None:
        super().__init__(name="rendezvous registration", daemon=True)
        self._address = address
        self._properties = {"run": RunSpec.load(paths.spec).model_dump(mode="json")}
        self._first: dict[str, Any] | None = None
        self.start()

    def is_answered(self, wait_s: float) -> bool:
        """Return whether the rendezvous has answered. Raises SettingsError if other machines train another run."""
        self.join(wait_s)
        if self._first is None:
            return False
        if difference := describe_difference(self._first["properties"], self._properties):
            raise SettingsError(
                f"machine.rendezvous: {self._address}: {self._first['host']} and this machine, {socket.gethostname()}, "
                f"would train different things: {difference}. {REQUIREMENT}"
            )
        return True

    def run(self) -> None:
        from torch.distributed import TCPStore

        host, port = self._address.rsplit(":", 1)
        own = json.dumps({"host": socket.gethostname(), "properties": self._properties})
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):  # torch raises it when the connection is lost
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
            self._first = json.loads(store.compare_set(RUN_KEY, "", own))


def _create_rendezvous(paths: RunPaths, machine: Machine) -> "RendezvousHandler":
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    min_nodes, max_nodes = machine.node_range
    address = machine.active_rendezvous
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint=address or "localhost:0", run_id=paths.root.name, min_nodes=min_nodes,
            max_nodes=max_nodes, is_host=address is None,
            read_timeout=math.ceil(min(CONNECT_TIMEOUT_S, machine.rendezvous_timeout_s)),
            join_timeout=math.ceil(machine.rendezvous_timeout_s), last_call_timeout=LAST_CALL_S,
            keep_alive_interval=KEEP_ALIVE_S, keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
        )
    )  # fmt: skip


def _run_ranks(
    rendezvous: "RendezvousHandler", machine: Machine, arguments: list[str], count: int, heartbeat: "_AgentHeartbeat"
) -> list[int]:  # fmt: skip
    """Run all ranks of this machine until they end.

    Return the exit codes of failed ranks in the order of their failures; an empty list if all ranks completed.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    spec = WorkerSpec(
        role="ranks", local_world_size=count, entrypoint=sys.executable, args=("-m", WORKER_MODULE, *arguments),
        rdzv_handler=rendezvous, max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    # With os.devnull, ranks write to this process's output, and torch creates no directory of logs under /tmp.
    agent = LocalElasticAgent(
        spec,
        DefaultLogsSpecs(log_dir=os.devnull),
        start_method="spawn",
        shutdown_timeout=int(machine.grace_period_s) + 15,
    )
    heartbeat.agent = agent
    result = agent.run()
    failures = sorted(result.failures.values(), key=lambda failure: (failure.timestamp, failure.local_rank))
    return [failure.exitcode for failure in failures]


class _AgentHeartbeat(threading.Thread):
    """Sends heartbeats in place of the ranks while no rank runs, which is while this machine waits for other
    machines."""

    def __init__(self, address: str, count: int, machine: Machine) -> None:
        super().__init__(name="agent heartbeat", daemon=True)
        limits = machine.stall_timeout_s, machine.first_stall_timeout_s
        self._heartbeats = [Heartbeat.attach_at(address, rank, *limits) for rank in range(count)]
        self._machine = machine
        self.agent: LocalElasticAgent | None = None
        self.journal: Journal | None = None
        """Gets a notice if this machine waits long at the rendezvous; None before this machine has connected."""
        self.start()

    def run(self) -> None:
        from torch.distributed.elastic.agent.server.api import WorkerState

        machine, idle_since_s, is_reported = self._machine, time.monotonic(), False
        while True:
            if self.agent is not None and self.agent.get_worker_group().state == WorkerState.HEALTHY:
                idle_since_s, is_reported = time.monotonic(), False
            else:
                for heartbeat in self._heartbeats:
                    heartbeat.beat("load")
                if not is_reported and self.journal and time.monotonic() - idle_since_s > REPORT_AFTER_S:
                    is_reported = True
                    if machine.active_rendezvous:
                        text = (
                            f"this machine waits at {machine.active_rendezvous}: {machine.nodes} machines train the "
                            "run together, and either too few have joined, or enough have and this one is a spare"
                        )
                        self.journal.append("notice", text=text)
            time.sleep(HEARTBEAT_S)


def _combine_exit_codes(codes: list[int]) -> int:
    """Return the exit code of the first rank that failed by itself, not because another rank was lost.

    If a signal ended that rank, end this process by the same signal.
    """
    if not codes:
        return EXIT_OK
    code = next((code for code in codes if code != EXIT_PEERS), EXIT_PEERS)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        os._exit(EXIT_BUG)
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # a thread of torch's rendezvous can abort the process while the interpreter shuts down
