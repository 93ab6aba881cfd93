"""Tests of `ratchet audit`: a complete page, and exit code 3 for a changed byte in any file that proves a fact."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import audited_project
import promotion_project
import ratchet
from promotion_project import accept_model, write_outputs
from ratchet.cli.audit import format_audit, format_markdown
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.runs.directory import RunPaths
from ratchet.stages.audit import AuditReport, audit
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, promote, rollback
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Verdict, read_champion

pytestmark = pytest.mark.usefixtures("calm")


@dataclasses.dataclass(frozen=True)
class Audited:
    """A promoted and deployed model."""

    layout: ProjectLayout
    served: Path

    @property
    def folder(self) -> Path:
        return self.layout.promoted_model(read_champion(self.layout.champion).champion_digest or "")

    @property
    def run(self) -> RunPaths:
        return RunPaths(next(self.layout.runs.iterdir()))

    @property
    def release(self) -> Path:
        return self.served / "releases" / (self.served / "current").readlink().name


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory, prepared: Path, mlflow_template: Path) -> Iterator[Audited]:
    folder = tmp_path_factory.mktemp("audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_ACTOR", "ada@example.org")
        layout = audited_project.make(folder / "project", prepared, mlflow_template, folder / "served")
    return Audited(layout, folder / "served")


def facts(report: AuditReport) -> dict[str, str]:
    return {fact.name: fact.text for fact in report.facts}


def test_the_page_of_a_complete_project_verifies_every_fact(audited: Audited) -> None:
    report = audit(Project(audited.layout.root))
    assert [(fact.name, fact.status, fact.proof) for fact in report.facts if fact.status != "verified"] == []
    found = facts(report)
    assert "champion since" in found["champion"]
    assert found["who"] == "grace@example.org"
    assert found["git commit"] == f"{audited_project.COMMIT}, branch main, with uncommitted changes"
    assert "on trainer-7 (cpu, float32)" in found["where, when"]
    assert found["attempts"].startswith("2 attempts (attempt 1: ")
    assert "1 repeated step" in found["attempts"]
    assert "learning_rate 0.01" in found["settings"]
    assert "185 train" in found["rows"]
    assert found["source data/raw/rows.csv"].startswith("SHA-256 ")
    assert "PROMOTE follows again" in found["judged again"]
    assert "by ada@example.org" in found["promote"]
    assert "by ada@example.org" in found["deploy"]
    assert found["release, current"].startswith("signed by key")
    sections = [fact.section for fact in report.facts]
    assert list(dict.fromkeys(sections)) == ["model", "data", "training", "judgement", "promotion", "deployment"]
    text = format_audit(report)
    assert f"{len(report.facts)} facts verified, 0 not verifiable here, 0 do not fit" in text
    assert max(map(len, text.splitlines())) <= 120
    assert report.model_dump()["facts"] == ratchet.audit(ratchet.Project(audited.layout.root)).model_dump()["facts"]


def test_the_command_needs_no_torch_and_prints_json(audited: Audited) -> None:
    code = (
        "import sys; from ratchet.cli.main import main\n"
        "code = main(['--project', sys.argv[1], 'audit', '1', '--json'])\n"
        "print('torch' in sys.modules, code, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, str(audited.layout.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False 0"
    assert AuditReport.model_validate_json(done.stdout).is_consistent


def flip(path: Path, old: bytes = b"", new: bytes = b"") -> None:
    """Replace a text, or else change a bit in the middle of the file."""
    content = path.read_bytes()
    if old:
        assert old in content, path
        path.write_bytes(content.replace(old, new, 1))
        return
    place = len(content) // 2
    path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])


Place = Callable[[Audited], Path]
FILES: dict[str, tuple[Place, bytes, bytes]] = {
    "adapter": (lambda a: a.folder / "adapter" / "adapter.safetensors", b"", b""),
    "weights": (lambda a: a.folder / "hf" / "model.safetensors", b"", b""),
    "verdict": (lambda a: a.folder / "verdict.json", b"PROMOTE", b"REJECTS"),
    "evaluation": (lambda a: a.folder / "eval.json", b"0.95", b"0.96"),
    "bill of materials": (lambda a: a.folder / "sbom.json", b"", b""),
    "bundle": (lambda a: a.folder / "bundle.json", b"", b""),
    "provenance": (lambda a: a.folder / "provenance.json", b"trainer-7", b"trainer-8"),
    "signature": (lambda a: a.folder / "model.sig", b'"sig": "M', b'"sig": "N'),
    "ledger": (lambda a: a.layout.promotions, b"ada@", b"eve@"),
    "champion file": (lambda a: a.layout.champion, b"", b""),
    "anchor in the champion file": (lambda a: a.layout.champion, b'"version": 1', b'"version": 2'),
    "keys": (lambda a: a.layout.keyring, b"", b""),
    "prepared rows": (lambda a: a.layout.data / "train.arrow", b"", b""),
    "dataset card": (lambda a: a.layout.data / "card.json", b"", b""),
    "source": (lambda a: a.layout.raw / "rows.csv", b"", b""),
    "base": (lambda a: a.layout.tiny_model / "model.safetensors", b"", b""),
    "journal": (lambda a: a.run.journal, b'"loss":2.0', b'"loss":1.0'),
    "spec": (lambda a: a.run.spec, b'"rank": 4', b'"rank": 8'),
    "result": (lambda a: a.run.result / "adapter" / "adapter.safetensors", b"", b""),
    "scores of rows": (lambda a: a.layout.evaluate / "samples" / "merged" / "accuracy.jsonl", b"1.0", b"0.0"),
    "ids of test rows": (lambda a: a.layout.test_set_uses, b"s00001", b"s0000x"),
    "release": (lambda a: a.release / "gguf" / "model-q8_0.gguf", b"", b""),
    "record of the release": (lambda a: a.release / "release.json", b'"version": 1', b'"version": 2'),
    "history of deployments": (lambda a: a.served / "deployments.jsonl", b"ada@", b"eve@"),
    "list of deployments": (lambda a: a.layout.deployments, b"ada@", b"eve@"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_found_and_its_file_is_named(
    audited: Audited, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    find, old, new = FILES[name]
    path = find(audited)
    original = path.read_bytes()
    flip(path, old, new)
    try:
        code = main(["--project", str(audited.layout.root), "audit", "1"])
    finally:
        path.write_bytes(original)
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    summary = text[text.index("do not fit") :]
    assert code == 3
    assert re.search(rf"does not fit: .*{re.escape(path.name)}", summary), summary
