"""Ratchet's losses equal those of transformers' Trainer and of TRL at each step, on the same rows in the same order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import Trainer, TrainerCallback, TrainingArguments

from ratchet.config.train import Train
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import adapters
from ratchet.models.loss import pad_rows
from ratchet.training import optimizer as schedule
from ratchet.training.trainer import TrainingLoop
from small_loop import ROWS, SHAPE, SMALL, loop_of, losses

STEPS = 50
TOLERANCE = 1e-5
"""Relative tolerance of the loss of each step. float32 has a precision of 1.2e-7, and the rounding errors of a step
affect all later steps."""
PeerOf = Callable[..., Trainer]


class Log(TrainerCallback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def settings_of(batch_rows: int) -> Train:
    """Return settings for fifty steps with this number of rows per step."""
    changes = {"dropout": 0.0, "batch_size": batch_rows, "epochs": STEPS * batch_rows / ROWS, "learning_rate": 0.003}
    return SMALL.model_copy(update=changes)


def arguments_of(loop: TrainingLoop, micro: int, folder: Path, **more: Any) -> dict[str, Any]:
    """Convert Ratchet's settings to the arguments of Trainer."""
    train = loop.context.settings
    return {
        "output_dir": str(folder), "num_train_epochs": 1, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": train.batch_size // micro, "learning_rate": train.learning_rate,
        "max_grad_norm": train.max_grad_norm, "weight_decay": train.weight_decay, "optim": "adamw_torch",
        "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "activation_checkpointing": False,
        "dataloader_pin_memory": False, "seed": train.seed, **more,
    }  # fmt: skip


def dataset_of(loop: TrainingLoop) -> Dataset:
    """Return the rows in the order in which Ratchet's steps use them."""
    rows, order = loop.context.train_rows, [row for step in range(STEPS) for (row,) in loop.plan.batch(step)]
    spans = [slice(int(rows.offsets[row]), int(rows.offsets[row + 1])) for row in order]
    return Dataset.from_dict(
        {"input_ids": [rows.input_ids[span].tolist() for span in spans],
         "labels": [rows.labels[span].tolist() for span in spans]}
    )  # fmt: skip


def model_of(loop: TrainingLoop) -> Any:
    """Create the loop's model again, with peft's own forward passes."""
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    model = adapters.attach(plain, loop.context.settings, "base", (), STEPS)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.__dict__.pop("forward", None)
    return model


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the rows on the right and add an attention mask."""
    ids, device = [row["input_ids"] for row in rows], torch.device("cpu")
    return {
        "input_ids": pad_rows(ids, 0, device), "labels": pad_rows([row["labels"] for row in rows], IGNORE_INDEX,
            device),
        "attention_mask": pad_rows([[1] * len(row) for row in ids], 0, device),
    }  # fmt: skip


def trainer(loop: TrainingLoop, micro: int, folder: Path, kind: type[Trainer] = Trainer) -> Trainer:
    """Create a Trainer of transformers."""
    arguments = TrainingArguments(**arguments_of(loop, micro, folder))
    return kind(model=model_of(loop), args=arguments, train_dataset=dataset_of(loop), data_collator=collated)


def losses_of(peer: Trainer, train: Train) -> list[float]:
    """Train the peer and return its losses. The peer uses Ratchet's learning rates, because the warm-up of transformers
    begins at 0."""

    def scheduler(num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        def factor(step: int) -> float:
            return schedule.compute_learning_rate(step, num_training_steps, train) / train.learning_rate

        peer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or peer.optimizer, factor)
        return peer.lr_scheduler

    log = Log()
    peer.add_callback(log)
    peer.create_scheduler = scheduler
    peer.train()
    return log.losses


def both(tmp_path: Path, batch_rows: int, micro: int, make: PeerOf, **more: Any) -> tuple[list[float], list[float]]:
    """Return the losses of all steps, first Ratchet's and then the peer's."""
    train = settings_of(batch_rows)
    loop = loop_of(tmp_path / "ours", train, micro=micro)
    peer = make(loop, micro, tmp_path / "peer", **more)
    loop.run()
    return losses(loop.context.paths), losses_of(peer, train)


def greatest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference over all steps."""
    assert len(ours) == len(theirs) == STEPS
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
