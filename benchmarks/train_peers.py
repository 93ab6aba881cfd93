"""Trains the peers of benchmarks/train.py: transformers' Trainer and TRL's SFTTrainer on a project's own base and rows.

Sources: transformers 5.23 (`trainer.py`, `training_args.py`), TRL 1.16 (`sft_trainer.py`, `sft_config.py`). TRL packs
into sequences of `train.pack_tokens` by best fit, and flattens a micro-batch of packs to one sequence, so it has no
padding. With sdpa attention, the cost of a sequence grows with its square, so a micro-batch is one pack, the fastest
choice for TRL.
"""

import math
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft.tuners.tuners_utils import BaseTunerLayer
from train_cell import Told
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from ratchet.config import params_file
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan, split_micro_batches
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import adapters, base_model, loading
from ratchet.models.loss import SequenceBatch, answer_nll
from ratchet.models.memory import capacity
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.training import optimizer as schedule


class Clock(TrainerCallback):  # type: ignore[misc]
    """Records the times at which steps end, and the losses that the trainer logs."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.told.ended.append(time.time())
        self.told.cpu_s.append(time.process_time())

    def on_log(self, *arguments: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.told.losses.append(logs["loss"])


class Counting:
    """Collator that counts the tokens of each step. The first label of a sequence is not a prediction and does not
    count."""

    def __init__(self, collate: Any, steps_of: int, told: Told) -> None:
        self.collate, self.micro_batches, self.told, self.seen = collate, steps_of, told, 0

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        trained = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        given = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        if self.seen % self.micro_batches == 0:
            self.told.input_tokens.append(0)
            self.told.trained_tokens.append(0)
        self.told.input_tokens[-1] += int(given)
        self.told.trained_tokens[-1] += trained
        self.seen += 1
        return batch


class Peer:
    """A trainer of a peer, and the measurements after its training.

    Args:
        who: one of train_cell.CONTENDERS, except `ours`.
        project: a project with base, data and params.yaml.
        folder: folder for the trainer's output.
    """

    def __init__(self, who: str, project: Path, folder: Path) -> None:
        self.who, self.folder, self.told = who, folder, Told()
        self.layout = ProjectLayout(project)
        self.settings = params_file.load(self.layout.params)
        self.train = self.settings.train
        loading.use_threads(self.settings.machine.threads)
        self.device = loading.pick_device(self.settings.machine.device)
        self.card = BaseCard.load(self.layout.base_card)
        self.path = base_model.locate(self.layout, self.card)
        self.rows = token_files.load_rows(self.layout.data, "train")
        self.packs = who.endswith("-packed")

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer, created as a training script does."""
        tokenizer = base_model.load_tokenizer(self.path, self.layout.chat_template, self.card.added_tokens)
        found = token_files.open_split(self.layout.data, "train").select_columns(["input_ids", "labels"])
        # The data set is in memory: results derived from files are cached next to them, and a second run would reuse
        # them.
        dataset = Dataset.from_dict(found[self._order()] if self.who == "trainer-in-order" else found[:])
        common = {"model": self._model(), "train_dataset": dataset, "processing_class": tokenizer,
                  "callbacks": [Clock(self.told)]}  # fmt: skip
        if not self.who.startswith("trainer"):
            from trl import SFTTrainer

            trainer = SFTTrainer(args=self._arguments_of_trl(), **common)
            if self.who.startswith("trl") and self.who != "trl-defaults":
                for _, parameter in adapters.trainable_parameters(trainer.model):
                    parameter.data = parameter.data.to(getattr(torch, self.train.adapter_dtype))
        else:
            collate = DataCollatorForSeq2Seq(tokenizer)
            trainer = Trainer(args=TrainingArguments(**self._arguments()), data_collator=collate, **common)
        size = trainer.args.gradient_accumulation_steps
        trainer.data_collator = Counting(trainer.data_collator, size, self.told)
        trainer.create_scheduler = self._scheduler_of(trainer)
        return trainer

    def _scheduler_of(self, trainer: Trainer) -> Any:
        """Return a function that creates a schedule with Ratchet's learning rates. Those of transformers begin at 0;
        those of Ratchet begin at the first step of the warm-up."""

        def make(num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
            def factor(step: int) -> float:
                return schedule.compute_learning_rate(step, num_training_steps, self.train) / self.train.learning_rate

            trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or trainer.optimizer, factor)
            return trainer.lr_scheduler

        return make

    def _model(self) -> loading.Model:
        return self._model_of_unsloth() if self.who.startswith("unsloth") else self._model_of_peft()

    def _model_of_unsloth(self) -> Any:
        """Create the model as unsloth's documentation does, with its own choice of types. Its kernels come with the
        model."""
        from unsloth import FastLanguageModel

        longest = self.train.pack_tokens
        model, _ = FastLanguageModel.from_pretrained(str(self.path), max_seq_length=longest, load_in_4bit=True)
        return FastLanguageModel.get_peft_model(
            model, r=self.train.rank, lora_alpha=self.train.alpha, lora_dropout=0, bias="none",
            use_gradient_checkpointing=False, random_state=self.train.seed,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        )  # fmt: skip

    def _model_of_peft(self) -> loading.Model:
        base = loading.load(self.path, self.card, self.train, self.device)
        model = adapters.attach(base, self.train, self.card.digest)
        model.peft_config["default"].base_model_name_or_path = str(self.path)  # the digest is not on the hub
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.__dict__.pop("forward", None)  # Ratchet's forward (models/adapters.py); the peer uses peft's
        return model

    def _order(self) -> list[int]:
        """Return Ratchet's order of rows, step by step."""
        plan = BatchPlan(self.rows.lengths, self.train)
        return [row for step in range(plan.steps) for sequence in plan.batch(step) for row in sequence]

    def _rows_of_step(self) -> int:
        """Return the number of sequences of a step: as many as Ratchet's, or as hold about as many tokens."""
        counts_packs = self.train.batching == "packed"
        if self.packs == counts_packs:
            return self.train.batch_size
        rows_of_pack = self.train.pack_tokens / float(self.rows.lengths.mean())
        return max(1, round(self.train.batch_size * (rows_of_pack if counts_packs else 1 / rows_of_pack)))

    def _arguments(self) -> dict[str, Any]:
        """Return the project's settings as Trainer's arguments."""
        train, of_step = self.train, self._rows_of_step()
        micro = 1 if self.packs else math.gcd(self.settings.machine.micro_batch_size, of_step)
        in_order = self.who == "trainer-in-order"
        strategies = {"trl-grouped": "group_by_length", "trainer-in-order": "sequential"}
        dtype = loading.pick_dtype(train.compute_dtype, self.device)
        return {
            "output_dir": str(self.folder), "num_train_epochs": 1 if in_order else train.epochs,
            "per_device_train_batch_size": micro, "gradient_accumulation_steps": of_step // micro,
            "learning_rate": train.learning_rate, "optim": "adamw_torch",
            "weight_decay": train.weight_decay, "max_grad_norm": train.max_grad_norm,
            "train_sampling_strategy": strategies.get(self.who, "random"), "seed": train.seed,
            "activation_checkpointing": False, "bf16": self.device.type == "cuda" and dtype == torch.bfloat16,
            "logging_steps": 1 if in_order else 10, "logging_nan_inf_filter": not in_order,
            "save_strategy": "no", "use_cpu": self.device.type == "cpu", "report_to": [], "disable_tqdm": True,
        }  # fmt: skip

    def _arguments_of_trl(self) -> Any:
        from trl import SFTConfig

        given = self._arguments()
        if self.who == "trl-defaults":
            given |= {"activation_checkpointing": True}
        longest = self.train.pack_tokens if self.packs else int(self.rows.lengths.max())
        return SFTConfig(**given, max_length=longest, packing=self.packs)

    def peak_bytes(self) -> int:
        """Return the peak memory of the training in bytes."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else capacity.peak_resident_bytes()

    def validation_loss(self) -> float:
        """Return the mean loss over all answer tokens of the validation rows, as Ratchet's training loop computes
        it."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model).eval()
        rows = token_files.load_rows(self.layout.data, "validation")
        everything = list(range(len(rows)))
        size = self.settings.machine.micro_batch_size
        with torch.no_grad():
            total = sum(
                float(answer_nll(model, batch.input_ids, batch.labels).double().sum())
                for piece in split_micro_batches(everything, rows.lengths.tolist(), size)
                for batch in [SequenceBatch.from_sequences(rows, [[row] for row in piece], self.device)]
            )
        return total / rows.count_trained(everything)
