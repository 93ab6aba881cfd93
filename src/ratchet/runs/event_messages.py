"""Events of a journal as lines for people."""

from ratchet.config import units
from ratchet.runs.journal import Event
from ratchet.runs.restart_policy import cause
from ratchet.runs.status import among

DOUBTS = ("skipped", "repeated", "spike", "budget", "scale")
"""Events about a step that was not as it should be."""
ANSWERS = "generate"
"""Phase of a generation's budgets."""
ELSEWHERE = {"server": "a server", "llama.cpp": "llama.cpp", "none": ""}
"""Devices of models that others compute, in numbers of their own."""


def beginning(event: Event, unit: str = "step") -> str:
    """Of `ready`: where an attempt begins, and on what; `unit`: what its steps are called."""
    start, planned = event.data["start_step"], event.data["planned_steps"]
    resumed = f"going on from {unit} {start}" if start else "starting"
    where = computing(str(event.data["device"]), str(event.data["compute_dtype"]))
    return f"{resumed}, {planned} {unit}s{where and ' on '}{where}{among(event.data)}"


def computing(device: str, numbers: str) -> str:
    """Where and in which numbers a model computes: `cuda in bfloat16`, `a server`; empty: nothing is computed."""
    return ELSEWHERE.get(device, f"{device} in {numbers}")


def foreseen(event: Event) -> str:
    """Of `forecast`: what the run will need."""
    forecast = event.data["forecast"]
    peak = max((phase["parts"] for phase in forecast["phases"]), key=lambda parts: sum(parts.values()))
    most = ", ".join(
        f"{name} {units.written(count)}" for name, count in sorted(peak.items(), key=lambda one: -one[1])[:3]
    )
    return (
        f"memory forecast for micro-batches of {forecast['rows']} x {forecast['row_tokens']} tokens: "
        f"{units.written(sum(peak.values()))} of {units.written(event.data['available_bytes'])} at hand ({most})"
    )


def doubt(event: Event) -> str:
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


def news(event: Event) -> str | None:
    """One line of what is out of the ordinary, not of a run's usual way.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the event lacks what its kind has.
    """
    data = event.data
    if event.kind in ("notice", "alert"):
        return f"{event.kind}: {data['text']}"
    if event.kind in DOUBTS:
        unit = "answer" if data.get("phase") == ANSWERS else "step"
        return f"{unit} {data['step']}: {doubt(event)}"
    if event.kind == "died":
        return f"attempt {event.attempt} died: {cause(data['class'], data['text'])}"
    if event.kind in ("refused", "ended_early"):
        return f"{event.kind.replace('_', ' ')}: {data['text']}"
    return None
