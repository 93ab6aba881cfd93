"""Proves that a new project has enough rows for its gate to pass or fail."""

from pathlib import Path
from typing import Any

from init_cases import (
    made,
    regressions,
    requests,
)
from ratchet.config.gate import AboveChanceRule, ExportParityRule, MustImproveRule, MustNotRegressRule
from ratchet.data import splits
from ratchet.quality_gate.statistics import required_pairs

PACKAGES = ("stages",)


def test_labels_are_judged_by_an_accuracy_that_the_test_rows_can_show(tmp_path: Path) -> None:
    rows = requests(4500)
    settings = made(tmp_path, rows)
    test_rows = sum(splits.assign_split(row["prompt"], settings.prepare.split) == "test" for row in rows)
    margins = regressions(settings)
    assert margins.keys() == {"champion", "anchor"}
    (margin,) = set(margins.values())
    assert 0.02 < margin < 0.05
    gate = settings.gate
    assert required_pairs(margin, gate.expected_discordance, gate.confidence, gate.power) <= test_rows
    assert required_pairs(margin - 0.01, gate.expected_discordance, gate.confidence, gate.power) > test_rows
    (improve,) = (rule for rule in gate.rules if isinstance(rule, MustImproveRule))
    assert (improve.metric, improve.over, improve.by) == (("accuracy",), "base", 0.02)
    (chance,) = (rule for rule in gate.rules if isinstance(rule, AboveChanceRule))
    assert chance.metric == "accuracy"
    assert ExportParityRule in {type(rule) for rule in gate.rules}


def test_free_text_is_judged_by_the_loss_on_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {n}", "response": f"it is the number {n} " * (n % 5)} for n in range(200)]
    settings = made(tmp_path, rows)
    assert settings.prepare.task == "text"
    assert {rule.metric for rule in settings.gate.rules if isinstance(rule, MustNotRegressRule)} == {"answer_loss"}
    assert settings.evaluate.harness.tasks == ("answers",)


def test_conversations_are_not_shown_to_a_harness_that_sees_only_their_last_question(tmp_path: Path) -> None:
    def talk(n: int) -> dict[str, Any]:
        turns = [("user", f"hello {n}"), ("assistant", "hello"), ("user", "and now?"), ("assistant", f"go on, {n}")]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    settings = made(tmp_path, [talk(n) for n in range(100)])
    assert settings.evaluate.harness.tasks == ()
