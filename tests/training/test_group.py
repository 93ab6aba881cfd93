"""Training groups: real processes that train several runs together, are killed, and lose single runs."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

import group_cases
import tiny_project
from group_cases import RunInGroup, group, members, trains, until
from ratchet.config.train import Train
from ratchet.errors import EXIT_BUG
from ratchet.models.loss import SequenceBatch
from ratchet.models.merged_pass import MergedModel, MergedPasses
from ratchet.runs.directory import RunPaths
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalReader
from ratchet.storage.layout import ProjectLayout
from ratchet.training.group import MAX_MERGED_TOKENS, MemberShutdown, TrainingGroup
from ratchet.training.train_step import StepExecutor

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
    epochs=[0.5] * 6,
    seed=[1, 2, 3, 4, 5, 6],
)


@pytest.mark.long
@pytest.mark.usefixtures("torch_settings")
def test_a_run_in_a_group_equals_the_run_alone_up_to_rounding(
    copy: Callable[[str], ProjectLayout], tmp_path: Path
) -> None:
    layout = copy("project")
    together = group_cases.train_together(layout, VARIANTS, tmp_path / "g")
    assert "not in those of the other runs" not in str([group_cases.events_text(paths) for paths in together])
    processes = [group_cases.train_alone(layout, variant) for variant in VARIANTS[:2]]  # with and without dropout
    # A group of one run computes as a process of its own, and starts sooner.
    with members(copy("single"), VARIANTS) as runs:
        for number, run in enumerate(runs):
            assert group_cases.train_in_threads([run], tmp_path / f"{number}.json") == [0]
        for run, alone in zip(runs, processes, strict=False):
            assert group_cases.adapter(run.paths).keys() == group_cases.adapter(alone).keys()
            assert group_cases.validation_losses(run.paths) == group_cases.validation_losses(alone)
        for alone, grouped in zip([*processes, *(run.paths for run in runs[2:])], together, strict=True):
            losses = group_cases.validation_losses(alone)
            assert group_cases.validation_losses(grouped) == pytest.approx(losses, rel=TOLERANCE)
            expected, found = group_cases.adapter(alone), group_cases.adapter(grouped)
            assert expected.keys() == found.keys()
            for name, tensor in expected.items():
                assert torch.linalg.norm(found[name] - tensor) <= TOLERANCE * torch.linalg.norm(tensor), name


@pytest.mark.long
@pytest.mark.usefixtures("torch_settings")
def test_a_pass_without_enough_memory_is_divided_without_a_lost_step(
    copy: Callable[[str], ProjectLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with members(copy("enough"), THREE) as runs:
        assert group_cases.train_in_threads(runs, tmp_path / "record.json") == [0, 0, 0]
        expected = [group_cases.validation_losses(run.paths) for run in runs]
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
    monkeypatch.setitem(MAX_MERGED_TOKENS, "cpu", 10_000)
    with members(copy("little"), THREE) as runs:
        assert group_cases.train_in_threads(runs, tmp_path / "record2.json") == [0, 0, 0]
        assert sizes.count(3) == 1
        assert sizes.count(2) > 10
        for run, losses in zip(runs, expected, strict=True):
            assert "do not fit into memory together" in str(group_cases.events_text(run.paths))
            assert group_cases.validation_losses(run.paths) == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.usefixtures("torch_settings")
def test_after_an_error_of_a_merged_pass_each_run_computes_its_own(
    copy: Callable[[str], ProjectLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[float]:
        raise RuntimeError("injected")

    monkeypatch.setattr(MergedPasses, "forward_backward", fail)
    losses = []
    for name, chosen in (("two", THREE[:2]), ("one", THREE[:1])):
        with members(copy(name), chosen) as runs:
            assert set(group_cases.train_in_threads(runs, tmp_path / f"{name}.json")) == {0}
            losses.append(group_cases.validation_losses(runs[0].paths))
            text = "not in those of the other runs: injected"
            assert (text in str(group_cases.events_text(runs[0].paths))) == (name == "two")
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("torch_settings")
def test_a_lost_gpu_ends_the_process_of_a_group(
    copy: Callable[[str], ProjectLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run can compute alone either. Each reports the GPU, and their supervisors start another process."""

    def fail(*_: object) -> list[float]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    ended: list[int] = []
    monkeypatch.setattr(MergedPasses, "forward_backward", fail)
    monkeypatch.setattr(os, "_exit", ended.append)
    with members(copy("two"), THREE[:2]) as runs:
        assert group_cases.train_in_threads(runs, tmp_path / "record.json") == [EXIT_BUG] * 2 == ended
        for run in runs:
            (error,) = (e.data for e in JournalReader(run.paths.journal).read() if e.kind == "worker_error")
            assert error["failure_class"] == "hardware"
            assert "computed separately" not in str(group_cases.events_text(run.paths))


@pytest.mark.long
@pytest.mark.usefixtures("torch_settings")
def test_dropout_in_one_run_and_recomputed_activations_in_another(
    copy: Callable[[str], ProjectLayout], tmp_path: Path
) -> None:
    chosen = trains(rank=[4, 8], dropout=[0.2, 0.0], epochs=[1, 1])
    machines = [tiny_project.MACHINE, tiny_project.MACHINE.model_copy(update={"activation_checkpointing": True})]
    losses = {}
    for name, part in (("first", slice(0, 1)), ("second", slice(1, 2)), ("together", slice(0, 2))):
        with members(copy(name), chosen[part], machines[part]) as runs:
            assert set(group_cases.train_in_threads(runs, tmp_path / f"{name}.json")) == {0}
            losses[name] = [group_cases.validation_losses(run.paths) for run in runs]
    for alone, together in zip(losses["first"] + losses["second"], losses["together"], strict=True):
        assert together == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.usefixtures("torch_settings")
def test_a_stop_during_a_validation_does_not_hold_up_the_others(
    copy: Callable[[str], ProjectLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdowns, original = [MemberShutdown(), MemberShutdown()], StepExecutor.validate

    def validate(self: StepExecutor) -> bool | None:
        if self.context.shutdown is shutdowns[0] and self.state.step == 14:  # a step whose checkpoint is due, too
            shutdowns[0].request()
        return original(self)

    monkeypatch.setattr(StepExecutor, "validate", validate)
    with members(copy("project"), THREE[:2]) as runs:
        assert group_cases.train_in_threads(runs, tmp_path / "record.json", shutdowns) == [75, 0]
        assert runs[0].paths.checkpoint_steps()[-1] == 14


class StopAfterSteps(MemberShutdown):
    """A request to stop a run as soon as it has done this number of steps in all of its attempts."""

    def __init__(self, run: RunInGroup, steps: int) -> None:
        super().__init__()
        self._run, self._steps = run, steps

    @property
    def is_requested(self) -> bool:
        return kinds(self._run).count("step") >= self._steps


@pytest.mark.usefixtures("torch_settings")
def test_a_record_of_common_checkpoints_holds_until_another_process_trains_the_run(
    copy: Callable[[str], ProjectLayout], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    with members(copy("project"), THREE[:1]) as [run]:

        def train_from_the_first_record(attempt: int) -> int:
            """Return the step at which this attempt begins, with the record of a group that was killed in attempt 1
            before its next common checkpoint."""
            record.write_text(json.dumps({"runs": {run.paths.root.name: [0, 1]}, "limit": None}), encoding="utf-8")
            stop = StopAfterSteps(run, 2 * attempt)
            assert group_cases.train_in_threads([run], record, [stop], attempt) == [75]
            ready = [event for event in JournalReader(run.paths.journal).read() if event.kind == "worker_ready"]
            return int(ready[-1].data["start_step"])

        assert train_from_the_first_record(1) == 0
        assert run.paths.checkpoint_steps() == [2]
        assert train_from_the_first_record(2) == 0
        assert train_from_the_first_record(3) == 2
        assert "another process has trained this run since" in str(group_cases.events_text(run.paths))


def test_a_run_that_returns_twice_before_the_group_begins_keeps_its_common_checkpoint(tmp_path: Path) -> None:
    record, paths = tmp_path / "record.json", RunPaths(tmp_path / "run")
    record.write_text(json.dumps({"runs": {"run": [7, 1]}, "limit": None}), encoding="utf-8")
    paths.root.mkdir()
    together = TrainingGroup(record)
    for attempt in (2, 3):
        with closing(Journal(paths.journal, attempt)) as journal:
            member = together.join(paths, journal, MemberShutdown(), Heartbeat(None, 0, 0), 0.0)
            assert member.resume_step == 7
            member.end()


@pytest.mark.long
def test_a_diverging_run_ends_alone(copy: Callable[[str], ProjectLayout], tmp_path: Path) -> None:
    guards = {"guards": tiny_project.TRAIN.guards.model_dump() | {"max_bad_steps": 1}}
    wanted = [THREE[0], Train.model_validate(THREE[1].model_dump() | {"learning_rate": 1e30} | guards)]
    with group(tmp_path / "g") as running, members(copy("project"), wanted) as runs:
        for run in runs:
            run.start(running.connection)
        assert [run.wait() for run in runs] == [0, 1]
        [error] = [e for e in JournalReader(runs[1].paths.journal).read() if e.kind == "worker_error"]
        assert error.data["failure_class"] in ("diverged", "hardware")
        runs[1].paths.launch.unlink()
        runs[1].start(running.connection)
        assert runs[1].wait() == 1


@pytest.mark.long
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


@pytest.mark.long
def test_a_run_without_supervisor_gives_up_its_lock_and_the_others_continue(
    copy: Callable[[str], ProjectLayout], tmp_path: Path
) -> None:
    longest, other = (Train.model_validate(THREE[k].model_dump() | {"epochs": n}) for k, n in ((0, 200), (1, 1)))
    with group(tmp_path / "g") as running, members(copy("project"), [longest, other]) as runs:
        processes = [run.start(running.connection) for run in runs]
        until(lambda: runs[0].steps() >= 3, "no progress")
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), runs[0].directory.lock.fd)  # as the end of the supervisor's process does
        assert runs[0].paths.lock().is_held()
        processes[0].abandon()
        until(lambda: not runs[0].paths.lock().is_held(), "the lock is still held")
        assert runs[1].wait() == 0
        assert "interrupted" not in kinds(runs[0])
