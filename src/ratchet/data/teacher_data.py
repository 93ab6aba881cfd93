"""Sources that are answers of a teacher: known by the card that `ratchet select` puts beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ratchet.config.data import Source
from ratchet.data.readers import Fields
from ratchet.errors import DamagedError, DataError
from ratchet.storage import digests, output_card
from ratchet.storage.output_card import card_of
from ratchet.storage.records.dataset_card import Taught
from ratchet.storage.records.selection import PROVENANCE, SelectionCard


def card_beside(source: Source, files: Mapping[str, Path]) -> SelectionCard | None:
    """The card of a source's file, if it is answers of a teacher.

    Args:
        source: of prepare.sources.
        files: its files, by name.

    Raises:
        DataError: it is mixed with other files, or is to be judged by.
        DamagedError: the rows are not those that the card speaks of, or it is no such card.
    """
    names = [name for name, path in files.items() if card_of(path).is_file()]
    if not names:
        return None
    if len(files) > 1:
        raise DataError(
            f"params.yaml: prepare.sources: {source.label}: {names[0]} is answers of a teacher, by its card, and of a "
            f"source so is the only file: leave it out of the pattern, and name it by itself, {{files: {names[0]}}}"
        )
    if source.split in ("validation", "test"):
        raise DataError(
            f"params.yaml: prepare.sources: {source.label}: split: {source.split}, but its rows are answers of a "
            "teacher: what a model says is no truth to judge by; take split: train, or none"
        )
    name, path = names[0], files[names[0]]
    card = output_card.card_beside(path, SelectionCard)
    if card is None:
        raise DamagedError(
            f"{name}: {card_of(path).name} beside it is no card of `ratchet select`; choose answers of `ratchet "
            "generate` with that first, and of other files move such a card away"
        )
    if digests.of_file(path) != card.output:
        raise DamagedError(
            f"{name}: was changed since `ratchet select` wrote it; remove it and run that again, or choose otherwise "
            "with section select (a program of yours can score answers: select.reward)"
        )
    return card


def require_no_stranger(source: Source, records: Sequence[Fields]) -> None:
    """Raise DataError for records that say they are answers of a teacher, where no card vouches for them."""
    if any(isinstance(one.get(PROVENANCE), dict) and "generation" in one[PROVENANCE] for one in records):
        name = card_of(Path(source.files or source.label)).name
        raise DataError(
            f"{source.label}: its rows were written by `ratchet select` ({PROVENANCE}), but their card is not beside "
            f"them; put {name} there, and the file under the name that it had"
        )


def described(card: SelectionCard, training_rows: int) -> Taught:
    """What the dataset card says of it."""
    teachers = zip(card.model_names, card.spec.teachers, strict=True)
    return Taught(
        teachers=tuple(f"{name} ({one.kind} {one.model_digest[: digests.SHORT]})" for name, one in teachers),
        generations=tuple(one.generation for one in card.spec.teachers),
        answers=card.answers,
        rows=card.rows,
        filters=tuple((one.name, one.dropped) for one in card.filters if one.dropped),
        training_rows=training_rows,
    )
