"""Verdict and Bundle → registered version → alias `champion` → champion file; and back. Imports no torch.

The order makes every step repeatable: the model's files are sealed first, then registered (found again by digest), then
the alias moves, and the champion file, which is committed to git, is written last. Whoever repeats an interrupted
command finishes it; until then champion file and alias differ, and no other promotion is let in between.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ratchet import files
from ratchet.config import Settings
from ratchet.errors import ChampionError, DamagedError, GateError
from ratchet.layout import Layout
from ratchet.records import Bundle, Champion, ChampionFile, Verdict, read_champion
from ratchet.services.registry import Registry, Version

KIND = "model"
FOLDER_DIGITS = 16  # hex digits of the model digest that name its folder (64 bits)
SMOKE_TIMEOUT_S = 600.0


def promote(layout: Layout, settings: Settings) -> str:
    """Make the exported model champion; returns what to tell. Repeating it changes nothing.

    Raises:
        GateError: the verdict is not PROMOTE, or is not about this model.
        ChampionError: champion file and registry disagree.
        BusyError: another promotion is at work.
        DataError, DamagedError: a stage's output is missing or damaged.
        TrackingError: MLflow's database cannot be used; nothing was promoted.
    """
    verdict, bundle = Verdict.load(layout.verdict), Bundle.load(layout.bundle)
    files.verify(layout.export, "export")
    if verdict.model_digest != bundle.model_digest:
        raise GateError(
            f"{layout.verdict}: the verdict is about model {verdict.model_digest[:12]}, "
            f"but {layout.export} holds {bundle.model_digest[:12]}; run `dvc repro gate`"
        )
    with _only_promotion(layout):
        registry = Registry(layout, settings.promote.model_name)
        before = read_champion(layout.champion)
        if before.champion and before.champion.model_digest == bundle.model_digest:
            _check_agreement(layout, registry, before, target=before.champion.version)
            if registry.champion() == before.champion.version:
                return f"version {before.champion.version} (model {bundle.model_digest[:12]}) is champion already"
        elif verdict.decision != "PROMOTE":
            reasons = "\n".join(f"  {r.outcome}: {r.text}" for r in verdict.reasons)
            raise GateError(f"model {bundle.model_digest[:12]} is not promoted: {verdict.decision}\n{reasons}")
        _check_agreement(layout, registry, before, target=_registered(registry, bundle.model_digest))
        _keep(layout, bundle.model_digest)
        version = registry.ensure_version(
            bundle.model_digest, model_folder(layout, bundle.model_digest), bundle.run_id, _tags(bundle)
        )
        champion = Champion(
            version=version,
            model_digest=bundle.model_digest,
            adapter_digest=bundle.adapter_digest,
            run_id=bundle.run_id,
        )
        registry.set_champion(version)
        _succeed(before, champion).save(layout.champion)
    return f"version {version} (model {bundle.model_digest[:12]}) is champion now{_formerly(before, version)}"
