"""Links from messages to the sections of the documentation's page troubleshooting that say more than the message."""

import re
from collections.abc import Mapping
from pathlib import Path

from ratchet.errors import DOCUMENTATION

CLONE = Path(__file__).resolve().parents[3]

SECTIONS: Mapping[str, str] = {
    "even with one row at a time": "out-of-memory-while-the-model-is-loaded",
    "the model has no such layers": "no-trainable-parameters",
    "bitsandbytes cannot be loaded": "bitsandbytes-does-not-import-the-cuda-version-does-not-match",
    "bitsandbytes cannot quantize to 4 bits on this": "bitsandbytes-does-not-import-the-cuda-version-does-not-match",
    "bitsandbytes dequantizes 4-bit matrices": "cuda-kernels-fail-in-bitsandbytes",
    "no rendezvous at": "the-pipeline-hangs-at-the-start",
    "the final state could not be saved within": "recovery-from-a-checkpoint-fails",
    "does not fit into memory in": "the-data-loader-runs-out-of-memory-rows-are-much-longer-than-expected",
    "not UTF-8 (byte": "the-text-looks-corrupted",
    "prepare.limits.fully_masked": "all-labels-of-some-rows-are-100",
    "the adapter does not fit this base model": "shape-mismatch-when-adapters-are-attached",
    "does not fit train.target_modules and the base": "shape-mismatch-when-adapters-are-attached",
    "validation loss is ...: the model's logits are not finite": "perplexity-is-nan-or-infinite",
    "loss is nan": "the-loss-becomes-nan",
    "the merged model differs from base + adapter": "the-merged-model-answers-differently",
    "the merged model equals the base": "the-merged-model-answers-differently",
    "export.gguf: found architecture": "gguf-export-fails",
    "needs row lengths that are multiples of": "gguf-export-fails",
    "the token is missing or wrong, or it may not see this repository": "the-hub-answers-401-403-a-gated-model",
    "but torch finds no GPU": "machinedevice-cuda-but-torch-finds-no-gpu",
    "is in use by process": "a-second-dvc-repro-is-refused",
    "test rows are required": "the-gate-says-hold",
    "compared with ..., but the ... is now": "promotion-is-refused-because-the-champion-moved",
    "its replica lacks": "the-replica-is-incomplete-exit-code-75",
}
"""Anchor of the section, by a part of the messages that it explains, as the section quotes it; `...` is any text."""


def find_section(message: str) -> str | None:
    """Return where the section about a message is; None if no section says more than the message."""
    for part, anchor in SECTIONS.items():
        if re.search(".*".join(map(re.escape, part.split("..."))), message):
            return locate_section(anchor)
    return None


def locate_section(anchor: str) -> str:
    """Return the address of a section: on the documentation's site once it has one, else in the clone that this is
    installed from, else in words."""
    if DOCUMENTATION.startswith("https:"):
        return f"{DOCUMENTATION}/troubleshooting.html#{anchor}"
    for page in (CLONE / "build" / "site" / "troubleshooting.html", CLONE / "docs" / "troubleshooting.md"):
        if page.exists():
            return f"{page.as_uri()}#{anchor}"
    return f"{DOCUMENTATION}, page troubleshooting, section {anchor}"
