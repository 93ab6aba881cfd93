"""Proves that losses, and so gradients, of preference tuning equal those of TRL's DPOTrainer at each step, on the same
pairs in the same order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from golden_loss_cases import arguments_of, greatest_difference, losses_of, model_of, settings_of
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models.loss import pad_rows
from ratchet.training.trainer import TrainingLoop
from small_loop import SHAPE, loop_of, losses

trl = pytest.importorskip("trl", reason="TRL is not installed (pip install -c constraints.txt -e '.[benchmarks]')")

PACKAGES = ("training", "models")
TOLERANCE = 1e-4
"""Relative tolerance of the loss of each step; TRL adds the log-probabilities of an answer in float32."""
PEER_LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}


class PairTrainer(trl.DPOTrainer):  # type: ignore[misc] # without types
    """DPOTrainer on rows that are tokens already."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset


def collated(pairs: list[dict[str, list[list[int]]]]) -> dict[str, torch.Tensor]:
    """Pad the pairs as DPOTrainer's collator does: first all chosen answers, then all rejected ones."""
    rows = [pair["rows"][k] for k in (0, 1) for pair in pairs]
    labels = [pair["labels"][k] for k in (0, 1) for pair in pairs]
    device = torch.device("cpu")
    return {
        "input_ids": pad_rows(rows, 0, device),
        "attention_mask": pad_rows([[1] * len(row) for row in rows], 0, device),
        "completion_mask": pad_rows([[int(label != IGNORE_INDEX) for label in row] for row in labels], 0, device),
    }


def pairs_of(loop: TrainingLoop) -> Dataset:
    """Return the pairs in the order in which Ratchet's steps use them."""
    rows = loop.context.train_rows
    pairs = [pair for step in range(loop.plan.steps) for pair in loop.plan.batch(step)]
    spans = [[slice(int(rows.offsets[row]), int(rows.offsets[row + 1])) for row in pair] for pair in pairs]
    return Dataset.from_dict(
        {
            "rows": [[rows.input_ids[span].tolist() for span in pair] for pair in spans],
            "labels": [[rows.labels[span].tolist() for span in pair] for pair in spans],
        }
    )


@pytest.mark.parametrize("objective", PEER_LOSSES)
@pytest.mark.parametrize(("batch_rows", "micro"), [(1, 1), (4, 4), (4, 2)], ids=str)
def test_losses_are_those_of_trl(tmp_path: Path, objective: str, batch_rows: int, micro: int) -> None:
    train = settings_of(batch_rows)
    # The rows form half as many pairs.
    train = train.model_copy(update={"objective": objective, "epochs": 2 * train.epochs, "learning_rate": 0.003})
    loop = loop_of(tmp_path / "ours", train, micro=micro)
    words = WordLevel({"<pad>": 0} | {f"w{number}": number for number in range(1, SHAPE["vocab_size"])}, "w1")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="w2")  # noqa: S106
    more = {"beta": train.beta, "loss_type": [PEER_LOSSES[objective]], "remove_unused_columns": False}
    peer = PairTrainer(
        model=model_of(loop), args=trl.DPOConfig(**arguments_of(loop, micro, tmp_path / "peer", **more)),
        train_dataset=pairs_of(loop), data_collator=collated, processing_class=tokenizer,
    )  # fmt: skip
    loop.run()
    ours = losses(loop.context.paths)
    assert greatest_difference(ours, losses_of(peer, train)) <= TOLERANCE
    assert min(ours) < 0.95 * ours[0]  # the model learns; equal losses of a constant model would prove nothing
