"""The time of a step as a function of the number of ranks, fitted to measurements."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_ERROR = 1e-3  # relative, of a measurement: blocks that happen to be equal are no exact time


@dataclass(frozen=True)
class StepFit:
    """The time of a step of V micro-batches on W ranks: `fixed_s + micro_batch_s * ceil(V / W)`.

    The slowest rank computes ceil(V / W) micro-batches, one after the other. All else, such as the exchange and the
    update, takes `fixed_s`.

    Attributes:
        num_micro_batches: V.
        fixed_s, micro_batch_s: in seconds.
        covariance: variance of `fixed_s`, their covariance, variance of `micro_batch_s`.
    """

    num_micro_batches: int
    fixed_s: float
    micro_batch_s: float
    covariance: tuple[float, float, float]

    def predict(self, world_size: int) -> tuple[float, float]:
        """Return the seconds of a step on so many ranks, and their standard error."""
        share = count_share(self.num_micro_batches, world_size)
        of_fixed, of_both, of_micro = self.covariance
        variance = of_fixed + 2 * share * of_both + share * share * of_micro
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
    points = [
        (count_share(num_micro_batches, size), step_s, (max(error, LEAST_ERROR) * step_s) ** -2)
        for size, (step_s, error) in measured.items()
    ]
    n = sum(weight for _, _, weight in points)
    x = sum(weight * share for share, _, weight in points)
    y = sum(weight * step_s for _, step_s, weight in points)
    xx = sum(weight * share * share for share, _, weight in points)
    xy = sum(weight * share * step_s for share, step_s, weight in points)
    determinant = n * xx - x * x
    fixed_s, micro_s = (xx * y - x * xy) / determinant, (n * xy - x * y) / determinant
    if fixed_s < 0:
        fixed_s, micro_s = 0.0, xy / xx
    residual = sum(weight * (fixed_s + share * micro_s - step_s) ** 2 for share, step_s, weight in points)
    excess = max(1.0, residual / (len(points) - 2)) if len(points) > 2 else 1.0
    covariance = (excess * xx / determinant, -excess * x / determinant, excess * n / determinant)
    return StepFit(num_micro_batches, fixed_s, micro_s, covariance)
