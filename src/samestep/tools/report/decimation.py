"""Reduces curves of any length to as many points as a chart has pixels, without losing a peak."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Dark violet to yellow, evenly spaced and readable without colour vision: viridis (Smith and van der Walt, 2015).
VIRIDIS = np.array(
    [
        (68, 1, 84),
        (71, 44, 122),
        (59, 81, 139),
        (44, 113, 142),
        (33, 144, 141),
        (39, 173, 129),
        (92, 200, 99),
        (170, 220, 50),
        (253, 231, 37),
    ]
)


def decimate(x: Floats, y: Floats, num_buckets: int) -> tuple[Floats, Floats]:
    """Reduce a curve to the smallest and largest y of each of `num_buckets` equal parts of the x axis.

    Args:
        x: not decreasing.
        y: as long as x. nan is kept only in parts without any other value.

    Returns:
        x and y of at most 2 * num_buckets points, in the order of the curve.

    Example::

        >>> import numpy as np
        >>> x = np.arange(1000.0)
        >>> y = np.where(x == 321, 9.0, 0.0)
        >>> [int(points.max()) for points in decimate(x, y, 10)]
        [999, 9]
    """
    if len(x) <= 2 * num_buckets:
        return x, y
    bucket = np.minimum((x - x[0]) / max(x[-1] - x[0], 1e-300) * num_buckets, num_buckets - 1).astype(np.int64)
    starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
    is_number = ~np.isnan(y)
    by_low = np.lexsort((np.where(is_number, y, np.inf), bucket))
    by_high = np.lexsort((np.where(is_number, -y, np.inf), bucket))
    kept = np.unique(np.concatenate([by_low[starts], by_high[starts]]))
    return x[kept], y[kept]


def merge_rows(num: int, most: int) -> NDArray[np.int64]:
    """Return where groups of neighbouring rows begin: at most `most` groups of `num` rows, of about equal length.

    Example::

        >>> merge_rows(10, 4)
        array([0, 2, 5, 7])
    """
    return np.unique(np.linspace(0, num, min(num, most), endpoint=False).astype(np.int64))


def colour(values: Floats, low: float, high: float) -> NDArray[np.uint8]:
    """Return the colours of values as RGBA `[*values.shape, 4]`: `low` is dark, `high` bright, nan transparent."""
    place = np.clip((np.nan_to_num(values, nan=low) - low) / max(high - low, 1e-300), 0, 1) * (len(VIRIDIS) - 1)
    channels = [np.interp(place, np.arange(len(VIRIDIS)), VIRIDIS[:, channel]) for channel in range(3)]
    alpha = np.where(np.isfinite(values), 255, 0)
    return np.stack([*channels, alpha], axis=-1).astype(np.uint8)


def shorten(values: Floats, digits: int = 6) -> Sequence[float | None]:
    """Return the values with a number of significant digits, for JSON; None for those that are not finite."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
