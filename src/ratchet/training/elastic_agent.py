"""Starts the ranks of this machine, as torchrun does: `python -m ratchet.training.elastic_agent RUN_DIRECTORY ATTEMPT
SUPERVISOR_PID HEARTBEATS RANKS`.

torch's elastic agent meets those of other machines at `machine.rendezvous`, gives ranks their numbers, starts them anew
when a machine joins, and ends all when one ends. Whether there is to be another attempt is not for it to say: the
supervisor of each machine decides, and its agent comes to the next meeting.
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
from typing import TYPE_CHECKING, Any, NoReturn

from ratchet.config.schema import Machine
from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, EXIT_PEERS, SettingsError
from ratchet.runs import log
from ratchet.runs.directory import RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal
from ratchet.runs.rendezvous import explain_unreachable
from ratchet.runs.restart_policy import FailureClass
from ratchet.runs.signals import die_with_parent
from ratchet.training.consistency_check import NEEDED, describe_difference

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousHandler as Meetings

LAST_CALL_S = 3
"""How long further machines may still join when there are enough."""
ALIVE_S, ALIVE_TIMES = 1, 5
"""An agent that is not heard of so often, so many seconds apart, is gone."""
CONNECT_S = 60
RETRY_S = 1.0
TOLD_S = 10.0
"""What keeps us from the meeting is told when it has lasted so long."""
RUN_KEY = "ratchet/run"
"""Where the first who comes to the meeting says which run is trained: others meet under its RunId, and would not."""
BEAT_S = 0.5
ENTRY = "ratchet.training.worker_main"


def main(arguments: list[str]) -> int:
    """Returns what the supervisor is to know of the ranks' end: the exit code of the first that failed by itself."""
    paths, attempt, supervisor = RunPaths(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        return EXIT_INTERRUPTED
    machine = TrainingLaunchSpec.load(paths.launch).machine
    log.capture_output(paths.logs, machine, attempt, None, "agent")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Else the agent of rank 0 tells its address once, in the first meeting (torch 2.13): who joins later waits for it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    ranks = [str(paths.root), str(attempt), str(os.getpid()), arguments[3]]
    count, standing = int(arguments[4]), _AgentHeartbeat(arguments[3], int(arguments[4]), machine)
    failure: FailureClass = "rendezvous"
    with contextlib.closing(Journal(paths.journal, attempt)) as journal:
        try:
            meetings = _connect_rendezvous(paths, machine, journal)
            standing.tells = journal
            failure = "peers"
            return _combine_exit_codes(_run_ranks(meetings, machine, ranks, count, standing))
        except SignalException:
            return EXIT_INTERRUPTED  # the ranks were asked to stop, and have ended
        except SettingsError as error:
            journal.append("failure", **{"class": "data"}, text=str(error))
            return EXIT_INPUT
        except (RendezvousError, DistError) as error:
            if isinstance(error, RendezvousTimeoutError):
                failure = "rendezvous"
            journal.append("failure", **{"class": failure}, text=_describe_failure(machine, failure, error))
            return EXIT_PEERS


def _describe_failure(machine: Machine, failure: FailureClass, error: Exception) -> str:
    said = (str(error).splitlines() or [type(error).__name__])[0]
    where = machine.rendezvous or "this machine"
    if failure == "peers":
        return f"the place where machines meet, {where}, is lost: {said}"
    return f"{machine.nodes} machines did not meet at {where} within {machine.rendezvous_wait_s:g} s ({said})"


def _connect_rendezvous(paths: RunPaths, machine: Machine, journal: Journal) -> "Meetings":
    """Connects to the place where machines meet, as soon as it is served.

    Raises:
        RendezvousConnectionError: nobody serves it within `machine.rendezvous_wait_s`; the message says what is there.
        SettingsError: another service has it, or machines meet there that train another run.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    place = machine.meeting_place
    if place is None:
        return _create_rendezvous(paths, machine)
    began_s, told = time.monotonic(), False
    entrance: _RendezvousRegistration | None = None
    while True:
        if entrance is None and not (why := explain_unreachable(place)):
            entrance = _RendezvousRegistration(paths, place)
        if entrance is None:
            time.sleep(RETRY_S)
        elif entrance.is_open(RETRY_S):
            try:
                return _create_rendezvous(paths, machine)
            except RendezvousConnectionError:
                entrance, why = None, "it was lost again"
        else:
            why = "somebody takes connections there, and does not answer: does another service have this port?"
            entrance = entrance if entrance.is_alive() else None
        waited_s = time.monotonic() - began_s
        if waited_s > machine.rendezvous_wait_s:
            raise RendezvousConnectionError(why)
        if waited_s > TOLD_S and not told:
            told = True
            wait = f"tried for {machine.rendezvous_wait_s:g} s (machine.rendezvous_wait_s)"
            journal.append("notice", text=f"no meeting at {place} yet: {why}; {wait}")


class _RendezvousRegistration(threading.Thread):
    """Says at the meeting which run this is, if nobody has.

    A thread of its own: torch (2.13) waits without end for the answer of whoever takes the connection.
    """

    def __init__(self, paths: RunPaths, place: str) -> None:
        super().__init__(name="entrance", daemon=True)
        self._place = place
        self._told = {"run": RunSpec.load(paths.spec).model_dump(mode="json")}
        self._first: dict[str, Any] | None = None
        self.start()

    def is_open(self, wait_s: float) -> bool:
        """Whether the meeting has answered. Raises SettingsError when another run is trained there."""
        self.join(wait_s)
        if self._first is None:
            return False
        if found := describe_difference(self._first["told"], self._told):
            raise SettingsError(
                f"machine.rendezvous {self._place}: {self._first['host']} and this machine, {socket.gethostname()}, "
                f"would train different things: {found}. {NEEDED}"
            )
        return True

    def run(self) -> None:
        from torch.distributed import TCPStore

        host, port = self._place.rsplit(":", 1)
        own = json.dumps({"host": socket.gethostname(), "told": self._told})
        wait = timedelta(seconds=CONNECT_S)
        with contextlib.suppress(RuntimeError):  # torch's, of a connection that is lost
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait)
            self._first = json.loads(store.compare_set(RUN_KEY, "", own))


def _create_rendezvous(paths: RunPaths, machine: Machine) -> "Meetings":
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    least, most = machine.node_range
    place = machine.meeting_place
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint=place or "localhost:0", run_id=paths.root.name, min_nodes=least,
            max_nodes=most, is_host=place is None,
            read_timeout=math.ceil(min(CONNECT_S, machine.rendezvous_wait_s)),
            join_timeout=math.ceil(machine.rendezvous_wait_s), last_call_timeout=LAST_CALL_S,
            keep_alive_interval=ALIVE_S, keep_alive_max_attempt=ALIVE_TIMES,
        )
    )  # fmt: skip


def _run_ranks(
    meetings: "Meetings", machine: Machine, arguments: list[str], count: int, standing: "_AgentHeartbeat"
) -> list[int]:  # fmt: skip
    """Exit codes of ranks that failed, in the order in which they were found; none when all have done their work."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    spec = WorkerSpec(
        role="ranks", local_world_size=count, entrypoint=sys.executable, args=("-m", ENTRY, *arguments),
        rdzv_handler=meetings, max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    # Ranks write to our own output; a directory of logs would be made under /tmp otherwise.
    agent = LocalElasticAgent(
        spec, DefaultLogsSpecs(log_dir=os.devnull), start_method="spawn", shutdown_timeout=int(machine.grace_s) + 15
    )
    standing.agent = agent
    result = agent.run()
    failures = sorted(result.failures.values(), key=lambda one: (one.timestamp, one.local_rank))
    return [failure.exitcode for failure in failures]


class _AgentHeartbeat(threading.Thread):
    """Gives signs of life while there are no ranks to do it: machines wait for each other."""

    def __init__(self, address: str, count: int, machine: Machine) -> None:
        super().__init__(name="standing in", daemon=True)
        limits = machine.stall_s, machine.stall_first_s
        self._pages = [Heartbeat.attach_at(address, place, *limits) for place in range(count)]
        self._machine = machine
        self.agent: LocalElasticAgent | None = None
        """Whoever starts the ranks, as soon as there is one."""
        self.tells: Journal | None = None
        """Of a machine that has found the meeting: is told when it waits there for long."""
        self.start()

    def run(self) -> None:
        from torch.distributed.elastic.agent.server.api import WorkerState

        idle_since_s, told = time.monotonic(), False
        while True:
            if self.agent is not None and self.agent.get_worker_group().state == WorkerState.HEALTHY:
                idle_since_s, told = time.monotonic(), False
            else:
                for page in self._pages:
                    page.beat("load")
                if not told and self.tells and time.monotonic() - idle_since_s > TOLD_S:
                    told = True
                    self._tell(self.tells)
            time.sleep(BEAT_S)

    def _tell(self, journal: Journal) -> None:
        machine = self._machine
        if machine.meeting_place:
            journal.append(
                "notice",
                text=f"this machine waits at {machine.meeting_place}: {machine.nodes} machines train the run together, "
                "and either too few have come, or all places are taken and this one stands by",
            )


def _combine_exit_codes(codes: list[int]) -> int:
    own = [code for code in codes if code != EXIT_PEERS]
    if not codes:
        return EXIT_OK
    if not own:
        return EXIT_PEERS
    if own[0] < 0:
        _die_of_signal(-own[0])
    return own[0]


def _die_of_signal(number: int) -> NoReturn:
    """End as the rank did: by the same signal."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(EXIT_BUG)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # threads of torch's rendezvous do not survive the interpreter's end: one aborted the process
