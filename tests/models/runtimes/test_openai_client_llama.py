"""Tests the client of OpenAI-compatible servers against llama.cpp's server with a tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.config.machine import EndpointSettings as Patience
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.openai_client import ChatRequest, OpenAiEndpoint, SamplingOptions

QUESTION = [{"role": "user", "content": "what is water"}]


@pytest.fixture(scope="module")
def endpoint(path: Path) -> Iterator[OpenAiEndpoint]:
    with llama_server.start_server(path, 1, 256) as server:
        yield OpenAiEndpoint(
            server.address, Patience(max_concurrency=4, timeout_s=120, max_attempts=2, retry_delay_s=0.1)
        )


def test_the_model_is_known_by_its_own_name(endpoint: OpenAiEndpoint) -> None:
    found = endpoint.get_model()
    assert found.name == found.identity["id"]
    assert found.identity["meta"]["n_params"] > 0


def test_greedy_and_seeded_answers_repeat_with_their_log_probability(endpoint: OpenAiEndpoint) -> None:
    for sampling in (SamplingOptions(8, logprobs=True), SamplingOptions(8, temperature=1.0, seed=5, logprobs=True)):
        ((_, first),), ((_, second),) = (list(endpoint.answers([ChatRequest(0, QUESTION, sampling)])) for _ in range(2))
        assert (first.text, first.finish, first.tokens) == (second.text, second.finish, second.tokens)
        assert first.tokens and first.prompt_tokens
        # The second request finds the prompt in the server's cache, which rounds sums differently.
        assert first.mean_log_probability == pytest.approx(second.mean_log_probability, abs=1e-4)
        assert first.mean_log_probability is not None and first.mean_log_probability < 0
    assert endpoint.notes == []


def test_too_long_prompts_are_reported_and_the_rest_is_answered(endpoint: OpenAiEndpoint) -> None:
    long = [{"role": "user", "content": "what is water " * 200}]
    asked = [ChatRequest(k, long if k == 2 else QUESTION, SamplingOptions(4)) for k in range(6)]
    found = dict(endpoint.answers(asked, lambda: False))
    assert sorted(found) == list(range(6))
    assert [k for k, reply in found.items() if reply.finish == "context"] == [2]
    assert len({reply.text for k, reply in found.items() if k != 2}) == 1
