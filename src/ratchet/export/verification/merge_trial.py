"""One way to merge, measured: module by module against the weights that went in, and against what was trained."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ratchet.errors import DamagedFileError
from ratchet.export.verification.divergence import measure_closeness
from ratchet.export.verification.layers import ActivationRecording, check_merge
from ratchet.export.verification.parity import log_softmax, logits_at
from ratchet.export.verification.probe_inputs import ProbeInputs
from ratchet.models.device import Model
from ratchet.storage.records.export import MergeParity, MergeTrial, Progress

Logits = NDArray[np.float32]
"""[positions, vocabulary]."""


def reference_logits(model: Model, material: ProbeInputs, progress: Progress) -> list[Logits]:
    """Logits of base + adapter as it was trained, of each row at its positions."""
    total, found = len(material.rows), []
    for row, (ids, positions) in enumerate(zip(material.rows, material.positions, strict=True)):
        progress("logits", row, total)
        found.append(logits_at(model, ids, positions))
    progress("logits", total, total)
    return found


def measure_merge(
    merge_base: Literal["dequantized", "original"],
    merged: Model,
    dtype: torch.dtype,
    trained: Sequence[Logits],
    recording: ActivationRecording,
    material: ProbeInputs,
) -> MergeTrial:
    """Measure a merged model that was read back from disk.

    Args:
        merge_base: weights that the updates were added to.
        merged: the plain model.
        dtype: type of its stored weights.
        trained: logits of the model that was trained, by `reference_logits`, whatever it was merged into.
        recording: of base + adapter computed from the weights that were merged (`reference.combined(recipe, base)`).
        material: rows and positions.

    Raises:
        DamagedFileError: a module of the merged model is off, or it has another vocabulary.
    """
    checked = check_merge(recording, merged, dtype)
    greatest, total, elements, agreeing, count = 0.0, 0.0, 0, 0, 0
    kl = 0.0
    for ids, positions, targets, expected in zip(
        material.rows, material.positions, material.targets, trained, strict=True
    ):  # fmt: skip
        found = logits_at(merged, ids, positions)
        if found.shape != expected.shape:
            raise DamagedFileError(
                f"the merged model has {found.shape[-1]} logits, the trained one {expected.shape[-1]}"
            )
        differences = np.abs(found.astype(np.float64) - expected)
        greatest = max(greatest, float(differences.max()))
        total += float(differences.sum())
        elements += differences.size
        close = measure_closeness([log_softmax(expected)], [log_softmax(found)], [targets])
        agreeing += round(close.greedy_agreement * close.positions)
        kl += close.kl * close.positions
        count += close.positions
    parity = MergeParity(
        rows=len(material.rows),
        tokens=count,
        max_logit_difference=greatest,
        mean_logit_difference=total / elements,
        greedy_agreement=agreeing / count,
    )
    return MergeTrial(merge_base=merge_base, parity=parity, kl=kl / count, check=checked)
