"""A Transformer that learns to translate: two BPE tokenizers, batches of similar lengths, BLEU and chrF.

samestep train translate --target de --nproc-per-node 2
samestep train translate --data pairs.tsv --source en --target it
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.recipes import build_schedule, check_numbers, run_main
from samestep.recipes.corpora.encoded_pairs import LEAST_SIZE, Bucketed, load_data
from samestep.recipes.corpora.text_tokenizer import import_tokenizers
from samestep.recipes.models.seq2seq import PAD, Seq2Seq


class Vocabulary:
    """The tokenizers, as JSON, in every snapshot. A resumed run refuses others."""

    def __init__(self, tokenizers: tuple[str, str]) -> None:
        self.tokenizers = [*tokenizers]

    def state_dict(self) -> dict[str, Any]:
        return {"tokenizers": self.tokenizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state != self.state_dict():
            raise samestep.InvalidValue(
                "the tokenizers are not those of the run, because the data, the options or the version of the library "
                "tokenizers differ: restore them, or begin anew in another --run-dir",
                code="SS405",
            )


def build_metrics(target: str) -> dict[str, Any]:
    """Return BLEU and chrF by name. Languages without spaces between words are compared by characters."""
    try:
        import sacrebleu
    except ImportError:
        raise samestep.MissingPackage("sacrebleu is not installed: pip install 'samestep[translate]'") from None
    is_spaced = target.partition("_")[0] not in ("zh", "ja", "th", "lo", "km", "my")
    return {"BLEU": sacrebleu.BLEU(tokenize="13a" if is_spaced else "char", force=True), "chrF": sacrebleu.CHRF()}


def compute_loss(model: Seq2Seq, batch: dict[str, Any], label_smoothing: float = 0.0) -> Tensor:
    """Return the mean loss over the target tokens of a batch."""
    logits = model(batch["source"], batch["target"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=PAD, label_smoothing=label_smoothing)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="translate", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--data",
        default="gettext",
        help="gettext (translated messages of the programs on this machine), a directory of gettext catalogues, or a "
        "file with a pair per line: source, tab, target (default: gettext)",
    )
    parser.add_argument("--source", default="en", help="language to translate from (default: en)")
    parser.add_argument("--target", default="de", help="language to translate to (default: de)")
    parser.add_argument(
        "--held-out",
        type=int,
        help="number of sentences to validate on; 0: validate on the training set (default: a tenth, up to 500)",
    )
    parser.add_argument("--vocab-size", type=int, default=4000, help="vocabulary size per language (default: 4000)")
    parser.add_argument("--max-length", type=int, default=64, help="maximum tokens per sentence (default: 64)")
    parser.add_argument("--dim", type=int, default=128, help="width of the model (default: 128)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: 4)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the encoder and of the decoder (default: 2)")
    parser.add_argument("--dropout", type=float, default=0.1, help="default: 0.1")
    parser.add_argument("--label-smoothing", type=float, default=0.1, help="default: 0.1")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate (default: 0.002)")
    parser.add_argument("--warm-up", type=int, default=400, help="steps until the highest learning rate (default: 400)")
    parser.add_argument(
        "--ema", type=float, default=0.0, metavar="DECAY", help="validate and keep an EMA of the weights"
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training pairs (default: 20)")
    parser.add_argument("--validate-every", type=int, default=1, help="epochs between validations (default: 1)")
    parser.add_argument(
        "--patience",
        type=int,
        default=5,
        help="stop after N validations without a better BLEU (default: 5)",
        metavar="N",
    )
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per step, over all ranks (default: 64)")
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        help="pairs per forward and backward pass (default: a quarter of the batch, for up to 4 ranks)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random except the split (default: 0)")
    parser.add_argument("--num-workers", type=int, default=0, help="DataLoader workers per rank (default: 0)")
    parser.add_argument("--run-dir", default="runs/translate", help="default: runs/translate")
    args = parser.parse_args(argv)
    if args.micro_batch_size is None:
        args.micro_batch_size = args.batch_size // math.gcd(args.batch_size, 4)
    if args.vocab_size < LEAST_SIZE:
        parser.error(f"--vocab-size {args.vocab_size} is below {LEAST_SIZE}, a token for each byte and three others")
    counts = "epochs batch_size micro_batch_size validate_every patience warm_up heads layers dim max_length"
    check_numbers(parser, args, counts, least=1)
    check_numbers(parser, args, "held_out lr num_workers", least=0)
    check_numbers(parser, args, "dropout label_smoothing ema", 0, 1)
    if args.dim % (2 * args.heads):
        parser.error(f"--dim {args.dim} is no multiple of twice --heads {args.heads}")
    return args


def build_models(args: argparse.Namespace, num_source: int, num_target: int) -> tuple[Seq2Seq, AveragedModel | None]:
    """Return the model, and with `--ema` an exponential moving average of it."""
    sizes = {"dim": args.dim, "num_heads": args.heads, "num_layers": args.layers, "max_length": args.max_length}
    model = Seq2Seq(num_source, num_target, **sizes, dropout=args.dropout)
    if not args.ema:
        return model, None
    return model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema))  # type: ignore[no-untyped-call]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    metrics = build_metrics(args.target)
    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        config=vars(args),
    )
    assert run.dir is not None
    data = run.once(
        load_data,
        args.data,
        args.source,
        args.target,
        run.dir / "tokenizers",
        held_out=args.held_out,
        vocab_size=args.vocab_size,
        max_length=args.max_length,
    )
    run.print(f"{len(data.train):,} pairs to train on, {len(data.held_out):,} to score")
    for reason, count in data.left_out.items():
        run.print(f"left out: {count:,} {reason}")

    source, target = map(import_tokenizers().Tokenizer.from_str, data.tokenizers)
    with run.sharded_init():
        model, ema = build_models(args, source.get_vocab_size(), target.get_vocab_size())
    scored: Any = model if ema is None else ema.module
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-9)
    num_steps = args.epochs * math.ceil(len(data.train) / run.batch_size)
    scheduler = build_schedule(optimizer, num_steps, args.warm_up)
    prepared: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    prepared |= {"vocabulary": Vocabulary(data.tokenizers)} | ({} if ema is None else {"ema": ema})
    # Translations have different lengths, and with shard="fsdp2" all ranks gather parameters equally often. So the
    # model is one block, which is also gathered for its method `translate`.
    run.prepare(**prepared, shard_blocks=[Seq2Seq])
    register_fsdp_forward_method(scored, "translate")
    if "best" in run.state:  # the run was resumed
        run.summary["validation"] = f"best BLEU {run.state['best']:.1f}"

    def score(batch: dict[str, Any]) -> dict[str, Any]:
        with run.autocast():
            loss = compute_loss(scored, batch)
            rows = scored.translate(batch["source"])
        return {
            "loss": (loss, batch["num_tokens"]),
            "translations": [text.strip() for text in target.decode_batch(rows)],
        }

    def validate(epoch: int) -> None:
        """Score the held-out pairs, print some translations, keep the best weights, and stop if they do not improve."""
        scores = run.evaluate(score, data.held_out, collate_fn=data.held_out.collate)
        found = scores["translations"]
        wanted = [target for _, target in data.references]
        row = {name: metric.corpus_score(found, [wanted]).score for name, metric in metrics.items()}
        run.log({"validation/loss": scores["loss"], **{f"validation/{name}": value for name, value in row.items()}})
        for number in np.unique(np.linspace(0, len(found) - 1, 5, dtype=int)[1:-1]):
            run.print(f"{data.references[number][0]}\n  wanted: {wanted[number]}\n  found:  {found[number]}")
        if row["BLEU"] > run.state.get("best", -1.0):
            run.state.update(best=row["BLEU"], best_epoch=epoch)
            run.snapshot("best")
        elif epoch - run.state["best_epoch"] >= args.patience * args.validate_every:
            run.stop(f"no better BLEU, --patience {args.patience}")
        run.summary["validation"] = f"BLEU {row['BLEU']:.1f} (best {run.state['best']:.1f}), chrF {row['chrF']:.1f}"

    order = Bucketed(data.train, run.batch_size, run.seed)
    for epoch in run.epochs(
        data.train, args.epochs, sampler=order, collate_fn=data.train.collate, num_workers=args.num_workers
    ):
        for step in epoch:
            for batch in step:
                with run.autocast():
                    loss = compute_loss(model, batch, args.label_smoothing)
                step.backward(loss, weight=batch["num_tokens"])
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if ema is not None:
                ema.update_parameters(model)
        if (epoch.number + 1) % args.validate_every == 0 or epoch.number + 1 == args.epochs:
            validate(epoch.number)


if __name__ == "__main__":
    run_main(main)
