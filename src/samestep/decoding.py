"""JSON that other programs may have written, parsed strictly and checked against a type: a Struct of msgspec.

Python's own parser reads the text, because msgspec's refuses lone surrogates. They stand for the bytes of file names
and arguments that are not UTF-8.
"""

import json
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

MAX_DEPTH = 100  # of nested JSON: far below Python's limit of recursion

# Types of the entries of Structs. Numbers never stand for true and false.
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]
Argument = Annotated[str, Meta(pattern=r"\A[^\0\ud800-\udc7f\udd00-\udfff]*\Z")]  # that `os.fsencode` can encode
Object = dict[Any, Any]

Json = Mapping[str, Any]  # an object of JSON that is only read

T = TypeVar("T")


def decode(text: bytes | str, kind: type[T]) -> T:
    """Parse JSON, and convert it. Raises ValueError, as `parse_json` and `convert`."""
    return convert(parse_json(text), kind)


def convert(value: Any, kind: type[T]) -> T:
    """Convert parsed JSON to a type. Entries that a Struct does not have are left out, unless it forbids them.

    Raises:
        ValueError: the value lacks something, or something in it has another type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at ")
        raise ValueError(f"{where.removeprefix('$').lstrip('.') or 'JSON'}: {what[:1].lower()}{what[1:]}") from None


def parse_json(text: bytes | str) -> Any:
    """Parse JSON strictly: numbers are finite, and nesting is at most `MAX_DEPTH` deep.

    Raises:
        ValueError: the text is something else.
    """
    try:
        value = json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [*chain.from_iterable(level)]
        if not level:
            return value
    raise ValueError("the JSON is nested too deeply")


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def as_json(value: Any, constant: Callable[[str], str] = str) -> Any:
    """Return a value as a reader of its JSON gets it. Other types become their str.

    Args:
        constant: returns the text that replaces "NaN", "Infinity" or "-Infinity", which JSON lacks.
    """
    return json.loads(json.dumps(value, default=str), parse_constant=constant)
