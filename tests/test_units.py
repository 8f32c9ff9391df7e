"""Numbers in words."""

from samestep.units import format_bytes, format_time


def test_sizes() -> None:
    sizes = (0, 999, 1000, 12.34e6, 512e6, 1.5e9, 3e13)
    assert [*map(format_bytes, sizes)] == ["0 B", "999 B", "1 KB", "12 MB", "512 MB", "1.5 GB", "30 TB"]


def test_durations() -> None:
    durations = (0, 2.1e-5, 0.0034, 1.25, 300, 720, 7200, 86400 * 3)
    assert [*map(format_time, durations)] == ["0 s", "21 us", "3.4 ms", "1.2 s", "300 s", "12 min", "2 h", "3 days"]
