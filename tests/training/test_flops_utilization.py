"""Compares the predicted operations of a training with those that torch counts."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from ratchet.training import profiler, step_timer
from small_loop import SHAPE, SMALL, loop_of

LAYERS = 12


def test_operations_are_those_that_torch_counts_without_attention(tmp_path: Path) -> None:
    """Each row is a micro-batch, so there is no padding. The prediction and the count differ in a part of the first
    and of the last layer."""
    width = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(**SHAPE | width)
    loop = loop_of(tmp_path, SMALL.model_copy(update={"dropout": 0.0}), micro=1, config=config)
    task, executor = loop.context, loop.executor
    rows = [row for sequence in task.batch_plan.batch(0) for row in sequence]
    with profiler.count_workload(task.model) as asked:
        executor.compute_gradients(1)
    tokens = task.train_rows.count_tokens(rows)
    told = step_timer.flops_per_token(task.model, task.train_rows.count_trained(rows) / tokens)
    assert told is not None
    # Attention over n tokens has two products forward (scores, weighted sum of values) and five backward (including the
    # scores again).
    attention = sum(LAYERS * (2 + 5) * 2 * task.train_rows.count_tokens([row]) ** 2 * 64 for row in rows)
    assert told * tokens == pytest.approx(asked.flops - attention, rel=0.07)


def test_matrices_of_an_unknown_kind_make_it_unknown(tmp_path: Path) -> None:
    model = loop_of(tmp_path, SMALL).context.model
    assert step_timer.flops_per_token(model, 0.5)
    layer = model.get_submodule("base_model.model.model.layers.0")
    layer.register_parameter("experts", nn.Parameter(torch.zeros(8, 32, 48), requires_grad=False))
    assert step_timer.flops_per_token(model, 0.5) is None
