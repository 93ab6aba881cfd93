"""Tests that runs, trials, versions and groups of seeds are found by name; errors list the existing names."""

from pathlib import Path

import pytest

import trained_runs
from ratchet.errors import DataError, SettingsError
from ratchet.registry import ledger
from ratchet.reports.comparison import MAX_SUBJECTS, ComparisonIndex
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Champion, ChampionFile, Promotion
from ratchet.storage.records.sweep import SweepObjective, SweepReport, Trial
from trained_runs import Training

TRAININGS = trained_runs.seeds(Training(steps=10), 4)
RUNS = [one.spec.run_id for one in TRAININGS]


@pytest.fixture
def names(project: ProjectLayout) -> ComparisonIndex:
    for one in TRAININGS:
        trained_runs.lay(project, one)
    trials = [Trial(number=n, values={}, run_id=run, state="complete") for n, run in enumerate(RUNS[:2])]
    trials.append(Trial(number=2, values={}, run_id=None, state="infeasible", reason="rank: no layer is as wide"))
    files.make_directory(project.sweep("lora"))
    SweepReport(
        study="lora", storage="journal",
        objectives=(SweepObjective(metric="validation_loss", direction="minimize"),), axes=(),
        sampler="", pruner="", versions={}, data_digest="", base_digest="", planned_trials=3, trials=tuple(trials),
    ).save(project.sweep("lora") / "report.json")  # fmt: skip
    first, second = (
        Champion(version=number, model_digest=letter * 64, adapter_digest="0" * 64, run_id=run)
        for number, letter, run in ((1, "1", RUNS[2]), (2, "2", RUNS[3]))
    )
    entry = Promotion(
        id="x", time="2026-01-01T00:00:00Z", action="promote", actor="me", version=1, model_digest="1" * 64,
        adapter_digest="0" * 64, run_id=RUNS[2], previous_version=None, previous=None,
    )  # fmt: skip
    head = ledger.append_entry(project.promotions, entry)
    for twin in ("abc111111111", "abc222222222"):
        files.make_directory(project.runs / twin)
        (project.runs / twin / "journal.jsonl").touch()
    ChampionFile(champion=second, anchor=first, ledger=head.digest).save(project.champion)
    return ComparisonIndex(project)


@pytest.mark.parametrize(
    ("name", "runs", "about"),
    [
        (RUNS[0], [0], ""),
        (RUNS[0][:6], [0], ""),
        ("lora/1", [1], "trial 1 of lora"),
        ("v1", [2], "version 1"),
        ("champion", [3], "version 2"),
        ("anchor", [2], "version 1"),
        (f"{RUNS[0][:6]}+lora/1+v1", [0, 1, 2], ""),
    ],
)
def test_a_name_stands_for_its_trainings(names: ComparisonIndex, name: str, runs: list[int], about: str) -> None:
    found = names.subject(name)
    assert (found.name, found.run_ids) == (name, tuple(RUNS[place] for place in runs))
    assert found.members[0].about == about


def test_labels_trials_and_versions_of_runs(names: ComparisonIndex) -> None:
    found = names.subject("three seeds = lora/0+lora/1")
    assert (found.name, found.run_ids) == ("three seeds", (RUNS[0], RUNS[1]))
    assert names.trials_of(RUNS[1]) == ["lora/1"]
    assert (names.versions_of(RUNS[3]), names.versions_of(RUNS[0])) == ([2], [])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zzzz", "found nothing with this name"),
        (f"{RUNS[1][:5]}x", f"did you mean {RUNS[1]}"),
        ("v7", "versions: v1, v2"),
        ("lora/9", "no trial '9'; it has trials 0 to 2"),
        ("lora/2", "rejected before training (rank: no layer is as wide)"),
        ("laro/1", "did you mean lora?"),
        ("../lora/1", "no sweep with this name"),
        ("lora/", "no trial ''"),
        ("abc", "2 run ids begin with this name: abc111111111, abc222222222"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(names: ComparisonIndex, name: str, said: str) -> None:
    with pytest.raises(DataError) as told:
        names.subject(name)
    assert said in str(told.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["", "v1"], "found an empty name"),
        (["v1", "anchor"], "is the same run as v1"),
        (["v1+v1", "champion"], "names a run twice"),
        (["v1+champion", "champion+v1"], "is the same runs as"),
        (["x=v1", "x=champion"], "two subjects have this name"),
        (["=v1", "champion"], "the label before = is empty"),
        ([f"v{number}" for number in range(MAX_SUBJECTS + 1)], "a page can show at most"),
    ],
)
def test_names_that_make_no_comparison_are_refused(names: ComparisonIndex, given: list[str], said: str) -> None:
    with pytest.raises(SettingsError) as told:
        names.subjects(given)
    assert said in str(told.value)


def test_an_empty_project_says_that_there_is_nothing(project: ProjectLayout, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="runs: none"):
        ComparisonIndex(project).subject("abc")
    with pytest.raises(DataError, match="does not exist yet"):
        ComparisonIndex(project).subject("champion")
