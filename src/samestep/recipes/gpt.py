"""A GPT-2 language model, trained on the source of Python's standard library or on text of yours.

samestep train gpt --nproc-per-node 2
samestep train gpt --preset small --data train.bin --vocabulary-size 50257 --precision bf16 --compile
"""

import math
import os
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.cli import PATH
from samestep.recipes import AMOUNT, COUNT, SHARE, Recipe, build_schedule, group_by_decay, keep_best, quarter
from samestep.sources import Tokens, TokenWindows, map_tokens

LEARNING_RATES = {"tiny": 2e-3, "small": 1e-3, "gpt2": 6e-4}
SIZES = {"layers": "num_layers", "heads": "num_heads", "width": "width", "context": "context"}  # field of GPT2Config
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_tokens(file: Path | None) -> Tokens:
    """Return the tokens of a `.npy` or `.bin` file, or the bytes of any other one. None: Python's standard library."""
    if file is None:
        return np.frombuffer(b"".join(path.read_bytes() for path in list_standard_library()), np.uint8)
    return map_tokens(file, "uint16" if file.suffix == ".bin" else "uint8")


def list_standard_library() -> list[Path]:
    """Return the source files of Python's standard library, without its tests, sorted by their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT]
        found += [Path(directory, file) for file in files if file.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def split(
    tokens: Tokens, context: int, vocabulary_size: int, held_out: float, most: int
) -> tuple[TokenWindows, TokenWindows]:
    """Return the windows for training, and up to `most` windows of the tail, which is held out for validation.

    Args:
        held_out: the tail's share of the tokens; it has at least one window.

    Raises:
        InvalidValue: there are too few tokens.
    """
    num_tokens = len(tokens)
    cut = min(int(num_tokens * (1 - held_out)), num_tokens - context - 1)
    if cut < context + 1:
        raise samestep.InvalidValue(
            f"the data has {num_tokens} tokens, and sequences of {context} need at least {2 * context + 2}, one to "
            "train on and one held out: give more text, a smaller --context, or a smaller --held-out",
            code="SS303",
        )
    every = math.ceil((num_tokens - cut - 1) // context / most)
    return (
        TokenWindows(tokens, context, 0, cut, vocabulary_size),
        TokenWindows(tokens, context, cut, num_tokens, vocabulary_size, every),
    )


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2 model. The defaults are those of the smallest published model.

    Attributes:
        vocabulary_size: number of tokens.
        context: largest number of tokens in a sequence.
        num_layers: number of blocks.
        num_heads: attention heads of each block.
        width: size of a token's representation, a multiple of `num_heads`.
        dropout: probability, after the embeddings, in the attention and after each half of a block.
    """

    vocabulary_size: int = 50257
    context: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.0


PRESETS = {
    "tiny": GPT2Config(context=128, num_layers=4, num_heads=4, width=128),  # 0.8 M parameters and the embeddings
    "small": GPT2Config(context=256, num_layers=6, num_heads=6, width=384),  # 10.6 M
    "gpt2": GPT2Config(),  # 124 M with GPT-2's vocabulary
}


INITIAL_STD = 0.02


class GPT2Embedding(nn.Embedding):
    """An embedding with the initial values of GPT-2 (section 2.3)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class GPT2Linear(nn.Linear):
    """A linear layer with the initial values of GPT-2: less than others for those that add to the residual stream.

    Args:
        num_additions: how many such layers add to the stream; 1 for other layers.
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, num_additions: int = 1) -> None:
        self.std = INITIAL_STD / math.sqrt(num_additions)  # before `super`, which calls `reset_parameters`
        super().__init__(num_inputs, num_outputs)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


class SelfAttention(nn.Module):
    """Causal self-attention: (N, T, width) -> (N, T, width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.c_attn = GPT2Linear(config.width, 3 * config.width)
        self.c_proj = GPT2Linear(config.width, config.width, num_additions=2 * config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.c_attn(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return F.dropout(self.c_proj(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with GELU: (..., width) -> (..., width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = GPT2Linear(config.width, 4 * config.width)
        self.c_proj = GPT2Linear(4 * config.width, config.width, num_additions=2 * config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.dropout, self.training)


class TransformerBlock(nn.Module):
    """Attention and MLP, each normalized before and added to its input."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2(nn.Module):
    """A decoder-only Transformer. The token embedding is also the output matrix.

    Args:
        config: the sizes.
        checkpoint_activations: whether to keep only the input of each block for the backward pass and recompute the
            rest, with less memory and about a third more time. The gradients have the same values.
    """

    def __init__(self, config: GPT2Config, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.wte = GPT2Embedding(config.vocabulary_size, config.width)
        self.wpe = GPT2Embedding(config.context, config.width)
        self.h = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token at each position.

        Args:
            tokens: integers (N, T), T at most `config.context`.

        Returns:
            Logits (N, T, vocabulary_size).

        Raises:
            ValueError: the sequence is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens are more than the context of {self.config.context}")
        x = F.dropout(self.wte(tokens) + self.wpe.weight[:length], self.config.dropout, self.training)
        for block in self.h:
            if self.checkpoint_activations and self.training:
                # Only dropout draws random numbers, and saving the generators' states takes time.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.config.dropout > 0)
            else:
                x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def build_optimizer(
    model: GPT2, lr: float, weight_decay: float, *, beta2: float = 0.95, fused: bool = True
) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices and embeddings, and not for biases and LayerNorm.

    The fused kernel is faster. On the CPU, its bits depend on where a shard ends, so it is not available with
    `shard="fsdp2"`.
    """
    return torch.optim.AdamW(group_by_decay(model, weight_decay), lr=lr, betas=(0.9, beta2), fused=fused)


# --- the recipe -------------------------------------------------------------------------------------------------------


@click.command("gpt", cls=Recipe, help=__doc__)
@click.option("--preset", type=click.Choice([*PRESETS]), default="tiny", help="size of the model")
@click.option("--data", type=PATH, help="text, or tokens as .npy or .bin (uint16); default: Python's source")
@click.option("--vocabulary-size", type=COUNT, default=256, help="number of tokens, 256 for the bytes of a text")
@click.option("--layers", type=COUNT, help="number of blocks; default: the preset's")
@click.option("--heads", type=COUNT, help="attention heads of a block; default: the preset's")
@click.option("--width", type=COUNT, help="size of a token's vector; default: the preset's")
@click.option("--context", type=COUNT, help="tokens per sequence; default: the preset's")
@click.option("--steps", type=COUNT, default=1000, help="optimizer steps")
@click.option("--batch-size", type=COUNT, default=32, help="sequences per step, over all ranks")
@click.option("--micro-batch-size", type=COUNT, help="sequences per forward and backward pass; default: a quarter")
@click.option("--lr", type=AMOUNT, help="highest learning rate; default: 0.002 for tiny, 0.001 small, 0.0006 gpt2")
@click.option("--warm-up", type=click.IntRange(0), help="steps of rising learning rate; default: 5 %, at most 2000")
@click.option("--weight-decay", type=AMOUNT, default=0.1, help="weight decay of matrices")
@click.option("--beta2", type=SHARE, default=0.95, help="second beta of AdamW")
@click.option("--dropout", type=SHARE, default=0.0, help="probability of dropout")
@click.option("--precision", default="fp32", help="fp32, tf32, bf16 or fp16")
@click.option("--compile", is_flag=True, help="use torch.compile, which needs a C++ compiler")
@click.option("--checkpoint-activations", is_flag=True, help="use less memory and more time")
@click.option("--held-out", type=SHARE, default=0.05, help="share of the data to validate on")
@click.option("--validate-every", type=COUNT, default=100, help="steps between validations")
@click.option("--validate-samples", type=COUNT, default=256, help="sequences per validation")
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
    tokens = read_tokens(args.data)
    sizes = {field: options[name] for name, field in SIZES.items() if options[name]}
    config = replace(PRESETS[args.preset], vocabulary_size=args.vocabulary_size, dropout=args.dropout, **sizes)
    if config.width % config.num_heads:
        raise samestep.InvalidValue(
            f"--width is {config.width}, which is no multiple of {config.num_heads} --heads: change one", code="SS104"
        )
    with run.sharded_init():
        model = GPT2(config, checkpoint_activations=args.checkpoint_activations)
    train, held_out = split(tokens, config.context, args.vocabulary_size, args.held_out, args.validate_samples)
    lr = LEARNING_RATES[args.preset] if args.lr is None else args.lr
    optimizer = build_optimizer(model, lr, args.weight_decay, beta2=args.beta2, fused=False)
    num_warm_up = min(2000, args.steps // 20) if args.warm_up is None else args.warm_up
    scheduler = build_schedule(optimizer, args.steps, num_warm_up, end=0.1)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)
    forward = torch.compile(model) if args.compile else model

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
