"""Reports ranks that compute more slowly than the others."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from samestep.watch.stall_diagnosis import BUSY, Beat

SLOWER = 1.25
AFTER_STEPS = 50
LEAST_S = 1e-3  # per micro-batch; smaller differences are noise

Pace = Mapping[str, float]  # phase -> seconds per micro-batch, without waits for other ranks


class SlowRanks:
    """Reports, once, each rank that computes more slowly than the others over `AFTER_STEPS` steps.

    Args:
        least_s: shortest time over which ranks are compared.
        say: prints a line.
    """

    def __init__(self, least_s: float, say: Callable[[str], None]) -> None:
        self._least_s = least_s
        self._say = say
        self._first_s = 0.0
        self._first: dict[int, Beat] = {}  # since when the paces are compared
        self._reported: set[int] = set()

    def observe(self, ranks: Sequence[Beat], now_s: float) -> None:
        """Compare the ranks, if enough steps were done since the last comparison."""
        beats = {beat.rank: beat for beat in ranks}
        first = self._first
        is_same = first.keys() == beats.keys()  # a rank may have died
        lowest = min(beats)
        if is_same and (beats[lowest].step - first[lowest].step < AFTER_STEPS or now_s - self._first_s < self._least_s):
            return
        self._first_s = now_s
        self._first = beats
        slow = find_slow(_compute_paces(first, beats)) if is_same else {}
        for rank in slow.keys() - self._reported:
            phase, mine_s, usual_s = slow[rank]
            what = {"loading": "loading data", "updating": "updating"}.get(phase, f"in the {phase}")
            self._say(
                f"rank {rank} (host {beats[rank].host}) is slow: it takes {1000 * mine_s:.1f} ms per micro-batch, "
                f"the others {1000 * usual_s:.1f} ms; it loses time {what}"
            )
        self._reported |= slow.keys()


def _compute_paces(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> dict[int, Pace]:
    """Return the pace of each rank between two times, for ranks that have loaded any micro-batch."""
    paces = dict[int, Pace]()
    for rank, beat in now.items():
        num = beat.num_micro_batches - before[rank].num_micro_batches
        if num > 0:
            was = before[rank].spent_s
            paces[rank] = {phase: (beat.spent_s.get(phase, 0.0) - was.get(phase, 0.0)) / num for phase in BUSY}
    return paces


def find_slow(paces: Mapping[int, Pace]) -> dict[int, tuple[str, float, float]]:
    """Find the ranks that are slower than the others, by the pace of each rank.

    Returns:
        rank -> the phase that loses most, the rank's seconds per micro-batch, and the median of the other ranks.
    """
    found = {}
    for rank, pace in paces.items():
        others = [paces[other] for other in paces if other != rank]
        total_s = sum(pace.values())
        usual_s = median([sum(other.values()) for other in others] or [total_s])
        if total_s > SLOWER * usual_s and total_s - usual_s > LEAST_S:
            lost = {phase: s - median([other.get(phase, 0.0) for other in others]) for phase, s in pace.items()}
            found[rank] = (max(lost, key=lambda phase: lost[phase]), total_s, usual_s)
    return found
