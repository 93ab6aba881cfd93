"""Tests of the progress view, which is computed from events, and of the state read from the run directory."""

import os
from pathlib import Path
from typing import Any

import pytest

from ratchet.runs import progress_view
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import NOTABLE_EVENTS, POINTS, DownsampledCurve, ProgressView
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.storage import files

T = 1_760_000_000.0


def said(kind: str, t: float = T, attempt: int = 1, **data: Any) -> JournalEvent:
    return JournalEvent(kind, t, attempt, data)


def step(number: int, t: float | None = None, **changes: Any) -> JournalEvent:
    data = {"step": number, "loss": 2.0 / number, "learning_rate": 1e-3, "grad_norm": 0.5, "trained_tokens": 100,
            "input_tokens": 500, "step_s": 0.5} | changes  # fmt: skip
    return said("step", T + number if t is None else t, **data)


def ready(start: int = 0, planned: int = 100, **changes: Any) -> JournalEvent:
    data = {"start_step": start, "planned_steps": planned, "device": "cuda", "compute_dtype": "bfloat16", "ranks": 1}
    return said("worker_ready", **(data | changes))


def told(*events: JournalEvent) -> ProgressView:
    vitals = ProgressView()
    for event in events:
        vitals.update(event)
    return vitals


def test_figures_of_a_training() -> None:
    vitals = told(
        said("attempt_started", pid=1), said("memory_forecast", forecast={"phases": [], "notes": []},
            available_bytes=7),
        ready(flops_per_token=2e9, peak_flops_per_s=1e13), step(1), step(2),
        said("validation", step=2, loss=1.5, tokens=10, seconds=1.0, improved=True),
    )  # fmt: skip
    assert vitals.state == "training"
    assert vitals.progress.tokens_per_s == 1000
    assert vitals.progress.trained_tokens_per_s == 200
    assert vitals.mfu == pytest.approx(0.2)
    assert vitals.gradient_norm == 0.5
    assert vitals.train.points() == [(1, 2.0), (2, 1.0)]
    assert vitals.validation.points() == [(2, 1.5)]
    assert (vitals.available_bytes, vitals.began_t, vitals.device) == (7, T, "cuda")


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "starting"),
        ([said("attempt_started", pid=1)], "starting"),
        ([said("attempt_started", pid=1), ready()], "training"),
        ([ready(), said("worker_exited", failure_class="killed", decision="Retry", text="x", exit_code=-9)], "waiting"),
        ([ready(), said("worker_exited", failure_class="bug", decision="GiveUp", text="x", exit_code=1)], "failed"),
        (
            [ready(), said("worker_exited", failure_class="bug", decision="Interrupted", text="x", exit_code=1)],
            "stopped",
        ),
        ([ready(), said("interrupted", step=1)], "stopped"),
        ([ready(), said("finished", step=1, reason="completed", adapter_digest="d")], "finished"),
    ],
    ids=["nothing", "attempt", "ready", "retry", "give up", "interrupted", "stopped", "finished"],
)
def test_states(events: list[JournalEvent], state: str) -> None:
    assert told(*events).state == state


def test_figures_are_of_this_attempt_and_steps_done_again_are_drawn_once() -> None:
    vitals = told(ready(), step(1), step(2), said("attempt_started", attempt=2, pid=1))
    assert vitals.progress.tokens_per_s is None
    assert vitals.mfu is None
    vitals.update(ready(start=1))
    vitals.update(step(2))
    vitals.update(step(3))
    assert vitals.progress.tokens_per_s is not None
    assert [number for number, _ in vitals.train.points()] == [1, 2, 3]


def test_what_is_out_of_the_ordinary_is_news_and_old_news_go() -> None:
    vitals = told(
        said("alert", text="disk full"), said("notice", text="code changed"),
        said("step_skipped", step=3, action="roll_back", reason="spike", rows=[1], rollback_step=2),
        said("microbatch_budget", step=3, phase="train", action="shrink", failed_tokens=9,
             budget={"tokens": 8, "failed_tokens": 9, "good_steps": 0, "wait_steps": 1, "grown": 0}),
        said("worker_exited", failure_class="out_of_memory", decision="Retry", text="no memory", exit_code=1),
    )  # fmt: skip
    assert [(one.text, one.is_urgent) for one in vitals.notable_events] == [
        ("alert: disk full", True),
        ("notice: code changed", False),
        ("step 3: skipped, rolled back to the weights of step 2: spike", True),
        ("step 3: micro-batch of train limited to 8 padded tokens: 9 did not fit", False),
        ("attempt 1 died: out of memory, no memory", True),
    ]
    assert (vitals.rollbacks, vitals.budget_shrinks) == (1, 1)
    for number in range(3 * NOTABLE_EVENTS):
        vitals.update(said("notice", text=f"{number}"))
    assert len(vitals.notable_events) == NOTABLE_EVENTS


def test_a_rank_that_the_others_wait_for() -> None:
    vitals = told(ready(ranks=4, hosts=["a", "a", "b", "b"]), said("rank_timings", step=9, steps=3, seconds=10.0,
                                                                  busy_s=[5.0, 5.2, 9.0, 5.1]))  # fmt: skip
    (slow,) = vitals.stragglers
    assert (slow.rank, slow.host, slow.busy) == (2, "b", 0.9)
    assert slow.relative_to_median == pytest.approx(9.0 / 5.1)
    assert [one.is_straggler for one in vitals.ranks] == [False, False, True, False]
    assert (
        told(said("rank_timings", step=9, steps=3, seconds=10.0, busy_s=[4.0, 8.0])).stragglers[0].relative_to_median
        == 2.0
    )
    assert told(said("rank_timings", step=9, steps=3, seconds=10.0, busy_s=[0.0, 0.0])).stragglers == []


KINDS = (
    "attempt_started", "worker_ready", "step", "step_skipped", "step_repeated", "gradient_spike", "microbatch_budget",
    "loss_scale", "memory_forecast", "memory_peak", "rank_timings",
    "validation", "checkpoint_saved", "replicated", "alert", "notice", "worker_exited", "finished", "interrupted",
    "system_metrics", "start_refused",
)  # fmt: skip


@pytest.mark.parametrize("value", [None, "text", [], float("inf"), -1, {}], ids=str)
def test_damaged_events_say_nothing_and_break_nothing(value: Any) -> None:
    keys = ("step", "loss", "step_s", "grad_norm", "input_tokens", "trained_tokens", "learning_rate", "planned_steps",
            "start_step", "busy_s", "seconds", "hosts", "text", "failure_class", "decision", "forecast", "gpus",
            "ranks",
            "flops_per_token", "peak_flops_per_s", "budget", "action", "phase", "improved", "device_bytes")  # fmt: skip
    vitals = told(ready(), step(1))
    for kind in KINDS:
        vitals.update(said(kind))
        vitals.update(said(kind, **dict.fromkeys(keys, value)))
    vitals.eta.estimate(T)
    assert vitals.train.points()[0] == (1, 2.0)


def test_a_curve_of_any_length_stays_small_and_keeps_its_mean() -> None:
    curve = DownsampledCurve()
    for number in range(1, 100_001):
        curve.add(number, float(number))
    points = curve.points()
    assert POINTS / 2 <= len(points) <= POINTS
    assert [number for number, _ in points] == sorted(number for number, _ in points)
    assert points[-1][0] == 100_000
    whole = curve.complete_values()
    assert sum(whole) / len(whole) == pytest.approx(
        sum(range(1, len(whole) * curve.values_per_point + 1)) / len(whole) / curve.values_per_point
    )
    assert not DownsampledCurve()


def test_what_is_beside_the_journal(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "abc")
    assert progress_view.read_sidecar_state(run) == progress_view.SidecarState()
    files.make_directory(run.checkpoints)
    assert progress_view.read_sidecar_state(run) == progress_view.SidecarState()
    with run.lock().acquire():
        (run.checkpoints / f"{files.PARTIAL}step-00000012-{os.getpid()}").mkdir()
        (run.checkpoints / f"{files.PARTIAL}step-00000099-999999999").mkdir()  # left behind by a dead process
        (run.checkpoints / "step-00000010").mkdir()
        ReplicationState(place="p", token=1, node="n", lock=(1, 2), durable_steps=(8,), in_flight=10).save(
            run.replication_state
        )
        found = progress_view.read_sidecar_state(run)
    assert (found.running, found.saving, found.finished) == (True, 12, False)
    assert found.replica is not None
    assert found.replica.in_flight == 10
    run.replication_state.write_text("{")
    run.result.mkdir()
    found = progress_view.read_sidecar_state(run)
    assert (found.saving, found.replica, found.finished) == (None, None, True)
