"""Ways to train that need less memory and more time, for settings that leave them to be chosen (`auto`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.model import combinations, forecast
from ratchet.model.blueprint import Blueprint
from ratchet.model.forecast import Work


@dataclass(frozen=True)
class Way:
    """One of them."""

    machine: Machine
    cost: str
    """What it does and what that takes, for people."""


def ways(settings: Train, machine: Machine, ranks: int) -> Iterator[Way]:
    """All that are left to be chosen: what costs least comes first, all at once last."""
    found = []
    if machine.activation_checkpointing == "auto":
        cost = "activations are recomputed, which takes a third more time"
        found.append(({"activation_checkpointing": True}, cost))
    if machine.shard_base == "auto" and ranks > 1 and combinations.unshareable(settings) is None:
        cost = f"the base is shared among {ranks} ranks, so that its layers travel for every pass forward and backward"
        found.append(({"shard_base": True}, cost))
    for values, cost in found:
        yield Way(machine.model_copy(update=values), cost)
    if len(found) > 1:
        together = {name: value for values, _ in found for name, value in values.items()}
        yield Way(machine.model_copy(update=together), "; ".join(cost for _, cost in found))


def first_that_fits(
    blueprint: Blueprint, settings: Train, machine: Machine, work: Work, available_bytes: int
) -> Way | None:  # fmt: skip
    """The cheapest of `ways` with which a row at a time fits into so much for each rank; None when none does."""
    single = work.single_row()
    for way in ways(settings, machine, work.ranks):
        found = forecast.forecast(blueprint, settings, way.machine, single)
        if found.needed_bytes(work.sharing) <= available_bytes:
            return way
    return None
