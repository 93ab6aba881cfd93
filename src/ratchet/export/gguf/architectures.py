"""Which models llama.cpp computes as transformers does, and what a GGUF file has to tell it about one.

What each architecture reads is in llama.cpp's `src/models/*.cpp`, the keys are in the specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Where llama.cpp has a constant in the place of a setting
(the scale of attention in Gemma 2 and 3, which of their layers see a window only), a config that says otherwise is
refused: the file would load, and answer differently.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType
from numpy.typing import NDArray

from ratchet.errors import BaseModelError, SettingsError
from ratchet.models import base_model

CONVERTER = "convert_hf_to_gguf.py"
"""Of a llama.cpp checkout; knows every architecture of its llama.cpp."""

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)
_ATTENTION_BIASES = tuple(f"self_attn.{one}_proj.bias" for one in "qkvo")
_MLP_BIASES = tuple(f"mlp.{one}_proj.bias" for one in ("gate", "up", "down"))


@dataclass(frozen=True)
class GgufModelFamily:
    """One model_type of transformers, in llama.cpp."""

    title: str
    arch: MODEL_ARCH
    activations: tuple[str, ...] = _SILU
    ropes: tuple[str, ...] = ("default", "linear", "yarn")
    """Ways to stretch rotary positions that llama.cpp computes alike."""
    biases: tuple[str, ...] = ()
    interleaved: bool = False
    """Rotary pairs are neighbours (2i, 2i + 1), not halves: rows of queries and keys change places."""
    norm_offset: float = 0.0
    """Added to the weights of norms, which transformers multiplies by 1 + weight."""
    always_tied: bool = False
    """The head is the embedding, whatever a file holds."""
    window_period: int = 0
    """Every so many layers one sees everything, the others a window; 0: windows are not computed."""
    scale_of_hidden_at: int = 0
    """Number of layers at which attention is scaled by hidden size / heads in the place of the size of a head."""


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
        scale_of_hidden_at=46,
    ),
    "gemma3_text": GgufModelFamily(
        "Gemma 3 (text)", MODEL_ARCH.GEMMA3, _GELU, ("default", "linear"), norm_offset=1.0, window_period=6,
        scale_of_hidden_at=62,
    ),
    "phi3": GgufModelFamily("Phi-3", MODEL_ARCH.PHI3, ropes=("default", "longrope")),
}  # fmt: skip


@dataclass(frozen=True)
class GgufArchitecture:
    """One model, as llama.cpp has to know it."""

    family: GgufModelFamily
    config: Any
    """Of transformers."""
    head_width: int
    rotary: int
    """Dimensions of a head that are rotated."""
    context_tokens: int
    tied: bool
    extra: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Tensors that are computed from the config."""
    attention_factor: float | None = None
    """Of longrope: cosines and sines are multiplied by it."""
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def key_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)

    @property
    def widths(self) -> set[int]:
        """Lengths of the rows of the matrices of a block."""
        return {
            self.config.hidden_size,
            self.config.intermediate_size,
            self.head_width * self.config.num_attention_heads,
        }


def is_supported(directory: Path) -> bool:
    """Whether the writer here knows the architecture of a model's directory. Raises BaseModelError: no config."""
    return base_model.read_config(directory)["model_type"] in FAMILIES


def read_architecture(directory: Path) -> GgufArchitecture:
    """What config.json means.

    Raises:
        BaseModelError: there is no config, transformers does not understand it, or llama.cpp computes such a model
            otherwise than transformers does.
        SettingsError: an architecture that is not carried.
    """
    kind = base_model.read_config(directory)["model_type"]
    if kind not in FAMILIES:
        raise SettingsError(
            f"export.gguf: {kind}: the writer here carries {', '.join(one.title for one in FAMILIES.values())}; name a "
            f"checkout of llama.cpp in machine.llama_cpp, and its {CONVERTER} is used for others, or export no GGUF"
        )
    family, config = FAMILIES[kind], _config(directory)
    where = f"{directory / 'config.json'}: export.gguf"
    _require_same_arithmetic(family, config, where)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if family.arch is MODEL_ARCH.PHI3 and head * config.num_attention_heads != config.hidden_size:
        raise _unsupported_error(where, f"head_dim {head}", "the hidden size divided by the heads")
    rope = _rope_parameters(config)
    _require_rope(family, rope, where)
    rotary = int(head * rope.get("partial_rotary_factor", 1.0))
    context, notes = _context_limit(family, config, rope)
    extra, factor = _rope_tensors(config, rope, rotary)
    tied = family.always_tied or bool(config.tie_word_embeddings)
    return GgufArchitecture(family, config, head, rotary, context, tied, extra, factor, notes)


def _config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # of any kind: configs check themselves
        raise BaseModelError(
            f"{directory / 'config.json'}: transformers does not understand it ({str(error).splitlines()[0]}); bring "
            "the original file"
        ) from None


def _unsupported_error(where: str, found: str, wanted: str) -> BaseModelError:
    return BaseModelError(
        f"{where}: {found}: llama.cpp computes this architecture with {wanted} only, so a GGUF file would answer "
        "otherwise than the model; export no GGUF of it"
    )


def _require_same_arithmetic(family: GgufModelFamily, config: Any, where: str) -> None:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in family.activations:
        raise _unsupported_error(where, f"activation {activation}", family.activations[0])
    for name, part in (("attention_bias", "self_attn"), ("mlp_bias", "mlp")):
        if getattr(config, name, False) and not any(one.startswith(part) for one in family.biases):
            raise _unsupported_error(where, f"{name}: true", f"{name}: false")
    if getattr(config, "use_bidirectional_attention", False):
        raise _unsupported_error(where, "use_bidirectional_attention: true", "causal attention")
    if family.always_tied and not config.tie_word_embeddings:
        raise _unsupported_error(where, "tie_word_embeddings: false", "a head that is the embedding")
    if family.window_period:
        _require_windows(family, config, where)


def _require_windows(family: GgufModelFamily, config: Any, where: str) -> None:
    period, layers = family.window_period, config.num_hidden_layers
    types = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    if list(config.layer_types) != types or not config.sliding_window:
        raise _unsupported_error(where, "layer_types", f"a window in all but every {period}th layer")
    hidden = config.hidden_size // config.num_attention_heads
    scale = hidden if layers == family.scale_of_hidden_at else config.head_dim
    if config.query_pre_attn_scalar != scale:
        raise _unsupported_error(where, f"query_pre_attn_scalar {config.query_pre_attn_scalar}", f"{scale}")
    caps = (config.attn_logit_softcapping, config.final_logit_softcapping)
    if family.arch is MODEL_ARCH.GEMMA2 and None in caps:
        raise _unsupported_error(where, "no soft-capping", "soft-capping of attention and logits")
    if family.arch is MODEL_ARCH.GEMMA3 and any(caps):
        raise _unsupported_error(where, "soft-capping", "none")


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Rotary parameters of the layers that see everything."""
    found: dict[str, Any] = config.rope_parameters
    full: dict[str, Any] = found.get("full_attention", found)
    return full


def _require_rope(family: GgufModelFamily, rope: dict[str, Any], where: str) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in family.ropes:
        raise _unsupported_error(where, f"rope_type {kind}", " or ".join(family.ropes))
    if family.arch is not MODEL_ARCH.PHI3 and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported_error(
            where, f"partial_rotary_factor {rope['partial_rotary_factor']}", "heads that are rotated whole"
        )
    if kind == "yarn":
        own = rope.get("attention_factor")
        usual = 0.1 * math.log(rope["factor"]) + 1.0  # Peng et al. 2023, YaRN, equation 22
        if own is not None and not math.isclose(own, usual, rel_tol=1e-6):
            raise _unsupported_error(where, f"attention_factor {own}", f"{usual:.6g}")
        if rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
            raise _unsupported_error(where, "mscale or truncate", "YaRN as published")


def _context_limit(family: GgufModelFamily, config: Any, rope: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Tokens up to which llama.cpp computes what transformers does; what has to be said about it."""
    context = int(config.max_position_embeddings)
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window and not family.window_period and (types is None or "sliding_attention" in types) and window < context:
        note = f"llama.cpp knows no window in this architecture: the file's context ends where it begins, at {window}"
        return int(window), (note,)
    trained = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and trained and trained < context:
        note = (
            f"opened with more than {trained} tokens of context, llama.cpp takes the factors for long texts for short "
            "ones, too, as transformers does not: the file's own context is that"
        )
        return int(trained), (note,)
    return context, ()


def _rope_tensors(
    config: Any, rope: dict[str, Any], rotary: int
) -> tuple[dict[str, NDArray[np.float32]], float | None]:
    """Divisors of the rotary frequencies, and the factor of longrope, from transformers' own formulas."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        stretched, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        plain = 1.0 / (rope["rope_theta"] ** (np.arange(0, rotary, 2, dtype=np.float32) / rotary))
        return {"rope_freqs.weight": (plain / stretched.double().numpy()).astype(np.float32)}, None
    if kind == "longrope":
        factors = {one: np.asarray(rope[f"{one}_factor"], np.float32) for one in ("long", "short")}
        _, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        return {f"rope_factors_{one}.weight": factors[one] for one in factors}, float(factor)
    return {}, None


def write_metadata(writer: GGUFWriter, model: GgufArchitecture) -> None:
    """Tell a file's reader about the model; the writer knows its architecture already."""
    config, rope = model.config, _rope_parameters(model.config)
    writer.add_context_length(model.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(model.key_heads)
    writer.add_key_length(model.head_width)
    writer.add_value_length(model.head_width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(model.rotary)
    writer.add_rope_freq_base(rope["rope_theta"])
    _write_rope_scaling(writer, model, rope)
    if model.family.window_period:
        writer.add_sliding_window(config.sliding_window)
    if model.family.arch is MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if model.family.arch is MODEL_ARCH.GEMMA3:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _write_rope_scaling(writer: GGUFWriter, model: GgufArchitecture, rope: dict[str, Any]) -> None:
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
