"""Tests the limits of a sweep: when it starts no further trial, and when it stops."""

from typing import Any

from ratchet.config.sweep import Sweep
from ratchet.storage.records.sweep import TrainingCost, Trial
from ratchet.tuning import final_round


def trial(number: int, state: str = "complete", **fields: Any) -> Trial:
    cost = TrainingCost(trained_tokens=fields.pop("tokens", 100), train_seconds=fields.pop("seconds", 360.0))
    values = {"train.rank": number + 1}
    return Trial(number=number, values=values, run_id=f"run{number}", state=state, cost=cost, **fields)


def failures(*reasons: str, cause: str = "bug") -> list[Trial]:
    return [trial(n, "failed", cause=cause, reason=reason) for n, reason in enumerate(reasons)]


def test_a_continued_trial_counts_once_among_all_trials() -> None:
    history = [trial(0, "pruned"), trial(1), trial(2, continues=0)]
    assert final_round.count_trials(history) == 2


def test_hours_and_tokens_of_a_continued_trial_count_once() -> None:
    first = trial(0, "pruned", tokens=100, seconds=1800.0)
    again = trial(2, continues=0, tokens=250, seconds=5400.0)
    history = [first, trial(1, tokens=300, seconds=3600.0), again]
    assert final_round.check_limits(Sweep(max_hours=2.4), history) == "2.50 hours trained of 2.4"
    assert final_round.check_limits(Sweep(max_tokens=550), history) == "550 tokens trained of 550"
    assert final_round.check_limits(Sweep(max_hours=2.6, max_tokens=551), history) is None
    # The costs of the earlier trial count until this one ends.
    begun = trial(1, "running", continues=0, tokens=0, seconds=0.0)
    assert final_round.check_limits(Sweep(max_hours=0.5), [first, begun]) == "0.50 hours trained of 0.5"
    assert final_round.check_limits(Sweep(max_tokens=101), [first, begun]) is None


def test_limits_of_hours_and_tokens_end_the_search() -> None:
    history = [trial(0, tokens=100, seconds=7200.0)]
    assert final_round.check_limits(Sweep(max_hours=2.5), history) is None
    assert final_round.check_limits(Sweep(max_hours=2), history) == "2.00 hours trained of 2"
    assert final_round.check_limits(Sweep(max_tokens=101), history) is None
    assert final_round.check_limits(Sweep(max_tokens=100), history) == "100 tokens trained of 100"


def test_repeated_failures_of_one_cause_stop_the_sweep_with_the_diagnosis() -> None:
    history = failures("run 0a1b2c3d4e5f: worker died at step 7", "run 1b2c3d4e5f6a: worker died at step 12")
    sweep = Sweep(max_repeated_failures=3)
    assert final_round.diagnose_failures(sweep, history) is None
    third = trial(2, "failed", cause="bug", reason="run 99ffee334455: worker died at step 3")
    text = final_round.diagnose_failures(sweep, [*history, third])
    assert text is not None
    assert "3 trials failed for the same reason (bug; trials 0, 1, 2)" in text
    assert "died at step 3" in text
    killed = trial(3, "failed", cause="killed", reason="the disk is full")
    different = [*failures("the disk is full", "no such module: q_prj", "the disk is full"), killed]
    assert final_round.diagnose_failures(sweep, different) is None
    assert final_round.diagnose_failures(Sweep(max_repeated_failures=2), different) is not None


def test_infeasible_trials_are_knowledge_as_long_as_anything_fits() -> None:
    infeasible = [trial(n, "infeasible", cause="too_large", reason="needs 9 GiB") for n in range(9)]
    assert final_round.diagnose_failures(Sweep(max_repeated_failures=3), [*infeasible[:8]]) is None
    text = final_round.diagnose_failures(Sweep(max_repeated_failures=3), infeasible)
    assert text is not None
    assert "none of 9 trials was feasible" in text
    assert final_round.diagnose_failures(Sweep(max_repeated_failures=3), [*infeasible, trial(9)]) is None
