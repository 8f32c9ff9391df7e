"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"). Imports torch only."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = F.dropout(self.c_proj(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return out


class MLP(nn.Module):
    """Two linear layers with GELU in its tanh approximation: (..., width) -> (..., width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = GPT2Linear(config.width, 4 * config.width)
        self.c_proj = GPT2Linear(4 * config.width, config.width, num_additions=2 * config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


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

    def count_flops_per_token(self, context: int) -> int:
        """Return the floating-point operations of a forward and backward pass per token of sequences of `context`.

        6 N + 12 L H Q T: PaLM (Chowdhery et al. 2022), appendix B. N counts all parameters except the position
        embedding, which is only added; L H Q is `num_layers * width`. Operations that activation checkpointing repeats
        do not count.
        """
        num_params = sum(param.numel() for param in self.parameters()) - self.wpe.weight.numel()
        return 6 * num_params + 12 * self.config.num_layers * self.config.width * context
