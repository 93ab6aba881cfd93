"""Load a causal language model with its linear layers in 4 bits (bitsandbytes), or as it is, on GPU or CPU.

Of the host's memory loading takes, beside what the model will hold there, one tensor at a time: as it is stored, in
the type it is loaded in, and what bitsandbytes needs to quantise it on a CPU (12 bytes a weight). Without quantisation
transformers reads with up to four threads, so as many tensors are under way at once. On a GPU the host holds those.
"""

from pathlib import Path

import torch
from transformers import BitsAndBytesConfig, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, SettingsError, first_line
from ratchet.models import base_model, model_spec, prequantized, vocabulary, weights
from ratchet.models import device as device_probe
from ratchet.models.device import Model, pick_device, pick_dtype, require_dtype, use_threads
from ratchet.models.memory import parameters
from ratchet.storage.records.base import BaseCard

__all__ = [
    "Model", "load", "load_plain", "pick_device", "pick_dtype", "require_dtype", "use_threads",
]  # fmt: skip

disable_progress_bar()


def load(
    path: Path, card: BaseCard | None, settings: Train, device: torch.device, place: torch.device | None = None
) -> Model:
    """The frozen base as it is trained against, in evaluation mode, with a row for every token.

    Args:
        path: its directory.
        card: says which tokens are added and whether code of its own may run; without one, none are, and none may.
        settings: quantisation, types and attention.
        device: where it is to compute.
        place: where it is to lie meanwhile; None: there.

    Raises:
        BaseModelError: the directory holds no causal model, or not all of its weights.
        SettingsError: the model has no attention of the kind that `train.attention` asks for; its files are quantised
            otherwise than `train` says; the device lacks bitsandbytes or the type that it is to compute in.
    """
    require_dtype(settings.compute_dtype, device)
    dtype = pick_dtype(settings.compute_dtype, device)
    stored = prequantized.detect(base_model.read_config(path), str(path))
    if stored is not None:
        prequantized.require_same_quantization(stored, settings, str(path))
    plan = model_spec.load(path, card.remote_code if card else False)
    plan.require_causal()
    weights.check_stored_tensors(path, plan, stored)
    try:
        skeleton = plan.model(dtype, settings.attention)
    except ValueError as error:  # transformers lists what the class has
        raise SettingsError(
            f"train.attention: {settings.attention}, but the model of {path} has none; set eager"
        ) from error
    if settings.quantization != "none" and not parameters.list_quantized_modules(skeleton):
        raise SettingsError(
            f"train.quantization: {settings.quantization}, but transformers stores no layer of a {plan.class_name} in "
            "4 bits: its linear layers are of a class of their own; set train.quantization: none (plain LoRA)"
        )
    if settings.quantization != "none":
        _require_four_bits(skeleton, settings, device)
    model = _read_weights(
        path, skeleton, dtype, place or device, None if stored else _quantization_config(settings, dtype)
    )
    if stored is not None:
        _cast_unquantized(model, skeleton)
    _keep_layout(model)
    if settings.quantization != "none":
        _require_forward(model, settings, plan.class_name)
    if card is not None:
        tokenizer = base_model.open_tokenizer(path, card.remote_code)
        pieces = vocabulary.add_tokens(tokenizer, card.added_tokens)
        vocabulary.grow_embeddings(model, vocabulary.required_rows(tokenizer), pieces)
    return model.requires_grad_(False)


def load_plain(path: Path, dtype: torch.dtype, device: torch.device, remote_code: bool = False) -> Model:
    """A model without quantisation, frozen, in evaluation mode, with the attention that transformers holds best.

    Raises:
        BaseModelError: the directory holds no causal model, or not all of its weights, or they are quantised.
    """
    if prequantized.detect(base_model.read_config(path), str(path)) is not None:
        raise BaseModelError(f"{path}: its weights are quantised in its own files; there are no plain ones to load")
    plan = model_spec.load(path, remote_code)
    plan.require_causal()
    weights.check_stored_tensors(path, plan, None)
    return _read_weights(path, plan.model(dtype), dtype, device, None).requires_grad_(False)


def _require_four_bits(skeleton: Model, settings: Train, device: torch.device) -> None:
    """Raises SettingsError unless bitsandbytes reads what it has quantised here: it is tried, width by width."""
    names = set(parameters.list_quantized_modules(skeleton))
    widths = {layer.inputs for layer in model_spec.list_layers(skeleton) if layer.name in names}
    if fault := device_probe.find_four_bit_fault(device, widths, settings.quantization):
        raise SettingsError(
            f"train.quantization: {settings.quantization}: {fault}; set train.quantization: none (plain LoRA), or "
            "install a build of bitsandbytes that is made for this device"
        )


def _require_forward(model: Model, settings: Train, name: str) -> None:
    """Two tokens through the model, for some (Mamba) read a layer's weights themselves, which in 4 bits are others.

    Raises:
        SettingsError: they do not come through.
    """
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise SettingsError(
            f"train.quantization: {settings.quantization}, but {name} does not compute with layers in 4 bits "
            f"({first_line(error)}); set train.quantization: none (plain LoRA)"
        ) from error


def _quantization_config(settings: Train, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    if settings.quantization == "none":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.quantization,
        bnb_4bit_use_double_quant=settings.double_quantization,
        bnb_4bit_quant_storage=settings.quantization_storage,
        bnb_4bit_compute_dtype=dtype,
    )


def _read_weights(
    path: Path, skeleton: Model, dtype: torch.dtype, device: torch.device, wanted: BitsAndBytesConfig | None
) -> Model:
    """The weights of a directory in a model like `skeleton`, of its types; quantised as `wanted` or as they are."""
    config = skeleton.config
    if getattr(config, "quantization_config", None):
        config.quantization_config["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
    reader = weights.WeightReader(path)
    try:
        with model_spec.use_plain_linears(config):
            # No path: transformers would map the files, and load adapters and functions that it finds beside them.
            model = type(skeleton).from_pretrained(
                None,
                config=config,
                state_dict=reader.tensors(),
                dtype=dtype,
                device_map={"": device},
                quantization_config=wanted,
                attn_implementation=config._attn_implementation,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise BaseModelError(f"{path}: transformers cannot load it: {first_line(error)}") from error
    weights.trim_heap()
    if model.can_generate() and (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
    model.config.use_cache = False
    return model.eval()


def _cast_unquantized(model: Model, skeleton: Model) -> None:
    """Give what is not in 4 bits the type that it was to have.

    Of a checkpoint in 4 bits transformers 5.23 leaves `weight` of every module in the type of the file: it takes it for
    packed, also that of a norm. Biases it casts; the two then do not go together.
    """
    wanted = {name: parameter.dtype for name, parameter in skeleton.named_parameters()}
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.to(wanted[name])


def _keep_layout(model: Model) -> None:
    """Stop 4-bit layers from repacking themselves at their first use in evaluation mode.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 then converts the weights in place to a layout whose kernel rounds to
    bfloat16 and has no gradient: training after the first validation would go on without an error, and wrongly.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
