"""Several claims at once: p-values made so much larger that the chance of one false claim stays what it was."""

from collections.abc import Sequence


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given (S. Holm, Scandinavian Journal of Statistics 6, 1979, 65-70).

    Claims whose adjusted p-value is below alpha include a false one with probability alpha at most, however they
    depend on each other.

    Raises:
        ValueError: a value that is no probability.
    """
    for value in p:
        if not 0 <= value <= 1:
            raise ValueError(f"{value!r} is no p-value")
    adjusted = [0.0] * len(p)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted
