"""Generations with answers that a test provides. The production code writes prompts, ledger, result, output and
card."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.generate import Generate
from ratchet.config.select import Select
from ratchet.config.settings import Settings
from ratchet.inference import output
from ratchet.inference.output import AnswerLedger
from ratchet.inference.prompts import PromptSource
from ratchet.inference.spec import GenerationAnswer, GenerationPaths, GenerationSpec, ModelIdentity
from ratchet.storage.layout import ProjectLayout

Said = str | tuple[str, dict[str, Any]]
"""Text of an answer, optionally with other fields of Answer."""


def settings_of(select: dict[str, Any] | None = None, **generate: Any) -> Settings:
    """Return settings with these sections."""
    return Settings(select=Select.model_validate(select or {}), generate=Generate.model_validate(generate))


def project(root: Path, settings: Settings) -> ProjectLayout:
    """Create a project without data or base."""
    layout = ProjectLayout(root)
    layout.raw.mkdir(parents=True, exist_ok=True)
    layout.experiments.mkdir(exist_ok=True)
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    return layout


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def generation(
    layout: ProjectLayout,
    settings: Settings,
    prompts: Path,
    answers: Callable[[str, int], Said],
    target: Path,
    model: str = "a",
) -> Path:
    """Write the output of a generation. `answers(id of the prompt, sample)` provides each answer."""
    source = PromptSource(prompts, settings)
    count, prompts_digest = source.measure()
    spec = GenerationSpec(
        generate=settings.generate.answer_settings(), prompts_digest=prompts_digest,
        model=ModelIdentity(kind="merged", digest=model * 64, weight_format="float32"), template_digest="",
    )  # fmt: skip
    paths = GenerationPaths(layout.generations / spec.run_id)
    source.seal(paths.prompts, count)
    samples = settings.generate.samples
    ledger = AnswerLedger(paths, 1, count * samples, lambda text: None)
    for number, prompt in enumerate(source.prompts()):
        for sample in range(samples):
            said = answers(prompt.id, sample)
            text, other = said if isinstance(said, tuple) else (said, {})
            values = {"finish": "stop", "prompt_tokens": 3, "tokens": 2, "mean_log_probability": -0.5, **other}
            ledger.add(GenerationAnswer(index=number * samples + sample, text=text, **values))
    ledger.seal(max(1, count * samples))
    output.seal_result(paths, spec, ledger)
    ledger.close()
    output.write_output(paths, target, f"models/{model}", 0)
    return target


def refused(layout: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> str:
    """Run `ratchet prepare`, check that it refuses the project and writes no data, and return its message."""
    assert main(["--project", str(layout.root), "prepare"]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert not layout.data.exists()
    return message
