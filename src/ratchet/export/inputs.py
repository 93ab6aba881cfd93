"""Whether the formats that are asked for can carry a model: said before hours are spent on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ratchet.config.schema import Settings
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.export.gguf import llama_cpp_tools, writer
from ratchet.export.gguf.llama_cpp_tools import LlamaCppTools
from ratchet.export.merge import recipe as recipes
from ratchet.export.merge import streaming
from ratchet.export.merge.recipe import MergeBase, MergeRecipe, WeightedAdapter
from ratchet.export.onnx import exporter
from ratchet.models import base_model, loading, teacher_reference
from ratchet.registry import pickle_scan
from ratchet.runs.directory import RunSpec
from ratchet.storage import digests, disk, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.export import Progress


def find_llama_cpp(settings: Settings, root: Path) -> tuple[Path | None, LlamaCppTools]:
    """The directory of llama.cpp that the settings name, and its tools. Raises SettingsError when there are none."""
    named = settings.machine.llama_cpp
    directory = None if named is None else root / Path(named).expanduser()
    return directory, llama_cpp_tools.find_tools(directory)


def require_exportable(model: Path, settings: Settings, root: Path) -> None:
    """Ask every format, by config and tokenizer alone.

    Args:
        model: directory of the base, which has the architecture and the tokenizer of what will be exported.
        root: of the project.

    Raises:
        SettingsError: an architecture, or a type, that a format cannot have here; says which it can.
        BaseModelError: a tokenizer that GGUF cannot represent.
    """
    wanted = settings.export
    directory, found = find_llama_cpp(settings, root)
    if wanted.gguf.types:
        writer.require_exportable(model, wanted.gguf.types, directory)
    llama_cpp_tools.require_quantizer(found, wanted.gguf.types)
    if wanted.onnx.types:
        exporter.require_exportable(model)


# What an export works with: the stages before it, checked to belong together, and what it will cost in disk space.


@dataclass(frozen=True)
class ExportJob:
    """One export: settings, inputs, device."""

    layout: ProjectLayout
    settings: Settings
    base: BaseCard
    trained: TrainReport
    card: DatasetCard
    base_path: Path
    device: torch.device
    tools: LlamaCppTools
    progress: Progress

    @property
    def dtype(self) -> torch.dtype:
        """Of the merged weights."""
        return loading.pick_dtype(self.settings.export.dtype, self.device)

    @property
    def spec(self) -> RunSpec:
        """Of the run that trained the adapter."""
        train, teaching = teacher_reference.resolve_teacher(self.settings.train, self.layout, self.card.digest)
        return RunSpec(train=train, data_digest=self.card.digest, base_digest=self.base.digest, teaching=teaching)

    @property
    def ways(self) -> tuple[MergeBase, ...]:
        """Bases to merge into; where there is a choice to measure, the one that the adapter was trained on is last."""
        wanted = self.settings.export.merge_base
        if wanted != "auto":
            return (wanted,)
        one_only = self.settings.train.quantization == "none" or self.base.quantization is not None
        return ("dequantized",) if one_only else ("original", "dequantized")

    def recipe(self, merge_base: MergeBase) -> MergeRecipe:
        """What is merged into which base."""
        export = self.settings.export
        own = WeightedAdapter(self.layout.adapter, export.weight)
        others = tuple(WeightedAdapter(self.layout.root / one.adapter, one.weight) for one in export.also)
        return MergeRecipe(
            base=self.base_path, card=self.base, train=self.settings.train, parts=(own, *others),
            modules=export.modules, merge_base=merge_base, dtype=self.dtype, device=self.device,
            shard_bytes=export.shard_size,
        )  # fmt: skip

    def tokenizer(self) -> Any:
        """As in training."""
        base = self.base
        return base_model.load_tokenizer(self.base_path, self.layout.own_template, base.added_tokens, base.remote_code)


def open_job(layout: ProjectLayout, settings: Settings, progress: Progress) -> ExportJob:
    """Read and check what export needs, before anything takes long.

    Raises:
        DamagedFileError: the adapter on disk is not the one that the training report names.
        DataError: a stage before this has not run, or is of other settings.
        BaseModelError: the base is gone or changed, or an adapter is of another base.
        SettingsError: a format cannot carry this model.
        OSError: the disk has no room for all of it.
    """
    base, trained = BaseCard.load(layout.base_card), TrainReport.load(layout.train_report)
    card = DatasetCard.load(layout.dataset_card)
    base_path = base_model.locate(layout, base)
    loading.use_threads(settings.machine.threads)
    device = loading.pick_device(settings.machine.device)
    job = ExportJob(
        layout, settings, base, trained, card, base_path, device, find_llama_cpp(settings, layout.root)[1], progress
    )  # fmt: skip
    job.spec.require(trained)
    _check_adapter(layout, trained)
    for one in settings.export.also:
        if not (layout.root / one.adapter / "adapter_config.json").is_file():
            raise SettingsError(
                f"export.also: {one.adapter}: no saved adapter there (adapter_config.json); name its directory, as "
                "seen from the project"
            )
        pickle_scan.scan_directory(layout.root / one.adapter)
    for way in job.ways:
        recipes.require_mergeable(job.recipe(way))
    require_exportable(base_path, settings, layout.root)
    base_model.verify_files(base_path, base.files)
    layout.experiments.mkdir(exist_ok=True)
    disk.require_space(layout.experiments, _required_bytes(job))
    return job


def _check_adapter(layout: ProjectLayout, trained: TrainReport) -> None:
    files.verify_sealed(layout.train, "train")
    names = sorted(p.name for p in layout.adapter.iterdir())
    if digests.hash_tree(layout.adapter, names) != trained.adapter_digest:
        raise DamagedFileError(f"{layout.adapter}: not the adapter of run {trained.run_id}; run `dvc repro -f train`")


def _required_bytes(job: ExportJob) -> int:
    """Of everything that lies on the disk at once."""
    export = job.settings.export
    merged = [streaming.merged_size_bytes(job.recipe(way)) for way in job.ways]
    scale = 4 / job.dtype.itemsize  # of float32 files, the largest that any of these can become
    one: int = round(merged[-1] * scale)
    others = len(export.gguf.types) + len(export.onnx.types)
    return sum(merged) + others * one
