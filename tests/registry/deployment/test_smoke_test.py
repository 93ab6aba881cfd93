"""Tests real servers on the files of a release: verified answers and ties pass, others are refused.

Also tests that no server keeps running.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from promoted_models import SETTINGS, make_champion, store_fake_model
from ratchet.cli.deploy import format_deployment
from ratchet.config.settings import Settings
from ratchet.errors import ChampionError, DamagedFileError
from ratchet.registry.deployment.smoke_test import TIE_NATS, run_smoke_test
from ratchet.stages.deploy import DeployOptions, check_release, deploy
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ExportArtifact
from smoke_cases import export, nothing_left, verified  # noqa: F401 (fixtures)


def test_another_model_is_refused(export: Path, verified: dict[str, ExportArtifact]) -> None:
    with pytest.raises(ChampionError, match=r"answer to 'What is a ratchet\?' differs from .* from token 1 on"):
        run_smoke_test(export / "other", verified["gguf/f32"], has_dated_prompts=False)


def changed(one: ExportArtifact, **about: Any) -> ExportArtifact:
    """Return the artifact with these fields of its first probe changed."""
    first, *others = one.probes
    return one.model_copy(update={"probes": (first.model_copy(update=about), *others)})


def test_another_token_is_accepted_only_at_a_tie(export: Path, verified: dict[str, ExportArtifact]) -> None:
    one = verified["gguf/f32"]
    ids, margins = list(one.probes[0].answer_ids), list(one.probes[0].margins)
    ids[3], margins[3] = (ids[3] + 1) % 300, TIE_NATS / 2
    told = run_smoke_test(
        export / "one", changed(one, answer_ids=tuple(ids), margins=tuple(margins)), has_dated_prompts=False
    )
    tie = "'What is a ratchet?' differs from token 4 on, a tie with a margin of 0.025 nats"
    assert told == f"2 of 3 answers as verified; {tie}"
    margins[3] = TIE_NATS * 2
    with pytest.raises(ChampionError, match=r"from token 4 on, where the verified token had a margin of 0\.10 nats"):
        run_smoke_test(
            export / "one", changed(one, answer_ids=tuple(ids), margins=tuple(margins)), has_dated_prompts=False
        )


def test_another_prompt_without_dates_or_no_answers_are_refused(
    export: Path, verified: dict[str, ExportArtifact]
) -> None:
    other = changed(verified["gguf/f32"], question="What is a pawl?")
    with pytest.raises(ChampionError, match=r"prompt for 'What is a pawl\?' differs"):
        run_smoke_test(export / "one", other, has_dated_prompts=False)
    assert run_smoke_test(export / "one", other, has_dated_prompts=True) == "3 of 3 answers as verified"
    with pytest.raises(DamagedFileError, match="no verified answers of hf"):
        run_smoke_test(export / "one", verified["hf"].model_copy(update={"probes": ()}), has_dated_prompts=False)


def kept(
    layout: ProjectLayout,
    export: Path,
    verified: dict[str, ExportArtifact],
    spoil: Callable[[ExportArtifact], ExportArtifact] | None = None,
) -> None:
    """Make the model champion, with changed answers if `spoil` is given."""
    probes = {form: (spoil(one) if spoil else one).probes for form, one in verified.items()}
    make_champion(layout, store_fake_model(layout, export / "one", list(verified), probes).model_digest)


def test_a_model_with_other_answers_is_not_deployed(
    project: ProjectLayout, export: Path, verified: dict[str, ExportArtifact], tmp_path: Path
) -> None:
    served = tmp_path / "served"
    wrong = tuple(reversed(verified["gguf/f32"].probes[0].answer_ids))
    kept(project, export, verified, lambda one: changed(one, answer_ids=wrong, margins=(9.0,) * len(wrong)))
    with pytest.raises(ChampionError, match="the current release was not changed"):
        deploy(Project.from_parts(project, SETTINGS), served)
    assert not (served / "current").exists()
    assert list((served / "releases").iterdir()) == []
    kept(project, export, verified)
    result = deploy(Project.from_parts(project, SETTINGS), served)
    assert result.deployment.smoke_test == "3 of 3 answers as verified"
    assert "smoke test: 3 of 3 answers as verified" in format_deployment(result)
    [entry] = (served / "deployments.jsonl").read_text().splitlines()
    assert json.loads(entry)["smoke_test"] == "3 of 3 answers as verified"
    result = deploy(Project.from_parts(project, SETTINGS), served, DeployOptions(format="hf", smoke_test=False))
    assert "hf) is current" in format_deployment(result)
    assert check_release(project, served / "previous").artifact_name == "gguf/f32"


def running(needle: bytes) -> list[int]:
    """Return the ids of processes with this text in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if needle in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # the process has ended
    return found


@pytest.mark.long
def test_kill_during_smoke_test_leaves_no_server(
    project: ProjectLayout, export: Path, verified: dict[str, ExportArtifact], tmp_path: Path
) -> None:
    """After a SIGKILL in a smoke test, the server ends, `current` is unchanged, and a repeated deployment succeeds."""
    served = tmp_path / "served"
    kept(project, export, {"hf": verified["hf"], "gguf/f32": verified["gguf/f32"]})
    code = (
        "import sys; from pathlib import Path\n"
        "from ratchet.config.settings import Settings; from ratchet.storage.layout import ProjectLayout as Layout\n"
        "from ratchet.stages.deploy import deploy; from ratchet.stages.project import Project\n"
        "from ratchet.registry.deployment import smoke_test as smoke\n"
        "smoke._compare_answer = lambda *about: (print('asked', flush=True), __import__('time').sleep(600))\n"
        "smoke.llama_server.LlamaServer.close = lambda self: None\n"
        "smoke._is_same_prompt = lambda *about: (print('asked', flush=True), __import__('time').sleep(600))\n"
        "deploy(Project.from_parts(Layout(Path(sys.argv[1])), Settings()), Path(sys.argv[2]))\n"
    )
    deployer = subprocess.Popen(
        [sys.executable, "-c", code, str(project.root), str(served)], stdout=subprocess.PIPE, text=True
    )
    assert deployer.stdout is not None
    assert deployer.stdout.readline() == "asked\n"
    weights = str((served / "releases").resolve()).encode()
    assert len(running(weights)) == 1
    deployer.send_signal(signal.SIGKILL)
    deployer.wait()
    deployer.stdout.close()
    deadline = time.monotonic() + 60
    while running(weights) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(weights) == []
    assert not (served / "current").exists()
    deploy(Project.from_parts(project, Settings()), served)
    assert check_release(project, served / "current").artifact_name == "gguf/f32"
