"""Rows of a dataset of the Hugging Face hub, at a pinned commit.

The first time it is downloaded into the cache of `datasets`; from then on its rows are read there, memory-mapped, and
no network is needed (without one, HF_HUB_OFFLINE=1 spares half a minute of attempts). Two habits of the library (5.2.0,
`load.py`) would give other rows than those pinned, without an error, and are stopped here: a folder of the dataset's
name in the working directory is read in its place, and where the hub cannot be reached, the newest rows in the cache
are taken, of whatever commit.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from ratchet.config.data import Source
from ratchet.data.readers import Record, as_written
from ratchet.errors import DataError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN_CHARACTERS = 300


def records(source: Source) -> Iterator[Record]:
    """Every record of `source.dataset`, in order; values of a class label are given by name.

    Raises:
        DataError: it cannot be had at this commit; the message says why.
    """
    split = _split(source)
    classes = {name: kind for name, kind in split.features.items() if isinstance(kind, datasets.ClassLabel)}
    place = f"{source.dataset}[{source.dataset_split}]"
    for index, row in enumerate(split):
        fields = {name: as_written(value) for name, value in row.items()}
        for name, kind in classes.items():
            fields[name] = _class_name(kind, fields[name])
        yield f"{place}#{index}", fields


def _split(source: Source) -> Any:
    """The split, from the cache or downloaded into it."""
    if not _COMMIT.fullmatch(source.revision or ""):
        raise DataError(
            f"{source.label}: revision {source.revision} is no commit; give the 40 digits of one (the hub's page "
            "`Files`, `History`), so that the same rows come again"
        )
    if Path(str(source.dataset)).exists():
        raise DataError(
            f"{source.label}: there is a folder {source.dataset} here, and it would be read in place of the hub's "
            "dataset; move it, or give its files below data/raw as a source"
        )
    silent = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()  # a download may take minutes
    try:
        builder = datasets.load_dataset_builder(source.dataset, source.subset, revision=source.revision)
        if builder.hash == source.revision:
            builder.download_and_prepare()
            return builder.as_dataset(split=source.dataset_split)
    except (
        Exception
    ) as error:  # of httpx, huggingface_hub, datasets, pyarrow or the file system: all mean the same here
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN_CHARACTERS]
        raise DataError(
            f"{source.label}: cannot be had from the hub ({reason}); check its name, revision, subset and split in "
            "prepare.sources, and the network"
        ) from error
    finally:
        if silent:
            datasets.disable_progress_bars()
    raise DataError(
        f"{source.label}: the hub does not give this commit, and the cache holds {builder.hash}; check the revision in "
        "prepare.sources, and the network"
    )


def _class_name(kind: datasets.ClassLabel, value: int | None) -> str | None:
    """Name of a class; unlabelled rows are null or, by the library's custom, -1."""
    return None if value is None or value < 0 else str(kind.int2str(value))
