"""Commands on an installation that lacks libraries. tests/proofs/test_installations.py really installs each extra."""

import subprocess
import sys
from pathlib import Path

import pytest

import tiny_project
from promoted_models import promote_fake_model
from ratchet.config.evaluate import Evaluate, HarnessSettings
from ratchet.config.export import Export, GgufSettings, OnnxSettings
from ratchet.config.settings import Settings

PACKAGES = ("config", "cli")
HIDE = """
import importlib.machinery, sys
hidden, *arguments = sys.argv[1:]
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: None if name in hidden.split() else find(name, *rest)
from ratchet.cli.main import main
sys.exit(main(arguments))
"""


def run_without(libraries: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process that cannot import these libraries."""
    command = [sys.executable, "-c", HIDE, libraries, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tiny_project.write(tmp_path / "project").root


@pytest.mark.parametrize(("library", "command", "extra"), [("optuna", "sweep", "sweep"), ("datasets", "prepare", "")])
def test_a_command_names_the_extra_that_it_needs(project: Path, library: str, command: str, extra: str) -> None:
    done = run_without(library, "--project", project, command)
    target = f"ratchet-llm[{extra}]" if extra else "ratchet-llm"
    assert done.returncode == 2
    assert done.stderr == (
        f"ratchet {command}: this needs {library}, which is not installed; install it with: pip install '{target}'\n"
    )


def test_the_python_api_names_the_extra(project: Path) -> None:
    code = HIDE.split("from ratchet", maxsplit=1)[0] + "import ratchet\nratchet.sweep(ratchet.Project(arguments[0]))\n"
    command = [sys.executable, "-c", code, "optuna", str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr.splitlines()[-1] == (
        "ratchet.errors.MissingLibraryError: this needs optuna, which is not installed; "
        "install it with: pip install 'ratchet-llm[sweep]'"
    )


@pytest.mark.parametrize(
    ("settings", "library", "start"),
    [
        ({"export": Export(gguf=GgufSettings(types=("q8_0",)))}, "gguf", "export.gguf needs gguf"),
        ({"export": Export(onnx=OnnxSettings(types=("fp32",)))}, "onnxruntime", "export.onnx needs onnxruntime"),
        ({"evaluate": Evaluate(harness=HarnessSettings(tasks=("answers",)))}, "lm_eval", "evaluate.harness needs lm_"),
        ({"evaluate": Evaluate(metrics=("bleu",))}, "sacrebleu", "evaluate.metrics needs sacrebleu"),
    ],
)
def test_training_does_not_start_if_a_later_stage_would_lack_a_library(
    tmp_path: Path, settings: dict[str, object], library: str, start: str
) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    tiny_project.save(
        layout, Settings.model_validate({**dict(tiny_project.SETTINGS), "evaluate": Evaluate()} | settings)
    )
    done = run_without(library, "--project", layout.root, "train")
    assert done.returncode == 2
    assert done.stderr.startswith(f"ratchet train: {start}")
    assert not layout.runs.exists()


def test_a_service_without_its_library_changes_no_command(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    done = run_without("opentelemetry", "--project", project, "status")
    assert (done.returncode, done.stderr) == (
        0,
        "ratchet: OpenTelemetry: nothing is sent: this needs opentelemetry, which is not installed; install it with: "
        "pip install 'ratchet-llm[observability]'\n",
    )


MODEL_LIBRARIES = "torch transformers peft bitsandbytes accelerate datasets tokenizers safetensors"


@pytest.mark.long
def test_a_host_that_shows_and_deploys_needs_no_model_library(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "project")
    promote_fake_model(layout, "a")
    target = tmp_path / "served"
    for command in (
        ["status"],
        ["watch", "--once"],
        ["promotions"],
        ["deploy", target, "--format", "hf", "--no-smoke"],
        ["verify", target / "current"],
        ["deploy", target, "--no-smoke"],
    ):
        done = run_without(MODEL_LIBRARIES, "--project", layout.root, *command)
        assert (done.returncode, done.stderr) == (0, ""), command
    assert (target / "current" / "SERVE.md").is_file()
