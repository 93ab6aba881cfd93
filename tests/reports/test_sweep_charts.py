"""Tests charts of a sweep: any report can be drawn, equal reports give equal charts, and charts show the values."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest

import sweep_example as example
from ratchet.reports.plots import Figure
from ratchet.reports.sweep_charts import COLOURS, assign_lanes, axis_limits, build_charts, choose_ticks, find_pauses
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
from sweep_reports import FORTY, REPORTS


def trace(figure: Figure, name: str) -> dict[str, Any]:
    """Return the only trace with this name."""
    [found] = [one for one in figure["data"] if one.get("name") == name]
    return found


def points(figure: Figure, name: str) -> list[tuple[Any, Any]]:
    found = trace(figure, name)
    return list(zip(found["x"], found["y"], strict=True))


@pytest.mark.parametrize("name", REPORTS)
def test_every_sweep_has_the_charts_that_it_has_data_for(name: str) -> None:
    report = REPORTS[name]()
    charts = build_charts(report)
    assert list(charts) == [one for one in sweep_charts_in_order() if one in charts]
    assert ("pareto" in charts) == (
        len(report.objectives) > 1 and any(one.state == "complete" for one in report.trials)
    )
    assert ("history" in charts) == bool(report.trials)
    for figures in charts.values():
        for figure in figures:
            # Text is escaped: Plotly would read tags in names and labels. Our own line breaks are the only tags.
            assert "<" not in json.dumps(figure["data"]).replace("<br>", "").replace("<extra>", "").replace(
                "</extra>", ""
            )
            assert figure["layout"]["height"] < 2000


def sweep_charts_in_order() -> list[str]:
    return ["history", "curves", "importances", "slices", "contour", "parallel", "pareto", "timeline", "savings"]


def test_equal_reports_give_equal_charts_and_other_reports_others() -> None:
    charts, again = build_charts(FORTY), build_charts(SweepReport.model_validate_json(FORTY.model_dump_json()))
    assert json.dumps(charts) == json.dumps(again)
    other = build_charts(example.report(39))
    assert [name for name in charts if charts[name] == other[name]] == ["importances"], "both have the same"


def test_only_charts_that_have_something_to_show_are_there() -> None:
    assert build_charts(example.report(0)) == {}
    assert "contour" not in build_charts(example.narrowed(FORTY, ["train.rank", "train.target_modules"]))
    assert len(build_charts(REPORTS["four objectives"]())["pareto"]) == 6
    assert len(build_charts(REPORTS["four objectives"]())["history"]) == 4


def test_a_best_trial_outside_the_frame_is_marked_at_its_edge_without_its_height() -> None:
    trials = [
        trial.model_copy(update={"objectives": (-50.0,)}) if trial.number == 32 else trial for trial in FORTY.trials
    ]
    report = FORTY.model_copy(update={"trials": tuple(trials), "best": (32,), "winner": None, "final_round": None})
    [figure] = build_charts(report)["history"]
    low = figure["layout"]["yaxis"]["range"][0]
    star = next(trace for trace in figure["data"] if trace["name"] == "best: trial 32")
    assert star["y"][0] >= low > -50
    assert all(y is None or y >= low for y in next(t for t in figure["data"] if t["name"] == "best so far")["y"])
    complete = next(trace for trace in figure["data"] if trace["name"] == "complete")
    assert "%{y" not in complete["hovertemplate"]


def test_history_has_each_trial_where_it_belongs() -> None:
    [figure] = build_charts(FORTY)["history"]
    plain = {one.number: one.objectives[0] for one in FORTY.trials if one.state == "complete"}
    assert dict(points(figure, "complete")) == plain
    best, line = math.inf, points(figure, "best so far")
    for place in plain.items():
        if place[1] < best:
            best = place[1]
            assert place in line
    assert line[-2][1] == min(plain.values())
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["infeasible", "failed"]
    infeasible = points(figure, "infeasible")
    assert [at for at, _ in infeasible] == [7, 12, 17, 25, 27, 37, 38]
    assert {row for _, row in infeasible} == {figure["layout"]["annotations"][0]["y"]}
    assert infeasible[0][1] < min(plain.values())
    # Pruned trials are inside the frame or at its edge; those that another trial continued are not shown.
    continued = {one.continues for one in FORTY.trials}
    pruned = {one.number for one in FORTY.trials if one.state == "pruned"} - continued
    assert {at for at, _ in points(figure, "pruned")} == pruned
    low, high = figure["layout"]["yaxis"]["range"]
    assert all(low < value <= high for _, value in points(figure, "pruned"))
    assert points(figure, "winner: trial 6") == [(6, plain[6])]


def test_curves_begin_before_a_trial_went_on_and_are_grey_where_pruned() -> None:
    [figure] = build_charts(FORTY)["curves"]
    by_number = {one.number: one for one in FORTY.trials}
    whole = validation_curve(by_number[10].model_copy(update={"curve": {5760: 1.0}}), by_number)
    assert list(whole) == [*by_number[8].curve, 5760]
    assert points(figure, "continued here") == [
        list(by_number[one.continues].curve.items())[-1] for one in FORTY.trials if one.continues is not None
    ]
    lines = {one["name"]: one["line"]["color"] for one in figure["data"] if one["mode"] == "lines"}
    assert {name: lines[name] for name in ("complete", "pruned", "failed")} == {
        name: COLOURS[name]
        for name in ("complete", "pruned", "failed")  # type: ignore[index]
    }
    assert [name.partition(":")[0] for name in lines if ":" in name] == ["third", "second", "best"]


def test_parallel_axes_are_logarithmic_where_searched_so_and_gaps_are_gaps() -> None:
    [figure] = build_charts(FORTY)["parallel"]
    titles = [title.replace("<br>", "") for title in figure["layout"]["xaxis"]["ticktext"]]
    assert titles[0] == "target_rank", "a hyperparameter with gaps is the first"
    assert not any("alpha" in title for title in titles), "a tie says nothing of its own"
    rank = titles.index("rank")
    winner = next(one for one in FORTY.trials if one.number == FORTY.winner)
    place = dict(points(figure, f"winner: trial {FORTY.winner}"))[float(rank)]
    assert place == pytest.approx(math.log(winner.values["train.rank"] / 4) / math.log(16))
    assert None in trace(figure, "pruned")["y"], "pruned trials have no objective"
    objective = len(titles) - 1
    assert all(y is None for x, y in points(figure, "pruned") if x == objective)


def test_slices_show_what_cannot_be_trained_above_all_others() -> None:
    first, second = build_charts(FORTY)["slices"]
    names = [first["layout"][f"xaxis{n}"]["title"]["text"] for n in ("", "2", "3", "4")]
    names += [second["layout"][f"xaxis{n}"]["title"]["text"] for n in ("", "2")]
    assert names == ["rank", "learning_rate", "dropout", "target_modules", "adapter", "target_rank"]
    assert first["layout"]["xaxis2"]["type"] == "log"

    def marks(figure: Figure, state: str, panel: str) -> list[tuple[Any, float]]:
        [found] = [one for one in figure["data"] if one["name"] == state and one["xaxis"] == panel]
        return list(zip(found["x"], found["y"], strict=True))

    infeasible = marks(first, "infeasible", "x")
    assert len({y for _, y in infeasible}) == 1
    assert infeasible[0][1] > max(y for _, y in marks(first, "complete", "x"))
    assert {x for x, _ in infeasible} == {64.0}, "rank 64, the highest"
    searched = [one for one in FORTY.trials if one.state == "complete" and one.values["train.adapter"] == "adalora"]
    assert len(marks(second, "complete", "x2")) == len(searched)


def test_choices_with_equal_beginnings_and_other_types_stay_apart() -> None:
    choices = ["x" * 40 + "1", "x" * 40 + "2", 1, True, ("q", "v")]
    axes = (ParameterAxis(name="c", kind="choice", choices=tuple(choices)),)
    trials = tuple(
        FORTY.trials[0].model_copy(update={"number": k, "values": {"c": one}})
        for k, one in enumerate([*choices, ["q", "v"]])
    )
    report = FORTY.model_copy(update={"axes": axes, "trials": trials, "importances": {}})
    [figure] = build_charts(report)["slices"]
    assert len(figure["layout"]["xaxis"]["tickvals"]) == 5
    assert len(set(trace(figure, "complete")["x"])) == 5


def test_space_between_points_is_coloured_only_where_there_are_enough() -> None:
    def surfaces(report: SweepReport) -> int:
        return sum(one.get("type") == "contour" for one in build_charts(report)["contour"][0]["data"])

    assert surfaces(FORTY) == 1
    assert surfaces(REPORTS["knobs on a line"]()) == 0
    layout = build_charts(FORTY)["contour"][0]["layout"]
    assert (layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]) == ("learning_rate", "rank")
    fewer = example.narrowed(FORTY, ["train.learning_rate", "train.dropout", "train.adalora.target_rank"])
    layout = build_charts(fewer)["contour"][0]["layout"]
    names = (layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"])
    assert names == ("learning_rate", "dropout"), "the two most important"


def test_the_front_is_what_nothing_beats() -> None:
    report = REPORTS["two objectives"]()
    [figure] = build_charts(report)["pareto"]
    by_number = {one.number: one for one in report.trials}
    mib = 2**20
    front = points(figure, "front")
    expected = sorted((by_number[one].objectives[0], by_number[one].objectives[1] / mib) for one in report.best)
    assert [pytest.approx(one) for one in expected] == front
    for place in points(figure, "complete, dominated"):
        assert any(a <= place[0] and b <= place[1] for a, b in front)
    assert figure["layout"]["yaxis"]["title"]["text"] == "memory (MiB), lower is better"


def test_the_timeline_has_a_bar_for_each_time_and_joins_those_of_one_trial() -> None:
    [figure] = build_charts(FORTY)["timeline"]
    states = [one.state for one in FORTY.trials]
    for state in ("complete", "pruned", "infeasible", "failed"):
        assert len(trace(figure, state)["y"]) == states.count(state), state
    retries = [(a, b) for one in FORTY.trials for a, b in pairwise(one.executions)]
    assert len(trace(figure, "taken over by another worker")["y"]) == len(retries) == 8
    lanes = assign_lanes(take for one in FORTY.trials for take in one.executions)
    [joints] = [one for one in figure["data"] if one.get("mode") == "lines"]
    assert joints["y"] == [y for a, b in retries for y in (lanes[a.worker], lanes[b.worker], None)]
    assert len(trace(figure, "continues a pruned trial")["y"]) == 3


def test_the_chart_of_tokens_adds_up() -> None:
    [figure] = build_charts(FORTY)["savings"]
    assert sum(sum(one["y"]) for one in figure["data"]) == compute_savings(FORTY).full_tokens
    [large] = build_charts(REPORTS["a thousand"]())["savings"]
    assert sum(one["y"][-2] for one in large["data"]) == compute_savings(REPORTS["a thousand"]()).full_tokens


def test_many_workers_of_a_host_share_lanes_and_never_overlap() -> None:
    takes = [TrialExecution(worker=f"node{k % 2}/{k}", started=10.0 * k, last_seen=10.0 * k + 35) for k in range(100)]
    lanes = assign_lanes(takes)
    assert max(lanes.values()) + 1 == 4
    for row in range(4):
        members = [one for one in takes if lanes[one.worker] == row]
        assert len({one.worker.split("/")[0] for one in members}) == 1
        assert all(a.last_seen <= b.started for a, b in pairwise(members))


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
    ("limits", "ticks"),
    [
        ((1e-4, 1e-2, True), ["1e-4", "2e-4", "5e-4", "0.001", "0.002", "0.005", "0.01"]),
        ((1e-6, 1e-1, True), ["1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1"]),
        ((4, 64, True), ["5", "10", "20", "50"]),
        ((5, 7, True), ["5", "7"]),
        ((0, 0.2, False), ["0", "0.05", "0.1", "0.15", "0.2"]),
        ((1, 3, False), ["1", "1.5", "2", "2.5", "3"]),
        ((1000, 9000, False), ["2,000", "4,000", "6,000", "8,000"]),
    ],
)
def test_axes_have_round_numbers_in_order(limits: tuple[float, float, bool], ticks: list[str]) -> None:
    assert [format_number(tick) for tick in choose_ticks(*limits)] == ticks


def test_a_frame_is_not_stretched_by_one_that_went_wrong() -> None:
    usual = [1.2 + k / 100 for k in range(20)]
    low, high = axis_limits([*usual, 900.0])
    assert low < 1.2
    assert 1.39 < high < 2
    assert axis_limits([1.0, 900.0])[1] > 900, "few are all shown"
    low, high = axis_limits(usual, [5.0] * 10)
    assert 1.5 < high < 2, "others stretch it once"
    assert axis_limits([]) == [0.0, 1.0]
    low, high = axis_limits([2.0])
    assert low < 2.0 < high
    low, high = axis_limits([0.0, 0.0])
    assert low < 0.0 < high


def test_time_runs_only_while_somebody_works() -> None:
    assert find_pauses([(100, 200), (150, 300), (10_300, 10_500), (10_520, 10_600)]) == [(300, 10_300)]
    assert find_pauses([]) == []
    [figure] = build_charts(REPORTS["a pause"]())["timeline"]
    assert len(figure["layout"]["xaxis"]["rangebreaks"]) == 1
    assert "pause" in figure["layout"]["annotations"][0]["text"]


def test_numbers_and_names_for_people() -> None:
    found = (0.0, 16, 0.05, 1.2345e-4, 12_000, 3.14159, -0.002, 2.5e7)
    assert [format_number(one) for one in found] == ["0", "16", "0.05", "1.23e-4", "12,000", "3.14", "-0.002", "2.5e7"]
    assert [format_parameter_value(one) for one in (True, None, 64, 0.1, ["q", "v"], "x" * 30)] == [
        "true", "null", "64", "0.1", "q, v", "x" * 23 + "…",
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
