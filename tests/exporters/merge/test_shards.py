"""Tests the writer of safetensors files: the library reads them back, and their sizes are predicted."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ratchet.exporters.merge import model_files
from ratchet.exporters.merge.model_files import TensorEntry
from ratchet.models import safetensors_format

TENSORS = {
    "d": torch.tensor([1.5, -2.5], dtype=torch.float64),
    "counts": torch.arange(3),
    "a": torch.arange(12.0).reshape(3, 4),
    "number": torch.tensor(7.0),
    "none": torch.zeros(0, 4),
    "turned": torch.arange(12.0).reshape(3, 4).T,
    "h": torch.arange(5.0).to(torch.bfloat16),
    "g": torch.arange(3.0).to(torch.float16),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(7, dtype=torch.uint8),
}


def entries(tensors: dict[str, Tensor]) -> list[TensorEntry]:
    return [TensorEntry(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]


def write(directory: Path, tensors: dict[str, Tensor], shard_bytes: int) -> list[int]:
    told: list[int] = []
    model_files.write_shards(directory, entries(tensors), iter(tensors.items()), shard_bytes, told.append)
    written = sum(path.stat().st_size for path in directory.iterdir())
    assert written == model_files.shard_files_size_bytes(entries(tensors), shard_bytes)
    return told


@pytest.mark.parametrize("shard_bytes", [1, 50, 100_000])
def test_the_library_reads_back_what_was_written(shard_bytes: int, tmp_path: Path) -> None:
    told = write(tmp_path, TENSORS, shard_bytes)
    found: dict[str, Tensor] = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        found |= load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in TENSORS.items())
    total = sum(one.nbytes for one in TENSORS.values())
    assert told[-1] == total
    single = tmp_path / "model.safetensors"
    assert single.exists() == (shard_bytes == 100_000)
    if not single.exists():
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / file)


def test_no_file_exceeds_the_limit_unless_one_tensor_does(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((10,), float(number)) for number in range(9)} | {"large": torch.zeros(100)}
    write(tmp_path, tensors, 100)
    held = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [len(one) for one in held] == [2, 2, 2, 2, 1, 1]
    assert min(path.name for path in tmp_path.glob("*.safetensors")) == "model-00001-of-00006.safetensors"


def test_large_tensors_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_format, "CHUNK_BYTES", 64)
    told = write(tmp_path, {"a": torch.arange(100.0)}, 1000)
    assert told == [64, 128, 192, 256, 320, 384, 400]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.arange(100.0))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    def making() -> Iterator[tuple[str, Tensor]]:
        for name in "abcd":
            alive.append(sum(one() is not None for one in made))
            numbers = np.full((3, 5), float(len(made)), dtype=np.float32)
            made.append(weakref.ref(numbers))
            tensor = torch.from_numpy(numbers)
            del numbers
            yield name, tensor
            del tensor

    announced = [TensorEntry(name, (3, 5), torch.float32) for name in "abcd"]
    model_files.write_shards(tmp_path, announced, making(), 130, lambda _: None)
    assert alive == [0, 0, 0, 0]


def test_a_tensor_that_differs_from_its_entry_is_refused(tmp_path: Path) -> None:
    announced = [TensorEntry("a", (2,), torch.float32)]
    for name, tensor in (("b", torch.zeros(2)), ("a", torch.zeros(3)), ("a", torch.zeros(2).half())):
        with pytest.raises(RuntimeError, match="expected TensorEntry"):
            model_files.write_shards(tmp_path, announced, iter([(name, tensor)]), 100, lambda _: None)
