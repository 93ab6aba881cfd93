"""Tests streamed answers with a real loopback server that streams and breaks like real servers."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from ratchet.config.machine import EndpointSettings as Patience
from ratchet.errors import EndpointError, RatchetError, SettingsError
from ratchet.models.runtimes import llama_server, openai_client
from ratchet.models.runtimes.llama_server import LlamaServer as Llama
from ratchet.models.runtimes.openai_client import ChatDelta, ChatReply, ChatRequest, OpenAiEndpoint, SamplingOptions
from scripted_endpoint import Said, Script, chat, error, event, served, serving, sse, streamed

QUESTION = ChatRequest(0, [{"role": "user", "content": "what is water"}], SamplingOptions(8, logprobs=True))
QUICK = Patience(max_attempts=3, retry_delay_s=0.001, timeout_s=5)


def heard(script: Script, patience: Patience = QUICK, **more: object) -> list[ChatDelta | ChatReply]:
    with served(script) as server:
        return list(OpenAiEndpoint(server.url, patience, **more).stream(QUESTION))  # type: ignore[arg-type]


def reply(found: list[ChatDelta | ChatReply]) -> ChatReply:
    (one,) = [one for one in found if isinstance(one, ChatReply)]
    assert found[-1] is one
    return one


def test_pieces_are_streamed_with_separate_reasoning() -> None:
    with served(lambda body, number: streamed("It", " is", " wet.", reasoning=("Hm", "m."), hold_s=0.01)) as server:
        pieces = OpenAiEndpoint(server.url, QUICK).stream(QUESTION)
        first = list(islice(pieces, 2))
        assert first == [ChatDelta("Hm", True), ChatDelta("m.", True)]  # the server has not sent the rest yet
        found = [*first, *pieces]
        assert server.got[0]["stream"] is True
    assert [one for one in found if isinstance(one, ChatDelta)][2:] == [
        ChatDelta(t, False) for t in ("It", " is", " wet.")
    ]
    end = reply(found)
    assert (end.text, end.reasoning, end.finish) == ("It is wet.", "Hmm.", "stop")
    assert (end.prompt_tokens, end.tokens) == (11, 5)


def test_comments_names_and_split_lines_of_a_stream_are_no_text() -> None:
    raw = event({"content": "wet"}, finish_reason="stop")
    events = (
        b": ping\n\n",
        b"event: message\nid: 3\nretry: 9\n" + raw[:20],
        raw[20:] + b"\n\n",
        b"data:[DONE]\r\n\r\n",
    )
    found = heard(lambda body, number: Said(events=events))
    assert found[0] == ChatDelta("wet", False)
    assert reply(found).text == "wet"


def test_only_carriage_returns_and_line_feeds_end_a_line() -> None:
    raw = event({"content": "a\u2028b\x85c"}, finish_reason="stop").decode().encode()
    document = json.loads(raw.removeprefix(b"data: "))
    events = (f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode(), sse("[DONE]"))
    assert reply(heard(lambda body, number: Said(events=events))).text == "a\u2028b\x85c"
    splitter = openai_client.LineSplitter()
    pieces = [b"a\r", b"\nb\rc\n", b"\xe2\x80", b"\xa8d", b"\r\n\r", b"\ne"]
    assert [splitter.feed(piece) for piece in pieces] == [[], ["a", "b", "c"], [], [], ["\u2028d"], [""]]
    assert splitter.close() == "e"


def test_data_of_several_lines_is_one_event() -> None:
    lines = ['data: {"a":', "data: 1}", "", ":x", "data", "", "data: cut"]
    assert list(openai_client.iterate_event_data(lines)) == ['{"a":\n1}', "", "cut"]


@pytest.mark.parametrize("lacks", ["[DONE]", "usage", "finish_reason"])
def test_what_servers_leave_out_of_a_stream_is_no_error(lacks: str) -> None:
    events = tuple(one for one in streamed("wet").events if lacks.encode() not in one)
    end = reply(heard(lambda body, number: Said(events=events)))
    assert (end.text, end.finish) == ("wet", "stop")
    assert (end.tokens is None) == (lacks == "usage")


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (streamed("wet").events[:2], "the stream ended before the answer"),
        ((event({"content": "wet"}), b'data: {"choices": [{"del'), "invalid or incomplete JSON"),
        ((event({"content": "wet"}), sse({"error": {"message": "CUDA is gone"}})), "CUDA is gone"),
        ((sse({"choices": [{"index": 0}]}),), "a choice has no delta"),
        ((event({"content": ["wet"]}),), "content of a delta is not text"),
    ],
)
def test_a_broken_stream_is_an_error_without_repetition(events: tuple[bytes, ...], why: str) -> None:
    with served(lambda body, number: Said(events=events)) as server:
        found = []
        with pytest.raises(EndpointError, match=why):
            found.extend(OpenAiEndpoint(server.url, QUICK).stream(QUESTION))
        assert len(server.got) == 1


def test_a_server_that_sends_only_comments_times_out() -> None:
    said = Said(events=streamed("wet").events[:2], after="comments")
    with pytest.raises(EndpointError, match=r"no piece of the answer arrived for 1 s \(machine.endpoint.timeout_s\)"):
        heard(lambda body, number: said, QUICK.model_copy(update={"timeout_s": 1}))


def test_requests_are_retried_until_the_answer_starts() -> None:
    def script(body: object, number: int) -> Said:
        return [error(503, "loading"), Said(hangs_up=True), streamed("wet")][min(number, 2)]

    assert reply(heard(script)).text == "wet"
    with pytest.raises(EndpointError, match="503"):
        heard(lambda body, number: error(503, "loading"))


def test_unsupported_stream_options_are_dropped() -> None:
    def script(body: dict[str, object], number: int) -> Said:
        return error(400, "unknown field stream_options") if "stream_options" in body else streamed("wet")

    assert reply(heard(script)).text == "wet"


def test_a_server_that_does_not_stream_is_understood() -> None:
    found = heard(lambda body, number: chat("wet", reasoning_content="hm"))
    assert found[:2] == [ChatDelta("hm", True), ChatDelta("wet", False)]
    assert reply(found).tokens == 5


def test_refusals_are_errors_or_replies() -> None:
    with pytest.raises(SettingsError, match="not nice"):
        heard(lambda body, number: error(400, "not nice"))
    assert (
        reply(heard(lambda body, number: error(422, "not nice"), returns_refusals=True)).refusal == "HTTP 422: not nice"
    )
    full = reply(heard(lambda body, number: error(400, "maximum context length is 8")))
    assert (full.finish, full.refusal) == ("context", None)


def test_a_closed_iterator_cancels_the_answer() -> None:
    said = replace(streamed("wet", " and"), hold_s=0.01, after="comments")  # the stream does not end by itself
    with served(lambda body, number: said) as server:
        pieces = OpenAiEndpoint(server.url, QUICK).stream(QUESTION)
        assert next(pieces) == ChatDelta("wet", False)
        pieces.close()  # type: ignore[attr-defined]
        deadline_s = time.monotonic() + 30
        while server.here and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert server.here == 0  # the server failed to write to the closed connection


def test_the_context_length_is_read_from_the_model_entry() -> None:
    told = Said({"data": [{"id": "m", "max_model_len": 4096}]})
    for models, expected in ((told, 4096), (serving("m"), None)):
        with served(lambda body, number: chat("x"), models) as server:
            assert OpenAiEndpoint(server.url, QUICK).get_model().context_tokens == expected


@pytest.fixture(scope="module")
def llama(path: Path) -> Iterator[Llama]:
    with llama_server.start_server(path, 1, 256) as server:
        yield server


def test_llama_cpp_streams_the_same_answer(llama: Llama) -> None:
    ids = llama.tokenize("what is water", add_special=True)
    whole = llama.completion(ids, 12, cache_prompt=False, response_fields=["content", "tokens"])
    pieces = list(llama.stream(ids, 12, cache_prompt=False))
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert pieces[-1]["tokens_predicted"] == len(whole["tokens"])
    assert len(pieces) > 2


def test_llama_cpp_behind_the_client_of_servers_streams_too(llama: Llama) -> None:
    found = list(OpenAiEndpoint(llama.address, QUICK).stream(QUESTION))
    end = reply(found)
    assert "".join(one.text for one in found if isinstance(one, ChatDelta) and not one.is_reasoning) == end.text
    assert end.tokens and end.mean_log_probability and end.mean_log_probability < 0


def test_llama_cpp_that_rejects_or_dies_during_an_answer_is_an_error(path: Path) -> None:
    with llama_server.start_server(path, 1, 256) as server:
        with pytest.raises(SettingsError, match="rejected /completion"):
            list(server.stream(list(range(3)) * 200, 12))
        pieces = server.stream(server.tokenize("what is water", add_special=True), 200, ignore_eos=True)
        next(pieces)
        server.process.kill()
        with pytest.raises(RatchetError, match="during an answer"):
            list(pieces)
