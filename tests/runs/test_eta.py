"""Tests of the estimated remaining time: the coverage of its range, and the work that it counts."""

import math
import random
from collections.abc import Callable, Iterator

import pytest

from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import EtaEstimator, RemainingTime

T = 1_760_000_000.0
Costs = Callable[[random.Random, int], list[float]]


def journal(costs: list[float], every: int = 0, validation_s: float = 0.0) -> Iterator[JournalEvent]:
    """Yield the events of a training with these step times in seconds, and with validations if `every` is set."""
    t = T
    yield JournalEvent("worker_ready", t, 1, {"start_step": 0, "planned_steps": len(costs), "device": "cpu"})
    for number, cost in enumerate(costs, start=1):
        t += cost
        yield JournalEvent("step", t, 1, {"step": number, "step_s": cost})
        if every and (number % every == 0 or number == len(costs)):
            t += validation_s
            yield JournalEvent("validation", t, 1, {"step": number, "seconds": validation_s, "loss": 1.0})


def alike(draw: random.Random, steps: int) -> list[float]:
    return [math.exp(draw.gauss(0, 0.01)) for _ in range(steps)]


def noisy(draw: random.Random, steps: int) -> list[float]:
    return [math.exp(draw.gauss(0, 0.2)) for _ in range(steps)]


def spiked(draw: random.Random, steps: int) -> list[float]:
    return [math.exp(draw.gauss(0, 0.15)) * (8 if draw.random() < 0.03 else 1) for _ in range(steps)]


def wandering(draw: random.Random, steps: int) -> list[float]:
    place, found = 0.0, []
    for _ in range(steps):
        place = 0.95 * place + draw.gauss(0, 0.1)
        found.append(math.exp(place))
    return found


def warming(draw: random.Random, steps: int) -> list[float]:
    found = [math.exp(draw.gauss(0, 0.1)) * (1 + 2 * math.exp(-number / 4)) for number in range(steps)]
    return [20 * found[0], *found[1:]]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("costs", [alike, noisy, spiked, wandering, warming], ids=lambda kind: kind.__name__)
def test_nine_of_ten_ends_are_within_the_range(costs: Costs, share: float) -> None:
    right = 0
    for seed in range(60):
        steps = (60, 200, 1000)[seed % 3]
        events = list(journal(costs(random.Random(seed), steps)))
        at = 1 + max(4, round(share * steps))
        left = left_after(events[:at])
        right += left.low_s <= events[-1].t - events[at - 1].t <= left.high_s
    assert right >= 0.8 * 60


def after(events: list[JournalEvent]) -> EtaEstimator:
    outlook = EtaEstimator()
    for event in events:
        outlook.update(event)
    return outlook


def left_after(events: list[JournalEvent], t: float | None = None) -> RemainingTime:
    left = after(events).estimate(events[-1].t if t is None else t)
    assert left is not None
    return left


def test_steps_that_are_alike_need_no_range_soon() -> None:
    left = left_after(list(journal([1.0] * 1000))[:201])
    assert left.is_precise
    assert left.estimate_s == pytest.approx(800)
    assert left.describe() == "about 13 min"


def test_few_steps_give_no_estimate_and_the_first_does_not_count() -> None:
    events = list(journal([50.0, 1.0, 1.0, 1.0] + [1.0] * 96))
    assert after(events[:4]).estimate(events[3].t) is None
    left = left_after(events[:5])
    assert left.estimate_s == pytest.approx(96)
    assert not left.is_precise
    assert "(" in left.describe()


def test_future_validations_count_and_the_elapsed_part_of_a_step_does_not() -> None:
    events = list(journal([1.0] * 100, every=10, validation_s=5.0))
    half = [event for event in events if event.data.get("step", 0) <= 50]
    now = events[-1].t - 5 * 15
    left = left_after(half, now)
    assert left.estimate_s == pytest.approx(50 + 25)
    later = left_after(half, now + 5 + 0.4)  # the journal got the validation of step 50 at its end
    assert later.estimate_s < left.estimate_s
    assert left_after(events).estimate_s == 0.0


def test_waits_between_steps_count_but_not_a_machine_that_slept() -> None:
    waits = [JournalEvent("worker_ready", T, 1, {"start_step": 0, "planned_steps": 100})]
    waits += [JournalEvent("step", T + 2.0 * number, 1, {"step": number, "step_s": 1.0}) for number in range(1, 51)]
    assert left_after(waits).estimate_s == pytest.approx(100)
    waits.append(JournalEvent("step", T + 1e6, 1, {"step": 51, "step_s": 1.0}))
    assert left_after(waits).estimate_s < 300


def test_another_attempt_keeps_the_costs_of_steps_unless_it_has_another_device() -> None:
    events = list(journal([1.0] * 100))[:51]
    again = JournalEvent("worker_ready", T + 60, 2, {"start_step": 40, "planned_steps": 100, "device": "cpu"})
    step = JournalEvent("step", T + 70, 2, {"step": 41, "step_s": 9.0})
    assert left_after([*events, again, step]).estimate_s == pytest.approx(59)
    other = JournalEvent("worker_ready", T + 60, 2, {"start_step": 40, "planned_steps": 100, "device": "cuda"})
    assert after([*events, other, step]).estimate(T + 70) is None


def test_estimate_of_a_long_run() -> None:
    events = list(journal([0.5 + 0.001 * (number % 7) for number in range(20_000)]))
    left = left_after(events[:10_001])
    assert left.estimate_s == pytest.approx(events[-1].t - events[10_000].t, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [((4, 7, 11), "about 7 s (4-11)"), ((40, 52, 70), "about 50 s (40-70)"), ((540, 720, 1020), "about 12 min (9-17)"),
     ((690, 720, 750), "about 12 min"), ((5000, 7000, 9000), "about 1.9 h (1.4-2.5)"),
     ((2e5, 3e5, 4e5), "about 3.5 d (2.3-4.6)")],
    ids=["seconds", "minute", "minutes", "close", "hours", "days"],
)  # fmt: skip
def test_words(seconds: tuple[float, float, float], text: str) -> None:
    assert RemainingTime(*seconds).describe() == text
