"""Proves that a model can be tuned on pairs of its own answers: supervised training, promotion, generation, selection
of pairs, preference tuning from the trained weights, and the comparison of the gate with the supervised model."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import tiny_project
from ratchet.config import params_file
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path
from ratchet.storage.records.data import DatasetCard, SelectionCard
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.gate import Verdict
from ratchet.storage.records.training import TrainReport

PACKAGES = ("inference", "stages", "training")
REWARD = "import json, sys\nfor line in sys.stdin: print(json.loads(line)['answer'].count('e'))\n"
"""A reward that the barely trained model can earn."""
SUPERVISED = {
    "evaluate.harness.tasks": (), "gate.rules": ({"rule": "must_improve", "metric": "answer_loss", "over": "base"},),
}  # fmt: skip
SAMPLED = {
    "generate.samples": 4, "generate.temperature": 1.0, "generate.max_new_tokens": 8,
    "select.finish_reasons": ("stop", "length"), "select.reward.command": (sys.executable, "score.py"),
    "select.deduplication.jaccard_threshold": None,
}  # fmt: skip


def run(layout: ProjectLayout, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    done = tiny_project.ratchet(layout, *arguments)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def write_settings(layout: ProjectLayout, changes: dict[str, object]) -> None:
    tiny_project.save(layout, params_file.apply_changes(tiny_project.SETTINGS, changes))


@pytest.mark.long
def test_from_supervised_training_to_the_gate_over_pairs_of_own_answers(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "project")
    write_settings(layout, SUPERVISED | SAMPLED)
    for stage in ("base", "prepare", "train", "export", "evaluate"):
        run(layout, stage)
    run(layout, "gate", codes=(0, 3))
    run(layout, "promote", "--force", "--reason", "the reference of the preference tuning")
    supervised = TrainReport.load(layout.train_report)

    (layout.root / "score.py").write_text(REWARD, encoding="utf-8")
    run(layout, "generate", "data/raw/rows.jsonl", "--output", "answers.jsonl")
    assert "pairs by reward" in run(layout, "select", "answers.jsonl", "--pairs", "--output", "data/raw/pairs.jsonl")
    pairs = [json.loads(line) for line in (layout.raw / "pairs.jsonl").read_bytes().splitlines()]
    card = SelectionCard.load(card_path(layout.raw / "pairs.jsonl"))
    assert card.rows == len(pairs) > 60
    for pair in pairs:
        chosen, rejected = (pair[name][0]["content"].count("e") for name in ("chosen", "rejected"))
        assert chosen > rejected

    shutil.copytree(layout.base / "model", layout.root / "models" / "tiny")  # it would be built of other rows now
    preferred = {
        "base.source": "models/tiny", "prepare.sources": ("data/raw/pairs.jsonl",), "prepare.task": "preferences",
        "prepare.deduplication.jaccard_threshold": None, "train.objective": "dpo", "train.epochs": 2,
        "train.init_adapter": supervised.run_id, "train.learning_rate": 0.001, "evaluate.generation_rows": 20,
        "gate.rules": ({"rule": "must_improve", "metric": "preference_accuracy", "over": "champion"},),
    }  # fmt: skip
    write_settings(layout, SUPERVISED | preferred)
    for stage in ("base", "prepare", "train", "export", "evaluate"):
        run(layout, stage)
    assert run(layout, "gate", codes=(0, 3))
    data, report = DatasetCard.load(layout.dataset_card), EvaluationReport.load(layout.eval_report)
    assert data.rows_out == len(pairs)
    assert TrainReport.load(layout.train_report).base_digest == supervised.base_digest
    for role in ("candidate", "champion"):
        assert report.scores[role].metrics["preference_accuracy"].n == data.splits["test"]
    assert Verdict.load(layout.verdict).decision in ("PROMOTE", "HOLD", "REJECT")
