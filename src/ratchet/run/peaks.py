"""Memory of a run: what it held at most, and what was foreseen."""

from dataclasses import dataclass, field

from ratchet import sizes


@dataclass
class Memory:
    """What a run holds, and what was foreseen, in bytes."""

    peaks: dict[str, int] = field(default_factory=dict)
    """Measured, by phase."""
    forecast: dict[str, int] = field(default_factory=dict)
    """The same, as forecast."""
    device_bytes: int = 0
    """Of all that the device has."""

    def describe(self) -> str:
        """One line; empty when nothing was measured."""
        if not self.peaks:
            return ""
        phase, peak = max(self.peaks.items(), key=lambda one: one[1])
        text = (
            f"{sizes.written(peak)} of {sizes.written(self.device_bytes)} at most, in phase {phase.replace('_', ' ')}"
        )
        if not self.forecast:
            return text
        foreseen = max(self.forecast.values())
        return f"{text}; forecast {sizes.written(foreseen)} ({round(100 * (foreseen / peak - 1)):+d} %)"
