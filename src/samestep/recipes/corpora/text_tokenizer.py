"""Tokenizers of text: bytes, or those of the library `tokenizers`. Does not import torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import InvalidValue, needing
from samestep.hashing import hash_bytes

END = "<|endoftext|>"  # the token at the end of each document
NUM_BYTES = 256
MAX_TEXTS = 64  # encoded in one call, on all cores


@dataclass(frozen=True)
class Tokenizer:
    """Converts text to tokens and back: a token per byte of UTF-8, or a tokenizer of the library `tokenizers`.

    It is passed to `run.prepare`, so that every snapshot contains it, and a resumed run compares it.

    Attributes:
        definition: the content of `tokenizer.json` of the library; "" for bytes.
    """

    definition: str = ""

    def __str__(self) -> str:
        """Describe it, such as "bytes" or "4096 kinds (1f2e3d4c)"."""
        if not self.definition:
            return "bytes"
        return f"{self.vocabulary_size} kinds ({hash_bytes(self.definition.encode())[:8]})"

    @cached_property
    def _library(self) -> Any:
        return import_tokenizers().Tokenizer.from_str(self.definition)

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of tokens."""
        return max(self._library.get_vocab().values()) + 1 if self.definition else NUM_BYTES + 1

    @cached_property
    def end(self) -> int | None:
        """The token at the end of a document; None if there is none."""
        end: int | None = self._library.token_to_id(END) if self.definition else NUM_BYTES
        return end

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        """Return the tokens of each text, without the end of the document."""
        if not self.definition:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        tokens = list[NDArray[np.integer[Any]]]()
        for first in range(0, len(texts), MAX_TEXTS):
            encoded = self._library.encode_batch(texts[first : first + MAX_TEXTS], add_special_tokens=False)
            tokens += [np.array(each.ids, np.uint32) for each in encoded]
        return tokens

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt. An empty one begins a new document.

        Raises:
            InvalidValue: the tokenizer cannot represent the prompt.
        """
        if not prompt and self.end is not None:
            return [self.end]
        tokens: list[int] = self.encode([prompt.encode(errors="replace").decode()])[0].tolist()
        # A tokenizer without byte-level tokens drops unknown characters, or replaces them by a token. Some add spaces.
        if not tokens or self.decode(tokens).split() != prompt.split():
            raise InvalidValue(
                f"the tokenizer has no tokens for the prompt {prompt!r}: it gives {self.decode(tokens)!r}", code="SS704"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with U+FFFD for bytes that are not UTF-8. Ends of documents are left out."""
        if not self.definition:
            return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
        text: str = self._library.decode(list(tokens), skip_special_tokens=True)
        return text

    def state_dict(self) -> dict[str, str]:
        """Return the state for snapshots."""
        return {"definition": self.definition}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Compare with the tokenizer of a snapshot. Raises InvalidValue if they differ."""
        if (other := Tokenizer(**state)) != self:
            raise InvalidValue(
                f"the run's tokens are {other}, and the data's are {self}: name the run's data", code="SS702"
            )


BYTES = Tokenizer()


def import_tokenizers() -> Any:
    """Import the library `tokenizers`. Raises MissingPackage if it is not installed."""
    with needing("this tokenizer needs the library tokenizers", "'samestep[gpt]'"):
        import tokenizers
    return tokenizers


def train_characters(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with a token for each character of some texts, sorted, and one for the end."""
    library = import_tokenizers()
    characters = sorted({character for text in texts for character in text})
    tokenizer = library.Tokenizer(library.models.BPE({character: n for n, character in enumerate(characters)}, []))
    tokenizer.decoder = library.decoders.Fuse()
    tokenizer.add_special_tokens([END])
    return Tokenizer(tokenizer.to_str())


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2). It has a token for each byte.

    Args:
        size: number of tokens at most; there are fewer if the texts have fewer frequent pairs.
    """
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        show_progress=False,
        min_frequency=2,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer.to_str())


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`. Raises InvalidValue if it cannot be used."""
    library = import_tokenizers()
    try:
        definition = file.read_text("utf-8")
        library.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises Exception itself
        raise InvalidValue(
            f"{file} is no tokenizer of the library tokenizers ({' '.join(str(error).split())}): name a tokenizer.json",
            code="SS702",
        ) from None
    return Tokenizer(definition)
