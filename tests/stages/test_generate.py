"""Tests of `ratchet generate`: output files, refusals, a server that does not answer, and printed answers."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import generations
from generate_cases import (
    COUNT,
    layout,  # noqa: F401 (a fixture)
    model,  # noqa: F401 (a fixture)
    prompts,  # noqa: F401 (a fixture)
)
from ratchet.cli.main import main
from ratchet.config.machine import EndpointSettings
from ratchet.errors import EXIT_INTERRUPTED
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from scripted_endpoint import chat, error, served


def generate(layout: ProjectLayout, prompts: Path, *more: str) -> int:
    return main(["--project", str(layout.root), "generate", str(prompts), *more])


@pytest.mark.usefixtures("calm")
def test_from_prompts_to_a_file_and_once_more(
    layout: ProjectLayout, prompts: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, table = tmp_path / "out" / "a.jsonl", tmp_path / "a.parquet"
    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 0
    said = capsys.readouterr().out
    assert f"{COUNT} prompts of prompts.jsonl (column prompt)" in said
    assert f"{COUNT} answers to {COUNT} prompts" in said
    card = json.loads((tmp_path / "out" / "a.jsonl.card.json").read_text(encoding="utf-8"))
    assert card["output"] == digests.hash_file(lines)
    assert sum(card["finish"].values()) == card["answers"] == COUNT

    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 0
    assert "written before from these prompts, settings and model" in capsys.readouterr().out
    assert generate(layout, prompts, "--model", str(model), "--output", str(table)) == 0  # no worker is started
    records = [json.loads(line) for line in lines.read_bytes().splitlines()]
    assert pq.read_table(table).to_pylist() == [one | {"fields": "{}"} for one in records]

    generations.project_settings(layout, generations.with_generate(temperature=0.8, seed=7, max_new_tokens=5))
    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 2
    assert "differs in generate.max_new_tokens, generate.seed" in capsys.readouterr().err
    generations.project_settings(layout, generations.with_generate(temperature=0.8))
    lines.write_bytes(lines.read_bytes() + b"\n")
    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 2
    assert "changed since it was written" in capsys.readouterr().err


@pytest.mark.usefixtures("calm")
def test_refusals_leave_nothing_behind(
    layout: ProjectLayout, prompts: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = tmp_path / "mine.jsonl"
    stranger.write_text("mine\n", encoding="utf-8")
    dangling = tmp_path / "link.jsonl"
    dangling.symlink_to("nothing.jsonl")
    (tmp_path / "card.jsonl.card.json").mkdir()
    cases = [
        ([str(tmp_path / "none.jsonl"), "--model", str(model), "--output", "x.jsonl"], "no such file"),
        ([str(prompts), "--model", str(model)], "--output: name a file"),
        ([str(prompts), "--model", str(model), "--output", str(tmp_path / "a.csv")], "expected .jsonl or .parquet"),
        ([str(prompts), "--model", "gone", "--output", str(tmp_path / "a.jsonl")], "no such model"),
        ([str(prompts), "--model", str(model), "--output", str(stranger)], "`ratchet generate` did not write it"),
        ([str(prompts), "--model", str(model), "--stream", "--output", "x.jsonl"], "--stream writes no file"),
        ([str(prompts), "--model", "gone", "--output", str(stranger / "o.jsonl")], f"{stranger}: File exists"),
        ([str(prompts), "--model", "gone", "--output", f"{'n' * 252}.jsonl"], "File name too long"),
        ([str(prompts), "--model", "gone", "--output", str(dangling)], "found a broken link"),
        ([str(prompts), "--model", "gone", "--output", str(tmp_path / "card.jsonl")], "--output: its card"),
    ]
    before = sorted(tmp_path.iterdir())
    for words, expected in cases:
        assert main(["--project", str(layout.root), "generate", *words]) == 2
        assert expected in capsys.readouterr().err
    assert stranger.read_text(encoding="utf-8") == "mine\n"
    assert dangling.is_symlink() and sorted(tmp_path.iterdir()) == before
    assert not layout.generations.exists()


@pytest.mark.usefixtures("calm")
def test_prompts_with_tools_are_refused_for_a_server(
    layout: ProjectLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    rows = [{"prompt": "a", "tools": []}, {"prompt": "b", "tools": [tool]}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with served(lambda *_: chat("yes")) as server:
        for words in (["--output", str(output)], ["--stream"]):
            assert generate(layout, path, "--model", f"{server.url}", *words) == 2
            said = capsys.readouterr().err
            assert f"{path}: prompt 2 has tools, " in said and f"not sent to a server (--model {server.url}" in said
    assert not output.exists()
    assert not layout.generations.exists()


@pytest.mark.usefixtures("calm")
def test_a_server_that_does_not_answer_gives_an_exit_code_for_retries(
    layout: ProjectLayout, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = generations.SETTINGS.machine.model_copy(update={"endpoint": EndpointSettings(max_attempts=1)})
    generations.project_settings(layout, generations.SETTINGS.model_copy(update={"machine": machine}))
    with served(lambda *_: error(503, "busy")) as server:
        words = (layout, prompts, "--model", server.url, "--output", str(tmp_path / "a.jsonl"))
        assert generate(*words) == EXIT_INTERRUPTED
    assert capsys.readouterr().err.endswith("; check the server; run it again to resume (0 answers are kept)\n")
    assert generate(*words) == EXIT_INTERRUPTED  # no server, no model name: no run is created
    assert capsys.readouterr().err.endswith(
        "1 attempt (machine.endpoint.max_attempts); check the server; run the command again\n"
    )


@pytest.mark.usefixtures("calm")
def test_answers_on_the_screen_with_reasoning_apart(
    layout: ProjectLayout, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"prompt": "is water wet"}\n{"prompt": "<|im_end|>"}\n', encoding="utf-8")
    assert generate(layout, path, "--model", str(model), "--stream") == 0
    said = capsys.readouterr().out
    assert said.startswith("prompt 1\n")
    assert "not asked: prompt 2: <|im_end|>" in said
    assert "2 answers shown, none written" in said
    assert "\033" not in said
    assert not layout.generations.exists()
