"""Proves the README's sentence "every trial is accounted for, none is trained twice" for sweeps with
killed workers and a killed machine."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

import tiny_project
import tiny_sweep
from ratchet.config import params_file
from ratchet.config.sweep import FinalistSettings, ObjectiveSettings, PrunerSettings, SweepParameter
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import ObjectiveSet
from ratchet.storage.records.sweep import SweepReport
from sweep_cases import (
    of_mlflow,
    project,  # noqa: F401 (a fixture)
    template,  # noqa: F401 (a fixture)
)
from tiny_sweep import SPACE

PACKAGES = ("tuning", "stages")
PRUNERS = pytest.mark.parametrize(
    "pruner",
    [PrunerSettings(kind="asha", min_resource_fraction=0.25), PrunerSettings(kind="freeze_thaw")],
    ids=["asha", "freeze_thaw"],
)


def attempts(layout: ProjectLayout, run_id: str | None) -> int:
    """Return the number of trainer processes that were started for a run."""
    events = JournalReader(layout.runs / str(run_id) / "journal.jsonl").read()
    return sum(event.kind == "attempt_started" for event in events)


def tags(layout: ProjectLayout, key: str) -> dict[str, str]:
    """Return the values of a tag by the name of the run."""
    query = "select runs.name, tags.value from tags join runs using (run_uuid) where tags.key = "
    return dict(of_mlflow(layout, f"{query}'{key}'"))


@PRUNERS
def test_workers_are_killed_and_every_trial_is_accounted_for(project: ProjectLayout, pruner: PrunerSettings) -> None:
    wanted = tiny_sweep.settings(trials=5, pruner=pruner, finalists=FinalistSettings(top_k=2, seeds=2))
    tiny_project.save(project, wanted)
    sweep = tiny_sweep.begin(project, "--workers", "2")
    for kill in range(1, 4):
        tiny_sweep.until(lambda kill=kill: tiny_sweep.steps_done(project.runs) > 4 * kill, sweep)  # type: ignore[misc]
        victims = tiny_sweep.processes_of(f"ratchet.tuning.sweep_worker {project.root}")
        os.kill(victims[-1], signal.SIGKILL)
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == 0, output
    found = tiny_sweep.report(project)
    assert [trial.number for trial in found.trials] == list(range(len(found.trials)))
    assert sum(trial.continues is None for trial in found.trials) == 5
    assert {trial.state for trial in found.trials} <= {"complete", "pruned"}
    assert sum(len(trial.executions) - 1 for trial in found.trials) >= 1, "no trial was taken over"
    assert len({json.dumps(trial.values) for trial in found.trials if trial.continues is None}) == 5
    assert found.final_round is not None
    assert [len(finalist.run_ids) for finalist in found.final_round.finalists] == [2, 2]
    _the_study_is_over(project, found)
    _mlflow_has_two_levels(project, found)
    _the_gate_knows_the_rows(project)
    _the_winner_is_adopted_and_not_trained_again(project, found)


def _the_study_is_over(project: ProjectLayout, found: SweepReport) -> None:
    """Check that the same command does nothing: the setting counts all trials of the study, and all are done."""
    before = {trial.run_id: attempts(project, trial.run_id) for trial in found.trials}
    again = tiny_project.ratchet(project, "sweep", "--workers", "2")
    assert again.returncode == 0, again.stderr
    assert tiny_sweep.told(tiny_sweep.report(project).trials) == tiny_sweep.told(found.trials)
    assert {trial.run_id: attempts(project, trial.run_id) for trial in found.trials} == before


def _mlflow_has_two_levels(project: ProjectLayout, found: SweepReport) -> None:
    [(parent, status)] = of_mlflow(project, "select run_uuid, status from runs where name = 'sweep'")
    assert status == "FINISHED"
    names = dict(of_mlflow(project, "select name, status from runs where name != 'sweep'"))
    assert tags(project, "mlflow.parentRunId") == dict.fromkeys(names, parent)
    superseded = {trial.continues for trial in found.trials}
    for trial in found.trials:
        if trial.number not in superseded:
            # A worker that is killed may have completed a training that another one then counts as pruned.
            is_complete = (project.runs / trial.run_id / "result" / "train.json").exists()
            assert is_complete or trial.state == "pruned"
            assert names[f"trial {trial.number}"] == ("FINISHED" if is_complete else "KILLED"), trial
            assert tags(project, "ratchet.trial_state")[f"trial {trial.number}"] == trial.state


def _the_gate_knows_the_rows(project: ProjectLayout) -> None:
    """Check that models are chosen by validation rows and never by rows of the gate."""
    from ratchet.data import token_files

    noted = set(ObjectiveSet.load(project.objectives / "sweep.json").sample_ids)
    assert noted == set(token_files.open_split(project.data, "validation")["id"])
    assert not noted & set(token_files.open_split(project.data, "test")["id"])


def _the_winner_is_adopted_and_not_trained_again(project: ProjectLayout, found: SweepReport) -> None:
    text = project.params.read_text(encoding="utf-8")
    assert found.winner is not None
    winner = found.trials[found.winner]
    project.params.write_text(text.replace("  rank: 4\n", "  rank: 4  # mine\n"), encoding="utf-8")
    done = tiny_project.ratchet(project, "sweep", "--adopt")
    assert done.returncode == 0, done.stderr
    assert "finds this run already trained" in done.stdout
    settings = params_file.load(project.params)
    assert {key: getattr(settings.train, key.removeprefix("train.")) for key in winner.values} == winner.values
    written = project.params.read_text(encoding="utf-8")
    assert "# mine" in written
    changed = [line for line in written.splitlines() if line not in text.splitlines()]
    assert len(changed) <= len(winner.values) + 1
    before = attempts(project, winner.run_id)
    trained = tiny_project.ratchet(project, "train")
    assert trained.returncode == 0, trained.stderr
    assert f"run {winner.run_id}: trained before" in trained.stdout
    assert attempts(project, winner.run_id) == before


@PRUNERS
def test_power_loss_changes_nothing_one_worker_and_a_seed_give_the_same_trials(
    project: ProjectLayout, template: ProjectLayout, tmp_path: Path, pruner: PrunerSettings
) -> None:
    wanted = tiny_sweep.settings(pruner=pruner)
    tiny_project.save(project, wanted)
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stderr
    shutil.copytree(template.root, tmp_path / "broken")
    broken = ProjectLayout(tmp_path / "broken")
    tiny_project.save(broken, wanted)
    for kill in range(1, 3):
        sweep = tiny_sweep.begin(broken)
        tiny_sweep.until(lambda kill=kill: tiny_sweep.steps_done(broken.runs) > 5 * kill, sweep)  # type: ignore[misc]
        tiny_sweep.kill_all(broken, sweep)
    resumed = tiny_project.ratchet(broken, "sweep")
    assert resumed.returncode == 0, resumed.stderr
    whole, other = tiny_sweep.report(project), tiny_sweep.report(broken)
    assert tiny_sweep.told(other.trials) == tiny_sweep.told(whole.trials)
    assert sum(len(trial.executions) for trial in other.trials) > len(other.trials)


def test_trials_that_cannot_be_teach_the_study_and_do_not_end_it(project: ProjectLayout) -> None:
    space = {
        "train.learning_rate": SweepParameter(choices=(0.01, 1e30)),
        "train.adapter_dtype": SweepParameter(choices=("float32", "float16")),
    }
    chosen = tiny_sweep.settings(space=space, trials=9, max_repeated_failures=4, pruner=PrunerSettings(kind="none"))
    tiny_project.save(project, chosen)
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    found = tiny_sweep.report(project)
    knobs = ("train.learning_rate", "train.adapter_dtype")
    by_values = {tuple(trial.values[parameter] for parameter in knobs): trial for trial in found.trials}
    assert len(by_values) == len(found.trials) == 4, "the space has four points, each tried once"
    assert by_values[0.01, "float32"].state == "complete"
    diverged, refused = by_values[1e30, "float32"], by_values[0.01, "float16"]
    assert (diverged.state, diverged.cause, diverged.constraints) == ("infeasible", "diverged", {"diverged": 1.0})
    assert (refused.state, refused.run_id, refused.constraints) == ("infeasible", None, {"settings": 1.0})
    assert "train.adapter_dtype: with float16" in refused.reason
    failed = of_mlflow(project, "select count(*) from runs where status = 'FAILED'")
    assert failed == [(3,)]


def test_the_same_failure_again_and_again_stops_the_sweep_with_the_diagnosis(project: ProjectLayout) -> None:
    space = {**SPACE, "train.target_modules": SweepParameter(choices=("no_such_layer",))}
    tiny_project.save(project, tiny_sweep.settings(space=space, trials=9, max_repeated_failures=2))
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 trials failed for the same reason" in done.stderr
    assert "no_such_layer" in done.stderr
    assert Counter(trial.state for trial in tiny_sweep.report(project).trials) == {"failed": 2}
    assert of_mlflow(project, "select status from runs where name = 'sweep'") == [("FAILED",)]
    again = tiny_project.ratchet(project, "sweep")
    assert again.returncode == 1
    assert "the sweep had stopped: 2 trials failed" in again.stdout
    assert Counter(trial.state for trial in tiny_sweep.report(project).trials) == {"failed": 4}


def test_a_value_that_the_base_cannot_have_is_infeasible(project: ProjectLayout) -> None:
    space = {"train.target_modules": SweepParameter(choices=("no_such_layer", "all"))}
    chosen = tiny_sweep.settings(space=space, trials=2, max_repeated_failures=1, pruner=PrunerSettings(kind="none"))
    tiny_project.save(project, chosen)
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    by_value = {trial.values["train.target_modules"]: trial for trial in tiny_sweep.report(project).trials}
    assert by_value["all"].state == "complete"
    refused = by_value["no_such_layer"]
    assert (refused.state, refused.cause, set(refused.constraints)) == ("infeasible", "data", {"settings"})


def test_objectives_may_be_several_and_ask_for_answers(project: ProjectLayout) -> None:
    aims = (ObjectiveSettings(metric="accuracy"), ObjectiveSettings(metric="adapter_bytes"))
    chosen = tiny_sweep.settings(objectives=aims, trials=2, pruner=PrunerSettings(kind="none"), generation_rows=12)
    tiny_project.save(project, chosen)
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    found = tiny_sweep.report(project)
    for trial in found.trials:
        accuracy, size = trial.objectives
        assert 0 <= accuracy <= 1
        [weights] = (project.runs / str(trial.run_id) / "result" / "adapter").glob("*.safetensors")
        assert size == weights.stat().st_size
    assert set(found.best) <= {0, 1}
    assert found.winner is None
    if len(found.best) > 1:
        assert "choose a trial of the Pareto front: 0, 1" in tiny_project.ratchet(project, "sweep", "--adopt").stderr


def test_a_space_that_was_edited_is_refused_with_the_difference_and_forked(project: ProjectLayout) -> None:
    none = PrunerSettings(kind="none")
    tiny_project.save(project, tiny_sweep.settings(trials=2, pruner=none))
    assert tiny_project.ratchet(project, "sweep").returncode == 0
    wider = {**SPACE, "train.rank": SweepParameter(low=2, high=16, log=True)}
    tiny_project.save(project, tiny_sweep.settings(trials=1, space=wider, pruner=none))
    refused = tiny_project.ratchet(project, "sweep")
    assert refused.returncode == 2
    assert "space.train.rank.high: 8 -> 16" in refused.stderr
    assert "--fork" in refused.stderr
    forked = tiny_project.ratchet(project, "sweep", "--fork")
    assert forked.returncode == 0, forked.stderr
    old, new = tiny_sweep.report(project), tiny_sweep.report(project, "sweep.2")
    assert [trial.run_id for trial in new.trials[:2]] == [trial.run_id for trial in old.trials]
    assert len(new.trials) == 3, "those that were taken over come on top of sweep.trials"
    tiny_project.save(project, tiny_sweep.settings(trials=2, pruner=none))
    back = tiny_project.ratchet(project, "sweep", "--report")
    assert back.returncode == 0, back.stderr
    assert back.stdout.startswith("sweep: 2 of 2 trials (2 complete)\n")
