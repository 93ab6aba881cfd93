"""Tests of `ratchet chat`: on a real terminal with key presses, from a script, with a real model and with servers."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ratchet
from chat_cases import (
    PATIENCE_S,
    QUICK,
    layout,  # noqa: F401 (a fixture)
    model,  # noqa: F401 (a fixture)
    terminal,
)
from generations import with_generate
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_INTERRUPTED, DataError, EndpointError, RatchetError, SettingsError
from ratchet.stages.chat import chat
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from scripted_endpoint import JSON, Said, error, served, streamed


def last(body: JSON) -> str:
    return str(body["messages"][-1]["content"])


def echo(body: JSON, number: int) -> Said:
    return streamed("You said: ", last(body), reasoning=("Let me", " see"))


def scripted(layout: ProjectLayout, model: str, *lines: str, settings: Settings = QUICK) -> str:
    """Run a chat without a terminal on these input lines; return its output."""
    out = io.StringIO()
    chat(Project.from_parts(layout, settings), model, (io.StringIO("".join(f"{line}\n" for line in lines)), out))
    return out.getvalue()


def test_a_script_gets_answers_and_nothing_else(layout: ProjectLayout) -> None:
    with served(echo) as server:
        said = scripted(layout, server.url, "one", "", "/system Be short.", "two", "//etc", "three\\", "lines")
    assert said == "You said: one\nYou said: two\nYou said: /etc\nYou said: three\nlines\n"
    talk = server.got[-1]["messages"]
    assert [message["role"] for message in talk] == ["system", *["user", "assistant"] * 3, "user"]
    assert talk[0]["content"] == "Be short."
    assert talk[2]["content"] == "You said: one"  # the reasoning is not sent back


def test_a_program_has_a_conversation(layout: ProjectLayout) -> None:
    notices: list[str] = []
    project = Project.from_parts(layout, QUICK)
    with served(echo) as server, ratchet.chat(project, server.url, notices.append) as talk:
        assert [talk.ask("one"), talk.ask("two")] == ["You said: one", "You said: two"]
        roles = [message["role"] for message in server.got[-1]["messages"]]
        with pytest.raises(SettingsError, match="found None; expected a string"):
            talk.ask(None)  # type: ignore[arg-type]
    assert roles == ["user", "assistant", "user"]
    with pytest.raises(SettingsError, match="the chat is closed"):
        talk.ask("three")
    assert notices == []
    with served(error(400, "no")) as server, ratchet.chat(project, server.url) as talk, pytest.raises(EndpointError):
        talk.ask("one")


def test_a_question_of_a_program_that_does_not_fit_is_refused_and_the_conversation_continues(
    layout: ProjectLayout, model: Path
) -> None:
    with ratchet.chat(Project.from_parts(layout, QUICK), str(model)) as talk:
        answer = talk.ask("hello")
        with pytest.raises(DataError, match=r"does not fit .*: it was not asked, and nothing was truncated"):
            talk.ask("a long question " * 2000)
        assert isinstance(talk.ask("again"), str)
    with ratchet.chat(Project.from_parts(layout, QUICK), str(model)) as talk:
        assert talk.ask("hello") == answer


def test_fenced_questions_and_reset(layout: ProjectLayout) -> None:
    with served(echo) as server:
        said = scripted(layout, server.url, "one", "/reset", '"""', "a", "", 'b"""', '"""c', "d", "/quit")
        assert [last(body) for body in server.got] == ["one", "a\n\nb", "c\nd\n/quit"]
    assert [len(body["messages"]) for body in server.got] == [1, 1, 3]
    assert said.count("You said") == 3


def test_retry_takes_the_answer_back_and_draws_another(layout: ProjectLayout) -> None:
    drawn = with_generate(QUICK, temperature=0.9)
    with served(echo) as server:
        scripted(layout, server.url, "one", "two", "/retry", "three", settings=drawn)
    assert server.got[1]["messages"] == server.got[2]["messages"]
    assert server.got[1]["seed"] != server.got[2]["seed"]
    assert [m["content"] for m in server.got[3]["messages"]] == [
        "one", "You said: one", "two", "You said: two", "three",
    ]  # fmt: skip


def test_a_saved_conversation_is_training_data(layout: ProjectLayout, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    with served(echo) as server:
        scripted(layout, server.url, "/system Be kind.", "one", f"/save {path}", "two", f"/save {path}")
        (record,) = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [m["content"] for m in record["messages"]] == [
            "Be kind.", "one", "You said: one", "two", "You said: two",
        ]  # fmt: skip
        for words, why in (
            (["one", f"/save {path}"], "the file exists already"), (["one", "/save x.csv"], "expected .jsonl"),
            ([f"/save {tmp_path / 'new.jsonl'}"], "the chat is empty"), (["one", "/save"], "name a file"),
            (["/nonsense"], "unknown command"), (["/retry"], "no question was asked yet"),
            (["one", "/save /proc/none/x.jsonl"], "nothing was written"),
        ):  # fmt: skip
            with pytest.raises(SettingsError, match=why):
                scripted(layout, server.url, *words)


def test_an_error_without_a_terminal_ends_the_chat(layout: ProjectLayout) -> None:
    full = error(400, "maximum context length is 8")
    for said, kind, why in (
        (full, DataError, "it was not asked, and nothing was truncated; /reset"),
        (error(422, "not nice"), DataError, "HTTP 422: not nice"), (error(503, "busy"), EndpointError, "503"),
        (Said(events=streamed("half").events[:2]), EndpointError, "was interrupted"),
    ):  # fmt: skip
        with served(lambda body, number, said=said: said) as server, pytest.raises(kind, match=why):
            scripted(layout, server.url, "one")


def test_on_a_terminal_reasoning_is_dim_and_figures_follow(layout: ProjectLayout) -> None:
    with served(echo) as server, terminal(layout, server.url, columns=40) as seen:
        seen.until("Ctrl-D ends.*> ")
        seen.press("hello there\r")
        text = seen.until("context.*> ")
        assert "\x1b[2mLet me see\x1b[0m\r\nYou said: hello there\r\n" in text
        assert re.search(r"\x1b\[2m4 tokens, [\d,.]+\s+tokens/s,\s+context\s+15\x1b", text)
        seen.resize(23)
        seen.press("\x1b[A\r")  # the up arrow recalls the previous input
        assert "You said: hello there" in seen.until("tokens/s.*> ")
        seen.press("tell of extraordinarily long words\r")
        assert "You said: tell of\r\nextraordinarily long\r\nwords\r\n" in seen.until("tokens/s.*> ")
        seen.press("/nonsense\r")
        seen.until(r"! /nonsense: unknown\s+command.*> ")
        seen.press("/help\r")
        assert "/retry" in seen.until(r"Ctrl-C\s+stops\s+an\s+answer.*> ")
        seen.press("\x04")
        assert seen.end() == 0
    assert [last(body) for body in server.got] == [*["hello there"] * 2, "tell of extraordinarily long words"]


def test_without_colours_labels_mark_reasoning(layout: ProjectLayout) -> None:
    with served(echo) as server, terminal(layout, server.url, NO_COLOR="1") as seen:
        seen.until("> ")
        seen.press("hi\r")
        text = seen.until("tokens/s.*> ")
        assert "(reasoning) Let me see\r\n(answer) You said: hi\r\n" in text
        assert "\x1b[2m" not in text
        seen.press("/quit\r")
        assert seen.end() == 0


def test_ctrl_c_stops_an_answer_and_nothing_else(layout: ProjectLayout) -> None:
    def script(body: JSON, number: int) -> Said:
        slow = streamed("I begin", *[" and go on"] * 600, reasoning=("Hm",), hold_s=0.02)
        return echo(body, number) if last(body) == "short" else slow

    with served(script) as server, terminal(layout, server.url) as seen:
        for _ in range(2):  # the second answer can be stopped too
            seen.until("> ")
            seen.press("tell me\r")
            seen.until("I begin and go on")
            seen.press("\x03")
            assert "\x1b[2m(stopped; the partial answer stays" in seen.until("asks again")
        seen.until("> ")
        seen.press("half a line")
        seen.until("half a line")
        seen.interrupt("Ctrl-D ends")
        seen.press("short\r")
        seen.until("You said: short.*tokens/s.*> ")
        seen.press("\x04")
        assert seen.end() == 0
    assert [m["content"][:7] for m in server.got[-1]["messages"]] == [
        "tell me",
        "I begin",
        "tell me",
        "I begin",
        "short",
    ]


def test_ctrl_c_ends_a_stream_with_plain_colours(layout: ProjectLayout) -> None:
    (layout.root / "q.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n', encoding="utf-8")
    slow = streamed("never", reasoning=("Hm",) * 600, hold_s=0.02)
    with (
        served(lambda body, number: slow) as server,
        terminal(layout, server.url, 80, "generate", "q.jsonl", "--stream") as seen,
    ):
        assert "\x1b[1mprompt 1\x1b[0m" in seen.until("\x1b\\[2mHmHm")
        seen.press("\x03")
        assert seen.end() == EXIT_INTERRUPTED
        assert re.search(r"\x1b\[0m\r\nratchet generate: interrupted", seen.text)
        assert len(server.got) == 1
    assert not layout.generations.exists()


def test_sigterm_is_not_treated_as_ctrl_c(layout: ProjectLayout) -> None:
    slow = streamed("I begin", *[" and go on"] * 600, hold_s=0.02)
    with served(lambda body, number: slow) as server, terminal(layout, server.url) as seen:
        seen.until("> ")
        seen.press("tell me\r")
        seen.until("I begin and go on")
        os.kill(seen.pid, signal.SIGTERM)
        assert seen.end() == EXIT_INTERRUPTED


@pytest.mark.parametrize("words", [["chat"], ["generate", "q.jsonl", "--stream"]], ids=["chat", "stream"])
def test_a_closed_output_ends_the_command(layout: ProjectLayout, words: list[str]) -> None:
    (layout.root / "q.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n', encoding="utf-8")
    with served(lambda body, number: streamed(*["word\n"] * 200, hold_s=0.01)) as server:
        command = [sys.executable, "-m", "ratchet", *words, "--model", server.url]
        process = subprocess.Popen(
            command, cwd=layout.root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("one\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(PATIENCE_S) == EXIT_INTERRUPTED
        assert said == f"ratchet {words[0]}: the reader has closed the output\n"
        process.stdin.close()
        process.stderr.close()


@pytest.mark.parametrize("words", [["chat"], ["generate", "q.jsonl", "--stream"]], ids=["chat", "stream"])
def test_a_full_disk_is_named_as_standard_output(layout: ProjectLayout, words: list[str]) -> None:
    (layout.root / "q.jsonl").write_text('{"prompt": "one"}\n', encoding="utf-8")
    with served(echo) as server, Path("/dev/full").open("w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "ratchet", *words, "--model", server.url]
        done = subprocess.run(
            command, cwd=layout.root, input="one\n", stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    told = "standard output: No space left on device; free space, or redirect the output to another disk"
    assert done.stderr == f"ratchet {words[0]}: {told}\n"


def test_reasoning_without_an_opening_mark_is_not_part_of_the_conversation(layout: ProjectLayout) -> None:
    with served(lambda body, number: streamed("Hmm. ", "So: </think>", "wet")) as server:
        scripted(layout, server.url, "one", "two")
        assert [message["content"] for message in server.got[1]["messages"]] == ["one", "wet", "two"]


def test_a_withheld_answer_is_an_error_and_is_not_kept(layout: ProjectLayout) -> None:
    with served(lambda body, number: streamed("wet") if number else streamed(finish="content_filter")) as server:
        with pytest.raises(RatchetError, match="no answer: the server's filter withholds the answer"):
            scripted(layout, server.url, "one", "two")
        assert len(server.got) == 1
    with (
        served(lambda body, number: streamed("wet") if number else streamed(finish="content_filter")) as server,
        ratchet.chat(Project.from_parts(layout, QUICK), server.url) as conversation,
    ):
        with pytest.raises(RatchetError, match="no answer"):
            conversation.ask("one")
        assert conversation.ask("two") == "wet"
        assert [message["content"] for message in server.got[1]["messages"]] == ["two"]


def test_a_model_in_memory_answers_until_its_context_is_full(layout: ProjectLayout, model: Path) -> None:
    with pytest.raises(DataError, match=r"has 1\d\d tokens, which does not fit a context of 128: it was not asked"):
        scripted(layout, str(model), *["what is water and what is wet"] * 20)


def test_a_real_model_on_a_terminal(layout: ProjectLayout, model: Path) -> None:
    layout.params.write_text(params_file.dump(with_generate(QUICK, max_new_tokens=200)), encoding="utf-8")
    with terminal(layout, str(model)) as seen:
        seen.until("loading.*> ")
        seen.press("what is water\r")
        assert re.search(r"context [\d,]+ of 128", seen.until("tokens/s.*> "))
        seen.press("\x04")
        assert seen.end() == 0


@pytest.mark.usefixtures("calm")
def test_the_command_line_takes_questions_from_standard_input(
    layout: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--project", str(layout.root), "chat", "--model"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    with served(echo) as server:
        assert main([*command, server.url]) == 0
    assert capsys.readouterr() == ("You said: one\nYou said: two\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main([*command, "gone"]) == 2
    assert "no such model" in capsys.readouterr().err
    with served(echo) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n"))
        assert main([*command, server.url]) == 0
        assert "/reset" in capsys.readouterr().out
        monkeypatch.setattr(sys, "stdin", io.StringIO("a \udcff b\n"))
        assert main([*command, server.url]) == 2
        assert "the question is not UTF-8" in capsys.readouterr().err
