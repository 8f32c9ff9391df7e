"""The time of a step as a function of the number of ranks, fitted to measurements."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

LEAST_ERROR = 1e-3  # relative, of a measurement: blocks that happen to be equal are no exact time


@dataclass(frozen=True)
class StepFit:
    """The time of a step of V micro-batches on W ranks: `fixed_s + micro_batch_s * ceil(V / W)`.

    The slowest rank computes ceil(V / W) micro-batches, one after the other. All else, such as the exchange and the
    update, takes `fixed_s`.

    Attributes:
        num_micro_batches: V.
        fixed_s, micro_batch_s: in seconds.
        covariance: of `micro_batch_s` and `fixed_s`.
    """

    num_micro_batches: int
    fixed_s: float
    micro_batch_s: float
    covariance: list[list[float]]

    def predict(self, world_size: int) -> tuple[float, float]:
        """Return the seconds of a step on so many ranks, and their standard error."""
        share = count_share(self.num_micro_batches, world_size)
        factors = np.array([share, 1])
        variance = float(factors @ self.covariance @ factors)
        return self.fixed_s + share * self.micro_batch_s, math.sqrt(max(variance, 0.0))


def count_share(num_micro_batches: int, world_size: int) -> int:
    """Return the largest number of micro-batches of a rank."""
    return -(-num_micro_batches // world_size)


def fit_steps(num_micro_batches: int, measured: Mapping[int, tuple[float, float]]) -> StepFit:
    """Fit both parameters by least squares, weighted by the errors of the measurements.

    If the measurements are farther from the fit than their errors explain, the errors of the parameters grow
    accordingly. A negative `fixed_s`, from ranks that speed up by more than their number, becomes 0.

    Args:
        num_micro_batches: of a step.
        measured: number of ranks -> seconds per step, and their relative standard error; two shares or more.
    """
    shares = np.array([count_share(num_micro_batches, size) for size in measured], float)
    times_s, errors = np.array([*measured.values()]).T
    weights = 1 / (np.maximum(errors, LEAST_ERROR) * times_s)
    (micro_s, fixed_s), covariance = np.polyfit(shares, times_s, 1, w=weights, cov="unscaled")
    if fixed_s < 0:
        fixed_s = 0.0
        micro_s = np.average(times_s / shares, weights=(weights * shares) ** 2)
    residual = (((fixed_s + micro_s * shares - times_s) * weights) ** 2).sum()
    if len(shares) > 2:
        covariance *= max(1.0, residual / (len(shares) - 2))
    return StepFit(num_micro_batches, float(fixed_s), float(micro_s), covariance.tolist())
