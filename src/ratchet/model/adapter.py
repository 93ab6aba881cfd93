"""LoRA adapters on a frozen base, through peft: attach, save, load."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from ratchet import files
from ratchet.config_train import Train
from ratchet.errors import BaseModelError, SettingsError
from ratchet.model.quantized import Model


def attach(base: Model, settings: Train, base_digest: str) -> Model:
    """A fresh adapter on `base`, initialised from `settings.seed`; everything else is frozen.

    Raises:
        SettingsError: `train.targets` names modules that the model does not have.
    """
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # peft says int, and takes any number
        lora_dropout=settings.dropout,
        target_modules=targets,
        base_model_name_or_path=base_digest,
    )
    base.name_or_path = base_digest
    torch.manual_seed(settings.seed)
    try:
        model = get_peft_model(base, config)
    except ValueError as error:
        leaves = sorted({name.rsplit(".", 1)[-1] for name, module in base.named_modules() if hasattr(module, "weight")})
        raise SettingsError(
            f"train.targets: {settings.targets}: {str(error).splitlines()[0]}; its modules: {', '.join(leaves)}"
        ) from None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != ("lora_" in name):
            raise RuntimeError(f"{name}: requires_grad is {parameter.requires_grad}; only LoRA matrices may learn")
    return model


def trainable(model: Model) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names and parameters that learn, in a fixed order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def save(model: Model, directory: Path, base_digest: str) -> None:
    """Write the adapter in peft's own format. The same weights give the same bytes, on any machine."""
    # Embeddings are frozen; "auto" would look for the base's config on the hub to find that out.
    model.save_pretrained(str(directory), safe_serialization=True, save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)  # peft's model card template: nothing in it is filled in
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = base_digest
    for key, value in config.items():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            config[key] = sorted(value)  # peft keeps sets: their order changes from process to process
    files.write_json(path, config)


def load(base: Model, directory: Path) -> Model:
    """The saved adapter on a base that was loaded as in training; frozen, in evaluation mode.

    Raises:
        BaseModelError: the adapter does not fit this base.
    """
    try:
        return PeftModel.from_pretrained(base, str(directory), is_trainable=False).eval()
    except (ValueError, RuntimeError) as error:
        raise BaseModelError(f"{directory}: the adapter does not fit this base model: {str(error)[:300]}") from None
