"""`ratchet doctor`: what machine, data and base allow, and what params.yaml should say, with reasons and sources."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from ratchet.config import params_file
from ratchet.config.schema import Settings
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
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.training import microbatch_budget

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
EXPORT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = 3
"""Numbers in a checkpoint for each parameter that learns: itself and two moments."""


@dataclass
class _DoctorReport:
    """What was found, and what is said of it."""

    layout: ProjectLayout | None
    settings: Settings
    write: bool
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    changes: list[RecommendedChange] = field(default_factory=list)

    def say(self, name: str, text: str) -> None:
        self.lines.append(f"  {name:<10} {text}")


def doctor(layout: ProjectLayout | None, settings: Settings | None, base: Path | None, write: bool) -> tuple[bool, str]:
    """The verb.

    Args:
        layout: of the project; None outside of one.
        settings: of the project, as read just now; None outside of one.
        base: a model directory or config.json to look at instead of the project's base.
        write: whether to put the advice into params.yaml.

    Returns:
        Whether a run has what it needs here; and the report.

    Raises:
        SettingsError: params.yaml was changed by somebody else meanwhile, or `write` means nothing here.
        BaseModelError: `base` is no model.
    """
    text = _read_params(layout, settings, base, write)
    seen = _DoctorReport(layout, settings or Settings(), write)
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
    if (found := facts.blueprint) is not None:
        facts = _check_memory(seen, facts, found, torch_device)
        _check_run_settings(seen, facts, found)
    proposals = recommendations.merge_into_proposals(seen.settings, seen.changes)
    report = ["machine, base and data", *seen.lines, *_format_advice(proposals, base, layout)]
    if text is not None and layout is not None and proposals and base is None:
        report += _apply_changes(layout, text, proposals, write)
    report += [f"problem: {problem}" for problem in seen.problems]
    return not seen.problems, "\n".join(report)


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


# ------------------------------------------------------------------------------------------------------- what there is


def _report_machine(seen: _DoctorReport) -> TorchDevice:
    wanted = seen.settings.machine.device
    try:
        found = device.pick_device(wanted)
        device.require_dtype(seen.settings.train.compute_dtype, found)
    except SettingsError as error:
        seen.problems.append(str(error))
        found = device.pick_device("auto")
    device.use_threads(seen.settings.machine.threads)
    seen.say("device", device.describe_device(found))
    if found.type == "cuda":
        host = capacity.measure_host()
        seen.say("host", f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} memory at hand")
    where = seen.layout.runs if seen.layout else Path.cwd()
    seen.say("disk", f"{format_bytes(capacity.disk_free_bytes(where))} free")
    seen.say("libraries", ", ".join(f"{name} {version(name)}" for name in LIBRARIES))
    return found


def _load_base_spec(seen: _DoctorReport, base: Path | None) -> ModelSpec | None:
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
    seen.say("base", f"{found.class_name}, {found.parameters:,} parameters, {kinds} layers in attention and MLP")
    return found


def _locate_base(seen: _DoctorReport) -> tuple[Path, bool] | None:
    """Where the project's base lies, and whether its own code may run; None, and said, where that is not known."""
    layout, wanted = seen.layout, seen.settings.base
    if layout is None:
        seen.say("base", "not known: no project here; name a model directory or its config.json with --base")
        return None
    if layout.base_card.is_file() and (card := BaseCard.load(layout.base_card)).source == wanted.source:
        return base_model.locate(layout, card), card.remote_code
    directory = (layout.root / Path(wanted.source).expanduser()).resolve()
    if wanted.source != base_model.TINY and directory.is_dir():
        return directory, wanted.trust_remote_code is not None
    seen.say("base", f"{wanted.source}: not known before stage base has run (`ratchet base`); see also --base")
    return None


def _load_data_card(seen: _DoctorReport) -> DatasetCard | None:
    if seen.layout is None or not seen.layout.dataset_card.is_file():
        if seen.layout is not None:
            seen.say("data", "not known before stage prepare has run (`ratchet prepare`)")
        return None
    card = DatasetCard.load(seen.layout.dataset_card)
    rows = card.lengths["train"]
    seen.say(
        "data",
        f"{card.splits['train']:,} training rows ({card.task}) of {rows.median:,} tokens in the median, "
        f"{rows.greatest:,} at most; {rows.trained:,} answer tokens",
    )
    return card


def _check_quantization(seen: _DoctorReport, facts: RecommendationInputs, torch_device: TorchDevice) -> None:
    """Whether bitsandbytes does here what it should, for this base."""
    train = seen.settings.train
    if train.quantization == "none":
        return
    widths = {512}
    if facts.blueprint is not None:
        stored = set(parameters.estimate_base_sizes(facts.blueprint, train, compute_bytes=4).quantized)
        widths = {layer.inputs for layer in facts.blueprint.layers if layer.name in stored}
    if widths:
        fault = device.find_four_bit_fault(torch_device, widths, train.quantization)
    else:
        fault = "this base has no layer that transformers stores in 4 bits"
    if fault is None:
        seen.say("4 bits", f"{train.quantization} works here")
        return
    if not seen.write:  # else it is mended below
        seen.problems.append(f"train.quantization: {train.quantization}: {fault}; none trains LoRA without 4 bits")
    seen.changes.append(RecommendedChange({"train.quantization": "none"}, fault, "tried out on this machine"))


# ------------------------------------------------------------------------------------------------------- does it fit


def _check_memory(
    seen: _DoctorReport, facts: RecommendationInputs, base: ModelSpec, torch_device: TorchDevice
) -> RecommendationInputs:
    """Forecast, changes so that it fits, and room on the disk; returns the facts with these changes."""
    teacher = _load_teacher_spec(seen)
    works = microbatch_budget.make_work_estimator(
        seen.layout.data if seen.layout and facts.data else None, torch_device, teacher
    )

    def needed(settings: Settings) -> int:
        expected = forecast.forecast(base, settings.train, settings.machine, works(settings))
        return expected.needed_bytes(work.sharing)

    work = works(facts.settings)
    available = capacity.measure_device(torch_device).available_bytes // work.sharing
    try:
        found = recommendations.fit_to_memory(
            facts.settings, facts.device, MemoryConstraint(available, needed, work.row_tokens, work.ranks)
        )
    except InputError as error:
        seen.problems.append(str(error))
        return facts
    except Exception as error:  # a model of a kind that nobody has seen; it may train all the same
        seen.say("memory", f"no forecast for this model ({type(error).__name__}: {str(error)[:200]})")
        return facts
    _report_memory(seen, found, work, available)
    for change in found.changes:
        facts = replace(facts, settings=params_file.apply_changes(facts.settings, change.values))
    seen.changes += found.changes
    _check_disk(seen, facts.settings, base)
    return facts


def _load_teacher_spec(seen: _DoctorReport) -> ModelSpec | None:
    """The one that would be in memory, if train.distill has one there."""
    if seen.layout is None or not seen.settings.train.distill.stays:
        return None
    try:
        found = model_spec.load(teacher_reference.teacher_directory(seen.layout, seen.settings.train))
    except InputError as error:
        seen.problems.append(str(error))
        return None
    seen.say("teacher", f"{found.class_name}, {found.parameters:,} parameters, in memory beside the student")
    return found


def _report_memory(seen: _DoctorReport, found: MemoryFit, work: MemoryWorkload, available: int) -> None:
    size = f"{work.rows} rows of {work.row_tokens:,} tokens at a time"
    each = f" for each of {work.sharing} ranks" if work.sharing > 1 else ""
    needed = (
        f"{format_bytes(found.needed_bytes)} needed by the forecast for {size}, {format_bytes(available)} at hand{each}"
    )
    if not found.fits:
        seen.say("memory", f"{needed}: no setting makes it fit")
        seen.problems.append(
            f"even the smallest settings need {format_bytes(found.least_bytes)} of memory, and "
            f"{format_bytes(available)} are at hand: take a smaller base, a machine with more memory, or more ranks "
            "that share the base (`ratchet forecast --ranks N` says what each of them would hold)"
        )
    elif found.changes:
        seen.say("memory", f"{needed}; {format_bytes(found.least_bytes)} with the changes below")
    else:
        seen.say("memory", f"{needed}: it fits")


def _check_disk(seen: _DoctorReport, settings: Settings, base: ModelSpec) -> None:
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


def _check_run_settings(seen: _DoctorReport, facts: RecommendationInputs, base: ModelSpec) -> None:
    """Whether a run would be refused for what its settings ask of this base."""
    try:
        targets.check_adapter(base, facts.settings.train, bool(facts.settings.base.added_tokens))
    except InputError as error:
        if str(error) not in seen.problems:
            seen.problems.append(str(error))


# ---------------------------------------------------------------------------------------------------------- the advice


def _format_advice(proposals: list[SettingProposal], base: Path | None, layout: ProjectLayout | None) -> Iterator[str]:
    against = "params.yaml" if layout is not None else "the defaults"
    if not proposals and layout is None and base is None:
        return  # nothing to advise about
    if not proposals:
        yield f"advice: nothing to change in {against}" + (f" for {base}" if base is not None else "")
        return
    count = f"{len(proposals)} change{'s' * (len(proposals) > 1)}"
    yield f"advice: {count} to {against}" + (f" for {base}" if base is not None else "")
    for one in proposals:
        yield f"  {one.key}: {_format_value(one.before)} → {_format_value(one.value)}"
        yield f"      {one.reason}"
        yield f"      source: {one.source}"


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _apply_changes(layout: ProjectLayout, text: str, proposals: list[SettingProposal], write: bool) -> Iterator[str]:
    """The change of params.yaml as a diff, which is made if asked for."""
    new = params_file.amend_text(text, {one.key: one.value for one in proposals})
    name = layout.params.name
    yield ""
    yield from difflib.unified_diff(text.splitlines(), new.splitlines(), name, f"{name} (advised)", n=1, lineterm="")
    yield ""
    if not write:
        yield "`ratchet doctor --write` makes these changes"
        return
    if layout.params.read_text(encoding="utf-8") != text:
        raise SettingsError(f"{layout.params}: changed by somebody else meanwhile; nothing was written: repeat")
    files.write_atomic(layout.params, new)
    yield f"{name}: written"
