"""Sentence pairs in two languages: gettext catalogues, and files of tab-separated pairs."""

import gettext
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import samestep

# of a message in a catalogue: names, menu entries and paragraphs are left out
MIN_WORDS = 3
MAX_WORDS = 24
OTHER_LENGTHS = f"messages of fewer than {MIN_WORDS} or more than {MAX_WORDS} words"
UNREADABLE = "catalogues that cannot be read"
SYSTEM = ("/usr", "/usr/local")


class Pair(NamedTuple):
    """A sentence, its translation and their origin, such as "pairs.tsv", 12."""

    source: str
    target: str
    file: str
    number: int


@dataclass
class PairCorpus:
    """Sentence pairs.

    Attributes:
        pairs: the pairs.
        is_found: whether they are messages of this machine's programs, which users cannot correct.
        left_out: reason for leaving pairs out -> number of pairs.
    """

    pairs: list[Pair]
    is_found: bool = False
    left_out: Counter[str] = field(default_factory=Counter)


def read_pairs(data: str, source: str, target: str) -> PairCorpus:
    """Read the pairs of two languages.

    Args:
        data: "gettext" (the catalogues of this machine), a directory with catalogues, or a file with a pair per line.
        source, target: codes of languages, such as "en" and "pt_BR".

    Raises:
        InvalidValue: there are no pairs, or a pair of a file cannot be used.
    """
    if source == target:
        raise samestep.InvalidValue(
            f"source and target are both {source}: choose two languages by --source, --target", code="SS104"
        )
    if data == "gettext":
        corpus = read_catalogues(find_directories(), source, target)
    elif Path(data).is_dir():
        found = sorted({path.parent.parent for path in Path(data).rglob("LC_MESSAGES")})
        corpus = read_catalogues(found, source, target)
    elif Path(data).is_file():
        corpus = PairCorpus([*_read_lines(Path(data))])
    else:
        raise samestep.InvalidValue(
            f"there is no file {data}: give a file with a pair per line, a directory of gettext catalogues, or gettext",
            code="SS701",
        )
    if not corpus.pairs:
        raise samestep.InvalidValue(
            f"{data} holds no pair of {source} and {target} that can be used: name other data by --data", code="SS701"
        )
    return corpus


def refuse(file: str, number: int, why: str) -> samestep.InvalidValue:
    """Return the error for a line of a file."""
    return samestep.InvalidValue(f"{file}, line {number} {why}: correct or remove it", code="SS701")


def _read_lines(file: Path) -> Iterator[Pair]:
    """Yield the pairs of a file: in each line, a source, a tab, and a target."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                columns = line.decode("utf-8-sig" if number == 1 else "utf-8").split("\t")
            except UnicodeDecodeError as error:
                raise refuse(str(file), number, f"is not UTF-8 ({error.reason})") from None
            texts = [column.strip() for column in columns]
            if len(texts) != 2 or not all(texts):
                raise refuse(str(file), number, "is no source, a tab and a target")
            yield Pair(texts[0], texts[1], str(file), number)


def find_directories() -> list[Path]:
    """Return the directories of this machine that may contain catalogues: of the system and of Python packages."""
    prefixes = dict.fromkeys([*SYSTEM, sys.base_prefix, sys.prefix])
    found = [Path(prefix) / "share" / name for prefix in prefixes for name in ("locale", "locale-langpack")]
    for packages in dict.fromkeys(path for path in sys.path if path.endswith("-packages")):
        for pattern in ("*/locale", "*/*/locale", "*/*/*/locale"):
            found += sorted(Path(packages).glob(pattern))
    return [path for path in found if path.is_dir()]


def read_catalogues(directories: list[Path], source: str, target: str) -> PairCorpus:
    """Read the messages that catalogues have in both languages. A pair in several catalogues counts once.

    The messages' keys are English: "en" needs no catalogue.

    Raises:
        InvalidValue: there are no catalogues of a language.
    """
    corpus = PairCorpus([], is_found=True)
    languages = {name: {} if name == "en" else _read_language(directories, name, corpus) for name in (source, target)}
    seen = set[tuple[str, str]]()
    for file, key in languages[target] or languages[source]:
        texts = [key if name == "en" else known.get((file, key), "") for name, known in languages.items()]
        pair = (_clean(texts[0]), _clean(texts[-1]))
        if pair in seen or not all(pair) or pair[0] == pair[1]:  # an untranslated message is not a pair
            continue
        seen.add(pair)
        if MIN_WORDS <= len(pair[0].split()) <= MAX_WORDS:
            corpus.pairs.append(Pair(*pair, file, len(seen)))
        else:
            corpus.left_out[OTHER_LENGTHS] += 1
    return corpus


def _read_language(directories: list[Path], language: str, corpus: PairCorpus) -> dict[tuple[str, str], str]:
    """Return the messages of all catalogues of a language: (catalogue, key) -> text."""
    messages = {}
    files = [(each, file) for each in directories for file in sorted(each.glob(f"{language}/LC_MESSAGES/*.mo"))]
    for directory, file in files:
        try:
            texts = read_catalogue(file)
        except (OSError, ValueError, LookupError, struct.error):  # as `gettext` raises them
            corpus.left_out[UNREADABLE] += 1
            continue
        messages.update({(str(directory / file.name), key): text for key, text in texts.items()})
    if not files:
        found = Counter(file.parent.parent.name for each in directories for file in each.glob("*/LC_MESSAGES/*.mo"))
        others = f"there are some of {', '.join(name for name, _ in found.most_common(12))}"
        advice = "install packages with translations, such as `pip install django`, or give other data by --data"
        others = others if found else f"there are none at all: {advice}"
        raise samestep.InvalidValue(f"no gettext catalogue of {language} was found, and {others}", code="SS701")
    return messages


def read_catalogue(file: Path) -> dict[str, str]:
    """Return the messages of a gettext catalogue (.mo), by their keys without a context, in the singular.

    Raises:
        OSError, ValueError, LookupError, struct.error: the file is not a catalogue, is truncated, or is not in the
            encoding that it declares.
    """
    with open(file, "rb") as opened:
        entries = gettext.GNUTranslations(opened)._catalog  # type: ignore[attr-defined]  # noqa: SLF001
    singular = {key[0] if isinstance(key, tuple) else key: text for key, text in entries.items() if _is_singular(key)}
    return {key: text for key, text in singular.items() if key}


def _is_singular(key: str | tuple[str, int]) -> bool:
    """Return whether a key is of a message without a plural, or of its singular form: (message, 0)."""
    return isinstance(key, str) or key[1] == 0


def _clean(text: str) -> str:
    """Return a message's text without its context, with single spaces."""
    return " ".join(text.rpartition("\4")[2].split())
