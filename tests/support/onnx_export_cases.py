"""Export to ONNX: in onnxruntime, the written graph computes the same step as the model, for any length, batch size and
past."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_format
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from onnx_models import save
from ratchet.exporters import onnx

WINDOW = 16
SHORT = 32
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + place for place in range(8)],
}  # fmt: skip
"""Phi-3's two sets of rotary frequencies. The last position of a piece determines the set."""
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "llama-tied": {"num_hidden_layers": 1, "dtype": torch.bfloat16},
    "mistral": {"num_hidden_layers": 1, "sliding_window": WINDOW},
    "qwen2": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": WINDOW},
    "phi3": {"num_hidden_layers": 1, "original_max_position_embeddings": SHORT, "rope_parameters": LONG},
    "gpt2": {"n_layer": 1},
}
TOLD: dict[Path, list[tuple[str, int, int]]] = {}
"""Arguments of the progress calls of each export."""


def written(source: Path, target: Path, type: Any = "fp32") -> Path:
    told = TOLD.setdefault(target, [])
    onnx.write_onnx(source, target, type, lambda *about: told.append(about))
    return target


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that exports each family once and returns the model directory and its fp32 export."""
    root = tmp_path_factory.mktemp("onnx")
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            source = save(family, root / family / "hf", **LAYERS[family])
            if family == "gpt2":
                without_prefix(source / "model.safetensors")
            made[family] = source, written(source, root / family / "onnx")
        return made[family]

    return get


def without_prefix(path: Path) -> None:
    """Rename the tensors as in GPT-2's own checkpoint, which uses other names than the class."""
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


class Session:
    """Runs model.onnx with numpy inputs."""

    def __init__(self, directory: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.run = onnxruntime.InferenceSession(
            str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"]
        ).run
        graph = onnx_format.load(str(directory / "model.onnx"), load_external_data=False).graph
        self.past = {
            one.name: tuple(part.dim_value for part in one.type.tensor_type.shape.dim)
            for one in graph.input
            if one.name.startswith("past_key_values.")
        }

    def logits(self, ids: Any, mask: Any, positions: Any, cuts: tuple[int, ...]) -> Any:
        """Return the logits of complete rows that are fed piece by piece. Each piece uses the cache of the earlier
        pieces."""
        past = {name: np.zeros((len(ids), s[1], 0, s[3]), np.float32) for name, s in self.past.items()}
        found = []
        for start, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
            fed = {
                "input_ids": ids[:, start:end],
                "attention_mask": mask[:, :end],
                "position_ids": positions[:, start:end],
            }
            logits, *present = self.run(None, fed | past)
            past = dict(zip(past, present, strict=True))
            found.append(logits)
        return np.concatenate(found, axis=1)


def rows(batch: int, length: int, padding: int) -> tuple[Any, Any, Any]:
    """Return token ids, attention mask and positions. The first row is padded on the left."""
    ids = np.random.default_rng(length).integers(4, 300, (batch, length))
    mask = np.ones_like(ids)
    mask[0, :padding] = 0
    ids[0, :padding] = 0
    return ids, mask, np.maximum(mask.cumsum(axis=1) - 1, 0)
