"""Proves docs/models.md, "Start from trained weights": every stage accepts a model that was trained from the weights of
another run, and a training that is killed resumes from its own checkpoint. A trial may start from those of another."""

import shutil
from pathlib import Path

import tiny_project
import tiny_sweep
from ratchet.config.sweep import PrunerSettings
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.training import TrainReport
from resume_cases import steps_after, wait_for
from sweep_cases import (
    of_mlflow,
    project,  # noqa: F401 (a fixture)
    template,  # noqa: F401 (a fixture)
)
from tiny_project import outcome

PACKAGES = ("training", "exporters", "models", "tuning")


def test_a_run_from_trained_weights_is_killed_resumed_exported_and_evaluated(tmp_path: Path) -> None:
    project = tiny_project.prepared(tmp_path / "project")
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 0, done.stderr
    source = TrainReport.load(project.train_report).run_id
    train = tiny_project.TRAIN.model_copy(update={"init_adapter": source, "learning_rate": 0.003})
    tiny_project.save(project, tiny_project.SETTINGS.model_copy(update={"train": train}))
    copy = ProjectLayout(tmp_path / "copy")
    shutil.copytree(project.root, copy.root)
    for layout, is_killed in ((project, False), (copy, True)):
        if is_killed:
            process = tiny_project.start_training(layout)
            assert wait_for(layout, process, steps_after(5))
            process.kill()
            process.communicate()
        done = tiny_project.ratchet(layout, "train")
        assert done.returncode == 0, done.stderr
    assert TrainReport.load(project.train_report).run_id != source
    assert outcome(copy) == outcome(project)
    for stage in ("export", "evaluate"):
        done = tiny_project.ratchet(project, stage)
        assert done.returncode == 0, done.stderr


def test_a_warm_clone_starts_from_the_weights_of_its_trial_and_can_be_adopted(project: ProjectLayout) -> None:
    def request(*arguments: str) -> str:
        done = tiny_project.ratchet(project, "sweep", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    wanted = tiny_sweep.settings(trials=1, pruner=PrunerSettings(kind="none"))
    tiny_project.save(project, wanted)
    request()
    request("--clone", "0", "--warm")
    request()
    source, warm = tiny_sweep.report(project).trials
    assert (warm.state, warm.request and warm.request.trial) == ("complete", 0)
    assert {**source.values, "train.init_adapter": warm.values["train.init_adapter"]} == warm.values
    assert next(iter(warm.curve.values())) < next(iter(source.curve.values()))
    query = "select value from tags join runs using (run_uuid) where key = 'ratchet.trial_clone'"
    [clone] = [text for (text,) in of_mlflow(project, query) if text]
    assert clone.startswith("clone of trial 0 of study sweep, from the weights in experiments/start_weights/")
    adopted = request("--adopt", str(warm.number))
    assert f"init_adapter: {warm.values['train.init_adapter']}" in adopted
    assert "finds this run already trained; train.init_adapter now applies to trials without it" in adopted
    assert "git ignores experiments/start_weights: copy it to other machines, or `git add -f`" in adopted
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 0, done.stderr
    assert TrainReport.load(project.train_report).run_id == warm.run_id
