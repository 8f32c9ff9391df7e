"""A GPT-2 language model, trained on the source of Python's standard library or on text of yours.

samestep train gpt --nproc-per-node 2
samestep train gpt --preset small --data tokens --steps 5000 --precision bf16 --compile
"""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import samestep
from samestep.command_line import PATH
from samestep.recipes import AMOUNT, COUNT, SHARE, Recipe, build_schedule, keep_best, quarter
from samestep.recipes.corpora.token_file import open_corpus, read_standard_library, split
from samestep.recipes.models.gpt2 import GPT2, PRESETS

LEARNING_RATES = {"tiny": 2e-3, "small": 1e-3, "gpt2": 6e-4}
SIZES = {"layers": "num_layers", "heads": "num_heads", "width": "width", "context": "context"}  # field of GPT2Config


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


@click.command("gpt", cls=Recipe, help=__doc__)
@click.option("--preset", type=click.Choice([*PRESETS]), default="tiny", help="size of the model")
@click.option("--data", type=PATH, help="output of samestep prepare text; default: Python's source")
@click.option("--layers", type=COUNT, help="number of blocks; default: the preset's")
@click.option("--heads", type=COUNT, help="attention heads of a block; default: the preset's")
@click.option("--width", type=COUNT, help="size of a token's vector; default: the preset's")
@click.option("--context", type=COUNT, help="tokens per sequence; default: the preset's")
@click.option("--steps", type=COUNT, default=1000, help="optimizer steps")
@click.option("--batch-size", type=COUNT, default=32, help="sequences per step, over all ranks")
@click.option("--micro-batch-size", type=COUNT, help="sequences per forward and backward pass; default: a quarter")
@click.option("--lr", type=AMOUNT, help="highest learning rate; default: 0.002 for tiny, 0.001 small, 0.0006 gpt2")
@click.option("--lr-end", type=AMOUNT, default=0.1, help="last learning rate relative to --lr")
@click.option("--warm-up", type=click.IntRange(0), help="steps of rising learning rate; default: 5 %, at most 2000")
@click.option("--weight-decay", type=AMOUNT, default=0.1, help="weight decay of matrices")
@click.option("--beta2", type=SHARE, default=0.95, help="second beta of AdamW")
@click.option("--dropout", type=SHARE, default=0.0, help="probability of dropout")
@click.option("--precision", default="fp32", help="fp32, tf32, bf16 or fp16")
@click.option("--compile", is_flag=True, help="use torch.compile, which needs a C++ compiler")
@click.option("--checkpoint-activations", is_flag=True, help="use less memory and more time")
@click.option("--validate-every", type=COUNT, default=100, help="steps between validations")
@click.option("--validate-samples", type=COUNT, default=256, help="sequences per validation")
@click.option("--held-out", type=SHARE, default=0.05, help="share of the data to validate on")
@click.option("--patience", type=COUNT, default=10, help="end after this many validations without a lower loss")
@click.option("--seed", default=0, help="seed of everything random")
@click.option("--num-workers", default=0, help="DataLoader workers per rank")
@click.option("--run-dir", default="runs/gpt", help="directory of the run")
def main(**options: Any) -> None:
    args = SimpleNamespace(**options)
    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size or quarter(args.batch_size),
        seed=args.seed,
        precision=args.precision,
        snapshot_every=args.validate_every,
        config=options,
    )
    corpus = open_corpus(args.data) if args.data else read_standard_library()
    sizes = {field: options[name] for name, field in SIZES.items() if options[name]}
    size = corpus.tokenizer.vocabulary_size
    config = replace(PRESETS[args.preset], vocabulary_size=size, dropout=args.dropout, **sizes)
    if config.width % config.num_heads:
        raise samestep.InvalidValue(
            f"--width is {config.width}, which is no multiple of {config.num_heads} --heads: change one", code="SS104"
        )
    with run.sharded_init():
        model = GPT2(config, checkpoint_activations=args.checkpoint_activations)
    train, held_out = split(corpus, config.context, args.held_out, args.validate_samples)
    lr = LEARNING_RATES[args.preset] if args.lr is None else args.lr
    optimizer = build_optimizer(model, lr, args.weight_decay, beta2=args.beta2, fused=False)
    num_warm_up = min(2000, args.steps // 20) if args.warm_up is None else args.warm_up
    scheduler = build_schedule(optimizer, args.steps, num_warm_up, args.lr_end)
    run.prepare(tokenizer=corpus.tokenizer, model=model, optimizer=optimizer, scheduler=scheduler)
    forward = torch.compile(model) if args.compile else model
    run.state["model"] = asdict(config)  # for `samestep sample`

    def compute_loss(tokens: Tensor) -> Tensor:
        with run.autocast():
            logits = forward(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    for step in run.steps(train, args.steps, num_workers=args.num_workers):
        for tokens in step:
            step.backward(compute_loss(tokens))
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step.number + 1) % args.validate_every == 0 or step.number + 1 == args.steps:
            loss = run.evaluate(lambda tokens: {"loss": compute_loss(tokens)}, held_out)["loss"]
            run.log({"validation/loss": loss})
            keep_best(run, loss, args.patience, is_loss=True)
            run.summary["validation loss"] = f"{loss:.4f} (best {run.state['best']:.4f})"


if __name__ == "__main__":
    main()
