"""How fast this machine reaches the mirror: bytes of nothing are sent there and read back, as checkpoints would be."""

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratchet import digest
from ratchet.mirror.store import Store

SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""Bytes of one try; the next larger one follows when one took less than LONG_ENOUGH_S: up to 32 MiB each way."""
LONG_ENOUGH_S = 1.0


@dataclass(frozen=True)
class Speed:
    """Bits in a second, both ways. Sending includes what the store does to be sure that all has arrived."""

    upload_bits_s: float
    download_bits_s: float


def measure(store: Store) -> Speed:
    """Send and fetch content that cannot be compressed, and remove it.

    Raises:
        MirrorError: the store cannot be reached, or not for long enough.
        SettingsError: it must not be used like this: bucket, credentials, clock.
    """
    store.check()
    upload = download = 0.0
    with tempfile.TemporaryDirectory(prefix="ratchet-speed-") as folder:
        for size in SIZES:
            with _sent(store, Path(folder) / "content", size) as (name, sent_s):
                began_s = time.perf_counter()
                arrived = sum(len(block) for block in store.blocks(name))
                fetched_s = time.perf_counter() - began_s
            upload, download = 8 * size / sent_s, 8 * arrived / fetched_s
            if min(sent_s, fetched_s) >= LONG_ENOUGH_S or max(sent_s, fetched_s) >= 8 * LONG_ENOUGH_S:
                break
    return Speed(upload, download)


@contextmanager
def _sent(store: Store, path: Path, size: int) -> Iterator[tuple[str, float]]:
    """An object of random content for so long; its name, and how long it took to send it."""
    content = os.urandom(size)
    path.write_bytes(content)
    name = f"speed/{socket.gethostname()[:32].lower()}-{secrets.token_hex(8)}"
    began_s = time.perf_counter()
    try:
        store.send(name, path, (digest.of_bytes(content), size))
        yield name, time.perf_counter() - began_s
    finally:
        store.remove([name])
