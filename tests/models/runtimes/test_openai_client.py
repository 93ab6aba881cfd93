"""Tests the client of OpenAI-compatible servers: requests, parsing, retries and rejections."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ratchet import http_client
from ratchet.config.machine import EndpointSettings as Patience
from ratchet.errors import EXIT_INTERRUPTED, EndpointError, SettingsError
from ratchet.models.runtimes.openai_client import ChatReply, ChatRequest, OpenAiEndpoint, SamplingOptions
from ratchet.storage.progress import use_reporter
from scripted_endpoint import JSON, Said, Script, Server, chat, error, served, serving

SHORT = Patience(max_concurrency=3, timeout_s=20, max_attempts=3, retry_delay_s=0.01)
LIMIT = SamplingOptions(max_tokens=16)
HELLO = [{"role": "user", "content": "Hello?"}]


def endpoint(url: str, patience: Patience = SHORT, model: str | None = None) -> OpenAiEndpoint:
    return OpenAiEndpoint(url, patience, model)


def ask(client: OpenAiEndpoint, sampling: SamplingOptions = LIMIT) -> ChatReply:
    ((_, reply),) = client.answers([ChatRequest(0, HELLO, sampling)])
    return reply


def asked_once(
    script: Script, patience: Patience = SHORT, sampling: SamplingOptions = LIMIT
) -> tuple[ChatReply, Server]:
    """Send one request to a server that follows this script; return the reply and the server."""
    with served(script) as server:
        return ask(endpoint(server.url, patience), sampling), server


def after(*first: Said) -> Script:
    """Return a script that gives these replies in turn, then an answer."""
    return lambda _, number: first[number] if number < len(first) else chat("at last")


def asked(count: int) -> Iterator[ChatRequest]:
    for place in range(count):
        yield ChatRequest(place, [{"role": "user", "content": f"number {place}"}], LIMIT)


def echo(body: JSON, _: int) -> Said:
    return chat(f"you said {body['messages'][-1]['content']}")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RATCHET_ENDPOINT_KEY", raising=False)


# ------------------------------------------------------------------------------------------------- requests and replies


def test_an_answer_with_all_that_a_server_tells() -> None:
    def script(_: JSON, __: int) -> Said:
        said = chat("Paris", reasoning_content="France, so")
        said.body["choices"][0]["logprobs"] = {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}
        return said

    sampling = SamplingOptions(max_tokens=16, temperature=0.5, top_p=0.9, seed=7, logprobs=True)
    reply, server = asked_once(script, sampling=sampling)
    assert (reply.text, reply.reasoning, reply.finish, reply.tries) == ("Paris", "France, so", "stop", 1)
    assert (reply.prompt_tokens, reply.tokens, reply.mean_log_probability) == (11, 5, -1.0)
    assert server.got == [
        {
            "model": "tiny-judge", "messages": HELLO, "stream": False, "max_tokens": 16, "temperature": 0.5,
            "top_p": 0.9, "seed": 7, "logprobs": True,
        }
    ]  # fmt: skip
    assert server.paths == ["/v1/models", "/v1/chat/completions"]
    assert "Authorization" not in server.headers[0]


def test_missing_fields_of_a_reply_are_none() -> None:
    said = Said({"choices": [{"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"}]})
    reply, _ = asked_once(lambda *_: said)
    assert (reply.text, reply.reasoning, reply.finish) == ("", "hm", "length")
    assert (reply.prompt_tokens, reply.tokens, reply.mean_log_probability) == (None, None, None)


def test_texts_that_no_file_could_hold_are_made_whole() -> None:
    said = b'{"choices": [{"message": {"content": "a\\ud83d b \\ud83d\\ude00\\u0000"}, "finish_reason": "st\\nop"}]}'
    reply, _ = asked_once(lambda *_: Said(said))
    assert (reply.text, reply.finish) == ("a\ufffd b \U0001f600\0", "st op")


def test_the_address_may_have_a_path_of_its_own() -> None:
    with served(echo) as server:
        ask(endpoint(f"{server.url}/some/where/v2/"))
    assert server.paths == ["/some/where/v2/models", "/some/where/v2/chat/completions"]


def test_many_at_once_no_more_than_wanted_and_each_with_its_place() -> None:
    together = threading.Barrier(3)

    def script(body: JSON, number: int) -> Said:
        if number < 3:
            together.wait(20)  # this fails unless three requests are open at the same time
        return echo(body, number)

    with served(script) as server:
        found = dict(endpoint(server.url).answers(asked(20), lambda: False))
    assert {place: reply.text for place, reply in found.items()} == {k: f"you said number {k}" for k in range(20)}
    assert server.at_once == 3


def test_chats_are_taken_from_their_source_as_they_are_sent() -> None:
    taken: list[int] = []

    def counted() -> Iterator[ChatRequest]:
        for one in asked(50):
            taken.append(one.index)
            yield one

    with served(echo) as server:
        answers = endpoint(server.url).answers(counted(), lambda: False)
        next(answers)
        assert len(taken) <= 4
        answers.close()


# -------------------------------------------------------------------------------------------------- choice of the model


def test_the_only_model_is_used_and_a_configured_one_must_exist() -> None:
    with served(echo, serving("one", "two")) as server:
        with pytest.raises(SettingsError, match="serves one, two; set the name of one"):
            endpoint(server.url).get_model()
        with pytest.raises(SettingsError, match="does not serve 'three'; it serves: one, two"):
            endpoint(server.url, model="three").get_model()
        found = endpoint(server.url, model="two").get_model()
    assert (found.name, found.identity) == ("two", {"id": "two", "owned_by": "test"})


def test_a_server_without_a_model_list_needs_a_name() -> None:
    with served(echo, error(404, "not found")) as server:
        assert endpoint(server.url, model="mine").get_model().identity == {"id": "mine"}
        with pytest.raises(SettingsError, match="does not list its models"):
            endpoint(server.url).get_model()


# -------------------------------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(error(500, "oh"), id="500"),
        pytest.param(error(503, "Loading model"), id="503"),
        pytest.param(error(429, "slow down"), id="429"),
        pytest.param(error(429, "slow down", **{"Retry-After": "0"}), id="429-retry-after"),
        pytest.param(Said(hangs_up=True), id="hangs-up"),
        pytest.param(Said(stalls=True), id="stalls"),
        pytest.param(Said({"choices": []}, cut=True), id="cut-off"),
        pytest.param(Said(b'{"choices": [{"message": {"con'), id="half-a-json"),
        pytest.param(Said(b"<html>busy</html>"), id="no-json"),
        pytest.param(Said(b"[" * 100_000), id="deep-json"),
        pytest.param(Said({"choices": []}), id="no-choices"),
        pytest.param(Said({"error": {"message": "upstream"}}), id="error-with-200"),
        pytest.param(Said({"choices": [{"message": {"content": "x"}}]}), id="no-finish"),
        pytest.param(Said({"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}), id="no-text"),
    ],
)
def test_transient_failures_are_retried(first: Said) -> None:
    reply, server = asked_once(after(first), SHORT.model_copy(update={"timeout_s": 1.0 if first.stalls else 20}))
    assert (reply.text, reply.tries, len(server.got)) == ("at last", 2, 2)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        pytest.param(error(500, "out of cheese"), "HTTP 500 Internal Server Error: out of cheese", id="500"),
        pytest.param(Said(b'{"choices": [{"mess'), 'incomplete JSON: {"choices": .{"mess;', id="half-a-json"),
        pytest.param(Said(b""), "invalid or incomplete JSON: an empty response", id="empty"),
        pytest.param(Said(hangs_up=True), "RemoteProtocolError: Server disconnected", id="hangs-up"),
        pytest.param(Said(stalls=True), r"no complete answer within 1 s \(machine.endpoint.timeout_s\)", id="stalls"),
    ],
)
def test_the_final_error_names_the_last_failure(said: Said, named: str) -> None:
    with served(lambda *_: said) as server:
        asking = endpoint(server.url, Patience(timeout_s=1 if said.stalls else 60, max_attempts=2, retry_delay_s=0.01))
        with pytest.raises(EndpointError, match=named) as caught:
            ask(asking)
    assert len(server.got) == 2
    assert "2 attempts" in str(caught.value) and caught.value.exit_code == EXIT_INTERRUPTED


def test_a_refused_connection_is_an_error() -> None:
    with served(echo) as server:
        url = server.url
    with pytest.raises(EndpointError, match="ConnectionRefusedError") as caught:
        ask(endpoint(url))
    assert "kept" not in str(caught.value)  # no answer was begun
    assert str(caught.value).endswith("(machine.endpoint.max_attempts); check the server")


def test_failed_attempts_are_shown_while_the_server_does_not_answer() -> None:
    with served(echo) as server:
        url = server.url
    shown: list[tuple[str, int, int | None]] = []

    class Recorder:
        def report(self, task: str, done: int, total: int | None, unit: str) -> None:
            shown.append((task, done, total))

        def clear(self) -> None:
            shown.clear()

    with use_reporter(Recorder()), pytest.raises(EndpointError):
        endpoint(url).get_model()
    assert [(done, total) for _, done, total in shown] == [(1, None), (2, None)]
    assert all(url in task and "ConnectionRefusedError" in task for task, _, _ in shown)


def test_replies_before_an_error_are_yielded_first() -> None:
    def script(body: JSON, number: int) -> Said:
        return error(400, "no such thing") if "number 5" in body["messages"][0]["content"] else echo(body, number)

    found = []
    with served(script) as server, pytest.raises(SettingsError, match="no such thing"):
        for place, _ in endpoint(server.url, Patience(max_concurrency=1)).answers(asked(9), lambda: False):
            found.append(place)
    assert found == [0, 1, 2, 3, 4]


# ----------------------------------------------------------------------------------------------- refusals without retry


@pytest.mark.parametrize(
    ("said", "named"),
    [
        pytest.param(error(400, "temperature must be cold"), "400 Bad Request: temperature must be cold", id="400"),
        pytest.param(error(401, "who are you"), "who are you; the key is read from RATCHET_ENDPOINT_KEY", id="401"),
        pytest.param(Said(b"gone\nfor good", 410), "410 Gone: gone for good", id="410"),
        pytest.param(Said(b"", 307, {"Location": "http://127.0.0.1:9/x"}), "redirects are not followed", id="redirect"),
    ],
)
def test_permanent_rejections_are_errors_at_once(said: Said, named: str) -> None:
    with served(lambda *_: said) as server, pytest.raises(SettingsError, match=named):
        ask(endpoint(server.url))
    assert len(server.got) == 1


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("This model's maximum context length is 128 tokens", id="vllm"),
        pytest.param("the request exceeds the available context size", id="llama.cpp"),
    ],
)
def test_a_too_long_prompt_is_a_reply_and_others_continue(text: str) -> None:
    def script(body: JSON, number: int) -> Said:
        return error(400, text) if "number 1" in body["messages"][0]["content"] else echo(body, number)

    with served(script) as server:
        found = dict(endpoint(server.url).answers(asked(4), lambda: False))
    assert [found[k].finish for k in range(4)] == ["stop", "context", "stop", "stop"]


def test_unsupported_parameters_are_dropped_and_noted() -> None:
    def script(body: JSON, _: int) -> Said:
        for name in ("logprobs", "seed"):
            if name in body:
                return error(400, f"Unsupported parameter: '{name}'")
        if "max_tokens" in body:
            return error(400, "Unsupported parameter: 'max_tokens'; use 'max_completion_tokens' instead")
        return chat("fine")

    with served(script) as server:
        asking = endpoint(server.url)
        wanted = SamplingOptions(max_tokens=16, seed=3, logprobs=True)
        assert [ask(asking, wanted).text for _ in range(2)] == ["fine", "fine"]
    assert [note.split(" does ")[1] for note in asking.notes] == [
        "not support logprobs; requests are sent without it",
        "not support seed; requests are sent without it",
    ]
    assert len(server.got) == 5
    assert server.got[-1]["max_completion_tokens"] == 16


# -------------------------------------------------------------------------------------------------------------- API key


def test_the_key_is_sent_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ENDPOINT_KEY", "sk-very-secret")
    said = error(401, "Incorrect key: sk-very-secret")
    with served(lambda *_: said) as server, pytest.raises(SettingsError) as caught:
        ask(endpoint(server.url))
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in str(caught.value) and "(the key)" in str(caught.value)


def test_a_key_that_would_be_more_than_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ENDPOINT_KEY", "sk\r\nHost: elsewhere")
    with pytest.raises(SettingsError, match="RATCHET_ENDPOINT_KEY") as caught:
        endpoint("http://127.0.0.1:1")
    assert "elsewhere" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("http://example.org/v1", "http to example.org can be read"),
        ("https://me:secret@example.org/v1", "without user name and password"),
        ("https://example.org/v1?key=secret", "without a query"),
        ("example.org", "expected a URL such as https"),
        ("https://example.org:99999", "valid host and port"),
        ("https://exa\nmple.org", "printable ASCII"),
        ("ftp://example.org", "expected a URL such as https"),
    ],
    ids=["plain-http", "password", "query", "no-scheme", "port", "line", "scheme"],
)
def test_invalid_addresses_are_refused(address: str, fault: str) -> None:
    found = http_client.find_endpoint_problem(address)
    assert found is not None and fault in found and "secret" not in found
    with pytest.raises(SettingsError):
        endpoint(address)


@pytest.mark.parametrize("address", ["https://example.org", "http://localhost:8000/v1", "http://[::1]:8080"])
def test_valid_addresses_are_accepted(address: str) -> None:
    assert http_client.find_endpoint_problem(address) is None


# --------------------------------------------------------------------------------------------------------- cancellation


def test_stopping_cancels_pending_requests() -> None:
    begun = threading.Event()

    def script(body: JSON, number: int) -> Any:
        if number == 0:
            return echo(body, number)
        begun.set()
        return Said(stalls=True)

    with served(script) as server:
        one_by_one = Patience(max_concurrency=1, timeout_s=600)
        found = list(endpoint(server.url, one_by_one).answers(asked(9), begun.is_set))
        assert [place for place, _ in found] == [0]
        assert list(endpoint(server.url).answers(asked(1), lambda: len(server.got) > 2)) == []
        with pytest.raises(EndpointError, match="was cancelled"):
            list(endpoint(server.url).answers(asked(1), lambda: True))
