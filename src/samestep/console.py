"""What leaves for a terminal: text that others may have written, without its control characters."""

import re
import sys

# C0 but tab and newline, DEL, C1, marks and overrides of the direction of writing, halves of surrogate pairs.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape(text: str) -> str:
    r"""The text with control characters written out, such as `\x1b`. Tabs and newlines stay."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(sentence: str) -> None:
    """Prints one line for a person on standard error, whatever the sentence quotes."""
    print(f"samestep: {escape(sentence)}".replace("\n", "\\n"), file=sys.stderr, flush=True)
