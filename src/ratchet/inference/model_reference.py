"""Which model `--model` means, by content, and where it lies. Imports no torch: the verb asks."""

import re
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.errors import ChampionError, DamagedFileError, DataError, SettingsError
from ratchet.inference.spec import GenerationStart, ModelIdentity
from ratchet.models import base_model
from ratchet.models.runtimes.openai_client import OpenAiEndpoint
from ratchet.registry import ledger, model_store
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile

WORDS = "base, adapter, merged, champion, v3 (a promoted version), a directory, a .gguf file, or http(s)://HOST[#MODEL]"


@dataclass(frozen=True)
class ModelReference:
    """A model that somebody asked for."""

    model: ModelIdentity
    start: GenerationStart
    template_digest: str = ""


def resolve_model(name: str, layout: ProjectLayout, settings: Settings) -> ModelReference:
    """The model of this name.

    Raises:
        SettingsError: no model is called so.
        DataError, DamagedFileError, ChampionError, BaseModelError: it is not there, or not whole; the message says what
            makes it.
    """
    if name in ("base", "adapter"):
        return _resolve_base(name == "adapter", layout, settings)
    if name == "merged":
        return _resolve_merged(layout, settings)
    if name == "champion" or re.fullmatch(r"v[1-9][0-9]*", name):
        return _resolve_promoted(name, layout, settings)
    if re.match(r"https?://", name):
        return _resolve_endpoint(name, settings)
    path = Path(name).expanduser().absolute()
    if path.is_file() and path.suffix == ".gguf":
        start = _generation_start(settings, path)
        return ModelReference(ModelIdentity(kind="gguf", digest=digests.hash_file(path), held="as in the file"), start)
    if path.is_dir():
        return _resolve_directory(path, digests.hash_files(base_model.fingerprint(path)), "auto", settings, None)
    raise SettingsError(f"--model {name}: no such model; name one of: {WORDS}")


def _generation_start(settings: Settings, path: Path | str) -> GenerationStart:
    # A generation is one process on one device; its answers are in no mirror.
    machine = settings.machine.model_copy(update={"gpus": 1, "nodes": "1", "rendezvous": None, "mirror": None})
    return GenerationStart(machine=machine, generate=settings.generate, train=settings.train, path=str(path))


def _resolve_base(with_adapter: bool, layout: ProjectLayout, settings: Settings) -> ModelReference:
    card = BaseCard.load(layout.base_card)
    own, adapter = card.digest, None
    if with_adapter:
        report = _verified_train_report(layout)
        if report.base_digest != card.digest:
            raise DataError(
                f"{layout.train}: its adapter was trained on base {report.base_digest[:12]}, and {layout.base} holds "
                f"{card.digest[:12]}; run `dvc repro train`, or ask for --model base"
            )
        own, adapter = digests.hash_json([card.digest, report.adapter_digest]), str(layout.adapter)
    template = layout.own_template
    start = _generation_start(settings, base_model.locate(layout, card)).model_copy(
        update={"adapter": adapter, "base": card, "template": str(template) if template else None}
    )
    train = settings.train
    held = f"{train.base_form}, computed in {train.compute_dtype}, attention {train.attention}"
    model = ModelIdentity(kind="adapter" if with_adapter else "base", digest=own, held=held)
    return ModelReference(model, start, digests.hash_file(template) if template else "")


def _verified_train_report(layout: ProjectLayout) -> TrainReport:
    """The sealed adapter's report, every byte checked."""
    if not layout.train_report.is_file():
        raise DataError(
            f"{layout.train}: no trained adapter is there; run `dvc repro train`, or ask another model: --model base "
            f"({WORDS})"
        )
    try:
        files.verify_sealed(layout.train, None)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; run `dvc repro -f train`, or `dvc checkout`") from None
    return TrainReport.load(layout.train_report)


def _resolve_merged(layout: ProjectLayout, settings: Settings) -> ModelReference:
    if not layout.bundle.is_file():
        raise DataError(f"{layout.export}: no exported model is there; run `dvc repro export`")
    files.verify_sealed(layout.export, None)
    bundle = ModelBundle.load(layout.bundle)
    return _resolve_directory(layout.merged_model, bundle.model_digest, bundle.dtype, settings, _read_base_card(layout))


def _resolve_promoted(name: str, layout: ProjectLayout, settings: Settings) -> ModelReference:
    champion = _find_version(name, layout)
    folder = model_store.verify_version(layout, champion)
    bundle = ModelBundle.load(folder.parent / model_store.BUNDLE)
    if bundle.model_digest != champion.model_digest:
        raise ChampionError(
            f"{folder.parent}: holds model {bundle.model_digest[:12]}, not {champion.model_digest[:12]}"
        )
    return _resolve_directory(folder, bundle.model_digest, bundle.dtype, settings, _read_base_card(layout))


def _find_version(name: str, layout: ProjectLayout) -> Champion:
    held = ChampionFile.load(layout.champion) if layout.champion.is_file() else ChampionFile()
    if name == "champion":
        if held.champion is None:
            raise ChampionError("no model is champion here yet; `ratchet promote` makes one, or ask --model adapter")
        return held.champion
    number = int(name[1:])
    found = {
        one.version: Champion(
            version=one.version, model_digest=one.model_digest, adapter_digest=one.adapter_digest, run_id=one.run_id
        )
        for one in ledger.read_entries(layout.promotions)
    }
    found |= {one.version: one for one in (held.champion, held.anchor, *held.previous) if one is not None}
    if number not in found:
        there = ", ".join(f"v{one}" for one in sorted(found)) or "none"
        raise ChampionError(f"--model {name}: no such version was promoted here; there are: {there}")
    return found[number]


def _read_base_card(layout: ProjectLayout) -> BaseCard | None:
    return BaseCard.load(layout.base_card) if layout.base_card.is_file() else None


def _resolve_directory(folder: Path, own: str, dtype: str, settings: Settings, base: BaseCard | None) -> ModelReference:
    """Plain weights of a directory; `base` says only whether code of its own may run."""
    start = _generation_start(settings, folder).model_copy(update={"dtype": dtype, "base": base})
    return ModelReference(ModelIdentity(kind="merged", digest=own, held=f"plain weights, computed in {dtype}"), start)


def _resolve_endpoint(name: str, settings: Settings) -> ModelReference:
    """What a server says that it serves; it is asked now, so that a wrong address is told at once."""
    address, _, model = name.partition("#")
    served = OpenAiEndpoint(address, settings.machine.endpoint, model or None).served()
    own = digests.hash_json({"address": address, "model": dict(served.identity)})
    return ModelReference(
        ModelIdentity(kind="endpoint", digest=own, held="as served"),
        _generation_start(settings, f"{address}#{served.name}"),
    )
