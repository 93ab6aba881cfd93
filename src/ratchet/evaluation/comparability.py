"""Contracts: everything that can make two models' scores incomparable, by name, so that messages can name a difference.

Scores change with the number type, the batch size and the kernels of a library (EleutherAI/lm-evaluation-harness issues
704, 1625, 2851), and the data of a task can change while its name stays. Scores under equal contracts are comparable.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from ratchet.config.evaluate import BUILTIN_METRICS, ModelFormat
from ratchet.config.extensions import describe_extension
from ratchet.config.settings import Settings
from ratchet.data import tokenization
from ratchet.evaluation import harness
from ratchet.evaluation.rows import TestRows
from ratchet.models import cpu_products, loading
from ratchet.models.cpu_kernels import library
from ratchet.storage import digests
from ratchet.storage.records.data import DatasetCard

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
HARNESS = "lm_eval"
"""Library whose version matters only to settings that use it: tasks of the harness, the metric ifeval."""
OWN_TEMPLATE = "each model's own"
"""Template of a contract under which every model uses its own chat template."""


def describe_numerics(
    model_format: ModelFormat, settings: Settings, device: torch.device, batch_rows: int
) -> dict[str, Any]:
    """Describe how a model in this format computes on this machine: all that scores depend on but weights and inputs.

    `weights` is the format of the weights in memory (`nf4+dq uint8`, `float32`). `products` is the library of the
    CPU's float32 products, if it is not torch's default (models.cpu_products); models in 16 bits have some too.
    `kernels` are the instructions of Ratchet's own kernels (models.cpu_kernels), if they are used.
    `versions` are those of LIBRARIES and, if the settings use the harness, of HARNESS.
    """
    tasks, is_adapter = settings.evaluate.harness, model_format == "adapter"
    uses_harness = tasks.tasks or tasks.builtin_tasks or "ifeval" in settings.evaluate.metrics
    libraries = (*LIBRARIES, HARNESS) if uses_harness else LIBRARIES
    dtype = settings.train.compute_dtype if is_adapter else settings.export.dtype
    uses_onednn = device.type == "cpu" and cpu_products.is_onednn_faster()
    compute_dtype = loading.pick_dtype(dtype, device)
    uses_kernels = device.type == "cpu" and compute_dtype == torch.float32 and library.load_kernels().is_available
    return {
        "model_format": model_format,
        "weights": settings.train.base_weight_format if is_adapter else settings.export.dtype,
        "dtype": str(compute_dtype).removeprefix("torch."),
        "device": loading.get_gpu_name(device) or "cpu",
        **({"products": "oneDNN"} if uses_onednn else {}),
        **({"kernels": library.load_kernels().text} if uses_kernels else {}),
        "threads": torch.get_num_threads(),
        "batch_rows": batch_rows,
        "versions": {name: version(name) for name in libraries},
    }


def comparison_terms(
    settings: Settings,
    card: DatasetCard,
    rows: TestRows,
    general_text: str,
    tasks: Mapping[str, str],
    encoder: str | None = None,
) -> dict[str, Any]:
    """Return the terms of the contract that are the same for every model: the inputs.

    `tasks` has the current digest of each local harness task, `encoder` the digest of the encoder of
    semantic_similarity.
    """
    evaluate = settings.evaluate.model_dump(
        mode="json", exclude={"formats", "quantization_rows", "latency_rows", "judge", "safety"}
    )
    # At their defaults, settings that came later are left out, so that earlier contracts keep their digests.
    for name in ("perturbations", "embedding_model"):
        if not evaluate[name]:
            del evaluate[name]
    extensions = [name for name in settings.evaluate.metrics if name not in BUILTIN_METRICS]
    packages = [describe_extension("ratchet.metrics", name) for name in extensions]
    return {
        **({"metric_packages": packages} if packages else {}),
        **({"encoder": encoder} if encoder else {}),
        "data": card.digest,
        "test_rows": digests.hash_json(rows.ids),
        "fields": card.fields_digest,
        "general_text": digests.hash_bytes(general_text.encode()),
        "settings": evaluate,
        "tasks": dict(tasks),
        "fewshot_seed": harness.FEWSHOT_SEED,
    }


def template_terms(tokenizer: Any, rows: TestRows, end_tokens: Sequence[int]) -> dict[str, Any]:
    """Return the terms of a model's prompts: template, end tokens, and the first prompt (which shows a doubled BOS)."""
    first = tokenization.encode_prompt(tokenizer, rows.conversations[0].context)
    return {
        "chat_template": digests.hash_bytes(str(tokenizer.chat_template).encode()),
        "ends": [tokenizer.convert_ids_to_tokens(token) for token in end_tokens],
        "first_prompt": digests.hash_json(first),
        "add_bos": bool(first) and first[0] == tokenizer.bos_token_id,
    }
