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
from ratchet.registry import keys
from ratchet.runs.directory import RunPaths
from ratchet.stages.approve import approve
from ratchet.stages.audit import SECTIONS, AuditReport, audit
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, promote, rollback
from ratchet.storage import digests, files
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
    assert list(dict.fromkeys(sections)) == list(SECTIONS)
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
    summary = text[text.index("not verifiable here, ") :]
    assert code == 3
    assert re.search(rf"does not fit: .*{re.escape(path.name)}", summary), summary


@pytest.mark.parametrize("name", ["data", "evaluate", "model", "release"])
def test_a_missing_manifest_does_not_stop_the_audit(audited: Audited, name: str, tmp_path: Path) -> None:
    layout = audited.layout
    folders = {"data": layout.data, "evaluate": layout.evaluate, "model": audited.folder, "release": audited.release}
    manifest = folders[name] / files.MANIFEST
    shutil.move(manifest, tmp_path / "manifest")
    try:
        report = audit(Project(layout.root))
    finally:
        shutil.move(tmp_path / "manifest", manifest)
    sealed = name in ("model", "release")
    facts = report.list_facts("contradicted" if sealed else "unverified")
    assert any(files.MANIFEST in fact.proof or folders[name].name in fact.proof for fact in facts)
    assert report.is_consistent is not sealed


def test_a_folder_among_the_files_of_the_adapter_does_not_fit(audited: Audited) -> None:
    extra = audited.folder / "adapter" / "extra"
    extra.mkdir()
    (extra / "x").write_text("x")
    try:
        problems = audit(Project(audited.layout.root)).list_facts("contradicted")
    finally:
        shutil.rmtree(extra)
    assert any("adapter/extra/x" in fact.proof for fact in problems)


def test_the_journal_may_grow_after_the_training(audited: Audited) -> None:
    with audited.run.journal.open("ab") as stream:
        stream.write(b'{"attempt":2,"event":"notice","t":1.0,"text":"an upload was repeated"}\n')
    report = audit(Project(audited.layout.root))
    assert report.is_consistent
    assert "every byte" in facts(report)["journal"]


def test_a_verdict_that_was_replaced_and_sealed_again_is_found(audited: Audited, tmp_path: Path) -> None:
    shutil.copytree(audited.layout.root, tmp_path / "copy")
    layout = ProjectLayout(tmp_path / "copy")
    folder = layout.promoted_model(read_champion(layout.champion).champion_digest or "")
    better = Verdict.load(folder / "verdict.json").model_copy(update={"test_set_uses": 1, "max_test_set_uses": 500})
    kept = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with files.sealed_directory(folder, "model") as scratch:
        for name, content in kept.items():
            if name != files.MANIFEST:
                files.write_atomic(scratch / name, content)
        better.save(scratch / "verdict.json")
    report = audit(Project(layout.root))
    [problem] = report.list_facts("contradicted")
    assert (problem.name, "verdict.json" in problem.proof) == ("files", True)
    assert {fact.status for fact in report.facts if fact.name == "rule at_least"} == {"unverified"}


def test_rows_that_were_changed_and_sealed_again_are_found(audited: Audited, tmp_path: Path) -> None:
    shutil.copytree(audited.layout.root, tmp_path / "copy")
    layout = ProjectLayout(tmp_path / "copy")
    kept = {path.name: path.read_bytes() for path in layout.data.iterdir() if path.name != files.MANIFEST}
    with files.sealed_directory(layout.data, "data") as scratch:
        for name, content in kept.items():
            files.write_atomic(scratch / name, content)
        flip(scratch / "train.arrow")
    report = audit(Project(layout.root))
    [problem] = report.list_facts("contradicted")
    assert (problem.name, "experiments/data" in problem.proof) == ("prepared rows", True)


def test_newer_data_and_evaluations_are_not_contradictions(audited: Audited, tmp_path: Path) -> None:
    shutil.copytree(audited.layout.root, tmp_path / "copy")
    layout = ProjectLayout(tmp_path / "copy")
    with files.sealed_directory(layout.data, "data") as scratch:
        files.write_atomic(scratch / "card.json", b"{}")
    flip(layout.raw / "rows.csv")
    files.remove_sealed(layout.base)
    promotion_project.write_outputs(layout, "b")
    report = audit(Project(layout.root), 1)
    assert report.list_facts("contradicted") == []
    reasons = {fact.name: fact.proof for fact in report.list_facts("unverified")}
    assert reasons["prepared rows"] == "experiments/data has other data now"
    assert "rows.csv has changed" in reasons["source data/raw/rows.csv"]
    assert reasons["base, files"] == "tiny is not on this machine"
    assert reasons["judged again"] == "experiments/evaluate has another evaluation now"


def test_a_clone_without_files_states_what_it_cannot_verify(
    audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, clone = audited.layout, tmp_path / "clone"
    names = [
        layout.params,
        layout.root / "dvc.yaml",
        layout.champion,
        layout.promotions,
        layout.keyring,
        layout.test_set_uses,
    ]
    for path in names:
        (clone / path.relative_to(layout.root)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, clone / path.relative_to(layout.root))
    report = audit(Project(clone))
    assert report.is_consistent
    assert {"ledger", "champion file", "champion", "promote"} <= {f.name for f in report.list_facts("verified")}
    assert all(fact.proof for fact in report.list_facts("unverified"))
    assert main(["--project", str(clone), "audit"]) == 2
    output, errors = capsys.readouterr()
    assert "0 do not fit" in output
    assert errors.startswith("ratchet audit: the audit is incomplete: ")
    shutil.copytree(audited.folder, clone / audited.folder.relative_to(layout.root))  # such as from a backup
    assert main(["--project", str(clone), "audit"]) == 0
    report = audit(Project(clone))
    assert report.is_consistent
    found = {fact.name: (fact.status, fact.text) for fact in report.facts}
    assert found["who"] == ("verified", "grace@example.org"), "the facts of the journal are signed with the model"
    assert found["leakage"][0] == found["adapter"][0] == "verified"
    assert found["run directory"][0] == "unverified"


REASON = (
    "see https://evil.example, <img src=x onerror=alert(1)> | [click](http://evil.example) @all `rm` "
    "hf_abcdefghijklmnopqrstuvwx"
)


@pytest.fixture
def forced(tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Create a project whose second version was forced, and rolled back."""
    monkeypatch.setenv("RATCHET_ACTOR", "eve@example.org")
    tracked_project.params.write_text(params_file.dump(promotion_project.SETTINGS), encoding="utf-8")
    project = Project(tracked_project.root)
    write_outputs(tracked_project, "a")
    promote(project)
    write_outputs(tracked_project, "b", "HOLD")
    promote(project, PromoteOptions(force=True, reason=REASON))
    rollback(project, options=PromoteOptions(reason="it is rude"), smoke_test=accept_model)
    return project


def test_forced_and_rolled_back_versions_show_who_and_why(forced: Project) -> None:
    report = audit(forced, 2)
    assert report.is_consistent
    found = facts(report)
    assert found["forced"].startswith("FORCED by eve@example.org despite the gate's decision HOLD: see https")
    assert "rolled back on" in found["champion"]
    assert "it is rude" in found["champion"]
    assert found["compared with"] == "version 1"
    assert "hf_abcdef" not in format_audit(report) + format_markdown(report)
    page = format_markdown(report)
    for line in page.splitlines():
        outside = re.sub(r"`[^`]*`", "", line.replace(r"\`", ""))
        assert "<img" not in re.sub(r"\\<", "", outside)
        assert not re.search(r"(?<!\\)[\[<]|://|www\.|(?<!\\)@", outside), line
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 5), line
    terms = [fact.text for fact in audit(forced).facts if fact.name == "champion"]
    assert [text.startswith("is champion") for text in terms] == [False, True]

    (forced.layout.promoted_model(report.model_digest) / "forced.json").unlink()
    assert not audit(forced, 2).is_consistent


def test_approvals_are_shown_and_verified(
    tracked_project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, other = tracked_project, ProjectLayout(tmp_path / "bob")
    own = promotion_project.SETTINGS.promote.model_copy(update={"approvals": 1})
    settings = promotion_project.SETTINGS.model_copy(update={"promote": own})
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    project = Project(layout.root)
    write_outputs(layout, "a")
    keys.create_key_pair(layout)
    (tmp_path / "bob.pem").write_text(keys.create_key_pair(other).public)
    keys.trust_key(layout, tmp_path / "bob.pem")
    with monkeypatch.context() as bob:
        bob.setenv("RATCHET_ACTOR", "bob")
        bob.setenv(keys.KEY_VARIABLE, str(other.private_key))
        approve(project, digests.hash_file(layout.verdict))
    promote(project)
    report = audit(project)
    assert report.list_facts("contradicted") == []
    found = facts(report)
    assert found["approvals"] == "1 of 1 given"
    assert found["approval"].startswith("bob (")
    assert found["approved verdict"] == digests.hash_file(layout.verdict)

    [path] = (layout.promoted_model(report.model_digest) / "approvals").iterdir()
    flip(path, b'"sig": "M', b'"sig": "N')
    problems = audit(project).list_facts("contradicted")
    assert any(path.name in fact.proof for fact in problems)
    assert {fact.name for fact in problems} >= {"approval", "files"}
    path.unlink()
    assert "has no valid file" in next(
        one.proof for one in audit(project).list_facts("contradicted") if one.name == "approval"
    )


def test_a_broken_ledger_or_champion_file_does_not_stop_the_audit(forced: Project) -> None:
    path = forced.layout.promotions
    lines = path.read_bytes().splitlines(keepends=True)
    for content, version in ((lines[:2], 2), (lines[1:], 2), ([], 2), ([lines[0], b"no line\n", lines[2]], 1)):
        path.write_bytes(b"".join(content))
        report = audit(forced, version)
        problems = " ".join(fact.proof for fact in report.list_facts("contradicted"))
        assert "experiments/promotions.jsonl" in problems
        assert report.version == version
    path.write_bytes(b"".join(lines))
    champion = json.loads(forced.layout.champion.read_bytes())
    champion["anchor"]["run_id"] = "run-b"
    forced.layout.champion.write_text(json.dumps(champion), encoding="utf-8")
    [problem] = audit(forced).list_facts("contradicted")
    assert problem.proof.startswith("experiments/champion.json: anchor")


def test_an_alias_that_was_moved_by_hand_is_found(forced: Project) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{forced.layout.mlflow_database}")
    client.set_registered_model_alias(promotion_project.NAME, "champion", "2")
    [problem] = audit(forced).list_facts("contradicted")
    assert (problem.name, "alias points to version 2" in problem.proof) == ("alias and version", True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["7"], r"version 7 of .* was never promoted; known: 1, 2"),
        (["x"], "expected a whole number"),
        (["--release", "nowhere"], "--release nowhere: not a deployment directory"),
        (["--markdown", "--json"], "leave out one of them"),
    ],
)
def test_bad_input_has_one_message(
    forced: Project, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["--project", str(forced.layout.root), "audit", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_project_without_champion_has_nothing_to_audit(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--project", str(project.root), "audit"]) == 2
    assert "there is no champion yet" in capsys.readouterr().err
