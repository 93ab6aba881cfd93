"""`ratchet select`: writes the answers that pass the filters, or pairs of answers, as a data source.

A card accounts for every answer.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config.select import PairSettings
from ratchet.config.settings import Settings
from ratchet.config.units import format_count
from ratchet.errors import DataError, SettingsError
from ratchet.inference import answer_selection
from ratchet.inference.answer_selection import RESERVED_FIELDS, RESERVED_PAIR_FIELDS, AnswerSelector, GenerationOutput
from ratchet.inference.spec import GenerationCard
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path, is_output_current, read_card, write_output
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import PairScore, SelectionCard, SelectionSpec

if TYPE_CHECKING:
    from ratchet.evaluation.judge import JudgeSession

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
    *,
    pairs: bool = False,
) -> SelectResult:
    """Choose among a model's answers and write the chosen ones as rows to learn from.

    Args:
        project: the project; section select of its settings has the filters.
        answers: outputs of `ratchet generate`.
        output: the .jsonl file for the rows.
        prompts: the file of prompts, if the directory of the generation no longer exists.
        on_progress: receives a line for each output.
        pairs: write pairs of a chosen and a rejected answer (select.pairs) instead of single answers.

    Raises:
        SettingsError: the output cannot be written or is another file, the settings do not fit the answers, the
            reward program fails, or the judge refuses a request.
        EndpointError: the judge does not answer.
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
        pairs_by = _decide_pairs_by(settings) if pairs else None
        _require_fitting(outputs, settings, RESERVED_PAIR_FIELDS if pairs else RESERVED_FIELDS)
        ids = [source.card.id for source in outputs]
        if double := next((source for source in outputs if ids.count(source.card.id) > 1), None):
            raise SettingsError(f"{double.path.name}: another output is of the same generation; name one of them")
        for source in outputs:
            on_progress(
                f"{source.path.name}: {format_count(source.card.answers, 'answer')} to "
                f"{format_count(source.card.prompts, 'prompt')} by {source.card.model_name}"
            )
        judge = _connect_judge(layout, settings) if pairs_by == "judge" else None
        spec = SelectionSpec(
            select=settings.select if pairs else settings.select.model_copy(update={"pairs": PairSettings()}),
            teachers=tuple(source.teacher for source in outputs),
            reward_files=_fingerprint_scorer(settings, layout, pairs_by, judge),
            pairs_by=pairs_by,
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
            rank = None if judge is None else partial(judge.rank_answers, progress=on_progress)
            selector = AnswerSelector(spec.select, outputs, layout.root, scratch, pairs_by, rank)
            card = _select_and_write(selector, spec, target)
        finally:
            shutil.rmtree(scratch)
    return SelectResult(output=target, card=card, was_written_before=False)


def _decide_pairs_by(settings: Settings) -> PairScore:
    """Return what decides about pairs. Raises SettingsError if the settings do not have it, or drop what pairs need."""
    select, reward = settings.select, settings.select.reward
    has_reward = bool(reward.command) or reward.function is not None
    by = select.pairs.by or ("reward" if has_reward else "reference")
    if by == "reward" and not has_reward:
        raise SettingsError("select.pairs.by: found reward, but there is none; set select.reward.command or function")
    if by == "judge" and settings.evaluate.judge.base_url is None:
        raise SettingsError("select.pairs.by: found judge, but there is none; set evaluate.judge.base_url")
    unfit = {
        "select.min_agreement": select.min_agreement is not None,
        "select.reward.min_score": reward.min_score is not None,
        "select.reference": select.reference == "match" and by != "reference",
    }
    if name := next((name for name, is_set in unfit.items() if is_set), None):
        raise SettingsError(
            f"{name}: is set, but would drop the answers that --pairs needs as rejected ones; remove it (pairs are "
            f"decided by the {by}, select.pairs.by)"
        )
    return by


def _connect_judge(layout: ProjectLayout, settings: Settings) -> "JudgeSession | None":
    from ratchet.evaluation.judge import JudgeSession  # imports torch

    return JudgeSession.from_settings(layout, settings)


def _fingerprint_scorer(
    settings: Settings, layout: ProjectLayout, pairs_by: PairScore | None, judge: "JudgeSession | None"
) -> dict[str, str]:
    """Identify what scores the answers: files or function of the reward, or model, rubric and options of the judge."""
    if judge is not None:
        options = settings.evaluate.judge.model_dump(
            mode="json", include={"max_tokens", "temperature", "show_reference"}
        )
        served = {"address": str(judge.endpoint.address), "identity": dict(judge.served.identity)}
        return {
            "judge": digests.hash_json([judge.served.name, served, options]),
            "rubric": digests.hash_bytes(judge.rubric.encode()),
        }
    return {} if pairs_by == "reference" else answer_selection.fingerprint(settings.select.reward, layout.root)


def _require_fitting(outputs: Iterable[GenerationOutput], settings: Settings, reserved: Sequence[str]) -> None:
    """Raise SettingsError if these settings cannot select from an output."""
    for source in outputs:
        generate = source.card.spec.generate
        if settings.select.answer_format == "labels" and not generate.labels:
            raise SettingsError(
                f"select.answer_format: labels, but {source.path.name} was generated without generate.labels"
            )
        if clash := next((name for name in generate.extra_fields if name in reserved), None):
            raise SettingsError(
                f"{source.path.name}: generate.extra_fields names the field {clash!r}, and rows have another field of "
                "that name; rename it in the prompts"
            )


def _select_and_write(selector: AnswerSelector, spec: SelectionSpec, target: Path) -> SelectionCard:
    rows = selector.folder / "rows.jsonl"  # not the name of the output, which may be one of the work files
    selector.write(rows)
    card = SelectionCard(
        spec=spec,
        model_names=tuple(source.card.model_name for source in selector.outputs),
        prompts=selector.prompts,
        answers=selector.tally.answers,
        filters=selector.tally.filters,
        without_reference=selector.without_reference,
        rows=selector.rows,
        prompts_with_rows=selector.prompts_with_rows,
        pairs=selector.pairs,
    )
    if not card.rows:
        raise DataError(f"of {card.answers:,} answers none is left:\n" + "\n".join(format_filters(card)))

    def copy_rows(path: Path) -> None:
        with rows.open("rb") as stream:
            files.write_blocks(path, ([block] for block in iter(lambda: stream.read(2**20), b"")))

    return write_output(target, copy_rows, card)


def format_filters(card: SelectionCard) -> Iterator[str]:
    """Yield a line for each filter that dropped answers, and for each reason why prompts have no pair."""
    if (found := card.pairs) is not None:
        if card.rows:
            yield (
                f"  pairs by {found.by}; the chosen answer is the longer one in {found.longer_chosen:.0%} (mean "
                f"{found.chosen_characters:.0f} characters against {found.rejected_characters:.0f})"
            )
        reasons = {
            "fewer than two different answers": found.single_prompts, "equal scores": found.equal_prompts,
            "differences below select.pairs.min_difference": found.close_prompts,
        }  # fmt: skip
        yield from (
            f"  no pair for {format_count(count, 'prompt')}: {reason}" for reason, count in reasons.items() if count
        )
        if found.duplicates:
            yield f"  left out: {format_count(found.duplicates, 'pair')} like earlier ones"
    for tally in card.filters:
        if tally.dropped:
            examples = f" ({'; '.join(tally.examples[:2])})" if tally.examples else ""
            yield f"  {tally.name.replace('_', ' ')}: {tally.dropped:,} left out, {tally.left:,} left{examples}"
