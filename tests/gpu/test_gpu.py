"""Training on a GPU: `make test-gpu`. Without one, the tests marked `gpu` are skipped. One is enough, also for NCCL.

The same tests run on the CPU where they can. On the CPU, `make test` runs one of them and `make soak` the others, which
other tests cover, too.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from promises.trial import Started
from support.ports import reserve_port
from support.runs import check, digest, find_tests, read_rows, samestep_command
from support.snapshots import read_snapshot
from torch import Tensor, nn
from torch.utils.data import Dataset

import samestep
from samestep.snapshot.store import Store
from samestep.world.group import Group

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [CUDA, pytest.param("cpu", marks=pytest.mark.soak)]


class Pictures(Dataset[tuple[Tensor, int]]):
    """Random images, with new random noise at every read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return image + 0.1 * torch.rand(3, 8, 8), index % 4


class Model(nn.Module):
    """Convolutions, BatchNorm, dropout, and attention; `width` chooses the size of the buckets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))

    def forward(self, images: Tensor) -> Tensor:
        words = self.features(images).flatten(2).transpose(1, 2)
        words = words + self.attention(words, words, words, need_weights=False)[0]
        scores: Tensor = self.head(words.mean(1))
        return scores


def strike(fault: str, marker: Path) -> None:
    if fault == "raise":
        raise ValueError("a broken image")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.Signals[fault])


def train(
    run_dir: str, *, precision: Any = "fp32", width: int = 32, is_compiled: bool = False,
    is_staged: bool = False, shard: Any = None, fault: str | None = None, **loading: Any,
) -> str:  # fmt: skip
    """Train two epochs of four steps. Returns the type of the device.

    Args:
        fault: what happens to the last rank in step 5: the name of a signal that it gets the first time, or "raise".
    """
    if is_staged:
        Group.needs_staging = lambda group, device: True
    run = samestep.Run(
        run_dir,
        batch_size=16,
        micro_batch_size=4,
        precision=precision,
        snapshot_every=3,
        log_every=1,
        shard=shard,
    )
    assert run.dir is not None
    model = Model(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.prepare(model=model, optimizer=optimizer)
    forward = torch.compile(model) if is_compiled else model
    for epoch in run.epochs(Pictures(), 2, **loading):
        for step in epoch:
            for images, labels in step:
                assert images.device == run.device
                with run.autocast():
                    loss = F.cross_entropy(forward(images), labels)
                if fault is not None and step.number == 5 and run.rank == run.world_size - 1:
                    strike(fault, run.dir / f"{fault}.once")
                step.backward(loss * 2.0**20 if precision == "fp16" and step.number == 1 else loss)  # it overflows
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scores = run.evaluate(lambda batch: {"loss": F.cross_entropy(model(batch[0]), batch[1])}, Pictures())
        run.log({"validation/loss": scores["loss"]})
    return run.device.type


def spawn(run_dir: Path, device: str, world_size: int = 1, max_steps: int = 0, **arguments: Any) -> str:
    """Train on several ranks, which share the GPUs over gloo. Returns the digest of the run."""
    variables = {"SAMESTEP_BACKEND": "gloo"} | ({"SAMESTEP_MAX_STEPS": str(max_steps)} if max_steps else {})
    found = samestep.spawn(train, world_size, (str(run_dir),), arguments, device=device, env=variables)
    assert found == device
    return digest(run_dir)


@pytest.mark.parametrize("device", DEVICES)
def test_one_rank_repeats_and_resumes(device: str, tmp_path: Path) -> None:
    expected = spawn(tmp_path / "whole", device)
    assert spawn(tmp_path / "again", device) == expected
    spawn(tmp_path / "resumed", device, max_steps=5)
    assert spawn(tmp_path / "resumed", device) == expected
    losses = [row["train/loss"] for row in read_rows(tmp_path / "whole") if "train/loss" in row]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


# Up to 4 MiB of all ranks' parts are sent directly; more by halving and doubling, or in chunks for 3 ranks.
SIZES = [(2, 32), (3, 32), (4, 32), (2, 30_000), (3, 30_000)]


@pytest.mark.parametrize(
    ("device", "world_size", "width"),
    [pytest.param("cuda", *size, marks=pytest.mark.gpu) for size in SIZES]
    + [pytest.param("cpu", *size, marks=pytest.mark.soak) for size in SIZES[:-1]]
    + [("cpu", *SIZES[-1])],
)
def test_ranks_share_a_gpu(device: str, world_size: int, width: int, tmp_path: Path) -> None:
    """On the CPU, gradients are copied to the memory that is exchanged, too."""
    found = spawn(tmp_path / "many", device, world_size, width=width, is_staged=device == "cpu")
    assert found == spawn(tmp_path / "one", device, width=width)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param("cuda", "bf16", marks=pytest.mark.gpu),
        pytest.param("cuda", "fp16", marks=pytest.mark.gpu),
        pytest.param("cuda", "tf32", marks=pytest.mark.gpu),
        pytest.param("cpu", "bf16", marks=pytest.mark.soak),
        pytest.param("cpu", "fp16", marks=pytest.mark.soak),
    ],
)
def test_mixed_precision(device: str, precision: str, tmp_path: Path) -> None:
    expected = spawn(tmp_path / "one", device, precision=precision)
    assert expected != spawn(tmp_path / "fp32", device)
    spawn(tmp_path / "two", device, 2, max_steps=5, precision=precision)
    assert spawn(tmp_path / "two", device, precision=precision) == expected
    rows = read_rows(tmp_path / "one")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert all(loss < 10 for k, loss in enumerate(losses) if k != 1)
    if precision == "fp16":  # the scale was halved before the stop
        assert rows[1]["train/skipped_steps"] == 1
        assert "train/skipped_steps" not in rows[0]
        newest = Store(tmp_path / "two").snapshots()[-1]
        scale = read_snapshot(Store(tmp_path / "two"), newest)["position"]["precision"]
        assert scale == {"scale": 2.0**15, "good_steps": 6}


@pytest.mark.timeout(600)  # It compiles kernels.
@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str, tmp_path: Path) -> None:
    if device == "cpu":
        pytest.importorskip("torch._inductor.cpp_builder").get_cpp_compiler()
    assert spawn(tmp_path / "two", device, 2, is_compiled=True) == spawn(tmp_path / "one", device, is_compiled=True)


@pytest.mark.parametrize("device", DEVICES)
def test_pinned_memory_and_workers(device: str, tmp_path: Path) -> None:
    expected = spawn(tmp_path / "plain", device, pin_memory=False)
    assert spawn(tmp_path / "pinned", device, pin_memory=True, num_workers=2) == expected
    assert spawn(tmp_path / "pinned-2", device, 2, pin_memory=True, num_workers=1) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_snapshots_hold_the_state_of_their_step(device: str, tmp_path: Path) -> None:
    """Copies are made while the next step runs, and must not contain its update."""
    spawn(tmp_path / "whole", device)
    spawn(tmp_path / "stopped", device, max_steps=6)
    whole = {each.step: each for each in Store(tmp_path / "whole").snapshots() if each.name is None}
    assert sorted(whole) == [3, 6, 8]
    assert digest(tmp_path / "stopped", 6) == whole[6].manifest["digest"]
    weights = read_snapshot(Store(tmp_path / "whole"), whole[8])["objects"]["model"]
    assert {weight.device.type for weight in weights.values()} == {"cpu"}


@pytest.mark.parametrize("device", DEVICES)
def test_second_opinions_agree(device: str, tmp_path: Path) -> None:
    variables = {"SAMESTEP_BACKEND": "gloo", "SAMESTEP_CHECK_COMPUTE_EVERY": "2"}
    samestep.spawn(train, 2, (str(tmp_path / "compared"),), device=device, env=variables)
    assert digest(tmp_path / "compared") == spawn(tmp_path / "plain", device)


VERIFIED = """
from gpu.test_gpu import train
train("runs/verified")
"""


@pytest.mark.parametrize("device", DEVICES)
def test_replay(device: str, tmp_path: Path) -> None:
    """The checksums of the gradients in the ledger are computed on the GPU."""
    (tmp_path / "script.py").write_text(VERIFIED)
    env = {"PYTHONPATH": str(Path(__file__).parents[1])}
    flags = ["--nproc-per-node", "2", "--device", device, "--backend", "gloo"]
    check(samestep_command("launch", *flags, "script.py", cwd=tmp_path, env=env))
    done = samestep_command("replay", "runs/verified", "--step", "5", *flags, "script.py", cwd=tmp_path, env=env)
    assert "the bits of steps 3 to 5 agree with the run's ledger" in check(done).stdout


def train_queued(run_dir: str) -> None:
    """Let torch raise an error where the host waits for the GPU, after the first steps."""
    run = samestep.Run(run_dir, batch_size=16, micro_batch_size=4, precision="bf16", log_every=1000)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.prepare(model=model, optimizer=optimizer)
    for step in run.steps(Pictures(), 8, num_workers=1):
        torch.cuda.set_sync_debug_mode("error" if step.number in range(2, 7) else "default")
        for images, labels in step:
            with run.autocast():
                scores = model(images)
                loss = F.cross_entropy(scores, labels)
            step.log(accuracy=(scores.argmax(1) == labels).float().mean())
            step.backward(loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.gpu
def test_a_step_is_queued_without_waiting(tmp_path: Path) -> None:
    samestep.spawn(train_queued, 1, (str(tmp_path),), device="cuda")


def train_on_two_devices(run_dir: str, kinds: tuple[str, str]) -> list[str]:
    """Train branches of a model, with BatchNorm, on two devices of one rank. Returns the devices of the gradients."""
    run = samestep.Run(run_dir, batch_size=16, micro_batch_size=4, device="cpu", log_every=1)
    branches = nn.ModuleList(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(kind) for kind in kinds
    )
    optimizer = torch.optim.Adam(branches.parameters(), 1e-2)
    run.prepare(model=branches, optimizer=optimizer, device_map="keep")
    for epoch in run.epochs(Pictures(), 2):
        for step in epoch:
            for images, labels in step:
                scores = sum(branch(images.to(kind)).cpu() for branch, kind in zip(branches, kinds, strict=True))
                step.backward(F.cross_entropy(scores, labels))
            devices = [param.grad.device.type for param in branches.parameters()]
            run.clip_grad_norm_(branches.parameters(), 0.5)
            optimizer.step()
    return devices


@pytest.mark.parametrize("second", DEVICES)
def test_layers_on_two_devices(second: str, tmp_path: Path) -> None:
    digests = set()
    for world_size in (1, 2, 3):
        run_dir = tmp_path / f"{world_size}"
        devices = samestep.spawn(train_on_two_devices, world_size, (str(run_dir), ("cpu", second)), device="cpu")
        assert devices == ["cpu"] * 6 + [second] * 6
        digests.add(digest(run_dir))
    assert len(digests) == 1


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_divided_optimizers(device: str, world_size: int, tmp_path: Path) -> None:
    expected = spawn(tmp_path / "whole", device)
    spawn(tmp_path / "divided", device, world_size, max_steps=5, shard="optimizer", is_staged=device == "cpu")
    assert spawn(tmp_path / "divided", device, shard="optimizer") == expected


@pytest.mark.parametrize("device", [CUDA, "cpu"])
def test_fsdp2_needs_nccl(device: str, tmp_path: Path) -> None:
    """Gloo would end the process with a segmentation fault."""
    with pytest.raises(samestep.InvalidValue, match='backend="gloo" on a GPU is not available with shard="fsdp2"'):
        spawn(tmp_path, device, 2, shard="fsdp2", is_staged=device == "cpu")


NODE = """
import ast, sys
from gpu.test_gpu import train
import torch.distributed as dist
train("runs/nccl", **ast.literal_eval(sys.argv[1]))
assert "nccl" in dist.get_backend_config()
"""


def launch_nodes(directory: Path, world_size: int, *flags: str, **arguments: Any) -> tuple[list[int], str]:
    """Train on nodes of one rank, which share a GPU over NCCL. It permits this only between hosts (NCCL_HOSTID).

    Returns the exit codes of the launchers, and what they have printed.
    """
    (directory / "script.py").write_text(NODE)
    nodes: list[Started] = []
    with reserve_port() as port:
        for k in range(world_size):
            command = [
                sys.executable, "-m", "samestep", "launch", "--nnodes", str(world_size), "--node-rank", str(k),
                "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--device", "cuda:0", *flags,
                "script.py", repr(arguments),
            ]  # fmt: skip
            variables = {"SAMESTEP_RDZV_SECRET": "secret of the nodes", "PYTHONPATH": find_tests()}
            nodes.append(Started(command, directory / f"node-{k}", {**variables, "NCCL_HOSTID": f"host-{k}"}))
        try:
            codes = [node.finish(240) for node in nodes]
        finally:
            for node in nodes:
                node.kill_all()
    return codes, "\n".join(node.output for node in nodes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (2, {"width": 30_000}),
        (3, {"width": 30_000}),
        (2, {"precision": "bf16"}),
        (2, {"shard": "optimizer"}),
        (3, {"shard": "optimizer"}),
        (2, {"shard": "fsdp2"}),
        (3, {"shard": "fsdp2"}),
        (3, {"shard": "fsdp2", "precision": "bf16", "width": 30_000}),
        (2, {"is_compiled": True}),
    ],
    ids=str,
)
def test_nccl(world_size: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    codes, output = launch_nodes(tmp_path, world_size, **arguments)
    assert codes == [0] * world_size, output
    alone = {name: value for name, value in arguments.items() if name != "shard"}
    assert digest(tmp_path / "runs/nccl") == spawn(tmp_path / "one", "cuda", **alone)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("shard", [None, "fsdp2"])
def test_a_rank_is_lost_over_nccl(fault: str, shard: str | None, tmp_path: Path) -> None:
    """The others wait for it in kernels of the GPU."""
    codes, output = launch_nodes(tmp_path, 2, "--max-restarts", "1", "--stuck-after-s", "8", shard=shard, fault=fault)
    assert codes == [0, 0], output
    assert (tmp_path / "runs/nccl/restarts.jsonl").exists()
    assert digest(tmp_path / "runs/nccl") == spawn(tmp_path / "one", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [(2, {}), (3, {}), (3, {"width": 30_000}), (3, {"precision": "bf16"})],
    ids=str,
)
def test_the_others_continue_over_nccl(world_size: int, arguments: dict[str, Any], fault: str, tmp_path: Path) -> None:
    codes, output = launch_nodes(tmp_path, world_size, "--heal", "--stuck-after-s", "8", fault=fault, **arguments)
    assert codes == [0] * world_size, output
    assert len((tmp_path / "runs/nccl/heals.jsonl").read_text().splitlines()) == 1
    assert digest(tmp_path / "runs/nccl") == spawn(tmp_path / "one", "cuda", **arguments)


@pytest.mark.parametrize("device", [CUDA, "cpu"])
def test_the_others_continue_on_one_gpu(device: str, tmp_path: Path) -> None:
    """Over gloo, through host memory."""
    arguments = {"fault": "SIGKILL", "is_staged": device == "cpu"}
    (tmp_path / "script.py").write_text(f"from gpu.test_gpu import train\ntrain('runs/gloo', **{arguments})")
    command = ["launch", "--nproc-per-node", "3", "--heal", "--device", device, "--backend", "gloo", "script.py"]
    check(samestep_command(*command, cwd=tmp_path, env={"PYTHONPATH": find_tests()}))
    assert len((tmp_path / "runs/gloo/heals.jsonl").read_text().splitlines()) == 1
    assert digest(tmp_path / "runs/gloo") == spawn(tmp_path / "one", device, is_staged=device == "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shard", [None, "fsdp2"])
def test_a_signal_saves_over_nccl(shard: str | None, tmp_path: Path) -> None:
    codes, output = launch_nodes(tmp_path, 2, shard=shard, fault="SIGTERM")
    assert codes == [75, 75], output
    codes, output = launch_nodes(tmp_path, 2, shard=shard)
    assert codes == [0, 0], output
    assert digest(tmp_path / "runs/nccl") == spawn(tmp_path / "one", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shard", [None, "fsdp2"])
def test_an_error_over_nccl(shard: str | None, tmp_path: Path) -> None:
    codes, output = launch_nodes(tmp_path, 2, shard=shard, fault="raise")
    assert codes == [1, 1], output
    assert "rank 1 raised ValueError: a broken image" in output
    assert "PeerFailed" not in output.partition("a broken image")[0]
