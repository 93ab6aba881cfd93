"""Stage export with every format: what is written is run, what is wrong is named, and what was there stays whole."""

from collections.abc import Callable
from typing import Any

import pytest

import tiny_project
from ratchet.config.export import Export, Gguf, Onnx
from ratchet.config.schema import Settings
from ratchet.stages import export
from ratchet.storage.layout import Layout
from ratchet.storage.records.export import Bundle

PLAIN = Export(task_rows=12, parity_rows=8)
EVERY = PLAIN.model_copy(
    update={
        "merge_base": "dequantized",
        "gguf": Gguf(types=("f32", "q8_0")),
        "onnx": Onnx(types=("fp32", "int8")),
        "data_licence": "CC-BY-4.0",
    }
)


def with_export(wanted: Export, **evaluate: Any) -> Settings:
    changed = tiny_project.SETTINGS.evaluate.model_copy(update=evaluate)
    return tiny_project.SETTINGS.model_copy(update={"export": wanted, "evaluate": changed})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A project whose adapter is strong enough to show."""
    layout = tiny_project.prepared(tmp_path_factory.mktemp("forms") / "project")
    tiny_project.adapted(layout)
    return layout


@pytest.fixture
def run(trained: Layout, monkeypatch: pytest.MonkeyPatch) -> Callable[[Settings], Bundle]:
    """Stage export without MLflow, which has tests of its own."""
    monkeypatch.setattr(export, "_track", lambda *_: None)

    def exported(settings: Settings) -> Bundle:
        export.export(trained, settings)
        return Bundle.load(trained.bundle)

    return exported
