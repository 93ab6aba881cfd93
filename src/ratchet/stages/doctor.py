"""`ratchet doctor`: examines machine, data and base, and proposes changes of params.yaml with reasons and sources."""

import difflib
import os
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from ratchet.config import defaults, params_file
from ratchet.config.mlflow_environment import resolve_addresses
from ratchet.config.settings import Settings
from ratchet.config.units import format_bytes
from ratchet.errors import InputError, SettingsError
from ratchet.models import device, model_spec, recommendations, targets
from ratchet.models.device import TorchDevice
from ratchet.models.memory import capacity, forecast, parameters
from ratchet.models.model_spec import ModelSpec
from ratchet.models.recommendations import MemoryConstraint, RecommendationInputs, RecommendedChange, SettingProposal
from ratchet.runs.gpus import count_visible_gpus
from ratchet.stages.forecast import load_teacher_spec, locate_base
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.training import QuantizationReport
from ratchet.training import microbatch_budget

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
EXPORT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = 3
"""Count of numbers that a checkpoint stores for each trainable parameter: its value and two moments."""


class DoctorReport(Record):
    """Result of `ratchet doctor`."""

    findings: tuple[tuple[str, str], ...]
    """Pairs of subject and finding, such as ("disk", "40 GiB free")."""
    proposals: tuple[SettingProposal, ...]
    """Settings to change, with reasons and sources."""
    compared_with: str
    """The settings that the proposals change: `params.yaml`, or `the defaults` outside a project."""
    base: Path | None
    """The model of `--base`."""
    is_base_known: bool
    diff: tuple[str, ...]
    """Lines of a unified diff of params.yaml."""
    was_written: bool
    problems: tuple[str, ...]
    """Reasons why a run cannot start on this machine; empty if a run can start."""


@dataclass
class _Examination:
    """Inputs and findings of an examination."""

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
        settings: the present settings of the project; None outside one.
        base: a model directory or config.json to examine in place of the project's base.
        write: whether to write the proposals into params.yaml.

    Raises:
        SettingsError: params.yaml was changed meanwhile, or `write` is set outside a project or together with `base`.
        BaseModelError: `base` is not a model.
    """
    if write and layout is None:
        raise SettingsError("--write: no Ratchet project here, so there is no params.yaml to change")
    if write and base is not None:
        raise SettingsError(
            "--write: the advice is for --base, and params.yaml may name another; set base.source, run `ratchet base`, "
            "and repeat without --base"
        )
    text = layout.params.read_text(encoding="utf-8") if layout is not None else None
    if layout is not None and params_file.parse(text or "", environment=os.environ) != settings:
        raise SettingsError(f"{layout.params}: changed while it was read; repeat")
    examination = _Examination(layout, settings or Settings(), write)
    if text is not None:
        _report_defaults(examination, text)
    _report_mlflow(examination)
    torch_device = _report_machine(examination)
    facts = RecommendationInputs(
        examination.settings,
        "cuda" if torch_device.type == "cuda" else "cpu",
        _load_base_spec(examination, base),
        data_card := _load_data_card(examination),
        None if base is not None else _find_base_loss(examination, data_card),
    )
    _check_quantization(examination, facts, torch_device)
    if examination.changes:
        facts = replace(facts, settings=params_file.apply_changes(facts.settings, examination.changes[0].values))
    facts, changes = recommendations.apply_rules(facts, recommendations.RULES)
    examination.changes += changes
    if (spec := facts.spec) is not None:
        facts = _check_memory(examination, facts, spec, torch_device)
        try:  # a run with these adapter settings would be refused
            targets.check_adapter(spec, facts.settings.train, bool(facts.settings.base.added_tokens))
        except InputError as error:
            if str(error) not in examination.problems:
                examination.problems.append(str(error))
    proposals = recommendations.merge_into_proposals(examination.settings, examination.changes)
    diff: list[str] = []
    if text is not None and layout is not None and proposals and base is None:
        diff = _change_params(layout, text, proposals, write)
    return DoctorReport(
        findings=tuple(examination.findings),
        proposals=tuple(proposals),
        base=base,
        diff=tuple(diff),
        compared_with="params.yaml" if layout is not None else "the defaults",
        is_base_known=layout is not None or base is not None,
        was_written=write and bool(diff),
        problems=tuple(examination.problems),
    )


def _report_defaults(examination: _Examination, text: str) -> None:
    """Add a finding if newer defaults differ from those of the version in params.yaml."""
    old, new = params_file.explain(text)[0], defaults.VERSION
    if old == new:
        return
    changes = ", ".join(f"{name} {one.before} → {one.after}" for name, one in defaults.list_changes(old).items())
    finding = f"of version {old}; version {new} changes {changes or 'none that matter'}"
    examination.add("defaults", f"{finding}; `version: {new}` in params.yaml adopts them")


def _report_mlflow(examination: _Examination) -> None:
    """Add a finding with the addresses of MLflow and the origin of each; a problem if the environment is wrong."""
    layout = examination.layout
    try:
        addresses = resolve_addresses(examination.settings, layout.mlflow_database if layout is not None else None)
    except SettingsError as error:
        examination.problems.append(str(error))
    else:
        examination.add("MLflow", addresses.describe())


def _report_machine(examination: _Examination) -> TorchDevice:
    setting = examination.settings.machine.device
    torch_device = device.pick_device("cpu")
    try:
        torch_device = device.pick_device(setting)
        device.require_dtype(examination.settings.train.compute_dtype, torch_device)
    except SettingsError as error:
        examination.problems.append(str(error))
    device.use_threads(examination.settings.machine.threads)
    examination.add("device", device.describe_device(torch_device))
    from ratchet.stages import hardware_probe  # its imports take a second

    if torch_device.type == "cuda":
        host = capacity.measure_host()
        available, total = format_bytes(host.available_bytes), format_bytes(host.total_bytes)
        examination.add("host", f"{available} of {total} memory available")
        examination.findings += hardware_probe.probe_gpu(torch_device)
    else:
        examination.add("products", hardware_probe.describe_cpu_products())
        examination.add("kernels", hardware_probe.describe_cpu_kernels())
        if setting != "cpu" and count_visible_gpus():
            examination.add("GPU", f"not used: {device.explain_missing_gpu()}")
    folder = examination.layout.runs if examination.layout else Path.cwd()
    examination.add("disk", f"{format_bytes(capacity.disk_free_bytes(folder))} free")
    examination.add("libraries", ", ".join(f"{name} {version(name)}" for name in LIBRARIES))
    return torch_device


def _load_base_spec(examination: _Examination, base: Path | None) -> ModelSpec | None:
    """Load the shape of the base, without its weights. If it is not known, return None and add a finding or problem."""
    try:
        location = locate_base(examination.layout, examination.settings, base)
    except SettingsError as error:
        if base is not None:
            raise
        examination.add("base", f"not known: {error}")
        return None
    try:
        spec = model_spec.load(*location)
    except InputError as error:
        if base is not None:
            raise
        examination.problems.append(str(error))
        return None
    layers = sum(1 for layer in spec.layers if layer.role in ("attention", "mlp"))
    examination.add("base", f"{spec.class_name}, {spec.parameters:,} parameters, {layers} layers in attention and MLP")
    return spec


def _load_data_card(examination: _Examination) -> DatasetCard | None:
    if examination.layout is None:
        return None
    if not examination.layout.dataset_card.is_file():
        examination.add("data", "not known before stage prepare has run (`ratchet prepare`)")
        return None
    card = DatasetCard.load(examination.layout.dataset_card)
    rows = card.lengths["train"]
    examination.add(
        "data",
        f"{card.splits['train']:,} training rows ({card.task}) of {rows.median:,} tokens in the median, "
        f"{rows.greatest:,} at most; {rows.trained:,} answer tokens",
    )
    return card


def _find_base_loss(examination: _Examination, data: DatasetCard | None) -> float | None:
    """Return the loss of the base in full precision, if `ratchet evaluate --quantization` has measured it on these
    data."""
    layout = examination.layout
    if layout is None or data is None or not (path := layout.quantization / "quantization.json").is_file():
        return None
    report = QuantizationReport.load(path)
    if (report.base_digest, report.data_digest) != (data.base_digest, data.digest):
        return None
    loss = report.costs[0].loss
    examination.add("base", f"loss {loss:.3g} nats per answer token, by `ratchet evaluate --quantization`")
    return loss


def _check_quantization(examination: _Examination, facts: RecommendationInputs, torch_device: TorchDevice) -> None:
    """Test 4-bit quantization on this device with the widths of this base. Propose `none` if that fails."""
    train = examination.settings.train
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
        examination.add("4 bits", f"{train.quantization} works here")
        return
    if not examination.write:  # with --write, the change below fixes it
        problem = f"train.quantization: {train.quantization}: {fault}; none trains LoRA without 4 bits"
        examination.problems.append(problem)
    without = {"train.quantization": "none"} | (
        {"train.initialization": "zero"} if train.initialization == "loftq" else {}
    )
    examination.changes.append(RecommendedChange(without, fault, "tested on this machine"))


def _check_memory(
    examination: _Examination, facts: RecommendationInputs, base: ModelSpec, torch_device: TorchDevice
) -> RecommendationInputs:
    """Forecast the memory, change settings until it fits, and check the disk. Returns the facts with these changes."""
    try:
        teacher, notes = load_teacher_spec(examination.layout, examination.settings)
    except InputError as error:
        examination.problems.append(str(error))
        teacher, notes = None, ()
    examination.findings += [("teacher", note) for note in notes]
    data = examination.layout.data if examination.layout and facts.data else None
    estimate_work = microbatch_budget.make_work_estimator(data, torch_device, teacher)

    def needed(settings: Settings) -> int:
        expected = forecast.forecast(base, settings.train, settings.machine, estimate_work(settings))
        return expected.needed_bytes(work.local_ranks)

    work = estimate_work(facts.settings)
    available = capacity.measure_device(torch_device).available_bytes // work.local_ranks
    try:
        constraint = MemoryConstraint(available, needed, work.row_tokens, work.ranks)
        fit = recommendations.fit_to_memory(facts.settings, facts.device, constraint)
    except InputError as error:
        examination.problems.append(str(error))
        return facts
    except Exception as error:  # an unknown kind of model; training it may be possible
        examination.add("memory", f"no forecast for this model ({type(error).__name__}: {str(error)[:200]})")
        return facts
    size = f"{work.rows} rows of {work.row_tokens:,} tokens at a time"
    per_rank = f" for each of {work.local_ranks} ranks" if work.local_ranks > 1 else ""
    reduced, total = format_bytes(fit.reduced_bytes), format_bytes(available)
    finding = f"{format_bytes(fit.needed_bytes)} needed by the forecast for {size}, {total} available{per_rank}"
    if not fit.fits:
        finding += ": no setting makes it fit"
        examination.problems.append(
            f"even the smallest settings need {reduced} of memory, and {total} are available: take a smaller base, a "
            "machine with more memory, or more ranks that share the base (`ratchet forecast --ranks N` shows the "
            "memory of each rank)"
        )
    else:
        finding += f"; {reduced} with the changes below" if fit.changes else ": it fits"
    examination.add("memory", finding)
    for change in fit.changes:
        facts = replace(facts, settings=params_file.apply_changes(facts.settings, change.values))
    examination.changes += fit.changes
    _check_disk(examination, facts.settings, base)
    return facts


def _check_disk(examination: _Examination, settings: Settings, base: ModelSpec) -> None:
    """Add a problem if the disk has too little space for checkpoints and the exported model."""
    if examination.layout is None:
        return
    trainable_bytes = 4 * parameters.count_trainable_parameters(base, settings.train)
    checkpoints = STATES * trainable_bytes * (settings.machine.keep_checkpoints + 2)
    exported = EXPORT_BYTES[settings.export.dtype] * base.parameters
    free = capacity.disk_free_bytes(examination.layout.runs)
    if free < checkpoints + exported:
        examination.problems.append(
            f"{examination.layout.runs}: {format_bytes(free)} are free, and a run needs about "
            f"{format_bytes(checkpoints)} for checkpoints and {format_bytes(exported)} for the exported model "
            f"(export.dtype: {settings.export.dtype}): free some space, or move runs with RATCHET_RUNS"
        )


def _change_params(layout: ProjectLayout, text: str, proposals: list[SettingProposal], write: bool) -> list[str]:
    """Return the change of params.yaml as a diff. Write the change if `write` is set."""
    new = params_file.amend_text(text, {proposal.key: proposal.value for proposal in proposals})
    name = layout.params.name
    if write and layout.params.read_text(encoding="utf-8") != text:
        raise SettingsError(f"{layout.params}: changed by another process meanwhile; nothing was written: run it again")
    if write:
        files.write_atomic(layout.params, new)
    return list(difflib.unified_diff(text.splitlines(), new.splitlines(), name, f"{name} (proposed)", n=1, lineterm=""))
