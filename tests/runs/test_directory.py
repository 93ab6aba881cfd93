"""Tests of run directories: identity, locks, and lookup of a run by its id."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ratchet.config import params_file
from ratchet.config import train as config_train
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.errors import DamagedFileError, DataError, LockHeldError, StorageError
from ratchet.runs import directory
from ratchet.runs.directory import RESULT, RunDirectory, RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent
from ratchet.storage import files


def spec(train: Train | None = None, data: str = "d" * 64, base: str = "b" * 64) -> RunSpec:
    return RunSpec(train=train or Train(), data_digest=data, base_digest=base)


# ------------------------------------------------------------------------------------------------------------- RunId

OTHER_VALUES = {
    "quantization": "none", "double_quantization": False, "compute_dtype": "float32", "rank": 8, "alpha": 8.0,
    "dropout": 0.1, "target_modules": ["q_proj"], "epochs": 1.5, "batch_size": 8, "learning_rate": 1e-4,
    "schedule": "linear",
    "warmup_ratio": 0.1, "optimizer": "adamw_8bit", "weight_decay": 0.1, "max_grad_norm": 2.0,
    "validate_every_steps": 7,
    "early_stopping": {"patience": 3}, "final_checkpoint": "last", "seed": 1, "batching": "packed", "pack_tokens": 512,
    "attention": "eager", "guards": {"max_bad_steps": 2}, "quantization_storage": "bfloat16", "adapter": "dora",
    "use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4.0}, "initialization": "pissa",
    "adalora": {"target_rank": 4}, "adapter_dtype": "bfloat16", "loraplus_lr_ratio": 16.0,
    "gradient_compression": {"method": "int8"}, "distill": {"teacher": "models/teacher"},
    "init_adapter": "0123456789ab", "objective": "dpo", "beta": 0.5,
    "final_learning_rate_share": 0.1, "polynomial_power": 3.0, "cooldown_ratio": 0.5,
    "warmup_steps": 7, "validate_every_epochs": 0.5,
}  # fmt: skip


def test_every_setting_of_train_makes_another_run() -> None:
    assert OTHER_VALUES.keys() == Train.model_fields.keys()
    # pissa requires quantization none, and beta is used by preference tuning only.
    needed = {"initialization": {"quantization": "none"}, "beta": {"objective": "dpo"}}
    ids = {
        name: spec(Train.model_validate({name: value} | needed.get(name, {}))).run_id
        for name, value in OTHER_VALUES.items()
    }
    assert len({*ids.values(), spec().run_id}) == len(OTHER_VALUES) + 1, ids


def test_settings_that_are_newer_than_a_run_do_not_change_its_id() -> None:
    assert spec().run_id == "b38566ace6fd"
    document = spec().model_dump(mode="json")
    newer = [name.split(".") for name in config_train.ADDED]
    for *sections, leaf in newer:
        node = document["train"]
        for section in sections:
            node = node[section]
        del node[leaf]
    assert directory.compute_run_id(document) == spec().run_id
    assert RunSpec.model_validate(document) == spec()
    nested = spec(Train.model_validate({"guards": {"recovery_steps": 9}})).run_id
    assert nested not in (spec().run_id, spec(Train.model_validate({"guards": {"max_bad_steps": 9}})).run_id)


def test_other_data_another_base_and_another_recipe_make_another_run() -> None:
    ids = {
        spec().run_id,
        spec(data="e" * 64).run_id,
        spec(base="e" * 64).run_id,
        spec(data="b" * 64, base="d" * 64).run_id,
        spec().model_copy(update={"recipe_version": directory.RECIPE_VERSION + 1}).run_id,
    }
    assert len(ids) == 5


@pytest.mark.parametrize(
    "text",
    ["machine: {threads: 1}", "machine: {micro_batch_size: 4, max_restarts: 9}", "train: {epochs: 3, alpha: 32}",
     "train: {epochs: 3.0, alpha: 32.0}", "train: {rank: '16'}", "train: {alpha: '32', learning_rate: '2e-4'}",
     "train: {target_modules: all}"],
)  # fmt: skip
def test_run_depends_on_the_values_of_train_and_not_on_their_spelling_or_the_machine(text: str) -> None:
    assert spec(params_file.parse(text).train).run_id == spec().run_id
    assert set(Machine.model_fields).isdisjoint({*Train.model_fields, *RunSpec.model_fields})


def test_run_id_survives_saving_and_is_the_same_in_every_process(tmp_path: Path) -> None:
    one = spec(Train.model_validate({"learning_rate": 1e-5, "target_modules": ["q_proj", "v_proj"], "epochs": 1 / 3}))
    one.save(tmp_path / "spec.json")
    again = RunSpec.load(tmp_path / "spec.json")
    assert again == one
    assert again.run_id == one.run_id
    code = "import pathlib, sys; from ratchet.runs.directory import RunSpec\n"
    code += "print(RunSpec.load(pathlib.Path(sys.argv[1])).run_id)"
    command = [sys.executable, "-c", code, str(tmp_path / "spec.json")]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == one.run_id


# ----------------------------------------------------------------------------------------------------------- opening


def test_opening_makes_the_directory_and_opening_again_continues_it(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path / "runs", spec())
    run.journal.append("notice", text="first")
    assert run.paths.root == tmp_path / "runs" / spec().run_id
    assert run.paths.checkpoints.is_dir()
    assert RunSpec.load(run.paths.spec) == spec()
    assert json.loads(run.paths.format.read_text()) == {"format": directory.FORMAT}
    other = RunDirectory.open(tmp_path / "runs", spec(data="e" * 64))  # two different runs can be open at once
    assert other.paths.root != run.paths.root
    other.close()
    run.close()
    run.paths.format.unlink()  # as in a directory of the first format
    again = RunDirectory.open(tmp_path / "runs", spec())
    again.journal.append("notice", text="second")
    again.close()
    events = [json.loads(line)["text"] for line in run.paths.journal.read_text().splitlines()]
    assert events == ["first", "second"]
    assert json.loads(run.paths.format.read_text()) == {"format": directory.FORMAT}


def test_a_run_that_somebody_trains_is_refused_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOCK_WAIT_S", 0.1)
    with_lock = RunDirectory.open(tmp_path, spec())
    scratch = with_lock.paths.root / f"{files.PARTIAL}result-1"
    scratch.mkdir()
    with pytest.raises(LockHeldError, match=rf"run {spec().run_id} is in use by process {os.getpid()}"):
        RunDirectory.open(tmp_path, spec())
    assert scratch.is_dir()
    with_lock.close()
    RunDirectory.open(tmp_path, spec()).close()
    assert not scratch.exists()


def test_a_directory_with_another_runs_spec_is_refused_with_what_differs(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, spec()).close()
    paths = RunPaths(tmp_path / spec().run_id)
    spec(Train.model_validate({"rank": 8, "early_stopping": {"patience": 2}})).save(paths.spec)
    for _ in range(2):  # the lock is released after each failure
        with pytest.raises(DamagedFileError, match=r"differs in train\.early_stopping\.patience, train\.rank; move"):
            RunDirectory.open(tmp_path, spec())


FORMAT_SAYS = r"format\.json: unreadable; if this version of ratchet wrote the run, remove the file"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [("spec.json", b'{"format": 1, "tra', r"spec\.json: not a RunSpec")]
    + [("format.json", content, FORMAT_SAYS) for content in (b"", b"{", b"[]", b"{}", b"null", b"\xff")],
)
def test_unreadable_file_of_a_run_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    RunDirectory.open(tmp_path, spec()).close()
    path = tmp_path / spec().run_id / name
    assert path.is_file()
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=says):
        RunDirectory.open(tmp_path, spec())


def test_opening_clears_what_dead_writers_left(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path, spec())
    run.close()
    for folder in (run.paths.root, run.paths.checkpoints):
        (folder / ".partial-x-1").mkdir()
        (folder / ".partial-x-1" / "half").write_bytes(b"half")
    RunDirectory.open(tmp_path, spec()).close()
    assert list(tmp_path.rglob(".partial-*")) == []


# ---------------------------------------------------------------------------------------------------- contents of a run


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


# -------------------------------------------------------------------------------------------------- other versions


@pytest.mark.parametrize("found", [3, 99, "3"])
def test_a_run_of_a_newer_format_is_refused_untouched(tmp_path: Path, found: object) -> None:
    RunDirectory.open(tmp_path, spec()).close()
    paths = RunPaths(tmp_path / spec().run_id)
    paths.format.write_text(json.dumps({"format": found, "more": 1}))
    (paths.root / ".partial-of-the-newer").touch()
    before = sorted((p, p.read_bytes()) for p in paths.root.rglob("*") if p.is_file())
    with pytest.raises(
        DamagedFileError, match=rf"newer version of ratchet \(format {found}; this version reads up to 2\); use that"
    ):
        RunDirectory.open(tmp_path, spec())
    assert sorted((p, p.read_bytes()) for p in paths.root.rglob("*") if p.is_file()) == before


def test_settings_that_this_version_does_not_know_are_named(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, spec()).close()
    paths = RunPaths(tmp_path / spec().run_id)
    raw = json.loads(paths.spec.read_text())
    raw["train"]["dreams"] = 3
    raw["train"]["guards"]["angels"] = 1
    paths.spec.write_text(json.dumps(raw))
    with pytest.raises(
        DamagedFileError, match=r"unknown settings: train\.dreams, train\.guards\.angels; a newer version"
    ):
        RunDirectory.open(tmp_path, spec())


# ------------------------------------------------------------------------------------------------------- unusable disks

OPEN = """
import resource, sys
from pathlib import Path
from ratchet.config.train import Train
from ratchet.errors import StorageError
from ratchet.runs.directory import RunDirectory
from ratchet.runs.directory import RunSpec
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    RunDirectory.open(Path(sys.argv[1]), RunSpec(train=Train(), data_digest="d" * 64, base_digest="b" * 64))
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("room", [0, 3, 12, 500])
def test_a_disk_without_room_is_told_and_nothing_half_made_is_left(tmp_path: Path, room: int) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path / "runs"), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "set RATCHET_RUNS=DIR to keep runs elsewhere" in done.stdout
    left = [p.name for p in (tmp_path / "runs").rglob("*")]
    assert left in ([], [spec().run_id, "lock"]), left  # an empty lock file is allowed
    RunDirectory.open(tmp_path / "runs", spec()).close()


@pytest.mark.parametrize(
    ("code", "says"),
    [(errno.EROFS, "Read-only file system; mount it writable"), (errno.EACCES, "Permission denied; give this user"),
     (errno.ENOSPC, "No space left on device; free some space"), (errno.EIO, "Input/output error; check the disk")],
)  # fmt: skip
def test_each_refusal_of_a_disk_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    def refuse(operation: str, path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(files, "before", refuse)
    with pytest.raises(StorageError, match=says):
        RunDirectory.open(tmp_path / "runs", spec())
    assert list((tmp_path / "runs").iterdir()) == []
    monkeypatch.undo()
    run = RunDirectory.open(tmp_path / "runs", spec())
    run.close()
    monkeypatch.setattr(files, "before", refuse)
    run.paths.format.unlink()
    with pytest.raises(StorageError, match=says):
        RunDirectory.open(tmp_path / "runs", spec())
    assert run.paths.journal.exists(), "a run that was there is not undone"


def test_a_file_in_the_place_of_the_runs_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match=r"runs.*: Not a directory; move the file away"):
        RunDirectory.open(tmp_path / "runs", spec())
    assert (tmp_path / "runs").read_text() == "a file"


def test_who_waited_for_a_run_that_was_removed_meanwhile_begins_it_anew(tmp_path: Path) -> None:
    first = RunDirectory.open(tmp_path, spec())
    opened: list[RunDirectory] = []
    waiting = threading.Thread(target=lambda: opened.append(RunDirectory.open(tmp_path, spec())))
    waiting.start()
    descriptors = Path("/proc/self/fd")
    while sum(_names(fd) == str(first.paths.root / "lock") for fd in descriptors.iterdir()) < 2:
        assert waiting.is_alive()  # waits until the thread has opened the lock file
    files.remove_sealed(first.paths.root)
    first.close()
    waiting.join()
    with pytest.raises(LockHeldError):
        opened[0].paths.lock().acquire()
    assert RunSpec.load(opened[0].paths.spec) == spec()
    opened[0].close()


def _names(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------------------------- lookup


def begun(runs: Path, name: str, *times: float) -> RunPaths:
    """Create a run with journal lines of these times. The file time of the journal is meaningless."""
    paths = RunPaths(runs / name)
    paths.root.mkdir(parents=True)
    paths.journal.write_bytes(b"".join(JournalEvent("notice", t, 1, {"text": "x"}).line() for t in times))
    os.utime(paths.journal, ns=(7, 7))
    return paths


def found(runs: Path) -> str:
    run = directory.find_newest_run(runs)
    return run.root.name if run else ""


def test_newest_run_has_the_newest_last_line_whatever_the_times_of_files(tmp_path: Path) -> None:
    assert found(tmp_path / "runs") == ""
    begun(tmp_path / "runs", "aaa", 3.0)
    newest = begun(tmp_path / "runs", "bbb", 1.0, 9.0)
    begun(tmp_path / "runs", "ccc", 99.0, 1.0)
    begun(tmp_path / "runs", "ddd")
    (tmp_path / "runs" / "zzz").mkdir()
    begun(tmp_path / "runs", ".partial-zzz-doomed-1", 1000.0)
    for mtime in (0, 1, 2**40):
        os.utime(newest.journal, (mtime, mtime))
        assert found(tmp_path / "runs") == "bbb"


def test_newest_run_is_the_last_by_name_at_equal_times_and_a_locked_one_before_all(tmp_path: Path) -> None:
    for name in ("bbb", "ccc", "aaa"):
        begun(tmp_path, name, 3.0)
    assert found(tmp_path) == "ccc"
    trained = begun(tmp_path, "add", 1.0)
    with trained.lock().acquire():
        assert found(tmp_path) == "add"
    assert found(tmp_path) == "ccc"


ALL = "ab12, ab34, cd56"


@pytest.mark.parametrize(
    ("prefix", "says", "there"),
    [
        ("cd", "", "cd56"),
        ("ab3", "", "ab34"),
        ("ab", "2 runs", "ab12, ab34; give more of the id"),
        ("x", "no run", ALL),
        ("ab12x", "no run", ALL),
        ("", "3 runs", f"{ALL}; give more of the id"),
    ],
)
def test_run_is_found_by_an_unambiguous_beginning_of_its_id(tmp_path: Path, prefix: str, says: str, there: str) -> None:
    for name in ("ab12", "ab34", "cd56"):
        begun(tmp_path, name)
    if not says:
        assert directory.find_run(tmp_path, prefix).root == tmp_path / there
        return
    with pytest.raises(DataError, match=rf"matches {says} in .*; found: {there}$"):
        directory.find_run(tmp_path, prefix)
