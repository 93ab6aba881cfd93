"""`ratchet generate` as in life: processes that are killed, outputs that are there already, every message."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import generations
from ratchet import cli, digest
from ratchet.config_endpoint import Endpoint
from ratchet.errors import EXIT_INTERRUPTED
from ratchet.layout import Layout
from scripted_endpoint import error, served

ROOT = Path(__file__).parents[1]
COUNT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generations.chat_directory(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generations.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", COUNT)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return generations.project(tmp_path / "my project", generations.with_generate(temperature=0.8))


def generate(layout: Layout, prompts: Path, *more: str) -> int:
    return cli.main(["--project", str(layout.root), "generate", str(prompts), *more])


@pytest.mark.slow
@pytest.mark.usefixtures("calm")
def test_from_prompts_to_a_file_and_once_more(
    layout: Layout, prompts: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, table = tmp_path / "out" / "a.jsonl", tmp_path / "a.parquet"
    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 0
    said = capsys.readouterr().out
    assert f"{COUNT} prompts of prompts.jsonl (column prompt)" in said
    assert f"{COUNT} answers to {COUNT} prompts" in said
    card = json.loads((tmp_path / "out" / "a.jsonl.card.json").read_text(encoding="utf-8"))
    assert card["output"] == digest.of_file(lines)
    assert sum(card["finish"].values()) == card["answers"] == COUNT

    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert generate(layout, prompts, "--model", str(model), "--output", str(table)) == 0  # no worker is started
    records = [json.loads(line) for line in lines.read_bytes().splitlines()]
    assert pq.read_table(table).to_pylist() == [one | {"fields": "{}"} for one in records]

    generations.project_settings(layout, generations.with_generate(temperature=0.8, seed=7, max_new_tokens=5))
    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 2
    assert "differs in generate.max_new_tokens, generate.seed" in capsys.readouterr().err
    generations.project_settings(layout, generations.with_generate(temperature=0.8))
    lines.write_bytes(lines.read_bytes() + b"\n")
    assert generate(layout, prompts, "--model", str(model), "--output", str(lines)) == 2
    assert "was changed since it was written" in capsys.readouterr().err


@pytest.mark.usefixtures("calm")
def test_refusals_leave_nothing_behind(
    layout: Layout, prompts: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = tmp_path / "mine.jsonl"
    stranger.write_text("mine\n", encoding="utf-8")
    dangling = tmp_path / "link.jsonl"
    dangling.symlink_to("nothing.jsonl")
    (tmp_path / "card.jsonl.card.json").mkdir()
    cases = [
        ([str(tmp_path / "none.jsonl"), "--model", str(model), "--output", "x.jsonl"], "no such file"),
        ([str(prompts), "--model", str(model)], "--output: name a file"),
        ([str(prompts), "--model", str(model), "--output", str(tmp_path / "a.csv")], "ends with neither of .jsonl"),
        ([str(prompts), "--model", "gone", "--output", str(tmp_path / "a.jsonl")], "no such model"),
        ([str(prompts), "--model", str(model), "--output", str(stranger)], "not by `ratchet generate`"),
        ([str(prompts), "--model", str(model), "--stream", "--output", "x.jsonl"], "--stream writes no file"),
        ([str(prompts), "--model", "gone", "--output", str(stranger / "o.jsonl")], f"{stranger}: File exists"),
        ([str(prompts), "--model", "gone", "--output", f"{'n' * 252}.jsonl"], "File name too long"),
        ([str(prompts), "--model", "gone", "--output", str(dangling)], "is a link that leads to nothing"),
        ([str(prompts), "--model", "gone", "--output", str(tmp_path / "card.jsonl")], "--output: its card"),
    ]
    before = sorted(tmp_path.iterdir())
    for words, expected in cases:
        assert cli.main(["--project", str(layout.root), "generate", *words]) == 2
        assert expected in capsys.readouterr().err
    assert stranger.read_text(encoding="utf-8") == "mine\n"
    assert dangling.is_symlink() and sorted(tmp_path.iterdir()) == before
    assert not layout.generations.exists()


@pytest.mark.usefixtures("calm")
def test_a_server_that_does_not_answer_is_a_reason_to_repeat(
    layout: Layout, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = generations.SETTINGS.machine.model_copy(update={"endpoint": Endpoint(tries=1)})
    generations.project_settings(layout, generations.SETTINGS.model_copy(update={"machine": machine}))
    with served(lambda *_: error(503, "busy")) as server:
        words = (layout, prompts, "--model", server.url, "--output", str(tmp_path / "a.jsonl"))
        assert generate(*words) == EXIT_INTERRUPTED
    assert capsys.readouterr().err.endswith("; see to the server; repeat to go on (0 answers are kept)\n")
    assert generate(*words) == EXIT_INTERRUPTED  # nobody is there to be asked which model it is: no run is begun
    assert capsys.readouterr().err.endswith("1 try (machine.endpoint.tries); see to the server; repeat\n")


@pytest.mark.usefixtures("calm")
def test_answers_on_the_screen_with_reasoning_apart(
    layout: Layout, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


@pytest.mark.slow
def test_killed_at_random_it_gives_what_it_would_have_given(
    layout: Layout, prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import generate_kills

    slow = [{"kind": "slow", "seconds": 0.02, "step": 0}]
    whole = generate_kills.Trial(layout, prompts, tmp_path / "whole", str(model))
    broken = generate_kills.Trial(layout, prompts, tmp_path / "broken", str(model), slow)
    assert whole.finish() == 0
    assert generate_kills.campaign(broken, 3, COUNT, seed=2) == 3
    assert broken.output.read_bytes() == whole.output.read_bytes()
    assert generate_kills.places(broken.output) == [(f"q{number}", 0) for number in range(COUNT)]
    assert broken.computed_again == 0


@pytest.mark.slow
def test_a_worker_that_hangs_is_found_and_its_answers_are_kept(
    layout: Layout, prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import generate_kills

    settings = generations.with_generate(temperature=0.8)
    machine = settings.machine.model_copy(update={"stall_s": 1.0})
    generations.project_settings(layout, settings.model_copy(update={"machine": machine}))
    hang = [{"kind": "hang", "step": COUNT // 2, "mark": str(tmp_path / "hung")}]
    trial = generate_kills.Trial(layout, prompts, tmp_path / "trial", str(model), hang)
    assert trial.finish() == 0
    assert (tmp_path / "hung").exists()
    assert [ready["start_step"] for ready in trial.readies()] == [0, COUNT // 2]
    assert len(generate_kills.places(trial.output)) == COUNT
