"""Tests the uses of a test set: each model counts once, however often it is evaluated."""

import json
import multiprocessing
from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError
from ratchet.quality_gate import test_sets
from ratchet.storage.layout import ProjectLayout


def test_a_model_counts_once_for_each_gate_set(project: ProjectLayout) -> None:
    assert test_sets.count_models(project, "set", "a") == 1  # the model itself counts before its use is recorded
    for test_set_digest, model in (("set", "a"), ("set", "b"), ("other", "a"), ("set", "a")):
        test_sets.record_test_set_use(project, test_set_digest, model, f"run-{model}")
    assert [(one.test_set_digest, one.model) for one in test_sets.read_test_set_uses(project)] == [
        ("set", "a"), ("set", "b"), ("other", "a")
    ]  # fmt: skip
    assert [test_sets.count_models(project, "set", model) for model in ("a", "b", "c")] == [2, 2, 3]
    assert test_sets.count_models(project, "other", "a") == 1


def test_a_second_note_changes_no_byte_and_lines_that_git_merged_twice_count_once(project: ProjectLayout) -> None:
    test_sets.record_test_set_use(project, "set", "a", "run-a")
    before = project.test_set_uses.read_bytes()
    test_sets.record_test_set_use(project, "set", "a", "run-z")
    assert project.test_set_uses.read_bytes() == before
    assert json.loads(before) == {"test_set_digest": "set", "model": "a", "run_id": "run-a"}
    project.test_set_uses.write_bytes(2 * before)
    assert test_sets.count_models(project, "set", "b") == 2


@pytest.mark.parametrize("line", ["<<<<<<< HEAD", "{}", '{"test_set_digest": "set"}', "null", "\x00"])
def test_a_damaged_line_is_named_and_nothing_is_written(project: ProjectLayout, line: str) -> None:
    test_sets.record_test_set_use(project, "set", "a", "run-a")
    with project.test_set_uses.open("a") as stream:
        stream.write(f"{line}\n")
    before = project.test_set_uses.read_bytes()
    with pytest.raises(DamagedFileError, match=r"test_set_uses\.jsonl:2: not a test set use"):
        test_sets.count_models(project, "set", "a")
    with pytest.raises(DamagedFileError, match=r"test_set_uses\.jsonl:2"):
        test_sets.record_test_set_use(project, "set", "b", "run-b")
    assert project.test_set_uses.read_bytes() == before


def _note_some(root: Path, worker: int) -> None:
    for k in range(5):
        test_sets.record_test_set_use(ProjectLayout(root), "set", f"model-{worker}-{k}", "run")


def test_concurrent_processes_lose_no_line(project: ProjectLayout) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_note_some, args=(project.root, k)) for k in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert test_sets.count_models(project, "set", "model-0-0") == 15
