"""What the nodes of a launch report to its supervisor, and what it tells them to do. A node is one machine's agent."""

from msgspec import Struct

from samestep.launch.failure import RankFailure
from samestep.world.environment import Outcome, Restart

# --- events -----------------------------------------------------------------------------------------------------------


class Tick(Struct, tag=True, frozen=True):
    """Time has passed."""


class Joined(Struct, tag=True, frozen=True):
    """A node is there.

    Attributes:
        host: its name.
        address: from which it reaches the others; "" on one machine.
    """

    host: str
    num_ranks: int
    address: str = ""


class Ended(Struct, tag=True, frozen=True):
    """The process of a rank has ended.

    Attributes:
        code: exit code, or minus the signal that killed it.
        time_s: wall-clock time.
        failure: None if it has done what it should.
        outcome: how its run has ended, if it has noted that.
    """

    rank: int
    code: int
    time_s: float
    failure: RankFailure | None = None
    outcome: Outcome = Outcome.UNKNOWN


class Signalled(Struct, tag=True, frozen=True):
    """A node has received a signal to stop."""

    signum: int


class Broken(Struct, tag=True, frozen=True):
    """A node cannot start its ranks. Has the message and the code of an Error."""

    message: str
    error_code: str = ""


class Lost(Struct, tag=True, frozen=True):
    """A node no longer answers."""


class Board(Struct, tag=True, frozen=True):
    """What the ranks of a launch with `--heal` have written into their store.

    Attributes:
        is_ready: all have begun their first loop, so that others can continue if one dies.
        has_met: all members of the newest generation have come to it.
        stuck: ranks that do not respond.
        reason: why they must end.
    """

    is_ready: bool
    has_met: bool
    stuck: list[int] = []
    reason: str = ""


Event = Tick | Joined | Ended | Signalled | Broken | Lost | Board

# --- commands ---------------------------------------------------------------------------------------------------------


class Start(Struct, tag=True, frozen=True):
    """Start the ranks.

    Attributes:
        num_restarts, restart: how often the ranks were restarted, and why the last time.
        node, num_nodes: the number of this node, and of all.
        first_rank: the number of this node's first rank.
        peer: the address of another node.
        sentence: which ranks are where.
        heals: whether the other ranks continue if one dies.
        port: of the ranks' store, on node 0.
    """

    num_restarts: int
    restart: Restart | None
    node: int
    num_nodes: int
    first_rank: int
    world_size: int
    peer: str = ""
    sentence: str = ""
    heals: bool = False
    port: int = 0


class Signal(Struct, tag=True, frozen=True):
    """Send a signal to the ranks. `spares`: not to those that have reported an error, and complete a snapshot."""

    signum: int
    spares: bool = False


class EndStuck(Struct, tag=True, frozen=True):
    """Kill a rank that does not respond. `reason`: a sentence, for the failure."""

    rank: int
    reason: str


class Continue(Struct, tag=True, frozen=True):
    """Name the ranks that continue after a death: a generation. No members: none continues."""

    number: int
    members: list[int]


class Print(Struct, tag=True, frozen=True):
    """Print a sentence."""

    sentence: str


class Report(Struct, tag=True, frozen=True):
    """Print the failure of a rank of this node. `then`: what follows, if the launch does not end."""

    failure: RankFailure
    world_size: int
    then: str = ""


class Finish(Struct, tag=True, frozen=True):
    """End the launch.

    Attributes:
        code: its exit code.
        message: the reason, if that is not the failure of a rank.
        error_code: its code, if it is an Error.
        failure: of the rank that has failed first.
    """

    code: int
    message: str = ""
    error_code: str = ""
    failure: RankFailure | None = None


Command = Start | Signal | EndStuck | Continue | Print | Report | Finish
Message = Event | Command
