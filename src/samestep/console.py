"""Printing text from other sources to a terminal, without its control characters."""

import re
import sys

# C0 except tab and newline, DEL, C1, marks that change the direction of text, surrogates.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape(text: str) -> str:
    r"""The text with control characters escaped, such as `\x1b`. Tabs and newlines are kept."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(sentence: str) -> None:
    """Prints one line on standard error."""
    print(f"samestep: {escape(sentence)}".replace("\n", "\\n"), file=sys.stderr, flush=True)
