"""Defines the models that llama.cpp computes exactly as transformers does, and writes their GGUF metadata.

The parameters of each architecture are in llama.cpp's `src/models/*.cpp`, and their keys in the specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Instead of some settings, llama.cpp has constants
(attention scale and pattern of sliding-window layers in Gemma 2 and 3). A config with other values is refused, because
llama.cpp would load the file but give other answers.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType
from numpy.typing import NDArray
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.gguf.llama_cpp_tools import CONVERT
from ratchet.models import base_model

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)
_ATTENTION_BIASES = tuple(f"self_attn.{letter}_proj.bias" for letter in "qkvo")
_MLP_BIASES = tuple(f"mlp.{part}_proj.bias" for part in ("gate", "up", "down"))


@dataclass(frozen=True)
class GgufModelFamily:
    """A model_type of transformers and its counterpart in llama.cpp."""

    title: str
    arch: MODEL_ARCH
    activations: tuple[str, ...] = _SILU
    ropes: tuple[str, ...] = ("default", "linear", "yarn")
    """Types of rotary scaling that llama.cpp computes identically."""
    biases: tuple[str, ...] = ()
    interleaved: bool = False
    """Whether rotary pairs are neighbors (2i, 2i + 1) instead of halves, so that query and key rows are reordered."""
    norm_offset: float = 0.0
    """Offset of the weights of norms, for models in which transformers multiplies by 1 + weight."""
    always_tied: bool = False
    """Whether the head is always the embedding, even if the files contain a head."""
    window_period: int = 0
    """With 6, every sixth layer has full attention; the others have a window. 0: llama.cpp computes no windows."""
    hidden_scale_layers: int = 0
    """Number of layers of the variant that scales attention by hidden size / heads instead of head size; 0: none."""


FAMILIES = {
    "llama": GgufModelFamily(
        "Llama", MODEL_ARCH.LLAMA, ropes=("default", "linear", "yarn", "llama3"), interleaved=True,
        biases=_ATTENTION_BIASES + _MLP_BIASES,
    ),
    "mistral": GgufModelFamily(
        "Mistral", MODEL_ARCH.LLAMA, ropes=("default", "linear", "yarn", "llama3"), interleaved=True
    ),
    "qwen2": GgufModelFamily("Qwen2", MODEL_ARCH.QWEN2, biases=_ATTENTION_BIASES[:3]),
    "qwen3": GgufModelFamily("Qwen3", MODEL_ARCH.QWEN3),
    "gemma": GgufModelFamily("Gemma", MODEL_ARCH.GEMMA, _GELU, ("default",), norm_offset=1.0, always_tied=True),
    "gemma2": GgufModelFamily(
        "Gemma 2", MODEL_ARCH.GEMMA2, _GELU, ("default",), norm_offset=1.0, always_tied=True, window_period=2,
        hidden_scale_layers=46,
    ),
    "gemma3_text": GgufModelFamily(
        "Gemma 3 (text)", MODEL_ARCH.GEMMA3, _GELU, ("default", "linear"), norm_offset=1.0, window_period=6,
        hidden_scale_layers=62,
    ),
    "phi3": GgufModelFamily("Phi-3", MODEL_ARCH.PHI3, ropes=("default", "longrope")),
}  # fmt: skip


@dataclass(frozen=True)
class GgufArchitecture:
    """llama.cpp's parameters of one model."""

    family: GgufModelFamily
    config: Any
    """Config of transformers."""
    head_size: int
    rotary_dims: int
    """Dimensions of a head that are rotated."""
    context_tokens: int
    is_tied: bool
    computed_tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Tensors that are computed from the config."""
    attention_factor: float | None = None
    """Factor of cosines and sines in longrope."""
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads."""
        return int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)

    @property
    def row_widths(self) -> set[int]:
        """Row lengths of the matrices in a layer."""
        return {
            self.config.hidden_size,
            self.config.intermediate_size,
            self.head_size * self.config.num_attention_heads,
        }


def is_supported(directory: Path) -> bool:
    """Return whether the writer supports a model's architecture. Raises BaseModelError without a config."""
    return base_model.read_config(directory)["model_type"] in FAMILIES


def read_architecture(directory: Path) -> GgufArchitecture:
    """Read a model's parameters from config.json.

    Raises:
        BaseModelError: config.json is missing, transformers rejects it, or llama.cpp would compute such a model
            differently.
        SettingsError: the architecture is not supported.
    """
    kind = base_model.read_config(directory)["model_type"]
    if kind not in FAMILIES:
        raise SettingsError(
            f"export.gguf: found architecture {kind}; supported: {', '.join(f.title for f in FAMILIES.values())}. "
            f"For others, set machine.llama_cpp to a checkout of llama.cpp, which has {CONVERT}, or remove all types "
            "from export.gguf.types"
        )
    family, path = FAMILIES[kind], directory / "config.json"
    try:
        config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # each config class validates itself
        raise BaseModelError(
            f"{path}: transformers rejects it ({str(error).splitlines()[0]}); restore the original file"
        ) from None
    where = f"{path}: export.gguf"
    _require_same_arithmetic(family, config, where)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if family.arch is MODEL_ARCH.PHI3 and head_size * config.num_attention_heads != config.hidden_size:
        raise _unsupported_error(where, f"head_dim {head_size}", "hidden size / heads")
    rope = _rope_parameters(config)
    _require_rope(family, rope, where)
    rotary_dims = int(head_size * rope.get("partial_rotary_factor", 1.0))
    context, notes = _context_limit(family, config, rope)
    tensors, factor = _rope_tensors(config, rope, rotary_dims)
    is_tied = family.always_tied or bool(config.tie_word_embeddings)
    return GgufArchitecture(family, config, head_size, rotary_dims, context, is_tied, tensors, factor, notes)


def _unsupported_error(where: str, found: str, supported: str) -> BaseModelError:
    return BaseModelError(
        f"{where}: found {found}; llama.cpp computes this architecture only with {supported}, so a GGUF file would "
        "give other answers than the model; remove all types from export.gguf.types"
    )


def _require_same_arithmetic(family: GgufModelFamily, config: Any, where: str) -> None:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in family.activations:
        raise _unsupported_error(where, f"activation {activation}", family.activations[0])
    for name, part in (("attention_bias", "self_attn"), ("mlp_bias", "mlp")):
        if getattr(config, name, False) and not any(bias.startswith(part) for bias in family.biases):
            raise _unsupported_error(where, f"{name}: true", f"{name}: false")
    if getattr(config, "use_bidirectional_attention", False):
        raise _unsupported_error(where, "use_bidirectional_attention: true", "causal attention")
    if family.always_tied and not config.tie_word_embeddings:
        raise _unsupported_error(where, "tie_word_embeddings: false", "tied embeddings")
    if family.window_period:
        _require_windows(family, config, where)


def _require_windows(family: GgufModelFamily, config: Any, where: str) -> None:
    period, layers = family.window_period, config.num_hidden_layers
    types = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    if list(config.layer_types) != types or not config.sliding_window:
        raise _unsupported_error(
            where, "layer_types", f"full attention in every {period}th layer and windows elsewhere"
        )
    hidden_scale = config.hidden_size // config.num_attention_heads
    scale = hidden_scale if layers == family.hidden_scale_layers else config.head_dim
    if config.query_pre_attn_scalar != scale:
        raise _unsupported_error(where, f"query_pre_attn_scalar {config.query_pre_attn_scalar}", f"{scale}")
    caps = (config.attn_logit_softcapping, config.final_logit_softcapping)
    if family.arch is MODEL_ARCH.GEMMA2 and None in caps:
        raise _unsupported_error(where, "no soft-capping", "soft-capping of attention and logits")
    if family.arch is MODEL_ARCH.GEMMA3 and any(caps):
        raise _unsupported_error(where, "soft-capping", "no soft-capping")


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Return the rotary parameters of the layers with full attention."""
    parameters: dict[str, Any] = config.rope_parameters
    full: dict[str, Any] = parameters.get("full_attention", parameters)
    return full


def _require_rope(family: GgufModelFamily, rope: dict[str, Any], where: str) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in family.ropes:
        raise _unsupported_error(where, f"rope_type {kind}", " or ".join(family.ropes))
    if family.arch is not MODEL_ARCH.PHI3 and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported_error(
            where, f"partial_rotary_factor {rope['partial_rotary_factor']}", "partial_rotary_factor 1"
        )
    if kind == "yarn":
        factor = rope.get("attention_factor")
        published = 0.1 * math.log(rope["factor"]) + 1.0  # Peng et al. 2023, YaRN, equation 22
        if factor is not None and not math.isclose(factor, published, rel_tol=1e-6):
            raise _unsupported_error(where, f"attention_factor {factor}", f"{published:.6g}")
        if rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
            raise _unsupported_error(where, "mscale or truncate", "YaRN as published")


def _context_limit(family: GgufModelFamily, config: Any, rope: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the largest context in tokens for which llama.cpp computes the same as transformers, and notes."""
    context = int(config.max_position_embeddings)
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window and not family.window_period and (types is None or "sliding_attention" in types) and window < context:
        note = f"the file's context is {window} tokens, because llama.cpp has no sliding window for this architecture"
        return int(window), (note,)
    trained = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and trained and trained < context:
        note = (
            f"the file's context is {trained} tokens: with a larger one, llama.cpp also uses the factors of long texts "
            "for short texts, unlike transformers"
        )
        return int(trained), (note,)
    return context, ()


def _rope_tensors(
    config: Any, rope: dict[str, Any], rotary_dims: int
) -> tuple[dict[str, NDArray[np.float32]], float | None]:
    """Compute divisors of rotary frequencies, and the attention factor of longrope, with transformers' formulas."""
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        stretched, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        plain = 1.0 / (rope["rope_theta"] ** (np.arange(0, rotary_dims, 2, dtype=np.float32) / rotary_dims))
        return {"rope_freqs.weight": (plain / stretched.double().numpy()).astype(np.float32)}, None
    if kind == "longrope":
        _, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        divisors = {
            f"rope_factors_{length}.weight": np.asarray(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
        return divisors, float(attention_factor)
    return {}, None


def write_metadata(writer: GGUFWriter, model: GgufArchitecture) -> None:
    """Write a model's parameters into a file's metadata, to which the architecture is already written."""
    config, rope = model.config, _rope_parameters(model.config)
    writer.add_context_length(model.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(model.key_value_heads)
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(model.rotary_dims)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
        writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
    if model.attention_factor is not None:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(model.attention_factor)
    if model.family.window_period:
        writer.add_sliding_window(config.sliding_window)
    if model.family.arch is MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if model.family.arch is MODEL_ARCH.GEMMA3:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
