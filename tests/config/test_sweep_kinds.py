"""Tests which sampler and pruner `auto` means, and which spaces freeze-thaw refuses."""

import pytest

from ratchet.config import params_file
from ratchet.config.sweep import Sweep
from ratchet.errors import SettingsError

RANGES = "{train.rank: {low: 4, high: 64}, train.alpha: {tie: 2 * train.rank}, train.dropout: {low: 0, high: 0.2}}"
CHOICES = "{train.rank: {choices: [4, 8]}}"
CONDITIONAL = "{train.rank: {low: 4, high: 64}, train.dropout: {low: 0, high: 0.2, when: {train.rank: 4}}}"
EPOCHS = "{train.rank: {low: 4, high: 64}, train.epochs: {low: 1, high: 3}}"
NAMES = ("rank", "alpha", "dropout", "learning_rate", "weight_decay", "max_gradient_norm")
SIX = "{" + ", ".join(f"train.{name}: {{low: 1, high: 2}}" for name in NAMES) + "}"


def sweep(text: str, version: int = 2) -> Sweep:
    return params_file.parse(
        f"version: {version}\nsweep:\n" + "".join(f"  {line}\n" for line in text.splitlines())
    ).sweep


@pytest.mark.parametrize(
    ("text", "sampler", "pruner"),
    [
        ("trials: 20", "gp", "freeze_thaw"),
        (f"space: {RANGES}", "gp", "freeze_thaw"),
        (f"space: {CHOICES}", "tpe", "asha"),
        (f"space: {CONDITIONAL}", "tpe", "asha"),
        (f"space: {SIX}", "tpe", "asha"),
        (f"space: {EPOCHS}", "gp", "asha"),
        ("sampler: {kind: tpe}", "tpe", "asha"),
        ("sampler: {kind: gp}", "gp", "freeze_thaw"),
        ("pruner: {kind: asha}", "gp", "asha"),
        ("objectives: [{metric: accuracy}]", "gp", "asha"),
        ("objectives: [{metric: validation_loss, direction: maximize}]", "gp", "asha"),
        ("objectives: [{metric: validation_loss}, {metric: memory_bytes}]", "gp", "none"),
    ],
)
def test_auto_depends_on_space_and_objectives(text: str, sampler: str, pruner: str) -> None:
    found = sweep(text)
    assert (found.resolved_sampler.kind, found.resolved_pruner.kind) == (sampler, pruner)


def test_a_project_of_version_1_keeps_its_defaults() -> None:
    found = sweep("trials: 20", version=1)
    assert (found.resolved_sampler.kind, found.resolved_pruner.kind) == ("tpe", "asha")
    assert found.pruner.min_resource_fraction == 0.05


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"space: {CHOICES}", "it needs a space of at most 5 ranges without choices and without when"),
        (f"space: {EPOCHS}", "it needs trainings of the same length, and the space has train.epochs"),
        ("objectives: [{metric: accuracy}]", "it predicts validation_loss, which must be the only objective"),
        ("sampler: {kind: random}", "it proposes values itself, with a Gaussian process; found sampler.kind random"),
    ],
)
def test_freeze_thaw_is_refused_where_it_is_not_possible(text: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        sweep(f"{text}\npruner: {{kind: freeze_thaw}}")
    assert f"pruner.kind: found freeze_thaw; {problem}; set it to auto" in str(caught.value)
