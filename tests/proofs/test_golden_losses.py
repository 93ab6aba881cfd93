"""Proves that the losses and gradients of Ratchet's training step equal those of transformers and TRL on the same
rows."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer

from golden_loss_cases import (
    TOLERANCE,
    PeerOf,
    arguments_of,
    both,
    dataset_of,
    greatest_difference,
    model_of,
    trainer,
)
from ratchet.training.trainer import TrainingLoop
from small_loop import SHAPE

PACKAGES = ("training", "models")


def sft_trainer(loop: TrainingLoop, micro: int, folder: Path) -> Trainer:
    """Create a trainer of TRL. Skips the test if TRL is not installed."""
    trl = pytest.importorskip("trl", reason="TRL is not installed (pip install -c constraints.txt -e '.[benchmarks]')")
    words = WordLevel({"<pad>": 0} | {f"w{number}": number for number in range(1, SHAPE["vocab_size"])}, "w1")
    special = {"pad_token": "<pad>", "eos_token": "w2"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
    arguments = trl.SFTConfig(**arguments_of(loop, micro, folder, max_length=SHAPE["max_position_embeddings"]))
    return trl.SFTTrainer(
        model=model_of(loop), args=arguments, train_dataset=dataset_of(loop), processing_class=tokenizer
    )


@pytest.mark.parametrize("make", [trainer, sft_trainer], ids=["transformers", "trl"])
@pytest.mark.parametrize(("batch_rows", "micro"), [(1, 1), (4, 4), (4, 1), (8, 2), (8, 4)], ids=str)
def test_losses_are_those_of_the_peer(tmp_path: Path, batch_rows: int, micro: int, make: PeerOf) -> None:
    ours, theirs = both(tmp_path, batch_rows, micro, make)
    assert greatest_difference(ours, theirs) <= TOLERANCE
    assert min(ours) < 0.99 * ours[0]  # the model learns; equal losses of a constant model would prove nothing
