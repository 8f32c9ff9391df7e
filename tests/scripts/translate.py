"""Translation: token weights, an averaged model, mixed precision, a sampler, the best kept, an early end."""

import argparse
import functools

import torch
from pairs import PAD, Pairs, by_length, collate, greedy, load_or_train, read_pairs, share_of_words
from torch import nn

import samestep


class Transformer(nn.Module):
    def __init__(self, num_src, num_tgt, dim=16):
        super().__init__()
        self.src, self.tgt, self.places = nn.Embedding(num_src, dim), nn.Embedding(num_tgt, dim), nn.Embedding(12, dim)
        layers = {"d_model": dim, "nhead": 2, "dim_feedforward": 32, "dropout": 0.1, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layers), 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layers), 1)

    def encode(self, src, src_mask):
        x = self.src(src) + self.places.weight[: src.shape[1]]
        return self.encoder(x, src_key_padding_mask=src_mask)

    def decode(self, h, src_mask, dec, dec_mask):
        length = dec.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=dec.device).triu(1)
        x = self.tgt(dec) + self.places.weight[:length]
        return self.decoder(x, h, tgt_mask=later, tgt_key_padding_mask=dec_mask, memory_key_padding_mask=src_mask)

    def project(self, x):
        return x @ self.tgt.weight.T

    def forward(self, src, src_mask, dec, dec_mask):
        return self.project(self.decode(self.encode(src, src_mask), src_mask, dec, dec_mask))


p = argparse.ArgumentParser()
p.add_argument("--lr", type=float, default=2e-2)
p.add_argument("--epochs", type=int, default=20)
args = p.parse_args()
run = samestep.Run(
    "runs/en-it", batch_size=32, micro_batch_size=4, precision="bf16", snapshot_every=3, log_every=1, config=vars(args)
)
train, val = read_pairs()
src, tgt = run.once(load_or_train, run.dir / "tokenizers", train)
model = Transformer(src.get_vocab_size(), tgt.get_vocab_size())
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 8, (8 / (s + 1)) ** 0.5))
run.prepare(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema)
pad = tgt.ids[PAD]
loss_fn = nn.CrossEntropyLoss(ignore_index=pad, label_smoothing=0.1)
train, val = Pairs(train, src, tgt), Pairs(val, src, tgt)


def score(b):
    with run.autocast():
        loss = loss_fn(ema(b["src"], b["src_mask"], b["dec"], b["dec_mask"]).flatten(0, 1), b["label"].flatten())
    return {"loss": (loss, (b["label"] != pad).sum()), "hyp": tgt.decode_batch(greedy(ema.module, b)), "ref": b["text"]}


sampler = functools.partial(by_length, train)
for epoch in run.epochs(train, args.epochs, collate_fn=collate, num_workers=1, sampler=sampler):
    for step in epoch:
        for b in step:
            with run.autocast():
                h = model.encode(b["src"], b["src_mask"])
                logits = model.project(model.decode(h, b["src_mask"], b["dec"], b["dec_mask"]))
                loss = loss_fn(logits.flatten(0, 1), b["label"].flatten())
            step.backward(loss, weight=(b["label"] != pad).sum())
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
    out = run.evaluate(score, val, collate_fn=collate)
    hyp, ref = out.pop("hyp"), out.pop("ref")
    words = share_of_words(hyp, ref)
    run.log({"validation/loss": out["loss"], "validation/words": words})
    run.print("\n".join(f"{r}\n  -> {h}" for r, h in list(zip(ref, hyp, strict=True))[:3]))
    if words > run.state.get("best", 0):
        run.state["best"], run.state["since"] = words, epoch.number
        run.snapshot("best")
    elif epoch.number - run.state["since"] >= 5:
        run.stop("no better translation for 5 epochs")
