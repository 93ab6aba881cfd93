"""Proves with real processes that prompts lead to generated answers and to a report about the answers."""

import json
from pathlib import Path

import pytest

import generations
from fake_answers import of_labels, write
from page_reading import section, table
from ratchet.cli.main import main
from ratchet.cli.report import format_report
from ratchet.config.settings import Settings
from ratchet.stages.project import Project
from ratchet.stages.report import report
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("evaluation", "stages", "inference")


def reported(layout: ProjectLayout, path: Path) -> tuple[str, str]:
    """Return the text for the terminal and the HTML page."""
    target = layout.root / "page.html"
    result = report(Project.from_parts(layout, Settings()), str(path), target)
    return format_report(result), target.read_text(encoding="utf-8")


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_from_prompts_to_a_panel(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = ["wet", "dry as dust"]
    settings = generations.with_generate(
        labels=labels, extra_fields=["topic"], temperature=0.5, samples=2, max_new_tokens=16
    )
    layout = generations.project(tmp_path / "p", settings)
    model = generations.chat_directory(tmp_path / "model")
    rows = [
        {"text": f"is {word}", "label": labels[n % 2], "topic": word[0]} for n, word in enumerate(generations.WORDS)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "so", "label": "damp"}]), "utf-8")
    output = tmp_path / f"a.{ending}"
    words = ["--project", str(layout.root)]
    assert main([*words, "generate", str(prompts), "--model", str(model), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "12 of them have a reference" in said
    assert "references that are not among the 2 generate.labels: 1, such as 'damp'" in said
    assert "of 12 prompts with a reference" in said
    assert said.rstrip().endswith(f"more: ratchet report {output}")
    assert main([*words, "report", str(output)]) == 0
    said = capsys.readouterr().out
    assert "of 2 answers per prompt" in said
    assert "mean average precision" in said
    assert "error rate by topic" in said
    [page] = layout.pages.glob("answers-*.html")
    assert (
        sum(
            int(cells[-1])
            for cells in table(section(page.read_text("utf-8"), "calibration"), "Calibration values").values()
        )
        == 11
    )
    text = page.read_text("utf-8")
    assert all(title in text for title in ("Confusion matrix.", "Precision and recall,", "Reliability."))


def test_two_hundred_labels_stay_readable(project: ProjectLayout) -> None:
    labels = tuple(f"label {number}" for number in range(200))
    path = write(project.root / "a.jsonl", of_labels(labels, 600), labels=labels)
    said, page = reported(project, path)
    assert len(page) < 2_000_000
    assert "by label (the worst 20 of" in said
    assert "most frequently confused, of " in said
    assert len(said.splitlines()) < 80
    assert max(map(len, said.splitlines())) < 200
    assert len(table(section(page, "by-label"), "Worst labels")) == 15
