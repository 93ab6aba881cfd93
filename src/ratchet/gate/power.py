"""How small a difference so many samples can show, and how many samples a difference takes."""

import math

from scipy import special


def deviations(confidence: float, power: float) -> tuple[float, float]:
    """Normal quantiles: how many standard errors confidence takes, and how many more the power.

    Raises:
        ValueError: not between nought and one.
    """
    for name, value in (("confidence", confidence), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value!r} is not between 0 and 1")
    return float(special.ndtri(confidence)), float(special.ndtri(power))


def detectable_binary(n: float, discordance: float, confidence: float, power: float) -> float:
    """Smallest difference of two shares of right answers that n pairs show, when so many pairs are discordant.

    From the normal approximation of paired counts, (z_a + z_b) sqrt(discordance / n) (R. J. Connor, Biometrics 43,
    1987, with the variance that holds for equal models). Never less than z_a^2 / (n + z_a^2): so far down reaches
    Tango's interval when not a single pair is discordant.
    """
    _check(n, discordance)
    z, more = deviations(confidence, power)
    return max((z + more) * math.sqrt(discordance / n), z * z / (n + z * z))


def needed_binary(margin: float, discordance: float, confidence: float, power: float) -> int:
    """Pairs that it takes to show such a difference: the smallest n for which `detectable_binary` is at most that.

    Raises:
        ValueError: a margin that is not positive, or shares that are none.
    """
    _check(1, discordance)
    if not margin > 0:
        raise ValueError(f"no number of samples shows a difference of {margin!r}")
    z, more = deviations(confidence, power)
    return max(1, math.ceil(discordance * ((z + more) / margin) ** 2), math.ceil(z * z * (1 / margin - 1)))


def _check(n: float, discordance: float) -> None:
    if not n > 0 or not 0 <= discordance <= 1:
        raise ValueError(f"{n!r} pairs of which a share of {discordance!r} is discordant: there is no such thing")
