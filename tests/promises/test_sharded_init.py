"""A model that is sharded while the script builds it has the bits of one that is not, and is never whole on a rank."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from promises.models import Transformer
from safetensors.torch import save_file
from support.selection import one_in
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep.torch_internals import gather_whole
from samestep.train.state import weights
from samestep.train.state.sharded_init import PartialParameter

SHARDED = {"SAMESTEP_SHARD": "fsdp2"}
Built = tuple[nn.Module, list[nn.Module]]  # a model, and others that are made of it


class Many(nn.Module):
    """Modules with many ways to initialize parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7, 5))
        self.words = nn.Embedding(11, 6, padding_idx=3)
        self.attention = nn.MultiheadAttention(6, 2)
        self.cells = nn.LSTM(6, 4, num_layers=2)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.bilinear = nn.Bilinear(2, 3, 4)
        self.list = nn.ParameterList([torch.rand(3), torch.rand(2, 2)])
        self.half = nn.Linear(3, 3, dtype=torch.bfloat16).requires_grad_(False)  # two trained dtypes are refused
        self.scalars = nn.PReLU()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        nn.init.orthogonal_(self.conv.weight.flatten(1))
        nn.init.trunc_normal_(self.scale, std=0.02)


def build_plainly() -> Built:
    return Many(), []


def build_as_gpt() -> Built:
    """Initialize again: all by `apply`, some by their names, tied weights twice, a row of an embedding, by a norm."""
    model = Transformer()

    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                part.bias.data.zero_()
        elif isinstance(part, nn.Embedding):
            part.weight.data.normal_(mean=0.0, std=0.02)
            part.weight.data[3].fill_(0.5)

    model.apply(init)
    for name, param in model.named_parameters():
        if name.endswith("out.weight"):
            nn.init.normal_(param, std=0.02 / math.sqrt(4))
    with torch.no_grad():
        model.blocks[0].mlp[0].weight.mul_(3.0)
        model.blocks[1].mlp[0].weight /= model.blocks[0].mlp[0].weight.norm()
        model.blocks[0].mlp[0].weight[2:4] = model.blocks[1].mlp[0].weight[:2]
        model.positions.weight += torch.tensor(model.positions.weight.tolist()[::-1])
        torch._foreach_mul_([*model.parameters()], 0.5)
    return model, []


def build_copies() -> Built:
    model = Transformer()
    copied = copy.deepcopy(model.blocks[0])
    model.blocks.append(copied)
    averaged = AveragedModel(model)
    model.blocks[1].load_state_dict(model.blocks[0].state_dict())
    twin = copy.deepcopy(model)
    nn.init.normal_(model.blocks[0].mlp[0].weight)
    return model, [averaged, twin]


def build_converted() -> Built:
    """Parameters that get other memory."""
    model = Transformer().double()
    kept = model.tokens.weight.data  # a name of the memory that is not a parameter of the model
    model.head.weight.data = torch.rand(17, 16, dtype=torch.float64)
    model.bfloat16()
    model.kept = kept  # type: ignore[assignment]
    return model, []


def build_from_tensors() -> Built:
    """Parameters whose memory another tensor has, too, and which the script reads afterwards."""
    vectors = torch.randn(9, 4)
    model = nn.Sequential(nn.Embedding.from_pretrained(vectors, freeze=False), nn.Linear(4, 4))
    model.vectors = vectors  # type: ignore[assignment]
    model.array = model[1].weight.detach().numpy()  # type: ignore[assignment]
    return model, []


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x


def read_values(build: Callable[[], Built]) -> tuple[list[Any], Tensor, bool]:
    """Return the bits of the values after `run.prepare`, a random draw, and whether all was divided before it."""
    run = samestep.Run(None, batch_size=8, micro_batch_size=1)
    with run.sharded_init():
        model, others = build()
    is_divided = all(isinstance(param, PartialParameter) for param in model.parameters())
    kept = [
        value.sum() for value in (getattr(model, "kept", None), getattr(model, "vectors", None)) if value is not None
    ]
    drawn = torch.rand(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    models = {f"model_{number}": Twice(each) for number, each in enumerate([model, *others])}
    run.prepare(**models, optimizer=optimizer, shard_blocks=["Block"] if isinstance(model, Transformer) else None)
    values = [
        (f"{name}.{path}", gather_whole(value).view(torch.uint8).tolist() if value.dim() else value.tolist())
        for name, each in models.items()
        for path, value in each.state_dict().items()
    ]
    return [*values, ("kept", [each.item() for each in kept])], drawn, is_divided


@pytest.mark.parametrize(("build", "world_size"), one_in(3, [
    (build, world_size)
    for build in (build_plainly, build_as_gpt, build_copies, build_converted, build_from_tensors)
    for world_size in (2, 3, 4)
]))  # fmt: skip
def test_the_values_are_those_of_an_unsharded_model(build: Callable[[], Built], world_size: int) -> None:
    values, drawn, _ = samestep.spawn(read_values, 1, (build,))
    sharded, drawn_there, is_divided = samestep.spawn(read_values, world_size, (build,), env=SHARDED)
    assert [name for name, _ in sharded] == [name for name, _ in values]
    for (name, one), (_, other) in zip(values, sharded, strict=True):
        assert one == other, name
    assert torch.equal(drawn, drawn_there)
    assert is_divided is (build is not build_from_tensors)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made inside it and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if type(each) in (Tensor, nn.Parameter):
                self._storages[each.untyped_storage()] = None
        self.most = max(self.most, sum(each.nbytes() for each in [*self._storages]))
        return result


NUM_LAYERS, WIDTH = 16, 256
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


def build_deep() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    model.apply(lambda part: nn.init.normal_(part.weight, std=0.02) if isinstance(part, nn.Linear) else None)
    return model


def count_bytes() -> list[int]:
    """Return, of each rank, the most bytes of tensors in the construction of a model, and until it is prepared."""
    run = samestep.Run(None, batch_size=8, micro_batch_size=1)
    with LiveBytes() as live:
        with run.sharded_init():
            model = build_deep()
        built = live.most
        optimizer = torch.optim.AdamW(model.parameters())
        run.prepare(model=model, optimizer=optimizer, shard_blocks=[nn.Linear])
        return run._context.group.gather([built, live.most])


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_rank_never_has_the_whole_model(world_size: int) -> None:
    for built, prepared in samestep.spawn(count_bytes, world_size, env=SHARDED):
        if world_size == 1:
            assert built >= NUM_LAYERS * LAYER_BYTES
            continue
        shards = NUM_LAYERS * LAYER_BYTES / world_size
        print(built, prepared, shards, LAYER_BYTES)
        assert built <= shards + 2.5 * LAYER_BYTES  # the last layer, and the memory of the next one
        assert prepared <= shards + 3 * LAYER_BYTES  # a layer, the parts of it that were gathered, its shards


def use_after(what: Callable[[nn.Module], object], *, is_prepared: bool) -> None:
    run = samestep.Run(None, batch_size=8, micro_batch_size=1)
    with run.sharded_init():
        model = nn.Linear(3, 3)
    whole = model.weight
    if is_prepared:
        run.prepare(model=model)
    assert "PartialParameter(shape=(3, 3), dtype=torch.float32)" in repr(whole)
    assert sum(param.numel() for param in model.parameters()) == 12
    what(nn.ParameterList([whole]) if is_prepared else model)  # type: ignore[list-item]


@pytest.mark.parametrize(("what", "name", "is_prepared"), one_in(4, [
    (lambda model: [each + 1 for each in model.parameters()], "add", False),
    (lambda model: model.double(), "double", False),
    (lambda model: model.apply(lambda part: nn.init.normal_(part.weight)), "normal_", False),
    (copy.deepcopy, "data", False),
    (lambda model: [each.tolist() for each in model.parameters()], "tolist", True),
]))  # fmt: skip
def test_use_outside_of_the_block_is_refused(what: Any, name: str, is_prepared: bool) -> None:
    with pytest.raises(samestep.UsageError, match=rf"divided was used \({name}\)"):
        samestep.spawn(use_after, 2, (what,), {"is_prepared": is_prepared}, env=SHARDED)


def draw_differently() -> None:
    run = samestep.Run(None, batch_size=8, micro_batch_size=1)
    torch.rand(run.rank)
    with run.sharded_init():
        model = nn.Linear(3, 3)
    run.prepare(model=model)


def test_other_draws_on_a_rank_are_noticed() -> None:
    with pytest.raises(samestep.InvalidValue, match=r"the initial value of model is .* on rank 1"):
        samestep.spawn(draw_differently, 2, env=SHARDED)


def load(path: Path, build: Callable[[], nn.Module], arguments: dict[str, Any]) -> list[Any]:
    """Return the weights after `run.load_weights`, and the bytes that each rank has read."""
    read: list[int] = []
    before = weights.Saved.read

    def count(self: weights.Saved, first: int, last: int) -> Tensor:
        rows = self.rows

        class Counted:
            def __getitem__(self, key: Any) -> Tensor:
                some: Tensor = rows[key]
                read.append(some.nbytes)
                return some

        return before(weights.Saved(Counted(), self.shape), first, last)

    weights.Saved.read = count  # type: ignore[method-assign]
    run = samestep.Run(None, batch_size=8, micro_batch_size=1)
    with run.sharded_init():
        model = build()
        if arguments.pop("inside"):
            run.load_weights(model, path, **arguments)
    if read == []:
        run.load_weights(model, path, **arguments)
    run.prepare(model=Twice(model))
    values = {name: gather_whole(value) for name, value in model.state_dict().items()}
    return [values, run._context.group.gather(sum(read))]


@pytest.mark.parametrize(("world_size", "inside"), one_in(2, [(3, True), (3, False), (1, True)]))
def test_each_rank_reads_its_rows_of_several_files(tmp_path: Path, world_size: int, inside: bool) -> None:
    whole = {f"model.{name}": value for name, value in Transformer().state_dict().items() if name != "head.weight"}
    names = [*whole]
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: whole[name] for name in some}, tmp_path / file)
    index = {name: file for file, some in files.items() for name in some}
    (tmp_path / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    arguments = {"rename": "model.{}".format, "inside": inside}
    values, num_bytes = samestep.spawn(load, world_size, (tmp_path, Transformer, arguments), env=SHARDED)
    assert values["head.weight"].equal(whole["model.tokens.weight"])
    assert all(values[name.removeprefix("model.")].equal(value) for name, value in whole.items())
    total = sum(value.nbytes for value in whole.values())
    for of_rank in num_bytes:
        assert of_rank <= total / world_size * 1.3  # whole rows


def load_here(path: Path, model: nn.Module, **arguments: Any) -> nn.Module:
    samestep.Run(None, batch_size=8).load_weights(model, path, **arguments)
    return model


def test_weights_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 3), "more": torch.ones(1)}, file)
    for model, message in (
        (nn.Linear(3, 2), "lacks bias of the model: pass rename="),
        (nn.Linear(3, 2, bias=False), "has more, which the model lacks"),
    ):
        with pytest.raises(samestep.InvalidValue, match=message):
            load_here(tmp_path, model)
    with pytest.raises(samestep.InvalidValue, match=r"weight has the shape \(2, 4\), and weight in .* has \(2, 3\)"):
        load_here(file, nn.Linear(4, 2), strict=False)
    assert load_here(file, nn.Linear(3, 2).bfloat16(), strict=False).weight.tolist() == [[1.0] * 3] * 2
    file.write_bytes(b"nothing")
    for path in (file, tmp_path / "none", tmp_path):
        with pytest.raises(samestep.InvalidValue, match="holds no weights that can be read"):
            load_here(path, nn.Linear(3, 2))
    file.unlink()
    (tmp_path / weights.INDEX).write_text('{"weight_map": {"weight": "../model.safetensors"}}')
    with pytest.raises(samestep.InvalidValue, match="which is not beside it"):
        load_here(tmp_path, nn.Linear(3, 2))
