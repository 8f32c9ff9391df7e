"""Each fault that `samestep verify` looks for is planted in a script. It is found, and the message names it.

The ranks are forked by this process's own server instead of by a `samestep launch` each time, which takes 1.5 s.
"""

import re
import subprocess
import traceback
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.selection import one_in
from tools.planted import plant

import samestep
from samestep.launch.target import Target
from samestep.tools import traced_script
from samestep.tools.verify.command import run_verify


def run_script(path: str) -> None:
    """Run a script on a rank, as the launcher does."""
    from samestep.launch.rank_process import load_main

    code, main = load_main("script", path, [])
    exec(code, main.__dict__)


def run_quickly(command: list[str], variables: Mapping[str, str], output: Path) -> int:
    """Replaces `run_to_end`, unless the launcher has to decide about deaths."""
    if "--heal" in command:
        return run_with_hash_seed(command, variables, output)
    num_ranks, script = int(command[command.index("--nproc-per-node") + 1]), command[-1]
    ours = {name: value for name, value in variables.items() if name.startswith("SAMESTEP_")}
    try:
        samestep.spawn(run_script, num_ranks, (script,), device="cpu", env=ours)
    except Exception as error:
        output.write_text("".join(traceback.format_exception(error)) + f"samestep: error: {error}")
        return 137 if "SIGKILL" in str(error) else getattr(error, "exit_code", 1)
    output.touch()
    return 0


def run_with_hash_seed(command: list[str], variables: Mapping[str, str], output: Path) -> int:
    """Runs a program, as `run_to_end` does. Its interpreter has the run's hash seed."""
    with open(output, "w") as file:
        return commands.run(command, real=True, env=variables, stdout=file, stderr=subprocess.STDOUT).returncode


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`verify(fault...)` returns the exit code and the output."""
    monkeypatch.setattr(traced_script, "run_to_end", run_quickly)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # runs have different ones, unless it is set
    monkeypatch.chdir(tmp_path)  # a trace looks into all modules below: these tests are not the script's

    def run(
        num_steps: int = 3, num_kills: int = 0, kill_seed: int = 3, hashes: bool = False,
        shard: str | None = None, heal: bool = False, **faults: str,
    ) -> tuple[int, str]:  # fmt: skip
        if hashes:
            monkeypatch.setattr(traced_script, "run_to_end", run_with_hash_seed)
        script = tmp_path / "planted.py"
        script.write_text(plant(**faults))
        options = {
            "steps": num_steps, "world_sizes": "1,3", "kills": num_kills, "kill_seed": kill_seed,
            "shard": shard, "heal": heal,
        }  # fmt: skip
        options = {name: value for name, value in options.items() if value or name in ("kills", "kill_seed")}
        code = run_verify.callback(Target("script", str(script)), options)
        return code, capsys.readouterr().out

    return run


KILLED_ON_3 = 0  # a seed of the kills for which the first run is on 3 ranks, and resumed on 1
WIDE = "nn.Linear(6, 500), nn.LayerNorm(500), nn.Linear(500, 500), nn.LayerNorm(500), nn.Linear(500, 3)"
LAYERS = "nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)"
UNPOOL = (
    "y, i = F.max_pool1d(x.unsqueeze(1), 2, return_indices=True); "
    "x = x + F.max_unpool1d(y, i, 2).squeeze(1) * (1 + open('/dev/urandom', 'rb').read(1)[0])"
)


@pytest.mark.parametrize(
    ("faults", "words"),
    one_in(16, [
        # A generator of the script: seeded once, not seeded, in the model, in the data set.
        ({"before": "rng = np.random.default_rng(3)", "in_micro_batch": "x = x + float(rng.normal())"},
         ["differs from step 0", "first: model.layers.0.weight", "a global variable, its own generator"]),
        ({"in_model": "self.noise = torch.Generator().manual_seed(1)",
          "in_forward": "x = x + torch.randn(6, generator=self.noise)"},
         ["on 3 ranks and on 1 rank", "a global variable, its own generator"]),
        ({"in_data": "self.rng = np.random.default_rng(1)", "in_item": "x = x * float(self.rng.random())"},
         ["returned different values for the same samples", "not on earlier reads"]),
        # A data set whose samples depend on the rank: all of them, which the run refuses, or a few.
        ({"in_item": "x = x * torch.distributed.get_rank() if torch.distributed.is_initialized() else x"},
         ["exit code 2", "sample 0 of the data set differs between rank 0 and rank 1: build the same data set"]),
        ({"top": "import torch.distributed as dist",
          "in_item": "x = x * dist.get_rank() if 0 < index < 13 and dist.is_initialized() else x"},
         ["returned different values for the same samples (micro-batch 0 of step 0)", "not on the rank"]),
        # Data that each process creates anew, as if from a generator that the run has not seeded yet.
        ({"top": "salt = int.from_bytes(open('/dev/urandom', 'rb').read(6)) / 2**48", "in_item": "x = x + salt"},
         ["in two runs on 1 rank", "(micro-batch 0 of step 0): build random data after samestep.Run(...)"]),
        # A clock.
        ({"top": "import time", "in_item": "x = x + time.time_ns() % 997"},
         ["in two runs on 1 rank", "different values for the same samples", "read no clock and no file"]),
        ({"top": "import time", "in_micro_batch": "x = x * (1 + time.time() % 1)"},
         ["in two runs on 1 rank", "look for clocks (time.time(), datetime.now())"]),
        # An operator that is not deterministic.
        ({"arguments": ", deterministic=False", "in_forward": UNPOOL},
         ["in two runs on 1 rank", "with deterministic=False, operators that are not deterministic"]),
        # A buffer that counts this rank's micro-batches.
        ({"in_model": "self.register_buffer('seen', torch.zeros(()))", "before": "count = 0",
          "after_micro_batch": "count += 1", "in_step": "model.seen += count"},
         ["first: model.seen, the only tensor that differs", "a buffer must get its value from the whole step"]),
        # Threads.
        ({"before": "torch.set_num_threads(run.world_size)", "swap": f"{LAYERS} -> {WIDE}"},
         ["or calls torch.set_num_threads"]),
        # Code that reads the rank, and a counter in each model.
        ({"in_micro_batch": "x = x * (1 + run.world_size)"},
         ["the same inputs of micro-batch", "or it reads its rank or the number of ranks (run.rank"]),
        ({"top": "import os", "before": "scale = 1 + int(os.environ.get('RANK', 0)) + int(os.getenv('WORLD_SIZE', 1))",
          "in_micro_batch": "x = x * scale"},
         ["or it reads its rank or the number of ranks (run.rank, os.environ)"]),
        ({"in_model": "self.calls = 0", "in_forward": "self.calls += 1; x = x * self.calls"},
         ["the same inputs of micro-batch 2 give a different loss: the script keeps state from one micro-batch"]),
        ({"top": "import os, torch.distributed as dist", "in_model": "self.calls = 0",
          "in_forward": "self.calls += 1; x = x * self.calls",
          "in_step": "os.environ.get('RANK'); run.rank; dist.is_initialized() and dist.get_rank()"},
         ["the same inputs of micro-batch 2 give a different loss: the script keeps state from one micro-batch"]),
        # A mean over the ranks of what samestep averages already.
        ({"swap": "step.backward(loss -> step.backward(loss / run.world_size"},
         ["the same inputs of micro-batch 0 give a different loss", "or it reads its rank or the number of ranks"]),
    ]),
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(verify: Any, faults: dict[str, str], words: list[str]) -> None:
    code, printed = verify(**faults)
    assert code == 1, printed
    for expected in words:
        assert expected in printed, f"{expected!r} is not in\n{printed}"


SORTED = "words = list({'alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta'})"
BIAS = "model.layers[0].bias.data += "


@pytest.mark.parametrize(
    ("words", "faults"),
    one_in(6, [
        ("PYTHONHASHSEED", {"in_data": SORTED + "; self.ids = {w: i for i, w in enumerate(words)}",
                            "in_item": "x = x + self.ids['eta']"}),
        ("PYTHONHASHSEED", {"in_model": "self.salt = hash('salt') % 97", "in_forward": "x = x * self.salt"}),
        ("not on earlier reads", {"top": "reads = [0]", "in_item": "reads[0] += 1; x = x * reads[0]"}),
        ("not on earlier reads", {"in_data": "self.count = 0", "in_item": "self.count += 1; x = x * (self.count % 5)",
                                  "swap": "epochs(data, 9) -> epochs(data, 9, num_workers=1)"}),
    ]),
)  # fmt: skip
def test_an_order_of_hashes_or_of_reads_is_named(verify: Any, words: str, faults: dict[str, str]) -> None:
    code, printed = verify(num_steps=2, hashes=words == "PYTHONHASHSEED", **faults)
    assert code == 1, printed
    assert words in printed, printed


# Several runs on one to three ranks, with a kill and a resume: 17 s, and 19 s on a busy machine.
@pytest.mark.parametrize(
    ("in_step", "words"),
    one_in(2, [
        ("model.layers[0].weight.data += 1e-4 * average * rng.random()",
         r"first: model\.layers\.0\.weight, the only tensor that differs"),
        ("optimizer.param_groups[0]['lr'] = 0.01 * average", r"first: optimizer\.param_groups\.0\.lr, [\d.]+ and "),
    ]),
)  # fmt: skip
def test_what_no_snapshot_holds_is_found_by_the_interruption(verify: Any, in_step: str, words: str) -> None:
    code, printed = verify(
        num_steps=9, num_kills=1, kill_seed=KILLED_ON_3, before="average, rng = 0.0, random.Random(3)",
        in_step=f"average += float(step.loss); {in_step}",
    )  # fmt: skip
    assert code == 1, printed
    assert "in two runs on 1 rank, resumed" in printed
    assert "state that the script keeps from step to step, such as a generator of its own, is in no snapshot" in printed
    assert printed.count("likely: ") == 1, "two runs from begin to end were the same, so that it repeats"
    assert re.search(words, printed), printed


MODES = "none,optimizer,fsdp2"
NORM = "norm = sum(float(g.square().sum()) for g in grads) ** 0.5; [g.mul_(0.1 / norm) for g in grads]"
GRADS = "grads = [getattr(p.grad, '_local_tensor', p.grad) for p in model.parameters() if p.grad is not None]; "
SGD = "torch.optim.AdamW(model.parameters(), 0.02) -> torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)"
AVERAGE = "import samestep.engine.sharded_sum as p; p.ChunkSum.total = property(lambda self: self.sums[0] / 3)"
MINUS_ZERO = "h = (self.idle * 0.0).sum(); h.register_hook(lambda g: -torch.ones_like(g)); x = x + h"
ZEROS = (
    "import samestep.engine.sharded_unit as t; real = t.ShardedUnit.split; "
    "t.ShardedUnit.split = lambda self, flat: [x if x is None else torch.zeros_like(x) + x for x in real(self, flat)]"
)


# Several runs on one and three ranks: 20 s, and 23 s on a busy machine.
@pytest.mark.parametrize(
    ("shard", "faults", "words"),
    one_in(4, [
        # A norm over local shards, or over the gradients of a rank's own parameters.
        ("fsdp2", {"swap": f"optimizer.step() -> {GRADS}{NORM}; optimizer.step()"},
         ["on 3 ranks with shard=fsdp2 and on 1 rank", "first: model.layers.0.weight, of ",
          "the same gradients give a different model.layers.0.weight", "use run.clip_grad_norm_"]),
        ("optimizer", {"swap": f"optimizer.step() -> {GRADS}{NORM}; optimizer.step()"},
         ["on 3 ranks with shard=optimizer and on 1 rank",
          "the same gradients give a different model.layers.0.weight"]),
        # An average in place of the sum.
        ("fsdp2", {"top": AVERAGE},
         ["first: model.layers.0.weight", "the same losses give a different gradient of model.layers.0.weight",
          "such as a mean in place of a sum"]),
        # A fused optimizer.
        ("fsdp2", {"before": "optimizer.param_groups[0].update(fused=True, foreach=False)"},
         ["first: optimizer.state.model.layers.0.weight.exp_avg_sq, ", "or fused=True, whose kernel"]),
        # A buffer of +0.0, to which gradients of -0.0 are added.
        ("fsdp2", {"top": ZEROS, "swap": SGD, "in_model": "self.idle = nn.Parameter(torch.ones(4))",
                     "in_forward": MINUS_ZERO},
         ["first: optimizer.state.model.idle.momentum_buffer, the only tensor that differs",
          "the same losses give a different gradient of model.idle", "+0.0 in place of the neutral -0.0"]),
        # Initial values that depend on the number of ranks.
        ("fsdp2", {"before": "[m.reset_parameters() for m in model.modules() if hasattr(m, 'reset_parameters')]"},
         ["model.layers.0.weight differs before the first step: set initial values before run.prepare"]),
        (None, {"swap": "model = Model() -> torch.manual_seed(run.world_size); model = Model()"},
         ["model.layers.0.weight differs before the first step: its initial value must not depend on the rank"]),
    ]),
)  # fmt: skip
def test_a_fault_of_a_sharded_run_is_found_and_named(
    verify: Any, shard: str | None, faults: dict[str, str], words: list[str]
) -> None:
    code, printed = verify(num_steps=2, shard=shard, **faults)
    assert code == 1, printed
    for expected in words:
        assert expected in printed, f"{expected!r} is not in\n{printed}"


# Runs on one and three ranks, in three modes: 33 s, and 39 s on a busy machine.
def test_the_modes_of_a_sound_script_are_the_same(verify: Any) -> None:
    """Each resume is on another number of ranks or in another mode than the start before it."""
    code, printed = verify(num_steps=9, num_kills=2, shard=MODES)
    assert code == 0, printed
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    trained = [row[1] for row in rows if row[0] == "train"]
    assert trained == ["1 rank", "3 ranks", "3 ranks, optimizer", "3 ranks, fsdp2"]
    places = [row[1] for row in rows if row[0].startswith("killed") or row[0] == "resumed"]
    assert len(places) == 3
    assert all(one != other for one, other in pairwise(places))
    assert printed.endswith("everything is the same\n")


def test_the_others_continue_a_sound_script(verify: Any) -> None:
    code, printed = verify(num_steps=9, heal=True)
    assert code == 0, printed
    assert re.search(r"^ +healed +3 ranks +0-8 +same, 2 of 3 died ", printed, re.M)


def test_what_a_repeated_pass_changes_twice_is_found(verify: Any) -> None:
    code, printed = verify(
        heal=True,
        before="seen = []",
        in_micro_batch="seen.append(step.micro_batch)",
        in_step=f"{BIAS}len(seen) - len(set(seen)); seen.clear()",
    )
    assert code == 1, printed
    assert re.search(r"^ +healed +3 ranks +0-\d +(differs from step|exit code)", printed, re.M)
    assert "likely: the script collects or adds up values in the loop over micro-batches" in printed


def test_a_mode_that_the_run_refuses(verify: Any) -> None:
    swap = "AdamW(model.parameters(), 0.02) -> Adafactor(model.parameters())"
    code, printed = verify(num_steps=2, shard=MODES, swap=swap)
    assert code == 1, printed
    assert "on 3 ranks with shard=fsdp2 it ends with exit code 2:\noptimizer is Adafactor" in printed
