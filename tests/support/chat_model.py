"""A chat model with random weights and known answers, as real files for real servers."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from promoted_models import CHATML
from ratchet.data import tokenization
from ratchet.data.conversation import Conversation
from ratchet.exporters.verification.parity import TorchRuntime
from ratchet.models import base_model
from ratchet.models.loading import load_plain
from ratchet.storage.records.export import ExportProbe

QUESTIONS = ("What is a ratchet?", "Name three colours.", "Is water wet?")
TOKENS = 6


def tokenizer(begins: bool = False) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", "<s>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["what is water and what is wet, and what is the colour of it"] * 4, trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")  # noqa: S106
    found.chat_template = CHATML
    if begins:
        first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
        found.backend_tokenizer.post_processor = first
        found.bos_token = "<s>"  # noqa: S105 (a token of a text)
        found.chat_template = "{{ bos_token }}" + CHATML
    return found


def write_model(directory: Path, seed: int, begins: bool = False) -> None:
    """Write a Llama with random weights that are large enough to give clear preferences between tokens.

    Args:
        seed: seed of the weights.
        begins: whether the tokenizer and the chat template both begin with `<s>`, as those of Llama 3 do.
    """
    words = tokenizer(begins)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.3,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    words.save_pretrained(directory)


def probes_of_hf(directory: Path) -> tuple[ExportProbe, ...]:
    words = base_model.load_tokenizer(directory)
    model = TorchRuntime(load_plain(directory, torch.float32, torch.device("cpu"), False), words)
    found = []
    for question in QUESTIONS:
        prompt = tokenization.encode_prompt(words, Conversation([{"role": "user", "content": question}]))
        answer = model.generate(prompt, TOKENS, [words.eos_token_id])
        found.append(
            ExportProbe(
                question=question, prompt_ids=tuple(prompt), answer_ids=tuple(answer), answer=words.decode(answer),
                margins=tuple(1.0 for _ in answer),
            )
        )  # fmt: skip
    return tuple(found)
