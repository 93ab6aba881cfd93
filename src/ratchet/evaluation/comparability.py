"""The contract: everything that could make two models' scores incomparable, by name, so that a difference can be named.

Scores move with the type of numbers, the rows of a batch and the kernels of a library (EleutherAI/lm-evaluation-harness
issues 704, 1625, 2851), and a task's data can change under its name. What is equal here may be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from ratchet.config.evaluation import Form
from ratchet.config.schema import Settings
from ratchet.data import tokenization
from ratchet.evaluation import harness
from ratchet.evaluation.rows import TestRows
from ratchet.models import loading
from ratchet.storage import digests
from ratchet.storage.records.data import DatasetCard

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "lm_eval")
OWN = "each model's own"


@dataclass(frozen=True)
class NumericsSpec:
    """How a model computes here: what its scores depend on beside its weights and what it is asked."""

    form: Form
    weights: str
    """How the weights are held, e.g. `nf4+dq uint8` or `float32`."""
    dtype: str
    device: str
    threads: int
    batch_rows: int
    versions: Mapping[str, str]

    @classmethod
    def of(cls, form: Form, settings: Settings, device: torch.device, batch_rows: int) -> "NumericsSpec":
        """Of this machine and these settings."""
        dtype = settings.train.compute_dtype if form == "adapter" else settings.export.dtype
        return cls(
            form=form,
            weights=settings.train.base_form if form == "adapter" else settings.export.dtype,
            dtype=str(loading.pick_dtype(dtype, device)).removeprefix("torch."),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            threads=torch.get_num_threads(),
            batch_rows=batch_rows,
            versions={name: version(name) for name in LIBRARIES},
        )

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "versions": dict(self.versions)}


def comparison_terms(
    settings: Settings,
    card: DatasetCard,
    rows: TestRows,
    general_text: str,
    tasks: Mapping[str, str],
) -> dict[str, Any]:
    """What is the same for every model and form: what they are asked.

    Args:
        tasks: fingerprint of each local harness task, as it is now.
    """
    asked = settings.evaluate.model_dump(mode="json", exclude={"forms", "quantization_rows", "latency_rows", "judge"})
    return {
        "data": card.digest,
        "test_rows": digests.hash_json(rows.ids),
        "fields": card.fields_digest,
        "general_text": digests.hash_bytes(general_text.encode()),
        "settings": asked,
        "tasks": dict(tasks),
        "fewshot_seed": harness.FEWSHOT_SEED,
    }


def template_terms(tokenizer: Any, rows: TestRows, ends: Sequence[int]) -> dict[str, Any]:
    """How a model is asked: template, ends of an answer, tokens of the first prompt (a doubled BOS shows there)."""
    first = tokenization.encode_prompt(tokenizer, rows.conversations[0].question)
    return {
        "chat_template": digests.hash_bytes(str(tokenizer.chat_template).encode()),
        "ends": [tokenizer.convert_ids_to_tokens(end) for end in ends],
        "first_prompt": digests.hash_json(first),
        "add_bos": bool(first) and first[0] == tokenizer.bos_token_id,
    }
