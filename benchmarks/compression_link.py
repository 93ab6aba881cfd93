"""Creates two network namespaces with a link of a given speed: veth, and tc's token bucket at both ends. Needs root.

If the kernel lacks tbf, or the container may not create namespaces, the reason is reported and everything is removed.
No delay is added: this needs netem, which many small kernels lack. It would add one round trip per operation.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PLACES = "/usr/sbin:/sbin:/usr/bin:/bin"
BURST_BYTES = 256_000
"""Size of the token bucket: 2 ms at 1 Gbit/s, so that a late timer does not reduce the speed."""
QUEUE_MS = 50


class NoLinkError(Exception):
    """This machine cannot create a link; the message gives the reason."""


@dataclass(frozen=True)
class End:
    """One end of the link: its namespace, interface and address."""

    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Command prefix that runs a process in this namespace."""
        return [_tool("ip"), "netns", "exec", self.namespace]


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PLACES}")
    if found is None:
        raise NoLinkError(f"{name} (package iproute2) is not installed")
    return found


def _run(*command: str) -> None:
    done = subprocess.run([_tool(command[0]), *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLinkError(f"`{' '.join(command)}` says: {(done.stderr or done.stdout).strip().splitlines()[:1]}")


@contextmanager
def link() -> Iterator[tuple[End, End]]:
    """Yield both ends of a link that is as fast as the kernel copies. The link exists until the context ends.

    Raises:
        NoLinkError: not root, no tools, or no namespaces.
    """
    if os.geteuid():
        raise NoLinkError("namespaces need root")
    name = f"ratchet-{os.getpid()}"
    ends = tuple(End(f"{name}-{one}", f"r{os.getpid()}{one}", f"10.231.77.{1 + k}") for k, one in enumerate("ab"))
    made = []
    try:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
            made.append(end.namespace)
        _run("ip", "link", "add", ends[0].interface, "type", "veth", "peer", "name", ends[1].interface)
        for end in ends:
            _run("ip", "link", "set", end.interface, "netns", end.namespace)
            _run("ip", "-n", end.namespace, "addr", "add", f"{end.address}/24", "dev", end.interface)
            _run("ip", "-n", end.namespace, "link", "set", end.interface, "up")
            _run("ip", "-n", end.namespace, "link", "set", "lo", "up")
        yield ends[0], ends[1]
    finally:
        for namespace in made:
            subprocess.run([_tool("ip"), "netns", "del", namespace], capture_output=True, check=False)


def shape(ends: Sequence[End], rate: str | None) -> None:
    """Limit each end to send at `rate` (such as 100mbit); both directions may be used at once. None: no limit.

    Raises:
        NoLinkError: the kernel has no token bucket.
    """
    for end in ends:
        place = ["tc", "-n", end.namespace, "qdisc"]
        subprocess.run([_tool("tc"), *place[1:], "del", "dev", end.interface, "root"], capture_output=True, check=False)
        if rate:
            bucket = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
            _run(*place, "add", "dev", end.interface, "root", *bucket)


def sent_bytes(interface: str) -> int:
    """Return the bytes that this end has sent, with Ethernet, IP and TCP headers, from within its namespace.

    The number comes from /proc, because sysfs shows the interfaces of the namespace in which it was mounted.
    """
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LookupError(f"/proc/self/net/dev has no {interface}")
