"""Tests which training the freeze-thaw search begins, pauses and continues, on trials whose losses are computed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ratchet.config.sweep import SamplerSettings, SweepParameter
from ratchet.storage.records.sweep import Trial
from ratchet.tuning.freeze_thaw import Continuation, FreezeThawSearch, NewTrial, has_reached_rung
from ratchet.tuning.search_space import SearchSpace, to_unit
from study_histories import DROPOUT, RANK, RATE, is_in_space, loss, space_of

SPACE = space_of(RANK, RATE)
SAMPLER = SamplerSettings(n_startup_trials=4)
FIRST_RUNG = 0.1
LONGEST = 1000
VALIDATIONS = range(100, LONGEST + 1, 100)
BAD = {"train.rank": 4, "train.alpha": 8, "train.learning_rate": 1e-4}
GOOD = {"train.rank": 20, "train.alpha": 40, "train.learning_rate": 1.8e-3}
FAIR = {"train.rank": 40, "train.alpha": 80, "train.learning_rate": 1e-3}
POOR = {"train.rank": 50, "train.alpha": 100, "train.learning_rate": 3e-4}


def losses(values: Mapping[str, Any], rows: int) -> dict[int, float]:
    """Return the losses of a training up to this number of rows."""
    end = 1 + loss(values) / 10
    return {at: end * (at / LONGEST) ** -0.3 for at in VALIDATIONS if at <= rows}


def trained(number: int, values: Mapping[str, Any], rows: int, state: str = "pruned", **fields: Any) -> Trial:
    curve = losses(values, rows)
    if state == "complete":
        fields["objectives"] = (min(curve.values()),)
    return Trial(number=number, values=dict(values), run_id=f"run{number}", state=state, curve=curve, **fields)


def search(history: Sequence[Trial], space: SearchSpace = SPACE, **fields: Any) -> FreezeThawSearch:
    fields = {"may_begin": False, **fields}
    return FreezeThawSearch(
        space, SAMPLER, history, LONGEST, lambda values: any(t.values == values for t in history), **fields
    )


def positions_apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[float]:
    """Return the distance of the values in each dimension, in widths of the space."""
    return [abs(to_unit(d, first[d.name]) - to_unit(d, second[d.name])) for d in SPACE.dimensions()]


def distance_between(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Return the distance of the values, in widths of the space."""
    return math.hypot(*positions_apart(first, second))


PAUSED = [trained(0, BAD, 100), trained(1, GOOD, 100), trained(2, FAIR, 100), trained(3, POOR, 100)]


def test_the_first_trials_cover_the_space_and_are_compared_at_the_first_rung() -> None:
    history: list[Trial] = [trained(0, BAD, 100)]
    for number in range(1, SAMPLER.n_startup_trials):
        step = search(history, may_begin=True).choose()
        assert isinstance(step, NewTrial)
        assert is_in_space(SPACE, step.values)
        history.append(trained(number, step.values, 100, "running"))
        at_rung = search(history, may_begin=True, trial_at_rung=number)
        if number < SAMPLER.n_startup_trials - 1:
            assert at_rung.reason_to_pause() == "the first trials are compared at this rung"
        history[-1] = trained(number, step.values, 100)
    rates = [trial.values["train.learning_rate"] for trial in history[1:]]
    assert max(rates) / min(rates) > 5


def test_the_most_promising_paused_training_is_continued() -> None:
    assert search(PAUSED).choose() == Continuation(1)


def test_a_training_continues_at_a_rung_while_its_expected_improvement_is_the_highest() -> None:
    running = [*PAUSED, trained(4, GOOD, 200, "running", continues=1)]
    assert search(running, trial_at_rung=4).reason_to_pause() is None
    bad = [*PAUSED, trained(4, BAD, 200, "running", continues=0)]
    reason = search(bad, trial_at_rung=4).reason_to_pause()
    assert reason is not None
    assert "; trial 1 has " in reason
    assert "its expected improvement is" in reason


def test_a_training_without_expected_improvement_is_continued_only_for_the_final_round() -> None:
    history = [trained(0, BAD, 100), trained(1, GOOD, 1000, "complete"), *PAUSED[3:], trained(4, BAD, 800)]
    assert search(history).choose() is None
    step = search(history, missing_trainings=1).choose()
    assert isinstance(step, Continuation)
    running = [*history, trained(5, history[step.number].values, 200, "running", continues=step.number)]
    assert search(running, missing_trainings=1, trial_at_rung=5).reason_to_pause() is None
    assert search(running, trial_at_rung=5).reason_to_pause() is not None


def test_the_best_of_the_other_trainings_becomes_the_next_finalist() -> None:
    history = [
        trained(0, GOOD, 1000, "complete"), trained(1, FAIR, 500), trained(2, BAD, 100),
        trained(3, BAD, 800, "running", continues=2),
    ]  # fmt: skip
    judged = search(history, missing_trainings=1, may_improve=False, trial_at_rung=3)
    assert (judged.reason_to_pause() or "").endswith(
        "; trial 1 has a clearly lower predicted loss, and is completed for the final round"
    )
    paused = [*history[:3], trained(3, BAD, 800, continues=2)]
    assert search(paused, missing_trainings=1, may_improve=False).choose() == Continuation(1)
    running = [*paused, trained(4, FAIR, 800, "running", continues=1)]
    assert search(running, missing_trainings=1, may_improve=False, trial_at_rung=4).reason_to_pause() is None


def test_after_a_limit_nothing_is_continued_to_improve() -> None:
    assert search(PAUSED, may_improve=False).choose() is None
    assert search(PAUSED, may_improve=False, missing_trainings=1).choose() == Continuation(1)


def test_new_values_are_near_the_best_but_not_those_of_another_trial() -> None:
    history = [*PAUSED, trained(4, GOOD, 1000, "complete", continues=1)]
    history += [trained(5, {**GOOD, "train.learning_rate": 4e-3}, 1000, "complete")]
    step = search(history, may_begin=True).choose()
    assert isinstance(step, NewTrial)
    assert loss(step.values) < loss(POOR)
    assert distance_between(step.values, GOOD) > 0.05


def test_new_values_are_not_at_the_other_end_of_the_space_where_least_is_known() -> None:
    history = [
        trained(number, {"train.rank": rank, "train.alpha": 2 * rank, "train.learning_rate": rate}, 1000, "complete")
        for number, (rank, rate) in enumerate(((20, 1.8e-3), (26, 1.8e-3), (20, 2.6e-3), (15, 1.2e-3)))
    ]
    step = search(history, may_begin=True).choose()
    assert isinstance(step, NewTrial)
    assert max(positions_apart(step.values, history[0].values)) < 0.31


def test_an_improvement_that_is_smaller_than_differences_between_seeds_is_not_worth_a_training() -> None:
    history = [*PAUSED, trained(4, FAIR, 1000, "complete", continues=2)]
    for scale, step in ((0.02, Continuation(1)), (0.002, None)):
        scaled = [
            one.model_copy(update={"curve": {rows: 3 * (value / 3) ** scale for rows, value in one.curve.items()}})
            for one in history
        ]
        assert search(scaled).choose() == step


def test_a_small_improvement_is_worth_a_training_only_when_no_other_may_begin() -> None:
    """All values were tried, so no new ones are proposed in either case."""
    near = {**GOOD, "train.learning_rate": 2.6e-3}
    history = [trained(0, BAD, 100), trained(1, GOOD, 1000, "complete"), trained(2, near, 100)]
    last = replace(search(history), is_tried=lambda _: True)
    assert last.choose() == Continuation(2)
    assert replace(last, may_begin=True).choose() is None
    history[2] = trained(2, near, 200)  # its curve now shows that it will hardly be better
    assert replace(last, history=history).choose() is None


def test_other_workers_propose_values_elsewhere_while_a_training_runs() -> None:
    """A training that runs counts as ended as predicted, so the expected improvement near it is small."""
    history = [*PAUSED, trained(4, GOOD, 1000, "complete", continues=1)]
    first = search(history, may_begin=True).choose()
    assert isinstance(first, NewTrial)
    distances = {}
    for state in ("failed", "running"):
        begun = Trial(number=5, values=first.values, run_id="run5", state=state)
        step = search([*history, begun], may_begin=True).choose()
        assert isinstance(step, NewTrial)
        distances[state] = distance_between(step.values, first.values)
    assert distances["running"] > 2 * distances["failed"]


def test_infeasible_values_are_avoided() -> None:
    """Losses fall with the rank, and ranks of 40 and more do not fit."""
    ranks = {}
    for state in ("infeasible", "failed"):
        history = [
            Trial(
                number=i, values={**GOOD, "train.rank": rank, "train.learning_rate": rate}, run_id=f"run{i}",
                state="pruned" if rank < 40 else state, curve={400: 3.0 - 0.02 * rank} if rank < 40 else {},
            )
            for i, (rank, rate) in enumerate(product((4, 12, 32, 40, 64), (1e-4, 1e-3, 1e-2)))
        ]  # fmt: skip
        step = search(history, may_begin=True).choose()
        assert isinstance(step, NewTrial)
        ranks[state] = step.values["train.rank"]
    assert ranks["infeasible"] < 40 < ranks["failed"]


def test_decisions_do_not_depend_on_the_order_of_the_history() -> None:
    history = [*PAUSED, trained(4, GOOD, 1000, "complete", continues=1)]
    assert search(history, may_begin=True).choose() == search(history[::-1], may_begin=True).choose()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_search_finds_the_best_values_for_a_small_share_of_the_work(seed: int) -> None:
    space, history = space_of(RANK, RATE, DROPOUT), []
    sampler = SamplerSettings(seed=seed)
    step: NewTrial | Continuation | None = NewTrial({**BAD, "train.dropout": 0.0})

    def at(may_begin: bool, trial_at_rung: int | None = None) -> FreezeThawSearch:
        missing = 1 - sum(trial.state == "complete" for trial in history)
        tried = lambda values: any(trial.values == values for trial in history)  # noqa: E731
        return FreezeThawSearch(
            space, sampler, history, LONGEST, tried, may_begin, missing_trainings=missing, trial_at_rung=trial_at_rung
        )

    begun = 0
    while step is not None:
        continues = step.number if isinstance(step, Continuation) else None
        values = step.values if isinstance(step, NewTrial) else history[step.number].values
        begun += continues is None
        done = 0 if continues is None else max(history[continues].curve)
        number, state = len(history), "complete"
        history.append(trained(number, values, 0, "running", continues=continues))
        for rows in VALIDATIONS:
            if rows <= done:
                continue
            curve = {at: value for at, value in losses(values, rows).items() if at > done}
            history[number] = history[number].model_copy(update={"curve": curve})
            is_at_rung = rows < LONGEST and has_reached_rung(FIRST_RUNG, history, history[number], LONGEST)
            if is_at_rung and at(begun < 20, trial_at_rung=number).reason_to_pause() is not None:
                state = "pruned"
                break
        objectives = (min(history[number].curve.values()),) if state == "complete" else ()
        history[number] = history[number].model_copy(update={"state": state, "objectives": objectives})
        step = at(begun < 20).choose()
    work = sum(len(trial.curve) for trial in history) / len(VALIDATIONS)
    best = min(trial.objectives[0] for trial in history if trial.state == "complete")
    assert begun == 20
    assert work < 8
    assert best < 1.02


def test_validations_that_are_reported_again_reach_no_rung() -> None:
    first = trained(0, GOOD, 200)
    continued = trained(1, GOOD, 0, "running", continues=0)
    for rows, reaches in ((100, False), (200, False), (300, False), (400, True), (500, False), (800, True)):
        continued = continued.model_copy(update={"curve": losses(GOOD, rows)})
        assert has_reached_rung(FIRST_RUNG, [first, continued], continued, LONGEST) is reaches
    taken_over = continued.model_copy(update={"curve": losses(GOOD, 400)})
    assert not has_reached_rung(FIRST_RUNG, [first, continued], taken_over, LONGEST)


def test_a_space_that_is_used_up_before_the_first_trials_ends_with_a_complete_training() -> None:
    space = space_of({"train.rank": SweepParameter(low=4, high=12, step=4)})
    history = [
        Trial(number=i, values={"train.rank": rank}, run_id=f"run{i}", state="pruned", curve={100: 3.0 - i})
        for i, rank in enumerate((4, 8, 12))
    ]
    assert search(history, space, may_begin=True, missing_trainings=1).choose() == Continuation(2)
    running = history[2].model_copy(update={"state": "running", "curve": {100: 1.0, 200: 0.9}})
    judged = search([*history[:2], running], space, may_begin=True, missing_trainings=1, trial_at_rung=2)
    assert judged.reason_to_pause() is None


def test_more_first_trials_begin_while_none_has_a_loss() -> None:
    history = [
        Trial(number=i, values={**GOOD, "train.rank": 4 + i}, run_id=f"run{i}", state="infeasible") for i in range(40)
    ]
    step = search(history, may_begin=True).choose()
    assert isinstance(step, NewTrial)
    assert search(history).choose() is None


def test_a_loss_that_is_not_a_number_and_a_failed_continuation_spoil_nothing() -> None:
    plain = search([*PAUSED, trained(4, GOOD, 1000, "complete", continues=1)], may_begin=True).choose()
    nan = Trial(
        number=5, values={**GOOD, "train.rank": 63}, run_id="run5", state="complete", objectives=(math.nan,),
        curve={100: 3.0, 1000: math.nan},
    )  # fmt: skip
    history = [*PAUSED, trained(4, GOOD, 1000, "complete", continues=1), nan]
    step = search(history, may_begin=True, is_best_kept=False).choose()
    assert isinstance(plain, NewTrial)
    assert isinstance(step, NewTrial)
    failed = [*PAUSED, trained(4, GOOD, 0, "failed", continues=1)]
    assert search(failed).choose() == Continuation(2)
