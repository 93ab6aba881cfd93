"""Projects whose teacher is in memory while the student trains: runs and their identity, kills, ranks, what is said."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rank_projects
import tiny_project
import tiny_sweep
from rank_projects import PATIENCE_S, SLOW, events, report, train
from ratchet import digest
from ratchet.config import Settings
from ratchet.config_sweep import Knob, Pruner
from ratchet.config_train import Distill, Train
from ratchet.data import tokens
from ratchet.distill import distill
from ratchet.doctor import doctor
from ratchet.errors import BaseModelError, InputError
from ratchet.faults.attack import worker_of
from ratchet.layout import Layout
from ratchet.records_model import MemoryForecast
from ratchet.run.directory import RunSpec, newest
from ratchet.studies import knobs
from ratchet.training import distillation_live
from ratchet.training.commission import launch_of, spec_of
from tiny_project import outcome

KILLS = 2


def taught(**changes: Any) -> Train:
    chosen = {"teacher": "teacher", "asked": "during", "top_k": None, "weight": 0.7, "temperature": 1.5} | changes
    return tiny_project.TRAIN.model_copy(update={"distill": Distill(**chosen)})


def with_teacher(layout: Layout, machine: dict[str, Any] | None = None, **changes: Any) -> Settings:
    """Settings of the tiny project with a teacher; written to its params.yaml."""
    chosen = rank_projects.settings(taught(**changes), **(machine or {}))
    tiny_project.save(layout, chosen)
    return chosen


def make_teacher(place: Path, base: Path) -> None:
    """The base with other weights."""
    shutil.copytree(base, place)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    model.save_pretrained(place)


@pytest.fixture(scope="module")
def with_one(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("taught") / "project"
    shutil.copytree(prepared, root)
    make_teacher(root / "teacher", Layout(root).tiny_model)
    return root


@pytest.fixture
def project(with_one: Path, tmp_path: Path) -> Layout:
    shutil.copytree(with_one, tmp_path / "copy of project")
    return Layout(tmp_path / "copy of project")


@pytest.fixture(scope="module")
def reference(with_one: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, dict[str, str]]:
    """A training that nobody interrupts."""
    root = tmp_path_factory.mktemp("reference") / "project"
    shutil.copytree(with_one, root)
    layout = Layout(root)
    with_teacher(layout)
    train(layout)
    return layout, outcome(layout)


# --------------------------------------------------------------------------------------------------------- identity


def test_runs_of_before_keep_their_names() -> None:
    spec = RunSpec(train=Train(), data_digest="d" * 64, base_digest="b" * 64)
    assert spec.run_id == "3ea144e68039"
    distill = Distill(teacher="0123456789ab", temperature=2.0)
    written = spec.model_copy(update={"train": Train(distill=distill), "teaching": "t" * 64})
    assert written.run_id == "c6fda8e378c8"  # as before a teacher could stay
    during = distill.model_copy(update={"asked": "during"})
    assert written.model_copy(update={"train": Train(distill=during)}).run_id != written.run_id


def test_a_teacher_is_known_by_its_bytes(project: Layout) -> None:
    before = spec_of(project, with_teacher(project))
    assert before.train.distill.teacher == digest.of_files(launch_of(project, with_teacher(project)).teacher_files)[:12]
    (project.root / "teacher").rename(project.root / "elsewhere")
    assert spec_of(project, with_teacher(project, teacher="elsewhere")) == before
    with pytest.raises(BaseModelError, match="teacher: no such directory"):
        spec_of(project, with_teacher(project))
    config = project.root / "elsewhere" / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    assert spec_of(project, with_teacher(project, teacher="elsewhere")).run_id != before.run_id


def test_padding_is_told_once_when_training_begins(project: Layout) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(project.root / "teacher")
    model.resize_token_embeddings(512, mean_resizing=False)
    model.save_pretrained(project.root / "teacher")
    with_teacher(project)
    train(project)
    assert sum("512 rows (teacher)" in event.data["text"] for event in events(project, "notice")) == 1


@pytest.mark.parametrize(
    "change", [{"quantization": "nf4"}, {"temperature": 2.0}, {"top_k": 8}, {"weight": 0.5}, {"direction": "reverse"}]
)
def test_how_it_teaches_makes_another_run(project: Layout, change: dict[str, Any]) -> None:
    assert spec_of(project, with_teacher(project, **change)).run_id != spec_of(project, with_teacher(project)).run_id


def test_temperature_and_top_k_may_be_searched(project: Layout) -> None:
    assert knobs.searchable("train.distill.top_k").kind == "int"
    space = {
        "train.distill.temperature": Knob(low=1.0, high=3.0),
        "train.distill.top_k": Knob(low=2, high=40, log=True),
    }
    chosen = tiny_sweep.settings(space=space, trials=3, pruner=Pruner(kind="none"))
    train = chosen.train.model_copy(update={"distill": taught(top_k=8).distill})
    tiny_project.save(project, chosen.model_copy(update={"train": train}))
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stderr
    trials = tiny_sweep.report(project).trials
    assert [trial.state for trial in trials] == ["complete"] * 3
    assert len({trial.adapter_digest for trial in trials}) == 3


# ------------------------------------------------------------------------------------------------------------ kills


def start(layout: Layout) -> "subprocess.Popen[str]":
    return rank_projects.start(layout, [SLOW])


def steps(layout: Layout) -> int:
    return len(events(layout, "step"))


@pytest.fixture
def started(project: Layout) -> Iterator["subprocess.Popen[str]"]:
    with_teacher(project)
    process = start(project)
    yield process
    process.kill()
    process.communicate()


def kill_worker(layout: Layout, process: "subprocess.Popen[str]") -> None:
    """After a step or two more."""
    done = steps(layout) + 1
    rank_projects.wait_until(lambda: steps(layout) > done, process)
    pid = worker_of(process.pid, layout.root)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_killed_workers_change_nothing(
    project: Layout, reference: tuple[Layout, dict[str, str]], started: "subprocess.Popen[str]"
) -> None:
    for _ in range(KILLS):
        kill_worker(project, started)
    _, complained = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0, complained
    assert len(events(project, "died")) == KILLS
    assert outcome(project) == reference[1]
    assert newest(project.runs).root.name == newest(reference[0].runs).root.name


def test_a_teacher_that_changes_under_a_run_is_refused_at_its_restart(
    project: Layout, started: "subprocess.Popen[str]"
) -> None:
    rank_projects.wait_until(lambda: steps(project) > 0, started)
    weights = project.root / "teacher" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    kill_worker(project, started)
    _, complained = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 2
    assert "model.safetensors: changed since this run was started" in complained


def test_what_it_takes_was_foreseen(reference: tuple[Layout, dict[str, str]]) -> None:
    layout, _ = reference
    parts = MemoryForecast.load(newest(layout.runs).forecast).of("steady").parts
    held = sum(path.stat().st_size for path in (layout.root / "teacher").glob("*.safetensors"))
    assert 0.9 * held < parts["teacher"] < 1.3 * held


# ------------------------------------------------------------------------------------------------------------ ranks


def test_each_rank_has_its_teacher_whether_they_share_the_base_or_not(project: Layout, tmp_path: Path) -> None:
    apart = Layout(tmp_path / "apart")
    shutil.copytree(project.root, apart.root)
    for layout, shares in ((project, True), (apart, False)):
        with_teacher(layout, {"gpus": 2, "shard_base": shares})
        train(layout)
        assert events(layout, "ready")[-1].data["shares_base"] is shares
    assert report(project).adapter_digest == report(apart).adapter_digest
    assert report(project).validation_loss == report(apart).validation_loss


# ------------------------------------------------------------------------------------------------------ what is said


def told(layout: Layout, settings: Settings, forecast: bool = False) -> str:
    return distill(layout, settings, forecast, lambda _: None)


def test_there_is_nothing_to_do_before(project: Layout) -> None:
    settings = with_teacher(project)
    said = told(project, settings)
    assert "asked during training" in said
    assert "nothing is to be done before" in said
    assert not project.distill.exists()
    done = tiny_project.ratchet(project, "distill", "--forecast")
    assert done.returncode == 0, done.stderr
    assert "without the teacher" in done.stdout
    with_teacher(project, asked="before", top_k=8)
    assert tiny_project.ratchet(project, "distill").returncode == 0
    assert "is not read" in told(project, settings)


def test_forecast_and_doctor_count_it(project: Layout) -> None:
    with_teacher(project)
    done = tiny_project.ratchet(project, "forecast")
    assert done.returncode == 0, done.stderr
    assert "teacher" in done.stdout.split("in all")[0]
    assert "The teacher is asked during training" in done.stdout
    _, text = doctor(project, with_teacher(project), None, False)
    assert "in memory beside the student" in text
    shutil.rmtree(project.root / "teacher")
    good, text = doctor(project, with_teacher(project), None, False)
    assert (good, "teacher: no such directory" in text) == (False, True)


def other_tokenizer(project: Layout) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(project.root / "teacher")
    tokenizer.add_tokens(["quite another"])
    tokenizer.save_pretrained(project.root / "teacher")


def cut_weights(project: Layout) -> None:
    path = project.root / "teacher" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def short_context(project: Layout) -> None:
    path = project.root / "teacher" / "config.json"
    path.write_text(path.read_text().replace('"max_position_embeddings": 1024', '"max_position_embeddings": 16'))


def nothing(_: Layout) -> None:
    """The settings alone are wrong."""


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (nothing, {"top_k": 400}, "train.distill.top_k: 400"),
        (other_tokenizer, {}, "'quite another'.*ratchet generate"),
        (short_context, {}, "reads 16 at most"),
    ],
    ids=["top-k", "tokenizer", "context"],
)
def test_what_cannot_teach_is_refused_before_anything_is_loaded(
    project: Layout, spoil: Any, changes: dict[str, Any], message: str
) -> None:
    spoil(project)
    settings = with_teacher(project, **changes)
    rows = tokens.rows(project.data, "train")
    for ask in (
        lambda: distillation_live.found(spec_of(project, settings), launch_of(project, settings), rows),
        lambda: told(project, settings),
    ):
        with pytest.raises(InputError, match=message):
            ask()


def test_training_says_why_it_is_refused(project: Layout) -> None:
    cut_weights(project)
    with_teacher(project)
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 2
    assert "model.safetensors" in done.stderr


def test_padding_is_allowed_and_told(project: Layout) -> None:
    place = project.root / "teacher"
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    model.resize_token_embeddings(512, mean_resizing=False)
    model.save_pretrained(place)
    assert "512 rows (teacher)" in told(project, with_teacher(project))


def test_all_tokens_need_a_teacher_that_stays() -> None:
    with pytest.raises(ValueError, match=r"top_k: null: .* asked: during"):
        Distill(top_k=None)
