"""The laws of Amdahl and Gustafson, fitted to measured times, and the largest worthwhile number of ranks."""

from collections.abc import Mapping


def fit_amdahl(step_s: Mapping[int, float]) -> float:
    """Return the serial fraction s of a step of constant size: T(W) = T(1) * (s + (1 - s) / W).

    Least squares of T(W) / T(1), which is linear in s. Amdahl, "Validity of the single processor approach to achieving
    large scale computing capabilities" (1967). Below 0 if the step speeds up by more than the number of ranks.

    Args:
        step_s: number of ranks -> seconds per step, for 1 and at least one more.
    """
    pairs = [(1 - 1 / size, time_s / step_s[1] - 1 / size) for size, time_s in step_s.items()]
    return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)


def fit_gustafson(samples_per_s: Mapping[int, float]) -> float:
    """Return the serial fraction s of steps that grow with the ranks: speed-up S(W) = W - s * (W - 1).

    Least squares of S(W). Gustafson, "Reevaluating Amdahl's law" (1988).

    Args:
        samples_per_s: number of ranks -> samples per second, for 1 and at least one more.
    """
    pairs = [(size - 1, size - pace / samples_per_s[1]) for size, pace in samples_per_s.items()]
    return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)


def find_break_even(serial: float, least_gain: float, most: int) -> int:
    """Return the smallest number of ranks at which one more shortens the run by less than a fraction `least_gain`.

    Args:
        serial: the fraction of Amdahl's law; below 0 counts as 0.
        most: largest number of ranks that can share a step.
    """
    serial = min(max(serial, 0.0), 1.0)

    def predict(size: int) -> float:
        return serial + (1 - serial) / size

    size = 1
    while size < most and 1 - predict(size + 1) / predict(size) >= least_gain:
        size += 1
    return size
