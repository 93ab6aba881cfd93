"""Tests of `ratchet report ANSWERS`: terminal figures, and a page that needs no network and no script."""

import re
from pathlib import Path

import pytest

from fake_answers import of_labels, record, write
from page_reading import heard, read, section, table
from ratchet.cli.main import main
from ratchet.cli.report import format_report
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError
from ratchet.stages.project import Project
from ratchet.stages.report import report
from ratchet.storage.layout import ProjectLayout

LABELS = ("billing", "refund", "other")
HOSTILE = "</script><script>alert(1)</script>\x1b[31m"


def reported(layout: ProjectLayout, path: Path) -> tuple[str, str]:
    """Return the terminal text and the page of a report."""
    target = layout.root / "page.html"
    result = report(Project.from_parts(layout, Settings()), str(path), target)
    return format_report(result), target.read_text(encoding="utf-8")


def test_the_page_has_what_the_panel_has(project: ProjectLayout) -> None:
    path = write(project.root / "a.jsonl", of_labels(LABELS, 120), labels=LABELS, extra_fields=["topic", "row"])
    said, page = reported(project, path)
    figures = table(section(page, "figures"), "Figures")
    assert {"accuracy", "expected calibration error", "Brier score"} < set(figures)
    for name, (value, n, *_) in figures.items():
        told = re.search(rf"^  {re.escape(name)}(?: \(0 to 2\))? +(\d\.\d\d\d)\b", said, re.M)
        assert told is not None, name
        assert (value[: len(told[1])], n) == (told[1], "120"), name
    assert set(table(section(page, "by-label"), "Worst labels")) == set(LABELS)
    assert "Confusion matrix of 3 labels" in page
    [curves] = [one for one in section(page, "precision-and-recall").iter("svg") if one.get("role") == "img"]
    assert all(label in str(curves.get("aria-label")) for label in LABELS)
    [diagram] = section(page, "calibration").iter("svg")
    assert "expected calibration error" in str(diagram.get("aria-label"))
    bins = table(section(page, "calibration"), "Calibration values")
    assert sum(int(cells[-1]) for cells in bins.values()) == 120
    assert set(table(section(page, "errors-by-category"), "Error rate by topic")) == {"even", "odd"}
    assert "All 120 answers are valid labels" in heard(section(page, "unparseable-answers"))
    links = {one.get("href") for one in read(page).iter("a")}
    assert links == {f"#{one.get('id')}" for one in read(page).iter("section")}
    assert all(svg.get("aria-label") for svg in read(page).iter("svg") if svg.get("aria-hidden") != "true")
    assert "<script" not in page
    assert "default-src 'none'" in page


def test_labels_may_look_like_markup(project: ProjectLayout) -> None:
    labels = ("$5", "<b>x</b>", "long " * 30 + "end")
    path = write(project.root / "a.jsonl", of_labels(labels, 30), labels=labels)
    _, page = reported(project, path)
    [matrix] = [one for one in section(page, "by-label").iter("table") if str(one.get("class")).startswith("matrix")]
    assert [heard(one) for one in matrix.iterfind("./tbody/tr/th")] == [label.strip() for label in labels]
    assert sum(int(heard(cell) or "0") for cell in matrix.iter("td")) == 30


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.card.json", "head.csv", "x.pdf", "folder", "notes.html", "no/x.html", "f.html"]
)
def test_a_page_takes_the_place_of_nothing_but_a_page(name: str, project: ProjectLayout) -> None:
    path = write(project.root / "a.jsonl", of_labels(LABELS, 9), labels=LABELS)
    for mine in ("head.csv", "notes.html", "no"):
        (project.root / mine).write_text("<!DOCTYPE html>\n<html>mine</html>", encoding="utf-8")
    for folder in ("folder", "f.html"):
        (project.root / folder).mkdir()
    before = {one: one.read_bytes() if one.is_file() else b"" for one in project.root.rglob("*")}
    with pytest.raises(SettingsError, match=rf"--output.*{re.escape(name)}") as refused:
        report(Project.from_parts(project, Settings()), str(path), project.root / name)
    assert ".partial" not in str(refused.value)
    assert {one: one.read_bytes() if one.is_file() else b"" for one in project.root.rglob("*")} == before


def test_a_page_may_be_written_again_and_is_the_same_for_the_same_answers(project: ProjectLayout) -> None:
    path = write(project.root / "a.jsonl", [record(0, "a", "b")])
    report(Project.from_parts(project, Settings()), str(path), None)
    [page] = project.pages.glob("answers-*.html")
    before = page.read_bytes()
    report(Project.from_parts(project, Settings()), str(path), None)
    assert page.read_bytes() == before
    _, first = reported(project, path)
    _, second = reported(project, write(project.root / "b.jsonl", [record(0, "b", "b")]))
    assert first != second


@pytest.mark.parametrize("name", ["small.csv", "../small.csv", "gone.csv", "page.html", "../folder/small.json"])
def test_a_file_that_is_not_an_output_of_generate(name: str, project: ProjectLayout) -> None:
    (project.root / "small.csv").write_text("a,b\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=rf"^{re.escape(name)}: not an output of `ratchet generate`.*\.jsonl or"):
        report(Project.from_parts(project, Settings()), name, None)


def test_help_of_report_mentions_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "an output of generate" in " ".join(capsys.readouterr().out.split())


def test_text_of_a_model_is_escaped(project: ProjectLayout) -> None:
    records = [record(n, HOSTILE, "a", fields={"topic": HOSTILE}) for n in range(3)]
    path = write(project.root / "a.jsonl", records, labels=("a", "b"), extra_fields=["topic"])
    said, page = reported(project, path)
    assert "\x1b" not in said
    assert "\x1b" not in page
    assert "<script" not in page
    assert r"\u001b[31m" in heard(section(page, "unparseable-answers"))


def test_samples_and_free_text_have_sections_of_their_own(project: ProjectLayout) -> None:
    records = [record(n, one, "a", sample=s) for n in range(2) for s, one in enumerate(("a", "b"))]
    said, page = reported(project, write(project.root / "a.jsonl", records, samples=2))
    assert "most frequent answer is right" in said
    assert {"exact match", "token f1"} == set(table(section(page, "figures"), "Figures"))
    assert "most frequent answer is right" in table(section(page, "agreement-among-samples"), "Agreement among samples")
    assert not [one for one in read(page).iter("section") if one.get("id") == "by-label"]
    _, bare = reported(project, write(project.root / "b.jsonl", [record(0, "x", None)]))
    assert "No prompt has a reference" in heard(section(bare, "figures"))


def test_an_output_that_is_not_there_writes_nothing(project: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        report(Project.from_parts(project, Settings()), "gone.jsonl", None)
    assert not project.pages.exists()
    stranger = project.root / "mine.jsonl"
    stranger.write_text("{}\n", encoding="utf-8")
    assert main(["--project", str(project.root), "report", str(stranger)]) == 2
    assert "mine.jsonl.card.json is missing" in capsys.readouterr().err
