"""`ratchet doctor`: what machine, data and base allow, and what params.yaml should say, with reasons and sources."""

import difflib
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.config.units import format_bytes
from ratchet.errors import InputError, SettingsError
from ratchet.models import base_model, device, model_spec, recommendations, targets, teacher_reference
from ratchet.models.device import TorchDevice
from ratchet.models.memory import capacity, forecast, parameters
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.models.recommendations import (
    MemoryConstraint,
    MemoryFit,
    RecommendationInputs,
    RecommendedChange,
    SettingProposal,
)
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import DatasetCard
from ratchet.training import microbatch_budget

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
EXPORT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = 3
"""Numbers in a checkpoint for each parameter that learns: itself and two moments."""


class DoctorReport(Record):
    """Result of `ratchet doctor`."""

    findings: tuple[tuple[str, str], ...]
    """Subject and finding, such as ("disk", "40 GiB free")."""
    proposals: tuple[SettingProposal, ...]
    """Settings to change, with reasons and sources."""
    compared_with: str
    """What the proposals change: `params.yaml`, or `the defaults` outside a project."""
    base: Path | None
    """The model of `--base`."""
    is_base_known: bool
    diff: tuple[str, ...]
    """Lines of a unified diff of params.yaml."""
    was_written: bool
    problems: tuple[str, ...]
    """What a run lacks on this machine; empty when it can start."""


@dataclass
class _Examination:
    """Findings so far."""

    layout: ProjectLayout | None
    settings: Settings
    write: bool
    findings: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    changes: list[RecommendedChange] = field(default_factory=list)

    def add(self, subject: str, finding: str) -> None:
        self.findings.append((subject, finding))


def doctor(
    layout: ProjectLayout | None, settings: Settings | None, base: Path | None = None, write: bool = False
) -> DoctorReport:
    """Examine machine, data and base, and propose settings.

    Args:
        layout: the project; None outside one.
        settings: the project's settings as just read; None outside a project.
        base: a model directory or config.json to examine in place of the project's base.
        write: whether to write the proposals into params.yaml.

    Raises:
        SettingsError: params.yaml was changed meanwhile, or `write` is not possible here.
        BaseModelError: `base` is not a model.
    """
    text = _read_params(layout, settings, base, write)
    seen = _Examination(layout, settings or Settings(), write)
    torch_device = _report_machine(seen)
    facts = RecommendationInputs(
        seen.settings,
        "cuda" if torch_device.type == "cuda" else "cpu",
        _load_base_spec(seen, base),
        _load_data_card(seen),
    )
    _check_quantization(seen, facts, torch_device)
    if seen.changes:
        facts = replace(facts, settings=params_file.apply_changes(facts.settings, seen.changes[0].values))
    facts, changes = recommendations.apply_rules(facts, recommendations.RULES)
    seen.changes += changes
    if (found := facts.spec) is not None:
        facts = _check_memory(seen, facts, found, torch_device)
        _check_run_settings(seen, facts, found)
    proposals = recommendations.merge_into_proposals(seen.settings, seen.changes)
    diff: list[str] = []
    if text is not None and layout is not None and proposals and base is None:
        diff = _change_params(layout, text, proposals, write)
    return DoctorReport(
        findings=tuple(seen.findings),
        proposals=tuple(proposals),
        compared_with="params.yaml" if layout is not None else "the defaults",
        base=base,
        is_base_known=layout is not None or base is not None,
        diff=tuple(diff),
        was_written=write and bool(diff),
        problems=tuple(seen.problems),
    )


def _read_params(layout: ProjectLayout | None, settings: Settings | None, base: Path | None, write: bool) -> str | None:
    """params.yaml as it is, which is what `settings` were read from."""
    if write and layout is None:
        raise SettingsError("--write: no Ratchet project here, so there is no params.yaml to change")
    if write and base is not None:
        raise SettingsError(
            "--write: the advice is for --base, and params.yaml may name another; set base.source, run `ratchet base`, "
            "and repeat without --base"
        )
    if layout is None:
        return None
    text = layout.params.read_text(encoding="utf-8")
    if params_file.parse(text) != settings:
        raise SettingsError(f"{layout.params}: changed while it was read; repeat")
    return text


def _report_machine(seen: _Examination) -> TorchDevice:
    wanted = seen.settings.machine.device
    try:
        found = device.pick_device(wanted)
        device.require_dtype(seen.settings.train.compute_dtype, found)
    except SettingsError as error:
        seen.problems.append(str(error))
        found = device.pick_device("auto")
    device.use_threads(seen.settings.machine.threads)
    seen.add("device", device.describe_device(found))
    if found.type == "cuda":
        host = capacity.measure_host()
        seen.add("host", f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} memory at hand")
    where = seen.layout.runs if seen.layout else Path.cwd()
    seen.add("disk", f"{format_bytes(capacity.disk_free_bytes(where))} free")
    seen.add("libraries", ", ".join(f"{name} {version(name)}" for name in LIBRARIES))
    return found


def _load_base_spec(seen: _Examination, base: Path | None) -> ModelSpec | None:
    """The base without its weights; what is not known is said."""
    if base is not None:
        if not base.exists():
            raise SettingsError(f"--base {base}: no such file; name a model directory or its config.json")
        found = model_spec.load(base)
    else:
        place = _locate_base(seen)
        if place is None:
            return None
        try:
            found = model_spec.load(*place)
        except InputError as error:
            seen.problems.append(str(error))
            return None
    kinds = sum(1 for layer in found.layers if layer.role in ("attention", "mlp"))
    seen.add("base", f"{found.class_name}, {found.parameters:,} parameters, {kinds} layers in attention and MLP")
    return found


def _locate_base(seen: _Examination) -> tuple[Path, bool] | None:
    """The base's directory and whether its own code may run; None with a finding when that is not known."""
    layout, wanted = seen.layout, seen.settings.base
    if layout is None:
        seen.add("base", "not known: no project here; name a model directory or its config.json with --base")
        return None
    if (location := base_model.locate_before_stage(layout, wanted)) is not None:
        return location
    seen.add("base", f"{wanted.source}: not known before stage base has run (`ratchet base`); see also --base")
    return None


def _load_data_card(seen: _Examination) -> DatasetCard | None:
    if seen.layout is None or not seen.layout.dataset_card.is_file():
        if seen.layout is not None:
            seen.add("data", "not known before stage prepare has run (`ratchet prepare`)")
        return None
    card = DatasetCard.load(seen.layout.dataset_card)
    rows = card.lengths["train"]
    seen.add(
        "data",
        f"{card.splits['train']:,} training rows ({card.task}) of {rows.median:,} tokens in the median, "
        f"{rows.greatest:,} at most; {rows.trained:,} answer tokens",
    )
    return card


def _check_quantization(seen: _Examination, facts: RecommendationInputs, torch_device: TorchDevice) -> None:
    """Whether bitsandbytes does here what it should, for this base."""
    train = seen.settings.train
    if train.quantization == "none":
        return
    widths = {512}
    if facts.spec is not None:
        stored = set(parameters.estimate_base_sizes(facts.spec, train, compute_bytes=4).quantized_modules)
        widths = {layer.inputs for layer in facts.spec.layers if layer.name in stored}
    if widths:
        fault = device.find_four_bit_fault(torch_device, widths, train.quantization)
    else:
        fault = "this base has no layer that transformers stores in 4 bits"
    if fault is None:
        seen.add("4 bits", f"{train.quantization} works here")
        return
    if not seen.write:  # otherwise it is fixed below
        seen.problems.append(f"train.quantization: {train.quantization}: {fault}; none trains LoRA without 4 bits")
    seen.changes.append(RecommendedChange({"train.quantization": "none"}, fault, "tested on this machine"))


def _check_memory(
    seen: _Examination, facts: RecommendationInputs, base: ModelSpec, torch_device: TorchDevice
) -> RecommendationInputs:
    """Forecast, changes so that it fits, and room on the disk; returns the facts with these changes."""
    teacher = _load_teacher_spec(seen)
    works = microbatch_budget.make_work_estimator(
        seen.layout.data if seen.layout and facts.data else None, torch_device, teacher
    )

    def needed(settings: Settings) -> int:
        expected = forecast.forecast(base, settings.train, settings.machine, works(settings))
        return expected.needed_bytes(work.local_ranks)

    work = works(facts.settings)
    available = capacity.measure_device(torch_device).available_bytes // work.local_ranks
    try:
        found = recommendations.fit_to_memory(
            facts.settings, facts.device, MemoryConstraint(available, needed, work.row_tokens, work.ranks)
        )
    except InputError as error:
        seen.problems.append(str(error))
        return facts
    except Exception as error:  # an unknown kind of model, which may still train
        seen.add("memory", f"no forecast for this model ({type(error).__name__}: {str(error)[:200]})")
        return facts
    _report_memory(seen, found, work, available)
    for change in found.changes:
        facts = replace(facts, settings=params_file.apply_changes(facts.settings, change.values))
    seen.changes += found.changes
    _check_disk(seen, facts.settings, base)
    return facts


def _load_teacher_spec(seen: _Examination) -> ModelSpec | None:
    """The teacher that is in memory during training, if there is one."""
    if seen.layout is None or not seen.settings.train.distill.is_online:
        return None
    try:
        found = model_spec.load(teacher_reference.teacher_directory(seen.layout, seen.settings.train))
    except InputError as error:
        seen.problems.append(str(error))
        return None
    seen.add("teacher", f"{found.class_name}, {found.parameters:,} parameters, in memory together with the student")
    return found


def _report_memory(seen: _Examination, found: MemoryFit, work: MemoryWorkload, available: int) -> None:
    size = f"{work.rows} rows of {work.row_tokens:,} tokens at a time"
    each = f" for each of {work.local_ranks} ranks" if work.local_ranks > 1 else ""
    needed = (
        f"{format_bytes(found.needed_bytes)} needed by the forecast for {size}, {format_bytes(available)} at hand{each}"
    )
    if not found.fits:
        seen.add("memory", f"{needed}: no setting makes it fit")
        seen.problems.append(
            f"even the smallest settings need {format_bytes(found.reduced_bytes)} of memory, and "
            f"{format_bytes(available)} are at hand: take a smaller base, a machine with more memory, or more ranks "
            "that share the base (`ratchet forecast --ranks N` says what each of them would hold)"
        )
    elif found.changes:
        seen.add("memory", f"{needed}; {format_bytes(found.reduced_bytes)} with the changes below")
    else:
        seen.add("memory", f"{needed}: it fits")


def _check_disk(seen: _Examination, settings: Settings, base: ModelSpec) -> None:
    """Room for checkpoints and the exported model."""
    if seen.layout is None:
        return
    learned = 4 * parameters.count_trainable_parameters(base, settings.train)
    checkpoints = STATES * learned * (settings.machine.keep_checkpoints + 2)
    exported = EXPORT_BYTES[settings.export.dtype] * base.parameters
    free = capacity.disk_free_bytes(seen.layout.runs)
    if free < checkpoints + exported:
        seen.problems.append(
            f"{seen.layout.runs}: {format_bytes(free)} are free, and a run needs about {format_bytes(checkpoints)} for "
            f"checkpoints and {format_bytes(exported)} for the exported model (export.dtype: {settings.export.dtype}): "
            "make room, or move runs with RATCHET_RUNS"
        )


def _check_run_settings(seen: _Examination, facts: RecommendationInputs, base: ModelSpec) -> None:
    """Whether a run would be refused for what its settings ask of this base."""
    try:
        targets.check_adapter(base, facts.settings.train, bool(facts.settings.base.added_tokens))
    except InputError as error:
        if str(error) not in seen.problems:
            seen.problems.append(str(error))


def _change_params(layout: ProjectLayout, text: str, proposals: list[SettingProposal], write: bool) -> list[str]:
    """The change of params.yaml as a diff; written if asked for."""
    new = params_file.amend_text(text, {proposal.key: proposal.value for proposal in proposals})
    name = layout.params.name
    if write:
        if layout.params.read_text(encoding="utf-8") != text:
            raise SettingsError(
                f"{layout.params}: changed by another process meanwhile; nothing was written: run it again"
            )
        files.write_atomic(layout.params, new)
    return list(difflib.unified_diff(text.splitlines(), new.splitlines(), name, f"{name} (proposed)", n=1, lineterm=""))
