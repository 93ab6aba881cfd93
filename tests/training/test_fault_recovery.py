"""Tests of the trainer in this process: it recovers from injected NaN, exhausted memory and failed disks."""

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.config.machine import Machine
from ratchet.config.train import GuardSettings, Train
from ratchet.errors import DivergenceError, InterruptedRunError, MemoryExhaustedError, NonFiniteStateError, StorageError
from ratchet.models import adapters
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection.injection import FaultInjector, InjectedFault
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage import files
from ratchet.training import checkpoint
from ratchet.training.non_finite import describe_origin
from ratchet.training.trainer import TrainingLoop
from small_loop import SMALL, after_steps, loop_of, losses, steps, trained_by

PLAIN = SMALL.model_copy(update={"dropout": 0.0})


def faulty(root: Path, *faults: dict[str, Any], train: Train = SMALL, **more: Any) -> TrainingLoop:
    return loop_of(root, train, faults=FaultInjector(tuple(map(InjectedFault.model_validate, faults))), **more)


def told(loop: TrainingLoop, kind: str) -> list[JournalEvent]:
    return [event for event in JournalReader(loop.context.paths.journal).read() if event.kind == kind]


def same_weights(a: TrainingLoop, b: TrainingLoop) -> bool:
    x, y = trained_by(a), trained_by(b)
    return all(torch.equal(x[name], y[name]) for name in x)


def interrupted(root: Path, count: int, *faults: dict[str, Any], train: Train = SMALL) -> TrainingLoop:
    """Stop a run after `count` steps; return the loop of the next process."""
    with pytest.raises(InterruptedRunError):
        faulty(root, *faults, train=train, stop=after_steps(RunPaths(root), count)).run()
    return faulty(root, *faults, train=train)


def test_a_nan_that_does_not_come_again_changes_nothing(tmp_path: Path) -> None:
    clean, flicker = faulty(tmp_path / "clean"), faulty(tmp_path / "nan", {"kind": "non_finite", "step": 5})
    assert flicker.run() == clean.run()
    assert same_weights(flicker, clean)
    assert losses(flicker.context.paths) == losses(clean.context.paths)
    assert [e.data["step"] for e in told(flicker, "step_repeated")] == [5]


def test_a_step_that_is_nan_twice_is_left_out_and_its_rows_are_named(tmp_path: Path) -> None:
    fault = {"kind": "non_finite", "step": 5, "times": 0}
    loop = faulty(tmp_path / "whole", fault)
    state = loop.run()
    assert state.step == loop.plan.steps
    assert state.skipped_steps == 1
    (skipped,) = told(loop, "step_skipped")
    assert (skipped.data["step"], skipped.data["action"]) == (5, "skip")
    assert skipped.data["rows"] == [row for sequence in loop.plan.batch(4) for row in sequence]
    assert [e.data["step"] for e in steps(loop.context.paths)] == [1, 2, 3, 4, *range(6, loop.plan.steps + 1)]
    assert checkpoint.is_finite(trained_by(loop))
    for at in (4, 5, 9):  # the run is stopped right before, right after, and long after the bad step
        resumed = interrupted(tmp_path / str(at), at if at < 5 else at - 1, fault)
        assert resumed.run() == state
        assert same_weights(resumed, loop)


def test_a_step_that_was_left_out_once_is_left_out_by_a_process_that_finds_nothing_wrong(tmp_path: Path) -> None:
    fault = {"kind": "non_finite", "step": 6, "times": 0}
    whole = faulty(tmp_path / "whole", fault)
    whole.run()
    first = faulty(tmp_path / "killed", fault, stop=after_steps(RunPaths(tmp_path / "killed"), 6))
    with pytest.raises(InterruptedRunError):
        first.run()
    for step in first.context.paths.checkpoint_steps():  # simulates a kill before the last checkpoints were sealed
        if step > 5:
            (first.context.paths.checkpoint(step) / "state.json").unlink()
    healthy = faulty(tmp_path / "killed")
    assert healthy.state.step < 6
    healthy.run()
    assert same_weights(healthy, whole)


def test_repeated_nan_stops_with_a_diagnosis_and_finite_weights(tmp_path: Path) -> None:
    faults = [{"kind": "non_finite", "step": step, "times": 0} for step in range(5, 25)]
    train = SMALL.model_copy(update={"guards": GuardSettings(max_bad_steps=2)})
    loop = faulty(tmp_path / "patient", *faults, train=train)
    with pytest.raises(DivergenceError, match=r"5.*6.*7") as raised:
        loop.run()
    assert "train.learning_rate" in str(raised.value)
    assert str([row for sequence in loop.plan.batch(6) for row in sequence]) in str(raised.value)
    assert checkpoint.is_finite(trained_by(loop))
    assert loop.state.step == 6
    train = SMALL.model_copy(update={"guards": GuardSettings(on_non_finite="stop")})
    at_once = faulty(tmp_path / "at once", {"kind": "non_finite", "step": 3, "times": 0}, train=train)
    with pytest.raises(DivergenceError):
        at_once.run()
    assert at_once.state.step == 2


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj", "model.embed_tokens", "model.layers.0.self_attn.q_proj"]
)
def test_the_layer_in_which_a_nan_began_is_named(tmp_path: Path, name: str) -> None:
    train = PLAIN.model_copy(update={"guards": GuardSettings(on_non_finite="stop")})
    loop = faulty(tmp_path, train=train)
    module = loop.context.model.get_base_model().get_submodule(name)
    with torch.no_grad():
        module.weight[0] = float("nan")
        if name == "model.embed_tokens":
            module.weight.fill_(float("inf"))
    with pytest.raises(
        DivergenceError, match=rf"computed twice; the first output that is not finite is that of {name};"
    ):
        loop.run()


def test_a_loss_that_is_nan_although_no_layer_is_says_so(tmp_path: Path) -> None:
    loop = faulty(tmp_path, {"kind": "non_finite", "step": 5, "times": 0})
    loop.run()
    (skipped,) = told(loop, "step_skipped")
    assert skipped.data["reason"] == (
        "loss is nan, computed twice; no gradient is finite, although the outputs of all layers are"
    )


def test_gradients_tell_the_origin_as_far_as_they_can() -> None:
    norms = {"layers.0": math.nan, "layers.1": math.inf, "layers.2": 1.0}
    assert describe_origin([""], norms) == "the first gradient that is not finite is that of layers.1"
    assert describe_origin(["", "layers.2"], norms) == "the first output that is not finite is that of layers.2"
    assert describe_origin(None, {"layers.0": math.nan}) == "no gradient is finite"  # no pass was watched
    assert describe_origin([""], {"layers.0": 1.0}) == ""


def test_a_spike_names_the_modules_with_the_largest_gradients(tmp_path: Path) -> None:
    train = PLAIN.model_copy(update={"guards": GuardSettings(window_steps=8), "max_grad_norm": 0.5})
    loop = faulty(tmp_path / "report", {"kind": "spike", "step": 12}, train=train)
    loop.run()
    (event,) = told(loop, "gradient_spike")
    modules, position = event.data["modules"], loop.state.module_norm_steps.index(12)
    recorded = {name: norms[position] for name, norms in loop.state.module_norms.items()}
    assert modules == pytest.approx({name: recorded[name] for name in modules}, rel=1e-4)  # norms before clipping
    assert min(modules.values()) >= max(norm for name, norm in recorded.items() if name not in modules) * (1 - 1e-4)
    train = PLAIN.model_copy(update={"guards": GuardSettings(window_steps=8, on_loss_spike="skip")})
    loop = faulty(tmp_path / "skip", {"kind": "spike", "step": 12}, train=train)
    loop.run()
    (skipped,) = told(loop, "step_skipped")
    assert skipped.data["reason"].startswith("loss ")
    assert "; largest gradient norms: model.layers." in skipped.data["reason"]


def test_going_back_takes_the_weights_of_the_snapshot_and_goes_on_with_the_next_rows(tmp_path: Path) -> None:
    guards = GuardSettings(on_non_finite="roll_back", snapshot_every_steps=3, learning_rate_factor=0.5)
    train = SMALL.model_copy(update={"guards": guards})
    fault = {"kind": "non_finite", "step": 8, "times": 0}
    before = faulty(tmp_path / "before", train=train, stop=after_steps(RunPaths(tmp_path / "before"), 6))
    with pytest.raises(InterruptedRunError):
        before.run()
    at_bad = faulty(tmp_path / "at", fault, train=train, stop=StopWhenSkipped(RunPaths(tmp_path / "at")))
    with pytest.raises(InterruptedRunError):
        at_bad.run()
    assert at_bad.state.step == 8
    assert same_weights(at_bad, before)
    (skipped,) = told(at_bad, "step_skipped")
    assert (skipped.data["action"], skipped.data["rollback_step"], skipped.data["learning_rate_scale"]) == (
        "roll_back",
        6,
        0.5,
    )
    whole = faulty(tmp_path / "whole", fault, train=train)
    state = whole.run()
    assert state.skipped_steps == 2  # step 7, which is rolled back, and step 8
    rates = {e.data["step"]: e.data["learning_rate"] for e in steps(whole.context.paths)}
    clean = faulty(tmp_path / "clean", train=train)
    clean.run()
    expected = {e.data["step"]: e.data["learning_rate"] for e in steps(clean.context.paths)}
    assert rates[7] == expected[7]
    assert rates[9] == 0.5 * expected[9]
    for at in (6, 7, 9):
        resumed = interrupted(tmp_path / str(at), at if at < 8 else at - 1, fault, train=train)
        assert resumed.run() == state
        assert same_weights(resumed, whole)


class StopWhenSkipped(type(after_steps(RunPaths(Path("/nonexistent")), 1))):  # type: ignore[misc]
    """Asks the loop to stop after a skipped step."""

    def __init__(self, paths: RunPaths) -> None:
        super().__init__(paths, 10**6)
        self._journal = paths.journal

    @property
    def is_requested(self) -> bool:
        return any(event.kind == "step_skipped" for event in JournalReader(self._journal).read())


@pytest.mark.parametrize("action", ["report", "skip"])
def test_a_spike_is_reported_or_left_out(tmp_path: Path, action: str) -> None:
    train = SMALL.model_copy(update={"guards": GuardSettings(on_spike=action, window_steps=8)})  # type: ignore[arg-type]
    loop = faulty(tmp_path, {"kind": "spike", "step": 12}, train=train)
    loop.run()
    kind = "gradient_spike" if action == "report" else "step_skipped"
    (event,) = told(loop, kind)
    assert event.data["step"] == 12
    assert (12 in [e.data["step"] for e in steps(loop.context.paths)]) == (action == "report")


def test_a_validation_without_a_number_stops_with_a_diagnosis(tmp_path: Path) -> None:
    loop = faulty(tmp_path)
    with torch.no_grad():
        loop.context.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(DivergenceError, match=r"validation loss is nan at step 0.*base model"):
        loop.executor.validate()
    assert not told(loop, "validation")


def test_a_weight_that_becomes_nan_is_never_sealed(tmp_path: Path) -> None:
    clean = faulty(tmp_path / "clean")
    clean.run()
    loop = faulty(tmp_path / "poisoned", {"kind": "weights", "step": 7})
    with pytest.raises(NonFiniteStateError):
        loop.run()
    again = faulty(tmp_path / "poisoned")
    assert 0 < again.state.step <= 7
    assert checkpoint.is_finite(trained_by(again))
    again.run()
    assert same_weights(again, clean)


def memory(step: int, steps: int, tokens: int, phase: str = "train") -> dict[str, Any]:
    return {"kind": "memory", "step": step, "steps": steps, "tokens": tokens, "phase": phase}


def test_exhausted_memory_repeats_the_step_in_smaller_pieces(tmp_path: Path) -> None:
    clean = faulty(tmp_path / "clean", train=PLAIN)
    clean.run()
    loop = faulty(tmp_path / "small", memory(4, 3, 50), train=PLAIN)
    loop.run()
    assert [e.data["batch"] for e in steps(loop.context.paths)] == [e.data["batch"] for e in steps(clean.context.paths)]
    assert losses(loop.context.paths)[:3] == losses(clean.context.paths)[:3]
    pairs = zip(losses(loop.context.paths), losses(clean.context.paths), strict=True)
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs)
    told_budgets = told(loop, "microbatch_budget")
    assert {e.data["action"] for e in told_budgets} == {"shrink"}
    assert told_budgets[0].data["step"] >= 4
    assert loop.state.budget.tokens is not None
    assert loop.state.budget.tokens <= 0.8 * told_budgets[0].data["failed_tokens"]


def test_exhausted_memory_in_validation_changes_validation_alone(tmp_path: Path) -> None:
    clean = faulty(tmp_path / "clean")
    clean.run()
    loop = faulty(tmp_path / "small", memory(1, 0, 30, "validation"))
    loop.run()
    assert same_weights(loop, clean)
    assert losses(loop.context.paths) == losses(clean.context.paths)
    assert loop.state.budget == clean.state.budget
    assert {e.data["phase"] for e in told(loop, "microbatch_budget")} == {"validation"}
    assert loop.state.validation_loss == pytest.approx(clean.state.validation_loss, rel=1e-5)


def test_a_run_begins_within_what_the_forecast_allows_and_does_so_again_after_a_restart(tmp_path: Path) -> None:
    def begun(first: int | None) -> TrainingLoop:
        return loop_of(tmp_path, SMALL, micro=8, initial_micro_batch_tokens=first)

    limit = begun(60)
    assert limit.state.budget.tokens == limit.state.validation_budget.tokens == 60
    assert {(e.data["phase"], e.data["step"]) for e in told(limit, "microbatch_budget")} == {
        ("train", 1),
        ("validation", 0),
    }
    again = begun(None)  # there is more memory now, but the sums must stay the same
    assert again.state.budget == limit.state.budget
    assert len(told(again, "microbatch_budget")) == 2
    assert again.run().budget.tokens == 60, "what the forecast allows is not tried larger"


def test_each_kill_for_memory_halves_the_micro_batches_down_to_single_rows(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, SMALL, micro=8)
    longest = int(loop.context.train_rows.lengths.max())
    for kill in range(7):
        loop.context.journal.append("attempt_started", pid=1, code_version="")
        loop.context.journal.append(
            "worker_exited", exit_code=-9, failure_class="out_of_memory", decision="Retry", text="killed"
        )
        loop = loop_of(tmp_path, SMALL, micro=8)
        if kill == 0:
            assert loop.state.budget.tokens == 8 * longest // 2
            assert loop.state.validation_budget.tokens == 8 * longest // 2
    assert loop.state.budget.tokens is not None
    assert loop.state.budget.tokens <= longest, "down to single rows, and no further"


@pytest.mark.long
def test_one_row_that_does_not_fit_has_its_activations_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = faulty(tmp_path / "clean", micro=1)
    clean.run()
    loop = faulty(tmp_path / "full", micro=1)

    def memory(phase: str, step: int, tokens: int) -> None:
        if phase == "train" and step >= 3 and not adapters.uses_activation_checkpointing(loop.context.model):
            raise MemoryError(f"{tokens} tokens")

    monkeypatch.setattr(loop.context.faults, "memory", memory)
    loop.run()
    assert [e.data["text"].endswith("step 3: from here on activations are recomputed") for e in told(loop, "notice")]
    assert same_weights(loop, clean), "recomputed to the last bit"


def test_one_row_that_does_not_fit_says_what_would(tmp_path: Path) -> None:
    loop = faulty(tmp_path, memory(3, 0, 2))
    with pytest.raises(MemoryExhaustedError, match="one row of") as raised:
        loop.run()
    assert "take less than" in str(raised.value)  # the text that the worker passes to the loop
    assert loop.state.step == 2


def test_a_disk_that_is_full_for_a_while_holds_nothing_up_and_changes_nothing(tmp_path: Path) -> None:
    clean = faulty(tmp_path / "clean")
    state = clean.run()
    loop = faulty(tmp_path / "full", {"kind": "disk", "step": 4, "times": 3})
    assert loop.run() == state
    assert same_weights(loop, clean)
    alerts = [e.data["text"] for e in told(loop, "alert")]
    assert "No space left on device" in alerts[0]
    assert "saved again" in alerts[-1]
    assert loop.context.paths.checkpoint_steps()[-1] == state.step


def test_a_disk_that_stays_dead_ends_the_run_after_training_with_the_old_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = files.before
    # A checkpoint is sealed first: on a busy machine, six steps may end before the first checkpoint is sealed.
    interrupted(tmp_path, 4)
    loop = faulty(tmp_path, {"kind": "disk", "step": 6, "times": 0, "errno": "EROFS"})
    quick = Machine(device="cpu", micro_batch_size=4, checkpoint_every=2, storage_timeout_s=0.5)
    object.__setattr__(loop.context, "machine", quick)
    with pytest.raises(StorageError, match=r"could not be saved within 0\.5 s.*Read-only.*saved step is"):
        loop.run()
    assert loop.state.step == loop.plan.steps
    monkeypatch.setattr(files, "before", sound)
    # The next process does this when it opens the run. The failed disk prevented it before.
    files.remove_partials(loop.context.paths.checkpoints)
    again = faulty(tmp_path)
    assert 0 < again.state.step <= 6
    assert again.run().step == loop.plan.steps


def test_snapshot_is_not_changed_by_later_training(tmp_path: Path) -> None:
    loop = faulty(tmp_path, stop=after_steps(RunPaths(tmp_path), 2))
    with pytest.raises(InterruptedRunError):
        loop.run()
    taken = checkpoint.take_snapshot(loop.state, loop.context.model, loop.executor.optimizer)
    now = {**taken.weights, **taken.optimizer_tensors}
    assert len(now) == len(taken.weights) + len(taken.optimizer_tensors)
    kept = {name: tensor.clone() for name, tensor in now.items()}
    with torch.no_grad():
        values = [value for entry in loop.executor.optimizer.state.values() for value in entry.values()]
        for value in (*loop.executor.parameters, *values):
            value.add_(1.0)
    assert all(torch.equal(kept[name], tensor) for name, tensor in now.items())


def test_a_clock_that_jumps_and_files_of_any_age_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = faulty(tmp_path / "clean")
    state = clean.run()
    jumps = iter(range(10**6))
    # The clock alternates between one hour ahead and one hour behind.
    monkeypatch.setattr(time, "time", lambda: 1e9 + 3600 * (-1) ** next(jumps))
    resumed = interrupted(tmp_path / "jumps", 9)
    paths = resumed.context.paths
    for age, step in enumerate(paths.checkpoint_steps()):  # the oldest checkpoint has the newest file time
        for path in (paths.checkpoint(step), *paths.checkpoint(step).iterdir()):
            os.utime(path, (10**9 - age, 10**9 - age))
    again = faulty(paths.root)
    assert again.state.step == 9
    assert again.run() == state
    assert same_weights(again, clean)
    assert paths.checkpoint_steps()[-1] == state.step


def test_what_is_gone_is_told_of(tmp_path: Path) -> None:
    paths = interrupted(tmp_path, 9).context.paths
    for step in paths.checkpoint_steps():
        shutil.rmtree(paths.checkpoint(step))
    loop = faulty(tmp_path)
    assert loop.state.step == 0
    assert "checkpoint of step 9, which the journal lists, is missing" in told(loop, "notice")[-1].data["text"]
    interrupted(tmp_path / "other", 4).context.paths.journal.unlink()
    loop = faulty(tmp_path / "other")
    assert loop.state.step == 4
    assert "the metrics of the steps between are lost" in told(loop, "notice")[-1].data["text"]
