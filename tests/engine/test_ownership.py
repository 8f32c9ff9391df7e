"""`send_owned` copies tensors of any kind from their owners to all ranks."""

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.engine import ownership
from samestep.engine.ownership import send_owned
from samestep.world.group import Group


def build(owner: int) -> list[torch.Tensor]:
    """Return tensors of all kinds with random content. Rank 1 owns nothing."""
    generator = torch.Generator().manual_seed(owner)
    if owner == 1:
        return []
    real = torch.randn(3 * owner + 500, generator=generator)
    image = torch.randn(2, 3, 4, 4, generator=generator)
    return [
        torch.nn.Parameter(torch.randn(70, 9, generator=generator)),
        real.bfloat16(),
        torch.tensor(owner + 7),
        image.to(memory_format=torch.channels_last),
        torch.zeros(0, 4),
        real[:5] > 0,
        torch.complex(real, real.flip(0)),
        torch.randn(6, 7, generator=generator).double().t(),
        real[:3].to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.randn(11, generator=generator)),
    ]


def send_all(chunk_bytes: int) -> None:
    dist.init_process_group("gloo")
    group = Group(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    ownership.CHUNK_BYTES = chunk_bytes
    owned = [
        [each.detach() if owner == group.rank else torch.zeros_like(each) for each in build(owner)]
        for owner in range(group.world_size)
    ]
    before = [[each._version for each in of_rank] for of_rank in owned]
    send_owned(owned, group)
    for owner, of_rank in enumerate(owned):
        for found, expected, version in zip(of_rank, build(owner), before[owner], strict=True):
            assert found.stride() == expected.stride()
            assert found.tolist() == expected.tolist()
            assert owner == group.rank or not found.numel() or found._version > version
    dist.destroy_process_group()


@pytest.mark.parametrize(("world_size", "chunk_bytes"), [(2, 1), (3, 1000), (5, 1 << 20)])
def test_each_rank_gets_all(world_size: int, chunk_bytes: int) -> None:
    samestep.spawn(send_all, world_size, (chunk_bytes,))
