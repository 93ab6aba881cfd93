"""Predicts final losses from incomplete trainings, with a Gaussian process over searched values and progress.

The logarithm of the validation loss of training i with values x at progress t (share of its rows) is modelled as

    mean + a s + c(s) + b x + g(x) + h(x, s) + d_i(s) + noise,

where s is a coordinate of progress (`_progress_coordinate`), a s + c(s) the curve that all trainings share, b x a
linear trend and g other effects of the values, h the change of the effects with progress, and d_i the deviation of one
training from others with almost the same values (its seed). a and b have normal priors; c, g, h and d_i are Gaussian
processes with a Matern kernel (smoothness 5/2). For g and h, the squared distance of two positions x and x' is

    (sum over the values k of ((x_k - x'_k) / length_k)^2) + (direction · (x - x'))^2,

a factor analysis distance (Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, page 107). Rank and
learning rate need the direction: where one is larger, the other has to be smaller, so losses change quickly along the
direction and slowly across it. All this follows freeze-thaw Bayesian optimization (Swersky et al. 2014, arXiv
1406.3896), with a kernel on progress instead of sums of exponentials. The hyperparameters maximise the posterior
density (`PRIORS`, `DIRECTION_STD`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import erfcx, log_ndtr

Array = NDArray[np.float64]

FIRST_PROGRESS = 0.05
"""Progress at which the coordinate of progress is 0; it is 1 at the end of a training."""

LOGARITHMIC_SHARE = 0.7
"""Share of the logarithm of progress in the coordinate of progress; the rest is linear. Late in a training, losses fall
faster than with the logarithm alone, because the learning rate decays."""

SLOPE_STD = 4.0
"""Standard deviation of a, the common slope of the losses over the coordinate of progress (its mean is 0), in units of
the standardised losses. Without it, final losses are predicted too high until a training is complete."""

DIRECTION_STD, DIRECTION_START = 2.0, 1.0
"""Prior standard deviation of each component of the direction (its mean is 0), and the absolute value of each at the
start of the fit, in units of 1 / width of a range."""

MAX_RATIO = 1.65
"""Losses above this many times the median of the first losses count as this value, because how far a training diverges
says nothing about good values."""

MIN_STD = 1e-6
"""Smallest standard deviation of the logarithms of losses; if they differ less, they count as equal."""

MIN_LOSS = 1e-6
"""Smaller losses count as this value, in nats per token."""

MAX_LOSSES_PER_CURVE = 6
"""Maximum number of losses used of each training, at about equal distances of logarithmic progress. More change little,
and the time grows with the cube of their number."""

MAX_LOSSES = 360
"""Maximum number of losses of all trainings. With more trainings, fewer losses of each are used, but at least the last
one. A fit with 360 losses takes about 1.5 s."""

FEASIBILITY_LENGTH = 0.3
"""Length scale of feasibility, as a share of a range."""

JITTER = 1e-6
_SQRT5 = math.sqrt(5.0)


@dataclass(frozen=True)
class Prior:
    """Log-normal prior of a hyperparameter, in units of the standardised losses or of the width of a range."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""


PRIORS = {
    "length": Prior(1.0, 0.7),
    "progress_length": Prior(1.0, 0.5),
    "common": Prior(1.0, 1.0),
    "trend": Prior(0.4, 0.5),
    "values": Prior(1.0, 1.0),
    "interaction": Prior(0.4, 1.0),
    "deviation": Prior(0.03, 1.0),
    "noise": Prior(0.01, 1.0),
}
"""Priors of: length scales of values and of progress, and standard deviations of c, b, g, h, d and noise. The trend
finds best values at an edge of the space; a larger one misses best values near an edge (benchmarks/sweep_curves.py)."""

_SCALES = ("common", "trend", "values", "interaction", "deviation", "noise")


@dataclass(frozen=True)
class LearningCurve:
    """Validation losses of a training."""

    position: tuple[float, ...]
    """Position of its values in the search space, from 0 to 1 in each dimension."""
    progress: tuple[float, ...]
    """Share of the training's rows at each validation, above 0 and at most 1, ascending."""
    losses: tuple[float, ...]
    """Validation losses in nats per token; they may be infinite or NaN."""


@dataclass(frozen=True)
class Prediction:
    """Normal distributions of the logarithm of final losses."""

    mean: Array
    std: Array


class LearningCurveModel:
    """The model, fitted to curves.

    Args:
        curves: the trainings; each has a loss.
        hyperparameters: those of another model; None: they are fitted.
    """

    def __init__(self, curves: Sequence[LearningCurve], hyperparameters: Array | None = None) -> None:
        count = max(1, min(MAX_LOSSES_PER_CURVE, MAX_LOSSES // len(curves)))
        self._curves = curves
        positions, progress, losses, owners = [], [], [], []
        for owner, curve in enumerate(curves):
            for index in _choose_points(curve.progress, count):
                positions.append(curve.position)
                progress.append(curve.progress[index])
                losses.append(curve.losses[index])
                owners.append(owner)
        self._x, self._s = np.array(positions, float), _progress_coordinate(np.array(progress, float))
        self._owners = np.array(owners)
        self._y = self._standardise(_clip_log_losses(losses, curves))
        self._differences_x = self._x[:, None, :] - self._x[None, :, :]
        self._products_x = _linear(self._x, self._x)
        self._products_s = np.outer(self._s, self._s)
        self._distances_s = np.abs(self._s[:, None] - self._s[None, :])
        self._same = (self._owners[:, None] == self._owners[None, :]).astype(float)
        self.hyperparameters = self._fit() if hyperparameters is None else hyperparameters
        """Logarithms of the length scales of the values, the direction, and the logarithms of the other values that
        `PRIORS` lists."""
        self._factor = self._factorise(self.hyperparameters)
        self._weights = cho_solve(self._factor, self._y)

    def predict_new(self, positions: Array) -> Prediction:
        """Return the final losses of trainings with these values (n x dimensions), without the deviation that a seed
        causes: a lucky seed is no better value."""
        owners = np.full(len(positions), -1)
        return self._predict(positions, owners, with_deviation=False)

    def predict_observed(self, indices: Sequence[int]) -> Prediction:
        """Return the final losses of trainings by their index in the curves of this model."""
        positions = np.array([self._curves[index].position for index in indices], float)
        return self._predict(positions, np.array(indices), with_deviation=True)

    def _predict(self, positions: Array, owners: NDArray[np.int64], with_deviation: bool) -> Prediction:
        lengths, direction, length_s, scale = self._unpack(self.hyperparameters)
        scaled, known = (_scale_positions(x, lengths, direction) for x in (positions, self._x))
        kernel_x = _matern(cdist(scaled, known))
        kernel_s = _matern(np.broadcast_to(np.abs(1.0 - self._s) / length_s, kernel_x.shape))
        same = (owners[:, None] == self._owners[None, :]).astype(float)
        # Predictions are for the end of a training, where the coordinate of progress is 1.
        cross = _total(_covariances(scale, kernel_x, kernel_s, _linear(positions, self._x), self._s, same))
        one = np.ones(len(positions))  # the kernel of a position with itself
        squares = np.sum((positions - 0.5) ** 2, axis=1)
        prior = _total(_covariances(scale, one, one, squares, one, with_deviation * one))
        mean = cross @ self._weights
        variance = prior - np.sum(cross * cho_solve(self._factor, cross.T).T, axis=1)
        std = np.sqrt(np.maximum(variance, 1e-12))
        return Prediction(mean * self.log_loss_std + self._center, std * self.log_loss_std)

    def _standardise(self, logs: Array) -> Array:
        self._center = float(logs.mean())
        self.log_loss_std = max(float(logs.std()), MIN_STD)
        """Standard deviation of the logarithms of all losses."""
        standardised: Array = (logs - self._center) / self.log_loss_std
        return standardised

    def _unpack(self, theta: Array) -> tuple[Array, Array, float, dict[str, float]]:
        """Return the length scales of the values, the direction, the length scale of progress, and the standard
        deviations."""
        dimensions = self._x.shape[1]
        positive = np.exp(theta[2 * dimensions :])
        return (
            np.exp(theta[:dimensions]),
            theta[dimensions : 2 * dimensions],
            float(positive[0]),
            dict(zip(_SCALES, positive[1:], strict=True)),
        )

    def _distances(self, lengths: Array, direction: Array, length_s: float) -> tuple[Array, Array, Array]:
        """Return the distances of the losses: by coordinate of `_scale_positions`, of the values together, and of
        progress in units of its length scale."""
        components = _scale_positions(self._differences_x, lengths, direction)
        return components, np.sqrt(np.sum(components**2, axis=2)), self._distances_s / length_s

    def _noise(self, scale: dict[str, float]) -> Array:
        return (scale["noise"] ** 2 + JITTER) * np.eye(len(self._y))

    def _factorise(self, theta: Array) -> tuple[Array, bool]:
        """Return the Cholesky factor of the covariance of the losses."""
        lengths, direction, length_s, scale = self._unpack(theta)
        _, radius_x, radius_s = self._distances(lengths, direction, length_s)
        parts = self._covariances(scale, _matern(radius_x), _matern(radius_s))
        factor: tuple[Array, bool] = cho_factor(_total(parts) + self._noise(scale), lower=True)
        return factor

    def _negative_log_posterior(self, theta: Array) -> tuple[float, Array]:
        """Return the negative logarithm of the posterior density, without constants, and its gradient."""
        lengths, direction, length_s, scale = self._unpack(theta)
        components, radius_x, radius_s = self._distances(lengths, direction, length_s)
        kernel_x, kernel_s = _matern(radius_x), _matern(radius_s)
        parts = self._covariances(scale, kernel_x, kernel_s)
        factor = cho_factor(_total(parts) + self._noise(scale), lower=True)
        weights = cho_solve(factor, self._y)
        inverse = cho_solve(factor, np.eye(len(self._y)))
        outer = inverse - np.outer(weights, weights)  # d loss / d covariance, times 2
        loss = 0.5 * float(self._y @ weights) + float(np.log(np.diag(factor[0])).sum())
        gradient = np.empty_like(theta)
        dimensions = len(lengths)
        slope_x = (scale["values"] ** 2 + scale["interaction"] ** 2 * kernel_s) * _matern_slope(radius_x)
        sensitivity_x = 0.5 * outer * slope_x  # -2 d loss / d squared distance
        for dimension in range(dimensions):
            gradient[dimension] = np.sum(sensitivity_x * components[:, :, dimension] ** 2)
            products = components[:, :, -1] * self._differences_x[:, :, dimension]
            gradient[dimensions + dimension] = -np.sum(sensitivity_x * products)
        weight_s = scale["common"] ** 2 + scale["interaction"] ** 2 * kernel_x + scale["deviation"] ** 2 * self._same
        gradient[2 * dimensions] = 0.5 * np.sum(outer * weight_s * _matern_slope(radius_s) * radius_s**2)
        parts["noise"] = scale["noise"] ** 2 * np.eye(len(self._y))
        for index, name in enumerate(_SCALES, 2 * dimensions + 1):
            gradient[index] = np.sum(outer * parts[name])
        means, sigmas = self._priors()
        deviation = (theta - means) / sigmas
        return loss + 0.5 * float(deviation @ deviation), gradient + deviation / sigmas

    def _covariances(self, scale: dict[str, float], kernel_x: Array, kernel_s: Array) -> dict[str, Array]:
        return _covariances(scale, kernel_x, kernel_s, self._products_x, self._products_s, self._same)

    def _priors(self) -> tuple[Array, Array]:
        """Return means and standard deviations of the normal priors of the hyperparameters."""
        dimensions = self._x.shape[1]
        length, others = PRIORS["length"], [PRIORS[name] for name in ("progress_length", *_SCALES)]
        means = [math.log(length.median)] * dimensions + [0.0] * dimensions
        sigmas = [length.sigma] * dimensions + [DIRECTION_STD] * dimensions
        return (
            np.array(means + [math.log(prior.median) for prior in others]),
            np.array(sigmas + [prior.sigma for prior in others]),
        )

    def _fit(self) -> Array:
        """Return the hyperparameters with the highest posterior density near the start.

        The fit starts from the means of the priors, except for the direction: at 0, its likelihood has no gradient. It
        starts at `DIRECTION_START`, with the signs of the slopes of a linear regression of the losses.
        """
        means, sigmas = self._priors()
        bounds = list(zip(means - 4 * sigmas, means + 4 * sigmas, strict=True))
        dimensions = self._x.shape[1]
        predictors = np.column_stack([self._x, self._s, np.ones(len(self._y))])
        slopes = np.linalg.lstsq(predictors, self._y)[0][:dimensions]
        start = means.copy()
        start[dimensions : 2 * dimensions] = np.where(slopes < 0, -DIRECTION_START, DIRECTION_START)
        found = minimize(
            self._negative_log_posterior, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60}
        )
        theta: Array = found.x
        return theta


def _scale_positions(positions: Array, lengths: Array, direction: Array) -> Array:
    """Return positions, or differences of positions, in coordinates in which the kernel's distance is Euclidean: each
    value divided by its length scale, then the product with the direction (dimensions + 1 in all)."""
    return np.concatenate([positions / lengths, positions @ direction[:, None]], axis=-1)


def _covariances(
    scale: dict[str, float], kernel_x: Array, kernel_s: Array, products_x: Array, products_s: Array, same: Array
) -> dict[str, Array]:
    """Return the covariances of the terms of the model without noise, by the name of their standard deviation or term.

    Args:
        scale: standard deviations by name.
        kernel_x: kernel of the values.
        kernel_s: kernel of the progress.
        products_x: products of positions, for the linear trend.
        products_s: products of coordinates of progress, for the common slope.
        same: 1 for losses of the same training, otherwise 0.
    """
    return {
        "common": scale["common"] ** 2 * kernel_s,
        "slope": SLOPE_STD**2 * products_s,
        "trend": scale["trend"] ** 2 * products_x,
        "values": scale["values"] ** 2 * kernel_x,
        "interaction": scale["interaction"] ** 2 * kernel_x * kernel_s,
        "deviation": scale["deviation"] ** 2 * same * kernel_s,
    }


def _total(parts: dict[str, Array]) -> Array:
    total: Array = reduce(np.add, parts.values())
    return total


def log_expected_improvement(prediction: Prediction, best: float) -> Array:
    """Return the logarithm of the expected improvement over `best`, a log loss (Ament et al. 2023, equation 9).

    It is finite even where the expected improvement itself is 0 in floating point.
    """
    z = (best - prediction.mean) / prediction.std
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        direct = np.log(density + z * np.exp(log_ndtr(z)))
        # For z << 0: log phi(z) + log(1 - |z| Phi(z) / phi(z)), with Phi / phi by erfcx.
        tail = 1.0 + z * math.sqrt(math.pi / 2) * erfcx(-z / math.sqrt(2))
        far = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) + np.log(np.maximum(tail, 1e-300))
        very_far = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(np.abs(z))
    logs: Array = np.where(z > -1, direct, np.where(z > -1e3, far, very_far)) + np.log(prediction.std)
    return logs


def log_feasibility(points: Array, known: Array, infeasible: NDArray[np.bool_]) -> Array:
    """Return the logarithm of the probability that positions are feasible, by a Gaussian process (Gardner et al. 2014).

    A position is feasible where the process is below 0. Its mean is -1 without evidence; it is +1 at known infeasible
    positions, and -1 at known feasible ones.
    """
    covariance = _matern(cdist(known, known) / FEASIBILITY_LENGTH) + 0.01 * np.eye(len(known))
    cross = _matern(cdist(points, known) / FEASIBILITY_LENGTH)
    factor = cho_factor(covariance, lower=True)
    mean = -1.0 + cross @ cho_solve(factor, 2.0 * infeasible)
    variance = 1.0 - np.sum(cross * cho_solve(factor, cross.T).T, axis=1)
    logs: Array = log_ndtr(-mean / np.sqrt(np.maximum(variance, 1e-6)))
    return logs


def _clip_log_losses(losses: Sequence[float], curves: Sequence[LearningCurve]) -> Array:
    """Return the logarithms of losses, limited above (`MAX_RATIO`) and below (`MIN_LOSS`)."""
    first = [curve.losses[0] for curve in curves if curve.losses and math.isfinite(curve.losses[0])]
    limit = MAX_RATIO * (float(np.median(first)) if first else 1.0)
    values = np.where(np.isfinite(losses), losses, limit)
    logs: Array = np.log(np.clip(values, MIN_LOSS, max(limit, 2 * MIN_LOSS)))
    return logs


def _choose_points(progress: Sequence[float], count: int) -> list[int]:
    """Return indices of at most `count` validations: the last, the first, and some between at equal log distances."""
    if len(progress) <= count:
        return list(range(len(progress)))
    if count == 1:
        return [len(progress) - 1]
    coordinates = np.log(np.array(progress, float))
    wanted = np.linspace(coordinates[0], coordinates[-1], count)
    return sorted({int(np.argmin(np.abs(coordinates - one))) for one in wanted})


def _progress_coordinate(progress: Array) -> Array:
    """Return 0 at `FIRST_PROGRESS` and 1 at the end."""
    logarithmic = 1.0 + np.log(progress) / math.log(1 / FIRST_PROGRESS)
    linear = 1.0 - (1.0 - progress) / (1.0 - FIRST_PROGRESS)
    coordinate: Array = LOGARITHMIC_SHARE * logarithmic + (1.0 - LOGARITHMIC_SHARE) * linear
    return coordinate


def _linear(first: Array, second: Array) -> Array:
    """Return the products of positions, measured from the middle of the space."""
    products: Array = (first - 0.5) @ (second - 0.5).T
    return products


def _matern(radius: Array) -> Array:
    kernel: Array = (1.0 + _SQRT5 * radius + 5.0 / 3.0 * radius**2) * np.exp(-_SQRT5 * radius)
    return kernel


def _matern_slope(radius: Array) -> Array:
    """Return the derivative by the logarithm of a length, divided by the squared scaled distance along it."""
    slope: Array = 5.0 / 3.0 * (1.0 + _SQRT5 * radius) * np.exp(-_SQRT5 * radius)
    return slope
