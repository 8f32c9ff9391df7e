"""Decides for all nodes of a launch when their ranks start, stop, continue after a death, start again, and end.

`Supervisor.handle` takes an event and returns commands. It reads no clock and no file, and starts nothing: the agent of
node 0 feeds it (launcher.py). On one machine there is one node.
"""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from samestep.launch.link import (
    Board,
    Broken,
    Command,
    Continue,
    Ended,
    EndStuck,
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
)
from samestep.launch.rank_reports import SOON_S, RankFailure
from samestep.world.environment import SECRET, Outcome, Restart, find_exit_code
from samestep.world.membership import GENERATION_S

SAY_S = 5.0  # after which node 0 prints for whom it waits
FOLLOW_S = 0.5  # after the first failure: time for other ranks to fail, with the same error or because they lost it
KILL_S = 60.0  # for killed ranks to end, and for spared ones, which have 30 s; one in a driver call can take long


class State(Enum):
    """What the launch waits for."""

    JOINING = auto()  # for all nodes
    RUNNING = auto()  # for the ends of the ranks
    SAVING = auto()  # the same, after a signal to stop
    FAILING = auto()  # a rank has failed: for FOLLOW_S, so that others fail with it
    KILLING = auto()  # for KILL_S, after SIGKILL
    OVER = auto()  # for nothing


class RankState(Enum):
    """The state of a rank's process."""

    RUNNING = auto()
    SUCCEEDED = auto()  # exit code 0
    OBEYED = auto()  # it was ended by a signal that it was sent
    FAILED = auto()
    OUTLIVED = auto()  # it has failed, and the others have continued


@dataclass
class RankRecord:
    """A rank of the current start.

    Attributes:
        failure: how it has failed.
        outcome: how its run has ended.
    """

    number: int
    node: int
    state: RankState = RankState.RUNNING
    failure: RankFailure | None = None
    outcome: Outcome = Outcome.UNKNOWN


@dataclass
class Node:
    """A node.

    Attributes:
        is_lost: it no longer answers.
        num_signals: to stop. The second one kills the ranks. A scheduler sends the first one to each node.
    """

    joined: Joined
    name: str
    is_lost: bool = False
    num_signals: int = 0


@dataclass
class Generation:
    """The ranks that continue after a death.

    Attributes:
        number: from 1; 0 at the start.
        members: its ranks, as numbered at the start.
        stuck: ranks that were ended because they did not respond.
        due_s: when ranks must no longer wait for one that has ended after a signal.
    """

    number: int = 0
    members: list[int] = field(default_factory=list)
    due_s: float = math.inf
    stuck: set[int] = field(default_factory=set)


class Supervisor:
    """The supervisor of a launch.

    Args:
        nodes: how many there are, and where and for how long they meet.
        heals: whether the other ranks continue if one dies.

    Attributes:
        generation: with `--heal`, the ranks that continue.
    """

    def __init__(self, nodes: Nodes, now_s: float, *, max_restarts: int = 0, heals: bool = False) -> None:
        self.state = State.JOINING
        self.generation = Generation()
        self._meeting = nodes
        self._max_restarts = max_restarts
        self._heals = heals
        self._now_s = now_s
        self._due_s = now_s + nodes.timeout_s  # of the current state
        self._say_s = now_s + SAY_S
        self._nodes: dict[int, Node] = {}
        self._ranks: list[RankRecord] = []
        self._signals: list[int] = []
        self._board = Board(is_ready=False, has_met=False)
        self._num_restarts = 0
        self._can_restart = True
        self._commands: list[tuple[int, Command]] = []

    @property
    def world_size(self) -> int:
        """Number of ranks at the start."""
        return len(self._ranks)

    def handle(self, node: int, event: Message, now_s: float) -> list[tuple[int, Command]]:
        """Process an event of a node. Returns commands, each with the node that executes it."""
        self._now_s = now_s
        self._commands = []
        if self.state is State.OVER:
            return []
        match event:
            case Joined():
                is_alone = self._meeting.num_nodes == 1
                self._nodes[node] = Node(event, event.host if is_alone else f"node {node} ({event.host})")
            case Ended():
                self._note_end(event)
            case Signalled():
                self._note_signal(node, event.signum)
            case Broken():
                self._finish(Outcome.REFUSED, message=event.message, error_code=event.error_code)
            case Lost():
                self._lose(node, event.time_s)
            case Board():
                if self.state in (State.RUNNING, State.SAVING):  # after a failure, that of its time explains it
                    self._board = event
                for rank in self._running():
                    if rank.number in {*event.stuck} - self.generation.stuck:
                        self.generation.stuck.add(rank.number)  # the node ends it, so that the others continue
                        self._tell(rank.node, EndStuck(rank.number, event.reason))
        self._advance()
        return self._commands

    # --- events -----------------------------------------------------------------------------------------------

    def _note_end(self, end: Ended) -> None:
        rank = self._ranks[end.rank]
        if rank.state is RankState.RUNNING:
            rank.failure = end.failure
            rank.outcome = end.outcome
            good = RankState.OBEYED if end.code else RankState.SUCCEEDED
            rank.state = good if end.failure is None else RankState.FAILED

    def _note_signal(self, number: int, signum: int) -> None:
        self._signals.append(signum)
        self._nodes[number].num_signals += 1
        if self.state is State.JOINING:
            self._finish(Outcome.STOPPED, signum)
        elif self._is_insistent:
            self._kill()
        elif self.state is State.RUNNING:
            self._enter(State.SAVING)
            self._tell_all(Signal(signal.SIGTERM if signum == signal.SIGHUP else signum))

    def _lose(self, number: int, time_s: float) -> None:
        if (node := self._nodes.get(number)) is None or node.is_lost:
            return
        if self.state is State.JOINING:
            self._finish(
                Outcome.REFUSED,
                message=f"{node.name} has ended before all nodes were there, or --node-rank {number} was given twice: "
                "start all nodes again",
                error_code="SS504",
            )
            return
        node.is_lost = True
        self._can_restart = False
        for rank in self._running():
            if rank.node == number:
                failure = RankFailure(rank.number, time_s, 1, False, "died", f"was lost with {node.name}")
                self._note_end(Ended(rank.number, 1, failure))

    # --- states -----------------------------------------------------------------------------------------------

    def _enter(self, state: State, limit_s: float = math.inf) -> None:
        self.state = state
        self._due_s = self._now_s + limit_s

    def _advance(self) -> None:
        """Go on to the state that follows, if any, and to those after it."""
        before = self.state
        is_due = self._now_s >= self._due_s
        match before:
            case State.JOINING:
                self._wait_for_nodes(is_due=is_due)
            case State.RUNNING | State.SAVING:
                self._watch_ranks()
            case State.FAILING | State.KILLING if not self._running():
                self._conclude()
            case State.FAILING if is_due:
                self._kill(spares=True)
            case State.KILLING if is_due:
                for rank in self._running():
                    self._can_restart = False
                    self._note_end(Ended(rank.number, -signal.SIGKILL))
                self._conclude()
        if self.state is not before:
            self._advance()

    def _wait_for_nodes(self, *, is_due: bool) -> None:
        meeting = self._meeting
        if len(self._nodes) == meeting.num_nodes:
            self._start(None)
        elif is_due:
            missing = self._describe_missing(f"did not join at {meeting.endpoint} within {meeting.timeout_s:.0f} s")
            self._finish(
                Outcome.REFUSED,
                message=f"{missing}: start the launcher there too, with the same {SECRET}, or allow more time with "
                "--rdzv-timeout",
                error_code="SS507",
            )
        elif self._now_s >= self._say_s:
            self._say_s = math.inf  # once
            missing = self._describe_missing(f"still missing at {meeting.endpoint}")
            self._tell(0, Print(f"{missing}; waiting for up to {self._due_s - self._now_s:.0f} s more"))

    def _describe_missing(self, what: str) -> str:
        num_nodes = self._meeting.num_nodes
        missing = ", ".join(str(node) for node in range(num_nodes) if node not in self._nodes)
        present = ", ".join(node.name for node in self._nodes.values())
        return f"of {num_nodes} nodes, --node-rank {missing} {what}; present: {present}"

    def _start(self, restart: Restart | None) -> None:
        """Start all ranks."""
        self._enter(State.RUNNING)
        self._board = Board(is_ready=False, has_met=False)
        self._ranks = []
        firsts: dict[int, int] = {}
        shares: list[str] = []
        for number, node in sorted(self._nodes.items()):
            first = firsts[number] = self.world_size
            self._ranks += [RankRecord(first + i, number) for i in range(node.joined.num_ranks)]
            last = f"-{self.world_size - 1}" if node.joined.num_ranks > 1 else ""
            shares.append(f"{first}{last} on {node.name}")
        self.generation = Generation(members=[*range(self.world_size)])
        for number, first in firsts.items():
            self._tell(
                number,
                Start(
                    self._num_restarts,
                    restart,
                    number,
                    first,
                    self.world_size,
                    addresses=[node.joined.address for node in self._nodes.values()],
                    sentence=f"ranks {', '.join(shares)}",
                    heals=self._heals,
                ),
            )

    def _watch_ranks(self) -> None:
        if self._heals:
            self._heal()
        if self._failed():
            self._refuse()
            self._enter(State.FAILING, FOLLOW_S)
        elif not self._running():
            self._conclude()

    def _kill(self, *, spares: bool = False) -> None:
        self._enter(State.KILLING, KILL_S)
        self._refuse()
        self._tell_all(Signal(signal.SIGKILL, spares))

    # --- healing ----------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """After a death, let the other ranks continue if they can. If not, the failures remain those of the launch."""
        if self._signals and any(rank.state in (RankState.SUCCEEDED, RankState.OBEYED) for rank in self._ranks):
            self._limit_waiting()  # ranks save and end, and those that remain may need one that has ended
            return
        members = self.generation.members
        left = [rank for rank in members if self._ranks[rank].state is RankState.RUNNING]
        if not left or left == members:
            return
        failed = self._failed()
        # A rank that has ended its script counts as gone if another has failed, or if the others wait for it to come.
        is_needed = bool(failed) or (self.generation.number > 0 and not self._board.has_met)
        # An exception would occur again, in the rank that gets these micro-batches.
        can_continue = self._board.is_ready and all(failure.is_death for failure in failed)
        if not is_needed or not can_continue:
            return
        self._name(left)
        for failure in failed:
            self._ranks[failure.rank].state = RankState.OUTLIVED
            if failure.kind != "stuck":  # the reason to end such a rank was printed before
                self._tell(0, Print(f"{failure.reason}{self._locate(failure.rank)}"))

    def _limit_waiting(self) -> None:
        """After a signal, ranks must not wait for long for one that has ended. The others may save for any time."""
        if math.isinf(self.generation.due_s):
            self.generation.due_s = self._now_s + GENERATION_S
        elif self._now_s >= self.generation.due_s:
            self.generation.due_s = math.nan  # once
            self._refuse()

    def _refuse(self) -> None:
        """End the waiting of ranks that have lost another one."""
        if self._heals:
            self._name([])

    def _name(self, members: list[int]) -> None:
        self.generation.number += 1
        if members:
            self.generation.members = members
            self._board = Board(is_ready=self._board.is_ready, has_met=False)
        self._tell(0, Continue(self.generation.number, members))

    def _explain_no_healing(self) -> str:
        """Return a clause: why others have not continued after a death; "" if none has failed for one."""
        failures = self._failed()
        dead = {rank.number for rank in self._ranks if rank.failure is not None and rank.failure.is_death}
        is_alone = dead.issuperset(self.generation.members)
        has_own_failure = any(not (failure.is_death or failure.secondary) for failure in failures)  # perhaps much later
        if not (failures and dead) or is_alone or has_own_failure:
            return ""
        if refusal := next(filter(None, [failure.refusal for failure in failures]), ""):
            return refusal
        if not self._board.is_ready:
            return "not all had begun a loop in which they can"
        has_ended = any(rank.state is RankState.SUCCEEDED for rank in self._ranks)
        return "one had already ended its script" if has_ended else "they have not formed a new group"

    # --- the end ----------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """All ranks have ended: start them again, or end the launch."""
        cause = self._find_cause()
        # An Error is a mistake of the user, and would occur again.
        could_restart = cause is not None and not self._signals and self._can_restart and cause.kind != "error"
        restarts = could_restart and self._num_restarts < self._max_restarts
        why = self._explain_no_healing() if self._heals and not self._is_insistent else ""
        if why:
            how = "--max-restarts N starts again" if could_restart and not self._max_restarts else ""
            advice = "" if restarts else f": {how or 'the same command resumes'} from the newest snapshot"
            self._tell(0, Print(f"the other ranks do not continue, because {why}{advice}"))
        if restarts and cause is not None:
            self._num_restarts += 1
            self._report(cause, f"; restart {self._num_restarts} of {self._max_restarts}")
            self._start(Restart(cause.reason, cause.rank))
        else:
            self._end(cause)

    def _end(self, cause: RankFailure | None) -> None:
        """End the launch. `cause`: the failure that caused the others."""
        signals = self._signals
        has_obeyed = cause is None or cause.secondary or -cause.code in signals
        has_succeeded = all(rank.state in (RankState.SUCCEEDED, RankState.OUTLIVED) for rank in self._ranks)
        noted = {rank.outcome for rank in self._ranks}
        outcome = next((each for each in (Outcome.STOPPED, Outcome.FINISHED) if each in noted), Outcome.UNKNOWN)
        if signals and has_obeyed:
            if self._is_insistent or not has_succeeded:
                outcome = Outcome.KILLED
            elif outcome is Outcome.UNKNOWN:
                outcome = Outcome.STOPPED
            self._finish(outcome, signals[-1])
        elif cause is not None and self._nodes[self._ranks[cause.rank].node].is_lost:
            lost = [node.name for node in self._nodes.values() if node.is_lost]
            was = "was" if len(lost) == 1 else "were"
            self._finish(
                Outcome.LOST,
                message=f"{' and '.join(lost)} {was} lost: the same commands resume from the newest snapshot",
            )
        elif cause is not None:
            self._report(cause)
            self._finish(Outcome.FAILED, cause.code, failure=cause)
        elif has_succeeded:
            self._finish(outcome)
        else:  # the ranks were stopped, and none has reported a reason
            self._finish(Outcome.LOST)

    def _finish(
        self,
        outcome: Outcome,
        number: int = 0,
        *,
        message: str = "",
        error_code: str = "",
        failure: RankFailure | None = None,
    ) -> None:
        self._tell_all(Finish(find_exit_code(outcome, number), message, error_code, failure))
        self._enter(State.OVER)

    def _find_cause(self) -> RankFailure | None:
        """Return the failure that caused the others; of ranks with the same one, the lowest, which is usually shown.

        It can be a death that the others had outlived, if they failed soon after.
        """
        failures = self._failed()
        if not failures:
            return None
        first = min(failures, key=lambda failure: (failure.secondary, failure.time_s))
        if first.secondary:
            outlived = [rank.failure for rank in self._ranks if rank.state is RankState.OUTLIVED and rank.failure]
            deaths = [failure for failure in outlived if not failure.secondary]
            last = max(deaths, key=lambda failure: failure.time_s, default=None)
            if last is not None and first.time_s < last.time_s + SOON_S:
                return last
        return next(each for each in failures if (each.kind, each.message) == (first.kind, first.message))

    def _report(self, failure: RankFailure, then: str = "") -> None:
        """Let the rank's node print its failure, and the other nodes name it."""
        node = self._ranks[failure.rank].node
        sentence = f"{failure.reason}{self._locate(failure.rank)}{then or '; the others were stopped'}"
        for number in self._nodes:
            if number == node:
                self._tell(number, Report(failure, self.world_size, then))
            else:
                self._tell(number, Print(sentence))

    # --- helpers ----------------------------------------------------------------------------------------------

    def _running(self) -> list[RankRecord]:
        return [rank for rank in self._ranks if rank.state is RankState.RUNNING]

    @property
    def _is_insistent(self) -> bool:
        """Whether a node has received a second signal to stop."""
        return any(node.num_signals > 1 for node in self._nodes.values())

    def _failed(self) -> Sequence[RankFailure]:
        return [rank.failure for rank in self._ranks if rank.state is RankState.FAILED and rank.failure is not None]

    def _locate(self, rank: int) -> str:
        """Return a clause that names the node of a rank; "" on one machine, or if that node is lost."""
        node = self._nodes[self._ranks[rank].node]
        return "" if node.is_lost or self._meeting.num_nodes == 1 else f", on {node.name}"

    def _tell(self, node: int, command: Command) -> None:
        if not self._nodes[node].is_lost:
            self._commands.append((node, command))

    def _tell_all(self, command: Command) -> None:
        for node in self._nodes:
            self._tell(node, command)
