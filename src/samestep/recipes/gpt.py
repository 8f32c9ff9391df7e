"""A GPT-2 language model, trained on the source of Python's standard library or on text of yours.

samestep train gpt --nproc-per-node 2
samestep train gpt --preset small --data tokens --steps 5000 --precision bf16 --compile
"""

import argparse
import difflib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import samestep
from samestep.recipes import build_schedule, check_numbers, run_main
from samestep.recipes.corpora.text_tokenizer import BYTES
from samestep.recipes.corpora.token_file import name_tokenizer, open_corpus, read_standard_library, split
from samestep.recipes.models.gpt2 import GPT2, PRESETS, GPT2Config
from samestep.snapshot.reading import read_run

LEARNING_RATES = {"tiny": 2e-3, "small": 1e-3, "gpt2": 6e-4}
SIZES = {"layers": "num_layers", "heads": "num_heads", "width": "width", "context": "context"}  # field of GPT2Config


def parse_preset(name: str) -> str:
    """Return the name of a preset. Raises ArgumentTypeError if there is none."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(PRESETS)}"
        raise argparse.ArgumentTypeError(f"there is no preset {name}; {advice}")
    return name


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpt", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--preset", type=parse_preset, default="tiny", metavar="P", help="model size: tiny, small, gpt2 (default: tiny)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="output of samestep prepare text (default: Python's source)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of blocks (default: the preset's)")
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads of a block (default: the preset's)")
    parser.add_argument("--width", type=int, metavar="N", help="size of a token's vector (default: the preset's)")
    parser.add_argument("--context", type=int, metavar="T", help="tokens per sequence (default: the preset's)")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, over all ranks (default: 32)")
    parser.add_argument("--micro-batch-size", type=int, help="sequences per forward pass (default: batch / 4)")
    parser.add_argument("--lr", type=float, help="highest learning rate (default: 0.002 for tiny, 0.0006 for gpt2)")
    parser.add_argument("--lr-end", type=float, default=0.1, help="last learning rate relative to --lr (default: 0.1)")
    parser.add_argument("--warm-up", type=int, help="steps of rising learning rate (default: 5 %%, at most 2000)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="weight decay of matrices (default: 0.1)")
    parser.add_argument("--beta2", type=float, default=0.95, help="second beta of AdamW (default: 0.95)")
    parser.add_argument("--dropout", type=float, default=0.0, help="default: 0")
    parser.add_argument("--precision", default="fp32", help="fp32, tf32, bf16 or fp16 (default: fp32)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile, which needs a C++ compiler")
    parser.add_argument("--checkpoint-activations", action="store_true", help="use less memory and more time")
    parser.add_argument("--validate-every", type=int, default=100, help="steps between validations (default: 100)")
    parser.add_argument("--validate-samples", type=int, default=256, help="sequences per validation (default: 256)")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the data to validate on (default: 0.05)")
    parser.add_argument(
        "--patience",
        type=int,
        default=10,
        metavar="N",
        help="stop after N validations without a lower loss (default: 10)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--num-workers", type=int, default=0, help="DataLoader workers per rank (default: 0)")
    parser.add_argument("--run-dir", default="runs/gpt", help="default: runs/gpt")
    args = parser.parse_args(argv)
    counts = "steps batch_size micro_batch_size validate_every validate_samples patience context layers heads width"
    check_numbers(parser, args, counts, least=1)
    check_numbers(parser, args, "lr lr_end warm_up weight_decay num_workers", least=0)
    check_numbers(parser, args, "dropout beta2", 0, 1)
    if not 0 < args.held_out < 1:
        parser.error(f"--held-out is {args.held_out}: give a fraction between 0 and 1")
    if args.micro_batch_size is None:
        args.micro_batch_size = args.batch_size // math.gcd(args.batch_size, 4)  # so that up to 4 ranks share a step
    if args.warm_up is None:
        args.warm_up = min(2000, args.steps // 20)
    for name, field in SIZES.items():
        setattr(args, name, getattr(args, name) or getattr(PRESETS[args.preset], field))
    if args.width % args.heads:
        parser.error(f"--width is {args.width}, and --heads {args.heads}: give a width that is a multiple of the heads")
    if args.lr is None:
        args.lr = LEARNING_RATES[args.preset]
    return args


def check_run(run: samestep.Run, here: Mapping[str, Any]) -> None:
    """Compare the configuration with that of the resumed run. Raises Error if the models differ."""
    if run.dir is None or not (run.dir / "run.json").exists():
        return
    there = read_run(run.dir, str(run.dir))["config"]
    if there.get("tokenizer") and here["tokenizer"] and there["tokenizer"] != here["tokenizer"]:
        raise samestep.Error(
            f"the run in {run.dir} was trained on tokens of {there['tokenizer']}, and the data is of "
            f"{here['tokenizer']}: name its data by --data, or another --run-dir",
            code="SS405",
        )
    for name in ("preset", *SIZES):
        if there.get(name) and here[name] and there[name] != here[name]:
            raise samestep.Error(
                f"the run in {run.dir} has --{name} {there[name]}, and this is --{name} {here[name]}: give the run's, "
                "or another --run-dir",
                code="SS405",
            )


def build_optimizer(
    model: GPT2, lr: float, weight_decay: float, *, beta2: float = 0.95, fused: bool = True
) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices and embeddings, and not for biases and LayerNorm.

    The fused kernel is faster. On the CPU, its bits depend on where a shard ends, so it is not available with
    `shard="fsdp2"`.
    """
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=fused)


class Throughput:
    """Measures tokens per second, without validations."""

    def __init__(self, run: samestep.Run, context: int) -> None:
        self._run = run
        self._tokens_per_step = run.batch_size * context
        self._began: tuple[float, int] | None = None

    def begin(self, *, again: bool = True) -> None:
        """Begin to measure at the end of a step. A later call has no effect without `again`."""
        if again or self._began is None:
            self._began = self._read_clock(), self._run.steps_done

    def format_rate(self) -> str:
        """Return the rate of the steps since `begin`; "" if there are none."""
        if self._began is None or self._run.steps_done == self._began[1]:
            return ""
        elapsed_s = self._read_clock() - self._began[0]
        return f"{(self._run.steps_done - self._began[1]) * self._tokens_per_step / elapsed_s:,.0f} tokens/s"

    def _read_clock(self) -> float:
        if self._run.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    settings = vars(args) | {"tokenizer": name_tokenizer(args.data) if args.data else str(BYTES)}
    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        precision=args.precision,
        snapshot_every=args.validate_every,
        config=settings,
    )
    run.once(check_run, run, settings)
    corpus = open_corpus(args.data) if args.data else read_standard_library()
    sizes = {field: getattr(args, name) for name, field in SIZES.items()}
    config = GPT2Config(corpus.tokenizer.vocabulary_size, **sizes, dropout=args.dropout)
    with run.sharded_init():
        model = GPT2(config, checkpoint_activations=args.checkpoint_activations)
    train, held_out = split(corpus, args.context, args.held_out, args.validate_samples)
    optimizer = build_optimizer(model, args.lr, args.weight_decay, beta2=args.beta2, fused=False)
    scheduler = build_schedule(optimizer, args.steps, args.warm_up, args.lr_end)
    run.prepare(tokenizer=corpus.tokenizer, model=model, optimizer=optimizer, scheduler=scheduler)
    forward = torch.compile(model) if args.compile else model
    run.state["model"] = asdict(config)  # for `samestep sample`
    throughput = Throughput(run, args.context)

    def compute_loss(tokens: Tensor) -> Tensor:
        with run.autocast():
            logits = forward(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def validate() -> None:
        rate = throughput.format_rate()
        scores = run.evaluate(lambda tokens: {"loss": compute_loss(tokens)}, held_out)
        loss = scores["loss"]
        run.log({"validation/loss": loss})
        if loss < run.state.get("best", math.inf):
            run.state |= {"best": loss, "num_worse": 0}
            run.snapshot("best")
        else:
            run.state["num_worse"] += 1
            if run.state["num_worse"] >= args.patience:
                run.stop(f"no lower validation loss in {args.patience} validations")
        run.summary["validation loss"] = f"{loss:.4f} (best {run.state['best']:.4f})"
        if rate:
            run.summary["rate"] = rate
            run.print(f"training at {rate}")
        throughput.begin()

    for step in run.steps(train, args.steps, num_workers=args.num_workers):
        for tokens in step:
            step.backward(compute_loss(tokens))
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        throughput.begin(again=False)  # the first step compiles and warms up
        if (step.number + 1) % args.validate_every == 0 or step.number + 1 == args.steps:
            validate()


if __name__ == "__main__":
    run_main(main)
