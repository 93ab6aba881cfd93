"""The form in which every adapter is kept: a LoRA or DoRA of peft's; the files depend on nothing but the weights."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import AdaLoraConfig, LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratchet.errors import DamagedError
from ratchet.models import lora_weights as thin
from ratchet.models.device import Model
from ratchet.models.lora_weights import ADAPTER, Factors, adapted_layers, first_factors
from ratchet.storage import files

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
"""peft's, of every tensor's name."""


def write(model: Model, directory: Path, base_digest: str) -> None:
    """Write the adapter of a model in training, or of a loaded one."""
    files.make_directory(directory)
    own: LoraConfig = model.peft_config[ADAPTER]
    layers = dict(adapted_layers(model))
    if isinstance(own, AdaLoraConfig) or any(first_factors(layer) for layer in layers.values()):
        tensors, changes = _folded(model, own)
    else:
        tensors, changes = tensors_of(model), {}
        changes["target_modules"] = [name for name, one in layers.items() if not isinstance(one, ParamWrapper)]
    changes["target_modules"] = _short(changes["target_modules"], model)
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(ready, directory / WEIGHTS, metadata={"format": "pt"})
    files.write_json(directory / CONFIG, _document(own, changes, base_digest))


def read(directory: Path) -> dict[str, Tensor]:
    """The saved tensors, by peft's names. Raises DamagedError when there is no readable file of them."""
    try:
        tensors: dict[str, Tensor] = load_file(directory / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{directory / WEIGHTS}: cannot be read ({error}); train again") from None
    if not tensors:
        raise DamagedError(f"{directory / WEIGHTS}: holds no tensors; train again")
    return tensors


def tensors_of(model: Model) -> dict[str, Tensor]:
    """The tensors of a LoRA or DoRA by the names under which peft saves them."""
    # Embeddings are frozen but for the rows of new tokens; "auto" would look for the base's config on the hub. Of a
    # state that it takes itself, peft 0.21 takes every bias of the matrices for a piece of something larger, and warns.
    found: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=model.state_dict(), save_embedding_layers=False
    )
    return found


def pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """A rank or alpha pattern that matches just these names."""
    return {f"^{re.escape(name)}": value for name, value in values.items()}


def _folded(model: Model, own: LoraConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of the plain LoRA that does what PiSSA's or AdaLoRA's matrices do."""
    every = list(thin.factors(model))
    updates = [one for one in every if one.rank] or [_nothing(every[0])]
    tensors = {}
    for one in updates:
        tensors[f"{_PREFIX}{one.name}.lora_A.weight"] = one.a
        tensors[f"{_PREFIX}{one.name}.lora_B.weight"] = one.b
    for name, _, rows in thin.token_rows(model):
        module = name.removesuffix(".weight")
        tensors[f"{_PREFIX}{module}.token_adapter.trainable_tokens_delta"] = rows.float()
    rank = max(one.rank for one in updates)
    stabilised = own.use_rslora
    alphas = {one.name: one.scale * (math.sqrt(one.rank) if stabilised else one.rank) for one in updates}
    alpha = next(alphas[one.name] for one in updates if one.rank == rank)
    return tensors, {
        "target_modules": [one.name for one in updates],
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": stabilised,
        "rank_pattern": pattern({one.name: one.rank for one in updates if one.rank != rank}),
        "alpha_pattern": pattern({name: value for name, value in alphas.items() if value != alpha}),
    }


def _nothing(one: Factors) -> Factors:
    """An update of rank 1 that is zero: peft loads no adapter without any layer."""
    a, b = one.a.new_zeros(1, one.a.shape[1]), one.b.new_zeros(one.b.shape[0], 1)
    return Factors(one.name, one.layer, a, b, one.scale)


def _short(names: list[str], model: Model) -> list[str]:
    """The last parts of the names if those mean just these modules, as people write them; else the names."""
    leaves = {name.rsplit(".", 1)[-1] for name in names}
    plain = (path for path, _ in model.get_base_model().named_modules() if "base_layer" not in path.split("."))
    meant = [path for path in plain if path.rsplit(".", 1)[-1] in leaves]
    return sorted(leaves) if sorted(meant) == sorted(names) else sorted(names)


def _document(own: LoraConfig, changes: dict[str, Any], base_digest: str) -> dict[str, Any]:
    """adapter_config.json, of a plain LoRA's entries only."""
    made = LoraConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base_digest,
        lora_dropout=own.lora_dropout,
        fan_in_fan_out=own.fan_in_fan_out,
        use_dora=own.use_dora,
        trainable_token_indices=own.trainable_token_indices,
        target_parameters=sorted(own.target_parameters) if own.target_parameters else None,
        **{key: getattr(own, key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
        | changes,
    )
    # peft keeps sets: their order changes from process to process.
    document: dict[str, Any] = json.loads(json.dumps(made.to_dict(), default=sorted))
    return document
