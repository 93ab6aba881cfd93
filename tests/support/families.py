"""Tiny configs of the real transformers classes, with a factory for each family. A model with random weights takes
milliseconds."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    T5Config,
    T5ForConditionalGeneration,
)

Config = Callable[..., PretrainedConfig]

VOCABULARY = 96
HIDDEN = 64
INNER = 128
LAYERS = 2
HEADS = 4
KEY_HEADS = 2
POSITIONS = 128

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _modern(made: Callable[..., Any], **more: Any) -> Config:
    """Return the factory for a family whose config has the same field names as Llama, with grouped-query attention and
    a gated MLP."""

    def config(**changes: Any) -> PretrainedConfig:
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_HEADS,
            "max_position_embeddings": POSITIONS,
            "tie_word_embeddings": False,
        }
        return made(**{**_TOKENS, **shape, **more, **changes})

    return config


def _own(made: Callable[..., Any], **words: Any) -> Config:
    """Return the factory for a family whose config has its own field names."""

    def config(**changes: Any) -> PretrainedConfig:
        return made(**{**_TOKENS, "vocab_size": VOCABULARY, **words, **changes})

    return config


_HEADS = {"head_dim": HIDDEN // HEADS}
_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}

FAMILIES: dict[str, Config] = {
    "llama": _modern(LlamaConfig),
    "llama-tied": _modern(LlamaConfig, tie_word_embeddings=True, attention_bias=True),
    "mistral": _modern(MistralConfig, sliding_window=64),
    "mixtral": _modern(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _modern(Qwen2Config),
    "qwen3": _modern(Qwen3Config, **_HEADS),
    "qwen3-moe": _modern(Qwen3MoeConfig, **_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    "gemma2": _modern(Gemma2Config, **_HEADS, sliding_window=64, tie_word_embeddings=True),
    "gemma3": _modern(Gemma3TextConfig, **_HEADS, sliding_window=64, tie_word_embeddings=True),
    "phi3": _modern(Phi3Config),
    "phi": _modern(PhiConfig),
    "olmo2": _modern(Olmo2Config),
    "stablelm": _modern(StableLmConfig),
    "cohere": _modern(CohereConfig, tie_word_embeddings=True),
    "gpt2": _own(GPT2Config, **_GPT2),
    "gpt-bigcode": _own(GPTBigCodeConfig, **_GPT2),
    "gpt-j": _own(GPTJConfig, rotary_dim=4, **_GPT2),
    "gpt-neo": _own(
        GPTNeoConfig,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        attention_types=[[["global", "local"], 1]],
        num_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=POSITIONS,
    ),
    "gpt-neox": _own(
        GPTNeoXConfig,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
    ),
    "falcon": _own(FalconConfig, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS),
    "opt": _own(
        OPTConfig,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
    ),
    "bloom": _own(BloomConfig, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS),
    "mpt": _own(MptConfig, d_model=HIDDEN, n_layers=LAYERS, n_heads=HEADS, expansion_ratio=2, max_seq_len=POSITIONS),
    "mamba": _own(MambaConfig, hidden_size=HIDDEN, state_size=4, num_hidden_layers=LAYERS),
}
"""Causal models, by family. A factory takes changes to its config: `FAMILIES["llama"](num_hidden_layers=1)`."""

T5: Config = _own(
    T5Config, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS,
)  # fmt: skip
"""An encoder-decoder. Ratchet recognizes it but cannot train it."""


def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Create a model of the family with random weights in evaluation mode. The random state of the caller does not
    change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "t5":
            return T5ForConditionalGeneration(T5(**changes)).to(dtype).eval()
        return AutoModelForCausalLM.from_config(FAMILIES[family](**changes), dtype=dtype).eval()
