"""The Python API: a notebook imports it, trains with it and reads runs with it."""

import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import machines
import ratchet
import tiny_project
from ratchet import api, errors
from ratchet.runs.journal import JournalEvent
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("stages", "cli")


class Recorder:
    """A callback that keeps the kinds of events that it receives."""

    name = "recorder"

    def __init__(self, run: ratchet.Run) -> None:
        self.run, self.kinds, self.status = run, [], ""

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        self.kinds += [event.kind for event in events]

    def on_end(self, status: str) -> None:
        self.status = status


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[ratchet.Project, ratchet.Run, list[Recorder]]:
    layout = tiny_project.prepared(tmp_path_factory.mktemp("api") / "project")
    project, recorders = ratchet.Project(layout.root), []

    def create(run: ratchet.Run) -> Recorder:
        recorders.append(Recorder(run))
        return recorders[-1]

    return project, ratchet.train(project, callbacks=[create]), recorders


def test_every_public_name_exists_and_is_documented() -> None:
    assert ratchet.__all__ == sorted(ratchet.__all__, key=lambda name: (not name[0].isupper(), name))
    for name in ratchet.__all__:
        member = getattr(ratchet, name)
        assert name == "__version__" or inspect.getdoc(member), name
    assert set(dir(ratchet)) == set(ratchet.__all__)
    functions = {name for name, member in vars(api).items() if inspect.isfunction(member) and not name.startswith("_")}
    assert functions - {"explained_imports", "ignore_progress", "set_library_defaults"} <= set(ratchet.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = ratchet.tarin


def test_importing_the_package_loads_no_library() -> None:
    code = "import sys, ratchet; print(*({'torch', 'mlflow', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_training_returns_a_run(trained: tuple[ratchet.Project, ratchet.Run, list[Recorder]]) -> None:
    project, run, _ = trained
    assert run.status == "finished"
    assert run.report is not None
    assert run.report.run_id == run.id == run.path.name
    assert run.adapter_dir is not None
    assert (run.adapter_dir / "adapter_model.safetensors").is_file()
    assert run.step == run.report.steps == max(run.checkpoints)
    assert ratchet.load_run(project, run.id[:6]).id == run.id
    assert [one.id for one in ratchet.list_runs(project)] == [run.id]


def test_metrics_are_a_table_with_each_step_once(trained: tuple[ratchet.Project, ratchet.Run, list[Recorder]]) -> None:
    _, run, _ = trained
    assert run.report is not None
    metrics = run.metrics()
    assert list(metrics.index) == list(range(1, run.report.steps + 1))
    assert metrics["loss"].notna().all()
    assert metrics["validation_loss"].dropna().to_dict() == run.report.validation_loss


def test_a_callback_receives_the_journal(trained: tuple[ratchet.Project, ratchet.Run, list[Recorder]]) -> None:
    _, run, [recorder] = trained
    assert recorder.run.id == run.id
    assert recorder.kinds.count("step") == run.step
    assert recorder.status == "FINISHED"


def test_a_finished_run_is_not_trained_again_and_nothing_is_printed(
    trained: tuple[ratchet.Project, ratchet.Run, list[Recorder]], capfd: pytest.CaptureFixture[str]
) -> None:
    project, run, _ = trained
    assert ratchet.train(project).id == run.id
    assert capfd.readouterr().out == ""


def test_an_override_changes_the_settings_of_one_call(
    trained: tuple[ratchet.Project, ratchet.Run, list[Recorder]],
) -> None:
    project, _, _ = trained
    changed = project.with_overrides({"train.rank": 2})
    assert changed.settings.train.rank == 2
    assert project.settings.train.rank == tiny_project.TRAIN.rank
    both = changed.with_overrides({"train.seed": 9}).settings.train
    assert (both.rank, both.seed) == (2, 9)
    numbers = project.with_overrides({"train.rank": np.int64(2), "train.learning_rate": np.float64(0.5)}).settings.train
    assert (numbers.rank, numbers.learning_rate) == (2, 0.5)
    with pytest.raises(errors.SettingsError, match=r"^override train.rank: found 'two'"):
        ratchet.train(project, overrides={"train.rank": "two"})


def test_a_directory_without_a_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ProjectError, match="no Ratchet project here"):
        ratchet.Project(tmp_path)


@pytest.mark.parametrize(
    "name", sorted(name for name in {*ratchet.__all__} - {"init", "__version__"} if name.islower())
)
def test_anything_but_a_project_is_refused(name: str) -> None:
    function = getattr(ratchet, name)
    expected = rf"ratchet\.{name}: project: found 'folder'; expected a ratchet\.Project"
    with pytest.raises(errors.SettingsError, match=expected):
        function("folder")
    with pytest.raises(errors.SettingsError, match=expected):
        function(project="folder")


def test_arguments_of_another_type_are_refused(trained: tuple[Any, ...]) -> None:
    project = trained[0]
    for call, message in (
        (lambda: ratchet.sweep(project, workers="2"), r"ratchet\.sweep: workers: found '2'; expected an integer"),
        (lambda: ratchet.sweep(project, workers=True), "sweep: workers: found True"),
        (lambda: ratchet.adopt(project, "6"), "adopt: trial: found '6'; expected an integer or None"),
        (lambda: ratchet.adopt(project, False), "adopt: trial: found False"),
        (lambda: ratchet.control_trial(project, ["stop"], 0), r"action: found \['stop'\]"),
        (lambda: ratchet.control_trial(project, "stop", 0.5), "trial: found 0.5"),
        (lambda: ratchet.control_trial(project, "clone", 0, "train.rank=3"), "changes: found 'train.rank=3'"),
        (lambda: ratchet.control_trial(project, "clone", 0, None, "no"), "is_warm: found 'no'"),
        (lambda: ratchet.audit(project, releases="release"), "releases: found 'release'; expected a list whose items "),
        (lambda: ratchet.monitor(project, "log.jsonl"), "logs: found 'log.jsonl'; expected a list"),
        (lambda: ratchet.compare(project, [1]), r"names: found \[1\]; expected a list whose items are each a string"),
        (lambda: ratchet.train(project, callbacks=[print, "no"]), "callbacks: found .*; expected a list "),
        (lambda: ratchet.generate(project, 5, "out.jsonl"), "prompts: found 5; expected a string or a pathlib.Path"),
        (lambda: ratchet.rollback(project, "v1"), "version: found 'v1'; expected an integer or None"),
    ):
        with pytest.raises(errors.SettingsError, match=message):
            call()
    for path in (None, 5):
        with pytest.raises(errors.SettingsError, match="expected the path of a directory"):
            ratchet.Project(path)  # type: ignore[arg-type]
    with pytest.raises(errors.SettingsError, match=r"ratchet\.init: directory: found None"):
        ratchet.init(None, None)  # type: ignore[arg-type]
    with pytest.raises(errors.ProjectError, match="nowhere: no such directory"):
        ratchet.Project(project.root / "nowhere")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'project'"):
        ratchet.sweep()
    with pytest.raises(errors.DataError, match="no study sweep in"):
        ratchet.adopt(project, np.int64(0))  # an index of a report's table


def test_an_unknown_run_is_refused(trained: tuple[ratchet.Project, ratchet.Run, list[Recorder]]) -> None:
    project, _, _ = trained
    with pytest.raises(errors.DataError, match="ffff"):
        ratchet.load_run(project, "ffff")


@pytest.mark.long
def test_an_interrupted_training_is_shown_as_stopped(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    code = "import ratchet, sys; ratchet.train(ratchet.Project(sys.argv[1]))"
    environment: dict[str, Any] = tiny_project.environment()
    process = subprocess.Popen([sys.executable, "-c", code, str(layout.root)], env=environment, start_new_session=True)
    project = ratchet.Project(layout.root)
    try:
        machines.wait_until(lambda: any(run.step >= 2 for run in ratchet.list_runs(project)))
        [run] = ratchet.list_runs(project)
        assert run.status == "training"
        assert run.adapter_dir is None
    finally:
        process.kill()
        process.wait()
    machines.wait_until(lambda: run.status == "stopped")
    assert ratchet.train(project).status == "finished"


def test_overrides_are_refused_where_they_would_be_ignored(trained: tuple[Any, ...]) -> None:
    project = trained[0]
    with pytest.raises(
        errors.SettingsError, match=r"^override train\.rank\.x: unknown setting; rank is not a section$"
    ):
        project.with_overrides({"train.rank.x": 5})
    with pytest.raises(errors.SettingsError, match=r"^override prepare\.max_tokens: stages base and prepare have"):
        ratchet.train(project, overrides={"prepare.max_tokens": 24})
    with pytest.raises(errors.SettingsError, match=r"^override sweep\.trials: ratchet\.train accepts only"):
        ratchet.train(project, overrides={"sweep.trials": 1})
    with pytest.raises(errors.SettingsError, match=r"^overrides: found 'train\.rank=4'; expected a mapping"):
        ratchet.Project(project.root, "train.rank=4")  # type: ignore[arg-type]
    with pytest.raises(errors.SettingsError, match=r"^train\.adalora\.target_rank: .*other values of train\.adapter"):
        project.with_overrides({"train.adapter": "adalora"})


def test_names_to_compare_may_be_too_few(trained: tuple[Any, ...]) -> None:
    with pytest.raises(errors.SettingsError, match="found no names; name two or more runs"):
        ratchet.compare(trained[0], [])
    with pytest.raises(errors.SettingsError, match=rf"^{trained[1].id}: name two or more"):
        ratchet.compare(trained[0], [trained[1]])


@pytest.mark.long
def test_a_run_can_be_trained_in_a_thread(tmp_path: Path) -> None:
    project = ratchet.Project(tiny_project.prepared(tmp_path / "project").root)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ratchet.train, project).result().status == "finished"


def test_json_is_all_that_a_training_prints_on_standard_output(trained: tuple[Any, ...]) -> None:
    done = tiny_project.ratchet(ProjectLayout(trained[0].root), "train", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"]["run_id"] == trained[1].id


def test_modules_are_attributes_of_the_package() -> None:
    code = "import ratchet; print(ratchet.errors.DataError.exit_code, ratchet.api.train.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 train\n"
