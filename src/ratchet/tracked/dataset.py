"""Prepared data as MLflow's own dataset input, by the digest of what was learned from."""

import json
from pathlib import Path
from typing import Any

from ratchet import digest
from ratchet.card import DatasetCard

NAME_CHARACTERS = 400


def is_there(run: Any, card: DatasetCard) -> bool:
    """Whether MLflow's run has these data as an input."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    return any(one.dataset.digest == card.digest[: digest.SHORT] for one in inputs)


def log(client: Any, mlflow_id: str, card: DatasetCard) -> None:
    """Add it. MLflow keeps one for each name and digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = {"rows_in": card.rows_in, "rows": card.rows_out, "splits": card.splits}
    profile |= {"dropped": {reason: drop.count for reason, drop in card.dropped.items()}}
    profile |= {"tokens": {name: lengths.total for name, lengths in card.lengths.items()}}
    dataset = Dataset(
        name=", ".join(Path(source).name for source in card.sources)[:NAME_CHARACTERS],
        digest=card.digest[: digest.SHORT],
        source_type="local",
        source=json.dumps({"uri": next(iter(card.sources), ""), "sha256": card.sources}),
        profile=json.dumps(profile),
    )
    client.log_inputs(mlflow_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
