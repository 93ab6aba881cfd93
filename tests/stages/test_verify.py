"""Tests of `ratchet verify` on a whole project, on its runs and on single directories, before and after a bit flip."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import snapshots
from ratchet.cli.main import main
from ratchet.cli.verify import format_verification
from ratchet.errors import SettingsError
from ratchet.registry import keys, signature
from ratchet.runs.directory import RESULT, RunDirectory, RunPaths
from ratchet.stages.verify import verify
from ratchet.storage import files
from ratchet.storage.layout import RUNS_VARIABLE, ProjectLayout
from snapshots import SPEC, save


def seal(target: Path, kind: str) -> Path:
    with files.sealed_directory(target, kind) as scratch:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "a.bin").write_bytes(bytes(range(200)))
    return target


@pytest.fixture
def run(project: ProjectLayout) -> RunPaths:
    """Create a run with two checkpoints and a result."""
    opened = RunDirectory.open(project.runs, SPEC)
    for step in (2, 4):
        opened.journal.append("step", step=step)
        save(opened.paths, step, best=2)
    opened.close()
    with files.sealed_directory(opened.paths.result, RESULT) as scratch:
        files.link_tree(opened.paths.checkpoint(2), scratch / "checkpoints" / "best")
    return opened.paths


@pytest.fixture
def whole(project: ProjectLayout, run: RunPaths) -> ProjectLayout:
    """Create a project with sealed directories of every kind."""
    for kind, folder in {"base": project.base, "data": project.data, "gate": project.gate}.items():
        seal(folder, kind)
    with files.sealed_directory(project.promoted_model("f" * 64), "model") as scratch:
        (scratch / "a.bin").write_bytes(bytes(range(200)))
        signature.sign_folder(scratch, keys.load_signer(project))
    (project.models / ".partial-model-123").mkdir()  # a directory that is being written is not verified
    return project


def lines(*paths: Path) -> tuple[bool, list[str]]:
    report = verify(paths)
    return report.is_intact, format_verification(report).splitlines()


def test_an_intact_project_is_listed_item_by_item(whole: ProjectLayout, run: RunPaths) -> None:
    found, text = lines(whole.root)
    assert found, text
    assert [line.split(str(whole.root))[1].split("  ")[:2] for line in text] == [
        ["/experiments/base", "base"],
        ["/experiments/data", "data"],
        ["/experiments/gate", "gate"],
        ["/mlruns/models/" + "f" * 16, "model"],
        ["/mlruns/models/" + "f" * 16 + "/model.sig", "signature"],
        [f"/experiments/runs/{SPEC.run_id}/spec.json", "spec"],
        [f"/experiments/runs/{SPEC.run_id}/journal.jsonl", "journal"],
        [f"/experiments/runs/{SPEC.run_id}/checkpoints/step-00000002", "checkpoint"],
        [f"/experiments/runs/{SPEC.run_id}/checkpoints/step-00000004", "checkpoint"],
        [f"/experiments/runs/{SPEC.run_id}/result", "result"],
    ]
    manifest = files.read_manifest(whole.base)
    first = verify([whole.root]).findings[0]
    assert (first.status, first.path, first.kind, first.digest, first.size_bytes) == (
        "ok", whole.base, "base", manifest.digest, 200,
    )  # fmt: skip
    assert text[0] == f"ok  {whole.base}  base  {manifest.digest[:12]}  200 bytes"

    found, text = lines(run.root, run.checkpoint(2), whole.data)  # one directory at a time
    assert found
    assert len(text) == 5 + 1 + 1
    assert all(line.startswith("ok  ") for line in text)


def test_a_new_project_is_intact_and_moved_runs_are_found(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines(project.root) == (True, [f"ok  {project.root}  project  nothing is sealed in it yet"])
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "elsewhere"))
    RunDirectory.open(project.runs, SPEC).close()
    found, text = lines(project.root)
    assert found
    assert str(tmp_path / "elsewhere") in text[0]


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def add_setting(run: RunPaths) -> None:
    """Add a setting that this version does not know. The name of the run directory then does not match the edited
    spec."""
    raw = json.loads(run.spec.read_bytes())
    raw["train"]["invented_later"] = 1
    files.write_json(run.spec, raw)


def other_run(run: RunPaths) -> None:
    (run.checkpoint(4) / "identity.json").unlink()
    with files.sealed_directory(run.checkpoint(4), "checkpoint") as scratch:
        files.link_tree(run.checkpoint(2), scratch)
        (scratch / "manifest.json").unlink()
        (scratch / "identity.json").unlink()
        other = SPEC.model_copy(update={"data_digest": "e" * 64})
        files.write_json(scratch / "identity.json", snapshots.identity(other))


Damage = Callable[[RunPaths], object]
OF_A_RUN: dict[str, tuple[Damage, str]] = {
    "bit of a checkpoint": (
        lambda run: flip(run.checkpoint(4) / "optimizer.safetensors"),
        r"step-00000004: optimizer\.safetensors: content differs",
    ),
    "bit of a result": (
        lambda run: flip(run.result / "checkpoints" / "best" / "trainable.safetensors"),
        r"result: checkpoints/best/trainable\.safetensors: content differs",
    ),
    "manifest gone": (lambda run: (run.checkpoint(4) / files.MANIFEST).unlink(), r"step-00000004: not sealed"),
    "another kind": (
        lambda run: edit(run.checkpoint(4) / files.MANIFEST, b'"checkpoint"', b'"chackpoint"'),
        r"step-00000004: found a sealed 'chackpoint'; expected 'checkpoint'",
    ),
    "best one gone": (
        lambda run: files.remove_sealed(run.checkpoint(2)),
        r"step-00000004: state\.json: refers to the checkpoint of step 2, which does not exist",
    ),
    "of another run": (other_run, r"step-00000004: identity\.json: belongs to another run, .* in data_digest"),
    "line of the journal": (
        lambda run: edit(run.journal, b'{"attempt"', b'{"att\x00mpt"'),
        r"journal\.jsonl: 1 damaged line\(s\) among 1 event",
    ),
    "journal gone": (lambda run: run.journal.unlink(), r"journal\.jsonl: missing"),
    "spec edited": (lambda run: edit(run.spec, b'"seed": 0', b'"seed": 1'), r"spec\.json: is the spec of run \w+, not"),
    "setting added to the spec": (add_setting, r"spec\.json: is the spec of run \w+, not"),
    "spec cut": (lambda run: os.truncate(run.spec, 20), r"spec\.json: invalid JSON"),
    "spec a list": (lambda run: run.spec.write_text("[]"), r"spec\.json: found list; expected a JSON object"),
    "newer version": (
        lambda run: files.write_json(run.format, {"format": 99}),
        r"written by a newer version of ratchet \(format 99",
    ),
}


@pytest.mark.parametrize("damage", OF_A_RUN)
def test_damage_to_a_run_is_named(run: RunPaths, damage: str) -> None:
    inflict, says = OF_A_RUN[damage]
    assert lines(run.root)[0]
    inflict(run)
    found, text = lines(run.root)
    assert not found
    damaged = "\n".join(line for line in text if line.startswith("DAMAGED "))
    assert re.search(says, damaged), damaged
    assert any(line.startswith("ok  ") for line in text)  # intact directories are still listed


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    target = seal(tmp_path / "out", "export")
    path = target / files.MANIFEST
    good = path.read_bytes()
    missed = []
    for place, byte in enumerate(good):
        bit = place % 8
        path.write_bytes(good[:place] + bytes([byte ^ 1 << bit]) + good[place + 1 :])
        if lines(target)[0]:
            missed.append((place, bit))
    assert missed == []


def test_a_copy_of_an_active_run_is_intact(run: RunPaths, tmp_path: Path) -> None:
    with run.journal.open("ab") as stream:
        stream.write(b'{"event": "st')
    found, text = lines(run.root)
    assert found
    assert text[1].endswith("the last line is not finished")
    run.root.rename(tmp_path / "backup of tuesday")
    assert lines(tmp_path / "backup of tuesday")[0]
    assert lines(tmp_path / "backup of tuesday" / "checkpoints" / "step-00000004")[0]


def test_runs_and_checkpoints_of_format_1_can_be_verified(run: RunPaths) -> None:
    run.format.unlink()
    path = run.checkpoint(2)
    (path / "identity.json").unlink()
    (path / files.MANIFEST).unlink()
    files.seal_directory(path, "checkpoint")
    files.remove_sealed(run.checkpoint(4))
    assert lines(run.root)[0]


def test_a_path_that_is_not_sealed_is_refused_before_anything_is_checked(whole: ProjectLayout, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("nowhere", "folder", "file"):
        with pytest.raises(SettingsError, match=rf"{name}: (does not exist|contains nothing that can be checked)"):
            verify([whole.root, tmp_path / name])


def test_the_command_ends_with_0_or_2_and_does_not_load_torch(
    run: RunPaths, tmp_path: Path, calm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys; from ratchet.cli.main import main\n"
        "end = main(sys.argv[1:]); print('torch' in sys.modules); exit(end)"
    )
    command = [sys.executable, "-c", code, "verify", str(run.root)]
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "False"), good.stderr
    assert len(good.stdout.splitlines()) == 6
    flip(run.checkpoint(4) / "state.json")
    assert main(["verify", str(run.root)]) == 2
    assert sum(line.startswith("DAMAGED ") for line in capsys.readouterr().out.splitlines()) == 1
    assert main(["verify", str(run.root), "--json"]) == 2
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["path"] for finding in findings if finding["status"] == "damaged"] == [str(run.checkpoint(4))]
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    wrong = capsys.readouterr().err
    assert "does not exist" in wrong
    assert "Traceback" not in wrong
