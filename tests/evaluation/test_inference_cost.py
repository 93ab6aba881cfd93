"""Tests latency and memory of answering, with a fake clock."""

from typing import Any

import pytest

import families
from ratchet.evaluation import evaluator
from ratchet.models import scoring
from ratchet.models.memory import capacity


class Clock:
    """A clock that advances only while the model computes: one second per token of the pass."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        self.passes: list[tuple[int, ...]] = []
        model.model.layers[0].register_forward_hook(self._pass)

    def _pass(self, module: Any, inputs: Any, output: Any) -> None:
        self.passes.append(tuple(inputs[0].shape[:2]))
        self.now += inputs[0].shape[1]

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def model() -> Any:
    return families.make("llama")


@pytest.fixture
def clock(model: Any, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(model)
    monkeypatch.setattr(evaluator, "time", made)
    return made


def test_prompts_are_answered_one_at_a_time_and_the_warm_up_does_not_count(model: Any, clock: Clock) -> None:
    prompts = [[5] * length for length in (30, 10, 11, 12)]
    found = evaluator.measure_cost(model, 0, prompts, [], 3)
    assert clock.passes == [(1, n) for length in (30, 30, 10, 11, 12) for n in (length, 1, 1)]
    assert (found.rows, found.device) == (4, "cpu")
    assert (found.latency_s, found.latency_p95_s) == (13.5, 32.0)  # median and p95 of 32, 12, 13 and 14 s
    assert found.tokens_per_s == pytest.approx(4 * 3 / 71)
    assert found.memory_bytes >= sum(p.nbytes for p in model.parameters())


@pytest.mark.usefixtures("clock")
def test_the_slowest_of_twenty_answers_is_beyond_the_95th_percentile(model: Any) -> None:
    found = evaluator.measure_cost(model, 0, [[5] * length for length in range(1, 21)], [], 1)
    assert (found.latency_s, found.latency_p95_s) == (10.5, 19.0)


@pytest.mark.usefixtures("clock")
def test_speed_counts_the_generated_tokens(model: Any) -> None:
    end = scoring.generate(model, [[5, 6]], [], 4, 0)[0][0]
    assert evaluator.measure_cost(model, 0, [[5, 6]], [end], 4).tokens_per_s == pytest.approx(1 / 2)


def test_peak_memory_is_reset_before_measuring(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(what: str, value: Any) -> Any:
        order.append(what)
        return value

    monkeypatch.setattr(capacity, "reset_peak", lambda: note("forgotten", True))
    monkeypatch.setattr(capacity, "peak_resident_bytes", lambda: note("read", 12345))
    model.model.layers[0].register_forward_hook(lambda *_: order.append("pass"))
    assert evaluator.measure_cost(model, 0, [[5, 6]], [], 1).memory_bytes == 12345
    assert order == ["forgotten", "pass", "pass", "read"]
