"""A Transformer that learns to translate: two BPE tokenizers, batches of similar lengths, BLEU and chrF.

samestep train translate --target de --nproc-per-node 2
samestep train translate --data pairs.tsv --source en --target it
"""

import math
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.errors import needing
from samestep.recipes import AMOUNT, COUNT, SHARE, Recipe, build_schedule, keep_best, quarter
from samestep.recipes.corpora.encoded_pairs import LEAST_SIZE, Bucketed, collate, load_data
from samestep.recipes.corpora.text_tokenizer import Tokenizer, import_tokenizers
from samestep.recipes.models.seq2seq import PAD, Seq2Seq


def build_metrics(target: str) -> dict[str, Any]:
    """Return BLEU and chrF by name. Languages without spaces between words are compared by characters."""
    with needing("the recipe translate needs sacrebleu", "'samestep[translate]'"):
        import sacrebleu
    is_spaced = target.partition("_")[0] not in ("zh", "ja", "th", "lo", "km", "my")
    return {"BLEU": sacrebleu.BLEU(tokenize="13a" if is_spaced else "char", force=True), "chrF": sacrebleu.CHRF()}


def compute_loss(model: Seq2Seq, batch: dict[str, Any], label_smoothing: float = 0.0) -> Tensor:
    """Return the mean loss over the target tokens of a batch."""
    logits = model(batch["source"], batch["target"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=PAD, label_smoothing=label_smoothing)


@click.command("translate", cls=Recipe, help=__doc__)
@click.option(
    "--data",
    default="gettext",
    help="gettext (translated messages of the programs on this machine), a directory of gettext catalogues, or a file "
    "with a pair per line: source, tab, target",
)
@click.option("--source", default="en", help="language to translate from")
@click.option("--target", default="de", help="language to translate to")
@click.option(
    "--held-out",
    type=click.IntRange(0),
    help="number of sentences to validate on; 0: validate on the training set; default: a tenth, up to 500",
)
@click.option("--vocab-size", type=click.IntRange(LEAST_SIZE), default=4000, help="tokens of each language")
@click.option("--max-length", type=COUNT, default=64, help="maximum tokens per sentence")
@click.option("--dim", type=COUNT, default=128, help="width of the model, a multiple of twice --heads")
@click.option("--heads", type=COUNT, default=4, help="attention heads")
@click.option("--layers", type=COUNT, default=2, help="layers of the encoder and of the decoder")
@click.option("--dropout", type=SHARE, default=0.1, help="probability of dropout")
@click.option("--label-smoothing", type=SHARE, default=0.1, help="as in torch")
@click.option("--lr", type=AMOUNT, default=2e-3, help="the highest learning rate")
@click.option("--warm-up", type=COUNT, default=400, help="steps until the highest learning rate")
@click.option("--ema", type=SHARE, default=0.0, help="decay of an average of the weights to validate and keep; 0: none")
@click.option("--epochs", type=COUNT, default=20, help="passes over the training pairs")
@click.option("--validate-every", type=COUNT, default=1, help="epochs between validations")
@click.option("--patience", type=COUNT, default=5, help="end after this many validations without a better BLEU")
@click.option("--batch-size", type=COUNT, default=64, help="pairs per step, over all ranks")
@click.option("--micro-batch-size", type=COUNT, help="pairs per forward and backward pass; default: a quarter")
@click.option("--seed", default=0, help="seed of everything random except the split")
@click.option("--num-workers", default=0, help="DataLoader workers per rank")
@click.option("--run-dir", default="runs/translate", help="directory of the run")
def main(**options: Any) -> None:
    args = SimpleNamespace(**options)
    if args.dim % (2 * args.heads):
        raise samestep.InvalidValue(
            f"--dim is {args.dim}, which is no multiple of twice {args.heads} --heads: change one", code="SS104"
        )
    metrics = build_metrics(args.target)
    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size or quarter(args.batch_size),
        seed=args.seed,
        config=options,
    )
    assert run.dir is not None
    data = run.once(
        load_data,
        args.data,
        args.source,
        args.target,
        run.dir / "tokenizers",
        num_held_out=args.held_out,
        vocab_size=args.vocab_size,
        max_length=args.max_length,
    )
    run.print(f"{len(data.train):,} pairs to train on, {len(data.held_out):,} to score")
    if data.num_left_out:
        run.print(f"{data.num_left_out:,} pairs have more than {args.max_length} tokens, and are left out")

    source, target = map(import_tokenizers().Tokenizer.from_str, data.tokenizers)
    sizes = {"dim": args.dim, "num_heads": args.heads, "num_layers": args.layers, "max_length": args.max_length}
    with run.sharded_init():
        model = Seq2Seq(source.get_vocab_size(), target.get_vocab_size(), **sizes, dropout=args.dropout)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema)) if args.ema else None  # type: ignore[no-untyped-call]
    scored: Any = model if ema is None else ema.module
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-9)
    num_steps = args.epochs * math.ceil(len(data.train) / run.batch_size)
    scheduler = build_schedule(optimizer, num_steps, args.warm_up)
    prepared: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    prepared |= dict(zip(("source", "target"), map(Tokenizer, data.tokenizers), strict=True))
    prepared |= {} if ema is None else {"ema": ema}
    # Translations have different lengths, and with shard="fsdp2" all ranks gather parameters equally often. So the
    # model is one block, which is also gathered for its method `translate`.
    run.prepare(**prepared, shard_blocks=[Seq2Seq])
    register_fsdp_forward_method(scored, "translate")

    def score(batch: dict[str, Any]) -> dict[str, Any]:
        with run.autocast():
            loss = compute_loss(scored, batch)
            rows = scored.translate(batch["source"])
        return {
            "loss": (loss, batch["num_tokens"]),
            "translations": [text.strip() for text in target.decode_batch(rows)],
        }

    def validate() -> None:
        """Score the held-out pairs, print some translations, keep the best weights, and stop if they do not improve."""
        scores = run.evaluate(score, data.held_out, collate_fn=collate)
        found = scores["translations"]
        wanted = [target for _, target in data.references]
        row = {name: metric.corpus_score(found, [wanted]).score for name, metric in metrics.items()}
        run.log({"validation/loss": scores["loss"], **{f"validation/{name}": value for name, value in row.items()}})
        for number in np.unique(np.linspace(0, len(found) - 1, 5, dtype=int)[1:-1]):
            run.print(f"{data.references[number][0]}\n  wanted: {wanted[number]}\n  found:  {found[number]}")
        keep_best(run, row["BLEU"], args.patience)
        run.summary["validation"] = f"BLEU {row['BLEU']:.1f} (best {run.state['best']:.1f}), chrF {row['chrF']:.1f}"

    order = Bucketed(data.train, run.batch_size, run.seed)
    for epoch in run.epochs(data.train, args.epochs, sampler=order, collate_fn=collate, num_workers=args.num_workers):
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
            validate()


if __name__ == "__main__":
    main()
