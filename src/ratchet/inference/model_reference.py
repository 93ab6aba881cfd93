"""Which model `--model` means, by content, and where it lies. Imports no torch: the verb asks."""

import re
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.errors import ChampionError, DamagedError, DataError, SettingsError
from ratchet.inference.spec import GenerationStart, Model
from ratchet.models import base_model
from ratchet.models.runtimes.openai_client import Endpoint
from ratchet.registry import ledger, model_store
from ratchet.storage import digests, files
from ratchet.storage.layout import Layout
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.export import Bundle
from ratchet.storage.records.gate import Champion, ChampionFile

WORDS = "base, adapter, merged, champion, v3 (a promoted version), a directory, a .gguf file, or http(s)://HOST[#MODEL]"


@dataclass(frozen=True)
class Meant:
    """A model that somebody asked for."""

    model: Model
    start: GenerationStart
    template_digest: str = ""


def meant(name: str, layout: Layout, settings: Settings) -> Meant:
    """The model of this name.

    Raises:
        SettingsError: no model is called so.
        DataError, DamagedError, ChampionError, BaseModelError: it is not there, or not whole; the message says what
            makes it.
    """
    if name in ("base", "adapter"):
        return _on_base(name == "adapter", layout, settings)
    if name == "merged":
        return _merged(layout, settings)
    if name == "champion" or re.fullmatch(r"v[1-9][0-9]*", name):
        return _promoted(name, layout, settings)
    if re.match(r"https?://", name):
        return _served(name, settings)
    path = Path(name).expanduser().absolute()
    if path.is_file() and path.suffix == ".gguf":
        start = _start(settings, path)
        return Meant(Model(kind="gguf", digest=digests.of_file(path), held="as in the file"), start)
    if path.is_dir():
        return _plain(path, digests.of_files(base_model.fingerprint(path)), "auto", settings, None)
    raise SettingsError(f"--model {name}: no such model; name one of: {WORDS}")


def _start(settings: Settings, path: Path | str) -> GenerationStart:
    # A generation is one process on one device; its answers are in no mirror.
    machine = settings.machine.model_copy(update={"gpus": 1, "nodes": "1", "rendezvous": None, "mirror": None})
    return GenerationStart(machine=machine, generate=settings.generate, train=settings.train, path=str(path))


def _on_base(with_adapter: bool, layout: Layout, settings: Settings) -> Meant:
    card = BaseCard.load(layout.base_card)
    own, adapter = card.digest, None
    if with_adapter:
        report = _trained(layout)
        if report.base_digest != card.digest:
            raise DataError(
                f"{layout.train}: its adapter was trained on base {report.base_digest[:12]}, and {layout.base} holds "
                f"{card.digest[:12]}; run `dvc repro train`, or ask for --model base"
            )
        own, adapter = digests.of_json([card.digest, report.adapter_digest]), str(layout.adapter)
    template = layout.own_template
    start = _start(settings, base_model.locate(layout, card)).model_copy(
        update={"adapter": adapter, "base": card, "template": str(template) if template else None}
    )
    train = settings.train
    held = f"{train.base_form}, computed in {train.compute_dtype}, attention {train.attention}"
    model = Model(kind="adapter" if with_adapter else "base", digest=own, held=held)
    return Meant(model, start, digests.of_file(template) if template else "")


def _trained(layout: Layout) -> TrainReport:
    """The sealed adapter's report, every byte checked."""
    if not layout.train_report.is_file():
        raise DataError(
            f"{layout.train}: no trained adapter is there; run `dvc repro train`, or ask another model: --model base "
            f"({WORDS})"
        )
    try:
        files.verify(layout.train, None)
    except DamagedError as error:
        raise DamagedError(f"{error}; run `dvc repro -f train`, or `dvc checkout`") from None
    return TrainReport.load(layout.train_report)


def _merged(layout: Layout, settings: Settings) -> Meant:
    if not layout.bundle.is_file():
        raise DataError(f"{layout.export}: no exported model is there; run `dvc repro export`")
    files.verify(layout.export, None)
    bundle = Bundle.load(layout.bundle)
    return _plain(layout.merged_model, bundle.model_digest, bundle.dtype, settings, _base_of(layout))


def _promoted(name: str, layout: Layout, settings: Settings) -> Meant:
    champion = _version(name, layout)
    folder = model_store.verified(layout, champion)
    bundle = Bundle.load(folder.parent / model_store.BUNDLE)
    if bundle.model_digest != champion.model_digest:
        raise ChampionError(
            f"{folder.parent}: holds model {bundle.model_digest[:12]}, not {champion.model_digest[:12]}"
        )
    return _plain(folder, bundle.model_digest, bundle.dtype, settings, _base_of(layout))


def _version(name: str, layout: Layout) -> Champion:
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
        for one in ledger.read(layout.promotions)
    }
    found |= {one.version: one for one in (held.champion, held.anchor, *held.previous) if one is not None}
    if number not in found:
        there = ", ".join(f"v{one}" for one in sorted(found)) or "none"
        raise ChampionError(f"--model {name}: no such version was promoted here; there are: {there}")
    return found[number]


def _base_of(layout: Layout) -> BaseCard | None:
    return BaseCard.load(layout.base_card) if layout.base_card.is_file() else None


def _plain(folder: Path, own: str, dtype: str, settings: Settings, base: BaseCard | None) -> Meant:
    """Plain weights of a directory; `base` says only whether code of its own may run."""
    start = _start(settings, folder).model_copy(update={"dtype": dtype, "base": base})
    return Meant(Model(kind="merged", digest=own, held=f"plain weights, computed in {dtype}"), start)


def _served(name: str, settings: Settings) -> Meant:
    """What a server says that it serves; it is asked now, so that a wrong address is told at once."""
    address, _, model = name.partition("#")
    served = Endpoint(address, settings.machine.endpoint, model or None).served()
    own = digests.of_json({"address": address, "model": dict(served.identity)})
    return Meant(Model(kind="endpoint", digest=own, held="as served"), _start(settings, f"{address}#{served.name}"))
