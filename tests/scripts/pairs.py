"""Sentences in English and Italian, and tokenizers of words: what `translate.py` needs."""

import json
from itertools import product

import torch
from torch.nn.utils.rnn import pad_sequence

PAD, START, END = "[PAD]", "[START]", "[END]"
NOUNS = {"cat": "gatto", "dog": "cane", "book": "libro", "train": "treno", "friend": "amico"}
ADJECTIVES = {"red": "rosso", "small": "piccolo", "old": "vecchio", "": ""}
VERBS = {"sees": "vede", "has": "ha", "wants": "vuole"}


def read_pairs():
    """(English, Italian) sentences to train on, and others to validate with."""
    pairs = []
    for (noun, nome), (adjective, aggettivo), (verb, verbo), (what, cosa) in product(
        NOUNS.items(), ADJECTIVES.items(), VERBS.items(), NOUNS.items()
    ):
        if noun != what:
            english, italian = f"the {adjective} {noun} {verb} a {what}", f"{nome} {aggettivo} {verbo} un {cosa}"
            pairs.append((" ".join(english.split()), " ".join(italian.split())))
    return [pair for i, pair in enumerate(pairs) if i % 6], pairs[::6]


class Tokenizer:
    """Words, in the order in which they were met."""

    def __init__(self, words):
        self.words = words
        self.ids = {word: i for i, word in enumerate(words)}

    def get_vocab_size(self):
        return len(self.words)

    def encode(self, text):
        return [self.ids[word] for word in text.split()]

    def decode_batch(self, rows):
        stop = (self.ids[PAD], self.ids[END])
        return [" ".join(self.words[i] for i in row[: next((k for k, i in enumerate(row) if i in stop), None)])
                for row in rows]  # fmt: skip


def load_or_train(directory, pairs):
    """Both languages' tokenizers: from their files, or from the sentences."""
    tokenizers = []
    for k, language in enumerate(("en", "it")):
        path = directory / f"{language}.json"
        if not path.exists():
            words = dict.fromkeys(word for pair in pairs for word in pair[k].split())
            directory.mkdir(exist_ok=True)
            path.write_text(json.dumps([PAD, START, END, *words]))
        tokenizers.append(Tokenizer(json.loads(path.read_text())))
    return tokenizers


class Pairs(torch.utils.data.Dataset):
    def __init__(self, pairs, src, tgt):
        self.pairs = [(src.encode(a), tgt.encode(b), b) for a, b in pairs]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


def by_length(dataset, epoch):
    """Sentences of about one length together, in another order each epoch."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
    return sorted(order, key=lambda i: len(dataset[i][0]))


def collate(samples):
    def pad(rows):
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    src, dec = pad([a for a, _, _ in samples]), pad([[1, *b] for _, b, _ in samples])
    label = pad([[*b, 2] for _, b, _ in samples])
    return {"src": src, "src_mask": src == 0, "dec": dec, "dec_mask": dec == 0, "label": label,
            "text": [text for _, _, text in samples]}  # fmt: skip


def greedy(model, batch, max_length=8):
    """The likeliest word after another: rows of ids."""
    h, dec = model.encode(batch["src"], batch["src_mask"]), batch["dec"][:, :1]
    for _ in range(max_length):
        logits = model.project(model.decode(h, batch["src_mask"], dec, None))
        dec = torch.cat([dec, logits[:, -1:].argmax(-1)], dim=1)
    return dec[:, 1:].tolist()


def share_of_words(hyp, ref):
    """How many of the words that should be there are there, in their places."""
    pairs = [(h.split(), r.split()) for h, r in zip(hyp, ref, strict=True)]
    return sum(a == b for h, r in pairs for a, b in zip(h, r, strict=False)) / sum(len(r) for _, r in pairs)
