"""Proves that losses, and so gradients, of preference tuning equal those of TRL's DPOTrainer and KTOTrainer at each
step, on the same pairs or labelled answers in the same order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from golden_loss_cases import STEPS, arguments_of, greatest_difference, losses_of, model_of, settings_of
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models.loss import pad_rows
from ratchet.models.preference_loss import weigh_labels
from ratchet.training.trainer import TrainingLoop
from small_loop import ROWS, SHAPE, loop_of, losses, random_rows, steps

trl = pytest.importorskip("trl", reason="TRL is not installed (pip install -c constraints.txt -e '.[benchmarks]')")

PACKAGES = ("training", "models")
TOLERANCE = 1e-4
"""Relative tolerance of the loss of each step; TRL adds the log-probabilities of an answer in float32."""
EOS = 2
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


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word per token, whose words are separated by spaces."""
    words = WordLevel({"<pad>": 0} | {f"w{number:02}": number for number in range(1, SHAPE["vocab_size"])}, "w01")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=f"w{EOS:02}")  # noqa: S106


def labelled_of(loop: TrainingLoop) -> Dataset:
    """Return the labelled answers as text in the order in which Ratchet's steps use them."""
    rows, texts = loop.context.train_rows, []
    for row in (row for step in range(loop.plan.steps) for (row,) in loop.plan.batch(step)):
        span = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids, labels = rows.input_ids[span].tolist(), rows.labels[span].tolist()
        words, masked = [f"w{number:02}" for number in ids], labels.count(IGNORE_INDEX)
        texts.append((" ".join(words[:masked]) + " ", " ".join(words[masked:]), bool(rows.is_desirable[row])))
    return Dataset.from_dict(dict(zip(("prompt", "completion", "label"), zip(*texts, strict=True), strict=True)))


@pytest.mark.parametrize("micro", [4, 3])
def test_losses_of_labelled_answers_are_those_of_trl(tmp_path: Path, micro: int) -> None:
    """KTOTrainer makes the mismatched answers itself, within its batches. They are Ratchet's batches of a step here,
    while Ratchet divides them into micro-batches."""
    train = settings_of(4).model_copy(update={"objective": "kto", "learning_rate": 0.003})
    rows = random_rows(ROWS, seed=1)
    ends = {name: getattr(rows, name).copy() for name in ("input_ids", "labels")}
    for values in ends.values():
        values[rows.offsets[1:] - 1] = EOS  # KTOTrainer would add it
    loop = loop_of(tmp_path / "ours", train, micro=micro, train_rows=replace(rows, **ends))
    rows = loop.context.train_rows
    desirable_weight, undesirable_weight = weigh_labels(rows.is_desirable)
    more = {"beta": train.beta, "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    peer = trl.KTOTrainer(
        model=model_of(loop), train_dataset=labelled_of(loop), processing_class=word_tokenizer(),
        args=trl.KTOConfig(max_length=int(rows.lengths.max()), **arguments_of(loop, 4, tmp_path / "peer", **more)),
    )  # fmt: skip
    loop.run()
    ours = losses(loop.context.paths)
    assert greatest_difference(ours, losses_of(peer, train)) <= TOLERANCE
    assert sum(event.data["kl"] > 0 for event in steps(loop.context.paths)) >= STEPS / 4  # z is not always cut off at 0
    names = {"kl": "kl", "reward_margin": "rewards/margins", "rejected_log_probability": "logps/rejected"}
    for event, log in zip(steps(loop.context.paths), peer.state.log_history, strict=False):
        for name, peer_name in names.items():
            assert event.data.get(name) == (pytest.approx(log[peer_name], 1e-3, 1e-4) if peer_name in log else None)
    assert steps(loop.context.paths)[-1].data["reward_margin"] > 0.02  # the model learns


@pytest.mark.parametrize("objective", PEER_LOSSES)
@pytest.mark.parametrize(("batch_rows", "micro"), [(1, 1), (4, 4), (4, 2)], ids=str)
def test_losses_are_those_of_trl(tmp_path: Path, objective: str, batch_rows: int, micro: int) -> None:
    train = settings_of(batch_rows)
    # The rows form half as many pairs.
    train = train.model_copy(update={"objective": objective, "epochs": 2 * train.epochs, "learning_rate": 0.003})
    loop = loop_of(tmp_path / "ours", train, micro=micro)
    more = {"beta": train.beta, "loss_type": [PEER_LOSSES[objective]], "remove_unused_columns": False}
    peer = PairTrainer(
        model=model_of(loop), args=trl.DPOConfig(**arguments_of(loop, micro, tmp_path / "peer", **more)),
        train_dataset=pairs_of(loop), data_collator=collated, processing_class=word_tokenizer(),
    )  # fmt: skip
    loop.run()
    ours = losses(loop.context.paths)
    assert greatest_difference(ours, losses_of(peer, train)) <= TOLERANCE
    assert min(ours) < 0.95 * ours[0]  # the model learns; equal losses of a constant model would prove nothing
