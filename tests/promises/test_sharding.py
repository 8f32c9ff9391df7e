"""A run whose optimizers or models are divided among the ranks gives the bits of a run on one rank, also through
crashes.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from promises.loops import Result, build_run
from promises.models import build_pairs
from promises.test_same_bits import run_alone
from promises.trial import Outcome, Trial
from support.runs import digest
from support.selection import one_in
from support.tiny import Tiny, tiny_run, update
from support.trace import Trace, assert_same
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import samestep
from samestep.torch_internals import get_local

DIVIDED = {"SAMESTEP_SHARD": "optimizer"}
SHARDED = {"SAMESTEP_SHARD": "fsdp2"}


@pytest.mark.parametrize(("first", "fault", "then"), [
    (DIVIDED, "kill rank 1 at step 7 in update", {}),
    (DIVIDED, "kill rank 0 at step 10 in writing tensors", SHARDED),
    (SHARDED, "kill rank 0 at step 10 in writing tensors", {}),
    (SHARDED, "raise rank 2 at step 12 in reduction", DIVIDED),
])  # fmt: skip
def test_resumed_with_another_sharding(
    trial: Trial, undisturbed: Callable[..., Outcome], first: dict[str, str], fault: str, then: dict[str, str]
) -> None:
    """On 3 ranks with one sharding, then on 2 with another one, then on 4 with the first one again."""
    trial.spawn_to_fail(3, fault, keep_last=1, **first)
    trial.assert_struck(fault)
    trial.spawn_to_fail(2, "kill rank 1 at step 13 in forward", keep_last=1, **then)
    assert trial.spawn(4, keep_last=1, **first) == trial.dir
    assert trial.outcome() == undisturbed()


ROUNDED = {"SAMESTEP_EXCHANGE_DTYPE": "bf16"}


def get_weights() -> torch.Tensor:
    weights: list[torch.Tensor] = []
    tiny_run(None, after_epoch=lambda t: weights.append(t.model.weight.detach().clone()))
    return weights[-1]


def test_rounding_changes_the_bits_and_little_else() -> None:
    exact, rounded = (samestep.spawn(get_weights, 2, env=env) for env in ({}, ROUNDED))
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=2**-6, atol=2**-8)


def get_weights_in_bf16() -> torch.Tensor:
    def learn(t: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        with t.run.autocast():
            loss = torch.nn.functional.mse_loss(t.model(x), y)
        t.step.backward(loss)

    weights: list[torch.Tensor] = []
    model = functools.partial(torch.nn.Linear, 4, 1)
    tiny_run(None, precision="bf16", model=model, optimizer=torch.optim.AdamW, body=learn, compare_every=1,
             after_epoch=lambda t: weights.append(t.model.weight.detach().clone()))  # fmt: skip
    return weights[-1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_fast_sums_in_bf16(world_size: int) -> None:
    """The backend's sum goes to the owner. It is the exact one but for the order of the additions."""
    exact = samestep.spawn(get_weights_in_bf16, 1)
    fast = samestep.spawn(get_weights_in_bf16, world_size, env=DIVIDED | {"SAMESTEP_REDUCTION": "fast"})
    torch.testing.assert_close(fast, exact, rtol=1e-5, atol=1e-6)


def train_layers(count: Callable[[Any], None]) -> None:
    """Train 8 layers of 272 parameters each, and call a function after each epoch."""
    tiny_run(
        None,
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8))),
        optimizer=torch.optim.AdamW,
        data=torch.ones(24, 16),
        after_epoch=count,
    )


def gather(found: list[Any]) -> list[Any]:
    """Return a list of each rank."""
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, found)
    return everywhere


def count_states() -> list[Any]:
    """Return, of each rank, how many parameters have state, and the bytes of it."""
    counts: list[Any] = []

    def count(t: Any) -> None:
        state = t.optimizer.state
        num_bytes = sum(value.nbytes for of_param in state.values() for value in of_param.values())
        counts[:] = [len(state), num_bytes]

    train_layers(count)
    return gather(counts)


def test_a_rank_has_the_state_of_its_parameters_only() -> None:
    (_, whole), *_ = samestep.spawn(count_states, 2)
    divided = samestep.spawn(count_states, 4, env=DIVIDED)
    assert sum(number for number, _ in divided) == 16
    assert max(num_bytes for _, num_bytes in divided) <= whole / 4 * 1.1


def count_shards() -> list[Any]:
    """Return, of each rank, the bytes of its parameters and of its optimizer's state."""
    found: list[Any] = []

    def count(t: Any) -> None:
        tensors = [value for state in t.optimizer.state.values() for value in state.values()]
        found[:] = [sum(get_local(each).nbytes for each in some) for some in (t.model.parameters(), tensors)]

    train_layers(count)
    return gather(found)


def test_a_rank_has_its_shards_only() -> None:
    (params, state), *_ = samestep.spawn(count_shards, 2)
    for of_rank in samestep.spawn(count_shards, 4, env=SHARDED):
        assert of_rank[0] == params // 4
        assert of_rank[1] <= state / 4 * 1.1  # each parameter has a number of steps, too


class Odd(torch.nn.Module):
    """Parameters without elements and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (torch.nn.Parameter(torch.tensor(each)) for each in (1.5, 0.5))
        self.none, self.nothing, self.empty = (torch.nn.Parameter(torch.zeros(each)) for each in (0, 0, (3, 0)))
        self.register_buffer("unfilled", torch.zeros(0))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
                state = self.state[param]
                state["sum"] = state.get("sum", 0) + param.grad
                param -= state["sum"] * 0.1 / self.state["all"]["updates"]  # type: ignore[index]


def update_and_read(tiny: Tiny) -> None:
    """Look at the state of every parameter, which makes an empty one for those of other ranks."""
    tiny.optimizer.step()
    assert sum("exp_avg" in tiny.optimizer.state[param] for param in tiny.model.parameters()) in (0, 1, 2)


def update_and_load(tiny: Tiny) -> None:
    """Load a state of all parameters on all ranks."""
    tiny.optimizer.step()
    state = tiny.optimizer.state_dict()
    shapes = [param.shape for param in tiny.model.parameters()]
    kept = {i: {"step": torch.tensor(3.0), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}
            for i, shape in enumerate(shapes)}  # fmt: skip
    tiny.optimizer.load_state_dict(state | {"state": kept})


STATES: dict[str, dict[str, Any]] = {
    "empty tensors": {"model": Odd},
    "state of no parameter": {"optimizer": Global},
    "state that the script reads": {"then": update_and_read},
    "state that the script loads": {"then": update_and_load},
}


@pytest.mark.parametrize("name", one_in(2, STATES))
def test_any_state(name: str, tmp_path: Path) -> None:
    """Snapshots hold the state of an undivided run, and a start with other ranks continues from them."""
    options = {"optimizer": torch.optim.AdamW, "snapshot_every": 1, **STATES[name]}
    samestep.spawn(tiny_run, 1, (tmp_path / "alone",), {"num_steps": 4, **options})
    for world_size, num_steps in ((3, 2), (2, 4)):
        samestep.spawn(tiny_run, world_size, (tmp_path / "ranks",), {"num_steps": num_steps, **options}, env=DIVIDED)
    assert digest(tmp_path / "ranks") == digest(tmp_path / "alone")


def raise_after_update(tiny: Tiny) -> None:
    update(tiny)
    raise ZeroDivisionError


@pytest.mark.parametrize("shard", [DIVIDED, SHARDED])
def test_a_failure_after_an_update_is_the_only_one(
    shard: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The record of the step, whose checksum the ranks have not combined, is left out."""
    with pytest.raises(ZeroDivisionError):
        samestep.spawn(tiny_run, 2, (tmp_path,), {"then": raise_after_update}, env=shard)
    assert "IndexError" not in "".join(capfd.readouterr())
    assert (tmp_path / "ledger.bin").exists()


class Adapting(torch.optim.SGD):
    """Computes its settings from the gradients that it sees."""

    def step(self, closure: Any = None) -> None:
        grads = [param.grad for param in self.param_groups[0]["params"] if param.grad is not None]
        self.param_groups[0]["lr"] += sum(float(grad.norm()) for grad in grads)
        super().step()


def test_settings_from_the_gradients_of_one_rank_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"num_steps": 1, "optimizer": Adapting}
    with pytest.raises(samestep.InvalidValue, match=r"other settings \(param_groups\) on rank . than on rank"):
        samestep.spawn(tiny_run, 2, (tmp_path,), options, env=DIVIDED)
    assert "optimizer is of class Adapting, which is not torch's" in capfd.readouterr().out


def update_on_some_ranks(tiny: Tiny) -> None:
    if tiny.run.rank == 0 or tiny.step.number != 1:
        tiny.optimizer.step()


def update_with_own_rate(tiny: Tiny) -> None:
    tiny.optimizer.param_groups[0]["lr"] = 0.1 + tiny.run.rank
    tiny.optimizer.step()


@pytest.mark.parametrize(("then", "message"), [
    (update_on_some_ranks, r"optimizer\.step\(\) was called 2 times on rank 1 and 3 times on rank 0"),
    (update_with_own_rate, "optimizer has other settings .* on rank 1 than on rank 0"),
])  # fmt: skip
def test_updates_that_differ_between_ranks(then: Callable[[Tiny], None], message: str, tmp_path: Path) -> None:
    """With whole models, the comparison of the replicas finds them."""
    with pytest.raises(samestep.InvalidValue, match=message):
        samestep.spawn(tiny_run, 2, (tmp_path,), {"then": then, "num_steps": 3}, env=SHARDED)


@pytest.mark.parametrize(
    ("rank", "then"), [(0, "continues"), (1, "continues"), (0, "evaluates"), (0, "saves"), (1, "ends")]
)
def test_a_divided_update_on_some_ranks(rank: int, then: str, tmp_path: Path) -> None:
    skipped = 2 if then == "ends" else 1

    def update_on_one(tiny: Tiny) -> None:
        if tiny.run.rank == rank or tiny.step.number < skipped:
            tiny.optimizer.step()
        elif then == "evaluates":
            tiny.run.evaluate(lambda batch: {}, [torch.zeros(1)] * 4)

    message = f"rank {rank} has called optimizer.step, and rank {1 - rank} has "
    with pytest.raises(samestep.UsageError, match=message + ("called run.evaluate" if then == "evaluates" else "not")):
        options = {"then": update_on_one, "num_steps": 3, "snapshot_every": 2 if then == "saves" else 100}
        samestep.spawn(tiny_run, 2, (tmp_path,), options, env=DIVIDED)


def average_unprepared(tiny: Tiny) -> None:
    update(tiny)
    torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 1)).update_parameters(tiny.model)


def test_an_averaged_model_that_was_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        samestep.spawn(tiny_run, 2, (tmp_path,), {"then": average_unprepared}, env=SHARDED)


def keep_in_state(run_dir: Path) -> None:
    def keep(tiny: Tiny) -> None:
        tiny.run.state["best"] = {key: value.clone() for key, value in tiny.model.state_dict().items()}

    tiny_run(run_dir, num_steps=1, then=keep)


def test_a_sharded_tensor_in_the_state_of_the_script(tmp_path: Path) -> None:
    with pytest.raises(samestep.InvalidType, match=r"state\.best\.weight is a DTensor, which a snapshot cannot hold"):
        samestep.spawn(keep_in_state, 2, (tmp_path,), env=SHARDED)


class Aliased(torch.nn.Module):
    """Two parameters in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight.data = self.first.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).sum(1, keepdim=True)


@pytest.mark.parametrize("shard", [DIVIDED, SHARDED])
def test_parameters_in_one_memory_are_refused(shard: dict[str, str]) -> None:
    with pytest.raises(samestep.InvalidValue, match=r"model\.second\.weight shares memory with model\.first\.weight"):
        samestep.spawn(train_wrong, 2, (Aliased,), env=shard)


class Swapped(torch.nn.Module):
    """Two blocks of one shape. Rank 1 runs them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks][:: -1 if torch.distributed.is_initialized() and os.environ["RANK"] == "1" else 1]:
            x = block(x).tanh()
        return x.sum(1, keepdim=True)


class OneBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x).sum(1, keepdim=True)


class Mixing(torch.nn.Module):
    """Uses each of its inputs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.layers
        return a(x).tanh() * b(x) + c(memory) * d(memory)


class Mixed(torch.nn.Module):
    """Tensors that are used twice in a block, in other blocks, and outside of them; the first block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList(Mixing() for _ in range(3))
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = memory = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x, memory)
        return self.last(x + memory)


class Scalar(torch.nn.Linear):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


def train_wrong(model: type[torch.nn.Module], blocks: Any = None) -> None:
    run = samestep.Run(None, batch_size=8, micro_batch_size=2)
    built = model()
    run.prepare(model=built, optimizer=torch.optim.SGD(built.parameters(), 0.1), shard_blocks=blocks)
    for step in run.steps(torch.ones(32, 4), 2):
        for x in step:
            step.backward(built(x).square().mean())


@pytest.mark.parametrize(("model", "message"), [
    (Swapped, "rank 1 has used other parts of the model than rank 0"),
    (Scalar, r"model cannot be sharded \(.* scalar parameters.*\): change the model"),
])  # fmt: skip
def test_models_that_cannot_be_sharded(model: type[torch.nn.Module], message: str) -> None:
    with pytest.raises((samestep.UsageError, samestep.InvalidValue), match=message):
        samestep.spawn(train_wrong, 2, (model,), env=SHARDED)


def train_mixed(blocks: Any = None) -> Result:
    run = build_run()
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.prepare(model=model, optimizer=optimizer, shard_blocks=blocks)
    trace = Trace(run)
    for step in run.steps(build_pairs(24), 3):
        for x, _ in step:
            step.backward(model(x[:, :4]).square().mean())
        optimizer.step()
        trace.end_step(step)
    return trace.finish()


# Trainings with FSDP2 on two or three ranks, and on one: 4 s, and 25 s on a busy machine.
@pytest.mark.parametrize(
    ("blocks", "world_size"), one_in(3, [(b, n) for n in (2, 3) for b in (["Mixing"], None, ["Linear"], [])])
)
def test_the_order_in_which_gradients_of_a_tensor_are_added(blocks: list[str] | None, world_size: int) -> None:
    """FSDP2 alone adds those from within a block to each other first."""
    train = functools.partial(train_mixed, blocks)
    assert_same(samestep.spawn(train, world_size, env=SHARDED), run_alone(train), f"{world_size} ranks", "1 rank")


def test_blocks_are_classes_or_names() -> None:
    with pytest.raises(samestep.InvalidType, match="shard_blocks must hold classes of modules or their names, not 3"):
        samestep.spawn(train_wrong, 2, (OneBlock, [3]), env=SHARDED)
    with pytest.raises(samestep.InvalidType, match="shard_blocks must be a list of classes of modules"):
        samestep.spawn(train_wrong, 2, (OneBlock, OneBlock), env=SHARDED)
    with pytest.raises(samestep.InvalidValue, match=r"names Block, but .* consist of OneBlock, ModuleList, Linear"):
        samestep.spawn(train_wrong, 2, (OneBlock, ["Block"]), env=SHARDED)


def train_one(optimizer: Callable[..., Any]) -> None:
    run = samestep.Run(None, batch_size=4, micro_batch_size=2)
    model = torch.nn.Linear(3, 3)
    run.prepare(model=model, optimizer=optimizer(model.parameters()))


class Wrapper:
    """An object with an optimizer inside."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


@pytest.mark.parametrize(
    ("optimizer", "message"), [(torch.optim.LBFGS, "optimizer is LBFGS"), (Wrapper, "inside another object")]
)
def test_optimizers_that_cannot_be_divided(optimizer: Callable[..., Any], message: str) -> None:
    with pytest.raises(samestep.Error, match=message):
        samestep.spawn(train_one, 2, (optimizer,), env=DIVIDED)
    samestep.spawn(train_one, 1, (optimizer,), env=DIVIDED)


@pytest.mark.parametrize(("optimizer", "message"), [
    (torch.optim.LBFGS, "optimizer is LBFGS, which may need whole tensors, .* leave out shard"),
    (torch.optim.Rprop, "optimizer is Rprop, which may need whole tensors, .* use shard=.optimizer."),
    (functools.partial(torch.optim.AdamW, fused=True), "has fused=True"),
    (Wrapper, "inside another object"),
])  # fmt: skip
def test_optimizers_that_cannot_be_sharded(optimizer: Callable[..., Any], message: str) -> None:
    with pytest.raises(samestep.InvalidValue, match=message):
        samestep.spawn(train_one, 2, (optimizer,), env=SHARDED)


def test_a_run_that_began_with_a_fused_optimizer_cannot_be_sharded(tmp_path: Path) -> None:
    fused = functools.partial(torch.optim.Adam, fused=True)
    samestep.spawn(tiny_run, 1, (tmp_path,), {"num_steps": 1, "optimizer": fused})
    with pytest.raises(samestep.InvalidValue, match=r"has fused=True, .* continues with shard=.optimizer."):
        samestep.spawn(tiny_run, 2, (tmp_path,), {"num_steps": 2, "optimizer": torch.optim.Adam}, env=SHARDED)


@pytest.mark.parametrize(("name", "value"), [("REDUCTION", "fast"), ("CHECK_COMPUTE_EVERY", "2")])
def test_options_that_sharded_models_do_not_have(name: str, value: str) -> None:
    with pytest.raises(samestep.InvalidValue, match='is not available with shard="fsdp2"'):
        samestep.spawn(train_one, 2, (torch.optim.Adagrad,), env={**SHARDED, f"SAMESTEP_{name}": value})


def clip_by_hand() -> None:
    tiny_run(None, then=lambda t: [torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0), update(t)])


def clip_by_total_norm() -> None:
    def clip(t: Tiny) -> None:
        params = [param for param in t.model.parameters() if param.grad is not None]
        total_norm = torch.nn.utils.get_total_norm([param.grad for param in params])
        torch.nn.utils.clip_grads_with_norm_(params, 1.0, total_norm)
        update(t)

    tiny_run(None, then=clip)


@pytest.mark.parametrize("train", [clip_by_hand, clip_by_total_norm])
def test_clipping_by_the_gradients_of_one_rank_is_refused(train: Callable[[], None]) -> None:
    with pytest.raises(samestep.UsageError, match=r"call run\.clip_grad_norm_"):
        samestep.spawn(train, 2, env=DIVIDED)
    with pytest.raises(samestep.UsageError, match="adds norms of shards"):
        samestep.spawn(train, 2, env=SHARDED)
    samestep.spawn(train, 2)
    samestep.spawn(train, 1, env=DIVIDED)


def scale_too_far(is_enabled: bool) -> torch.Tensor:
    """Return the weights after 3 steps. A scaler of the script skips one, because of one infinite gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=is_enabled)

    def skip(t: Tiny) -> None:
        grad = t.model[0].weight.grad
        if t.step.number == 1 and is_enabled and grad is not None and t.run.rank == 0:
            (get_local(grad) if isinstance(grad, DTensor) else grad)[0] = torch.inf
        scaler.scale(torch.ones(()))
        scaler.step(t.optimizer)
        scaler.update()

    tiny = Tiny(model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)))
    tiny.train(num_steps=3, then=skip)
    params = [param.full_tensor() if isinstance(param, DTensor) else param for param in tiny.model.parameters()]
    return torch.cat([param.detach().flatten() for param in params])


def test_a_scaler_that_sees_the_gradients_of_one_rank() -> None:
    """It skips the update on that rank only, which is refused. One that is not enabled skips none."""
    with pytest.raises(samestep.UsageError, match=r"rank 1 has called optimizer.step, and rank 0 has "):
        samestep.spawn(scale_too_far, 2, (True,), env=DIVIDED)
    skipped, whole = (samestep.spawn(scale_too_far, 1, (is_enabled,), env=DIVIDED) for is_enabled in (True, False))
    assert not torch.equal(skipped, whole)
    assert torch.equal(samestep.spawn(scale_too_far, 2, (True,), env=SHARDED), skipped)
    assert torch.equal(samestep.spawn(scale_too_far, 2, (False,), env=SHARDED), whole)
    assert torch.equal(samestep.spawn(scale_too_far, 2, (False,), env=DIVIDED), whole)


def clip(norm_type: float, foreach: bool | None) -> Result:
    """Return norms for gradients of several dtypes, of which one is absent."""
    run = build_run()
    model = torch.nn.ModuleList([torch.nn.Linear(6, 40), torch.nn.Linear(40, 4).double(), torch.nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    norms = []
    for step in run.steps(build_pairs(), 3):
        for x, _ in step:
            step.backward(model[1](model[0](x).double()).square().mean())
        norms.append(("norm", run.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach).item().hex()))
        optimizer.step()
    return norms


@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, None), (float("inf"), None), (1.0, False)])
def test_the_norm_is_that_of_torch(norm_type: float, foreach: bool | None) -> None:
    train = functools.partial(clip, norm_type, foreach)
    alone = samestep.spawn(train, 1)
    for world_size in (2, 3):
        assert samestep.spawn(train, world_size, env=DIVIDED) == alone


def count_for_a_norm(num_layers: int) -> dict[str, int]:
    """Return how often ranks exchange something, and read it, to clip the gradients of a model."""
    run = build_run()
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    tolist = Mock(side_effect=torch.Tensor.tolist)
    for step in run.steps(build_pairs(), 1):
        for x, _ in step:
            step.backward(model(x).square().mean())
        with CommDebugMode() as exchanges, patch.object(torch.Tensor, "tolist", lambda tensor: tolist(tensor)):
            run.clip_grad_norm_(model.parameters(), 0.01)
    return {**{str(name): count for name, count in exchanges.get_comm_counts().items()}, "reads": tolist.call_count}


def test_a_norm_takes_one_exchange_of_shards() -> None:
    """However many parameters there are. Then the ranks exchange the numbers, and their size."""
    for num_layers in (1, 8):
        counts = samestep.spawn(count_for_a_norm, 2, (num_layers,), env=SHARDED)
        assert counts == {"c10d.alltoall_base_": 1, "c10d.allgather_": 2, "reads": 1}


def test_nothing_else_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(samestep.InvalidValue, match="shard must be optimizer, fsdp2 or none, not 'model'"):
        samestep.Run(tmp_path, batch_size=4, shard="model")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def train_own() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group()
    tiny_run(None, model=lambda: fully_shard(torch.nn.Linear(4, 1)))


def test_a_model_that_the_script_has_sharded_is_refused() -> None:
    with pytest.raises(samestep.Error, match=r"model was given to fully_shard by the script: leave"):
        samestep.spawn(train_own, 2, env=SHARDED)
