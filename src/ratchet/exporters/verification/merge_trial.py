"""Measures one merge: module by module against base + adapter on the same weights, and against the trained model."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ratchet.errors import DamagedFileError
from ratchet.exporters.verification.divergence import measure_distance
from ratchet.exporters.verification.layers import ActivationRecording, check_merge
from ratchet.exporters.verification.parity import log_softmax, logits_at
from ratchet.exporters.verification.probe_inputs import ProbeInputs
from ratchet.models.device import Model
from ratchet.storage.records.export import MergeParity, MergeTrial, Progress

Logits = NDArray[np.float32]
"""[positions, vocabulary]."""


def reference_logits(model: Model, inputs: ProbeInputs, progress: Progress) -> list[Logits]:
    """Compute the trained model's (base + adapter) logits of each row at its positions."""
    total, logits = len(inputs.rows), []
    for row, (ids, positions) in enumerate(zip(inputs.rows, inputs.positions, strict=True)):
        progress("logits", row, total)
        logits.append(logits_at(model, ids, positions))
    progress("logits", total, total)
    return logits


def measure_merge(
    merge_base: Literal["dequantized", "original"],
    merged: Model,
    dtype: torch.dtype,
    trained: Sequence[Logits],
    recording: ActivationRecording,
    inputs: ProbeInputs,
) -> MergeTrial:
    """Measure a merged model that was loaded from disk.

    Args:
        merge_base: the weights that the updates were added to.
        merged: the plain model.
        dtype: type of its stored weights.
        trained: logits of the trained model from `reference_logits`, whatever the merge base.
        recording: recording of `reference.load_adapted_model(recipe, merge_base)`.
        inputs: rows and positions.

    Raises:
        DamagedFileError: a module of the merged model deviates, or its vocabulary differs.
    """
    check = check_merge(recording, merged, dtype)
    max_difference, sum_difference, elements, agreements, tokens, kl = 0.0, 0.0, 0, 0, 0, 0.0
    for ids, positions, targets, expected in zip(
        inputs.rows, inputs.positions, inputs.targets, trained, strict=True
    ):  # fmt: skip
        logits = logits_at(merged, ids, positions)
        if logits.shape != expected.shape:
            raise DamagedFileError(
                f"the merged model has {logits.shape[-1]} logits; expected {expected.shape[-1]} as in the trained model"
            )
        differences = np.abs(logits.astype(np.float64) - expected)
        max_difference = max(max_difference, float(differences.max()))
        sum_difference += float(differences.sum())
        elements += differences.size
        distance = measure_distance([log_softmax(expected)], [log_softmax(logits)], [targets])
        agreements += round(distance.greedy_agreement * distance.positions)
        kl += distance.kl * distance.positions
        tokens += distance.positions
    parity = MergeParity(
        rows=len(inputs.rows),
        tokens=tokens,
        max_logit_difference=max_difference,
        mean_logit_difference=sum_difference / elements,
        greedy_agreement=agreements / tokens,
    )
    return MergeTrial(merge_base=merge_base, parity=parity, kl=kl / tokens, check=check)
