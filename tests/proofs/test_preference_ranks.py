"""Proves that preference tuning on two ranks learns what it learns on one, and rows R9 and R10 for it: a killed rank
changes no bit of the adapter. The divergence in the loss of `kto` is that of the batch of all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from rank_projects import EVEN, batches, events, project, report, settings, train
from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.config.train import PREFERENCE_STATISTICS, Train
from ratchet.runs.fault_injection.injection import InjectedFault
from ratchet.stages import base, prepare
from ratchet.stages.project import Project

PACKAGES = ("runs", "training", "models")
PAIRS = Prepare(sources=("data/raw/pairs.jsonl",), task="preferences", max_tokens=64)


def chosen(objective: str, **machine: Any) -> Settings:
    changes = {"objective": objective, "batch_size": 8, "validate_every_steps": 5}
    epochs = {"dpo": 0.6, "kto": 0.3}[objective]  # a pair is two answers
    tuned = Train.model_validate(EVEN.model_dump() | changes | {"epochs": epochs})
    return settings(tuned, **machine).model_copy(update={"prepare": PAIRS})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare pairs of answers to the requests of the tiny project."""
    wanted = chosen("dpo")
    layout = tiny_project.write(tmp_path_factory.mktemp("pairs") / "project", wanted)
    rows = [json.loads(line) for line in (layout.raw / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [
        {"prompt": row["request"], "chosen": row["intent"], "rejected": f"{other['intent']}, or not"}
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in texts)
    (layout.raw / "pairs.jsonl").write_text(lines, encoding="utf-8")
    base.base(Project.from_parts(layout, wanted))
    prepare.prepare(Project.from_parts(layout, wanted))
    return layout.root


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_two_ranks_learn_what_one_learns_and_a_killed_rank_changes_nothing(
    pairs: Path, tmp_path: Path, objective: str
) -> None:
    alone = project(pairs, tmp_path / "alone", chosen(objective))
    together = project(pairs, tmp_path / "together", chosen(objective, gpus=2, micro_batch_size=3))
    killed = project(pairs, tmp_path / "killed", chosen(objective, gpus=2, micro_batch_size=3))
    train(alone)
    train(together)
    assert batches(together) == batches(alone) != {}
    for kind in ("step", "validation"):
        for ours, theirs in zip(events(together, kind), events(alone, kind), strict=True):
            names = ("loss", "grad_norm", *PREFERENCE_STATISTICS)
            found, expected = ([event.data.get(name, 0) for name in names] for event in (ours, theirs))
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert any(event.data["kl"] > 0 for event in events(alone, "step"))
    assert report(together).validation_loss == pytest.approx(report(alone).validation_loss, rel=1e-4)
    said = train(killed, [InjectedFault(kind="die", step=4, rank=1, mark=str(tmp_path / "struck"))])
    assert (tmp_path / "struck").exists(), said
    assert report(killed).adapter_digest == report(together).adapter_digest
    assert batches(killed) == batches(together)
