"""Memory of a training as it was forecast and as it was measured, phase by phase."""

from collections.abc import Mapping, Sequence

from ratchet import markup
from ratchet.markup import NONE, Html, bar, quiet
from ratchet.records_model import MemoryForecast
from ratchet.sizes import unit_for, written

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8b8f96")
"""Of parts of memory, light page or dark; told apart with every kind of colour vision (Okabe and Ito 2008)."""

STYLE = "".join(
    f".part{number} {{ background: {COLOURS[number % len(COLOURS)]}; }}\n"
    # Once the colours are taken they come again, striped.
    if number < len(COLOURS)
    else f".part{number} {{ background: repeating-linear-gradient(45deg, {COLOURS[number % len(COLOURS)]} 0 4px, "
    "transparent 4px 6px); }\n"
    for number in range(2 * len(COLOURS))
)


def memory(forecast: MemoryForecast | None, measured: Mapping[str, int]) -> Sequence[Html] | str:
    """A bar for each phase, all on one scale; a table of phases and parts; what was measured beside it."""
    if forecast is None:
        if not measured:
            return "Nothing was forecast or measured."
        alone = [(phase.replace("_", " "), written(count)) for phase, count in measured.items()]
        return [markup.table("Measured memory", "tn", ("phase", "measured"), alone)]
    parts = list(dict.fromkeys(part for phase in forecast.phases for part in phase.parts))
    classes = {part: f"part{number % (2 * len(COLOURS))}" for number, part in enumerate(parts)}
    most = max([forecast.peak.total_bytes, *measured.values(), 1])
    size, unit = unit_for(most)
    bars = []
    for one in forecast.phases:
        found = measured.get(one.phase)
        shares = [(classes[part], one.parts.get(part, 0) / most) for part in parts]
        drawn = bar(*shares, mark=None if found is None else found / most)
        known = (written(found), f"{one.total_bytes / found - 1:+.1%}") if found else (NONE, NONE)
        bars.append((one.phase.replace("_", " "), drawn, written(one.total_bytes), *(known if measured else ())))
    heads = ("phase", "", "forecast", *(("measured", "forecast is off by") if measured else ()))
    rows = [(part, *(_amount(one.parts.get(part, 0), size) for one in forecast.phases)) for part in parts]
    rows.append(("in all", *(_amount(one.total_bytes, size) for one in forecast.phases)))
    names = [one.phase.replace("_", " ") for one in forecast.phases]
    line = ", and a line where it was measured" if measured else ""
    return [
        quiet(f"Held at the moment when the sum is greatest in each phase{line}."),
        markup.key(*((classes[part], part) for part in parts)),
        markup.table("Phases", "tbnnn"[: len(heads)], heads, bars),
        markup.table("Parts by phase", "t" + "n" * len(names), (unit, *names), rows),
    ]


def _amount(count: int, size: int) -> str:
    return f"{count / size:,.2f}" if count else NONE
