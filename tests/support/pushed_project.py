"""A tiny project whose model the gate accepts, ready for `ratchet push`."""

from pathlib import Path

import tiny_project
from ratchet.config.evaluate import Evaluate, SafetySettings
from ratchet.config.export import Export, GgufSettings
from ratchet.config.gate import AtLeastRule, Gate
from ratchet.config.settings import Settings
from ratchet.stages import evaluate, export, gate
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout

SETTINGS: Settings = tiny_project.SETTINGS.model_copy(
    update={
        "train": tiny_project.TRAIN.model_copy(update={"quantization": "none"}),
        "export": Export(
            task_rows=8, parity_rows=4, max_shard_size=100_000, gguf=GgufSettings(types=("q8_0",)),
            data_licence="CC-BY-4.0",
        ),
        "evaluate": Evaluate(max_new_tokens=4, safety=SafetySettings(injections="bundled")),
        "gate": Gate(rules=(AtLeastRule(rule="at_least", metric="accuracy", value=0.0),)),
    }
)  # fmt: skip


def accepted(root: Path, settings: Settings = SETTINGS) -> ProjectLayout:
    """Create a project with an adapter of random numbers and completed stages up to gate, without MLflow."""
    layout = tiny_project.prepared(root, settings)
    tiny_project.adapted(layout, settings)
    project = Project.from_parts(layout, settings)
    for stage in (export, evaluate, gate):
        log = getattr(stage, "_log_to_mlflow", None)
        try:
            if log is not None:
                stage._log_to_mlflow = lambda *_: None  # type: ignore[union-attr]
            getattr(stage, stage.__name__.rsplit(".", 1)[-1])(project)
        finally:
            if log is not None:
                stage._log_to_mlflow = log  # type: ignore[union-attr]
    return layout
