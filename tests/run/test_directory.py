"""Runs: which one a set of inputs means, who may write to it, and how it is found again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet import files, params
from ratchet.config import Machine, Settings, Train
from ratchet.errors import BusyError, DamagedError, DataError
from ratchet.run import directory
from ratchet.run.directory import RESULT, Launch, Run, RunPaths, RunSpec


def spec(train: Train | None = None, data: str = "d" * 64, base: str = "b" * 64) -> RunSpec:
    return RunSpec(train=train or Train(), data_digest=data, base_digest=base)


# ------------------------------------------------------------------------------------------------------------- RunId

OTHER_VALUES = {
    "quantization": "none", "double_quantization": False, "compute_dtype": "float32", "rank": 8, "alpha": 8.0,
    "dropout": 0.1, "targets": ["q_proj"], "epochs": 1.5, "batch_rows": 8, "learning_rate": 1e-4, "schedule": "linear",
    "warmup": 0.1, "optimizer": "adamw_8bit", "weight_decay": 0.1, "max_grad_norm": 2.0, "validate_every_steps": 7,
    "early_stopping": {"patience": 3}, "keep": "last", "seed": 1, "batching": "packed", "pack_tokens": 512,
    "attention": "eager",
}  # fmt: skip


def test_every_setting_of_train_makes_another_run() -> None:
    assert OTHER_VALUES.keys() == Train.model_fields.keys()
    ids = {name: spec(Train.model_validate({name: value})).run_id for name, value in OTHER_VALUES.items()}
    assert len({*ids.values(), spec().run_id}) == len(OTHER_VALUES) + 1, ids


def test_other_data_another_base_and_another_recipe_make_another_run() -> None:
    ids = {
        spec().run_id,
        spec(data="e" * 64).run_id,
        spec(base="e" * 64).run_id,
        spec(data="b" * 64, base="d" * 64).run_id,
        spec().model_copy(update={"recipe_version": directory.RECIPE_VERSION + 1}).run_id,
    }
    assert len(ids) == 5


def test_the_machine_is_no_part_of_a_run() -> None:
    names = set(Machine.model_fields)
    assert names.isdisjoint(Train.model_fields)
    assert names.isdisjoint(RunSpec.model_fields)
    text = params.dump(Settings())
    other = text.replace("micro_batch_rows: 32", "micro_batch_rows: 4").replace("retries: 3", "retries: 9")
    assert other != text
    assert spec(params.parse(other).train).run_id == spec(params.parse(text).train).run_id


@pytest.mark.parametrize(
    "text",
    ["machine: {threads: 1}", "train: {epochs: 3, alpha: 32}", "train: {epochs: 3.0, alpha: 32.0}",
     "train: {rank: '16'}", "train: {alpha: '32', learning_rate: '2e-4'}", "train: {targets: all-linear}"],
)  # fmt: skip
def test_the_same_value_is_the_same_run_however_it_is_spelled(text: str) -> None:
    assert spec(params.parse(text).train).run_id == spec().run_id


def test_a_run_id_survives_being_saved(tmp_path: Path) -> None:
    one = spec(Train.model_validate({"learning_rate": 1e-5, "targets": ["q_proj", "v_proj"], "epochs": 1 / 3}))
    one.save(tmp_path / "spec.json")
    again = RunSpec.load(tmp_path / "spec.json")
    assert again == one
    assert again.run_id == one.run_id


def test_a_run_id_is_the_same_in_every_process() -> None:
    code = "from ratchet.config import Train; from ratchet.run.directory import RunSpec\n"
    code += "print(RunSpec(train=Train(), data_digest='d' * 64, base_digest='b' * 64).run_id)"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == spec().run_id


# ----------------------------------------------------------------------------------------------------------- opening


def test_opening_makes_the_directory_and_opening_again_goes_on_with_it(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "runs", spec())
    run.journal.append("notice", text="first")
    assert run.paths.root == tmp_path / "runs" / spec().run_id
    assert run.paths.checkpoints.is_dir()
    assert RunSpec.load(run.paths.spec) == spec()
    run.close()
    again = Run.open(tmp_path / "runs", spec())
    again.journal.append("notice", text="second")
    again.close()
    events = [json.loads(line)["text"] for line in run.paths.journal.read_text().splitlines()]
    assert events == ["first", "second"]


def test_a_run_that_somebody_trains_is_refused_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOCK_WAIT_S", 0.1)
    with_lock = Run.open(tmp_path, spec())
    scratch = with_lock.paths.root / f"{files.PARTIAL}result-1"
    scratch.mkdir()
    with pytest.raises(BusyError, match=rf"run {spec().run_id} is in use by process {os.getpid()}"):
        Run.open(tmp_path, spec())
    assert scratch.is_dir()
    with_lock.close()
    Run.open(tmp_path, spec()).close()
    assert not scratch.exists()


def test_two_different_runs_are_open_at_once(tmp_path: Path) -> None:
    one, two = Run.open(tmp_path, spec()), Run.open(tmp_path, spec(data="e" * 64))
    assert one.paths.root != two.paths.root
    one.close()
    two.close()


def test_a_directory_with_another_runs_spec_is_refused_with_what_differs(tmp_path: Path) -> None:
    Run.open(tmp_path, spec()).close()
    paths = RunPaths(tmp_path / spec().run_id)
    spec(Train.model_validate({"rank": 8, "early_stopping": {"patience": 2}})).save(paths.spec)
    for _ in range(2):  # the lock is given back each time
        with pytest.raises(DamagedError, match=r"differs in train\.early_stopping\.patience, train\.rank; move"):
            Run.open(tmp_path, spec())


def test_an_unreadable_spec_is_refused(tmp_path: Path) -> None:
    Run.open(tmp_path, spec()).close()
    RunPaths(tmp_path / spec().run_id).spec.write_bytes(b'{"format": 1, "tra')
    with pytest.raises(DamagedError, match=r"spec\.json: not a RunSpec"):
        Run.open(tmp_path, spec())


def test_opening_clears_what_dead_writers_left(tmp_path: Path) -> None:
    run = Run.open(tmp_path, spec())
    run.close()
    for folder in (run.paths.root, run.paths.checkpoints):
        (folder / ".partial-x-1").mkdir()
        (folder / ".partial-x-1" / "half").write_bytes(b"half")
    Run.open(tmp_path, spec()).close()
    assert list(tmp_path.rglob(".partial-*")) == []


def test_how_an_attempt_runs_may_change_between_attempts(tmp_path: Path) -> None:
    run = Run.open(tmp_path, spec())
    for rows in (32, 4):
        machine = Machine(micro_batch_rows=rows)
        launch = Launch(machine=machine, base_path="/somewhere", data_path="/else", base_files={"a": "b"})
        launch.save(run.paths.launch)
        assert Launch.load(run.paths.launch).machine.micro_batch_rows == rows
    run.close()


# ------------------------------------------------------------------------------------------------ what is in a run


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert paths.checkpoint_steps() == []
    for step in (100, 20, 3):
        paths.checkpoint(step).mkdir(parents=True)
    for other in ("step-abc", ".partial-step-00000005-1", "best", "step-"):
        (paths.checkpoints / other).mkdir()
    assert paths.checkpoint_steps() == [3, 20, 100]


def test_a_run_is_finished_when_its_result_is_sealed_and_whole(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not paths.is_finished()
    paths.result.mkdir()
    (paths.result / "train.json").write_bytes(b"{}")
    assert not paths.is_finished()
    with files.sealed_directory(paths.result, RESULT) as scratch:
        (scratch / "train.json").write_bytes(b"{}")
    assert paths.is_finished()
    (paths.result / "train.json").write_bytes(b"[]")
    assert not paths.is_finished()


# ---------------------------------------------------------------------------------------------------------- finding


def begun(runs: Path, name: str, written_at: int) -> Path:
    (runs / name).mkdir(parents=True)
    journal = runs / name / "journal.jsonl"
    journal.write_bytes(b"")
    os.utime(journal, ns=(written_at, written_at))
    return runs / name


def test_the_newest_run_is_the_one_whose_journal_was_written_last(tmp_path: Path) -> None:
    assert directory.newest(tmp_path / "runs") is None
    begun(tmp_path / "runs", "aaa", 3_000)
    begun(tmp_path / "runs", "bbb", 9_000)
    begun(tmp_path / "runs", "ccc", 1_000)
    (tmp_path / "runs" / "zzz").mkdir()
    found = directory.newest(tmp_path / "runs")
    assert found is not None
    assert found.root.name == "bbb"


def test_a_run_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    for name in ("ab12", "ab34", "cd56"):
        begun(tmp_path, name, 0)
    assert directory.named(tmp_path, "cd").root == tmp_path / "cd56"
    assert directory.named(tmp_path, "ab3").root == tmp_path / "ab34"


@pytest.mark.parametrize(("prefix", "says"), [("ab", "2 runs"), ("x", "no run"), ("ab12x", "no run"), ("", "3 runs")])
def test_a_name_that_means_no_run_or_several_is_refused_with_those_there_are(
    tmp_path: Path, prefix: str, says: str
) -> None:
    for name in ("ab12", "ab34", "cd56"):
        begun(tmp_path, name, 0)
    with pytest.raises(DataError, match=rf"{says} of that name .*there are: ab12, ab34, cd56"):
        directory.named(tmp_path, prefix)
