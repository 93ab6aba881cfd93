"""All settings of a project. `machine` says how a run executes; every other section determines results.

Each section is a class of the same name. The docstring below a field is its description in params.yaml.
"""

from pydantic import model_validator

from ratchet.config.base import Base
from ratchet.config.evaluate import Evaluate
from ratchet.config.export import Export
from ratchet.config.fields import Section
from ratchet.config.gate import Gate
from ratchet.config.generate import Generate
from ratchet.config.machine import Machine
from ratchet.config.monitor import Monitor
from ratchet.config.prepare import Prepare
from ratchet.config.promote import Promote
from ratchet.config.select import Select
from ratchet.config.sweep import Sweep
from ratchet.config.train import Train


class Settings(Section):
    """All sections of params.yaml."""

    base: Base = Base()
    prepare: Prepare = Prepare()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    gate: Gate = Gate()
    promote: Promote = Promote()
    monitor: Monitor = Monitor()
    sweep: Sweep = Sweep()
    generate: Generate = Generate()
    select: Select = Select()
    machine: Machine = Machine()

    @model_validator(mode="after")
    def _check_exported_update(self) -> "Settings":
        if not self.export.is_plain and self.evaluate.formats != ("merged",):
            raise ValueError(
                "evaluate.formats: export.weight, additional_adapters or modules change the merged update, so scores "
                "of the adapter would not describe the export; set evaluate.formats: [merged]"
            )
        return self
