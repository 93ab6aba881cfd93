"""A curve of any length in bounded memory, for small pictures: what is dropped depends on the points alone."""

POINTS = 256
"""At most so many are kept."""


class Curve:
    """Values by step, ascending. Each point is the mean of as many values as every other, but the last."""

    def __init__(self) -> None:
        self._whole: list[tuple[int, float]] = []
        self._part: list[tuple[int, float]] = []
        self.per = 1
        """Values that a point stands for."""

    def add(self, step: int, value: float) -> None:
        """Go on with one more value."""
        self._part.append((step, value))
        if len(self._part) < self.per:
            return
        self._whole.append(_mean(self._part))
        self._part = []
        if len(self._whole) == POINTS:
            self._whole = [_mean(self._whole[place : place + 2]) for place in range(0, POINTS, 2)]
            self.per *= 2

    def points(self) -> list[tuple[int, float]]:
        """Step and value of each point; the step is that of the last value in it."""
        return [*self._whole, _mean(self._part)] if self._part else list(self._whole)

    def whole(self) -> list[float]:
        """The values of the points that are complete: each stands for `per` values."""
        return [value for _, value in self._whole]

    def __bool__(self) -> bool:
        return bool(self._whole or self._part)


def _mean(points: list[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)
