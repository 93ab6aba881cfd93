"""Measures for `ratchet doctor` what a GPU can do (rates by dtype, 4 bits, attention kernels, and the models that fit),
and how fast a CPU computes products by dtype.

Every figure is measured on the device or computed from its memory. No weights are loaded.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.config.units import format_bytes
from ratchet.models import device as device_probe
from ratchet.models import model_spec
from ratchet.models.cpu_kernels import library
from ratchet.models.memory import capacity, forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.training import profiler

SIDE = 4096
"""Rows and columns of the measured products, as wide as the layers of models of 7B parameters."""
CPU_SIDE = 1024
"""Rows and columns of the measured products of a CPU: a few hundredths of a second."""
USEFUL_GAIN = 1.2
"""A CPU must multiply this many times as fast in bfloat16 as in float32 for the setting to be named."""
KERNELS = {"flash": "FLASH_ATTENTION", "memory-efficient": "EFFICIENT_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
ROW_TOKENS = 2048
SHAPES: Mapping[str, tuple[int, int, int, int, int]] = {
    "1B": (2048, 8192, 16, 8, 128_256), "3B": (3072, 8192, 28, 8, 128_256), "8B": (4096, 14_336, 32, 8, 128_256),
    "14B": (5120, 17_408, 40, 8, 151_936), "32B": (5120, 25_600, 64, 8, 151_936), "70B": (8192, 28_672, 80, 8, 128_256),
}  # fmt: skip
"""Hidden size, inner size, layers, key-value heads and vocabulary of Llama 3.2 and 3.1 and of Qwen 3, by parameters."""


def probe_gpu(
    device: torch.device, side: int = SIDE, shapes: Mapping[str, tuple[int, int, int, int, int]] = SHAPES
) -> Iterator[tuple[str, str]]:
    """Yield pairs of subject and finding, as `ratchet doctor` prints them.

    Args:
        device: the GPU; on a CPU, the forecast is that of a GPU with the memory of the machine.
        side: rows and columns of the measured products.
        shapes: shapes of the models whose memory is computed, in ascending order of their size.
    """
    compute_dtype = device_probe.pick_dtype("auto", device)
    dtypes = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16, compute_dtype))
    if device.type == "cuda" and compute_dtype == torch.float16:
        del dtypes[torch.bfloat16]  # torch would emulate it
    products = Counter([(side, side, side)])
    rates = {dtype: profiler.measure_product_flops_per_s(products, dtype, device) for dtype in dtypes}
    texts = (f"{_name_dtype(dtype)} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in rates.items())
    yield "products", f"{', '.join(texts)}; `auto` is {_name_dtype(compute_dtype)}"
    for kind in ("nf4", "fp4"):
        fault = device_probe.find_four_bit_fault(device, (64, 320, side), kind)
        yield kind, fault or "works"
    yield "attention", _list_attention_kernels(device, compute_dtype)
    yield "QLoRA", _list_fitting_models(device, shapes, rates[compute_dtype])


def describe_cpu_products() -> str:
    """Return this CPU's rates of products in float32 and bfloat16, and the dtype that `auto` means."""
    products, device = Counter([(CPU_SIDE, CPU_SIDE, CPU_SIDE)]), torch.device("cpu")
    full, half = (
        profiler.measure_product_flops_per_s(products, dtype, device) for dtype in (torch.float32, torch.bfloat16)
    )
    text = f"float32 {full / 1e9:,.0f} GFLOP/s, bfloat16 {half / 1e9:,.0f} GFLOP/s; `auto` is float32 on every CPU"
    return text + (
        "; products are faster in bfloat16 (train.compute_dtype), but Ratchet's kernels compute only float32"
        if half > USEFUL_GAIN * full
        else ""
    )


def describe_cpu_kernels() -> str:
    """Describe the kernels that this CPU uses in float32: Ratchet's own, or torch's and why. The first call compiles
    them."""
    found = library.load_kernels()
    if found.is_available:
        return f"Ratchet's own for attention, norms, gated units and rotary embeddings in float32 ({found.text})"
    return f"torch's only: {found.text}"


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list_attention_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """List the fused kernels that compute a forward and a backward pass, with and without the mask of a pack."""
    query = torch.randn(1, 8, 512, 64, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool, device=device).tril()
    found = {}
    for name, member in KERNELS.items():
        works = []
        for label, options in (("rows", {"is_causal": True}), ("packs", {"attn_mask": mask})):
            try:
                with sdpa_kernel([getattr(SDPBackend, member)]):
                    functional.scaled_dot_product_attention(query, query, query, **options).sum().backward()
            except RuntimeError as error:
                if device_probe.is_device_error(error):
                    raise
                continue
            works.append(label)
        if works:
            found[name] = " and ".join(works)
    return "; ".join(f"{name} for {works}" for name, works in found.items()) or "no fused kernel"


def _list_fitting_models(
    device: torch.device, shapes: Mapping[str, tuple[int, int, int, int, int]], flops_per_s: float
) -> str:
    """Describe memory and rate of QLoRA (NF4, rank 16, one row of ROW_TOKENS tokens, recomputed activations) for each
    shape that fits, and the first that does not.

    The rate is an upper bound, from the measured products of attention and MLP alone: six operations per weight and
    token, because a frozen matrix takes part in the forward pass, its repetition and the backward pass.
    """
    available = capacity.measure_device(device).available_bytes
    work = MemoryWorkload(1, ROW_TOKENS, ROW_TOKENS // 2, False, "cuda", 1, ROW_TOKENS, ROW_TOKENS // 2)
    texts = []
    for name, next_name in pairwise([*shapes, ""]):
        width, inner, layers, heads, vocabulary = shapes[name]
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=width // 128, num_key_value_heads=heads, max_position_embeddings=4096,
            tie_word_embeddings=False,
        )  # fmt: skip
        spec = model_spec.from_config(config)
        train = Train(rank=16, compute_dtype="auto" if device.type == "cuda" else "bfloat16")
        needed = forecast.forecast(spec, train, Machine(activation_checkpointing=True), work).needed_bytes(1)
        if needed > available:
            texts.append(f"{name} needs {format_bytes(needed)} and does not fit")
            break
        weights = sum(
            layer.inputs * layer.outputs * layer.count for layer in spec.layers if layer.role in ("attention", "mlp")
        )
        tokens_per_s = flops_per_s / (6.0 * weights)
        end = "" if next_name else " (the largest of the list)"
        texts.append(f"{name} in {format_bytes(needed)}, at most {tokens_per_s:,.0f} tokens/s{end}")
    return "; ".join(texts)
