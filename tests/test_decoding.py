"""JSON is parsed strictly, and becomes the Struct that it should be, or an error that names the entry."""

from typing import Any

import pytest
from msgspec import Struct

from samestep.decoding import Argument, Count, Number, Object, Size, convert, decode, parse_json


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    x: Number
    tags: list[str]
    parent: "Point | None" = None


INNER = {"x": 1, "tags": ["a"], "parent": None}


def test_structs() -> None:
    assert convert({"x": 0.5, "tags": [], "parent": INNER}, Point) == Point(0.5, [], Point(1, ["a"]))
    assert decode(b'{"x": 2, "tags": ["\\ud800"]}', Point) == Point(2, ["\ud800"])
    assert decode("[1, 2]", list[Count]) == [1, 2]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (INNER | {"x": "1"}, "x: expected float, got str"),
        (INNER | {"x": True}, "x: expected float, got bool"),
        (INNER | {"tags": [1]}, "tags[0]: expected str, got int"),
        (INNER | {"tags": "a"}, "tags: expected array, got str"),
        (INNER | {"parent": {}}, "parent: object missing required field x"),
        (INNER | {"parent": [INNER]}, "parent: expected object | null, got array"),
        (INNER | {"more": 1}, "JSON: object contains unknown field more"),
        ([], "JSON: expected object, got array"),
    ],
)
def test_an_error_names_the_entry(value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        convert(value, Point)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [0, 2**63 - 1], [-1, 2**63, 1.0, True, "1", None]),
        (Size, [1, 2**63 - 1], [0, 2**63, 1.5, True]),
        (Number, [0, -1.5, 1e299, 10**18], [1e300, 10**400, float("nan"), float("inf"), True, "1", None]),
        (Argument, ["", "a b\n", "\udcff"], ["a\0", "\ud800", "\udd00", 1]),
        (Object, [{}, {3: object()}], [[], None, "x"]),
    ],
)
def test_types(kind: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert convert(value, kind) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"expected|out of range"):
            convert(value, kind)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"NaN", b"[-Infinity]", b"1e999", b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 101 + b"1" + b"}" * 101, b"9" * 5000, b"\xff", b"1 2",
    ],
)  # fmt: skip
def test_what_is_not_parsed(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)
    with pytest.raises(ValueError):  # noqa: PT011
        decode(text, Any)
