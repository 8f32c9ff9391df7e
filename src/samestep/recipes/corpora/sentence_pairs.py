"""Sentence pairs in two languages: gettext catalogues, and files of tab-separated pairs."""

import gettext
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import samestep

# of a message in a catalogue: names, menu entries and paragraphs are left out
MIN_WORDS = 3
MAX_WORDS = 24
SYSTEM = ("/usr", "/usr/local")

Pair = tuple[str, str]  # a sentence and its translation


def read_pairs(data: str, source: str, target: str) -> list[Pair]:
    """Read the pairs of two languages.

    Args:
        data: "gettext" (the catalogues of this machine), a directory with catalogues, or a file with a pair per line.
        source, target: codes of languages, such as "en" and "pt_BR".

    Raises:
        InvalidValue: there are no pairs, or a line of a file is no pair.
    """
    if data == "gettext" or Path(data).is_dir():
        inside = {path.parent.parent for path in Path(data).rglob("LC_MESSAGES")}
        pairs = [*read_catalogues(find_directories() if data == "gettext" else sorted(inside), source, target)]
    else:
        pairs = [*_read_lines(Path(data))]
    if not pairs:
        raise samestep.InvalidValue(
            f"{data} holds no pair of {source} and {target} that can be used: name other data by --data, or install "
            "packages with translations, such as `pip install django`",
            code="SS701",
        )
    return pairs


def _read_lines(file: Path) -> Iterator[Pair]:
    """Yield the pairs of a file: in each line, a source, a tab, and a target."""
    try:
        with file.open(encoding="utf-8-sig") as opened:
            lines = opened.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise samestep.InvalidValue(f"{file} is no text in UTF-8 ({error}): name other data", code="SS701") from None
    for number, line in enumerate(lines, start=1):
        texts = [column.strip() for column in line.split("\t")]
        if len(texts) != 2 or not all(texts):
            raise samestep.InvalidValue(
                f"{file}, line {number} is no source, a tab and a target: correct or remove it", code="SS701"
            )
        yield texts[0], texts[1]


def find_directories() -> list[Path]:
    """Return the directories of this machine that may contain catalogues: of the system and of Python packages."""
    prefixes = dict.fromkeys([*SYSTEM, sys.base_prefix, sys.prefix])
    found = [Path(prefix) / "share" / name for prefix in prefixes for name in ("locale", "locale-langpack")]
    for packages in dict.fromkeys(path for path in sys.path if path.endswith("-packages")):
        for pattern in ("*/locale", "*/*/locale", "*/*/*/locale"):
            found += sorted(Path(packages).glob(pattern))
    return found


def read_catalogues(directories: list[Path], source: str, target: str) -> Iterator[Pair]:
    """Yield the messages that catalogues have in both languages. A pair in several catalogues counts once."""
    known = {name: {} if name == "en" else _read_language(directories, name) for name in (source, target)}
    seen = set[Pair]()
    for file, key in known[target] or known[source]:  # the key is the message in English
        texts = [key if name == "en" else known[name].get((file, key), "") for name in (source, target)]
        pair = (_clean(texts[0]), _clean(texts[1]))
        is_sentence = MIN_WORDS <= len(pair[0].split()) <= MAX_WORDS
        if is_sentence and pair not in seen and pair[1] and pair[0] != pair[1]:  # an untranslated message is no pair
            seen.add(pair)
            yield pair


def _read_language(directories: list[Path], language: str) -> dict[tuple[str, str], str]:
    """Return the messages of all catalogues (.mo) of a language, in the singular: (catalogue, key) -> text."""
    messages = {}
    for directory in directories:
        for file in sorted(directory.glob(f"{language}/LC_MESSAGES/*.mo")):
            with suppress(OSError, ValueError, LookupError, struct.error):  # it is damaged
                for key, text in read_catalogue(file).items():
                    messages[str(directory / file.name), key] = text
    return messages


def read_catalogue(file: Path) -> dict[str, str]:
    """Return the messages of a gettext catalogue (.mo), by their keys in English, in the singular.

    Raises:
        OSError, ValueError, LookupError, struct.error: the file is not a catalogue, is truncated, or is not in the
            encoding that it declares.
    """
    with open(file, "rb") as opened:
        entries = gettext.GNUTranslations(opened)._catalog  # type: ignore[attr-defined]  # noqa: SLF001
    forms = {key if isinstance(key, tuple) else (key, 0): text for key, text in entries.items()}
    return {key: text for (key, form), text in forms.items() if key and form == 0}


def _clean(text: str) -> str:
    """Return a message's text without its context, with single spaces."""
    return " ".join(text.rpartition("\4")[2].split())
