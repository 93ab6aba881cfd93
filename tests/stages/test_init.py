"""Tests of `ratchet init` with real git and real DVC: settings and gate rules fit the data."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from init_cases import (
    made,
    regressions,
    requests,
)
from ratchet.config.base import Base
from ratchet.config.gate import ForgettingRule
from ratchet.config.prepare import Prepare
from ratchet.errors import DataError
from ratchet.registry import keys
from ratchet.stages import init
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning.search_space import SearchSpace

SYSTEM = "You are the clerk of a small post office."


@pytest.mark.parametrize(
    "responses", [{"yes": 90, "no": 90}, {f"a long answer {i}": 1 for i in range(90)}], ids=["labels", "text"]
)
def test_a_base_that_knows_something_must_not_forget_it_and_the_tiny_one_knows_nothing(
    responses: dict[str, int],
) -> None:
    seen = init.InitDataSummary(responses=Counter(responses), splits=Counter({"test": 20}))
    for base, wanted in ((Base(source="some/model", revision="main"), True), (Base(), False)):
        rules = init.suggest_settings(Prepare(), seen, base, "project").gate.rules
        assert any(isinstance(rule, ForgettingRule) for rule in rules) is wanted


def test_labelled_answers_are_tuned_by_kto() -> None:
    responses = Counter({"yes": 90, "no": 90})  # no classes, although they are short
    seen = init.InitDataSummary(responses=responses, splits=Counter({"test": 20}), labelled=180)
    found = init.suggest_settings(Prepare(), seen, Base(), "project")
    assert (found.prepare.task, found.train.objective) == ("preferences", "kto")
    assert SearchSpace.from_settings(found).variables  # a sweep accepts its objective


@pytest.mark.parametrize(("rows", "margin"), [(10, 0.05), (20_000, 0.02)], ids=["few", "many"])
def test_a_margin_is_never_wider_than_five_points_nor_narrower_than_two(rows: int, margin: float) -> None:
    seen = init.InitDataSummary(responses=Counter({"yes": 9 * rows, "no": 9 * rows}), splits=Counter({"test": rows}))
    assert set(regressions(init.suggest_settings(Prepare(), seen, Base(), "project")).values()) == {margin}


def test_the_harness_task_asks_with_the_rows_own_system_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    from ratchet.data import token_files

    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.yaml").write_text(init.harness_task_yaml(8), encoding="utf-8")
    documents = [
        {"id": "a", "system": SYSTEM, "prompt": "Is it open?", "response": "Yes.", "turns": 3},
        {"id": "b", "system": "", "prompt": "Is it shut?", "response": "No.", "turns": 2},
    ]
    data = tmp_path / "experiments" / "data"
    data.mkdir(parents=True)
    (data / "test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents), encoding="utf-8")
    with token_files.use_fresh_cache():
        task = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["answers"])["tasks"]["answers"]

    def asked(document: dict[str, Any]) -> Any:
        def written(messages: Any, **_: Any) -> str:
            return json.dumps(messages)

        return json.loads(
            task.fewshot_context(
                document, 0, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=written
            )
        )

    assert [[(m["role"], m["content"]) for m in asked(one)] for one in task.test_docs()] == [
        [("system", SYSTEM), ("user", "Is it open?")],
        [("user", "Is it shut?")],
    ]


def test_a_new_project_can_sign_and_git_takes_its_public_key_alone(tmp_path: Path) -> None:
    made(tmp_path, requests(60))
    layout = ProjectLayout(tmp_path / "project")
    (key,) = keys.read_keyring(layout.keyring).keys
    assert keys.own_fingerprint(layout) == key.fingerprint
    asked = subprocess.run(["git", "ls-files", ".ratchet"], cwd=layout.root, check=True, capture_output=True, text=True)
    assert asked.stdout.split() == [".ratchet/.gitignore", ".ratchet/keys.json", ".ratchet/params.schema.json"]
    assert layout.private_key.stat().st_mode & 0o077 == 0
    assert ".ratchet" in (layout.root / ".dvcignore").read_text().split()


def test_the_columns_of_pairs_can_be_named(tmp_path: Path) -> None:
    rows = [{"ask": f"is {n} even", "good": f"yes {n}", "bad": f"no {n}"} for n in range(60)]
    settings = made(tmp_path, rows, prompt="ask", response="good", rejected="bad")
    columns = settings.prepare.columns
    assert (columns.prompt, columns.response, columns.rejected) == ("ask", "good", "bad")
    assert (settings.prepare.task, settings.train.objective) == ("preferences", "dpo")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a", "response": "b"}\n' * 9, r"9 usable rows with 1 prompt leave split \w+ empty"),
        ('{"a": 1\n', r"0 usable rows .*; first unusable row: .*rows\.jsonl:1: not JSON \(.*"),
        ('{"prompt": "a", "response": ""}\n', r"0 usable rows .*; first unusable row: .*rows\.jsonl:1: empty answer"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_with_the_first_reason(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=said):
        init.init(tmp_path / "project", tmp_path / "rows.jsonl")
    assert not (tmp_path / "project").exists()


def test_rows_that_prepare_will_refuse_are_a_warning(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"is {n} even", "response": f"yes {n}"}) for n in range(60)]
    rows[2] = rows[40] = '{"prompt": '
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    [warning] = init.init(tmp_path / "project", tmp_path / "rows.jsonl").warnings
    assert warning.startswith("2 of 60 rows are malformed, and `ratchet prepare` accepts 1.0%; the first: ")
    assert "rows.jsonl:3: not JSON" in warning
    assert warning.endswith("; fix the rows, or set prepare.limits.malformed")
