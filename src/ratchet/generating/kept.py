"""How many answers a generation has, as its files say; read, not checked, by whoever does not hold its ledger."""

from collections.abc import Iterable
from pathlib import Path

from ratchet.generating.answers import Answer
from ratchet.run.journal import Reader


def answered(shards: Iterable[Path], ledger: Path) -> int:
    """Places that have an answer.

    Args:
        shards: files with the answers of sealed shards, a line each; the folder of each is named by its first place.
        ledger: lines of answers, some of which may stand in shards, too.
    """
    places = set[int]()
    for path in shards:
        first = path.parent.name.removeprefix("shard-")
        if first.isdecimal():  # not one that is being written
            with path.open("rb") as stream:
                places.update(range(int(first), int(first) + sum(1 for _ in stream)))
    for event in Reader(ledger).read():
        try:
            places.add(Answer.of(event.data).place)
        except (TypeError, ValueError):
            continue
    return len(places)
