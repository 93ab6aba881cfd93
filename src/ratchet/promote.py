"""Verdict and Bundle → registered version → alias `champion` → champion file; and back. Imports no torch.

The order makes every step repeatable: the model's files are sealed first, then registered (found again by digest), then
the alias moves, and the champion file, which is committed to git, is written last. Whoever repeats an interrupted
command finishes it; until then champion file and alias differ, and no other promotion is let in between.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ratchet import files
from ratchet.config import Settings
from ratchet.errors import ChampionError, DamagedError, GateError
from ratchet.layout import Layout
from ratchet.lock import Lock
from ratchet.records import Bundle
from ratchet.records_gate import Champion, ChampionFile, Verdict, read_champion
from ratchet.services.registry import Registry

KIND = "model"
SMOKE_TIMEOUT_S = 600.0


def promote(layout: Layout, settings: Settings) -> str:
    """Make the exported model champion; returns what to tell. Repeating it changes nothing.

    Raises:
        GateError: the verdict is not PROMOTE, or is not about this model, or compared it with an earlier champion.
        ChampionError: champion file and registry disagree.
        BusyError: another promotion is at work.
        DataError, DamagedError: a stage's output is missing or damaged.
        TrackingError: MLflow's database cannot be used.
    """
    with _promotion_lock(layout):
        verdict, bundle = Verdict.load(layout.verdict), Bundle.load(layout.bundle)
        exported = files.verify(layout.export, "export")
        before = read_champion(layout.champion)
        registry = Registry(layout, settings.promote.model_name)
        if before.champion and before.champion.model_digest == bundle.model_digest:
            _check_agreement(layout, registry, before, target=None)
            return f"{_name(before.champion)} is champion already"
        _check_verdict(layout, verdict, bundle, before.champion)
        _check_agreement(layout, registry, before, target=_number_of(registry, bundle.model_digest))
        _keep_model(layout, bundle.model_digest, exported)
        folder = layout.promoted_model(bundle.model_digest)
        tags = {"ratchet.adapter_digest": bundle.adapter_digest, "ratchet.run_id": bundle.run_id}
        champion = Champion(
            version=registry.ensure_version(bundle.model_digest, folder, bundle.run_id, tags),
            model_digest=bundle.model_digest,
            adapter_digest=bundle.adapter_digest,
            run_id=bundle.run_id,
        )
        registry.set_champion(champion.version)
        _succeed(before, champion).save(layout.champion)
    formerly = f", after {_name(before.champion)}" if before.champion else ""
    return f"{_name(champion)} is champion now{formerly}; commit {layout.champion.relative_to(layout.root)}"


def rollback(
    layout: Layout, settings: Settings, version: int | None, check: Callable[[Path], None] | None = None
) -> str:
    """Make an earlier version champion again; returns what to tell.

    Args:
        version: the registered version; None takes the previous champion.
        check: raises ChampionError for a model folder that does not work; by default loads it in a process of its own.

    Raises:
        ChampionError: no such version, its model is gone, damaged or does not answer, or champion file and registry
            disagree and this is neither's version.
        BusyError: another promotion is at work.
        TrackingError: MLflow's database cannot be used.
    """
    with _promotion_lock(layout):
        before = read_champion(layout.champion)
        registry = Registry(layout, settings.promote.model_name)
        if version is None:
            if not before.previous:
                raise ChampionError(f"{layout.champion}: names no previous champion, so there is none to go back to")
            version = before.previous[0].version
        _check_agreement(layout, registry, before, target=version)
        champion = _registered(registry, version)
        if before.champion == champion and registry.champion() == version:
            return f"{_name(champion)} is champion already"
        (check or smoke_test)(_kept_model(layout, champion))
        registry.set_champion(version)
        _return(before, champion).save(layout.champion)
    return f"{_name(champion)} is champion again; commit {layout.champion.relative_to(layout.root)}"


def smoke_test(model: Path) -> None:
    """Load a Hugging Face folder in a fresh process and let it answer. Raises ChampionError with what it said."""
    command = [sys.executable, "-m", "ratchet.model.smoke", str(model)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SMOKE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ChampionError(f"{model}: did not answer within {SMOKE_TIMEOUT_S:g} s; champion is unchanged") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ChampionError(f"{model}: does not load and answer ({last}); champion is unchanged")


def _promotion_lock(layout: Layout) -> Lock:
    return Lock(layout.mlruns / "promote.lock", "promotion").acquire()


def _name(champion: Champion) -> str:
    return f"version {champion.version} (model {champion.model_digest[:12]}, run {champion.run_id})"


def _check_verdict(layout: Layout, verdict: Verdict, bundle: Bundle, champion: Champion | None) -> None:
    """Raise GateError unless this verdict lets this model succeed this champion."""
    if verdict.model_digest != bundle.model_digest:
        raise GateError(
            f"{layout.verdict}: is about model {verdict.model_digest[:12]}, "
            f"but {layout.export} holds {bundle.model_digest[:12]}; run `dvc repro`"
        )
    if verdict.decision != "PROMOTE":
        reasons = "".join(f"\n  {r.outcome:<9} {r.text}" for r in verdict.reasons if r.outcome != "pass")
        raise GateError(
            f"model {bundle.model_digest[:12]} is not promoted, the verdict is {verdict.decision}:{reasons}"
        )
    was, now = verdict.champion_digest, champion.model_digest if champion else None
    if was != now:
        raise GateError(
            f"{layout.verdict}: compared with champion {(was or 'none')[:12]}, "
            f"but the champion is {(now or 'none')[:12]} by now; run `dvc repro`"
        )


def _check_agreement(layout: Layout, registry: Registry, file: ChampionFile, target: int | None) -> None:
    """Raise ChampionError unless file and alias agree, or one of them names `target`, which is to be champion.

    That is so when an interrupted command is repeated, or undone by naming the version that the file still names.
    """
    filed, alias = file.champion, registry.champion()
    if filed is not None:
        found = registry.version(filed.version)
        if found is None or found.model_digest != filed.model_digest:
            raise ChampionError(
                f"{layout.champion} names {_name(filed)}, which the registry in {layout.mlruns} does not have. "
                "Git does not hold mlruns/: copy it from where that version was promoted, or, if it is lost, "
                f"start anew: echo {{}} > {layout.champion}; dvc repro"
            )
    number = filed.version if filed else None
    if number == alias or (target is not None and target in (number, alias)):
        return
    ways = " or ".join(f"`ratchet rollback {version}`" for version in (number, alias) if version is not None)
    raise ChampionError(
        f"{layout.champion} names {_name(filed) if filed else 'no champion'}, but the registry's alias is at "
        f"{'no version' if alias is None else f'version {alias}'}: a promotion was interrupted, or one of them was "
        f"changed by hand. Repeat the interrupted command, or choose: {ways}"
    )


def _number_of(registry: Registry, model_digest: str) -> int | None:
    return next((v.number for v in registry.versions() if v.model_digest == model_digest), None)


def _keep_model(layout: Layout, model_digest: str, exported: files.Manifest) -> None:
    """Seal a copy of the export, and what speaks for it, outside DVC's reach; one that is whole is left as it is."""
    folder = layout.promoted_model(model_digest)
    files.remove_partials(layout.models)
    if folder.exists():
        with suppress(DamagedError):  # then it is made again
            files.verify(folder, KIND)
            return
    sources = {name: layout.export / name for name in exported.files}
    sources |= {"verdict.json": layout.verdict, "eval.json": layout.eval_report}
    with files.sealed_directory(folder, KIND) as scratch:
        for name, path in sources.items():
            files.link_or_copy(path.resolve(), scratch / name)  # DVC may have made it a link into its cache
    kept = files.read_manifest(folder).files
    changed = [name for name in exported.files if kept[name] != exported.files[name]]
    if changed:
        raise DamagedError(f"{layout.export / changed[0]}: changed while it was promoted; run `dvc repro` and repeat")


def _registered(registry: Registry, number: int) -> Champion:
    """What the registry knows of a version. Raises ChampionError when there is none."""
    found = registry.version(number)
    if found is None:
        known = ", ".join(str(v.number) for v in registry.versions()) or "none"
        raise ChampionError(f"version {number} of {registry.model_name} is not registered; known: {known}")
    return Champion(
        version=number,
        model_digest=found.model_digest,
        adapter_digest=found.tags["ratchet.adapter_digest"],
        run_id=found.tags["ratchet.run_id"],
    )


def _kept_model(layout: Layout, champion: Champion) -> Path:
    """The verified Hugging Face folder of a promoted version. Raises ChampionError when it is gone or damaged."""
    folder = layout.promoted_model(champion.model_digest)
    try:
        files.verify(folder, KIND)
    except DamagedError as error:
        raise ChampionError(
            f"{_name(champion)} cannot be champion: {error}. Bring the folder back from a backup, "
            "or choose another version: `ratchet rollback VERSION`"
        ) from error
    return folder / "hf"


def _succeed(before: ChampionFile, champion: Champion) -> ChampionFile:
    """`champion` follows whoever was champion; every version is named once."""
    line = [before.champion, *before.previous] if before.champion else list(before.previous)
    return ChampionFile(champion=champion, previous=_others(line, champion))


def _return(before: ChampionFile, champion: Champion) -> ChampionFile:
    """`champion` is back; the one that it replaces was found wanting and is not named as one to go back to."""
    return ChampionFile(champion=champion, previous=_others(before.previous, champion))


def _others(line: Iterable[Champion], champion: Champion) -> tuple[Champion, ...]:
    return tuple({c.version: c for c in line if c.version != champion.version}.values())
