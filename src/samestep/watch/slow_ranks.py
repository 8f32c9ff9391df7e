"""Reports ranks that compute more slowly than the others."""

from collections.abc import Callable, Mapping, Sequence

from samestep.watch.stall_diagnosis import BUSY, SLOW_AFTER_STEPS, Beat, find_slow


class SlowRanks:
    """Reports, once, each rank that computes more slowly than the others over `SLOW_AFTER_STEPS` steps.

    Args:
        least_s: shortest time over which ranks are compared.
        say: prints a line.
    """

    def __init__(self, least_s: float, say: Callable[[str], None]) -> None:
        self._least_s = least_s
        self._say = say
        self._window: tuple[float, Mapping[int, Beat]] | None = None  # its begin, in which paces are compared
        self._reported: set[int] = set()

    def observe(self, ranks: Sequence[Beat], now_s: float) -> None:
        """Compare the ranks, if enough steps were done since the last comparison."""
        if len(ranks) < 2:
            return
        beats = {beat.rank: beat for beat in ranks}
        if self._window is None or self._window[1].keys() != beats.keys():  # a rank may have died
            self._window = (now_s, beats)
        first_s, first = self._window
        lowest = min(beats)
        if beats[lowest].step - first[lowest].step < SLOW_AFTER_STEPS or now_s - first_s < self._least_s:
            return
        self._window = (now_s, beats)
        for rank, (phase, mine_s, usual_s) in find_slow(_compute_paces(first, beats)).items():
            if rank in self._reported:
                continue
            self._reported.add(rank)
            what = {"loading": "loading data", "updating": "updating"}.get(phase, f"in the {phase}")
            self._say(
                f"rank {rank} (host {beats[rank].host}) is slow: it takes {1000 * mine_s:.1f} ms per micro-batch, "
                f"the others {1000 * usual_s:.1f} ms; it loses time {what}"
            )


def _compute_paces(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> dict[int, dict[str, float]]:
    """Return rank -> phase -> seconds per micro-batch between two times, for ranks that have loaded any."""
    paces = {}
    for rank, beat in now.items():
        num = beat.num_micro_batches - before[rank].num_micro_batches
        if num > 0:
            spent = beat.spent_s
            was = before[rank].spent_s
            paces[rank] = {phase: (spent.get(phase, 0.0) - was.get(phase, 0.0)) / num for phase in BUSY}
    return paces
