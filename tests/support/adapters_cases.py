"""All kinds of adapters in the training loop: each adapter learns, and an interruption does not change the result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ratchet.config.train import Train
from ratchet.models import adapters, loading
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal
from ratchet.training import checkpoint
from ratchet.training.train_state import TrainSnapshot
from ratchet.training.trainer import TrainingLoop
from small_loop import SHAPE, SMALL, StopAfterSteps, loop_of

CPU = torch.device("cpu")
GPT2 = {
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
}
WIDE = SHAPE | {"hidden_size": 64, "intermediate_size": 128}
"""Shape of the test models. On some CPUs, bitsandbytes computes wrong results for narrower matrices."""
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "tied": lambda: transformers.LlamaConfig(**WIDE, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
}
METHODS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "rank_pattern": {r".*\.0\..*": 2}, "alpha": 64, "learning_rate": 0.03},
    "loraplus": {"loraplus_lr_ratio": 4.0, "weight_decay": 0.1},
    "dora": {"adapter": "dora", "weight_decay": 0.1},
    "pissa": {"initialization": "pissa"},
    "adalora": {
        "adapter": "adalora",
        "rank": 6,
        "alpha": 32,
        "adalora": {"target_rank": 2, "every_steps": 3},
        "learning_rate": 0.05,  # singular values start at zero, while the vectors are small
    },
    "loraplus-8bit": {"loraplus_lr_ratio": 4.0, "optimizer": "adamw_8bit", "rank": 16},
}


def settings(method: str, quantization: str = "none") -> Train:
    return Train.model_validate(SMALL.model_dump() | METHODS[method] | {"quantization": quantization})


def loop(root: Path, train: Train, family: str, stop: int | None = None, tokens: tuple[int, ...] = ()) -> TrainingLoop:
    """Create a loop as a new process does. The base is loaded in 4 bits if the settings require it."""
    stopping = None if stop is None else StopAfterSteps(RunPaths(root), stop)
    if train.quantization == "none" and not tokens:
        return loop_of(root, train, stopping, config=CONFIGS[family]())
    directory = root.parent / f"base-{family}"
    if not directory.exists():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(directory)
    # This loop only provides its rows, plan and settings; it runs no step.
    task = loop_of(root.parent / "unused", settings("rslora"), config=CONFIGS["llama"]()).context
    RunPaths(root).checkpoints.mkdir(parents=True, exist_ok=True)
    journal = Journal(RunPaths(root).journal, 1)
    base = loading.load(directory, None, train, CPU)
    return TrainingLoop(
        replace(
            task, spec=task.spec.model_copy(update={"train": train}), paths=RunPaths(root), journal=journal,
            model=adapters.attach(base, train, "base", tokens, task.batch_plan.steps),
            shutdown=stopping or task.shutdown,
        )
    )  # fmt: skip


def state_of(done: TrainingLoop) -> TrainSnapshot:
    return checkpoint.take_snapshot(done.state, done.context.model, done.executor.optimizer)
