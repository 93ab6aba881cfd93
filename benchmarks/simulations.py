"""Random streams and limits of benchmarks that count errors in simulations."""

import zlib

import numpy as np


def rng(name: str) -> np.random.Generator:
    """Return a separate random stream for a simulation."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def error_limit(rate: float, cases: int) -> float:
    """Return the highest share of errors that a simulation of this many cases may have: the rate plus three standard
    errors."""
    return round(rate + 3 * (rate * (1 - rate) / cases) ** 0.5, 4)
