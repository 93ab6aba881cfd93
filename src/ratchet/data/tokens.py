"""Prepared splits on disk: one Arrow dataset each, memory-mapped when read."""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ratchet import digest
from ratchet.data.splits import SplitName
from ratchet.data.template import Encoded, Message

datasets.disable_progress_bars()

ID_DIGITS = 16


@dataclass(frozen=True)
class Sample:
    """One prepared row."""

    id: str
    messages: list[Message]
    encoded: Encoded

    @property
    def response(self) -> str:
        """What the assistant should have said last."""
        return self.messages[-1]["content"]


def sample_id(conversation: Sequence[Message]) -> str:
    """Identity of a conversation by content; scores of two models are paired by it."""
    return digest.of_json(list(conversation))[:ID_DIGITS]


def write(samples: Sequence[Sample], path: Path) -> None:
    """Save a split."""
    columns: dict[str, list[Any]] = {
        "id": [s.id for s in samples],
        "messages": [digest.canonical_json(s.messages) for s in samples],
        "input_ids": [s.encoded.input_ids for s in samples],
        "labels": [s.encoded.labels for s in samples],
    }
    ints = datasets.List(datasets.Value("int32"))
    text = datasets.Value("string")
    features = datasets.Features({"id": text, "messages": text, "input_ids": ints, "labels": ints})
    # The library's own fingerprint is random for data from memory, and would make equal data unequal files.
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset._fingerprint = digest.of_json(columns)[:ID_DIGITS]
    dataset.save_to_disk(str(path))


def read(data: Path, split: SplitName) -> datasets.Dataset:
    """Open a split; columns id, messages (JSON), input_ids, labels."""
    return datasets.load_from_disk(str(data / split))


def content_digest(splits: Mapping[SplitName, Sequence[Sample]]) -> str:
    """Fingerprint of ids, token ids and masks of all splits, in order."""
    state = hashlib.sha256()
    for name, samples in sorted(splits.items()):
        state.update(f"{name}\n".encode())
        for sample in samples:
            state.update(digest.canonical_json([sample.id, sample.encoded.input_ids, sample.encoded.labels]).encode())
    return state.hexdigest()


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Let `datasets` convert files anew: its cache goes by name and time, and may keep rows that have changed."""
    before = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory(prefix="ratchet-datasets-") as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = before
