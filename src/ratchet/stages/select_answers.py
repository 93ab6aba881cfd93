"""A teacher's answers → a data source: those that pass the filters, with a card that accounts for every answer."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.errors import DataError, SettingsError
from ratchet.inference import answer_selection, reward
from ratchet.inference.answer_selection import TAKEN, AnswerSelector, GenerationOutput
from ratchet.inference.spec import GenerationCard
from ratchet.storage import digests, disk, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.output_card import card_path, is_output_current, read_card, write_output
from ratchet.storage.records.data import SelectionCard, SelectionSpec

ENDING = ".jsonl"


@dataclass(frozen=True)
class SelectOptions:
    """What the command line says."""

    answers: tuple[Path, ...]
    output: Path
    prompts: Path | None = None


def select(layout: ProjectLayout, settings: Settings, options: SelectOptions, say: Callable[[str], None]) -> str:
    """Choose among answers, and write those that are taken as rows to learn from.

    Args:
        say: takes lines on how far it is.

    Returns:
        What came of it, for people.

    Raises:
        SettingsError: no such output; settings that do not fit it; the reward's program fails; what is to be written
            cannot be, or something else has its name.
        DamagedFileError: an output was changed.
        DataError: prompts are not there, or nothing is left.
        LockHeldError: somebody else writes this output.
        OSError: the disk does not take it.
    """
    target = options.output.absolute()
    if target.suffix != ENDING:
        raise SettingsError(f"--output {options.output}: does not end with {ENDING}; name it so")
    disk.require_writable(target, "--output")
    disk.require_writable(card_path(target), "--output: its card")
    if twice := next((one for one in options.answers if options.answers.count(one) > 1), None):
        raise SettingsError(f"{twice}: named twice; name it once")
    if own := next((one for one in options.answers if one.resolve() == target.resolve()), None):
        raise SettingsError(f"--output {options.output}: is {own}, which is chosen from; name another --output")
    name = digests.hash_bytes(str(target).encode())[: digests.SHORT]
    with FileLock(layout.stage_lock(f"select-{name}"), f"output {target}").acquire(wait_s=1.0):
        outputs = [
            answer_selection.open_output(one.absolute(), layout, settings, options.prompts) for one in options.answers
        ]
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
            reward_files=reward.fingerprint_command(settings.select.reward, layout.root),
        )
        if target.exists() and read_card(target, GenerationCard) is not None:
            raise SettingsError(f"{target}: is an output of `ratchet generate`; name another --output")
        if is_output_current(target, spec, SelectionCard, "select"):
            return f"{target}: is there, of these answers and settings; nothing to do"
        scratch = layout.experiments / f"{files.PARTIAL}select-{name}"
        if scratch.exists():  # of a process that was killed
            shutil.rmtree(scratch)
        files.make_directory(scratch)
        try:
            card = _select_and_write(layout, spec, outputs, scratch, target)
        finally:
            shutil.rmtree(scratch)
    return describe(card, target)


def _require_fitting(outputs: Iterable[GenerationOutput], settings: Settings) -> None:
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


def _select_and_write(
    layout: ProjectLayout, spec: SelectionSpec, outputs: list[GenerationOutput], scratch: Path, target: Path
) -> SelectionCard:
    choice = AnswerSelector(spec.select, outputs, layout.root, scratch)
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
    )
    if not card.rows:
        raise DataError(f"of {card.answers:,} answers none is left:\n" + "\n".join(_format_filters(card)))

    def contents(aside: Path) -> None:
        with rows.open("rb") as stream:
            files.write_blocks(aside, ([block] for block in iter(lambda: stream.read(2**20), b"")))

    return write_output(target, contents, card)


def _format_filters(card: SelectionCard) -> Iterator[str]:
    for one in card.filters:
        if one.dropped:
            examples = f" ({'; '.join(one.examples[:2])})" if one.examples else ""
            yield f"  {one.name.replace('_', ' ')}: {one.dropped:,} left out, {one.left:,} left{examples}"


def describe(card: SelectionCard, target: Path) -> str:
    """The card in a few lines, for the terminal."""
    lines = [
        f"{card.rows:,} rows of {card.answers:,} answers, for {card.taught_prompts:,} of {card.prompts:,} prompts",
        *_format_filters(card),
    ]
    if card.without_reference:
        lines.append(f"  {card.without_reference:,} prompts have no reference: nothing was compared there")
    return "\n".join([*lines, f"  {target}"])
