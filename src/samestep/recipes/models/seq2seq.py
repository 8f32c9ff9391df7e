"""An encoder-decoder Transformer (Vaswani et al., "Attention Is All You Need", 2017) with greedy decoding.

It imports torch only: copy this file to use exported weights without samestep. Layer normalization comes before each
block (Xiong et al., 2020), and the output layer shares the weights of the target embedding (Press and Wolf, 2017).

In shapes, N is the number of sentences, S and T are the lengths of the source and the target, and D is `dim`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# token ids in both languages
PAD = 0
START = 1
END = 2


class UnitEmbedding(nn.Embedding):
    """An embedding whose vectors have an initial norm of about 1."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class Seq2Seq(nn.Module):
    """Encoder-decoder Transformer.

    Args:
        num_source, num_target: number of token ids of the two languages.
        dim: width D, divisible by `num_heads` and by 2.
        num_layers: layers of the encoder, and of the decoder.
        max_length: largest number of tokens of a sentence, with END, and with START for the target.
    """

    def __init__(
        self,
        num_source: int,
        num_target: int,
        *,
        dim: int = 256,
        num_heads: int = 4,
        num_layers: int = 3,
        dropout: float = 0.1,
        max_length: int = 64,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.max_length = max_length
        self.source_embedding = UnitEmbedding(num_source, dim)
        self.target_embedding = UnitEmbedding(num_target, dim)
        options: dict[str, Any] = {"dropout": dropout, "batch_first": True, "norm_first": True}
        layers = range(num_layers)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, **options) for _ in layers)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(dim, num_heads, 4 * dim, **options) for _ in layers)
        self.encoder_norm = nn.LayerNorm(dim)
        self.decoder_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", build_positions(max_length, dim), persistent=False)

    def embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        """Return the input of the first layer (N, length, D) for tokens (N, length)."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sentence has {length} tokens, and the model takes at most {self.max_length}")
        embedded: Tensor = self.dropout(embedding(tokens) * math.sqrt(self.dim) + self.get_buffer("positions")[:length])
        return embedded

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory (N, S, D) of source tokens (N, S), padded on the right, and where padding is (N, S)."""
        is_padding = source == PAD
        x = self.embed(self.source_embedding, source)
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=is_padding)
        return self.encoder_norm(x), is_padding

    def decode(self, target: Tensor, memory: Tensor, is_padding: Tensor) -> Tensor:
        """Return the logits (N, T, num_target) of the token after each token of `target` (N, T).

        Padding of the target is on the right: no earlier token attends to it, so it needs no mask.
        """
        length = target.shape[1]
        is_later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        x = self.embed(self.target_embedding, target)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=is_later, memory_key_padding_mask=is_padding, tgt_is_causal=True)
        return F.linear(self.decoder_norm(x), self.target_embedding.weight)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits (N, T, num_target) of the token after each token of `target` (N, T).

        Args:
            source: token ids (N, S), padded on the right with PAD. Each sentence ends with END.
            target: token ids (N, T), padded on the right with PAD. Each sentence begins with START.
        """
        return self.decode(target, *self.encode(source))

    @torch.no_grad()
    def translate(self, source: Tensor) -> list[list[int]]:
        """Translate sentences greedily: take the most likely token each time. Call `eval()` first.

        A translation has at most 10 tokens more than twice those of its source.

        Args:
            source: as in `forward`.

        Returns:
            The tokens of each translation, without START and END.
        """
        limits = (2 * (source != PAD).sum(1) + 10).clamp(max=self.max_length - 1)
        encoded = self.encode(source)
        tokens = torch.full((len(source), 1), START, device=source.device)
        is_done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        while not is_done.all():
            logits = self.decode(tokens, *encoded)[:, -1]
            logits[:, [PAD, START]] = -math.inf
            chosen = logits.argmax(1).masked_fill(is_done, PAD)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
            is_done = is_done | (chosen == END) | (tokens.shape[1] > limits)
        return [[token for token in row if token not in (PAD, END)] for row in tokens[:, 1:].tolist()]


def build_positions(max_length: int, dim: int) -> Tensor:
    """Return the sinusoidal position codes (max_length, dim)."""
    frequencies = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000.0) / dim))
    angles = torch.arange(max_length)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
