"""Who keeps a run from moving, and who slows it down: judged from what the ranks tell of themselves. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

# What a rank can be at -> what is said of it.
SLOW_SAVING_S, SLOW_SAVING_SHARE = 5.0, 0.25  # from which on snapshots are said to slow a run
PHASES = {
    "starting": "been starting",
    "loading": "been loading data",
    "forward": "been computing",
    "backward": "been in the backward",
    "reducing": "been in the reduction",
    "updating": "been updating",
    "saving": "been saving",
    "validating": "been validating",
    "script": "been in the script's own code between two steps",
    "left": "been out of the loop",
    "ended": "ended its part",
}
# Those that a step or a validation is made of: they take as long as they took before. The others hold whatever a
# script does now and then, and tell nothing of how long it may take the next time.
LEARNT = ("loading", "forward", "backward", "reducing", "validating")

FLOOR_S, FIRST_S, STOP_S = 10.0, 300.0, 300.0
UNKNOWN_STOP_S = 1800.0  # as long as the other ranks' collectives wait
TIMES_LONGER = 10.0
WARM_UP = 2  # of each phase: it compiles, opens files, starts workers
MANY_FAULTS_PER_S = 20.0

# Rows of the table at the end -> the phases that they hold.
SUMMARY = {
    "data": ("loading",),
    "compute": ("forward", "backward"),
    "waiting for ranks": ("reducing",),
    "update": ("updating",),
    "snapshots": ("saving",),
    "validation": ("validating",),
    "other": ("script", "left"),
}

SLOWER = 1.25
SLOW_AFTER_STEPS = 50
SLOW_LEAST_S = 1e-3  # per micro-batch: below, one cannot tell a slow rank from an unlucky one


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself.

    Attributes:
        number: of its beats.
        system: where `pid` is the number of its process, and of no other one.
        step, phase: what it is at: a key of PHASES.
        for_s: how long it has not moved: not gone on to another phase or micro-batch, nor written to a snapshot.
        num_seen, longest_s: how often it was through this phase, and the longest that it took, after WARM_UP.
        waits_in: the exchange with other ranks that it is in, such as "the reduction" or "all_reduce"; else "".
        place: the line of the script that it is at, such as "train.py:31 in load".
        ails: what it waits for of the system, such as "asleep" or "waiting for a lock".
        is_busy: it computes.
        is_compiling: torch.compile is at work.
        faults_per_s: major page faults.
        spent_s: phase -> seconds in all.
        num_steps: done since the run was started, the last time.
        num_micro_batches: loaded so far.
    """

    rank: int
    host: str
    pid: int
    number: int
    step: int
    phase: str
    for_s: float
    system: str = ""
    num_seen: int = 0
    longest_s: float = 0.0
    waits_in: str = ""
    place: str = ""
    ails: str = ""
    is_busy: bool = False
    is_compiling: bool = False
    faults_per_s: float = 0.0
    spent_s: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_micro_batches: int = 0


@dataclass(frozen=True)
class Heard:
    """The newest beat of a rank, and how it stands with it.

    Attributes:
        age_s: since it came.
        is_silent: by now, another one should have come.
        fate: of its process, as far as the one who judges sees it: "stopped", "dead", "alive", or "" (another host).
    """

    beat: Beat
    age_s: float = 0.0
    is_silent: bool = False
    fate: str = ""

    @property
    def still_s(self) -> float:
        """For how long it has not moved."""
        return self.beat.for_s + self.age_s


@dataclass(frozen=True)
class Limits:
    """Seconds.

    Attributes:
        floor_s: nothing is said of less.
        first_s: in which what has no precedent may take: a phase's first times, compilation, a script's own code.
        stop_s: after which the run is stopped; None: this follows from what is learnt.
    """

    floor_s: float = FLOOR_S
    first_s: float = FIRST_S
    stop_s: float | None = None

    def of(self, beat: Beat) -> float:
        """For how long this rank may be at what it is at."""
        learnt_s = max(self.floor_s, TIMES_LONGER * beat.longest_s)
        if beat.phase in LEARNT and beat.num_seen > WARM_UP and not beat.is_compiling:
            return learnt_s
        return max(self.first_s, learnt_s)


def build_limits(stuck_after_s: int | None) -> Limits:
    """The limits of a run that is to be stopped after so many seconds without movement; None: when learnt."""
    if stuck_after_s is None:
        return Limits()
    return Limits(min(FLOOR_S, stuck_after_s / 3), min(FIRST_S, stuck_after_s), stuck_after_s)


@dataclass(frozen=True)
class Verdict:
    """Nothing has moved for too long.

    Attributes:
        guilty: the ranks that the others wait for; where all wait, those that are elsewhere than most.
        sentence: for a person.
        is_final: it has been so for so long that the run is to be stopped.
    """

    guilty: tuple[int, ...]
    sentence: str
    is_final: bool


def judge(ranks: Sequence[Heard], limits: Limits, awake_s: float = float("inf")) -> Verdict | None:
    """What keeps the ranks from moving; None while something moves, or may still be expected to.

    Args:
        ranks: all of them.
        awake_s: for how long the judge has been awake without a break: it may have been stopped itself.
    """
    ended = [heard for heard in ranks if heard.beat.phase == "ended"]
    ranks = [heard for heard in ranks if heard.beat.phase != "ended"]
    if not ranks:
        return None
    still_s = min([awake_s, *[heard.still_s for heard in ranks]])
    silent = [heard for heard in ranks if heard.is_silent]
    there = [heard for heard in ranks if not heard.is_silent]
    waiting = [heard.beat for heard in there if heard.beat.waits_in]
    others = [heard.beat for heard in there if not heard.beat.waits_in]
    is_busy = False
    if silent:
        unclear = [heard.beat for heard in silent if heard.fate == "alive"]
        limit_s = max([limits.floor_s, *[limits.of(beat) for beat in unclear]])
        guilty, sentence = silent, _describe_silent(silent, there, still_s)
        is_known = True
    elif others:
        limit_s = max([limits.of(beat) for beat in others])
        guilty = [heard for heard in there if not heard.beat.waits_in]
        sentence, is_busy = _describe_others(others, still_s), any(beat.is_busy for beat in others)
        is_known = limit_s != limits.first_s
    elif ended:
        limit_s, guilty, is_known = limits.floor_s, ended, True
        beats = [heard.beat for heard in ended]
        sentence = f"{_name(beats)} left the run at step {max(beat.step for beat in beats)}"
    else:
        groups = _group(waiting)
        apart = len(groups) > 1
        limit_s = 2 * limits.floor_s if apart else max([limits.of(beat) for beat in waiting])
        guilty = [heard for heard in there if heard.beat in groups[0]] if apart else []
        sentence = _describe_waiting(groups, still_s)
        is_known = apart or limit_s != limits.first_s
    if still_s < limit_s:
        return None
    if silent or others or ended:
        sentence += _describe_wait(waiting, len(guilty))
    stop_s = limits.stop_s
    if stop_s is None:
        stop_s = max(STOP_S, 2 * limit_s) if is_known else max(UNKNOWN_STOP_S, 2 * limit_s)
        if is_busy:  # it may be long, but it is not stuck: the others' collectives have a timeout
            stop_s = float("inf")
    return Verdict(tuple(heard.beat.rank for heard in guilty), sentence, still_s >= stop_s)


def find_slow(paces: Mapping[int, Mapping[str, float]]) -> dict[int, tuple[str, float, float]]:
    """The ranks that are slower than the others.

    Args:
        paces: rank -> phase -> seconds per micro-batch, without what it waited for others.

    Returns:
        rank -> the phase in which most is lost, its seconds per micro-batch, and the others' median of all phases.
    """
    found = {}
    totals = {rank: sum(pace.values()) for rank, pace in paces.items()}
    for rank, pace in paces.items():
        others = [other for other in paces if other != rank]
        if not others:
            break
        usual = median([totals[other] for other in others])
        if totals[rank] > SLOWER * usual and totals[rank] - usual > SLOW_LEAST_S:
            lost = {phase: s - median([paces[other].get(phase, 0.0) for other in others]) for phase, s in pace.items()}
            found[rank] = (max(lost, key=lambda phase: lost[phase]), totals[rank], usual)
    return found


# --- words ----------------------------------------------------------------------------------------------------------


def describe_seconds(seconds: float) -> str:
    """Such as "48 s" or "12 min"."""
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 3" or "ranks 1, 2 and 5"; where there are many, the first of them."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:6]))} ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def describe_spent(spent_s: Mapping[str, float]) -> str:
    """Where the time went, such as "compute 71 %, data 12 %, ...", the largest part first."""
    told = sorted([(share, name) for name, share in share_spent(spent_s).items() if share >= 0.005], reverse=True)
    return ", ".join([f"{name} {share:.0%}".replace("%", " %") for share, name in told])


def share_spent(spent_s: Mapping[str, float]) -> dict[str, float]:
    """The share of the time that went into each part of `SUMMARY`: they add up to 1; {} where no time was spent."""
    parts = {name: sum(spent_s.get(phase, 0.0) for phase in phases) for name, phases in SUMMARY.items()}
    total_s = sum(parts.values())
    return {name: part_s / total_s for name, part_s in parts.items()} if total_s > 0 else {}


def explain_slow_saving(spent_s: Mapping[str, float], save_s: float, where: str) -> str:
    """What to say of a run that waits for its snapshots for a large part of its time; "" where it does not.

    Args:
        spent_s: phase -> seconds so far.
        save_s: what the last snapshot took to write.
        where: the directory or URL that takes them.
    """
    saving_s, total_s = spent_s.get("saving", 0.0), sum(spent_s.values()) - spent_s.get("starting", 0.0)
    if saving_s < SLOW_SAVING_S or saving_s < SLOW_SAVING_SHARE * total_s:
        return ""
    return (
        f"snapshots slow the run: {100 * saving_s / total_s:.0f} % of its time is waiting until they are copied and "
        f"written, the last one took {save_s:.1f} s to write to {where}; take fewer with --snapshot-every, or name a "
        "run directory on a faster disk"
    )


def _name(beats: Sequence[Beat]) -> str:
    """Ranks and their hosts."""
    hosts = sorted({beat.host for beat in beats})
    where = f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:4])}{' ...' if len(hosts) > 4 else ''}"
    return f"{describe_ranks([beat.rank for beat in beats])} ({where})"


def _describe_others(others: Sequence[Beat], still_s: float) -> str:
    """Ranks that do something else than to wait for other ranks."""
    by_kind: dict[tuple[str, int], list[Beat]] = {}
    for beat in others:
        by_kind.setdefault((beat.phase, beat.step), []).append(beat)
    parts = []
    for (phase, step), beats in by_kind.items():
        first = beats[0]
        has = "has" if len(beats) == 1 else "have"
        # Each has its own seconds; what is said is for how long nothing has moved.
        text = f"{_name(beats)} {has} {PHASES[phase]} for {describe_seconds(still_s)} at step {step}"
        if first.place and all(beat.place == first.place for beat in beats):
            text += f", {first.place}"
        if first.is_compiling:
            text += ", compiling"
        elif first.faults_per_s >= MANY_FAULTS_PER_S:
            text += f", swapping ({first.faults_per_s:.0f} page faults per second)"
        elif first.ails:
            text += f", {first.ails}"
        elif first.is_busy:
            text += ", computing"
        parts.append(text)
    return "; ".join(parts)


def _describe_silent(silent: Sequence[Heard], there: Sequence[Heard], still_s: float) -> str:
    """Ranks whose beats have stopped."""
    beats = [heard.beat for heard in silent]
    steps = sorted({beat.step for beat in beats})
    at = f"last heard of at step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
    fates = {heard.fate for heard in silent}
    for_s = describe_seconds(still_s)
    if fates == {"stopped"}:
        was = "was" if len(beats) == 1 else "were"
        return f"{_name(beats)} {was} stopped (SIGSTOP) {for_s} ago, {at}"
    if fates == {"dead"}:
        return f"{_name(beats)} died {for_s} ago, {at}"
    hosts = {beat.host for beat in beats}
    if fates == {""} and not any(heard.beat.host in hosts for heard in there):
        return f"nothing was heard of {_name(beats)} for {for_s}, {at}: the host or its network is down"
    if fates == {"alive"}:
        return (
            f"{_name(beats)} has said nothing for {for_s}, {at}: it lives, but the call that it is in does not let "
            "other threads run"
        )
    return f"nothing was heard of {_name(beats)} for {for_s}, {at}: stopped, dead, or cut off"


def _group(waiting: Sequence[Beat]) -> list[list[Beat]]:
    """Ranks by the exchange that they wait in, the fewest first."""
    groups: dict[tuple[str, int, str], list[Beat]] = {}
    for beat in waiting:
        place = "" if beat.waits_in.startswith("the ") else beat.place
        groups.setdefault((_describe_exchange(beat), beat.step, place), []).append(beat)
    return sorted(groups.values(), key=len)


def _describe_waiting(groups: Sequence[Sequence[Beat]], still_s: float) -> str:
    if len(groups) == 1:
        beats = groups[0]
        return (
            f"all {len(beats)} ranks have waited in {_describe_exchange(beats[0])} for {describe_seconds(still_s)} at "
            f"step {beats[0].step}: a message between them is lost, or very slow"
        )
    parts = [f"{_name(beats)} in {_describe_exchange(beats[0])} at step {beats[0].step}" for beats in groups[:4]]
    return (
        f"the ranks have waited for each other for {describe_seconds(still_s)}: {', '.join(parts)}: one of these "
        "collectives is called by some ranks only"
    )


def _describe_exchange(beat: Beat) -> str:
    if beat.waits_in == "the exchange":  # one that is not about gradients
        return f"the exchange while {beat.phase}"
    is_ours = beat.waits_in.startswith("the ")
    return beat.waits_in if is_ours or not beat.place else f"{beat.waits_in} ({beat.place})"


def _describe_wait(waiting: Sequence[Beat], num_guilty: int) -> str:
    if not waiting:
        return ""
    where = Counter(_describe_exchange(beat) for beat in waiting).most_common(1)[0][0]
    who = f"rank {waiting[0].rank} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    return f"; {who} for {'it' if num_guilty == 1 else 'them'} in {where}"
