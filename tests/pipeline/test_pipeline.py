"""A run with a pipeline has the same bits for each map of its stages to ranks."""

import copy
import functools
import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline.piped import CASES, Mlp, TiedGpt, build_in, open_run, train_on
from support.runs import read_bits
from support.selection import one_in
from support.tiny import Pairs, Tiny
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep.engine.ownership import StageOwnership
from samestep.world.group import Group

MAPS = [(1, 2), (2, 1), (1, 4), (2, 2), (3, 2), (1, 3), (4, 1)]  # pipelines, ranks of each
QUICK = {
    ("mlp", (3, 2)), ("stochastic", (1, 4)), ("gpt", (2, 2)), ("tied", (1, 3)), ("resnet", (1, 4)),
}  # fmt: skip


@functools.cache
def run_alone(kind: str, **options: Any) -> dict[str, Any]:
    return train_on(1, 1, kind, **options)


@pytest.mark.parametrize(("kind", "ranks"), [
    pytest.param(kind, ranks, marks=[] if (kind, ranks) in QUICK else pytest.mark.soak)
    for kind in CASES for ranks in MAPS
])  # fmt: skip
def test_same_bits(kind: str, ranks: tuple[int, int]) -> None:
    assert train_on(*ranks, kind) == run_alone(kind)


def update_blocks(params: Any) -> torch.optim.Optimizer:
    """An optimizer without the embeddings, one of which is the weight of the head, too."""
    return torch.optim.AdamW([*params][2:], lr=0.01)


@pytest.mark.parametrize("options", [
    pytest.param({"clips": True, "kind": "tied"}, marks=pytest.mark.soak),
    pytest.param({"clips": True, "kind": "tied", "optimizer": update_blocks}, id="the tied weight is not updated"),
    {"is_weighted": True},
    {"optimizer": functools.partial(torch.optim.Adagrad, lr=0.01)},
    {"averages": True, "kind": "tied", "in_sharded_init": True},
    {"averages": True, "kind": "resnet", "shard": "optimizer"},
    {"precision": "bf16"},
    pytest.param({"precision": "fp16"}, marks=pytest.mark.soak),
    pytest.param({"exchange_dtype": "bf16"}, marks=pytest.mark.soak),
], ids=str)  # fmt: skip
def test_same_bits_with(options: dict[str, Any]) -> None:
    given = {"kind": "mlp"} | options
    expected = train_on(1, 1, **given)
    assert expected != run_alone(given["kind"])
    assert train_on(2, 2, **given) == expected


@pytest.mark.parametrize(("options", "ranks"), one_in(7, itertools.product(
    [
        {"kind": "tied", "clips": True},
        {"kind": "resnet", "optimizer": functools.partial(torch.optim.Adagrad, lr=0.01)},
        {"kind": "mlp", "is_weighted": True},
        {"kind": "gpt", "precision": "fp16"},
    ],
    [(2, 2), (1, 2), (2, 1), (3, 2)],
)), ids=str)  # fmt: skip
def test_same_bits_with_divided_state(options: dict[str, Any], ranks: tuple[int, int]) -> None:
    assert train_on(*ranks, **options, shard="optimizer") == train_on(1, 1, **options)


@pytest.mark.parametrize(("kind", "starts"), [
    ("resnet", [(1, 2, None), (2, 1, "optimizer"), (2, 2, None)]),
    pytest.param("mlp", [(2, 2, "optimizer"), (1, 2, "optimizer"), (3, 2, "optimizer")], marks=pytest.mark.soak),
    ("tied", [(1, 1, None), (2, 1, "optimizer"), (1, 3, None)]),
])  # fmt: skip
def test_resumed_on_other_ranks(kind: str, starts: list[tuple[int, int, str | None]], tmp_path: Path) -> None:
    """A run that is stopped in each epoch, with other ranks each time, has the bits of one that was not stopped."""
    for (num_replicas, num_ranks, shard), max_steps in zip(starts, (1, 3, None), strict=True):
        options = {"shard": shard, "max_steps": max_steps, "averages": True}
        found = train_on(num_replicas, num_ranks, kind, tmp_path / "parts", **options)
    assert found["state"] == train_on(1, 1, kind, tmp_path / "whole", averages=True)["state"]
    assert read_bits(tmp_path / "parts") == read_bits(tmp_path / "whole")


def test_without_pipeline_a_function_is_as_good_as_a_loop(tmp_path: Path) -> None:
    def weigh(batch: tuple[Tensor, Tensor]) -> float:
        return float(batch[0].sum().abs())

    def take(t: Tiny, x: Tensor, y: Tensor) -> None:
        t.step.backward(F.mse_loss(t.model(x), y), weight=weigh((x, y)))

    Tiny(tmp_path / "loop").train(body=take)
    t = Tiny(tmp_path / "function")
    for epoch in t.run.epochs(Pairs(), 2):
        for step in epoch:
            step.run(lambda batch: F.mse_loss(t.model(batch[0]), batch[1]), weight=weigh)
            t.optimizer.step()
    assert read_bits(tmp_path / "function") == read_bits(tmp_path / "loop")


def test_restored_on_several_ranks(tmp_path: Path) -> None:
    def recall(num_ranks: int) -> Any:
        run = open_run(tmp_path / str(num_ranks), batch_size=4, pipeline=2)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model=model, optimizer=optimizer, stages=["1"])
        for step in run.steps(torch.ones(8, 1), 3):
            step.run(lambda x: model(x).square().mean())
            optimizer.step()
            if step.number == 1:
                run.snapshot("second")
        run.restore("second")
        return run.evaluate(lambda x: {"mean": model(x).mean()}, torch.ones(4, 1))

    assert samestep.spawn(recall, 2, (2,)) == samestep.spawn(recall, 1, (1,))


def test_a_copy_of_the_model_is_a_plain_model() -> None:
    run = open_run()
    model = TiedGpt()
    run.prepare(model=model, optimizer=torch.optim.SGD(model.parameters()), stages=CASES["tied"][2])
    texts = torch.zeros(2, 6, dtype=torch.int64)
    assert torch.equal(copy.deepcopy(model).eval()(texts), model.eval()(texts))


def train_and_flip(run_dir: Path, rank: int, compare_every: int) -> None:
    """Train a model whose last stage has no parameters. After step 3, a bit flips on a rank."""
    run = open_run(run_dir, batch_size=4, pipeline=2, compare_every=compare_every, snapshot_every=5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model=model, optimizer=optimizer, stages=["2"])
    for step in run.steps(torch.ones(8, 1), 10):
        step.run(lambda x: model(x).square().mean())
        optimizer.step()
        if (run.rank, step.number) == (rank, 2):
            model[1].weight.detach().view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize(("compare_every", "found_at"), [(2, 4), (100, 5)])
def test_a_flipped_bit_is_found(compare_every: int, found_at: int, tmp_path: Path) -> None:
    """In the comparison of ranks with the same stages, also of that before a snapshot."""
    with pytest.raises(samestep.Error, match=rf"rank 0 .* and rank 2 .* after step {found_at}, .* model.1.weight"):
        samestep.spawn(
            train_and_flip, 4, (tmp_path / "run", 2, compare_every), env={"SAMESTEP_PIPELINE_RANKS": "2"}
        )  # fmt: skip


# --- memory -----------------------------------------------------------------------------------------------------------


def train_within(limit: int) -> float:
    """Train a model of 64 MiB with so many mebibytes more than before it is built. Returns the loss."""
    run: Any = samestep.Run(None, batch_size=4, micro_batch_size=1, pipeline=4, device="cpu")
    used = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    allowed = (int(used) << 10) + (limit << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    with run.sharded_init():
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model=model, optimizer=optimizer, stages=["4", "8", "12"])
    for step in run.steps(torch.ones(4, 1024), 1):
        step.run(lambda x: model(x).square().mean())
        optimizer.step()
    return float(step.loss)


def test_a_model_that_does_not_fit_one_rank() -> None:
    """With gradients and their partial sums, it needs 290 MiB on one rank. On 4, it needs 155 MiB, most for threads."""
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        samestep.spawn(train_within, 1, (220,))
    assert samestep.spawn(train_within, 4, (220,)) == samestep.spawn(train_within, 1, (500,))


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers that this rank has."""
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if not each.is_meta)


def measure(in_sharded_init: bool, shard: str | None = None) -> list[tuple[int, int, int]]:
    """Return per rank: the bytes of the parameters and buffers, of the optimizer's state, and of gradients."""
    run = open_run(batch_size=4, shard=shard)
    model = build_in(run, Mlp, in_sharded_init=in_sharded_init)
    average = AveragedModel(model)
    average.n_averaged += run.rank
    optimizer = torch.optim.Adam(model.parameters())
    run.prepare(model=model, average=average, optimizer=optimizer, stages=CASES["mlp"][2])
    assert average.n_averaged == 0  # as on rank 0
    assert count_bytes(average.module) == count_bytes(model)
    for step in run.steps(torch.ones(4, 8), 1):
        step.run(lambda x: model(x).square().mean())
        optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    own = count_bytes(model), sum(each.nbytes for each in states), sum(each.nbytes for each in grads)
    return run._context.group.gather(own)  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_sharded_init", [False, True])
def test_a_rank_holds_its_stages_only(in_sharded_init: bool) -> None:
    model = Mlp()
    parts = [[model.first, model.blocks[0]], [model.blocks[1]], [model.blocks[2], model.blocks[3]], [model.last]]
    sizes = [sum(count_bytes(each) for each in part) for part in parts]
    found = samestep.spawn(measure, 4, (in_sharded_init,))
    assert [own for own, _, _ in found] == sizes
    for own, states, grads in found:
        assert 0 < grads <= own
        assert states <= 2 * own + 100  # with the number of updates of each


def test_ranks_with_the_same_stages_divide_their_state() -> None:
    alike = samestep.spawn(measure, 2, (False,))
    divided = samestep.spawn(measure, 4, (False, "optimizer"), env={"SAMESTEP_PIPELINE_RANKS": "2"})
    for (own, states, grads), *peers in zip(alike, divided[:2], divided[2:], strict=True):
        assert [each for each, _, _ in peers] == [own, own]
        for whole, parts in zip((states, grads), [*zip(*peers, strict=True)][1:], strict=True):
            assert sum(parts) == whole
            assert max(parts) < 0.6 * whole


def test_each_stage_is_divided_evenly() -> None:
    """Four ranks, of which two hold the first two parameters, and two the others."""
    group = Group(0, 4, torch.device("cpu"))
    group.divide(2)
    params = [nn.Parameter(torch.empty(size)) for size in (40, 10, 30, 20)]
    ownership = StageOwnership(group, dict(zip(params, (0, 0, 1, 1), strict=True)), divides=True)
    assert ownership.assign(params) == [(0,), (1,), (0,), (1,)]
