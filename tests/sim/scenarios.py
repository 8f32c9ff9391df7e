"""Scenarios: what is trained, on how many ranks, and which faults happen. They are data, and have a text form:

    seed=7 script=gan shard=optimizer every=3 steps=8 routes=chunks copies=background | 3 heal kill@fsync#2 | 2

The rounds after the first bar are starts of the run. A fault has a kind, a point, and perhaps a rank and a duration in
seconds: `freeze@exchange#5/2+30` freezes rank 2 for 30 s at the fifth point of the round that is an exchange; `@1234`
is the round's 1234th point. Without a rank, a fault strikes the rank that is at the point.
"""

import random
import re
from dataclasses import dataclass, fields, replace
from itertools import accumulate

SCRIPTS = ("mlp", "batchnorm", "gan", "phases", "passes", "stream")  # and staged, for "pipelines"
KINDS = ("kill", "kill_all", "power", "flip", "freeze", "stop", "full")
LABELS = (
    "fsync", "os.rename", "open", "write", "os.mkdir", "os.rmdir", "exchange", "broadcast", "recv.wait",
    "send.wait", "isend", "join", "store.set", "store.check", "irecv", "queue.get", "event.wait",
)  # fmt: skip
STEPS_PER_EPOCH = 5  # of all scripts
# Focus -> the points from one death to the next, at most.
HEALING = {"heal": 150, "twins": 1500, "pipelines": 600}
NUM_RANKS = {"heal": (3, 4, 5), "twins": (3, 3, 3, 4, 5), "pipelines": (3, 4, 4, 6)}
NUM_DEATHS = {"heal": (1, 2), "twins": (1, 2, 2, 3), "pipelines": (1, 1, 2, 3)}
NUM_POINTS = {1: 300, 2: 1000, 3: 1500, 4: 2000, 5: 2600}  # of a start of 10 steps, about
_FAULT = re.compile(r"(\w+)@([\w.]+)(?:#(\d+))?(?:/(\d+))?(?:\+([\d.]+))?")


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        kind: "kill" (a rank), "kill_all" (ranks and launcher), "power" (the same, and what is not synced is lost),
            "flip" (the same, and a byte of the newest snapshot changes), "freeze" (a rank), "stop" (SIGTERM to the
            launcher, or to `rank`), "full" (the disk).
        label: the beginning of the labels of the points that count; "" for all.
        count: the number of the point, from 1.
        rank: None for the rank that is at the point.
        seconds: of a freeze or a full disk.
    """

    kind: str
    label: str
    count: int
    rank: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        point = f"{self.label}#{self.count}" if self.label else f"{self.count}"
        rank = "" if self.rank is None else f"/{self.rank}"
        return f"{self.kind}@{point}{rank}{f'+{self.seconds:g}' if self.seconds else ''}"

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Return the fault of a text. Raises ValueError."""
        found = _FAULT.fullmatch(text)
        if found is None or found[1] not in KINDS:
            raise ValueError(f"{text!r} is no fault")
        kind, point, count, rank, seconds = found.groups()
        label, number = (point, int(count)) if count else ("", int(point))
        return cls(kind, label, number, None if rank is None else int(rank), float(seconds or 0))


@dataclass(frozen=True)
class Round:
    """One start of the run.

    Attributes:
        heals: `--heal`.
        restarts: `--max-restarts`.
    """

    num_ranks: int
    heals: bool = False
    restarts: int = 0
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        words = [str(self.num_ranks), *(["heal"] if self.heals else [])]
        return " ".join([*words, *([f"restarts={self.restarts}"] if self.restarts else []), *map(str, self.faults)])

    @classmethod
    def parse(cls, text: str) -> "Round":
        """Return the round of a text. Raises ValueError."""
        num_ranks, *words = text.split()
        restarts = next((int(word.partition("=")[2]) for word in words if word.startswith("restarts=")), 0)
        faults = tuple(Fault.parse(word) for word in words if "@" in word)
        return cls(int(num_ranks), "heal" in words, restarts, faults)


@dataclass(frozen=True)
class Scenario:
    """A run, from its first start to its last, which has no faults.

    Attributes:
        seed: of the order of tasks, and of all that the network and the disk decide.
        script: a file of scripts/.
        shard: "none" or "optimizer".
        owners: `--shard-copies`. With 2, ranks can continue after a death if the state is divided.
        every: `--snapshot-every`, in steps.
        steps: `--max-steps`. An epoch has 5.
        routes: "gather" or "chunks": for gradients of every size, the route of small or that of large ones.
        copies: "at_once" or "background": when the tensors of a snapshot are copied.
        pace: seconds that each step takes.
    """

    seed: int
    script: str = "mlp"
    shard: str = "none"
    owners: int = 1
    every: int = 2
    steps: int = 10
    routes: str = "gather"
    copies: str = "at_once"
    pace: int = 0
    rounds: tuple[Round, ...] = (Round(1),)

    def __str__(self) -> str:
        words = [f"{each.name}={getattr(self, each.name)}" for each in fields(self) if each.name != "rounds"]
        return " | ".join([" ".join(words), *map(str, self.rounds)])

    @classmethod
    def parse(cls, text: str) -> "Scenario":
        """Return the scenario of a text. Raises ValueError."""
        head, *rounds = text.split("|")
        given = dict(word.split("=") for word in head.split())
        numbers = {name: int(given.pop(name)) for name in ("seed", "owners", "every", "steps", "pace") if name in given}
        return cls(**numbers, **given, rounds=tuple(Round.parse(each) for each in rounds))


def plan(seed: int, focus: str = "") -> Scenario:
    """Return the scenario of a seed.

    Args:
        focus: "" for any, "heal" (deaths that others survive), "twins" (the same, with a divided state), "pipelines"
            (the same, with several of them), "background" (kills while the tensors of a snapshot are copied), a kind of
            fault, or a kind and a label, such as "kill_all@os.rename".
    """
    choose = random.Random(f"scenario {seed} {focus}")
    shard = {"heal": "none", "twins": "optimizer", "pipelines": "none"}.get(focus)
    shard = shard or choose.choice(("none", "none", "none", "optimizer"))
    owners = 2 if focus == "twins" else random.Random(f"owners {seed}").choice((1, 2))  # no draw of `choose`
    epochs = 2 if focus else choose.choice((1, 2, 2))
    if focus == "twins":
        epochs = choose.choice((1, 1, 1, 2))
    num_rounds = 1 if focus else choose.choice((1, 1, 2, 2, 3))
    rounds = [_plan_round(choose, epochs, focus) for _ in range(num_rounds)]
    scenario = Scenario(
        seed,
        script="staged" if focus == "pipelines" else choose.choice(SCRIPTS),
        shard=shard,
        owners=owners if shard == "optimizer" else 1,
        every=choose.choice((1, 2, 3, 4)),
        steps=STEPS_PER_EPOCH * epochs,
        routes=choose.choice(("gather", "gather", "chunks")),
        copies="background" if focus == "background" else choose.choice(("at_once", "background")),
        rounds=(*rounds, Round(choose.choice((1, 1, 2) if focus == "twins" else (1, 2, 3)))),
    )
    steps = scenario.steps - choose.choice((0, 0, 0, 1, 3))
    return replace(scenario, steps=steps, pace=choose.choices((0, 1, 60), (45, 4, 1))[0])


def _plan_round(choose: random.Random, epochs: int, focus: str) -> Round:
    num_ranks = choose.choice(NUM_RANKS.get(focus, (1, 2, 2, 3, 3, 3, 4, 5)))
    heals = num_ranks > 1 and choose.random() < 0.5
    kinds = ("kill", "kill", "kill", "freeze", "stop") if heals else ("kill", "kill_all", "power", "power", *KINDS)
    kind, _, label = focus.partition("@")
    if focus:
        heals = False
        kinds = ("kill_all", "power") if focus == "background" else (kind,)
    if focus in HEALING:  # after all have begun; perhaps more while the others heal, or have healed
        if focus == "pipelines":
            first, last = 150 * num_ranks, 500 * epochs * num_ranks
        elif focus == "twins":  # there, a start has more points, and a step grows with the square of the ranks
            first, last = 200 * num_ranks, (50 + 150 * epochs) * num_ranks**2
        else:
            first, last = 110 * num_ranks, NUM_POINTS[num_ranks]
        ranges = [(first, last), *[(1, HEALING[focus])] * (max(NUM_DEATHS[focus]) - 1)]
        points = [*accumulate(choose.randrange(*each) for each in ranges)][: choose.choice(NUM_DEATHS[focus])]
        return Round(num_ranks, True, 0, tuple(Fault("kill", "", each) for each in points))
    faults = [
        _plan_fault(choose, choose.choice(kinds), num_ranks, epochs, label) for _ in range(choose.choice((1, 1, 2)))
    ]
    restarts = 0 if focus else choose.choice((0, 0, 0, 2))
    return Round(num_ranks, heals, restarts, tuple(faults))


def _plan_fault(choose: random.Random, kind: str, num_ranks: int, epochs: int, label: str) -> Fault:
    rank = None if choose.random() < 0.6 else choose.randrange(num_ranks)
    seconds = choose.choice((0.1, 3.0, 30.0)) if kind in ("freeze", "full") else 0.0
    if label or choose.random() < 0.5:
        return Fault(kind, label or choose.choice(LABELS), 1 + int(choose.expovariate(0.08)), rank, seconds)
    return Fault(kind, "", choose.randrange(100, NUM_POINTS[num_ranks] * epochs // 2), rank, seconds)


# In which a promise was broken once, or which find a planted fault: what was wrong -> scenario.
PINNED: dict[str, str] = {
    "a snapshot that was put aside is back after a power cut, and the ledger has lost its steps": (
        "seed=3 script=batchnorm every=2 steps=10 | 1 flip@200/0 | 2 power@400 | 1"
    ),
    "a finished run loses a row that the body of its last, cut epoch has logged": "seed=1 script=mlp steps=3 | 1 | 1",
    "the directory of snapshots is lost: who created it was killed before the sync": (
        "seed=2 script=gan every=1 steps=5 | 1 kill_all@fsync#6 | 1 power@300 | 1"
    ),
    "a run of several loops is killed in each of them, and stopped": (
        "seed=1 script=phases | 3 kill_all@900 | 2 stop@800 | 1 power@200 | 3 kill_all@1200 | 2"
    ),
    "a batch that an earlier pass has changed in place is taken for a new one": (
        "seed=1 script=passes every=2 steps=5 | 3 heal kill@635/1 | 1"
    ),
    "rank 0 dies before the ranks have completed the record of its last step, whose gradient is divided": (
        "seed=30008 script=batchnorm shard=optimizer owners=2 every=2 steps=7 copies=background | 5 heal kill@2134 | 3"
    ),
    "an owner of the state dies, and later the one that had the other copy": (
        "seed=1 script=mlp shard=optimizer owners=2 every=5 steps=10 | 4 heal kill@900/0 kill@1900/1 | 2"
    ),
    "an owner of the state dies in the last step of a loop, and the other one in the next loop": (
        "seed=9402387 script=phases shard=optimizer owners=2 every=3 steps=9 | 3 heal kill@2080 kill@3020 | 1"
    ),
    "ranks of two pipelines die at once in the first step, and the others form one": (
        "seed=1 script=staged every=5 steps=5 | 4 heal kill@727/3 kill@743/0 | 1"
    ),
}
