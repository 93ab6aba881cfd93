"""A replica in a bucket behind a faulty network, and the faults of that network."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

from faulty_proxy import Fault, FaultyProxy, Request
from ratchet.runs.replication.object_storage import PART_BYTES
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.storage.files import Entry
from s3_server import S3Server

# Times are scaled down: 0.3 s replaces the timeout of 30 s, 0.05 s replaces the back-off of 30 s, and 100 KB/s replaces
# 1 KB/s.
QUICK = TransferLimits(
    retry_timeout_s=60.0, timeout_s=0.3, slowest_bytes_s=100_000.0, first_wait_s=0.001, longest_wait_s=0.05
)
ONCE = TransferLimits(retry_timeout_s=0.0, timeout_s=2.0, slowest_bytes_s=100_000.0)
TRICKLE = TransferLimits(
    retry_timeout_s=20.0, timeout_s=0.5, slowest_bytes_s=30_000.0, first_wait_s=0.001, longest_wait_s=0.05
)
LARGE = 2 * PART_BYTES + 1000


class Replica:
    """A bucket behind a proxy, and source files for uploads."""

    def __init__(self, server: S3Server, proxy: FaultyProxy, folder: Path) -> None:
        self.server, self.proxy, self.folder = server, proxy, folder
        self.bucket = server.bucket()
        self.url = f"s3://{self.bucket}/replica"

    def store(self, limits: TransferLimits = QUICK, stopping: Callable[[], bool] = lambda: False) -> ReplicaStore:
        return ReplicaStore(self.url, limits, stopping)

    def file(self, size: int, seed: int = 0) -> tuple[str, Path, Entry]:
        """Create a file. Return its name in the replica, its path and its entry."""
        path = self.folder / f"source-{size}-{seed}"
        path.write_bytes(random.Random(f"{seed} {size}").randbytes(size))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return f"objects/{digest}", path, (digest, size)

    def holds(self, name: str) -> str | None:
        """Return the digest of an object as the server stores it, without the proxy."""
        return self.server.digest(self.bucket, f"replica/{name}")


def bodies(request: Request) -> bool:
    return request.method == "PUT" and request.body_bytes > 0


def with_words(request: Request) -> bool:
    """Match requests with an answer body. Answers to HEAD have no body and therefore no error code, so a missing bucket
    looks like a missing object."""
    return request.method != "HEAD"


def reads(request: Request) -> bool:
    return request.method == "GET" and "list-type" not in request.target


FAULTS = {
    "500": lambda: Fault("status", 3, status=500, code="InternalError"),
    "503": lambda: Fault("status", 3),
    "reset-at-once": lambda: Fault("reset", 2),
    "reset-in-mid-part": lambda: Fault("reset", 2, bodies, bytes=40_000),
    "stalled": lambda: Fault("stall", 2),
    "stalled-in-mid-part": lambda: Fault("stall", 2, bodies, bytes=40_000),
    "answer-lost": lambda: Fault("lost", 2),
    "wrong-bytes-sent": lambda: Fault("flip-sent", 2, bodies),
    "wrong-bytes-read": lambda: Fault("flip-read", 1, reads),
    "truncated": lambda: Fault("truncate", 2, reads),
    "expired": lambda: Fault("status", 2, status=403, code="ExpiredToken"),
    "skewed": lambda: Fault("status", 2, status=403, code="RequestTimeTooSkewed"),
    "bucket-gone-for-a-while": lambda: Fault("status", 2, with_words, status=404, code="NoSuchBucket"),
}
