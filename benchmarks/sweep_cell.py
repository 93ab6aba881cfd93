"""Runs the peer of benchmarks/sweep.py: a study of Optuna around Hugging Face Trainer, in one process.

    python benchmarks/sweep_cell.py PROJECT SEED STEPS [TOKENS]

The study is `optuna.create_study` with a seeded TPESampler, Optuna's default pruner (median), and storage in memory. A
trial loads the base, attaches the adapter and trains it with Trainer. A callback of six lines reports the validation
loss and ends trials that are to be pruned. Space, trials, schedule, batch and validations are those of the project's
params.yaml. Base, first weights of the adapter and order of the rows are Ratchet's, so both searches minimise nearly
the same function: another order of the rows alone changes the loss by 3 to 6 %. Validation rows are one batch, because
Trainer averages over batches: so the figure is the mean over tokens, as in Ratchet.

With TOKENS, the study ends after the trial in which this number of answer tokens was trained.

The last line of the output lists the result of each trial: {"begun", "ended", "tokens", "value", "finished"}.
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ratchet.config import params_file
from ratchet.config.train import Train
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.models import adapters, base_model, loading
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard


class Report(TrainerCallback):  # type: ignore[misc]
    """Reports every validation to Optuna."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.value = math.inf
        """Lowest validation loss so far."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, float], **_: Any
    ) -> None:
        self.value = min(self.value, metrics["eval_loss"])
        self.trial.report(metrics["eval_loss"], state.global_step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


class CountingTrainer(Trainer):  # type: ignore[misc]
    """Trainer that counts trained answer tokens. Trainer's own counter includes the tokens of the question."""

    learned = 0

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if model.training:
            self.learned += int((inputs["labels"] != -100).sum())
        return super().compute_loss(model, inputs, *arguments, **options)


class Loop:
    """The user's script: all objects that are the same for all trials."""

    def __init__(self, project: Path, steps: int, folder: Path) -> None:
        self.layout = ProjectLayout(project)
        self.settings = params_file.load(self.layout.params)
        self.steps, self.folder = steps, folder
        self.card = BaseCard.load(self.layout.base_card)
        self.path = base_model.locate(self.layout, self.card)
        self.tokenizer = base_model.load_tokenizer(self.path, self.layout.chat_template, self.card.added_tokens)
        rows, self.validation = (
            token_files.open_split(self.layout.data, split).select_columns(["input_ids", "labels"])
            for split in ("train", "validation")
        )
        plan = BatchPlan([len(ids) for ids in rows["input_ids"]], self.settings.train)
        self.rows = rows.select([row for step in range(plan.steps) for part in plan.batch(step) for row in part])
        self.told: list[dict[str, Any]] = []
        loading.use_threads(self.settings.machine.threads)

    def objective(self, trial: optuna.Trial) -> float:
        """Train once. Return the lowest validation loss in nats per token."""
        begun, report = time.time(), Report(trial)
        trainer = self._trainer(self._suggested(trial), report)
        finished = False
        try:
            trainer.train()
            if trainer.state.global_step % self.settings.train.validate_every_steps:
                trainer.evaluate()  # validates after the last step, as Ratchet does
            finished = True
            return report.value
        finally:
            self.told.append(
                {"begun": begun, "ended": time.time(), "tokens": trainer.learned, "value": report.value,
                 "finished": finished}
            )  # fmt: skip

    def _suggested(self, trial: optuna.Trial) -> Train:
        space = self.settings.sweep.space
        rank, rate = space["train.rank"], space["train.learning_rate"]
        chosen = trial.suggest_int("rank", int(rank.low or 0), int(rank.high or 0), log=rank.log)
        learning_rate = trial.suggest_float("learning_rate", rate.low or 0.0, rate.high or 0.0, log=rate.log)
        changes = {"rank": chosen, "alpha": 2.0 * chosen, "learning_rate": learning_rate}
        return self.settings.train.model_copy(update=changes)

    def _trainer(self, train: Train, report: Report) -> CountingTrainer:
        torch.manual_seed(train.seed)
        model = adapters.attach(loading.load(self.path, self.card, train, torch.device("cpu")), train, self.card.digest)
        model.peft_config["default"].base_model_name_or_path = str(self.path)  # the digest is not on the hub
        arguments = TrainingArguments(
            output_dir=str(self.folder), max_steps=self.steps, per_device_train_batch_size=train.batch_size,
            per_device_eval_batch_size=len(self.validation), learning_rate=train.learning_rate,
            lr_scheduler_type=train.schedule, warmup_steps=math.ceil(train.warmup_ratio * self.steps),
            optim="adamw_torch",
            weight_decay=train.weight_decay, max_grad_norm=train.max_grad_norm, eval_strategy="steps",
            eval_steps=train.validate_every_steps, prediction_loss_only=True, save_strategy="no", seed=train.seed,
            use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no", train_sampling_strategy="sequential",
        )  # fmt: skip
        return CountingTrainer(
            model=model, args=arguments, train_dataset=self.rows, eval_dataset=self.validation,
            data_collator=DataCollatorForSeq2Seq(self.tokenizer), processing_class=self.tokenizer, callbacks=[report],
        )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the study, and print the result of each trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="ratchet-trainer-") as folder:
        loop = Loop(Path(arguments[0]), int(arguments[2]), Path(folder))
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=int(arguments[1])))
        limit = int(arguments[3]) if len(arguments) > 3 else math.inf

        def end_at_limit(study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
            if sum(one["tokens"] for one in loop.told) >= limit:
                study.stop()

        study.optimize(loop.objective, n_trials=loop.settings.sweep.trials, callbacks=[end_at_limit])
    print(json.dumps(loop.told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
