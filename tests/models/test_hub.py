"""Base models and adapters from the hub, with its real client and a local server."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import tiny_project
from hub_server import OWNER, Fault, Hub
from progress_recorder import ProgressRecorder
from ratchet.config.settings import Settings
from ratchet.errors import BaseModelError
from ratchet.models import base_model
from ratchet.models import hub as hub_client
from ratchet.stages import base, prepare
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import use_reporter
from ratchet.storage.records.base import BaseCard

BASE = f"{OWNER}/base"
TOKENS = [[3, 40, 7, 19, 5, 11]]

LOAD = f"""
import sys
import torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    print(*model(torch.tensor({TOKENS})).logits.flatten().tolist())
"""


def with_base(revision: str = "main", source: str = BASE) -> Settings:
    changed = tiny_project.SETTINGS.base.model_copy(update={"source": source, "revision": revision})
    train = tiny_project.TRAIN.model_copy(update={"quantization": "none"})
    return tiny_project.SETTINGS.model_copy(update={"base": changed, "train": train})


@pytest.fixture
def model(prepared: Path) -> dict[str, bytes]:
    """Return the files of the tiny base."""
    folder = ProjectLayout(prepared).tiny_model
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.long
def test_a_base_and_its_adapter_come_from_the_hub_at_their_commit(
    hub: Hub, model: dict[str, bytes], tmp_path: Path
) -> None:
    commit = hub.add(BASE, model | {"README.md": b"---\nlicense: mit\n---\n"}, is_private=True)
    layout = tiny_project.write(tmp_path / "project", with_base())
    project = Project(layout.root)
    card = base.base(project)
    assert (card.revision, card.licence, card.source) == (commit, "mit", BASE)
    prepare.prepare(project)
    hub.add(BASE, {"model.safetensors": b"the branch has moved"})
    tiny_project.adapted(layout, project.settings)
    assert base_model.locate(layout, BaseCard.load(layout.base_card)).name == commit

    (tmp_path / "elsewhere").mkdir()
    environment = os.environ | hub.environment(tmp_path / "other home")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(layout.adapter)], cwd=tmp_path / "elsewhere", env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = torch.tensor([float(number) for number in done.stdout.split()])
    loaded = AutoModelForCausalLM.from_pretrained(base_model.locate(layout, card))
    expected = PeftModel.from_pretrained(loaded, str(layout.adapter))
    with torch.no_grad():
        logits = expected(torch.tensor(TOKENS)).logits.flatten()
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


def refused(layout: ProjectLayout, settings: Settings) -> str:
    with pytest.raises(BaseModelError) as caught:
        base.base(Project.from_parts(layout, settings))
    assert caught.value.exit_code == 2
    assert not layout.base.exists()
    assert not list(layout.experiments.glob(".partial*"))
    return str(caught.value)


def test_a_base_that_the_hub_does_not_give_is_refused(
    hub: Hub, model: dict[str, bytes], project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(BASE, model, is_private=True)
    assert "base.source: ada/none at main: the hub answers 404" in refused(project, with_base(source="ada/none"))
    assert "base.source: ada/base at v9: the hub answers 404" in refused(project, with_base("v9"))
    fault = hub.inject(Fault("GET", "/resolve/", "status", 403))
    assert "the hub answers 403: as injected; the repository is not yours" in refused(project, with_base())
    fault.times = 0
    monkeypatch.setenv("HF_TOKEN", "hf_WrongTokenOfNobody1234")
    message = refused(project, with_base())
    assert "the hub answers 401: Invalid credentials in Authorization header; the token is missing or wrong" in message
    assert "hf_Wrong" not in message


def test_a_download_that_breaks_leaves_nothing_and_is_resumed(
    hub: Hub, model: dict[str, bytes], project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(BASE, model)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client waits before each new attempt
    fault = hub.inject(Fault("GET", "model.safetensors", "reset"))
    assert "the hub cannot be reached" in refused(project, with_base())
    fault.times = 0
    hub.inject(Fault("GET", "model.safetensors", "cut", times=2))
    assert base.base(Project.from_parts(project, with_base())).revision == commit


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_named(hub: Hub, model: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(BASE, model)
    layout = tiny_project.write(tmp_path / "project", with_base())
    home = tmp_path / "small"
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(home)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        environment = tiny_project.environment() | hub.environment(home)
        command: list[Any] = tiny_project.command("-q", "base")
        done = subprocess.run(command, cwd=layout.root, env=environment, capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["umount", str(home)], check=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "No space left on device; free some space, or set HF_HOME to a directory on a larger disk" in done.stderr
    assert not layout.base.exists()


def test_the_bytes_of_a_download_are_reported_although_bars_of_libraries_are_disabled(
    hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 10_000}
    hub.add(BASE, files)
    with use_reporter(recorder := ProgressRecorder()):
        path = hub_client.download(BASE, "main", ["*.json", "*.safetensors"])
    assert {name: (path / name).read_bytes() for name in files} == files
    total = sum(map(len, files.values()))
    assert {(task, unit) for task, _, _, unit in recorder.states} == {(f"download of {BASE}", "bytes")}
    assert max(state[1] for state in recorder.states) == total
    assert all(done < whole <= total + 1 for _, done, whole, _ in recorder.states if whole is not None)
    assert "%" not in capfd.readouterr().err
