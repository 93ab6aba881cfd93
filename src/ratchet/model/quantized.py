"""Load a causal language model with its linear layers in 4 bits (bitsandbytes), on GPU or CPU."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from ratchet.config_train import Train
from ratchet.errors import BaseModelError, SettingsError

disable_progress_bar()

Model = Any
"""A transformers or peft model; their own types say no more."""


def use_threads(count: int) -> None:
    """Set the CPU threads of torch to `machine.threads`; 0 leaves torch's choice, one for each physical core."""
    if count:
        torch.set_num_threads(count)


def pick_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of `machine.device`. Raises SettingsError when it asks for a GPU and there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError("machine.device: cuda, but torch finds no GPU; set auto or cpu, or install a CUDA build")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The type of matrix products. `auto`: bfloat16 where the GPU computes in it, else float32.

    Without bfloat16 instructions a CPU is half as fast in bfloat16 as in float32 (measured on a 10M model).
    """
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]


def load(path: Path, settings: Train, device: torch.device) -> Model:
    """The frozen base as it is trained against, in evaluation mode.

    Raises:
        BaseModelError: the directory holds no model that transformers can load.
        SettingsError: the model has no attention of the kind that `train.attention` asks for.
    """
    dtype = pick_dtype(settings.compute_dtype, device)
    quantization = None
    if settings.quantization == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=settings.double_quantization,
            bnb_4bit_compute_dtype=dtype,
        )
    model = _from_directory(
        path, dtype, device, quantization, None if settings.attention == "auto" else settings.attention
    )
    _keep_layout(model)
    return model


def _keep_layout(model: Model) -> None:
    """Stop 4-bit layers from repacking themselves at their first use in evaluation mode.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 then converts the weights in place to a layout whose kernel rounds to
    bfloat16 and has no gradient: training after the first validation would go on without an error, and wrongly.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def load_plain(path: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """A model without quantisation, in evaluation mode, with the attention that transformers holds best.

    Raises:
        BaseModelError: the directory holds no model that transformers can load.
    """
    return _from_directory(path, dtype, device, None, None)


def _from_directory(
    path: Path, dtype: torch.dtype, device: torch.device, quantization: Any, attention: str | None
) -> Model:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype,
            device_map={"": device},
            quantization_config=quantization,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if attention and "attn_implementation" in str(error):
            raise SettingsError(f"train.attention: {attention}, but the model of {path} has none; set eager") from error
        raise BaseModelError(f"{path}: transformers cannot load it: {str(error).splitlines()[0]}") from error
    model.config.use_cache = False
    return model.eval()
