"""An encoder-decoder Transformer (Vaswani et al., "Attention Is All You Need", 2017) with greedy decoding.

It imports torch only: copy this file to use exported weights without samestep. Layer normalization comes before each
block (Xiong et al., 2020), and the output layer shares the weights of the target embedding (Press and Wolf, 2017).

In shapes, N is the number of sentences, S and T are the lengths of the source and the target, and D is `dim`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# token ids in both languages
PAD = 0
START = 1
END = 2
Projected = tuple[Tensor, Tensor]  # keys and values, each (N, heads, length, D / heads)


class UnitEmbedding(nn.Embedding):
    """An embedding whose vectors have an initial norm of about 1."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class XavierLinear(nn.Linear):
    """A linear layer with the initial values of Glorot and Bengio (2010)."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query, self.key, self.value, self.output = (XavierLinear(dim, dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        """Split (N, length, D) into heads: (N, heads, length, D / heads)."""
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def project(self, memory: Tensor) -> Projected:
        """Return the keys and values of `memory` (N, length, D)."""
        return self.split(self.key(memory)), self.split(self.value(memory))

    def forward(self, x: Tensor, projected: Projected, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend from x (N, T, D) to keys and values. `mask` is True where attention is allowed."""
        queries = self.split(self.query(x))
        keys, values = projected
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(queries, keys, values, mask, dropout, is_causal)
        mixed: Tensor = self.output(x.transpose(1, 2).flatten(2))
        return mixed


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, num_heads, dropout)
        self.attention_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(XavierLinear(dim, 4 * dim), nn.ReLU(), XavierLinear(4 * dim, dim))
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map (N, S, D) to (N, S, D). `mask` (N, 1, 1, S) is False at padding."""
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, self.attention.project(normed), mask))
        encoded: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return encoded


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, and a feed-forward network."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, num_heads, dropout)
        self.attention_norm = nn.LayerNorm(dim)
        self.cross_attention = Attention(dim, num_heads, dropout)
        self.cross_attention_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(XavierLinear(dim, 4 * dim), nn.ReLU(), XavierLinear(4 * dim, dim))
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, memory: Projected, mask: Tensor, past: Projected | None = None
    ) -> tuple[Tensor, Projected]:
        """Map (N, T, D) to (N, T, D).

        Args:
            memory: `cross_attention.project` of the encoder's output.
            mask: (N, 1, 1, S), False at padding of the source.
            past: keys and values of the tokens before x, which must then be one token. None: x begins with the first
                token.

        Returns:
            The output, and the keys and values of all tokens so far.
        """
        normed = self.attention_norm(x)
        projected = self.attention.project(normed)
        if past is not None:
            projected = (torch.cat([past[0], projected[0]], 2), torch.cat([past[1], projected[1]], 2))
        x = x + self.dropout(self.attention(normed, projected, is_causal=past is None))
        x = x + self.dropout(self.cross_attention(self.cross_attention_norm(x), memory, mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), projected


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
        self.encoder = nn.ModuleList(EncoderLayer(dim, num_heads, dropout) for _ in range(num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(dim, num_heads, dropout) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(dim)
        self.decoder_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", build_positions(max_length, dim), persistent=False)

    def embed(self, embedding: nn.Embedding, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the input of the first layer (N, length, D) for tokens (N, length) at positions from `start` on."""
        stop = start + tokens.shape[1]
        if stop > self.max_length:
            raise ValueError(f"a sentence has {stop} tokens, and the model takes at most {self.max_length}")
        positions = self.get_buffer("positions")[start:stop]
        embedded: Tensor = self.dropout(embedding(tokens) * math.sqrt(self.dim) + positions)
        return embedded

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory (N, S, D) of source tokens (N, S), padded on the right, and their mask (N, 1, 1, S)."""
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(self.source_embedding, source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def project(self, memory: Tensor) -> list[Projected]:
        """Return the keys and values of the memory for each layer of the decoder."""
        layers = (layer for layer in self.decoder if isinstance(layer, DecoderLayer))
        return [layer.cross_attention.project(memory) for layer in layers]

    def decode(
        self, target: Tensor, memory: list[Projected], mask: Tensor, past: list[Projected] | None = None
    ) -> tuple[Tensor, list[Projected]]:
        """Return the logits (N, T, num_target) of the token after each token of `target` (N, T), and the new past.

        Padding of the target is on the right: no earlier token attends to it, so it needs no mask.

        Args:
            memory, mask: from `project` and `encode`.
            past: result of the call for the tokens before `target`, which must then be one token.
        """
        start = 0 if past is None else past[0][0].shape[2]
        x = self.embed(self.target_embedding, target, start)
        projected = list[Projected]()
        for number, layer in enumerate(self.decoder):
            x, own = layer(x, memory[number], mask, None if past is None else past[number])
            projected.append(own)
        return F.linear(self.decoder_norm(x), self.target_embedding.weight), projected

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits (N, T, num_target) of the token after each token of `target` (N, T).

        Args:
            source: token ids (N, S), padded on the right with PAD. Each sentence ends with END.
            target: token ids (N, T), padded on the right with PAD. Each sentence begins with START.
        """
        memory, mask = self.encode(source)
        logits, _ = self.decode(target, self.project(memory), mask)
        return logits

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
        memory, mask = self.encode(source)
        projected = self.project(memory)
        past = None
        tokens = torch.full((len(source), 1), START, device=source.device)
        is_done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        while not is_done.all():
            logits, past = self.decode(tokens[:, -1:], projected, mask, past)
            logits[..., [PAD, START]] = -math.inf
            chosen = logits[:, -1].argmax(1).masked_fill(is_done, PAD)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
            is_done = is_done | (chosen == END) | (tokens.shape[1] > limits)
        return [[token for token in row if token not in (PAD, END)] for row in tokens[:, 1:].tolist()]


def build_positions(max_length: int, dim: int) -> Tensor:
    """Return the sinusoidal position codes (max_length, dim)."""
    frequencies = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000.0) / dim))
    angles = torch.arange(max_length)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
