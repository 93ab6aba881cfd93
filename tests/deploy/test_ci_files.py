"""The CI files for users: a linter accepts them, and their scripts pull, judge, comment and check in a real project."""

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

import gate_cases
import tiny_project
from gate_cases import right
from ratchet.config.gate import AtLeastRule, Gate
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_GATE
from ratchet.stages import init
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("stages", "cli")

CI = Path(__file__).parents[2] / "deploy" / "ci"
GITHUB: dict[str, Any] = yaml.safe_load((CI / "github.yml").read_text(encoding="utf-8"))
GITLAB: dict[str, Any] = yaml.safe_load((CI / "gitlab.yml").read_text(encoding="utf-8"))
SETTINGS = Settings(gate=Gate(rules=(AtLeastRule(rule="at_least", metric="accuracy", value=0.5),)))
TOKEN = "a-project-access-token"  # noqa: S105 (of the server below)
RIGHT = {"PROMOTE": 190, "REJECT": 20}
"""Right answers out of 200 that lead to a decision."""


def create_clone(root: Path, decision: str, mlflow_template: Path) -> ProjectLayout:
    """Create a project, and clone it as a CI runner does: the outputs of earlier stages are in a DVC remote."""
    layout = ProjectLayout(root / "project")
    tiny_project.write(layout.root, SETTINGS)
    models = {role: {"accuracy": right(count)} for role, count in (("base", 60), ("candidate", RIGHT[decision]))}
    found = gate_cases.evidence(models, current_task_digests={}, model_formats=("adapter",))
    no_tasks = {**gate_cases.CONTRACTS["k1"], "tasks": {}}
    gate_cases.write(layout, gate_cases.with_report(found, contracts={"k1": no_tasks}))
    stages = yaml.safe_load(Path(init.__file__).with_name("dvc_template.yaml").read_text(encoding="utf-8"))["stages"]
    (layout.root / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"gate": stages["gate"]}}), encoding="utf-8")
    layout.judgements.touch()
    (layout.root / ".gitignore").write_text("/mlruns\n", encoding="utf-8")
    for command in (
        "git init -q", "dvc init -q", f"dvc remote add -q -d storage {root}/remote",
        "dvc add -q data/raw experiments/evaluate experiments/export", "dvc push -q", "git add -A",
        "git -c user.name=me -c user.email=me@example.org commit -qm all", f"git clone -q . {root}/clone",
    ):  # fmt: skip
        run(command, layout.root)
    clone = ProjectLayout(root / "clone")
    clone.mlruns.mkdir()
    clone.mlflow_database.write_bytes(mlflow_template.read_bytes())
    return clone


def run(script: str, root: Path, expected: int = 0, **variables: str) -> str:
    """Run a script with bash as a CI runner does: it ends at the first command that fails."""
    environment = tiny_project.environment() | variables
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml"])
def test_a_linter_finds_nothing(name: str) -> None:
    config = YamlLintConfig("{extends: default, rules: {line-length: {max: 120}, document-start: disable}}")
    assert list(linter.run((CI / name).read_text(encoding="utf-8"), config)) == []


@pytest.mark.long
def test_the_steps_of_github_comment_and_then_check(tmp_path: Path, mlflow_template: Path) -> None:
    layout = create_clone(tmp_path, "PROMOTE", mlflow_template)
    job = GITHUB["jobs"]["gate"]
    assert GITHUB["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert "head.repo.full_name == github.repository" in job["if"]  # no fork runs here
    programs = tmp_path / "bin"
    programs.mkdir()
    gh = programs / "gh"  # records its arguments, and the comment
    gh.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat verdict.md > {tmp_path}/comment\n', encoding="utf-8"
    )
    gh.chmod(0o755)
    path = os.pathsep.join([str(programs), tiny_project.environment()["PATH"]])
    steps = {step["name"]: step["run"] for step in job["steps"] if "run" in step}
    assert list(steps) == ["Install", "Train and judge", "Comment", "Check"]
    for name in ("Train and judge", "Comment"):
        run(steps[name], layout.root, PATH=path, PULL_REQUEST="7", GITHUB_STEP_SUMMARY=str(tmp_path / "summary"))
    run(steps["Check"], layout.root)
    assert (tmp_path / "arguments").read_text(encoding="utf-8").startswith("pr comment 7 ")
    comment = (tmp_path / "comment").read_text(encoding="utf-8")
    assert "PROMOTE" in comment
    assert "| " in comment
    assert (tmp_path / "summary").read_text(encoding="utf-8") == comment
    [kept] = [step["with"]["path"].split() for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert [name for name in kept if not (layout.root / name).is_file()] == []


@pytest.fixture
def api() -> Iterator[tuple[str, list[tuple[str, str | None, str]]]]:
    """Start a server that records path, token and body of each request. Returns its address and the records."""
    requests: list[tuple[str, str | None, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            requests.append((self.path, self.headers["PRIVATE-TOKEN"], parse_qs(text)["body"][0]))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/api/v4", requests
    server.shutdown()
    server.server_close()


@pytest.mark.long
def test_the_script_of_gitlab_comments_before_it_fails(
    api: tuple[str, list[tuple[str, str | None, str]]], tmp_path: Path, mlflow_template: Path
) -> None:
    layout = create_clone(tmp_path, "REJECT", mlflow_template)
    address, requests = api
    run(
        "\n".join(GITLAB["ratchet"]["script"]), layout.root, expected=EXIT_GATE,
        CI_API_V4_URL=address, CI_PROJECT_ID="5", CI_MERGE_REQUEST_IID="3", GITLAB_TOKEN=TOKEN,
    )  # fmt: skip
    [(path, token, body)] = requests
    assert (path, token) == ("/api/v4/projects/5/merge_requests/3/notes", TOKEN)
    assert body == (layout.root / "verdict.md").read_text(encoding="utf-8")
    assert "REJECT" in body
    assert [name for name in GITLAB["ratchet"]["artifacts"]["paths"] if not (layout.root / name).is_file()] == []


def test_both_files_install_what_the_makefile_pins() -> None:
    pinned = next(
        line.partition("?= ")[2] for line in (CI.parents[1] / "Makefile").read_text().splitlines() if "TORCH ?=" in line
    )
    assert GITHUB["jobs"]["gate"]["env"]["TORCH"] == GITLAB["ratchet"]["variables"]["TORCH"] == pinned
    assert sys.version_info[:2] == (3, 11)
    assert "python:3.11" in GITLAB["ratchet"]["image"]
