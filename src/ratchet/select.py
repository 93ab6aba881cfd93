"""A teacher's answers → a data source: those that pass the filters, with a card that accounts for every answer."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ratchet import digest, disk, files
from ratchet.config import Settings
from ratchet.errors import DataError, SettingsError
from ratchet.layout import Layout
from ratchet.lock import Lock
from ratchet.records_select import SelectionCard, SelectionSpec, card_of
from ratchet.run.directory import differing
from ratchet.selecting import answers, reward
from ratchet.selecting.answers import Output
from ratchet.selecting.choice import TAKEN, Choice

ENDING = ".jsonl"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    answers: tuple[Path, ...]
    output: Path
    prompts: Path | None = None


def select(layout: Layout, settings: Settings, options: Options, say: Callable[[str], None]) -> str:
    """Choose among answers, and write those that are taken as rows to learn from.

    Args:
        say: takes lines on how far it is.

    Returns:
        What came of it, for people.

    Raises:
        SettingsError: no such output; settings that do not fit it; the reward's program fails; what is to be written
            cannot be, or something else has its name.
        DamagedError: an output was changed.
        DataError: prompts are not there, or nothing is left.
        BusyError: somebody else writes this output.
        OSError: the disk does not take it.
    """
    target = options.output.absolute()
    if target.suffix != ENDING:
        raise SettingsError(f"--output {options.output}: does not end with {ENDING}; name it so")
    disk.require_writable(target, "--output")
    disk.require_writable(card_of(target), "--output: its card")
    if twice := next((one for one in options.answers if options.answers.count(one) > 1), None):
        raise SettingsError(f"{twice}: named twice; name it once")
    if own := next((one for one in options.answers if one.resolve() == target.resolve()), None):
        raise SettingsError(f"--output {options.output}: is {own}, which is chosen from; name another --output")
    name = digest.of_bytes(str(target).encode())[: digest.SHORT]
    with Lock(layout.stage_lock(f"select-{name}"), f"output {target}").acquire(wait_s=1.0):
        outputs = [answers.opened(one.absolute(), layout, settings, options.prompts) for one in options.answers]
        _require_fitting(outputs, settings)
        ids = [one.card.id for one in outputs]
        if double := next((one for one in outputs if ids.count(one.card.id) > 1), None):
            raise SettingsError(f"{double.path.name}: another output is of the same generation; name one of them")
        for one in outputs:
            asked = one.card
            say(f"{one.path.name}: {asked.answers:,} answers to {asked.prompts:,} prompts by {asked.model_name}")
        spec = SelectionSpec(
            select=settings.select,
            teachers=tuple(one.teacher for one in outputs),
            reward_files=reward.fingerprints(settings.select.reward, layout.root),
        )
        if _is_there(target, spec):
            return f"{target}: is there, of these answers and settings; nothing to do"
        scratch = layout.experiments / f"{files.PARTIAL}select-{name}"
        if scratch.exists():  # of a process that was killed
            shutil.rmtree(scratch)
        files.make_directory(scratch)
        try:
            card = _chosen(layout, spec, outputs, scratch, target)
        finally:
            shutil.rmtree(scratch)
    return describe(card, target)


def _require_fitting(outputs: Iterable[Output], settings: Settings) -> None:
    """Raise SettingsError for an output that these settings cannot choose from."""
    for one in outputs:
        generate = one.card.spec.generate
        if settings.select.format == "labels" and not generate.labels:
            raise SettingsError(f"select.format: labels, but {one.path.name} was generated without generate.labels")
        if clash := next((name for name in generate.keep if name in TAKEN), None):
            raise SettingsError(
                f"{one.path.name}: generate.keep names the field {clash!r}, and rows have another one of that name; "
                "rename it in the prompts"
            )


def _is_there(target: Path, spec: SelectionSpec) -> bool:
    """Whether this very choice is written, as it was written.

    Raises:
        SettingsError: something else has its name; the message says what differs.
    """
    if not target.exists():
        return False
    another = "remove it, or name another --output"
    if answers.is_output(target):
        raise SettingsError(f"{target}: is an output of `ratchet generate`; name another --output")
    beside = card_of(target).name
    try:
        card = SelectionCard.model_validate_json(card_of(target).read_bytes())
    except FileNotFoundError:
        raise SettingsError(f"{target}: is there, and not by `ratchet select` (no {beside}); {another}") from None
    except (OSError, ValueError):
        raise SettingsError(
            f"{target}: is there, and not by `ratchet select` ({beside} is no card of that); {another}"
        ) from None
    if names := differing(card.spec.model_dump(mode="json"), spec.model_dump(mode="json")):
        raise SettingsError(f"{target}: is there, of a choice that differs in {', '.join(names)}; {another}")
    if digest.of_file(target) != card.output:
        raise SettingsError(f"{target}: was changed since it was written; {another}")
    return True


def _chosen(layout: Layout, spec: SelectionSpec, outputs: list[Output], scratch: Path, target: Path) -> SelectionCard:
    choice = Choice(spec.select, outputs, layout.root, scratch)
    rows = scratch / target.name
    choice.write(rows)
    card = SelectionCard(
        spec=spec,
        model_names=tuple(one.card.model_name for one in outputs),
        prompts=choice.prompts,
        answers=choice.tally.answers,
        filters=choice.tally.filters,
        without_reference=choice.without_reference,
        rows=choice.rows,
        taught_prompts=choice.taught_prompts,
        output=digest.of_file(rows),
    )
    if not card.rows:
        raise DataError(f"of {card.answers:,} answers none is left:\n" + "\n".join(_filters(card)))
    files.make_directory(target.parent)
    aside = target.with_name(f"{files.PARTIAL}{target.name}")
    try:
        with rows.open("rb") as stream:
            files.write_blocks(aside, ([block] for block in iter(lambda: stream.read(2**20), b"")))
        card.save(card_of(target))  # first: rows without their card would be a stranger's
        files.publish(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return card


def _filters(card: SelectionCard) -> Iterator[str]:
    for one in card.filters:
        if one.dropped:
            examples = f" ({'; '.join(one.examples[:2])})" if one.examples else ""
            yield f"  {one.name.replace('_', ' ')}: {one.dropped:,} left out, {one.left:,} left{examples}"


def describe(card: SelectionCard, target: Path) -> str:
    """The card in a few lines, for the terminal."""
    lines = [
        f"{card.rows:,} rows of {card.answers:,} answers, for {card.taught_prompts:,} of {card.prompts:,} prompts",
        *_filters(card),
    ]
    if card.without_reference:
        lines.append(f"  {card.without_reference:,} prompts have no reference: nothing was compared there")
    return "\n".join([*lines, f"  {target}"])
