"""Cases for `ratchet train` with a real webhook server and a real Prometheus port."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.webhook import VARIABLE

TOKEN = "T0PLANTED-xyzzy"  # noqa: S105


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    train = tiny_project.TRAIN.model_copy(update={"epochs": 1.0})
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    return tiny_project.prepared(tmp_path_factory.mktemp("observed") / "project", settings)


def project(template: ProjectLayout, root: Path, **machine: Any) -> ProjectLayout:
    from ratchet.config import params_file

    shutil.copytree(template.root, root)
    settings = params_file.load(root / "params.yaml")
    changed = settings.machine.model_copy(update={"tracking_timeout_s": 60.0, **machine})
    layout = ProjectLayout(root)
    tiny_project.save(layout, settings.model_copy(update={"machine": changed}))
    return layout


def train(layout: ProjectLayout, address: str, *faults: dict[str, object]) -> "subprocess.CompletedProcess[str]":
    environment = tiny_project.environment() | {VARIABLE: address, "RATCHET_FAULTS": json.dumps(faults)}
    return subprocess.run(
        tiny_project.command("train"), cwd=layout.root, env=environment, capture_output=True, text=True, check=False
    )
