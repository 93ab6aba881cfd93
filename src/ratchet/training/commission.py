"""What settings, data and base mean as a run, and where its worker finds them. Imports no torch: verbs ask it too."""

from ratchet.card import DatasetCard
from ratchet.config import Settings
from ratchet.layout import Layout
from ratchet.model import source
from ratchet.records import BaseCard
from ratchet.run.directory import Launch, RunSpec


def spec_of(layout: Layout, settings: Settings) -> RunSpec:
    """Which run these settings, this data and this base mean. Raises DataError where a stage before it has not run."""
    data, base = DatasetCard.load(layout.dataset_card), BaseCard.load(layout.base_card)
    return RunSpec(train=settings.train, data_digest=data.digest, base_digest=base.digest)


def launch_of(layout: Layout, settings: Settings) -> Launch:
    """How and where a worker of it runs, now. Raises like `spec_of`, and BaseModelError where the base is gone."""
    base = BaseCard.load(layout.base_card)
    return Launch(
        machine=settings.machine,
        base_path=str(source.locate(layout, base)),
        data_path=str(layout.data),
        base=base,
    )
