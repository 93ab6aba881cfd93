"""Proves that the Python API alone does the work of the command line: a script in the style of a notebook prepares,
trains, evaluates, exports, gates and promotes the bundled project. The API prints nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import tiny_project

PACKAGES = ("api", "stages")
ROOT = Path(__file__).parents[2]
SCRIPT = """
import json
import ratchet

project = ratchet.Project("bundled")
base = ratchet.base(project)
data = ratchet.prepare(project)
run = ratchet.train(project)
bundle = ratchet.export(project)
report = ratchet.evaluate(project)
verdict = ratchet.gate(project)
promotion = ratchet.promote(project)
print(json.dumps({
    "base": base.digest, "data": data.digest, "run": run.id, "status": run.status, "steps": run.step,
    "last_loss": float(run.metrics()["loss"].iloc[-1]), "model": bundle.model_digest,
    "scores": sorted(report.scores), "decision": verdict.decision, "version": promotion.champion.version,
}))
"""


def test_a_script_takes_the_bundled_project_from_rows_to_a_promoted_model(tmp_path: Path) -> None:
    project = tmp_path / "bundled"
    for name in ("params.yaml", "dvc.yaml"):
        project.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    for name in ("raw", "text", "tasks"):
        shutil.copytree(ROOT / "data" / name, project / "data" / name)
    (project / "experiments").mkdir()
    for name in ("champion.json", "judgements.jsonl"):
        shutil.copy(ROOT / "experiments" / name, project / "experiments")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=tiny_project.environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["status"], found["decision"], found["version"]) == ("finished", "PROMOTE", 1)
    assert found["steps"] > 0
    assert found["last_loss"] < 1.0
    assert {"base", "candidate"} <= set(found["scores"])
    champion = json.loads((project / "experiments" / "champion.json").read_text())["champion"]
    assert champion["model_digest"] == found["model"]
