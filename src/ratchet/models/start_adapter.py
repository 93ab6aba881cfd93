"""Finds the trained weights that a training starts from (train.init_adapter), and identifies them by their content.

They are a checkpoint of a run, or an adapter in peft's format: in a directory, on the hub, or that of the champion.
Imports no torch.

A run keeps the champion that it began with, whatever is promoted later: experiments/start_adapters.json has it by
RunId (`training/run_spec.py` writes it when stage train runs).
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from ratchet.config.train import Train, find_pattern_key
from ratchet.errors import DamagedFileError, DataError, HubError, SettingsError
from ratchet.models import base_model, hub
from ratchet.runs.directory import CHECKPOINT, RunPaths
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import read_champion
from ratchet.storage.records.training import TrainReport

INIT_ADAPTER = "train.init_adapter"
"""Key path of the setting, for messages."""
CHAMPION = "champion"
"""Value of the setting for the adapter of the promoted model."""
CHECKPOINT_WEIGHTS, CHECKPOINT_IDENTITY = "trainable.safetensors", "identity.json"
"""Files of a checkpoint (training/checkpoint.py)."""
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
DEEPSPEED_SCRIPT = "zero_to_fp32.py"
"""DeepSpeed copies this script into its checkpoints. Their states are pickles, which Ratchet does not read."""
EQUAL_SETTINGS = (
    "adapter",
    "rank",
    "alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "initialization",
)
"""Settings that must be those of the training from which a checkpoint comes."""
PEFT_DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "r": ("rank", 8), "lora_alpha": ("alpha", 8), "use_rslora": ("use_rslora", False),
}  # fmt: skip
"""Name of the setting and peft's default (LoraConfig), by key of adapter_config.json."""
PATTERNS = ("rank_pattern", "alpha_pattern")
"""Settings, and keys of adapter_config.json, with values by layer."""
LAYER_OF_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")
"""Name of a tensor in adapter_model.safetensors, with the name of its layer."""
KIND = "start weights"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[^@\s]+)?")
"""Id of an adapter on the hub, and optionally its commit, tag or branch."""
COMMIT = re.compile("[0-9a-f]{40}")


class StartChampion(Record):
    """A champion that a run began with."""

    version: int
    """Version of the registered model."""
    model_digest: str
    digest: str
    """First digits of the digest of its adapter, as in the run's spec."""


class PinnedStartAdapters(Record):
    """experiments/start_adapters.json: the adapters that names such as a branch or `champion` mean in this project."""

    commits: dict[str, str] = Field(default_factory=dict)
    """Commit by the value of train.init_adapter, such as `org/name@main`."""
    champions: dict[str, StartChampion] = Field(default_factory=dict)
    """Champion by the RunId of the run that began with it."""
    latest_run: str | None = None
    """Run among them for which stage train ran last."""

    @classmethod
    def load_if_present(cls, layout: ProjectLayout) -> "PinnedStartAdapters":
        """Load the file of a project; an empty record if there is none."""
        return cls.load(layout.start_adapters) if layout.start_adapters.exists() else cls()


@dataclass(frozen=True)
class StartAdapter:
    """Trained weights in a directory."""

    path: Path

    @property
    def is_checkpoint(self) -> bool:
        """Whether the directory is a checkpoint; otherwise, it is an adapter in peft's format."""
        return (self.path / CHECKPOINT_WEIGHTS).is_file()

    @property
    def _files(self) -> tuple[str, str]:
        return (CHECKPOINT_WEIGHTS, CHECKPOINT_IDENTITY) if self.is_checkpoint else (ADAPTER_WEIGHTS, ADAPTER_CONFIG)

    @property
    def weights(self) -> Path:
        """File of the weights."""
        return self.path / self._files[0]

    def digest(self) -> str:
        """Return the digest of the weights and, for an adapter, of its configuration. Raises DataError if a file is
        missing."""
        names = self._files[:1] if self.is_checkpoint else self._files
        try:
            return digests.hash_files(digests.hash_unchanged_files(self.path, names))
        except FileNotFoundError as error:
            if (self.path / DEEPSPEED_SCRIPT).is_file():
                raise DataError(
                    f"{INIT_ADAPTER}: {self.path}: found the states of DeepSpeed's ranks, but no {ADAPTER_WEIGHTS}; "
                    f"save the adapter with save_pretrained, or load the output of {DEEPSPEED_SCRIPT} with peft and "
                    "save it"
                ) from None
            raise DataError(
                f"{INIT_ADAPTER}: {self.path}: found neither {CHECKPOINT_WEIGHTS} nor {ADAPTER_WEIGHTS} with "
                f"{ADAPTER_CONFIG} ({error.filename} is missing); set a RunId, or the directory of an adapter or a "
                "checkpoint"
            ) from None

    def require_fit(self, train: Train, base_digest: str) -> None:
        """Raise SettingsError if a training with these settings and this base cannot start from the weights, as far as
        is known without reading them."""
        document = self._read_json(self._files[1])
        if self.is_checkpoint:
            spec = document.get("spec", {})
            found = {key: spec.get("train", {}).get(key) for key in EQUAL_SETTINGS}
            base = spec.get("base_digest")
        else:
            found = {name: document.get(key) or default for key, (name, default) in PEFT_DEFAULTS.items()}
            found["adapter"] = "dora" if document.get("use_dora") else "lora"
            base = base_model.read_base_digest(self.path)
        is_digest = re.fullmatch("[0-9a-f]{64}", str(base)) is not None  # peft itself writes a name or a path
        if (self.is_checkpoint or is_digest) and base != base_digest:
            raise SettingsError(
                f"{INIT_ADAPTER}: {self.path}: was trained on the base model with the digest {str(base)[:12]}, but "
                f"this project's is {base_digest[:12]}; set another adapter"
            )
        if found["adapter"] == "adalora" or found.get("initialization") == "pissa":
            raise SettingsError(
                f"{INIT_ADAPTER}: {self.path}: is a checkpoint of AdaLoRA or PiSSA, and its weights alone are no "
                "start; set the directory result/adapter of that run, which is a LoRA"
            )
        own = train.model_dump(mode="json")
        for key, value in found.items():
            if own[key] != value:
                raise SettingsError(
                    f"train.{key}: found {own[key]}, but the weights in {self.path} have {value}; set train.{key}: "
                    f"{value}, or other weights ({INIT_ADAPTER})"
                )
        if not self.is_checkpoint and any((document.get(key) or {}) != own[key] for key in PATTERNS):
            self._require_equal_patterns(train, document)

    def _require_equal_patterns(self, train: Train, document: Mapping[str, Any]) -> None:
        """Raise SettingsError if a layer has another rank or alpha in section train than in adapter_config.json.
        Patterns there may have full names of layers."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.weights), framework="np") as tensors:
                matches = [LAYER_OF_TENSOR.fullmatch(name) for name in tensors.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"{INIT_ADAPTER}: {self.weights}: cannot be read ({error}); set another adapter") from None
        for key, own, default in (
            ("rank_pattern", train.rank_pattern, train.rank), ("alpha_pattern", train.alpha_pattern, train.alpha),
        ):  # fmt: skip
            saved = document.get(key) or {}
            for layer in (match[1] for match in matches if match is not None):
                wanted, value = (_find_value(layer, pattern, default) for pattern in (own, saved))
                if wanted != value:
                    raise SettingsError(
                        f"train.{key}: {layer} has the value {wanted}, but {value} in {self.path}; add {value} for "
                        f"this layer, or set other weights ({INIT_ADAPTER})"
                    )

    def require_digest(self, short: str) -> None:
        """Raise DataError unless the digest of the weights begins so."""
        if not self.digest().startswith(short):
            raise DataError(
                f"{INIT_ADAPTER}: {self.path}: has changed since the start of this run; restore it, or start a new run"
            )

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return files.read_json_object(self.path / name)
        except DamagedFileError as error:
            raise DataError(f"{INIT_ADAPTER}: {error}; set another adapter") from None


def _find_value(layer: str, pattern: Mapping[str, float], default: float) -> float:
    try:
        key = find_pattern_key(layer, pattern)
    except re.error:  # the check of section train reports it; in a saved adapter, it matches no layer
        return default
    return default if key is None else pattern[key]


def locate(layout: ProjectLayout, train: Train) -> StartAdapter:
    """Return the weights that the setting names. Raises DataError if there are none."""
    reference = str(train.init_adapter)
    if reference == CHAMPION:
        return locate_champion(layout, find_champion(layout))
    run = RunPaths(layout.runs / reference)
    if "/" not in reference and run.root.is_dir():
        if not run.is_finished():
            raise DataError(f"{INIT_ADAPTER}: run {reference} has no result; finish it, or set one of its checkpoints")
        kept = "best" if _read_train(run).get("final_checkpoint") == "best" else "last"
        return StartAdapter(run.result / "checkpoints" / kept)
    path = (layout.root / Path(reference).expanduser()).resolve()
    if path.is_dir():
        return StartAdapter(path)
    if not HUB_ID.fullmatch(reference):
        raise DataError(
            f"{INIT_ADAPTER}: found {reference!r}, but there is neither such a run in {layout.runs} nor such a "
            "directory; set a RunId, the directory of an adapter or a checkpoint, or the hub id of an adapter"
        )
    try:
        return StartAdapter(_fetch_from_hub(layout, reference))
    except HubError as error:
        raise HubError(
            f"{INIT_ADAPTER}: {reference} is no directory ({path}), so it is treated as a hub id; {error}"
        ) from None


def _fetch_from_hub(layout: ProjectLayout, reference: str) -> Path:
    """Return the directory of an adapter on the hub in the hub's cache, downloaded if necessary.

    A branch or tag means the commit that it had at the first use in this project, so that a training can be resumed
    and repeated after the branch has moved.
    """
    repository, _, revision = reference.partition("@")
    known = PinnedStartAdapters.load_if_present(layout)
    commit = revision if COMMIT.fullmatch(revision) else known.commits.get(reference)
    names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    if commit is not None:
        return hub.find_cached(repository, commit, names) or hub.download(repository, commit, names)
    found = hub.download(repository, revision or "main", names)
    if all((found / name).is_file() for name in names):  # otherwise `digest` refuses it
        pinned = known.model_copy(update={"commits": known.commits | {reference: found.name}})
        pinned.save(layout.start_adapters)
    return found


def read_champion_start(layout: ProjectLayout) -> StartChampion:
    """Return the current champion as the start of a run. Raises DataError if there is none on this machine."""
    champion = read_champion(layout.champion).champion
    if champion is None:
        raise DataError(
            f"{INIT_ADAPTER}: found {CHAMPION}, but {layout.champion} names none; run `ratchet promote` first, or set "
            "a RunId, the directory or hub id of an adapter, or null"
        )
    start = StartChampion(version=champion.version, model_digest=champion.model_digest, digest="")
    return start.model_copy(update={"digest": locate_champion(layout, start).digest()[: digests.SHORT]})


def locate_champion(layout: ProjectLayout, champion: StartChampion) -> StartAdapter:
    """Return the adapter of a champion. Raises DataError if this machine lacks it."""
    folder = layout.promoted_model(champion.model_digest)
    if not folder.is_dir():
        raise DataError(
            f"{INIT_ADAPTER}: the champion, version {champion.version}, is not on this machine; copy {folder} from the "
            "machine that promoted it, or set another adapter"
        )
    return StartAdapter(folder / "adapter")


def find_champion(layout: ProjectLayout) -> StartChampion:
    """Return the champion that the output of stage train began with; without one, that of the run that stage train
    trained last, or the current champion. Raises DataError if there is none."""
    pinned = PinnedStartAdapters.load_if_present(layout)
    trained = TrainReport.load(layout.train_report).run_id if layout.train_report.exists() else None
    known = (pinned.champions.get(str(run_id)) for run_id in (trained, pinned.latest_run))
    return next(filter(None, known), None) or read_champion_start(layout)


def resolve(layout: ProjectLayout, train: Train, base_digest: str) -> Train:
    """Return section train as a run's spec contains it: with the first digits of the digest of the weights.

    Raises:
        DataError: the weights are missing.
        SettingsError: they do not fit the settings or the base.
    """
    if train.init_adapter is None:
        return train
    if train.init_adapter == CHAMPION:  # a finished run needs only the digest, and not the weights
        return train.model_copy(update={"init_adapter": find_champion(layout).digest})
    start = locate(layout, train)
    digest = start.digest()[: digests.SHORT]
    start.require_fit(train, base_digest)
    return train.model_copy(update={"init_adapter": digest})


def keep_best_weights(layout: ProjectLayout, run: RunPaths) -> str:
    """Keep the best weights of a run, which may still be trained, in a directory of their own. Return its path relative
    to the project.

    Raises:
        DataError: the run has no valid checkpoint on this machine, or is removed now.
    """
    source = run.result / "checkpoints" / "best" if run.is_finished() else _find_best_checkpoint(run)
    try:
        target = layout.start_weights / StartAdapter(source).digest()[: digests.SHORT]
        if not target.exists():
            with files.sealed_directory(target, KIND) as scratch:
                for name in (CHECKPOINT_WEIGHTS, CHECKPOINT_IDENTITY):
                    files.link_or_copy(source / name, scratch / name)
    except FileNotFoundError:  # a newer checkpoint has replaced it
        raise DataError(f"run {run.root.name}: {source} was removed in the meantime; repeat the command") from None
    return target.relative_to(layout.root).as_posix()


def _find_best_checkpoint(run: RunPaths) -> Path:
    for step in reversed(run.checkpoint_steps()):
        path = run.checkpoint(step)
        with suppress(DamagedFileError, OSError, ValueError, KeyError):  # damaged or removed: an older one counts
            files.verify_sealed(path, CHECKPOINT)
            best = run.checkpoint(_read_best_step(path) or step)
            files.verify_sealed(best, CHECKPOINT)
            return best
    raise DataError(f"run {run.root.name}: has no valid checkpoint on this machine to start from ({run.checkpoints})")


def _read_best_step(path: Path) -> int:
    state: Mapping[str, Any] = json.loads((path / "state.json").read_bytes())["state"]
    return int(state["best_step"])


def _read_train(run: RunPaths) -> dict[str, Any]:
    train: dict[str, Any] = json.loads(run.spec.read_bytes()).get("train", {})
    return train
