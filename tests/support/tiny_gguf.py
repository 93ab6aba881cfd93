"""Tiny random models of real classes, as Hugging Face directories and GGUF files, for tests that need a runtime."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ratchet.config.export import BuiltInGgufType
from ratchet.exporters.gguf import writer
from ratchet.models import tiny_model

TEXTS = [
    "Where is my parcel? It was sent on Monday, the 3rd.",
    "I'd like a refund of 1,000.50 euros; don't make me wait!",
    "def area(r):\n    return 3.14 * r ** 2\n",
    "Please reset the password of my account, and tell me when it's done.",
    "The bill is wrong: it says 12345 and not 123.",
]
POSITIONS = 512


def tokenizer() -> Any:
    """Train a byte-level BPE tokenizer with the chat template of the embedded base."""
    return tiny_model.train_tokenizer(TEXTS * 3, 400)


def config(vocabulary: int, **changes: Any) -> LlamaConfig:
    """Return the config of a small Llama with grouped-query attention."""
    shape = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3,
    }  # fmt: skip
    return LlamaConfig(**{**shape, **changes})


def directory(path: Path, seed: int = 0, louder: dict[int, float] | None = None, **changes: Any) -> Path:
    """Write a model with weights ten times as large as usual, so that its distributions are far from uniform.

    Args:
        path: the directory to create.
        seed: seed of the weights.
        louder: factors for token rows in the output layer, which make these tokens more likely.
        changes: changes to the config.
    """
    own = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config(len(own), initializer_range=0.2, **changes), dtype=torch.float32
        )
    with torch.no_grad():
        for token, factor in (louder or {}).items():
            model.lm_head.weight[token] *= factor
    model.save_pretrained(path)
    own.save_pretrained(path)
    return path


def write(path: Path, target: Path, kind: BuiltInGgufType = "f32") -> Path:
    """Write the directory as a GGUF file."""
    writer.write_gguf(path, target, kind, lambda what, done, total: None)
    return target


def patched(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    """Write a copy in which some bytes are replaced by others of the same length."""
    content = source.read_bytes()
    assert len(old) == len(new)
    assert old in content
    target.write_bytes(content.replace(old, new, 1))
    return target


def expected(model: Any, ids: list[int]) -> Any:
    """Compute the log-probabilities after each token with transformers."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()


def greedy(model: Any, prompt: list[int], new_tokens: int, ends: Sequence[int] = ()) -> list[int]:
    """Decode greedily, one token at a time, without a cache and without transformers' generation code."""
    ids = list(prompt)
    while len(ids) < len(prompt) + new_tokens:
        ids.append(int(expected(model, ids)[-1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]
