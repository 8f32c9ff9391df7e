"""Tokenizers of text: bytes, or those of the library `tokenizers`. Does not import torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.errors import Error, InvalidValue, needing
from samestep.hashing import hash_bytes

END = "<|endoftext|>"  # the token at the end of each document
NUM_BYTES = 256
MAX_TEXTS = 64  # encoded in one call, on all cores


@dataclass(frozen=True)
class Tokenizer:
    """Converts text to tokens and back.

    It is passed to `run.prepare`, so that every snapshot contains it, and a resumed run compares it.

    Attributes:
        kind: "bytes" (one token per byte of UTF-8), "chars" or "bpe".
        vocabulary_size: number of tokens.
        end: the token at the end of a document; None if there is none.
        definition: the content of `tokenizer.json` of the library `tokenizers`; empty for bytes.
    """

    kind: str
    vocabulary_size: int
    end: int | None
    definition: bytes = b""

    def __str__(self) -> str:
        """Describe it, such as "bytes" or "bpe of 4096 tokens (1f2e3d4c)"."""
        if self.kind == "bytes":
            return self.kind
        return f"{self.kind} of {self.vocabulary_size} tokens ({hash_bytes(self.definition)[:8]})"

    @cached_property
    def _library(self) -> Any:
        return import_tokenizers().Tokenizer.from_str(self.definition.decode())

    def encode(self, texts: Sequence[bytes]) -> Iterator[NDArray[np.integer[Any]]]:
        """Yield the tokens of each text in UTF-8, without the end of the document.

        Raises:
            UnicodeDecodeError: a text is not UTF-8, and the tokenizer is not "bytes".
            Error: the library is not installed.
        """
        if self.kind == "bytes":
            yield from (np.frombuffer(text, np.uint8) for text in texts)
            return
        for encoding in self._library.encode_batch([text.decode() for text in texts], add_special_tokens=False):
            yield np.array(encoding.ids, np.uint32)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt. An empty one begins a new document.

        Raises:
            InvalidValue: the tokenizer cannot represent the prompt.
            Error: the library is not installed.
        """
        if not prompt:
            if self.end is None:
                raise InvalidValue(
                    "the prompt is empty, and the tokenizer has no token that begins a document: give a prompt",
                    code="SS704",
                )
            return [self.end]
        try:
            tokens: list[int] = next(self.encode([prompt.encode(errors="surrogateescape")])).tolist()
        except UnicodeDecodeError:
            raise InvalidValue(f"the prompt {prompt!r} is not UTF-8: give text", code="SS704") from None
        # A tokenizer without byte-level tokens drops unknown characters, or replaces them by a token.
        if self.kind != "bytes" and _squeeze(self.decode(tokens)) != _squeeze(prompt):
            raise InvalidValue(
                f"the tokenizer has no tokens for the prompt {prompt!r}: it gives {self.decode(tokens)!r}", code="SS704"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with U+FFFD for bytes that are not UTF-8. Ends of documents are left out.

        Raises:
            Error: the library is not installed.
        """
        if self.kind == "bytes":
            return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
        text: str = self._library.decode(list(tokens), skip_special_tokens=True)
        return text

    def state_dict(self) -> dict[str, Any]:
        """Return the state for snapshots."""
        size = self.vocabulary_size
        return {"kind": self.kind, "vocabulary_size": size, "end": self.end, "definition": self.definition.decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with the tokenizer of a snapshot. Raises Error if they differ."""
        if (other := Tokenizer.from_state_dict(state)) != self:
            raise InvalidValue(
                f"the run's tokenizer is {other}, and the data's is {self}: name the run's data", code="SS702"
            )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer from its state in a snapshot."""
        return cls(state["kind"], state["vocabulary_size"], state["end"], state["definition"].encode())


BYTES = Tokenizer("bytes", NUM_BYTES + 1, end=NUM_BYTES)


def import_tokenizers() -> Any:
    """Import the library `tokenizers`. Raises Error if it is not installed."""
    with needing("this tokenizer needs the library tokenizers", "'samestep[gpt]'"):
        import tokenizers
    return tokenizers


def build_tokenizer(definition: bytes, kind: str = "bpe") -> Tokenizer:
    """Build the tokenizer that a `tokenizer.json` defines.

    Raises:
        Error: the library is not installed.
        ValueError: the library cannot read the definition.
    """
    try:
        library = import_tokenizers().Tokenizer.from_str(definition.decode())
    except Error:
        raise
    except Exception as error:  # the library raises Exception itself
        raise ValueError(" ".join(str(error).split())) from None
    return Tokenizer(kind, max(library.get_vocab().values()) + 1, library.token_to_id(END), definition)


def train_characters(texts: Iterable[bytes]) -> Tokenizer:
    """Return a tokenizer with a token for each character of texts in UTF-8, sorted, and one for the end."""
    library = import_tokenizers()
    characters = sorted({character for text in texts for character in text.decode()})
    tokenizer = library.Tokenizer(library.models.BPE({character: n for n, character in enumerate(characters)}, []))
    tokenizer.decoder = library.decoders.Fuse()
    tokenizer.add_special_tokens([END])
    return build_tokenizer(tokenizer.to_str().encode(), "chars")


def train_bpe(texts: Iterable[bytes], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE on texts in UTF-8.

    It has fewer than `vocabulary_size` tokens if the texts have fewer frequent pairs.

    Raises:
        Error: the library is not installed.
        UnicodeDecodeError: a text is not UTF-8.
    """
    tokenizer = train_byte_level((text.decode() for text in texts), vocabulary_size, [END], min_frequency=2)
    return build_tokenizer(tokenizer.to_str().encode())


def train_byte_level(
    texts: Iterable[str], size: int, special: Sequence[str], *, adds_space: bool = False, min_frequency: int = 0
) -> Any:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2). It has a token for each byte.

    Args:
        size: number of tokens at most.
        special: tokens that never come from a text. They get the first numbers.
        adds_space: whether to begin each text with a space, so that its first word is encoded like any other.
        min_frequency: how often a pair must occur to become a token.
    """
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        show_progress=False,
        min_frequency=min_frequency,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`. Raises Error if it cannot be used."""
    try:
        return build_tokenizer(file.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidValue(
            f"{file} is no tokenizer of the library tokenizers ({why}): name a tokenizer.json", code="SS702"
        ) from None


def _squeeze(text: str) -> str:
    """Remove white space: some tokenizers add or drop it at the ends."""
    return "".join(text.split())
