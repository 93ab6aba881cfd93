"""Proves rows R1 and R9 for a teacher in memory: resumed runs are exact, and micro-batches shrink to the remaining
memory."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from online_distillation_cases import (
    CPU,
    attending,
    distill_settings,
    found,
)
from ratchet.errors import InterruptedRunError
from ratchet.models.loss import SequenceBatch
from ratchet.models.teacher import OnlineTeacherTargets
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.training.distillation import OnlineTeacherReader
from small_loop import ROWS, after_steps, loop_of, losses, random_rows, trained_by

PACKAGES = ("training", "models")


@pytest.mark.parametrize("top_k", [6, None], ids=["some", "all"])
@pytest.mark.parametrize("batching", ["shuffled", "packed"])
def test_a_training_goes_on_exactly_and_micro_batches_change_last_bits_only(
    tmp_path: Path, batching: str, top_k: int | None
) -> None:
    train = distill_settings(top_k).model_copy(update={"batching": batching})
    folder, rows = tmp_path / "teacher", random_rows(ROWS, seed=1)
    once = loop_of(tmp_path / "once", train, teacher=attending(folder, train, rows))
    once.run()
    again = tmp_path / "again"
    with pytest.raises(InterruptedRunError):
        loop_of(again, train, after_steps(RunPaths(again), 5), teacher=attending(folder, train, rows)).run()
    resumed = loop_of(again, train, teacher=attending(folder, train, rows))
    resumed.run()
    assert losses(RunPaths(again)) == losses(once.context.paths)
    for name, value in trained_by(once).items():
        assert torch.equal(value, trained_by(resumed)[name])
    small = loop_of(tmp_path / "small", train, micro=1, teacher=attending(folder, train, rows))
    small.run()
    assert losses(small.context.paths) == pytest.approx(losses(once.context.paths), rel=1e-4)
    alone = loop_of(tmp_path / "alone", train)
    alone.run()
    assert losses(alone.context.paths)[0] != losses(once.context.paths)[0]


class Narrow(OnlineTeacherReader):
    """A teacher that runs out of memory with more than two rows."""

    def get_targets(self, sequences: Sequence[Sequence[int]], batch: SequenceBatch) -> OnlineTeacherTargets:
        if len(sequences) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB, the teacher")
        return super().get_targets(sequences, batch)


def test_micro_batches_shrink_to_what_the_teacher_has_room_for(tmp_path: Path) -> None:
    train, rows = distill_settings(None), random_rows(ROWS, seed=1)
    wide = loop_of(tmp_path / "wide", train, teacher=attending(tmp_path / "teacher", train, rows))
    wide.run()
    narrow = Narrow(found(tmp_path / "teacher"), train, rows, CPU)
    once = loop_of(tmp_path / "once", train, teacher=narrow)
    once.run()
    shrunk = [one for one in JournalReader(once.context.paths.journal).read() if one.kind == "microbatch_budget"]
    assert [one.data["action"] for one in shrunk][:1] == ["shrink"]
    assert losses(once.context.paths) == pytest.approx(losses(wide.context.paths), rel=1e-4)
    again = tmp_path / "again"
    with pytest.raises(InterruptedRunError):
        loop_of(again, train, after_steps(RunPaths(again), 5), teacher=narrow).run()
    loop_of(again, train, teacher=narrow).run()
    assert losses(RunPaths(again)) == losses(once.context.paths)
