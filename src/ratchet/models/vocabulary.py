"""Adds tokens to a tokenizer, and trainable embedding rows for them to a model.

Embeddings grow but never shrink. Many models have more rows than their tokenizer has tokens (padding for fast kernels).
In such a model new tokens use the padding, and embeddings do not grow. A tokenizer may have tokens without rows in the
model, if tokens were added but the resized model was not saved. Such tokens are treated like `base.added_tokens`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from tokenizers import AddedToken

from ratchet.errors import BaseModelError
from ratchet.models.device import Model
from ratchet.storage.records.base import BaseCard

Pieces = Mapping[int, Sequence[int]]
"""By id of a new token: ids of the pieces into which its text was split before the token was added."""

_GROWN_ATTRIBUTE = "grown_rows"
"""Attribute of a model with the ids of the rows that `grow_embeddings` added."""


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> dict[int, list[int]]:
    """Add tokens to a tokenizer; tokens that it already has are unchanged.

    New tokens are matched literally, without the tokenizer's normalization. They are not special tokens, because
    special tokens are removed from decoded answers. Returns, by id of each new token, the ids of the pieces into which
    its text was split before.
    """
    vocabulary = tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in vocabulary]
    pieces = [tokenizer.encode(token, add_special_tokens=False) for token in new]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in new])
    return dict(zip(tokenizer.convert_tokens_to_ids(new), pieces, strict=True))


def required_rows(tokenizer: Any) -> int:
    """Return how many rows a tokenizer needs: its largest id plus 1. `len` would be too small if ids have gaps."""
    return 1 + max(int(id_) for id_ in tokenizer.get_vocab().values())


def list_new_token_ids(tokenizer: Any, card: BaseCard, model: Model | None = None) -> list[int]:
    """Return the ids whose rows must be trained, ascending: base.added_tokens and rows added by `grow_embeddings`.

    Raises BaseModelError if the tokenizer does not have a token of the base card.
    """
    vocabulary = tokenizer.get_vocab()
    if missing := [token for token in card.added_tokens if token not in vocabulary]:
        raise BaseModelError(f"base.added_tokens: {missing[0]} is not in the tokenizer; run `dvc repro base`")
    grown = set(getattr(model, _GROWN_ATTRIBUTE, ())) & set(vocabulary.values())
    return sorted({vocabulary[token] for token in card.added_tokens} | grown)


def grow_embeddings(model: Model, tokenizer_size: int, pieces: Pieces | None = None) -> list[int]:
    """Give the model's input and output embeddings a row for every id below `tokenizer_size`.

    A new row is the mean of the rows of its token's pieces, or of all old rows if no pieces are known. So it starts in
    the range of existing rows, and the probabilities of other tokens hardly change (Hewitt 2021, "Initializing new
    word embeddings for pretrained language models"). Tied embeddings stay tied. The same model and tokenizer give the
    same rows; random streams are unchanged. Returns ids of the added rows, ascending; empty if the model had enough
    rows. Raises BaseModelError if the output embeddings are in 4 bits and cannot grow.

    Args:
        model: model without adapters, on any device; its linear layers may be in 4 bits.
        tokenizer_size: result of `required_rows`.
        pieces: result of `add_tokens`; rows of these tokens are initialized even if they were padding.
    """
    head = model.get_output_embeddings()
    if isinstance(head, Linear4bit):
        if pieces or tokenizer_size > head.out_features:
            raise BaseModelError(
                "base.added_tokens: the output layer of this model is stored in 4 bits, so it cannot have new rows; "
                "use the model from before it was quantized"
            )
        return []
    old_rows = [len(tensor) for tensor in _list_token_tensors(model)]
    if tokenizer_size > min(old_rows):
        gpus = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):  # transformers draws values for new rows, which are overwritten below
            model.resize_token_embeddings(max(tokenizer_size, *old_rows), mean_resizing=False)
    with torch.no_grad():
        for tensor, old_count in zip(_list_token_tensors(model), old_rows, strict=True):
            initialize_rows(tensor, dict.fromkeys(range(old_count, len(tensor)), ()) | dict(pieces or {}), old_count)
    added = list(range(min(old_rows), tokenizer_size))
    setattr(model, _GROWN_ATTRIBUTE, added)
    return added


def _list_token_tensors(model: Model) -> list[torch.Tensor]:
    """Return every tensor with one row per token: embedding, head if it is not tied, the head's bias."""
    tensors: dict[int, torch.Tensor] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for tensor in (getattr(module, "weight", None), getattr(module, "bias", None)):
            if tensor is not None:
                tensors.setdefault(id(tensor), tensor)
    return list(tensors.values())


def initialize_rows(tensor: torch.Tensor, new_rows: Pieces, old_count: int) -> None:
    """Set each row of `new_rows` to the mean of its pieces' rows; without pieces, of the first `old_count` rows."""
    mean = tensor[:old_count].mean(dim=0, dtype=torch.float32) if new_rows else None
    values = {}
    for row, pieces in new_rows.items():
        known_pieces = [piece for piece in pieces if piece < old_count and piece not in new_rows]
        values[row] = tensor[known_pieces].float().mean(dim=0) if known_pieces else mean
    for row, value in values.items():
        tensor[row] = value
