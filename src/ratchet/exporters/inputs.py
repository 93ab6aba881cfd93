"""Collects and checks the inputs of an export before any long work starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.exporters.gguf import llama_cpp_tools
from ratchet.exporters.gguf.llama_cpp_tools import LlamaCppTools
from ratchet.exporters.merge import merger
from ratchet.exporters.merge.merger import plan_merge
from ratchet.exporters.merge.recipe import MergeBase, MergeRecipe, WeightedAdapter
from ratchet.models import base_model, cpu_products, loading
from ratchet.registry import pickle_scan
from ratchet.runs.directory import RunSpec
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.export import Progress
from ratchet.storage.records.training import TrainReport
from ratchet.training.run_spec import build_run_spec


def require_exportable(model: Path, settings: Settings, root: Path) -> LlamaCppTools:
    """Check that every requested format supports the model, from its config and tokenizer alone.

    Args:
        model: directory of the base, whose architecture and tokenizer the exported model has.
        settings: all settings of the project.
        root: directory of the project.

    Returns:
        llama.cpp's tools that are installed.

    Raises:
        SettingsError: a format does not support the architecture or type; the message lists the supported ones. Or the
            directory in `machine.llama_cpp` has no tools.
        BaseModelError: GGUF cannot represent the tokenizer.
    """
    export = settings.export
    setting = settings.machine.llama_cpp
    tools = llama_cpp_tools.find_tools(None if setting is None else root / Path(setting).expanduser())
    if export.gguf.types:
        from ratchet.exporters.gguf import architectures, writer  # needs the extra `export`, as onnx below

        writer.require_exportable(model, export.gguf.types, tools.convert is not None)
        llama_cpp_tools.require_quantizer(tools, export.gguf.types, architectures.is_supported(model))
    if export.onnx.types:
        from ratchet.exporters import onnx

        onnx.require_exportable(model)
    return tools


@dataclass(frozen=True)
class ExportJob:
    """Settings, checked inputs and device of one export."""

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
        """Data type of the merged weights."""
        return loading.pick_dtype(self.settings.export.dtype, self.device)

    @property
    def spec(self) -> RunSpec:
        """Spec of the run that trained the adapter."""
        return build_run_spec(self.layout, self.settings)

    @property
    def merge_bases(self) -> tuple[MergeBase, ...]:
        """Base weights to merge into. If both are tried, the weights that the adapter was trained on come last."""
        merge_base = self.settings.export.merge_base
        if merge_base != "auto":
            return (merge_base,)
        has_one_base = self.settings.train.quantization == "none" or self.base.quantization is not None
        return ("dequantized",) if has_one_base else ("original", "dequantized")

    def recipe(self, merge_base: MergeBase) -> MergeRecipe:
        """Return the recipe that merges all adapters into these weights of the base."""
        export = self.settings.export
        trained = WeightedAdapter(self.layout.adapter, export.weight)
        additional = tuple(
            WeightedAdapter(self.layout.root / entry.adapter, entry.weight) for entry in export.additional_adapters
        )
        return MergeRecipe(
            base=self.base_path, card=self.base, train=self.settings.train, adapters=(trained, *additional),
            modules=export.modules, merge_base=merge_base, dtype=self.dtype, device=self.device,
            shard_bytes=export.max_shard_size, method=export.merge_method, density=export.density,
        )  # fmt: skip

    def tokenizer(self) -> Any:
        """Load the tokenizer used in training."""
        return base_model.load_project_tokenizer(self.layout, self.base)


def open_job(layout: ProjectLayout, settings: Settings, progress: Progress) -> ExportJob:
    """Read and check all inputs of an export.

    Raises:
        DamagedFileError: the adapter on disk differs from the adapter in the training report.
        DataError: an earlier stage has not run, or ran with other settings.
        BaseModelError: the base is missing or changed, or an adapter belongs to another base.
        SettingsError: a format does not support this model.
        OSError: the disk has too little free space.
    """
    base, trained = BaseCard.load(layout.base_card), TrainReport.load(layout.train_report)
    card = DatasetCard.load(layout.dataset_card)
    base_path = base_model.locate(layout, base)
    loading.use_threads(settings.machine.threads)
    cpu_products.use_onednn()  # as in the command, so that merged weights have the same bits in every process
    device = loading.pick_device(settings.machine.device)
    tools = require_exportable(base_path, settings, layout.root)
    job = ExportJob(layout, settings, base, trained, card, base_path, device, tools, progress)
    job.spec.require(trained)
    files.verify_sealed(layout.train, "train")
    names = sorted(p.name for p in layout.adapter.iterdir())
    if digests.hash_tree(layout.adapter, names) != trained.adapter_digest:
        raise DamagedFileError(
            f"{layout.adapter}: its digest differs from the training report of run {trained.run_id}; run "
            "`dvc repro -f train`"
        )
    for entry in settings.export.additional_adapters:
        if not (layout.root / entry.adapter / "adapter_config.json").is_file():
            raise SettingsError(
                f"export.additional_adapters: {entry.adapter}: found no adapter_config.json; expected "
                "the directory of a saved adapter, relative to the project"
            )
        pickle_scan.scan_directory(layout.root / entry.adapter)
        if entry.prepared_data is not None:
            _require_data_of_same_base(layout.root / entry.prepared_data, entry.prepared_data, base)
    for merge_base in job.merge_bases:
        plan_merge(job.recipe(merge_base))
    base_model.verify_files(base_path, base.files)
    layout.experiments.mkdir(exist_ok=True)
    files.require_space(layout.experiments, _required_bytes(job))
    return job


def _require_data_of_same_base(folder: Path, name: str, base: BaseCard) -> None:
    """Check the prepared data of another adapter, whose tokens must be those of this base."""
    if not (folder / "card.json").is_file():
        raise SettingsError(
            f"export.additional_adapters: prepared_data: found no card.json in {name}; expected the directory "
            "experiments/data of a project, relative to this one"
        )
    files.verify_sealed(folder, "data")
    if (found := DatasetCard.load(folder / "card.json").base_digest) != base.digest:
        raise SettingsError(
            f"export.additional_adapters: prepared_data: {name} was prepared for base {found[:12]}, but this one has "
            f"{base.digest[:12]}; name data of the same base"
        )


def _required_bytes(job: ExportJob) -> int:
    """Return the bytes of all files that exist on disk at the same time: every merged model, and every other format."""
    export = job.settings.export
    merged_bytes = [merger.merged_size_bytes(job.recipe(merge_base)) for merge_base in job.merge_bases]
    format_bytes: int = round(merged_bytes[-1] * 4 / job.dtype.itemsize)  # float32, the largest type of any format
    return sum(merged_bytes) + format_bytes * (
        len(export.gguf.types) + len(export.onnx.types) + len(export.bitsandbytes.types)
    )
