"""A model that is built in `run.sharded_init` has the same values in all modes, and is never whole on a rank."""

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep.torch_internals import gather_whole
from samestep.train.sharded_init import ShardedInit

SHARDED = {"SAMESTEP_SHARD": "fsdp2"}


class Scaled(nn.Module):
    """A module of the script with a parameter, a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(7, 5))
        self.register_buffer("table", torch.arange(4.0))
        self.head = nn.Linear(6, 11)
        self.words = nn.Embedding(11, 6, padding_idx=3)
        self.head.weight = self.words.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.scale, std=0.02)


class Many(nn.Module):
    """Modules of torch, a copy of one, and frozen parameters of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.attention = nn.MultiheadAttention(6, 2)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.bilinear = nn.Bilinear(2, 3, 4)
        self.narrow = nn.Linear(3, 3).bfloat16().requires_grad_(False)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def read_values() -> list[Any]:
    """Return the bits of the values after `run.prepare`, of a model and an average of it, and a random draw."""
    run = samestep.Run(None, batch_size=8, micro_batch_size=1)
    with run.sharded_init():
        model = Many()
        average = AveragedModel(model)
    assert all(param.is_meta for param in [*model.parameters(), *average.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drawn = torch.rand(3).tolist()
    run.prepare(model=model, average=average, optimizer=optimizer)
    assert model.scaled.head.weight is model.scaled.words.weight
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [id(param) for param in model.parameters()]
    values = {
        path: gather_whole(value).view(torch.uint8).tolist() if value.dim() else value.tolist()
        for path, value in model.state_dict().items()
    }
    copied = average.state_dict()
    assert all(
        gather_whole(copied[f"module.{path}"]).equal(gather_whole(value)) for path, value in model.state_dict().items()
    )
    return [values, drawn, gather_whole(model.narrow.weight).dtype, model.narrow.weight.requires_grad]


def test_the_values_are_the_same_in_all_modes() -> None:
    alone = samestep.spawn(read_values, 1)
    for num_ranks, shard in ((2, "none"), (2, "optimizer"), (3, "fsdp2")):
        found = samestep.spawn(read_values, num_ranks, env={"SAMESTEP_SHARD": shard})
        for path, value in alone[0].items():
            assert found[0][path] == value, (shard, path)
        assert found[1:] == alone[1:] == [alone[1], torch.bfloat16, False]


def fill(build: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    init = ShardedInit(seed)
    with init.building():
        model = build()
    init.fill(model)
    return model


def test_the_values_follow_from_the_seed_and_the_distribution_of_the_module() -> None:
    one, other, another = (
        fill(lambda: nn.Sequential(nn.Linear(99, 99), nn.Linear(99, 99)), seed) for seed in (5, 5, 6)
    )
    assert torch.equal(one[0].weight, other[0].weight)
    assert not torch.equal(one[0].weight, one[1].weight)
    assert not torch.equal(one[0].weight, another[0].weight)
    assert one[0].weight.abs().max().item() == pytest.approx(99**-0.5, rel=0.01)
    attention: Any = fill(lambda: nn.MultiheadAttention(6, 2))
    assert attention.out_proj.bias.tolist() == attention.in_proj_bias[:6].tolist() == [0.0] * 6
    words: Any = fill(Scaled)
    assert words.head.weight[3].tolist() == [0.0] * 6, "a tied weight has the values of the module that created it"
    assert words.table.tolist() == [0.0, 1.0, 2.0, 3.0]
    twins: Any = fill(lambda: nn.ModuleList([layer := nn.Linear(3, 3), copy.deepcopy(layer)]))
    assert torch.equal(twins[0].weight, twins[1].weight)


class SetElsewhere(nn.Module):
    """A model that sets the values of its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        nn.init.normal_(self.layer.weight)


@pytest.mark.parametrize(("build", "words"), [
    (lambda: nn.ParameterList([torch.ones(2)]), r"ParameterList has the parameter 0 and no reset_parameters that"),
    (lambda: nn.LSTM(2, 2), r"LSTM has the parameter bias_hh_l0 and no reset_parameters that"),
    (lambda: nn.Linear(2, 2, device="meta"), r"weight is on the meta device, and no module has created it"),
    (SetElsewhere, r"layer\.weight was set in run\.sharded_init by other code"),
])  # fmt: skip
def test_modules_that_cannot_be_initialized_are_refused(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(samestep.UsageError, match=words):
        fill(build)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made inside it and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if type(each) in (Tensor, nn.Parameter) and not each.is_meta:
                self._storages[each.untyped_storage()] = None
        self.most = max(self.most, sum(each.nbytes() for each in [*self._storages]))
        return result


NUM_LAYERS, WIDTH = 16, 256
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


def build_deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def count_bytes() -> list[int]:
    """Return, of each rank, the most bytes of tensors in the construction of a model, and until it is prepared."""
    run = samestep.Run(None, batch_size=8, micro_batch_size=1)
    with LiveBytes() as live:
        with run.sharded_init():
            model = build_deep()
        built = live.most
        run.prepare(model=model, optimizer=torch.optim.AdamW(model.parameters()), shard_blocks=[nn.Linear])
        return run._context.group.gather([built, live.most])


def test_a_rank_never_has_the_whole_model() -> None:
    for built, prepared in samestep.spawn(count_bytes, 4, env=SHARDED):
        assert built <= 1.1 * LAYER_BYTES
        assert prepared <= NUM_LAYERS * LAYER_BYTES / 4 + 3 * LAYER_BYTES
