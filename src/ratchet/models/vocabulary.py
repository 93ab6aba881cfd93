"""Tokens beside a model's own: the tokenizer learns their names, the model gets rows for them, the rows are learned.

Embeddings grow and never shrink. Many models have more rows than their tokenizer has tokens (padding for fast kernels):
new tokens then lie inside the padding, and nothing grows. A tokenizer may know tokens that the model has no rows for
(someone added them and did not save a resized model): that is the same case as tokens of `base.added_tokens`.
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
"""For the id of a new token: the ids of the pieces that its text was encoded as before it was added."""

_GROWN = "grown_rows"


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> dict[int, list[int]]:
    """Teach a tokenizer tokens; those that it knows already stay what they are.

    They are matched as they are written, whatever the tokenizer does to other text, and are no special tokens: an
    answer may hold them, and special tokens are left out of decoded answers.

    Returns:
        For each token that was new: its id, and the ids of the pieces that its text was encoded as until now.
    """
    known = tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    pieces = [tokenizer.encode(token, add_special_tokens=False) for token in new]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in new])
    return dict(zip(tokenizer.convert_tokens_to_ids(new), pieces, strict=True))


def required_rows(tokenizer: Any) -> int:
    """Rows that a model needs for a tokenizer: its greatest id and one more (ids may have gaps, `len` does not see)."""
    return 1 + max(int(id_) for id_ in tokenizer.get_vocab().values())


def list_new_token_ids(tokenizer: Any, card: BaseCard, model: Model | None = None) -> list[int]:
    """Ids whose rows must learn, ascending.

    They are those of the base's added tokens, and the rows that `grow_embeddings` gave to `model`.

    Raises:
        BaseModelError: the tokenizer does not know a token that the base card names.
    """
    known = tokenizer.get_vocab()
    if missing := [token for token in card.added_tokens if token not in known]:
        raise BaseModelError(
            f"base.added_tokens: {missing[0]} is not in the tokenizer, so it was loaded without; run `dvc repro base`"
        )
    grown = set(getattr(model, _GROWN, ())) & set(known.values())
    return sorted({known[token] for token in card.added_tokens} | grown)


def grow_embeddings(model: Model, tokenizer_size: int, pieces: Pieces | None = None) -> list[int]:
    """Give the model a row for every id below `tokenizer_size`, in its input and output embeddings.

    A new row is the mean of the rows of the pieces of its token's text, or of all rows where no pieces are known: so
    the token begins where the model has been, and the probability of other tokens hardly changes (Hewitt 2021,
    "Initializing new word embeddings for pretrained language models"). Tied embeddings stay tied. The same model and
    tokenizer give the same rows, and random streams stay where they are.

    Args:
        model: without adapters, on any device; its linear layers may be in 4 bits.
        tokenizer_size: as `required_rows` finds it.
        pieces: as `add_tokens` returns them. Rows that are named here begin anew even if the model had them:
            as padding.

    Returns:
        Ids of the rows that were added, ascending; empty when the model had enough.

    Raises:
        BaseModelError: the output embeddings are in 4 bits, which cannot grow.
    """
    if not _can_resize(model, tokenizer_size, pieces or {}):
        return []
    before = [len(tensor) for tensor in _list_token_tensors(model)]
    if tokenizer_size > min(before):
        gpus = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):  # transformers draws values for the new rows; none of them stays
            model.resize_token_embeddings(max(tokenizer_size, *before), mean_resizing=False)
    with torch.no_grad():
        for tensor, old in zip(_list_token_tensors(model), before, strict=True):
            initialize_rows(tensor, dict.fromkeys(range(old, len(tensor)), ()) | dict(pieces or {}), old)
    added = list(range(min(before), tokenizer_size))
    setattr(model, _GROWN, added)
    return added


def _can_resize(model: Model, tokenizer_size: int, pieces: Pieces) -> bool:
    """Whether rows can be added and set. Raises BaseModelError when they would have to be, and cannot."""
    head = model.get_output_embeddings()
    if not isinstance(head, Linear4bit):
        return True
    if pieces or tokenizer_size > head.out_features:
        raise BaseModelError(
            "base.added_tokens: the output layer of this model is stored in 4 bits, so it can neither grow nor learn "
            "new rows; use the model before it was quantised"
        )
    return False


def _list_token_tensors(model: Model) -> list[torch.Tensor]:
    """Every tensor with a row for each token, once: embedding, head if it is not tied to it, the head's bias."""
    found: dict[int, torch.Tensor] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for tensor in (getattr(module, "weight", None), getattr(module, "bias", None)):
            if tensor is not None:
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def initialize_rows(tensor: torch.Tensor, starts: Pieces, old: int) -> None:
    """Set the rows that `starts` names to the mean of their pieces' rows, else to that of the first `old` rows."""
    mean = tensor[:old].mean(dim=0, dtype=torch.float32) if starts else None
    values = {}
    for row, pieces in starts.items():
        known = [piece for piece in pieces if piece < old and piece not in starts]
        values[row] = tensor[known].float().mean(dim=0) if known else mean
    for row, value in values.items():
        tensor[row] = value
