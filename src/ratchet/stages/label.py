"""`ratchet label`: people judge pairs of answers on a local web page; figures and preference pairs from judgements."""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.config.units import format_count
from ratchet.data import token_files
from ratchet.data.conversation import Conversation, extract_text
from ratchet.errors import DataError, SettingsError
from ratchet.evaluation.human_labels import LabelSample, LabelTask, compute_report, make_pairs, make_samples
from ratchet.http_client import is_loopback
from ratchet.inference.answer_selection import open_output, read_prompt_answers
from ratchet.inference.prompts import PromptSource
from ratchet.inference.spec import GenerationCard
from ratchet.quality_gate.evidence import list_candidate_roles, read_answers, read_rows
from ratchet.quality_gate.judgements import differ, read_judgements
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files
from ratchet.storage.digests import SHORT
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import read_card
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationReport, ModelRole, judge_file
from ratchet.storage.records.label import LabelPairsReport, LabelReport, LabelSideReport

TOKEN_VARIABLE = "RATCHET_LABEL_TOKEN"  # noqa: S105 (the name of a variable)
"""Environment variable with the token of the page; without it, each start draws another one."""
REFERENCES: tuple[ModelRole, ...] = ("base", "champion", "anchor")
MIN_TOKEN_CHARACTERS = 16
MIN_ID_CHARACTERS = 4
"""Minimum number of characters of a shortened run id."""


@dataclass(frozen=True)
class LabelPrompt:
    """A prompt with the answer of one side."""

    id: str
    conversation: Conversation
    answer: str
    group: str | None = None


@dataclass(frozen=True)
class LabelSide:
    """The answers of one side."""

    name: str
    digest: str
    prompts: Mapping[str, LabelPrompt]
    """By the digest of the prompt's text, or by row id if both sides are models of the evaluation."""
    role: ModelRole | None = None
    """Role in the evaluation; None for a file."""


def label(  # noqa: PLR0913 (keyword arguments)
    project: Project,
    names: tuple[str, str],
    *,
    prompts: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    rater: str | None = None,
    on_progress: Callable[[str], None] = ignore_progress,
) -> LabelReport:
    """Serve the page until the user presses Ctrl-C; then return the figures.

    Args:
        project: the project; evaluate.seed determines the order of samples and sides.
        names: both sides; see `open_task`.
        prompts: see `open_task`.
        host: address to listen on; any but loopback needs a token, from RATCHET_LABEL_TOKEN or drawn.
        port: port to listen on; 0: any free one.
        rater: name that the page proposes.
        on_progress: receives the address of the page and notes about the samples.

    Raises:
        DataError, SettingsError, DamagedFileError: see `open_task`; or the address cannot be used, or the token is too
            short.
    """
    from ratchet.stages.label_server import LabelServer, LabelSession

    task = open_task(project, names, prompts)
    token = None
    if not is_loopback(host):
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(MIN_TOKEN_CHARACTERS)
        if len(token) < MIN_TOKEN_CHARACTERS:
            raise SettingsError(
                f"{TOKEN_VARIABLE}: found {format_count(len(token), 'character')}; expected at least "
                f"{MIN_TOKEN_CHARACTERS}"
            )
    files.make_directory(project.layout.judgements.parent)
    session = LabelSession(task, project.layout.judgements, project.settings.evaluate.seed)
    for note in describe_task(task):
        on_progress(note)
    with LabelServer(session, host, port, token, rater) as server:
        on_progress(f"{server.address} (Ctrl-C ends; every judgement is saved at once)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            on_progress("stopped")
    return summarize(project, task)


def label_results(project: Project, names: tuple[str, str], prompts: Path | None = None) -> LabelReport:
    """Return the figures of the judgements about two sides. Raises the errors of `open_task`."""
    return summarize(project, open_task(project, names, prompts))


def summarize(project: Project, task: LabelTask) -> LabelReport:
    """Compute the figures of a task from the project's judgements."""
    return compute_report(task, read_judgements(project.layout.judgements), project.settings.evaluate.seed)


def label_pairs(
    project: Project, names: tuple[str, str], output: Path, prompts: Path | None = None
) -> LabelPairsReport:
    """Write preference pairs that `prepare.task: preferences` reads.

    Raises:
        DataError: no sample has a preferred answer; or see `open_task`.
        SettingsError: the output exists or cannot be written; or see `open_task`.
    """
    files.require_writable(output, "--pairs")
    if output.suffix != ".jsonl":
        raise SettingsError(f"--pairs {output}: expected a name that ends in .jsonl")
    if output.exists():
        raise SettingsError(f"--pairs {output}: exists; remove it, or name another file")
    task = open_task(project, names, prompts)
    rows, ties, disagreements, empty = make_pairs(task, read_judgements(project.layout.judgements))
    if not rows:
        raise DataError(
            f"{project.layout.judgements}: no pair can be made of {names[0]} and {names[1]} "
            f"({format_count(ties, 'tie')}, {format_count(disagreements, 'sample')} with different judgements, {empty} "
            "with an empty answer); judge more samples "
            f"with `ratchet label {names[0]} {names[1]}`"
        )
    base.write_lines(output, rows)
    return LabelPairsReport(
        output=str(output), pairs=len(rows), ties=ties, disagreements=disagreements, empty=empty,
        are_test_rows=task.are_test_rows,
    )  # fmt: skip


def describe_task(task: LabelTask) -> list[str]:
    """Return notes about the samples and prompts that do not match."""
    different = format_count(len(task.samples), "prompt")
    notes = [f"{different} with different answers; {task.identical_answers:,} with equal ones"]
    notes += [
        f"left out: {format_count(side.unmatched, 'prompt')} of {side.answers:,} that only {side.name} has"
        for side in task.sides
        if side.unmatched
    ]
    return notes


# Reading both sides.


def open_task(project: Project, names: tuple[str, str], prompts: Path | None = None) -> LabelTask:
    """Read the answers of both sides and match them by prompt.

    Args:
        project: the project.
        names: for each side `base`, `champion`, `anchor`, `candidate` or the id of the evaluated run, all with their
            answers in experiments/evaluate; or a file: an output of `ratchet generate`, or records with prompt and
            answer in columns that `prepare` recognises.
        prompts: file of prompts of outputs of `ratchet generate` whose generation was deleted.

    Raises:
        SettingsError: a name is unknown, or both sides are the same.
        DataError: there are no answers, no common prompts, or all answers are equal.
        DamagedFileError: a file was changed after it was written.
    """
    are_test_rows = not any(_is_file(name) for name in names)
    first, second = (_open_side(project, name, prompts, are_test_rows) for name in names)
    if first.digest == second.digest:
        raise SettingsError(f"{names[0]} and {names[1]} are the same; name two different models or files")
    shared = [key for key in first.prompts if key in second.prompts]
    if not shared:
        examples = (next(iter(side.prompts.values())).conversation.prompt[:60] for side in (first, second))
        raise DataError(
            f"{names[0]} and {names[1]} have no prompt in common (first prompts: "
            f"{' and '.join(map(repr, examples))}); generate both from the same prompts"
        )
    differing = [key for key in shared if differ(first.prompts[key].answer, second.prompts[key].answer)]
    if not differing:
        raise DataError(
            f"{names[0]} and {names[1]} give equal answers to every prompt ({len(shared):,}): nothing to judge"
        )
    samples = make_samples(
        (first.digest, second.digest),
        {
            key: LabelSample(
                prompt=key if are_test_rows else first.prompts[key].id,
                conversation=first.prompts[key].conversation,
                answers=(first.prompts[key].answer, second.prompts[key].answer),
                group=first.prompts[key].group or second.prompts[key].group,
            )
            for key in differing
        },
    )
    sides = (
        LabelSideReport(
            name=side.name, digest=side.digest, answers=len(side.prompts), unmatched=len(side.prompts) - len(shared)
        )
        for side in (first, second)
    )
    judges = _read_judges(project.layout, first.role, second.role) if are_test_rows else {}
    one, other = sides
    return LabelTask((one, other), samples, len(shared) - len(differing), are_test_rows, judges)


def _is_file(name: str) -> bool:
    return bool(Path(name).suffix) or Path(name).is_file()


def _open_side(project: Project, name: str, prompts: Path | None, by_row: bool) -> LabelSide:
    if not _is_file(name):
        return _open_evaluated(project, name, by_row)
    path = Path(name).absolute()
    if path.is_file() and read_card(path, GenerationCard) is not None:
        output = open_output(path, project.layout, project.settings, prompts)
        found = [
            LabelPrompt(prompt.id, prompt.conversation, answers[0].text)
            for prompt, answers in read_prompt_answers([output])
        ]
    else:
        found = _read_file(path, project.settings)
    # A file keeps its judgements when rows are added or moved: each sample has its own answers.
    place = os.path.relpath(path.resolve(), project.root.resolve())
    return LabelSide(name, digests.hash_bytes(place.encode()), _index_prompts(found))


def _read_file(path: Path, settings: Settings) -> list[LabelPrompt]:
    """Read records with prompt and answer."""
    generate = settings.generate.model_copy(update={"extra_fields": (), "labels": (), "skip_invalid": False})
    source = PromptSource(path, settings.model_copy(update={"generate": generate}))
    source.measure()  # refuses invalid records
    found = [
        LabelPrompt(prompt.id, prompt.conversation, prompt.reference)
        for prompt in source.prompts()
        if prompt.reference is not None
    ]
    if not found:
        raise DataError(
            f"{path}: no record has an answer next to its prompt ({source.description}); name an output of `ratchet "
            "generate`, or a file with columns such as prompt and answer"
        )
    return found


def _index_prompts(found: list[LabelPrompt]) -> dict[str, LabelPrompt]:
    """Return the prompts by the digest of their texts; the first one of equal prompts counts."""
    by_text: dict[str, LabelPrompt] = {}
    for prompt in found:
        texts = [[message["role"], extract_text(message)] for message in prompt.conversation.messages]
        by_text.setdefault(digests.hash_json([texts, prompt.conversation.tools]), prompt)
    return by_text


def _open_evaluated(project: Project, name: str, by_row: bool) -> LabelSide:
    """Read the answers of an evaluated model."""
    layout = project.layout
    if not layout.eval_report.exists():
        raise DataError(
            f"{name}: no answers yet, because nothing is evaluated ({layout.eval_report} is missing); run `dvc repro "
            "evaluate`, or name an output of `ratchet generate`"
        )
    files.verify_sealed(layout.evaluate, "evaluation")
    report = EvaluationReport.load(layout.eval_report)
    role = _find_role(report, name, project.settings, layout)
    answers = read_answers(layout, role)
    if not answers:
        raise DataError(f"{name}: the evaluation has no generated answers of {role}; run `dvc repro -f evaluate`")
    conversations = _read_conversations(layout)
    found = [
        LabelPrompt(
            row.id,
            conversations.get(row.id) or Conversation([{"role": "user", "content": row.prompt}]),
            answers[row.id],
            row.group,
        )
        for row in read_rows(layout)
        if row.id in answers
    ]
    by_key = {prompt.id: prompt for prompt in found} if by_row else _index_prompts(found)
    return LabelSide(name, report.scores[role].model_digest, by_key, role)


def _find_role(report: EvaluationReport, name: str, settings: Settings, layout: ProjectLayout) -> ModelRole:
    candidates = list_candidate_roles(report, settings.evaluate.formats)
    is_run = len(name) >= MIN_ID_CHARACTERS and report.run_id.startswith(name)
    if (name == "candidate" or is_run) and candidates:
        return candidates[0]
    if reference := next((role for role in REFERENCES if role == name), None):
        if reference in report.scores:
            return reference
        raise DataError(
            f"{name}: the evaluation has no answers of the {name} (it has {', '.join(report.scores)}); run `dvc repro "
            "evaluate` once there is one"
        )
    if any(path.name.startswith(name) for path in layout.runs.glob("*") if len(name) >= MIN_ID_CHARACTERS):
        raise DataError(
            f"{name}: this run has no answers here, the evaluation is of run {report.run_id}; answer a file of prompts "
            f"with its adapter (`ratchet generate PROMPTS --output {name[:SHORT]}.jsonl`) and name the output"
        )
    raise SettingsError(
        f"{name}: expected candidate or {report.run_id} (the evaluated run), base, champion, anchor, or a file of "
        "answers such as answers.jsonl"
    )


def _read_conversations(layout: ProjectLayout) -> dict[str, Conversation]:
    """Read the prompts of the test rows by id. Ids are digests of content, so equal ids have equal prompts."""
    if not layout.dataset_card.exists():
        return {}
    dataset = token_files.open_split(layout.data, "test").select_columns(["id", "conversation"])
    return {row["id"]: Conversation.from_json(row["conversation"]).context for row in dataset}


def _read_judges(
    layout: ProjectLayout, first: ModelRole | None, second: ModelRole | None
) -> dict[str, dict[str, float]]:
    """Read the scores of the first side by the LLM judges of the evaluation, by judge and row id."""
    report = EvaluationReport.load(layout.eval_report).judge_report
    if report is None or report.candidate not in (first, second):
        return {}
    opponent = second if report.candidate == first else first
    path = layout.evaluate / judge_file(str(opponent))
    if not path.exists():
        return {}
    models = [judge.model for judge in (report, *report.additional_judges)]
    names = [
        model if models.index(model) == number else f"{model} ({number + 1})" for number, model in enumerate(models)
    ]
    scores: dict[str, dict[str, float]] = {name: {} for name in names}
    for line in base.read_lines(path):
        for name, found in zip(names, (line, *line.get("additional_judges", ())), strict=True):
            if found["score"] is not None:
                scores[name][line["id"]] = found["score"] if report.candidate == first else 1 - found["score"]
    return scores
