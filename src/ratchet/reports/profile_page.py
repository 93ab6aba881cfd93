"""Where a step's time goes, on a page of plain text: Markdown that a terminal shows as well."""

from collections.abc import Iterable, Iterator, Sequence

from ratchet.config.units import written
from ratchet.storage.records.profile import Part, Profile

MEANT = {
    "data": "batch plan, padding, copies to the device",
    "forward": "body of the model",
    "loss": "head and cross entropy, gradient of the head",
    "backward": "gradient of the body",
    "optimizer": "clipping, step",
    "snapshot": "copy of the state for a checkpoint",
    "evaluation": "all validation rows",
    "waiting": "everything between: journal, guards, Python",
}
UNEVEN = 0.3
"""Distance of the quartiles, as a share of the median, from which on figures say more of the machine than of a step."""
LONGEST_NAME = 60
"""Characters of an operator's name."""


def page(profile: Profile) -> str:
    """The whole page."""
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: Profile) -> Iterator[str]:
    floors = profile.floors
    yield f"# Where the time goes: run {profile.run_id}"
    yield ""
    yield (
        f"{profile.device}, {profile.compute_dtype}, {profile.threads} threads, torch {profile.torch}: "
        f"{profile.measured_steps} steps measured, after {profile.warm_steps} to warm up; {profile.traced_steps} more "
        "traced."
    )
    yield ""
    first, third = profile.quartiles_s
    yield f"- a step: {_time(profile.step_s)} (median; quartiles {_time(first)} to {_time(third)})"
    if third - first > UNEVEN * profile.step_s:
        yield "- **steps differ much: rows of very different lengths, or a busy machine: measure again when it is not**"
    if profile.synchronised_step_s is not None:
        yield f"- waiting for the GPU between the parts, as below: {_time(profile.synchronised_step_s)}"
    yield (
        f"- {profile.input_tokens / profile.step_s:,.0f} input tokens/s, "
        f"{profile.trained_tokens / profile.step_s:,.0f} trained tokens/s"
    )
    yield (
        f"- a step has {profile.micro_batches:,.1f} micro-batches, {profile.input_tokens:,.0f} input tokens, "
        f"{profile.trained_tokens:,.0f} of them learned from; {profile.padding:.1%} of what is computed is padding"
    )
    yield (
        f"- memory: {written(profile.peak_bytes)} at most; {written(profile.saved_activation_bytes)} of it kept for "
        "the backward pass"
    )
    yield ""
    yield from _table(
        ("part", "one takes", "one in", "a step", "share", "what it is"), "lrrrrl", map(_part, profile.parts)
    )
    yield ""
    yield f"A snapshot is sealed as a checkpoint in {_time(profile.save_s)}, in a thread beside training."
    yield ""
    yield "## Floors"
    yield ""
    rows = [
        (
            "operations", f"{floors.flops / 1e9:,.3g} GFLOP", _rate(floors.shapes_flops_s),
            _time(floors.flops_s), f"{floors.flops_s / profile.step_s:.0%}",
        ),
        (
            "bytes moved", written(sum(floors.moved_bytes.values())), f"{written(floors.bandwidth_bytes_s)}/s",
            _time(floors.bytes_s), f"{floors.bytes_s / profile.step_s:.0%}",
        ),
    ]  # fmt: skip
    yield from _table(("of a step", "how many", "measured rate", "takes", "of the step"), "lrrrr", rows)
    yield ""
    yield (
        f"The step takes {profile.step_s / floors.floor_s:.2f} times the greater floor. The rate is that of torch.mm "
        f"on the model's own shapes; on large square matrices it is {_rate(floors.square_flops_s)}."
    )
    if (of_sheet := profile.of_sheet) is not None and floors.sheet_flops_s is not None:
        yield f"Model FLOP utilisation: {of_sheet:.1%} of the {_rate(floors.sheet_flops_s)} of the data sheet."
    yield from (f"- {name}: {written(amount)}" for name, amount in floors.moved_bytes.items())
    yield ""
    yield "## Operators"
    yield ""
    operators = (
        (one.name[:LONGEST_NAME], f"{one.calls:,.0f}", _time(one.self_s), f"{one.share:.1%}")
        for one in profile.operators
    )
    yield from _table(("by time in itself", "calls a step", "a step", "share"), "lrrr", operators)
    yield ""
    yield from profile.notes


def _part(part: Part) -> Sequence[str]:
    often = "" if part.every_steps == 1 else f"{part.every_steps:,.0f}"
    return part.name, _time(part.each_s), often, _time(part.step_s), f"{part.share:.1%}", MEANT[part.name]


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms"


def _rate(flops_s: float) -> str:
    return f"{flops_s / 1e12:,.1f} TFLOP/s" if flops_s >= 1e12 else f"{flops_s / 1e9:,.1f} GFLOP/s"


def _table(heads: Sequence[str], sides: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width; `sides`: l or r for each."""
    all_rows = [heads, *rows]
    widths = [max(3, *(len(row[place]) for row in all_rows)) for place in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in zip(row, widths, sides, strict=True))
        return f"| {' | '.join(cells)} |"

    yield line(heads)
    rules = ("-" * w if side == "l" else "-" * (w - 1) + ":" for w, side in zip(widths, sides, strict=True))
    yield f"| {' | '.join(rules)} |"
    yield from map(line, all_rows[1:])
