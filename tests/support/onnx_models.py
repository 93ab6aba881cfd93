"""Tiny models of the real classes with their own tokenizers, as directories for exports."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from families import make

VOCABULARY = 320
SPECIAL = ("<pad>", "<bos>", "<eos>", "<|turn|>")
TEMPLATE = "{% for message in messages %}<|turn|>{{ message['content'] }}{% endfor %}"
LINES = ("A parcel, a bill, a login.", "Money comes back when it can.", "Where is my order?", "def f(x): return x + 1")


def save(family: str, directory: Path, dtype: Any = None, **changes: Any) -> Path:
    """Write weights, config and tokenizer of a random model of a family."""
    import torch

    model = make(family, dtype=dtype or torch.float32, vocab_size=VOCABULARY, **changes)
    model.save_pretrained(directory)
    tokenizer(directory)
    return directory


def tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer with special tokens and a chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(LINES, trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(directory))
