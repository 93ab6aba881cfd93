"""The regular duties of a generating worker: answers made durable, shards sealed, progress told."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ratchet.errors import StorageError
from ratchet.inference.answer_records import Answer
from ratchet.inference.answer_shards import Ledger
from ratchet.runs.journal import Journal

EVERY_S = 1.0
_LIVE = {
    "rows": "rows", "held_tokens": "tokens", "waiting": "waiting", "budget_tokens": "budget_tokens",
    "available_bytes": "available_bytes", "device_bytes": "device_bytes", "held_bytes": "held_bytes",
    "forecast_bytes": "forecast_bytes", "chosen": "chosen", "doubted": "doubted",
}  # fmt: skip
"""Of what a model in memory tells of its batches, by the name that it has in the journal's `answered`."""


class Pace:
    """Keeps what was answered, about every second; waits for a disk that takes nothing, but not for ever.

    Args:
        ledger: of the run.
        journal: of the run.
        shard_rows: answers that are sealed together.
        wait_s: how long a disk may take nothing (machine.storage_wait_s).
        clock_s: monotonic.
    """

    def __init__(
        self, ledger: Ledger, journal: Journal, shard_rows: int, wait_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ledger, self._journal, self._rows, self._wait_s, self._clock_s = (
            ledger,
            journal,
            shard_rows,
            wait_s,
            clock_s,
        )
        self._told_s = clock_s()
        self._tokens = 0
        self._finish = Counter[str]()
        """Answers since the last telling, by how they ended."""
        self._live: dict[str, Any] = {}
        self._failing_since_s: float | None = None

    def begin(self) -> None:
        """The model is loaded: seconds count from now on."""
        self._told_s = self._clock_s()

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take what a speaker tells."""
        if kind == "batch":
            self._live = dict(data)
        elif kind == "budget":
            tokens, failed = data.get("tokens"), data.get("failed_tokens")
            self._journal.append(
                "budget", step=self._ledger.count, phase="generate", action=data["action"], failed_tokens=failed,
                budget={"tokens": tokens},
            )  # fmt: skip
        elif kind == "notice":
            self._journal.append("notice", text=str(data["text"]))
        else:
            self._journal.append("decoding", about=kind, **data)

    def answered(self, answer: Answer) -> None:
        """One more; what is due is done."""
        self._tokens += answer.tokens or 0
        self._finish[answer.finish] += 1
        if self._clock_s() - self._told_s >= EVERY_S:
            self.keep()

    def keep(self) -> bool:
        """Make all durable, seal what can be sealed, and tell where we are; False: the disk does not take it now.

        Raises:
            StorageError: it has not for too long.
        """
        try:
            self._ledger.keep()
            self._seal()
        except OSError as error:
            self._fails(error)
            return False
        self._failing_since_s = None
        now_s = self._clock_s()
        self._journal.append(
            "answered", step=self._ledger.count, tokens=self._tokens, seconds=round(now_s - self._told_s, 4),
            finish=dict(self._finish), **{name: self._live.get(told) for name, told in _LIVE.items()},
        )  # fmt: skip
        self._told_s, self._tokens = now_s, 0
        self._finish.clear()
        return True

    def patiently(self, act: Callable[[], None], beat: Callable[[], None]) -> None:
        """Do it again until the disk takes it. Raises StorageError when it has not for too long."""
        while True:
            beat()
            try:
                act()
            except OSError as error:
                self._fails(error)
                time.sleep(EVERY_S)
            else:
                self._failing_since_s = None
                return

    def _seal(self) -> None:
        begun_s = self._clock_s()
        if count := self._ledger.seal(self._rows):
            seconds = round(self._clock_s() - begun_s, 4)
            self._journal.append("shard", step=self._ledger.count, answers=count, seconds=seconds)

    def _fails(self, error: OSError) -> None:
        now_s = self._clock_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
            self._journal.append("alert", text=f"answers cannot be kept ({error}); they wait in memory")
        self._told_s = now_s
        if now_s - self._failing_since_s > self._wait_s:
            raise StorageError(f"answers could not be kept: {error}. Make room, and repeat")
