"""A GPT-2 language model, trained on the source of Python's standard library or on text of yours.

samestep train gpt --nproc-per-node 2
samestep train gpt --preset small --data tokens --steps 5000 --precision bf16 --compile
python -m samestep.recipes.gpt --init-from gpt2-model --data tokens --export-to fine-tuned
"""

import argparse
import difflib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import samestep
from samestep.decoding import parse_json
from samestep.files import creating_directory, replace_file
from samestep.recipes import check_numbers, run_main
from samestep.recipes.commands.sample import load_model
from samestep.recipes.corpora.text_tokenizer import BYTES, Tokenizer, read_vocabulary
from samestep.recipes.corpora.token_file import TokenCorpus, name_tokenizer, open_corpus, read_standard_library, split
from samestep.recipes.models.gpt2 import GPT2, PRESETS, GPT2Config
from samestep.snapshot.reading import read_run

OTHER_NAMES = {  # of the options, in nanoGPT and minGPT
    "n_layer": "--layers",
    "n_head": "--heads",
    "n_embd": "--width",
    "block_size": "--context",
    "max_iters": "--steps",
    "model_type": "--preset",
    "learning_rate": "--lr",
    "min_lr": "--lr-end",
    "warmup_iters": "--warm-up",
    "lr_decay_iters": "--steps",
    "eval_interval": "--validate-every",
    "eval_iters": "--validate-samples",
    "out_dir": "--run-dir",
    "work_dir": "--run-dir",
    "dataset": "--data",
    "dtype": "--precision",
    "gradient_accumulation_steps": "--micro-batch-size",
    "resid_pdrop": "--dropout",
    "embd_pdrop": "--dropout",
    "attn_pdrop": "--dropout",
}
LEARNING_RATES = {"tiny": 2e-3, "small": 1e-3, "gpt2": 6e-4}
SIZES = {"layers": "num_layers", "heads": "num_heads", "width": "width"}  # option -> field of GPT2Config
# Dense operations per second of 16-bit matrix multiplication with 32-bit sums, from the makers' data sheets. A longer
# name comes before its beginning.
PEAK_FLOPS = {
    "A100": 312e12,
    "A10": 125e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX A6000": 155e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
}


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
        "--preset", type=parse_preset, metavar="P", help="model size: tiny, small, gpt2 (default: tiny)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="output of samestep prepare text (default: Python's source)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of blocks (default: the preset's)")
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads of a block (default: the preset's)")
    parser.add_argument("--width", type=int, metavar="N", help="size of a token's vector (default: the preset's)")
    parser.add_argument("--context", type=int, metavar="T", help="tokens per sequence (default: the model's context)")
    parser.add_argument(
        "--init-from", type=Path, metavar="DIR", help="begin with a GPT-2 saved by transformers, or with another run"
    )
    parser.add_argument("--export-to", type=Path, metavar="DIR", help="write the best weights there, for transformers")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, over all ranks (default: 32)")
    parser.add_argument("--micro-batch-size", type=int, help="sequences per forward pass (default: batch / 4)")
    parser.add_argument("--lr", type=float, help="highest learning rate (default: 0.002 for tiny, 0.0006 for gpt2)")
    parser.add_argument("--lr-end", type=float, default=0.1, help="last learning rate relative to --lr (default: 0.1)")
    parser.add_argument("--warm-up", type=int, help="steps of rising learning rate (default: 5 %%, at most 2000)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="weight decay of matrices (default: 0.1)")
    parser.add_argument("--dropout", type=float, help="default: 0, or the value of --init-from")
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
    check_numbers(parser, args, "dropout", 0, 1)
    if not 0 < args.held_out < 1:
        parser.error(f"--held-out is {args.held_out}: give a fraction between 0 and 1")
    for name in ("preset", *SIZES):
        if args.init_from and getattr(args, name):
            parser.error(f"--{name} and --init-from both set the model's size: give one of them")
    if args.export_to is not None and os.path.lexists(args.export_to):
        parser.error(f"--export-to {args.export_to} exists already: name another directory")
    if args.micro_batch_size is None:
        args.micro_batch_size = args.batch_size // math.gcd(args.batch_size, 4)  # so that up to 4 ranks share a step
    if args.warm_up is None:
        args.warm_up = min(2000, args.steps // 20)
    if args.init_from is None:
        args.preset = args.preset or "tiny"
        for name, field in SIZES.items() | {("context", "context")}:
            setattr(args, name, getattr(args, name) or getattr(PRESETS[args.preset], field))
        if args.width % args.heads:
            parser.error(
                f"--width is {args.width}, and --heads {args.heads}: give a width that is a multiple of the heads"
            )
    if args.lr is None:
        args.lr = LEARNING_RATES[args.preset or "gpt2"]
    return args


def read_hugging_face(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read `config.json` and the weights that `save_pretrained` wrote. Raises Error if they cannot be read."""
    try:
        settings = parse_json((directory / "config.json").read_bytes())
        if (file := directory / "model.safetensors").exists():
            return settings, load_file(file)
        return settings, torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except Exception as error:  # of safetensors and pickle, too
        why = " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            why = f"there is no {error.filename}"
        raise samestep.InvalidValue(
            f"{directory} holds no model saved by Hugging Face that can be read ({why}): name one or a run of gpt",
            code="SS703",
        ) from None


def write_hugging_face(model: GPT2, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a directory that `transformers.GPT2LMHeadModel.from_pretrained` reads, with the tokenizer of BPE."""
    settings, weights = model.to_hugging_face()
    settings |= {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    weights = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with creating_directory(directory) as hidden:
        save_file(weights, hidden / "model.safetensors", metadata={"format": "pt"})
        replace_file(hidden / "config.json", json.dumps(settings, indent=1).encode() + b"\n")
        if tokenizer.definition:
            replace_file(hidden / "tokenizer.json", tokenizer.definition)


def build_model(args: argparse.Namespace, corpus: TokenCorpus) -> GPT2:
    """Build the model of `--preset` or `--init-from`.

    Raises:
        Error: the model of `--init-from` has a different vocabulary than the data, or its context is shorter than
            `--context`.
    """
    if args.init_from is None:
        config = GPT2Config(
            corpus.tokenizer.vocabulary_size, args.context, args.layers, args.heads, args.width, args.dropout or 0.0
        )
        return GPT2(config, checkpoint_activations=args.checkpoint_activations)
    if (args.init_from / "run.json").exists():
        start, tokenizer = load_model(args.init_from, str(args.init_from), "best")
        settings, weights = start.to_hugging_face()
        definition: bytes | None = tokenizer.definition
    else:
        settings, weights = read_hugging_face(args.init_from)
        definition = find_definition(args.init_from)
    try:
        if args.dropout is not None:
            settings["resid_pdrop"] = args.dropout
        model = GPT2.from_hugging_face(settings, weights, checkpoint_activations=args.checkpoint_activations)
    except samestep.Error:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise samestep.Error(
            f"{args.init_from} holds another model than GPT-2 ({error}): name a GPT-2", code="SS703"
        ) from None
    check_vocabulary(model.config.vocabulary_size, definition, corpus, args.init_from)
    if (args.context or 0) > model.config.context:
        raise samestep.Error(
            f"--context is {args.context}, and the model in {args.init_from} takes at most {model.config.context} "
            "tokens: give a smaller one",
            code="SS703",
        )
    return model


def find_definition(directory: Path) -> bytes | None:
    """Return the content of a model's `tokenizer.json`; None if there is none."""
    file = directory / "tokenizer.json"
    return file.read_bytes() if file.is_file() else None


def check_vocabulary(num_tokens: int, definition: bytes | None, corpus: TokenCorpus, init_from: Path) -> None:
    """Raise Error unless the data have been made with the model's tokenizer, as far as can be seen.

    The model may have more tokens than its tokenizer: sizes are often rounded up.

    Args:
        num_tokens: the size of the model's vocabulary.
        definition: the model's `tokenizer.json`; empty for bytes, None if it is unknown.
    """
    size = corpus.tokenizer.vocabulary_size
    tokenizer = corpus.tokenizer
    if definition is not None and read_vocabulary(definition) != read_vocabulary(tokenizer.definition):
        own = "--tokenizer bytes"
        if definition:
            own = f"--tokenizer {init_from}/tokenizer.json"
        raise samestep.Error(
            f"the model in {init_from} was trained with another tokenizer than that of {corpus.name}, {tokenizer}: "
            f"prepare the text with {own}",
            code="SS702",
        )
    if not size <= num_tokens < 2 * size:
        raise samestep.Error(
            f"the model in {init_from} has {num_tokens} tokens, and {corpus.name} is made of {size}: prepare the text "
            "with the tokenizer of the model, --tokenizer FILE",
            code="SS702",
        )


def check_run(run: samestep.Run, here: Mapping[str, Any]) -> None:
    """Compare the configuration with that of the resumed run. Raises Error if the models differ."""
    if run.dir is None or not (run.dir / "run.json").exists():
        return
    if here["init_from"] and run.dir.resolve() == here["init_from"].resolve():
        raise samestep.Error(
            f"--init-from is the directory of this run, {run.dir}, which resumes without it: leave it out, or name "
            "another --run-dir",
            code="SS104",
        )
    there = read_run(run.dir, str(run.dir))["config"]
    if there.get("tokenizer") and here["tokenizer"] and there["tokenizer"] != here["tokenizer"]:
        raise samestep.Error(
            f"the run in {run.dir} was trained on tokens of {there['tokenizer']}, and the data is of "
            f"{here['tokenizer']}: name its data by --data, or another --run-dir",
            code="SS405",
        )
    for name in ("preset", "context", *SIZES):
        if there.get(name) and here[name] and there[name] != here[name]:
            raise samestep.Error(
                f"the run in {run.dir} has --{name} {there[name]}, and this is --{name} {here[name]}: give the run's, "
                "or another --run-dir",
                code="SS405",
            )


def warm_up_then_cosine(step: int, num_steps: int, num_warm_up: int, end: float) -> float:
    """Return the factor of the learning rate: linear up to 1, then half a cosine down to `end`."""
    if step < num_warm_up:
        return (step + 1) / num_warm_up
    done = min(1.0, (step - num_warm_up) / max(1, num_steps - num_warm_up))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))


def build_optimizer(model: GPT2, lr: float, weight_decay: float, *, fused: bool = True) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices and embeddings, and not for biases and LayerNorm.

    The fused kernel is faster. On the CPU, its bits depend on where a shard ends, so it is not available with
    `shard="fsdp2"`.
    """
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def find_peak_flops(run: samestep.Run) -> float | None:
    """Return the peak of all ranks' GPUs in operations per second; None on CPU, in fp32 and tf32, or if unknown."""
    with run.autocast():
        if run.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
            return None
    return (look_up_peak(torch.cuda.get_device_name(run.device)) or 0) * run.world_size or None


def look_up_peak(name: str) -> float | None:
    """Return the peak of a GPU by its name in torch; None for an unknown GPU and for a part of one."""
    if re.search(r"\b(Laptop|MIG|Max-Q|D)\b", name):
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


class Throughput:
    """Measures tokens per second, without validations, and the model FLOPs utilization (MFU).

    MFU is the share of the GPUs' peak that the arithmetic of the model needs; see `GPT2.count_flops_per_token`.
    """

    def __init__(self, run: samestep.Run, model: GPT2, context: int) -> None:
        self._run = run
        self._tokens_per_step = run.batch_size * context
        self._flops_per_token = model.count_flops_per_token(context)
        self._peak = find_peak_flops(run)
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
        rate = (self._run.steps_done - self._began[1]) * self._tokens_per_step / elapsed_s
        mfu = f", MFU {rate * self._flops_per_token / self._peak:.1%}" if self._peak else ""
        return f"{rate:,.0f} tokens/s{mfu}"

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
    if run.shard == "fsdp2" and args.export_to is not None:
        raise samestep.InvalidValue(
            "--export-to is not available with --shard fsdp2: leave it out, and start again with it and --shard none "
            "after the run",
            code="SS608",
        )
    corpus = open_corpus(args.data) if args.data else read_standard_library()
    with run.sharded_init():
        model = build_model(args, corpus)
    context = args.context or model.config.context
    train, held_out = split(corpus, context, args.held_out, args.validate_samples)
    optimizer = build_optimizer(model, args.lr, args.weight_decay, fused=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step, args.steps, args.warm_up, args.lr_end)
    )
    run.prepare(tokenizer=corpus.tokenizer, model=model, optimizer=optimizer, scheduler=scheduler)
    forward = torch.compile(model) if args.compile else model
    run.state["model"] = asdict(model.config)  # for `samestep sample`
    throughput = Throughput(run, model, context)

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

    if args.export_to is not None:
        run.restore("best" if "best" in run.state else "latest")
        run.once(write_hugging_face, model, corpus.tokenizer, args.export_to)
        run.print(f"wrote {args.export_to}")


if __name__ == "__main__":
    run_main(main)
