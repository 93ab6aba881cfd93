"""Events of a journal as lines for people."""

from ratchet.config import units
from ratchet.runs.journal import JournalEvent
from ratchet.runs.restart_policy import describe_cause
from ratchet.runs.status import describe_ranks

DOUBTS = ("skipped", "repeated", "spike", "budget", "scale")
"""Events about a step that was not as it should be."""
ANSWERS = "generate"
"""Phase of a generation's budgets."""
ELSEWHERE = {"server": "a server", "llama.cpp": "llama.cpp", "none": ""}
"""Devices of models that others compute, in numbers of their own."""


def describe_beginning(event: JournalEvent, unit: str = "step") -> str:
    """Of `ready`: where an attempt begins, and on what; `unit`: what its steps are called."""
    start, planned = event.data["start_step"], event.data["planned_steps"]
    resumed = f"going on from {unit} {start}" if start else "starting"
    where = describe_device(str(event.data["device"]), str(event.data["compute_dtype"]))
    return f"{resumed}, {planned} {unit}s{where and ' on '}{where}{describe_ranks(event.data)}"


def describe_device(device: str, numbers: str) -> str:
    """Where and in which numbers a model computes: `cuda in bfloat16`, `a server`; empty: nothing is computed."""
    return ELSEWHERE.get(device, f"{device} in {numbers}")


def describe_forecast(event: JournalEvent) -> str:
    """Of `forecast`: what the run will need."""
    forecast = event.data["forecast"]
    peak = max((phase["parts"] for phase in forecast["phases"]), key=lambda parts: sum(parts.values()))
    most = ", ".join(
        f"{name} {units.format_bytes(count)}" for name, count in sorted(peak.items(), key=lambda one: -one[1])[:3]
    )
    return (
        f"memory forecast for micro-batches of {forecast['rows']} x {forecast['row_tokens']} tokens: "
        f"{units.format_bytes(sum(peak.values()))} of "
        f"{units.format_bytes(event.data['available_bytes'])} at hand ({most})"
    )


def describe_anomaly(event: JournalEvent) -> str:
    """Of one of DOUBTS: what was wrong with a step, or had to be done about it."""
    data = event.data
    if event.kind == "skipped":
        back = "" if data["to_step"] is None else f", back to the weights of step {data['to_step']}"
        return f"left out{back}: {data['reason']}"
    if event.kind == "repeated":
        return f"computed once more: {data['reason']}"
    if event.kind == "spike":
        return (
            f"gradient norm {data['grad_norm']:.3g} is {data['deviations']:.1f} deviations above the median "
            f"{data['median']:.3g}; learned from all the same"
        )
    if event.kind == "scale":
        return f"gradient overflowed in float16; computed once more with the loss scaled by {data['loss_scale']:g}"
    tokens = data["budget"]["tokens"]
    limit = "has no limit of its own any more" if tokens is None else f"of at most {tokens:,} padded tokens"
    cause = f"{data['failed_tokens']:,} did not fit" if data["action"] == "shrink" else "there was room for a while"
    what = "batch" if data["phase"] == ANSWERS else f"micro-batch of {data['phase']}"
    return f"{what} {limit}: {cause}"


def describe_notable_event(event: JournalEvent) -> str | None:
    """One line of what is out of the ordinary, not of a run's usual way.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the event lacks what its kind has.
    """
    data = event.data
    if event.kind in ("notice", "alert"):
        return f"{event.kind}: {data['text']}"
    if event.kind in DOUBTS:
        unit = "answer" if data.get("phase") == ANSWERS else "step"
        return f"{unit} {data['step']}: {describe_anomaly(event)}"
    if event.kind == "died":
        return f"attempt {event.attempt} died: {describe_cause(data['class'], data['text'])}"
    if event.kind in ("refused", "ended_early"):
        return f"{event.kind.replace('_', ' ')}: {data['text']}"
    return None
