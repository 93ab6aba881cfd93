"""Tests that pickles that would run a program are found everywhere, and that none is run."""

import gzip
import io
import os
import pickle
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

import tiny_project
from ratchet.config import params_file
from ratchet.config.base import Base
from ratchet.errors import BaseModelError
from ratchet.registry import pickle_scan
from ratchet.stages import base
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard


class Program:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Return the path of a file that exists only after a planted program has run."""
    return tmp_path / "it ran"


def evil(trap: Path, protocol: int = 2) -> bytes:
    return pickle.dumps({"weight": Program(f"touch '{trap}'")}, protocol)


def zipped(content: bytes, name: str = "data.pkl") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr(name, content)
    return stream.getvalue()


def tarred(content: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member = tarfile.TarInfo("weights")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def torch_file(value: object, legacy: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def array(content: bytes) -> bytes:
    """Return an array of objects: a header, followed by a pickle."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return stream.getvalue() + content


PLACES: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "weights of torch": ("pytorch_model.bin", lambda t: torch_file({"w": Program(f"touch '{t}'")}, legacy=False)),
    "weights of old torch": ("pytorch_model.bin", lambda t: torch_file({"w": Program(f"touch '{t}'")}, legacy=True)),
    "a plain pickle": ("training_args.bin", evil),
    "the first protocol": ("model.pt", lambda t: evil(t, 0)),
    "the newest protocol": ("model.ckpt", lambda t: evil(t, 5)),
    "under a name of text": ("notes.txt", evil),
    "under a name of text, first protocol": ("vocab.json", lambda t: pickle.dumps(Program(f"touch '{t}'"), 0)),
    "under the name of weights": ("model.safetensors", evil),
    "in a folder": ("runs/old/state", evil),
    "in a zip": ("tokenizer.zip", lambda t: zipped(evil(t))),
    "in a zip, under another name": ("extra.dat", lambda t: zipped(evil(t), "readme.md")),
    "in a zip, first protocol": ("extra.zip", lambda t: zipped(pickle.dumps(Program(f"touch '{t}'"), 0), "a.txt")),
    "in a zip in a zip": ("extra.zip", lambda t: zipped(zipped(evil(t)), "inner")),
    "in a zip without its name": ("added_tokens.json", lambda t: zipped(evil(t))),
    "behind other bytes of a zip": ("pytorch_model.bin", lambda t: b"#!/bin/sh\n" + zipped(evil(t))),
    "in a tar": ("weights.pth", lambda t: tarred(evil(t))),
    "gzipped": ("model.joblib", lambda t: gzip.compress(evil(t))),
    "compressed as joblib does": ("model.pkl", lambda t: zlib.compress(evil(t))),
    "in an array": ("mean.npy", lambda t: array(evil(t))),
    "in an archive of arrays": ("means.npz", lambda t: zipped(array(evil(t)), "a.npy")),
    "behind a harmless pickle": ("state.pkl", lambda t: pickle.dumps({"a": 1}) + evil(t)),
    "in a pickle that breaks off": ("state.pkl", lambda t: evil(t)[:-1]),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_program_is_found_and_not_run(tmp_path: Path, trap: Path, place: str) -> None:
    name, content = PLACES[place]
    folder = tmp_path / "model"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(content(trap))
    with pytest.raises(BaseModelError, match=r"(posix|nt|os) system: loading this pickle would run") as raised:
        pickle_scan.scan_directory(folder)
    assert name in str(raised.value)
    assert not trap.exists()


def clean(folder: Path) -> Path:
    """Write a model with additional files that published models often contain."""
    folder.mkdir()
    save_file({"w": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    weights = {"a": torch.arange(5000).float(), "b": torch.ones(3, dtype=torch.bfloat16)}
    (folder / "pytorch_model.bin").write_bytes(torch_file(weights, legacy=False))
    (folder / "consolidated.pth").write_bytes(torch_file(weights, legacy=True))
    (folder / "optimizer.pt").write_bytes(torch_file({"state": {0: {"step": torch.tensor(1.0)}}}, legacy=False))
    np.save(folder / "mean.npy", np.arange(10))
    np.savez_compressed(folder / "means.npz", a=np.arange(10), b=np.random.default_rng(0).random(1000))
    (folder / "rows.txt.gz").write_bytes(gzip.compress(b"hello\n" * 100))
    (folder / "noise.dat").write_bytes(np.random.default_rng(1).bytes(200_000))
    for name, text in {
        "config.json": "{}", "README.md": "# os\nsystem\n", "vocab.txt": "cos\nsystem\n", "merges.txt": "x^ y\ncat s",
        "tokenizer.model": "\x80 no pickle", "c.txt": "cbuiltins\nlist\n.", "empty": "",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    return folder


def test_harmless_files_pass_and_pickles_are_listed(tmp_path: Path) -> None:
    folder = clean(tmp_path / "model")
    (folder / "vocab.txt").unlink()  # these two lines are how a pickle of protocol 0 calls os.system
    found = pickle_scan.scan_directory(folder)
    assert found.files == 14
    assert found.pickles == ("consolidated.pth", "optimizer.pt", "pytorch_model.bin")
    assert found.suspicious == ()
    assert found.scanner.startswith("picklescan ")


def test_suspicious_files_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "training_args.bin").write_bytes(torch_file({"path": Path("x")}, legacy=False))
    (folder / "data.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(50))
    (folder / "cut.npz").write_bytes(zipped(bytes(3000), "a.npy")[:60])
    found = pickle_scan.scan_directory(folder)
    assert found.pickles == ("training_args.bin",)
    assert [text.partition(": ")[0] for text in found.suspicious] == [
        "cut.npz", "data.7z", "training_args.bin!archive/data.pkl",
    ]  # fmt: skip
    assert "pathlib" in found.suspicious[2]


def test_large_weights_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    header = b'{"__metadata__":{}}'
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(2**40)  # reading the whole file would take an hour
    with (folder / "model.gguf").open("wb") as stream:
        stream.write(b"GGUF")
        stream.truncate(2**40)
    assert pickle_scan.scan_directory(folder).pickles == ()


def test_stage_base_refuses_before_anything_is_opened(project: ProjectLayout, trap: Path) -> None:
    folder = project.root / "data" / "their model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("no JSON: opening it is an error")
    (folder / "pytorch_model.bin").write_bytes(evil(trap))
    settings = params_file.load(project.params).model_copy(
        update={"base": Base(source=str(folder), convert_pickles=True)}
    )
    with pytest.raises(BaseModelError, match=r"pytorch_model\.bin: \w+ system: .*no file was loaded"):
        base.base(Project.from_parts(project, settings))
    assert not trap.exists()
    assert not project.base.exists()


def test_the_scan_of_stage_base_is_stored_next_to_the_card(tmp_path: Path) -> None:
    """The scan accepts and records harmless pickles, even if they were converted."""
    layout = tiny_project.write(tmp_path / "project")
    base.base(Project.from_parts(layout, tiny_project.SETTINGS))
    assert pickle_scan.load_scan(layout.base) is None  # the tiny base was not downloaded
    theirs = Path(shutil.copytree(layout.tiny_model, layout.root / "theirs"))
    weights = load_file(theirs / "model.safetensors")
    (theirs / "pytorch_model.bin").write_bytes(torch_file(weights, legacy=True))
    (theirs / "model.safetensors").unlink()
    settings = tiny_project.SETTINGS.model_copy(update={"base": Base(source="theirs", convert_pickles=True)})
    base.base(Project.from_parts(layout, settings))
    found = pickle_scan.load_scan(layout.base)
    assert found is not None
    assert found.pickles == ("pytorch_model.bin",)
    assert found.suspicious == ()
    assert pickle_scan.scan_directory(layout.tiny_model, BaseCard.load(layout.base_card)).pickles == ()
    files.verify_sealed(layout.base, "base")
