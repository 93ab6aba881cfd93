"""Tests TIES and DARE: the definitions of their papers, equal results every time, and agreement with peft's forward."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import small_bases as small
from merging_cases import ROUNDING
from ratchet.config.export import MergeMethod
from ratchet.errors import SettingsError
from ratchet.exporters.merge.recipe import WeightedAdapter
from ratchet.exporters.verification import reference

FACTORS = (1.0, 0.5)
DENSITY = 0.3
NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """Write a base with two LoRA adapters, one of which adapts q_proj only, and a DoRA adapter."""
    folder = tmp_path_factory.mktemp("methods")
    base = small.write_base(folder / "base", "llama")
    one = small.write_adapter(folder / "one", base, small.settings())
    two = small.write_adapter(folder / "two", base, small.settings(target_modules=["q_proj"]), seed=4)
    dora = small.write_adapter(folder / "dora", base, small.settings(adapter="dora"), seed=5)
    return base, one, two, dora


def ties(updates: list[Tensor], kept: list[Tensor]) -> Tensor:
    """Elect a sign for each entry, and average the entries that have it (Yadav et al. 2023, algorithm 1)."""
    result = torch.zeros_like(updates[0])
    for place in range(result.numel()):
        values = [float(part.flatten()[place]) for part in kept]
        sign = 1 if sum(values) >= 0 else -1
        agreeing = [factor * value for factor, value in zip(FACTORS, values, strict=False) if value * sign > 0]
        result.view(-1)[place] = sum(agreeing) / max(1, len(agreeing))
    return result


def keep_largest(update: Tensor) -> Tensor:
    smallest = update.abs().flatten().sort(descending=True).values[int(DENSITY * update.numel()) - 1]
    return torch.where(update.abs() >= smallest, update, 0.0)


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_merged_weights_and_the_reference_follow_the_paper(
    method: MergeMethod, places: tuple[Path, Path, Path, Path], tmp_path: Path
) -> None:
    base, one, two, _ = places
    parts = [WeightedAdapter(path, factor) for path, factor in zip((one, two), FACTORS, strict=True)]
    recipe = small.recipe(base, *parts, method=method, density=DENSITY)
    _, merged, model = small.merge(recipe, tmp_path / "merged")
    _, again, _ = small.merge(recipe, tmp_path / "again")
    plain = small.merge(small.recipe(base, WeightedAdapter(one, 0.0)), tmp_path / "plain")[1]
    alone = [small.merge(small.recipe(base, path), tmp_path / path.name)[1] for path in (one, two)]
    for name in NAMES:
        assert torch.equal(merged[name], again[name])
        updates = [part[name] - plain[name] for part in alone if not torch.equal(part[name], plain[name])]
        found = merged[name] - plain[name]
        if method == "ties":
            torch.testing.assert_close(found, ties(updates, [keep_largest(u) for u in updates]), atol=1e-5, rtol=1e-4)
            continue
        # The random entries are those of the merge: an entry is dropped, or divided by the density.
        choices = [torch.zeros_like(found)]
        for update, factor in zip(updates, FACTORS, strict=False):
            choices += [choice + factor * update / DENSITY for choice in choices]
        if method == "dare_linear":
            distance = torch.stack([(found - choice).abs() for choice in choices]).min(dim=0).values
            assert distance.max() < 1e-4
        share = (found.abs() > 1e-7).float().mean()
        assert share == pytest.approx(1 - (1 - DENSITY) ** len(updates), abs=0.05)
    assert (small.logits(reference.load_adapted_model(recipe)) - small.logits(model)).abs().max() <= ROUNDING
    linear = small.recipe(base, *parts)
    assert (small.logits(reference.load_adapted_model(linear)) - small.logits(model)).abs().max() > 100 * ROUNDING


def test_entries_of_dora_cannot_be_dropped(places: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    base, one, _, dora = places
    with pytest.raises(SettingsError, match=r"found ties, but the adapter of model\.layers\.\d\.\S+ is DoRA"):
        small.merge(small.recipe(base, one, dora, method="ties", density=DENSITY), tmp_path / "merged")
