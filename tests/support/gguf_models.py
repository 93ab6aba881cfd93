"""Tiny models with tokenizers in the form that a merge writes, for tests of GGUF files."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaTokenizer, PretrainedConfig, PreTrainedTokenizerFast

import families
from ratchet.exporters.verification.probe_inputs import TEXTS

ROWS = 640
"""Number of rows of the embeddings; larger than the vocabulary of any tokenizer in this module."""
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    *TEXTS, "The card has not arrived, and it's been 12 days.", "We'll see; they've said 2024-01-31.",
    "def f(x):\n    return x ** 2\n\n\n", "Straße, naïve, ÉCOLE, Übung, ДОМ дом, 中文字符 と かな", "a/b/c ./d //e",
]  # fmt: skip
LETTERS = (
    "   \t\n\r'sStTdDlLvVeErRmMaeioZzéÉßÜñ0123456789٣½²_-./\\!?#$€中文かカ한ДдªºǅʰЁ"
    "\u0301\u00a0\u2003\u200d\U0001f44d\U0001f3fd\U0001f600\ufb01"
)


def config(family: str, **changes: Any) -> PretrainedConfig:
    """Return the config of a tiny model of the family. Gemma has the shape of Gemma 2."""
    if family == "gemma":
        shape = families.FAMILIES["gemma2"](**changes).to_dict()
        return GemmaConfig(**{name: value for name, value in shape.items() if name in GemmaConfig().to_dict()})
    return families.FAMILIES[family](**changes)


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """Create a tiny model with random weights."""
    if family != "gemma":
        return families.make(family, seed, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32).eval()


def nonsense(count: int = 400) -> list[str]:
    """Return pseudo-random strings. The strings are the same in each call."""
    draw = random.Random(1)
    return ["".join(draw.choices(LETTERS, k=draw.randint(1, 25))) for _ in range(count)]


def byte_level(
    steps: Sequence[Any] = (), nfc: bool = False, whole_words: bool = False, regex: bool = False
) -> PreTrainedTokenizerFast:
    """Create a byte-level BPE tokenizer. `steps` (pre-tokenizers or patterns) split the text; without `steps`, GPT-2's
    rule does."""
    made = [pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps]
    bpe = Tokenizer(models.BPE(ignore_merges=whole_words))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex or not steps)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*made, last]) if steps else last
    bpe.normalizer = normalizers.NFC() if nfc else None
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 3, trainer)
    if whole_words:
        bpe = with_unreachable(bpe)
    bpe.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL[0], eos_token=SPECIAL[2], additional_special_tokens=[SPECIAL[1]],
        chat_template=CHAT, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def with_unreachable(bpe: Tokenizer) -> Tokenizer:
    """Add entries that no merge creates; only a tokenizer with ignore_merges uses them."""
    written = json.loads(bpe.to_str())
    vocabulary = written["model"]["vocab"]
    for word in ("zqxj", "Ġzqxj"):
        vocabulary[word] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(written))


def pieces(folder: Path, template: str | None, **settings: Any) -> Any:
    """Create a SentencePiece tokenizer in the form to which transformers converts a tokenizer.model."""
    lines = [line for text in CORPUS * 3 for line in text.split("\n") if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), vocab_size=600, model_type="bpe",
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **settings}))
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


def save(model: Any, tokenizer: Any, directory: Path) -> Path:
    """Save model and tokenizer as a merge and `huggingface.complete_directory` do."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def nothing(what: str, done: int, total: int) -> None:
    """Progress callback that does nothing."""
