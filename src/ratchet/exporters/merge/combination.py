"""Combines the updates of several adapters to one matrix: linearly, by TIES, or by DARE, with peft's functions.

`linear` is the sum of w_i D_i (task arithmetic; Ilharco et al., ICLR 2023). `ties` keeps the largest entries of each,
elects a sign for each entry by their sum, and takes the mean of the w_i D_i that agree with it (Yadav et al., NeurIPS
2023). `dare_linear` drops entries at random and divides the rest by the density before the sum, `dare_ties` before the
election (Yu et al., ICML 2024). Trimming is per matrix, as in peft, not over all matrices.
"""

from collections.abc import Sequence

import torch
from peft.utils import merge_utils
from torch import Tensor

from ratchet.config.export import MergeMethod
from ratchet.storage import digests

SEED = 0
"""Seed of DARE's random entries, with the name of the matrix; so they depend neither on the order nor on the device."""


def combine_updates(
    name: str, updates: Sequence[Tensor], weights: Sequence[float], method: MergeMethod, density: float
) -> Tensor:
    """Return the combined update of a matrix.

    Args:
        name: name of the matrix in the base.
        updates: the adapters' updates in float32, unweighted.
        weights: their factors.
        method: how to combine them.
        density: share of the entries of each update to keep; `linear` keeps all.
    """
    device = updates[0].device
    tensors, factors = [update.cpu() for update in updates], torch.tensor(weights, dtype=torch.float32)
    if method == "linear":
        combined = merge_utils.task_arithmetic(tensors, factors)
    elif method == "ties":
        combined = merge_utils.ties(tensors, factors, density)
    else:
        combine = merge_utils.dare_linear if method == "dare_linear" else merge_utils.dare_ties
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(digests.hash_json([SEED, name])[:15], 16))
            combined = combine(tensors, factors, density)
    result: Tensor = combined.to(device)
    return result
