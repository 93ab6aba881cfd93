"""Look-ups of a gate set: each model counts once, however often it is looked up."""

import json
import multiprocessing
from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError
from ratchet.gate import test_set_reuse
from ratchet.storage.layout import ProjectLayout


def test_a_model_counts_once_for_each_gate_set(project: ProjectLayout) -> None:
    assert test_set_reuse.count_models(project, "set", "a") == 1  # the one that asks, before anything is written
    for gate_set, model in (("set", "a"), ("set", "b"), ("other", "a"), ("set", "a")):
        test_set_reuse.record_look(project, gate_set, model, f"run-{model}")
    assert [(one.gate_set, one.model) for one in test_set_reuse.read_looks(project.lookups)] == [
        ("set", "a"), ("set", "b"), ("other", "a")
    ]  # fmt: skip
    assert [test_set_reuse.count_models(project, "set", model) for model in ("a", "b", "c")] == [2, 2, 3]
    assert test_set_reuse.count_models(project, "other", "a") == 1


def test_a_second_note_changes_no_byte_and_lines_that_git_merged_twice_count_once(project: ProjectLayout) -> None:
    test_set_reuse.record_look(project, "set", "a", "run-a")
    before = project.lookups.read_bytes()
    test_set_reuse.record_look(project, "set", "a", "run-z")
    assert project.lookups.read_bytes() == before
    assert json.loads(before) == {"gate_set": "set", "model": "a", "run_id": "run-a"}
    project.lookups.write_bytes(2 * before)
    assert test_set_reuse.count_models(project, "set", "b") == 2


@pytest.mark.parametrize("line", ["<<<<<<< HEAD", "{}", '{"gate_set": "set"}', "null", "\x00"])
def test_a_damaged_line_is_named_and_nothing_is_written(project: ProjectLayout, line: str) -> None:
    test_set_reuse.record_look(project, "set", "a", "run-a")
    with project.lookups.open("a") as stream:
        stream.write(f"{line}\n")
    before = project.lookups.read_bytes()
    with pytest.raises(DamagedFileError, match=r"lookups\.jsonl:2: not a look-up"):
        test_set_reuse.count_models(project, "set", "a")
    with pytest.raises(DamagedFileError, match=r"lookups\.jsonl:2"):
        test_set_reuse.record_look(project, "set", "b", "run-b")
    assert project.lookups.read_bytes() == before


def _note_some(root: Path, worker: int) -> None:
    for k in range(5):
        test_set_reuse.record_look(ProjectLayout(root), "set", f"model-{worker}-{k}", "run")


def test_processes_that_look_at_once_lose_no_line(project: ProjectLayout) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_note_some, args=(project.root, k)) for k in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert test_set_reuse.count_models(project, "set", "model-0-0") == 15
