"""The screen of a run in all sizes: it always fits, and keeps the most important lines."""

from functools import partial
from typing import Any

import pytest

from faked_terminal import GIB, SIZES, Events, T, assert_fits, drawn
from ratchet.console.callback import RunEventFormatter, summarize_run
from ratchet.console.run_screen import ASCII_LEVELS, LEVELS, draw_curve, render_panel, render_table
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import ProgressView, SidecarState
from ratchet.runs.replication_protocol import ReplicationState


def eventful() -> Events:
    """Return the journal events of a training of two ranks with events of every kind."""
    found = Events()
    forecast = {"phases": [{"phase": "steady", "parts": {"weights": 6 * GIB}}], "notes": []}
    for attempt, (start, end) in enumerate(((0, 60), (50, 120)), start=1):
        found.add("attempt_started", start, attempt, pid=1, code_version="1")
        found.add("memory_forecast", start, attempt, forecast=forecast, available_bytes=20 * GIB)
        found.add("worker_ready", start, attempt, start_step=start, planned_steps=1200, device="cuda",
            compute_dtype="bfloat16",
             ranks=2, hosts=["node-a", "node-b"], flops_per_token=1e9, peak_flops_per_s=1e14)  # fmt: skip
        found.add("memory_peak", start, attempt, phase="steady", peak_bytes=7 * GIB, device_bytes=24 * GIB)
        for step in range(start + 1, end + 1):
            found.add("step", step, attempt, step=step, loss=3.0 / step**0.3, learning_rate=1e-4, grad_norm=0.8,
                 trained_tokens=1_000, input_tokens=12_000, step_s=1.0)  # fmt: skip
            if step % 20 == 0:
                found.add(
                    "validation", step, attempt, step=step, loss=3.2 / step**0.3, tokens=1, seconds=0.5, improved=True
                )
                found.add("checkpoint_saved", step, attempt, step=step, is_best=True, size_bytes=1, bytes_written=1,
                    bytes_linked=0,
                     blocked_s=0.01, seconds=0.1)  # fmt: skip
        found.add("rank_timings", end, attempt, step=end, steps=5, seconds=5.0, busy_s=[2.4, 4.6])
        if attempt == 1:
            found.add_killed(end)
    found.add("step_skipped", 121, 2, step=121, action="skip", reason="loss is nan", rows=[1], rollback_step=None)
    found.add("microbatch_budget", 121, 2, step=122, phase="train", action="shrink", failed_tokens=4096,
         budget={"tokens": 2048, "failed_tokens": 4096, "good_steps": 0, "wait_steps": 1, "grown": 0})  # fmt: skip
    gpu = {"utilization_percent": 97, "power_w": 300, "temperature_c": 64}
    found.add("system_metrics", 121, 2, sample=1, cpu_percent=35.0, memory_percent=61.0, disk_used_percent=40.0,
         worker_memory_bytes=3 * GIB, gpus=[{"index": 0, **gpu}, {"index": 1, **gpu}])  # fmt: skip
    found.add("alert", 122, 2, text="\x1b[31mno space left\non the disk of 重い" + " long" * 60)
    return found


def view(events: list[JournalEvent] | None = None) -> ProgressView:
    found = ProgressView()
    for event in eventful() if events is None else events:
        found.update(event)
    return found


REPLICA = ReplicationState(
    place="p", token=1, node="n", lock=(1, 2), durable_steps=(100,), in_flight=120, behind_bytes=3 * GIB,
    failed_since=T,
)  # fmt: skip
SIDECAR = SidecarState(running=True, saving=120, replica=REPLICA)


def shown(width: int, height: int, encoding: str = "utf-8", **changes: Any) -> list[str]:
    """Return the lines of the screen of this training at the given size."""
    run = {"view": view(), "sidecar": SIDECAR, "age_s": 125} | changes
    render = partial(render_panel, "run abc", run["view"], run["sidecar"], T + run["age_s"])
    return drawn(render, width, height, encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp437"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits(width: int, height: int, encoding: str) -> None:
    lines = shown(width, height, encoding)
    assert_fits(lines, width, height)
    assert lines[0].startswith("run abc  training")
    assert "121/1200" in lines[1] or "step 121 of 1,200" in lines[1]


@pytest.mark.parametrize(
    "kinds",
    [(), ("attempt_started",), ("attempt_started", "worker_ready"), ("attempt_started", "worker_ready", "step")],
    ids=str,
)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_run_that_has_only_begun_fits_too(width: int, height: int, kinds: tuple[str, ...]) -> None:
    few = [event for event in eventful()[:10] if event.kind in kinds]
    assert_fits(shown(width, height, view=view(few), sidecar=SidecarState()), width, height)


def test_all_of_it_on_a_large_screen() -> None:
    text = "\n".join(shown(120, 40))
    for part in (
        "attempt 2", "cuda in bfloat16, 2 ranks", "10 %", "left", "train loss", "validation", "best", "1.00e-04",
        "gradient norm 0.8", "12,000 tokens/s input, 1,000 trained", "MFU 12.0 %", "1.00 steps/s",
        "7.0 of 24.0 GiB (29 %)", "forecast 6.0 (-14 %)",
        "CPU 35 %", "GPU 0 97 % 300 W 64 C", "GPU 1 97 %", "step 120, sealed 5 s ago", "writing step 120",
        "! step 100 durable, 20 steps behind; unreachable for 125 s", "sending step 120", "! 1 skipped step",
        "1 micro-batch shrunk", "train at most 2,048 tokens", "2; 10 steps repeated", "attempt 1 died: killed",
        "! rank 1 on node-b computes 92 % longer than the median", "!  1", "node-a",
        "! step 121: skipped: loss is nan",
        "! alert: \\u001b[31mno space left",
    ):  # fmt: skip
        assert part in text, part
    few = eventful()
    begun = next(n for n, event in enumerate(few) if event.data.get("step") == 3)
    assert "time left unknown" in "\n".join(shown(120, 40, view=view(few[:begun])))
    assert "about " in text
    assert "no events" not in text
    assert "! no events for 1 h" in shown(80, 9, age_s=4_000)[0]


def test_the_little_that_fits_says_what_matters_most() -> None:
    lines = shown(40, 10)
    assert [line.split()[0] for line in lines[2:8]] == ["loss", "valid", "speed", "memory", "ckpt", "tries"]
    assert lines[8].startswith("ranks   ! rank 1 on node-b")
    assert lines[-1].endswith("…")
    assert shown(40, 4)[2].startswith("loss")
    assert "alert" in shown(40, 4)[3]


@pytest.mark.parametrize(
    ("sidecar", "events", "state"),
    [
        (SidecarState(), None, "not running"),
        (SidecarState(), [], "not started"),
        (SidecarState(running=True), [], "loading"),
        (SIDECAR, [*eventful(), JournalEvent("finished", T + 130, 2, {"step": 1, "reason": "completed"})], "finished"),
    ],
    ids=["gone", "not started", "loading", "finished"],
)
def test_states_in_words(sidecar: SidecarState, events: list[JournalEvent] | None, state: str) -> None:
    lines = shown(80, 20, view=view(events), sidecar=sidecar)
    assert lines[0].startswith(f"run abc  {state}")


@pytest.mark.parametrize("count", [0, 1, 3, 50])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_several_runs_in_a_table(width: int, height: int, count: int) -> None:
    rows = [(f"run-{number:02}", view(), SIDECAR if number % 2 else SidecarState()) for number in range(count)]
    lines = drawn(partial(render_table, rows, T + 125), width, height)
    assert_fits(lines, width, height)
    if count:
        assert lines[0].split()[0] == "run"
        assert lines[1].startswith("run-01" if count > 1 else "run-00")
    if count > height:
        assert lines[-1] == f"and {count - height + 2} more"


def test_columns_of_a_table() -> None:
    head, row, *_ = drawn(partial(render_table, [("abcdef", view(), SIDECAR)], T + 125), 120, 9)
    assert head.split() == [
        "run", "state", "step", "left", "loss", "validation", "tokens/s", "checkpoint", "attempts", "alerts",
    ]  # fmt: skip
    assert row.startswith("abcdef  ! training  121/1200")


def test_curves_are_drawn_where_their_steps_are() -> None:
    points = [(step, float(step)) for step in range(1, 9)]
    assert draw_curve(points, 8, (1.0, 8.0), 8, LEVELS) == "▁▂▃▄▅▆▇█"
    assert draw_curve(points[4:], 8, (1.0, 8.0), 8, LEVELS) == "    ▅▆▇█"
    assert draw_curve(points, 8, (1.0, 8.0), 4, ASCII_LEVELS) == "_-=#"
    assert draw_curve([(3, 7.0)], 3, (7.0, 7.0), 3, LEVELS)[2] == "▁"
    assert draw_curve([*points, (9, 900.0)], 9, (1.0, 8.0), 9, LEVELS) == "▁▂▃▄▅▆▇██"


def test_lines_of_several_runs_bear_their_names() -> None:
    found: list[str] = []
    telling = RunEventFormatter(found.append, "abc: ")
    run = view()
    for event in eventful():
        telling.event(event)
    telling.figures(run, T + 125)
    telling.figures(run, T + 126)
    assert {line[:5] for line in found} == {"abc: "}
    assert found[-1].startswith("abc: step 121/1200: loss 0.7")
    assert found[-1].endswith(", about 18 min left")
    assert len([line for line in found if line.startswith("abc: step 121/1200")]) == 1
    assert summarize_run(run, SidecarState(running=True), T + 125).startswith("training, step 121/1200, loss 0.7")
    assert summarize_run(run, SidecarState(), T + 125).startswith("not running, step 121/1200, loss 0.7")
    assert "left" not in summarize_run(run, SidecarState(), T + 125)
