"""What answering costs, with a clock of our own."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.evaluation import speed
from ratchet.model import capacity, scoring


def make() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Clock:
    """Stands still but while the model computes: a second for each token of the pass."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        self.passes: list[tuple[int, ...]] = []
        model.model.layers[0].register_forward_hook(self._pass)

    def _pass(self, module: Any, inputs: Any, output: Any) -> None:
        self.passes.append(tuple(inputs[0].shape[:2]))
        self.now += inputs[0].shape[1]

    def perf_counter(self) -> float:
        return self.now


def test_prompts_are_answered_one_at_a_time_and_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    clock = Clock(model)
    monkeypatch.setattr(speed, "time", clock)
    prompts = [[5] * length for length in (30, 10, 11, 12)]
    found = speed.measure(model, 0, prompts, [], 3)
    assert clock.passes == [(1, n) for length in (30, 30, 10, 11, 12) for n in (length, 1, 1)]
    assert (found.rows, found.device) == (4, "cpu")
    assert (found.latency_s, found.latency_p95_s) == (13.5, 32.0)  # of 32, 12, 13, 14 s
    assert found.tokens_per_s == pytest.approx(4 * 3 / 71)
    assert found.memory_bytes >= sum(p.nbytes for p in model.parameters())


def test_of_twenty_answers_the_slowest_is_beyond_the_ninety_fifth_percentile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(speed, "time", Clock(model))
    found = speed.measure(model, 0, [[5] * length for length in range(1, 21)], [], 1)
    assert (found.latency_s, found.latency_p95_s) == (10.5, 19.0)


def test_tokens_are_those_that_were_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    end = scoring.generate(model, [[5, 6]], [], 4, 0)[0][0]
    monkeypatch.setattr(speed, "time", Clock(model))
    assert speed.measure(model, 0, [[5, 6]], [end], 4).tokens_per_s == pytest.approx(1 / 2)


def test_memory_of_what_was_before_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(what: str, value: Any) -> Any:
        order.append(what)
        return value

    monkeypatch.setattr(capacity, "forget_peak", lambda: note("forgotten", True))
    monkeypatch.setattr(capacity, "peak_resident_bytes", lambda: note("read", 12345))
    model = make()
    model.model.layers[0].register_forward_hook(lambda *_: order.append("pass"))
    assert speed.measure(model, 0, [[5, 6]], [], 1).memory_bytes == 12345
    assert order == ["forgotten", "pass", "pass", "read"]
