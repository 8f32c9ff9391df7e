"""Sentence pairs in two languages: gettext catalogues, files of tab-separated pairs, and Hugging Face datasets."""

import gettext
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import samestep

# of a message in a catalogue: names, menu entries and paragraphs are left out
MIN_WORDS = 3
MAX_WORDS = 24
OTHER_LENGTHS = f"messages of fewer than {MIN_WORDS} or more than {MAX_WORDS} words"
UNREADABLE = "catalogues that cannot be read"
DATASETS = "datasets:"
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
        unit: unit of the numbers of the pairs: "line", "row" or "message".
        skips_bad: whether a pair that cannot be used is left out; otherwise it is an error.
        left_out: reason for leaving pairs out -> number of pairs.
    """

    pairs: list[Pair]
    unit: str
    skips_bad: bool
    left_out: Counter[str] = field(default_factory=Counter)

    def leave_out(self, file: str, number: int, why: str, reason: str) -> None:
        """Count a pair that cannot be used, or raise Error if it must not be skipped.

        Args:
            why: the problem of this pair, such as "has no target".
            reason: the problem in general, such as "empty or one-sided pairs".
        """
        if not self.skips_bad:
            raise samestep.InvalidValue(
                f"{file}, {self.unit} {number} {why}: correct it, or leave such pairs out by --skip-bad", code="SS701"
            )
        self.left_out[reason] += 1

    def add(self, rows: Iterable[tuple[str, str, str, int]]) -> "PairCorpus":
        """Add pairs, given as the fields of `Pair`. Raises Error for one that is empty or one-sided."""
        for source, target, file, number in rows:
            if source and target:
                self.pairs.append(Pair(source, target, file, number))
                continue
            missing = "text"
            if source or target:
                missing = "target" if source else "source"
            self.leave_out(file, number, f"has no {missing}", "empty or one-sided pairs")
        return self


def read_pairs(data: str, source: str, target: str, *, skips_bad: bool) -> PairCorpus:
    """Read the pairs of two languages.

    Args:
        data: "gettext" (the catalogues of this machine), a directory with catalogues, a file with a pair per line, or
            "datasets:NAME" (Hugging Face).
        source, target: codes of languages, such as "en" and "pt_BR".
        skips_bad: whether to leave out unreadable, empty and one-sided pairs; otherwise they are errors.

    Raises:
        InvalidValue: there are no pairs, or a pair cannot be used.
    """
    if source == target:
        raise samestep.InvalidValue(
            f"source and target are both {source}: choose two languages by --source, --target", code="SS104"
        )
    if data.startswith(DATASETS):
        corpus = read_dataset(data.removeprefix(DATASETS), source, target, skips_bad)
    elif data == "gettext":
        corpus = read_catalogues(find_directories(), source, target, skips_bad=True)
    elif Path(data).is_dir():
        found = sorted({path.parent.parent for path in Path(data).rglob("LC_MESSAGES")})
        corpus = read_catalogues(found, source, target, skips_bad)
    elif Path(data).is_file():
        corpus = PairCorpus([], "line", skips_bad)
        corpus.add(_read_lines(Path(data), corpus))
    else:
        raise samestep.InvalidValue(
            f"there is no file {data}: give a file with a pair per line, a directory of gettext catalogues, "
            f"{DATASETS}NAME, or gettext",
            code="SS701",
        )
    if not corpus.pairs:
        raise samestep.InvalidValue(
            f"{data} holds no pair of {source} and {target} that can be used: name other data by --data", code="SS701"
        )
    return corpus


def _read_lines(file: Path, corpus: PairCorpus) -> Iterator[tuple[str, str, str, int]]:
    """Yield the pairs of a file: in each line, a source, a tab, and a target."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                columns = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n").split("\t")
            except UnicodeDecodeError as error:
                corpus.leave_out(str(file), number, f"is not UTF-8 ({error.reason})", "lines that are not UTF-8")
                continue
            if len(columns) > 2:
                why = f"has {len(columns)} columns instead of a source, a tab and a target"
                corpus.leave_out(str(file), number, why, "lines of more than two columns")
                continue
            source, target = (*columns, "")[:2]
            yield source.strip(), target.strip(), str(file), number


def read_dataset(name: str, source: str, target: str, skips_bad: bool) -> PairCorpus:
    """Read a Hugging Face dataset whose rows have a `translation`, such as opus_books. Raises Error."""
    try:
        import datasets
    except ImportError:
        raise samestep.MissingPackage("datasets is not installed: pip install datasets") from None
    config = "-".join(sorted((source, target)))
    try:
        rows = datasets.load_dataset(name, config, split="train")["translation"]
        texts = [(row[source].strip(), row[target].strip()) for row in rows]
    except Exception as error:  # of the network, of the hub, of the dataset's format
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise samestep.InvalidValue(
            f"the dataset {name}, {config}, cannot be read ({why}): name other data by --data", code="SS701"
        ) from None
    where = f"{name}, {config}"
    return PairCorpus([], "row", skips_bad).add((*pair, where, number) for number, pair in enumerate(texts))


def find_directories() -> list[Path]:
    """Return the directories of this machine that may contain catalogues: of the system and of Python packages."""
    prefixes = dict.fromkeys([*SYSTEM, sys.base_prefix, sys.prefix])
    found = [Path(prefix) / "share" / name for prefix in prefixes for name in ("locale", "locale-langpack")]
    for packages in dict.fromkeys(path for path in sys.path if path.endswith("-packages")):
        for pattern in ("*/locale", "*/*/locale", "*/*/*/locale"):
            found += sorted(Path(packages).glob(pattern))
    return [path for path in found if path.is_dir()]


def read_catalogues(directories: list[Path], source: str, target: str, skips_bad: bool) -> PairCorpus:
    """Read the messages that catalogues have in both languages. A pair in several catalogues counts once.

    The messages' keys are English: "en" needs no catalogue.

    Raises:
        InvalidValue: there are no catalogues of a language, or one cannot be read.
    """
    corpus = PairCorpus([], "message", skips_bad)
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
        except (OSError, ValueError, LookupError, struct.error) as error:  # as `gettext` raises them
            if not corpus.skips_bad:
                why = f"{type(error).__name__}: {error}"
                raise samestep.InvalidValue(
                    f"{file} is no catalogue that can be read ({why}): remove it, or give --skip-bad", code="SS701"
                ) from None
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
