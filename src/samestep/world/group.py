"""The group of all ranks, which continues after the death of a rank (docs/dev/healing.md).

The death of rank 1 of 4, in the order of time:

| who | what | where |
|---|---|---|
| launcher | notices the end of the process, and names the next generation: ranks 0, 2 and 3 | `launch/supervisor.py` |
| ranks 0, 2, 3 | notice the failed collective themselves, or `LossWatch` breaks their connections | `try_once` |
| ranks 0, 2, 3 | close the old process group, wait for the generation, and open a new group | `_regroup` |
| ranks 0, 2, 3 | compare how many collectives they have completed: that of a rank behind is complete | `is_settled` |
| ranks 0, 2, 3 | divide the micro-batches anew; a new rank 0 takes the run directory over | `train/opening.py` |
| the step | begins the pass again, if its exchange was the collective that failed | `Step.__iter__` |
"""

import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from samestep.console import saying_when_slow
from samestep.errors import InvalidValue, LeftOver, NotHealed, PeerFailed
from samestep.files import read_bytes
from samestep.hashing import hash_bytes
from samestep.processes import Held, hold
from samestep.torch_internals import abort_nccl, add_gloo, break_gloo_connections
from samestep.version import __version__
from samestep.world.environment import Environment, read_environment, read_master
from samestep.world.local_sockets import connect
from samestep.world.membership import (
    GENERATION_S,
    STUCK,
    Change,
    LossWatch,
    Membership,
    check_ranks_unchanged,
    is_settled,
)
from samestep.world.process_group import (
    NCCL,
    Waiter,
    close_group,
    communicate,
    connect_to_store,
    has_group,
    join_process_group,
    open_process_group,
    release_connections,
)
from samestep.world.signed import SignedEntries
from samestep.world.transport import Transport

T = TypeVar("T")

PATIENCE_S = 30.0  # a rank that waits longer for the others prints where it waits

_run_numbers = count()  # of this process


class Group(Transport, Held):
    """All ranks of the run.

    After `begin_healing`, a collective either completes on all ranks, or, if one dies meanwhile, the survivors form a
    new group and repeat it. So `rank` and `world_size` can change in each call.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, *, local_rank: int = 0) -> None:
        super().__init__(rank, world_size, device, local_rank=local_rank)
        self._are_together = False
        self._membership: Membership | None = None
        self._uses_nccl = False  # set if ranks can continue after a death
        self._refuses = False  # to continue after a death, in this loop
        self._notify: Callable[[Change], None] = lambda change: None
        self._end: Callable[[LeftOver], NoReturn]
        self._watch: LossWatch | None = None

    # --- the death of a rank ----------------------------------------------------------------------------------

    @property
    def members(self) -> Sequence[int]:
        """The number that each rank had at the start."""
        return range(self.world_size) if self._membership is None else self._membership.members

    @property
    def replicas(self) -> Sequence[int]:
        """The number that each replica had at the start; of those of several ranks, the present one."""
        return self.members if self.ranks_per_replica == 1 else range(self.num_replicas)

    @property
    def number(self) -> int:
        """This rank's number at the start."""
        return self.rank if self._membership is None else self._membership.own

    @property
    def generation(self) -> int:
        """How often the ranks have formed a new group after a death."""
        return 0 if self._membership is None else self._membership.generation

    @property
    def can_heal(self) -> bool:
        """Whether the other ranks continue if one dies."""
        return self._healing is not None

    @property
    def _healing(self) -> Membership | None:
        """The membership, unless no rank continues after a death in this loop."""
        return None if self._refuses else self._membership

    def begin_healing(
        self, environment: Environment, notify: Callable[[Change], None], end: Callable[[LeftOver], NoReturn]
    ) -> None:
        """Let the other ranks continue if one dies. A further call, in a later loop, replaces the functions.

        Args:
            notify: called on all survivors after a death, in the new group.
            end: ends this process, because the others continue without it.
        """
        self._notify = notify
        self._end = end
        self._refuses = False
        if self._membership is None:
            membership = Membership(
                connect_to_store(), environment.secret, self.rank, self.world_size, self.ranks_per_replica
            )
            self._uses_nccl = self.device.type == "cuda" and not self.needs_staging(self.device)
            self._membership = membership
            self.waiter = None if self._uses_nccl else Waiter()
            self._watch = LossWatch(membership, connect_to_store, self._break_connections)

    def announce_ready(self) -> None:
        """Announce to the launcher that this rank can continue after the death of another one. On all ranks."""
        if self._membership is not None:
            self._membership.announce()

    def refuse_healing(self) -> None:
        """Let no rank continue if one dies, until the next call of `begin_healing`."""
        self._refuses = True

    def request_end(self, environment: Environment, members: Sequence[int], reason: str) -> None:
        """Request that the launchers of other hosts end stuck ranks, as numbered at the start. In any thread."""
        SignedEntries(environment.secret.encode(), connect_to_store()).put(STUCK, (members, reason))

    def is_lost(self, member: int) -> bool:
        """Return whether the other ranks continue without `member`, as numbered at the start. In any thread."""
        return self._membership is not None and self._membership.is_lost(member)

    def complete(self, collective: Callable[[], T], *, on_device: bool = False) -> T:
        while True:
            if completed := self.try_once(collective, on_device=on_device):
                return completed[0]

    def try_once(
        self, collective: Callable[[], T], *, on_device: bool, release: Callable[[], None] = lambda: None
    ) -> list[T]:
        """Run a collective. If a rank dies meanwhile, form a new group.

        Args:
            on_device: whether it exchanges tensors on this rank's device. NCCL returns before their results are there.
            release: called when it has failed, to release its messages: they keep connections to other ranks open.

        Returns:
            Its result, in a list; an empty one if the collective must be repeated.

        Raises:
            PeerFailed: the run cannot continue without the rank that has died.
        """
        membership = self._healing
        if membership is None or self._are_together:
            return [collective()]
        completed: list[T] = []
        try:
            with self._together():
                completed.append(collective())
            self._confirm(membership, on_device=on_device)
            return completed
        except NotHealed:
            raise
        except PeerFailed as error:
            reason = str(error)
        release()
        return completed if self._heal(membership, reason) else []

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Make the collectives in this block part of one: a death in them raises."""
        self._are_together = True
        try:
            yield
        finally:
            self._are_together = False

    def _confirm(self, membership: Membership, *, on_device: bool) -> None:
        """Return when the collective before this call is complete on all ranks. Raises PeerFailed if one has died."""
        if on_device and self._uses_nccl:
            communicate(torch.cuda.current_stream(self.device).synchronize)
            membership.check_connected()
        self._gather_number_now(1)
        membership.complete()

    def _heal(self, membership: Membership, reason: str) -> bool:
        """Form a new group of the survivors, after a collective, or the confirmation after it, has failed.

        Args:
            reason: its error.

        Returns:
            True to keep the collective's result, which this rank has, and which another one may have used; False to
            repeat the collective.
        """
        began_s = time.monotonic()
        before = membership.members
        try:
            positions = self._regroup(membership, reason)
        except LeftOver as error:
            self._end(error)
        counts = is_settled(membership.position, positions)
        if counts:
            membership.complete()
        self._notify(Change(before, membership.members, began_s))
        return counts

    def _regroup(self, membership: Membership, reason: str) -> list[int]:
        """Join the members of the newest generation, and return the positions of all. `reason`: as for `advance`."""
        while True:
            membership.leave(self._leave)
            membership.advance(reason)
            with suppress(RuntimeError), self._together():  # a further rank has died
                self._join(membership)
                return self.gather_number(membership.position)

    # --- the process group ------------------------------------------------------------------------------------

    def _break_connections(self) -> None:
        """Let the waits for other ranks end: gloo's raise, and NCCL's leave a wrong result. In any thread."""
        break_gloo_connections()
        if self.waiter is not None:
            self.waiter.give_up()
        if self._uses_nccl:
            abort_nccl()

    def _leave(self) -> None:
        """Leave the process group, which ends the waits of other ranks for this one."""
        super().close()
        self.waiter = None if self._uses_nccl else Waiter()
        if self._uses_nccl:
            abort_nccl()  # to destroy the group would wait for ranks that are gone
        close_group()

    def _join(self, membership: Membership) -> None:
        self.set_place(membership.rank, len(membership.members))
        if self.world_size == 1:
            return
        open_process_group(
            NCCL if self._uses_nccl else "gloo",
            GENERATION_S,
            store=membership.open_store(),
            rank=self.rank,
            world_size=self.world_size,
        )
        self.local_sockets = connect(self, check=membership.check_newest)

    def close(self) -> None:
        super().close()
        if self._watch is not None:
            self._watch.close()

    def forget(self) -> None:
        # Another rank notices the end of this one when no process has its connections open any more.
        if self.local_sockets is not None:
            self.local_sockets.close()
        release_connections()

    def open_lasting_entries(self) -> SignedEntries:
        """Open a connection for signed entries of the process group's store. One rank has a store of its own.

        If ranks can continue after a death, the entries stay when they form a new group.
        """
        if self.world_size == 1:
            return SignedEntries(self._key, dist.HashStore())  # type: ignore[attr-defined]
        if self._membership is not None:
            return SignedEntries(self._key, connect_to_store())
        return SignedEntries(self._key, dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]  # noqa: SLF001


# --- the opening ------------------------------------------------------------------------------------------------------


def describe_script() -> dict[str, Any]:
    """Return the file of the script, the start of its sha256, and its arguments; {} for code in no file.

    Returns:
        {"file": "train.py", "sha256": "9f86d081884c7d65", "arguments": ["--lr", "0.1"]}
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError):
        if file is not None:
            sha256 = hash_bytes(read_bytes(Path(file), is_given=True))[:16]
            return {"file": Path(file).name, "sha256": sha256, "arguments": sys.argv[1:]}
    return {}


def describe_software() -> dict[str, str]:
    """Describe what must be the same on all ranks."""
    return {
        "samestep": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "script": describe_script().get("sha256", ""),
    }


def find_ranks() -> Environment:
    """Read the environment. The rank and the number of ranks are those of the process group, if there is one.

    If only the process group defines them, local ranks are counted per machine. Raises Error as `read_environment`, or
    if a launcher has set other ranks than those of the group.
    """
    environment = replace(read_environment(), run_number=next(_run_numbers))
    check_ranks_unchanged()
    if not has_group():
        return environment
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    add_gloo()
    if (rank, world_size) == (environment.rank, environment.world_size):
        return environment
    if environment.world_size > 1:
        raise InvalidValue(
            f"this process is rank {rank} of {world_size} in its process group, and RANK is {environment.rank} and "
            f"WORLD_SIZE {environment.world_size}: create the process group with the launcher's ranks, or unset both",
            rank=rank,
            code="SS506",
        )
    hosts = Group(rank, world_size, torch.device("cpu")).gather_hosts()
    local_ranks = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    return replace(
        environment,
        rank=rank,
        world_size=world_size,
        local_rank=local_ranks.index(rank),
        local_world_size=len(local_ranks),
        launcher="torchrun" if environment.launcher == "python" else environment.launcher,
    )


def open_group(
    environment: Environment,
    device: torch.device,
    *,
    backend: str | None = None,
    compares: bool = True,
) -> Group:
    """Join the ranks, with gloo on CPU and NCCL (gloo for host tensors) on CUDA.

    With the backend gloo, tensors on GPUs are exchanged through host memory. A process group that the script has
    created is used as it is. If `compares`, all ranks must have the same script and versions. Raises Error if they
    differ, or not all ranks join.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" or backend == "gloo" else NCCL
    group = Group(environment.rank, environment.world_size, device, local_rank=environment.local_rank)
    hold(group)
    if environment.world_size > 1 and not dist.is_initialized():
        host, port = read_master()
        sentence = (
            f"rank {environment.rank} has waited {PATIENCE_S:.0f} s for all {environment.world_size} ranks to join at "
            f"{host}:{port}: check that each is started, and that rank 0 listens there"
        )
        with saying_when_slow(sentence, PATIENCE_S), _ended_by_ctrl_c():
            join_process_group(backend, environment)

    if group.world_size > 1:
        sentence = (
            f"rank {group.rank} has waited {PATIENCE_S:g} s in samestep.Run for the other ranks: create each Run on "
            "every rank, in the same order"
        )
        with saying_when_slow(sentence, PATIENCE_S), _ended_by_ctrl_c():
            group.derive_key(environment.secret.encode(), group.gather_bytes(secrets.token_bytes()))
            if compares:
                group.agree(describe_software())
            group.connect_locally()
    return group


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let SIGINT end this process at once: torch waits for other ranks without returning to Python's handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
