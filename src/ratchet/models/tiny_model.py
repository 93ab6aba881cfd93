"""Builds the tiny base model: a small decoder, pre-trained from scratch on the project's own texts.

Tests, demos and machines without a network need a real base model (an ordinary Hugging Face directory) that LoRA can
fine-tune. LoRA adapts features that a model already extracts, so the model is trained on two tasks without labels:

- language: next-token prediction on packed documents;
- topics: in the chat template, the user sends a text and the assistant names its topic, which is the few words with the
  largest weights (TF-IDF) in the text *and its nearest neighbours*. So the hidden state at the assistant's first
  position summarizes the user's turn. Fine-tuning relies on this summary.

The same texts, settings, number of threads and library versions give the same bytes.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ratchet.config.base import TinyModelSettings
from ratchet.models import cpu_products
from ratchet.storage.progress import report_progress

PAD, END_OF_TEXT, TURN_START, TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build(texts: Sequence[str], output_dir: Path, settings: TinyModelSettings, progress: Callable[[str], None]) -> None:
    """Train tokenizer and model on `texts` and save both to `output_dir` in transformers' format.

    Raises ValueError if all texts are empty.

    Args:
        texts: paragraphs or lines; empty ones are skipped.
        output_dir: receives config, generation config, weights and tokenizer; created if missing.
    """
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise ValueError("no text to pre-train on: provide lines or paragraphs of text")
    cpu_products.use_onednn()  # as in the command, so that the weights have the same bits in every process
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    progress(f"tokenizer: {len(tokenizer)} entries from {len(texts)} texts")
    documents = PretrainingDocuments(texts, tokenizer, settings)
    progress(f"pre-training: {documents.describe()}")
    with torch.random.fork_rng(devices=[]):  # the caller's random state is unchanged
        torch.manual_seed(settings.seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
        model = LlamaForCausalLM(config)
        _pretrain(model, documents, settings, progress)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (GPT-2's splitting rule, `gpt-2` in GGUF) with ChatML turns.

    Every string can be encoded, because all 256 bytes are entries. The end-of-turn token is the `eos_token`; padding
    has its own token, so that masking the padding never masks the end of an answer.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A word at the start of a text has no leading space, so train on texts with and without one, and on the role names.
    bpe.train_from_iterator([*texts, *(" " + text for text in texts), *["system user assistant\n"] * 20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[END_OF_TEXT, TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _name_topics(texts: Sequence[str], words: int = 3, neighbours: int = 8) -> list[str]:
    """Return the topic of each text, such as "card, arrive, order": the `words` words with the largest weights.

    Weights are TF-IDF, summed over the text's nearest `neighbours` by cosine similarity, which include the text itself.
    Words in fewer than two texts or in more than a tenth of the texts are ignored, and of the other words all but the
    4,000 most frequent. A topic is empty if no neighbour has a remaining word. The neighbours of a text without any
    remaining word are arbitrary.
    """
    word_counts = [Counter(re.findall(r"[^\W\d_]+", text.lower())) for text in texts]
    document_frequency = Counter(word for counts in word_counts for word in counts)
    usable = sorted(word for word, n in document_frequency.items() if 2 <= n <= max(2, len(texts) // 10))
    column = {
        word: i for i, word in enumerate(sorted(usable, key=lambda word: (-document_frequency[word], word))[:4000])
    }
    vocabulary = list(column)
    weights_nw = torch.zeros(len(texts), max(1, len(vocabulary)))
    for row, counts in enumerate(word_counts):
        for word, count in counts.items():
            if word in column:
                weights_nw[row, column[word]] = (1 + math.log(count)) * math.log(len(texts) / document_frequency[word])
    weights_nw = functional.normalize(weights_nw, dim=1)
    topics = []
    for chunk_cw in weights_nw.split(512):
        near_ck = (chunk_cw @ weights_nw.T).topk(min(neighbours, len(texts)), dim=1).indices
        heaviest = weights_nw[near_ck].sum(dim=1).topk(min(words, weights_nw.shape[1]), dim=1)
        for values, indices in zip(heaviest.values.tolist(), heaviest.indices.tolist(), strict=True):
            topics.append(", ".join(vocabulary[i] for v, i in zip(values, indices, strict=True) if v > 0))
    return topics


class PretrainingDocuments:
    """Token ids of the pre-training data: plain texts, and conversations about their topics."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, settings: TinyModelSettings) -> None:
        self._rng = random.Random(settings.seed)
        self._length = settings.sequence_length
        end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        encoded: list[list[int]] = tokenizer(list(texts))["input_ids"]
        self.texts = [
            [*ids[start : start + self._length], end] for ids in encoded for start in range(0, len(ids), self._length)
        ]
        # The sample is limited because the search for neighbours takes quadratic time: 2 s for 7,500 texts.
        sample = self._rng.sample(range(len(texts)), min(len(texts), 8000))
        before, between, after = (
            tokenizer(part)["input_ids"]
            for part in (f"{TURN_START}user\n", f"{TURN_END}\n{TURN_START}assistant\n", f"{TURN_END}\n")
        )
        topics = _name_topics([texts[i] for i in sample])
        self.conversations = [
            [*before, *encoded[i][: self._length // 2], *between, *tokenizer(topic)["input_ids"], *after]
            for i, topic in zip(sample, topics, strict=True)
            if topic
        ]

    def describe(self) -> str:
        tokens = sum(map(len, self.texts)) + sum(map(len, self.conversations))
        return f"{len(self.texts)} texts and {len(self.conversations)} conversations, {tokens} tokens"

    def draw_batch(self, sequences: int) -> Tensor:
        """Return the next batch [sequences, sequence_length + 1]; every row starts with the start of a document."""
        rows = []
        for _ in range(sequences):
            row: list[int] = []
            while len(row) <= self._length:
                source = self.conversations if self.conversations and self._rng.random() < 0.7 else self.texts
                row += self._rng.choice(source)
            rows.append(row[: self._length + 1])
        return torch.tensor(rows)


def _pretrain(
    model: LlamaForCausalLM,
    documents: PretrainingDocuments,
    settings: TinyModelSettings,
    progress: Callable[[str], None],
) -> None:
    """Train on the next-token loss of every position; Muon for matrices of blocks, AdamW for embeddings and norms.

    With Muon, two minutes are sufficient: after 200 steps the loss was 1.62 nats, against 2.54 for AdamW at its best
    learning rate (1e-3, of four tried). A step with Muon took about a fifth more time.
    """
    blocks = [p for p in model.model.layers.parameters() if p.ndim == 2]
    other_parameters = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    muon = MuonOptimizer(blocks)
    adamw = torch.optim.AdamW(other_parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model.train()
    for step in range(settings.steps):
        ids_bt = documents.draw_batch(settings.batch_size)
        logits_btv = model(input_ids=ids_bt[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits_btv.flatten(0, 1), ids_bt[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # Linear warm-up over 1/20 of the steps, then cosine decay to 1/20.
        warmup = max(1, settings.steps // 20)
        decay = 1 + math.cos(math.pi * (step - warmup) / max(1, settings.steps - warmup))
        rate = settings.learning_rate * ((step + 1) / warmup if step < warmup else 0.05 + 0.95 * 0.5 * decay)
        muon.step(rate)
        adamw.param_groups[0]["lr"] = 0.4 * rate
        adamw.step()
        model.zero_grad()
        report_progress("pre-training", step + 1, settings.steps)
        if step + 1 == settings.steps:
            progress(f"pre-training: {settings.steps} steps, loss {loss.item():.3f}")
    model.eval()


class MuonOptimizer:
    """Muon: orthogonalized momentum, whose step has equal size in all directions of a matrix (Jordan et al. 2024).

    The scale 0.2 sqrt(longer side) is that of Moonlight (Liu et al. 2025). torch's own Muon orthogonalizes in bfloat16,
    which many CPUs only emulate; this class uses float32.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._momenta = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]

    def step(self, rate: float) -> None:
        """Update every matrix from its gradient; weights decay by a tenth of `rate`."""
        with torch.no_grad():
            for matrix, momentum in self._momenta:
                momentum.lerp_(matrix.grad, 0.05)
                update = _orthogonalize(matrix.grad.lerp(momentum, 0.95))
                matrix.mul_(1 - 0.1 * rate).add_(update, alpha=-0.2 * rate * max(matrix.shape) ** 0.5)


def _orthogonalize(matrix: Tensor) -> Tensor:
    """Move all singular values towards 1 with five Newton-Schulz iterations of Jordan's quintic."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
