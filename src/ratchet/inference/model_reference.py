"""Resolves the value of `--model` to a model identity and its location, without importing torch."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.errors import ChampionError, DamagedFileError, DataError, SettingsError
from ratchet.inference.spec import GenerationStart, ModelIdentity
from ratchet.models import base_model
from ratchet.models.runtimes.openai_client import OpenAiEndpoint
from ratchet.registry import ledger, model_store
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, read_champion
from ratchet.storage.records.training import TrainReport

MODEL_NAMES = (
    "base, adapter, merged, champion, v3 (a promoted version), a directory, a .gguf file, or http(s)://HOST[#MODEL]"
)


@dataclass(frozen=True)
class ModelReference:
    """The identity of a model, and how to start it."""

    model: ModelIdentity
    start: GenerationStart
    template_digest: str = ""


def resolve_model(
    name: str, layout: ProjectLayout, settings: Settings, fetch: Callable[[Champion], None] = lambda _: None
) -> ModelReference:
    """Resolve the name of a model. `fetch` makes the files of a promoted model available.

    Raises:
        SettingsError: no model has this name.
        DataError, DamagedFileError, ChampionError, BaseModelError: the model is missing or damaged; the message names
            the command that creates it.
    """
    if name in ("base", "adapter"):
        return _resolve_base(name == "adapter", layout, settings)
    if name == "merged":
        return _resolve_merged(layout, settings)
    if name == "champion" or re.fullmatch(r"v[1-9][0-9]*", name):
        champion = _find_promoted(name, layout)
        fetch(champion)
        return _resolve_promoted(champion, layout, settings)
    if re.match(r"https?://", name):
        return _resolve_endpoint(name, settings)
    path = Path(name).expanduser().absolute()
    if path.is_file() and path.suffix == ".gguf":
        start = _generation_start(settings, path)
        return ModelReference(
            ModelIdentity(kind="gguf", digest=digests.hash_file(path), weight_format="as in the file"), start
        )
    if path.is_dir():
        return _resolve_directory(path, digests.hash_files(base_model.fingerprint(path)), "auto", settings, None)
    raise SettingsError(f"--model {name}: no such model; expected one of: {MODEL_NAMES}")


def _generation_start(settings: Settings, path: Path | str) -> GenerationStart:
    # A generation runs as one process on one device, without a replica.
    machine = settings.machine.model_copy(update={"gpus": 1, "nodes": "1", "rendezvous": None, "replica": None})
    return GenerationStart(machine=machine, generate=settings.generate, train=settings.train, path=str(path))


def _resolve_base(with_adapter: bool, layout: ProjectLayout, settings: Settings) -> ModelReference:
    card = BaseCard.load(layout.base_card)
    digest, adapter = card.digest, None
    if with_adapter:
        report = _verified_train_report(layout)
        if report.base_digest != card.digest:
            raise DataError(
                f"{layout.train}: the adapter was trained on base {report.base_digest[:12]}, but {layout.base} holds "
                f"{card.digest[:12]}; run `dvc repro train`, or use --model base"
            )
        digest, adapter = digests.hash_json([card.digest, report.adapter_digest]), str(layout.adapter)
    template = layout.chat_template
    start = _generation_start(settings, base_model.locate(layout, card)).model_copy(
        update={"adapter": adapter, "base": card, "template": str(template) if template else None}
    )
    train = settings.train
    weight_format = f"{train.base_weight_format}, computed in {train.compute_dtype}, attention {train.attention}"
    model = ModelIdentity(kind="adapter" if with_adapter else "base", digest=digest, weight_format=weight_format)
    return ModelReference(model, start, digests.hash_file(template) if template else "")


def _verified_train_report(layout: ProjectLayout) -> TrainReport:
    """Verify the sealed adapter and load its report."""
    if not layout.train_report.is_file():
        raise DataError(
            f"{layout.train}: no trained adapter; run `dvc repro train`, or use another model: --model base "
            f"({MODEL_NAMES})"
        )
    try:
        files.verify_sealed(layout.train, None)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; run `dvc repro -f train`, or `dvc checkout`") from None
    return TrainReport.load(layout.train_report)


def _resolve_merged(layout: ProjectLayout, settings: Settings) -> ModelReference:
    if not layout.bundle.is_file():
        raise DataError(f"{layout.export}: no exported model; run `dvc repro export`")
    files.verify_sealed(layout.export, None)
    bundle = ModelBundle.load(layout.bundle)
    return _resolve_directory(layout.merged_model, bundle.model_digest, bundle.dtype, settings, _read_base_card(layout))


def _find_promoted(name: str, layout: ProjectLayout) -> Champion:
    if name == "champion":
        champion = read_champion(layout.champion).champion
        if champion is None:
            raise ChampionError("no champion yet; run `ratchet promote`, or use --model adapter")
        return champion
    versions = find_promoted_versions(layout)
    known = ", ".join(f"v{version}" for version in versions) or "none"
    if (champion := versions.get(int(name[1:]))) is None:
        raise ChampionError(f"--model {name}: this version was never promoted; promoted versions: {known}")
    return champion


def _resolve_promoted(champion: Champion, layout: ProjectLayout, settings: Settings) -> ModelReference:
    folder = model_store.verify_version(layout, champion)
    bundle = ModelBundle.load(folder.parent / model_store.BUNDLE)
    if bundle.model_digest != champion.model_digest:
        raise ChampionError(
            f"{folder.parent}: found model {bundle.model_digest[:12]}, expected {champion.model_digest[:12]}"
        )
    return _resolve_directory(folder, bundle.model_digest, bundle.dtype, settings, _read_base_card(layout))


def find_promoted_versions(layout: ProjectLayout) -> dict[int, Champion]:
    """Return all promoted versions by number, from the ledger and the champion file."""
    file = read_champion(layout.champion)
    entries = [
        Champion(
            version=entry.version,
            model_digest=entry.model_digest,
            adapter_digest=entry.adapter_digest,
            run_id=entry.run_id,
        )
        for entry in ledger.read_entries(layout.promotions)
    ]
    champions = [entry for entry in (*entries, file.champion, file.anchor, *file.previous) if entry is not None]
    by_version = {champion.version: champion for champion in champions}
    return {version: by_version[version] for version in sorted(by_version)}


def _read_base_card(layout: ProjectLayout) -> BaseCard | None:
    return BaseCard.load(layout.base_card) if layout.base_card.is_file() else None


def _resolve_directory(
    folder: Path, digest: str, dtype: str, settings: Settings, base: BaseCard | None
) -> ModelReference:
    """Resolve a directory with merged weights; `base` only determines whether the model's remote code may run."""
    start = _generation_start(settings, folder).model_copy(update={"dtype": dtype, "base": base})
    return ModelReference(
        ModelIdentity(kind="merged", digest=digest, weight_format=f"plain weights, computed in {dtype}"), start
    )


def _resolve_endpoint(name: str, settings: Settings) -> ModelReference:
    """Ask a server for its model, so that a wrong address is reported at once."""
    address, _, model = name.partition("#")
    served = OpenAiEndpoint(address, settings.machine.endpoint, model or None).get_model()
    digest = digests.hash_json({"address": address, "model": dict(served.identity)})
    return ModelReference(
        ModelIdentity(kind="endpoint", digest=digest, weight_format="as served"),
        _generation_start(settings, f"{address}#{served.name}"),
    )
