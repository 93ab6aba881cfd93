"""Proves that a killed evaluation resumes and gives the same bytes."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

import tiny_project
from evaluate_cases import (
    SETTINGS,
    cold,  # noqa: F401 (a fixture)
    evaluated,
    export_of,
    forwards,  # noqa: F401 (a fixture)
    keep_as_champion,
    layout,  # noqa: F401 (a fixture)
    made,  # noqa: F401 (a fixture)
    samples,
)
from ratchet.config import params_file
from ratchet.errors import DataError
from ratchet.stages import evaluate
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import EvaluationReport

PACKAGES = ("evaluation", "stages")


def test_a_champion_on_the_same_base_is_put_on_it_as_an_adapter(layout: ProjectLayout, forwards: list[int]) -> None:
    first = EvaluationReport.load(layout.eval_report)
    was = {name: samples(layout, first, "candidate", name) for name in first.scores["candidate"].samples}
    keep_as_champion(layout, 1)
    subprocess.run(["rm", "-r", str(layout.scores)], check=True)
    export_of(layout, 4)
    report = evaluated(layout)
    assert set(report.scores) == {"base", "candidate", "champion", "anchor"}
    assert len({one.contract for one in report.scores.values()}) == 1
    now = {name: samples(layout, report, "champion", name) for name in report.scores["champion"].samples}
    assert now == was, "to the last bit what it scored as the candidate, on a base loaded for itself"
    assert samples(layout, report, "candidate", "answer_loss") != was["answer_loss"]
    assert report.scores["anchor"] == report.scores["champion"].model_copy(
        update={"samples": report.scores["anchor"].samples}
    )


def test_a_champion_without_its_adapter_is_compared_as_plain_weights(layout: ProjectLayout) -> None:
    champion = keep_as_champion(layout, 1, with_adapter=False)
    export_of(layout, 4)
    report = evaluated(layout)
    assert set(report.scores) == {"base", "candidate", "merged", "champion", "anchor"}
    assert report.scores["champion"].contract == report.scores["merged"].contract
    assert report.scores["champion"].contract != report.scores["candidate"].contract
    assert report.scores["champion"].model_digest == champion.model_digest


def test_killed_in_the_middle_it_goes_on_and_gives_the_same_bytes(
    layout: ProjectLayout, cold: ProjectLayout, made: Path
) -> None:
    environment = tiny_project.environment() | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        tiny_project.command("evaluate"),
        cwd=layout.root,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while sum(path.read_bytes().count(b"\n") for path in layout.scores.glob("*.jsonl")) < 12:
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not layout.evaluate.exists()
    before = {path.name: path.read_bytes() for path in layout.scores.glob("*.jsonl")}
    evaluated(layout)
    for name, content in before.items():
        whole = content[: content.rindex(b"\n") + 1]
        assert (layout.scores / name).read_bytes().startswith(whole), "what was scored before is not scored again"
    assert files.read_manifest(layout.evaluate) == files.read_manifest(ProjectLayout(made).evaluate)


def test_the_candidate_against_itself_wants_its_evaluation(layout: ProjectLayout) -> None:
    export_of(layout, 4)
    with pytest.raises(DataError, match="about another adapter"):
        evaluate.evaluate_again(Project.from_parts(layout, SETTINGS), lambda _: None)


@pytest.mark.parametrize("export_there", [True, False], ids=["of another adapter", "none"])
def test_adapters_are_scored_without_their_export_and_merged_weights_are_not(
    layout: ProjectLayout, export_there: bool
) -> None:
    if export_there:
        tiny_project.adapted(layout, SETTINGS, 9)
    else:
        subprocess.run(["rm", "-r", str(layout.export)], check=True)
    with pytest.raises(DataError, match=r"\(evaluate\.formats has merged\); run `dvc repro export`"):
        evaluated(layout, params_file.apply_changes(SETTINGS, {"evaluate.formats": ["adapter", "merged"]}))
    report = evaluated(layout)
    assert set(report.scores) == {"base", "candidate"}
    assert report.model_digest is None
    assert any("not exported yet" in note for note in report.notes)
    exported = export_of(layout, 9 if export_there else 3)
    again = evaluated(layout)
    assert again.model_digest == exported.model_digest
    assert again.scores == report.scores
    assert not any("not exported yet" in note for note in again.notes)
