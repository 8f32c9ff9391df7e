"""A run whose optimizers or models are divided among the ranks gives the bits of a run on one rank, also through
crashes, and needs the memory that `samestep scale` computes. What cannot be divided is refused.
"""

import errno
import functools
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed.checkpoint
from promises.loops import build_pairs, sgd_momentum, trace_run
from promises.test_mistakes import Wrapper
from promises.test_same_bits import run_alone
from promises.trial import Trial, Undisturbed, fail
from support.runs import digest
from support.selection import one_in
from support.snapshots import list_steps
from support.tiny import Tiny, learn, tiny_run, update
from support.trace import assert_same
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Adagrad, AdamW
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep.plan.shards import ParamSize, RankMemory, compute_memory
from samestep.snapshot.manifest import name_part
from samestep.snapshot.store import Store
from samestep.torch_internals import get_local
from samestep.train.interception import measure_sizes
from samestep.train.objects import Objects
from samestep.watch.records import read_status

DIVIDED = {"SAMESTEP_SHARD": "optimizer"}
SHARDED = {"SAMESTEP_SHARD": "fsdp2"}


@pytest.mark.parametrize(("first", "fault", "then"), one_in(2, [
    (DIVIDED, "kill rank 0 at step 10 in committing", SHARDED),
    (SHARDED, "raise rank 2 at step 12 in forward", {}),
]))  # fmt: skip
def test_resumed_with_another_sharding(
    trial: Trial, undisturbed: Undisturbed, first: dict[str, str], fault: str, then: dict[str, str]
) -> None:
    """On 3 ranks with one sharding, then on 2 with another one, then on 4 with the first one again."""
    fail(trial.spawn, 3, fault, keep_last=1, env=first)
    trial.assert_struck(fault)
    fail(trial.spawn, 2, "kill rank 1 at step 13 in forward", keep_last=1, env=then)
    assert trial.spawn(4, keep_last=1, env=first) == trial.dir
    assert trial.outcome() == undisturbed()


# --- numbers ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters without elements and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.tensor(each)) for each in (1.5, 0.5))
        self.none, self.nothing, self.empty = (nn.Parameter(torch.zeros(each)) for each in (0, 0, (3, 0)))
        self.register_buffer("unfilled", torch.zeros(0))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.scale + self.shift + self.none.sum() + self.nothing.sum() + self.empty.sum()


class Global(torch.optim.Optimizer):
    """An optimizer with state that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state["all"] = {"updates": torch.zeros(())}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["updates"] += 1  # type: ignore[index]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param -= param.grad * 0.1 / self.state["all"]["updates"]  # type: ignore[index]


def update_and_load(tiny: Tiny) -> None:
    """Load a state of all parameters on all ranks."""
    tiny.optimizer.step()
    kept = {i: {"step": torch.tensor(3.0), "exp_avg": torch.ones(param.shape), "exp_avg_sq": torch.ones(param.shape)}
            for i, param in enumerate(tiny.model.parameters())}  # fmt: skip
    tiny.optimizer.load_state_dict(tiny.optimizer.state_dict() | {"state": kept})


STATES: dict[str, dict[str, Any]] = {
    "empty tensors, and state that the script loads": {"model": Odd, "then": update_and_load},
    "state of no parameter": {"optimizer": Global},
}


@pytest.mark.parametrize("name", STATES)
def test_any_state(name: str, tmp_path: Path) -> None:
    """Snapshots hold the state of an undivided run, and a start with other ranks continues from them."""
    options = {"optimizer": AdamW, "snapshot_every": 1, **STATES[name]}
    samestep.spawn(tiny_run, 1, (tmp_path / "alone",), {"num_steps": 4, **options})
    for world_size, num_steps in ((3, 2), (2, 4)):
        samestep.spawn(tiny_run, world_size, (tmp_path / "ranks",), {"num_steps": num_steps, **options}, env=DIVIDED)
    assert digest(tmp_path / "ranks") == digest(tmp_path / "alone")


class Mixing(nn.Module):
    """Uses each of its inputs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        a, b, c, d = self.layers
        return a(x).tanh() * b(x) + c(memory) * d(memory)


class Mixed(nn.Module):
    """Tensors that are used twice in a block, in other blocks, and outside of them; the first block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Mixing() for _ in range(3))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = memory = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x, memory)
        return self.last(x + memory)


@pytest.mark.parametrize(("blocks", "world_size"), one_in(2, [([Mixing], 3), ([nn.Linear], 2)]))
def test_the_order_in_which_gradients_of_a_tensor_are_added(blocks: Any, world_size: int) -> None:
    """FSDP2 alone adds those from within a block to each other first."""
    train = functools.partial(
        trace_run, Mixed, optimizer=sgd_momentum, data=build_pairs(24), num_steps=3,
        objects=lambda t: {"shard_blocks": blocks},
        body=lambda t, x, y: t.step.backward(t.model(x[:, :4]).square().mean()),
    )  # fmt: skip
    assert_same(samestep.spawn(train, world_size, env=SHARDED), run_alone(train), f"{world_size} ranks", "1 rank")


# --- what is refused --------------------------------------------------------------------------------------------------


class Aliased(nn.Module):
    """Two parameters in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight.data = self.first.weight.data


class Swapped(nn.Module):
    """Two blocks of one shape. Rank 1 runs them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks][:: -1 if os.environ["RANK"] == "1" else 1]:
            x = block(x).tanh()
        return x.sum(1, keepdim=True)


def shard_by_script() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(4, 1))


def update_on(rank: int, *, evaluates: bool = False) -> Callable[[Tiny], None]:
    """Return what skips an update on the other rank, in step 1."""

    def then(tiny: Tiny) -> None:
        if tiny.run.rank == rank or tiny.step.number != 1:
            tiny.optimizer.step()
        elif evaluates:
            tiny.run.evaluate(lambda batch: {}, [torch.zeros(1)] * 4)

    return then


def update_with_own_rate(tiny: Tiny) -> None:
    tiny.optimizer.param_groups[0]["lr"] = 0.1 + tiny.run.rank
    update(tiny)


def clip_by_hand(tiny: Tiny) -> None:
    nn.utils.clip_grad_norm_(tiny.model.parameters(), 1.0)
    update(tiny)


def clip_by_total_norm(tiny: Tiny) -> None:
    params = [param for param in tiny.model.parameters() if param.grad is not None]
    nn.utils.clip_grads_with_norm_(params, 1.0, nn.utils.get_total_norm([param.grad for param in params]))
    update(tiny)


# Arguments of `tiny_run`; how it is sharded; the error's sentence.
REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"then": update_with_own_rate}, DIVIDED, r"the hash of the settings of optimizer \(param_groups\) is .* on ra"),
    ({"then": update_on(0)}, SHARDED, r"the number of calls of optimizer\.step\(\) is 3 on rank 0 and 2 on rank 1"),
    ({"then": update_on(0)}, DIVIDED, "rank 0 has called optimizer.step, and rank 1 has not"),
    ({"then": update_on(0, evaluates=True)}, DIVIDED, "rank 0 has called optimizer.step, and rank 1 has called run"),
    ({"then": update_on(0), "snapshot_every": 2}, DIVIDED, "rank 0 has called optimizer.step, and rank 1 has not"),
    ({"then": update_on(1), "max_steps": 2}, DIVIDED, "rank 1 has called optimizer.step, and rank 0 has not"),
    ({"then": lambda t: AveragedModel(nn.Linear(4, 1)).update_parameters(t.model)}, SHARDED,
     r"got mixed torch\.Tensor and DTensor"),
    ({"then": lambda t: t.run.state.update(best=t.model.state_dict())}, SHARDED,
     r"state\.best\.weight is a DTensor of torch.float32, which a snapshot cannot"),
    ({"then": clip_by_hand}, DIVIDED, r"call run\.clip_grad_norm_"),
    ({"then": clip_by_total_norm}, SHARDED, r"call run\.clip_grad_norm_"),
    ({"model": Aliased}, DIVIDED, r"model\.second\.weight shares memory with model\.first\.weight"),
    ({"model": Swapped}, SHARDED, "rank 1 has used other parts of the model than rank 0"),
    ({"body": lambda t, x, y: t.step.micro_batch and learn(t, x, y)}, SHARDED,
     r"step\.backward was not called in micro-batch 0, and with shard=\"fsdp2\" all ranks wait"),
    ({"model": Odd}, SHARDED, r"model cannot be sharded \(.* scalar parameters.*\): change the model"),
    ({"model": shard_by_script}, SHARDED, r"model was given to fully_shard by the script: leave"),
    ({"objects": lambda t: {"shard_blocks": [nn.Conv2d]}}, SHARDED, r"holds Conv2d, but .* consist of Linear"),
    ({"optimizer": torch.optim.LBFGS}, DIVIDED, "optimizer is LBFGS"),
    ({"optimizer": torch.optim.Rprop}, SHARDED, "optimizer is Rprop, which may need whole tensors, .*or shard=.optim"),
    ({"optimizer": Wrapper}, SHARDED, "inside another object"),
    ({"optimizer": functools.partial(AdamW, fused=True)}, SHARDED, "has fused=True"),
    ({"optimizer": Adagrad, "check_compute_every": 2}, SHARDED, 'is not available with shard="fsdp2"'),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "shard", "sentence"), REFUSED)
def test_what_is_refused(wrong: dict[str, Any], shard: dict[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises((samestep.Error, RuntimeError), match=sentence):
        samestep.spawn(tiny_run, 2, (tmp_path / "run",), {"num_steps": 3} | wrong, env=shard)


@pytest.mark.parametrize(
    ("right", "num_ranks", "shard"),
    [({"then": clip_by_hand}, 2, {}), ({"then": clip_by_total_norm}, 1, DIVIDED), ({"optimizer": Wrapper}, 1, DIVIDED)],
)
def test_what_is_not_refused_where_nothing_is_divided(right: Any, num_ranks: int, shard: dict[str, str]) -> None:
    samestep.spawn(tiny_run, num_ranks, (), right, env=shard)


# --- snapshots: each rank writes a file of its own, and reads what it needs of the files of any number of ranks -------

MB = 1 << 20


def read_counter() -> int:
    """The bytes that this process has read from files so far."""
    line, *_ = Path("/proc/self/io").read_text().splitlines()
    return int(line.removeprefix("rchar: "))


def count_read(run_dir: Path) -> list[int]:
    """Start or resume a run with 4 MB of parameters and 8 MB of optimizer state. Returns the bytes that each rank read
    before the loop.
    """
    import torch.distributed.fsdp

    before = read_counter()
    tiny = Tiny(
        run_dir, snapshot_every=1, optimizer=AdamW,
        model=lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))),
    )  # fmt: skip
    num_read = read_counter() - before
    tiny.train(num_steps=tiny.run.steps_done + 1, data=torch.ones(64, 512))
    return tiny.run._context.group.gather(num_read)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("written") / "run"
    samestep.spawn(count_read, 3, (run_dir,), env=SHARDED)
    return run_dir


@pytest.mark.parametrize(("shard", "world_size", "needed_mb"), [(SHARDED, 2, 6), (DIVIDED, 4, 4 + 2)])
def test_each_rank_reads_what_it_needs(
    shard: dict[str, str], world_size: int, needed_mb: int, sharded_run: Path, tmp_path: Path
) -> None:
    """Besides, the ranks together check every byte once."""
    shutil.copytree(sharded_run, tmp_path / "run")
    counts = samestep.spawn(count_read, world_size, (tmp_path / "run",), env=shard)
    checked_mb = 12 / world_size
    for count in counts:
        assert needed_mb * MB <= count <= (needed_mb + checked_mb + 1.5) * MB
    assert sum(counts) >= (needed_mb * world_size + 12) * MB


def train_on_full_disk(run_dir: Path, rank: int, step: int) -> None:
    """Train, on a disk that is full when one rank writes the snapshot of one step."""
    prepare = Store.prepare
    is_full = True

    def prepare_or_fail(store: Store, draft: str, tensors: Any, own: int) -> Any:
        nonlocal is_full
        if is_full and own == rank and f"step-{step:08d}" in draft:
            is_full = False
            raise OSError(errno.ENOSPC, "No space left on device")
        return prepare(store, draft, tensors, own)

    Store.prepare = prepare_or_fail  # type: ignore[method-assign]
    tiny_run(run_dir, num_steps=8, snapshot_every=2, keep_last=9, model=lambda: torch.nn.Linear(4, 1))
    (run_dir / f"after-{os.environ['RANK']}").touch()


@pytest.mark.parametrize(("step", "saved"), [(4, [2, 6, 8]), (8, [2, 4, 6])])
def test_the_disk_of_one_rank_is_full(
    step: int, saved: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run continues, rank 0 reports it, and nothing is left of the snapshot. If it is the last one, training is
    lost, so the run fails, whatever the script does after the loop.
    """
    why = f"{name_part(2)} is missing: rank 2 could not write it ([Errno 28] No space left on device)"
    with nullcontext() if step < 8 else pytest.raises(samestep.Error, match=r"could not be written .* fix this"):
        samestep.spawn(train_on_full_disk, 3, (tmp_path, 2, step), env=DIVIDED)
    assert f"the snapshot of step {step} could not be written ({why})" in capfd.readouterr().out
    assert len(list(tmp_path.glob("after-*"))) == 3
    assert (read_status(tmp_path)["status"] == "done") == (step < 8)
    assert list_steps(tmp_path) == saved
    assert sorted(os.listdir(tmp_path / "snapshots")) == [f"step-{each:08d}" for each in saved]


def spoil_one_rank(tiny: Tiny) -> None:
    """Let the shard of rank 1 become nan."""
    tiny.optimizer.step()
    if tiny.step.number == 3 and tiny.run.rank == 1:
        with torch.no_grad():
            tiny.model.weight.to_local().fill_(float("nan"))


def test_a_rank_whose_shard_is_not_finite(tmp_path: Path) -> None:
    given = {"num_steps": 8, "snapshot_every": 2, "model": lambda: torch.nn.Linear(4, 4), "then": spoil_one_rank}
    with pytest.raises(samestep.InvalidValue, match=r"model.weight is not finite after step 4"):
        samestep.spawn(tiny_run, 2, (tmp_path,), given, env=SHARDED)
    assert list_steps(tmp_path) == [2]


def get_weights() -> Tensor:
    weights: list[Tensor] = []
    tiny_run(None, optimizer=AdamW, compare_every=1,
             after_epoch=lambda t: weights.append(t.model.weight.detach().clone()))  # fmt: skip
    return weights[-1]


def test_rounding_changes_the_bits_and_little_else() -> None:
    exact = samestep.spawn(get_weights, 2)
    rounded = samestep.spawn(get_weights, 2, env={"SAMESTEP_EXCHANGE_DTYPE": "bf16"})
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=2**-6, atol=2**-6)


def count_for_a_norm(num_layers: int) -> dict[str, int]:
    """Return how often ranks exchange something, and read it, to clip the gradients of a model."""
    counts: dict[str, int] = {}

    def then(t: Tiny) -> None:
        tolist = Mock(side_effect=Tensor.tolist)
        with CommDebugMode() as exchanges, patch.object(Tensor, "tolist", lambda tensor: tolist(tensor)):
            t.run.clip_grad_norm_(t.model.parameters(), 0.01)
        counts.update({str(name): count for name, count in exchanges.get_comm_counts().items()})
        counts["reads"] = tolist.call_count

    tiny_run(num_steps=1, model=lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))), then=then)
    return counts


def test_a_norm_takes_one_exchange_of_shards() -> None:
    """However many parameters there are. (Then the ranks gather the numbers, by messages that are not counted.)"""
    for num_layers in (1, 8):
        counts = {"c10d.alltoall_base_": 1, "reads": 1}
        assert samestep.spawn(count_for_a_norm, 2, (num_layers,), env=SHARDED) == counts


def test_each_rank_writes_what_it_holds(sharded_run: Path) -> None:
    sizes = [(sharded_run / "snapshots/step-00000001" / name_part(rank)).stat().st_size for rank in range(3)]
    assert sum(sizes) == pytest.approx(12 * MB, rel=0.01)
    assert max(sizes) < 4.1 * MB


# --- memory -----------------------------------------------------------------------------------------------------------


def build_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3))


def measure() -> list[Any]:
    """Return of each rank the bytes of its parameters, of gradients and of its optimizer's state, and all sizes."""
    found: list[Any] = []

    def count(t: Any) -> None:
        params = [*t.model.parameters()]
        state = [value for each in t.optimizer.state.values() for value in each.values()]
        tensors = (params, [param.grad for param in params if param.grad is not None], state)
        own = [sum(get_local(each).nbytes for each in some) for some in tensors]
        sizes = measure_sizes(Objects({"model": t.model, "optimizer": t.optimizer}), None)
        found[:] = t.run._context.group.gather(own), sizes

    tiny_run(None, model=build_blocks, optimizer=torch.optim.AdamW, data=torch.ones(24, 5), after_epoch=count)
    return found


@pytest.mark.parametrize(("shard", "copies"), [("none", 1), ("optimizer", 1), ("optimizer", 2), ("fsdp2", 1)])
def test_the_formulas_are_those_of_a_run(shard: str, copies: int) -> None:
    env = {"SAMESTEP_SHARD": shard, **({"SAMESTEP_SHARD_COPIES": "2"} if copies > 1 else {})}
    ranks, _ = samestep.spawn(measure, 3, env=env)
    _, sizes = samestep.spawn(measure, 1)
    assert sum(size.num_bytes for size in sizes) == 4 * (40 + 2 * 56 + 24 + 2)
    expected = compute_memory(sizes, None if shard == "none" else shard, 3, copies)
    assert max(params for params, *_ in ranks) == expected.parameters
    assert max(state for *_, state in ranks) == expected.optimizer_state
    if shard != "optimizer":  # which drops the gradients of other owners after the step's exchange
        assert max(grads for _, grads, _ in ranks) == expected.gradients


def test_what_a_rank_gathers_and_owns() -> None:
    sizes = [ParamSize(400, 10, 400, 800, block=1), ParamSize(120, 3, 120, 240, block=2)]
    assert compute_memory(sizes, "fsdp2", 4) == RankMemory(160, 160, 320, gathered_block=800)
