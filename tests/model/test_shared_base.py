"""The memory of a base that ranks share: by arithmetic from the shapes of its matrices."""

from typing import Literal

import pytest
import torch

import families
from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.model import blueprint, forecast, replica
from ratchet.model.forecast import Work

Device = Literal["cpu", "cuda"]


def test_a_rank_computes_its_part_of_a_step_and_no_more() -> None:
    work = Work(8, 48, 24, packed=False, device="cuda")
    assert [work.among(ranks, 1, 16).rows for ranks in (1, 2, 3, 16, 17)] == [8, 8, 6, 1, 1]


def test_gradients_of_an_earlier_micro_batch_are_there_only_where_a_rank_has_several() -> None:
    plan = blueprint.of_config(families.FAMILIES["llama"](max_position_embeddings=2048))

    def gradients(ranks: int) -> int:
        work = Work(2, 1024, 512, packed=False, device="cuda", ranks=ranks)
        parts = forecast.forecast(plan, Train(rank=4, batch_rows=8), Machine(), work).of("first_step").parts
        assert parts["activations"] > 0, "the peak is in the middle of the step"
        return parts.get("gradients", 0)

    assert gradients(1) == gradients(2) > gradients(4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_learns_is_known_in_its_order_also_of_layers_that_are_left_out(family: str) -> None:
    settings = Train(rank=4, rank_pattern={r"layers\.(0|3)\.mlp\.up_proj": 8} if family == "gemma2" else {})
    plan = blueprint.of_config(families.FAMILIES[family](num_hidden_layers=11))

    def shapes(device: Device) -> list[torch.Size]:
        made = replica.build(plan, settings, torch.float32, device)
        return [one.shape for one in made.learning()]

    assert shapes("cuda") == shapes("cpu")  # on CPUs models of so few layers are executed as a whole
