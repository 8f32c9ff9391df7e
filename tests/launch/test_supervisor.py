"""The supervisor of a launch: a search of every order of events of three ranks, and single decisions."""

import copy
import itertools
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec import convert, to_builtins

from samestep.launch.link import (
    Board,
    Broken,
    Command,
    Continue,
    Ended,
    EndStuck,
    Event,
    Finish,
    Joined,
    Lost,
    Message,
    Nodes,
    Print,
    Report,
    Signal,
    Signalled,
    Start,
    Tick,
)
from samestep.launch.rank_reports import SOON_S, RankFailure
from samestep.launch.supervisor import RankState, State, Supervisor
from samestep.world.environment import Outcome
from samestep.world.membership import GENERATION_S

READY = Board(is_ready=True, has_met=True)
LATER_S = 1000.0
NOW_S = 1.8e9  # by the wall clock


def died(rank: int, time_s: float = 0.0) -> Ended:
    return Ended(rank, -9, RankFailure(rank, time_s, -9, False, "died", "was killed by SIGKILL"))


def raised(rank: int, time_s: float = 0.0) -> Ended:
    return Ended(rank, 1, RankFailure(rank, time_s, 1, False, "exception", "ValueError: oh no"))


def lost_another(rank: int, time_s: float = 0.0) -> Ended:
    return Ended(rank, 1, RankFailure(rank, time_s, 1, True, "exception", "PeerFailed: another rank has died"))


def end(outcome: Outcome, *ranks: int) -> list[Event]:
    """Ranks end without a failure."""
    return [Ended(rank, 0, outcome=outcome) for rank in ranks]


class Launch:
    """A supervisor, and what it has told its nodes. Without ranks, no node has joined."""

    def __init__(self, num_ranks: int = 3, num_nodes: int = 1, **options: Any) -> None:
        self.now_s = 0.0
        self.told: list[tuple[int, Command]] = []
        nodes = Nodes(num_nodes, host="a", port=1, timeout_s=60.0)
        self.supervisor = Supervisor(nodes, 0.0, **options)
        for node in range(num_nodes if num_ranks else 0):
            self.do(Joined(f"h{node}", num_ranks // num_nodes), node=node)

    def do(self, *events: Event, node: int = 0, after_s: float = 0.0) -> "Launch":
        self.now_s += after_s
        for event in events:
            self.told += self.supervisor.handle(node, event, self.now_s)
        return self

    def wait(self, seconds: float) -> "Launch":
        return self.do(Tick(), after_s=seconds)

    def tell(self, kind: type[Any]) -> list[Any]:
        return [command for _, command in self.told if isinstance(command, kind)]

    @property
    def end(self) -> Finish:
        [end] = {*self.tell(Finish)}  # the same on all nodes
        assert self.supervisor.state is State.OVER
        return end

    @property
    def said(self) -> str:
        return "\n".join(each.sentence for each in self.tell(Print))

    @property
    def named(self) -> list[list[int]]:
        return [each.members for each in self.tell(Continue)]


# --- every order of events --------------------------------------------------------------------------------------------


def find_events(launch: Launch, num_ends: int) -> Iterator[Event]:
    """What can happen next. A rank that is told to end ends, or does not."""
    running = [rank.number for rank in launch.supervisor._ranks if rank.state is RankState.RUNNING]
    sent = {command.signum for command in launch.tell(Signal)}
    for rank in running:
        yield from (Ended(rank, 0, outcome=outcome) for outcome in (Outcome.FINISHED, Outcome.STOPPED))
        if num_ends < 2:
            yield from (died(rank), raised(rank))
        yield lost_another(rank)
        if sent:
            yield Ended(rank, -max(sent))
    if len(launch.supervisor._signals) < 2:
        yield Signalled(signal.SIGTERM)
    yield Tick()


def summarize(launch: Launch) -> tuple[Any, ...]:
    """What the next decisions depend on."""
    own = launch.supervisor
    ranks = tuple((rank.state, rank.outcome, rank.failure) for rank in own._ranks)
    return own.state, ranks, len(own._signals), own._num_restarts, tuple(own.generation.members), own.generation.number


@pytest.mark.parametrize("policy", [{}, {"heals": True}, {"max_restarts": 1}])
def test_every_order_of_events(policy: dict[str, Any]) -> None:
    """Each launch ends, all ranks have ended by then, and its exit code tells how."""
    launches = [(Launch(**policy), 0)]
    seen = {summarize(launches[0][0])}
    ends = set[int]()
    while launches:
        launch, num_failed = launches.pop()
        if policy.get("heals"):
            launch.do(READY)
        for event in find_events(launch, num_failed):
            further = copy.deepcopy(launch)
            is_own = isinstance(event, Ended) and event.failure is not None and not event.failure.secondary
            further.do(event, after_s=LATER_S if isinstance(event, Tick) else 0.0)
            if further.supervisor.state is State.OVER:
                check_end(further)
                ends.add(further.end.code)
            elif (key := summarize(further)) not in seen:
                seen.add(key)
                launches.append((further, num_failed + is_own))
    assert ends >= {0, 75, 1, 137, 143}
    assert len(seen) > 100


def check_end(launch: Launch) -> None:
    ranks = launch.supervisor._ranks
    code = launch.end.code
    assert all(rank.state is not RankState.RUNNING for rank in ranks)
    if code in (0, 75):
        assert all(rank.state in (RankState.SUCCEEDED, RankState.OUTLIVED) for rank in ranks)
        assert (code == 75) == any(rank.outcome is Outcome.STOPPED for rank in ranks)
    if launch.end.failure is not None:
        assert launch.tell(Report)[-1].failure == launch.end.failure, "the reason comes last"
    starts = launch.tell(Start)
    assert [start.num_restarts for start in starts] == [*range(len(starts))]


def test_a_launch_ends_without_further_events() -> None:
    """Whatever has happened once a rank has failed, time alone ends the launch: by SIGKILL, or without."""
    for ends in itertools.permutations([died(0), raised(1), Ended(2, 0)]):
        for num in (1, 2):
            launch = Launch().do(*ends[:num])
            if launch.supervisor.state is State.RUNNING:
                continue
            for _ in range(3):
                launch.wait(LATER_S)
            assert launch.end.code in (1, 137)
            assert launch.tell(Signal) == [Signal(signal.SIGKILL, spares=True)]


# --- single decisions -------------------------------------------------------------------------------------------------


def test_messages_survive_the_link() -> None:
    failure = RankFailure(1, 2.0, -9, False, "died", "was killed")
    events = [Tick(), Joined("h", 2, "a"), died(1), Signalled(15)]
    events += [Broken("no", "SS1"), Lost(0.0), Board(is_ready=True, has_met=False, stuck=[1], reason="r")]
    start = Start(1, None, 0, 0, 4, ["peer"], "ranks", True, 29400)
    commands = [start, Signal(15), EndStuck(1, "r"), Continue(1, [0]), Print("s")]
    kind: Any = Message
    for message in (*events, *commands, Report(failure, 3, "; then"), Finish(1, "m", "SS1", failure)):
        assert convert(to_builtins(message), kind) == message


@pytest.mark.parametrize(
    ("signums", "ends", "code"),
    [
        ([signal.SIGTERM], end(Outcome.STOPPED, 0), 75),
        ([signal.SIGINT], end(Outcome.STOPPED, 0), 130),
        ([signal.SIGTERM], end(Outcome.FINISHED, 0), 0),
        ([signal.SIGTERM], [Ended(0, 0)], 75),
        ([signal.SIGTERM], [Ended(0, -15)], 143),
        ([signal.SIGTERM, signal.SIGINT], [Ended(0, -9)], 130),
        ([signal.SIGTERM], [raised(0)], 1),
        ([], [Ended(0, 0)], 0),
        ([], end(Outcome.STOPPED, 0), 75),
        ([], [died(0)], 137),
    ],
)
def test_exit_codes(signums: Sequence[int], ends: Sequence[Event], code: int) -> None:
    assert Launch(1).do(*map(Signalled, signums)).do(*ends).end.code == code


def test_a_scheduler_signals_each_node() -> None:
    """The ranks save. The second signal that one node receives kills them."""
    launch = Launch(2, 2)
    for node in range(2):
        launch.do(Signalled(signal.SIGUSR1), node=node)
    assert [each.signum for each in launch.tell(Signal)] == [signal.SIGUSR1] * 2
    again = copy.deepcopy(launch).do(Signalled(signal.SIGUSR1), node=1)
    assert again.tell(Signal)[-1] == Signal(signal.SIGKILL), "also those that complete a snapshot"
    assert launch.do(*end(Outcome.STOPPED, 0, 1)).end.code == 75


def test_a_death_is_blamed_if_the_others_fail_soon_after() -> None:
    for later_s, blamed in ((20.0, 1), (2 * SOON_S, 0)):
        launch = Launch(2, heals=True).do(READY, died(1)).do(lost_another(0, later_s))
        assert launch.end.failure.rank == blamed


def test_of_equal_failures_that_of_the_lowest_rank_is_reported() -> None:
    [report] = Launch().do(raised(1), raised(0), raised(2)).tell(Report)
    assert report.failure.rank == 0


def test_an_error_is_not_tried_again() -> None:
    failure = RankFailure(0, 0.0, 2, False, "error", "the batch size is odd")
    launch = Launch(1, max_restarts=3).do(Ended(0, 2, failure))
    assert launch.end.code == 2
    assert len(launch.tell(Start)) == 1


# --- healing ----------------------------------------------------------------------------------------------------------


def test_after_a_signal_no_rank_waits_long_for_one_that_has_ended() -> None:
    """The others may save for as long as they like, but a rank that waits for it after a death ends."""
    launch = Launch(heals=True).do(READY, Signalled(signal.SIGTERM), Ended(1, 0))
    assert launch.named == [], "the others may end soon"
    launch.wait(GENERATION_S).wait(GENERATION_S)
    assert launch.named == [[]], "once"


def test_after_a_signal_the_others_complete_a_long_step() -> None:
    """They continue without a rank that dies then, and a refusal would break their connections."""
    launch = Launch(heals=True).do(READY, Signalled(signal.SIGTERM), died(2)).wait(2 * GENERATION_S)
    assert launch.named == [[0, 1]]
    assert launch.do(*end(Outcome.STOPPED, 0, 1)).end.code == 75


def test_a_rank_that_ends_after_a_healed_death_is_not_gone() -> None:
    """Without the death, the others would fail, too. But ranks that wait for it after a death continue without it."""
    launch = Launch(4, heals=True).do(READY, died(3))
    launch.do(Board(is_ready=True, has_met=False), Ended(2, 0))
    assert launch.named == [[0, 1, 2], [0, 1]]
    launch.do(READY, Ended(1, 0), Ended(0, 0))
    assert launch.named == [[0, 1, 2], [0, 1]]
    assert launch.end.code == 0


@pytest.mark.parametrize("kind", ["worker died", "left over"])
def test_why_a_rank_has_ended_is_printed(kind: str) -> None:
    launch = Launch(heals=True).do(READY, Ended(2, 1, RankFailure(2, 0.0, 1, False, kind, "rank 2 ends, because")))
    assert launch.named == [[0, 1]]
    assert "rank 2 ends, because" in launch.said


def test_a_failure_after_a_healed_death_is_none_of_healing() -> None:
    launch = Launch(heals=True).do(READY, died(2), READY, raised(0), lost_another(1))
    assert launch.end.failure.rank == 0
    assert "do not continue" not in launch.said


def test_the_last_rank_is_killed_before_it_continues() -> None:
    """Its number is not the number of ranks, since others have died before. No rank is left that could continue."""
    launch = Launch(heals=True).do(READY, died(0), READY, died(2), READY, died(1))
    assert launch.end.code == 137
    assert "do not continue" not in launch.said


@pytest.mark.parametrize(
    "events",
    [
        # The others may begin their first loop after the death.
        [Board(is_ready=False, has_met=False), died(1), READY, lost_another(0), lost_another(2)],
        [READY, raised(1)],  # it would occur again, in the rank that gets these micro-batches
    ],
)
def test_what_is_not_healed(events: Sequence[Event]) -> None:
    launch = Launch(heals=True).do(*events)
    assert launch.named == [[]]
    assert ("because not all had begun a loop in which they can" in launch.said) == (len(events) > 2)


def test_a_stuck_rank_is_ended_once_by_its_own_node() -> None:
    stuck = Board(is_ready=True, has_met=True, stuck=[1, 2], reason="nothing moves")
    launch = Launch(4, 2, heals=True).do(stuck, stuck)
    assert [each for each in launch.told if isinstance(each[1], EndStuck)] == [
        (0, EndStuck(1, "nothing moves")),
        (1, EndStuck(2, "nothing moves")),
    ]


# --- several nodes ----------------------------------------------------------------------------------------------------


def test_a_lost_node() -> None:
    launch = Launch(4, 2, max_restarts=3).do(Lost(0.0), node=1)
    for rank in (0, 1):
        launch.do(lost_another(rank))
    assert launch.end == Finish(1, "node 1 (h1) was lost: the same commands resume from the newest snapshot")
    assert len(launch.tell(Start)) == 2, "no restart without it"


def test_the_others_continue_without_a_node() -> None:
    launch = Launch(4, 2, heals=True).do(READY).do(Lost(NOW_S), node=1)
    assert launch.named[-1] == [0, 1]
    assert "rank 2 was lost with node 1 (h1)" in launch.said
    failing = copy.deepcopy(launch).do(lost_another(0, NOW_S + 20.0), lost_another(1, NOW_S + 20.0))
    assert failing.end == Finish(1, "node 1 (h1) was lost: the same commands resume from the newest snapshot")
    assert launch.do(*end(Outcome.FINISHED, 0, 1)).end.code == 0


def test_a_failure_is_printed_by_its_node_and_named_by_the_others() -> None:
    launch = Launch(4, 2).do(raised(2), lost_another(0), lost_another(1), lost_another(3))
    assert [node for node, command in launch.told if isinstance(command, Report)] == [1]
    assert launch.said == "rank 2 raised ValueError: oh no, on node 1 (h1); the others were stopped"


def test_nodes_that_do_not_come() -> None:
    launch = Launch(0, 3)
    launch.do(Joined("h0", 1)).wait(10.0)
    said = "of 3 nodes, --node-rank 1, 2 still missing at a:1; present: node 0 (h0); waiting for up to 50 s more"
    assert launch.said == said
    launch.wait(50.0)
    assert launch.end.message.startswith("of 3 nodes, --node-rank 1, 2 did not join at a:1 within 60 s; present: node")
    assert (launch.end.code, launch.end.error_code) == (2, "SS507")


def test_a_node_that_goes_before_all_are_there() -> None:
    """A second one with its number replaces what it writes."""
    launch = Launch(0, 3).do(Joined("h0", 1)).do(Joined("h1", 1), node=1).do(Lost(0.0), node=1)
    said = "node 1 (h1) has ended before all nodes were there, or --node-rank 1 was given twice: start all nodes again"
    assert launch.end == Finish(2, said, "SS504")


def test_a_node_that_cannot_start_its_ranks_ends_the_launch() -> None:
    launch = Launch(4, 2).do(Broken("no further process", "SS513"), node=1)
    assert launch.end == Finish(2, "no further process", "SS513")
