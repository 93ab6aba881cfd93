"""Loss on answer tokens: logits are computed only where they are learned from."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.data.template import MASKED
from ratchet.model.quantized import Model


def pad(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    """Rows of different length as one [rows, longest] tensor, filled on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], device=device)


def answer_nll(model: Model, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each label, [rows, positions - 1]; 0 where masked.

    No attention mask is needed: rows are filled on the right, where a causal model's earlier positions do not look.
    Logits are computed for the columns in which any row is learned from, never for the whole batch x vocabulary.
    """
    targets = labels[:, 1:]
    columns = (targets != MASKED).any(dim=0).nonzero().squeeze(1)
    forward = (model.get_base_model() if hasattr(model, "get_base_model") else model).forward
    if "logits_to_keep" in inspect.signature(forward).parameters:
        logits = model(input_ids=input_ids, logits_to_keep=columns, use_cache=False).logits
    else:
        logits = model(input_ids=input_ids, use_cache=False).logits[:, columns]
    chosen = targets[:, columns]
    nll_of_columns = functional.cross_entropy(
        logits.float().flatten(0, 1), chosen.flatten(), ignore_index=MASKED, reduction="none"
    )
    nll = torch.zeros(targets.shape, dtype=nll_of_columns.dtype, device=targets.device)
    return nll.index_copy(1, columns, nll_of_columns.view(chosen.shape))
