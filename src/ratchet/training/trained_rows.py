"""Records the rows on which a run was trained, so that a training that starts from its weights is not tested on them.

The test rows of a training have other prompts than its own training and validation rows (`data/splits.py`). But the
weights that it starts from (train.init_adapter) may have been trained with another split, and then they have seen test
rows. So a run directory has trained_rows.bin: hashes of the prompts of its training and validation rows, and of those
of the runs that it starts from, over all generations.

The file is not part of the run's identity, and a replica does not have it: stage train writes it again from the data
wherever it ends or finds the run. It is a line of JSON, then two sorted arrays of 8-byte integers: 8 bytes a row.
Stage train runs this module as a process, so that its own process, which stays for the whole training, loads no
numerical library (`training/rows_process.py`). Imports no torch.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.train import Train
from ratchet.data import prompt_hashes
from ratchet.errors import EXIT_INPUT, DamagedFileError, DataError, HubError, InputError, first_line
from ratchet.models import start_adapter
from ratchet.models.start_adapter import CHECKPOINT_IDENTITY, INIT_ADAPTER, StartAdapter
from ratchet.runs.directory import RunPaths, compute_run_id, storage_errors
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.training import TrainReport

FORMAT = 1
Hashes = NDArray[np.uint64]
"""Sorted hashes of prompts (`data/prompt_hashes.py`)."""


@dataclass(frozen=True)
class StartRows:
    """Rows on which the weights that a training starts from were trained."""

    name: str = ""
    """Name of the weights, such as `run 0123456789ab`."""
    prompts: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    """Sorted hashes of their prompts."""
    unknown: tuple[str, ...] = ()
    """Why the rows of some of these trainings are not known; empty if all are known."""


@dataclass(frozen=True)
class TrainedRows:
    """Rows on which a run was trained: trained_rows.bin."""

    own: Hashes
    """Sorted hashes of the prompts of its training and validation rows."""
    start: StartRows
    """Further rows, of the weights that it starts from."""

    def save(self, path: Path) -> None:
        """Write the file, atomically."""
        header = {
            "format": FORMAT, "own": len(self.own), "start": len(self.start.prompts), "name": self.start.name,
            "unknown": self.start.unknown,
        }  # fmt: skip
        arrays = (part.astype("<u8").tobytes() for part in (self.own, self.start.prompts))
        files.write_atomic(path, b"".join([json.dumps(header).encode(), b"\n", *arrays]))

    @classmethod
    def load(cls, path: Path) -> "TrainedRows":
        """Read the file. Raises DamagedFileError if it is incomplete."""
        try:
            line, _, content = path.read_bytes().partition(b"\n")
            header = json.loads(line)
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}")
            own, further = header["own"], header["start"]
            if len(content) != 8 * (own + further):
                raise ValueError(f"{len(content):,} bytes of hashes, expected {8 * (own + further):,}")
            numbers = np.frombuffer(content, "<u8").astype(np.uint64)
            start = StartRows(str(header["name"]), numbers[own:], tuple(map(str, header["unknown"])))
            return cls(numbers[:own], start)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{path}: not the hashes of training rows ({first_line(error)}); remove the file, and run `ratchet "
                "train` with the settings and the data of this run, which writes it again"
            ) from None


def write_rows(layout: ProjectLayout, run: RunPaths, train: Train, data_digest: str) -> None:
    """Write trained_rows.bin of a run. The rows of the run itself are not read again if they are there.

    Nothing is written if the data cannot be read, or were prepared again since the run began.

    Args:
        layout: the project, with the data of the run.
        run: its directory.
        train: section train, in which init_adapter is no digest.
        data_digest: digest of the data.

    Raises:
        DamagedFileError: a record of the rows of the start is damaged.
        StorageError: the file cannot be written.
    """
    recorded: TrainedRows | None = None
    with suppress(DamagedFileError):
        recorded = TrainedRows.load(run.trained_rows)
    start = read_start_rows(layout, train, data_digest)
    try:
        if recorded is None and DatasetCard.load(layout.dataset_card).digest != data_digest:
            return
        own = recorded.own if recorded is not None else prompt_hashes.hash_trained_prompts(layout.data)
    except (DamagedFileError, DataError):
        return
    prompts = np.setdiff1d(start.prompts, own, assume_unique=True)
    with storage_errors(run.root):
        TrainedRows(own, StartRows(start.name, prompts, start.unknown)).save(run.trained_rows)


def read_start_rows(layout: ProjectLayout, train: Train, data_digest: str) -> StartRows:
    """Read the rows of the weights that a training starts from, of their start, and so on.

    Args:
        layout: the project.
        train: section train, in which init_adapter is no digest.
        data_digest: digest of the data of the training.

    Raises:
        DamagedFileError: a record of rows is damaged.
    """
    if train.init_adapter is None:
        return StartRows()
    try:
        start = start_adapter.locate(layout, train)
    except (DataError, HubError) as error:
        return StartRows(str(train.init_adapter), unknown=(first_line(error),))
    return _read_rows(layout, start, data_digest, str(train.init_adapter))


def count_trained_rows(
    layout: ProjectLayout, train: Train, run_id: str, data_digest: str, prompts: Iterable[str]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Count the test rows on which the weights that a run started from were trained.

    Rows that share their prompt with one of the run's own training rows are not counted: the split or the sources allow
    that, and the data card reports it.

    Args:
        layout: the project.
        train: section train of the settings.
        run_id: the run.
        data_digest: digest of its data.
        prompts: prompts of the test rows.

    Returns:
        The number by name of the weights, empty if it is 0; and a note for each training with unknown rows.

    Raises:
        DamagedFileError: a record of rows is damaged.
    """
    if train.init_adapter is None:
        return {}, ()
    path = RunPaths(layout.runs / run_id).trained_rows
    recorded = TrainedRows.load(path) if path.exists() else None
    complete = recorded is not None and not recorded.start.unknown
    start = recorded.start if recorded is not None and complete else read_start_rows(layout, train, data_digest)
    hashes = np.array([prompt_hashes.hash_prompt(prompt) for prompt in prompts], np.uint64)
    leaked = hashes[np.isin(hashes, start.prompts)]
    if len(leaked):
        own = recorded.own if recorded is not None else prompt_hashes.hash_trained_prompts(layout.data)
        leaked = leaked[~np.isin(leaked, own)]
    notes = tuple(
        f"test rows may be training rows of {start.name}, from which this training starts ({INIT_ADAPTER}); this "
        f"cannot be checked: {reason}"
        for reason in start.unknown
    )
    return ({start.name: len(leaked)} if len(leaked) else {}), notes


def _read_rows(layout: ProjectLayout, start: StartAdapter, data_digest: str, reference: str) -> StartRows:
    """Read the rows of the training of these weights, and of those that it started from."""
    spec, run_id = _find_spec(layout, start)
    name = f"run {run_id}" if run_id else reference
    records = [
        RunPaths(folder).trained_rows
        for folder in (*([layout.runs / run_id] if run_id else []), *_list_parent_folders(start))
    ]
    if (path := next(filter(Path.is_file, records), None)) is not None:
        rows = TrainedRows.load(path)
        return StartRows(name, np.union1d(rows.own, rows.start.prompts), rows.start.unknown)
    if spec is None:
        return StartRows(name, unknown=(f"no file here says on which rows {name} was trained",))
    if spec.get("data_digest") == data_digest:  # the same rows, in the same split
        earlier = spec.get("train", {}).get("init_adapter")
        if earlier is None:
            return StartRows(name)
        kept = StartAdapter(layout.start_weights / str(earlier))
        if kept.is_checkpoint:
            found = _read_rows(layout, kept, data_digest, str(earlier))
            return StartRows(name, found.prompts, found.unknown)
        return StartRows(
            name, unknown=(f"{name} starts from other weights ({earlier}), and has no record of its rows",)
        )
    return StartRows(
        name,
        unknown=(
            f"{name} has no record of its training rows (trained_rows.bin): its directory is not here, or a sweep or "
            "an earlier version of Ratchet trained it; `ratchet train` with its settings and data writes it",
        ),
    )


def _list_parent_folders(start: StartAdapter) -> tuple[Path, ...]:
    """Return the folders that may be the run directory of weights: result/adapter or result/checkpoints/best is in
    it."""
    return tuple(start.path.resolve().parents)[:3]


def _find_spec(layout: ProjectLayout, start: StartAdapter) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return the spec (as JSON) of the run that trained these weights, as far as it is known, and the id of the run."""
    with suppress(DamagedFileError, DataError, OSError):
        if start.is_checkpoint:
            spec = files.read_json_object(start.path / CHECKPOINT_IDENTITY).get("spec")
            return (spec, compute_run_id(spec)) if isinstance(spec, dict) else (None, None)
    around = _list_parent_folders(start)
    for folder in around:
        with suppress(DamagedFileError, DataError, OSError):
            spec = files.read_json_object(folder / "spec.json")
            if "data_digest" in spec:
                return spec, compute_run_id(spec)
    for kind, name in ((TrainReport, "train.json"), (ModelBundle, "bundle.json")):
        path = around[0] / name
        if not path.is_file():
            continue
        with suppress(DamagedFileError, DataError, OSError):
            made = kind.load(path)
            with suppress(DamagedFileError, DataError, OSError):
                return files.read_json_object(RunPaths(layout.runs / made.run_id).spec), made.run_id
            lineage = made.lineage if isinstance(made, ModelBundle) else None
            train = lineage.settings.get("train") if lineage is not None else None
            if isinstance(train, Mapping):
                return {"data_digest": made.data_digest, "train": train}, made.run_id
            return {"train": {}}, made.run_id
    return None, None


def main(root: str, run: str, data_digest: str) -> int:
    """Write the rows of a run; section train is standard input, as JSON. Return the exit code."""
    try:
        train = Train.model_validate_json(sys.stdin.read())
        write_rows(ProjectLayout(Path(root)), RunPaths(Path(run)), train, data_digest)
    except InputError as error:
        print(error, file=sys.stderr)
        return EXIT_INPUT
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
