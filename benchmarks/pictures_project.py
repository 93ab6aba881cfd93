"""Creates the project of benchmarks/pictures.py: two minutes of trainings on the bundled requests."""

from dataclasses import dataclass
from pathlib import Path

from small_project import SETTINGS as SMALL
from small_project import build

from ratchet.config import params_file
from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.gate import ExportParityRule, Gate, MustImproveRule
from ratchet.config.promote import Promote
from ratchet.config.settings import Settings
from ratchet.config.sweep import FinalistSettings, PrunerSettings, SamplerSettings, Sweep, SweepParameter
from ratchet.storage.layout import ProjectLayout
from ratchet.training.run_spec import build_run_spec

ROWS = 1000
SHAPE = TinyModelSettings(
    vocab_size=800, hidden_size=128, intermediate_size=256, layers=2, heads=4, sequence_length=64, batch_size=16,
    steps=120,
)  # fmt: skip
SPACE = {
    "train.rank": SweepParameter(low=2, high=16, log=True),
    "train.alpha": SweepParameter(tie="2 * train.rank"),
    "train.learning_rate": SweepParameter(low=2e-3, high=5e-2, log=True),
}


@dataclass(frozen=True)
class Variant:
    """Another training, for comparison with the first one."""

    name: str
    seed: int
    rank: int


FIRST = Variant("rank16", 3, 16)
OTHERS = (Variant("rank16", 4, 16), Variant("rank2", 3, 2), Variant("rank2", 4, 2))


def settings(port: int, metrics: Path, replica: Path) -> Settings:
    """Return the settings of the first training: with all callbacks and a replica."""
    train = SMALL.train.model_copy(
        update={"rank": 16, "alpha": 32, "epochs": 12, "batch_size": 32, "validate_every_steps": 25}
    )
    machine = SMALL.machine.model_copy(
        update={"checkpoint_every": 20, "micro_batch_size": 16, "metrics_port": port, "metrics_file": str(metrics),
                "metrics_scrape_wait_s": 3.0, "replica": str(replica), "replica_interval_s": 2.0,
                "system_metrics_interval_s": 2.0}
    )  # fmt: skip
    sweep = Sweep(
        name="lora", space=SPACE, trials=6, sampler=SamplerSettings(n_startup_trials=3),
        pruner=PrunerSettings(kind="asha", min_resource_fraction=0.25),
        finalists=FinalistSettings(top_k=1),
    )  # fmt: skip
    # Rules that so few rows and so small a base can pass: the model is promoted, and its audit is shown.
    rules = (
        MustImproveRule(rule="must_improve", metric=("accuracy",)),
        ExportParityRule(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99),
    )
    return SMALL.model_copy(
        update={"base": Base(tiny=SHAPE), "train": train, "machine": machine, "sweep": sweep, "gate": Gate(rules=rules),
                "promote": Promote(model_name="support")}
    )  # fmt: skip


def made(folder: Path, chosen: Settings) -> ProjectLayout:
    """Create the project with its base and its data."""
    return build(folder, ROWS, chosen)


def put(layout: ProjectLayout, chosen: Settings) -> str:
    """Write the settings. Return the id of the run that they define."""
    layout.params.write_text(params_file.dump(chosen), encoding="utf-8")
    return build_run_spec(layout, chosen).run_id


def varied(chosen: Settings, variant: Variant) -> Settings:
    """Return the settings of another training, without metrics port, metrics file and replica."""
    update = {"rank": variant.rank, "alpha": 2.0 * variant.rank, "seed": variant.seed}
    return quiet(chosen.model_copy(update={"train": chosen.train.model_copy(update=update)}))


def quiet(chosen: Settings) -> Settings:
    """Return the same settings without metrics port, metrics file and replica."""
    update = {"metrics_port": None, "metrics_file": None, "replica": None}
    return chosen.model_copy(update={"machine": chosen.machine.model_copy(update=update)})


def short(chosen: Settings) -> Settings:
    """Return the settings of the sweep: two epochs per trial."""
    train = chosen.train.model_copy(update={"epochs": 2.0, "validate_every_steps": 6})
    machine = chosen.machine.model_copy(update={"checkpoint_every": 6, "lease_timeout_s": 10.0})
    return quiet(chosen.model_copy(update={"train": train, "machine": machine}))
