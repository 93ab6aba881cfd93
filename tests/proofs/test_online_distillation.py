"""Proves rows R1 and R9 for a teacher in memory: resumed runs are exact, and micro-batches shrink to the room that
is left.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from distillation_live_cases import (
    CPU,
    attending,
    found,
    taught,
)
from ratchet.errors import InterruptedRunError
from ratchet.models.loss import SequenceBatch
from ratchet.models.teacher import OnlineTeacherTargets
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.training.online_distillation import OnlineTeacherReader
from small_loop import ROWS, after_steps, loop_of, losses, random_rows, trained_by

PACKAGES = ("training", "models")


@pytest.mark.parametrize("top_k", [6, None], ids=["some", "all"])
@pytest.mark.parametrize("batching", ["shuffled", "packed"])
def test_a_training_goes_on_exactly_and_micro_batches_change_last_bits_only(
    tmp_path: Path, batching: str, top_k: int | None
) -> None:
    train = taught(top_k).model_copy(update={"batching": batching})
    folder, rows = tmp_path / "teacher", random_rows(ROWS, seed=1)
    once = loop_of(tmp_path / "once", train, lessons=attending(folder, train, rows))
    once.run()
    again = tmp_path / "again"
    with pytest.raises(InterruptedRunError):
        loop_of(again, train, after_steps(RunPaths(again), 5), lessons=attending(folder, train, rows)).run()
    resumed = loop_of(again, train, lessons=attending(folder, train, rows))
    resumed.run()
    assert losses(RunPaths(again)) == losses(once.task.paths)
    for name, value in trained_by(once).items():
        assert torch.equal(value, trained_by(resumed)[name])
    small = loop_of(tmp_path / "small", train, micro=1, lessons=attending(folder, train, rows))
    small.run()
    assert losses(small.task.paths) == pytest.approx(losses(once.task.paths), rel=1e-4)
    alone = loop_of(tmp_path / "alone", train)
    alone.run()
    assert losses(alone.task.paths)[0] != losses(once.task.paths)[0]


class Narrow(OnlineTeacherReader):
    """Has no room for more than two rows at a time."""

    def of(self, sequences: Sequence[Sequence[int]], batch: SequenceBatch) -> OnlineTeacherTargets:
        if len(sequences) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB, the teacher")
        return super().of(sequences, batch)


def test_micro_batches_shrink_to_what_the_teacher_has_room_for(tmp_path: Path) -> None:
    train, rows = taught(None), random_rows(ROWS, seed=1)
    wide = loop_of(tmp_path / "wide", train, lessons=attending(tmp_path / "teacher", train, rows))
    wide.run()
    narrow = Narrow(found(tmp_path / "teacher"), train, rows, CPU)
    once = loop_of(tmp_path / "once", train, lessons=narrow)
    once.run()
    shrunk = [one for one in JournalReader(once.task.paths.journal).read() if one.kind == "budget"]
    assert [one.data["action"] for one in shrunk][:1] == ["shrink"]
    assert losses(once.task.paths) == pytest.approx(losses(wide.task.paths), rel=1e-4)
    again = tmp_path / "again"
    with pytest.raises(InterruptedRunError):
        loop_of(again, train, after_steps(RunPaths(again), 5), lessons=narrow).run()
    loop_of(again, train, lessons=narrow).run()
    assert losses(RunPaths(again)) == losses(once.task.paths)
