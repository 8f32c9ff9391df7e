"""A loop's plan, against a model that lists the positions of all epochs and cuts them one after the other."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.hashing import hash_short
from samestep.plan.ledger import combine
from samestep.plan.loop_plan import STREAM_LENGTH, LoopPlan
from samestep.plan.order import Order, build_order, check_order
from samestep.plan.tree import build_layout

SEED = 5
MicroBatch = list[tuple[int, int]]  # an epoch and a position of it, for each sample


@dataclass(frozen=True)
class Loop:
    """`num_epochs` epochs of `length` samples."""

    length: int
    num_epochs: int
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
        cuts = np.linspace(0, self.length, self.num_shards + 1).astype(int)
        return [] if self.has_sampler else np.diff(cuts).tolist()

    def find_order(self, epoch: int) -> Order:
        """The order of an epoch; with a sampler, of random samples."""
        if self.has_sampler:
            return check_order(np.random.default_rng(epoch).integers(0, 99, self.length), 99, epoch)
        return build_order(self.length, seed=SEED, epoch=epoch, shuffle=self.shuffle, shard_sizes=self.shard_sizes)

    @cached_property
    def orders(self) -> dict[int, list[int]]:
        """The samples of each epoch."""
        return {epoch: [*map(int, self.find_order(epoch)[0 : self.length])] for epoch in self.epochs}

    @property
    def epochs(self) -> range:
        return range(self.first_epoch, self.first_epoch + self.num_epochs)

    def build_plan(self) -> LoopPlan:
        return LoopPlan(
            **self.numbers, length=99 if self.has_sampler else self.length, is_endless=self.is_endless,
            shuffle=self.shuffle, drop_last=self.drop_last, shard_sizes=self.shard_sizes,
            find_order=self.find_order if self.has_sampler else None,
            epoch_length=self.length if self.has_sampler else None, first_step=self.first_step,
            first_epoch=self.first_epoch,
        )  # fmt: skip

    def list_steps(self) -> list[list[MicroBatch]]:
        """The micro-batches of all steps whose samples are known."""
        if self.is_endless:
            samples = [(epoch, p) for epoch in self.epochs for p in range(self.length)]
            steps = [*cut(samples, self.batch_size)]
            return [[*cut(step, self.micro_batch_size)] for step in steps if len(step) == self.batch_size]
        return [[*cut(step, self.micro_batch_size)] for steps in self.list_epochs() for step in steps]

    def list_epochs(self) -> list[list[MicroBatch]]:
        """The steps of each epoch, if the loop is not endless."""
        found = []
        for epoch in self.epochs:
            steps = [*cut([(epoch, p) for p in range(self.length)], self.batch_size)]
            found.append([step for step in steps if len(step) == self.batch_size or not self.drop_last])
        return found


def cut(samples: MicroBatch, size: int) -> Iterator[MicroBatch]:
    return (samples[at : at + size] for at in range(0, len(samples), size))


@st.composite
def loops(draw: st.DrawFn, **fixed: Any) -> Loop:
    has_sampler, is_endless, drop_last, shuffle = (draw(st.booleans()) for _ in range(4))
    is_endless = fixed.get("is_endless", is_endless)
    size, v = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    least = size * v if drop_last and not is_endless else 1
    length, num_epochs = draw(st.integers(least, least + 30)), draw(st.integers(1, 6))
    shards = draw(st.sampled_from([0, 3, 7]))
    first_step, first_epoch = draw(st.sampled_from([(0, 0), (7, 0), (9, 4)]))
    return Loop(
        length, num_epochs, has_sampler, size, v, is_endless, drop_last, shuffle, shards, first_step, first_epoch
    )


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
        assert [*plan.epochs_of(step)] == sorted({epoch for epoch, _ in join(expected)})
        samples = [read(loop, micro_batch) for micro_batch in expected]
        assert [plan.indices(span).tolist() for span in spans] == samples
        assert planned.samples.tolist() == read(loop, join(expected))
        assert planned.fingerprint == combine([hash_short(np.array(each).data) for each in samples])
        num_samples = {epoch: len(samples) for epoch, samples in planned.by_epoch.items()}
        assert num_samples == Counter(epoch for epoch, _ in join(expected))


@given(loops(is_endless=False))
def test_epochs(loop: Loop) -> None:
    plan, end = loop.build_plan(), loop.first_step
    assert plan.epochs_done(end) == loop.first_epoch
    for epoch, steps in enumerate(loop.list_epochs(), loop.first_epoch):
        assert plan.next_epoch(end) == epoch
        assert plan.steps_per_epoch == len(steps)
        for step in range(end + 1, end + len(steps)):
            assert plan.epochs_done(step) is None
            assert plan.next_epoch(step) == epoch + 1
            assert plan.epoch_of(step) == epoch
        end += len(steps)
        assert plan.num_steps_within(epoch) == plan.num_steps_until(epoch) == end
        assert plan.epochs_done(end) == epoch + 1
        assert plan.num_dropped == loop.length - sum(map(len, steps))
    assert plan.plan_end(loop.num_epochs) == end


@given(loops(is_endless=True))
def test_endless_loops(loop: Loop) -> None:
    plan = loop.build_plan()
    assert plan.next_epoch(loop.first_step) == loop.first_epoch
    for step, expected in enumerate(loop.list_steps(), loop.first_step):
        assert plan.epochs_done(step) is None
        assert plan.next_epoch(step + 1) == expected[-1][-1][0] + 1
    assert plan.num_dropped == 0
    assert plan.plan_end(8) == loop.first_step + 8
    lasts = [step[-1][-1][0] for step in loop.list_steps()]
    for epoch in loop.epochs:
        assert plan.num_steps_within(epoch) == loop.first_step + sum(last <= epoch for last in lasts)
        done = (epoch + 1 - loop.first_epoch) * loop.length
        assert plan.num_steps_until(epoch) == loop.first_step - (-done // loop.batch_size)


@given(st.integers(1, 30), st.integers(0, 40), st.integers(1, 6))
def test_a_lane_stays_in_one_worker(num_lanes: int, most: int, world_size: int) -> None:
    """Workers take turns with a rank's micro-batches."""
    plan = LoopPlan(
        length=STREAM_LENGTH, batch_size=2 * num_lanes, micro_batch_size=2, seed=0, is_endless=True, is_stream=True
    )
    for held in build_layout(num_lanes, world_size).ranges:
        if not held:
            continue
        count = plan.count_workers(most, len(held))
        assert count <= most
        assert bool(count) == bool(most)
        workers = [number % count for number in range(3 * len(held))] if count else []
        assert workers[: len(held)] == workers[len(held) : 2 * len(held)] == workers[2 * len(held) :]
    indexed = LoopPlan(length=9, batch_size=2 * num_lanes, micro_batch_size=2, seed=0)
    assert indexed.count_workers(most, 1) == most


@settings(max_examples=20)
@given(st.integers(10**8, 10**9), st.sampled_from([0, 1000]))
def test_large_data_sets_are_planned_in_place(length: int, num_shards: int) -> None:
    """A step in the middle of an epoch needs neither the earlier steps nor the whole order."""
    sizes = [length // num_shards] * (num_shards - 1) if num_shards else []
    sizes += [length - sum(sizes)] if num_shards else []
    plan = LoopPlan(length=length, batch_size=256, micro_batch_size=64, seed=1, shard_sizes=sizes)
    step = plan.steps_per_epoch // 2
    samples = plan.plan_step(step).samples
    assert len({*samples.tolist()}) == 256
    order = build_order(length, seed=1, epoch=0, shard_sizes=sizes)
    assert samples.tolist() == order[step * 256 : step * 256 + 256].tolist()
