"""Tests plots of a sweep: any report can be drawn, equal reports give equal plots, and plots show the figures."""

import io
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
from matplotlib.image import imread
from matplotlib.patches import PathPatch

import sweep_example as example
from ratchet.reports import sweep_canvas as canvas
from ratchet.reports import sweep_plots
from ratchet.reports.sweep_canvas import ParameterScale, axis_limits
from ratchet.reports.sweep_plots import ParallelCoordinates, SweepWorkClock, assign_lanes, split_at_gaps
from ratchet.storage.records.sweep import (
    ParameterAxis,
    SweepObjective,
    SweepReport,
    TrainingCost,
    Trial,
    TrialExecution,
)
from ratchet.tuning.trial_summary import (
    CauseSavings,
    best_values_so_far,
    break_lines,
    compute_savings,
    format_duration,
    format_number,
    format_objective,
    format_parameter_value,
    rank_trials,
    recommended_trial,
    saved_tokens_by_cause,
    shorten_names,
    trial_value,
    validation_curve,
)
from sweep_plots_cases import (
    FORTY,
    REPORTS,
    figures,  # noqa: F401 (a fixture)
    svg,
)


@pytest.mark.parametrize("name", ["nothing", "usual", "thirty knobs"])
def test_pictures_have_a_bounded_size_in_pixels(name: str) -> None:
    report = REPORTS[name]()
    for draw in sweep_plots.PICTURES.values():
        stream = io.BytesIO()
        draw(report, stream, "png")
        high, wide, _ = imread(io.BytesIO(stream.getvalue())).shape
        assert min(high, wide) > 100
        assert wide < 2500


def test_pictures_go_where_they_are_sent(tmp_path: Path) -> None:
    found = sweep_plots.write(FORTY, tmp_path / "plots")
    assert [path.name for path in found] == [f"{name}.png" for name in sweep_plots.available_plots(FORTY)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
    sweep_plots.PICTURES["history"](FORTY, tmp_path / "history.svg", "auto")
    assert (tmp_path / "history.svg").read_bytes() == svg("history", FORTY)
    stream = io.BytesIO()
    sweep_plots.PICTURES["history"](FORTY, stream, "auto")
    assert stream.getvalue() == found[0].read_bytes()


def test_only_pictures_that_have_something_to_show_are_wanted() -> None:
    assert sweep_plots.available_plots(example.report(0)) == []
    assert "pareto" not in sweep_plots.available_plots(FORTY)
    assert "contour" in sweep_plots.available_plots(FORTY)
    assert "contour" not in sweep_plots.available_plots(example.narrowed(FORTY, ["train.rank", "train.target_modules"]))
    assert "pareto" in sweep_plots.available_plots(REPORTS["two objectives"]())


def marks(axes: Any, label: str) -> list[tuple[float, float]]:
    """Return the points of all lines with this label."""
    return [
        (float(x), float(y))
        for line in axes.lines
        if line.get_label() == label
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def draw(name: str, report: SweepReport, figures: list[matplotlib.figure.Figure]) -> matplotlib.figure.Figure:
    figures.clear()
    sweep_plots.PICTURES[name](report, io.BytesIO(), "png")
    return figures[0]


def test_history_has_each_trial_where_it_belongs(figures: list[matplotlib.figure.Figure]) -> None:
    found: list[Any] = draw("history", FORTY, figures).axes
    above, below = found
    plain = {one.number: one.objectives[0] for one in FORTY.trials if one.state == "complete"}
    assert dict(marks(above, "complete")) == plain
    best, line = math.inf, marks(above, "best so far")
    for place in plain.items():
        if place[1] < best:
            best = place[1]
            assert place in line
    assert line[-1][1] == min(plain.values())
    rows = [text.get_text() for text in below.get_yticklabels()]
    assert rows == ["infeasible", "failed"]
    assert [int(at) for at, row in marks(below, "infeasible")] == [7, 12, 17, 25, 27, 37, 38]
    # Pruned trials are inside the frame or at its edge; those that another trial continued are not shown.
    shown_pruned = {
        at for line in above.lines for at in line.get_xdata() if line.get_color() == canvas.COLOURS["pruned"]
    }
    continued = {one.continues for one in FORTY.trials}
    assert shown_pruned == {one.number for one in FORTY.trials if one.state == "pruned"} - continued
    assert marks(above, "winner: trial 6") == [(6.0, plain[6])]


def test_curves_begin_before_a_trial_went_on_and_are_grey_where_pruned(figures: list[matplotlib.figure.Figure]) -> None:
    axes: Any = draw("curves", FORTY, figures).axes[0]
    by_number = {one.number: one for one in FORTY.trials}
    whole = validation_curve(by_number[10].model_copy(update={"curve": {5760: 1.0}}), by_number)
    assert list(whole) == [*by_number[8].curve, 5760]
    diamonds = marks(axes, "continued here")
    assert diamonds == [
        pytest.approx(list(by_number[one.continues].curve.items())[-1])
        for one in FORTY.trials
        if one.continues is not None
    ]
    colours = {matplotlib.colors.to_hex(one.get_color()[0]) for one in axes.collections}
    assert colours == {canvas.COLOURS[state] for state in ("complete", "pruned", "failed")}


def test_parallel_axes_are_logarithmic_where_searched_so_and_gaps_are_gaps() -> None:
    sheet = ParallelCoordinates.from_report(FORTY)
    assert next(iter(sheet.hyperparameters)) == "train.adalora.target_rank", "a knob with gaps stands first"
    trial = next(one for one in FORTY.trials if one.state == "complete" and one.values["train.adapter"] == "lora")
    places = dict(zip(sheet.hyperparameters, sheet.places(trial), strict=False))
    assert places["train.adalora.target_rank"] is None
    assert places["train.rank"] == pytest.approx(math.log(trial.values["train.rank"] / 4) / math.log(16))
    assert "train.alpha" not in places, "a tie says nothing of its own"
    assert len(split_at_gaps(sheet.places(trial))) == 1
    pruned = next(one for one in FORTY.trials if one.state == "pruned")
    assert sheet.places(pruned)[-1] is None
    assert split_at_gaps([0.1, None, 0.2, 0.3, None]) == [[(0.0, 0.1)], [(2.0, 0.2), (3.0, 0.3)]]


def test_slices_show_what_cannot_be_trained_above_all_others(figures: list[matplotlib.figure.Figure]) -> None:
    panels = draw("slices", FORTY, figures).axes
    assert [one.get_xlabel() for one in panels] == [
        "rank", "learning_rate", "dropout", "target_modules", "adapter", "target_rank",
    ]  # fmt: skip
    strip = {y for _, y in marks(panels[0], "infeasible")}
    assert len(strip) == 1
    assert min(strip) > max(y for _, y in marks(panels[0], "complete"))
    assert {x for x, _ in marks(panels[0], "infeasible")} == {1.0}, "rank 64, the highest"
    searched = [one for one in FORTY.trials if one.state == "complete" and one.values["train.adapter"] == "adalora"]
    assert len(marks(panels[5], "complete")) == len(searched)


def test_space_between_points_is_coloured_only_where_there_are_enough(figures: list[matplotlib.figure.Figure]) -> None:
    def surfaces(report: SweepReport) -> int:
        return sum(
            type(one).__name__ == "TriContourSet" for one in draw("contour", report, figures).axes[0].collections
        )

    assert surfaces(FORTY) == 1
    assert surfaces(example.report(9)) == 0
    assert surfaces(REPORTS["knobs on a line"]()) == 0
    axes = draw("contour", FORTY, figures).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning_rate", "rank")
    fewer = example.narrowed(FORTY, ["train.learning_rate", "train.dropout", "train.adalora.target_rank"])
    axes = draw("contour", fewer, figures).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning_rate", "dropout"), "the two most important"


def test_the_front_is_what_nothing_beats(figures: list[matplotlib.figure.Figure]) -> None:
    report = REPORTS["two objectives"]()
    (axes,) = draw("pareto", report, figures).axes
    by_number = {one.number: one for one in report.trials}
    assert marks(axes, "front") == [by_number[one].objectives for one in report.best]
    others = marks(axes, "complete, dominated")
    for place in others:
        assert any(a <= place[0] and b <= place[1] for a, b in marks(axes, "front"))
    assert axes.get_ylabel() == "memory (MiB), lower is better"
    assert len(draw("pareto", REPORTS["four objectives"](), figures).axes) == 6


def test_the_timeline_has_a_bar_for_each_time_and_joins_those_of_one_trial(
    figures: list[matplotlib.figure.Figure],
) -> None:
    axes: Any = draw("timeline", FORTY, figures).axes[0]
    # A rectangle has five vertices; the first one occurs twice.
    patches: list[Any] = [one for one in axes.patches if isinstance(one, PathPatch)]
    bars = {one.get_label(): len(one.get_path().vertices) // 5 for one in patches}
    states = [one.state for one in FORTY.trials]
    for state in ("complete", "pruned", "infeasible", "failed"):
        assert bars[state] == states.count(state), state
    retries = [(a, b) for one in FORTY.trials for a, b in pairwise(one.executions)]
    assert bars["taken over by another worker"] == len(retries) == 8
    lanes = assign_lanes(take for one in FORTY.trials for take in one.executions)
    joints = [line for line in axes.lines if line.get_color() == canvas.INK and len(line.get_xdata()) == 2]
    assert [tuple(line.get_ydata()) for line in joints] == [(lanes[a.worker], lanes[b.worker]) for a, b in retries]
    assert len(marks(axes, "continues a pruned trial")) == 3


def test_many_workers_of_a_host_share_lanes_and_never_overlap() -> None:
    takes = [TrialExecution(worker=f"node{k % 2}/{k}", started=10.0 * k, last_seen=10.0 * k + 35) for k in range(100)]
    lanes = assign_lanes(takes)
    assert max(lanes.values()) + 1 == 4
    for row in range(4):
        members = [one for one in takes if lanes[one.worker] == row]
        assert len({one.worker.split("/")[0] for one in members}) == 1
        assert all(a.last_seen <= b.started for a, b in pairwise(members))


def test_the_picture_of_tokens_adds_up(figures: list[matplotlib.figure.Figure]) -> None:
    axes: Any = draw("savings", FORTY, figures).axes[0]
    area = 0.0
    for patch in axes.patches:
        corners = patch.get_path().vertices.reshape(-1, 5, 2)
        area += float(sum((one[2][0] - one[0][0]) * (one[2][1] - one[0][1]) for one in corners))
    assert area / 0.8 * 1000 == pytest.approx(compute_savings(FORTY).full_tokens, rel=1e-6)


def trained(number: int, state: str, tokens: int, **more: Any) -> Trial:
    """Build a trial with 1,000 planned tokens, trained at ten tokens per second."""
    cost = TrainingCost(trained_tokens=tokens, planned_tokens=1000, train_seconds=tokens / 10)
    plain: dict[str, Any] = {"number": number, "values": {}, "run_id": str(number), "state": state, "cost": cost}
    return Trial.model_validate({**plain, **more})


def test_savings_by_hand() -> None:
    trials = (
        trained(0, "complete", 1000),
        trained(1, "pruned", 100),
        trained(2, "pruned", 100),
        trained(3, "complete", 1000, continues=2),
        trained(5, "infeasible", 0, cost=TrainingCost()),
        trained(6, "infeasible", 20),
        trained(7, "failed", 500),
        trained(8, "running", 300),
    )
    found = compute_savings(FORTY.model_copy(update={"trials": trials}))
    assert (found.trials, found.trained_tokens, found.trained_seconds) == (7, 2920, 292.0)
    assert found.pruned == CauseSavings(1, 900, 90.0)
    assert found.refused == CauseSavings(1, 1000, 100.0)
    assert (found.tokens, found.seconds, found.full_tokens, found.full_seconds) == (1900, 190.0, 4820, 482.0)
    assert saved_tokens_by_cause(FORTY.model_copy(update={"trials": trials})) == {
        "pruned": {1: 900}, "refused": {5: 1000},
    }  # fmt: skip
    nothing = compute_savings(example.report(0))
    assert (nothing.trials, nothing.full_tokens, nothing.full_seconds) == (0, 0, 0.0)
    slow = trained(1, "pruned", 100, cost=TrainingCost(trained_tokens=100, planned_tokens=1000, train_seconds=100.0))
    found = compute_savings(FORTY.model_copy(update={"trials": (trained(0, "complete", 1000), slow)}))
    assert found.pruned == CauseSavings(1, 900, 900.0), "seconds are extrapolated from the trial's own speed"


@pytest.mark.parametrize(
    ("metric", "state", "more", "expected"),
    [
        ("validation_loss", "complete", {"objectives": (1.5,)}, 1.5),
        ("validation_loss", "complete", {"objectives": (math.nan,)}, None),
        ("validation_loss", "pruned", {"curve": {64: 2.0, 32: 3.0}}, 2.0),
        ("accuracy", "pruned", {"curve": {64: 2.0}}, None),
        ("validation_loss", "failed", {"curve": {64: 2.0}}, None),
    ],
)
def test_value_of_a_trial(metric: Any, state: str, more: dict[str, Any], expected: float | None) -> None:
    objective = SweepObjective(metric=metric, direction="maximize" if metric == "accuracy" else "minimize")
    assert trial_value(trained(0, state, 1, **more), [objective]) == expected


def test_the_best_by_direction_and_the_one_that_is_recommended() -> None:
    objective = SweepObjective(metric="accuracy", direction="maximize")
    trials = tuple(trained(k, "complete", 1, objectives=(found,)) for k, found in enumerate((0.3, 0.2, 0.5, 0.5)))
    report = FORTY.model_copy(
        update={"objectives": (objective,), "trials": trials, "best": (2,), "winner": None, "final_round": None}
    )
    assert best_values_so_far(report) == [(0, 0.3), (2, 0.5)]
    assert [one.number for one in rank_trials(report)] == [2, 3, 0, 1]
    assert recommended_trial(report) == trials[2]
    assert recommended_trial(report.model_copy(update={"winner": 3})) == trials[3]
    assert recommended_trial(report.model_copy(update={"best": ()})) is None


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (ParameterAxis(name="r", kind="int", low=4, high=64, log=True), ["4", "8", "16", "32", "64"]),
        (ParameterAxis(name="r", kind="int", low=5, high=7, log=True), ["5", "7"]),
        (
            ParameterAxis(name="l", kind="float", low=1e-4, high=1e-2, log=True),
            ["1e-4", "2e-4", "5e-4", "0.001", "0.002", "0.005", "0.01"],
        ),
        (
            ParameterAxis(name="l", kind="float", low=1e-6, high=1e-1, log=True),
            ["1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1"],
        ),
        (ParameterAxis(name="d", kind="float", low=0, high=0.2), ["0", "0.05", "0.1", "0.15", "0.2"]),
        (ParameterAxis(name="w", kind="int", low=1, high=3), ["1", "2", "3"]),
        (ParameterAxis(name="e", kind="int", low=1000, high=9000), ["2,000", "4,000", "6,000", "8,000"]),
        (
            ParameterAxis(name="c", kind="choice", choices=(True, None, ("q", "v"), "all")),
            ["true", "null", "q, v", "all"],
        ),
        (ParameterAxis(name="x", kind="float", low=0.3, high=0.3), ["0.3"]),
    ],
)  # fmt: skip
def test_axes_have_round_numbers_in_order(axis: ParameterAxis, ticks: list[str]) -> None:
    found = ParameterScale.from_axis(axis, ()).ticks(7)
    assert [text for _, text in found] == ticks
    places = [place for place, _ in found]
    assert places == sorted(places)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_places_on_a_scale() -> None:
    scale = ParameterScale.from_axis(
        ParameterAxis(name="l", kind="float", low=1e-4, high=1e-2, log=True), (1e-1, math.nan, "x", True)
    )
    assert scale.place(1e-1) == pytest.approx(1.0), "what was tried outside of the space widens it"
    assert scale.place(1e-4) == pytest.approx(0.0)
    assert (scale.place(0), scale.place(math.nan), scale.place("x"), scale.place(None)) == (None,) * 4
    choices = ParameterScale.from_axis(
        ParameterAxis(name="c", kind="choice", choices=(1, True, ("q", "v"))), [["q", "v"], "new"]
    )
    assert [choices.place(one) for one in (1, True, ["q", "v"], "new", "other")] == [0, 1 / 3, 2 / 3, 1, None]
    assert ParameterScale.from_axis(ParameterAxis(name="c", kind="choice", choices=("a",)), ()).place("a") == 0.5


def test_a_frame_is_not_stretched_by_one_that_went_wrong() -> None:
    usual = [1.2 + k / 100 for k in range(20)]
    low, high = axis_limits([*usual, 900.0])
    assert low < 1.2
    assert 1.39 < high < 2
    assert axis_limits([1.0, 900.0])[1] > 900, "few are all shown"
    low, high = axis_limits(usual, [5.0] * 10)
    assert 1.5 < high < 2, "others stretch it once"
    assert axis_limits([]) == (0.0, 1.0)
    low, high = axis_limits([2.0])
    assert low < 2.0 < high
    low, high = axis_limits([0.0, 0.0])
    assert low < 0.0 < high


def test_time_runs_only_while_somebody_works() -> None:
    clock = SweepWorkClock.from_spans([(100, 200), (150, 300), (10_300, 10_500), (10_520, 10_600)])
    assert [begin for begin, _ in clock.pauses] == [300]
    assert clock.at(300) == 200
    assert clock.at(10_300) == pytest.approx(200 + clock.gap)
    assert clock.end == pytest.approx(500 + clock.gap)
    moments = [clock.at(moment) for moment in range(0, 11_000, 50)]
    assert moments == sorted(moments)
    assert SweepWorkClock.from_spans([]).end == 0


def test_numbers_names_and_times_for_people() -> None:
    found = (0.0, 16, 0.05, 1.2345e-4, 12_000, 3.14159, -0.002, 2.5e7)
    assert [format_number(one) for one in found] == ["0", "16", "0.05", "1.23e-4", "12,000", "3.14", "-0.002", "2.5e7"]
    assert [format_parameter_value(one) for one in (True, None, 64, 0.1, ["q", "v"], "x" * 30)] == [
        "true", "null", "64", "0.1", "q, v", "x" * 23 + "…",
    ]  # fmt: skip
    assert [format_duration(one) for one in (0, 9.96, 59.94, 61, 3600, 11_520, 190_800)] == [
        "0.0 s", "10.0 s", "59.9 s", "1 min 1 s", "1 h", "3 h 12 min", "2 d 5 h",
    ]  # fmt: skip
    assert shorten_names(["train.rank", "train.adalora.rank", "train.dropout"]) == {
        "train.rank": "train.rank", "train.adalora.rank": "adalora.rank", "train.dropout": "dropout",
    }  # fmt: skip
    assert break_lines("validation_loss_of_it", 12) == "validation_\nloss_of_it"
    assert break_lines("q_proj, k_proj, v_proj", 14) == "q_proj,\nk_proj, v_proj"
    memory = SweepObjective(metric="memory_bytes", direction="minimize")
    assert format_objective(memory, 3 * 2**30) == "3 GiB"
    assert format_objective(SweepObjective(metric="train_seconds", direction="minimize"), 90.0) == "90 s"
    assert format_objective(SweepObjective(metric="accuracy", direction="maximize"), 0.51236) == "0.5124"
