"""Tests the user's reward program: its input, and every way in which it can fail."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_generations as made
from ratchet.cli.select_answers import format_selection
from ratchet.errors import SettingsError
from ratchet.stages.project import Project
from ratchet.stages.select_answers import SelectResult, select
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path
from ratchet.storage.records.data import SelectionCard

PROMPTS = [{"id": f"q{n}", "prompt": f"say {n}", "answer": str(n), "area": "x"} for n in range(3)]
READ = "import json, os, sys, time\nasked = [json.loads(line) for line in sys.stdin]\n"
BY_LENGTH = READ + "for one in asked: print(len(one['answer']))\n"

Scored = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return ProjectLayout(tmp_path / "project")


@pytest.fixture
def scored(layout: ProjectLayout, tmp_path: Path) -> Scored:
    """Return a function that selects rows with a reward program of this text."""

    def run(
        program: str,
        command: tuple[str, ...] = (sys.executable, "score.py"),
        prompts: list[dict[str, Any]] = PROMPTS,
        **knobs: Any,
    ) -> list[dict[str, Any]]:
        select_ = {"reward": {"command": list(command), **knobs}, "deduplication": {"jaccard_threshold": None}}
        settings = made.settings_of(select_, samples=3, temperature=1.0, extra_fields=["area"])
        made.project(layout.root, settings)
        (layout.root / "score.py").write_text(program, encoding="utf-8")
        asked = made.write_lines(tmp_path / "prompts.jsonl", prompts)

        def answers(id: str, sample: int) -> made.Said:
            return f"<think>hm</think>{id}" + "!" * sample, {"mean_log_probability": -1.0 - sample}

        given = made.generation(layout, settings, asked, answers, tmp_path / "answers.jsonl")
        select(Project.from_parts(layout, settings), (given,), layout.raw / "distilled.jsonl")
        return [json.loads(line) for line in (layout.raw / "distilled.jsonl").read_bytes().splitlines()]

    return run


def test_answers_below_the_minimum_are_removed(scored: Scored, layout: ProjectLayout) -> None:
    rows = scored(BY_LENGTH, min_score=3)
    assert [(row["provenance"]["sample"], row["provenance"]["reward"]) for row in rows] == [(1, 3.0)] * 3
    card = SelectionCard.load(card_path(layout.raw / "distilled.jsonl"))
    assert {one.name: one.dropped for one in card.filters if one.dropped} == {"reward": 3, "not_selected": 3}
    assert card.spec.reward_files == {"score.py": digests.hash_file(layout.root / "score.py")}


def test_a_program_may_write_wide_lines_for_many_answers(scored: Scored) -> None:
    prompts = [{"id": f"q{n}", "prompt": f"say {n}", "answer": str(n), "area": "x"} for n in range(300)]
    rows = scored(READ + "for one in asked: print(f'{len(one[\"answer\"]):120}')\n", prompts=prompts, select_best=True)
    assert len(rows) == 300, "108,900 bytes"


def test_the_best_answer_by_score_is_selected(scored: Scored) -> None:
    rows = scored(BY_LENGTH, select_best=True)
    assert [row["messages"][-1]["content"] for row in rows] == ["q0!!", "q1!!", "q2!!"]


@pytest.mark.parametrize(
    ("options", "is_noted"), [({}, True), ({"select_best": True}, False), ({"min_score": 1}, False)]
)
def test_scores_that_chose_no_answer_are_noted(
    scored: Scored, layout: ProjectLayout, options: dict[str, Any], is_noted: bool
) -> None:
    scored(BY_LENGTH, **options)
    output = layout.raw / "distilled.jsonl"
    text = format_selection(
        SelectResult(output=output, card=SelectionCard.load(card_path(output)), was_written_before=False)
    )
    assert ("select.reward.select_best, or use --pairs" in text) == is_noted


def test_the_program_gets_requests_without_secrets(
    scored: Scored, layout: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_WEBHOOK_URL", "https://hooks.example/s3cr3t")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx")
    monkeypatch.setenv("DATABASE", "postgres://me:pa55word@host/db")
    monkeypatch.setenv("COLOUR", "blue")
    scored(
        READ + "json.dump([asked, dict(os.environ), os.getcwd()], open('seen.json', 'w'))\nfor one in asked: print(1)\n"
    )
    asked, environment, where = json.loads((layout.root / "seen.json").read_bytes())
    assert asked[1] == {
        "id": "q0", "messages": [{"role": "user", "content": "say 0"}], "reference": "0", "fields": {"area": "x"},
        "answer": "q0!", "reasoning": "hm",
    }  # fmt: skip
    assert len(asked) == 9
    assert Path(where) == layout.root
    assert environment["COLOUR"] == "blue"
    assert not {"RATCHET_WEBHOOK_URL", "HF_TOKEN", "DATABASE"} & environment.keys()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import sys\nsys.exit('no such measure')\n",
            "the program exited with code 1; its standard error:\n  no such measure",
        ),
        ("import os\nos.abort()\n", "the program was killed by signal 6"),
        ("print(1)\n", "the program wrote 1 numbers for 9 answers"),
        (BY_LENGTH + "print(1)\n", "the program wrote 10 numbers for 9 answers"),
        (READ + "for one in asked: print('good')\n", "line 1 of the output: found 'good', expected a number"),
        (READ + "for one in asked: print('nan')\n", "line 1 of the output: found 'nan', expected a number"),
        ("while True: print(1)\n", "the program wrote more than the numbers for 9 answers can need"),
        (
            "import os\nwhile True: os.write(1, b'1')\n",
            "the program wrote more than the numbers for 9 answers can need",
        ),
        (
            "import time\ntime.sleep(60)\n",
            "the program took more than 0.5 s (select.reward.timeout_s); no standard error",
        ),
        ("", "./missing: cannot be started"),
    ],
)
def test_a_failing_program_is_reported_with_its_standard_error(
    program: str, said: str, scored: Scored, layout: ProjectLayout
) -> None:
    knobs = {"command": ["./missing"]} if not program else {"timeout_s": 0.5 if "sleep" in program else 30.0}
    with pytest.raises(SettingsError) as refused:
        scored(program, **knobs)
    assert f"select.reward.command: {said}" in str(refused.value)
    assert list(layout.raw.iterdir()) == []
    assert [path.name for path in layout.experiments.iterdir() if "partial" in path.name] == []


def test_standard_error_is_bounded_and_its_end_is_reported(scored: Scored, layout: ProjectLayout) -> None:
    program = (
        "import os, pathlib, sys\n"
        "for number in range(2**18): print(f'{number:063}', file=sys.stderr)\n"
        "found = [path for path in pathlib.Path('experiments').rglob('*') if path.is_file()]\n"
        "open('seen', 'w').write(str(max(path.stat().st_size for path in found)))\n"
        "sys.exit(3)\n"
    )
    with pytest.raises(SettingsError) as refused:
        scored(program)
    assert int((layout.root / "seen").read_text()) < 2**20
    last = "\n".join(f"  {number:063}" for number in range(2**18 - 5, 2**18))
    assert str(refused.value).endswith(f"exited with code 3; its standard error:\n{last}")


def test_secrets_in_standard_error_are_redacted_even_if_cut(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", secret := "s3cr3t" * 4000)
    program = f"import sys\nsys.stderr.write({secret!r} + '\\n' + 'x' * {2**16 - 100} + '\\nover\\n')\nsys.exit(1)\n"
    with pytest.raises(SettingsError) as refused:
        scored(program)
    assert "s3cr3t" not in str(refused.value)
    assert str(refused.value).endswith("\n  over")


def test_a_child_that_holds_the_pipes_does_not_block(scored: Scored, layout: ProjectLayout) -> None:
    program = BY_LENGTH + (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))\n"
    )
    try:
        assert len(scored(program, timeout_s=50.0)) == 3
        assert Path(f"/proc/{(layout.root / 'pid').read_text()}").exists()  # Ratchet did not wait for the child
    finally:
        os.kill(int((layout.root / "pid").read_text()), signal.SIGKILL)


def test_children_of_the_program_are_killed(scored: Scored, layout: ProjectLayout) -> None:
    """A child that keeps running would occupy the machine."""
    program = READ + (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "for one in asked: print(1)\n"
    )
    scored(program)
    pid = (layout.root / "pid").read_text()
    deadline_s = time.monotonic() + 30
    while runs(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not runs(pid)


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
