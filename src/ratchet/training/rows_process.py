"""Starts the process that records the rows on which a run was trained (`training/trained_rows.py`)."""

import json
import subprocess
import sys

from ratchet.config.train import Train
from ratchet.config.units import describe_failure
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.log import print_message
from ratchet.storage.layout import ProjectLayout

MODULE = "ratchet.training.trained_rows"


def record_rows(layout: ProjectLayout, run: RunPaths, spec: RunSpec, train: Train) -> None:
    """Write trained_rows.bin of a run, unless it is there and complete. Takes a second, and more for large data.

    A failure is only printed, because the training is complete. A training that starts from this run then reports that
    its rows are not known.

    Args:
        layout: the project, with the data of the run.
        run: its directory; the caller holds its lock.
        spec: its spec.
        train: section train, in which init_adapter is no digest.
    """
    if _is_complete(run):
        return
    command = [sys.executable, "-m", MODULE, str(layout.root), str(run.root), spec.data_digest]
    done = subprocess.run(command, input=train.model_dump_json(), capture_output=True, text=True, check=False)
    message = done.stderr.strip()
    if done.returncode:
        print_message(f"{run.trained_rows}: not written ({describe_failure(message, done.returncode)})")


def _is_complete(run: RunPaths) -> bool:
    """Return whether the file is there with the length that its first line names, and with all rows of the start."""
    try:
        with run.trained_rows.open("rb") as stream:
            line = stream.readline()
            header = json.loads(line)
            size = len(line) + 8 * (header["own"] + header["start"])
            return not header["unknown"] and run.trained_rows.stat().st_size == size
    except (OSError, ValueError, KeyError, TypeError):
        return False
