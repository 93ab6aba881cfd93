"""Reads the points that each logger has stored, with the library that defines its format."""

import csv
import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.runs.directory import RunPaths
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker

Points = Counter[tuple[str, int, float]]
"""How often each point (metric, step, value) is stored. Values are rounded to 32 bits, as event files have them."""

BLOCK, HEADER = 32 * 1024, 7
"""Sizes of a block and of the header of a chunk in a .wandb file, which has the log format of LevelDB."""


def point(key: str, step: int, value: float) -> tuple[str, int, float]:
    return key, step, struct.unpack("f", struct.pack("f", value))[0]


def read(name: str, run: RunPaths) -> Points:
    """Return the points that a logger has of a run."""
    return Counter(READERS[name](run.loggers / name))


def read_mlflow(layout: ProjectLayout, run: RunPaths) -> Points:
    """Return the points of the journal that MLflow has of a run."""
    tracking = MlflowTracker(layout, Settings().promote.model_name)
    found = tracking.find(run.root.name)
    assert found is not None
    with tracking.connected() as client:
        keys = [key for key in found.data.metrics if key.startswith(("train/", "validation/", "system/"))]
        histories = {key: client.get_metric_history(found.info.run_id, key) for key in keys}
    return Counter(point(key, p.step, p.value) for key, history in histories.items() for p in history)


def _read_json_lines(folder: Path) -> Iterator[tuple[str, int, float]]:
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert row.pop("t") > 0
        step = row.pop("step")
        yield from (point(key, step, value) for key, value in row.items())


def _read_tensorboard(folder: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    for key in events.Tags()["scalars"]:
        yield from (point(key, event.step, event.value) for event in events.Scalars(key))


def _read_dvclive(folder: Path) -> Iterator[tuple[str, int, float]]:
    tables = folder / "plots" / "metrics"
    for path in tables.rglob("*.tsv"):
        key = path.relative_to(tables).with_suffix("").as_posix()
        with path.open(encoding="utf-8") as stream:
            for row in csv.DictReader(stream, delimiter="\t"):
                yield point(key, int(row["step"]), float(row[path.stem]))


def _read_wandb(folder: Path) -> Iterator[tuple[str, int, float]]:
    rows = []
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        for record in wandb_records(path):
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    for row in rows:
        for key in row.keys() - {"system/sample"}:
            if "/" in key:
                yield point(key, row["system/sample" if key.startswith("system/") else "step"], row[key])


def wandb_records(path: Path) -> Iterator[object]:
    """Yield the records of a .wandb file in W&B's own protocol."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, offset, pending = path.read_bytes(), HEADER, b""
    while offset + HEADER <= len(data):
        if BLOCK - offset % BLOCK < HEADER:  # the rest of a block is padding
            offset += BLOCK - offset % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[offset + 4 : offset + HEADER])
        pending += data[offset + HEADER : offset + HEADER + length]
        offset += HEADER + length
        if kind in (1, 4):  # a full chunk, or the last one of a record
            yield Record.FromString(pending)
            pending = b""


READERS = {
    "json_lines": _read_json_lines,
    "tensorboard": _read_tensorboard,
    "dvclive": _read_dvclive,
    "wandb": _read_wandb,
}
