"""The recipe translate and `samestep translate`: data, tokenizers, order, training, and errors."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import Popen, run
from support.runs import ask, check, digest, read_rows, samestep_command
from support.selection import one_in
from support.waiting import DEADLINE_S

import samestep
from samestep.cli import main
from samestep.recipes import translate
from samestep.recipes.corpora import sentence_pairs
from samestep.recipes.corpora.bpe import BytePairTokenizer
from samestep.recipes.corpora.encoded_pairs import Bucketed, Pairs, divide, load_data, load_or_train
from samestep.recipes.corpora.sentence_pairs import Pair, read_catalogue, read_pairs
from samestep.snapshot.store import Store

MODELS = Path(translate.__file__).parent / "models"
NOUNS = {"cat": "gatto", "dog": "cane", "book": "libro", "train": "treno", "friend": "amico"}
ADJECTIVES = {"red": "rosso", "small": "piccolo", "old": "vecchio", "": ""}
VERBS = {"sees": "vede", "has": "ha", "wants": "vuole"}


def build_pairs(num: int) -> list[tuple[str, str]]:
    """English sentences and their Italian translations."""
    words = list(product(NOUNS.items(), ADJECTIVES.items(), VERBS.items(), NOUNS.items()))
    chosen = np.random.default_rng(0).permutation(len(words))[:num]
    pairs = []
    for (noun, nome), (adjective, aggettivo), (verb, verbo), (what, cosa) in (words[k] for k in chosen):
        english, italian = f"the {adjective} {noun} {verb} a {what}", f"il {nome} {aggettivo} {verbo} un {cosa}"
        pairs.append((" ".join(english.split()), " ".join(italian.split())))
    return pairs


def write_pairs(file: Path, pairs: list[tuple[str, str]]) -> Path:
    file.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return file


def write_catalogue(
    file: Path, messages: Mapping[str, str], *, charset: str = "UTF-8", order: str = "<", magic: int = 0x950412DE
) -> None:
    """Write a .mo file, as msgfmt does."""
    header = f"Project-Id-Version: x\nContent-Type: text/plain; charset={charset}\nPlural-Forms: nplurals=2\n"
    rows = sorted((key.encode(charset), text.encode(charset)) for key, text in {"": header, **messages}.items())
    content, tables = b"", [b"", b""]
    for column in (0, 1):
        for row in rows:
            tables[column] += struct.pack(f"{order}2I", len(row[column]), 28 + 16 * len(rows) + len(content))
            content += row[column] + b"\0"
    head = struct.pack(f"{order}7I", magic, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(head + tables[0] + tables[1] + content)


def read_texts(*arguments: Any, skips_bad: bool = False) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in read_pairs(*map(str, arguments), skips_bad=skips_bad).pairs]


# --- catalogues and files -------------------------------------------------------------------------------------------


def test_catalogues_are_read_as_gettext_reads_them(tmp_path: Path) -> None:
    messages = {
        "open the file": "öffne die Datei",
        "menu\4close the file": "schließe die Datei",
        "delete one file\0delete %d files": "lösche eine Datei\0lösche %d Dateien",
        "untranslated words here": "untranslated words here",
        "not translated yet": "",
        "short": "kurz",
        "two\n  lines of\ttext": "zwei\nZeilen Text",
    }
    for number, (charset, order) in enumerate((("UTF-8", "<"), ("ISO-8859-1", ">"))):
        root = tmp_path / f"{number}"
        write_catalogue(root / "locale/de/LC_MESSAGES/tool.mo", messages, charset=charset, order=order)
        assert sorted(read_texts(root, "en", "de")) == [
            ("close the file", "schließe die Datei"),
            ("delete %d files", "lösche %d Dateien"),
            ("open the file", "öffne die Datei"),
            ("two lines of text", "zwei Zeilen Text"),
        ]
        assert sorted(read_texts(root, "de", "en"))[0] == ("lösche %d Dateien", "delete %d files")


def test_two_languages_meet_in_the_keys_of_one_catalogue(tmp_path: Path) -> None:
    keys = ["open the file", "close the file", "read the file"]
    write_catalogue(tmp_path / "de/LC_MESSAGES/a.mo", {key: f"{key} auf deutsch" for key in keys})
    write_catalogue(tmp_path / "fr/LC_MESSAGES/a.mo", {key: f"{key} en français" for key in keys[:2]})
    write_catalogue(tmp_path / "fr/LC_MESSAGES/b.mo", {keys[2]: "ailleurs en français"})
    expected = [(f"{key} auf deutsch", f"{key} en français") for key in keys[:2]]
    assert sorted(read_texts(tmp_path, "de", "fr")) == sorted(expected)


def test_the_catalogues_of_the_system_and_of_packages_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalogue(tmp_path / "share/locale/de/LC_MESSAGES/a.mo", {"of the system": "vom System her"})
    packages = tmp_path / "lib/site-packages"
    write_catalogue(packages / "web/conf/locale/de/LC_MESSAGES/b.mo", {"of a package": "von einem Paket"})
    (packages / "web/conf/locale/de/LC_MESSAGES/c.mo").write_bytes(b"no catalogue")  # the user cannot repair it
    monkeypatch.setattr(sentence_pairs, "SYSTEM", ())
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(packages)])
    corpus = read_pairs("gettext", "en", "de", skips_bad=False)
    assert [pair.source for pair in corpus.pairs] == ["of the system", "of a package"]
    assert corpus.left_out == {"catalogues that cannot be read": 1}
    with pytest.raises(samestep.Error, match=r"no gettext catalogue of xx was found, and there are some of de$"):
        read_pairs("gettext", "en", "xx", skips_bad=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        samestep.Error, match=r"there are none at all: install .* `pip install django`, or give other data"
    ):
        read_pairs("gettext", "en", "de", skips_bad=False)


@pytest.mark.parametrize("fault", ["magic", "cut", "charset", "bytes"])
def test_a_damaged_catalogue_is_named(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "de/LC_MESSAGES/tool.mo"
    write_catalogue(file, {"one two three": "eins zwei drei ä"}, magic=7 if fault == "magic" else 0x950412DE)
    content = file.read_bytes()
    if fault == "cut":
        file.write_bytes(content[:-20])
    elif fault == "charset":
        file.write_bytes(content.replace(b"UTF-8", b"UTF-X"))
    elif fault == "bytes":
        file.write_bytes(content.replace("ä".encode(), b"\xff\xff"))
    with pytest.raises((ValueError, LookupError)):
        read_catalogue(file)
    with pytest.raises(samestep.Error, match=f"{file} is no catalogue that can be read .* or give --skip-bad"):
        read_texts(tmp_path, "en", "de")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "has no text"),
        ("alone", "has no target"),
        ("alone\t ", "has no target"),
        ("\tallein", "has no source"),
        ("a\tb\tc", "has 3 columns instead of a source, a tab and a target"),
        ("a\xff\tb", r"is not UTF-8 \(invalid start byte\)"),
    ],
)
def test_a_bad_pair_is_named_and_skipped_only_if_asked(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_bytes(b"\xef\xbb\xbfyes \tja\r\n" + line.encode("latin-1") + b"\nno\tnein")
    with pytest.raises(
        samestep.Error, match=f"{file}, line 2 {what}: correct it, or leave such pairs out by --skip-bad"
    ):
        read_texts(file, "en", "de")
    corpus = read_pairs(str(file), "en", "de", skips_bad=True)
    assert [(pair.source, pair.target, pair.number) for pair in corpus.pairs] == [("yes", "ja", 1), ("no", "nein", 3)]
    assert corpus.left_out.total() == 1


def test_missing_data_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    for data, what in (
        (tmp_path / "empty.tsv", "holds no pair of en and de"),
        (tmp_path / "none.tsv", "there is no file .*none.tsv: give a file"),
        (tmp_path, "no gettext catalogue of de was found, and there are none at all"),
    ):
        with pytest.raises(samestep.Error, match=what):
            read_texts(data, "en", "de")
    with pytest.raises(samestep.Error, match="source and target are both en: choose two languages"):
        read_texts(tmp_path / "empty.tsv", "en", "en")


def test_a_hugging_face_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local data set in the format of opus_books."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(samestep.Error, match="datasets is not installed: pip install datasets"):
        read_texts("datasets:x", "en", "it")
    monkeypatch.undo()
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    home = tmp_path / "books"
    home.mkdir()
    rows = [{"id": str(k), "translation": {"en": a, "it": b}} for k, (a, b) in enumerate(build_pairs(5))]
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "README.md").write_text("---\nconfigs:\n- config_name: en-it\n  data_files: pairs.jsonl\n---\n")
    assert read_texts(f"datasets:{home}", "en", "it") == build_pairs(5)
    assert read_texts(f"datasets:{home}", "it", "en") == [(b, a) for a, b in build_pairs(5)]
    with pytest.raises(
        samestep.Error, match=r"the dataset .*books, de-en, cannot be read .*: name other data by --data"
    ):
        read_texts(f"datasets:{home}", "en", "de")


# --- tokenizers, parts and batches ----------------------------------------------------------------------------------


def test_tokenizers_keep_every_text() -> None:
    tokenizer = BytePairTokenizer.train(["good morning", "good night"] * 3, 300)
    assert 256 < len(tokenizer) <= 300
    texts = ["good morning", "größer 漢字 🙂", "[END] of [PAD]", "a\0b", "a  b"]
    rows = tokenizer.encode(texts)
    assert tokenizer.decode(rows) == texts
    assert all(token > 2 for row in rows for token in row)  # also for texts that look like PAD, START and END
    assert len(rows[0]) < len("good morning") / 2
    again = BytePairTokenizer(tokenizer.text)
    assert again.encode(texts) == rows
    with pytest.raises(samestep.Error, match="the tokenizer cannot be read"):
        BytePairTokenizer("{}")


def test_a_link_in_place_of_a_tokenizer_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "tokenizers" / "source.json").symlink_to(tmp_path / "mine")
    load_or_train((["a b"], ["c d"]), 270, tmp_path / "tokenizers")
    assert (tmp_path / "mine").read_text() == "mine"


def test_tokenizers_are_trained_once_for_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = (["good morning", "good night"], ["guten Morgen", "gute Nacht"])
    first = load_or_train(texts, 270, tmp_path / "tokenizers")
    other = load_or_train((texts[1], texts[0]), 270, tmp_path / "tokenizers")  # such as after --fresh with other data
    assert [each.text for each in other] == [each.text for each in reversed(first)]
    monkeypatch.setattr(BytePairTokenizer, "train", None)
    again = load_or_train((texts[1], texts[0]), 270, tmp_path / "tokenizers")
    assert [each.text for each in again] == [each.text for each in other]


@pytest.mark.parametrize(
    ("package", "use"),
    [("tokenizers", lambda: BytePairTokenizer("{}")), ("sacrebleu", lambda: translate.build_metrics("de"))],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, use: Callable[[], Any]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(samestep.Error, match=rf"^{package} is not installed: pip install 'samestep\[translate\]'$"):
        use()


def test_no_source_is_both_trained_on_and_held_out() -> None:
    pairs = [
        Pair(f"Sentence {k // 2}".upper() if k % 2 else f"Sentence {k // 2}", f"Satz {k}", "f", k) for k in range(80)
    ]
    train, held_out = divide(pairs, 10)
    assert sorted(train + held_out) == sorted(pairs)
    assert len({pair.source.casefold() for pair in held_out}) == 10
    assert not {pair.source.casefold() for pair in held_out} & {pair.source.casefold() for pair in train}
    assert divide(pairs[::-1], 10)[1] == held_out[::-1]  # in whatever order the data are read
    assert len(divide(pairs, None)[1]) == 8
    assert divide(pairs, 0) == (pairs, pairs)
    with pytest.raises(samestep.Error, match="40 held-out sources of 40 leave no pair to train on: add pairs"):
        divide(pairs, 40)


def test_a_pair_that_is_too_long_is_named_and_skipped_only_if_asked(tmp_path: Path) -> None:
    pairs = build_pairs(20)
    pairs[6] = (pairs[6][0], " ".join(map(str, range(90))))
    file, options = write_pairs(tmp_path / "pairs.tsv", pairs), {"held_out": 0, "vocab_size": 300, "max_length": 60}
    what = rf"{file}, line 7 has \d+ tokens, and the model takes 60 \(--max-length\)"
    with pytest.raises(samestep.Error, match=what):
        load_data(str(file), "en", "it", tmp_path / "tokenizers", skips_bad=False, **options)
    data = load_data(str(file), "en", "it", tmp_path / "tokenizers", skips_bad=True, **options)
    assert len(data.train) == len(data.held_out) == len(data.references) == 19
    assert data.left_out == {"pairs of more than 60 tokens": 1}


def test_batches_hold_the_sentences_with_padding() -> None:
    pairs = Pairs([[5, 6], [7], []], [[8], [9, 10, 11], []])
    batch = pairs.collate(pairs.__getitems__([1, 0]))
    assert batch["source"].tolist() == [[7, 2, 0], [5, 6, 2]]
    assert batch["target"].tolist() == [[1, 9, 10, 11], [1, 8, 2, 0]]
    assert batch["labels"].tolist() == [[9, 10, 11, 2], [8, 2, 0, 0]]
    assert batch["num_tokens"] == 6
    assert batch["source"].dtype == torch.int64


def test_batches_are_of_similar_lengths_in_an_order_of_epoch_and_seed_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, (2, 1003))
    pairs = Pairs(*([[3] * n for n in row] for row in lengths))
    order = Bucketed(pairs, 10, seed=1)
    first = order(0)
    assert sorted(first.tolist()) == list(range(1003))
    np.testing.assert_array_equal(first, Bucketed(pairs, 10, seed=1)(0))
    for other in (order(1), Bucketed(pairs, 10, seed=2)(0)):
        assert not np.array_equal(first, other)
    batches = [lengths[:, first[start : start + 10]] for start in range(0, 1000, 10)]
    assert np.mean([np.ptp(batch[0]) for batch in batches]) < 1
    assert np.mean([np.ptp(batch[1]) for batch in batches]) < 15  # of 28
    means = [batch[0].mean() for batch in batches]
    assert abs(np.corrcoef(means, range(100))[0, 1]) < 0.3  # the short ones are not first
    np.testing.assert_array_equal(sorted(Bucketed(Pairs([[3]] * 3, [[3]] * 3), 10, 0)(5)), [0, 1, 2])


def test_learning_rates_rise_then_fall_as_the_schedule_says() -> None:
    noam, cosine = (
        [translate.scale_learning_rate(schedule, step, 100, 10) for step in range(100)]
        for schedule in ("noam", "cosine")
    )
    assert noam[:10] == cosine[:10] == [(step + 1) / 10 for step in range(10)]
    for step in range(10, 100):  # Vaswani et al., 2017, in units of its highest value
        assert noam[step] == pytest.approx(min((step + 1) ** -0.5, (step + 1) * 10**-1.5) / 10**-0.5)
    assert cosine[10:] == sorted(cosine[10:], reverse=True)
    assert cosine[10] == 1
    assert cosine[99] < 0.001


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--vocab-size", "100"], "--vocab-size 100 is below 259"),
        (["--dim", "20", "--heads", "4"], "--dim 20 is no multiple of twice --heads 4"),
        (["--patience", "0"], "--patience is 0: give 1 or more"),
        (["--held-out", "-1"], "--held-out is -1: give 0 or more"),
        (["--schedule", "linear"], "invalid choice: 'linear'"),
    ],
)
def test_arguments_are_checked(argv: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        translate.parse_arguments(argv)
    assert what in capsys.readouterr().err


# --- training -------------------------------------------------------------------------------------------------------

OPTIONS = """
--source=en --target=it --held-out=0 --vocab-size=300 --max-length=40 --dim=64 --heads=2 --layers=1 --dropout=0
--label-smoothing=0.05 --batch-size=12 --lr=1e-2 --warm-up=8 --epochs=20 --validate-every=10 --ema=0.7
"""
TINY = OPTIONS.split()


def train(arguments: list[str], kill_at: int | None = None) -> None:
    """Train on a rank. `kill_at`: kill rank 1 when it updates the learning rate for this step."""
    if kill_at is not None:
        scale = translate.scale_learning_rate

        def scale_or_die(schedule: str, step: int, *numbers: int) -> float:
            if step == kill_at and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return scale(schedule, step, *numbers)

        translate.scale_learning_rate = scale_or_die
    translate.main(arguments)


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.tsv", build_pairs(20))


@pytest.fixture(scope="module")
def trained(pairs_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on one rank, and its output."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    arguments = [
        "train",
        "translate",
        f"--data={pairs_file}",
        f"--run-dir={run_dir}",
        "--snapshot-every=10epochs",
        *TINY,
    ]
    return run_dir, check(samestep_command(*arguments, cwd=run_dir.parent)).stdout


def test_it_learns_twenty_pairs_by_heart(trained: tuple[Path, str]) -> None:
    run_dir, printed = trained
    scores = [row for row in read_rows(run_dir) if "validation/BLEU" in row]
    assert len(scores) == 2
    assert scores[-1]["validation/BLEU"] > 90
    assert scores[-1]["validation/chrF"] > 90
    assert scores[-1]["validation/loss"] < scores[0]["validation/loss"]
    assert "20 pairs to train on, 20 to score" in printed
    assert len(re.findall(r"^  wanted: il .*\n  found:  ", printed, re.MULTILINE)) == 6
    best = Store(run_dir).find("best", warn=pytest.fail)
    assert best is not None
    assert Store(run_dir).read(best)["state"]["best"] == max(row["validation/BLEU"] for row in scores)


def test_one_pair_is_shown_once(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pair.tsv", build_pairs(1))
    done = samestep_command("train", "translate", f"--data={file}", *TINY, "--epochs=1", cwd=tmp_path)
    assert check(done).stdout.count("  wanted: ") == 1


# Two starts of a recipe, on three ranks and on two: 37 s, and 44 s on a busy machine.
@pytest.mark.parametrize(("before", "after"), one_in(3, [("fsdp2", "optimizer"), ("none", "fsdp2"), ("none", "none")]))
def test_it_is_the_same_after_a_kill_of_one_of_three_ranks_and_a_resume_on_two(
    trained: tuple[Path, str], pairs_file: Path, tmp_path: Path, before: str, after: str
) -> None:
    expected, _ = trained
    run_dir = tmp_path / "run"
    arguments = [f"--data={pairs_file}", f"--run-dir={run_dir}", *TINY]
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 3, (arguments, 11), env={"SAMESTEP_SNAPSHOT_EVERY": "3", "SAMESTEP_SHARD": before})
    assert Store(run_dir).snapshots()
    written_at = (run_dir / "tokenizers/source.json").stat().st_mtime_ns
    env = {"SAMESTEP_SNAPSHOT_EVERY": "10epochs", "SAMESTEP_SHARD": after}
    samestep.spawn(train, 2, ([*arguments, "--num-workers=1"],), env=env)
    assert (run_dir / "tokenizers/source.json").stat().st_mtime_ns == written_at
    assert digest(run_dir) == digest(expected)
    assert digest(run_dir, "best") == digest(expected, "best")
    for name in ("metrics.jsonl", "ledger.bin"):
        assert (run_dir / name).read_bytes() == (expected / name).read_bytes()


def test_other_tokenizers_than_the_runs_are_refused(
    trained: tuple[Path, str], pairs_file: Path, tmp_path: Path
) -> None:
    """The tokenizers are as of another version of the library, with the same number of tokens."""
    run_dir, _ = trained
    vocabulary = translate.Vocabulary(
        *(BytePairTokenizer((run_dir / f"tokenizers/{name}.json").read_text()) for name in ("source", "target")),
        {"dim": 32},
    )
    vocabulary.load_state_dict(vocabulary.state_dict())
    state = {**vocabulary.state_dict(), "source": vocabulary.state_dict()["target"]}
    with pytest.raises(samestep.Error, match="the tokenizers or the model's settings are not those of the run"):
        vocabulary.load_state_dict(state)


def test_it_stops_when_nothing_gets_better(pairs_file: Path, tmp_path: Path) -> None:
    still = ["--lr=0", "--epochs=9", "--validate-every=1", "--patience=1"]
    arguments = ["train", "translate", f"--data={pairs_file}", "--run-dir=run", *TINY, *still]
    done = check(samestep_command(*arguments, cwd=tmp_path))
    assert "no better BLEU, --patience 1" in done.stdout + done.stderr
    assert len([row for row in read_rows(tmp_path / "run") if "validation/BLEU" in row]) == 2


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_it_learns_two_hundred_pairs_by_heart(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pairs.tsv", build_pairs(200))
    larger = ["--dim=64", "--layers=2", "--epochs=60", "--validate-every=10", "--batch-size=40", "--lr=5e-3", "--ema=0"]
    arguments = ["train", "translate", f"--data={file}", "--run-dir=run", *TINY, *larger, "--nproc-per-node=2"]
    check(samestep_command(*arguments, cwd=tmp_path, timeout=600))
    scores = [row["validation/BLEU"] for row in read_rows(tmp_path / "run") if "validation/BLEU" in row]
    assert scores[-1] > 90
    lines = "".join(f"{source}\n" for source, _ in build_pairs(200))
    done = check(run_translate(tmp_path / "run", lines))
    found = done.stdout.splitlines()
    assert sum(a == b for a, (_, b) in zip(found, build_pairs(200), strict=True)) > 180


@pytest.mark.soak
def test_it_runs_under_torchrun(trained: tuple[Path, str], pairs_file: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    command = [*torchrun, "samestep.recipes.translate", f"--data={pairs_file}", "--run-dir=run", *TINY]
    done = run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "run") == digest(trained[0])


# --- the weights elsewhere, and the command -------------------------------------------------------------------------


def run_translate(run_dir: Path, text: str | bytes, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `samestep translate` with a text as its input."""
    data = text.encode() if isinstance(text, str) else text
    command = [sys.executable, "-m", "samestep", "translate", str(run_dir), *options]
    done = run(command, input=data, capture_output=True, timeout=120)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


PREDICT = """\
import sys
sys.modules["samestep"] = None  # no import of it works from here on
import torch
from tokenizers import Tokenizer
from seq2seq import END, Seq2Seq

source, target = (Tokenizer.from_file(f"{sys.argv[1]}/tokenizers/{name}.json") for name in ("source", "target"))
sizes = source.get_vocab_size(), target.get_vocab_size()
model = Seq2Seq(*sizes, dim=64, num_heads=2, num_layers=1, max_length=40).eval()
model.load_state_dict(torch.load("model.ema.pt"))
for line in sys.stdin:
    tokens = torch.tensor([[*source.encode(line.strip()).ids, END]])
    print(target.decode(model.translate(tokens, num_beams=4)[0]).strip())
"""


def test_the_exported_model_translates_without_samestep(trained: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = trained
    ask("export", run_dir, tmp_path / "model.pt", "--snapshot", "best")
    (tmp_path / "seq2seq.py").write_text((MODELS / "seq2seq.py").read_text())
    (tmp_path / "predict.py").write_text(PREDICT)
    lines = "".join(f"{source}\n" for source, _ in build_pairs(6))
    done = run(
        [sys.executable, str(tmp_path / "predict.py"), str(run_dir)],
        cwd=tmp_path,
        input=lines,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    found = check(run_translate(run_dir, lines))
    assert done.stdout == found.stdout
    right = sum(a == b for a, (_, b) in zip(done.stdout.splitlines(), build_pairs(6), strict=True))
    assert right >= 4


def test_lines_are_translated_as_they_come(trained: tuple[Path, str]) -> None:
    command = [sys.executable, "-m", "samestep", "translate", str(trained[0]), "--beam", "1"]
    with Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for source, target in build_pairs(3):
            process.stdin.write(f"{source}\n")
            process.stdin.flush()
            assert len(process.stdout.readline().split()) in range(len(target.split()) - 1, len(target.split()) + 2)
        process.stdin.write(" \n")
        process.stdin.flush()
        assert process.stdout.readline() == "\n"
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait() == 0


class Input:
    """A standard input of bytes."""

    def __init__(self, *lines: bytes) -> None:
        self.buffer = lines


@pytest.mark.parametrize(
    ("options", "line", "what"),
    [
        (
            [],
            b"word " * 50,
            r"line 2 of the input has \d+ tokens, and the model takes 40: divide it, or leave such lines",
        ),
        ([], b"\xff\xff", "line 2 of the input is not UTF-8"),
        (["--beam", "0"], b"", "--beam must be at least 1, not 0"),
        (["--snapshot", "worst"], b"", "there is no snapshot named worst in .*: there is step"),
        (["--device", "nowhere"], b"", "--device nowhere cannot be used"),
        (["--beems", "3"], b"", r"translate has no option --beems; did you mean --beam\?"),
    ],
)
def test_what_cannot_be_translated_is_named(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str],
    line: bytes, what: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", Input(b"the dog has a cat\n", line + b"\n"))
    assert main(["translate", str(trained[0]), *options]) == 2
    printed = capsys.readouterr()
    assert re.search(f"^samestep: error: {what}", printed.err, re.MULTILINE), printed.err
    assert len(printed.out.splitlines()) == (not options)  # the line before it was translated


def test_long_lines_stay_empty_if_asked(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Input(b"word " * 50, b"the dog has a cat"))
    assert main(["translate", str(trained[0]), "--skip-long", "--snapshot", "latest"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("\nil ")
    assert "1 lines were too long for the model and left empty" in printed.err


def test_a_run_of_another_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert main(["translate", str(run_dir)]) == 2
    (run_dir / "run.json").write_text(json.dumps({"format": 1, "numbers": {}}))
    state = {"objects": {"model": {}, "optimizer": {}}, "position": {"step": 3, "epoch": 0}, "state": {}}
    Store(run_dir).write(state, step=3, name="best", meta={})
    assert main(["translate", str(run_dir)]) == 2
    assert main(["translate", str(run_dir), "--snapshot", "latest"]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert "is no run's directory" in first
    for line in others:
        assert "is no run of the recipe translate, its snapshot holds model, optimizer: name a run that" in line
