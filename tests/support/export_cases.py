"""Stage export with each format: exported models are executed, errors name their cause, and a failure leaves the old
export complete."""

from collections.abc import Callable
from typing import Any

import pytest

import tiny_project
from ratchet.config.export import Export, GgufSettings, OnnxSettings
from ratchet.config.settings import Settings
from ratchet.stages import export
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ModelBundle

PLAIN = Export(task_rows=12, parity_rows=8)
EVERY = PLAIN.model_copy(
    update={
        "merge_base": "dequantized",
        "gguf": GgufSettings(types=("f32", "q8_0")),
        "onnx": OnnxSettings(types=("fp32", "int8")),
        "data_licence": "CC-BY-4.0",
    }
)


def with_export(wanted: Export, **evaluate: Any) -> Settings:
    changed = tiny_project.SETTINGS.evaluate.model_copy(update=evaluate)
    return tiny_project.SETTINGS.model_copy(update={"export": wanted, "evaluate": changed})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Create a project with an adapter that changes the model's answers."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("forms") / "project")
    tiny_project.adapted(layout)
    return layout


@pytest.fixture
def run(trained: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> Callable[[Settings], ModelBundle]:
    """Return a function that runs stage export without MLflow, which has its own tests."""
    monkeypatch.setattr(export, "_log_to_mlflow", lambda *_: None)

    def exported(settings: Settings) -> ModelBundle:
        export.export(Project.from_parts(trained, settings))
        return ModelBundle.load(trained.bundle)

    return exported
