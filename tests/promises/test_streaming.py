"""Sources and streams: the same bits at any number of ranks and workers and after a kill, and their errors."""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import check, find_tests, read_bits, samestep_command
from support.selection import one_in
from support.shards import MAKERS, make_tars, read_x
from support.snapshots import read_snapshot
from support.tiny import Tiny, update
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import samestep
from samestep.cli import main
from samestep.hashing import hash_content
from samestep.snapshot.store import Store
from samestep.sources import WebDataset

NUM_EPOCHS, NUM_STEPS, DIES_AT = 3, 30, 23


class Stream(IterableDataset[Tensor]):
    """Divides its numbers as torch's workers do, in another order in each pass, and adds noise."""

    def __init__(self, length: int = 70, *, shift: Any = 0) -> None:
        self.length, self.shift, self.epoch = length, shift, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        yield from self.draw(info.id, info.num_workers, 0)

    def draw(self, lane: int, num_lanes: int, start: int) -> Iterator[Tensor]:
        numbers = [*range(lane, self.length, num_lanes)]
        random.Random(self.epoch).shuffle(numbers)
        for number in numbers[start:]:
            yield torch.tensor([float(number + self.shift), random.random() + float(torch.rand(()))])


class Whole(Stream):
    """Does not divide its data."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.draw(0, 1, 0)


class Uncopied(Stream):
    """Has a state that holds an open generator."""

    def state_dict(self) -> dict[str, Any]:
        return {"samples": (number for number in range(3))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class Stateful(Stream):
    """Has no way to read its samples again."""

    at = 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        for sample in self.draw(info.id, info.num_workers, self.at):
            self.at += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": np.int64(self.epoch).item(), "buffer": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(Stateful):
    """Its state is incomplete, as that of a shuffle buffer may be."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + 1


class Given:
    """Has a method `lane`, and cannot be copied."""

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError

    def lane(self, lane: int, num_lanes: int) -> Iterator[Tensor]:
        assert get_worker_info() is None
        return Stream().draw(lane, num_lanes, 0)


STREAMS: dict[str, Callable[[], Any]] = {"plain": Stream, "stateful": Stateful, "given": Given}


def train(
    run_dir: Path | None, data: Any, num_workers: int = 0, dies_at: int = -1, max_steps: int | None = None,
    deaths: Sequence[tuple[int, int]] = (), dying_rank: int = 0, **feed: Any,
) -> list[float]:  # fmt: skip
    """Trains on a source for some epochs, or on a stream for some steps. Returns the samples of the first 4 steps.

    Args:
        dies_at, dying_rank: the step after whose update a rank kills itself.
        deaths: step, and the rank that kills itself among its micro-batches.
    """
    used: list[float] = []

    def body(t: Tiny, batch: Any) -> None:
        if (t.step.number, int(os.environ["RANK"])) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        x = batch[:, :2].sum(1, dtype=torch.float32) if isinstance(batch, Tensor) else batch["x"]
        t.step.backward(t.model(x[:, None]).square().mean())
        used.extend(read_x(batch) if t.step.number < 4 else [])

    def then(t: Tiny) -> None:
        update(t)
        if (t.step.number, t.run.rank) == (dies_at, dying_rank):
            os.kill(os.getpid(), signal.SIGKILL)

    tiny = Tiny(
        run_dir, model=lambda: nn.Linear(1, 1), optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
        batch_size=12, snapshot_every=5, max_steps=max_steps,
    )  # fmt: skip
    length = {"num_epochs": NUM_EPOCHS} if hasattr(data, "__getitems__") else {"num_steps": NUM_STEPS}
    tiny.train(data=data, body=body, then=then, num_workers=num_workers, **length, **feed)
    return used


def load(kind: str, root: Path) -> Any:
    return STREAMS[kind]() if kind in STREAMS else MAKERS[kind](root)


@pytest.mark.parametrize("kind", one_in(2, ["webdataset", "plain", "stateful"]))
def test_the_same_bits_through_a_kill_at_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    data = load(kind, tmp_path / "data")
    dies_at = DIES_AT if kind in STREAMS else 4  # in the middle of an epoch of 3 steps
    samestep.spawn(train, 1, (tmp_path / "alone", data))
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 2, (tmp_path / "killed", data, 2, dies_at))
    samestep.spawn(train, 3, (tmp_path / "killed", load(kind, tmp_path / "data"), 1))
    assert read_bits(tmp_path / "killed") == read_bits(tmp_path / "alone")
    assert main(["inspect", str(tmp_path / "killed"), "--samples"]) == 0


# Three ranks, and an undisturbed run to compare with: 10 s, and 16 s on a busy machine.
@pytest.mark.parametrize(
    ("kind", "num_workers", "deaths", "dies_at", "num_steps"),
    [
        ("given", 0, [(3, 2), (23, 0)], -1, NUM_STEPS),  # before the first snapshot, and after a state at step 16
        ("plain", 2, [], 4, 5),  # directly before the ranks gather the positions for the only snapshot
        ("plain", 2, [(3, 2)], 17, 18),  # and for the last one
    ],
)
def test_the_others_continue_a_stream(
    kind: str, num_workers: int, deaths: Sequence[tuple[int, int]], dies_at: int, num_steps: int, tmp_path: Path
) -> None:
    """They read the lanes of a rank that has died from the newest snapshot on, and have the same positions."""
    samestep.spawn(train, 1, (tmp_path / "alone", load(kind, tmp_path), 0, -1, num_steps))
    call = f"train(Path('healed'), STREAMS[{kind!r}](), {num_workers}, {dies_at}, {num_steps}, {deaths}, 1)"
    (tmp_path / "script.py").write_text(f"from promises.test_streaming import *\n{call}\n")
    command = ["launch", "--heal", "--nproc-per-node", "3", "script.py"]
    check(samestep_command(*command, cwd=tmp_path, env={"PYTHONPATH": find_tests()}))
    assert len((tmp_path / "healed" / "heals.jsonl").read_text().splitlines()) == len(deaths) + (dies_at >= 0)
    assert read_bits(tmp_path / "healed") == read_bits(tmp_path / "alone")
    stores = [Store(tmp_path / name) for name in ("healed", "alone")]
    healed, alone = [read_snapshot(store, store.snapshots()[-1])["position"]["lanes"] for store in stores]
    assert hash_content(healed) == hash_content(alone)
    assert main(["inspect", str(tmp_path / "healed"), "--samples"]) == 0


def test_lanes_begin_again_when_they_end() -> None:
    """A lane of 3 samples gives 8 of them in 4 steps: those of two passes, and of a third."""
    found = np.array(samestep.spawn(train, 1, (None, Stream(18), 0, -1, 4))).reshape(4, 6, 2)
    for lane in range(6):
        expected = []
        for epoch in range(3):
            stream = Stream(18)
            stream.set_epoch(epoch)
            expected += [sample[0].item() for sample in stream.draw(lane, 6, 0)]
        assert found[:, lane].flatten().tolist() == expected[:8]


@pytest.mark.parametrize(("first", "then", "message"), [
    (Forgetful(600), Forgetful(600), r"sample 35 of lane 0 of 6 .*Forgetful.* such as a shuffle buffer"),
    (Stream(600), Stream(600, shift=1), r"sample 35 of lane 0 of 6 .* is not the same as before"),
])  # fmt: skip
def test_a_stream_with_other_samples(first: Stream, then: Stream, message: str, tmp_path: Path) -> None:
    samestep.spawn(train, 1, (tmp_path, first, 0, -1, 18))
    with pytest.raises(samestep.Error, match=message):
        samestep.spawn(train, 1, (tmp_path, then))


@pytest.mark.parametrize(
    ("data", "feed", "message"),
    [
        (Stream(5), {}, r"lane 5 of 6 of the stream \(Stream\) gave no sample: .*at least 6 shards"),
        (Stream(0), {}, "lane 0 of 6 of the stream"),
        (Uncopied(), {}, r"the stream failed in lane 0 of 6, at its sample 2 \(TypeError: cannot pickle 'generator'"),
        (Whole(), {}, r"several of the 6 lanes of Whole begin with the same samples: let __iter__ divide"),
        (Stream(), {"shuffle": True}, "a stream decides its order itself"),
        (Stream(shift="x"), {}, r"the stream failed in lane 0 of 6, at its sample 0 \(TypeError: .* at .*\.py:\d+\)"),
        (DataLoader(Stream(), batch_size=3), {}, "batch_size is 3, and the run's is 12, in micro-batches of 2"),
    ],
)
def test_what_a_stream_must_be(data: Any, feed: dict[str, Any], message: str) -> None:
    with pytest.raises(samestep.Error, match=message):
        samestep.spawn(train, 1, (None, data), feed)


def test_other_shards_than_those_of_the_run(tmp_path: Path) -> None:
    """A tar has lost a sample. Then it is missing."""
    samestep.spawn(train, 1, (tmp_path / "run", make_tars(tmp_path / "data"), 0, -1, 4))
    before = (tmp_path / "run" / "run.json").read_bytes()
    make_tars(tmp_path / "data", spare=2)
    for _ in range(2):
        with pytest.raises(samestep.Error, match=r"holds another run \(.*shards '?\w+'? there, '?\w+'? here"):
            samestep.spawn(train, 2, (tmp_path / "run", WebDataset(tmp_path / "data")))
        (tmp_path / "data" / "2.tar").unlink(missing_ok=True)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
