"""Output files with a card: a JSON file next to the output, with the specification and SHA-256 of the output."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ratchet.errors import SettingsError
from ratchet.storage import digests, files
from ratchet.storage.records.base import Record, find_differing_keys

CARD_ENDING = ".card.json"
"""Suffix of a card's file name, after the name of the output."""


class OutputCard(Record):
    """Base class of output cards."""

    spec: Record
    """Everything that determines the content of the output."""
    output: str = ""
    """SHA-256 of the output."""


Kind = TypeVar("Kind", bound=OutputCard)


def card_path(output: Path) -> Path:
    """Return the path of an output's card."""
    return output.with_name(f"{output.name}{CARD_ENDING}")


def read_card(output: Path, kind: type[Kind]) -> Kind | None:
    """Read the card of an output, without checking the output; None if there is no card of this kind."""
    try:
        return kind.model_validate_json(card_path(output).read_bytes())
    except (OSError, ValueError):
        return None


def explain_missing_card(output: Path) -> str:
    """Explain why `read_card` returned None."""
    path = card_path(output)
    return f"{path.name} is not such a card" if path.exists() else f"{path.name} is missing"


def is_output_current(
    output: Path,
    spec: Record,
    kind: type[Kind],
    command: str,
    select_keys: Callable[[Kind, list[str]], list[str]] = lambda _, keys: keys,
) -> bool:
    """Return whether the output of a command exists, unchanged and with this specification.

    `select_keys` receives the card and all keys that differ; it returns the keys to report, at least one.

    Raises:
        SettingsError: the file exists, but has another specification, was changed, or is not an output of the command.
    """
    if not output.exists():
        return False
    remedy = "remove it, or set another --output"
    card = read_card(output, kind)
    if card is None:
        raise SettingsError(
            f"{output}: exists, but `ratchet {command}` did not write it ({explain_missing_card(output)}); {remedy}"
        )
    if keys := find_differing_keys(card.spec.model_dump(mode="json"), spec.model_dump(mode="json")):
        differing = ", ".join(select_keys(card, keys))
        raise SettingsError(f"{output}: exists, from a `ratchet {command}` that differs in {differing}; {remedy}")
    if digests.hash_file(output) != card.output:
        raise SettingsError(f"{output}: changed since it was written; {remedy}")
    return True


def write_output(output: Path, write: Callable[[Path], None], card: Kind) -> Kind:
    """Write an output with its card, atomically: after a crash the output is complete or absent.

    `write` writes the content durably to a path; `card` has no SHA-256 of the output. Returns the card as written.
    After an OSError, no partial file remains.
    """
    files.make_directory(output.parent)
    partial = output.with_name(f"{files.PARTIAL}{output.name}")
    try:
        write(partial)
        card = card.model_copy(update={"output": digests.hash_file(partial)})
        card.save(card_path(output))  # first, because an output without a card is not recognized
        files.publish_directory(partial, output)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return card
