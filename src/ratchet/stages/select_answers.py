"""A teacher's answers → a data source: those that pass the filters, with a card that accounts for every answer."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.errors import DataError, SettingsError
from ratchet.inference import answer_selection
from ratchet.inference.answer_selection import RESERVED_FIELDS, AnswerSelector, GenerationOutput
from ratchet.inference.spec import GenerationCard
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path, is_output_current, read_card, write_output
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import SelectionCard, SelectionSpec

ENDING = ".jsonl"


class SelectResult(Record):
    """Result of `ratchet select`."""

    output: Path
    card: SelectionCard
    was_written_before: bool
    """Whether the output of these answers and settings was there already."""


def select(
    project: Project,
    answers: Sequence[Path],
    output: Path,
    prompts: Path | None = None,
    on_progress: Callable[[str], None] = ignore_progress,
) -> SelectResult:
    """Choose among a teacher's answers and write the chosen ones as rows to learn from.

    Args:
        project: the project; section select of its settings has the filters.
        answers: outputs of `ratchet generate`.
        output: the rows, a .jsonl file.
        prompts: the prompts' file, if the directory of the generation is gone.
        on_progress: receives a line for each output.

    Raises:
        SettingsError: the output cannot be written or is not ours, settings do not fit the answers, or the reward
            program fails.
        DamagedFileError: an output was changed.
        DataError: prompts are missing, or no answer passes the filters.
        LockHeldError: another process writes this output.
        OSError: the disk is full or broken.
    """
    layout, settings = project.layout, project.settings
    target = output.absolute()
    if target.suffix != ENDING:
        raise SettingsError(f"--output {output}: does not end with {ENDING}; name it so")
    files.require_writable(target, "--output")
    files.require_writable(card_path(target), "--output: its card")
    if twice := next((one for one in answers if answers.count(one) > 1), None):
        raise SettingsError(f"{twice}: named twice; name it once")
    if own := next((one for one in answers if one.resolve() == target.resolve()), None):
        raise SettingsError(f"--output {output}: is {own}, which is chosen from; name another --output")
    name = digests.hash_bytes(str(target).encode())[: digests.SHORT]
    with FileLock(layout.stage_lock(f"select-{name}"), f"output {target}").acquire(wait_s=1.0):
        outputs = [answer_selection.open_output(one.absolute(), layout, settings, prompts) for one in answers]
        _require_fitting(outputs, settings)
        ids = [one.card.id for one in outputs]
        if double := next((one for one in outputs if ids.count(one.card.id) > 1), None):
            raise SettingsError(f"{double.path.name}: another output is of the same generation; name one of them")
        for one in outputs:
            asked = one.card
            on_progress(
                f"{one.path.name}: {asked.answers:,} answers to {asked.prompts:,} prompts by {asked.model_name}"
            )
        spec = SelectionSpec(
            select=settings.select,
            teachers=tuple(one.teacher for one in outputs),
            reward_files=answer_selection.fingerprint(settings.select.reward, layout.root),
        )
        if target.exists() and read_card(target, GenerationCard) is not None:
            raise SettingsError(f"{target}: is an output of `ratchet generate`; name another --output")
        if is_output_current(target, spec, SelectionCard, "select"):
            return SelectResult(output=target, card=SelectionCard.load(card_path(target)), was_written_before=True)
        scratch = layout.experiments / f"{files.PARTIAL}select-{name}"
        if scratch.exists():  # of a process that was killed
            shutil.rmtree(scratch)
        files.make_directory(scratch)
        try:
            card = _select_and_write(layout, spec, outputs, scratch, target)
        finally:
            shutil.rmtree(scratch)
    return SelectResult(output=target, card=card, was_written_before=False)


def _require_fitting(outputs: Iterable[GenerationOutput], settings: Settings) -> None:
    """Raise SettingsError for an output that these settings cannot choose from."""
    for one in outputs:
        generate = one.card.spec.generate
        if settings.select.answer_format == "labels" and not generate.labels:
            raise SettingsError(
                f"select.answer_format: labels, but {one.path.name} was generated without generate.labels"
            )
        if clash := next((name for name in generate.extra_fields if name in RESERVED_FIELDS), None):
            raise SettingsError(
                f"{one.path.name}: generate.extra_fields names the field "
                f"{clash!r}, and rows have another one of that name; "
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
        prompts_with_rows=choice.prompts_with_rows,
    )
    if not card.rows:
        raise DataError(f"of {card.answers:,} answers none is left:\n" + "\n".join(format_filters(card)))

    def contents(aside: Path) -> None:
        with rows.open("rb") as stream:
            files.write_blocks(aside, ([block] for block in iter(lambda: stream.read(2**20), b"")))

    return write_output(target, contents, card)


def format_filters(card: SelectionCard) -> Iterator[str]:
    for one in card.filters:
        if one.dropped:
            examples = f" ({'; '.join(one.examples[:2])})" if one.examples else ""
            yield f"  {one.name.replace('_', ' ')}: {one.dropped:,} left out, {one.left:,} left{examples}"
