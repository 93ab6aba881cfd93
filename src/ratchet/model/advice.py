"""What this project should change in params.yaml, each with its reason and source; nothing where a value is good.

A rule has a range that published work leaves open and speaks only outside of it: taste is not its business. Rules come
in the order in which they build on each other, each seeing what those before it have changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet import amend
from ratchet.card import DatasetCard, Lengths
from ratchet.config import Settings
from ratchet.model.blueprint import Blueprint
from ratchet.model.ledger import Device


@dataclass(frozen=True)
class Proposal:
    """One changed value."""

    key: str
    """As in params.yaml, such as `train.rank`."""
    before: Any
    value: Any
    reason: str
    source: str


@dataclass(frozen=True)
class Facts:
    """What rules look at; what is not known is None, and the rules that need it are silent."""

    settings: Settings
    device: Device
    blueprint: Blueprint | None
    data: DatasetCard | None

    @property
    def rows(self) -> Lengths | None:
        """Lengths of the training rows."""
        return self.data.lengths.get("train") if self.data else None


@dataclass(frozen=True)
class Change:
    """Values that belong together, for one reason."""

    values: dict[str, Any]
    """By key; the others go with the first."""
    reason: str
    source: str


Rule = Callable[[Facts], Change | None]


def advise(facts: Facts, rules: Sequence[Rule]) -> tuple[Facts, list[Change]]:
    """Ask the rules in their order; returns the facts with all changes made, and the changes."""
    changes = []
    for rule in rules:
        change = rule(facts)
        if change is not None:
            facts = replace(facts, settings=amend.changed(facts.settings, change.values))
            changes.append(change)
    return facts, changes


def proposals(settings: Settings, changes: Sequence[Change]) -> list[Proposal]:
    """The changes key by key: what several rules have changed is said once, with all their reasons."""
    found: dict[str, Proposal] = {}
    for change in changes:
        first = next(iter(change.values))
        for key, value in change.values.items():
            section, _, name = key.partition(".")
            before = getattr(getattr(settings, section), name)
            reasons, sources = [change.reason if key == first else f"goes with {first}"], [change.source]
            if known := found.pop(key, None):
                reasons.insert(0, known.reason)
                sources.insert(0, known.source)
            if value != before:
                found[key] = Proposal(key, before, value, "; ".join(reasons), "; ".join(dict.fromkeys(sources)))
    return list(found.values())
