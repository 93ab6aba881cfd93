"""Tests of `ratchet report`: the page of a training, complete or not, evaluated or not."""

import json
import re
from pathlib import Path

import pytest

import gate_cases as cases
import trained_runs
from gate_cases import beside_champion as evaluate
from page_reading import heard, read, section, table
from ratchet.cli.main import main
from ratchet.cli.report import format_report
from ratchet.config.gate import Gate
from ratchet.config.settings import Settings
from ratchet.errors import DataError, SettingsError
from ratchet.reports import pages
from ratchet.runs.directory import RunPaths
from ratchet.stages.project import Project
from ratchet.stages.report import report
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import curves_file
from trained_runs import HOSTILE, Training

SETTINGS = Settings(gate=Gate(resamples=1000))
ONE = Training(restarts=((37, 30),), spike=(25, 9.0))
RUN = ONE.spec.run_id


@pytest.fixture
def trained(project: ProjectLayout) -> ProjectLayout:
    trained_runs.lay(project, ONE)
    return project


def reported(layout: ProjectLayout, name: str | None = None) -> tuple[str, str]:
    """Return the terminal text and the page of a report."""
    result = report(Project.from_parts(layout, SETTINGS), name, layout.root / "page.html")
    return format_report(result), (layout.root / "page.html").read_text(encoding="utf-8")


def facts(page: str, name: str) -> dict[str, str]:
    """Return the names and values in a section of the page."""
    found: dict[str, str] = {}
    for listed in section(page, name).iter("dl"):
        found |= {heard(listed[k]): heard(listed[k + 1]) for k in range(0, len(listed), 2)}
    return found


def test_the_page_has_all_of_the_training(trained: ProjectLayout) -> None:
    text, page = reported(trained)
    assert text.startswith(f"run {RUN}\n")
    figures = facts(page, "figures")
    assert figures["lowest validation loss"] == f"{ONE.validation_loss(60):.4f}"
    assert (figures["attempts"], figures["repeated steps"], figures["state"]) == ("2", "7", "finished")
    assert facts(page, "settings")["train.rank"] == "8"
    assert facts(page, "settings")["base model"] == "acme/model"
    assert "37" in table(section(page, "events"), "Events")
    memory = table(section(page, "memory"), "Phases")
    assert memory["steady"][1:] == ["250.0 MiB", "300.0 MiB", "-16.7%"]
    lineage = facts(page, "lineage")
    assert (lineage["Base model"], lineage["Licence"]) == ("acme/model, revision 0123abcd", "apache-2.0")
    assert lineage["Code"] == "0.1.0+c0de"
    assert "The run was not evaluated" in heard(section(page, "evaluation"))
    assert "The gate has not judged this run, and it was not promoted" in heard(section(page, "registry"))
    for one in section(page, "curves").iter("figure"):
        [drawn] = [box for box in one.iter("div") if box.get("class") == "plot"]
        assert RUN in str(drawn.get("aria-label"))
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert [len(one["data"][-1]["text"]) for one in charts] == [2] * 5, "each chart has both events"
    assert "Symbols on the axis: ↻ resumed, ✕ died." in heard(section(page, "curves"))


def with_labels(layout: ProjectLayout) -> None:
    """Write an evaluation of the training and a champion, with rows, a confusion matrix and curves."""
    evaluate(layout, "another", RUN)
    found = cases.evidence(
        {"base": {"accuracy": cases.right(20)},
         "candidate": {"accuracy": cases.right(170), "answer_loss": cases.spread(1.0)}}
    )  # fmt: skip
    label = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 100.0, "average_precision": 0.7}
    scores = dict(found.report.scores)
    scores["candidate"] = scores["candidate"].model_copy(update={"per_class": {"yes": label, HOSTILE: label}})
    cases.write_evaluation(layout, cases.with_report(found, run_id=RUN, scores=scores))
    with files.sealed_directory(layout.root / "more", "evaluation") as scratch:
        files.link_tree(layout.evaluate, scratch)
        files.write_json(
            scratch / "confusion/candidate.json", {"labels": ["yes", HOSTILE], "matrix": [[90, 7, 3], [0, 100, 0]]}
        )
        curve = {"precision": [0.5, 0.9, 1.0], "recall": [1.0, 0.5, 0.0], "average_precision": 0.7}
        files.write_json(
            scratch / curves_file("candidate"), {"yes": curve, HOSTILE: {**curve, "average_precision": 0.9}}
        )
    files.remove_sealed(layout.evaluate)
    (layout.root / "more").rename(layout.evaluate)


def test_the_evaluation_is_shown_with_its_worst_samples(trained: ProjectLayout) -> None:
    with_labels(trained)
    _, page = reported(trained)
    evaluation = section(page, "evaluation")
    assert table(evaluation, "Metrics")["accuracyhigher is better, proportion, n 200, chance 25.0 %"][1].startswith(
        "85.0 %"
    )
    rows = table(evaluation, "Differences on the same rows")
    assert rows["accuracytest rows"][0] == "✔ candidate is better than base"
    assert table(evaluation, "Worst labels")["yes"][1:5] == ["0.500", "0.500", "0.500", "0.700"]
    matrix = next(one for one in evaluation.iter("figure") if heard(one).startswith("Confusion matrix"))
    told = {str(one.get("title")) for one in matrix.iter("td")}
    assert {"yes: 90 of 100 answered yes", "yes: 3 of 100 answered other"} <= told
    lines = next(one for one in evaluation.iter("figure") if heard(one).startswith("Precision and recall"))
    assert len([line for line in lines.iter("polyline") if line.get("points")]) == 2
    losses = cases.spread(1.0)
    worst = max(losses, key=lambda sample: losses[sample])
    first = next(iter(evaluation.iter("article")))
    assert f"Question {worst}?" in heard(first)
    assert len(list(evaluation.iter("article"))) == 20
    tree = read(page)  # the texts of rows and labels are not parsed as HTML
    assert "img" not in {one.tag for one in tree.iter()}
    assert not [name for one in tree.iter() for name in one.attrib if name.startswith("on")]


def test_an_adapter_that_is_champion_is_marked(trained: ProjectLayout) -> None:
    evaluate(trained, RUN, "another")
    _, page = reported(trained, "champion")
    assert "version 3 (champion)" in heard(section(page, "registry"))
    assert table(section(page, "evaluation"), "Differences on the same rows")["accuracytest rows"][0] == (
        "✔ champion is better than base"
    )


def test_the_data_card_is_linked_while_it_is_that_of_the_training(trained: ProjectLayout) -> None:
    assert "its card is not available" in facts(reported(trained)[1], "lineage")["Data"]
    files.make_directory(trained.data)
    trained.dataset_page.touch()
    files.write_json(trained.dataset_card, {
        "digest": trained_runs.DATA, "sources": {}, "base_digest": "b", "task": "text", "rows_in": 1, "rows_out": 1,
        "dropped": {}, "splits": {}, "lengths": {}, "labels": {},
    })  # fmt: skip
    _, page = reported(trained)
    links = [one.get("href") for one in section(page, "lineage").iter("a")]
    assert links == ["experiments/data/card.html"]
    assert (trained.root / "page.html").parent.joinpath(str(links[0])).exists()


def test_an_unfinished_training_has_a_page(project: ProjectLayout) -> None:
    for done in (0, 7):
        run_id = trained_runs.lay(project, Training(done=done, seed=done))
        text, page = reported(project, run_id)
        assert "not finished" in text
        assert facts(page, "figures")["state"] == "not finished"
        assert heard(section(page, "lineage"))
        with RunPaths(project.runs / run_id).lock().acquire():
            text, page = reported(project, run_id)
        assert "running" in text
        assert facts(page, "figures")["state"] == "running"
    empty = Training(done=0).spec.run_id
    (project.runs / empty / "journal.jsonl").write_bytes(b"")
    assert "The run has not done a step." in reported(project, empty)[1]


def test_the_page_is_next_to_others_and_stays_small(project: ProjectLayout) -> None:
    one = Training(steps=20_000, spike=(7_777, 50.0))
    run_id = trained_runs.lay(project, one)
    text = format_report(report(Project.from_parts(project, SETTINGS), None, None))
    page = project.pages / f"report-{run_id}.html"
    assert str(page) in text
    assert page.stat().st_size < 2_100_000, "2 MB of it are Plotly"
    assert "50 in steps 7,744 to 7,807" in page.read_text(encoding="utf-8")


def test_names_without_a_run_are_refused(project: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="no run yet"):
        report(Project.from_parts(project, SETTINGS), None, None)
    trained_runs.lay(project, ONE)
    with pytest.raises(SettingsError, match="ratchet compare"):
        report(Project.from_parts(project, SETTINGS), f"{RUN}+{RUN}", None)
    assert main(["--project", str(project.root), "report", "nobody"]) == 2
    assert "found nothing with this name" in capsys.readouterr().err
    assert main(["--project", str(project.root), "report", RUN, "--output", str(Path(project.root))]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_confusion_matrix_of_many_labels_stays_small() -> None:
    labels = [f"label {number}" for number in range(150)]
    matrix = [[1 + (row == column) * 50 for column in range(150)] for row in range(150)]
    drawn = str(pages.macros().confusion(pages.describe_confusion(labels, matrix)))
    assert len(drawn) < 700_000
    assert drawn.count('class="right"') == 150
    many = pages.describe_confusion(labels * 2, [[1] * 300] * 300)
    assert "too many for a plot" in pages.macros().confusion(many)
