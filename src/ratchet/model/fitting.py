"""The rules of the doctor about memory: what makes a training fit into this machine, and what it could have instead.

Cheap things come first: fewer rows at a time changes only the time, activation checkpointing costs about a third more
of it (Chen et al. 2016), a base shared among ranks what their line needs; then come fewer bits, and only last shorter
rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet import amend
from ratchet.config import Settings
from ratchet.model import combinations
from ratchet.model.advice import Change
from ratchet.model.ledger import Device
from ratchet.model.rules import QLORA
from ratchet.sizes import written

CHEN = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174"
FSDP = "Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277"
EIGHT_BITS = "Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861"
FORECAST = "forecast for this machine (docs/memory.md)"
SHARE = 0.9
"""Of the memory at hand that proposed settings may take by the forecast: it may be wrong by a tenth."""
LEAST_TOKENS = 64
"""No shorter rows are proposed."""
ROWS, CHECKPOINTING, SHARING = "machine.micro_batch_rows", "machine.activation_checkpointing", "machine.shard_base"

Values = dict[str, Any]


@dataclass(frozen=True)
class Room:
    """Memory for the training process, and what it would hold."""

    available_bytes: int
    needed_bytes: Callable[[Settings], int]
    """The peak of a training with some settings, by the forecast."""
    row_tokens: int
    """Of the longest sequence, with the settings as they are."""
    ranks: int = 1
    """That would train together."""


@dataclass(frozen=True)
class Fit:
    """How the settings go into the memory."""

    needed_bytes: int
    """By the settings as they are."""
    changes: tuple[Change, ...]
    least_bytes: int
    """With these changes."""
    fits: bool
    """With these changes; if not, nothing helps."""


def fit(settings: Settings, device: Device, room: Room) -> Fit:
    """What to change so that the training fits, or so that memory of a GPU that is there is used.

    Raises:
        SettingsError: the settings do not fit the base at all.
    """
    search = _Search(settings, room)
    needed = search.needed_bytes()
    if needed > room.available_bytes:
        return search.smaller(needed)
    changes = search.faster() if device == "cuda" else []
    return Fit(needed, tuple(changes), search.needed_bytes() if changes else needed, fits=True)


class _Search:
    """Settings that are changed step by step, and what they need."""

    def __init__(self, settings: Settings, room: Room) -> None:
        self.settings = settings
        self.room = room
        self.budget_bytes = int(SHARE * room.available_bytes)
        self.asked = ""

    def needed_bytes(self, values: Values | None = None) -> int:
        """The peak of a training with the settings, or with some of them changed."""
        return self.room.needed_bytes(amend.changed(self.settings, values or {}))

    def smaller(self, needed: int) -> Fit:
        """Fewer rows at a time; then, a row at a time, one thing after the other until it fits."""
        rows = self.settings.machine.micro_batch_rows
        self.asked = f"{written(needed)} would be needed, {written(self.room.available_bytes)} are at hand"
        count, least = self._fewer(rows, needed)
        changes: list[Change] = []
        for values, what, source in self._rungs():
            if least <= self.budget_bytes:
                break
            before, least = least, self.needed_bytes(values | {ROWS: 1})
            self.settings = amend.changed(self.settings, values)
            changes.append(Change(values, f"{self.asked}; {what}: {written(before - least)} less", source))
        if least > self.budget_bytes:
            shorter, least = self._shorter()
            changes += shorter
        if least > self.budget_bytes:
            return Fit(needed, (), least, fits=False)
        while changes and count * 2 <= rows and (more := self.needed_bytes({ROWS: count * 2})) <= self.budget_bytes:
            count, least = count * 2, more
        if count < rows:
            reason = f"{self.asked}; rows that fit at once: {count}. What is learned stays the same"
            changes.insert(0, Change({ROWS: count}, reason, FORECAST))
        return Fit(needed, tuple(changes), least, fits=True)

    def _fewer(self, rows: int, needed: int) -> tuple[int, int]:
        """Rows at a time that fit, and what they need; 1 where not even that does."""
        least = self.needed_bytes({ROWS: 1}) if rows > 1 else needed
        if least > self.budget_bytes:
            return 1, least
        count = 1 << ((rows - 1).bit_length() - 1)  # the next smaller power of two
        while count > 1 and (needed := self.needed_bytes({ROWS: count})) > self.budget_bytes:
            count //= 2
        return (count, needed) if count > 1 else (1, least)

    def _rungs(self) -> list[tuple[Values, str, str]]:
        train = self.settings.train
        found: list[tuple[Values, str, str]] = []
        if self.settings.machine.activation_checkpointing is not True:
            what = "activations computed twice instead of kept, for a third more time"
            found.append(({CHECKPOINTING: True}, what, f"{CHEN}; {FORECAST}"))
        four_bits = train.model_copy(update={"quantization": "nf4"})  # which may come next
        may_share = self.room.ranks > 1 and combinations.unshareable(four_bits) is None
        if may_share and self.settings.machine.shard_base is not True:
            what = f"the frozen base shared among {self.room.ranks} ranks, whose layers then travel for every pass"
            found.append(({SHARING: True}, what, f"{FSDP}; {FORECAST}"))
        if train.quantization == "none":
            values: Values = {"train.quantization": "nf4"}
            if train.initialization == "pissa":
                values["train.initialization"] = "zero"
            found.append((values, "the frozen base in 4 bits", f"{QLORA}; {FORECAST}"))
        if train.distill.stays and train.distill.quantization == "none":
            values = {"train.distill.quantization": "nf4"}
            found.append((values, "the teacher in 4 bits", f"{QLORA}; {FORECAST}"))
        if not train.double_quantization:
            values = {"train.double_quantization": True}
            found.append((values, "constants of quantisation in 8 bits", f"{QLORA}; {FORECAST}"))
        if train.optimizer == "adamw":
            values = {"train.optimizer": "adamw_8bit"}
            found.append((values, "optimizer states in 8 bits", f"{EIGHT_BITS}; {FORECAST}"))
        return found

    def _shorter(self) -> tuple[list[Change], int]:
        """Half as long, again and again, at one row at a time."""
        least = self.needed_bytes(self._of_length(LEAST_TOKENS))
        if least > self.budget_bytes:
            return [], least
        length = 1 << ((self.room.row_tokens - 1).bit_length() - 1)
        while length > LEAST_TOKENS and (needed := self.needed_bytes(self._of_length(length))) > self.budget_bytes:
            length //= 2
        values = {key: value for key, value in self._of_length(length).items() if key != ROWS}
        self.settings = amend.changed(self.settings, values)
        reason = f"{self.asked}; rows of {2 * length:,} tokens do not fit, whatever else is changed"
        return [Change(values, reason, FORECAST)], needed if length > LEAST_TOKENS else least

    def _of_length(self, length: int) -> Values:
        packed = self.settings.train.batching == "packed"
        return {ROWS: 1, "prepare.max_tokens": length} | ({"train.pack_tokens": length} if packed else {})

    def faster(self) -> list[Change]:
        """What a GPU with memory to spare could do without, or have more of."""
        changes = []
        if self.settings.machine.activation_checkpointing is True:
            needed = self.needed_bytes({CHECKPOINTING: False})
            if needed <= self.budget_bytes:
                self.settings = amend.changed(self.settings, {CHECKPOINTING: False})
                reason = f"activations fit ({written(needed)}) without being computed twice, which takes a third longer"
                changes.append(Change({CHECKPOINTING: False}, reason, f"{CHEN}; {FORECAST}"))
        rows = count = self.settings.machine.micro_batch_rows
        while count * 2 <= self.settings.train.batch_rows and self.needed_bytes({ROWS: count * 2}) <= self.budget_bytes:
            count *= 2
        if count > rows:
            self.settings = amend.changed(self.settings, {ROWS: count})
            reason = f"{count} rows fit at once, and a GPU computes them in less time than one after the other"
            changes.append(Change({ROWS: count}, reason, FORECAST))
        return changes
