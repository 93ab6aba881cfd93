"""Semantic similarity of answers and references: cosine of sentence vectors of one encoder, without a download.

The encoder is a directory on this machine (evaluate.embedding_model), or the base as in training, whose mean hidden
states serve as vectors. It is the same for every scored model. Vectors of a language model point in similar directions
whatever the text, so the figure has the mean similarity of unrelated references as its chance level.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ratchet.errors import SettingsError, first_line
from ratchet.evaluation.evaluator import EvaluationResult
from ratchet.evaluation.metrics import mean_metric
from ratchet.models.device import Model
from ratchet.storage import digests
from ratchet.storage.records.evaluation import SampleScore

NAME = "semantic_similarity"
UNIT = "cosine, mean of samples"
MAX_TOKENS = 512
"""Longer texts are cut to this number of tokens; encoders were trained on no more."""
BATCH_ROWS = 16
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class TextEncoder:
    """A model that turns texts into vectors of length 1."""

    model: Model
    tokenizer: Any
    uses_first_token: bool = False
    """Whether the vector is that of the first token; otherwise the mean over all tokens."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return a vector for each text; zeros for a text without tokens."""
        with torch.inference_mode():
            return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> Vectors:
        unique = sorted(set(texts), key=lambda text: (len(text), text))
        vectors: dict[str, Vectors] = {}
        for start in range(0, len(unique), BATCH_ROWS):
            batch = unique[start : start + BATCH_ROWS]
            ids = [list(ids)[:MAX_TOKENS] for ids in self.tokenizer(batch, verbose=False)["input_ids"]]
            longest = max(1, *map(len, ids))
            padded = torch.tensor([[*row, *[self.tokenizer.pad_token_id or 0] * (longest - len(row))] for row in ids])
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
            device = self.model.device
            # The inner model: without the head, whose logits would take gigabytes.
            outputs = self.model.base_model(input_ids=padded.to(device), attention_mask=mask.to(device))
            states = outputs.last_hidden_state.float().cpu()
            weights = mask.unsqueeze(-1).float()
            sums = states[:, 0] if self.uses_first_token else (states * weights).sum(1) / weights.sum(1).clamp(min=1)
            lengths = torch.linalg.vector_norm(sums, dim=1, keepdim=True).clamp(min=1e-12)
            vectors |= dict(zip(batch, (sums / lengths).numpy(), strict=True))
        return np.stack([vectors[text] for text in texts])


def load_encoder(directory: Path, device: torch.device) -> TextEncoder:
    """Load an encoder, as sentence-transformers or transformers save it. Raises SettingsError if that fails."""
    from transformers import AutoModel, AutoTokenizer

    uses_first_token = read_uses_first_token(directory)
    try:
        model = AutoModel.from_pretrained(directory, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"evaluate.embedding_model: {directory} cannot be loaded ({first_line(error)}); name a directory with "
            "config.json, model.safetensors and a tokenizer"
        ) from None
    return TextEncoder(model.to(device).eval(), tokenizer, uses_first_token)


def read_uses_first_token(directory: Path) -> bool:
    """Return how sentence-transformers pools the tokens of this model. Raises SettingsError for other ways."""
    if not (directory / "config.json").is_file():
        raise SettingsError(f"evaluate.embedding_model: found no config.json in {directory}; name a model's directory")
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return False
    modes = {key for key, value in json.loads(path.read_bytes()).items() if key.startswith("pooling_mode_") and value}
    if modes not in ({"pooling_mode_mean_tokens"}, {"pooling_mode_cls_token"}):
        raise SettingsError(
            f"evaluate.embedding_model: {path}: found {', '.join(sorted(modes)) or 'no mode'}; expected either "
            "pooling_mode_mean_tokens or pooling_mode_cls_token"
        )
    return modes == {"pooling_mode_cls_token"}


def describe_encoder(directory: Path | None, base_digest: str) -> str:
    """Return the digest of an encoder, for the contract."""
    if directory is None:
        return f"base {base_digest}"
    read_uses_first_token(directory)
    return digests.hash_tree(
        directory, sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    )


def add_similarity(
    results: Mapping[Any, EvaluationResult], ids: Sequence[str], expected: Sequence[str], encoder: TextEncoder
) -> None:
    """Add the metric to the results of every model."""
    references = encoder.encode(expected)
    # Each reference is compared with the next one that differs in its text, which is unrelated.
    others = [
        next((k % len(expected) for k in range(i + 1, i + len(expected)) if expected[k % len(expected)] != text), None)
        for i, text in enumerate(expected)
    ]
    unrelated = [float(references[i] @ references[k]) for i, k in enumerate(others) if k is not None]
    chance = float(np.mean(unrelated)) if unrelated else None
    for result in {id(result): result for result in results.values()}.values():
        texts = [answer for row in result.answers for answer in row]
        vectors, size = encoder.encode(texts), len(result.answers[0])
        values = [
            float((vectors[size * i : size * (i + 1)] @ reference).mean()) for i, reference in enumerate(references)
        ]
        metric = mean_metric(values, "higher", UNIT).model_copy(update={"chance": chance})
        result.add_metric(NAME, metric, [SampleScore(id=key, value=v) for key, v in zip(ids, values, strict=False)])
