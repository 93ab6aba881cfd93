"""Tests base and adapter of a project as backends: 4-bit weights and the project's chat template."""

import io
from pathlib import Path

import pytest

import tiny_project
from generations import Generation, write_prompts
from ratchet.config.generate import Generate
from ratchet.errors import EXIT_OK, DataError
from ratchet.inference import model_reference
from ratchet.stages.chat import chat
from ratchet.stages.project import Project

SETTINGS = tiny_project.SETTINGS.model_copy(update={"generate": Generate(max_new_tokens=5, labels=("a", "no"))})
COUNT = 6


def test_base_and_adapter_give_different_answers(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "p", SETTINGS)
    prompts = write_prompts(tmp_path / "p.jsonl", COUNT)
    with pytest.raises(DataError, match=r"no trained adapter; run `dvc repro train`"):
        model_reference.resolve_model("adapter", layout, SETTINGS)
    tiny_project.adapted(layout, SETTINGS, strength=0.5)
    said, likely = {}, {}
    for name in ("base", "adapter"):
        made = Generation(tmp_path / "p", prompts, SETTINGS, name)
        assert made.work() == EXIT_OK, made.events("worker_error")
        said[name] = [record["mean_log_probability"] for record in made.records()]
        likely[name] = [record["label_log_probabilities"] for record in made.records()]
        assert "nf4" in made.spec.model.weight_format
    assert len(said["base"]) == len(said["adapter"]) == COUNT
    assert said["base"] != said["adapter"]
    assert all(nats < 0 for one in (*likely["base"], *likely["adapter"]) for nats in one.values())
    assert all(a["a"] != b["a"] for a, b in zip(likely["base"], likely["adapter"], strict=True))
    out = io.StringIO()
    chat(Project.from_parts(layout, SETTINGS), "adapter", (io.StringIO("what is water\nand what is wet\n"), out))
    assert out.getvalue().count("\n") >= 2
