"""Loads a causal language model on GPU or CPU, with its linear layers in 4 bits (bitsandbytes) or unquantized.

In addition to the model, loading needs host memory for one tensor at a time, also for a model on a GPU: the tensor as
stored, its copy in the dtype of the model, and the memory that bitsandbytes needs to quantize it on a CPU (12 bytes per
weight). Without quantization, transformers reads with up to four threads, so up to four tensors are in memory at once.
"""

from pathlib import Path

import torch
from bitsandbytes.nn import Linear4bit
from transformers import BitsAndBytesConfig, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, SettingsError, first_line
from ratchet.models import base_model, cpu_products, model_spec, vocabulary, weights
from ratchet.models import device as device_probe
from ratchet.models.device import Model, get_gpu_name, pick_device, pick_dtype, require_dtype, use_threads
from ratchet.models.memory import parameters
from ratchet.models.tiled_linear import TiledLinear4bit
from ratchet.storage.progress import report_step
from ratchet.storage.records.base import BaseCard

__all__ = [
    "Model", "get_gpu_name", "load", "load_plain", "pick_device", "pick_dtype", "require_dtype", "use_threads",
]  # fmt: skip

disable_progress_bar()


@report_step("loading the model")
def load(
    path: Path, card: BaseCard | None, settings: Train, device: torch.device, storage_device: torch.device | None = None
) -> Model:
    """Load the base as training uses it: frozen, in evaluation mode, with an embedding row for every token.

    Args:
        card: base card, with the added tokens and whether custom code may run; None: no added tokens, no custom code.
        settings: section train, of which quantization, dtypes and attention are used.
        storage_device: device onto which the weights are loaded; None: `device`.

    Raises:
        BaseModelError: the directory holds no causal model, or some weights are missing.
        SettingsError: the model does not support `train.attention`; its files are quantized differently from section
            `train`; or the device does not support bitsandbytes or the compute dtype.
    """
    require_dtype(settings.compute_dtype, device)
    dtype = pick_dtype(settings.compute_dtype, device)
    stored = base_model.detect_stored_quantization(base_model.read_config(path), str(path))
    if stored is not None:
        base_model.require_same_quantization(stored, settings, str(path))
    spec = model_spec.load(path, card.remote_code if card else False)
    spec.require_causal()
    weights.check_stored_tensors(path, spec, stored)
    try:
        meta_model = spec.model(dtype, settings.attention)
    except ValueError as error:  # its text lists the supported kinds of attention
        raise SettingsError(
            f"train.attention: {settings.attention}: not supported by the model of {path}; set eager"
        ) from error
    quantization = None
    if settings.quantization != "none":
        names = set(parameters.list_quantized_modules(meta_model))
        if not names:
            raise SettingsError(
                f"train.quantization: {settings.quantization}: transformers cannot quantize any layer of a "
                f"{spec.class_name}, because its linear layers have a custom class; set train.quantization: none "
                "(plain LoRA)"
            )
        widths = {layer.inputs for layer in model_spec.list_layers(meta_model) if layer.name in names}
        if fault := device_probe.find_four_bit_fault(device, widths, settings.quantization):
            raise SettingsError(
                f"train.quantization: {settings.quantization}: {fault}; set train.quantization: none (plain LoRA), or "
                "install a bitsandbytes build for this device"
            )
        if stored is None:
            quantization = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=settings.quantization,
                bnb_4bit_use_double_quant=settings.double_quantization,
                bnb_4bit_quant_storage=settings.quantization_storage,
                bnb_4bit_compute_dtype=dtype,
            )
    model = _read_weights(path, meta_model, dtype, storage_device or device, quantization)
    if stored is not None:
        # For a 4-bit checkpoint transformers 5.23 treats the `weight` of every module, even of a norm, as packed, and
        # leaves it in the dtype of the file. Biases are cast, so weight and bias would have different dtypes.
        dtypes = {name: parameter.dtype for name, parameter in meta_model.named_parameters()}
        for name, parameter in model.named_parameters():
            if not hasattr(parameter, "quant_state"):
                parameter.data = parameter.data.to(dtypes[name])
    if settings.quantization != "none":
        _require_forward(model, settings, spec.class_name)
    if card is not None:
        tokenizer = base_model.open_tokenizer(path, card.remote_code)
        pieces = vocabulary.add_tokens(tokenizer, card.added_tokens)
        vocabulary.grow_embeddings(model, vocabulary.required_rows(tokenizer), pieces)
    return model.requires_grad_(False)


def load_plain(path: Path, dtype: torch.dtype, device: torch.device, remote_code: bool = False) -> Model:
    """Load an unquantized model: frozen, in evaluation mode, with the attention that transformers prefers.

    Raises BaseModelError if the directory holds no causal model, some weights are missing, or they are quantized.
    """
    if base_model.detect_stored_quantization(base_model.read_config(path), str(path)) is not None:
        raise BaseModelError(f"{path}: the stored weights are quantized; use the model from before it was quantized")
    spec = model_spec.load(path, remote_code)
    spec.require_causal()
    weights.check_stored_tensors(path, spec, None)
    return _read_weights(path, spec.model(dtype), dtype, device, None).requires_grad_(False)


def _require_forward(model: Model, settings: Train, name: str) -> None:
    """Run two tokens through the model. Some models (Mamba) read a layer's weights directly, which fails in 4 bits.

    Raises SettingsError if the forward pass fails.
    """
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if device_probe.is_device_error(error):
            raise
        raise SettingsError(
            f"train.quantization: {settings.quantization}: {name} does not compute with layers in 4 bits "
            f"({first_line(error)}); set train.quantization: none (plain LoRA)"
        ) from error


def _read_weights(
    path: Path, meta_model: Model, dtype: torch.dtype, device: torch.device, quantization: BitsAndBytesConfig | None
) -> Model:
    """Load the weights of a directory into a model like `meta_model`, with its dtypes and the given quantization."""
    config = meta_model.config
    if getattr(config, "quantization_config", None):
        config.quantization_config["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
    cpu_products.use_onednn()  # as in workers and commands, so that models compute the same bits in every process
    reader = weights.WeightReader(path)
    try:
        with model_spec.use_plain_linears(config):
            # The path is not passed, because transformers would then map the files into memory, and load adapters and
            # functions from the same directory.
            model = type(meta_model).from_pretrained(
                None,
                config=config,
                state_dict=reader.tensors(),
                dtype=dtype,
                device_map={"": device},
                quantization_config=quantization,
                attn_implementation=config._attn_implementation,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if device_probe.is_device_error(error):
            raise
        raise BaseModelError(f"{path}: transformers cannot load it: {first_line(error)}") from error
    weights.trim_heap()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On a CPU with AVX512-BF16, the first use in evaluation mode makes bitsandbytes 0.50 convert the weights in
            # place to a layout whose kernel rounds to bfloat16 and has no gradient. After the first validation,
            # training would continue without an error, but with wrong results.
            module.support_avx512bf16_for_cpu = False
            if device.type == "cpu":
                module.__class__ = TiledLinear4bit
    if model.can_generate() and (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
    model.config.use_cache = False
    return model.eval()
