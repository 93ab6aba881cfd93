"""Tests real adapters of finished runs on validation rows, in this process and in a worker process."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import plain_fork_server
import tiny_project
from ratchet.data import token_files
from ratchet.errors import (
    BaseModelError,
    DamagedFileError,
    DataError,
    DivergenceError,
    MemoryExhaustedError,
    SettingsError,
)
from ratchet.evaluation import rows, validation_scoring
from ratchet.evaluation.scorer import Scorer
from ratchet.models import adapters, base_model, loading
from ratchet.models.loss import answer_nll
from ratchet.models.scoring import RowLikelihood
from ratchet.runs import fork_server
from ratchet.runs.device_lock import DeviceLock
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.fork_server import ForkServer
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import ValidationJob, ValidationScores, validation_scores_path
from ratchet.tuning import scheduler
from validation_scoring_cases import SETTINGS, damage, ids, launch, layout, made, scorer, wait_for  # noqa: F401 (fixtures)

CPU = torch.device("cpu")


def loaded(layout: ProjectLayout, run_id: str) -> Any:
    """Load the model as training does, without the code under test."""
    base, paths = BaseCard.load(layout.base_card), RunPaths(layout.runs / run_id)
    model = loading.load(base_model.locate(layout, base), base, RunSpec.load(paths.spec).train, CPU)
    return adapters.load(model, paths.result / "adapter")


def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the quantization of every base that is loaded later."""
    seen: list[str] = []
    before = loading.load

    def load(path: Path, card: Any, train: Any, device: Any) -> Any:
        seen.append(train.quantization)
        return before(path, card, train, device)

    monkeypatch.setattr(loading, "load", load)
    return seen


def test_loss_equals_that_of_training_and_each_base_is_loaded_once(
    layout: ProjectLayout, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, asked = loads(monkeypatch), [ids["first"], ids["plain"], ids["second"]]
    found = validation_scoring.score_runs(layout, launch(asked))
    assert seen == ["nf4", "none"]
    assert [one.run_id for one in found] == asked
    assert len({tuple(one.values["validation_loss"]) for one in found}) == 3  # each run has its own adapter and base
    validation = token_files.open_split(layout.data, "validation")
    for one in found:
        model, own = loaded(layout, one.run_id), []
        for row in validation:
            ids_bt, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            with torch.no_grad():
                own.append(float(answer_nll(model, ids_bt, labels).double().sum()))
        assert one.ids == tuple(validation["id"])
        assert one.values["validation_loss"] == pytest.approx(own, rel=1e-4)
        assert one.metrics["validation_loss"] == pytest.approx(math.fsum(own) / sum(one.tokens), rel=1e-5)
        report = json.loads((layout.runs / one.run_id / "result" / "train.json").read_text())
        assert one.adapter_digest == report["adapter_digest"]


def test_answers_are_scored_as_in_evaluate(
    layout: ProjectLayout, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model answers nonsense, so the test sets the truth to its answers: for some rows, and nearly for another."""
    answered: list[list[str]] = []
    truth = ["", "", ""]
    before_answers, before_read = Scorer.generate_answers, rows.read

    def answers(self: Any, *asked: Any) -> list[list[str]]:
        answered[:] = before_answers(self, *asked)
        return answered

    def read(*asked: Any) -> Any:
        real = before_read(*asked)
        return replace(real, references=[*truth, *real.references[len(truth) :]])

    monkeypatch.setattr(Scorer, "generate_answers", answers)
    monkeypatch.setattr(rows, "read", read)
    validation_scoring.score_runs(layout, launch([ids["first"]], ("accuracy",)))
    first, second, third = (one[0] for one in answered[:3])
    assert first and second and third
    truth[:] = [first, f"{second} zebra", third]
    data = DatasetCard.load(layout.dataset_card)
    validation_scores_path(
        layout.runs / ids["first"], launch([ids["first"]], ("accuracy",)).request_digest(data)
    ).unlink()
    [found] = validation_scoring.score_runs(layout, launch([ids["first"]], ("accuracy", "exact_match", "token_f1")))
    assert found.values["accuracy"][:3] == (1.0, 0.0, 1.0)
    assert found.values["exact_match"] == found.values["accuracy"]
    assert sum(found.values["accuracy"][3:]) == 0
    assert found.metrics["accuracy"] == pytest.approx(2 / len(found.ids))
    assert 0 < found.values["token_f1"][1] < 1


def test_a_sample_is_the_first_rows_and_never_a_test_row(layout: ProjectLayout, ids: dict[str, str]) -> None:
    [all_rows] = validation_scoring.score_runs(layout, launch([ids["first"]]))
    [some] = validation_scoring.score_runs(layout, launch([ids["first"]], rows=5))
    [more] = validation_scoring.score_runs(layout, launch([ids["first"]], rows=10_000))
    assert some.ids == all_rows.ids[:5]
    assert some.values["validation_loss"] == pytest.approx(all_rows.values["validation_loss"][:5], rel=1e-4)
    assert more.ids == all_rows.ids
    assert not set(all_rows.ids) & set(token_files.open_split(layout.data, "test")["id"])


def test_stored_scores_are_reused_unless_damaged_or_of_another_adapter(
    layout: ProjectLayout, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = launch([ids["first"], ids["second"]])
    before = validation_scoring.score_runs(layout, asked)
    seen = loads(monkeypatch)
    assert validation_scoring.score_runs(layout, asked) == before
    assert seen == []
    path = validation_scores_path(
        layout.runs / ids["second"], asked.request_digest(DatasetCard.load(layout.dataset_card))
    )
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"tokens": [\n    ', b'"tokens": [\n    1', 1))
    assert path.read_bytes() != whole
    with pytest.raises(DamagedFileError, match="changed since it was written"):
        ValidationScores.load(path)
    assert validation_scoring.score_runs(layout, asked) == before
    assert seen == ["nf4"]
    assert path.read_bytes() == whole
    other = ValidationScores.load(path).model_copy(update={"adapter_digest": "0" * 64}).sealed()
    other.save(path)
    assert validation_scoring.score_runs(layout, asked) == before  # the stored scores are of another adapter


def test_questions_differ_only_by_what_changes_scores(layout: ProjectLayout) -> None:
    data = DatasetCard.load(layout.dataset_card)
    one = launch(["a"], ("validation_loss",)).request_digest(data)
    assert launch(["a", "b"], ("validation_loss",), threads=7).request_digest(data) == one
    assert launch(["a"]).model_copy(update={"max_new_tokens": 9}).request_digest(data) == one
    answers = launch(["a"], ("accuracy", "validation_loss"))
    assert answers.request_digest(data) == launch(["a"], ("validation_loss", "accuracy")).request_digest(data)
    assert answers.model_copy(update={"max_new_tokens": 9}).request_digest(data) != answers.request_digest(data)
    assert launch(["a"], rows=3).request_digest(data) != one
    assert launch(["a"]).request_digest(data.model_copy(update={"digest": "0" * 64})) != one


def test_exhausted_memory_halves_all_batches(
    layout: ProjectLayout, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, failing = Scorer.score_rows, [ids["second"]]
    exact = validation_scoring.score_runs(layout, launch([ids["first"], ids["second"]], evaluation_batch_size=4))
    for one in exact:
        validation_scores_path(layout.runs / one.run_id, one.request_digest).unlink()
    shutil.rmtree(layout.scores)
    sizes: list[int] = []

    def likelihoods(self: Scorer, *asked: Any) -> list[RowLikelihood]:
        sizes.append(self.batch_rows)
        if failing and self.batch_rows == 8 and len(sizes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return before(self, *asked)

    monkeypatch.setattr(Scorer, "score_rows", likelihoods)
    found = validation_scoring.score_runs(layout, launch([ids["first"], ids["second"]], evaluation_batch_size=8))
    assert sizes == [8, 8, 4, 4]
    assert [one.numerics["batch_rows"] for one in found] == [4, 4]
    assert [one.values for one in found] == [one.values for one in exact]


COMPUTED = Scorer.score_rows


def exhausted(*_: Any) -> list[RowLikelihood]:
    raise torch.OutOfMemoryError("CUDA out of memory")


def with_nan(*asked: Any) -> list[RowLikelihood]:
    return [replace(one, nll=math.nan) if i == 2 else one for i, one in enumerate(COMPUTED(*asked))]


@pytest.mark.parametrize(
    ("broken", "kind", "text"),
    [
        (exhausted, MemoryExhaustedError, "a single row"),
        (with_nan, DivergenceError, r"not finite for 1 of \d+ validation rows"),
    ],
)
def test_failed_scores_are_an_error_and_not_stored(
    layout: ProjectLayout,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    broken: Any,
    kind: type[Exception],
    text: str,
) -> None:
    monkeypatch.setattr(Scorer, "score_rows", broken)
    with pytest.raises(kind, match=text):
        validation_scoring.score_runs(layout, launch([ids["first"]], evaluation_batch_size=4))
    assert not list((layout.runs / ids["first"]).glob("*validation_scores*"))


def change_card(layout: ProjectLayout, **changes: Any) -> None:
    DatasetCard.load(layout.dataset_card).model_copy(update=changes).save(layout.dataset_card)


REFUSED: dict[str, tuple[Callable[[ProjectLayout, str], None], type[Exception], str]] = {
    "damaged adapter": (damage, DamagedFileError, "adapter_model"),
    "no result": (
        lambda layout, run_id: shutil.rmtree(layout.runs / run_id / "result"),
        DamagedFileError,
        "not sealed",
    ),
    "other data": (lambda layout, _: change_card(layout, digest="0" * 64), DataError, "other data"),
    "other base": (lambda layout, _: change_card(layout, base_digest="0" * 64), BaseModelError, "another base"),
    "text task": (lambda layout, _: change_card(layout, task="text"), SettingsError, "exact_match"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unusable_runs_and_data_are_refused_before_a_model_is_loaded(
    layout: ProjectLayout, ids: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, kind, text = REFUSED[what]
    break_it(layout, ids["second"])
    seen = loads(monkeypatch)
    with pytest.raises(kind, match=text):
        validation_scoring.score_runs(layout, launch([ids["first"], ids["second"]], ("validation_loss", "accuracy")))
    assert seen == []


def test_unknown_runs_and_metrics_are_refused(layout: ProjectLayout) -> None:
    with pytest.raises(DataError, match="no result"):
        job = ValidationJob(run_ids=("0123456789ab",), metrics=("validation_loss",))
        scheduler.score_runs(layout, SETTINGS, job, ForkServer(), lambda: None, DeviceLock(None))
    with pytest.raises(SettingsError, match="train_seconds"):
        scheduler.parse_row_metric("train_seconds")


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer() as made:
        yield made


def use_code(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let a process that scores execute this code instead."""
    monkeypatch.setattr(fork_server, "SERVER", plain_fork_server.COMMAND)
    monkeypatch.setattr(scheduler, "SCORER_MODULE", "plain_fork_server")
    monkeypatch.setenv(plain_fork_server.CODE, code)


def test_arguments_hold_no_password(
    layout: ProjectLayout, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch, server: ForkServer
) -> None:
    use_code(monkeypatch, "import sys; print('SettingsError: told', *sys.argv); sys.exit(1)")
    machine = SETTINGS.machine.model_copy(update={"study_storage": "postgresql://user:opensesame@host/name"})
    settings = SETTINGS.model_copy(update={"machine": machine})  # params.yaml would refuse such an address
    job = ValidationJob(run_ids=(ids["first"],), metrics=("validation_loss",))
    with pytest.raises(Exception, match="told") as failed:
        scheduler.score_runs(layout, settings, job, server, lambda: None, DeviceLock(None))
    assert ids["first"] in str(failed.value)
    assert "opensesame" not in str(failed.value)


class _EnoughError(Exception):
    """Raised to end the wait."""


def test_exception_while_waiting_ends_it(
    layout: ProjectLayout, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch, server: ForkServer
) -> None:
    marks = layout.root / "marks"
    marks.mkdir()
    script = f"""
import os, pathlib, signal, sys, time
def ended(*_):
    pathlib.Path({str(marks)!r}, "ended").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, ended)
pathlib.Path({str(marks)!r}, str(os.getpid())).touch()
time.sleep(600)
"""
    use_code(monkeypatch, script)

    def look() -> None:
        if list(marks.iterdir()):
            raise _EnoughError

    with pytest.raises(_EnoughError):
        job = ValidationJob(run_ids=(ids["first"],), metrics=("validation_loss",))
        scheduler.score_runs(layout, SETTINGS, job, server, look, DeviceLock(None))
    [pid] = [path.name for path in marks.iterdir() if path.name != "ended"]
    assert (marks / "ended").exists()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")


def test_the_process_dies_with_its_parent(layout: ProjectLayout, ids: dict[str, str]) -> None:
    command = scorer(layout, launch([ids["first"]]))
    script = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen({command!r} + [str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=tiny_project.environment())
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_for(lambda: "libtorch" in Path(f"/proc/{child}/maps").read_text(), "torch")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not is_alive(child), "its end")
    assert not list(layout.runs.rglob("*validation_scores*"))


def is_alive(pid: int) -> bool:
    """Return whether the process still runs; a zombie counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_with_another_parent_than_named_does_not_begin(layout: ProjectLayout, ids: dict[str, str]) -> None:
    done = subprocess.run(
        scorer(layout, launch([ids["first"]]), str(os.getpid() + 1)), capture_output=True, check=False,
        env=tiny_project.environment(),
    )  # fmt: skip
    assert done.returncode == 75
