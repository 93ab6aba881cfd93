"""Proves that examples/quickstart.ipynb runs from its first to its last cell, in a real kernel and a new directory."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

PACKAGES = ("api", "stages")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


class CountingClient(NotebookClient):
    """Executes a notebook and counts how often a cell replaced something that it had displayed."""

    updates = 0

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        self.updates += msg["msg_type"] == "update_display_data"
        return super().process_message(msg, cell, cell_index)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs_to_its_end(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = CountingClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    [training] = [found for source, found in outputs.items() if "class LivePlot" in source]
    pictures = [output for output in training if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    assert client.updates >= 2 * len(pictures)  # each is drawn during the training, and at its end

    [compared] = [found for source, found in outputs.items() if "ratchet.compare" in source]
    assert "train.rank" in str(compared)
    text = "".join(output.get("text", "") for found in outputs.values() for output in found)
    project = tmp_path / "quickstart"
    decision = json.loads((project / "experiments" / "gate" / "verdict.json").read_text(encoding="utf-8"))["decision"]
    assert decision == "HOLD"  # some 60 test rows cannot show that nothing was lost
    assert f": {decision}" in text
    assert "where is my parcel, order 1234 -> delivery" in text
    assert len(list((project / "experiments" / "runs").glob("*/result"))) == 2
