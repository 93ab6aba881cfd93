"""`ratchet select`: writes the teacher's answers that pass the filters as a data source.

A card accounts for every answer.
"""

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
    """Whether the output of these answers and settings existed already."""


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
        output: the .jsonl file for the rows.
        prompts: the file of prompts, if the directory of the generation no longer exists.
        on_progress: receives a line for each output.

    Raises:
        SettingsError: the output cannot be written or is another file, the settings do not fit the answers, or the
            reward program fails.
        DamagedFileError: an output was changed.
        DataError: the prompts are missing, or no answer passes the filters.
        LockHeldError: another process writes this output.
        OSError: the disk is full or faulty.
    """
    layout, settings = project.layout, project.settings
    target = output.absolute()
    if target.suffix != ENDING:
        raise SettingsError(f"--output {output}: expected a name that ends in {ENDING}")
    files.require_writable(target, "--output")
    files.require_writable(card_path(target), "--output: its card")
    if twice := next((path for path in answers if answers.count(path) > 1), None):
        raise SettingsError(f"{twice}: named twice; name it once")
    if overwritten := next((path for path in answers if path.resolve() == target.resolve()), None):
        raise SettingsError(f"--output {output}: is also the input {overwritten}; name another --output")
    name = digests.hash_bytes(str(target).encode())[: digests.SHORT]
    with FileLock(layout.stage_lock(f"select-{name}"), f"output {target}").acquire(wait_s=1.0):
        outputs = [answer_selection.open_output(path.absolute(), layout, settings, prompts) for path in answers]
        _require_fitting(outputs, settings)
        ids = [source.card.id for source in outputs]
        if double := next((source for source in outputs if ids.count(source.card.id) > 1), None):
            raise SettingsError(f"{double.path.name}: another output is of the same generation; name one of them")
        for source in outputs:
            on_progress(
                f"{source.path.name}: {source.card.answers:,} answers to {source.card.prompts:,} prompts by "
                f"{source.card.model_name}"
            )
        spec = SelectionSpec(
            select=settings.select,
            teachers=tuple(source.teacher for source in outputs),
            reward_files=answer_selection.fingerprint(settings.select.reward, layout.root),
        )
        if target.exists() and read_card(target, GenerationCard) is not None:
            raise SettingsError(f"{target}: is an output of `ratchet generate`; name another --output")
        if is_output_current(target, spec, SelectionCard, "select"):
            return SelectResult(output=target, card=SelectionCard.load(card_path(target)), was_written_before=True)
        scratch = layout.experiments / f"{files.PARTIAL}select-{name}"
        if scratch.exists():  # a killed process left it
            shutil.rmtree(scratch)
        files.make_directory(scratch)
        try:
            card = _select_and_write(layout, spec, outputs, scratch, target)
        finally:
            shutil.rmtree(scratch)
    return SelectResult(output=target, card=card, was_written_before=False)


def _require_fitting(outputs: Iterable[GenerationOutput], settings: Settings) -> None:
    """Raise SettingsError if these settings cannot select from an output."""
    for source in outputs:
        generate = source.card.spec.generate
        if settings.select.answer_format == "labels" and not generate.labels:
            raise SettingsError(
                f"select.answer_format: labels, but {source.path.name} was generated without generate.labels"
            )
        if clash := next((name for name in generate.extra_fields if name in RESERVED_FIELDS), None):
            raise SettingsError(
                f"{source.path.name}: generate.extra_fields names the field {clash!r}, and rows have another field of "
                "that name; rename it in the prompts"
            )


def _select_and_write(
    layout: ProjectLayout, spec: SelectionSpec, outputs: list[GenerationOutput], scratch: Path, target: Path
) -> SelectionCard:
    selector = AnswerSelector(spec.select, outputs, layout.root, scratch)
    rows = scratch / "rows.jsonl"  # not the name of the output, which may be one of the work files
    selector.write(rows)
    card = SelectionCard(
        spec=spec,
        model_names=tuple(source.card.model_name for source in outputs),
        prompts=selector.prompts,
        answers=selector.tally.answers,
        filters=selector.tally.filters,
        without_reference=selector.without_reference,
        rows=selector.rows,
        prompts_with_rows=selector.prompts_with_rows,
    )
    if not card.rows:
        raise DataError(f"of {card.answers:,} answers none is left:\n" + "\n".join(format_filters(card)))

    def copy_rows(path: Path) -> None:
        with rows.open("rb") as stream:
            files.write_blocks(path, ([block] for block in iter(lambda: stream.read(2**20), b"")))

    return write_output(target, copy_rows, card)


def format_filters(card: SelectionCard) -> Iterator[str]:
    """Yield a line for each filter that dropped answers."""
    for tally in card.filters:
        if tally.dropped:
            examples = f" ({'; '.join(tally.examples[:2])})" if tally.examples else ""
            yield f"  {tally.name.replace('_', ' ')}: {tally.dropped:,} left out, {tally.left:,} left{examples}"
