"""`ratchet report`: a page about one training, or about a generation's answers. Changes none of the files it reads."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.evaluation.answer_analysis import is_output, read_generation
from ratchet.inference.output import OUTPUT_ENDINGS
from ratchet.quality_gate.evidence import read_rows
from ratchet.reports import comparison, comparison_page, run_page
from ratchet.reports.comparison import (
    CURRENT,
    JOINED,
    LABELLED,
    MOST_POINTS,
    NAME_SYNTAX,
    ComparisonIndex,
    ComparisonSide,
    EvaluationIndex,
    SubjectScores,
)
from ratchet.reports.run_page import RunEvaluation, RunProvenance
from ratchet.reports.sample_browser import REFERENCES
from ratchet.runs import directory
from ratchet.stages.project import Project
from ratchet.storage import html
from ratchet.storage.digests import revision_tags
from ratchet.storage.html import NONE
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import answers_file, curves_file
from ratchet.storage.records.gate import Verdict

CHECKED_OUT = {
    "git.revision": "Git, checked out now", "dvc.lock": "dvc.lock, checked out now", "dvc.base": "DVC, base",
    "dvc.prepare": "DVC, data",
}  # fmt: skip
"""Labels of the revisions that are checked out now; the run itself records only the code version."""


class ReportResult(Record):
    """Result of `ratchet report`."""

    title: str
    figures: dict[str, str]
    """The final figures as text, by name."""
    page: Path
    text: str = ""
    """Analysis of the answers of a generation; empty for a training."""


def report(project: Project, name: str | None = None, output: Path | None = None) -> ReportResult:
    """Write a page about a training, or about the answers of a generation.

    Args:
        project: the project; section gate of its settings defines the tests of differences.
        name: a training (see reports/comparison.py), or an output of `ratchet generate`; None: the latest run.
        output: the page; None: experiments/pages/report-RUN.html, or answers-GENERATION.html.

    Raises:
        DataError: `name` matches nothing, or more than one training; or the project has no runs yet.
        SettingsError: `name` is a group of seeds (use `ratchet compare`) or a file that is not an output of `ratchet
            generate`, or the page cannot be written.
        DamagedFileError: a file was changed after it was written.
    """
    layout, settings = project.layout, project.settings
    if output is not None:
        html.require_writable_target(output)
    if name is not None and is_output(name):
        return _write_answers_page(layout, settings, Path(name), output)
    if name is not None and Path(name.rpartition(LABELLED)[2]).suffix:  # runs, trials and versions have no ending
        raise SettingsError(
            f"{name}: not an output of `ratchet generate`, which is a file that ends in "
            f"{' or '.join(OUTPUT_ENDINGS)} with its card next to it; to see a training, {NAME_SYNTAX}"
        )
    if name is not None and JOINED in name:
        raise SettingsError(f"{name}: a report is about one training; `ratchet compare` compares groups")
    if name is None:
        newest = directory.find_newest_run(layout.runs)
        if newest is None:
            raise DataError(f"{layout.runs}: no run yet; `dvc repro` starts one")
        name = newest.root.name
    index = ComparisonIndex(layout)
    evaluations = EvaluationIndex(layout, index)
    side = comparison.read_side(layout, index.subject(name), index, evaluations, MOST_POINTS)
    target = output or layout.pages / f"report-{side.runs[0].run_id}.html"
    evaluation = _load_run_evaluation(layout, settings, side, evaluations)
    run_page.write(side, evaluation, _load_provenance(layout, side, target), target)
    figures = {name: value for name, [value] in comparison_page.summarize_sides([side]) if value != NONE}
    return ReportResult(title=f"run {side.runs[0].run_id}", figures=figures, page=target)


def _write_answers_page(layout: ProjectLayout, settings: Settings, path: Path, output: Path | None) -> ReportResult:
    """Write the page about the answers of a generation."""
    from ratchet.evaluation import answer_analysis
    from ratchet.reports import answers_page

    answers = read_generation(path.absolute(), settings.prepare.task)
    analysis = answer_analysis.analyze_answers(answers, settings.evaluate.seed)
    target = output or layout.pages / f"answers-{analysis.answers.card.id}.html"
    html.write(target, answers_page.render(analysis))
    text = answer_analysis.format_analysis(analysis)
    return ReportResult(title=f"generation {analysis.answers.card.id}", figures={}, page=target, text=text)


def _load_run_evaluation(
    layout: ProjectLayout, settings: Settings, side: ComparisonSide, evaluations: EvaluationIndex
) -> RunEvaluation | None:
    """Load the evaluation with its rows, or only the figures if it was stored with a registered version."""
    evaluation = next(iter(side.evaluations), None)
    if evaluation is None:
        return None
    if evaluation.place != CURRENT:
        return RunEvaluation(evaluation.report, evaluation.role)
    roles = [role for role in REFERENCES if role != evaluation.role and role in evaluation.report.scores]
    references = [evaluations.role_scores(role) for role in roles]
    subjects = [SubjectScores(scores.role, [scores], []) for scores in (evaluation, *references)]
    findings, _ = comparison.compare_pairs(subjects, settings.gate, only=evaluation.role)
    answers_path = layout.evaluate / answers_file(evaluation.role)
    answers = {row["id"]: row["answers"] for row in base.read_lines(answers_path)} if answers_path.exists() else {}
    return RunEvaluation(
        evaluation.report, evaluation.role, findings, read_rows(layout), answers, evaluation.samples,
        _read_json(layout.evaluate / f"confusion/{evaluation.role}.json"),
        _read_json(layout.evaluate / curves_file(evaluation.role)),
    )  # fmt: skip


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a file of stage evaluate; None if it does not exist."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content


def _load_provenance(layout: ProjectLayout, side: ComparisonSide, target: Path) -> RunProvenance:
    run = side.runs[0]
    tags = revision_tags(layout.root)
    checkout = {label: tags[key][:40] for key, label in CHECKED_OUT.items() if key in tags}
    if tags.get("git.dirty") == "true":
        checkout[CHECKED_OUT["git.revision"]] += ", with changes"
    card = page = gate = None
    with suppress(DataError, DamagedFileError):  # no data, or damaged ones
        is_current = run.spec is not None and DatasetCard.load(layout.dataset_card).digest == run.spec.data_digest
        if is_current and layout.dataset_page.exists():
            card = _relative_link(layout.dataset_page, target)
    if run.paths.page.exists():
        page = _relative_link(run.paths.page, target)
    if layout.verdict.exists() and Verdict.load(layout.verdict).run_id == run.run_id:
        gate = _relative_link(layout.gate_page, target)
    return RunProvenance(checkout, card, page, gate)


def _relative_link(path: Path, target: Path) -> str:
    """Return a relative link from one page to another, so that the project can be moved."""
    return Path(os.path.relpath(path, target.resolve().parent)).as_posix()
