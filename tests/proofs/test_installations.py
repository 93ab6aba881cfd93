"""Proves the README's section Install: in new virtual environments the distribution alone prepares, trains, evaluates
and gates; each extra alone adds its feature, and without it the message names the extra."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ratchet.config.evaluate import Evaluate, HarnessSettings
from ratchet.config.export import Export, GgufSettings, OnnxSettings
from ratchet.config.settings import Settings
from ratchet.config.sweep import Sweep
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Verdict

PACKAGES = ("cli", "stages", "config")
ROOT = Path(__file__).parents[2]
TORCH = re.findall(r"(?m)^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"))[0]
PLAIN = tiny_project.SETTINGS.model_copy(update={"evaluate": Evaluate(max_new_tokens=8)})
STAGES = ("base", "prepare", "train", "export", "evaluate", "gate")


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    root: Path

    def run(self, *arguments: str | Path, expected: int = 0) -> str:
        """Run `python ARGUMENTS` without the variables and directories of this process. Returns standard error."""
        kept = {"PATH", "HOME", "LANG", "TMPDIR", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"}
        environment = {name: value for name, value in os.environ.items() if name in kept}
        done = subprocess.run(
            [self.root / "bin" / "python", *map(str, arguments)],
            capture_output=True, text=True, check=False, timeout=900, cwd=self.root, env=environment,
        )  # fmt: skip
        assert done.returncode == expected, done.stdout + done.stderr
        return done.stderr

    def install(self, *requirements: str | Path) -> None:
        """Install distributions in the versions of constraints.txt."""
        self.run("-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *requirements)

    def ratchet(self, layout: ProjectLayout, *arguments: str | Path, expected: int = 0) -> str:
        """Run a command in a project. Returns standard error."""
        return self.run("-m", "ratchet", "--project", layout.root, *arguments, expected=expected)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """The distribution without extras."""
    root = tmp_path_factory.mktemp("environments") / "base"
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    environment = Environment(root)
    environment.install(TORCH)
    environment.install(wheel)
    return environment


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, base: Environment) -> ProjectLayout:
    """A project whose stages ran in the environment without extras."""
    layout = tiny_project.write(tmp_path_factory.mktemp("gated") / "project", PLAIN)
    for stage in STAGES:
        base.ratchet(layout, stage)
    return layout


@pytest.fixture
def add(base: Environment, wheel: Path, tmp_path: Path) -> Callable[[str], Environment]:
    """Return a copy of the environment with an extra. Files are hard links, because pip replaces files."""

    def install(extra: str) -> Environment:
        root = tmp_path / extra
        shutil.copytree(base.root, root, symlinks=True, copy_function=os.link)
        environment = Environment(root)
        environment.install(f"{wheel}[{extra}]")
        return environment

    return install


def change(gated: ProjectLayout, root: Path, **sections: Any) -> ProjectLayout:
    """Return a copy of the project with other settings."""
    shutil.copytree(gated.root, root)
    layout = ProjectLayout(root)
    tiny_project.save(layout, Settings.model_validate({**dict(PLAIN), **sections}))
    return layout


def test_the_distribution_alone_prepares_trains_evaluates_and_gates(gated: ProjectLayout) -> None:
    assert Verdict.load(gated.verdict).reasons


def test_the_examples_are_in_the_wheel(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    code = "import ratchet; print(ratchet.__file__, ratchet.init('mine', example='chat').example)"
    environment = tiny_project.environment() | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "ratchet" / "__init__.py"), "chat"]
    assert (tmp_path / "mine" / "README.md").is_file()


FEATURES = {
    "export": ("export", {"export": Export(gguf=GgufSettings(types=("q8_0",)), onnx=OnnxSettings(types=("fp32",)))}),
    "harness": ("evaluate", {"evaluate": Evaluate(max_new_tokens=8, harness=HarnessSettings(tasks=("answers",)))}),
    "sweep": ("sweep", {"sweep": Sweep(trials=2, space={"train.rank": {"choices": [2, 4]}})}),
    **{
        name: ("train", {"machine": tiny_project.MACHINE.model_copy(update={"loggers": (name,)})})
        for name in ("tensorboard", "wandb", "dvclive")
    },
}


@pytest.mark.parametrize("extra", FEATURES)
def test_an_extra_alone_adds_its_feature(
    extra: str, base: Environment, add: Callable[[str], Environment], gated: ProjectLayout, tmp_path: Path
) -> None:
    command, sections = FEATURES[extra]
    layout = change(gated, tmp_path / "project", **sections)
    assert f"pip install 'ratchet-llm[{extra}]'" in base.ratchet(layout, command, expected=2)
    add(extra).ratchet(layout, command)


def test_a_replica_in_s3_needs_its_extra(
    base: Environment, add: Callable[[str], Environment], gated: ProjectLayout, tmp_path: Path
) -> None:
    machine = tiny_project.MACHINE.model_copy(update={"replica": "s3://bucket/runs"})
    layout = change(gated, tmp_path / "project", machine=machine)
    assert "pip install 'ratchet-llm[storage]'" in base.ratchet(layout, "config", expected=2)
    add("storage").ratchet(layout, "config")


def test_a_study_in_postgres_needs_its_extra(
    base: Environment, add: Callable[[str], Environment], gated: ProjectLayout, tmp_path: Path
) -> None:
    machine = tiny_project.MACHINE.model_copy(update={"study_storage": "postgresql://me@127.0.0.1:1/studies"})
    layout = change(gated, tmp_path / "project", **FEATURES["sweep"][1], machine=machine)
    sweep, postgres = add("sweep"), add("postgres")
    assert "pip install 'ratchet-llm[postgres]'" in sweep.ratchet(layout, "sweep", expected=2)
    refused = postgres.ratchet(layout, "sweep", expected=2)
    assert "pip install" not in refused
    assert "127.0.0.1" in refused


def test_signing_by_an_identity_needs_its_extra(base: Environment, add: Callable[[str], Environment]) -> None:
    load = "from ratchet.config.extras import require_libraries; require_libraries('promote.signing', 'sign')"
    assert "pip install 'ratchet-llm[sign]'" in base.run("-c", load, expected=1)
    add("sign").run("-c", f"{load}; import sigstore.sign")
