"""Proves the sentence of docs/audit.md "Each fact names the file or digest that proves it" for a model that was really
trained, exported, evaluated, judged, promoted and deployed: every fact fits, and a changed byte does not."""

import json
from pathlib import Path

import tiny_project
from ratchet.config.gate import AtLeastRule, Gate
from ratchet.runs.directory import RunPaths
from ratchet.stages.audit import AuditReport, audit
from ratchet.stages.project import Project
from ratchet.storage.records.gate import read_champion

PACKAGES = ("stages", "registry")
GATE = Gate(rules=(AtLeastRule(rule="at_least", metric="perplexity", value=1e9),))


def test_every_fact_about_a_trained_model_fits_until_a_byte_changes(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project", tiny_project.SETTINGS.model_copy(update={"gate": GATE}))
    served = tmp_path / "served"
    deploy = ("deploy", str(served), "--format", "hf")
    for arguments in (("train",), ("export",), ("evaluate",), ("gate",), ("promote",), deploy):
        done = tiny_project.ratchet(layout, *arguments)
        assert done.returncode == 0, done.stderr
    done = tiny_project.ratchet(layout, "audit", "--json")
    assert done.returncode == 0, done.stdout
    report = AuditReport.model_validate_json(done.stdout)
    # The project is not in git, so no MLflow run has its commit.
    assert [fact.name for fact in report.facts if fact.status != "verified"] == ["git commit"]
    assert {"judged again", "journal", "prepared rows", "base, files", "deploy"} <= {fact.name for fact in report.facts}

    folder = layout.promoted_model(read_champion(layout.champion).champion_digest or "")
    run = RunPaths(next(layout.runs.iterdir()))
    step = next(line for line in run.journal.read_text().splitlines() if json.loads(line)["event"] == "step")
    changes = {
        folder / "adapter" / "adapter_model.safetensors": None,
        run.journal: (step.encode(), step.replace('"loss":', '"loss":1').encode()),
        layout.data / "train.arrow": None,
        served / "current" / "hf" / "model.safetensors": None,
    }
    for path, texts in changes.items():
        content = path.read_bytes()
        place = len(content) // 2
        flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        path.write_bytes(flipped if texts is None else content.replace(*texts, 1))
        problems = audit(Project(layout.root)).list_facts("contradicted")
        assert any(path.name in fact.proof for fact in problems), path
        path.write_bytes(content)
    assert audit(Project(layout.root)).is_consistent
