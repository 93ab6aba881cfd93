"""Tests of `ratchet compare`: its result, text and page, for complete and incomplete trainings."""

import json
import re
from pathlib import Path

import pytest

import gate_cases as cases
import trained_runs
from gate_cases import beside_champion as evaluate
from page_reading import heard, read, section, table
from ratchet.cli.compare import format_comparison
from ratchet.cli.main import main
from ratchet.config.gate import Gate
from ratchet.config.settings import Settings
from ratchet.reports.comparison import EvaluationIndex, ModelEvaluation
from ratchet.stages.compare import compare
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import ModelRole
from trained_runs import HOSTILE, OTHER_DATA, Training

SETTINGS = Settings(gate=Gate(resamples=1000))
FIRST = Training(restarts=((37, 30),), spike=(25, 9.0))
WIDE = trained_runs.seeds(Training(rank=16, floor=0.8, seed=3), 3)


def compared(layout: ProjectLayout, *names: str) -> tuple[str, str]:
    """Return the terminal text and the page of a comparison."""
    result = compare(Project.from_parts(layout, SETTINGS), names, layout.root / "page.html")
    return format_comparison(result), (layout.root / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def runs(project: ProjectLayout) -> tuple[str, str]:
    """Create one training and a group of trainings that differ in the seed and have another rank; return their
    names."""
    for one in (FIRST, *WIDE):
        trained_runs.lay(project, one)
    return FIRST.spec.run_id, "wide=" + "+".join(one.spec.run_id for one in WIDE)


def test_differences_and_figures_are_those_of_journals_and_reports(
    project: ProjectLayout, runs: tuple[str, str]
) -> None:
    text, page = compared(project, *runs)
    differing = table(section(page, "differences"), "Settings, data, base")
    assert differing == {"train.rank": ["8", "16"], "train.alpha": ["16", "32"], "train.seed": ["0", "3, 4, 5"]}
    alike = table(section(page, "differences"), "Settings, data, base, equal")
    assert alike["data"] == ["e" * 12] * 2
    assert not differing.keys() & alike.keys()
    assert re.findall(r"^  (train\.\w+) ", text, re.M) == list(differing)
    assert "They were executed in the same way." in heard(section(page, "differences"))

    found = table(section(page, "figures"), "Figures")
    best = [f"{one.validation_loss(60):.4f}" for one in WIDE]
    assert found["lowest validation loss"] == [f"{FIRST.validation_loss(60):.4f}", ", ".join(best)]
    assert found["steps"] == ["60 of 60", "60 of 60"]
    assert found["input tokens/s"] == ["1,024", "1,024"]
    assert (found["peak memory"], found["forecast"]) == (["300.0 MiB"] * 2, ["250.0 MiB"] * 2)
    assert (found["attempts"], found["repeated steps"]) == (["2", "1"], ["7", "0"])
    for name in found:
        assert name in text


def test_every_plot_has_a_table_and_a_description(project: ProjectLayout, runs: tuple[str, str]) -> None:
    _, page = compared(project, *runs)
    figures = list(section(page, "curves").iter("figure"))
    assert [heard(one.find("figcaption")).split(" nats")[0] for one in figures[:2]] == [
        "Training loss",
        "Validation loss",
    ]  # type: ignore[arg-type]
    assert len(figures) == 5
    for one in figures:
        [drawn] = [box for box in one.iter("div") if box.get("class") == "plot"]
        assert runs[0] in str(drawn.get("aria-label"))
        assert drawn.get("role") == "img"
        assert len(list(one.iter("tr"))) > 3
    numbers = table(figures[0], "Training loss: values")
    assert numbers["60"][0] == f"{FIRST.loss(60):.4g}"
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    for chart in charts:
        assert sum(one["meta"].get("named", False) for one in chart["data"]) == 2
    marks = [mark for one in charts[0]["data"] for mark in one.get("hovertext", ())]
    assert any("resumed" in mark for mark in marks)


def test_events_are_in_a_table_and_equal_inputs_give_equal_bytes(project: ProjectLayout, runs: tuple[str, str]) -> None:
    _, page = compared(project, *runs)
    found = table(section(page, "events"), "Events")
    assert found["37"][0] == runs[0]
    assert "died" in found["37"][1]
    assert "resumed" in found["30"][1]
    assert compared(project, *runs)[1] == page


def test_seeds_on_the_same_validation_rows_are_tested(project: ProjectLayout, runs: tuple[str, str]) -> None:
    trained_runs.score(project, FIRST, 0.6)
    for one in WIDE:
        trained_runs.score(project, one, 0.9)
    text, page = compared(project, *runs)
    assert f"accuracy (validation rows): wide better than {runs[0]}, 0.9 to 0.6" in text
    found = table(section(page, "significance"), "Differences on the same rows")
    assert found["accuracyvalidation rows"][0] == f"✔ wide is better than {runs[0]}"


def test_test_rows_of_a_group_are_noted_as_those_of_one_run(
    project: ProjectLayout, runs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cases.evidence({"base": {"accuracy": cases.right(100)}, "candidate": {"accuracy": cases.right(160)}})
    roles: dict[str, ModelRole] = {FIRST.spec.run_id: "base", WIDE[1].spec.run_id: "candidate"}

    def for_run(self: EvaluationIndex, run_id: str) -> list[ModelEvaluation]:
        chosen = [roles[run_id]] if run_id in roles else []
        return [ModelEvaluation(run_id, role, "here", found.report, found.samples[role]) for role in chosen]

    monkeypatch.setattr(EvaluationIndex, "for_run", for_run)
    text, page = compared(project, *runs)
    assert "accuracy (test rows): wide better than" in text
    note = f"wide: the scores on test rows are those of run {WIDE[1].spec.run_id} alone"
    assert note in text
    assert note in page


def test_trainings_on_different_data_are_noted_and_not_tested(project: ProjectLayout, runs: tuple[str, str]) -> None:
    other = Training(data=OTHER_DATA, objective="dpo")
    trained_runs.lay(project, other)
    for one in (FIRST, other):
        trained_runs.score(project, one, 0.6, request_digest=one.data[:12])
    text, page = compared(project, runs[0], other.spec.run_id)
    assert "These runs were trained on different data (eeeeeeeeeeee, ffffffffffff)" in text
    assert "not tested, they were not scored on the same rows" in text
    assert "different data" in heard(section(page, "differences"))
    assert "Not tested" in heard(section(page, "significance"))
    assert not list(section(page, "significance").iter("table"))
    captions = [heard(one) for one in section(page, "curves").iter("figcaption")]
    assert all("nats per answer token; DPO, per pair of answers" in caption for caption in captions[:2])


def test_a_candidate_is_tested_against_the_champion_under_the_same_contract(
    project: ProjectLayout, runs: tuple[str, str]
) -> None:
    candidate = WIDE[0].spec.run_id
    evaluate(project, runs[0], candidate)
    text, page = compared(project, "champion", candidate)
    assert f"accuracy (test rows): {candidate} better than champion, 85.0 % to 60.0 %" in text
    assert table(section(page, "figures"), "Figures")["promotions, verdicts"][0] == "version 3 (champion)"
    scores = table(section(page, "scores"), "Scores on test rows")
    assert scores["accuracy"][0].startswith("60.0 %")
    assert scores["accuracy"][1].startswith("85.0 %")

    report = cases.EvaluationReport.load(project.eval_report)
    other = {**report.scores, "champion": report.scores["champion"].model_copy(update={"contract": "k2"})}
    evaluate(project, runs[0], candidate, scores=other)
    text, page = compared(project, "champion", candidate)
    assert "not tested, they were scored under different contracts" in text
    assert "under different contracts and are not comparable" in heard(section(page, "scores"))
    assert not list(section(page, "significance").iter("table"))


@pytest.mark.parametrize("state", ["empty", "not started", "half done", "no directory"])
def test_incomplete_trainings_are_shown(project: ProjectLayout, runs: tuple[str, str], state: str) -> None:
    one = Training(seed=9, done=33)
    run_id = trained_runs.lay(project, one)
    journal = project.runs / run_id / "journal.jsonl"
    if state == "empty":
        journal.write_bytes(b"")
    elif state == "not started":
        journal.unlink()
    elif state == "no directory":
        evaluate(project, run_id, runs[0])
        for path in sorted((project.runs / run_id).iterdir()):
            path.unlink()
        (project.runs / run_id).rmdir()
    name = "champion" if state == "no directory" else run_id
    text, page = compared(project, runs[0], name)
    said = {"empty": "not started", "not started": "not started", "half done": "not finished",
            "no directory": "directory not found"}  # fmt: skip
    assert table(section(page, "figures"), "Figures")["state"] == ["finished", said[state]]
    assert said[state] in text or "is not on this machine" in text
    assert len(list(section(page, "curves").iter("figure"))) == 5


def test_two_trainings_without_a_step_have_a_page(project: ProjectLayout) -> None:
    for one in trained_runs.seeds(Training(done=0), 2):
        journal = project.runs / trained_runs.lay(project, one) / "journal.jsonl"
        journal.write_bytes(b"")
    _, page = compared(project, *(one.spec.run_id for one in trained_runs.seeds(Training(), 2)))
    assert "None of the runs has done a step." in heard(section(page, "curves"))


def test_untrusted_text_is_escaped(project: ProjectLayout) -> None:
    hostile = [Training(restarts=((20, 10),), word=HOSTILE), Training(seed=1, restarts=((20, 10),), word="</script>")]
    first, second = (trained_runs.lay(project, one) for one in hostile)
    _, page = compared(project, f"{HOSTILE.replace('=', '').replace('+', '')}={first}", second)
    tree = read(page)
    assert "img" not in {one.tag for one in tree.iter()}
    assert not [name for one in tree.iter() for name in one.attrib if name.startswith("on")]
    assert not re.search(r"[\x00\x1b\u202e]", page)
    own = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", page)
    assert len(re.findall(r"<script", own)) == 7  # five charts, their axes and the script of Ratchet
    assert not re.search(r"https?:|<link|<iframe|@import|url\(", own)
    assert "default-src 'none'" in page


def test_a_dozen_long_trainings_fit_into_three_megabytes(project: ProjectLayout) -> None:
    names = [trained_runs.lay(project, one) for one in trained_runs.seeds(Training(steps=1500), 12)]
    _, page = compared(project, *names)
    assert len(page.encode()) < 3_000_000
    assert "A point summarizes up to" in heard(section(page, "curves"))


def test_the_page_is_in_a_directory_that_git_ignores(project: ProjectLayout, runs: tuple[str, str]) -> None:
    result = compare(Project.from_parts(project, SETTINGS), runs, None)
    [page] = project.pages.iterdir()
    assert result.page == page
    assert str(page) in format_comparison(result)
    assert page.name.startswith("compare-")
    assert re.fullmatch(r"[\w.+-]+\.html", page.name)


def test_bad_names_pages_and_runs_are_messages_and_exit_code_2(
    project: ProjectLayout, runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--project", str(project.root), "compare"]
    for names in ([runs[0]], [runs[0], "nobody"], [runs[0], runs[0][:7]], [runs[0], "v9"], [runs[0], "lora/3"]):
        assert main([*place, *names]) == 2, names
        said = capsys.readouterr().err
        assert said.startswith("ratchet compare: ")
        assert "Traceback" not in said
    assert not project.pages.exists()
    (tmp_path / "file").touch()
    assert main([*place, *runs, "--output", str(tmp_path / "file" / "x.html")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert main([*place, *runs]) == 0
    spec = project.runs / runs[0] / "spec.json"
    files.write_atomic(spec, "{}")
    assert main([*place, *runs]) == 2
    assert str(spec) in capsys.readouterr().err


def test_a_spike_of_one_seed_is_named_where_the_mean_hides_it(project: ProjectLayout) -> None:
    group = trained_runs.seeds(Training(steps=1500), 2)
    group.append(Training(steps=1500, seed=7, spike=(777, 60.0)))
    names = [trained_runs.lay(project, one) for one in group]
    other = trained_runs.lay(project, Training(rank=16))
    _, page = compared(project, f"group={'+'.join(names)}", other)
    assert "Outside the frame: group: 60 in steps 7" in heard(section(page, "curves"))
