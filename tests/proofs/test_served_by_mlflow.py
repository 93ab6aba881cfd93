"""Proves that MLflow can serve a registered version without Ratchet."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mlflow_server
from chat_model import probes_of_hf, write_model
from ports import free_port
from promoted_models import NAME, store_fake_model
from ratchet.registry.model_store import KIND
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

PACKAGES = ("registry", "reports")

LOAD = """
import json, sys
import mlflow

pipeline = mlflow.transformers.load_model(f"models:/{sys.argv[1]}@champion")
messages = [{"role": "user", "content": sys.argv[2]}]
[answer] = pipeline(messages, max_new_tokens=int(sys.argv[3]), do_sample=False)
print(json.dumps(answer["generated_text"][-1]["content"]))
"""
"""What a user of MLflow writes to load the champion."""


def answer(port: int, body: dict[str, Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    """Send the request until the server accepts connections, and return the answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            with opener.open(request, timeout=60) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from None
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture(params=["own", "server"])
def where(
    request: pytest.FixtureRequest, tracked_project: ProjectLayout, tmp_path: Path, mlflow_template: Path
) -> Iterator[tuple[MlflowModelRegistry, str]]:
    """Yield a registry and its address: the project's own store, or a server."""
    if request.param == "own":
        yield MlflowModelRegistry(tracked_project, NAME), f"sqlite:///{tracked_project.mlflow_database}"
        return
    with mlflow_server.serve(tmp_path / "server", free_port(), mlflow_template) as address:
        yield MlflowModelRegistry(tracked_project, NAME, address), address


def test_a_registered_version_is_served_by_mlflow_alone(
    tracked_project: ProjectLayout, tmp_path: Path, where: tuple[MlflowModelRegistry, str]
) -> None:
    torch.set_num_threads(1)
    registry, address = where
    source = tmp_path / "source"
    write_model(source / "hf", 1, begins=True)
    bundle = store_fake_model(tracked_project, source, ("hf",))
    folder = tracked_project.promoted_model(bundle.model_digest)
    registry.set_champion(registry.ensure_version(bundle.model_digest, folder, "run", {}), None)
    before = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}

    port, log = free_port(), tmp_path / "log"
    hidden = tmp_path / "hidden"  # importing ratchet in the serving process fails
    hidden.mkdir()
    (hidden / "ratchet.py").write_text("raise RuntimeError('Ratchet is not there')\n")
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": address, "PYTHONPATH": str(hidden),
        "HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "mlflow", "models", "serve", "-m", f"models:/{NAME}@champion", "--env-manager", "local",
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=environment, cwd=tmp_path, start_new_session=True
        )
        try:
            probe = probes_of_hf(source / "hf")[0]
            body = {
                "messages": [{"role": "user", "content": probe.question}], "max_tokens": len(probe.answer_ids),
                "temperature": 0.0,
            }  # fmt: skip
            [found] = answer(port, body, process, log)
        finally:
            os.killpg(process.pid, 9)
            process.wait()
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["usage"]["prompt_tokens"] == len(probe.prompt_ids)
    assert found["usage"]["completion_tokens"] == len(probe.answer_ids)  # a second BOS token would change the counts
    assert found["choices"][0]["message"]["content"].strip() == probe.answer.strip()
    after = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert after - before <= {files.FOREIGN}
    files.verify_sealed(folder, KIND)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, NAME, probe.question, str(len(probe.answer_ids))], env=environment, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(loaded.stdout.splitlines()[-1]).strip() == probe.answer.strip()
    shutil.rmtree(folder)
