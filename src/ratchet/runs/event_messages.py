"""Describes events of a journal in one line each."""

from ratchet.config import units
from ratchet.runs.journal import JournalEvent
from ratchet.runs.restart_policy import describe_cause
from ratchet.runs.status import describe_ranks

STEP_ANOMALIES = ("step_skipped", "step_repeated", "gradient_spike", "microbatch_budget", "loss_scale")
"""Events about a step that did not run as usual."""
GENERATE_PHASE = "generate"
"""Phase of the batch budgets of a generation."""
EXTERNAL_DEVICES = {"server": "a server", "llama.cpp": "llama.cpp", "none": ""}
"""Devices of models that run outside torch, with their own number formats."""


def describe_start(event: JournalEvent, unit: str = "step") -> str:
    """Describe `worker_ready`: where an attempt starts and on which device; `unit` is the name of a step."""
    start, planned = event.data["start_step"], event.data["planned_steps"]
    resumed = f"resuming from {unit} {start}" if start else "starting"
    where = describe_device(str(event.data["device"]), str(event.data["compute_dtype"]))
    return f"{resumed}, {planned} {unit}s{where and ' on '}{where}{describe_ranks(event.data)}"


def describe_device(device: str, dtype: str) -> str:
    """Device and number format of a model: `cuda in bfloat16`, `a server`; empty if nothing is computed."""
    return EXTERNAL_DEVICES.get(device, f"{device} in {dtype}")


def describe_forecast(event: JournalEvent) -> str:
    """Describe `memory_forecast`: how much memory the run needs."""
    forecast = event.data["forecast"]
    peak = max((phase["parts"] for phase in forecast["phases"]), key=lambda parts: sum(parts.values()))
    most = ", ".join(
        f"{name} {units.format_bytes(count)}" for name, count in sorted(peak.items(), key=lambda one: -one[1])[:3]
    )
    return (
        f"memory forecast for micro-batches of {forecast['rows']} x {forecast['row_tokens']} tokens: "
        f"{units.format_bytes(sum(peak.values()))} of "
        f"{units.format_bytes(event.data['available_bytes'])} available ({most})"
    )


def describe_anomaly(event: JournalEvent) -> str:
    """Describe one of STEP_ANOMALIES: what was wrong with the step, or how it was handled."""
    data = event.data
    if event.kind == "step_skipped":
        step = data["rollback_step"]
        rollback = "" if step is None else f", rolled back to the weights of step {step}"
        return f"skipped{rollback}: {data['reason']}"
    if event.kind == "step_repeated":
        return f"repeated: {data['reason']}"
    if event.kind == "gradient_spike":
        return (
            f"gradient norm {data['grad_norm']:.3g} is {data['deviations']:.1f} deviations above the median "
            f"{data['median']:.3g}; trained on anyway"
        )
    if event.kind == "loss_scale":
        return f"gradient overflowed in float16; repeated with loss scale {data['loss_scale']:g}"
    tokens = data["budget"]["tokens"]
    limit = "no longer limited" if tokens is None else f"limited to {tokens:,} padded tokens"
    cause = (
        f"{data['failed_tokens']:,} did not fit" if data["action"] == "shrink" else "memory was sufficient for a while"
    )
    name = "batch" if data["phase"] == GENERATE_PHASE else f"micro-batch of {data['phase']}"
    return f"{name} {limit}: {cause}"


def describe_notable_event(event: JournalEvent) -> str | None:
    """One line for an unusual event; None for the usual ones.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the event lacks a key of its kind.
    """
    data = event.data
    if event.kind in ("notice", "alert"):
        return f"{event.kind}: {data['text']}"
    if event.kind in STEP_ANOMALIES:
        unit = "answer" if data.get("phase") == GENERATE_PHASE else "step"
        return f"{unit} {data['step']}: {describe_anomaly(event)}"
    if event.kind == "worker_exited":
        return f"attempt {event.attempt} died: {describe_cause(data['failure_class'], data['text'])}"
    if event.kind in ("start_refused", "pruned"):
        return f"{event.kind.replace('_', ' ')}: {data['text']}"
    return None
