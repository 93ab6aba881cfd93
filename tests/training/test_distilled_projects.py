"""Tests of projects with a teacher in memory: identity of runs, refused teachers and messages."""

from typing import Any

import pytest

from distillation_cases import nothing, other_tokenizer, padded, short_context
from distilled_project_cases import (
    project,  # noqa: F401 (a fixture)
    reference,  # noqa: F401 (a fixture)
    told,
    with_one,  # noqa: F401 (a fixture)
    with_teacher,
)
from ratchet.config.train import DistillSettings, Train
from ratchet.data import token_files
from ratchet.errors import BaseModelError, InputError
from ratchet.runs.directory import RunSpec
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.training import distillation
from ratchet.training.run_spec import build_launch, build_run_spec


def test_run_ids_are_stable() -> None:
    spec = RunSpec(train=Train(), data_digest="d" * 64, base_digest="b" * 64)
    assert spec.run_id == "b38566ace6fd"
    distill = DistillSettings(teacher="0123456789ab", temperature=2.0)
    written = spec.model_copy(update={"train": Train(distill=distill), "distillation_digest": "t" * 64})
    assert written.run_id == "5ea149c12de6"
    during = distill.model_copy(update={"mode": "online"})
    assert written.model_copy(update={"train": Train(distill=during)}).run_id != written.run_id


def test_a_teacher_is_known_by_its_bytes(project: ProjectLayout) -> None:
    before = build_run_spec(project, with_teacher(project))
    assert (
        before.train.distill.teacher
        == digests.hash_files(build_launch(project, with_teacher(project)).teacher_files)[:12]
    )
    (project.root / "teacher").rename(project.root / "elsewhere")
    assert build_run_spec(project, with_teacher(project, teacher="elsewhere")) == before
    with pytest.raises(BaseModelError, match="teacher: no such directory"):
        build_run_spec(project, with_teacher(project))
    config = project.root / "elsewhere" / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    assert build_run_spec(project, with_teacher(project, teacher="elsewhere")).run_id != before.run_id


@pytest.mark.parametrize(
    "change", [{"quantization": "nf4"}, {"temperature": 2.0}, {"top_k": 8}, {"weight": 0.5}, {"direction": "reverse"}]
)
def test_how_it_teaches_makes_another_run(project: ProjectLayout, change: dict[str, Any]) -> None:
    assert (
        build_run_spec(project, with_teacher(project, **change)).run_id
        != build_run_spec(project, with_teacher(project)).run_id
    )


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (nothing, {"top_k": 400}, "train.distill.top_k: 400"),
        (other_tokenizer, {}, "'quite another'.*ratchet generate"),
        (short_context, {}, "reads at most 16"),
    ],
    ids=["top-k", "tokenizer", "context"],
)
def test_what_cannot_teach_is_refused_before_anything_is_loaded(
    project: ProjectLayout, spoil: Any, changes: dict[str, Any], message: str
) -> None:
    spoil(project)
    settings = with_teacher(project, **changes)
    rows = token_files.load_rows(project.data, "train")
    for ask in (
        lambda: distillation.find_teacher(build_run_spec(project, settings), build_launch(project, settings), rows),
        lambda: told(project, settings),
    ):
        with pytest.raises(InputError, match=message):
            ask()


def test_padded_teacher_is_allowed_and_reported(project: ProjectLayout) -> None:
    padded(project)
    assert "512 rows (teacher)" in told(project, with_teacher(project))


def test_all_tokens_need_a_teacher_that_stays() -> None:
    with pytest.raises(ValueError, match=r"top_k: found null, .* mode: online"):
        DistillSettings(top_k=None)
