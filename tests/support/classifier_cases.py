"""A tiny text classifier on disk, for tests of the safety of answers."""

from pathlib import Path
from typing import Any

import torch


def write_classifier(folder: Path, labels: dict[int, str], **config: Any) -> Path:
    """Write a tiny classifier that gives the last label to the word `bad`, and the first one to `good`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "bad": 3, "good": 4}
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer = Tokenizer(models.WordLevel(words, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config |= {"id2label": labels, "num_labels": len(labels)}
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **config,
        )
    )  # fmt: skip
    target = torch.tensor([len(labels) - 1, 0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(25):
        logits = model(input_ids=torch.tensor([[2, 3], [2, 4]])).logits
        torch.nn.functional.cross_entropy(logits, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
