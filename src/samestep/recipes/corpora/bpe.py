"""Byte-level BPE tokenizers of the library `tokenizers` (Sennrich et al., 2016; the bytes as in GPT-2)."""

from collections.abc import Sequence
from typing import Any, Self

import samestep
from samestep.recipes.corpora.text_tokenizer import train_byte_level

SPECIAL = ("[PAD]", "[START]", "[END]")  # ids 0, 1 and 2
LEAST_SIZE = 256 + len(SPECIAL)  # a token for each byte


class BytePairTokenizer:
    """Splits any text into tokens. The ids 0, 1 and 2 mean padding, start and end, and never come from a text.

    Args:
        text: the tokenizer as JSON, in the format of `tokenizers`.

    Raises:
        Error: the library is not installed.
        InvalidValue: the text is not a tokenizer.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tokenizer = _import_library().Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            if isinstance(error, samestep.Error):
                raise
            raise samestep.InvalidValue(
                f"the tokenizer cannot be read ({error}): train it again", code="SS702"
            ) from None
        self._tokenizer.encode_special_tokens = True  # a text that contains "[END]" does not end there

    @classmethod
    def train(cls, sentences: Sequence[str], size: int) -> Self:
        """Return a tokenizer of at most `size` tokens, trained on sentences. Raises Error."""
        return cls(train_byte_level(_import_library(), sentences, size, SPECIAL, adds_space=True))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each sentence."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(sentences)]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of token ids, without spaces at its ends."""
        return [text.strip() for text in self._tokenizer.decode_batch(rows)]


def _import_library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise samestep.MissingPackage("tokenizers is not installed: pip install 'samestep[translate]'") from None
    return tokenizers
