"""Trains the peer of benchmarks/chaos.py: Hugging Face Trainer on a project's own base, data and LoRA settings.

    python benchmarks/peer_trainer.py PROJECT OUT --steps 24 --save-every 2 [--jit] [--by-length] [--find-batch-size]

The script follows the documentation: checkpoints by steps, `save_total_limit`, resume from `get_last_checkpoint`,
`full_determinism`. The base is loaded as Ratchet loads it (NF4 by bitsandbytes, same compute dtype), and the same peft
call attaches the adapter, so that only the training loop differs. Sources: transformers 5.23, `training_args.py`,
`trainer.py`, `trainer_utils.get_last_checkpoint`, `trainer_jit_checkpoint.py`.

OUT receives the checkpoints, `log.jsonl` (events, by which the benchmark times its kills) and, at the end,
`result.json`: SHA-256 of trainable weights and of the optimizer's state, the Trainer's own log, and whether all weights
are finite. Environment variables request faults, as in Ratchet: PEER_NAN_STEP (the loss of a micro-batch of this step
becomes NaN) and PEER_OOM_MICRO_BATCH (this micro-batch runs out of memory). Each fault occurs once per process.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fingerprints import fingerprint
from transformers import (
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.models import adapters, base_model, loading
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.training import optimizer as optimizers

LOGGING_STEPS = 5
LOG, RESULT = "log.jsonl", "result.json"
NAN_STEP, OOM_MICRO_BATCH = "PEER_NAN_STEP", "PEER_OOM_MICRO_BATCH"


@dataclass(frozen=True)
class Options:
    """Arguments of the script."""

    project: Path
    out: Path
    steps: int
    save_every: int
    jit: bool = False
    """Save a checkpoint at SIGTERM (`enable_jit_checkpoint`)."""
    by_length: bool = False
    """Put rows of similar length into the same batch (`train_sampling_strategy="group_by_length"`)."""
    find_batch_size: bool = False
    """Continue with smaller micro-batches after an out-of-memory error (`auto_find_batch_size`)."""
    pause_s: float = 0.0
    """Pause in seconds in every micro-batch, which stands for the time of a larger model."""

    def arguments(self) -> list[str]:
        """Return the options as a command line."""
        switches = {"--jit": self.jit, "--by-length": self.by_length, "--find-batch-size": self.find_batch_size}
        numbers = {"--steps": self.steps, "--save-every": self.save_every, "--pause-s": self.pause_s}
        return [
            str(self.project), str(self.out), *(text for name, value in numbers.items() for text in (name, str(value))),
            *(name for name, asked in switches.items() if asked),
        ]  # fmt: skip


class Log(TrainerCallback):  # type: ignore[misc]
    """Writes events to a file, one per line. The benchmark reads the file to time its faults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trainer: Trainer | None = None

    def tell(self, event: str, **data: Any) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"event": event, **data}) + "\n")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        rows = self.trainer._train_batch_size if self.trainer else 0
        self.tell(
            "begin", step=state.global_step, planned=state.max_steps, micro_batch_size=rows,
            batch_rows=rows * args.gradient_accumulation_steps,
        )  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.tell("step", step=state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.tell("saved", step=state.global_step)


class FaultyTrainer(Trainer):  # type: ignore[misc]
    """Trainer with faults in `compute_loss`, the method that its documentation lets subclasses override."""

    pause_s = 0.0
    nan_step = 0
    oom_micro_batch = 0
    micro_batches = 0

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *arguments, **options)
        time.sleep(self.pause_s)
        self.micro_batches += 1
        if self.micro_batches == self.oom_micro_batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected).")
        if self.state.global_step + 1 == self.nan_step:
            self.nan_step = 0
            return loss * math.nan
        return loss


def training_arguments(settings: Settings, options: Options) -> TrainingArguments:
    """Return the project's settings as Trainer's arguments. Gradient accumulation combines micro-batches into the batch
    of a step."""
    train, rows = settings.train, min(settings.machine.micro_batch_size, settings.train.batch_size)
    return TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=train.batch_size // rows,
        learning_rate=train.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(train.schedule, train.schedule),
        warmup_steps=math.ceil(train.warmup_ratio * options.steps),
        optim="adamw_torch",
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=2,
        enable_jit_checkpoint=options.jit,
        auto_find_batch_size=options.find_batch_size,
        train_sampling_strategy="group_by_length" if options.by_length else "random",
        logging_steps=LOGGING_STEPS,
        full_determinism=True,
        seed=train.seed,
        use_cpu=loading.pick_device(settings.machine.device).type == "cpu",
        report_to=[],
        disable_tqdm=True,
    )


def trainer_of(options: Options, log: Log) -> Trainer:
    """Create base, adapter, data and Trainer, as a training script does."""
    layout = ProjectLayout(options.project)
    settings = params_file.load(layout.params)
    loading.use_threads(settings.machine.threads)
    device = loading.pick_device(settings.machine.device)
    card = BaseCard.load(layout.base_card)
    path = base_model.locate(layout, card)
    model = adapters.attach(loading.load(path, card, settings.train, device), settings.train, card.digest)
    model.peft_config["default"].base_model_name_or_path = str(path)  # peft would look for the digest on the hub
    tokenizer = base_model.load_tokenizer(path, layout.chat_template, card.added_tokens)
    rows = token_files.open_split(layout.data, "train").select_columns(["input_ids", "labels"])
    trainer = FaultyTrainer(
        model=model,
        args=training_arguments(settings, options),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        callbacks=[log],
    )
    trainer.pause_s = options.pause_s
    trainer.nan_step = int(os.environ.get(NAN_STEP, "0"))
    trainer.oom_micro_batch = int(os.environ.get(OOM_MICRO_BATCH, "0"))
    log.trainer = trainer
    return trainer


def train(options: Options) -> None:
    """Train to the end, starting from the last checkpoint if there is one."""
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / LOG)
    log.tell("start")
    trainer = trainer_of(options, log)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.out)))
    weights = dict(adapters.trainable_parameters(trainer.model))
    state, rest = optimizers.flatten_state(trainer.optimizer)
    done = trainer.state.global_step >= trainer.state.max_steps
    result = {
        "finished": done,
        "step": trainer.state.global_step,
        "planned": trainer.state.max_steps,
        "weights": fingerprint(weights),
        "optimizer": fingerprint(state, rest["groups"]),
        "losses": {str(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
        "train_loss": next((e["train_loss"] for e in reversed(trainer.state.log_history) if "train_loss" in e), None),
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()),
    }
    if done:
        (options.out / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("project", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--jit", action="store_true", help="checkpoint at SIGTERM (enable_jit_checkpoint)")
    parser.add_argument("--by-length", action="store_true", help="group_by_length")
    parser.add_argument("--find-batch-size", action="store_true", help="auto_find_batch_size")
    parser.add_argument("--pause-s", type=float, default=0.0, help="wait in every micro-batch")
    train(Options(**vars(parser.parse_args(arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
