"""Trains the peer of benchmarks/preference.py: TRL's DPOTrainer on a project's own base and pairs.

Source: TRL 1.16 (`dpo_trainer.py`, `dpo_config.py`). The reference is the base with the adapter off, as in Ratchet.
DPOTrainer pads both answers of all pairs of a micro-batch to the longest one.
"""

import math
from functools import cached_property
from typing import Any

from datasets import Dataset
from train_peers import Clock, Peer
from transformers import Trainer

from ratchet.data import token_files
from ratchet.data.batches import list_rows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import adapters, base_model


class CountingPairs:
    """Collator that counts the tokens of each step."""

    def __init__(self, collate: Any, micro_batches: int, told: Any) -> None:
        self.collate, self.micro_batches, self.told, self.seen = collate, micro_batches, told, 0

    def __call__(self, pairs: Any) -> Any:
        batch = self.collate(pairs)
        if self.seen % self.micro_batches == 0:
            self.told.input_tokens.append(0)
            self.told.trained_tokens.append(0)
        self.told.input_tokens[-1] += int(batch["attention_mask"].sum())
        self.told.trained_tokens[-1] += int(batch["completion_mask"].sum())
        self.seen += 1
        return batch


class PairPeer(Peer):
    """DPOTrainer, and the measurements after its training."""

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer, created as a training script does, on pairs that are tokens already."""
        from trl import DPOConfig, DPOTrainer

        class PairTrainer(DPOTrainer):  # type: ignore[misc] # without types
            def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
                return dataset

        tokenizer = base_model.load_tokenizer(self.path, self.layout.chat_template, self.card.added_tokens)
        arguments = self._arguments()
        size = math.gcd(self.settings.machine.micro_batch_size, self.train.batch_size)
        arguments |= {
            "per_device_train_batch_size": size, "gradient_accumulation_steps": self.train.batch_size // size,
            "beta": self.train.beta, "max_length": None, "remove_unused_columns": False,
        }  # fmt: skip
        trainer = PairTrainer(
            model=self._model(), args=DPOConfig(**arguments), train_dataset=self._pairs(), processing_class=tokenizer,
            callbacks=[Clock(self.told)],
        )  # fmt: skip
        for _, parameter in adapters.trainable_parameters(trainer.model):
            parameter.data = parameter.data.float()
        trainer.data_collator = CountingPairs(
            trainer.data_collator, trainer.args.gradient_accumulation_steps, self.told
        )
        trainer.create_scheduler = self._scheduler_of(trainer)
        return trainer

    def _pairs(self) -> Dataset:
        """Return prompt, chosen and rejected tokens of each pair."""
        rows = token_files.load_rows(self.layout.data, "train", "dpo")
        columns: dict[str, list[list[int]]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
        for pair in range(len(rows) // 2):
            for name, row in zip(("chosen_ids", "rejected_ids"), list_rows([pair], 2), strict=True):
                span = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
                ids, labels = rows.input_ids[span].tolist(), rows.labels[span].tolist()
                first = next(i for i, label in enumerate(labels) if label != IGNORE_INDEX)
                last = max(i for i, label in enumerate(labels) if label != IGNORE_INDEX)
                columns[name].append(ids[first : last + 1])
            columns["prompt_ids"].append(ids[:first])
        return Dataset.from_dict(columns)

    def validation_loss(self) -> float:
        """Return nan: losses are compared step by step in a proof."""
        return math.nan
