"""A file that somebody asked for, and the card beside it: by which choice it was made, and the SHA-256 of its bytes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ratchet.errors import SettingsError
from ratchet.storage import digests, files
from ratchet.storage.records.base import Record, find_differing_keys

CARD_ENDING = ".card.json"
"""What the name of a card has behind that of its file."""


class OutputCard(Record):
    """What every card of an output says; each kind says more."""

    spec: Record
    """Everything that decides what the output holds."""
    output: str = ""
    """SHA-256 of the file beside which this lies."""


Kind = TypeVar("Kind", bound=OutputCard)


def card_path(output: Path) -> Path:
    """Where the card of an output lies."""
    return output.with_name(f"{output.name}{CARD_ENDING}")


def read_card(output: Path, kind: type[Kind]) -> Kind | None:
    """The card beside an output, which itself is not read; None: nothing lies there, or no card of this kind."""
    try:
        return kind.model_validate_json(card_path(output).read_bytes())
    except (OSError, ValueError):
        return None


def explain_missing_card(output: Path) -> str:
    """Why there is no `read_card` an output, in words."""
    place = card_path(output)
    return f"{place.name} is no card of that" if place.exists() else f"no {place.name} lies beside it"


def _all_names(_: OutputCard, names: list[str]) -> list[str]:
    return names


def is_output_current(
    output: Path, spec: Record, kind: type[Kind], verb: str, told: Callable[[Kind, list[str]], list[str]] = _all_names
) -> bool:
    """Whether an output of this very choice is there, as it was written.

    Args:
        output: the file.
        spec: everything that decides what it holds.
        kind: of its card.
        verb: that writes it.
        told: of the keys in which the spec on a card is another, those that tell somebody something; at least one.

    Raises:
        SettingsError: something else has its name; the message says what, or what differs.
    """
    if not output.exists():
        return False
    there, another = f"{output}: is there", "remove it, or name another --output"
    found = read_card(output, kind)
    if found is None:
        raise SettingsError(f"{there}, and not by `ratchet {verb}` ({explain_missing_card(output)}); {another}")
    if names := find_differing_keys(found.spec.model_dump(mode="json"), spec.model_dump(mode="json")):
        what = ", ".join(told(found, names))
        raise SettingsError(f"{there}, of a `ratchet {verb}` that differs in {what}; {another}")
    if digests.hash_file(output) != found.output:
        raise SettingsError(f"{output}: was changed since it was written; {another}")
    return True


def write_output(output: Path, contents: Callable[[Path], None], about: Kind) -> Kind:
    """Write an output with its card; after a crash the file is whole, or not there.

    Args:
        output: the file; one that is there is replaced.
        contents: writes the file, durably, under the name that it is given.
        about: the card, without the SHA-256 of the file.

    Returns:
        The card as it was written.

    Raises:
        OSError: the disk does not take it; no half-written file is left behind.
    """
    files.make_directory(output.parent)
    aside = output.with_name(f"{files.PARTIAL}{output.name}")
    try:
        contents(aside)
        about = about.model_copy(update={"output": digests.hash_file(aside)})
        about.save(card_path(output))  # first: an output without its card would be a stranger's
        files.publish_directory(aside, output)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    return about
