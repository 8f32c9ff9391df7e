"""A loop's plan, against a model that lists the positions of all epochs and cuts them one after the other."""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep.plan
from samestep.errors import InvalidValue
from samestep.plan.ledger import combine, fingerprint
from samestep.plan.loop_plan import STREAM_LENGTH, LoopPlan
from samestep.plan.order import GivenOrder, Order, build_order
from samestep.plan.tree import Layout, build_layout

SEED = 5
FAR = 10**6  # later than every step
MicroBatch = list[tuple[int, int]]  # an epoch and a position of it, for each sample


@dataclass(frozen=True)
class Loop:
    """Epochs of given lengths. Without a sampler, all have the same length."""

    lengths: list[int]
    has_sampler: bool
    micro_batch_size: int
    num_micro_batches: int
    is_endless: bool
    drop_last: bool
    shuffle: bool
    num_shards: int
    first_step: int
    first_epoch: int

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of the run."""
        return {"seed": SEED, "batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size}

    @property
    def shard_sizes(self) -> list[int]:
        cuts = np.linspace(0, self.lengths[0], self.num_shards + 1).astype(int)
        return [] if self.has_sampler else np.diff(cuts).tolist()

    def find_order(self, epoch: int) -> Order:
        """The order of an epoch; with a sampler, of random samples."""
        length = self.lengths[epoch - self.first_epoch]
        if self.has_sampler:
            return GivenOrder(np.random.default_rng(epoch).integers(0, 99, length), 99, epoch)
        return build_order(length, seed=SEED, epoch=epoch, shuffle=self.shuffle, shard_sizes=self.shard_sizes)

    @cached_property
    def orders(self) -> dict[int, list[int]]:
        """The samples of each epoch."""
        epochs = range(self.first_epoch, self.first_epoch + len(self.lengths))
        return {
            epoch: self.find_order(epoch).take(0, self.lengths[epoch - self.first_epoch]).tolist() for epoch in epochs
        }

    def build_plan(self, find_order: Callable[[int], Order] | None = None) -> LoopPlan:
        return LoopPlan(
            **self.numbers, length=99 if self.has_sampler else self.lengths[0], is_endless=self.is_endless,
            shuffle=self.shuffle, drop_last=self.drop_last, shard_sizes=self.shard_sizes,
            find_order=(find_order or self.find_order) if self.has_sampler else None, first_step=self.first_step,
            first_epoch=self.first_epoch,
        )  # fmt: skip

    def list_steps(self) -> list[list[MicroBatch]]:
        """The micro-batches of all steps whose samples are known."""
        epochs = [[(epoch, p) for p in range(n)] for epoch, n in enumerate(self.lengths, self.first_epoch)]
        if self.is_endless:
            samples = [sample for epoch in epochs for sample in epoch]
            steps = [*cut(samples, self.batch_size)]
            return [[*cut(step, self.micro_batch_size)] for step in steps if len(step) == self.batch_size]
        return [[*cut(step, self.micro_batch_size)] for steps in self.list_epochs() for step in steps]

    def list_epochs(self) -> list[list[MicroBatch]]:
        """The steps of each epoch, if the loop is not endless."""
        found = []
        for epoch, length in enumerate(self.lengths, self.first_epoch):
            steps = [*cut([(epoch, p) for p in range(length)], self.batch_size)]
            found.append([step for step in steps if len(step) == self.batch_size or not self.drop_last])
        return found


def cut(samples: MicroBatch, size: int) -> Iterator[MicroBatch]:
    return (samples[at : at + size] for at in range(0, len(samples), size))


@st.composite
def loops(draw: st.DrawFn, **fixed: Any) -> Loop:
    has_sampler, is_endless, drop_last, shuffle = (draw(st.booleans()) for _ in range(4))
    has_sampler, is_endless = fixed.get("has_sampler", has_sampler), fixed.get("is_endless", is_endless)
    size, v = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    least = size * v if drop_last and not is_endless else 1
    length = st.integers(least, least + 30)
    lengths = (
        draw(st.lists(length, min_size=1, max_size=6)) if has_sampler else [draw(length)] * draw(st.integers(1, 6))
    )
    shards = draw(st.sampled_from([0, 3, 7]))
    first_step, first_epoch = draw(st.sampled_from([(0, 0), (7, 0), (9, 4)]))
    return Loop(lengths, has_sampler, size, v, is_endless, drop_last, shuffle, shards, first_step, first_epoch)


def read(loop: Loop, positions: MicroBatch) -> list[int]:
    """The samples at positions of the model."""
    return [loop.orders[epoch][p] for epoch, p in positions]


def join(step: list[MicroBatch]) -> MicroBatch:
    return [*chain.from_iterable(step)]


@given(loops())
def test_steps(loop: Loop) -> None:
    plan = loop.build_plan()
    for step, expected in enumerate(loop.list_steps(), loop.first_step):
        planned = plan.plan_step(step)
        spans = plan.micro_batches(step)
        assert [stop - start for start, stop in spans] == [*map(len, expected)]
        assert plan.epoch_of(step) == expected[0][0][0]
        samples = [read(loop, micro_batch) for micro_batch in expected]
        assert [plan.indices(step, span).tolist() for span in spans] == samples
        assert planned.samples.tolist() == read(loop, join(expected))
        assert planned.fingerprint == combine([fingerprint(np.array(each)) for each in samples])
        assert [epoch for epoch, piece in planned.pieces for _ in piece] == [epoch for epoch, _ in join(expected)]


@given(loops(is_endless=False))
def test_epochs(loop: Loop) -> None:
    plan, end = loop.build_plan(), loop.first_step
    assert plan.epochs_done(end) == loop.first_epoch
    for epoch, steps in enumerate(loop.list_epochs(), loop.first_epoch):
        assert plan.next_epoch(end) == epoch
        plan.open_epochs(end)
        assert plan.count_steps(epoch) == len(steps)
        for step in range(end + 1, end + len(steps)):
            assert plan.epochs_done(step) is None
            assert plan.next_epoch(step) == epoch + 1
            assert plan.epoch_of(step) == epoch
        end += len(steps)
        assert plan.end_of(epoch) == plan.num_steps_until(epoch) == end
        assert plan.epochs_done(end) == epoch + 1
        assert plan.count_dropped(epoch) == loop.lengths[epoch - loop.first_epoch] - sum(map(len, steps))
    planned = plan.plan_end(len(loop.lengths))
    assert plan.find_end(planned) == plan.find_known_end(end) == end
    assert planned == (loop.first_epoch + len(loop.lengths) if loop.has_sampler else end)
    assert plan.unit == ("epoch" if loop.has_sampler else "step")


@given(loops(is_endless=True))
def test_endless_loops(loop: Loop) -> None:
    plan = loop.build_plan()
    assert plan.next_epoch(loop.first_step) == loop.first_epoch
    for step, expected in enumerate(loop.list_steps(), loop.first_step):
        plan.open_epochs(step)
        assert plan.epochs_done(step) is None
        assert plan.count_dropped(expected[0][0][0]) == 0
        if not loop.has_sampler:
            last = expected[-1][-1]
            assert plan.next_epoch(step + 1) == last[0] + 1
    assert plan.find_end(plan.plan_end(8)) == plan.plan_end(8) == loop.first_step + 8
    done = 0
    for epoch, length in enumerate(loop.lengths, loop.first_epoch):
        done += length
        if -(-done // loop.batch_size) <= len(loop.list_steps()):
            assert plan.num_steps_until(epoch) == loop.first_step - (-done // loop.batch_size)


@given(loops())
def test_uses_of_samples(loop: Loop) -> None:
    """An epoch of complete steps uses each sample as often as the plan counts."""
    plan = loop.build_plan()
    used: dict[int, list[int]] = {}
    for step in range(loop.first_step, loop.first_step + len(loop.list_steps())):
        for epoch, samples in plan.plan_step(step).pieces:
            used.setdefault(epoch, []).extend(samples.tolist())
    for epoch, length in enumerate(loop.lengths, loop.first_epoch):
        if len(used.get(epoch, [])) == length:
            counts = np.bincount(used[epoch], minlength=len(plan.count_uses(epoch)))
            assert counts.tolist() == plan.count_uses(epoch).tolist()


@given(loops(has_sampler=True), st.data())
def test_a_sampler_is_asked_for_what_the_next_step_needs(loop: Loop, data: st.DataObject) -> None:
    asked: list[int] = []

    @lru_cache
    def find_order(epoch: int) -> Order:
        asked.append(epoch)
        return loop.find_order(epoch)

    plan, steps = loop.build_plan(find_order), loop.list_steps()
    assert plan.find_known_end(FAR) == loop.first_step
    assert plan.find_end(plan.plan_end(3)) in (None, loop.first_step + 3)
    for step, expected in enumerate(steps, loop.first_step):
        plan.open_epochs(step)
        assert asked == [*range(loop.first_epoch, expected[-1][-1][0] + 1)]
        assert step < plan.find_known_end(FAR) <= loop.first_step + len(steps)
        assert plan.find_known_end(step) == step
    # A resume in any place continues with the same steps, and with the order that is open there.
    steps_done = data.draw(st.integers(0, len(steps)))
    plan = loop.build_plan()
    for step in range(loop.first_step, loop.first_step + steps_done):
        plan.open_epochs(step)
    done = loop.first_step + steps_done
    asked.clear()
    find_order.cache_clear()
    resumed = loop.build_plan(find_order)
    if (found := plan.find_open(done)) is None:
        resumed.resume(done, plan.epoch_of(done))
        assert asked == []
    else:
        resumed.resume(done, *found)
        assert asked == [found[0]]
        assert resumed.find_open(done) == found
    for step, expected in islice(enumerate(steps, loop.first_step), steps_done, None):
        assert resumed.plan_step(step).samples.tolist() == read(loop, join(expected))
        assert resumed.epoch_of(step) == expected[0][0][0]
        assert resumed.micro_batches(step) == loop_spans(loop, step)


def loop_spans(loop: Loop, step: int) -> tuple[tuple[int, int], ...]:
    plan = loop.build_plan()
    for each in range(loop.first_step, step + 1):
        plan.open_epochs(each)
    return plan.micro_batches(step)


def share(world_size: int) -> Callable[[int], Layout]:
    return partial(build_layout, world_size=world_size)


@given(loops(), st.integers(1, 6))
def test_the_ranks_load_each_micro_batch_once(loop: Loop, world_size: int) -> None:
    plan, end = loop.build_plan(), loop.first_step + len(loop.list_steps())
    for step in range(loop.first_step, end):
        plan.open_epochs(step)
    by_rank = [[*plan.tasks(loop.first_step, end, rank=r, layout=share(world_size))] for r in range(world_size)]
    alone = [*plan.tasks(loop.first_step, end, rank=0, layout=share(1))]
    assert len({task.seed for task in alone}) == len(alone)
    loaded = [iter(tasks) for tasks in by_rank]
    expected = iter(alone)
    for step in range(loop.first_step, end):
        for held, tasks in zip(build_layout(len(plan.micro_batches(step)), world_size).ranges, loaded, strict=True):
            for v in held:
                task, other = next(tasks), next(expected)
                assert (task.indices.tolist(), task.seed) == (other.indices.tolist(), other.seed)
                assert task.seed == plan.task(step, v).seed


@given(loops(), st.integers(1, 4))
def test_borrowed_micro_batches_come_first(loop: Loop, world_size: int) -> None:
    plan, step = loop.build_plan(), loop.first_step
    if not loop.list_steps():
        return
    plan.open_epochs(step)

    def borrow(number: int, num_micro_batches: int) -> list[int]:
        assert (number, num_micro_batches) == (step, len(plan.micro_batches(step)))
        return [num_micro_batches - 1]

    for rank, held in enumerate(build_layout(len(plan.micro_batches(step)), world_size).ranges):
        tasks = [*plan.tasks(step, step + 1, rank=rank, layout=share(world_size), borrow=borrow)]
        assert [task.seed for task in tasks] == [
            plan.task(step, v).seed for v in (len(plan.micro_batches(step)) - 1, *held)
        ]


@given(st.integers(1, 30), st.integers(0, 40), st.integers(1, 6))
def test_a_lane_stays_in_one_worker(num_lanes: int, most: int, world_size: int) -> None:
    """Workers take turns with a rank's micro-batches."""
    plan = LoopPlan(
        length=STREAM_LENGTH, batch_size=2 * num_lanes, micro_batch_size=2, seed=0, is_endless=True, is_stream=True
    )
    for rank, held in enumerate(build_layout(num_lanes, world_size).ranges):
        if not held:
            continue
        count = plan.count_workers(most, rank=rank, world_size=world_size)
        assert count <= most
        assert bool(count) == bool(most)
        workers = [number % count for number in range(3 * len(held))] if count else []
        assert workers[: len(held)] == workers[len(held) : 2 * len(held)] == workers[2 * len(held) :]
    indexed = LoopPlan(length=9, batch_size=2 * num_lanes, micro_batch_size=2, seed=0)
    assert indexed.count_workers(most, rank=0, world_size=world_size) == most


@given(loops())
def test_a_recorded_loop_has_the_same_plan(loop: Loop) -> None:
    plan = loop.build_plan()
    start = {"first_step": loop.first_step, "first_epoch": loop.first_epoch}
    sizes = {"shard_sizes": loop.shard_sizes, "find_order": loop.find_order}
    again = LoopPlan.from_numbers(loop.numbers | plan.numbers | start, **sizes)  # type: ignore[arg-type]
    assert again.numbers == plan.numbers
    for step in range(loop.first_step, loop.first_step + len(loop.list_steps())):
        assert again.plan_step(step).fingerprint == plan.plan_step(step).fingerprint
        assert again.epoch_of(step) == plan.epoch_of(step)
    with pytest.raises(KeyError, match="data_length"):
        LoopPlan.from_numbers(loop.numbers)


def test_the_numbers_of_a_stream() -> None:
    plan = LoopPlan(
        length=STREAM_LENGTH, batch_size=8, micro_batch_size=2, seed=0, is_endless=True, shuffle=False, is_stream=True
    )
    assert plan.numbers == {
        "num_lanes": 4, "data_length": STREAM_LENGTH, "mode": "steps", "shuffle": False, "drop_last": False,
        "sampler": "default",
    }  # fmt: skip
    assert LoopPlan.from_numbers(plan.numbers | {"seed": 0, "batch_size": 8, "micro_batch_size": 2}).is_stream
    assert plan.indices(10**9, plan.micro_batches(10**9)[3]).tolist() == [8 * 10**9 + 6, 8 * 10**9 + 7]


def test_sizes_that_do_not_fit_are_refused_at_once() -> None:
    for wrong in ({"length": 0}, {"micro_batch_size": 3}, {"length": 3, "drop_last": True}):
        with pytest.raises(InvalidValue):
            LoopPlan(**{"length": 9, "batch_size": 4, "micro_batch_size": 2, "seed": 0} | wrong)  # type: ignore[arg-type]


@settings(max_examples=20)
@given(st.integers(10**8, 10**9), st.sampled_from([0, 1000]))
def test_large_data_sets_are_planned_in_place(length: int, num_shards: int) -> None:
    """A step in the middle of an epoch needs neither the earlier steps nor the whole order."""
    sizes = [length // num_shards] * (num_shards - 1) if num_shards else []
    sizes += [length - sum(sizes)] if num_shards else []
    plan = LoopPlan(length=length, batch_size=256, micro_batch_size=64, seed=1, shard_sizes=sizes)
    step = plan.count_steps(0) // 2
    samples = plan.plan_step(step).samples
    assert len({*samples.tolist()}) == 256
    order = build_order(length, seed=1, epoch=0, shard_sizes=sizes)
    assert samples.tolist() == order.take(step * 256, step * 256 + 256).tolist()


def test_the_plan_does_no_input_and_output() -> None:
    """Modules of plan/ import nothing that reads or writes, only the rest of plan/, numpy and what computes."""
    allowed = {"samestep.errors", "samestep.hashing", "samestep.plan", "numpy"}
    pure = {"bisect", "collections", "dataclasses", "functools", "itertools", "math", "numbers", "struct",
            "typing"}  # fmt: skip
    assert pure <= sys.stdlib_module_names
    for path in Path(samestep.plan.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                first = name.split(".")[0]
                assert first in pure or any(name == each or name.startswith(f"{each}.") for each in allowed), (
                    f"{path.name} imports {name}"
                )
