"""Training groups: real processes that train several runs together, are killed, and lose single runs."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import group_cases
import tiny_project
from group_cases import RunInGroup, group, members, trains, until
from ratchet.config.train import Train
from ratchet.models.loss import SequenceBatch
from ratchet.models.merged_pass import MergedModel, MergedPasses
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from ratchet.training.group import MemberShutdown, TrainingGroup
from ratchet.training.worker import run_member

TOLERANCE = 1e-4
"""Largest relative difference between a run in a group and the same run alone, in float32 on a CPU."""
THREE = trains(rank=[4, 16, 8], learning_rate=[0.01, 0.003, 0.005], adapter=["lora", "lora", "dora"], seed=[1, 2, 3])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project")


@pytest.fixture
def copy(prepared: ProjectLayout, tmp_path: Path) -> Callable[[str], ProjectLayout]:
    """Return a function that copies the prepared project to a name."""

    def make(name: str) -> ProjectLayout:
        shutil.copytree(prepared.root, tmp_path / name)
        return ProjectLayout(tmp_path / name)

    return make


def kinds(run: RunInGroup) -> list[str]:
    return [event.kind for event in JournalReader(run.paths.journal).read()]


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Restore the settings that a training changes in its process."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_num_threads(threads)


VARIANTS = trains(
    rank=[4, 16, 8, 12, 8, 8],
    adapter=["lora", "lora", "dora", "adalora", "lora", "lora"],
    dropout=[0.1, 0.0, 0.2, 0.0, 0.0, 0.1],
    use_rslora=[False, True, False, False, False, False],
    target_modules=["all", "attention", "all", "all", "mlp", "all"],
    batching=["by_length", "by_length", "by_length", "shuffled", "shuffled", "packed"],
    schedule=["cosine", "constant", "linear", "cosine", "cosine", "cosine"],
    epochs=[1, 1, 1, 1, 1, 1],
    seed=[1, 2, 3, 4, 5, 6],
)


def test_a_run_in_a_group_equals_the_run_alone_up_to_rounding(
    copy: Callable[[str], ProjectLayout], tmp_path: Path
) -> None:
    layout = copy("project")
    together = group_cases.train_together(layout, VARIANTS, tmp_path / "g")
    for train, grouped in zip(VARIANTS, together, strict=True):
        alone = group_cases.train_alone(layout, train)
        assert alone != grouped
        losses = group_cases.validation_losses(alone)
        assert group_cases.validation_losses(grouped) == pytest.approx(losses, rel=TOLERANCE)
        expected, found = group_cases.adapter(alone), group_cases.adapter(grouped)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.linalg.norm(found[name] - tensor) <= TOLERANCE * torch.linalg.norm(tensor), name
    assert "instead of sharing" not in str([group_cases.events_text(paths) for paths in together])


def test_a_killed_group_ends_with_the_same_bytes(copy: Callable[[str], ProjectLayout], tmp_path: Path) -> None:
    undisturbed = group_cases.train_together(copy("undisturbed"), THREE, tmp_path / "g1")
    with group(tmp_path / "g2") as running, members(copy("killed"), THREE) as runs:
        for run in runs:
            run.start(running.connection)
        for kill in range(1, 4):
            until(lambda kill=kill: min(run.steps() for run in runs) >= 6 * kill, "no progress")  # type: ignore[misc]
            running.kill()
            assert [run.wait() for run in runs] == [-signal.SIGKILL] * 3
            for run in reversed(runs):
                run.start(running.connection)
        assert [run.wait() for run in runs] == [0] * 3
        resumed = [run.paths for run in runs]
    for expected, found in zip(undisturbed, resumed, strict=True):
        assert group_cases.result_bytes(found) == group_cases.result_bytes(expected)


@pytest.mark.usefixtures("torch_settings")
def test_a_pass_without_enough_memory_is_divided_without_a_lost_step(
    copy: Callable[[str], ProjectLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = group_cases.train_together(copy("enough"), THREE, tmp_path / "g")
    sizes: list[int] = []
    original = MergedPasses.forward_backward

    def limited(
        self: MergedPasses, merged: Sequence[MergedModel], batches: Sequence[SequenceBatch], scales: Sequence[float]
    ) -> list[float]:
        sizes.append(len(merged))
        losses = original(self, merged, batches, scales)  # gradients of a pass that fails at its end must not count
        if len(merged) > 2:
            raise torch.OutOfMemoryError("injected")
        return losses

    monkeypatch.setattr(MergedPasses, "forward_backward", limited)
    together = TrainingGroup(tmp_path / "record.json")
    codes: dict[int, int] = {}

    def work(number: int, run: RunInGroup) -> None:
        codes[number] = run_member(run.paths, 1, MemberShutdown(), Heartbeat(None, 0, 0), together)

    with members(copy("little"), THREE) as runs:
        threads = [threading.Thread(target=work, args=item) for item in enumerate(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == {0: 0, 1: 0, 2: 0}
        assert sizes.count(3) == 1
        assert sizes.count(2) > 10
        for run, other in zip(runs, expected, strict=True):
            assert "do not fit into memory together" in str(group_cases.events_text(run.paths))
            losses = group_cases.validation_losses(other)
            assert group_cases.validation_losses(run.paths) == pytest.approx(losses, rel=TOLERANCE)


def test_a_diverging_run_ends_alone(copy: Callable[[str], ProjectLayout], tmp_path: Path) -> None:
    guards = {"guards": tiny_project.TRAIN.guards.model_dump() | {"max_bad_steps": 1}}
    wanted = [THREE[0], Train.model_validate(THREE[1].model_dump() | {"learning_rate": 1e30} | guards)]
    with group(tmp_path / "g") as running, members(copy("project"), wanted) as runs:
        for run in runs:
            run.start(running.connection)
        assert [run.wait() for run in runs] == [0, 1]
        [error] = [e for e in JournalReader(runs[1].paths.journal).read() if e.kind == "worker_error"]
        assert error.data["failure_class"] in ("diverged", "hardware")


def test_a_stopped_run_saves_its_state_and_the_others_continue(
    copy: Callable[[str], ProjectLayout], tmp_path: Path
) -> None:
    with group(tmp_path / "g") as running, members(copy("project"), THREE) as runs:
        processes = [run.start(running.connection) for run in runs]
        until(lambda: runs[0].steps() >= 3, "no progress")
        processes[0].send_signal(signal.SIGTERM)
        assert [run.wait() for run in runs] == [75, 0, 0]
        [stopped] = [e for e in JournalReader(runs[0].paths.journal).read() if e.kind == "interrupted"]
        assert stopped.data["step"] == runs[0].steps() == runs[0].paths.checkpoint_steps()[-1]
        runs[0].start(running.connection)
        assert runs[0].wait() == 0


def test_a_run_without_supervisor_gives_up_its_lock_and_the_others_continue(
    copy: Callable[[str], ProjectLayout], tmp_path: Path
) -> None:
    longest = Train.model_validate(THREE[0].model_dump() | {"epochs": 200})
    with group(tmp_path / "g") as running, members(copy("project"), [longest, *THREE[1:]]) as runs:
        processes = [run.start(running.connection) for run in runs]
        until(lambda: runs[0].steps() >= 3, "no progress")
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), runs[0].directory.lock.fd)  # as the end of the supervisor's process does
        assert runs[0].paths.lock().is_held()
        processes[0]._connection.close()
        until(lambda: not runs[0].paths.lock().is_held(), "the lock is still held")
        assert [run.wait() for run in runs[1:]] == [0, 0]
        assert "interrupted" not in kinds(runs[0])
