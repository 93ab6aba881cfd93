"""Tests the backend for OpenAI-compatible servers, with a scripted server on loopback."""

import json
from collections import Counter
from pathlib import Path

import pytest

import group_cases
from generations import SETTINGS, Generation, project, with_generate, write_prompts
from ratchet.config.machine import EndpointSettings
from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_OK
from scripted_endpoint import JSON, Said, Script, chat, error, served

COUNT = 12
QUICK = SETTINGS.model_copy(
    update={
        "machine": SETTINGS.machine.model_copy(
            update={"endpoint": EndpointSettings(max_attempts=2, retry_delay_s=0.001)}
        )
    }
)


def asked_of(body: JSON) -> str:
    return str(body["messages"][-1]["content"])


def echo(body: JSON, number: int) -> Said:
    return chat(f"<think>about {asked_of(body)}</think>You said: {asked_of(body)}")


def generation(tmp_path: Path, url: str, **changed: object) -> Generation:
    if not (tmp_path / "p").exists():
        project(tmp_path / "p", QUICK)
        write_prompts(tmp_path / "prompts.jsonl", COUNT)
    return Generation(tmp_path / "p", tmp_path / "prompts.jsonl", with_generate(QUICK, **changed), url)


def test_answers_of_a_server_are_recorded(tmp_path: Path) -> None:
    with served(echo) as server:
        made = generation(tmp_path, server.url, system_prompt="Be short.", seed=5, temperature=0.5)
        assert made.work() == EXIT_OK
    records = made.records()
    assert [one["id"] for one in records] == [f"q{n}" for n in range(COUNT)]
    assert all(one["answer"].startswith("You said: ") and one["reasoning"].startswith("about ") for one in records)
    assert {one["prompt_tokens"] for one in records} == {11}
    assert server.got[0]["messages"][0] == {"role": "system", "content": "Be short."}
    assert len({body["seed"] for body in server.got}) == COUNT


@pytest.mark.parametrize(
    ("said", "record"),
    [
        (chat("four", reasoning_content="two and two"), ("two and two", "four", "stop")),
        (chat("half", finish="length"), (None, "half", "length")),
        (chat("half", finish="content_filter"), (None, "half", "filtered")),
    ],
    ids=["reasoning apart", "length", "content filter"],
)
def test_reasoning_and_finish_are_recorded(said: Said, record: tuple[str | None, str, str], tmp_path: Path) -> None:
    with served(lambda body, number: said) as server:
        made = generation(tmp_path, server.url)
        assert made.work() == EXIT_OK
    assert {(one["reasoning"], one["answer"], one["finish"]) for one in made.records()} == {record}


def test_a_failing_server_ends_the_attempt_and_no_prompt_is_sent_twice(tmp_path: Path) -> None:
    down = [True]

    def script(body: JSON, number: int) -> Said:
        return error(503, "busy") if down[0] and number >= COUNT // 2 else echo(body, number)

    with served(script) as server:
        made = generation(tmp_path, server.url)
        assert made.work() == EXIT_BUG
        assert made.events("worker_error")[-1].data["failure_class"] == "endpoint"
        answered = made.events("generation_progress")
        down[0] = False
        before = len(server.got)
        assert made.work() == EXIT_OK
        begun = made.events("worker_ready")[-1].data["start_step"]
        # A set, because aborted requests may still arrive, even twice.
        asked = {asked_of(body) for body in server.got[before:]}
        assert len(asked) == COUNT - begun
        assert begun >= 1 or not answered
    assert len(made.records()) == COUNT


def nasty(*words: str) -> Script:
    """Return a script that refuses prompts that contain one of these words."""

    def script(body: JSON, number: int) -> Said:
        refused = any(word in asked_of(body) for word in words)
        return error(400, "against our content policy") if refused else echo(body, number)

    return script


def test_a_refused_prompt_is_recorded_and_the_others_are_answered(tmp_path: Path) -> None:
    with served(nasty("wet")) as server:
        made = generation(tmp_path, server.url)
        assert made.work() == EXIT_OK
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    wanted = ["refused" if "wet" in text else "stop" for text in asked]
    assert "refused" in wanted
    records = made.records()
    assert [one["finish"] for one in records] == wanted
    assert {(one["text"], one["tokens"]) for one in records if one["finish"] == "refused"} == {("", 0)}
    (notice,) = [event.data["text"] for event in made.events("notice") if "refused" in event.data["text"]]
    assert "is recorded as refused; the others continue. The server reported: HTTP 400: against our" in notice


def test_a_server_that_refuses_all_prompts_ends_the_generation(tmp_path: Path) -> None:
    with served(nasty("")) as server:
        made = generation(tmp_path, server.url)
        assert made.work() == EXIT_INPUT
        assert len(server.got) == COUNT
    said = made.events("worker_error")[-1].data["text"]
    assert f"refused all {COUNT} prompts that were sent, prompt q" in said
    assert "HTTP 400: against our content policy" in said
    assert not made.events("generation_progress")


def test_many_refusals_without_answer_stop_the_generation(tmp_path: Path) -> None:
    project(tmp_path / "p", QUICK)
    with served(nasty("")) as server:
        made = Generation(tmp_path / "p", write_prompts(tmp_path / "many.jsonl", 200), QUICK, server.url)
        assert made.work() == EXIT_INPUT
        assert 16 <= len(server.got) <= 16 + QUICK.machine.endpoint.max_concurrency


def test_prompts_are_sent_again_after_many_refusals_when_one_is_answered(tmp_path: Path) -> None:
    project(tmp_path / "p", QUICK)
    refusals = []

    def script(body: JSON, number: int) -> Said:
        if asked_of(body) == first:
            group_cases.until(lambda: len(refusals) >= 16, "16 refusals")
        elif len(refusals) < 20:
            refusals.append(number)
            return error(400, "against our content policy")
        return echo(body, number)

    prompts = write_prompts(tmp_path / "many.jsonl", 60)
    first = json.loads(prompts.read_text().splitlines()[0])["prompt"]
    with served(script) as server:
        made = Generation(tmp_path / "p", prompts, QUICK, server.url)
        assert made.work() == EXIT_OK
    finishes = Counter(one["finish"] for one in made.records())
    assert finishes == {"refused": len(refusals), "stop": 60 - len(refusals)}


def test_an_answer_of_an_earlier_attempt_counts(tmp_path: Path) -> None:
    down = [False]

    def script(body: JSON, number: int) -> Said:
        if down[0]:
            return error(413, "too much")
        return error(503, "busy") if number else echo(body, number)

    with served(script) as server:
        made = generation(tmp_path, server.url)
        assert made.work() == EXIT_BUG
        down[0] = True
        assert made.work() == EXIT_OK
    counts = Counter(one["finish"] for one in made.records())
    assert counts == {"stop": 1, "refused": COUNT - 1}
    notices = [event.data["text"] for event in made.events("notice") if "refused" in event.data["text"]]
    assert len(notices) == 2  # for the first and the tenth of eleven refusals
    assert "the server refused 10 prompts" in notices[1]
